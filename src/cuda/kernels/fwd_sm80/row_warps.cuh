// SPDX-License-Identifier: Apache-2.0
// The warps that share rows of out: how they meet, and how they agree on the maximum and the sum of a row. Each has a part of the keys.
// With one warp per row this costs nothing.
#pragma once

#include "cuda/common/fragment.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/kernels/fwd_sm80/row_block.cuh"

namespace fa::cuda::sm80 {

template <class C>
class RowWarps {
 public:
  using Storage = typename C::Storage;
  using Fragment = QkFragment<C::kRowTiles, C::kKeys / 8>;
  static constexpr int kCount = C::kColumnWarps;

  // The CTA must synchronise before the first use.
  __device__ __forceinline__ explicit RowWarps(const RowBlock<C> &rows)
      : lane_(rows.lane), warp_(rows.column_warp), group_(rows.row_warp), smem_(rows.smem) {
    if constexpr (kCount > 1 && kHasMbarrierWait) {
      if (lane_ == 0 && warp_ == 0) mbarrier_init(barrier(), kCount * 32);
    }
  }

  // An mbarrier rather than a named one: racecheck loses track of __syncthreads where some warps pass named barriers and others do not. Chips
  // before sm_90 have named barriers all the same, because waiting for an mbarrier takes registers there.
  __device__ __forceinline__ void sync() {
    if constexpr (!kHasMbarrierWait) return named_barrier(1 + group_, kCount * 32);
    mbarrier_arrive(barrier());
    mbarrier_wait(barrier(), parity_);
    parity_ ^= 1;
  }

  // Whether `value` is true in any lane of these warps.
  __device__ __forceinline__ bool any(bool value) {
    if constexpr (kCount == 1) return __any_sync(~0u, value);
    if constexpr (!kHasMbarrierWait) return named_barrier_or(1 + group_, kCount * 32, value);
    bool any = __any_sync(~0u, value);
    if (lane_ == 0) st_shared_4(vote(warp_), any);
    sync();
#pragma unroll
    for (int n = 1; n < kCount; ++n) any |= ld_shared_4(vote((warp_ + n) % kCount)) != 0;
    return any;
  }

  __device__ __forceinline__ void reduce_max(float (&x)[Fragment::kRows]) { reduce(x, MaxOp{}); }
  __device__ __forceinline__ void reduce_sum(float (&x)[Fragment::kRows]) { reduce(x, SumOp{}); }

 private:
  // Combines a number per row, already combined over the lanes of a warp, over the warps.
  template <typename Op>
  __device__ __forceinline__ void reduce(float (&x)[Fragment::kRows], Op op) {
    if constexpr (kCount > 1) {
#pragma unroll
      for (int r = 0; r < Fragment::kRows; ++r) {
        if (Fragment::leads(lane_)) st_shared_float(row(warp_, r), x[r]);
      }
      sync();
#pragma unroll
      for (int r = 0; r < Fragment::kRows; ++r) {
        x[r] = ld_shared_float(row(0, r));
#pragma unroll
        for (int n = 1; n < kCount; ++n) x[r] = op(x[r], ld_shared_float(row(n, r)));
      }
    }
  }

  // The distance from row 0 is added last, where the compiler makes it an immediate offset: all rows have one address register.
  __device__ __forceinline__ uint32_t row(int warp, int r) const {
    return smem_ + Storage::kRowStatistics + warp * Storage::kWarpStatisticsBytes +
           (group_ * C::kWarpRows + Fragment::query(lane_, 0)) * 4 + Fragment::query(0, r) * 4;
  }
  __device__ __forceinline__ uint32_t barrier() const {
    return smem_ + Storage::kRowBarriers + group_ * sizeof(typename Storage::RowBarrier);
  }
  __device__ __forceinline__ uint32_t vote(int warp) const { return barrier() + 8 + warp * 4; }

  const int lane_, warp_, group_;
  const uint32_t smem_;
  uint32_t parity_ = 0;  // of the barrier's phase
};

}  // namespace fa::cuda::sm80
