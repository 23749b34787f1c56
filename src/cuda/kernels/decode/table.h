// SPDX-License-Identifier: Apache-2.0
// The table of decode kernels: one line per kernel shape, read by the build (one instance per line and dtype), by the
// planner and by the launcher. README.md beside this file gives the reasons for the sizes. Shapes for 8-bit KV are in
// table_8bit.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/common/shared_memory.h"
#include "cuda/kernels/decode/shared_storage.h"
#include "cuda/kernels/decode/table_8bit.h"

namespace fa::cuda::decode {

constexpr int32_t kSplitTileBytes = 32;   // of a SplitTile in the workspace
constexpr int32_t kCombineThreads = 128;  // of a CTA of the combine kernel
constexpr int32_t kCombineMinCtas = 6;    // CTAs of the combine kernel per SM
constexpr int32_t kCombineColumns =
    128;  // fp32 columns, counted through all rows, that a warp of the combine kernel holds at a time

struct Shape {
  const char *name;
  int32_t head_dim;         // bucket of q and k
  int32_t head_dim_v;       // bucket of v: the same, or its first columns of latent caches
  int32_t warp_rows;        // rows per warp; 8 means the S^T = K Q^T orientation, for one token per sequence
  int32_t row_warps;        // warps that share KV tiles, each with rows of its own
  int32_t kv_groups;        // groups of row_warps x column_warps() warps, each with KV tiles and a pipeline of its own
  int32_t kv_tile;          // keys of a group's KV tile
  int32_t stages;           // of a group's pipeline
  int32_t max_ctas_per_sm;  // the most CTAs per SM, where shared memory allows
  int32_t capability;       // of the oldest devices whose shared memory and register allocation fit
  bool clustered;           // the CTAs of a cluster share the keys of a head (cluster.cuh)
  int32_t kv_bytes;         // of an element of K or V
  size_t storage_bytes;     // of SharedStorageOf

  constexpr int32_t rows() const { return warp_rows * row_warps; }
  constexpr int32_t kv_step() const { return kv_groups * kv_tile; }
  constexpr int32_t column_warps() const { return decode::column_warps(head_dim, warp_rows); }
  constexpr int32_t threads() const { return row_warps * column_warps() * kv_groups * 32; }
  constexpr int32_t shared_bytes() const { return static_cast<int32_t>(storage_bytes); }
  // CTAs per SM where a CTA may have at most max_shared_bytes of shared memory.
  constexpr int32_t ctas_per_sm(int32_t max_shared_bytes) const {
    return std::min(max_ctas_per_sm, ctas_that_fit(shared_bytes(), max_shared_bytes));
  }
};

// X(name, head_dim, warp_rows, row_warps, kv_groups, kv_tile, stages, max_ctas_per_sm, capability, clustered)
#define FA_DECODE_TABLE(X)                           \
  X(d64_8, 64, 8, 1, 4, 32, 3, 2, 80, false)         \
  X(d64_8x12, 64, 8, 1, 6, 32, 2, 2, 80, false)      \
  X(d64_16, 64, 16, 1, 4, 32, 3, 2, 80, false)       \
  X(d64_16x12, 64, 16, 1, 6, 32, 2, 2, 80, false)    \
  X(d64_32, 64, 32, 1, 4, 32, 3, 2, 80, false)       \
  X(d64_64, 64, 32, 2, 4, 32, 3, 1, 80, false)       \
  X(d64_8c, 64, 8, 1, 4, 32, 3, 2, 90, true)         \
  X(d64_16c, 64, 16, 1, 4, 32, 3, 2, 90, true)       \
  X(d128_8, 128, 8, 1, 8, 16, 3, 1, 90, false)       \
  X(d128_8x12, 128, 8, 1, 12, 16, 2, 1, 90, false)   \
  X(d128_16, 128, 16, 1, 8, 16, 3, 1, 90, false)     \
  X(d128_16x12, 128, 16, 1, 12, 16, 2, 1, 90, false) \
  X(d128_16s, 128, 16, 1, 4, 16, 3, 2, 80, false)    \
  X(d128_32, 128, 32, 1, 4, 16, 3, 2, 90, false)     \
  X(d128_64, 128, 32, 2, 4, 16, 6, 1, 90, false)     \
  X(d128_8c, 128, 8, 1, 4, 16, 3, 2, 90, true)       \
  X(d128_16c, 128, 16, 1, 4, 16, 3, 2, 90, true)     \
  X(d256_8, 256, 8, 1, 4, 16, 3, 1, 90, false)       \
  X(d256_16, 256, 16, 1, 4, 16, 3, 1, 90, false)     \
  X(d256_32, 256, 16, 2, 4, 16, 3, 1, 90, false)     \
  X(d512_16, 512, 8, 2, 2, 16, 3, 1, 90, false)

#define FA_DECODE_SHAPE_OF(kv_bytes, name, head_dim, warp_rows, row_warps, kv_groups, kv_tile, stages, max_ctas, capability,  \
                           clustered)                                                                                         \
  {#name,                                                                                                                     \
   head_dim,                                                                                                                  \
   value_columns(head_dim),                                                                                                   \
   warp_rows,                                                                                                                 \
   row_warps,                                                                                                                 \
   kv_groups,                                                                                                                 \
   kv_tile,                                                                                                                   \
   stages,                                                                                                                    \
   max_ctas,                                                                                                                  \
   capability,                                                                                                                \
   clustered,                                                                                                                 \
   kv_bytes,                                                                                                                  \
   sizeof(SharedStorageOf<head_dim, (warp_rows) * (row_warps), column_warps(head_dim, warp_rows), kv_groups, kv_tile, stages, \
                          kv_bytes, clustered>::Type)},
#define FA_DECODE_SHAPE(...) FA_DECODE_SHAPE_OF(2, __VA_ARGS__)
#define FA_DECODE_8BIT_SHAPE(...) FA_DECODE_SHAPE_OF(1, __VA_ARGS__)
constexpr Shape kShapes[] = {FA_DECODE_TABLE(FA_DECODE_SHAPE) FA_DECODE_8BIT_TABLE(FA_DECODE_8BIT_SHAPE)};
#undef FA_DECODE_8BIT_SHAPE
#undef FA_DECODE_SHAPE
#undef FA_DECODE_SHAPE_OF
constexpr int kNumShapes = sizeof(kShapes) / sizeof(kShapes[0]);
constexpr int first_8bit_shape() {
  int n = 0;
  while (kShapes[n].kv_bytes != 1) ++n;
  return n;
}
constexpr int kFirst8Bit = first_8bit_shape();  // index of the first shape of table_8bit.h

}  // namespace fa::cuda::decode
