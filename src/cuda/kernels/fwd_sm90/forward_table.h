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
  int32_t stages;       // chunks of K, and of V, in shared memory
  int32_t out_slabs;    // of 64 columns of out, through shared memory at a time; 0: straight from registers
  int32_t max_queries;  // a sequence
  int32_t max_causal;   // queries a sequence, under a causal mask
  bool scored;          // for softcap and ALiBi
  bool fp8;             // operands are e4m3, and V comes transposed

  constexpr int32_t rows() const { return groups * 64; }
  // On a multiprocessor. A group alone leaves its gaps to other blocks.
  constexpr int32_t blocks_at_once() const { return groups > 1 ? 1 : 3; }
  constexpr int32_t threads() const { return (groups + 1) * 128; }
  constexpr int32_t shared_bytes() const {
    const int32_t columns = fp8 ? 128 : 64, slabs = (head_dim + columns - 1) / columns;
    const int32_t v_rows = fp8 ? head_dim_v : (head_dim_v + 63) / 64 * chunk;  // of 128 bytes
    // Q | K ring | V ring | out | barriers | four tiles
    return (q_stages * rows() * slabs + stages * (chunk * slabs + v_rows) + rows() * out_slabs) * 128 +
           (2 * q_stages * groups + 4 * stages + 9) * 8 + 4 * (88 + 8 * groups);
  }
};

constexpr int32_t kAnyLength = INT32_MAX;

// Cheaper kernels first. Three warpgroups keep the tensor cores busier than two; of few rows they would leave too many idle. So would they
// at D64, and tiles end often: blocks of one warpgroup, three a multiprocessor, do not wait for each other. At D128 the L2 cache could
// not feed them.
// X(name, head_dim, head_dim_v, groups, chunk, q_stages, stages, out_slabs, max_queries, max_causal, scored, fp8)
#define FA_SM90_FORWARD_TABLE(X)                                              \
  X(d64s, 64, 64, 1, 64, 2, 3, 1, 256, 512, false, false)                     \
  X(d64, 64, 64, 3, 128, 2, 3, 1, kAnyLength, kAnyLength, false, false)       \
  X(d96, 96, 96, 3, 64, 1, 4, 2, kAnyLength, kAnyLength, false, false)        \
  X(d128s, 128, 128, 2, 128, 2, 2, 2, 256, 256, false, false)                 \
  X(d128, 128, 128, 3, 64, 1, 4, 2, kAnyLength, kAnyLength, false, false)     \
  X(d192_128, 192, 128, 3, 64, 1, 3, 0, kAnyLength, kAnyLength, false, false) \
  X(d192, 192, 192, 2, 80, 1, 2, 3, kAnyLength, kAnyLength, false, false)     \
  X(d256, 256, 256, 2, 64, 1, 2, 2, kAnyLength, kAnyLength, false, false)     \
  X(d64g, 64, 64, 2, 128, 2, 3, 1, kAnyLength, kAnyLength, true, false)       \
  X(d128g, 128, 128, 3, 64, 1, 4, 2, kAnyLength, kAnyLength, true, false)     \
  X(d256g, 256, 256, 2, 64, 1, 2, 2, kAnyLength, kAnyLength, true, false)     \
  X(d64e, 64, 64, 3, 128, 2, 3, 1, kAnyLength, kAnyLength, false, true)       \
  X(d128e, 128, 128, 3, 96, 1, 4, 2, kAnyLength, kAnyLength, false, true)     \
  X(d256e, 256, 256, 2, 96, 1, 2, 4, kAnyLength, kAnyLength, false, true)

#define FA_SM90_SHAPE(name, ...) {#name, __VA_ARGS__},
constexpr ForwardShape kForwardShapes[] = {FA_SM90_FORWARD_TABLE(FA_SM90_SHAPE)};
#undef FA_SM90_SHAPE
constexpr int kNumForwardShapes = sizeof(kForwardShapes) / sizeof(kForwardShapes[0]);

}  // namespace fa::cuda::sm90
