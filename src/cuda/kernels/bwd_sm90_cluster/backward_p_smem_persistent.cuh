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
#include "cuda/kernels/bwd_sm90_cluster/p_exchange.cuh"

namespace fa::cuda::sm90 {

template <class C>
class BackwardPSmemPersistent : PExchange<C> {
 public:
  __device__ __forceinline__ BackwardPSmemPersistent(const BackwardParams &params, char *shared) : Exchange(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      mbarrier_init(k_full(), 1);
      mbarrier_init(v_full(), 1);
      mbarrier_init(dout_full(0), 1);
      mbarrier_init(dout_empty(0), 8);
      mbarrier_init(p_full(), 128);
      mbarrier_init(p_empty(), 128);
      mbarrier_init(vote(), C::kConsumerThreads);
      if constexpr (C::kOrdered) {
        mbarrier_init(dq_may_add(), 1);
        mbarrier_init(dq_added(), 4);
        mbarrier_init(dq_added_seen(), 1);
      }
      this->init_persistent(C::kOrdered ? 11 : 9, 4);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(ds_full(n), 4);
        mbarrier_init(ds_empty(n), 8);
        st_shared_4(vote_flag(n), 0);
      }
      for (int n = 0; n < C::kStages; ++n) {
        mbarrier_init(q_full(n), 1);
        mbarrier_init(q_empty(n), 8);
      }
      mbarrier_init_fence();
    } else if (threadIdx.x == 32) {
      this->prefetch_maps();
    }
    __syncthreads();
    cluster_sync();
    if (threadIdx.x < 128) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (warp_ == 0) {
        QPipeline q_pipe;
        DoutPipeline dout_pipe;
        this->for_each_work_tile([&](int &) { this->load_work_tile(q_pipe, dout_pipe); });
      }
      if (C::kOrdered && warp_ == 1) {
        pdl_wait();
        this->for_each_work_tile([&](int &n) { this->wait_dq_order(n); });
      }
      if (C::kOrdered && warp_ == 2) this->for_each_work_tile([&](int &n) { this->advance_dq_order(n); });
      if (warp_ == 3) scheduler();
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
  using Exchange = PExchange<C>;
  using Cluster = ClusterCta<C>;
  using Cluster::a_, Cluster::work, Cluster::lane_, Cluster::p_, Cluster::warp_;
  using Cluster::q_tiles, Cluster::workspace_q_tile, Cluster::dout_empty, Cluster::dout_full, Cluster::smem_dout,
      Cluster::ds_empty, Cluster::ds_full, Cluster::smem_ds, Cluster::smem_delta, Cluster::release_work_tile,
      Cluster::first_key, Cluster::flag, Cluster::k_full, Cluster::smem_k, Cluster::k_empty, Cluster::smem_lse,
      Cluster::is_partial, Cluster::next_work_tile, Cluster::peer_k_full, Cluster::q_empty, Cluster::q_full, Cluster::smem_q,
      Cluster::start_dp, Cluster::start_dq, Cluster::start_s, Cluster::start_gradient, Cluster::store, Cluster::in_peer,
      Cluster::v_empty, Cluster::v_full;
  using Exchange::add_dq, Exchange::dq_added, Exchange::vote, Exchange::compute_ds, Exchange::vote_flag, Exchange::store_p,
      Exchange::mask_ds, Exchange::dq_may_add, Exchange::p_empty, Exchange::p_full, Exchange::store_ds, Exchange::dq_added_seen;
  using typename Cluster::Dq, typename Cluster::DoutPipeline, typename Cluster::Element, typename Cluster::QPipeline;

  // The scheduler warp. As in backward.cuh it takes the next work tile when all loads of the current one have been issued.
  __device__ __forceinline__ void scheduler() const {
    int count = 0;
    for (int work_index = 0; this->schedule(work_index, count); ++work_index) {
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
    for (int work_index = 0; next_work_tile(work_index);) {
#pragma unroll
      for (float &x : dv) x = 0.f;
      mbarrier_wait(k_full(), work_index & 1);
      if (work().q_tile_begin < work().q_tile_end) {
        main_loop(dv, n, state);
      } else {
        __syncwarp();
        mbarrier_wait(peer_k_full(), work_index & 1);
        mbarrier_arrive_if(lane_ == 0, k_empty());
      }
      store(a_.problem.dv, dv, 1.f, static_cast<int>(p_.head_dim_v), a_.vector_dv);
      work_index = work().work_index;
      release_work_tile(work_index++);
    }
  }

  // State of the warpgroup in one register: the parity of the number of partial Q tiles; whether the previous Q tile was
  // partial and whether it took the NaN-safe path; in deterministic mode, whether this work tile is the first in the order to
  // add to the previous Q tile's dq; and, from kOneQTile up, how many Q tiles the work tile has left.
  static constexpr uint32_t kVoteParity = 1, kPrevPartial = 2, kPrevNanSafe = 4, kPrevFirstInOrder = 8, kOneQTile = 16;
  __device__ __forceinline__ bool prev_is_nan_safe(uint32_t state, int ds_stage) const {
    return (state & kPrevNanSafe) != 0 || ((state & kPrevPartial) != 0 && ld_shared_4(flag(ds_stage)) != 0);
  }

  // n: iterations of all work tiles before.
  __device__ __forceinline__ void main_loop(float (&dv)[C::kD / 2], int &n, uint32_t &state) const {
    float s[C::kTileQ / 2];
    Dq dq;
    uint32_t p16[C::kTileQ / 16][4];
    int q_tile = work().q_tile_end - 1, prev_tile = -1;  // prev_tile: number in the workspace, or -1
    int head_q = work().head_k * static_cast<int>(p_.group);
    state = (state & kVoteParity) | static_cast<uint32_t>(q_tiles()) * kOneQTile;
    mbarrier_wait(q_full(n & 1), n >> 1 & 1);
    fence_operand(s);
    wgmma_fence();
    start_s(s, uniform(smem_k()), smem_q(uniform(n & 1)));
    wgmma_wait<0>();
    fence_operand(s);
#pragma unroll 1
    do {
      const int stage = uniform(n & 1), next_stage = stage ^ 1,
                prev = next_stage;  // stage of dS of the previous Q tile, and of the next_stage one
      const uint32_t k = uniform(smem_k());
      const bool partial = is_partial(q_tile);
      bool nan_safe = false;
      if (partial) nan_safe = nan_if_nonfinite(s) != 0.f;
      this->exponentiate(p16, s, smem_lse(stage), first_key(), q_tile * C::kTileQ, this->alibi_slope(head_q));
      if (partial) this->mask_p(p16, s, first_key(), q_tile * C::kTileQ);
      store_p(s, n);
      mbarrier_arrive_if(lane_ == 0, q_empty(stage));
      if constexpr (!C::kScored) convert_p<Element>(s, p16);
      if (partial) nan_safe = any_nonfinite(nan_safe, n, state);
      mbarrier_wait(dout_full(0), n & 1);
      mbarrier_wait(ds_full(prev), (n - 1) >> 1 & 1);
      const bool nan_safe_prev = prev_is_nan_safe(state, prev);
      if (nan_safe || nan_safe_prev) {
        if (nan_safe) {
          wgmma_rs_nan_safe<Element, C::kTileQ, C::kD>(dv, p16, smem_dout(0), lane_);
        } else {
          fence_operand(p16);
          fence_operand(dv);
          wgmma_fence();
          start_gradient(dv, p16, smem_dout(0));
          wgmma_wait<0>();
          fence_operand(dv);
        }
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, dout_empty(0));
        if (prev_tile >= 0) finish_dq(dq, prev, prev_tile, state, nan_safe_prev, false);
        mbarrier_wait_if(state >= 2 * kOneQTile, q_full(next_stage), n + 1 >> 1 & 1);
        fence_operand(s);
        wgmma_fence();
        start_s(s, k, smem_q(next_stage));
      } else if (prev_tile < 0) {
        fence_operand(p16);
        fence_operand(dv);
        wgmma_fence();
        start_gradient(dv, p16, smem_dout(0));
        mbarrier_wait_if(state >= 2 * kOneQTile, q_full(next_stage), n + 1 >> 1 & 1);
        fence_operand(s);
        wgmma_fence();
        start_s(s, k, smem_q(next_stage));
        wgmma_wait<1>();
        fence_operand(dv);
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, dout_empty(0));
      } else {
        fence_operand(p16);
        fence_operand(dv);
        fence_operand(dq);
        wgmma_fence();
        start_gradient(dv, p16, smem_dout(0));
        start_dq(dq, prev, 0);
        wgmma_wait<1>();
        fence_operand(dv);
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, dout_empty(0));
        mbarrier_wait_if(state >= 2 * kOneQTile, q_full(next_stage), n + 1 >> 1 & 1);
        wgmma_wait<0>();
        fence_operand(dq);
        wait_dq_may_add(prev);
        add_dq_part(dq, state, prev_tile, 0);
        fence_operand(dq);
        fence_operand(s);
        wgmma_fence();
        start_dq(dq, prev, 1);
        start_s(s, k, smem_q(next_stage));
        wgmma_wait<1>();
        fence_operand(dq);
        release_ds_to_both(prev);
        add_dq_part(dq, state, prev_tile, 1);
        signal_dq_added();
      }
      wgmma_wait<0>();
      fence_operand(s);
      if (prev_tile < 0) mbarrier_wait(peer_k_full(), work().work_index & 1);  // for dq
      if (q_tile < work().q_tile_end - 1) {
        --prev_tile;
      } else {
        prev_tile = prev_tile < 0 ? workspace_q_tile(work().head_k * static_cast<int>(p_.group)) + q_tile
                                  : prev_tile - work().q_tile_begin + a_.row_chunks + q_tile;
      }
      state = (state & (kVoteParity | ~(kOneQTile - 1))) | (partial ? kPrevPartial : 0u) | (nan_safe ? kPrevNanSafe : 0u);
      if (C::kOrdered && a_.ordered && this->dq_order_position(q_tile) == 0) state |= kPrevFirstInOrder;
      if (--q_tile < work().q_tile_begin) {
        q_tile = work().q_tile_end - 1;
        ++head_q;
      }
      state -= kOneQTile;
      ++n;
    } while (state >= kOneQTile);
    const int last_n = opaque(n) - 1, prev = uniform(last_n & 1);  // opaque: otherwise ptxas keeps a copy of n
    mbarrier_wait(ds_full(prev), last_n >> 1 & 1);
    finish_dq(dq, prev, prev_tile, state, prev_is_nan_safe(state, prev), true);
  }

  // Neither CTA may overwrite dS before both have read it. The arrival at the peer's barrier is relaxed: finished wgmma have
  // read dS.
  __device__ __forceinline__ void release_ds_to_both(int ds_stage) const {
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, ds_empty(ds_stage));
    mbarrier_arrive_remote_relaxed_if(lane_ == 0, in_peer(ds_empty(ds_stage)));
  }
  // dq of a Q tile, number `index` in the workspace, whose dS is complete. With last_use_of_k it also releases K.
  __device__ __forceinline__ void finish_dq(Dq &dq, int ds_stage, int index, uint32_t state, bool nan_safe,
                                            bool last_use_of_k) const {
#pragma unroll 1
    for (int part = 0; part < C::kDqParts; ++part) {
      const bool last_part = part == C::kDqParts - 1;
      if (nan_safe) {
        // The row comes from threadIdx as it is read here: it must not occupy a register throughout the main loop.
        this->nan_safe_dq(dq, ds_stage, part, opaque(static_cast<int>(threadIdx.x)) % 128 / 32 * 16);
        __syncwarp();
        mbarrier_arrive_if(last_part && lane_ == 0, ds_empty(ds_stage));
        mbarrier_arrive_remote_if(last_part && lane_ == 0, in_peer(ds_empty(ds_stage)));
      } else {
        fence_operand(dq);
        wgmma_fence();
        start_dq(dq, ds_stage, part);
        wgmma_wait<0>();
        fence_operand(dq);
        if (last_part) release_ds_to_both(ds_stage);
      }
      mbarrier_arrive_if(last_part && last_use_of_k && lane_ == 0, k_empty());
      if (!last_part) wait_dq_may_add(ds_stage);
      add_dq_part(dq, state, index, part);
    }
    signal_dq_added();
  }

  // Adds a part of dq of a Q tile to dq_sum.
  __device__ __forceinline__ void add_dq_part(const Dq &dq, uint32_t state, int index, int part) const {
    if constexpr (C::kOrdered) {
      this->store_or_add_dq(dq, (state & kPrevFirstInOrder) != 0, index, part);
    } else {
      add_dq(dq, true, index, part);
    }
  }
  __device__ __forceinline__ void wait_dq_may_add(int ds_stage) const {
    if constexpr (C::kOrdered) mbarrier_wait(dq_may_add(), ds_stage);
  }
  __device__ __forceinline__ void signal_dq_added() const {
    if constexpr (C::kOrdered) Exchange::signal_dq_added(true);
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
    for (int work_index = 0; next_work_tile(work_index);) {
#pragma unroll
      for (float &x : dk) x = 0.f;
      const int end = n + (work().q_tile_begin < work().q_tile_end ? q_tiles() : 0);
      int q_tile = work().q_tile_end - 1;
      mbarrier_wait(v_full(), work_index & 1);
      mbarrier_arrive_if(n == end && lane_ == 0, v_empty());
#pragma unroll 1
      for (; n < end; ++n) {
        const int stage = uniform(n & 1);
        const bool partial = is_partial(q_tile);
        mbarrier_wait(dout_full(0), n & 1);
        fence_operand(dp);
        wgmma_fence();
        start_dp(dp, smem_dout(0));
        wgmma_wait<0>();
        fence_operand(dp);
        mbarrier_arrive_if(n + 1 == end && lane_ == 0, v_empty());
        bool nan_safe = false;
        if (partial)
          nan_safe = any_nonfinite(nan_if_nonfinite(dp) + this->delta_nan_if_nonfinite(smem_delta(0)) != 0.f, n, vote_parity);
        compute_ds(dp, n);
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, dout_empty(0));
        if (nan_safe) mask_ds(dp, q_tile);
        convert_p<Element>(dp, ds16);
        mbarrier_wait_cluster(ds_empty(stage), n >> 1 & 1 ^ 1);
        store_ds(ds16, stage, partial, nan_safe);
        mbarrier_wait(q_full(stage), n >> 1 & 1);
        if (nan_safe) {
          wgmma_rs_nan_safe<Element, C::kTileQ, C::kD>(dk, ds16, smem_q(stage), lane_);
        } else {
          fence_operand(ds16);
          fence_operand(dk);
          wgmma_fence();
          start_gradient(dk, ds16, smem_q(stage));
          wgmma_wait<0>();
          fence_operand(dk);
        }
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, q_empty(stage));
        if (--q_tile < work().q_tile_begin) q_tile = work().q_tile_end - 1;
      }
      store(a_.problem.dk, dk, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk);
      work_index = work().work_index;
      release_work_tile(work_index++);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------

  // PExchange::any_nonfinite with the parity bit of `state`, which it flips.
  __device__ __forceinline__ bool any_nonfinite(bool nonfinite, int n, uint32_t &state) const {
    const bool nan_safe = Exchange::any_nonfinite(nonfinite, n, state & kVoteParity);
    state ^= kVoteParity;
    return nan_safe;
  }
};

template <class C>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(C::kThreads, 1)
    backward_p_smem_persistent(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  BackwardPSmemPersistent<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90
