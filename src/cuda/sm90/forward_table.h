// SPDX-License-Identifier: Apache-2.0
// Every forward kernel for sm_90a, as sm80/forward_table.h.
#pragma once

#include <cstdint>

namespace fa::cuda::sm90 {

struct ForwardShape {
  const char *name;
  int32_t head_dim;    // bucket of q and k
  int32_t head_dim_v;  // bucket of v
  int32_t groups;      // warpgroups that compute, each on 64 rows
  int32_t chunk;       // keys
  int32_t q_stages;
  int32_t stages;  // chunks of K, and of V, in shared memory
  bool scored;     // for softcap and ALiBi

  constexpr int32_t rows() const { return groups * 64; }
  constexpr int32_t threads() const { return (groups + 1) * 128; }
  constexpr int32_t shared_bytes() const {
    const int32_t slabs = (head_dim + 63) / 64, slabs_v = (head_dim_v + 63) / 64;
    // Q | K ring | V ring | barriers | four tiles
    return q_stages * rows() * slabs * 128 + stages * chunk * (slabs + slabs_v) * 128 + (2 * q_stages + 4 * stages + 8) * 8 +
           4 * (80 + 8 * groups);
  }
};

// Cheaper kernels first.
// X(name, head_dim, head_dim_v, groups, chunk, q_stages, stages, scored)
#define FA_SM90_FORWARD_TABLE(X)             \
  X(d64, 64, 64, 3, 128, 2, 3, false)        \
  X(d96, 96, 96, 2, 128, 2, 2, false)        \
  X(d128, 128, 128, 2, 128, 2, 2, false)     \
  X(d192_128, 192, 128, 2, 128, 1, 2, false) \
  X(d192, 192, 192, 2, 112, 1, 2, false)     \
  X(d256, 256, 256, 2, 80, 1, 2, false)      \
  X(d64g, 64, 64, 2, 128, 2, 3, true)        \
  X(d128g, 128, 128, 2, 128, 2, 2, true)     \
  X(d256g, 256, 256, 2, 80, 1, 2, true)

#define FA_SM90_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr ForwardShape kForwardShapes[] = {FA_SM90_FORWARD_TABLE(FA_SM90_SHAPE)};
#undef FA_SM90_SHAPE
constexpr int kNumForwardShapes = sizeof(kForwardShapes) / sizeof(kForwardShapes[0]);

}  // namespace fa::cuda::sm90
