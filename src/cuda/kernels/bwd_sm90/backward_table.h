// SPDX-License-Identifier: Apache-2.0
// Every backward kernel for sm_90a, as forward_table.h for forward.
#pragma once

#include <cstdint>

namespace fa::cuda::sm90 {

// What the blocks of threads and their warpgroups do.
enum class Design : int32_t {
  alone,   // backward.cuh
  values,  // pairs of blocks that share keys, backward_pair.cuh
  scores,  // the same, backward_pair_scores.cuh
  wide,    // pairs as `values` that stay, backward_wide.cuh
};

constexpr int32_t kTurnsPerChunk = 2;  // shares of a chunk's dq, each of which blocks of keys add in an order of its own

struct BackwardShape {
  const char *name;
  int32_t head_dim, head_dim_v;  // buckets of q and k, and of v
  int32_t groups;                // warpgroups that compute, each on 64 keys
  int32_t rows;                  // queries of a chunk
  int32_t stages, dout_stages;   // chunks of q and of dout in shared memory
  Design design;
  bool ordered;  // for deterministic mode, too
  bool scored;   // for softcap and ALiBi

  // Blocks of threads stay as long as there is work.
  constexpr bool stays() const { return design != Design::values; }
  // P goes from one warpgroup to the other.
  constexpr bool hands_p() const { return design == Design::values || design == Design::wide; }
  // So many keys of a sequence it is for, where another kernel is better with long walks.
  constexpr int64_t longest() const { return design == Design::wide && !ordered ? 8 * keys() : INT64_MAX; }

  constexpr int32_t blocks() const { return design == Design::alone ? 1 : 2; }
  constexpr int32_t keys() const { return groups * 64; }
  constexpr int32_t threads() const { return (groups + 1) * 128; }
  constexpr int32_t block_keys() const { return keys() / blocks(); }
  // Of a warp's share of the sum for dq, which it holds in registers.
  constexpr int32_t dq_columns() const {
    return design == Design::alone ? head_dim * (rows / 64) / groups : head_dim % 128 == 0 ? 64 : head_dim / 2;
  }
  constexpr int32_t shared_bytes() const {
    const int32_t slab = 64 * 2, slabs = (head_dim + 63) / 64, slabs_v = (head_dim_v + 63) / 64;
    const int32_t chunks = rows * (stages * slabs + dout_stages * slabs_v) * slab,
                  statistics = (stages + dout_stages) * rows * 4;
    if (design != Design::alone) {
      // K and half of the other's, by halves of the columns | V | rings of Q and dO | P or dq | two dS and the other's | lse, delta |
      // barriers | flags | what the block works on
      const int32_t half = block_keys() * ((head_dim / 2 + 63) / 64) * slab;
      const int32_t handed = hands_p() ? block_keys() * rows * 4 : rows * head_dim / 2 * 4;
      const int32_t barriers = (!hands_p() ? 13 : ordered ? 14 : 11) + 2 * (stages + dout_stages);
      return 3 * half + block_keys() * slabs_v * slab + chunks + handed + block_keys() * rows * 4 * 2 + statistics +
             (barriers + 1) / 2 * 16 + 16 + (stays() ? 10 * 8 + 16 + 2 * 64 : 64);
    }
    // K | V | rings of Q and dO | two dS | dq | rings of lse and delta | barriers | what the block works on
    return keys() * (slabs + slabs_v) * slab + chunks + 2 * keys() * rows * 2 + rows * head_dim * 4 + statistics +
           (12 + 2 * groups + 2 * (stages + dout_stages)) * 8 + 4 * 64;
  }
};

// Narrow heads first: the first line with room for the columns is taken.
// X(name, head_dim, head_dim_v, groups, rows, stages, dout_stages, design, ordered, scored)
// One kernel a line, as the build reads it:
// clang-format off
#define FA_SM90_BACKWARD_TABLE(X) \
  X(d64, 64, 64, 2, 128, 2, 2, Design::alone, true, false)         \
  X(d96, 96, 96, 2, 64, 3, 3, Design::alone, true, false)          \
  X(d128, 128, 128, 2, 64, 3, 3, Design::alone, true, false)       \
  X(d192_128, 192, 128, 2, 64, 3, 2, Design::scores, true, false)  \
  X(d192, 192, 192, 2, 64, 2, 2, Design::scores, true, false)      \
  X(d256s, 256, 256, 2, 64, 2, 1, Design::wide, false, false)      \
  X(d256, 256, 256, 2, 64, 2, 1, Design::values, false, false)     \
  X(d256o, 256, 256, 2, 64, 2, 1, Design::wide, true, false)       \
  X(d64g, 64, 64, 2, 128, 2, 2, Design::alone, true, true)         \
  X(d128g, 128, 128, 2, 64, 3, 3, Design::alone, true, true)       \
  X(d192g, 192, 192, 2, 64, 2, 2, Design::scores, true, true)      \
  X(d256g, 256, 256, 2, 64, 2, 1, Design::wide, true, true)
// clang-format on

#define FA_SM90_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr BackwardShape kBackwardShapes[] = {FA_SM90_BACKWARD_TABLE(FA_SM90_SHAPE)};
#undef FA_SM90_SHAPE
constexpr int kNumBackwardShapes = sizeof(kBackwardShapes) / sizeof(kBackwardShapes[0]);

}  // namespace fa::cuda::sm90
