// SPDX-License-Identifier: Apache-2.0
// Exact attention backward for head_dim up to 256, as backward_p_smem.cuh, by persistent clusters. It is used for short
// sequences of keys, where half of the time of a work tile is its start and its end; for softcap and ALiBi; and for the
// deterministic mode. The iterations are the same: p_dv_dq_warpgroup has P, dv and dq, dp_dk_warpgroup has dP, dS and dk.
//
// A cluster works on one work tile after another. K has one stage, and dq of the last Q tile still needs it, so the next K is
// loaded while dv is stored. V, Q and dO of the next work tile are loaded during the last iterations of the current one.
//
// Producer warps: 0 loads; 1 and 2 keep the order of additions to dq in deterministic mode; 3 is the scheduler. The scheduler
// of CTA 0 takes the next work tile from a counter and sends its number to the peer.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90/shown_pairs.cuh"
#include "cuda/kernels/bwd_sm90_cluster/p_exchange.cuh"

namespace fa::cuda::sm90 {

template <class C>
class BackwardPSmemPersistent {
 public:
  using Params = BackwardParams;
  static constexpr int kThreads = C::kThreads;

  __device__ __forceinline__ BackwardPSmemPersistent(const BackwardParams &params, char *shared) : exchange_(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      mbarrier_init(cluster().k_full(), 1);
      mbarrier_init(cluster().v_full(), 1);
      init_pipeline<1>(cluster().dout_full(0), cluster().dout_empty(0), 8);
      mbarrier_init(exchange_.p_full(), 128);
      mbarrier_init(exchange_.p_empty(), 128);
      mbarrier_init(exchange_.vote(), C::kConsumerThreads);
      if constexpr (C::kOrdered) {
        mbarrier_init(exchange_.dq_may_add(), 1);
        mbarrier_init(exchange_.dq_added(), 4);
        mbarrier_init(exchange_.dq_added_seen(), 1);
      }
      cluster().init_persistent(C::kOrdered ? 11 : 9, 4);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(cluster().ds_full(n), 4);
        mbarrier_init(cluster().ds_empty(n), 8);
        st_shared_4(exchange_.vote_flag(n), 0);
      }
      init_pipeline<C::kStages>(cluster().q_full(0), cluster().q_empty(0), 8);
      mbarrier_init_fence();
      if constexpr (C::kHasDropout) {
        const DropoutKey key = load_dropout_key(cta().problem.dropout);
        st_shared_16(smem_dropout_key(), key.k0, key.k1, key.c3, 0);
      }
    } else if (threadIdx.x == 32) {
      cluster().prefetch_maps();
    }
    __syncthreads();
    cluster_sync();
    if (threadIdx.x < 128) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (cta().warp == 0) {
        QPipeline q_pipe;
        DoutPipeline dout_pipe;
        cluster().for_each_work_tile([&](int &) { cluster().load_work_tile(q_pipe, dout_pipe); });
      }
      if constexpr (C::kOrdered) {
        if (cta().warp == 1) {
          pdl_wait();
          cluster().for_each_work_tile([&](int &n) { exchange_.wait_dq_order(n); });
        }
        if (cta().warp == 2) cluster().for_each_work_tile([&](int &n) { exchange_.advance_dq_order(n); });
      }
      if (cta().warp == 3) scheduler();
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      if (uniform(threadIdx.x / 128) == 1) {
        p_dv_dq_warpgroup();
      } else {
        dp_dk_warpgroup();
      }
    }
    cluster_sync();  // until then the peer may still write to this shared memory
  }

 private:
  __device__ __forceinline__ ClusterCta<C> &cluster() { return exchange_.cluster; }
  __device__ __forceinline__ const ClusterCta<C> &cluster() const { return exchange_.cluster; }
  __device__ __forceinline__ const BackwardCta<C> &cta() const { return exchange_.cluster.cta; }

  using Dq = typename ClusterCta<C>::Dq;
  using Element = typename ClusterCta<C>::Element;
  using QPipeline = typename ClusterCta<C>::QPipeline;
  using DoutPipeline = typename ClusterCta<C>::DoutPipeline;

  // The scheduler warp. As in backward.cuh it takes the next work tile when all loads of the current one have been issued.
  __device__ __forceinline__ void scheduler() const {
    int count = 0;
    for (int work_index = 0; cluster().schedule(work_index, count); ++work_index) {
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroup with P, dv and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void p_dv_dq_warpgroup() {
    float dv[C::kD / 2];
    int n = 0;
    uint32_t state = 0;
#pragma unroll 1
    for (int work_index = 0; cluster().next_work_tile(work_index);) {
#pragma unroll
      for (float &x : dv) x = 0.f;
      mbarrier_wait(cluster().k_full(), work_index & 1);
      if (cta().work().q_tile_begin < cta().work().q_tile_end) {
        main_loop(dv, n, state);
      } else {
        __syncwarp();
        mbarrier_wait(cluster().peer_k_full(), work_index & 1);
        mbarrier_arrive_if(cta().lane == 0, cluster().k_empty());
      }
      cluster().store(cta().params.problem.dv, dv, C::kHasDropout ? cta().params.keep_scale : 1.f,
                      static_cast<int>(cta().problem.head_dim_v), cta().params.vector_dv);
      work_index = cta().work().work_index;
      cluster().release_work_tile(work_index++);
    }
  }

  // State of the warpgroup in one register: the parity of the number of partial Q tiles; whether the previous Q tile was
  // partial and whether it took the NaN-safe path; in deterministic mode, whether this work tile is the first in the order to
  // add to the previous Q tile's dq; and, from kOneQTile up, how many Q tiles the work tile has left.
  // In deterministic mode the first work tile in the order stores its dq. With masks as data, where its place in the order has to be counted, dq_sum is
  // zeroed.
  static constexpr bool kStoresFirst = C::kOrdered && !C::kHasDataMask;  // BackwardShape::first_stores_dq()
  static constexpr uint32_t kVoteParity = 1, kPrevPartial = 2, kPrevNanSafe = 4, kPrevFirstInOrder = 8, kOneQTile = 16;
  __device__ __forceinline__ bool prev_is_nan_safe(uint32_t state, int ds_stage) const {
    return (state & kPrevNanSafe) != 0 || ((state & kPrevPartial) != 0 && ld_shared_4(cluster().flag(ds_stage)) != 0);
  }

  // For mixtures, and masks of a score text: what is known of iteration n before S has been computed.
  struct ScoreTerms {
    DroppedPairs<C::kTileQ> dropped;
    ShownPairs<C::kTileQ> shown;
  };
  struct TextTerms {
    ShownPairs<C::kTileQ> shown;
  };
  struct NoScoreTerms {};
  static constexpr bool kHasTextMasks = C::kHasScoreText && C::kHasDataMask;
  using Terms = std::conditional_t<C::kMixtures, ScoreTerms, std::conditional_t<kHasTextMasks, TextTerms, NoScoreTerms>>;

  // Finds them, when Q has arrived and while S is computed.
  __device__ __forceinline__ void find_terms(Terms &terms, int n) const {
    if constexpr (C::kMixtures || kHasTextMasks) {
      const int head_q = cta().visited(n, &VisitedQTile::head_q), row0 = cta().visited(n, &VisitedQTile::q_tile) * C::kTileQ;
      const uint32_t codes = cta().visited(n, &VisitedQTile::cell_codes), own_codes = codes >> 2 * cluster().rank;
      if (codes == VisitedQTile::kAllCellsFull) {
        terms.shown.set_all();
      } else if constexpr (kHasTextMasks) {
        cta().find_shown_by_text(terms.shown, head_q, row0, cluster().first_key(), own_codes);
      } else {
        terms.shown.find(cta().params.mask, cta().problem, cta().work().batch, head_q, row0, cluster().first_key(), own_codes);
      }
      if constexpr (C::kMixtures) {
        if (cta().drops()) cta().draw(terms.dropped, smem_dropout_key(), head_q, row0, cluster().first_key());
        if (cta().has_bias()) bias_of(head_q, row0).fetch();
      }
    }
  }
  __device__ __forceinline__ BiasInPlace bias_of(int head_q, int row0) const {
    return BiasInPlace(cta().problem.bias, cta().work(), head_q, row0, cluster().first_key(), cta().warp, cta().lane);
  }
  __device__ __forceinline__ uint32_t smem_dropout_key() const { return cta().at(offsetof(typename C::Storage, dropout_key)); }
  // Whether pairs of a Q tile may be masked. Both CTAs get the same answer.
  __device__ __forceinline__ bool is_partial(int q_tile, [[maybe_unused]] int n) const {
    bool partial = cluster().is_partial(q_tile);
    if constexpr (C::kHasDataMask) partial |= cta().visited(n, &VisitedQTile::cell_codes) != VisitedQTile::kAllCellsFull;
    if constexpr (C::kMixtures) partial |= cta().has_bias();
    if constexpr (C::kHasScoreText) partial |= ScoreText::kMasksByScore;
    return partial;
  }

  // n: iterations of all work tiles before.
  __device__ __forceinline__ void main_loop(float (&dv)[C::kD / 2], int &n, uint32_t &state) const {
    float s[C::kTileQ / 2];
    Dq dq;
    uint32_t p16[C::kTileQ / 16][4];
    int q_tile = cta().work().q_tile_end - 1, prev_tile = -1;  // prev_tile: number in the workspace, or -1
    int head_q = cta().work().head_k * static_cast<int>(cta().problem.group);
    state = (state & kVoteParity) | static_cast<uint32_t>(cluster().q_tiles()) * kOneQTile;
    mbarrier_wait(cluster().q_full(n & 1), n >> 1 & 1);
    fence_operand(s);
    wgmma_fence();
    cluster().start_s(s, uniform(cluster().smem_k()), cluster().smem_q(uniform(n & 1)));
    Terms terms;
    find_terms(terms, n);
    wgmma_wait<0>();
    fence_operand(s);
#pragma unroll 1
    do {
      const int stage = uniform(n & 1), next_stage = stage ^ 1,
                prev = next_stage;  // stage of dS of the previous Q tile, and of the next_stage one
      const uint32_t k = uniform(cluster().smem_k());
      if constexpr (C::kHasDataMask) q_tile = cta().visited(n, &VisitedQTile::q_tile);
      const bool partial = is_partial(q_tile, n);
      bool nan_safe = false;
      if (partial) nan_safe = nan_if_nonfinite(s) != 0.f;
      if constexpr (C::kMixtures) {
        const int head_q = cta().visited(n, &VisitedQTile::head_q);
        float offset[C::kTileQ / 2], finite = 0.f;  // finite: not needed, with a bias every Q tile is taken for a partial one
        cta().make_offsets(offset, cluster().smem_lse(stage), bias_of(head_q, q_tile * C::kTileQ), cluster().first_key(),
                           q_tile * C::kTileQ, head_q, finite);
        if (cta().has_bias()) terms.shown.hide(offset, -CUDART_INF_F);  // a bias of -inf masks the pair
        cta().exponentiate_mixture(p16, s, offset);
        if (cta().drops()) cta().drop(p16, s, terms.dropped);
        if (partial) {
          cta().mask_p(p16, s, cluster().first_key(), q_tile * C::kTileQ);
          terms.shown.for_hidden(0, [&](int at) { cta().mask_element(p16, s, at); });
        }
        exchange_.store_p(s, n, terms.shown.word[0]);
      } else if constexpr (C::kHasScoreText) {
        if constexpr (C::kHasDataMask) head_q = cta().visited(n, &VisitedQTile::head_q);
        cta().exponentiate_text(p16, s, cluster().smem_lse(stage), head_q, cluster().first_key(), q_tile * C::kTileQ);
        if (partial) cta().mask_p(p16, s, cluster().first_key(), q_tile * C::kTileQ);
        if constexpr (kHasTextMasks) terms.shown.for_hidden(0, [&](int at) { cta().mask_element(p16, s, at); });
        exchange_.store_p(s, n);
      } else {
        cta().exponentiate(p16, s, cluster().smem_lse(stage), cluster().first_key(), q_tile * C::kTileQ,
                           cta().head_terms(head_q));
        if (partial) cta().mask_p(p16, s, cluster().first_key(), q_tile * C::kTileQ);
        exchange_.store_p(s, n);
      }
      mbarrier_arrive_if(cta().lane == 0, cluster().q_empty(stage));
      if constexpr (!C::kScored) convert_p<Element>(s, p16);
      if (partial) nan_safe = any_nonfinite(nan_safe, n, state);
      mbarrier_wait(cluster().dout_full(0), n & 1);
      mbarrier_wait(cluster().ds_full(prev), (n - 1) >> 1 & 1);
      const bool nan_safe_prev = prev_is_nan_safe(state, prev);
      if (nan_safe || nan_safe_prev) {
        if (nan_safe) {
          wgmma_rs_nan_safe<Element, C::kTileQ, C::kD>(dv, p16, cluster().smem_dout(0), cta().lane);
        } else {
          fence_operand(p16);
          fence_operand(dv);
          wgmma_fence();
          cluster().start_gradient(dv, p16, cluster().smem_dout(0));
          wgmma_wait<0>();
          fence_operand(dv);
        }
        __syncwarp();
        mbarrier_arrive_if(cta().lane == 0, cluster().dout_empty(0));
        if (prev_tile >= 0) finish_dq(dq, prev, prev_tile, state, nan_safe_prev, false);
        mbarrier_wait_if(state >= 2 * kOneQTile, cluster().q_full(next_stage), n + 1 >> 1 & 1);
        fence_operand(s);
        wgmma_fence();
        cluster().start_s(s, k, cluster().smem_q(next_stage));
      } else if (prev_tile < 0) {
        fence_operand(p16);
        fence_operand(dv);
        wgmma_fence();
        cluster().start_gradient(dv, p16, cluster().smem_dout(0));
        mbarrier_wait_if(state >= 2 * kOneQTile, cluster().q_full(next_stage), n + 1 >> 1 & 1);
        fence_operand(s);
        wgmma_fence();
        cluster().start_s(s, k, cluster().smem_q(next_stage));
        wgmma_wait<1>();
        fence_operand(dv);
        __syncwarp();
        mbarrier_arrive_if(cta().lane == 0, cluster().dout_empty(0));
      } else {
        fence_operand(p16);
        fence_operand(dv);
        fence_operand(dq);
        wgmma_fence();
        cluster().start_gradient(dv, p16, cluster().smem_dout(0));
        cluster().start_dq(dq, prev, 0);
        wgmma_wait<1>();
        fence_operand(dv);
        __syncwarp();
        mbarrier_arrive_if(cta().lane == 0, cluster().dout_empty(0));
        mbarrier_wait_if(state >= 2 * kOneQTile, cluster().q_full(next_stage), n + 1 >> 1 & 1);
        wgmma_wait<0>();
        fence_operand(dq);
        wait_dq_may_add(prev);
        add_dq_part(dq, state, prev_tile, 0);
        fence_operand(dq);
        fence_operand(s);
        wgmma_fence();
        cluster().start_dq(dq, prev, 1);
        cluster().start_s(s, k, cluster().smem_q(next_stage));
        wgmma_wait<1>();
        fence_operand(dq);
        release_ds_to_both(prev);
        add_dq_part(dq, state, prev_tile, 1);
        signal_dq_added();
      }
      if ((C::kMixtures || kHasTextMasks) && state >= 2 * kOneQTile) find_terms(terms, n + 1);
      wgmma_wait<0>();
      fence_operand(s);
      if (prev_tile < 0) mbarrier_wait(cluster().peer_k_full(), cta().work().work_index & 1);  // for dq
      if constexpr (C::kHasDataMask) {
        prev_tile = cta().workspace_q_tile(cta().visited(n, &VisitedQTile::head_q)) + q_tile;
      } else if (q_tile < cta().work().q_tile_end - 1) {
        --prev_tile;
      } else {
        prev_tile = prev_tile < 0 ? cta().workspace_q_tile(cta().work().head_k * static_cast<int>(cta().problem.group)) + q_tile
                                  : prev_tile - cta().work().q_tile_begin + cta().work().workspace_q_tiles + q_tile;
      }
      state = (state & (kVoteParity | ~(kOneQTile - 1))) | (partial ? kPrevPartial : 0u) | (nan_safe ? kPrevNanSafe : 0u);
      if (kStoresFirst && cta().params.ordered && cta().dq_order_position(q_tile) == 0) state |= kPrevFirstInOrder;
      if (--q_tile < cta().work().q_tile_begin) {
        q_tile = cta().work().q_tile_end - 1;
        ++head_q;
      }
      state -= kOneQTile;
      ++n;
    } while (state >= kOneQTile);
    const int last_n = opaque(n) - 1, prev = uniform(last_n & 1);  // opaque: otherwise ptxas keeps a copy of n
    mbarrier_wait(cluster().ds_full(prev), last_n >> 1 & 1);
    finish_dq(dq, prev, prev_tile, state, prev_is_nan_safe(state, prev), true);
  }

  // Neither CTA may overwrite dS before both have read it. The arrival at the peer's barrier is relaxed: finished wgmma have
  // read dS.
  __device__ __forceinline__ void release_ds_to_both(int ds_stage) const {
    __syncwarp();
    mbarrier_arrive_if(cta().lane == 0, cluster().ds_empty(ds_stage));
    mbarrier_arrive_remote_relaxed_if(cta().lane == 0, cluster().in_peer(cluster().ds_empty(ds_stage)));
  }
  // dq of a Q tile, number `index` in the workspace, whose dS is complete. With last_use_of_k it also releases K.
  __device__ __forceinline__ void finish_dq(Dq &dq, int ds_stage, int index, uint32_t state, bool nan_safe,
                                            bool last_use_of_k) const {
#pragma unroll 1
    for (int part = 0; part < C::kDqParts; ++part) {
      const bool last_part = part == C::kDqParts - 1;
      if (nan_safe) {
        // The row comes from threadIdx as it is read here: it must not occupy a register throughout the main loop.
        cluster().nan_safe_dq(dq, ds_stage, part, opaque(static_cast<int>(threadIdx.x)) % 128 / 32 * 16);
        __syncwarp();
        mbarrier_arrive_if(last_part && cta().lane == 0, cluster().ds_empty(ds_stage));
        mbarrier_arrive_remote_if(last_part && cta().lane == 0, cluster().in_peer(cluster().ds_empty(ds_stage)));
      } else {
        fence_operand(dq);
        wgmma_fence();
        cluster().start_dq(dq, ds_stage, part);
        wgmma_wait<0>();
        fence_operand(dq);
        if (last_part) release_ds_to_both(ds_stage);
      }
      mbarrier_arrive_if(last_part && last_use_of_k && cta().lane == 0, cluster().k_empty());
      if (!last_part) wait_dq_may_add(ds_stage);
      add_dq_part(dq, state, index, part);
    }
    signal_dq_added();
  }

  // Adds a part of dq of a Q tile to dq_sum.
  __device__ __forceinline__ void add_dq_part(const Dq &dq, uint32_t state, int index, int part) const {
    if constexpr (kStoresFirst) {
      exchange_.store_or_add_dq(dq, (state & kPrevFirstInOrder) != 0, index, part);
    } else {
      exchange_.add_dq(dq, true, index, part);
    }
  }
  __device__ __forceinline__ void wait_dq_may_add(int ds_stage) const {
    if constexpr (C::kOrdered) mbarrier_wait(exchange_.dq_may_add(), ds_stage);
  }
  __device__ __forceinline__ void signal_dq_added() const {
    if constexpr (C::kOrdered) exchange_.signal_dq_added(true);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroup with dP, dS and dk
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void dp_dk_warpgroup() {
    float dk[C::kD / 2], dp[C::kTileQ / 2];
    uint32_t ds16[C::kTileQ / 16][4];
    int n = 0;
    uint32_t vote_parity = 0;
#pragma unroll 1
    for (int work_index = 0; cluster().next_work_tile(work_index);) {
#pragma unroll
      for (float &x : dk) x = 0.f;
      const int end = n + (cta().work().q_tile_begin < cta().work().q_tile_end ? cluster().q_tiles() : 0);
      int q_tile = cta().work().q_tile_end - 1;
      mbarrier_wait(cluster().v_full(), work_index & 1);
      mbarrier_arrive_if(n == end && cta().lane == 0, cluster().v_empty());
#pragma unroll 1
      for (; n < end; ++n) {
        const int stage = uniform(n & 1);
        if constexpr (C::kHasDataMask) {
          mbarrier_wait(cluster().dout_full(0), n & 1);
          q_tile = cta().visited(n, &VisitedQTile::q_tile);
        }
        const bool partial = is_partial(q_tile, n);
        mbarrier_wait(cluster().dout_full(0), n & 1);
        fence_operand(dp);
        wgmma_fence();
        cluster().start_dp(dp, cluster().smem_dout(0));
        wgmma_wait<0>();
        fence_operand(dp);
        mbarrier_arrive_if(n + 1 == end && cta().lane == 0, cluster().v_empty());
        bool nan_safe = false;
        if (partial)
          nan_safe = any_nonfinite(nan_if_nonfinite(dp) + cta().delta_nan_if_nonfinite(cluster().smem_delta(0)) != 0.f, n,
                                   vote_parity);
        [[maybe_unused]] const ShownPairs<C::kTileQ> shown{{exchange_.compute_ds(dp, n)}};
        __syncwarp();
        mbarrier_arrive_if(cta().lane == 0, cluster().dout_empty(0));
        if (!C::kHasScoreText && nan_safe) {
          cta().mask_ds(dp, cluster().first_key(), q_tile * C::kTileQ);
          if constexpr (C::kMixtures) shown.for_hidden(0, [&](int at) { dp[at] = kMaskedP; });
        }
        convert_p<Element>(dp, ds16);
        mbarrier_wait_cluster(cluster().ds_empty(stage), n >> 1 & 1 ^ 1);
        exchange_.store_ds(ds16, stage, partial, nan_safe);
        mbarrier_wait(cluster().q_full(stage), n >> 1 & 1);
        if (nan_safe) {
          wgmma_rs_nan_safe<Element, C::kTileQ, C::kD>(dk, ds16, cluster().smem_q(stage), cta().lane);
        } else {
          fence_operand(ds16);
          fence_operand(dk);
          wgmma_fence();
          cluster().start_gradient(dk, ds16, cluster().smem_q(stage));
          wgmma_wait<0>();
          fence_operand(dk);
        }
        __syncwarp();
        mbarrier_arrive_if(cta().lane == 0, cluster().q_empty(stage));
        if (--q_tile < cta().work().q_tile_begin) q_tile = cta().work().q_tile_end - 1;
      }
      cluster().store(cta().params.problem.dk, dk, cta().problem.softmax_scale, static_cast<int>(cta().problem.head_dim),
                      cta().params.vector_dk);
      work_index = cta().work().work_index;
      cluster().release_work_tile(work_index++);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------

  // PExchange::any_nonfinite with the parity bit of `state`, which it flips.
  __device__ __forceinline__ bool any_nonfinite(bool nonfinite, int n, uint32_t &state) const {
    const bool nan_safe = exchange_.any_nonfinite(nonfinite, n, state & kVoteParity);
    state ^= kVoteParity;
    return nan_safe;
  }

  PExchange<C> exchange_;
};

}  // namespace fa::cuda::sm90
