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
  int32_t stages;    // chunks of q in shared memory, and with one block of dout
  int32_t blocks;    // 1, or 2 that share the keys (backward_pair.cuh); those do not add to dq in order

  // How many blocks of keys have added a group's share of a chunk's dq, where they do so in order.
  constexpr int32_t turns(bool deterministic) const { return deterministic ? groups : 0; }
  constexpr int32_t keys() const { return groups * 64; }
  constexpr int32_t threads() const { return (groups + 1) * 128; }
  constexpr int32_t block_keys() const { return keys() / blocks; }
  constexpr int32_t shared_bytes() const {
    const int32_t slabs = (head_dim + 63) / 64;
    if (blocks == 2) {
      // K | V | half of the other's K | ring of Q | dO | P | two dS and the other's | lse, delta | barriers | flags |
      // what the block works on
      const int32_t k = block_keys() * slabs * 128;
      return 2 * k + k / 2 + (stages + 1) * rows * slabs * 128 + block_keys() * rows * (4 + 4 * 2) + (stages + 1) * rows * 4 +
             (11 + 2 * stages) * 8 + 8 + 16 + 64;
    }
    // K | V | rings of Q and dO | two dS | dq | rings of lse and delta | barriers | what the block works on
    return 2 * keys() * slabs * 128 + stages * 2 * rows * slabs * 128 + 2 * keys() * rows * 2 + rows * head_dim * 4 +
           stages * 2 * rows * 4 + (6 + 2 * groups + 4 * stages) * 8 + 64;
  }
};

// Narrow heads first: the first line with room for the columns is taken.
// X(name, head_dim, groups, rows, stages, blocks)
// One kernel a line, as the build reads it:
// clang-format off
#define FA_SM90_BACKWARD_TABLE(X) \
  X(d64, 64, 2, 128, 2, 1)    \
  X(d128, 128, 2, 64, 3, 1)   \
  X(d256, 256, 2, 64, 2, 2)
// clang-format on

#define FA_SM90_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr BackwardShape kBackwardShapes[] = {FA_SM90_BACKWARD_TABLE(FA_SM90_SHAPE)};
#undef FA_SM90_SHAPE
constexpr int kNumBackwardShapes = sizeof(kBackwardShapes) / sizeof(kBackwardShapes[0]);

}  // namespace fa::cuda::sm90
