// SPDX-License-Identifier: Apache-2.0
// Every decode kernel that is built: one line each, read by the build (one object file a line and dtype), by the plan and by the
// launcher. Reasons for the sizes are in README.md beside this file. Kernels for keys and values of one byte are in bytes_table.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/kernels/decode/table_8bit.h"

namespace fa::cuda::decode {

constexpr int32_t kMaxClusterSize = 16;   // blocks of threads
constexpr int32_t kSplitTileBytes = 32;   // of a Cut in the workspace
constexpr int32_t kCombineThreads = 128;  // of a block that sums parts
constexpr int32_t kCombineMinCtas = 6;    // such blocks on one multiprocessor
constexpr int32_t kCombineColumns = 128;  // of rows, one after another, that a warp of it has at once

struct Shape {
  const char *name;
  int32_t head_dim;        // bucket of q, k and v
  int32_t warp_rows;       // of one warp; 8: of one token a sequence
  int32_t row_warps;       // warps that share keys
  int32_t key_warps;       // groups of them, each with keys of its own
  int32_t keys;            // of such a group at a time
  int32_t stages;          // of its ring
  int32_t blocks_at_once;  // blocks of threads on one multiprocessor that has the shared memory
  int32_t capability;      // of the oldest devices whose registers hold it
  bool clustered;          // the blocks of a cluster share the keys of a head (cluster.cuh)
  int32_t key_bytes = 2;   // of an element of K or V

  constexpr int32_t rows() const { return warp_rows * row_warps; }
  constexpr int32_t step() const { return key_warps * keys; }
  constexpr int32_t threads() const { return row_warps * key_warps * 32; }
  // K and V, and of bytes a factor for each key of both.
  constexpr int32_t ring_bytes() const {
    return key_warps * stages * keys * (2 * head_dim * key_bytes + (key_bytes == 1 ? 8 : 0));
  }
  // Where the blocks of a cluster leave their sums for this one: four columns of fp32 with their row's maximum and sum, of all rows in
  // turn, rounded up to as many for each block.
  constexpr int32_t landing_bytes() const { return clustered ? (rows() * head_dim / 4 + kMaxClusterSize) * 24 + 16 : 0; }
  // Q, rings of K and V, of every row a maximum and a sum for each group of warps and, with bytes, Q's scale.
  constexpr int32_t shared_bytes() const {
    return rows() * head_dim * 2 + ring_bytes() + key_warps * rows() * 8 + (key_bytes == 1 ? rows() * 4 : 0) + landing_bytes();
  }
  // Blocks of threads that run at once on a multiprocessor where one may have so much shared memory; 1 KB of each is the system's.
  constexpr int32_t blocks_on(int32_t most_bytes) const {
    return std::min(blocks_at_once, (most_bytes + 1024) / (shared_bytes() + 1024));
  }
};

// X(name, head_dim, warp_rows, row_warps, key_warps, keys, stages, blocks_at_once, capability, clustered)
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
  X(d256_8, 256, 8, 1, 4, 16, 3, 1, 80, false)       \
  X(d256_16, 256, 16, 1, 4, 16, 3, 1, 80, false)     \
  X(d256_32, 256, 16, 2, 4, 16, 3, 1, 80, false)

#define FA_DECODE_SHAPE(name, ...) {#name, __VA_ARGS__},
#define FA_DECODE_8BIT_SHAPE(name, ...) {#name, __VA_ARGS__, 1},
constexpr Shape kShapes[] = {FA_DECODE_TABLE(FA_DECODE_SHAPE) FA_DECODE_8BIT_TABLE(FA_DECODE_8BIT_SHAPE)};
#undef FA_DECODE_8BIT_SHAPE
#undef FA_DECODE_SHAPE
constexpr int kNumShapes = sizeof(kShapes) / sizeof(kShapes[0]);
constexpr int first_8bit_shape() {
  int n = 0;
  while (kShapes[n].key_bytes != 1) ++n;
  return n;
}
constexpr int kFirst8Bit = first_8bit_shape();  // index of the first shape of bytes_table.h

}  // namespace fa::cuda::decode
