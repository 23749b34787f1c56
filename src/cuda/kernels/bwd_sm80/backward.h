// SPDX-License-Identifier: Apache-2.0
// The backward kernels for sm_80 and newer, as plan and launcher see them.
#pragma once

#include "core/problem.h"
#include "cuda/common/divisor.h"
#include "cuda/common/l2_head_order.h"
#include "cuda/common/scores.h"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"
#include "cuda/kernels/bwd_sm80/backward_table.h"

namespace fa::cuda::sm80 {

// A problem and how it is cut. The only parameter of every kernel of the pass. `turn` has kTurnsPerChunk entries a chunk: the number
// of blocks of keys whose n-th warp has added to the chunk's dq.
struct BackwardParams : BackwardRows {
  L2HeadOrder order;                               // blocks of keys of the heads of k
  bool vector_q, vector_k, vector_v, vector_dout;  // 16-byte loads are legal
  bool deterministic;                              // blocks of keys add to dq in order, by `turn`
  Divisor mask_size_q, mask_size_k;                // of block_mask
  RawUnit raw;
  // Read by kernels with dropout: 1 / (1 - p) / 2^p_exponent, as row_lse makes their P 2^p_exponent times as large (common/scores.h).
  //   dv = keep_scale * sum of kept P * dout        dS = P * (keep_scale * dP - row_delta), dP = 0 where dropped
  // dS is the usual one, not scaled: it may be as large as fp16 holds.
  float keep_scale;
};

// What runs a shape of kBackwardShapes, in this order. The problem fields of params must be set.
struct BackwardLaunches {
  Launch main;  // dk, dv and the sum for dq
  Launch dq;    // from the sum to the tensor
  Launch bias;  // dbias, from q, k, v, dout, row_lse and row_delta alone; only in shapes with general scores
};
BackwardLaunches backward_launches(int shape, Dtype dtype, const BackwardParams &params);

}  // namespace fa::cuda::sm80
