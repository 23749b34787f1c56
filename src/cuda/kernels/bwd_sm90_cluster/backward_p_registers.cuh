// SPDX-License-Identifier: Apache-2.0
// Exact attention backward for head_dim 129 to 192, by persistent clusters of two CTAs (cluster_cta.cuh). Here the registers of
// one warpgroup hold dv, S and dP of 64 keys, so P never leaves it, and dS goes one way:
//
//   s_dv_warpgroup:   S^T = K Q^T is there: start dP^T = V dO^T; meanwhile P^T = exp2(S^T - lse)
//                     start dv += P^T dO; meanwhile dS^T = P^T (dP^T - delta), to shared memory of this CTA and of the peer
//                     S^T of the next Q tile
//   dk_dq_warpgroup:  dk += dS^T Q, with dS^T from shared memory, while the peer's dS arrives
//                     dq = dS K, half of the columns; stored to shared memory during dk of the next Q tile, from where a dq warp has TMA add
//                     it to dq_sum
//
// s_dv_warpgroup waits for dk_dq_warpgroup only if that is two Q tiles behind.
//
// Producer warps: 0 loads and is the scheduler; 1 sends dS to the peer and forwards its release; 2 and 3 reduce dq in
// alternation.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90_cluster/cluster_cta.cuh"

namespace fa::cuda::sm90 {

template <class C>
class BackwardPRegisters {
 public:
  using Params = BackwardParams;
  static constexpr int kThreads = C::kThreads;

  __device__ __forceinline__ BackwardPRegisters(const BackwardParams &params, char *shared) : cluster_(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      cluster_.init_persistent(12, 8);
      mbarrier_init(cluster_.k_full(), 1);
      mbarrier_init(cluster_.v_full(), 1);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(own_ds_full(n), 4);
        mbarrier_init(cluster_.ds_full(n), 1);
        mbarrier_init(cluster_.ds_consumed(n), 4);
        mbarrier_init(cluster_.ds_empty(n), 2);
      }
      for (int n = 0; n < 2; ++n) mbarrier_init(dq_full(n), 4);
      mbarrier_init(dq_empty(), 1);
      init_pipeline<C::kDoutStages>(cluster_.dout_full(0), cluster_.dout_empty(0), 4);
      init_pipeline<C::kStages>(cluster_.q_full(0), cluster_.q_empty(0), 8);
      mbarrier_init_fence();
    } else if (threadIdx.x == 32) {
      cluster_.prefetch_maps();
    }
    __syncthreads();
    cluster_sync();
    if (threadIdx.x < 128) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (cta().warp == 0) producer();
      if (cta().warp == 1) cluster_.for_each_work_tile([&](int &n) { forward_ds(n); });
      if (cta().warp > 1) {
        uint32_t parity = 0;
        pdl_wait();
        cluster_.for_each_work_tile([&](int &n) {
          cta().template reduce_dq<2>(cluster_.rank, smem_dq(), dq_full(cta().warp & 1), dq_empty(), parity,
                                      (cta().warp + n) & 1);
          n = cta().work().q_tiles_end;
        });
        bulk_wait_group();
      }
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      if (uniform(threadIdx.x / 128) == 1) {
        s_dv_warpgroup();
      } else {
        dk_dq_warpgroup();
      }
    }
    cluster_sync();  // until then the peer may still write to this shared memory
  }

 private:
  __device__ __forceinline__ const BackwardCta<C> &cta() const { return cluster_.cta; }

  using Dq = typename ClusterCta<C>::Dq;
  using Element = typename ClusterCta<C>::Element;
  using QPipeline = typename ClusterCta<C>::QPipeline;
  using DoutPipeline = typename ClusterCta<C>::DoutPipeline;
  using RowStats = typename ClusterCta<C>::RowStats;
  using Storage = typename ClusterCta<C>::Storage;
  using QTileRange = typename ClusterCta<C>::QTileRange;
  static_assert(!C::kPThroughSmem && C::kDqParts == 1);
  // Whether S^T of the next Q tile is computed beside dv: there are registers for it beside P, and a pipeline stage for its Q.
  static constexpr bool kOverlapNextS = C::kStages > 2;
  // Whether there are registers to load lse and delta of a Q tile before the wgmma are started.
  static constexpr bool kPrefetchStats = !C::kScored && C::kDv <= 128;
  // Whether dS is computed only after all wgmma that overlap it have been started, see late_one().
  static constexpr bool kLateDs = kOverlapNextS && kPrefetchStats;

  // dS of this CTA's keys is complete; ds_full is for the peer's.
  __device__ __forceinline__ uint32_t own_ds_full(int n) const {
    return cta().at(offsetof(Storage, cluster.own.own_ds_full), n, sizeof(Mbarrier));
  }
  __device__ __forceinline__ uint32_t dq_full(int n) const {
    return cta().at(offsetof(Storage, cluster.own.dq_full), n, sizeof(Mbarrier));
  }
  __device__ __forceinline__ uint32_t dq_empty() const { return cta().at(offsetof(Storage, cluster.own.dq_empty)); }
  __device__ __forceinline__ uint32_t smem_dq() const { return cluster_.smem_exchange(); }
  __device__ __forceinline__ uint32_t own_flag(int n) const { return cluster_.flag(2 + n); }

  // The producer warp is also the scheduler: it describes the next work tile when it has issued all loads of the current one.
  // The Q tiles of those loads are the last that the other warps have left.
  __device__ __forceinline__ void producer() {
    QPipeline q_pipe;
    DoutPipeline dout_pipe;
    int count = 0;
    cluster_.schedule(0, count);
    for (int work_index = 0; cluster_.next_work_tile(work_index); ++work_index) {
      cluster_.load_work_tile(q_pipe, dout_pipe);
      cluster_.schedule(work_index + 1, count);
      cluster_.release_work_tile(work_index);
    }
  }
  // With kLateDs the address is computed in every iteration: operand descriptors kept across iterations would leave too few
  // uniform registers.
  __device__ __forceinline__ uint32_t smem_k_of_iteration() const {
    return kLateDs ? uniform(cluster_.smem_k()) : cluster_.smem_k();
  }
  __device__ __forceinline__ void wait_q(bool more, int stage, uint32_t parity) const {
    mbarrier_wait_if(more, cluster_.q_full(stage), parity);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroup with S, P, dP, dS and dv
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void s_dv_warpgroup() {
    float dv[C::kDv / 2];
    QPipeline q_pipe;
    int n = 0;
#pragma unroll 1
    for (int work_index = 0; cluster_.next_work_tile(work_index);) {
#pragma unroll
      for (float &x : dv) x = 0.f;
      mbarrier_wait(cluster_.k_full(), work_index & 1);
      if (cta().work().q_tile_begin < cta().work().q_tile_end) {
        s_dv_main_loop(dv, q_pipe, n);
      } else {
        mbarrier_wait(cluster_.v_full(), work_index & 1);
        mbarrier_arrive_if(cta().lane == 0, cluster_.v_empty());
      }
      __syncwarp();
      mbarrier_arrive_if(cta().lane == 0, cluster_.k_empty());
      cluster_.store(cta().params.problem.dv, dv, 1.f, static_cast<int>(cta().problem.head_dim_v), cta().params.vector_dv);
      work_index = cta().work().work_index;
      cluster_.release_work_tile(work_index++);
    }
  }

  // n: iterations of all work tiles before.
  __device__ __forceinline__ void s_dv_main_loop(float (&dv)[C::kDv / 2], QPipeline &q_pipe, int &n) const {
    float s[C::kTileQ / 2], dp[C::kTileQ / 2];
    uint32_t p[C::kTileQ / 16][4], ds[C::kTileQ / 16][4];
    const QTileRange range = cluster_.q_tile_range();
    const int end = cta().work().q_tiles_end;
    int q_tile = range.end - 1, head_q = cta().work().head_k * static_cast<int>(cta().problem.group);
    RowStats lse, delta;
    {
      const int stage = uniform(q_pipe.stage());
      mbarrier_wait(cluster_.q_full(stage), q_pipe.phase());
      if constexpr (kPrefetchStats) cta().load_stats(lse, cluster_.smem_lse(stage));
      fence_operand(s);
      wgmma_fence();
      cluster_.start_s(s, smem_k_of_iteration(), cluster_.smem_q(stage));
      wgmma_wait<0>();
      fence_operand(s);
    }
    mbarrier_wait(cluster_.v_full(), cta().work().work_index & 1);
#pragma unroll 1
    do {
      const int stage = uniform(q_pipe.stage()), ds_stage = uniform(n & 1), dout_stage = uniform(n % C::kDoutStages);
      q_pipe.advance();
      const int next_stage = uniform(q_pipe.stage());
      const uint32_t k = smem_k_of_iteration();
      const bool partial = range.is_partial(q_tile);
      mbarrier_wait(cluster_.dout_full(dout_stage), n / C::kDoutStages & 1);
      if constexpr (kPrefetchStats) cta().load_stats(delta, cluster_.smem_delta(dout_stage));
      fence_operand(dp);
      wgmma_fence();
      cluster_.start_dp(dp, cluster_.smem_dout(dout_stage));
      float finite = 0.f;  // NaN if anything is not finite
      if (partial) finite = nan_if_nonfinite(s);
      float e[C::kTileQ / 2];  // P
#pragma unroll
      for (int i = 0; i < C::kTileQ / 2; ++i) e[i] = s[i];
      if constexpr (kPrefetchStats) {
        cta().exponentiate(e, lse);
      } else {
        cta().exponentiate(p, e, cluster_.smem_lse(stage), cluster_.first_key(), q_tile * C::kTileQ, cta().head_terms(head_q));
      }
      if (partial) cta().mask_p(p, e, cluster_.first_key(), q_tile * C::kTileQ);
      if constexpr (!C::kScored) convert_p<Element>(e, p);
      __syncwarp();
      mbarrier_arrive_if(cta().lane == 0, cluster_.q_empty(stage));
      wgmma_wait<0>();
      fence_operand(dp);
      mbarrier_arrive_if(n + 1 == end && cta().lane == 0, cluster_.v_empty());
      bool nan_safe = false;
      if (partial) {
        finite += nan_if_nonfinite(dp) + cta().delta_nan_if_nonfinite(cluster_.smem_delta(dout_stage));
        nan_safe = named_barrier_or(1, 128, finite != 0.f);
      }
      if (nan_safe) {
        compute_ds(dp, e, delta, cluster_.smem_delta(dout_stage), 1.f);
        cta().mask_ds(dp, cluster_.first_key(), q_tile * C::kTileQ);
        convert_p<Element>(dp, ds);
        if constexpr (kLateDs) wait_ds_empty(ds_stage, n);
        store_ds(ds, n, partial, true);
        wgmma_rs_nan_safe<Element, C::kTileQ, C::kDv>(dv, p, cluster_.smem_dout(dout_stage), cta().lane);
        wait_q(n + 1 < end, next_stage, q_pipe.phase());
        if (kPrefetchStats && n + 1 < end) cta().load_stats(lse, cluster_.smem_lse(next_stage));
        fence_operand(s);
        wgmma_fence();
        cluster_.start_s(s, k, cluster_.smem_q(next_stage));
      } else {
        if constexpr (kOverlapNextS) wait_q(n + 1 < end, next_stage, q_pipe.phase());
        if constexpr (kOverlapNextS && kPrefetchStats) {
          if (n + 1 < end) cta().load_stats(lse, cluster_.smem_lse(next_stage));
        }
        fence_operand(p);
        fence_operand(dv);
        if constexpr (kOverlapNextS) fence_operand(s);
        wgmma_fence();
        if constexpr (kOverlapNextS) cluster_.start_s(s, k, cluster_.smem_q(next_stage));
        cluster_.start_gradient(dv, p, cluster_.smem_dout(dout_stage));
        if constexpr (kLateDs) wait_ds_empty(ds_stage, n);
        compute_ds(dp, e, delta, cluster_.smem_delta(dout_stage), late_one());
        convert_p<Element>(dp, ds);
        store_ds(ds, n, partial, false);
        if constexpr (!kOverlapNextS) {
          wait_q(n + 1 < end, next_stage, q_pipe.phase());
          fence_operand(s);
          wgmma_fence();
          cluster_.start_s(s, k, cluster_.smem_q(next_stage));
        }
        wgmma_wait<kOverlapNextS ? 0 : 1>();
        fence_operand(dv);
      }
      __syncwarp();
      mbarrier_arrive_if(cta().lane == 0, cluster_.dout_empty(dout_stage));
      wgmma_wait<0>();
      fence_operand(s);
      if (--q_tile < range.begin) {
        q_tile = range.end - 1;
        ++head_q;
      }
    } while (++n < end);
  }

  __device__ __forceinline__ void compute_ds(float (&dp)[C::kTileQ / 2], const float (&p)[C::kTileQ / 2],
                                             const RowStats &prefetched, uint32_t smem_delta, float one) const {
    cta().template compute_ds<kLateDs>(
        dp, [&](int j) { return float4_of(p, j); },
        [&](int j) { return kPrefetchStats ? prefetched[j] : cta().row_stat(smem_delta, j); }, one);
  }
  // 1, as a number that the compiler does not know before the loop in front of it, a wait, has ended. Everything that dS needs
  // is there when the wgmma that overlap it are started. ptxas would otherwise compute dS between the first two of them, while
  // the tensor cores wait for the rest.
  __device__ __forceinline__ float late_one() const {
    return kLateDs ? __int_as_float(static_cast<int>(uniform(0x3f800000u + static_cast<uint32_t>(cta().lane)))) : 1.f;
  }

  // Waits until both CTAs have read the dS that was in this stage.
  __device__ __forceinline__ void wait_ds_empty(int ds_stage, int n) const {
    mbarrier_wait_cluster(cluster_.ds_empty(ds_stage), n >> 1 & 1 ^ 1);
  }
  // Stores this warp's 16 keys of dS^T of iteration n, for this CTA and the peer. For a partial Q tile it also stores, in both
  // CTAs, whether dk and dq need the NaN-safe path.
  __device__ __forceinline__ void store_ds(const uint32_t (&ds)[C::kTileQ / 16][4], int n, bool partial, bool nan_safe) const {
    const int ds_stage = uniform(n & 1);
    if constexpr (!kLateDs) wait_ds_empty(ds_stage, n);
    cluster_.store_ds_own(ds, ds_stage);
    __syncwarp();
    if (cta().lane != 0) return;
    if (cta().warp == 0 && partial) {
      st_shared_4(own_flag(ds_stage), nan_safe);
      st_async(cluster_.in_peer(cluster_.flag(ds_stage)), nan_safe, cluster_.in_peer(cluster_.ds_full(ds_stage)));
    }
    mbarrier_arrive(own_ds_full(ds_stage));
  }
  // The loop of the warp that sends dS of every Q tile to the peer and forwards the release of the one before. The fence, which
  // waits for the stores of the thread that executes it, is in the readers of dS, not in its writers.
  __device__ __forceinline__ void forward_ds(int &n) const {
    const int first = n;
    int q_tile = cta().work().q_tile_end - 1;
#pragma unroll 1
    for (; n < cta().work().q_tiles_end; ++n) {
      const int ds_stage = n & 1;
      mbarrier_wait(own_ds_full(ds_stage), n >> 1 & 1);
      if (elect_one()) {
        fence_proxy_async();
        cluster_.send_ds_to_peer(ds_stage, C::kDsBytes, 0);
        mbarrier_arrive_expect_tx(cluster_.ds_full(ds_stage),
                                  C::kDsBytes + (cluster_.is_partial(q_tile) ? 4 : 0));  // arrives from the peer
      }
      __syncwarp();
      if (n > first) cluster_.forward_ds_release(n - 1);
      if (--q_tile < cta().work().q_tile_begin) q_tile = cta().work().q_tile_end - 1;
    }
    if (n > first) cluster_.forward_ds_release(n - 1);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroup with dk and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void dk_dq_warpgroup() {
    float dk[C::kD / 2];
    QPipeline q_pipe;
    int n = 0;
#pragma unroll 1
    for (int work_index = 0; cluster_.next_work_tile(work_index);) {
#pragma unroll
      for (float &x : dk) x = 0.f;
      mbarrier_wait(cluster_.k_full(), work_index & 1);
      mbarrier_wait(cluster_.peer_k_full(), work_index & 1);
      if (cta().work().q_tile_begin < cta().work().q_tile_end) {
        dk_dq_main_loop(dk, q_pipe, n);
      } else {
        __syncwarp();
        mbarrier_arrive_if(cta().lane == 0, cluster_.k_empty());
      }
      cluster_.store(cta().params.problem.dk, dk, cta().problem.softmax_scale, static_cast<int>(cta().problem.head_dim),
                     cta().params.vector_dk);
      work_index = cta().work().work_index;
      cluster_.release_work_tile(work_index++);
    }
  }

  __device__ __forceinline__ void dk_dq_main_loop(float (&dk)[C::kD / 2], QPipeline &q_pipe, int &n) const {
    Dq dq;
#pragma unroll
    for (float &x : dq) x = 0.f;
    const QTileRange range = cluster_.q_tile_range();
    const int end = cta().work().q_tiles_end;
    int q_tile = range.end - 1;
    uint32_t first = 1;  // whether this is the first iteration of the work tile
#pragma unroll 1
    do {
      const int stage = uniform(q_pipe.stage()), ds_stage = uniform(n & 1);
      const uint32_t parity = n >> 1 & 1;
      mbarrier_wait(cluster_.q_full(stage), q_pipe.phase());
      mbarrier_wait(own_ds_full(ds_stage), parity);
      fence_proxy_async();
      bool nan_safe = false;
      if (range.is_partial(q_tile)) {
        mbarrier_wait(cluster_.ds_full(ds_stage), parity);
        // Only the lane that releases the flags reads them.
        if (cta().lane == 0) nan_safe = (ld_shared_4(own_flag(ds_stage)) | ld_shared_4(cluster_.flag(ds_stage))) != 0;
        nan_safe = __shfl_sync(~0u, nan_safe, 0);
      }
      if (nan_safe) {
        store_prev_dq(dq, n, first);
        wgmma_ss_nan_safe<Element, Major::k, C::kTileQ, C::kD, C::kTileQ>(dk, cluster_.smem_ds(ds_stage, 0), cta().warp * 16,
                                                                          cluster_.smem_q(stage), cta().lane);
        __syncwarp();
        mbarrier_arrive_if(cta().lane == 0, cluster_.q_empty(stage));
        cluster_.nan_safe_dq(dq, ds_stage, 0, cta().warp * 16);
      } else {
        fence_operand(dk);
        wgmma_fence();
        start_dk(dk, ds_stage, cluster_.smem_q(stage));
        store_prev_dq(dq, n, first);
        mbarrier_wait(cluster_.ds_full(ds_stage), parity);
        fence_operand(dq);
        wgmma_fence();
        cluster_.start_dq(dq, ds_stage, 0);
        wgmma_wait<1>();
        fence_operand(dk);
        __syncwarp();
        mbarrier_arrive_if(cta().lane == 0, cluster_.q_empty(stage));
        wgmma_wait<0>();
        fence_operand(dq);
      }
      cluster_.release_ds(true, ds_stage);
      first = 0;
      q_pipe.advance();
      if (--q_tile < range.begin) q_tile = range.end - 1;
    } while (++n < end);
    mbarrier_arrive_if(cta().lane == 0, cluster_.k_empty());
    store_prev_dq(dq, n, 0);
  }

  // Stores dq of iteration n - 1 to shared memory when TMA has read the one before from there, and signals a dq warp. In the
  // first iteration of a work tile the last dq of the previous one has already been stored; what is written then
  // is never read.
  __device__ __forceinline__ void store_prev_dq(const Dq &dq, int n, uint32_t first) const {
    mbarrier_wait(dq_empty(), (n & 1) ^ first);
    cta().store_dq_partial(dq, smem_dq());
    __syncwarp();
    mbarrier_arrive_if(first == 0 && cta().lane == 0, dq_full((n - 1) & 1));
  }
  // dk += dS^T Q for the keys of this CTA.
  __device__ __forceinline__ void start_dk(float (&dk)[C::kD / 2], int ds_stage, uint32_t rows) const {
    const uint64_t a = descriptor_k_major_uniform(cluster_.smem_ds(ds_stage, 0)),
                   b = descriptor_mn_major_uniform<C::kTileQ>(rows);
#pragma unroll
    for (int n = 0; n < C::kTileQ / 16; ++n)
      Wgmma<Element, C::kD>::ss_k_mn(dk, advance_descriptor(a, n * 32), advance_descriptor(b, n * 2048), 1);
    wgmma_commit();
  }

  ClusterCta<C> cluster_;
};

}  // namespace fa::cuda::sm90
