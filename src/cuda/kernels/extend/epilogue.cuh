// SPDX-License-Identifier: Apache-2.0
// Epilogue of a consumer warp of the extend kernel, for its 16 rows. A work unit that is a whole work tile stores the final out
// and lse; any other stores a split-KV partial. With few partials per tile, the CTA that has the last part keeps it in
// registers and adds the others. With many, all partials are stored, and the combine kernel (decode/combine.cuh) sums them.
#pragma once

#include <math_constants.h>

#include "cuda/common/combine.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/kernels/decode/kv_8bit.cuh"
#include "cuda/kernels/extend/cta.cuh"

namespace fa::cuda::extend {

template <class C>
class Epilogue : protected Cta<C> {
 public:
  using Base = Cta<C>;
  using typename Base::Element;
  using Fragment = QkFragment<1, C::kKvTile / 8>;  // of S
  using OutFragment = QkFragment<1, C::kD / 8>;

  using Base::Base;

 protected:
  using Base::a_;
  using Base::lane_;
  using Base::p_;

  // Rows count from the CTA's first row.
  __device__ __forceinline__ int first_row() const { return wg_ * kWarpgroupRows + warp_ * 16; }
  __device__ __forceinline__ int row_of(int r) const { return first_row() + (opaque(lane_) >> 2) + 8 * r; }
  __device__ __forceinline__ int token_of(int row) const { return a_.group.quotient(work_->row0 + row); }
  __device__ __forceinline__ int head_of(int row) const {
    return work_->head * static_cast<int>(a_.group.value) + a_.group.remainder(work_->row0 + row);
  }

  // 8-bit KV: the descale of all keys or all values of this head.
  __device__ __forceinline__ float head_descale(const Descale &d) const {
    return decode::head_descale(d, work_->batch, work_->head);
  }

  // Each warp does this on its own.
  __device__ __forceinline__ void epilogue() {
    softmax_.reduce_sums();
    if constexpr (C::k8BitKv) {
      const float factor = head_descale(a_.v_descale);
#pragma unroll
      for (int j = 0; j < C::kD / 2; ++j) out_[j] *= factor;
    }
    if constexpr (C::kUsesCombineKernel) {
      if (work_->partial_slot >= 0) {
        store_partials_by_row(work_->partial_slot);
        return;
      }
    } else {
      if (work_->partial_slot >= 0) {
        store_partials_by_lane(work_->partial_slot);
        __syncwarp();  // all lanes have stored their part
        if (lane_ == 0) count_released(a_.counters + work_->counter);
        return;
      }
      if (work_->num_partials > 0) merge_partials(work_->first_partial, work_->num_partials);
    }
    store_final();
  }

  __device__ __forceinline__ void store_final() const {
    const int quad = opaque(lane_) & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r), stored_row = min(row, work_->rows - 1);
      const RowResult result = finalize_row(softmax_.max[r], softmax_.sum[r], sink_of(p_, head_of(stored_row)));
      store_fragment_row<Element, C::kD / 8>(out_, r, out_at(stored_row),
                                             row < work_->rows ? static_cast<int>(p_.head_dim_v) : 0, a_.vector_out, quad,
                                             [&](float a, float b) { return pack(a * result.factor, b * result.factor); });
      if (quad == 0 && row < work_->rows && p_.lse.data != nullptr) *lse_at(row) = result.lse;
    }
  }

  __device__ __forceinline__ uint32_t pack(float a, float b) const {
    return C::k8BitKv && p_.q.dtype == Dtype::bf16 ? pack2<__nv_bfloat16>(a, b) : pack2<Element>(a, b);
  }
  __device__ __forceinline__ float *lse_at(int row) const {
    return row_of_tensor(p_.lse, work_->batch, work_->q_start + token_of(row), head_of(row));
  }
  __device__ __forceinline__ Element *out_at(int row) const {
    return row_of_tensor<Element>(p_.out, work_->batch, work_->q_start + token_of(row), head_of(row));
  }

  // Rows of the sequence's slot without queries: out = 0, lse = -inf.
  __device__ __forceinline__ void store_unused_rows() const {
    for (int row = max(work_->rows, 0) + wg_ * 4 + warp_; row < work_->end_row; row += C::kConsumerWarpgroups * 4) {
      store_zero_row(out_at(row), p_.head_dim_v, p_.lse.data != nullptr ? lse_at(row) : nullptr, -CUDART_INF_F, lane_);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Split-KV partials
  // ------------------------------------------------------------------------------------------------------------------

  // For the combine kernel: row-major. This lane has two of each eight columns.
  __device__ __forceinline__ void store_partials_by_row(int slot) const {
    const int64_t row0 = int64_t{slot} * C::kRows;
    const int quad = opaque(lane_) & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      auto *dst = reinterpret_cast<float2 *>(a_.partial_out + (row0 + row_of(r)) * C::kD) + quad;
#pragma unroll
      for (int j = 0; j < C::kD / 8; ++j) dst[j * 4] = {out_[4 * j + 2 * r], out_[4 * j + 2 * r + 1]};
      if (quad == 0) a_.partial_stats[row0 + row_of(r)] = {softmax_.max[r], softmax_.sum[r]};
    }
  }

  // For merge_partials(), which reads this layout faster: four accumulators of a lane, beside those of the other lanes.
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
      for (int r = 0; r < 2; ++r) partial_stats(slot)[row_of(r)] = {softmax_.max[r], softmax_.sum[r]};
    }
  }

  // Every warp counts each partial once. The warps that add the partials count once more, and the last of them resets the
  // counter.
  __device__ __forceinline__ void wait_partials(int num_partials) const {
    if (lane_ == 0) {
      int32_t *counter = a_.counters + work_->counter;
      const int warps = (min(work_->rows, C::kRows) + 15) / 16;
      while (load_acquire(counter) < num_partials * warps) __nanosleep(100);
      if (atomicAdd(counter, 1) == (num_partials + 1) * warps - 1) *counter = 0;
    }
    __syncwarp();
  }

  // Adds the partials of the earlier partitions, in the order of their keys, to the last part, which is in registers. The CTAs
  // of those partitions have started before this one and process these units first, so this wait cannot deadlock.
  __device__ __forceinline__ void merge_partials(int first_partial, int num_partials) {
    wait_partials(num_partials);
    float row_max[2] = {softmax_.max[0], softmax_.max[1]};
#pragma unroll 4
    for (int i = 0; i < num_partials; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) row_max[r] = fmaxf(row_max[r], __ldcg(partial_stats(first_partial + i) + row_of(r)).x);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = exp2_approx(softmax_.max[r] - row_max[r]);
      softmax_.max[r] = row_max[r];
      softmax_.sum[r] *= scale;
#pragma unroll
      for (int j = 0; j < C::kD / 8; ++j) {
        out_[4 * j + 2 * r] *= scale;
        out_[4 * j + 2 * r + 1] *= scale;
      }
    }
    // Two at a time: each waits for L2.
#pragma unroll 2
    for (int i = 0; i < num_partials; ++i) {
      const float4 *from = partial_out(first_partial + i);
      float4 x[C::kD / 8];
#pragma unroll
      for (int j = 0; j < C::kD / 8; ++j) x[j] = __ldcg(from + j * 32);
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 stats = __ldcg(partial_stats(first_partial + i) + row_of(r));
        scale[r] = exp2_approx(stats.x - softmax_.max[r]);
        softmax_.sum[r] = fmaf(scale[r], stats.y, softmax_.sum[r]);
      }
#pragma unroll
      for (int j = 0; j < C::kD / 8; ++j) {
        out_[4 * j] = fmaf(scale[0], x[j].x, out_[4 * j]);
        out_[4 * j + 1] = fmaf(scale[0], x[j].y, out_[4 * j + 1]);
        out_[4 * j + 2] = fmaf(scale[1], x[j].z, out_[4 * j + 2]);
        out_[4 * j + 3] = fmaf(scale[1], x[j].w, out_[4 * j + 3]);
      }
    }
  }

  const WorkUnitDescriptor *work_;
  int wg_, warp_;  // warp_: within the warpgroup
  float out_[C::kD / 2];
  OnlineSoftmax<Fragment> softmax_;
};

}  // namespace fa::cuda::extend
