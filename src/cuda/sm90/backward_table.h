// SPDX-License-Identifier: Apache-2.0
// Every backward kernel for sm_90a, as forward_table.h for forward.
#pragma once

#include <cstdint>

namespace fa::cuda::sm90 {

struct BackwardShape {
  const char *name;
  int32_t head_dim;  // bucket of q, k and v
  int32_t groups;    // warpgroups that compute, each on 64 keys
  int32_t rows;      // queries of a chunk
  int32_t stages;    // chunks of q and dout in shared memory

  // How many blocks of keys have added a group's share of a chunk's dq, where they do so in order.
  constexpr int32_t turns(bool deterministic) const { return deterministic ? groups : 0; }
  constexpr int32_t keys() const { return groups * 64; }
  constexpr int32_t threads() const { return (groups + 1) * 128; }
  constexpr int32_t shared_bytes() const {
    const int32_t slabs = (head_dim + 63) / 64;
    // K | V | rings of Q and dO | two dS | dq | rings of lse and delta | barriers | what the block works on
    return 2 * keys() * slabs * 128 + stages * 2 * rows * slabs * 128 + 2 * keys() * rows * 2 + rows * head_dim * 4 +
           stages * 2 * rows * 4 + (6 + 2 * groups + 4 * stages) * 8 + 64;
  }
};

// Narrow heads first: the first line with room for the columns is taken.
// X(name, head_dim, groups, rows, stages)
// One kernel a line, as the build reads it:
// clang-format off
#define FA_SM90_BACKWARD_TABLE(X) \
  X(d64, 64, 2, 128, 2)    \
  X(d128, 128, 2, 64, 3)
// clang-format on

#define FA_SM90_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr BackwardShape kBackwardShapes[] = {FA_SM90_BACKWARD_TABLE(FA_SM90_SHAPE)};
#undef FA_SM90_SHAPE
constexpr int kNumBackwardShapes = sizeof(kBackwardShapes) / sizeof(kBackwardShapes[0]);

}  // namespace fa::cuda::sm90
