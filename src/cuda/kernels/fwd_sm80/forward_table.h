// SPDX-License-Identifier: Apache-2.0
// Every forward kernel that is built: one line each, read by the build (one object file a line and dtype), by the plan and by the
// launcher. Reasons for the tile shapes are in README.md beside this file.
#pragma once

#include <cstdint>

#include "cuda/common/scores.h"

namespace fa::cuda::sm80 {

struct ForwardShape {
  const char *name;
  int32_t head_dim;    // bucket of q and k
  int32_t head_dim_v;  // bucket of v
  int32_t warps;
  int32_t tiles_per_warp;  // of 16 rows
  int32_t parts;           // warps that share rows
  int32_t chunk;           // keys
  int32_t min_blocks;      // blocks of threads on one multiprocessor
  ScoreSet scores;         // what it can do to them

  constexpr int32_t rows() const { return warps / parts * tiles_per_warp * 16; }
  constexpr int32_t threads() const { return warps * 32; }
  // Q (or out, in its place) and two chunks of K and V, in 16-bit elements; or, for parts, one chunk, P, one float a row and part,
  // and for each group of warps that share rows a barrier and a vote a part.
  // And the bias of a chunk.
  constexpr int32_t shared_bytes() const {
    const int32_t out_or_q = 2 * rows() * (head_dim > head_dim_v ? head_dim : head_dim_v),
                  pair = 2 * chunk * (head_dim + head_dim_v), bias = stages_bias(scores) ? 2 * rows() * chunk : 0;
    return bias + (parts == 1 ? out_or_q + 2 * pair
                              : out_or_q + pair + rows() * (2 * chunk + 4 * parts) + warps / parts * (8 + 4 * parts));
  }
};

// Cheaper kernels first: the plan takes the first one that fits head dims, scores and shared memory.
// X(name, head_dim, head_dim_v, warps, tiles_per_warp, parts, chunk, min_blocks, scores)
#define FA_SM80_FORWARD_TABLE(X)                \
  X(d64, 64, 64, 4, 2, 1, 64, 2, kPlain)        \
  X(d96, 96, 96, 4, 2, 1, 64, 2, kPlain)        \
  X(d128, 128, 128, 4, 2, 1, 64, 2, kPlain)     \
  X(d192_128, 192, 128, 4, 2, 2, 64, 2, kPlain) \
  X(d192, 192, 192, 4, 2, 2, 64, 2, kPlain)     \
  X(d256, 256, 256, 4, 2, 2, 64, 2, kPlain)     \
  X(d256s, 256, 256, 4, 1, 1, 32, 1, kPlain)    \
  X(d512, 512, 512, 8, 2, 4, 64, 1, kPlain)     \
  X(d576_512, 576, 512, 8, 2, 4, 64, 1, kPlain) \
  X(d64m, 64, 64, 4, 2, 1, 64, 2, kSmooth)      \
  X(d64b, 64, 64, 4, 2, 1, 64, 2, kBiased)      \
  X(d64r, 64, 64, 4, 2, 1, 64, 2, kDropped)     \
  X(d64g, 64, 64, 4, 1, 1, 64, 4, kAll)         \
  X(d128m, 128, 128, 4, 2, 1, 64, 2, kSmooth)   \
  X(d128b, 128, 128, 4, 2, 1, 64, 2, kBiased)   \
  X(d128r, 128, 128, 4, 2, 1, 64, 2, kDropped)  \
  X(d128g, 128, 128, 4, 1, 1, 64, 2, kAll)      \
  X(d256m, 256, 256, 4, 2, 2, 64, 2, kSmooth)   \
  X(d256b, 256, 256, 4, 2, 2, 64, 2, kBiased)   \
  X(d256r, 256, 256, 4, 2, 2, 64, 2, kDropped)  \
  X(d256g, 256, 256, 4, 2, 2, 64, 2, kAll)      \
  X(d256gs, 256, 256, 4, 1, 1, 32, 1, kAll)

#define FA_SM80_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr ForwardShape kForwardShapes[] = {FA_SM80_FORWARD_TABLE(FA_SM80_SHAPE)};
#undef FA_SM80_SHAPE
constexpr int kNumForwardShapes = sizeof(kForwardShapes) / sizeof(kForwardShapes[0]);

}  // namespace fa::cuda::sm80
