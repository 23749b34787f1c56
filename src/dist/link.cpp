// SPDX-License-Identifier: Apache-2.0
#include "dist/link.h"

#include <atomic>
#include <cinttypes>

namespace fa::dist {
namespace {

class TransportLink final : public Link {
 public:
  TransportLink(const fa_dist_transport &transport, int64_t timeout_ms)
      : Link(transport.rank, transport.num_ranks, timeout_ms), transport_(transport) {}

  fa_status start(int64_t, const std::vector<fa_dist_message> &messages, fa_stream stream, ErrorText &error) override {
    const int32_t count = static_cast<int32_t>(messages.size());
    const fa_status status = transport_.exchange(transport_.user, messages.data(), count, stream);
    if (status == FA_OK) return FA_OK;
    return fail(error, FA_ERROR_TRANSPORT, "transport.exchange failed with status %d for %d messages of rank %d", int{status},
                int{count}, int{rank()});
  }

  // A transport waits for all exchanges.
  int32_t most_ahead() const override { return 1; }
  fa_status wait(int64_t, fa_stream, ErrorText &error) override {
    const fa_status status = transport_.wait(transport_.user, timeout_ms());
    if (status == FA_OK) return FA_OK;
    return fail(error, FA_ERROR_TRANSPORT, "transport.wait failed with status %d on rank %d (timeout_ms is %" PRId64 ")",
                int{status}, int{rank()}, timeout_ms());
  }

  fa_status status(ErrorText &error) override {
    const fa_status status = transport_.status == nullptr ? FA_OK : transport_.status(transport_.user);
    if (status == FA_OK) return FA_OK;
    return fail(error, FA_ERROR_TRANSPORT, "transport.status reports status %d on rank %d", int{status}, int{rank()});
  }

  void give_up() override { abort(); }
  void abort() override {
    if (!aborted_.exchange(true)) transport_.abort(transport_.user);
  }

 private:
  const fa_dist_transport transport_;
  std::atomic<bool> aborted_{false};
};

}  // namespace

std::unique_ptr<Link> link_by_transport(const fa_dist_transport &transport, int64_t timeout_ms) {
  return std::make_unique<TransportLink>(transport, timeout_ms);
}

}  // namespace fa::dist
