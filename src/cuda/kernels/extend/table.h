// SPDX-License-Identifier: Apache-2.0
// The table of extend kernels: one line per kernel shape, read by the build (one instance per line and dtype), by the
// planner and by the launcher. README.md beside this file gives the reasons for the sizes. Shapes for 8-bit KV are in
// table_8bit.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/kernels/extend/shared_storage.h"
#include "cuda/kernels/extend/table_8bit.h"

namespace fa::cuda::extend {

constexpr int32_t kBoxRows = 16;  // rows of a TMA box of K or V

struct Shape {
  const char *name;
  int32_t head_dim;  // bucket of q, k and v
  int32_t consumer_warpgroups;
  int32_t keys;    // of a KV tile
  int32_t stages;  // of the 16-bit pipeline, of which K and V tiles take one each in turn
  // 8-bit KV: stages of the pipeline of 8-bit tiles, which are widened into the 16-bit pipeline. Else 0. Where `stages` is 0, there is no 16-bit
  // pipeline: consumer warps widen in registers (token_8bit.cuh).
  int32_t stages_8bit;
  bool uses_combine_kernel;  // stores all partials of a work tile for the combine kernel instead of adding them to the last one
  bool same_bits;            // for FA_FLAG_SAME_BITS, and for nothing else
  bool clustered;            // a cluster of CTAs has all keys of a KV head, one token (cluster.cuh)
  bool masks;                // for masks as data, and for nothing else (masks.cuh)
  size_t storage_bytes;      // of SharedStorage, and of SegmentTotals or TileNotes; or of ClusterStorage

  // For one token over 8-bit KV (token_8bit.cuh).
  constexpr bool one_token() const { return stages == 0; }
  constexpr int32_t rows() const {
    return clustered ? kClusterRows : one_token() ? kWarpRows : consumer_warpgroups * kWarpgroupRows;
  }
  // columns of a TMA box: a 128-byte swizzle atom, or, with 8-bit KV, which is widened anyway, all columns
  constexpr int32_t box_columns() const { return stages_8bit > 0 ? head_dim : 64; }
  constexpr int32_t threads() const { return (consumer_warpgroups + 1) * 128; }
  constexpr int32_t shared_bytes() const { return static_cast<int32_t>(storage_bytes); }
};

// X(name, head_dim, consumer_warpgroups, kv_tile, stages, stages_8bit, uses_combine_kernel, same_bits, clustered, masks)
#define FA_EXTEND_TABLE(X)                               \
  X(d64, 64, 2, 128, 14, 0, false, false, false, false)  \
  X(d64p, 64, 2, 128, 14, 0, true, false, false, false)  \
  X(d128, 128, 2, 128, 7, 0, false, false, false, false) \
  X(d128p, 128, 2, 128, 7, 0, true, false, false, false) \
  X(d256, 256, 2, 64, 5, 0, false, false, false, false)  \
  X(d256p, 256, 2, 64, 5, 0, true, false, false, false)  \
  X(d64s, 64, 2, 128, 12, 0, false, true, false, false)  \
  X(d64sp, 64, 2, 128, 12, 0, true, true, false, false)  \
  X(d128s, 128, 2, 128, 5, 0, false, true, false, false) \
  X(d128sp, 128, 2, 128, 5, 0, true, true, false, false) \
  X(d256s, 256, 2, 64, 5, 0, false, true, false, false)  \
  X(d256sp, 256, 2, 64, 5, 0, true, true, false, false)  \
  X(d64sc, 64, 2, 128, 8, 0, false, true, true, false)   \
  X(d128sc, 128, 2, 128, 4, 0, false, true, true, false) \
  X(d64b, 64, 2, 128, 14, 0, true, false, false, true)   \
  X(d128b, 128, 2, 128, 7, 0, true, false, false, true)  \
  X(d256b, 256, 2, 64, 5, 0, true, false, false, true)

#define FA_EXTEND_SHAPE(name, head_dim, consumer_warpgroups, kv_tile, stages, stages_8bit, uses_combine_kernel, same_bits, \
                        clustered, masks)                                                                                  \
  {#name,                                                                                                                  \
   head_dim,                                                                                                               \
   consumer_warpgroups,                                                                                                    \
   kv_tile,                                                                                                                \
   stages,                                                                                                                 \
   stages_8bit,                                                                                                            \
   uses_combine_kernel,                                                                                                    \
   same_bits,                                                                                                              \
   clustered,                                                                                                              \
   masks,                                                                                                                  \
   clustered ? sizeof(ClusterStorage<head_dim, stages>)                                                                    \
             : storage_bytes_of<head_dim, consumer_warpgroups, kv_tile, stages, stages_8bit>(same_bits, masks)},
constexpr Shape kShapes[] = {FA_EXTEND_TABLE(FA_EXTEND_SHAPE) FA_EXTEND_8BIT_TABLE(FA_EXTEND_SHAPE)};
#undef FA_EXTEND_SHAPE
constexpr int kNumShapes = sizeof(kShapes) / sizeof(kShapes[0]);
constexpr int first_8bit_shape() {
  int n = 0;
  while (kShapes[n].stages_8bit == 0) ++n;
  return n;
}
constexpr int kFirst8Bit = first_8bit_shape();  // index of the first shape of table_8bit.h

}  // namespace fa::cuda::extend
