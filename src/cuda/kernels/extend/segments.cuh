// SPDX-License-Identifier: Apache-2.0
// Kernels for FA_FLAG_SAME_BITS: the keys of a sequence are cut into segments of kSegmentKeys, counted from its first key. A
// segment has a softmax of its own (m, l, out), which starts anew. The segments of a row are folded in the order of their keys
// (common/combine.cuh), so its bits do not depend on which CTA computed which of them. What a warp has folded so far, the total
// of its 16 rows, is in shared memory, or, where that is full, in the workspace, of which every CTA has a part.
//
// A work tile may be cut at the end of any segment. Kernels without a combine kernel: the CTA with its front hands its total
// over in the workspace, and the CTA with the next part folds its own segments behind it. Until the total has arrived, segments
// are stored in the workspace. When that happens is a matter of time, but not the order in which they are folded.
// Kernels with a combine kernel store all segments of such a work tile for it.
#pragma once

#include "cuda/common/combine.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/segment_total.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/kernels/extend/epilogue.cuh"

namespace fa::cuda::extend {

// Where a warp's total is, in shared memory because registers are scarce, before the next segment of its work unit. From 0 on: in another CTA, and so many segments of this
// work unit are in the workspace. With a combine kernel: so many segments are stored for it.
enum SegmentState : int { kNoTotal = -2, kTotalHere = -1 };

template <class C>
class SegmentFold {
 public:
  static constexpr int kVectors = C::kD / 8;  // of four accumulators, of a lane
  using Softmax = OnlineSoftmax<QkFragment<1, C::kKvTile / 8>>;

  __device__ __forceinline__ SegmentFold(const Cta<C> &cta, const WarpRows<C> &rows) : cta_(cta), rows_(rows) {}

  __device__ __forceinline__ void begin_work_unit() {
    if (C::kUsesCombineKernel ? rows_.work->partial >= 0 : rows_.work->num_partials > 0) state_ = 0;
    save_state();
  }

  // Takes the next segment of the work unit, which is in registers; its row sums are those of the whole row. Returns true if it
  // is the last one of the work tile: then the registers hold the total of all segments. The total of a work unit that ends
  // before its work tile is handed over.
  __device__ __forceinline__ bool take(float (&out)[C::kD / 2], Softmax &softmax, int segment_number, bool last) {
    state_ = static_cast<int>(ld_shared_4(state_at()));
    if constexpr (C::kUsesCombineKernel) {
      if (rows_.work->partial >= 0) {
        store_for_combine(out, softmax, segment_number, last);
        return false;
      }
    } else if (state_ >= 0) {
      if (!last && state_ < cta_.params().stored_segments && !has_arrived()) {
        store(stored_segment(state_++), out, softmax);
        save_state();
        return false;
      }
      receive();
    }
    if (!last) {
      if (state_ == kTotalHere) {
        total().fold([&](int j) { return Total::vector_of(out, j); }, softmax.max, softmax.sum);
      } else {
        total().set(out, softmax.max, softmax.sum);
      }
      state_ = kTotalHere;
      save_state();
      return false;
    }
    if (state_ == kTotalHere) total().fold_into(out, softmax.max, softmax.sum);
    if (C::kUsesCombineKernel || rows_.work->partial < 0) return true;
    store(rows_.work->partial, out, softmax);
    __syncwarp();  // all lanes have stored their part
    if (cta_.lane() == 0) count_released(flag(rows_.work->partial));
    return false;
  }

 private:
  static constexpr int kLoads = 16;  // from the workspace at once: out and Q take most registers

  // Where the total lies.
  struct TotalLayout {
    const Cta<C> &cta;
    const WarpRows<C> &rows;
    __device__ __forceinline__ int lane() const { return cta.lane(); }
    decltype(cta.total(0)) base;
    __device__ __forceinline__ auto out(int j) const { return base + j * Cta<C>::kTotalStep; }
    __device__ __forceinline__ uint32_t stats(int r) const { return cta.total_stats() + rows.row_of(r) * 8; }
  };
  using Total = SegmentTotal<kVectors, TotalLayout>;
  __device__ __forceinline__ Total total() const { return Total({cta_, rows_, cta_.total(rows_.first_row() / 16)}); }

  __device__ __forceinline__ uint32_t state_at() const { return cta_.segment_state() + rows_.first_row() / 16 * 4; }
  __device__ __forceinline__ void save_state() const {
    __syncwarp();  // all lanes have read it
    if (cta_.lane() == 0) st_shared_4(state_at(), static_cast<uint32_t>(state_));
    __syncwarp();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Totals and segments in the workspace: of each warp and lane, M and L of its two rows, then out
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ float4 *partial_at(int partial) const {
    return reinterpret_cast<float4 *>(cta_.params().partial_out) +
           (int64_t{partial} * cta_.params().partial_warps + rows_.first_row() / 16) * ((kVectors + 1) * 32) + cta_.lane();
  }
  // The i-th segment of this work unit.
  __device__ __forceinline__ int stored_segment(int i) const {
    return static_cast<int>(gridDim.x) + rows_.work->counter * cta_.params().stored_segments + i;
  }
  __device__ __forceinline__ void store(int partial, const float (&out)[C::kD / 2], const Softmax &softmax) const {
    float4 *to = partial_at(partial);
    to[0] = {softmax.max[0], softmax.sum[0], softmax.max[1], softmax.sum[1]};
#pragma unroll
    for (int j = 0; j < kVectors; ++j) to[(j + 1) * 32] = Total::vector_of(out, j);
  }

  // For the combine kernel, row-major. Of segments that have no tile that the CTA's rows see, m and l alone.
  __device__ __forceinline__ void store_for_combine(float (&out)[C::kD / 2], Softmax &softmax, int segment_number, bool last) {
    const int count = rows_.work->num_partials, index = min(max(segment_number - rows_.work->first_partial, state_), count - 1);
    const auto store_empty = [&](int end) {
      for (; state_ < end; ++state_) {
        float2 *stats = cta_.params().partial_stats + int64_t{partial_of(state_)} * C::kRows;
        if ((cta_.lane() & 3) == 0) stats[rows_.row_of(0)] = stats[rows_.row_of(1)] = {kNoMax, 0.f};
      }
    };
    store_empty(index);
    Epilogue<C>(cta_, rows_, out, softmax).store_partials_by_row(partial_of(state_++));
    if (last) store_empty(count);
    save_state();
  }
  __device__ __forceinline__ int partial_of(int segment) const { return rows_.work->partial + segment * rows_.work->counter; }

  // Says that a warp has stored the total that it hands over, and is reset by the warp that takes it.
  __device__ __forceinline__ int32_t *flag(int partial) const {
    return cta_.params().counters + partial * (C::kRows / 16) + rows_.first_row() / 16;
  }
  __device__ __forceinline__ bool has_arrived() const {
    int there = 0;
    if (cta_.lane() == 0) there = load_acquire(flag(rows_.work->first_partial));
    return __shfl_sync(~0u, there, 0) != 0;
  }
  // Waits for the total of the partition before, and folds the stored segments. CTAs wait for CTAs with lower numbers alone,
  // which have started before them and hand over what begins in them before they wait themselves: they cannot deadlock.
  __device__ __forceinline__ void receive() {
    while (!has_arrived()) __nanosleep(100);
    if (cta_.lane() == 0) *flag(rows_.work->first_partial) = 0;
    __syncwarp();
    const float4 *from = partial_at(rows_.work->first_partial);
    const float4 stats = __ldcg(from);
#pragma unroll kLoads
    for (int j = 0; j < kVectors; ++j) total().set_out(j, __ldcg(from + (j + 1) * 32));
    total().set_stats({stats.x, stats.z}, {stats.y, stats.w});
#pragma unroll 1
    for (int i = 0; i < state_; ++i) {
      const float4 *stored = partial_at(stored_segment(i)), row = __ldcg(stored);
      total().template fold<kLoads>([&](int j) { return __ldcg(stored + (j + 1) * 32); }, {row.x, row.z}, {row.y, row.w});
    }
    state_ = kTotalHere;
  }

  const Cta<C> &cta_;
  const WarpRows<C> &rows_;
  int state_ = kNoTotal;  // of the warp: a SegmentState
};

}  // namespace fa::cuda::extend
