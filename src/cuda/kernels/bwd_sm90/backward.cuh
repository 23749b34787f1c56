// SPDX-License-Identifier: Apache-2.0
// Exact attention backward with wgmma (sm_90a), head_dim up to 128: computes dk, dv and the fp32 sum for dq. README.md has the
// reasons.
//
// A persistent CTA per SM. A work tile is 128 keys of one key head: K and V stay in shared memory, and the main loop runs over
// the queries that see them, query head after query head of the GQA group, in Q tiles of kTileQ rows, from the last Q tile
// down.
//
// | warps | role |
// |---|---|
// | 0 | producer: loads Q, dO, lse and delta by TMA through pipelines of kStages stages, and K and V of each work tile |
// | 1, 2 | reduce dq: TMA adds the partial of consumer warpgroup 0 or 1 to dq_sum |
// | 3 | scheduler: takes the next work tile from a counter and writes its description to shared memory |
// | consumer warpgroups 0, 1 | 64 keys each, with their dk and dv in registers |
//
// An iteration of a consumer warpgroup (S^T and dP^T: 64 keys x queries; kDpParts parts of 64 queries):
//
//   start S^T = K Q^T, then dP^T = V dO^T of 64 queries
//   wait for S^T; P^T = exp2(S^T - lse), converted to 16 bits, while dP^T runs
//   wait for dP^T; dS^T = P^T (dP^T - delta), converted and stored to shared memory
//   start dv += P^T dO and the first part of dk += dS^T Q; if kDpParts is 2, before them dP^T and meanwhile dS^T of the other 64 queries
//   start dq = dS K of the previous Q tile (half of its columns, or of its queries, per warpgroup), then the rest of dk
//   while that part of dk runs: store dq to shared memory, from where a dq warp has TMA add it to dq_sum
//
// P and dS are the A operands of dv and dk straight from registers. dq needs dS of both warpgroups. It is one iteration behind,
// so neither warpgroup waits for dS that the other has just begun, and the exponentials of one overlap the wgmma of the other.
//
// With Q tiles of 80 queries it is dq^T = K^T dS^T, half of the columns per warpgroup.
//
// Shared memory: K and V | Q stages | dO stages | two dS | dq partials | lse stages | delta stages | barriers | work tiles
#pragma once

#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_pre_post/second_pass.cuh"
#include "cuda/kernels/bwd_sm90/alibi.cuh"
#include "cuda/kernels/bwd_sm90/dropout.cuh"
#include "cuda/kernels/bwd_sm90/producer_warps.cuh"
#include "cuda/kernels/bwd_sm90/shown_pairs.cuh"
#include "cuda/kernels/bwd_sm90/split_tail.cuh"

namespace fa::cuda::sm90 {
template <class C>
class Backward : ProducerWarps<C> {
  using Base = ProducerWarps<C>;
  using Base::again;
  using Base::bias_empty;
  using Base::bias_full;
  using Base::bias_phase;
  using Base::bias_stage;
  using Base::cta_;
  using Base::dout_empty;
  using Base::dout_full;
  using Base::dq_empty;
  using Base::dq_full;
  using Base::dq_warp;
  using Base::ds_empty;
  using Base::ds_full;
  using Base::has_bias;
  using Base::is_bias_fp32;
  using Base::k_empty;
  using Base::kTilesPerWorkStage;
  using Base::kWg0MaySkip;
  using Base::kWg1MaySkip;
  using Base::loads_issued;
  using Base::masked_tiles;
  using Base::next_work_tile;
  using Base::producer;
  using Base::q_empty;
  using Base::q_full;
  using Base::release_work_tile;
  using Base::scheduler;
  using Base::smem_bias;
  using Base::smem_bias_tile;
  using Base::smem_delta;
  using Base::smem_dout;
  using Base::smem_dq;
  using Base::smem_ds;
  using Base::smem_lse;
  using Base::smem_q;
  using Base::v_empty;
  using Base::visited;
  using Base::work_empty;
  using Base::work_full;
  using typename Base::Element;
  using typename Base::QPipeline;
  using typename Base::Storage;

 public:
  __device__ __forceinline__ Backward(const BackwardParams &params, char *shared) : Base(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int n = 0; n < C::kKvStages; ++n) {
        mbarrier_init(k_empty(n), C::kConsumerWarpgroups * 4);
        mbarrier_init(v_empty(n), C::kConsumerWarpgroups * 4);
      }
      mbarrier_init(loads_issued(), 1);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(work_full(n), 1);
        mbarrier_init(work_empty(n), C::kConsumerWarpgroups * 4 + C::kDqPartials + 1);
      }
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(ds_full(n), C::kConsumerWarpgroups * 4);
        mbarrier_init(ds_empty(n), C::kConsumerWarpgroups * 4);
      }
      for (int n = 0; n < C::kConsumerWarpgroups; ++n) {
        mbarrier_init(dq_full(n), 4);
        mbarrier_init(dq_empty(n), 1);
      }
      for (int n = 0; n < C::kStages; ++n) {
        mbarrier_init(q_full(n), C::kAlibiByWgmma ? 2 : 1);  // the second arrival is write_alibi()'s
        mbarrier_init(q_empty(n), C::kConsumerWarpgroups * 4);
        mbarrier_init(dout_full(n), 1);
        mbarrier_init(dout_empty(n), C::kConsumerWarpgroups * 4);
      }
      if constexpr (C::kStagesBias || C::kMixtures) {
        for (int n = 0; n < Storage::kBiasStages; ++n) {
          mbarrier_init(bias_full(n), 1);
          mbarrier_init(bias_empty(n), C::kConsumerWarpgroups * 4);
        }
      }
      mbarrier_init_fence();
      if constexpr (C::kHasDropout) {
        const DropoutKey key = load_dropout_key(cta_.problem.dropout);
        st_shared_16(cta_.at(offsetof(Storage, dropout_key)), key.k0, key.k1, key.c3, 0);
      }
    } else if (threadIdx.x == 32) {
      for (const CUtensorMap *map : {&cta_.params.k_map, &cta_.params.q_map, &cta_.params.lse_map, &cta_.params.v_map,
                                     &cta_.params.dout_map, &cta_.params.delta_map})
        tma_prefetch_descriptor(map);
      if (C::kStagesBias || (C::kMixtures && has_bias())) tma_prefetch_descriptor(&cta_.params.bias_map);
    }
    if constexpr (C::kAlibiByWgmma) {
      if (threadIdx.x / 32 == 2) write_alibi_keys<C>(cta_.smem, cta_.lane);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      static_assert(C::kDqPartials == 2);
      if (cta_.warp == 0) {
        producer();
      } else if (cta_.warp == 3) {
        scheduler();
      } else {
        dq_warp(cta_.warp - 1);
      }
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      wg_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128 - 1), 0);  // warp-uniform, which the shuffle tells the compiler
      consumer();
    }
  }

 private:
  using RowStats = typename BackwardCta<C>::RowStats;

  __device__ __forceinline__ int kv_stage() const { return C::kKvStages > 1 ? kv_stage_ : 0; }
  __device__ __forceinline__ uint32_t smem_k() const { return Base::smem_k(kv_stage()); }
  __device__ __forceinline__ uint32_t smem_v() const { return Base::smem_v(kv_stage()); }

  // The operands of this warpgroup's dq partial: queries of dS, and columns of K.
  __device__ __forceinline__ uint32_t dq_ds_operand(uint32_t ds) const { return ds + wg_ % C::kDqRowParts * C::kTileKv * 128; }
  __device__ __forceinline__ uint32_t dq_k_operand() const { return smem_k() + wg_ / C::kDqRowParts * C::kTileKv * 128; }

  // Whether there are registers to load lse, or delta, of a Q tile before the wgmma are started.
  static constexpr bool kPrefetchLse = !C::kConvertsEarly && !C::kHasBias && C::kTileQ < 128,
                        kPrefetchDelta = kPrefetchLse && (C::kD < 128 || (C::kTileQ == 64 && !C::kNanSafe));
  static constexpr int kEarlyDkSteps =
      C::kTileQ / 32;  // with one part: steps of dk before dq; the others run while dq is stored

  __device__ __forceinline__ int first_key() const { return cta_.work().key0 + wg_ * 64; }

  // ------------------------------------------------------------------------------------------------------------------
  // wgmma, each started (committed) and not awaited
  // ------------------------------------------------------------------------------------------------------------------

  // S^T or dP^T: 64 keys of K or V (kColumns used columns per swizzle atom) times kCount rows of Q or dO. kAddsAlibi: with the K step of ALiBi.
  template <int kCount, int kColumns = 64, bool kAddsAlibi = false>
  __device__ __forceinline__ void start_s(float (&s)[kCount / 2], uint32_t keys, uint32_t rows) const {
    constexpr int kSteps = kColumns / 16;
    const uint64_t a = descriptor_k_major_uniform(keys + wg_ * 64 * 128), b = descriptor_k_major_uniform(rows);
#pragma unroll
    for (int d = 0; d < C::kD / 16; ++d) {
      Wgmma<Element, kCount>::ss_k_k(s, advance_descriptor(a, d / kSteps * C::kTileKv * 128 + d % kSteps * 32),
                                     advance_descriptor(b, d / 4 * C::kTileQ * 128 + d % 4 * 32), d != 0);
    }
    if constexpr (kAddsAlibi)
      Wgmma<Element, kCount>::ss_mn_k(s, alibi_keys<C>(cta_.smem, wg_), alibi_slopes<C>(cta_.smem, stage_), 1);
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dp(int part) {
    start_s<C::kDpQueries>(dp_, smem_v(), smem_dout(stage_) + part * 64 * 128);
  }
  // dq = dS K, or dq^T = K^T dS^T: this warpgroup's partial. `wg1_keys`: byte offset of the keys that the second half of dS is multiplied by.
  __device__ __forceinline__ void start_dq(uint32_t ds, int wg1_keys = C::kTileKv / 2 * 128) {
    const uint64_t k = descriptor_mn_major_uniform<C::kTileKv>(dq_k_operand());
    constexpr int kSteps = C::kTileKv / 16;
    if constexpr (C::kDqTransposed) {
      const uint64_t b = descriptor_k_major_uniform(ds);
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        Wgmma<Element, C::kTileQ>::ss_mn_k(dq_, advance_descriptor(k, n / (kSteps / 2) * wg1_keys + n % (kSteps / 2) * 2048),
                                           advance_descriptor(b, n / 4 * C::kTileQ * 128 + n % 4 * 32), n != 0);
      }
    } else {
      const uint64_t a = descriptor_mn_major_uniform<C::kTileKv>(dq_ds_operand(ds));
#pragma unroll
      for (int n = 0; n < kSteps; ++n) {
        Wgmma<Element, C::kDqColumns>::ss_mn_mn(dq_, advance_descriptor(a, n * 2048),
                                                advance_descriptor(k, n / (kSteps / 2) * wg1_keys + n % (kSteps / 2) * 2048),
                                                n != 0);
      }
    }
    wgmma_commit();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroups
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void consumer() {
    QPipeline q_pipe;
    int n = 0;
    if constexpr (C::kKvStages > 1) kv_stage_ = 0;
#pragma unroll 1
    for (int work_index = 0; next_work_tile(work_index);) {
      if constexpr (kWg1MaySkip) cta_.work_stage += wg_;
      if (C::kStagesDkv) wait_staged_read();
#pragma unroll
      for (int i = 0; i < C::kD / 2; ++i) dk_[i] = dv_[i] = 0.f;
      const bool wg1_skips = kWg1MaySkip && cta_.work().wg1_skips;
      if (cta_.work().q_tile_begin < cta_.work().q_tile_end || wg1_skips) {
        int q_tile = cta_.work().q_tile_end - 1;
        head_in_group_ = 0;
        has_prev_ = false;
        if (kWg0MaySkip && cta_.work().wg0_skips && wg_ == 0) {
          stage_ = uniform(q_pipe.stage());
          ds_stage_ = uniform(n & 1);
          skip_q_tile(q_pipe.phase(), n);
          ++n;
          q_pipe.advance();
          has_prev_ = true;
          --q_tile;
        }
        if constexpr (C::kHasDataMask) {
          // Kernels for mixtures have no register for a counter.
          auto left = [&, left = C::kMixtures ? 0 : masked_tiles().visible[cta_.work_stage]]() mutable {
            return C::kMixtures ? cta_.work().q_tiles_end - n : left--;
          };
#pragma unroll 1
          while (left() > 0) {
            if constexpr (Base::kPipelineCounts) q_pipe.count = static_cast<uint32_t>(n);
            stage_ = uniform(q_pipe.stage());
            ds_stage_ = uniform(n & 1);
            mbarrier_wait(q_full(stage_), q_pipe.phase());
            const uint32_t codes = visited(n, &VisitedQTile::cell_codes);
            if (C::kSkipsCells && sees_nothing(codes)) {
              skip_q_tile(q_pipe.phase(), n);
            } else {
              iteration(q_pipe.phase(), n, 0, codes);
            }
            ++n;
            q_pipe.advance();
            has_prev_ = true;
          }
        } else if (!kWg1MaySkip || q_tile >= cta_.work().q_tile_begin) {
#pragma unroll 1
          do {
            stage_ = uniform(q_pipe.stage());
            ds_stage_ = uniform(n & 1);
            iteration(q_pipe.phase(), n, q_tile, VisitedQTile::kAllCellsFull);
            ++n;
            q_pipe.advance();
            if (--q_tile < cta_.work().q_tile_begin) {
              q_tile = cta_.work().q_tile_end - 1;
              ++head_in_group_;
            }
            has_prev_ = true;
          } while (head_in_group_ < static_cast<int>(cta_.problem.group));
        }
        const bool stages = stages_dv();
        if (!stages) release_kv(v_empty(kv_stage()));
        if (kWg1MaySkip && cta_.work().wg1_skips && wg_ == 1) {
          stage_ = uniform(q_pipe.stage());
          ds_stage_ = uniform(n & 1);
          skip_q_tile(q_pipe.phase(), n);
          ++n;
          q_pipe.advance();
        }
        if (C::kStagesDkv && cta_.params.tma_dv) {
          named_barrier(3 + opaque(wg_), 128);  // no warp of this warpgroup has V as an operand any more
          if (stages)
            cta_.template store_staged<C::kTileKv * 128>(cta_.params.dv_map, dv_, C::kHasDropout ? cta_.params.keep_scale : 1.f,
                                                         smem_v() + (opaque(wg_) * 4 + opaque(cta_.warp)) * 16 * 128,
                                                         first_key());
        }
        finish_dq(kWg1MaySkip ? opaque(n) : n, kWg1MaySkip && cta_.work().wg1_skips);
        if (stages) {
          wait_staged_read();
          release_kv(v_empty(kv_stage()));
        }
        // A work tile without queries has no K and V: their barriers do not count it. It waits for no load, so the consumers could otherwise release
        // them twice before the producer has waited for the first time.
        release_kv(k_empty(kv_stage()));
        if constexpr (C::kKvStages > 1) kv_stage_ = uniform(kv_stage_ ^ 1);
      }
      if (C::kSplitTail && cta_.work().splits > 1 && !add_splits(cta_, wg_, dk_, dv_)) {
        work_index = cta_.work().work_index;
        release_work_tile(work_index++);
        continue;
      }
      const bool stages_dk = C::kStagesDkv && cta_.params.tma_dk && may_stage();
      if (stages_dk) {
        mbarrier_wait(dq_empty(opaque(wg_)), opaque(n) & 1 ^ 1);
        cta_.template store_staged<16 * 128>(cta_.params.dk_map, dk_, cta_.problem.softmax_scale,
                                             smem_dq(opaque(wg_)) + opaque(cta_.warp) * (C::kDqPartialBytes / 4), first_key());
      }
      cta_.store_dkv(cta_.params.problem.dk, dk_, cta_.problem.softmax_scale, static_cast<int>(cta_.problem.head_dim),
                     cta_.params.vector_dk, first_key(), wg_ * 128 + cta_.warp * 32 + opaque(cta_.lane), C::kConsumerThreads,
                     stages_dk);
      cta_.store_dkv(cta_.params.problem.dv, dv_, C::kHasDropout ? cta_.params.keep_scale : 1.f,
                     static_cast<int>(cta_.problem.head_dim_v), cta_.params.vector_dv, first_key(),
                     wg_ * 128 + cta_.warp * 32 + opaque(cta_.lane), C::kConsumerThreads, stages_dv());
      work_index = cta_.work().work_index;
      release_work_tile(work_index++);
    }
    if (C::kStagesDkv) wait_staged_read();  // shared memory is freed when the CTA exits
  }

  // Whether this warp's 16 keys of dk and dv can be stored by TMA: all of them are used, and their sums are complete.
  __device__ __forceinline__ bool may_stage() const {
    return cta_.work().key0 + (opaque(wg_) * 4 + opaque(cta_.warp)) * 16 + 16 <= cta_.work().seqlen_k &&
           (!C::kSplitTail || cta_.work().splits <= 1);
  }
  // dv is staged where V is, before the last dq, and V is released when TMA has read it. A work tile without queries stores its zeros from registers.
  __device__ __forceinline__ bool stages_dv() const {
    return C::kStagesDkv && cta_.params.tma_dv && may_stage() &&
           (cta_.work().q_tile_begin < cta_.work().q_tile_end || (kWg1MaySkip && cta_.work().wg1_skips));
  }
  // Until TMA has read what this warp has staged.
  __device__ __forceinline__ void wait_staged_read() const {
    if (opaque(cta_.lane) == 0) bulk_wait_group_read();
    __syncwarp();
  }

  __device__ __forceinline__ void release_kv(uint32_t empty) const {
    __syncwarp();
    mbarrier_arrive_if(cta_.lane == 0, empty);
  }

  // One iteration: everything for Q tile `q_tile` but its dq, and dq of the previous Q tile. n counts the iterations of all
  // work tiles. `codes`: VisitedQTile::cell_codes.
  __device__ __forceinline__ void iteration(uint32_t parity, int n, int q_tile, [[maybe_unused]] uint32_t codes) {
    // Before S = Q K^T is started there are registers for it; the other warpgroup's wgmmas run meanwhile.
    DroppedPairs<C::kTileQ> dropped;
    if constexpr (C::kHasDropout && !C::kMixtures) {
      cta_.draw(dropped, cta_.at(offsetof(Storage, dropout_key)),
                cta_.work().head_k * static_cast<int>(cta_.problem.group) + head_in_group_, q_tile * C::kTileQ, first_key());
    }
    bool partial;  // has masked pairs
    ShownPairs<C::kTileQ> shown;
    [[maybe_unused]] bool map_partial = false;  // masks as data may mask a pair
    if constexpr (C::kHasDataMask) {
      q_tile = visited(n, &VisitedQTile::q_tile);
      if (codes != VisitedQTile::kAllCellsFull) {
        const int head_q = visited(n, &VisitedQTile::head_q);
        const uint32_t own_codes = codes >> 2 * (C::kTileQ / kCell) * wg_;
        if constexpr (C::kHasScoreText) {
          if constexpr (ScoreText::kAlone) wgmma_wait<0>();
          cta_.find_shown_by_text(shown, head_q, q_tile * C::kTileQ, first_key(), own_codes);
        } else {
          shown.find(cta_.params.mask, cta_.problem, cta_.work().batch, head_q, q_tile * C::kTileQ, first_key(), own_codes);
        }
        map_partial = true;
      } else {
        shown.set_all();
      }
    }
    float offset[C::kMixtures ? C::kTileQ / 2 : 1], finite_bias = 0.f;
    if constexpr (C::kMixtures) {
      const int head_q = visited(n, &VisitedQTile::head_q);
      if (cta_.drops()) cta_.draw(dropped, cta_.at(offsetof(Storage, dropout_key)), head_q, q_tile * C::kTileQ, first_key());
      if (has_bias()) mbarrier_wait(bias_full(bias_stage(n)), bias_phase(n));
      cta_.make_offsets(offset, smem_lse(stage_),
                        BiasColumns<Element>(smem_bias_tile(n), is_bias_fp32(), wg_, cta_.warp, cta_.lane), first_key(),
                        q_tile * C::kTileQ, head_q, finite_bias);
      if (has_bias()) release_bias(bias_stage(n));
    }
    if constexpr (C::kDpParts > 1) {
      partial = q_tile < cta_.work().full_begin || q_tile >= cta_.work().full_end;
      if constexpr (C::kHasDataMask) partial |= map_partial;
    }
    mbarrier_wait(q_full(stage_), parity);
    if constexpr (C::kDpParts > 1) mbarrier_wait(dout_full(stage_), parity);
    if constexpr (kPrefetchLse) cta_.load_stats(stats_, smem_lse(stage_));
    fence_operand(s_);
    wgmma_fence();
    start_s<C::kTileQ, C::kKeyColumns, C::kAlibiByWgmma>(s_, smem_k(), smem_q(stage_));
    if constexpr (C::kDpParts == 1) {
      partial = q_tile < cta_.work().full_begin || q_tile >= cta_.work().full_end;
      if constexpr (C::kHasDataMask) partial |= map_partial;
    }
    const auto start_first_dp = [&] {
      if constexpr (C::kDpParts == 1) mbarrier_wait(dout_full(stage_), parity);
      fence_operand(dp_);
      wgmma_fence();
      start_dp(0);
    };
    // Kernels for mixtures have no registers for it beside the offsets.
    if constexpr (!C::kMixtures) start_first_dp();
    // For dq of the previous Q tile. The readers of dS fence, not the writers: behind store_ds() the fence would wait for this warp's stores.
    // Here it runs beside S and dP.
    if (has_previous(n)) wait_ds_full(n - 1);
    bool nan_safe_prev = false;  // with one part it is read later: head_dim 128 has no register for it here
    if constexpr (C::kDpParts > 1 && C::kNanSafe) nan_safe_prev = any_nan_safe(ds_stage_ ^ 1);
    fence_proxy_async();
    BiasPairs<Element, C::kTileQ> bias;
    bool masked = C::kNanSafe && partial;  // whether the products may have to be computed over the visible pairs alone
    if constexpr (C::kHasBias) {
      take_bias(n, bias);
      masked = named_barrier_or(1 + wg_, 128, partial || bias.any_nonfinite());
    }
    if constexpr (C::kMixtures) {
      if (has_bias()) masked = named_barrier_or(1 + wg_, 128, partial || finite_bias != 0.f);
      if (masked) {
        if (has_bias()) shown.hide(offset, -CUDART_INF_F);  // a bias of -inf masks the pair
        st_shared_4(smem_shown(), shown.word[0]);
      }
    }
    wgmma_wait<C::kMixtures || ScoreText::kAlone ? 0 : 1>();
    fence_operand(s_);
    if constexpr (ScoreText::kAlone) fence_operand(dp_);
    float finite = 0.f;  // NaN if anything is not finite
    if (masked || (C::kTextScores && ScoreText::kMasksByScore)) finite = nan_if_nonfinite(s_);
    if (!C::kNanSafe && partial) note_nonfinite(nan_if_nonfinite(s_));
    if constexpr (C::kTextScores) {
      int head_q = cta_.work().head_k * static_cast<int>(cta_.problem.group) + head_in_group_;
      if constexpr (C::kHasDataMask) head_q = visited(n, &VisitedQTile::head_q);
      uint32_t staged = 0;
      if constexpr (C::kStagesBias) {
        mbarrier_wait(bias_full(n % Storage::kBiasStages), n / Storage::kBiasStages & 1);
        staged = smem_bias(n % Storage::kBiasStages, wg_);
      }
      const bool hidden = cta_.exponentiate_text(p16_, s_, smem_lse(stage_), head_q, first_key(), q_tile * C::kTileQ, staged);
      if constexpr (C::kStagesBias) release_bias(n % Storage::kBiasStages);
      masked = ScoreText::kMasksByScore ? named_barrier_or(1 + wg_, 128, partial || hidden) : partial;
    } else if constexpr (C::kMixtures) {
      cta_.exponentiate_mixture(p16_, s_, offset);
      start_first_dp();
      if (cta_.drops()) cta_.drop(p16_, s_, dropped);
      q_tile = visited(n, &VisitedQTile::q_tile);  // again: it is not held in a register
    } else if constexpr (C::kHasBias) {
      cta_.exponentiate_biased(s_, smem_lse(stage_), bias);
    } else if constexpr (kPrefetchLse) {
      cta_.exponentiate(s_, stats_);
    } else if constexpr (C::kHasDropout) {
      cta_.exponentiate_dropped(p16_, s_, smem_lse(stage_), dropped);
    } else {
      cta_.exponentiate(p16_, s_, smem_lse(stage_), first_key(), q_tile * C::kTileQ,
                        cta_.head_terms(cta_.work().head_k * static_cast<int>(cta_.problem.group) + head_in_group_));
    }
    if (partial) cta_.mask_p(p16_, s_, first_key(), q_tile * C::kTileQ);
    if constexpr (C::kHasDataMask) {
      if constexpr (C::kMixtures) {
        if (visited(n, &VisitedQTile::cell_codes) != VisitedQTile::kAllCellsFull) {
          shown.word[0] = ld_shared_4(smem_shown());
          shown.for_hidden(0, [&](int at) { cta_.mask_element(p16_, s_, at); });
        }
      } else if (partial) {
#pragma unroll
        for (int w = 0; w < C::kTileQ / 64; ++w) shown.for_hidden(w, [&](int at) { cta_.mask_element(p16_, s_, 32 * w + at); });
      }
    }
    if constexpr (!C::kConvertsEarly) convert_p<Element>(s_, p16_);
    if constexpr (kPrefetchDelta) cta_.load_stats(stats_, smem_delta(stage_));
    wgmma_wait<0>();
    fence_operand(dp_);
    bool nan_safe = false;
    if (masked) {
      finite += nan_if_nonfinite(dp_) + cta_.delta_nan_if_nonfinite(smem_delta(stage_));
      // One part of dP tells of all of V, and delta of dO's rows in the sequence. Only dP tells of what stands behind the end of the sequence.
      if (C::kDpParts > 1 && (q_tile + 1) * C::kTileQ > cta_.work().seqlen_q) {
        redo_dp(1);
        finite += nan_if_nonfinite(dp_);
        redo_dp(0);
      }
      nan_safe = named_barrier_or(1 + wg_, 128, finite != 0.f);
    }
    if (C::kNanSafe && nan_safe) {
      if constexpr (C::kMixtures) q_tile = visited(n, &VisitedQTile::q_tile);
      nan_safe_gradients(q_tile, n, shown);
    } else {
      gradients(n, partial, nan_safe_prev);
    }
    __syncwarp();
    mbarrier_arrive_if(cta_.lane == 0, q_empty(again(stage_)));
    mbarrier_arrive_if(cta_.lane == 0, dout_empty(again(stage_)));
  }

  // Kernels for mixtures: ShownPairs of this thread, where a pair may be masked. They have no register for it beside the exponentials.
  __device__ __forceinline__ uint32_t smem_shown() const {
    return cta_.at(offsetof(Storage, shown), static_cast<int>(threadIdx.x) - 128, 4);
  }
  // Without a NaN-safe path: a hidden pair contributes a row of K, Q or dO multiplied by 0, and its dS has dP and delta in it. In a partial Q tile the threads
  // look at S and dS of all pairs; they are not finite where any of these is not. `finite`: NaN if one has been found.
  __device__ __forceinline__ void note_nonfinite(float finite) const {
    if (finite != 0.f) *cta_.params.nonfinite = 1;
  }

  // Loads the bias of iteration n into registers, and frees its stage.
  __device__ __forceinline__ void take_bias(int n, BiasPairs<Element, C::kTileQ> &bias) const {
    const int stage = n % Storage::kBiasStages;
    mbarrier_wait(bias_full(stage), n / Storage::kBiasStages & 1);
    bias.load(smem_bias(stage, wg_), cta_.warp, cta_.lane);
    release_bias(stage);
  }
  __device__ __forceinline__ void release_bias(int stage) const {
    __syncwarp();
    mbarrier_arrive_if(cta_.lane == 0, bias_empty(stage));
  }

  __device__ __forceinline__ void redo_dp(int part) {
    fence_operand(dp_);
    wgmma_fence();
    start_dp(part);
    wgmma_wait<0>();
    fence_operand(dp_);
  }

  // dv and dk from P and the first part of dP, and dq of the previous Q tile. The rest of dk is a wgmma group of its own:
  // dq is stored while it runs.
  __device__ __forceinline__ void gradients(int n, [[maybe_unused]] bool partial, bool nan_safe_prev) {
    const uint32_t ds = smem_ds(ds_stage_);
    // The first part of dS comes before all products of this function.
    compute_ds(0);
    if (!C::kNanSafe && partial) note_nonfinite(nan_if_nonfinite(dp_));
    convert_p<Element>(dp_, ds16_[0]);
    mbarrier_wait(ds_empty(ds_stage_), n >> 1 & 1 ^ 1);
    store_ds(ds, 0);
    if constexpr (C::kDpParts == 1) {
      fence_operand(ds16_[0]);
      fence_operand(dk_);
      start_dv();
      cta_.template start_gradient<0, kEarlyDkSteps>(dk_, ds16_[0], smem_q(stage_), 0);
    } else {
      fence_operand(dp_);
      fence_operand(ds16_[0]);
      fence_operand(dk_);
      wgmma_fence();
      start_dp(1);
      start_dv();
      cta_.template start_gradient<0, 4>(dk_, ds16_[0], smem_q(stage_), 0);
      wgmma_wait<1>();
      fence_operand(dp_);
      compute_ds(1);
      if (!C::kNanSafe && partial) note_nonfinite(nan_if_nonfinite(dp_));
      convert_p<Element>(dp_, ds16_[1]);
      store_ds(ds, 1);
      fence_operand(ds16_[1]);
    }
    if constexpr (C::kDpParts == 1 && C::kNanSafe) nan_safe_prev = any_nan_safe(ds_stage_ ^ 1);
    wgmma_fence();
    start_dq(smem_ds(ds_stage_ ^ 1));
    if constexpr (C::kDpParts == 1) {
      cta_.template start_gradient<kEarlyDkSteps, C::kTileQ / 16 - kEarlyDkSteps>(dk_, ds16_[0], smem_q(stage_), kEarlyDkSteps);
    } else {
      cta_.template start_gradient<0, 4>(dk_, ds16_[1], smem_q(stage_), 4);
    }
    wgmma_wait<1>();
    fence_operand(dq_);
    if (C::kNanSafe && nan_safe_prev) nan_safe_dq(smem_ds(ds_stage_ ^ 1));
    store_dq(n - 1, has_previous(n));
    wgmma_wait<0>();
    fence_operand(dv_);
    fence_operand(dk_);
  }

  // dv += P^T dO.
  __device__ __forceinline__ void start_dv() {
    fence_operand(p16_);
    fence_operand(dv_);
    wgmma_fence();
    cta_.template start_gradient<0, C::kTileQ / 16>(dv_, p16_, smem_dout(stage_), 0);
  }

  // Whether the work tile had a Q tile before iteration n. Kernels for mixtures have no register to hold it.
  __device__ __forceinline__ bool has_previous(int n) const {
    if constexpr (C::kMixtures) {
      return n > cta_.work().q_tiles_end - masked_tiles().visible[again(cta_.work_stage)];
    } else {
      return has_prev_;
    }
  }

  // Whether this warpgroup may skip a Q tile: it sees no cell of it. Its dS is zero then, and dq still multiplies it by its keys. Where these have NaN or Inf
  // it does not skip: a Q tile with masked pairs takes care of them.
  __device__ __forceinline__ bool sees_nothing(uint32_t codes) const {
    constexpr uint32_t kOwnCodes = (1u << 2 * (C::kTileQ / kCell)) - 1;
    return (codes >> 2 * (C::kTileQ / kCell) * wg_ & kOwnCodes) == 0 && !named_barrier_or(1 + wg_, 128, any_key_nonfinite());
  }
  // Whether anything of this thread's part of the warpgroup's 64 keys is not finite.
  __device__ __forceinline__ bool any_key_nonfinite() const {
    constexpr int kBytes = 64 * 128;  // in a swizzle atom
    bool found = false;
#pragma unroll 1
    for (int atom = 0; atom < C::kKeyAtoms; ++atom)
      found |= tile_has_nonfinite<Element, kBytes, 128>(smem_k() + (atom * C::kTileKv + wg_ * 64) * 128,
                                                        static_cast<int>(threadIdx.x) % 128);
    return found;
  }

  // Iteration n of a Q tile of which this warpgroup sees nothing: dq of the previous Q tile, and dS as if all pairs were
  // masked.
  __device__ __forceinline__ void skip_q_tile(uint32_t parity, int n) {
    mbarrier_wait(q_full(stage_), parity);
    mbarrier_wait(dout_full(stage_), parity);
    if constexpr (C::kStagesBias) {
      mbarrier_wait(bias_full(n % Storage::kBiasStages), n / Storage::kBiasStages & 1);
      release_bias(n % Storage::kBiasStages);
    }
    if (has_prev_) finish_dq(n, false);
    mbarrier_wait(ds_empty(ds_stage_), n >> 1 & 1 ^ 1);
#pragma unroll
    for (int part = 0; part < C::kDpParts; ++part) {
#pragma unroll
      for (auto &a : ds16_[part])
#pragma unroll
        for (uint32_t &x : a) x = kMaskedPBits | kMaskedPBits << 16;
      store_ds(smem_ds(ds_stage_), part);
    }
    mbarrier_arrive_if(cta_.lane == 0, q_empty(stage_));
    mbarrier_arrive_if(cta_.lane == 0, dout_empty(stage_));
  }

  // dq of the last of `q_tiles` Q tiles. With `wg1_skipped`, dS of the second 64 keys is zero; it is multiplied by the first 64
  // keys of K, whose tile has been tested for NaN and Inf.
  __device__ __forceinline__ void finish_dq(int q_tiles, bool wg1_skipped) {
    const uint32_t ds = smem_ds((q_tiles - 1) & 1);
    wait_ds_full(q_tiles - 1);
    fence_proxy_async();
    if (C::kNanSafe && any_nan_safe((q_tiles - 1) & 1)) {
      nan_safe_dq(ds);
    } else {
      fence_operand(dq_);
      wgmma_fence();
      start_dq(ds, wg1_skipped ? 0 : C::kTileKv / 2 * 128);
      wgmma_wait<0>();
      fence_operand(dq_);
    }
    store_dq(q_tiles - 1, true);
  }

  // dS^T = P^T (dP^T - delta) for a part of the Q tile, in place of dP^T.
  __device__ __forceinline__ void compute_ds(int part) {
    const auto p = [&](int j) { return float4_of(s_, part * 8 + j); };
    const auto delta = [&](int j) { return kPrefetchDelta ? stats_[j] : cta_.row_stat(smem_delta(stage_), part * 8 + j); };
    if constexpr (C::kHasDropout) {
      cta_.compute_ds_dropped(dp_, p, delta, cta_.params.keep_scale);
    } else {
      cta_.compute_ds(dp_, p, delta);
    }
  }

  // Stores this warp's 16 keys of a part of dS^T, for both warpgroups.
  __device__ __forceinline__ void store_ds(uint32_t ds, int part) const {
    if constexpr (C::kDqTransposed) {
      cta_.store_ds_transposed(ds16_[part], ds + wg_ * C::kTileQ * 128);
    } else {
      cta_.store_ds_fragment(ds16_[part], ds + part * C::kTileKv * 128, wg_ * 64);
    }
    if (part != C::kDpParts - 1) return;
    __syncwarp();
    mbarrier_arrive_if(cta_.lane == 0, ds_full(ds_stage_));
  }

  // Waits until all consumer warps have stored dS of iteration n. In the first iteration of a work tile there is no previous
  // dS, and nothing computed from it is used.
  __device__ __forceinline__ void wait_ds_full(int n) const { mbarrier_wait(ds_full(n & 1), n >> 1 & 1); }

  // Releases dS of iteration n, stores this warp's rows of its dq to shared memory when TMA has read those of the previous
  // iteration, and signals the dq warp. Without a previous Q tile (any = false) the values are stored but not signalled.
  __device__ __forceinline__ void store_dq(int n, bool any) const {
    __syncwarp();
    mbarrier_arrive_if(any && cta_.lane == 0, ds_empty(n & 1));
    mbarrier_wait(dq_empty(wg_), any ? (n & 1) ^ 1 : n & 1);
    cta_.store_dq_partial(dq_, smem_dq(wg_));
    __syncwarp();
    mbarrier_arrive_if(any && cta_.lane == 0, dq_full(wg_));
  }

  // ------------------------------------------------------------------------------------------------------------------
  // NaN-safe path
  // ------------------------------------------------------------------------------------------------------------------

  // Each warpgroup decides for itself whether its dk and dv of a Q tile need this path. dq is a product with both warpgroups' dS and K, so the
  // decisions go with dS: written when its stage is empty, read when it is full. They are not taken back before the work tile ends, so later Q tiles
  // with the same stage take the path for dq as well.
  __device__ __forceinline__ void set_nan_safe() const {
    if (cta_.warp != 0 || cta_.lane != 0) return;
    WorkTile *description = &cta_.work() - (kWg1MaySkip ? wg_ : 0);
#pragma unroll
    for (int n = 0; n < kTilesPerWorkStage; ++n) description[n].nan_safe[ds_stage_][wg_] = 1.f;
  }
  __device__ __forceinline__ bool any_nan_safe(int ds_stage) const {
    const float2 x = ld_shared_float2(smem_address(cta_.work().nan_safe[ds_stage]));
    return x.x + x.y != 0.f;
  }

  // gradients() over the visible pairs alone.
  __device__ __forceinline__ void nan_safe_gradients(int q_tile, int n, ShownPairs<C::kTileQ> &shown) {
    const uint32_t ds = smem_ds(ds_stage_);
    mbarrier_wait(ds_empty(ds_stage_), n >> 1 & 1 ^ 1);
    set_nan_safe();
    if constexpr (C::kHasBias) {
      cta_.mask_biased(s_, cta_.work().head_k * static_cast<int>(cta_.problem.group) + head_in_group_, first_key(),
                       q_tile * C::kTileQ);
      convert_p<Element>(s_, p16_);
    }
    if constexpr (C::kMixtures) {
      shown.word[0] = ld_shared_4(smem_shown());
      shown.template for_hidden<true>(0, [&](int at) { cta_.mask_element(p16_, s_, at); });
    }
#pragma unroll
    for (int part = 0; part < C::kDpParts; ++part) {
      if (part > 0) redo_dp(part);
      compute_ds(part);
      if constexpr (C::kHasBias || C::kTextScores) {
        cta_.mask_ds(dp_, [&](int n) { return is_masked_p(s_[part * 32 + n]); });
      } else {
        cta_.mask_ds(dp_, first_key(), q_tile * C::kTileQ + part * 64);
      }
      if constexpr (C::kHasDataMask) shown.template for_hidden<C::kMixtures>(part, [&](int at) { dp_[at] = kMaskedP; });
      convert_p<Element>(dp_, ds16_[part]);
      store_ds(ds, part);
      wgmma_rs_nan_safe<Element, C::kTileQ, C::kD>(dk_, ds16_[part], smem_q(stage_) + part * 64 * 128, cta_.lane);
    }
    wgmma_rs_nan_safe<Element, C::kTileQ, C::kD>(dv_, p16_, smem_dout(stage_), cta_.lane);
    if (!has_previous(n)) return;
    nan_safe_dq(smem_ds(ds_stage_ ^ 1));
    store_dq(n - 1, true);
  }

  __device__ __forceinline__ void nan_safe_dq(uint32_t ds) {
#pragma unroll
    for (float &x : dq_) x = 0.f;
    if constexpr (C::kNanSafe)
      wgmma_ss_nan_safe<Element, Major::mn, C::kTileKv, C::kDqColumns, C::kTileKv>(dq_, dq_ds_operand(ds), cta_.warp * 16,
                                                                                   dq_k_operand(), cta_.lane);
  }

  int wg_;

  RowStats stats_;        // lse, then delta of the Q tile, where they are loaded early
  int head_in_group_;     // query head of the GQA group
  bool has_prev_;         // whether the work tile had a Q tile before this one
  int stage_, ds_stage_;  // pipeline stage of Q and dO, and of dS
  int kv_stage_;          // of K and V, where there are two
  float s_[C::kTileQ / 2], dp_[C::kDpQueries / 2], dq_[C::kDqRegisters];
  uint32_t p16_[C::kTileQ / 16][4], ds16_[C::kDpParts][C::kDpQueries / 16][4];
  float dk_[C::kD / 2], dv_[C::kD / 2];
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) backward(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if (C::kNanSafe && !is_pass_needed(params)) return;
  extern __shared__ __align__(1024) char shared[];
  Backward<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90
