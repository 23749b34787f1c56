// SPDX-License-Identifier: Apache-2.0
// Exact attention backward with fp32 multiply-adds on CUDA cores.
//
// Every block of threads owns rows of one gradient and walks over the rows of the other side that meet them, so that each gradient is one
// sum in one fixed order: nothing is added through memory, and every run gives the same bits.
//
//   gradient  own rows           other rows                 tile
//   dq        queries            keys                       S = Q K^T, dP = dO V^T, dq += dS K
//   dk        keys               queries, head after head   S = K Q^T, dP = V dO^T, dk += dS^T Q
//   dv        keys               queries, head after head   S = K Q^T,              dv += P^T dO
//
//   shared memory:  two stages of slices | weights of one slice, by warp | lse and delta of two tiles' queries
//
// That is eight products where a walk with a shared sum for dq has five; it needs no workspace for that sum and one kernel for all three.
#pragma once

#include "cuda/kernels/bwd_simt/backward_scores.cuh"

namespace fa::cuda::simt {

template <class T>
class Backward : BackwardScores<T> {
  using Base = BackwardScores<T>;
  using Base::a_, Base::at_, Base::g_, Base::own_queries_, Base::p_, Base::products_, Base::ring_, Base::s_, Base::seqlen_k_,
      Base::seqlen_q_, Base::weights_;
  using typename Base::Tile;

 public:
  using Base::kSharedBytes;

  __device__ __forceinline__ Backward(const BackwardParams &params, float *shared) : Base(params, shared) {}

  __device__ __forceinline__ void run() {
    find_block();
    clear(acc_);
    find_tiles();
    walk();
    store();
  }

 private:
  // Blocks of rows slowest, and with a causal mask those with the most to do first.
  __device__ __forceinline__ void find_block() {
    int64_t index = blockIdx.x;
    what_ = Gradient::dq;
    if (index >= a_.blocks_dq) {
      index -= a_.blocks_dq;
      what_ = index < a_.blocks_dk ? Gradient::dk : Gradient::dv;
      if (what_ == Gradient::dv) index -= a_.blocks_dk;
    }
    const bool queries = what_ == Gradient::dq;
    const int heads = static_cast<int>(queries ? p_.heads_q : p_.heads_k);
    const int64_t all_heads = p_.batch * heads;
    const int head = static_cast<int>(index % all_heads);
    block_ = static_cast<int>(index / all_heads);
    if (queries && p_.band.right < Band::kUnlimited) block_ = a_.query_blocks - 1 - block_;
    b_ = head / heads;
    head_ = head % heads;
    own0_ = block_ * T::kOwnRows;
    this->choose(queries, what_ != Gradient::dv);
    this->through_softcap_ = what_ != Gradient::dv && p_.softcap > 0;
    this->enter_batch(b_);
  }

  // The tiles of other rows that meet the block's own ones; for keys, once for every query head of the group.
  __device__ __forceinline__ void find_tiles() {
    const Range own{own0_, min(own0_ + T::kOwnRows, own_queries_ ? seqlen_q_ : seqlen_k_)};
    const Range other =
        own_queries_ ? visible_keys(p_.band, seqlen_q_, seqlen_k_, own) : visible_queries(p_.band, seqlen_q_, seqlen_k_, own);
    first_tile_ = static_cast<int>(other.begin) / T::kOtherRows;
    tiles_ = other.empty() ? 0 : (static_cast<int>(other.end) + T::kOtherRows - 1) / T::kOtherRows - first_tile_;
    end_ = tiles_ * (own_queries_ ? 1 : static_cast<int>(p_.group));
  }

  __device__ __forceinline__ Tile tile(int n) const {
    const int head = own_queries_ ? head_ : head_ * static_cast<int>(p_.group) + n / tiles_;
    return {b_, head, own0_, (first_tile_ + n % tiles_) * T::kOtherRows};
  }

  // The first tile from n on in which the block mask leaves anything visible.
  __device__ __forceinline__ int next_tile(int n) const {
    if (p_.block_mask.data != nullptr) {
      const int own_end = min(own0_ + T::kOwnRows, own_queries_ ? seqlen_q_ : seqlen_k_);
      for (; n < end_; ++n) {
        const Tile t = tile(n);
        const int other_end = min(t.other0 + T::kOtherRows, own_queries_ ? seqlen_k_ : seqlen_q_);
        if (own_queries_ ? any_visible(p_.block_mask, b_, t.head_q, own0_, own_end, t.other0, other_end)
                         : any_visible(p_.block_mask, b_, t.head_q, t.other0, other_end, own0_, own_end))
          break;
      }
    }
    return n;
  }

  __device__ __forceinline__ void fetch(const Tile &t, int step, int parity) const {
    if (step < products_) {
      this->fetch_products(t, step, parity);
    } else {
      load_slice<T::kSliceRows, T::kColumns, T::kColumns>(ring_.vacant(), this->rows(!own_queries_, what_ == Gradient::dv),
                                                          t.other0 + (step - products_) * T::kSliceRows, 0);
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void walk() {
    int step = 0, next = next_tile(0), next_step = 0, parity = 1;
    Tile now{b_, 0, own0_, 0}, coming = now;
    bool started = false, active = false, masked = false;
#pragma unroll 1
    while (true) {
      const float *stage = ring_.await();
      if (next < end_) {
        if (next_step == 0) {
          coming = tile(next);
          this->find_operands(coming);
        }
        fetch(coming, next_step, next_step == 0 ? parity ^ 1 : parity);
      }
      if (started) {
        if (step == 0) this->look(now, active, masked);
        if (active) multiply(stage, now, step, masked, parity);
      }
      if (next >= end_) break;
      if (next_step == 0) parity ^= 1;
      now = coming;
      started = true;
      step = next_step;
      if (++next_step == products_ + T::kSlices) {
        next = next_tile(next + 1);
        next_step = 0;
      }
    }
  }

  __device__ __forceinline__ void multiply(const float *stage, const Tile &t, int step, bool masked, int parity) {
    if (step < products_) {
      this->multiply_products(step, stage);
      if (step == products_ - 1) this->weights(t, masked, what_ == Gradient::dv, parity);
    } else {
      share_weights<T>(weights_, s_, step - products_, at_);
      if (masked) {
        multiply_add_slice<T, true>(acc_, weights_, stage, at_);
      } else {
        multiply_add_slice<T, false>(acc_, weights_, stage, at_);
      }
    }
  }

  // Every row of the slot: the gradient, or zero where the row is not used. The last block also owns what lies beyond the grid.
  __device__ __forceinline__ void store() const {
    const Operand &t = what_ == Gradient::dq ? g_.dq : what_ == Gradient::dk ? g_.dk : g_.dv;
    const bool vectors = what_ == Gradient::dq ? a_.vector_dq : what_ == Gradient::dk ? a_.vector_dk : a_.vector_dv;
    const int columns = static_cast<int>(what_ == Gradient::dv ? p_.head_dim_v : p_.head_dim);
    const float scale = what_ == Gradient::dv ? p_.dropout.keep_scale : p_.softmax_scale;
    const Sequence sequence = sequence_of(own_queries_ ? p_.q_lengths : p_.k_lengths, b_);
    const int slot = static_cast<int>(sequence.slot), used = static_cast<int>(sequence.len);
    char *base = base_of(t, b_, sequence.start, head_);
    const int64_t stride = t.seq_stride * dtype_bytes(t.dtype);
#pragma unroll
    for (int i = 0; i < T::kOwn; ++i) {
      const int row = own0_ + at_.own + i;
      if (row >= used) continue;
#pragma unroll
      for (int c = 0; c < T::kAcc; c += 4) {
        store_4(base + row * stride, t.dtype, at_.column + c * 16, columns, vectors,
                {acc_[i][c] * scale, acc_[i][c + 1] * scale, acc_[i][c + 2] * scale, acc_[i][c + 3] * scale});
      }
    }
    const int last_block = (own_queries_ ? a_.query_blocks : a_.key_blocks) - 1;
    const int end = block_ == last_block ? slot : min(own0_ + T::kOwnRows, slot);
    for (int row = max(own0_, used) + at_.warp; row < end; row += kWarps) zero_row(base + row * stride, t.dtype, columns);
  }

  Gradient what_;
  int b_, head_;  // of q or k, as the own rows are
  int block_, own0_;
  int first_tile_, tiles_, end_;
  float acc_[T::kOwn][T::kAcc];
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1) backward(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(16) float simt_shared[];
  Backward<T>(params, simt_shared).run();
}

}  // namespace fa::cuda::simt
