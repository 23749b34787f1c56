// SPDX-License-Identifier: Apache-2.0
#include "dist/session.h"

#include <cinttypes>

namespace fa::dist {

fa_status Link::exchange(const std::vector<fa_dist_message> &messages, fa_stream stream, ErrorText &error) const {
  const int32_t count = static_cast<int32_t>(messages.size());
  const fa_status status = transport_.exchange(transport_.user, messages.data(), count, stream);
  if (status == FA_OK) return FA_OK;
  return fail(error, FA_ERROR_TRANSPORT, "transport.exchange failed with status %d for %d messages of rank %d", int{status},
              int{count}, int{rank()});
}

fa_status Link::wait(ErrorText &error) const {
  const fa_status status = transport_.wait(transport_.user, timeout_ms_);
  if (status == FA_OK) return FA_OK;
  return fail(error, FA_ERROR_TRANSPORT, "transport.wait failed with status %d on rank %d (timeout_ms is %" PRId64 ")",
              int{status}, int{rank()}, timeout_ms_);
}

void *Session::take(int64_t count, int64_t element_bytes) {
  char *memory = base_ + usage_.buffer_bytes;
  const size_t bytes = static_cast<size_t>(count * element_bytes);
  usage_.buffer_bytes += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  return memory;
}

fa_status Session::exchange(const std::vector<fa_dist_message> &messages) {
  for (const fa_dist_message &message : messages)
    (message.receive ? usage_.received_bytes : usage_.sent_bytes) += message.bytes;
  if (!running() || messages.empty()) return FA_OK;
  pending_ = true;
  return link_.exchange(messages, stream_, error_);
}

fa_status Session::wait() {
  if (!pending_) return FA_OK;
  pending_ = false;
  return link_.wait(error_);
}

}  // namespace fa::dist
