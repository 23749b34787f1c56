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
class BackwardPSmem {
 public:
  using Params = BackwardParams;
  static constexpr int kThreads = C::kThreads;

  __device__ __forceinline__ BackwardPSmem(const BackwardParams &params, char *shared) : exchange_(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      cta().describe_work_tile(static_cast<int>(blockIdx.x) / 2, cta().work());
      mbarrier_init(cluster().k_full(), 1);
      mbarrier_init(cluster().v_full(), 1);
      init_pipeline<1>(cluster().dout_full(0), cluster().dout_empty(0), 8);
      mbarrier_init(exchange_.p_full(), 128);
      mbarrier_init(exchange_.p_empty(), 128);
      mbarrier_init(exchange_.vote(), C::kConsumerThreads);
      for (int n = 0; n < 2; ++n) st_shared_4(exchange_.vote_flag(n), 0);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(cluster().ds_full(n), 4);
        mbarrier_init(cluster().ds_consumed(n), 4);
        mbarrier_init(cluster().ds_empty(n), 2);
      }
      init_pipeline<C::kStages>(cluster().q_full(0), cluster().q_empty(0), 8);
      mbarrier_init_fence();
    } else if (threadIdx.x == 32) {
      cluster().prefetch_maps();
    }
    __syncthreads();
    cluster_sync();
    if (threadIdx.x < 128) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (threadIdx.x < 32) {
        QPipeline q_pipe;
        DoutPipeline dout_pipe;
        cluster().load_work_tile(q_pipe, dout_pipe);
      }
      if (cta().warp == 3) {
        const int count = cta().work().q_tile_begin < cta().work().q_tile_end ? cluster().q_tiles() : 0;
        for (int n = 0; n < count; ++n) cluster().forward_ds_release(n);
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
  __device__ __forceinline__ ClusterCta<C> &cluster() { return exchange_.cluster; }
  __device__ __forceinline__ const ClusterCta<C> &cluster() const { return exchange_.cluster; }
  __device__ __forceinline__ const BackwardCta<C> &cta() const { return exchange_.cluster.cta; }

  using Dq = typename ClusterCta<C>::Dq;
  using Element = typename ClusterCta<C>::Element;
  using QPipeline = typename ClusterCta<C>::QPipeline;
  using DoutPipeline = typename ClusterCta<C>::DoutPipeline;

  static_assert(!C::kOrdered && !C::kScored);

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroup with P, dv and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void p_dv_dq_warpgroup() const {
    float dv[C::kD / 2];
#pragma unroll
    for (float &x : dv) x = 0.f;
    const int count = cta().work().q_tile_begin < cta().work().q_tile_end ? cluster().q_tiles() : 0;
    if (count > 0) {
      float s[C::kTileQ / 2];
      Dq dq;
      uint32_t p16[C::kTileQ / 16][4];
      QPipeline q_pipe;
      int head = cta().workspace_q_tile(cta().work().head_k * static_cast<int>(cta().problem.group)),
          q_tile = cta().work().q_tile_end - 1, prev_tile = 0, partial_tiles = 0;
      bool prev_partial = false, nan_safe_prev = false;
      mbarrier_wait(cluster().k_full(), 0);
      mbarrier_wait(cluster().q_full(0), 0);
      fence_operand(s);
      wgmma_fence();
      cluster().start_s(s, cluster().smem_k(), cluster().smem_q(0));
      wgmma_wait<0>();
      fence_operand(s);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const int stage = uniform(q_pipe.stage()), ds_stage = uniform(n & 1);
        q_pipe.advance();
        const int next_stage = uniform(q_pipe.stage());
        const bool partial = cluster().is_partial(q_tile);
        bool nan_safe = false;
        if (partial) nan_safe = nan_if_nonfinite(s) != 0.f;
        cta().exponentiate(p16, s, cluster().smem_lse(stage), cluster().first_key(), q_tile * C::kTileQ, {});
        if (partial) cta().mask_p(p16, s, cluster().first_key(), q_tile * C::kTileQ);
        exchange_.store_p(s, n);
        mbarrier_arrive_if(cta().lane == 0, cluster().q_empty(stage));
        if constexpr (!C::kScored) convert_p<Element>(s, p16);
        if (partial) nan_safe = exchange_.any_nonfinite(nan_safe, n, partial_tiles++ & 1);
        mbarrier_wait(cluster().dout_full(0), n & 1);
        const int prev = ds_stage ^ 1;  // stage of dS of the previous Q tile
        mbarrier_wait(cluster().ds_full(prev), (n - 1) >> 1 & 1);
        if (prev_partial) nan_safe_prev = nan_safe_prev || ld_shared_4(cluster().flag(prev)) != 0;
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
          if (n > 0) finish_dq(dq, prev, prev_tile, nan_safe_prev);
          cluster().wait_q(n + 1 < count, next_stage, q_pipe.phase());
          fence_operand(s);
          wgmma_fence();
          cluster().start_s(s, cluster().smem_k(), cluster().smem_q(next_stage));
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
          cluster().wait_q(n + 1 < count, next_stage, q_pipe.phase());
          wgmma_wait<0>();
          fence_operand(dq);
          exchange_.add_dq(dq, n > 0, prev_tile, 0);
          fence_operand(dq);
          fence_operand(s);
          wgmma_fence();
          cluster().start_dq(dq, prev, 1);
          cluster().start_s(s, cluster().smem_k(), cluster().smem_q(next_stage));
          wgmma_wait<1>();
          fence_operand(dq);
          cluster().release_ds(n > 0, prev);
          exchange_.add_dq(dq, n > 0, prev_tile, 1);
        }
        wgmma_wait<0>();
        fence_operand(s);
        prev_tile = head + q_tile;
        prev_partial = partial;
        nan_safe_prev = nan_safe;
        if (--q_tile < cta().work().q_tile_begin) {
          q_tile = cta().work().q_tile_end - 1;
          head += cta().work().workspace_q_tiles;
        }
      }
      const int prev = uniform(count - 1 & 1);
      mbarrier_wait(cluster().ds_full(prev), (count - 1) >> 1 & 1);
      if (prev_partial) nan_safe_prev = nan_safe_prev || ld_shared_4(cluster().flag(prev)) != 0;
      finish_dq(dq, prev, prev_tile, nan_safe_prev);
    }
    cluster().store(cta().params.problem.dv, dv, 1.f, static_cast<int>(cta().problem.head_dim_v), cta().params.vector_dv);
  }

  // dq of a Q tile, number `index` in the workspace, whose dS is complete.
  __device__ __forceinline__ void finish_dq(Dq &dq, int ds_stage, int index, bool nan_safe) const {
#pragma unroll 1
    for (int part = 0; part < C::kDqParts; ++part) {
      if (nan_safe) {
        cluster().nan_safe_dq(dq, ds_stage, part, cta().warp * 16);
      } else {
        fence_operand(dq);
        wgmma_fence();
        cluster().start_dq(dq, ds_stage, part);
        wgmma_wait<0>();
        fence_operand(dq);
      }
      exchange_.add_dq(dq, true, index, part);
    }
    cluster().release_ds(true, ds_stage);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroup with dP, dS and dk
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void dp_dk_warpgroup() const {
    float dk[C::kD / 2];
#pragma unroll
    for (float &x : dk) x = 0.f;
    const int count = cta().work().q_tile_begin < cta().work().q_tile_end ? cluster().q_tiles() : 0;
    if (count > 0) {
      float dp[C::kTileQ / 2];
      uint32_t ds16[C::kTileQ / 16][4];
      QPipeline q_pipe;
      int q_tile = cta().work().q_tile_end - 1, partial_tiles = 0;
      mbarrier_wait(cluster().v_full(), 0);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const int stage = uniform(q_pipe.stage()), ds_stage = uniform(n & 1);
        const bool partial = cluster().is_partial(q_tile);
        mbarrier_wait(cluster().dout_full(0), n & 1);
        fence_operand(dp);
        wgmma_fence();
        cluster().start_dp(dp, cluster().smem_dout(0));
        wgmma_wait<0>();
        fence_operand(dp);
        bool nan_safe = false;
        if (partial)
          nan_safe = exchange_.any_nonfinite(
              nan_if_nonfinite(dp) + cta().delta_nan_if_nonfinite(cluster().smem_delta(0)) != 0.f, n, partial_tiles++ & 1);
        exchange_.compute_ds(dp, n);
        __syncwarp();
        mbarrier_arrive_if(cta().lane == 0, cluster().dout_empty(0));
        if (nan_safe) cta().mask_ds(dp, cluster().first_key(), q_tile * C::kTileQ);
        convert_p<Element>(dp, ds16);
        mbarrier_wait_cluster(cluster().ds_empty(ds_stage), n >> 1 & 1 ^ 1);
        exchange_.store_ds(ds16, ds_stage, partial, nan_safe);
        mbarrier_wait(cluster().q_full(stage), q_pipe.phase());
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
        q_pipe.advance();
        if (--q_tile < cta().work().q_tile_begin) q_tile = cta().work().q_tile_end - 1;
      }
    }
    cluster().store(cta().params.problem.dk, dk, cta().problem.softmax_scale, static_cast<int>(cta().problem.head_dim),
                    cta().params.vector_dk);
  }

  PExchange<C> exchange_;
};

}  // namespace fa::cuda::sm90
