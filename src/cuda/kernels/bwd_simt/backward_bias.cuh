// SPDX-License-Identifier: Apache-2.0
// The gradient of the bias: a CTA owns a tile of dbias and sums dS over every (batch, head, row) that shares the tile, in a fixed order and
// without workspace. S and dP are computed a second time, only for callers that ask for dbias.
#pragma once

#include "cuda/kernels/bwd_simt/backward_scores.cuh"

namespace fa::cuda::simt {

using BiasTiling = Tiling<8, 4, 64>;

class BackwardBias {
  using T = BiasTiling;

 public:
  using Storage = BackwardStorage<T>;

  __device__ __forceinline__ BackwardBias(const BackwardParams &params, Storage &shared)
      : g_(params.problem), p_(params.problem.forward), scores_(params, shared) {}

  __device__ __forceinline__ void run() {
    find_tile();
    clear(sum_);
    scores_.init(/*own_is_q=*/true, /*with_dp=*/true);
    mainloop();
    if (g_.dbias_sum_rows) {
      store_column_sums();
    } else {
      store();
    }
  }

  static __host__ __device__ int64_t row_tiles(int64_t rows) { return (rows + T::kOwnRows - 1) / T::kOwnRows; }
  static __host__ __device__ int64_t column_tiles(int64_t columns) { return (columns + T::kOtherRows - 1) / T::kOtherRows; }

 private:
  __device__ __forceinline__ void find_tile() {
    const int64_t columns = column_tiles(g_.dbias_cols), rows = g_.dbias_sum_rows ? 1 : row_tiles(g_.dbias_rows);
    key0_ = static_cast<int>(blockIdx.x % columns) * T::kOtherRows;
    row_tile_ = static_cast<int>(blockIdx.x / columns % rows);
    const int64_t slice = blockIdx.x / columns / rows;
    const int heads = g_.dbias_sum_heads ? 1 : static_cast<int>(p_.heads_q);
    head_ = static_cast<int>(slice % heads);
    batch_ = static_cast<int>(slice / heads);
    heads_ = g_.dbias_sum_heads ? static_cast<int>(p_.heads_q) : 1;
    row_tiles_ = g_.dbias_sum_rows ? scores_.a.query_blocks : 1;
    end_ = (g_.dbias_sum_batch ? p_.batch : 1) * heads_ * row_tiles_;
  }

  // What the tile of dbias sums over: (batch, head, tile of rows), the last one fastest.
  __device__ __forceinline__ BackwardTile tile(int64_t n) const {
    const int row_tile = row_tile_ + static_cast<int>(n % row_tiles_), head = head_ + static_cast<int>(n / row_tiles_ % heads_);
    return {batch_ + static_cast<int>(n / row_tiles_ / heads_), head, row_tile * T::kOwnRows, key0_};
  }

  // The first from n on that has pairs in the band and in masks given as data. Sets its batch entry.
  __device__ __forceinline__ int64_t next_tile(int64_t n) {
    for (; n < end_; ++n) {
      const BackwardTile t = tile(n);
      scores_.set_batch(t.b);
      const Range keys =
          visible_keys(p_.band, scores_.seqlen_q, scores_.seqlen_k, Range{t.own0, min(t.own0 + T::kOwnRows, scores_.seqlen_q)});
      if (key0_ < keys.end && key0_ + T::kOtherRows > keys.begin && scores_.shows(t)) break;
    }
    return n;
  }

  __device__ __forceinline__ void mainloop() {
    int64_t n = next_tile(0);
    while (n < end_) {
      const BackwardTile t = tile(n);
      scores_.find_operands(t);
      __syncthreads();  // all threads have read the last stage of the previous tile
      for (int slice = 0; slice < scores_.slices; ++slice) {
        scores_.load_operands(t, slice, 0);
        cp_async_commit();
        scores_.compute_slice(slice, scores_.pipeline.wait());
      }
      scores_.compute_operand(t, /*masked=*/true, /*want_p=*/false, 0);
#pragma unroll
      for (int i = 0; i < T::kOwn; ++i)
#pragma unroll
        for (int j = 0; j < T::kOther; ++j) sum_[i][j] += scores_.s[i][j];
      n = next_tile(n + 1);
    }
  }

  __device__ __forceinline__ void put(int64_t row, int64_t column, float x) const {
    const ScoreTensor &t = g_.dbias;
    if (row >= g_.dbias_rows || column >= g_.dbias_cols) return;
    const int64_t at = batch_ * t.batch_stride + head_ * t.head_stride + row * t.row_stride + column * t.col_stride;
    store_4(static_cast<char *>(t.data) + at * dtype_bytes(t.dtype), t.dtype, 0, 1, false, {x, 0, 0, 0});
  }

  __device__ __forceinline__ void store() const {
#pragma unroll
    for (int i = 0; i < T::kOwn; ++i)
#pragma unroll
      for (int j = 0; j < T::kOther; ++j)
        put(int64_t{row_tile_} * T::kOwnRows + scores_.at.own + i, key0_ + scores_.at.other + 16 * j, sum_[i][j]);
  }

  __device__ __forceinline__ void store_column_sums() const {
    float *sums = scores_.pipeline.empty_stage();  // (kWarps * 2, kOtherRows)
    __syncthreads();
#pragma unroll
    for (int j = 0; j < T::kOther; ++j) {
      float x = 0;
#pragma unroll
      for (int i = 0; i < T::kOwn; ++i) x += sum_[i][j];
      sums[(scores_.at.own / T::kOwn) * T::kOtherRows + scores_.at.other + 16 * j] = x;
    }
    __syncthreads();
    for (int column = threadIdx.x; column < T::kOtherRows; column += kThreads) {
      float x = 0;
      for (int n = 0; n < kWarps * 2; ++n) x += sums[n * T::kOtherRows + column];
      put(0, key0_ + column, x);
    }
  }

  const BackwardProblem &g_;
  const Problem &p_;
  BackwardScores<T> scores_;
  int key0_, row_tile_, head_, batch_;  // of the tile of dbias; where it sums, the first
  int heads_, row_tiles_;
  int64_t end_;
  float sum_[T::kOwn][T::kOther];
};

}  // namespace fa::cuda::simt
