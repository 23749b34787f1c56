// SPDX-License-Identifier: Apache-2.0
// The softmax warpgroup: S [64][64] = Q K^T, then P, then the rescale factors of the epilogue.
//
// The first kQRegisterAtoms atoms of Q are in registers as A operands. That halves what those wgmmas read from shared memory.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/combine.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/lazy_max.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/mla/cta.cuh"
#include "cuda/kernels/mla/segments.cuh"

namespace fa::cuda::mla {

template <class C>
class SoftmaxWarpgroup {
 public:
  using Element = typename C::Element;

  __device__ __forceinline__ explicit SoftmaxWarpgroup(const Cta<C> &cta)
      : cta_(cta), a_(cta.a_), p_(cta.p_), lane_(cta.lane_) {}

  __device__ __forceinline__ void run() {
    warp_ = uniform(threadIdx.x >> 5) & 3;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      mbarrier_wait(cta_.work_full(n & 1), n >> 1 & 1);
      work_ = &cta_.descriptor(n & 1);
      if (work_->batch < 0) return;
      if (work_->rows > 0) mainloop();
      wait_epilogue_empty(C::kSameBits ? epilogues_++ : n);
      if (work_->rows > 0) finalize();
      mbarrier_arrive(cta_.epilogue_full());
      mbarrier_arrive(cta_.work_empty(n & 1));
    }
  }

 private:
  using Fragment = QkFragment<1, C::kKeys / 8>;  // of S, of one warp

  __device__ __forceinline__ int stage() const { return static_cast<int>(tile_count_ & 1); }
  __device__ __forceinline__ int row_of(int r) const { return cta_.row_of(warp_, r); }
  __device__ __forceinline__ int token_of(int row) const { return cta_.token_of(*work_, row); }

  // Waits until the PV warpgroups have finished the epilogue before number n of the CTA: one ends each work unit, or each segment.
  __device__ __forceinline__ void wait_epilogue_empty(uint32_t n) const {
    if (n > 0) mbarrier_wait(cta_.epilogue_empty(), (n - 1) & 1);
  }

  __device__ __forceinline__ void mainloop() {
    softmax_.reset();
    if constexpr (C::kSameBits) segments_.begin_work_unit(*work_);
    if (work_->kv_tile == work_->kv_tile_end) return;
    sync_softmax(0);  // all four warps have read the previous work unit's Q
    load_q();
    uint32_t q[C::kQRegisterAtoms * 4][4];
    load_q_registers(q);
    cp_async_wait<0>();
    if constexpr (C::k8BitKv) prepare_q(q);
    fence_proxy_async();
    sync_softmax(1);
#pragma unroll 1
    for (int tile = work_->kv_tile; tile < work_->kv_tile_end; ++tile, ++tile_count_) {
      const int key0 = tile * C::kKeys;
      bool masked = key0 < work_->interior.begin || key0 + C::kKeys > work_->interior.end;
      if constexpr (C::kEarlyAtoms < C::kAtoms) {
        mbarrier_wait(cta_.early_full(stage()), tile_count_ >> 1 & 1);
      } else {
        mbarrier_wait(cta_.full(stage()), tile_count_ >> 1 & 1);
      }
      if constexpr (C::kLists)
        masked |= (ld_shared_4(cta_.shared_listed(stage(), 0)) & ld_shared_4(cta_.shared_listed(stage(), 1))) != ~0u;
      float s[C::kKeys / 2];
      qk(s, q);
      if constexpr (C::k8BitKv) apply_row_scales(s);
      uint32_t flags = 0;
      if (masked) {
        // A NaN or Inf in a key makes S non-finite in every row.
        flags = work_->several_tokens && __any_sync(~0u, nan_if_nonfinite(s) != 0.f) ? Cta<C>::kNanSafe : 0;
        if (C::kSameBits && flags != 0) flags = search_tile();
        apply_mask(s, key0);
        if constexpr (C::kLists)
          mask_keys<Fragment>(s, ld_shared_4(cta_.shared_listed(stage(), 0)), ld_shared_4(cta_.shared_listed(stage(), 1)),
                              opaque(lane_));
      }
      // Lazy rescaling raises m only where P would exceed 2^8. That is rare, so out is hardly ever rescaled, and P does not wait for the
      // maxima of the other lanes of its row.
      softmax_.rescale[0] = softmax_.rescale[1] = 1.f;
      if (update_max(s)) flags |= Cta<C>::kRescaled;
      // P of this stage may be overwritten: this K tile was loaded after the PV warpgroups had released the stage.
      if (lane_ == 0) st_shared_4(cta_.shared_flags(stage()) + warp_ * 4, flags);
      if (masked) {
        exponentiate_and_store_p<true>(s);
      } else {
        exponentiate_and_store_p<false>(s);
      }
      if constexpr (C::kSameBits) {
        if (tile + 1 < work_->kv_tile_end && tile + 1 == cta_.segment_end(*work_, tile)) end_inner_segment(tile);
      }
    }
  }

  // FA_FLAG_SAME_BITS: whether this thread's part of a K tile holds a value that is not finite. S alone does not tell: it may overflow, and
  // a row of Q may hold such values, which must not change how P V of other rows is computed.
  __device__ __forceinline__ uint32_t search_tile() const {
    const bool found = tile_has_nonfinite<Element, C::kTileBytes, C::kSoftmaxThreads>(
        cta_.shared_tile(stage()), static_cast<int>(opaque(threadIdx.x)) & (C::kSoftmaxThreads - 1));
    return __any_sync(~0u, found) ? Cta<C>::kNanSafe : 0;
  }

  // FA_FLAG_SAME_BITS: the end of a segment within the work unit, whose last K tile is `tile`.
  __device__ __forceinline__ void end_inner_segment(int tile) {
    softmax_.reduce_sums();
    wait_epilogue_empty(epilogues_++);
    if (warp_ * 16 < work_->rows) {
      float2 stats[2] = {{softmax_.max[0], softmax_.sum[0]}, {softmax_.max[1], softmax_.sum[1]}};
      segments_.take(cta_, *work_, warp_, stats, tile, /*last=*/false);
    }
    mbarrier_arrive(cta_.epilogue_full());
    softmax_.reset();
  }

  __device__ __forceinline__ const Element *q_at(int row) const {
    return row_of_tensor<Element>(p_.q, work_->batch, work_->q_start + token_of(row), cta_.head_of(*work_, row));
  }
  // Loads the first columns of Q as an A operand in registers, the others (load_q) to shared memory. Missing rows and columns are zero.
  __device__ __forceinline__ void load_q_registers(uint32_t (&q)[C::kQRegisterAtoms * 4][4]) const {
    const int quad = opaque(lane_) & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r);
      const Element *src = q_at(min(row, work_->rows - 1)) + quad * 8;
      const int columns = row < work_->rows ? static_cast<int>(p_.head_dim) - quad * 8 : 0;
#pragma unroll
      for (int n = 0; n < C::kQRegisterAtoms * 4; n += 2) {
        uint4 x{};
        if (16 * n < columns) x = __ldcg(reinterpret_cast<const uint4 *>(src + 16 * n));
        q[n][r] = x.x;
        q[n][r + 2] = x.y;
        q[n + 1][r] = x.z;
        q[n + 1][r + 2] = x.w;
      }
    }
    if (tile_count_ == 0) mbarrier_arrive(cta_.q_requested());
#pragma unroll
    for (int n = 0; n < C::kQRegisterAtoms * 4; n += 2)
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
  // Each warp loads its own rows.
  __device__ __forceinline__ void load_q() const {
    const int vector = opaque(lane_) & 7, end = warp_ * 16 + 16;
#pragma unroll 1
    for (int row = warp_ * 16 + (opaque(lane_) >> 3); row < end; row += 4) {
      const int first = C::kQRegisterAtoms * 64 + vector * 8,
                columns = row < work_->rows ? static_cast<int>(p_.head_dim) - first : 0;
      const Element *src = q_at(min(row, work_->rows - 1));
      const uint32_t dst = cta_.shared_q() + row * 128 + ((vector ^ (row & 7)) << 4);
#pragma unroll
      for (int atom = 0; atom < C::kAtoms - C::kQRegisterAtoms; ++atom) {
        const bool exists = atom * 64 < columns;
        cp_async_16(dst + atom * C::kQAtomBytes, exists ? src + first + atom * 64 : src, exists ? 16 : 0);
      }
    }
    cp_async_commit();
  }
  // 8-bit K: queries in bf16 become fp16, each row times a power of two of its own. S is multiplied by the inverse, and by the descale of K.
  __device__ __forceinline__ void prepare_q(uint32_t (&q)[C::kQRegisterAtoms * 4][4]) {
    const float descale = head_descale(a_.k_descale, cta_.descale_batch(*work_), work_->head);
    if (p_.q.dtype != Dtype::bf16) {
#pragma unroll
      for (int r = 0; r < 2; ++r) st_shared_float(cta_.shared_row_scale(row_of(r)), descale);
      return;
    }
    __syncwarp();  // the warp's rows have arrived
    constexpr int kAtoms = C::kAtoms - C::kQRegisterAtoms;
    const int quad = opaque(lane_) & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r);
      // The lane's two vectors of an atom. The four lanes of a row have all of it.
      const auto vector = [&](int n) {
        return cta_.shared_q() + n / 2 * C::kQAtomBytes + row * 128 + (((quad + n % 2 * 4) ^ (row & 7)) << 4);
      };
      uint32_t top = 0;
#pragma unroll
      for (int n = 0; n < C::kQRegisterAtoms * 4; ++n) top = max_exponent(max_exponent(top, q[n][r]), q[n][r + 2]);
#pragma unroll 1
      for (int n = 0; n < 2 * kAtoms; ++n) {
        const uint4 x = ld_shared_16(vector(n));
        top = max_exponent(max_exponent(max_exponent(max_exponent(top, x.x), x.y), x.z), x.w);
      }
      top = max(top, __shfl_xor_sync(~0u, top, 1));
      top = max(top, __shfl_xor_sync(~0u, top, 2));
      const Bf16ToFp16 conversion(top);
      st_shared_float(cta_.shared_row_scale(row), descale * conversion.inverse);
#pragma unroll
      for (int n = 0; n < C::kQRegisterAtoms * 4; ++n) {
        q[n][r] = conversion.convert(q[n][r]);
        q[n][r + 2] = conversion.convert(q[n][r + 2]);
      }
#pragma unroll 1
      for (int n = 0; n < 2 * kAtoms; ++n) {
        const uint4 x = ld_shared_16(vector(n));
        st_shared_16(vector(n), conversion.convert(x.x), conversion.convert(x.y), conversion.convert(x.z),
                     conversion.convert(x.w));
      }
    }
  }
  __device__ __forceinline__ void apply_row_scales(float (&s)[C::kKeys / 2]) const {
    const float scale[2] = {ld_shared_float(cta_.shared_row_scale(row_of(0))),
                            ld_shared_float(cta_.shared_row_scale(row_of(1)))};
#pragma unroll
    for (int n = 0; n < C::kKeys / 2; ++n) s[n] *= scale[n / 2 % 2];
  }
  // A barrier of the softmax warps, passed twice per work unit.
  __device__ __forceinline__ void sync_softmax(uint32_t parity) const {
    mbarrier_arrive(cta_.softmax_sync());
    mbarrier_wait(cta_.softmax_sync(), parity);
  }

  __device__ __forceinline__ void qk(float (&s)[C::kKeys / 2], uint32_t (&q)[C::kQRegisterAtoms * 4][4]) const {
    uint64_t keys = row_group_descriptor<C>(cta_.shared_tile(stage())), q_shared = descriptor_k_major(cta_.shared_q());
    asm volatile("" : "+l"(keys), "+l"(q_shared));
    const auto k = [&](int n) { return advance_descriptor(keys, n / 4 * C::kAtomBytes + n % 4 * 32); };
    fence_operand(s);
    fence_operand(q);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < C::kQRegisterAtoms * 4; ++n) wgmma_rs_k<Element>(s, q[n], k(n), n > 0);
#pragma unroll
    for (int n = C::kQRegisterAtoms * 4; n < C::kAtoms * 4; ++n) {
      if (n == C::kEarlyAtoms * 4) {  // the other atoms
        wgmma_commit();
        mbarrier_wait(cta_.full(stage()), tile_count_ >> 1 & 1);
        wgmma_fence();
      }
      const int n_shared = n - C::kQRegisterAtoms * 4;
      Wgmma<Element, C::kKeys>::ss_k_k(s, advance_descriptor(q_shared, n_shared / 4 * C::kQAtomBytes + n_shared % 4 * 32), k(n),
                                       n > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    fence_operand(s);
  }

  // Waits until both PV warpgroups have read that K tile and its P.
  __device__ __forceinline__ void wait_pv(uint32_t tile) const {
    mbarrier_wait(cta_.empty(tile & 1, C::kSlices - 1), tile >> 1 & 1);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void apply_mask(float (&s)[C::kKeys / 2], int key0) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const KeyRange keys = keys_of_query({a_.limits, work_->tokens, work_->seqlen_k}, token_of(row_of(r)));
      mask_row<Fragment>(s, r, visible_bits<Fragment>(keys, key0, opaque(lane_)));
    }
  }

  // Raises the maxima of rows whose P would exceed 2^kRescaleThreshold. Under FA_FLAG_SAME_BITS each step is rounded by itself: what a lane finds
  // of its own scores and what the row finds of all must not differ, or a neighbour that asks for a raise would decide.
  __device__ __forceinline__ bool update_max(const float (&s)[C::kKeys / 2]) {
    const float c = exponent_scale(p_);
    if constexpr (!C::kSameBits) {
      return softmax_.template update_max</*kEachRow=*/true>(s, c, kRescaleThreshold);
    } else {
      float top[2] = {__fmul_rn(softmax_.largest(s, 0), c), __fmul_rn(softmax_.largest(s, 1), c)};
      const auto exceeds = [&](int r) { return __fsub_rn(top[r], kRescaleThreshold) > softmax_.max[r]; };
      if (!__any_sync(~0u, exceeds(0) || exceeds(1))) return false;
      Fragment::reduce(top, MaxOp{});
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (exceeds(r)) raise_row(softmax_, r, top[r]);
      }
      return true;
    }
  }

  // P = 2^(S - m) as 16-bit numbers to shared memory, preceded by the rescale factors; adds P to the row sums. P of a masked pair becomes
  // kMaskedP. P is released in slices of 16 keys: the PV warpgroups multiply the first while the next are exponentiated.
  template <bool kMasked>
  __device__ __forceinline__ void exponentiate_and_store_p(float (&s)[C::kKeys / 2]) {
    const float c = exponent_scale(p_);
    const int lane = opaque(lane_);  // registers are scarce
    store_rescale(lane);
    const uint32_t row_address = cta_.shared_p(stage()) + (warp_ * 16 + (lane & 15)) * 128;
    float tile_sum[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < C::kKeys / 16; ++n) {
      uint32_t p[4];
      softmax_.template exponentiate_step<Element, kMasked>(s, 0, n, c, tile_sum, p);
      stmatrix_x4(row_address + (((2 * n + (lane_ >> 4)) ^ (lane_ & 7)) << 4), p);
      release_p(n);
    }
    softmax_.sum[0] += tile_sum[0];
    softmax_.sum[1] += tile_sum[1];
  }
  __device__ __forceinline__ void store_rescale(int lane) const {
    if (Fragment::leads(lane)) {
      const uint32_t address = cta_.shared_rescale(stage(), warp_ * 16 + Fragment::query(lane, 0));
      st_shared_float(address, softmax_.rescale[0]);
      st_shared_float(address + 8 * 4, softmax_.rescale[1]);  // of row_of(1)
    }
  }
  __device__ __forceinline__ void release_p(int slice) const {
    fence_proxy_async();
    mbarrier_arrive(cta_.p_full(stage(), slice));
  }

  // ------------------------------------------------------------------------------------------------------------------
  // End of a work unit
  // ------------------------------------------------------------------------------------------------------------------

  // Computes each row's rescale factors for the epilogue and lse, or stores the maximum and sum of a partial.
  __device__ __forceinline__ void finalize() {
    float2 stats[2];
    softmax_.reduce_sums();
#pragma unroll
    for (int r = 0; r < 2; ++r) stats[r] = {softmax_.max[r], softmax_.sum[r]};
    float own_scale[2] = {1.f, 1.f};
    if constexpr (C::kSameBits) {
      // The PV warps receive segments through the memory of the K tiles.
      if (work_->partials > 0 && tile_count_ > 0) wait_pv(tile_count_ - 1);
      if (warp_ * 16 < work_->rows) segments_.take(cta_, *work_, warp_, stats, work_->kv_tile_end - 1, /*last=*/true);
    } else {
      if (work_->partials > 0) combine_stats(stats, own_scale);
    }
    if (!Fragment::leads(lane_)) return;
    const bool peer_stores_lse = C::kPairs && work_->pair && cluster_cta_rank() == 0;
    if (C::kPairs && work_->pair) exchange_stats(stats, own_scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r);
      const uint32_t epilogue = cta_.shared_epilogue(row);
      if (work_->tile_continues) {
        if (!(C::kSameBits && C::kUsesCombineKernel) && warp_ * 16 < work_->rows)
          (C::kSameBits ? cta_.handed_stats(work_->partial) : cta_.partial_stats(work_->partial))[row] = stats[r];
        if (!C::kSameBits) st_shared_float(epilogue, own_scale[r]);
      } else if (row < work_->rows) {
        auto [factor, lse] = finalize_row(stats[r].x, stats[r].y, sink_of(p_, cta_.head_of(*work_, row)));
        if constexpr (C::k8BitKv) factor *= head_descale(a_.v_descale, cta_.descale_batch(*work_), work_->head);
        const auto dst = reinterpret_cast<uint64_t>(cta_.rows_of(*work_).out_at(row));
        st_shared_16(epilogue, __float_as_uint(own_scale[r]), __float_as_uint(factor), static_cast<uint32_t>(dst),
                     static_cast<uint32_t>(dst >> 32));
        if (float *dst_lse = cta_.rows_of(*work_).lse_at(row); dst_lse != nullptr && !peer_stores_lse) *dst_lse = lse;
      }
    }
  }

  // Exchanges maxima and sums with the peer CTA of a cluster, by the lanes that own a row each. Both CTAs compute the same stats: the terms are
  // added in the order of the keys.
  __device__ __forceinline__ void exchange_stats(float2 (&stats)[2], float (&own_scale)[2]) const {
    const int rank = cluster_cta_rank(), peer = rank ^ 1;
    const uint32_t stats_full = cta_.dsmem_stats_full();
    if (warp_ * 16 >= work_->rows) return;
    if (warp_ == 0 && lane_ == 0) mbarrier_arrive_expect_tx(stats_full, (work_->rows + 15) / 16 * 16 * sizeof(float2));
#pragma unroll
    for (int r = 0; r < 2; ++r)
      st_async(map_to_cta(cta_.shared_peer_stats(row_of(r)), peer), stats[r], map_to_cta(stats_full, peer));
    mbarrier_wait(stats_full, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t address = cta_.shared_peer_stats(row_of(r));
      const float2 theirs = ld_shared_float2(address);
      const float top = fmaxf(stats[r].x, theirs.x), peer_scale = exp2_approx(theirs.x - top);
      own_scale[r] = exp2_approx(stats[r].x - top);
      st_shared_float(address, peer_scale);
      stats[r] = {top, rank == 0 ? fmaf(theirs.y, peer_scale, stats[r].y * own_scale[r])
                                 : fmaf(stats[r].y, own_scale[r], theirs.y * peer_scale)};
    }
  }

  // Waits for the partials of the partitions before, and turns their maxima into rescale factors, in shared memory where K tiles were. Those
  // partitions belong to CTAs that start before this one and compute these units first. The four lanes of a row divide its partials.
  __device__ __forceinline__ void combine_stats(float2 (&stats)[2], float (&own_scale)[2]) {
    const int partials = work_->partials, quad = opaque(lane_) & 3;
    if (tile_count_ > 0) wait_pv(tile_count_ - 1);
    if (lane_ == 0) {
      while (load_acquire(a_.counters + work_->awaited_counter) != partials) __nanosleep(100);
    }
    __syncwarp();
    if (warp_ * 16 >= work_->rows) return;
      // Eight lanes load the stats of a warp's 16 rows.
#pragma unroll 1
    for (int partial = opaque(lane_) >> 3; partial < partials; partial += 4) {
      const int row = warp_ * 16 + (opaque(lane_) & 7) * 2;
      cp_async_16(cta_.shared_partial_stats(partial, row), cta_.partial_stats(cta_.partial(*work_, partial)) + row);
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = stats[r].x;
#pragma unroll 1
      for (int partial = quad; partial < partials; partial += 4)
        top = fmaxf(top, ld_shared_float(cta_.shared_partial_stats(partial, row_of(r))));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      own_scale[r] = exp2_approx(stats[r].x - top);
      float sum = 0.f;
#pragma unroll 1
      for (int partial = quad; partial < partials; partial += 4) {
        const uint32_t address = cta_.shared_partial_stats(partial, row_of(r));
        const float2 its_stats = ld_shared_float2(address);
        const float scale = exp2_approx(its_stats.x - top);
        sum = fmaf(scale, its_stats.y, sum);
        st_shared_float(address, scale);
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      stats[r] = {top, fmaf(stats[r].y, own_scale[r], sum)};
    }
  }

  const Cta<C> cta_;
  const Params &a_;
  const Problem &p_;
  const int lane_;
  const WorkUnitDescriptor *work_;
  int warp_;                 // within the warpgroup
  uint32_t tile_count_ = 0;  // K tiles of the CTA so far
  uint32_t epilogues_ = 0;   // FA_FLAG_SAME_BITS: of the CTA so far, one for each segment
  OnlineSoftmax<Fragment> softmax_;
  SegmentStats<C, Fragment> segments_;
};

}  // namespace fa::cuda::mla
