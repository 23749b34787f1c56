// SPDX-License-Identifier: Apache-2.0
#include "dist/session.h"

#include <algorithm>

#include "dist/pieces.h"

namespace fa::dist {

void *Session::take(int64_t count, int64_t element_bytes) {
  char *memory = base_ + usage_.buffer_bytes;
  const size_t bytes = static_cast<size_t>(count * element_bytes);
  usage_.buffer_bytes += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  return memory;
}

fa_status Session::run(const BackwardProblem &problem, const BackwardSteps &steps) {
  bool waited = false, sent = false;
  const BackwardSteps noted{[&] {
                              waited = true;
                              return steps.before_keys();
                            },
                            [&] {
                              sent = true;
                              return steps.after_key_gradients();
                            }};
  FA_RETURN_IF_ERROR(run_any(ScoredBackward{problem, nullptr}, &noted));
  if (!waited) FA_RETURN_IF_ERROR(steps.before_keys());
  return sent ? FA_OK : steps.after_key_gradients();
}

fa_status Session::copy(const RowShape &shape, const Operand &from, const Operand &to) {
  return running() ? rows_.copy(shape, from, to, stream_, error_) : FA_OK;
}

fa_status Session::sum(const RowShape &shape, std::vector<const float *> parts, const Operand &to, float *scratch) {
  if (!running()) return FA_OK;
  while (parts.size() > size_t{kMostRowParts}) {
    const auto end = parts.begin() + kMostRowParts;
    FA_RETURN_IF_ERROR(
        rows_.sum(shape, {parts.begin(), end}, contiguous(scratch, Dtype::f32, shape.heads, shape.dim), stream_, error_));
    parts.erase(parts.begin() + 1, end);
    parts.front() = scratch;
  }
  return rows_.sum(shape, parts, to, stream_, error_);
}

fa_status Session::zero(void *memory, int64_t bytes) {
  return running() ? rows_.zero(memory, static_cast<size_t>(bytes), stream_, error_) : FA_OK;
}

fa_status Session::add(double *sum, const float *part, int64_t count) {
  return running() ? rows_.add(sum, part, count, stream_, error_) : FA_OK;
}

fa_status Session::sum(const double *parts, int64_t num_parts, int64_t count, float *to, int64_t stride) {
  return running() ? rows_.sum(parts, num_parts, count, to, stride, stream_, error_) : FA_OK;
}

fa_status Session::place(const std::vector<int64_t> &numbers, const int64_t *&placed) {
  auto *memory = take<int64_t>(static_cast<int64_t>(numbers.size()));
  placed = memory;
  return running() ? rows_.write(numbers, memory, stream_, error_) : FA_OK;
}

fa_status Session::exchange(const std::vector<fa_dist_message> &messages) {
  for (const fa_dist_message &message : messages)
    (message.receive ? usage_.received_bytes : usage_.sent_bytes) += message.bytes;
  if (!running() || messages.empty()) return FA_OK;
  return link_.exchange(messages, stream_, error_);
}

fa_status Session::wait(int64_t exchanges) {
  if (!running() || waited_ >= exchanges) return FA_OK;
  waited_ = exchanges;
  return link_.wait(exchanges, stream_, error_);
}

}  // namespace fa::dist
