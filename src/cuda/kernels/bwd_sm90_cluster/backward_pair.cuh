// SPDX-License-Identifier: Apache-2.0
// Exact attention backward for wide heads, as backward.cuh, by pairs of blocks of threads (pair_block.cuh), where dv and what a group would
// need to compute P and dS together do not fit in its registers. Of a block's two warpgroups one has dv, one dk:
//
//   values:  S^T = K Q^T is there: P^T = exp2(S^T - lse), to the other group through shared memory
//            dv += P^T dO and S^T of the next chunk
//            dq = dS K of the chunk before, 64 columns at a time, added to the sum straight from registers
//   keys:    dP^T = V dO^T; with P^T dS^T = P^T (dP^T - delta), to shared memory here and there
//            dk += dS^T Q
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90_cluster/pair_tasks.cuh"

namespace fa::cuda::sm90 {

template <class C>
class BackwardPair : PairTasks<C> {
 public:
  __device__ __forceinline__ BackwardPair(const BackwardParams &params, char *shared) : Tasks(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      this->find_block(static_cast<int>(blockIdx.x) / 2, b());
      mbarrier_init(k_full(), 1);
      mbarrier_init(v_full(), 1);
      mbarrier_init(dout_full(0), 1);
      mbarrier_init(dout_empty(0), 8);
      mbarrier_init(p_full(), 128);
      mbarrier_init(p_empty(), 128);
      mbarrier_init(agreed(), C::kConsumers);
      for (int n = 0; n < 2; ++n) st_shared_4(doubt(n), 0);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(ds_full(n), 4);
        mbarrier_init(ds_used(n), 4);
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
      if (threadIdx.x < 32) this->produce();
      if (warp_ == 3) {
        const int count = b().begin < b().end ? chunks() : 0;
        for (int n = 0; n < count; ++n) this->pass_release(n);
      }
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      if (uniform(threadIdx.x / 128) == 1) {
        values();
      } else {
        keys();
      }
    }
    cluster_sync();  // until then the other block may still write here
  }

 private:
  using Tasks = PairTasks<C>;
  using Pair = PairBlock<C>;
  using Pair::a_, Pair::b, Pair::lane_, Pair::p_, Pair::rank_, Pair::warp_;
  using Pair::add_exactly, Pair::await_q, Pair::chunks, Pair::chunks_at, Pair::dout_empty, Pair::dout_full, Pair::dout_tile,
      Pair::dq_exactly, Pair::ds_empty, Pair::ds_full, Pair::ds_used, Pair::delta_row, Pair::first_key, Pair::flag,
      Pair::handed, Pair::k_full, Pair::lse_row, Pair::masked, Pair::q_empty, Pair::q_full, Pair::q_tile, Pair::release_ds,
      Pair::round, Pair::start_dp, Pair::start_dq, Pair::start_gradient, Pair::start_scores, Pair::store, Pair::v_full,
      Pair::zero_if_finite;
  using Tasks::add_dq, Tasks::agree, Tasks::agreed, Tasks::derivatives, Tasks::doubt, Tasks::hand_over, Tasks::mark_masked,
      Tasks::p_empty, Tasks::p_full, Tasks::put_ds;
  using typename Pair::Dq, typename Pair::Element, typename Pair::Slot;

  static_assert(!C::kOrdered && !C::kScored);

  // ------------------------------------------------------------------------------------------------------------------
  // The group that has P, dv and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void values() const {
    float dv[C::kD / 2];
#pragma unroll
    for (float &x : dv) x = 0.f;
    const int count = b().begin < b().end ? chunks() : 0;
    if (count > 0) {
      float s[C::kRows / 2];
      Dq dq;
      uint32_t w[C::kRows / 16][4];
      Slot slot;
      int head = chunks_at(b().head_k * static_cast<int>(p_.group)), chunk = b().end - 1, before = 0, edges = 0;
      bool edge_before = false, careful_before = false;
      mbarrier_wait(k_full(), 0);
      mbarrier_wait(q_full(0), 0);
      fence_operand(s);
      wgmma_fence();
      start_scores(s, this->k_tile(), q_tile(0));
      wgmma_wait<0>();
      fence_operand(s);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const int at = uniform(slot.stage()), buffer = uniform(n & 1);
        slot.advance();
        const int next = uniform(slot.stage());
        const bool edge = masked(chunk);
        bool careful = false;
        if (edge) careful = zero_if_finite(s) != 0.f;
        this->weigh(w, s, lse_row(at), first_key(), chunk * C::kRows, 0.f);
        if (edge) this->mask_weights(w, s, first_key(), chunk * C::kRows);
        hand_over(s, n);
        mbarrier_arrive_if(lane_ == 0, q_empty(at));
        this->round_weights(w, s);
        if (edge) careful = agree(careful, n, edges++ & 1);
        mbarrier_wait(dout_full(0), n & 1);
        const int last = buffer ^ 1;  // where dS of the chunk before is
        mbarrier_wait(ds_full(last), (n - 1) >> 1 & 1);
        if (edge_before) careful_before = careful_before || ld_shared_4(flag(last)) != 0;
        if (careful || careful_before) {
          if (careful) {
            add_exactly(dv, w, dout_tile(0));
          } else {
            fence_operand(w);
            fence_operand(dv);
            wgmma_fence();
            start_gradient(dv, w, dout_tile(0));
            wgmma_wait<0>();
            fence_operand(dv);
          }
          __syncwarp();
          mbarrier_arrive_if(lane_ == 0, dout_empty(0));
          if (n > 0) finish_dq(dq, last, before, careful_before);
          await_q(n + 1 < count, next, slot.phase());
          fence_operand(s);
          wgmma_fence();
          start_scores(s, this->k_tile(), q_tile(next));
        } else {
          fence_operand(w);
          fence_operand(dv);
          fence_operand(dq);
          wgmma_fence();
          start_gradient(dv, w, dout_tile(0));
          start_dq(dq, last, 0);
          wgmma_wait<1>();
          fence_operand(dv);
          __syncwarp();
          mbarrier_arrive_if(lane_ == 0, dout_empty(0));
          await_q(n + 1 < count, next, slot.phase());
          wgmma_wait<0>();
          fence_operand(dq);
          add_dq(dq, n > 0, before, 0);
          fence_operand(dq);
          fence_operand(s);
          wgmma_fence();
          start_dq(dq, last, 1);
          start_scores(s, this->k_tile(), q_tile(next));
          wgmma_wait<1>();
          fence_operand(dq);
          release_ds(n > 0, last);
          add_dq(dq, n > 0, before, 1);
        }
        wgmma_wait<0>();
        fence_operand(s);
        before = head + chunk;
        edge_before = edge;
        careful_before = careful;
        if (--chunk < b().begin) {
          chunk = b().end - 1;
          head += a_.row_chunks;
        }
      }
      const int last = uniform(count - 1 & 1);
      mbarrier_wait(ds_full(last), (count - 1) >> 1 & 1);
      if (edge_before) careful_before = careful_before || ld_shared_4(flag(last)) != 0;
      finish_dq(dq, last, before, careful_before);
    }
    store(a_.problem.dv, dv, 1.f, static_cast<int>(p_.head_dim_v), a_.vector_dv);
  }

  // dq of a chunk whose dS is there, number `index` of the workspace.
  __device__ __forceinline__ void finish_dq(Dq &dq, int buffer, int index, bool careful) const {
#pragma unroll 1
    for (int part = 0; part < C::kDqParts; ++part) {
      if (careful) {
        dq_exactly(dq, buffer, part);
      } else {
        fence_operand(dq);
        wgmma_fence();
        start_dq(dq, buffer, part);
        wgmma_wait<0>();
        fence_operand(dq);
      }
      add_dq(dq, true, index, part);
    }
    release_ds(true, buffer);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The group that has dP, dS and dk
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void keys() const {
    float dk[C::kD / 2];
#pragma unroll
    for (float &x : dk) x = 0.f;
    const int count = b().begin < b().end ? chunks() : 0;
    if (count > 0) {
      float dp[C::kRows / 2];
      uint32_t w[C::kRows / 16][4];
      Slot slot;
      int chunk = b().end - 1, edges = 0;
      mbarrier_wait(v_full(), 0);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const int at = uniform(slot.stage()), buffer = uniform(n & 1);
        const bool edge = masked(chunk);
        mbarrier_wait(dout_full(0), n & 1);
        fence_operand(dp);
        wgmma_fence();
        start_dp(dp, dout_tile(0));
        wgmma_wait<0>();
        fence_operand(dp);
        bool careful = false;
        if (edge) careful = agree(zero_if_finite(dp) + zero_if_finite(delta_row(0)) != 0.f, n, edges++ & 1);
        derivatives(dp, n);
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, dout_empty(0));
        if (careful) mark_masked(dp, chunk);
        round(w, dp);
        mbarrier_wait_cluster(ds_empty(buffer), n >> 1 & 1 ^ 1);
        put_ds(w, buffer, edge, careful);
        mbarrier_wait(q_full(at), slot.phase());
        if (careful) {
          add_exactly(dk, w, q_tile(at));
        } else {
          fence_operand(w);
          fence_operand(dk);
          wgmma_fence();
          start_gradient(dk, w, q_tile(at));
          wgmma_wait<0>();
          fence_operand(dk);
        }
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, q_empty(at));
        slot.advance();
        if (--chunk < b().begin) chunk = b().end - 1;
      }
    }
    store(a_.problem.dk, dk, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk);
  }
};

template <class C>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(C::kThreads, 1)
    backward_pair(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  BackwardPair<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90
