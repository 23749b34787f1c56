// SPDX-License-Identifier: Apache-2.0
// The MLA kernels: one line per kernel, read by the build (one instance per line and dtype), by the plan and by the launcher. README.md gives the
// reasons for the sizes. Those for 8-bit caches are in table_8bit.h.
#pragma once

#include <cstdint>

#include "cuda/kernels/mla/shared_storage.h"
#include "cuda/kernels/mla/table_8bit.h"

namespace fa::cuda::mla {

constexpr int32_t kBoxRows = 8;  // rows of a box of K that TMA loads

struct Shape {
  const char *name;
  int32_t head_dim;                      // bucket of q and k
  int32_t head_dim_v;                    // bucket of v, the first columns of k
  int32_t keys;                          // per K tile
  int32_t stages;                        // K tiles in shared memory
  int32_t held;                          // swizzle atoms (64 columns) of Q in registers
  bool pairs;                            // clusters of two CTAs share a work tile
  bool lists;                            // keys are those that each query lists
  bool same_bits;                        // for FA_FLAG_SAME_BITS (segments.cuh)
  bool uses_combine_kernel;              // stores all partials of a work tile for the combine kernel (../decode/combine.cuh)
  int32_t kv_bytes;                      // of an element of K
  int32_t storage_bytes, most_partials;  // SharedStorage, and behind it SegmentStorage with same_bits, ByteStorage with 8-bit K

  constexpr int32_t rows() const { return 64; }
  constexpr int32_t threads() const { return 512; }
  constexpr int32_t max_split_partials() const { return most_partials; }
  constexpr int32_t shared_bytes() const { return storage_bytes; }
};

// X(name, head_dim, head_dim_v, keys, stages, held, pairs, lists, same_bits, uses_combine_kernel)
// The build looks for lines that begin with X(.
// clang-format off
#define FA_MLA_TABLE(X) \
  X(d576, 576, 512, 64, 2, 4, false, false, false, false) \
  X(d576p, 576, 512, 64, 2, 4, true, false, false, false) \
  X(d576c, 576, 512, 64, 2, 4, false, false, false, true) \
  X(d576l, 576, 512, 64, 2, 4, false, true, false, false) \
  X(d576s, 576, 512, 64, 2, 4, false, false, true, false) \
  X(d576sc, 576, 512, 64, 2, 4, false, false, true, true)

#define FA_MLA_SHAPE_OF(kv_bytes, name, head_dim, head_dim_v, keys, stages, held, pairs, lists, same_bits, uses_combine_kernel)        \
  {#name, head_dim, head_dim_v, keys, stages, held, pairs, lists, same_bits, uses_combine_kernel, kv_bytes,                           \
   static_cast<int32_t>(sizeof(SharedStorage<head_dim, head_dim_v, keys, stages, held>) + (same_bits ? sizeof(SegmentStorage) : 0) + \
                        (kv_bytes == 1 ? sizeof(ByteStorage) : 0)),                                                                  \
   SharedStorage<head_dim, head_dim_v, keys, stages, held>::most_partials()},
#define FA_MLA_SHAPE(...) FA_MLA_SHAPE_OF(2, __VA_ARGS__)
#define FA_MLA_8BIT_SHAPE(...) FA_MLA_SHAPE_OF(1, __VA_ARGS__)
// clang-format on
constexpr Shape kShapes[] = {FA_MLA_TABLE(FA_MLA_SHAPE) FA_MLA_8BIT_TABLE(FA_MLA_8BIT_SHAPE)};
#undef FA_MLA_8BIT_SHAPE
#undef FA_MLA_SHAPE
#undef FA_MLA_SHAPE_OF
constexpr int kNumShapes = sizeof(kShapes) / sizeof(kShapes[0]);
constexpr int first_8bit_shape() {
  int n = 0;
  while (kShapes[n].kv_bytes != 1) ++n;
  return n;
}
constexpr int kFirst8Bit = first_8bit_shape();  // index of the first shape of table_8bit.h

}  // namespace fa::cuda::mla
