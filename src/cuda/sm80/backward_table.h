// SPDX-License-Identifier: Apache-2.0
// Every backward kernel that is built, as forward_table.h for forward.
#pragma once

#include <cstdint>

namespace fa::cuda::sm80 {

struct BackwardShape {
  const char *name;
  int32_t head_dim;    // bucket of q and k
  int32_t head_dim_v;  // bucket of v
  int32_t warps;
  int32_t column_split;  // warps that share 16 keys: each owns this share of the columns of dk and dv
  int32_t rows;          // queries of a chunk
  int32_t stages;        // chunks of q and dout in shared memory
  int32_t min_blocks;    // blocks of threads on one multiprocessor
  bool general;          // softcap, bias, block mask, ALiBi, dropout

  constexpr int32_t threads() const { return warps * 32; }
  constexpr int32_t keys() const { return warps / column_split * 16; }
  constexpr int32_t shared_bytes() const {
    // K, V | Q, dO ring | P (if shared) and dS | lse, delta ring
    return 2 * (keys() * (head_dim + head_dim_v) + stages * rows * (head_dim + head_dim_v) +
                keys() * rows * (column_split > 1 ? 2 : 1)) +
           stages * rows * 2 * 4;
  }
};

// Cheaper kernels first, as in forward_table.h.
// X(name, head_dim, head_dim_v, warps, column_split, rows, stages, min_blocks, general)
#define FA_SM80_BACKWARD_TABLE(X)           \
  X(d64, 64, 64, 8, 1, 64, 2, 1, false)     \
  X(d128, 128, 128, 8, 1, 64, 2, 1, false)  \
  X(d128s, 128, 128, 4, 1, 32, 2, 1, false) \
  X(d256, 256, 256, 8, 2, 64, 2, 1, false)  \
  X(d256s, 256, 256, 8, 2, 32, 1, 1, false) \
  X(d64g, 64, 64, 8, 1, 64, 2, 1, true)     \
  X(d128g, 128, 128, 8, 1, 64, 2, 1, true)  \
  X(d128gs, 128, 128, 4, 1, 32, 2, 1, true) \
  X(d256g, 256, 256, 8, 2, 64, 2, 1, true)  \
  X(d256gs, 256, 256, 8, 2, 32, 1, 1, true)

#define FA_SM80_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr BackwardShape kBackwardShapes[] = {FA_SM80_BACKWARD_TABLE(FA_SM80_SHAPE)};
#undef FA_SM80_SHAPE
constexpr int kNumBackwardShapes = sizeof(kBackwardShapes) / sizeof(kBackwardShapes[0]);

}  // namespace fa::cuda::sm80
