// SPDX-License-Identifier: Apache-2.0
// What the host needs of the backward kernels for sm_90a: their parameters and their addresses.
#pragma once

#include <cuda.h>

#include "core/problem.h"
#include "cuda/common/data_mask.h"
#include "cuda/common/l2_head_order.h"
#include "cuda/common/scores.h"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"
#include "cuda/kernels/bwd_sm90/backward_table.h"
#include "cuda/kernels/bwd_sm90/cyclic_order.h"
#include "cuda/kernels/bwd_sm90/split_tail.h"

namespace fa::cuda::sm90 {

// The problem and how it is divided into tiles. Every kernel of the pass has this one parameter.
struct BackwardParams : BackwardRows {
  // Tensor maps over (head_dim, seqlen, heads, batch). A box is 64 columns x the rows of a Q tile (q, dout) or the keys of a
  // CTA (k, v).
  CUtensorMap q_map, k_map, v_map, dout_map;
  CUtensorMap lse_map, delta_map;    // row_lse and row_delta as (Q tiles, q_tile_rows); a box is one Q tile
  L2HeadOrder order;                 // of work tiles: under a causal mask those with the longest main loops come first
  Diagonal<int32_t>::Limits limits;  // of causal masks and windows
  int32_t blocks;                    // number of work tiles
  SplitTail split_tail;
  int32_t *taken;             // counter of work tiles taken beyond the first of each CTA; lies behind turn
  bool ordered;               // deterministic mode: work tiles add to dq_sum in ascending order
  bool vector_dk, vector_dv;  // 16-byte stores are legal
  RawUnit raw;
  // Dropout: 1 / (1 - p) / 2^p_exponent, because row_lse makes P 2^p_exponent times as large (common/scores.h).
  //   dv = keep_scale * sum of kept P * dout        dS = P * (keep_scale * dP - row_delta), dP = 0 where dropped
  float keep_scale;
  DataMask mask;
  // Bias: (keys, queries, heads_q, batch) in boxes of 64 keys by 64 queries. Dimensions in which the bias is broadcast have stride 0.
  CUtensorMap bias_map;
  // Separate gradients: dq has CTAs of its own, the first dq_blocks of the grid, one for a Q tile each.
  L2HeadOrder query_order;
  int32_t dq_blocks;
  CyclicOrder cyclic;          // deterministic mode: the order of additions to dq_sum, where it is in use
  CUtensorMap dk_map, dv_map;  // a box is 64 columns x the 16 keys of a warp
  bool tma_dk, tma_dv;         // TMA stores what it can of dk, or of dv
};

// The kernels' addresses; null if this build leaves them out. `shape` indexes kBackwardShapes.
struct BackwardKernels {
  const void *main;  // computes dk, dv and dq_sum, or dq
  const void *dq;    // converts dq_sum to dq: one CTA of BackwardShape::dq_threads() per Q tile; null where `main` stores dq
};
BackwardKernels backward_kernels(int shape, Dtype dtype);

}  // namespace fa::cuda::sm90
