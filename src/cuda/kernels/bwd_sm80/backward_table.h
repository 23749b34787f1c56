// SPDX-License-Identifier: Apache-2.0
// Every backward kernel that is built, as forward_table.h for forward.
#pragma once

#include <cstdint>

#include "cuda/common/scores.h"

namespace fa::cuda::sm80 {

constexpr int32_t kTurnsPerChunk = 8;  // warps of a block, at most

struct BackwardShape {
  const char *name;
  int32_t head_dim;    // bucket of q and k
  int32_t head_dim_v;  // bucket of v
  int32_t warps;
  int32_t roles;         // 2: half of the warps hold dv, half dk (backward_paired.cuh), and the next three count in one half
  int32_t query_parts;   // warps that share the keys of S^T and dP^T: each takes this share of the queries
  int32_t key_tiles;     // 16-key tiles of S^T and dP^T a warp holds
  int32_t column_parts;  // warps that share the keys of dk and dv: each takes this share of the columns
  int32_t rows;          // queries of a chunk
  int32_t stages;        // chunks of q and dout in shared memory
  int32_t min_blocks;    // blocks of threads on one multiprocessor
  ScoreSet scores;       // what it can do to them

  constexpr int32_t threads() const { return warps * 32; }
  constexpr int32_t keys() const { return warps / roles / query_parts * key_tiles * 16; }
  constexpr int32_t shared_bytes() const {
    // K, V | Q, dO rings | dS and, if warps exchange it, P; two of each with two roles | lse, delta rings | bias | a barrier a role
    return 2 * (keys() * (head_dim + head_dim_v) + stages * rows * (head_dim + head_dim_v) +
                keys() * rows * ((roles > 1 || query_parts > 1 ? 2 : 1) * roles + stages_bias(scores))) +
           stages * rows * 2 * 4 + (roles > 1 ? roles * 8 : 0);
  }
};

// Cheaper kernels first, as in forward_table.h: of two lines for the same head_dim the first that fits the device's shared
// memory is taken (227 KB on H100, 163 KB on A100, 99 KB on sm_86 and sm_89).
// X(name, head_dim, head_dim_v, warps, roles, query_parts, key_tiles, column_parts, rows, stages, min_blocks, scores)
#define FA_SM80_BACKWARD_TABLE(X)                       \
  X(d64, 64, 64, 4, 1, 1, 2, 1, 64, 2, 2, kPlain)       \
  X(d128, 128, 128, 8, 2, 1, 2, 2, 64, 2, 1, kPlain)    \
  X(d128a, 128, 128, 8, 1, 2, 2, 2, 64, 2, 1, kPlain)   \
  X(d128s, 128, 128, 4, 1, 2, 2, 2, 32, 2, 1, kPlain)   \
  X(d256, 256, 256, 8, 2, 2, 2, 4, 64, 2, 1, kPlain)    \
  X(d256s, 256, 256, 8, 1, 2, 1, 4, 32, 2, 1, kPlain)   \
  X(d64m, 64, 64, 4, 1, 1, 2, 1, 64, 2, 2, kSmooth)     \
  X(d64b, 64, 64, 4, 1, 1, 2, 1, 64, 2, 2, kBiased)     \
  X(d64r, 64, 64, 4, 1, 1, 2, 1, 64, 2, 2, kDropped)    \
  X(d64g, 64, 64, 4, 1, 1, 2, 1, 64, 2, 2, kAll)        \
  X(d128m, 128, 128, 8, 1, 2, 2, 2, 64, 2, 1, kSmooth)  \
  X(d128b, 128, 128, 8, 1, 2, 2, 2, 64, 2, 1, kBiased)  \
  X(d128r, 128, 128, 8, 1, 2, 2, 2, 64, 2, 1, kDropped) \
  X(d128g, 128, 128, 8, 1, 2, 2, 2, 64, 2, 1, kAll)     \
  X(d128gs, 128, 128, 4, 1, 2, 2, 2, 32, 2, 1, kAll)    \
  X(d256m, 256, 256, 8, 1, 2, 1, 4, 64, 2, 1, kSmooth)  \
  X(d256b, 256, 256, 8, 1, 2, 1, 4, 64, 2, 1, kBiased)  \
  X(d256r, 256, 256, 8, 1, 2, 1, 4, 64, 2, 1, kDropped) \
  X(d256g, 256, 256, 8, 1, 2, 1, 4, 64, 2, 1, kAll)     \
  X(d256gs, 256, 256, 8, 1, 2, 1, 4, 32, 2, 1, kAll)

#define FA_SM80_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr BackwardShape kBackwardShapes[] = {FA_SM80_BACKWARD_TABLE(FA_SM80_SHAPE)};
#undef FA_SM80_SHAPE
constexpr int kNumBackwardShapes = sizeof(kBackwardShapes) / sizeof(kBackwardShapes[0]);

}  // namespace fa::cuda::sm80
