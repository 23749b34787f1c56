// SPDX-License-Identifier: Apache-2.0
// A consumer warpgroup of the kernels for FA_FLAG_SAME_BITS: the main loop of consumer.cuh with the arithmetic of docs/numerics.md
// (arithmetic 2), which all calls with that flag share, decoding included.
//
//   KV tiles      of 128 keys counted from the sequence's first key, in the order of their keys
//   segments      of 1024 keys, counted in the same way: m, l and out start anew with each
//   maximum       every row's own: exact in the first tile of a segment in which it sees a key, lazy in the others (common/lazy_max.cuh)
//   total         what has been folded of a row's segments, in fp32 (common/segment_total.cuh), in the memory in which out is staged, or, with
//                 256 columns, in the workspace
//
// The main loop does not stop at the end of a segment. The first S of the next one is issued beside the last out += P V of this one, which is
// folded when its out is complete; at the end of a work tile its rows are stored then, too.
#pragma once

#include "cuda/common/lazy_max.cuh"
#include "cuda/common/segment_total.cuh"
#include "cuda/common/segments.h"
#include "cuda/kernels/fwd_sm90/consumer.cuh"

namespace fa::cuda::sm90 {

template <class C>
class SegmentConsumer : private Consumer<C> {
  using Base = Consumer<C>;
  using Base::a_, Base::at_, Base::k_, Base::out_, Base::p_, Base::p_operand_, Base::q_, Base::s_, Base::smem_, Base::softmax_,
      Base::v_, Base::work_, Base::epilogue_, Base::recompute_;
  using typename Base::Fragment, typename Base::OutFragment, typename Base::WorkTile;
  static constexpr int kSegmentTiles = kSegmentKeys / C::kKeys;
  static_assert(C::kScores == kPlain && C::kKeys == segment_tile_keys(C::kD) && !C::kFp8);

 public:
  using Base::Base;

  __device__ __forceinline__ void mainloop() {
#pragma unroll
    for (int n = 0; n < Base::kPvSteps; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) p_operand_[n][r] = 0;
    while (true) {
      mbarrier_wait(smem_.work_full(work_.stage()), work_.phase());
      const WorkTile &t = smem_.work_tile(work_.stage());
      const auto &tiles = smem_.segment_tiles(work_.stage(), at_.wg);
      const int begin = t.begin[at_.wg];  // KV tiles that only warpgroups before this one see
      const bool has_work = begin < t.kv_tiles;
      // The pipeline of V has to hold the last tile of the previous work tile and those that are skipped.
      if (pending_ && (!has_work || begin + skipped_ >= C::kStages)) drain();
      if (!has_work) {
        if (t.kv_tiles < 0) {
          if (C::kOutAtoms > 0 && at_.lane == 0) bulk_wait_group_read();  // shared memory is freed when the CTA exits
          break;
        }
        Base::skip_tile(t);
        work_.advance();
        continue;
      }
      if (t.row0 + C::kRows > t.seqlen_q) epilogue_.store_unused_rows(t);
      mbarrier_wait(smem_.q_full(q_.stage(), at_.wg), q_.phase());
      Base::skip_k(begin);
      int n = tiles.begin;
      bool fresh = true;  // no tile of the work tile has been computed
#pragma unroll 1
      while (n < tiles.end) {
        const bool unmasked = n >= tiles.inner_begin && n < tiles.inner_end, starts = fresh || n % kSegmentTiles == 0;
        iteration(t, n, !unmasked, starts, fresh, n + 1 == tiles.end);
        if (fresh) {
          Base::skip_v(begin);
        }
        fresh = false;
        ++n;
        // All rows have seen a key of the segment.
        const int end = unmasked ? min(tiles.inner_end, (n + kSegmentTiles - 1) / kSegmentTiles * kSegmentTiles) : n;
        if (Base::kEarlyK && n < end) mbarrier_wait(smem_.k_full(k_.stage()), k_.phase());
#pragma unroll 1
        for (; n < end; ++n) unmasked_iteration(t, n, n + 1 == end, n + 1 == tiles.end);
      }
      skipped_ = t.first + t.kv_tiles - tiles.end;
      Base::skip_k(skipped_);
      q_.advance();
      work_.advance();
    }
  }

 private:
  // ------------------------------------------------------------------------------------------------------------------
  // Iterations
  // ------------------------------------------------------------------------------------------------------------------

  // KV tile n, in full: issues its S and out += P V of the tile before it, then turns S into P. `starts`: it is the first one of its
  // segment, and the segment before it ends. `fresh`: of its work tile. `last`: of this warpgroup in its work tile.
  __device__ __forceinline__ void iteration(const WorkTile &t, int n, bool masked, bool starts, bool fresh, bool last) {
    const bool has_pv = pending_;
    uint32_t visible[2];
    mbarrier_wait(smem_.k_full(k_.stage()), k_.phase());
    Base::fence_operands();
    Base::issue_qk();
    if (masked) TileScores<C>::find_visible(a_, smem_, at_, work_, k_, t, n * C::kKeys, visible);
    if (has_pv) {
      mbarrier_wait(smem_.v_full(v_.stage()), v_.phase());
      if (fresh) clear_v_tail();
    }
    wgmma_fence();
    // Without a tile before, on whatever V's stage holds: the result is ignored.
    Base::issue_pv(first_pv_);
    wgmma_wait<1>();
    fence_operand(s_);
    Base::release_k(last);
    if (masked) Base::apply_mask(visible);
    float max[2], sum[2];  // of the segment that ends
    if (starts) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max[r] = softmax_.max[r];
        sum[r] = softmax_.sum[r];
        // Unused rows hold whatever: their maximum is so large that they raise nothing.
        softmax_.max[r] = at_.row(t, r) < t.seqlen_q ? kNoMax : 1e30f;
        softmax_.sum[r] = 0.f;
      }
    }
    const auto scale = [&](int) { return Base::scale(); };
    raise_max_before<Fragment>(softmax_, s_, masked, /*plain=*/true, scale, [&] {
      wgmma_wait<0>();
      fence_operand(out_);
      fence_operand(p_operand_);
      scale_rows<OutFragment>(out_, softmax_.rescale);
    });
    float tile_sum[2];
    softmax_.template exponentiate</*kMasked=*/false>(s_, Base::scale(), tile_sum);
    const bool raises = asks_for_raise(tile_sum);
    compute_before_wait(tile_sum[0] + tile_sum[1] + softmax_.sum[0]);
    wgmma_wait<0>();
    fence_operand(out_);
    fence_operand(p_operand_);
    if (has_pv) {
      mbarrier_arrive_if(at_.lane == 0, smem_.v_empty(v_.stage()));
      v_.advance();
    }
    if (raise_max_after(t, n, masked, raises, tile_sum) && !starts) scale_rows<OutFragment>(out_, softmax_.rescale);
    softmax_.sum[0] += tile_sum[0];
    softmax_.sum[1] += tile_sum[1];
    Base::convert_p();
    if (starts && has_pv) {
      Fragment::reduce(sum, SumOp{});
      if (fresh) {
        end_work_tile(max, sum);
      } else {
        end_segment(work_.stage(), n - 1, max, sum);
        fold(max, sum);
      }
    }
    segment_masked_ = masked || (segment_masked_ && !starts);
    first_pv_ = starts;
    pending_ = true;
  }

  // A tile without masks that does not begin its segment: most of them. `last`: of these iterations; `last_of_work`: of the work tile.
  // With kEarlyK the K stage is already full.
  __device__ __forceinline__ void unmasked_iteration(const WorkTile &t, int n, bool last, bool last_of_work) {
    if (!Base::kEarlyK) {
      mbarrier_wait(smem_.k_full(k_.stage()), k_.phase());
      mbarrier_wait(smem_.v_full(v_.stage()), v_.phase());
    }
    Base::fence_operands();
    Base::issue_qk();
    if (Base::kEarlyK) {
      mbarrier_wait(smem_.v_full(v_.stage()), v_.phase());
      wgmma_fence();
    }
    Base::issue_pv(first_pv_);
    wgmma_wait<1>();
    fence_operand(s_);
    Base::release_k(last_of_work);
    if (Base::kEarlyK && !last) mbarrier_wait(smem_.k_full(k_.stage()), k_.phase());
    float tile_sum[2];
    softmax_.template exponentiate</*kMasked=*/false>(s_, Base::scale(), tile_sum);
    const bool raises = asks_for_raise(tile_sum);
    compute_before_wait(tile_sum[0] + tile_sum[1] + softmax_.sum[0]);
    wgmma_wait<0>();
    fence_operand(out_);
    fence_operand(p_operand_);
    mbarrier_arrive_if(at_.lane == 0, smem_.v_empty(v_.stage()));
    v_.advance();
    if (raise_max_after(t, n, /*masked=*/false, raises, tile_sum)) scale_rows<OutFragment>(out_, softmax_.rescale);
    softmax_.sum[0] += tile_sum[0];
    softmax_.sum[1] += tile_sum[1];
    Base::convert_p();
    first_pv_ = false;
  }

  __device__ __forceinline__ bool raise_max_after(const WorkTile &t, int n, bool masked, bool raises, float (&tile_sum)[2]) {
    return cuda::raise_max_after<Fragment, /*kSameBits=*/true>(
        softmax_, s_, tile_sum, raises, masked, [&](int) { return Base::scale(); },
        [&](const bool(&overflowed)[2]) { recompute_.recompute_scores_by_mma(t, n * C::kKeys, overflowed, s_); });
  }

  // The rows of V past the end of the sequence, in the last KV tile of the previous work tile.
  __device__ __forceinline__ void clear_v_tail() const {
    if (p_.k_lengths.cu == nullptr && p_.k_lengths.used == nullptr) return;  // TMA has put zeros there
    const int last = smem_.segment_tiles(Base::previous_stage(), at_.wg).end - 1;
    Base::clear_v_rows(smem_.work_tile(Base::previous_stage()).seqlen_k - last * C::kKeys);
  }

  // The pending out += P V of the previous work tile, with no S to overlap it.
  __device__ __forceinline__ void drain() {
    mbarrier_wait(smem_.v_full(v_.stage()), v_.phase());
    clear_v_tail();
    Base::fence_operands();
    Base::issue_pv(first_pv_);
    wgmma_wait<0>();
    fence_operand(out_);
    mbarrier_arrive_if(at_.lane == 0, smem_.v_empty(v_.stage()));
    v_.advance();
    softmax_.reduce_sums();
    end_work_tile(softmax_.max, softmax_.sum);
    pending_ = false;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Segments
  // ------------------------------------------------------------------------------------------------------------------

  // Where the total lies. In shared memory that of each warp is where it stages its rows of out, and in as much again behind that of the warpgroup.
  struct TotalLayout {
    const SharedMemory<C> &smem;
    const ConsumerThread &at;
    float4 *const totals;                                        // in the workspace, of this lane
    static constexpr int kVectorsOfPart = 16 * 128 / (32 * 16);  // a part: the 16 rows of a warp in a swizzle atom
    __device__ __forceinline__ int lane() const { return at.lane; }
    __device__ __forceinline__ auto out(int j) const {
      if constexpr (C::Storage::kTotalIsShared) {
        return smem.out(at.wg) + at.warp * 16 * 128 + at.lane * 16 + j / kVectorsOfPart * 64 * 128 +
               j % kVectorsOfPart * 32 * 16;
      } else {
        return totals + j * 32;
      }
    }
    __device__ __forceinline__ uint32_t stats(int r) const {
      return smem.total_stats(at.wg * 64 + at.warp * 16 + (at.lane >> 2) + 8 * r);
    }
  };
  using Total = SegmentTotal<C::kDv / 8, TotalLayout>;
  __device__ __forceinline__ Total total() const {
    const int warp = (static_cast<int>(blockIdx.x) * C::kConsumerWarpgroups + at_.wg) * 4 + at_.warp;
    // opaque: registers are scarce, and this is needed once for a segment.
    return Total({smem_, at_, a_.totals + (warp * (C::kDv / 8) * 32 + opaque(at_.lane))});
  }

  // The segment that ends with KV tile n has all of its out. P of a masked pair is 0, and 0 times NaN or Inf is NaN. Where P itself is not finite
  // out has nothing to lose, and unused rows hold whatever.
  __device__ __forceinline__ void end_segment(int work_stage, int n, const float (&max)[2], const float (&sum)[2]) {
    if (!segment_masked_) return;
    const WorkTile &t = smem_.work_tile(work_stage);
    float zero[2] = {0.f, 0.f};  // or NaN, by row
#pragma unroll
    for (int j = 0; j < C::kDv / 2; ++j) zero[(j >> 1) & 1] = fmaf(out_[j], 0.f, zero[(j >> 1) & 1]);
    const int used = t.seqlen_q - at_.row(t, 0);
    if (!__any_sync(~0u,
                    (used > 0 && zero[0] != 0.f && sum[0] * 0.f == 0.f) || (used > 8 && zero[1] != 0.f && sum[1] * 0.f == 0.f)))
      return;
    float unused[2];
    recompute_.recompute_out(work_stage, max, out_, unused, n / kSegmentTiles);
    // Without these ptxas finds too few registers for the wgmmas.
    fence_operand(out_);
    fence_operand(p_operand_);
  }
  // Folds a segment that is not the last one.
  __device__ __forceinline__ void fold(const float (&max)[2], const float (&sum)[2]) {
    if (has_total_) {
      total().fold([&](int j) { return Total::vector_of(out_, j); }, max, sum);
    } else {
      if (C::Storage::kTotalIsShared) {
        if (at_.lane == 0) bulk_wait_group_read();  // until TMA has read the rows that were staged there
        __syncwarp();
      }
      total().set(out_, max, sum);
      has_total_ = true;
    }
  }
  // The previous work tile has all of its out: finishes its rows, frees its description, and skips V of the tiles that others see.
  __device__ __forceinline__ void end_work_tile(float (&max)[2], float (&sum)[2]) {
    const int stage = Base::previous_stage();
    const WorkTile &t = smem_.work_tile(stage);
    end_segment(stage, smem_.segment_tiles(stage, at_.wg).end - 1, max, sum);
    if (has_total_) {
      total().fold_into(out_, max, sum);
      __syncwarp();  // all lanes have read it
      has_total_ = false;
    }
    epilogue_.finalize_rows(t, max, sum);
    epilogue_.store_rows(t, out_);
    __syncwarp();
    mbarrier_arrive_if(at_.lane == 0, smem_.work_empty(stage));
    Base::skip_v(skipped_);
  }

  bool pending_ = false;         // out += P V of the last tile is still to be done
  bool first_pv_ = true;         // it is the first one of its segment
  bool segment_masked_ = false;  // some tile of its segment has masked pairs
  bool has_total_ = false;       // segments of its work tile have been folded
  int skipped_ = 0;              // KV tiles at the end of its work tile that only other warpgroups see
};

}  // namespace fa::cuda::sm90
