// SPDX-License-Identifier: Apache-2.0
// The row-wise kernels of the backward pass, whichever kernels compute dq, dk and dv: the statistics of every query (lse and
// delta), and the gradient of the sink.
#pragma once

#include <algorithm>

#include "core/problem.h"
#include "cuda/common/launch.h"

namespace fa::cuda {

// The Q tiles of a sequence in the workspace. Those of query head h are count tiles from begin + h * count on.
struct SequenceQTiles {
  int32_t begin, count;
};
// The place of sequence number `b`, which is q. A padded sequence has the `q_tiles` Q tiles of the longest one. Those of a packed one begin at
// start / rows + b, in Q tiles of a head: there are enough of them for its rows up to the next sequence, whatever the sequences before it are, and
// together the sequences need no more than q_tiles_of_a_head().
FA_HD SequenceQTiles q_tiles_of_sequence(const Problem &p, const Sequence &q, int b, int rows, int q_tiles) {
  const int heads = static_cast<int>(p.heads_q), start = static_cast<int>(q.start), end = static_cast<int>(q.start + q.slot);
  if (p.q_lengths.cu == nullptr) return {b * q_tiles * heads, q_tiles};
  const int first = start / rows + b;
  return {first * heads, end / rows + b + 1 - first};
}
// Q tiles that a query head has in the workspace, of all sequences.
FA_HD int64_t q_tiles_of_a_head(const Problem &p, int64_t rows, int64_t q_tiles) {
  return p.q_lengths.cu == nullptr ? p.batch * q_tiles : p.q_lengths.total / rows + p.batch;
}

// The parameters of every backward kernel begin with these. Queries are divided into Q tiles of q_tile_rows rows. Arrays are workspace,
// contiguous, of shape (Q tiles of all sequences and heads, ...) with the dimensions below; where the Q tiles of a sequence lie says
// q_tiles_of_sequence(). q_tile_rows is arbitrary, but q_tile_rows * head_dim_bucket must be a multiple of 4. Tensors may have any strides
// and alignment.
//
// dq_semaphore: order counters, zeroed, with one further number behind those of the Q tiles. Without zero_dq_sum, a counter that stays 0
// says that its partial of dq_sum was never written.
struct BackwardRows {
  BackwardProblem problem;
  int32_t q_tiles;  // Q tiles of the longest sequence; not used for packed ones
  int32_t q_tile_rows;
  int32_t dq_semaphores;  // counters in `dq_semaphore` per Q tile: two for a sum of dq; four: dq_sum is two arrays
  bool zero_dq_sum;       // backward_rows zeroes dq_sum
  int8_t p_exponent;  // the kernels that read row_lse and row_delta scale P by 2^p_exponent (common/scores.h); 0: they do not
  int16_t more_counters;    // behind the further number, zeroed, too
  int16_t head_dim_bucket;  // columns of dq_sum
  bool dq_sum_by_lane;      // layout of dq_sum (dq_sum_tile.cuh)
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
  const Problem &p = params.problem.forward;
  return static_cast<int>(q_tiles_of_a_head(p, params.q_tile_rows, params.q_tiles) * p.heads_q);
}
// The first Q tile of query head `head` of sequence `b`. `rows`: q_tile_rows.
FA_HD int first_q_tile_of(const BackwardRows &params, int b, int head, int rows) {
  const Problem &p = params.problem.forward;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // `cu` of a backward problem has no pairs. Main loops for sm_90 have no registers for the question, those for sm_80 have.
  Sequence q;
  if (p.q_lengths.cu != nullptr) {
    q.start = offset_of(p.q_lengths, b);
    q.slot = offset_of(p.q_lengths, b + 1) - q.start;
  }
#else
  const Sequence q = sequence_of(p.q_lengths, b);
#endif
  const SequenceQTiles tiles = q_tiles_of_sequence(p, q, b, rows, params.q_tiles);
  return tiles.begin + head * tiles.count;
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
