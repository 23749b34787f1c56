// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/operand.h"
#include "cuda/host/kv_copy.h"
#include "cuda/host/planners.h"
#include "cuda/kernels/kv_copy/kv_copy.h"

namespace fa::cuda {
namespace {

bool is_packed(const Problem &p) { return p.k_lengths.cu != nullptr; }
// Rows of a head in the copy, and of all heads and sequences.
int64_t rows_of_head(const Problem &p, int64_t keys) { return is_packed(p) ? p.k_lengths.total : keys; }
int64_t rows_of_copy(const Problem &p, int64_t keys) {
  return rows_of_head(p, keys) * p.heads_k * (is_packed(p) ? 1 : p.batch);
}

}  // namespace

int64_t copied_keys_of(const Problem &p) {
  constexpr int64_t kVector = 16, kMostBytes = int64_t{1} << 30;  // 8-bit numbers that a thread copies at a time
  const bool kv_8bit = is_quantised(p.k.dtype);
  if ((kv_8bit && (p.head_dim % kVector != 0 || p.head_dim_v % kVector != 0)) || !has_16_byte_rows(p.k, p.head_dim) ||
      !has_16_byte_rows(p.v, p.head_dim_v)) {
    return -1;
  }
  const int64_t keys = ceil_div(p.k_lengths.max_len, kv_copy::kKeys) * kv_copy::kKeys,
                row_bytes = (p.head_dim + p.head_dim_v) * dtype_bytes(p.q.dtype);
  return rows_of_copy(p, keys) <= kMostBytes / row_bytes ? keys : -1;
}

size_t copied_kv_bytes(const ForwardProblem &p, int64_t keys) {
  size_t bytes = 0;
  for (const int64_t columns : {p.head_dim, p.head_dim_v})
    bytes += align_up(static_cast<size_t>(rows_of_copy(p, keys) * columns * dtype_bytes(p.q.dtype)));
  return bytes;
}

ForwardProblem with_copied_kv(const ForwardProblem &p, int64_t keys, void *memory) {
  ForwardProblem copied = p;
  auto *at = static_cast<char *>(memory);
  const int64_t rows = rows_of_head(p, keys);
  for (const auto &[t, columns] : {std::pair{&copied.k, p.head_dim}, {&copied.v, p.head_dim_v}}) {
    *t = {at, p.q.dtype, is_packed(p) ? 0 : p.heads_k * rows * columns, columns, rows * columns};
    at += align_up(static_cast<size_t>(rows_of_copy(p, keys) * columns * dtype_bytes(p.q.dtype)));
  }
  if (p.q.dtype == Dtype::f32) copied.k_descale = copied.v_descale = {};
  copied.page_table = nullptr;
  copied.page_size = copied.num_pages = 0;
  return copied;
}

}  // namespace fa::cuda
