// SPDX-License-Identifier: Apache-2.0
// FA_FLAG_SAME_BITS: keys are cut into segments of kLatentSegmentKeys, counted from the first key of their sequence. A segment has a softmax of its
// own (m, l, out). The segments of a row are folded in the order of their keys (common/combine.cuh), so that its bits do not depend on which
// CTA computed which of them.
//
// The softmax warpgroup knows m and l of a segment, the PV warpgroups have its out in registers. What a CTA has folded of a work tile is its
// total: M and L in shared memory, O [64][512] in the workspace, of which each CTA has a part, since 128 KB find no room in shared memory.
// When a segment ends, each softmax warp decides whether it is stored or folded, folds m and l, and tells the two PV warps with the same rows the scales.
//
// Where several CTAs have a work tile, each hands its total over to the next one. A CTA stores its segments in the workspace until the total
// of those before them has arrived. When that happens is a matter of time, but not the order in which segments are folded. CTAs wait for CTAs
// of lower number alone, which have started before, and take the work unit for which they wait last, as README.md says of partials. Kernels with a
// combine kernel store all segments of such a work tile for it.
#pragma once

#include "cuda/common/combine.cuh"
#include "cuda/kernels/mla/cta.cuh"

namespace fa::cuda::mla {

// What PV warps do with a segment. With a number of stored segments it makes up the word that a softmax warp passes to them.
enum class SegmentAction : uint32_t {
  first,    // it becomes the total
  store,    // it is stored in the workspace, behind so many others
  fold,     // it is folded into the total
  receive,  // the total of the partition before becomes the CTA's own; so many stored segments are folded into it, then this one
};
__device__ __forceinline__ uint32_t action_word(SegmentAction action, int stored) {
  return static_cast<uint32_t>(stored) << 2 | static_cast<uint32_t>(action);
}
__device__ __forceinline__ SegmentAction action_of(uint32_t word) { return static_cast<SegmentAction>(word & 3); }
__device__ __forceinline__ int stored_of(uint32_t word) { return static_cast<int>(word >> 2); }

// What a softmax warp knows of the segments of its 16 rows in a work unit.
template <class C, class Fragment>
class SegmentStats {
 public:
  __device__ __forceinline__ void begin_work_unit(const WorkUnitDescriptor &work) {
    state_ = (C::kUsesCombineKernel ? work.tile_continues : work.partials > 0) ? 0 : kNoTotal;
  }

  // Takes m and l of the next segment, when the PV warps have finished the one before. `stats` of the lanes that lead a row become those of the
  // total, unless the segment is stored. `tile`: its last K tile, none if the rows see no key. `last`: of the work unit, whose total is then
  // complete.
  __device__ __forceinline__ void take(const Cta<C> &cta, const WorkUnitDescriptor &work, int warp, float2 (&stats)[2],
                                       int tile, bool last) {
    if constexpr (C::kUsesCombineKernel) {
      if (work.tile_continues) {
        store_for_combine(cta, work, warp, stats, tile, last);
        return;
      }
    }
    SegmentAction action = state_ == kNoTotal ? SegmentAction::first : SegmentAction::fold;
    int stored = 0;
    if (!C::kUsesCombineKernel && state_ >= 0) {
      stored = state_;
      action =
          !last && stored < cta.a_.stored_segments && !has_arrived(cta, work) ? SegmentAction::store : SegmentAction::receive;
      if (action == SegmentAction::receive) {
        while (!has_arrived(cta, work)) __nanosleep(100);
      }
    }
    state_ = action == SegmentAction::store ? stored + 1 : kTotalHere;
    if (cta.lane_ == 0) st_shared_4(cta.shared_action(warp), action_word(action, stored));
    if (!Fragment::leads(cta.lane_)) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = cta.row_of(warp, r);
      if (action == SegmentAction::store) {
        st_shared_float2(cta.shared_segment(stored, row), stats[r]);
        continue;
      }
      if (action != SegmentAction::first) {
        float2 total = action == SegmentAction::fold ? ld_shared_float2(cta.shared_total_stats(row))
                                                     : __ldcg(cta.handed_stats(work.first_partial) + row);
        const auto fold = [&](uint32_t at, const float2 &segment) {
          const FoldScales scales = fold_row(total.x, total.y, segment.x, segment.y);
          st_shared_float2(at, {scales.total, scales.segment});
        };
#pragma unroll 1
        for (int i = 0; i < stored; ++i) fold(cta.shared_segment(i, row), ld_shared_float2(cta.shared_segment(i, row)));
        fold(cta.shared_segment(SegmentStorage::kMostStored, row), stats[r]);
        stats[r] = total;
      }
      st_shared_float2(cta.shared_total_stats(row), stats[r]);
    }
  }

 private:
  // Where the total of the segments before is. From 0 on: another CTA has it, and so many segments of this work unit are stored.
  enum : int { kNoTotal = -2, kTotalHere = -1 };

  // m and l of the next segment of the work unit that has K tiles. Those before it, and behind the last one, have no key that the CTA's rows see.
  __device__ __forceinline__ void store_for_combine(const Cta<C> &cta, const WorkUnitDescriptor &work, int warp,
                                                    const float2 (&stats)[2], int tile, bool last) {
    const bool exists = work.kv_tile < work.kv_tile_end;
    const int segment = exists ? cta.segment_of(tile) - work.first_partial : work.counter;
    if (cta.lane_ == 0)
      st_shared_4(cta.shared_action(warp), action_word(exists ? SegmentAction::store : SegmentAction::first, segment));
    const int end = last ? work.counter : segment + 1;
    if (Fragment::leads(cta.lane_)) {
#pragma unroll 1
      for (int i = state_; i < end; ++i) {
        float2 *to = cta.partial_stats(work.partial + i * work.partial_step);
#pragma unroll
        for (int r = 0; r < 2; ++r) to[cta.row_of(warp, r)] = i == segment ? stats[r] : float2{kNoMax, 0.f};
      }
    }
    state_ = end;
  }

  __device__ __forceinline__ bool has_arrived(const Cta<C> &cta, const WorkUnitDescriptor &work) const {
    int there = 0;
    if (cta.lane_ == 0) there = load_acquire(cta.a_.counters + work.awaited_counter);
    __syncwarp();  // other lanes may read what has arrived
    return __shfl_sync(~0u, there, 0) != 0;
  }

  int state_;
};

}  // namespace fa::cuda::mla
