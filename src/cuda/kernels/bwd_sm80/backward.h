// SPDX-License-Identifier: Apache-2.0
// The backward kernels for sm_80 and newer, as plan and launcher see them.
#pragma once

#include "core/problem.h"
#include "cuda/common/data_mask.h"
#include "cuda/common/divisor.h"
#include "cuda/common/l2_head_order.h"
#include "cuda/common/scores.h"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"
#include "cuda/kernels/bwd_sm80/backward_table.h"

namespace fa::cuda::sm80 {

// The only parameter of every kernel of the pass: a problem, and how it is divided among CTAs. `dq_semaphore` has kDqSemaphoresPerTile counters per query tile.
// Counter n is the number of CTAs whose warp n has added to the tile's dq.
struct BackwardParams : BackwardRows {
  L2HeadOrder order;                               // of key blocks and the heads of k
  bool vector_q, vector_k, vector_v, vector_dout;  // 16-byte loads are legal
  bool deterministic;                              // CTAs add to dq in the order of their keys, by `dq_semaphore`
  Divisor mask_size_q, mask_size_k;                // of block_mask, which kernels without kDataMask read as it is
  RawUnit raw;
  // Read by kernels with dropout: 1 / (1 - p) / 2^p_exponent, because row_lse makes their P 2^p_exponent times as large (common/scores.h).
  //   dv = keep_scale * sum of kept P * dout        dS = P * (keep_scale * dP - row_delta), dP = 0 where dropped
  // dS is the usual one, not scaled: it may be as large as fp16 holds.
  float keep_scale;
  DataMask mask;  // read by kernels with kDataMask, and for dbias
};

// The launches of a shape, in this order. `shape` indexes kBackwardShapes. The problem fields of params must be set.
struct BackwardLaunches {
  Launch main;  // dk, dv and the sum for dq
  Launch dq;    // from the sum to the tensor
  Launch bias;  // dbias, from q, k, v, dout, row_lse and row_delta alone; only in shapes with a bias
};
BackwardLaunches backward_launches(int shape, Dtype dtype, const BackwardParams &params);

}  // namespace fa::cuda::sm80
