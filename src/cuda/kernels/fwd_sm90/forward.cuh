// SPDX-License-Identifier: Apache-2.0
// Exact attention forward for Hopper (sm_90a): wgmma, TMA, warp specialisation, persistent CTAs.
//
//   O = softmax(scale Q K^T) V     Q [seqlen_q][D]   K [seqlen_k][D]   V [seqlen_k][Dv]   for each head of each sequence
//
// A CTA takes work tiles of kRows query rows of one head from a counter, longest first.
//
//   scheduler warp         takes the next work tile and writes its description to shared memory (work_tile.cuh)
//   producer warp          loads K and V tiles of kKeys keys by TMA through pipelines of kStages stages; loads Q if it has two stages
//   Q producer warps       load Q where it has a single stage: they wait for the last S = Q K^T of the previous work tile
//   consumer warpgroups    64 rows each: S and out are accumulators in registers, P is an A operand in registers
//
// The main loop is software-pipelined by one KV tile, and runs across the ends of work tiles. One iteration:
//
//   issue S = Q K^T of this KV tile;  issue out += P V of the previous KV tile
//   wait for S;                       mask, P = exp2(S - m) while out += P V runs
//   wait for out;                     if that was the last KV tile of a work tile, store its rows
//   convert P to 16 (or 8) bits
//
// So the first S of a work tile runs while the rows of the previous work tile are finished, and the tensor cores do not idle in between.
//
// Lazy rescaling: the row maximum m may be too small by up to kRescaleThreshold (in base 2), as in the sm_80 kernel. Most KV tiles leave
// out alone. With head_dim_v up to 128 the unmasked iterations do not even compute the maximum. They make P with the current m, and where
// the sum of P turns out too large, m is raised afterwards.
//
// KV tiles with masked pairs come first. P of a masked pair is 0, and 0 times NaN or Inf in V is NaN. If out is not finite after the masked
// tiles, the warp recomputes their part over the visible pairs only (nan_safe_recompute).
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90/consumer.cuh"

namespace fa::cuda::sm90 {

template <class C>
class Forward : private ForwardConsumer<C> {
 public:
  using Base = ForwardConsumer<C>;
  using typename Base::Element;
  using typename Base::WorkTile;
  static constexpr int kKeys = C::kKeys;
  // With head_dim_v 256 the wgmmas take the time, and there are no registers to spare.
  static constexpr bool kSpareRegisters = C::kDv < 256;
  // Whether an iteration waits for V only after it has issued S, and for the next K before it exponentiates. With three warpgroups that gains
  // nothing.
  static constexpr bool kEarlyK = kSpareRegisters && C::kConsumerWarpgroups == 2;
  // Whether unmasked iterations make P with the current maximum, and raise it only if the sum of P is too large. Raising takes registers.
  static constexpr bool kDeferredMax = C::kDv <= 128 && !C::kHasScoreMod;

  using Base::Base;

  __device__ __forceinline__ void run() {
    bool has_work = false;  // whether the first work tile has rows
    if (threadIdx.x < 128) {
      if (warp_ == kProducerWarp) {
        if (elect_one()) init_barriers();
      } else if (warp_ == kSchedulerWarp) {
        has_work = schedule_first();
      }
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (warp_ == kProducerWarp) {
        load_kv();
      } else if (warp_ == kSchedulerWarp) {
        schedule(has_work);
      } else if constexpr (C::kQProducerWarps > 0) {
        load_q_tiles(warp_ - kFirstQWarp);
      }
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      wg_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128 - 1), 0);  // warp-uniform, and known to the compiler to be
      mainloop();
    }
  }

 private:
  static constexpr int kProducerWarp = 0, kSchedulerWarp = 1, kFirstQWarp = 2;

  using Base::k_empty, Base::k_full, Base::k_tile, Base::q_empty, Base::q_full, Base::q_tile, Base::v_empty, Base::v_full,
      Base::v_tile;
  using Base::load_kv, Base::load_q_tiles, Base::init_barriers, Base::schedule, Base::schedule_first;
  using Base::out_, Base::out_max_, Base::s_, Base::softmax_, Base::p_operand_;
  using Base::row_of, Base::rescale_out, Base::apply_score_mod, Base::store_empty_rows, Base::store_rows,
      Base::store_unused_rows, Base::set_scale, Base::promote_out, Base::add_promoted_out, Base::exponentiate;
  using Base::update_max_and_exponentiate, Base::find_visible, Base::finalize_rows, Base::apply_mask, Base::make_nan_safe,
      Base::rescale_p, Base::convert_p;
  using Base::wg_, Base::lane_, Base::p_, Base::shared_, Base::warp_;
  using Base::work_tile, Base::work_empty, Base::work_full;

  // ------------------------------------------------------------------------------------------------------------------
  // wgmma
  // ------------------------------------------------------------------------------------------------------------------

  // The descriptor of stage n of a pipeline that starts at `offset`, and of part m of the stage. `at_zero` is the descriptor of the same
  // operand at address 0. Between the stage number and the wgmma there is one addition, instead of an address and its conversion.
  __device__ __forceinline__ uint64_t stage_descriptor(uint64_t at_zero, int offset, int n, int bytes, int m = 0,
                                                       int part_bytes = 0) const {
    const int moved = (offset >> 4) + n * (bytes >> 4) + m * (part_bytes >> 4);
    return (at_zero & 0xFFFFFFFF00000000) | (static_cast<uint32_t>(at_zero) + (shared_ >> 4) + static_cast<uint32_t>(moved));
  }

  // Issues S = Q K^T for the next stage of K: Q [64][D], K [kKeys][D], S [64][kKeys].
  __device__ __forceinline__ void issue_qk() {
    constexpr bool kFewRegisters =
        C::kFp8 ||
        (C::kHasScoreMod && !kSpareRegisters);  // with few registers: else the descriptors of Q would be kept in some
    const uint64_t q = kFewRegisters ? descriptor_k_major(q_tile(q_.stage()) + wg_ * C::kQWarpgroupBytes)
                                     : stage_descriptor(descriptor_k_major_uniform(0), 0, q_.stage(), C::kQBytes, wg_,
                                                        C::kQWarpgroupBytes),
                   k = stage_descriptor(descriptor_k_major_uniform(0), C::kQStages * C::kQBytes, k_.stage(), C::kKBytes);
#pragma unroll
    for (int d = 0; d < C::kD / C::kMmaK; ++d) {
      Wgmma<Element, kKeys>::ss_k_k(s_, advance_descriptor(q, d / 4 * 64 * 128 + d % 4 * 32),
                                    advance_descriptor(k, d / 4 * kKeys * 128 + d % 4 * 32), d != 0);
    }
    wgmma_commit();
  }

  // Issues out += P V for the next stage of V: P [64][kKeys], V [kKeys][Dv], out [64][Dv]. The first one of a work tile overwrites out.
  __device__ __forceinline__ void issue_pv(bool first) {
    const uint64_t v = stage_descriptor(C::kFp8 ? descriptor_k_major_uniform(0) : descriptor_mn_major_uniform<kKeys>(0),
                                        C::kQStages * C::kQBytes + C::kStages * C::kKBytes, v_.stage(), C::kVBytes);
#pragma unroll
    for (int n = 0; n < Base::kPvSteps; ++n) {
      if constexpr (C::kFp8) {
        Wgmma<Element, C::kDv>::rs_k(out_, p_operand_[n], advance_descriptor(v, n * 32), n != 0 || !first);
      } else {
        Wgmma<Element, C::kDv>::rs_mn(out_, p_operand_[n], advance_descriptor(v, n * 2048), n != 0 || !first);
      }
    }
    wgmma_commit();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Main loop over work tiles and KV tiles
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void mainloop() {
#pragma unroll
    for (int n = 0; n < Base::kPvSteps; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) p_operand_[n][r] = 0;
    bool pending = false;  // out += P V of the previous work tile's last KV tile is still to be done
    bool single = true;    // that KV tile is the work tile's only one
    while (true) {
      mbarrier_wait(work_full(work_.stage()), work_.phase());
      const WorkTile &t = work_tile(work_.stage());
      const int begin = t.begin[wg_], masked_end = t.masked_end[wg_], kv_tiles = t.kv_tiles;
      if (begin >= kv_tiles) {  // the warpgroup has no rows, its rows see no keys, or there is no more work
        if (pending) drain(single);
        pending = false;
        if (kv_tiles < 0) {
          if (C::kOutAtoms > 0 && lane_ == 0) bulk_wait_group_read();  // shared memory is freed when the CTA exits
          break;
        }
        skip_tile(t);
        work_.advance();
        continue;
      }
      if (t.row0 + C::kRows > t.seqlen_q) store_unused_rows(t);
      mbarrier_wait(q_full(q_.stage(), wg_), q_.phase());
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Finite, so that -inf - max is -inf. Unused rows hold whatever: their maximum is so large that they never cause a rescale, which all
        // rows of a warp do together.
        softmax_.max[r] = row_of(t, r) < t.seqlen_q ? -1e30f : 1e30f;
        softmax_.sum[r] = 0.f;
      }
      set_scale(t);
      for (int n = 0; n < begin; ++n) skip_k();
      iteration<true>(t, begin, masked_end, kv_tiles, pending, single);
      int i = begin + 1;
      const int unmasked_begin = Base::unmasked_begin(t, begin, masked_end);
#pragma unroll 1
      for (; i < unmasked_begin; ++i) iteration<false>(t, i, masked_end, kv_tiles, true, i == begin + 1);
      if (kEarlyK && i < kv_tiles) mbarrier_wait(k_full(k_.stage()), k_.phase());
      bool restart = i == begin + 1, promoted = false;  // fp8: out starts again from zero; there is a promoted sum
#pragma unroll 1
      for (; i < kv_tiles; ++i) {
        unmasked_iteration(t, i, i + 1 == kv_tiles, C::kFp8 ? restart : i == begin + 1);
        if constexpr (C::kFp8) {
          restart = (i + 1) % Base::kPromotionInterval == 0 && i + 1 < kv_tiles;
          if (restart) {
            promote_out(promoted);
            promoted = true;
          }
        }
      }
      finalize_rows(work_tile(work_.stage()));
      pending = true;
      single = begin + 1 == kv_tiles;
      q_.advance();
      work_.advance();
    }
  }

  __device__ __forceinline__ const WorkTile &previous_tile() const {
    return work_tile((work_.stage() + C::kWorkStages - 1) % C::kWorkStages);
  }

  // Does the pending out += P V of the previous work tile, with no S to overlap it.
  __device__ __forceinline__ void drain(bool single) {
    mbarrier_wait(v_full(v_.stage()), v_.phase());
    if (single) clear_v_tail(previous_tile());
    fence_operands();
    issue_pv(single);
    wgmma_wait<0>();
    fence_operand(out_);
    mbarrier_arrive_if(lane_ == 0, v_empty(v_.stage()));
    v_.advance();
    finish_previous();
  }

  // A work tile in which this warpgroup has no work.
  __device__ __forceinline__ void skip_tile(const WorkTile &t) {
    store_unused_rows(t);
    store_empty_rows(t);
    const int kv_tiles = t.kv_tiles;
    if (kv_tiles > 0) {
      mbarrier_wait(q_full(q_.stage(), wg_), q_.phase());
      mbarrier_arrive_if(lane_ == 0, q_empty(q_.stage(), wg_));
      q_.advance();
    }
    for (int i = 0; i < kv_tiles; ++i) {
      skip_k();
      skip_v();
    }
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, work_empty(work_.stage()));
  }

  // Skips a KV tile that only other warpgroups see. It waits for the load first: an arrival before that would count for the phase before.
  __device__ __forceinline__ void skip_k() {
    mbarrier_wait(k_full(k_.stage()), k_.phase());
    mbarrier_arrive_if(lane_ == 0, k_empty(k_.stage()));
    k_.advance();
  }
  __device__ __forceinline__ void skip_v() {
    mbarrier_wait(v_full(v_.stage()), v_.phase());
    mbarrier_arrive_if(lane_ == 0, v_empty(v_.stage()));
    v_.advance();
  }

  // Zeroes the rows of V past the end of the sequence in a work tile's first KV tile. They belong to unused memory or to the next sequence,
  // and may hold NaN. Every warpgroup zeroes all of them, so that none waits for another.
  __device__ __forceinline__ void clear_v_tail(const WorkTile &t) const {
    if (C::kFp8 || (p_.k_lengths.cu == nullptr && p_.k_lengths.used == nullptr))
      return;  // TMA or the transposed copy of V has zeros there
    const int used = t.seqlen_k - t.kv_tile(t.begin[wg_]) * kKeys;
    if (used >= kKeys) return;
    const uint32_t v = v_tile(v_.stage());
    for (int n = used * 8 + (threadIdx.x & 127); n < kKeys * 8; n += 128)
#pragma unroll
      for (int s = 0; s < C::kVAtoms; ++s) st_shared_16(v + s * kKeys * 128 + n * 16, 0, 0, 0, 0);
    fence_proxy_async();
    named_barrier(1 + wg_, 128);
  }

  __device__ __forceinline__ void fence_operands() {
    fence_operand(s_);
    fence_operand(out_);
    fence_operand(p_operand_);
    wgmma_fence();
  }

  // Iteration i of a work tile, in full: issues S of KV tile i and out += P V of the KV tile before it, then turns S into P. In the first
  // iteration of a work tile (kFirst) the KV tile before is the last one of the previous work tile. `has_pv`: there is a KV tile before.
  // `first_pv`: it is the first of its work tile.
  template <bool kFirst>
  __device__ __forceinline__ void iteration(const WorkTile &t, int i, int masked_end, int kv_tiles, bool has_pv,
                                            bool first_pv) {
    // Without a KV tile before, the wgmma runs on whatever V's stage holds, and its result is ignored: so all work tiles run the same code.
    const auto wait_v = [&] {
      if (!has_pv) return;
      mbarrier_wait(v_full(v_.stage()), v_.phase());
      if (first_pv) clear_v_tail(kFirst ? previous_tile() : t);
    };
    mbarrier_wait(k_full(k_.stage()), k_.phase());
    if (!kEarlyK) wait_v();
    fence_operands();
    issue_qk();
    const bool masked = i < masked_end;
    uint32_t visible[2];
    if (kSpareRegisters && masked) find_visible(t, t.kv_tile(i) * kKeys, visible);  // while the wgmmas run
    if (kEarlyK) wait_v();
    wgmma_fence();
    issue_pv(first_pv);
    wgmma_wait<1>();
    fence_operand(s_);
    mbarrier_arrive_if(lane_ == 0, k_empty(k_.stage()));
    mbarrier_arrive_if(lane_ == 0 && i + 1 == kv_tiles, q_empty(q_.stage(), wg_));
    k_.advance();
    if constexpr (C::kHasScoreMod) apply_score_mod(t, t.kv_tile(i) * kKeys);
    if (masked) {
      if (!kSpareRegisters) find_visible(t, t.kv_tile(i) * kKeys, visible);
      apply_mask(visible);
    }
    const bool rescaled = update_max_and_exponentiate();
    compute_before_wait(softmax_.sum[0] + softmax_.sum[1]);
    wgmma_wait<0>();
    fence_operand(out_);
    fence_operand(p_operand_);
    convert_p();  // first of all: S is free from here on
    if (has_pv) {
      mbarrier_arrive_if(lane_ == 0, v_empty(v_.stage()));
      v_.advance();
    }
    if constexpr (kFirst) {
      if (has_pv) finish_previous();
      for (int n = 0; n < i; ++n) skip_v();
      masked_only_ = masked_end == kv_tiles;
    } else {
      if (i == masked_end) make_nan_safe(t);
      if (rescaled) rescale_out();
    }
    out_max_[0] = softmax_.max[0];
    out_max_[1] = softmax_.max[1];
  }

  // An iteration without masks whose previous KV tile is in the same work tile: most iterations. With kEarlyK the K stage is already full.
  __device__ __forceinline__ void unmasked_iteration(const WorkTile &t, int i, bool last, bool first_pv) {
    if (!kEarlyK) {
      mbarrier_wait(k_full(k_.stage()), k_.phase());
      mbarrier_wait(v_full(v_.stage()), v_.phase());
    }
    fence_operands();
    issue_qk();
    if (kEarlyK) {
      mbarrier_wait(v_full(v_.stage()), v_.phase());
      wgmma_fence();
    }
    issue_pv(first_pv);
    wgmma_wait<1>();
    fence_operand(s_);
    mbarrier_arrive_if(lane_ == 0, k_empty(k_.stage()));
    mbarrier_arrive_if(lane_ == 0 && last, q_empty(q_.stage(), wg_));
    k_.advance();
    if (kEarlyK && !last) mbarrier_wait(k_full(k_.stage()), k_.phase());
    if constexpr (C::kHasScoreMod) apply_score_mod(t, t.kv_tile(i) * kKeys);
    float sum[2] = {0.f, 0.f};
    bool rescaled;  // out must be multiplied by softmax_.rescale
    if constexpr (kDeferredMax) {
      exponentiate(sum);
      rescaled = __any_sync(~0u, C::kFp8 ? !(fmaxf(sum[0], sum[1]) <= Base::kMaxLaneSum) : !(sum[0] + sum[1] <= kMaxRowSum));
    } else {
      rescaled = update_max_and_exponentiate();
    }
    compute_before_wait(kDeferredMax ? sum[0] + sum[1] + softmax_.sum[0] : softmax_.sum[0] + softmax_.sum[1]);
    wgmma_wait<0>();
    fence_operand(out_);
    fence_operand(p_operand_);
    mbarrier_arrive_if(lane_ == 0, v_empty(v_.stage()));
    v_.advance();
    if (rescaled) {
      if constexpr (kDeferredMax) rescale_p(t, t.kv_tile(i) * kKeys, sum);
      rescale_out();
    }
    softmax_.sum[0] += sum[0];
    softmax_.sum[1] += sum[1];
    convert_p();
  }

  // The previous work tile has all of its out: finishes its rows and frees its description.
  __device__ __forceinline__ void finish_previous() {
    const WorkTile &t = previous_tile();
    if (masked_only_) make_nan_safe(t);
    if constexpr (C::kFp8) add_promoted_out(t);
    store_rows(t);
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, work_empty((work_.stage() + C::kWorkStages - 1) % C::kWorkStages));
  }

  PipelineState<C::kQStages> q_;
  PipelineState<C::kStages> k_, v_;
  PipelineState<C::kWorkStages> work_;
  bool masked_only_ = false;  // the previous work tile had only KV tiles with masked pairs
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm) forward(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  Forward<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90
