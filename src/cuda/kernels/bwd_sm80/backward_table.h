// SPDX-License-Identifier: Apache-2.0
// The backward kernels for sm_80 and newer, one row per kernel, read like forward_table.h.
#pragma once

#include <cstdint>

#include "cuda/common/scores.h"

namespace fa::cuda::sm80 {

constexpr int32_t kDqSemaphoresPerTile = 8;  // warps of a CTA, at most: each has its own counter per query tile

// Shared memory of a CTA, as in forward_table.h.
template <int kHeadDim, int kHeadDimV, int kWarps, int kRoles, int kScoreWarps, int kQueryWarps, int kKeyTiles,
          int kColumnWarps, int kRows, int kStages, int kMinCtas, int kCapability, ScoreSet kScores>
struct BackwardStorage {
  static constexpr int kKeys = kScoreWarps / kQueryWarps * kKeyTiles * 16;
  // S^T of a tile and dP^T are the work of two warps, where half of them would wait otherwise. dP^T goes to the first one as fp32.
  static constexpr bool kPassesDp = kScoreWarps * 2 <= kWarps / kRoles;
  static constexpr bool kSharesP = kRoles > 1 || kQueryWarps > 1 || kScoreWarps < kWarps;  // P, like dS, goes to other warps

  uint16_t k[kKeys][kHeadDim];
  uint16_t v[kKeys][kHeadDimV];
  uint16_t q[kStages][kRows][kHeadDim];
  uint16_t dout[kStages][kRows][kHeadDimV];
  uint16_t ds[kRoles][kKeys][kRows];                         // dS^T, two buffers with two roles
  static constexpr int32_t kScoreBytes = 2 * kKeys * kRows;  // of a buffer of dS^T, or of P^T
  static constexpr int32_t kP =
      2 * (kKeys * (kHeadDim + kHeadDimV) + kStages * kRows * (kHeadDim + kHeadDimV)) + kRoles * kScoreBytes;
  static constexpr int32_t kLse = kP + (kSharesP ? kRoles * kScoreBytes : 0), kStatisticsBytes = 4 * kRows;  // of a stage
  static constexpr int32_t kDelta = kLse + kStages * kStatisticsBytes, kBias = kDelta + kStages * kStatisticsBytes;
  static constexpr int32_t kRoleBarriers = kBias + (stages_bias(kScores) ? 2 * kRows * kKeys : 0);
  static constexpr int32_t kBytes = kRoleBarriers + 8 * (kRoles > 1 ? kRoles : kPassesDp ? kScoreWarps : 0);
};

struct BackwardShape {
  const char *name;
  int32_t head_dim;    // bucket of q and k
  int32_t head_dim_v;  // bucket of v
  int32_t warps;
  int32_t roles;         // 2: half of the warps hold dv, half dk (backward_specialized.cuh); the next four are then per role
  int32_t score_warps;   // that compute S^T, P^T and dS^T: all, or as many as have a tile; then as many others compute dP^T
  int32_t query_warps;   // warps that share the keys of S^T and dP^T: each has a part of the queries
  int32_t key_tiles;     // of 16 keys, of S^T and dP^T per warp
  int32_t column_warps;  // warps that share the keys of dk and dv: each has a part of the columns
  int32_t rows;          // queries of a tile
  int32_t stages;        // of Q and dO. 1: the next tile arrives under dq = dS K
  int32_t min_blocks;    // CTAs per SM
  int32_t capability;    // of the oldest devices with that much shared memory
  ScoreSet scores;       // the score terms it is built for
  int32_t storage;       // bytes of BackwardStorage

  // As in ForwardShape.
  constexpr bool takes_score_text() const { return (scores & kSoftcap) != 0; }
  constexpr int32_t threads() const { return warps * 32; }
  constexpr int32_t keys() const { return score_warps / query_warps * key_tiles * 16; }
  constexpr int32_t shared_bytes() const { return storage; }
};

// Cheaper kernels first. Of two rows for the same head_dim the plan takes the first that fits the device's shared memory (227 KB on H100,
// 163 KB on A100, 99 KB on sm_86 and sm_89). Names that end in s are of kernels for less shared memory, in t for the least.
// X(name, head_dim, head_dim_v, warps, roles, score_warps, query_warps, key_tiles, column_warps, rows, stages, min_blocks, capability, scores)
#define FA_SM80_BACKWARD_TABLE(X)                              \
  X(d64, 64, 64, 4, 1, 4, 1, 2, 1, 64, 2, 2, 80, kPlain)       \
  X(d64s, 64, 64, 8, 1, 8, 1, 2, 1, 32, 2, 1, 80, kPlain)      \
  X(d128, 128, 128, 8, 2, 4, 1, 2, 2, 64, 2, 1, 90, kPlain)    \
  X(d128a, 128, 128, 8, 1, 8, 2, 2, 2, 64, 2, 1, 80, kPlain)   \
  X(d128s, 128, 128, 8, 1, 8, 2, 2, 2, 32, 1, 1, 80, kPlain)   \
  X(d256, 256, 256, 8, 2, 4, 2, 2, 4, 64, 2, 1, 90, kPlain)    \
  X(d256s, 256, 256, 8, 1, 8, 2, 1, 4, 32, 2, 1, 80, kPlain)   \
  X(d256t, 256, 256, 8, 1, 4, 1, 1, 4, 16, 1, 1, 80, kPlain)   \
  X(d512s, 512, 512, 8, 1, 4, 2, 1, 8, 32, 1, 1, 80, kPlain)   \
  X(d512t, 512, 512, 8, 1, 2, 1, 1, 8, 16, 1, 1, 80, kPlain)   \
  X(d64m, 64, 64, 4, 1, 4, 1, 2, 1, 64, 2, 2, 80, kSmooth)     \
  X(d64r, 64, 64, 4, 1, 4, 1, 2, 1, 64, 2, 2, 80, kDropped)    \
  X(d64b, 64, 64, 4, 1, 4, 1, 2, 1, 64, 2, 2, 80, kBiased)     \
  X(d64g, 64, 64, 4, 1, 4, 1, 2, 1, 64, 2, 2, 80, kAll)        \
  X(d128m, 128, 128, 8, 1, 8, 2, 2, 2, 64, 2, 1, 80, kSmooth)  \
  X(d128r, 128, 128, 8, 1, 8, 2, 2, 2, 64, 2, 1, 80, kDropped) \
  X(d128b, 128, 128, 8, 1, 8, 2, 2, 2, 64, 2, 1, 90, kBiased)  \
  X(d128g, 128, 128, 8, 1, 8, 2, 2, 2, 64, 2, 1, 80, kAll)     \
  X(d128gs, 128, 128, 8, 1, 8, 2, 2, 2, 32, 1, 1, 80, kAll)    \
  X(d256m, 256, 256, 8, 1, 8, 2, 1, 4, 64, 2, 1, 90, kSmooth)  \
  X(d256r, 256, 256, 8, 1, 8, 2, 1, 4, 64, 2, 1, 90, kDropped) \
  X(d256b, 256, 256, 8, 1, 8, 2, 1, 4, 64, 2, 1, 90, kBiased)  \
  X(d256g, 256, 256, 8, 1, 8, 2, 1, 4, 64, 2, 1, 90, kAll)     \
  X(d256gs, 256, 256, 8, 1, 8, 2, 1, 4, 32, 2, 1, 80, kAll)    \
  X(d256gt, 256, 256, 8, 1, 4, 1, 1, 4, 16, 1, 1, 80, kAll)    \
  X(d512gs, 512, 512, 8, 1, 4, 2, 1, 8, 32, 1, 1, 80, kAll)    \
  X(d512gt, 512, 512, 8, 1, 2, 1, 1, 8, 16, 1, 1, 80, kAll)

#define FA_SM80_SHAPE(name, ...) {#name, __VA_ARGS__, BackwardStorage<__VA_ARGS__>::kBytes},
constexpr BackwardShape kBackwardShapes[] = {FA_SM80_BACKWARD_TABLE(FA_SM80_SHAPE)};
#undef FA_SM80_SHAPE
constexpr int kNumBackwardShapes = sizeof(kBackwardShapes) / sizeof(kBackwardShapes[0]);

}  // namespace fa::cuda::sm80
