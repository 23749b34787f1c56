// SPDX-License-Identifier: Apache-2.0
// The parts of the backward pass that go row by row, whatever kernels compute dq, dk and dv: its statistics, and the gradient of the sink.
#pragma once

#include "core/problem.h"
#include "cuda/common/launch.h"

namespace fa::cuda {

constexpr float kLseUnit = 1.4426950408889634f;  // log2(e), for kernels whose weights are 2^(logit - lse)

// What every family's backward parameters begin with. Arrays are workspace, each for (batch, heads_q, row_chunks, ...), without gaps:
// every sequence is padded to row_chunks * chunk_rows rows. Any chunk_rows will do, as long as chunk_rows * head_dim_bucket is a multiple
// of 4; tensors may have any strides and alignment.
//
// turn: zeroed, with one number more behind those of the chunks. Without zero_dq_sum a number is not 0 once its share of the chunk's dq_sum
// holds anything.
struct BackwardRows {
  BackwardProblem problem;
  int32_t row_chunks;  // chunks of queries of the longest sequence
  int32_t chunk_rows;
  int32_t chunk_turns;      // numbers in turn a chunk
  bool zero_dq_sum;         // the row kernel zeroes dq_sum
  int8_t p_exponent;        // the kernels that read row_lse and row_delta hold P times 2^p_exponent (common/scores.h), or 0
  int32_t head_dim_bucket;  // columns of dq_sum
  float lse_unit;           // what row_lse is multiplied by: 1, or log2(e)
  float *row_lse;    // (chunk_rows): lse * lse_unit - p_exponent; +inf for rows without keys and past the end: their P is 0
  float *row_delta;  // (chunk_rows): (sum of dout * out over the columns - dlse) / 2^p_exponent
  float *dq_sum;     // (chunk_rows * head_dim_bucket); null without
  int32_t *turn;     // (chunk_turns)
};

// Before the kernels of the pass: row_lse, row_delta, zero in turn and, if wanted, in dq_sum.
Launch backward_rows_launch(const BackwardRows &params);
// After it: dsink, from row_lse and row_delta.
Launch backward_sink_launch(const BackwardRows &params);

}  // namespace fa::cuda
