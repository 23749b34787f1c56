// SPDX-License-Identifier: Apache-2.0
// Every kernel for latent caches that is built: one line each, read by the build (one object file a line and dtype), by the plan and by
// the launcher. Reasons for the sizes are in README.md beside this file.
#pragma once

#include <cstdint>

namespace fa::cuda::mla {

constexpr int32_t kBoxRows = 8;  // rows of a box of K that TMA loads

struct Shape {
  const char *name;
  int32_t head_dim;    // bucket of q and k
  int32_t head_dim_v;  // bucket of v, the first columns of k
  int32_t keys;        // of a tile
  int32_t stages;      // of the ring of tiles
  int32_t held;        // slabs of 64 columns of Q in registers
  bool pairs;          // blocks of threads are clusters of two that share an item

  constexpr int32_t rows() const { return 64; }
  constexpr int32_t threads() const { return 512; }
  constexpr int32_t tile_bytes() const { return keys * head_dim * 2; }
  constexpr int32_t q_and_p_bytes() const { return rows() * (head_dim - 64 * held) * 2 + stages * rows() * keys * 2; }
  // Of an item, whose maxima and sums lie where tiles, Q and P were, behind a part.
  constexpr int32_t most_parts() const {
    return (stages * tile_bytes() + q_and_p_bytes() - rows() * head_dim_v * 4) / (rows() * 8);
  }
  // The ring, Q, two P, of every row two factors, what closes it and what the other block of a pair has of it, barriers, and plans of two
  // pieces of work.
  constexpr int32_t shared_bytes() const {
    return stages * tile_bytes() + q_and_p_bytes() + rows() * (4 * stages + 24) + stages * (24 + keys) + 88 + 192;
  }
};

// X(name, head_dim, head_dim_v, keys, stages, held, pairs)
// The build looks for lines that begin with X(.
// clang-format off
#define FA_LATENT_TABLE(X) \
  X(d576, 576, 512, 64, 2, 4, false) \
  X(d576p, 576, 512, 64, 2, 4, true)
// clang-format on

#define FA_LATENT_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr Shape kShapes[] = {FA_LATENT_TABLE(FA_LATENT_SHAPE)};
#undef FA_LATENT_SHAPE
constexpr int kNumShapes = sizeof(kShapes) / sizeof(kShapes[0]);

}  // namespace fa::cuda::mla
