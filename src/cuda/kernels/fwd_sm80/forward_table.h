// SPDX-License-Identifier: Apache-2.0
// The forward kernels for sm_80 and newer: one row per kernel, read by the build (one instance per row and dtype), by the plan and by the
// launcher. README.md has the reasons for the tile shapes.
#pragma once

#include <cstdint>

#include "cuda/common/scores.h"

namespace fa::cuda::sm80 {

// Shared memory of a CTA: the members, and behind them what only some kernels have. NVRTC takes no arrays of no elements, so
// that is offsets in bytes. Tiles of 16-bit elements are swizzled (smem_tile.cuh).
template <int kHeadDim, int kHeadDimV, int kWarps, int kRowTiles, int kColumnWarps, int kTile, int kMinCtas, int kCapability,
          ScoreSet kScores>
struct ForwardStorage {
  static constexpr int kRowWarps = kWarps / kColumnWarps, kRows = kRowWarps * kRowTiles * 16;
  static constexpr int kStages = kColumnWarps == 1 ? 2 : 1;
  static constexpr bool kShareRows = kColumnWarps > 1;

  // What the warps that share rows synchronise with (row_warps.cuh).
  struct RowBarrier {
    uint64_t barrier;
    uint32_t vote[kColumnWarps];
  };

  uint16_t q[kRows][kHeadDim];
  uint16_t k[kStages][kTile][kHeadDim];
  uint16_t v[kStages][kTile][kHeadDimV];
  static constexpr int32_t kP = 2 * (kRows * kHeadDim + kStages * kTile * (kHeadDim + kHeadDimV)),
                           kPRowBytes = 2 * kTile;  // p[kRows][kTile]
  static constexpr int32_t kRowStatistics = kP + (kShareRows ? kRows * kPRowBytes : 0),
                           kWarpStatisticsBytes = 4 * kRows;  // of each warp: row maxima, later row sums, over its keys
  static constexpr int32_t kBias = kRowStatistics + (kShareRows ? kColumnWarps * kWarpStatisticsBytes : 0),
                           kWarpBiasBytes = 2 * kRowTiles * 16 * (kTile / kColumnWarps);
  static constexpr int32_t kRowBarriers = kBias + (stages_bias(kScores) ? kWarps * kWarpBiasBytes : 0);
  static constexpr int32_t kBytes = kRowBarriers + (kShareRows ? kRowWarps * static_cast<int32_t>(sizeof(RowBarrier)) : 0);
};

struct ForwardShape {
  const char *name;
  int32_t head_dim;    // bucket of q and k
  int32_t head_dim_v;  // bucket of v
  int32_t warps;
  int32_t row_tiles;     // of 16 rows, per warp
  int32_t column_warps;  // warps that share rows: each has a part of the keys of S and of the columns of out
  int32_t kv_tile;       // keys of a KV tile
  int32_t min_blocks;    // CTAs per SM
  int32_t capability;    // of the oldest devices with that much shared memory
  ScoreSet scores;       // the score terms it is built for
  int32_t storage;       // bytes of ForwardStorage

  // Whether a kernel with a score text can be made of it, at run time. It takes all of its terms beside the text.
  constexpr bool takes_score_text() const { return (scores & kSoftcap) != 0; }
  constexpr int32_t rows() const { return warps / column_warps * row_tiles * 16; }
  constexpr int32_t threads() const { return warps * 32; }
  constexpr int32_t shared_bytes() const { return storage; }
};

// Cheaper kernels first: the plan takes the first one that fits head dims, score terms and shared memory.
// X(name, head_dim, head_dim_v, warps, row_tiles, column_warps, kv_tile, min_blocks, capability, scores)
#define FA_SM80_FORWARD_TABLE(X)                    \
  X(d64, 64, 64, 4, 2, 1, 64, 2, 80, kPlain)        \
  X(d96, 96, 96, 4, 2, 1, 64, 2, 80, kPlain)        \
  X(d128, 128, 128, 4, 2, 1, 64, 2, 80, kPlain)     \
  X(d192_128, 192, 128, 4, 2, 2, 64, 2, 80, kPlain) \
  X(d192, 192, 192, 4, 2, 2, 64, 2, 80, kPlain)     \
  X(d256, 256, 256, 4, 2, 2, 64, 2, 80, kPlain)     \
  X(d256s, 256, 256, 4, 1, 1, 32, 1, 80, kPlain)    \
  X(d512, 512, 512, 8, 2, 4, 64, 1, 90, kPlain)     \
  X(d512s, 512, 512, 8, 1, 2, 32, 1, 80, kPlain)    \
  X(d512t, 512, 512, 4, 1, 2, 32, 1, 80, kPlain)    \
  X(d576_512, 576, 512, 8, 2, 4, 64, 1, 90, kPlain) \
  X(d64m, 64, 64, 4, 2, 1, 64, 2, 80, kSmooth)      \
  X(d64b, 64, 64, 4, 2, 1, 64, 2, 80, kBiased)      \
  X(d64r, 64, 64, 4, 2, 1, 64, 2, 80, kDropped)     \
  X(d64g, 64, 64, 4, 1, 1, 64, 4, 80, kAll)         \
  X(d128m, 128, 128, 4, 2, 1, 64, 2, 80, kSmooth)   \
  X(d128b, 128, 128, 4, 2, 1, 64, 2, 80, kBiased)   \
  X(d128r, 128, 128, 4, 2, 1, 64, 2, 80, kDropped)  \
  X(d128g, 128, 128, 4, 1, 1, 64, 2, 80, kAll)      \
  X(d256m, 256, 256, 4, 2, 2, 64, 2, 80, kSmooth)   \
  X(d256b, 256, 256, 4, 2, 2, 64, 2, 80, kBiased)   \
  X(d256r, 256, 256, 4, 2, 2, 64, 2, 80, kDropped)  \
  X(d256g, 256, 256, 4, 2, 2, 64, 2, 80, kAll)      \
  X(d256gs, 256, 256, 4, 1, 1, 32, 1, 80, kAll)     \
  X(d512g, 512, 512, 8, 2, 4, 64, 1, 90, kAll)      \
  X(d512gs, 512, 512, 8, 1, 2, 32, 1, 80, kAll)     \
  X(d512gt, 512, 512, 4, 1, 2, 32, 1, 80, kAll)

#define FA_SM80_SHAPE(name, ...) {#name, __VA_ARGS__, ForwardStorage<__VA_ARGS__>::kBytes},
constexpr ForwardShape kForwardShapes[] = {FA_SM80_FORWARD_TABLE(FA_SM80_SHAPE)};
#undef FA_SM80_SHAPE
constexpr int kNumForwardShapes = sizeof(kForwardShapes) / sizeof(kForwardShapes[0]);

}  // namespace fa::cuda::sm80
