// SPDX-License-Identifier: Apache-2.0
// The last kernel of a backward pass that sums dq in the workspace: dq = softmax_scale * dq_sum.
#pragma once

#include "cuda/common/rows.cuh"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"
#include "cuda/kernels/bwd_pre_post/dq_sum_tile.cuh"
#include "cuda/kernels/bwd_pre_post/second_pass.cuh"

namespace fa::cuda {

// Converts dq_sum of Q tile number `index` to dq, from the layout of accumulators to rows of the tensor.
//
// dq_sum of a Q tile is a sequence of 16 x 8 tiles (dq_sum_tile.cuh), [warp][kRowTiles][kColumnTiles], as mma and wgmma accumulators
// hold them. Warps are numbered along the rows first. kTransposed: the tiles are of dq^T, 16 columns by 8 rows,
// [16 columns][8 rows]. Rows of the sequence's slot that are not used become zero.
template <typename Element, int kRows, int kD, int kRowTiles, int kColumnTiles, int kThreads, bool kTransposed>
__device__ __forceinline__ void convert_q_tile(const BackwardRows &a, int index) {
  constexpr int kRowParts = kRows / 16 / kRowTiles, kTiles = kRows * kD / 128;
  constexpr int kStep = kThreads / 8;                        // 16 x 8 tiles per pass of the CTA, four per warp
  constexpr int kBatch = kTiles % (2 * kStep) == 0 ? 2 : 1;  // passes whose loads a warp has in flight
  static_assert(kTiles % 4 == 0 && (!kTransposed || (kD % 64 == 0 && kColumnTiles == kRows / 8)));
  const Problem &p = a.problem.forward;
  const Operand &t = a.problem.dq;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, quad = lane % 4;
  const float *sum = a.dq_sum + int64_t{index} * (kRows * kD);
  const bool has_second = kTransposed && a.dq_semaphores > 2;  // two sums for a Q tile, with two counters each
  const int32_t *counters = a.dq_semaphore + int64_t{index} * a.dq_semaphores;
  const QTilePlace place = place_of_q_tile(a, index);
  if (place.head < 0) return;
  const int q_tile = place.q_tile, seqlen = place.len, seq_slot = place.seq_slot, columns = static_cast<int>(p.head_dim);
  const bool vectors = has_16_byte_rows(t, columns);
  Element *base =
      static_cast<Element *>(t.data) + place.batch * t.batch_stride + place.start * t.seq_stride + place.head * t.head_stride;
#pragma unroll
  for (int n0 = 0; n0 < kTiles; n0 += kStep * kBatch) {
    float4 x[kBatch][4];
    bool written[kBatch];
#pragma unroll
    for (int m = 0; m < kBatch; ++m) {
      const int first = n0 + m * kStep + thread / 32 * 4;
      if (kTiles % kStep != 0 && first >= kTiles) continue;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        // Transposed, a warp takes 64 columns of the same eight rows.
        const int tile =
            kTransposed ? (first / (4 * kColumnTiles) * 4 + n) * kColumnTiles + first / 4 % kColumnTiles : first + n;
        x[m][n] = load_dq_sum_tile(sum + tile * 128, lane, a.dq_sum_by_lane);
        if (has_second) {
          // Something is in the second sum of every Q tile, but not in the first one.
          const float4 y = load_dq_sum_tile(sum + int64_t{q_tiles_of_all_heads(a)} * (kRows * kD) + tile * 128, lane, true);
          const bool has_first = counters[first * 2 / kTiles] != 0;
          x[m][n] = {(has_first ? x[m][n].x : 0.f) + y.x, (has_first ? x[m][n].y : 0.f) + y.y,
                     (has_first ? x[m][n].z : 0.f) + y.z, (has_first ? x[m][n].w : 0.f) + y.w};
        }
      }
      // A partial that no work tile adds to was never written. Its order counter is then 0. A partial consists of whole warps.
      written[m] = has_second || a.zero_dq_sum || counters[first * a.dq_semaphores / kTiles] != 0;
    }
#pragma unroll
    for (int m = 0; m < kBatch; ++m) {
      const int first = n0 + m * kStep + thread / 32 * 4, tile = first + quad;
      if (kTiles % kStep != 0 && first >= kTiles) continue;
      const int warp = tile / (kRowTiles * kColumnTiles), i = tile / kColumnTiles % kRowTiles, j = tile % kColumnTiles;
      // words[r]: four vectors of eight columns, a pair of columns of each; those of r = 1 are eight rows, or 32 columns, further.
      int row = q_tile * kRows + (warp % kRowParts * kRowTiles + i) * 16 + lane / 4;
      int column = (warp / kRowParts * kColumnTiles + j) * 8;
      if (kTransposed) {
        row = q_tile * kRows + first / 4 % kColumnTiles * 8 + lane / 4;
        column = first / (4 * kColumnTiles) * 64 + quad * 8;
      }
      uint32_t words[2][4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint32_t upper = pack2<Element>(x[m][n].x * p.softmax_scale, x[m][n].y * p.softmax_scale),
                       lower = pack2<Element>(x[m][n].z * p.softmax_scale, x[m][n].w * p.softmax_scale);
        if constexpr (kTransposed) {
          words[n / 2][n % 2 * 2] = movmatrix_transpose(upper);
          words[n / 2][n % 2 * 2 + 1] = movmatrix_transpose(lower);
        } else {
          words[0][n] = upper;
          words[1][n] = lower;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        transpose_quad(words[r], quad);
        const int this_row = kTransposed ? row : row + 8 * r, this_column = kTransposed ? column + 32 * r : column;
        if (this_row >= seq_slot) continue;
        const uint32_t keep = written[m] && this_row < seqlen ? ~0u : 0u;
        store_elements<Element>(base + this_row * t.seq_stride + this_column,
                                {words[r][0] & keep, words[r][1] & keep, words[r][2] & keep, words[r][3] & keep},
                                columns - this_column, vectors);
      }
    }
  }
}

// CTAs take the last Q tiles first, because their sums may still be in the L2 cache.
template <typename Element, int kRows, int kD, int kRowTiles, int kColumnTiles, int kThreads, bool kTransposed = false>
__global__ void __launch_bounds__(kThreads) backward_dq(const __grid_constant__ BackwardRows a) {
  pdl_launch_dependents();
  if (!is_pass_needed(a)) return;
  for_each_q_tile(
      a, [&](int index) { convert_q_tile<Element, kRows, kD, kRowTiles, kColumnTiles, kThreads, kTransposed>(a, index); });
}

}  // namespace fa::cuda
