// SPDX-License-Identifier: Apache-2.0
// The group of warps that makes S and P. Some of Q stays in its registers, which halves what those products read from shared memory.
#pragma once

#include <math_constants.h>

#include "cuda/common/cluster.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/mla/cta.cuh"

namespace fa::cuda::mla {

template <class C>
class Scores : private Block<C> {
 public:
  using Base = Block<C>;
  using typename Base::Element;

  using Base::Base;

  __device__ __forceinline__ void run() {
    warp_ = uniform(threadIdx.x >> 5) & 3;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      mbarrier_wait(this->work_full(n & 1), n >> 1 & 1);
      plan_ = &this->descriptor(n & 1);
      if (plan_->batch < 0) return;
      if (plan_->rows > 0) walk();
      if (n > 0) mbarrier_wait(this->taken(), (n - 1) & 1);
      if (plan_->rows > 0) close();
      mbarrier_arrive(this->closed());
      mbarrier_arrive(this->work_empty(n & 1));
    }
  }

 private:
  using Base::a_;
  using Base::free;
  using Base::full;
  using Base::lane_;
  using Base::p_;

  __device__ __forceinline__ int place() const { return static_cast<int>(count_ & 1); }
  __device__ __forceinline__ int row_of(int r) const { return Base::row_of(warp_, r); }
  __device__ __forceinline__ int token_of(int row) const { return Base::token_of(*plan_, row); }

  __device__ __forceinline__ void walk() {
    max_[0] = max_[1] = -1e30f;  // finite, so that -inf minus it is -inf
    sum_[0] = sum_[1] = 0.f;
    if (plan_->kv_tile == plan_->kv_tile_end) return;
    meet(0);  // the last piece's Q is read
    fetch_q();
    uint32_t q[C::kHeld * 4][4];
    hold_q(q);
    cp_async_wait<0>();
    fence_proxy_async();
    meet(1);
#pragma unroll 1
    for (int tile = plan_->kv_tile; tile < plan_->kv_tile_end; ++tile, ++count_) {
      const int key0 = tile * C::kKeys;
      const bool masked = key0 < plan_->interior.begin || key0 + C::kKeys > plan_->interior.end;
      mbarrier_wait(full(place()), count_ >> 1 & 1);
      float s[C::kKeys / 2];
      multiply_q(s, q);
      uint32_t notes = 0;
      if (masked) {
        notes = plan_->several_tokens && __any_sync(~0u, has_nonfinite(s)) ? Base::kCare : 0;
        mask(s, key0);
      }
      if (raise_max(s)) notes |= Base::kRaised;
      // P there is read, for this tile was fetched when the one before it was handed back.
      if (lane_ == 0) st_shared_4(this->shared_notes(place()) + warp_ * 4, notes);
      if (masked) {
        leave_weights<true>(s);
      } else {
        leave_weights<false>(s);
      }
    }
  }

  __device__ __forceinline__ const Element *q_at(int row) const {
    return static_cast<const Element *>(p_.q.data) + plan_->batch * p_.q.batch_stride +
           (plan_->q_start + token_of(row)) * p_.q.seq_stride + this->head_of(*plan_, row) * p_.q.head_stride;
  }
  // The first columns of q as a left operand in registers, the others in shared memory; rows and columns that do not exist are zero.
  __device__ __forceinline__ void hold_q(uint32_t (&q)[C::kHeld * 4][4]) const {
    const int quad = opaque(lane_) & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r);
      const Element *from = q_at(min(row, plan_->rows - 1)) + quad * 8;
      const int columns = row < plan_->rows ? static_cast<int>(p_.head_dim) - quad * 8 : 0;
#pragma unroll
      for (int n = 0; n < C::kHeld * 4; n += 2) {
        uint4 x{};
        if (16 * n < columns) x = __ldcg(reinterpret_cast<const uint4 *>(from + 16 * n));
        q[n][r] = x.x;
        q[n][r + 2] = x.y;
        q[n + 1][r] = x.z;
        q[n + 1][r + 2] = x.w;
      }
    }
    if (count_ == 0) mbarrier_arrive(this->asked());
#pragma unroll
    for (int n = 0; n < C::kHeld * 4; n += 2)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t x[4] = {q[n][r], q[n][r + 2], q[n + 1][r], q[n + 1][r + 2]};
        transpose_quad(x, quad);
        q[n][r] = x[0];
        q[n][r + 2] = x[1];
        q[n + 1][r] = x[2];
        q[n + 1][r + 2] = x[3];
      }
  }
  __device__ __forceinline__ void fetch_q() const {
    const int chunk = opaque(lane_) & 7;
#pragma unroll 1
    for (int row = warp_ * 4 + (opaque(lane_) >> 3); row < C::kRows; row += 16) {
      const int first = C::kHeld * 64 + chunk * 8, columns = row < plan_->rows ? static_cast<int>(p_.head_dim) - first : 0;
      const Element *from = q_at(min(row, plan_->rows - 1));
      const uint32_t to = this->shared_q() + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
      for (int slab = 0; slab < C::kSlabs - C::kHeld; ++slab) {
        const bool exists = slab * 64 < columns;
        cp_async_16(to + slab * C::kQSlabBytes, exists ? from + first + slab * 64 : from, exists ? 16 : 0);
      }
    }
    cp_async_commit();
  }
  // Twice a piece.
  __device__ __forceinline__ void meet(uint32_t parity) const {
    mbarrier_arrive(this->met());
    mbarrier_wait(this->met(), parity);
  }

  __device__ __forceinline__ void multiply_q(float (&s)[C::kKeys / 2], uint32_t (&q)[C::kHeld * 4][4]) const {
    uint64_t keys = grouped_operand<C>(this->shared_tile(place())), others = descriptor_k_major(this->shared_q());
    asm volatile("" : "+l"(keys), "+l"(others));
    const auto step = [&](int n) { return advance_descriptor(keys, n / 4 * C::kSlabBytes + n % 4 * 32); };
    fence_operand(s);
    fence_operand(q);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < C::kHeld * 4; ++n) wgmma_rs_k<Element>(s, q[n], step(n), n > 0);
#pragma unroll
    for (int n = C::kHeld * 4; n < C::kSlabs * 4; ++n) {
      const int at = n - C::kHeld * 4;
      Wgmma<Element, C::kKeys>::ss_k_k(s, advance_descriptor(others, at / 4 * C::kQSlabBytes + at % 4 * 32), step(n), n > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(s);
  }

  // Until both groups of values have read that tile, and its weights.
  __device__ __forceinline__ void await_values(uint32_t tile) const {
    mbarrier_wait(free(tile & 1, C::kParts - 1), tile >> 1 & 1);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ float exponent_scale() const { return p_.softmax_scale * kLog2e; }

  // NaN or Inf in a key makes its scores so, in every row.
  static __device__ __forceinline__ bool has_nonfinite(const float (&s)[C::kKeys / 2]) {
    float zero = 0.f;
#pragma unroll
    for (int j = 0; j < C::kKeys / 2; ++j) zero = fmaf(s[j], 0.f, zero);
    return zero != 0.f;
  }

  __device__ __forceinline__ void mask(float (&s)[C::kKeys / 2], int key0) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = token_of(row_of(r)), first = key0 + 2 * (opaque(lane_) & 3);
      const Keys keys = Diagonal<int32_t>(a_.limits, plan_->tokens, plan_->seqlen_k).visible_keys({token, token + 1});
#pragma unroll
      for (int j = 0; j < C::kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (first + 8 * j + e < keys.begin || first + 8 * j + e >= keys.end) s[4 * j + 2 * r + e] = -CUDART_INF_F;
    }
  }

  // Of this thread's scores.
  static __device__ __forceinline__ float highest(const float (&s)[C::kKeys / 2], int r) {
    float top = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
    for (int j = 1; j < C::kKeys / 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    return top;
  }
  // Whether values have to look at factors. A maximum is raised where weights would pass 2^8, which is seldom: out need not be multiplied,
  // and weights do not wait for what other threads hold of their row.
  __device__ __forceinline__ bool raise_max(const float (&s)[C::kKeys / 2]) {
    constexpr float kRoom = 8.f;
    factor_[0] = factor_[1] = 1.f;
    const float c = exponent_scale();
    if (!__any_sync(~0u, highest(s, 0) * c > max_[0] + kRoom || highest(s, 1) * c > max_[1] + kRoom)) return false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = highest(s, r);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      if (!(top * exponent_scale() > max_[r] + kRoom)) continue;
      const float raised = fmaxf(max_[r], top * exponent_scale());
      factor_[r] = exp2_approx(max_[r] - raised);
      max_[r] = raised;
      sum_[r] *= factor_[r];
    }
    return true;
  }

  // P = 2^(S - m), rounded to the operand of the next product, to shared memory, with what out is multiplied by; adds to
  // the sums. What is masked becomes kMaskedWeight. Values multiply the first weights while the others are made.
  template <bool kMasked>
  __device__ __forceinline__ void leave_weights(const float (&s)[C::kKeys / 2]) {
    const float c = exponent_scale();
    const uint32_t line = this->shared_p(place()) + (warp_ * 16 + (lane_ & 15)) * 128;
    leave_factors();
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < C::kKeys / 16; ++n) {
      uint32_t weights[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float e[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float x = s[8 * n + 2 * r + m];
          e[m] = exp2_approx(fmaf(x, c, -max_[r & 1]));
          sum[r & 1] += e[m];
          if (kMasked && x == -CUDART_INF_F) e[m] = kMaskedP;
        }
        weights[r] = pack2<Element>(e[0], e[1]);
      }
      stmatrix_x4(line + (((2 * n + (lane_ >> 4)) ^ (lane_ & 7)) << 4), weights[0], weights[1], weights[2], weights[3]);
      hand_over(n);
    }
    sum_[0] += sum[0];
    sum_[1] += sum[1];
  }
  __device__ __forceinline__ void leave_factors() const {
    if ((lane_ & 3) == 0) {
      st_shared_float(this->shared_factor(place(), row_of(0)), factor_[0]);
      st_shared_float(this->shared_factor(place(), row_of(1)), factor_[1]);
    }
  }
  __device__ __forceinline__ void hand_over(int part) const {
    fence_proxy_async();
    mbarrier_arrive(this->weights(place(), part));
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Ends of pieces
  // ------------------------------------------------------------------------------------------------------------------

  // What the piece's out is multiplied by, and lse; or maxima and sums of a part.
  __device__ __forceinline__ void close() {
    float2 sums[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r] += __shfl_xor_sync(~0u, sum_[r], 1);
      sum_[r] += __shfl_xor_sync(~0u, sum_[r], 2);
      sums[r] = {max_[r], sum_[r]};
    }
    float own[2] = {1.f, 1.f};
    if (plan_->parts > 0) add_parts(sums, own);
    if ((lane_ & 3) != 0) return;
    const bool other_has_lse = C::kPairs && plan_->pair && cluster_cta_rank() == 0;
    if (C::kPairs && plan_->pair) exchange_sums(sums, own);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r);
      const uint32_t closing = this->shared_closing(row);
      if (plan_->tile_continues) {
        if (warp_ * 16 < plan_->rows) this->partial_stats(plan_->slot)[row] = sums[r];
        st_shared_float(closing, own[r]);
      } else if (row < plan_->rows) {
        const auto [factor, lse] = close_row(row, sums[r]);
        const auto to = reinterpret_cast<uint64_t>(this->out_at(*plan_, row));
        st_shared_16(closing, __float_as_uint(own[r]), __float_as_uint(factor), static_cast<uint32_t>(to),
                     static_cast<uint32_t>(to >> 32));
        if (!other_has_lse) this->store_lse(*plan_, row, lse);
      }
    }
  }

  // With the other block of a pair, by the lanes that have a row each. The same sums in both, and the order of the keys.
  __device__ __forceinline__ void exchange_sums(float2 (&sums)[2], float (&own)[2]) const {
    const int rank = cluster_cta_rank(), other = rank ^ 1;
    const uint32_t landed = this->landed_sums();
    if (warp_ * 16 >= plan_->rows) return;
    if (warp_ == 0 && lane_ == 0) mbarrier_arrive_expect_tx(landed, (plan_->rows + 15) / 16 * 16 * sizeof(float2));
#pragma unroll
    for (int r = 0; r < 2; ++r)
      st_async(map_to_cta(this->shared_other_sums(row_of(r)), other), sums[r], map_to_cta(landed, other));
    mbarrier_wait(landed, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t at = this->shared_other_sums(row_of(r));
      const float2 its = ld_shared_float2(at);
      const float top = fmaxf(sums[r].x, its.x), weight = exp2_approx(its.x - top);
      own[r] = exp2_approx(sums[r].x - top);
      st_shared_float(at, weight);
      sums[r] = {top, rank == 0 ? fmaf(its.y, weight, sums[r].y * own[r]) : fmaf(sums[r].y, own[r], its.y * weight)};
    }
  }

  // What a row's out is multiplied by, and its lse, from its maximum and sum. The sink is one more logit in the denominator.
  struct Closing {
    float factor, lse;
  };
  __device__ __forceinline__ Closing close_row(int row, float2 sums) const {
    float factor = 1.f;
    if (p_.sink != nullptr) {
      const float sink = p_.sink[this->head_of(*plan_, row) * p_.sink_stride] * kLog2e, raised = fmaxf(sums.x, sink);
      factor = exp2_approx(sums.x - raised);
      sums = {raised, sums.y * factor + exp2_approx(sink - raised)};
    }
    // The sum is NaN when a visible score is; then out is NaN too.
    if (sums.y == 0.f) return {0.f, -CUDART_INF_F};
    return {__fdividef(factor, sums.y), (sums.x + __log2f(sums.y)) * kLn2};
  }

  static __device__ __forceinline__ int load_acquired(const int32_t *counter) {
    int now;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];\n" : "=r"(now) : "l"(counter) : "memory");
    return now;
  }

  // Waits for the parts of the ranges before, and makes factors of their maxima: where those were, in the places of tiles that are done
  // with. Those ranges are of blocks of threads that have started before this one and come to these parts first. Every lane of the four that
  // share a row has every fourth part.
  __device__ __forceinline__ void add_parts(float2 (&sums)[2], float (&own)[2]) {
    const int parts = plan_->parts, quad = opaque(lane_) & 3;
    if (count_ > 0) await_values(count_ - 1);
    if (lane_ == 0) {
      while (load_acquired(a_.counters + plan_->awaited) != parts) __nanosleep(100);
    }
    __syncwarp();
    if (warp_ * 16 >= plan_->rows) return;
      // Eight lanes for the rows of a part.
#pragma unroll 1
    for (int part = opaque(lane_) >> 3; part < parts; part += 4) {
      const int row = warp_ * 16 + (opaque(lane_) & 7) * 2;
      cp_async_16(this->shared_part_sums(part, row), this->partial_stats(this->part_slot(*plan_, part)) + row);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = sums[r].x;
#pragma unroll 1
      for (int part = quad; part < parts; part += 4) top = fmaxf(top, ld_shared_float(this->shared_part_sums(part, row_of(r))));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      own[r] = exp2_approx(sums[r].x - top);
      float sum = 0.f;
#pragma unroll 1
      for (int part = quad; part < parts; part += 4) {
        const uint32_t at = this->shared_part_sums(part, row_of(r));
        const float2 its = ld_shared_float2(at);
        const float weight = exp2_approx(its.x - top);
        sum = fmaf(weight, its.y, sum);
        st_shared_float(at, weight);
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      sums[r] = {top, fmaf(sums[r].y, own[r], sum)};
    }
  }

  const Plan *plan_;
  int warp_;            // of the group
  uint32_t count_ = 0;  // tiles of the block so far
  float max_[2], sum_[2], factor_[2];
};

}  // namespace fa::cuda::mla
