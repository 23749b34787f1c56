// SPDX-License-Identifier: Apache-2.0
// Every kernel for queries that extend a cache that is built: one line each, read by the build (one object file a line and dtype), by the
// plan and by the launcher. Reasons for the sizes are in README.md beside this file. Kernels for keys and values of one byte are in
// bytes_table.h.
#pragma once

#include <cstdint>

#include "cuda/kernels/extend/table_8bit.h"

namespace fa::cuda::extend {

constexpr int32_t kGroupRows = 64;  // of a warpgroup that multiplies
constexpr int32_t kBoxRows = 16;    // rows of a box of K or V that TMA loads

struct Shape {
  const char *name;
  int32_t head_dim;  // bucket of q, k and v
  int32_t groups;    // warpgroups that multiply
  int32_t keys;      // of a tile
  int32_t slots;     // of the ring of tiles, of K and V in turn
  int32_t staged;    // tiles of bytes on their way, before they are widened into that ring; 0: K and V are of the queries' type
  bool uses_combine_kernel;  // leaves all parts of an item to a launch that sums them, instead of adding them to the last one

  constexpr int32_t rows() const { return groups * kGroupRows; }
  // A slab; of bytes, which are widened anyway, all.
  constexpr int32_t box_columns() const { return staged > 0 ? head_dim : 64; }
  constexpr int32_t threads() const { return (groups + 1) * 128; }
  // The ring, bytes, barriers, flags of the groups, plans of two pieces of work, and the scales of rows whose keys are bytes.
  constexpr int32_t shared_bytes() const {
    return (slots * 2 + staged) * keys * head_dim + (2 * slots + 4 + 2 * groups + 4 * staged) * 8 + groups * 8 + 2 * 96 +
           (staged > 0 ? rows() * 4 : 0);
  }
};

// X(name, head_dim, groups, keys, slots, staged, all_parts)
#define FA_EXTEND_TABLE(X)          \
  X(d64, 64, 2, 128, 14, 0, false)  \
  X(d64p, 64, 2, 128, 14, 0, true)  \
  X(d128, 128, 2, 128, 7, 0, false) \
  X(d128p, 128, 2, 128, 7, 0, true)

#define FA_EXTEND_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr Shape kShapes[] = {FA_EXTEND_TABLE(FA_EXTEND_SHAPE) FA_EXTEND_BYTES_TABLE(FA_EXTEND_SHAPE)};
#undef FA_EXTEND_SHAPE
constexpr int kNumShapes = sizeof(kShapes) / sizeof(kShapes[0]);
constexpr int first_of_bytes() {
  int n = 0;
  while (kShapes[n].staged == 0) ++n;
  return n;
}
constexpr int kFirst8Bit = first_of_bytes();  // index of the first shape of bytes_table.h

}  // namespace fa::cuda::extend
