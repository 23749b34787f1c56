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
class BackwardPRegisters : ClusterCta<C> {
 public:
  __device__ __forceinline__ BackwardPRegisters(const BackwardParams &params, char *shared) : Cluster(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      this->init_persistent(12, 8);
      mbarrier_init(k_full(), 1);
      mbarrier_init(v_full(), 1);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(own_ds_full(n), 4);
        mbarrier_init(ds_full(n), 1);
        mbarrier_init(ds_consumed(n), 4);
        mbarrier_init(ds_empty(n), 2);
      }
      for (int n = 0; n < 2; ++n) mbarrier_init(dq_full(n), 4);
      mbarrier_init(dq_empty(), 1);
      for (int n = 0; n < C::kDoutStages; ++n) {
        mbarrier_init(dout_full(n), 1);
        mbarrier_init(dout_empty(n), 4);
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
      if (warp_ == 0) producer();
      if (warp_ == 1) this->for_each_work_tile([&](int &n) { forward_ds(n); });
      if (warp_ > 1) {
        uint32_t parity = 0;
        pdl_wait();
        this->for_each_work_tile([&](int &n) {
          this->template reduce_dq<2>(rank_, smem_dq(), dq_full(warp_ & 1), dq_empty(), parity, (warp_ + n) & 1);
          n = work().q_tiles_end;
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
  using Cluster = ClusterCta<C>;
  using Cluster::a_, Cluster::work, Cluster::lane_, Cluster::p_, Cluster::rank_, Cluster::shared_, Cluster::warp_;
  using Cluster::q_tiles, Cluster::smem_delta, Cluster::dout_empty, Cluster::dout_full, Cluster::smem_dout,
      Cluster::nan_safe_dq, Cluster::ds_empty, Cluster::ds_full, Cluster::smem_ds, Cluster::ds_consumed,
      Cluster::release_work_tile, Cluster::first_key, Cluster::flag, Cluster::k_full, Cluster::k_empty, Cluster::smem_lse,
      Cluster::is_partial, Cluster::next_work_tile, Cluster::peer_k_full, Cluster::q_empty, Cluster::q_full, Cluster::smem_q,
      Cluster::release_ds, Cluster::start_dp, Cluster::start_dq, Cluster::start_gradient, Cluster::start_s, Cluster::row_stat,
      Cluster::store, Cluster::in_peer, Cluster::v_empty, Cluster::v_full;
  using typename Cluster::Dq, typename Cluster::Storage, typename Cluster::DoutPipeline, typename Cluster::Element,
      typename Cluster::QPipeline, typename Cluster::RowStats, typename Cluster::QTileRange;
  static_assert(!C::kPThroughSmem && C::kDqParts == 1);
  // Whether S^T of the next Q tile is computed beside dv: there are registers for it beside P, and a pipeline stage for its Q.
  static constexpr bool kOverlapNextS = C::kStages > 2;
  // Whether there are registers to load lse and delta of a Q tile before the wgmma are started.
  static constexpr bool kPrefetchStats = !C::kScored && C::kDv <= 128;
  // Whether dS is computed only after all wgmma that overlap it have been started, see late_one().
  static constexpr bool kLateDs = kOverlapNextS && kPrefetchStats;

  // dS of this CTA's keys is complete; ds_full is for the peer's.
  __device__ __forceinline__ uint32_t own_ds_full(int n) const {
    return this->at(offsetof(Storage, cluster.own.own_ds_full), n, sizeof(Mbarrier));
  }
  __device__ __forceinline__ uint32_t dq_full(int n) const {
    return this->at(offsetof(Storage, cluster.own.dq_full), n, sizeof(Mbarrier));
  }
  __device__ __forceinline__ uint32_t dq_empty() const { return this->at(offsetof(Storage, cluster.own.dq_empty)); }
  __device__ __forceinline__ uint32_t smem_dq() const { return this->smem_exchange(); }
  __device__ __forceinline__ uint32_t own_flag(int n) const { return flag(2 + n); }

  // The producer warp is also the scheduler: it describes the next work tile when it has issued all loads of the current one.
  // The Q tiles of those loads are the last that the other warps have left.
  __device__ __forceinline__ void producer() {
    QPipeline q_pipe;
    DoutPipeline dout_pipe;
    int count = 0;
    this->schedule(0, count);
    for (int work_index = 0; next_work_tile(work_index); ++work_index) {
      this->load_work_tile(q_pipe, dout_pipe);
      this->schedule(work_index + 1, count);
      release_work_tile(work_index);
    }
  }
  // With kLateDs the address is computed in every iteration: operand descriptors kept across iterations would leave too few
  // uniform registers.
  __device__ __forceinline__ uint32_t smem_k_of_iteration() const { return kLateDs ? uniform(this->smem_k()) : this->smem_k(); }
  __device__ __forceinline__ void wait_q(bool more, int stage, uint32_t parity) const {
    mbarrier_wait_if(more, q_full(stage), parity);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroup with S, P, dP, dS and dv
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void s_dv_warpgroup() {
    float dv[C::kDv / 2];
    QPipeline q_pipe;
    int n = 0;
#pragma unroll 1
    for (int work_index = 0; next_work_tile(work_index);) {
#pragma unroll
      for (float &x : dv) x = 0.f;
      mbarrier_wait(k_full(), work_index & 1);
      if (work().q_tile_begin < work().q_tile_end) {
        s_dv_main_loop(dv, q_pipe, n);
      } else {
        mbarrier_wait(v_full(), work_index & 1);
        mbarrier_arrive_if(lane_ == 0, v_empty());
      }
      __syncwarp();
      mbarrier_arrive_if(lane_ == 0, k_empty());
      store(a_.problem.dv, dv, 1.f, static_cast<int>(p_.head_dim_v), a_.vector_dv);
      work_index = work().work_index;
      release_work_tile(work_index++);
    }
  }

  // n: iterations of all work tiles before.
  __device__ __forceinline__ void s_dv_main_loop(float (&dv)[C::kDv / 2], QPipeline &q_pipe, int &n) const {
    float s[C::kTileQ / 2], dp[C::kTileQ / 2];
    uint32_t p[C::kTileQ / 16][4], ds[C::kTileQ / 16][4];
    const QTileRange range = this->q_tile_range();
    const int end = work().q_tiles_end;
    int q_tile = range.end - 1, head_q = work().head_k * static_cast<int>(p_.group);
    RowStats lse, delta;
    {
      const int stage = uniform(q_pipe.stage());
      mbarrier_wait(q_full(stage), q_pipe.phase());
      if constexpr (kPrefetchStats) this->load_stats(lse, smem_lse(stage));
      fence_operand(s);
      wgmma_fence();
      start_s(s, smem_k_of_iteration(), smem_q(stage));
      wgmma_wait<0>();
      fence_operand(s);
    }
    mbarrier_wait(v_full(), work().work_index & 1);
#pragma unroll 1
    do {
      const int stage = uniform(q_pipe.stage()), ds_stage = uniform(n & 1), dout_stage = uniform(n % C::kDoutStages);
      q_pipe.advance();
      const int next_stage = uniform(q_pipe.stage());
      const uint32_t k = smem_k_of_iteration();
      const bool partial = range.is_partial(q_tile);
      mbarrier_wait(dout_full(dout_stage), n / C::kDoutStages & 1);
      if constexpr (kPrefetchStats) this->load_stats(delta, smem_delta(dout_stage));
      fence_operand(dp);
      wgmma_fence();
      start_dp(dp, smem_dout(dout_stage));
      float finite = 0.f;  // NaN if anything is not finite
      if (partial) finite = nan_if_nonfinite(s);
      float e[C::kTileQ / 2];  // P
#pragma unroll
      for (int i = 0; i < C::kTileQ / 2; ++i) e[i] = s[i];
      if constexpr (kPrefetchStats) {
        this->exponentiate(e, lse);
      } else {
        this->exponentiate(p, e, smem_lse(stage), first_key(), q_tile * C::kTileQ, this->alibi_slope(head_q));
      }
      if (partial) this->mask_p(p, e, first_key(), q_tile * C::kTileQ);
      if constexpr (!C::kScored) convert_p<Element>(e, p);
      __syncwarp();
      mbarrier_arrive_if(lane_ == 0, q_empty(stage));
      wgmma_wait<0>();
      fence_operand(dp);
      mbarrier_arrive_if(n + 1 == end && lane_ == 0, v_empty());
      bool nan_safe = false;
      if (partial) {
        finite += nan_if_nonfinite(dp) + this->delta_nan_if_nonfinite(smem_delta(dout_stage));
        nan_safe = named_barrier_or(1, 128, finite != 0.f);
      }
      if (nan_safe) {
        compute_ds(dp, e, delta, smem_delta(dout_stage), 1.f);
#pragma unroll
        for (float &x : dp) x += 0.f;  // a visible -0 must not look masked
        this->template for_masked<C::kTileQ>(first_key(), q_tile * C::kTileQ, [&](int i) { dp[i] = kMaskedP; });
        convert_p<Element>(dp, ds);
        if constexpr (kLateDs) wait_ds_empty(ds_stage, n);
        store_ds(ds, n, partial, true);
        wgmma_rs_nan_safe<Element, C::kTileQ, C::kDv>(dv, p, smem_dout(dout_stage), lane_);
        wait_q(n + 1 < end, next_stage, q_pipe.phase());
        if (kPrefetchStats && n + 1 < end) this->load_stats(lse, smem_lse(next_stage));
        fence_operand(s);
        wgmma_fence();
        start_s(s, k, smem_q(next_stage));
      } else {
        if constexpr (kOverlapNextS) wait_q(n + 1 < end, next_stage, q_pipe.phase());
        if constexpr (kOverlapNextS && kPrefetchStats) {
          if (n + 1 < end) this->load_stats(lse, smem_lse(next_stage));
        }
        fence_operand(p);
        fence_operand(dv);
        if constexpr (kOverlapNextS) fence_operand(s);
        wgmma_fence();
        if constexpr (kOverlapNextS) start_s(s, k, smem_q(next_stage));
        start_gradient(dv, p, smem_dout(dout_stage));
        if constexpr (kLateDs) wait_ds_empty(ds_stage, n);
        compute_ds(dp, e, delta, smem_delta(dout_stage), late_one());
        convert_p<Element>(dp, ds);
        store_ds(ds, n, partial, false);
        if constexpr (!kOverlapNextS) {
          wait_q(n + 1 < end, next_stage, q_pipe.phase());
          fence_operand(s);
          wgmma_fence();
          start_s(s, k, smem_q(next_stage));
        }
        wgmma_wait<kOverlapNextS ? 0 : 1>();
        fence_operand(dv);
      }
      __syncwarp();
      mbarrier_arrive_if(lane_ == 0, dout_empty(dout_stage));
      wgmma_wait<0>();
      fence_operand(s);
      if (--q_tile < range.begin) {
        q_tile = range.end - 1;
        ++head_q;
      }
    } while (++n < end);
  }

  // dS^T = P^T (dP^T - delta), in place of dP^T. one: see late_one().
  __device__ __forceinline__ void compute_ds(float (&dp)[C::kTileQ / 2], const float (&p)[C::kTileQ / 2], const RowStats &ahead,
                                             uint32_t row, float one) const {
#pragma unroll
    for (int j = 0; j < C::kTileQ / 8; ++j) {
      const float2 delta = kPrefetchStats ? ahead[j] : row_stat(row, j);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float d = (r & 1) ? delta.y : delta.x;
        dp[4 * j + r] = p[4 * j + r] * (kLateDs ? fmaf(dp[4 * j + r], one, -d) : dp[4 * j + r] - d);
      }
    }
  }
  // 1, as a number that the compiler does not know before the loop in front of it, a wait, has ended. Everything that dS needs
  // is there when the wgmma that overlap it are started. ptxas would otherwise compute dS between the first two of them, while
  // the tensor cores wait for the rest.
  __device__ __forceinline__ float late_one() const {
    return kLateDs ? __int_as_float(static_cast<int>(uniform(0x3f800000u + static_cast<uint32_t>(lane_)))) : 1.f;
  }

  // Waits until both CTAs have read the dS that was in this stage.
  __device__ __forceinline__ void wait_ds_empty(int ds_stage, int n) const {
    mbarrier_wait_cluster(ds_empty(ds_stage), n >> 1 & 1 ^ 1);
  }
  // Stores this warp's 16 keys of dS^T of iteration n, for this CTA and the peer. For a partial Q tile it also stores, in both
  // CTAs, whether dk and dq need the NaN-safe path.
  __device__ __forceinline__ void store_ds(const uint32_t (&ds)[C::kTileQ / 16][4], int n, bool partial, bool nan_safe) const {
    const int ds_stage = uniform(n & 1);
    if constexpr (!kLateDs) wait_ds_empty(ds_stage, n);
    this->store_ds_own(ds, ds_stage);
    __syncwarp();
    if (lane_ != 0) return;
    if (warp_ == 0 && partial) {
      st_shared_4(own_flag(ds_stage), nan_safe);
      st_async(in_peer(flag(ds_stage)), nan_safe, in_peer(ds_full(ds_stage)));
    }
    mbarrier_arrive(own_ds_full(ds_stage));
  }
  // The loop of the warp that sends dS of every Q tile to the peer and forwards the release of the one before. The fence, which
  // waits for the stores of the thread that executes it, is in the readers of dS, not in its writers.
  __device__ __forceinline__ void forward_ds(int &n) const {
    const int first = n;
    int q_tile = work().q_tile_end - 1;
#pragma unroll 1
    for (; n < work().q_tiles_end; ++n) {
      const int ds_stage = n & 1;
      mbarrier_wait(own_ds_full(ds_stage), n >> 1 & 1);
      if (elect_one()) {
        fence_proxy_async();
        this->send_ds_to_peer(ds_stage, C::kDsBytes, 0);
        mbarrier_arrive_expect_tx(ds_full(ds_stage), C::kDsBytes + (is_partial(q_tile) ? 4 : 0));  // arrives from the peer
      }
      __syncwarp();
      if (n > first) this->forward_ds_release(n - 1);
      if (--q_tile < work().q_tile_begin) q_tile = work().q_tile_end - 1;
    }
    if (n > first) this->forward_ds_release(n - 1);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Consumer warpgroup with dk and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void dk_dq_warpgroup() {
    float dk[C::kD / 2];
    QPipeline q_pipe;
    int n = 0;
#pragma unroll 1
    for (int work_index = 0; next_work_tile(work_index);) {
#pragma unroll
      for (float &x : dk) x = 0.f;
      mbarrier_wait(k_full(), work_index & 1);
      mbarrier_wait(peer_k_full(), work_index & 1);
      if (work().q_tile_begin < work().q_tile_end) {
        dk_dq_main_loop(dk, q_pipe, n);
      } else {
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, k_empty());
      }
      store(a_.problem.dk, dk, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk);
      work_index = work().work_index;
      release_work_tile(work_index++);
    }
  }

  __device__ __forceinline__ void dk_dq_main_loop(float (&dk)[C::kD / 2], QPipeline &q_pipe, int &n) const {
    Dq dq;
#pragma unroll
    for (float &x : dq) x = 0.f;
    const QTileRange range = this->q_tile_range();
    const int end = work().q_tiles_end;
    int q_tile = range.end - 1;
    uint32_t first = 1;  // whether this is the first iteration of the work tile
#pragma unroll 1
    do {
      const int stage = uniform(q_pipe.stage()), ds_stage = uniform(n & 1);
      const uint32_t parity = n >> 1 & 1;
      mbarrier_wait(q_full(stage), q_pipe.phase());
      mbarrier_wait(own_ds_full(ds_stage), parity);
      fence_proxy_async();
      bool nan_safe = false;
      if (range.is_partial(q_tile)) {
        mbarrier_wait(ds_full(ds_stage), parity);
        // Only the lane that releases the flags reads them.
        if (lane_ == 0) nan_safe = (ld_shared_4(own_flag(ds_stage)) | ld_shared_4(flag(ds_stage))) != 0;
        nan_safe = __shfl_sync(~0u, nan_safe, 0);
      }
      if (nan_safe) {
        store_prev_dq(dq, n, first);
        wgmma_ss_nan_safe<Element, Major::k, C::kTileQ, C::kD, C::kTileQ>(dk, smem_ds(ds_stage, 0), warp_ * 16, smem_q(stage),
                                                                          lane_);
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, q_empty(stage));
        nan_safe_dq(dq, ds_stage, 0, warp_ * 16);
      } else {
        fence_operand(dk);
        wgmma_fence();
        start_dk(dk, ds_stage, smem_q(stage));
        store_prev_dq(dq, n, first);
        mbarrier_wait(ds_full(ds_stage), parity);
        fence_operand(dq);
        wgmma_fence();
        start_dq(dq, ds_stage, 0);
        wgmma_wait<1>();
        fence_operand(dk);
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, q_empty(stage));
        wgmma_wait<0>();
        fence_operand(dq);
      }
      release_ds(true, ds_stage);
      first = 0;
      q_pipe.advance();
      if (--q_tile < range.begin) q_tile = range.end - 1;
    } while (++n < end);
    mbarrier_arrive_if(lane_ == 0, k_empty());
    store_prev_dq(dq, n, 0);
  }

  // Stores dq of iteration n - 1 to shared memory when TMA has read the one before from there, and signals a dq warp. In the
  // first iteration of a work tile the last dq of the previous one has already been stored; what is written then
  // is never read.
  __device__ __forceinline__ void store_prev_dq(const Dq &dq, int n, uint32_t first) const {
    mbarrier_wait(dq_empty(), (n & 1) ^ first);
    this->store_dq_partial(dq, smem_dq());
    __syncwarp();
    mbarrier_arrive_if(first == 0 && lane_ == 0, dq_full((n - 1) & 1));
  }
  // dk += dS^T Q for the keys of this CTA.
  __device__ __forceinline__ void start_dk(float (&dk)[C::kD / 2], int ds_stage, uint32_t rows) const {
    const uint64_t a = descriptor_k_major_uniform(smem_ds(ds_stage, 0)), b = descriptor_mn_major_uniform<C::kTileQ>(rows);
#pragma unroll
    for (int n = 0; n < C::kTileQ / 16; ++n)
      Wgmma<Element, C::kD>::ss_k_mn(dk, advance_descriptor(a, n * 32), advance_descriptor(b, n * 2048), 1);
    wgmma_commit();
  }
};

template <class C>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(C::kThreads, 1)
    backward_p_registers(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  BackwardPRegisters<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90
