// SPDX-License-Identifier: Apache-2.0
// Every kernel for queries that extend a cache that is built: one line each, read by the build (one object file a line and dtype), by the
// plan and by the launcher. Reasons for the sizes are in README.md beside this file.
#pragma once

#include <cstdint>

namespace fa::cuda::extend {

struct Shape {
  const char *name;
  int32_t head_dim;  // bucket of q, k and v
  int32_t groups;    // warpgroups that multiply, each with 64 rows
  int32_t keys;      // of a tile
  int32_t slots;     // of the ring of tiles, of K and V in turn

  constexpr int32_t rows() const { return groups * 64; }
  constexpr int32_t threads() const { return (groups + 1) * 128; }
  // The ring, barriers, flags of the groups, and plans of two pieces of work.
  constexpr int32_t shared_bytes() const {
    return slots * keys * head_dim * 2 + (2 * slots + 4 + groups) * 8 + groups * 8 + 2 * 96;
  }
};

// X(name, head_dim, groups, keys, slots)
#define FA_EXTEND_TABLE(X) \
  X(d64, 64, 2, 128, 14)   \
  X(d128, 128, 2, 128, 7)

#define FA_EXTEND_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr Shape kShapes[] = {FA_EXTEND_TABLE(FA_EXTEND_SHAPE)};
#undef FA_EXTEND_SHAPE
constexpr int kNumShapes = sizeof(kShapes) / sizeof(kShapes[0]);

}  // namespace fa::cuda::extend
