// SPDX-License-Identifier: Apache-2.0
// The backward kernels for sm_80 and newer, as plan and launcher see them.
#pragma once

#include "core/problem.h"
#include "cuda/common/launch.h"
#include "cuda/sm80/backward_table.h"

namespace fa::cuda::sm80 {

// A problem and how it is cut. The only parameter of every kernel of the pass.
struct BackwardParams {
  BackwardProblem problem;
  int32_t key_blocks;  // blocks of keys of the longest sequence
  int32_t row_chunks;  // chunks of queries of the longest sequence
  int32_t chunk_rows;
  int32_t head_dim_bucket;                         // columns of dq_sum
  bool vector_q, vector_k, vector_v, vector_dout;  // 16-byte loads are legal
  bool deterministic;                              // blocks of keys add to dq in order

  // Workspace, each for (batch, heads_q, row_chunks, ...):
  float *row_lse;    // (chunk_rows): lse * log2(e); +inf for rows without keys and past the end, so that their P is 0
  float *row_delta;  // (chunk_rows): sum of dout * out over the columns, minus dlse
  float *dq_sum;     // (chunk_rows * head_dim_bucket): dq / softmax_scale in the order of the accumulators; null without dq
  int32_t *turn;     // (): with `deterministic`, the number of blocks of keys that have added to the chunk's dq
};

// What runs a shape of kBackwardShapes, in this order. The problem fields of params must be set.
struct BackwardLaunches {
  Launch main;  // dk, dv and the sum for dq
  Launch dq;    // from the sum to the tensor
  Launch bias;  // dbias, from q, k, v, dout, row_lse and row_delta alone; only in shapes with general scores
};
BackwardLaunches backward_launches(int shape, Dtype dtype, const BackwardParams &params);

// Before all of them: row_lse, row_delta, zero in dq_sum and turn.
Launch backward_rows_launch(const BackwardParams &params);
// dsink, from row_lse and row_delta.
Launch backward_sink_launch(const BackwardParams &params);

}  // namespace fa::cuda::sm80
