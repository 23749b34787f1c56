// SPDX-License-Identifier: Apache-2.0
// The copy of fp8 values that the forward kernel multiplies by: how it lies, and what the kernel that makes it takes.
#pragma once

#include "core/forward_problem.h"

namespace fa::cuda::sm90 {

// Products of 8-bit operands want both with the summed dimension contiguous: V is copied before, (batch, heads_k, head_dim_v, keys). Of
// every 16 keys the copy has 0 1 8 9 2 3 10 11 ..: in that order a lane holds weights that it can pack without an exchange. Zeros follow
// a sequence's last key up to the end of a chunk.
struct TransposeVParams {
  Operand v;
  Lengths lengths;
  char *copy;
  int64_t pitch;           // of its rows, bytes: a multiple of 128
  int32_t heads, columns;  // of v
  int32_t key_blocks;      // of 128, a sequence
  int32_t column_blocks;
};
constexpr int kTransposeThreads = 256;
constexpr int64_t kLongestChunk = 128;

// Where the keys of a sequence begin in a row of the copy. Packed sequences leave gaps for the zeros and begin on 128 bytes.
FA_HD constexpr int64_t transposed_v_key(int64_t start, int64_t batch) { return (start + 127) / 128 * 128 + 256 * batch; }
FA_HD int64_t transposed_v_keys(const Lengths &lengths, int64_t batch) {
  return lengths.cu != nullptr ? transposed_v_key(lengths.total, batch) : (lengths.max_len + 127) / 128 * 128;
}

const void *transpose_kernel();

}  // namespace fa::cuda::sm90
