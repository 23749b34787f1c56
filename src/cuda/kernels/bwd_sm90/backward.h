// SPDX-License-Identifier: Apache-2.0
// The backward kernels for sm_90a, as plan and launcher see them.
#pragma once

#include <cuda.h>

#include "core/problem.h"
#include "cuda/common/l2_head_order.h"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"
#include "cuda/kernels/bwd_sm90/backward_table.h"

namespace fa::cuda::sm90 {

// A problem and how it is cut. The only parameter of every kernel of the pass.
struct BackwardParams : BackwardRows {
  // Boxes of 64 columns x a chunk of rows (q, dout) or the keys of a block of threads (k, v) over (head_dim, seqlen, heads, batch).
  CUtensorMap q_map, k_map, v_map, dout_map;
  CUtensorMap lse_map, delta_map;    // row_lse and row_delta as (chunks, chunk_rows), boxes of one chunk
  L2HeadOrder order;                 // blocks of keys of key heads: with a causal mask the longest walks come first
  Diagonal<int32_t>::Limits limits;  // of the band
  int32_t blocks;                    // of keys, of all heads
  int32_t *taken;                    // how many of them were taken beyond the first of every block of threads; behind turn
  bool ordered;                      // blocks of keys add to dq_sum in ascending order
  bool vector_dk, vector_dv;         // 16-byte stores are legal
  // For kernels that take softcap: e^2x of its tanh(x) is two to the power of a raw product times cap_exponent (0 without softcap), and
  // logit_factor makes a logit in base 2 of tanh, or of the raw product.
  float cap_exponent, logit_factor;
};

constexpr int kDqThreads = 256;

// The kernels' addresses, null if this build leaves them out. `shape` indexes kBackwardShapes.
struct BackwardKernels {
  const void *main;  // dk, dv and the sum for dq
  const void *dq;    // from the sum to the tensor, a block of kDqThreads a chunk
};
BackwardKernels backward_kernels(int shape, Dtype dtype);

}  // namespace fa::cuda::sm90
