// SPDX-License-Identifier: Apache-2.0
// What becomes of what a warp of the groups that multiply has of its 16 rows: out is the caller's if the piece is a whole item, else a part
// of one in the workspace. Of few parts the block of threads that has the last one keeps it and adds the others; many are summed by a launch
// of their own (decode/sums.cuh).
#pragma once

#include <math_constants.h>

#include "cuda/common/rows.cuh"
#include "cuda/kernels/decode/kv_8bit.cuh"
#include "cuda/kernels/extend/cta.cuh"

namespace fa::cuda::extend {

template <class C>
class Epilogue : protected Cta<C> {
 public:
  using Base = Cta<C>;
  using typename Base::Element;

  using Base::Base;

 protected:
  using Base::a_;
  using Base::lane_;
  using Base::p_;

  // Rows count from the first one of the block.
  __device__ __forceinline__ int first_row() const { return wg_ * kGroupRows + warp_ * 16; }
  __device__ __forceinline__ int row_of(int r) const { return first_row() + (opaque(lane_) >> 2) + 8 * r; }
  __device__ __forceinline__ int token_of(int row) const { return a_.group.quotient(plan_->row0 + row); }
  __device__ __forceinline__ int head_of(int row) const {
    return plan_->head * static_cast<int>(a_.group.value) + a_.group.remainder(plan_->row0 + row);
  }

  // Of bytes: the factor of all keys or values of this head.
  __device__ __forceinline__ float head_descale(const Descale &d) const {
    return decode::head_descale(d, plan_->batch, plan_->head);
  }

  // Every warp for itself.
  __device__ __forceinline__ void epilogue() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum_[r] += __shfl_xor_sync(~0u, sum_[r], 1);
      sum_[r] += __shfl_xor_sync(~0u, sum_[r], 2);
    }
    if constexpr (C::k8BitKv) {
      const float factor = head_descale(a_.v_descale);
#pragma unroll
      for (int j = 0; j < C::kD / 2; ++j) out_[j] *= factor;
    }
    if constexpr (C::kUsesCombineKernel) {
      if (plan_->partial_slot >= 0) {
        store_partials_by_row(plan_->partial_slot);
        return;
      }
    } else {
      if (plan_->partial_slot >= 0) {
        store_partials_by_lane(plan_->partial_slot);
        __syncwarp();  // all lanes have stored theirs
        if (lane_ == 0) count_released(a_.counters + plan_->counter);
        return;
      }
      if (plan_->num_partials > 0) merge(plan_->first_partial, plan_->num_partials);
    }
    store_final();
  }

  // What a row's out is multiplied by, and its lse, from its maximum and sum. The sink is one more logit in the denominator.
  struct FinalRow {
    float factor, lse;
  };
  __device__ __forceinline__ FinalRow finalize(int row, float max, float sum) const {
    float factor = 1.f;
    if (p_.sink != nullptr) {
      const float sink = p_.sink[head_of(row) * p_.sink_stride] * kLog2e, new_max = fmaxf(max, sink);
      factor = exp2_approx(max - new_max);
      sum = sum * factor + exp2_approx(sink - new_max);
      max = new_max;
    }
    // The sum is NaN when a visible score is; then out is NaN too.
    if (sum == 0.f) return {0.f, -CUDART_INF_F};
    return {__fdividef(factor, sum), (max + __log2f(sum)) * kLn2};
  }

  __device__ __forceinline__ void store_final() const {
    const int quad = opaque(lane_) & 3, columns = static_cast<int>(p_.head_dim_v) - quad * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r), real = min(row, plan_->rows - 1), valid = row < plan_->rows ? columns : 0;
      const FinalRow closing = finalize(real, max_[r], sum_[r]);
      Element *dst = out_at(real) + quad * 8;
#pragma unroll
      for (int j = 0; j < C::kD / 8; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x[n] = pack(out_[4 * (j + n) + 2 * r] * closing.factor, out_[4 * (j + n) + 2 * r + 1] * closing.factor);
        transpose_quad(x, quad);
        store_elements(dst + j * 8, x, valid - j * 8, a_.vector_out);
      }
      if (quad == 0 && row < plan_->rows) store_lse(row, closing.lse);
    }
  }

  __device__ __forceinline__ uint32_t pack(float a, float b) const {
    return C::k8BitKv && p_.q.dtype == Dtype::bf16 ? pack2<__nv_bfloat16>(a, b) : pack2<Element>(a, b);
  }
  __device__ __forceinline__ void store_lse(int row, float lse) const {
    if (p_.lse.data == nullptr) return;
    p_.lse.data[plan_->batch * p_.lse.batch_stride + head_of(row) * p_.lse.head_stride +
                (plan_->q_start + token_of(row)) * p_.lse.seq_stride] = lse;
  }
  __device__ __forceinline__ Element *out_at(int row) const {
    return static_cast<Element *>(p_.out.data) + plan_->batch * p_.out.batch_stride +
           (plan_->q_start + token_of(row)) * p_.out.seq_stride + head_of(row) * p_.out.head_stride;
  }

  // Rows of the sequence that are not used: out = 0, lse = -inf.
  __device__ __forceinline__ void store_unused_rows() const {
    for (int row = max(plan_->rows, 0) + wg_ * 4 + warp_; row < plan_->end_row; row += C::kConsumerWarpgroups * 4) {
      if (lane_ == 0) store_lse(row, -CUDART_INF_F);
      auto *dst = reinterpret_cast<unsigned short *>(out_at(row));
      for (int column = lane_; column < p_.head_dim_v; column += 32) dst[column] = 0;
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Items in parts
  // ------------------------------------------------------------------------------------------------------------------

  // For decode/sums.cuh: rows, one after another. This lane has two of each eight columns.
  __device__ __forceinline__ void store_partials_by_row(int slot) const {
    const int64_t row0 = int64_t{slot} * C::kRows;
    const int quad = opaque(lane_) & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      auto *dst = reinterpret_cast<float2 *>(a_.partial_out + (row0 + row_of(r)) * C::kD) + quad;
#pragma unroll
      for (int j = 0; j < C::kD / 8; ++j) dst[j * 4] = {out_[4 * j + 2 * r], out_[4 * j + 2 * r + 1]};
      if (quad == 0) a_.partial_stats[row0 + row_of(r)] = {max_[r], sum_[r]};
    }
  }

  // For merge(), which reads them faster: every lane's accumulators, four at a time, side by side with those of the others.
  __device__ __forceinline__ float4 *partial_out(int slot) const {
    return reinterpret_cast<float4 *>(a_.partial_out) + (int64_t{slot} * C::kRows + first_row()) * (C::kD / 4) + opaque(lane_);
  }
  __device__ __forceinline__ float2 *partial_stats(int slot) const { return a_.partial_stats + int64_t{slot} * C::kRows; }

  __device__ __forceinline__ void store_partials_by_lane(int slot) const {
    float4 *dst = partial_out(slot);
#pragma unroll
    for (int j = 0; j < C::kD / 8; ++j) dst[j * 32] = {out_[4 * j], out_[4 * j + 1], out_[4 * j + 2], out_[4 * j + 3]};
    if ((lane_ & 3) == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) partial_stats(slot)[row_of(r)] = {max_[r], sum_[r]};
    }
  }

  static __device__ __forceinline__ int ld_acquire(const int32_t *counter) {
    int now;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];\n" : "=r"(now) : "l"(counter) : "memory");
    return now;
  }

  // Every warp counts once a part; those that add the parts up do so once more, and the last one leaves the counter as it was.
  __device__ __forceinline__ void wait_partials(int parts) const {
    if (lane_ == 0) {
      int32_t *counter = a_.counters + plan_->counter;
      const int warps = (min(plan_->rows, C::kRows) + 15) / 16;
      while (ld_acquire(counter) < parts * warps) __nanosleep(100);
      if (atomicAdd(counter, 1) == (parts + 1) * warps - 1) *counter = 0;
    }
    __syncwarp();
  }

  // Adds the parts of the ranges before, in the order of their keys, to the last one, which is in registers. Those ranges are of blocks of
  // threads that have started before this one and come to these parts first.
  __device__ __forceinline__ void merge(int first_part, int parts) {
    wait_partials(parts);
    float top[2] = {max_[0], max_[1]};
#pragma unroll 4
    for (int part = 0; part < parts; ++part)
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], __ldcg(partial_stats(first_part + part) + row_of(r)).x);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float weight = exp2_approx(max_[r] - top[r]);
      max_[r] = top[r];
      sum_[r] *= weight;
#pragma unroll
      for (int j = 0; j < C::kD / 8; ++j) {
        out_[4 * j + 2 * r] *= weight;
        out_[4 * j + 2 * r + 1] *= weight;
      }
    }
    // Two at a time: each waits for the L2 cache.
#pragma unroll 2
    for (int part = 0; part < parts; ++part) {
      const float4 *from = partial_out(first_part + part);
      float4 x[C::kD / 8];
#pragma unroll
      for (int j = 0; j < C::kD / 8; ++j) x[j] = __ldcg(from + j * 32);
      float weight[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 tile_sum = __ldcg(partial_stats(first_part + part) + row_of(r));
        weight[r] = exp2_approx(tile_sum.x - max_[r]);
        sum_[r] = fmaf(weight[r], tile_sum.y, sum_[r]);
      }
#pragma unroll
      for (int j = 0; j < C::kD / 8; ++j) {
        out_[4 * j] = fmaf(weight[0], x[j].x, out_[4 * j]);
        out_[4 * j + 1] = fmaf(weight[0], x[j].y, out_[4 * j + 1]);
        out_[4 * j + 2] = fmaf(weight[1], x[j].z, out_[4 * j + 2]);
        out_[4 * j + 3] = fmaf(weight[1], x[j].w, out_[4 * j + 3]);
      }
    }
  }

  const WorkUnitDescriptor *plan_;
  int wg_, warp_;  // warp_ within the group
  float out_[C::kD / 2];
  float max_[2], sum_[2];  // of this lane's two rows; the sum of its own keys
};

}  // namespace fa::cuda::extend
