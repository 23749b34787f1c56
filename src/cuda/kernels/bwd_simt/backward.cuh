// SPDX-License-Identifier: Apache-2.0
// Exact attention backward with fp32 multiply-adds on CUDA cores.
//
// Every CTA owns rows of one gradient; its main loop goes over the rows of the other side that meet them. Each gradient is one sum in one
// fixed order: nothing is added through memory, and every run gives the same bits.
//
//   gradient  own rows           other rows                 tile
//   dq        queries            keys                       S = Q K^T, dP = dO V^T, dq += dS K
//   dk        keys               queries, head after head   S = K Q^T, dP = V dO^T, dk += dS^T Q
//   dv        keys               queries, head after head   S = K Q^T,              dv += P^T dO
//
// These are eight matrix products where a kernel with a shared sum for dq has five. It needs no workspace for that sum, and one kernel
// computes all three gradients. Shared memory: BackwardStorage (backward_scores.cuh).
#pragma once

#include "cuda/kernels/bwd_simt/backward_scores.cuh"

namespace fa::cuda::simt {

template <class T>
class Backward {
 public:
  __device__ __forceinline__ Backward(const BackwardParams &params, BackwardStorage<T> &shared)
      : a_(params), g_(params.problem), p_(params.problem.forward), scores_(params, shared) {}

  __device__ __forceinline__ void run() {
    find_rows();
    clear(acc_);
    find_tiles();
    mainloop();
    epilogue();
  }

 private:
  // Row blocks slowest; with a causal mask those with the most to do first.
  __device__ __forceinline__ void find_rows() {
    int64_t index = blockIdx.x;
    gradient_ = Gradient::dq;
    if (index >= a_.blocks_dq) {
      index -= a_.blocks_dq;
      gradient_ = index < a_.blocks_dk ? Gradient::dk : Gradient::dv;
      if (gradient_ == Gradient::dv) index -= a_.blocks_dk;
    }
    const bool queries = gradient_ == Gradient::dq;
    const int heads = static_cast<int>(queries ? p_.heads_q : p_.heads_k);
    const int64_t all_heads = p_.batch * heads;
    const int head = static_cast<int>(index % all_heads);
    block_ = static_cast<int>(index / all_heads);
    if (queries && p_.band.right < Band::kUnlimited) block_ = a_.query_blocks - 1 - block_;
    b_ = head / heads;
    head_ = head % heads;
    own0_ = block_ * T::kOwnRows;
    scores_.init(queries, gradient_ != Gradient::dv);
    scores_.with_derivative = gradient_ != Gradient::dv && (ScoreText::kScores || has_transform(p_));
    scores_.set_batch(b_);
  }

  __device__ __forceinline__ int seqlen(bool queries) const { return queries ? scores_.seqlen_q : scores_.seqlen_k; }

  // The tiles of other rows that meet the CTA's own ones; for keys, once for every query head of the group.
  __device__ __forceinline__ void find_tiles() {
    const bool queries = scores_.own_queries;
    const Range own{own0_, min(own0_ + T::kOwnRows, seqlen(queries))};
    const Range other = queries ? visible_keys(p_.band, scores_.seqlen_q, scores_.seqlen_k, own)
                                : visible_queries(p_.band, scores_.seqlen_q, scores_.seqlen_k, own);
    first_tile_ = static_cast<int>(other.begin) / T::kOtherRows;
    tiles_ = other.empty() ? 0 : (static_cast<int>(other.end) + T::kOtherRows - 1) / T::kOtherRows - first_tile_;
    end_ = tiles_ * (queries ? 1 : static_cast<int>(p_.group));
  }

  __device__ __forceinline__ BackwardTile tile(int n) const {
    const int head = scores_.own_queries ? head_ : head_ * static_cast<int>(p_.group) + n / tiles_;
    return {b_, head, own0_, (first_tile_ + n % tiles_) * T::kOtherRows};
  }

  // The first tile from n on in which masks given as data leave anything visible.
  __device__ __forceinline__ int next_tile(int n) const {
    while (n < end_ && !scores_.shows(tile(n))) ++n;
    return n;
  }

  // Loads a slice: those of S and dP first, then those of the right operand of the gradient.
  __device__ __forceinline__ void load(const BackwardTile &t, int slice, int buffer) const {
    if (slice < scores_.slices) {
      scores_.load_operands(t, slice, buffer);
    } else {
      load_slice<T::kSliceRows, T::kColumns, T::kColumns>(scores_.pipeline.empty_stage(),
                                                          scores_.rows(!scores_.own_queries, gradient_ == Gradient::dv),
                                                          t.other0 + (slice - scores_.slices) * T::kSliceRows, 0);
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void mainloop() {
    int slice = 0, next = next_tile(0), next_slice = 0, buffer = 1;
    BackwardTile now{b_, 0, own0_, 0}, coming = now;
    bool started = false;
    TileMask mask = TileMask::empty;
#pragma unroll 1
    while (true) {
      const float *stage = scores_.pipeline.wait();
      if (next < end_) {
        if (next_slice == 0) {
          coming = tile(next);
          scores_.find_operands(coming);
        }
        load(coming, next_slice, next_slice == 0 ? buffer ^ 1 : buffer);
      }
      if (started) {
        if (slice == 0) mask = scores_.mask_of(now);
        if (mask != TileMask::empty) compute(stage, now, slice, mask == TileMask::partial, buffer);
      }
      if (next >= end_) break;
      if (next_slice == 0) buffer ^= 1;
      now = coming;
      started = true;
      slice = next_slice;
      if (++next_slice == scores_.slices + T::kSlices) {
        next = next_tile(next + 1);
        next_slice = 0;
      }
    }
  }

  __device__ __forceinline__ void compute(const float *stage, const BackwardTile &t, int slice, bool masked, int buffer) {
    if (slice < scores_.slices) {
      scores_.compute_slice(slice, stage);
      if (slice == scores_.slices - 1) scores_.compute_operand(t, masked, gradient_ == Gradient::dv, buffer);
    } else {
      store_p<T>(scores_.shared_p, scores_.s, slice - scores_.slices, scores_.at);
      if (masked) {
        fma_rs<T, true>(acc_, scores_.shared_p, stage, scores_.at);
      } else {
        fma_rs<T, false>(acc_, scores_.shared_p, stage, scores_.at);
      }
    }
  }

  // Every row of the sequence's slot: the gradient, or zero where the row is not used. The last CTA of a sequence also owns the rows beyond the grid.
  __device__ __forceinline__ void epilogue() const {
    const bool queries = scores_.own_queries;
    const Operand &t = gradient_ == Gradient::dq ? g_.dq : gradient_ == Gradient::dk ? g_.dk : g_.dv;
    const bool vectors = gradient_ == Gradient::dq ? a_.vector_dq : gradient_ == Gradient::dk ? a_.vector_dk : a_.vector_dv;
    const int columns = static_cast<int>(gradient_ == Gradient::dv ? p_.head_dim_v : p_.head_dim);
    const float scale = gradient_ == Gradient::dv ? p_.dropout.keep_scale : p_.softmax_scale;
    const Sequence sequence = sequence_of(queries ? p_.q_lengths : p_.k_lengths, b_);
    const int seq_slot = static_cast<int>(sequence.slot), used = static_cast<int>(sequence.len);
    char *base = base_of(t, b_, sequence.start, head_);
    const int64_t stride = t.seq_stride * dtype_bytes(t.dtype);
#pragma unroll
    for (int i = 0; i < T::kOwn; ++i) {
      const int row = own0_ + scores_.at.own + i;
      if (row >= used) continue;
      store_row<T>(base + row * stride, t.dtype, columns, vectors, acc_[i], scale, scores_.at);
    }
    const int last_block = (queries ? a_.query_blocks : a_.key_blocks) - 1;
    const int end = block_ == last_block ? seq_slot : min(own0_ + T::kOwnRows, seq_slot);
    for (int row = max(own0_, used) + scores_.at.warp; row < end; row += kWarps)
      zero_row(base + row * stride, t.dtype, columns);
  }

  const BackwardParams &a_;
  const BackwardProblem &g_;
  const Problem &p_;
  BackwardScores<T> scores_;
  Gradient gradient_;
  int b_, head_;  // of q or k, as the own rows are
  int block_, own0_;
  int first_tile_, tiles_, end_;
  float acc_[T::kOwn][T::kAcc];
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1) backward(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(16) float simt_shared[];
  Backward<T>(params, *reinterpret_cast<BackwardStorage<T> *>(simt_shared)).run();
}

}  // namespace fa::cuda::simt
