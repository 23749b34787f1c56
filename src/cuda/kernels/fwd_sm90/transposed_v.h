// SPDX-License-Identifier: Apache-2.0
// The transposed copy of V for the fp8 forward: its layout, and the parameters of the kernel that writes it.
#pragma once

#include "core/forward_problem.h"

namespace fa::cuda::sm90 {

// A wgmma of 8-bit operands wants both of them K-major: for out += P V, V with contiguous keys. So V is copied to the workspace first, as
// (batch, heads_k, head_dim_v, keys). Every 16 keys are in the order 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15: then a lane holds the P that it
// packs into its A operand, and lanes exchange nothing. The copy has zeros from a sequence's last key to the end of the KV tile.
struct TransposeVParams {
  Operand v;
  Lengths lengths;
  char *copy;
  int64_t pitch;           // bytes of a row of the copy (one column of V): a multiple of 128
  int32_t heads, columns;  // heads_k and head_dim_v
  int32_t key_blocks;      // blocks of 128 keys per sequence
  int32_t column_blocks;   // blocks of 128 columns
};
constexpr int kTransposeThreads = 256;
constexpr int64_t kMaxKvTile = 128;  // the most keys of a KV tile

// The first key of a sequence in a row of the copy. A packed sequence starts on a multiple of 128 bytes, with a gap for the zeros of the one
// before it.
FA_HD constexpr int64_t transposed_v_key(int64_t start, int64_t batch) { return (start + 127) / 128 * 128 + 256 * batch; }
// The keys in a row of the copy, zeros included.
FA_HD int64_t transposed_v_keys(const Lengths &lengths, int64_t batch) {
  return lengths.cu != nullptr ? transposed_v_key(lengths.total, batch) : (lengths.max_len + 127) / 128 * 128;
}

const void *transpose_kernel();

}  // namespace fa::cuda::sm90
