// SPDX-License-Identifier: Apache-2.0
// The row-wise kernels of the backward pass, whichever kernels compute dq, dk and dv: the statistics of every query (lse and
// delta), and the gradient of the sink.
#pragma once

#include <algorithm>

#include "core/problem.h"
#include "cuda/common/launch.h"

namespace fa::cuda {

// The parameters of every backward kernel begin with these. Queries are divided into Q tiles of q_tile_rows rows, and
// every sequence is padded to q_tiles of them. Arrays are workspace, contiguous, of shape (batch, heads_q, q_tiles, ...)
// with the dimensions below. q_tile_rows is arbitrary, but q_tile_rows * head_dim_bucket must be a multiple of 4. Tensors may have
// any strides and alignment.
//
// dq_semaphore: order counters, zeroed, with one further number behind those of the Q tiles. Without zero_dq_sum, a counter that stays 0
// says that its partial of dq_sum was never written.
struct BackwardRows {
  BackwardProblem problem;
  int32_t q_tiles;  // Q tiles of the longest sequence
  int32_t q_tile_rows;
  int32_t dq_semaphores;  // counters in `dq_semaphore` per Q tile
  bool zero_dq_sum;       // backward_rows zeroes dq_sum
  int8_t p_exponent;  // the kernels that read row_lse and row_delta scale P by 2^p_exponent (common/scores.h); 0: they do not
  int16_t more_counters;    // behind the further number, zeroed, too
  int32_t head_dim_bucket;  // columns of dq_sum
  float lse_unit;           // multiplies lse: 1, or log2(e)
  float *row_lse;  // (q_tile_rows): lse * lse_unit - p_exponent; +inf (so that P is 0) for rows without keys and past the end
  // (q_tile_rows): (sum over columns of dout * out - dlse) / 2^p_exponent; rows without keys: 0, or NaN if dout is not finite
  float *row_delta;
  float *dq_sum;          // (q_tile_rows * head_dim_bucket): fp32 sum for dq; null if dq is not wanted
  int32_t *dq_semaphore;  // (dq_semaphores)
  // Kernels without a NaN-safe path multiply hidden pairs by P = 0. They set *nonfinite where that may have brought NaN into a result. Then a second
  // pass computes everything again, by kernels with such a path: its launches have the flag as `only_if`, and end at once where it is 0.
  int32_t *nonfinite;      // zeroed by backward_rows; null: nobody looks for such values
  const int32_t *only_if;  // null: not a second pass
};

FA_HD int q_tiles_of_all_heads(const BackwardRows &params) {
  return static_cast<int>(params.problem.forward.batch * params.problem.forward.heads_q) * params.q_tiles;
}
// CTAs of the row kernel and the dq kernel: one for every Q tile. A second pass, which mostly ends at once, has no more than run at the same time.
inline int64_t ctas_for_q_tiles(const BackwardRows &params) {
  constexpr int kMostOfSecondPass = 256;
  const int tiles = q_tiles_of_all_heads(params);
  return params.only_if == nullptr ? tiles : std::min(tiles, kMostOfSecondPass);
}

// Runs before the backward kernel: row_lse, row_delta, zeros in `dq_semaphore` and, with zero_dq_sum, in dq_sum.
Launch backward_rows_launch(const BackwardRows &params);
// Runs after backward_rows: dsink from row_lse and row_delta.
Launch backward_sink_launch(const BackwardRows &params);
// Behind kernels that skip left padding: zeros in its rows of dk and dv.
Launch backward_padding_launch(const BackwardRows &params);

}  // namespace fa::cuda
