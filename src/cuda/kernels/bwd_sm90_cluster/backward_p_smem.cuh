// SPDX-License-Identifier: Apache-2.0
// Exact attention backward for head_dim up to 256, by clusters of two CTAs (cluster_cta.cuh), one work tile of 128 keys per
// cluster. S and dP do not both fit in registers beside dv, so the two consumer warpgroups of a CTA compute different things:
//
//   p_dv_dq_warpgroup: S^T = K Q^T is there: P^T = exp2(S^T - lse), to the other warpgroup through shared memory
//                      dv += P^T dO, and S^T of the next Q tile
//                      dq = dS K of the previous Q tile, 64 columns at a time, added to dq_sum straight from registers
//   dp_dk_warpgroup:   dP^T = V dO^T; with P^T: dS^T = P^T (dP^T - delta), to shared memory of this CTA and of the peer
//                      dk += dS^T Q
//
// Producer warps: warp 0 loads; warp 3 forwards the release of dS to the peer.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90_cluster/p_exchange.cuh"

namespace fa::cuda::sm90 {

template <class C>
class BackwardPSmem : PExchange<C> {
 public:
  __device__ __forceinline__ BackwardPSmem(const BackwardParams &params, char *shared) : Exchange(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      this->describe_work_tile(static_cast<int>(blockIdx.x) / 2, work());
      mbarrier_init(k_full(), 1);
      mbarrier_init(v_full(), 1);
      mbarrier_init(dout_full(0), 1);
      mbarrier_init(dout_empty(0), 8);
      mbarrier_init(p_full(), 128);
      mbarrier_init(p_empty(), 128);
      mbarrier_init(vote(), C::kConsumerThreads);
      for (int n = 0; n < 2; ++n) st_shared_4(vote_flag(n), 0);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(ds_full(n), 4);
        mbarrier_init(ds_consumed(n), 4);
        mbarrier_init(ds_empty(n), 2);
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
      if (threadIdx.x < 32) this->producer();
      if (warp_ == 3) {
        const int count = work().q_tile_begin < work().q_tile_end ? q_tiles() : 0;
        for (int n = 0; n < count; ++n) this->forward_ds_release(n);
      }
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
  using Cluster::a_, Cluster::work, Cluster::lane_, Cluster::p_, Cluster::rank_, Cluster::warp_;
  using Cluster::wait_q, Cluster::q_tiles, Cluster::workspace_q_tile, Cluster::dout_empty, Cluster::dout_full,
      Cluster::smem_dout, Cluster::nan_safe_dq, Cluster::ds_empty, Cluster::ds_full, Cluster::ds_consumed, Cluster::smem_delta,
      Cluster::first_key, Cluster::flag, Cluster::k_full, Cluster::smem_lse, Cluster::is_partial, Cluster::q_empty,
      Cluster::q_full, Cluster::smem_q, Cluster::release_ds, Cluster::start_dp, Cluster::start_dq, Cluster::start_gradient,
      Cluster::start_s, Cluster::store, Cluster::v_full;
  using Exchange::add_dq, Exchange::any_nonfinite, Exchange::vote, Exchange::compute_ds, Exchange::vote_flag, Exchange::store_p,
      Exchange::mask_ds, Exchange::p_empty, Exchange::p_full, Exchange::store_ds;
  using typename Cluster::Dq, typename Cluster::Element, typename Cluster::QPipeline;

  static_assert(!C::kOrdered && !C::kScored);

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroup with P, dv and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void p_dv_dq_warpgroup() const {
    float dv[C::kD / 2];
#pragma unroll
    for (float &x : dv) x = 0.f;
    const int count = work().q_tile_begin < work().q_tile_end ? q_tiles() : 0;
    if (count > 0) {
      float s[C::kTileQ / 2];
      Dq dq;
      uint32_t p16[C::kTileQ / 16][4];
      QPipeline q_pipe;
      int head = workspace_q_tile(work().head_k * static_cast<int>(p_.group)), q_tile = work().q_tile_end - 1, prev_tile = 0,
          partial_tiles = 0;
      bool prev_partial = false, nan_safe_prev = false;
      mbarrier_wait(k_full(), 0);
      mbarrier_wait(q_full(0), 0);
      fence_operand(s);
      wgmma_fence();
      start_s(s, this->smem_k(), smem_q(0));
      wgmma_wait<0>();
      fence_operand(s);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const int stage = uniform(q_pipe.stage()), ds_stage = uniform(n & 1);
        q_pipe.advance();
        const int next_stage = uniform(q_pipe.stage());
        const bool partial = is_partial(q_tile);
        bool nan_safe = false;
        if (partial) nan_safe = nan_if_nonfinite(s) != 0.f;
        this->exponentiate(p16, s, smem_lse(stage), first_key(), q_tile * C::kTileQ, 0.f);
        if (partial) this->mask_p(p16, s, first_key(), q_tile * C::kTileQ);
        store_p(s, n);
        mbarrier_arrive_if(lane_ == 0, q_empty(stage));
        if constexpr (!C::kScored) convert_p<Element>(s, p16);
        if (partial) nan_safe = any_nonfinite(nan_safe, n, partial_tiles++ & 1);
        mbarrier_wait(dout_full(0), n & 1);
        const int prev = ds_stage ^ 1;  // stage of dS of the previous Q tile
        mbarrier_wait(ds_full(prev), (n - 1) >> 1 & 1);
        if (prev_partial) nan_safe_prev = nan_safe_prev || ld_shared_4(flag(prev)) != 0;
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
          if (n > 0) finish_dq(dq, prev, prev_tile, nan_safe_prev);
          wait_q(n + 1 < count, next_stage, q_pipe.phase());
          fence_operand(s);
          wgmma_fence();
          start_s(s, this->smem_k(), smem_q(next_stage));
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
          wait_q(n + 1 < count, next_stage, q_pipe.phase());
          wgmma_wait<0>();
          fence_operand(dq);
          add_dq(dq, n > 0, prev_tile, 0);
          fence_operand(dq);
          fence_operand(s);
          wgmma_fence();
          start_dq(dq, prev, 1);
          start_s(s, this->smem_k(), smem_q(next_stage));
          wgmma_wait<1>();
          fence_operand(dq);
          release_ds(n > 0, prev);
          add_dq(dq, n > 0, prev_tile, 1);
        }
        wgmma_wait<0>();
        fence_operand(s);
        prev_tile = head + q_tile;
        prev_partial = partial;
        nan_safe_prev = nan_safe;
        if (--q_tile < work().q_tile_begin) {
          q_tile = work().q_tile_end - 1;
          head += a_.row_chunks;
        }
      }
      const int prev = uniform(count - 1 & 1);
      mbarrier_wait(ds_full(prev), (count - 1) >> 1 & 1);
      if (prev_partial) nan_safe_prev = nan_safe_prev || ld_shared_4(flag(prev)) != 0;
      finish_dq(dq, prev, prev_tile, nan_safe_prev);
    }
    store(a_.problem.dv, dv, 1.f, static_cast<int>(p_.head_dim_v), a_.vector_dv);
  }

  // dq of a Q tile, number `index` in the workspace, whose dS is complete.
  __device__ __forceinline__ void finish_dq(Dq &dq, int ds_stage, int index, bool nan_safe) const {
#pragma unroll 1
    for (int part = 0; part < C::kDqParts; ++part) {
      if (nan_safe) {
        nan_safe_dq(dq, ds_stage, part, warp_ * 16);
      } else {
        fence_operand(dq);
        wgmma_fence();
        start_dq(dq, ds_stage, part);
        wgmma_wait<0>();
        fence_operand(dq);
      }
      add_dq(dq, true, index, part);
    }
    release_ds(true, ds_stage);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroup with dP, dS and dk
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void dp_dk_warpgroup() const {
    float dk[C::kD / 2];
#pragma unroll
    for (float &x : dk) x = 0.f;
    const int count = work().q_tile_begin < work().q_tile_end ? q_tiles() : 0;
    if (count > 0) {
      float dp[C::kTileQ / 2];
      uint32_t ds16[C::kTileQ / 16][4];
      QPipeline q_pipe;
      int q_tile = work().q_tile_end - 1, partial_tiles = 0;
      mbarrier_wait(v_full(), 0);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const int stage = uniform(q_pipe.stage()), ds_stage = uniform(n & 1);
        const bool partial = is_partial(q_tile);
        mbarrier_wait(dout_full(0), n & 1);
        fence_operand(dp);
        wgmma_fence();
        start_dp(dp, smem_dout(0));
        wgmma_wait<0>();
        fence_operand(dp);
        bool nan_safe = false;
        if (partial)
          nan_safe =
              any_nonfinite(nan_if_nonfinite(dp) + this->delta_nan_if_nonfinite(smem_delta(0)) != 0.f, n, partial_tiles++ & 1);
        compute_ds(dp, n);
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, dout_empty(0));
        if (nan_safe) mask_ds(dp, q_tile);
        convert_p<Element>(dp, ds16);
        mbarrier_wait_cluster(ds_empty(ds_stage), n >> 1 & 1 ^ 1);
        store_ds(ds16, ds_stage, partial, nan_safe);
        mbarrier_wait(q_full(stage), q_pipe.phase());
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
        q_pipe.advance();
        if (--q_tile < work().q_tile_begin) q_tile = work().q_tile_end - 1;
      }
    }
    store(a_.problem.dk, dk, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk);
  }
};

template <class C>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(C::kThreads, 1)
    backward_p_smem(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  BackwardPSmem<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90
