// SPDX-License-Identifier: Apache-2.0
// Every MLA kernel that is built: one line per kernel, read by the build (one object file per line and dtype), by the plan and by the
// launcher. README.md gives the reasons for the sizes.
#pragma once

#include <cstdint>

namespace fa::cuda::mla {

constexpr int32_t kBoxRows = 8;  // rows of a box of K that TMA loads

struct Shape {
  const char *name;
  int32_t head_dim;    // bucket of q and k
  int32_t head_dim_v;  // bucket of v, the first columns of k
  int32_t keys;        // per K tile
  int32_t stages;      // K tiles in shared memory
  int32_t held;        // swizzle atoms (64 columns) of Q in registers
  bool pairs;          // clusters of two CTAs share a work tile

  constexpr int32_t rows() const { return 64; }
  constexpr int32_t threads() const { return 512; }
  constexpr int32_t tile_bytes() const { return keys * head_dim * 2; }
  constexpr int32_t q_and_p_bytes() const { return rows() * (head_dim - 64 * held) * 2 + stages * rows() * keys * 2; }
  // The most partials of a work tile: their maxima and sums lie where K tiles, Q and P were, after the out of one partial.
  constexpr int32_t most_parts() const {
    return (stages * tile_bytes() + q_and_p_bytes() - rows() * head_dim_v * 4) / (rows() * 8);
  }
  // K tiles, Q, P; of every row the rescale factors, the epilogue's entry and the peer's stats; flags, mbarriers, two work units (cta.cuh).
  constexpr int32_t shared_bytes() const {
    return stages * tile_bytes() + q_and_p_bytes() + rows() * (4 * stages + 24) + stages * (24 + keys) + 88 + 192;
  }
};

// X(name, head_dim, head_dim_v, keys, stages, held, pairs)
// The build looks for lines that begin with X(.
// clang-format off
#define FA_MLA_TABLE(X) \
  X(d576, 576, 512, 64, 2, 4, false) \
  X(d576p, 576, 512, 64, 2, 4, true)
// clang-format on

#define FA_MLA_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr Shape kShapes[] = {FA_MLA_TABLE(FA_MLA_SHAPE)};
#undef FA_MLA_SHAPE
constexpr int kNumShapes = sizeof(kShapes) / sizeof(kShapes[0]);

}  // namespace fa::cuda::mla
