// SPDX-License-Identifier: Apache-2.0
// The kernel of backward_pair.cuh by pairs of blocks of threads that stay: for few blocks of keys, where half of the time of a walk is its
// begin and its end, for softcap and ALiBi, and in order. Between products it does what that one does; of a block's two warpgroups one has P,
// dv and dq, the other dP, dS and dk.
//
// A pair works on one block of keys after another. K has one place, and dq of the last chunk still needs it: the next K comes while dv is
// stored. V, Q and dO of the next block come under the last chunks of this one. A warp of one of the two blocks takes the next block of keys
// from a counter and tells the other.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90_cluster/pair_tasks.cuh"

namespace fa::cuda::sm90 {

template <class C>
class BackwardWide : PairTasks<C> {
 public:
  __device__ __forceinline__ BackwardWide(const BackwardParams &params, char *shared) : Tasks(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      mbarrier_init(k_full(), 1);
      mbarrier_init(v_full(), 1);
      mbarrier_init(dout_full(0), 1);
      mbarrier_init(dout_empty(0), 8);
      mbarrier_init(p_full(), 128);
      mbarrier_init(p_empty(), 128);
      mbarrier_init(agreed(), C::kConsumers);
      if constexpr (C::kOrdered) {
        mbarrier_init(may_add(), 1);
        mbarrier_init(added(), 4);
        mbarrier_init(seen(), 1);
      }
      this->init_stay(C::kOrdered ? 11 : 9, 4);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(ds_full(n), 4);
        mbarrier_init(ds_empty(n), 8);
        st_shared_4(doubt(n), 0);
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
        Slot slot;
        DoutSlot dout_slot;
        this->each_item([&](int &) { this->fetch_item(slot, dout_slot); });
      }
      if (C::kOrdered && warp_ == 1) {
        pdl_wait();
        this->each_item([&](int &n) { this->await_turns(n); });
      }
      if (C::kOrdered && warp_ == 2) this->each_item([&](int &n) { this->pass_turns(n); });
      if (warp_ == 3) plan();
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
  using Pair::a_, Pair::b, Pair::lane_, Pair::p_, Pair::warp_;
  using Pair::add_exactly, Pair::chunks, Pair::chunks_at, Pair::dout_empty, Pair::dout_full, Pair::dout_tile, Pair::ds_empty,
      Pair::ds_full, Pair::ds_tile, Pair::delta_row, Pair::finish_block, Pair::first_key, Pair::flag, Pair::k_full,
      Pair::k_tile, Pair::keys_empty, Pair::lse_row, Pair::masked, Pair::next_block, Pair::other_k_full, Pair::q_empty,
      Pair::q_full, Pair::q_tile, Pair::round, Pair::start_dp, Pair::start_dq, Pair::start_scores, Pair::start_gradient,
      Pair::store, Pair::there, Pair::v_empty, Pair::v_full, Pair::zero_if_finite;
  using Tasks::add_dq, Tasks::added, Tasks::agreed, Tasks::derivatives, Tasks::doubt, Tasks::hand_over, Tasks::mark_masked,
      Tasks::may_add, Tasks::p_empty, Tasks::p_full, Tasks::put_ds, Tasks::seen;
  using typename Pair::Dq, typename Pair::DoutSlot, typename Pair::Element, typename Pair::Slot;

  // Describes blocks of keys, two places in shared memory. As in backward.cuh the next one is taken when all of this one has been fetched.
  __device__ __forceinline__ void plan() const {
    int count = 0;
    for (int item = 0; this->plan_item(item, count); ++item) {
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The group that has P, dv and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void values() {
    float dv[C::kD / 2];
    int n = 0;
    uint32_t state = 0;
#pragma unroll 1
    for (int item = 0; next_block(item);) {
#pragma unroll
      for (float &x : dv) x = 0.f;
      mbarrier_wait(k_full(), item & 1);
      if (b().begin < b().end) {
        walk(dv, n, state);
      } else {
        __syncwarp();
        mbarrier_wait(other_k_full(), item & 1);
        mbarrier_arrive_if(lane_ == 0, keys_empty());
      }
      store(a_.problem.dv, dv, 1.f, static_cast<int>(p_.head_dim_v), a_.vector_dv);
      item = b().item;
      finish_block(item++);
    }
  }

  // Of the group in one register: the parity of chunks with masked pairs, and whether the chunk before was one and had to be multiplied
  // carefully; in order, whether this block of keys is the first that sees it.
  static constexpr uint32_t kMet = 1, kEdge = 2, kCareful = 4, kFirst = 8, kChunk = 16;
  __device__ __forceinline__ bool dq_is_careful(uint32_t state, int buffer) const {
    return (state & kCareful) != 0 || ((state & kEdge) != 0 && ld_shared_4(flag(buffer)) != 0);
  }

  // n: chunks of all items before.
  __device__ __forceinline__ void walk(float (&dv)[C::kD / 2], int &n, uint32_t &state) const {
    float s[C::kRows / 2];
    Dq dq;
    uint32_t w[C::kRows / 16][4];
    int chunk = b().end - 1, before = -1;  // before: number in the workspace
    int head_q = b().head_k * static_cast<int>(p_.group);
    state = (state & kMet) | static_cast<uint32_t>(chunks()) * kChunk;
    mbarrier_wait(q_full(n & 1), n >> 1 & 1);
    fence_operand(s);
    wgmma_fence();
    start_scores(s, uniform(k_tile()), q_tile(uniform(n & 1)));
    wgmma_wait<0>();
    fence_operand(s);
#pragma unroll 1
    do {
      const int at = uniform(n & 1), next = at ^ 1,
                last = next;  // dS of the chunk before is where that of the next one will be
      const uint32_t k = uniform(k_tile());
      const bool edge = masked(chunk);
      bool careful = false;
      if (edge) careful = zero_if_finite(s) != 0.f;
      this->weigh(w, s, lse_row(at), first_key(), chunk * C::kRows, this->alibi_slope(head_q));
      if (edge) this->mask_weights(w, s, first_key(), chunk * C::kRows);
      hand_over(s, n);
      mbarrier_arrive_if(lane_ == 0, q_empty(at));
      this->round_weights(w, s);
      if (edge) careful = agree(careful, n, state);
      mbarrier_wait(dout_full(0), n & 1);
      mbarrier_wait(ds_full(last), (n - 1) >> 1 & 1);
      const bool careful_before = dq_is_careful(state, last);
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
        if (before >= 0) finish_dq(dq, last, before, state, careful_before, false);
        barrier_wait_if(state >= 2 * kChunk, q_full(next), n + 1 >> 1 & 1);
        fence_operand(s);
        wgmma_fence();
        start_scores(s, k, q_tile(next));
      } else if (before < 0) {
        fence_operand(w);
        fence_operand(dv);
        wgmma_fence();
        start_gradient(dv, w, dout_tile(0));
        barrier_wait_if(state >= 2 * kChunk, q_full(next), n + 1 >> 1 & 1);
        fence_operand(s);
        wgmma_fence();
        start_scores(s, k, q_tile(next));
        wgmma_wait<1>();
        fence_operand(dv);
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, dout_empty(0));
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
        barrier_wait_if(state >= 2 * kChunk, q_full(next), n + 1 >> 1 & 1);
        wgmma_wait<0>();
        fence_operand(dq);
        await_turn(last);
        add_share(dq, state, before, 0);
        fence_operand(dq);
        fence_operand(s);
        wgmma_fence();
        start_dq(dq, last, 1);
        start_scores(s, k, q_tile(next));
        wgmma_wait<1>();
        fence_operand(dq);
        release_multiplied_ds(last);
        add_share(dq, state, before, 1);
        end_turn();
      }
      wgmma_wait<0>();
      fence_operand(s);
      if (before < 0) mbarrier_wait(other_k_full(), b().item & 1);  // for dq
      if (chunk < b().end - 1) {
        --before;
      } else {
        before = before < 0 ? chunks_at(b().head_k * static_cast<int>(p_.group)) + chunk
                            : before - b().begin + a_.row_chunks + chunk;
      }
      state = (state & (kMet | ~(kChunk - 1))) | (edge ? kEdge : 0u) | (careful ? kCareful : 0u);
      if (C::kOrdered && a_.ordered && this->place_in_order(chunk) == 0) state |= kFirst;
      if (--chunk < b().begin) {
        chunk = b().end - 1;
        ++head_q;
      }
      state -= kChunk;
      ++n;
    } while (state >= kChunk);
    const int of_last = opaque(n) - 1, last = uniform(of_last & 1);  // or n as it was would be kept as well
    mbarrier_wait(ds_full(last), of_last >> 1 & 1);
    finish_dq(dq, last, before, state, dq_is_careful(state, last), true);
  }

  // Neither block may overwrite dS before both have multiplied it.
  __device__ __forceinline__ void release_multiplied_ds(int buffer) const {
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, ds_empty(buffer));
    mbarrier_arrive_remote_relaxed_if(lane_ == 0, there(ds_empty(buffer)));
  }
  // Rows of dS by this thread's number as it is read here: what depends on it shall not lie in registers throughout the walk.
  __device__ __forceinline__ void dq_exactly(Dq &dq, int buffer, int part) const {
    const int row = opaque(static_cast<int>(threadIdx.x)) % 128 / 32 * 16 + opaque(static_cast<int>(threadIdx.x)) % 32 / 4;
#pragma unroll
    for (float &x : dq) x = 0.f;
#pragma unroll 1
    for (int key = 0; key < C::kKeys; ++key) {
      const uint32_t ds = ds_tile(buffer, key / 64) + key % 64 * 128;
      uint32_t bits[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t pair = ld_shared_4(ds + (((row / 8 + r) ^ (key & 7)) << 4) + row % 8 / 2 * 4);
        bits[r] = (row & 1) ? pair >> 16 : pair & 0xFFFFu;
      }
      this->template add_row<64, C::kDqColumns>(dq, bits, this->dq_keys(key / 64, part), key % 64);
    }
  }

  // dq of a chunk whose dS is there, number `index` of the workspace; and with that of the last one K is done with.
  __device__ __forceinline__ void finish_dq(Dq &dq, int buffer, int index, uint32_t state, bool careful, bool keys_too) const {
#pragma unroll 1
    for (int part = 0; part < C::kDqParts; ++part) {
      const bool done = part == C::kDqParts - 1;
      if (careful) {
        dq_exactly(dq, buffer, part);
        __syncwarp();
        mbarrier_arrive_if(done && lane_ == 0, ds_empty(buffer));
        mbarrier_arrive_remote_if(done && lane_ == 0, there(ds_empty(buffer)));
      } else {
        fence_operand(dq);
        wgmma_fence();
        start_dq(dq, buffer, part);
        wgmma_wait<0>();
        fence_operand(dq);
        if (done) release_multiplied_ds(buffer);
      }
      mbarrier_arrive_if(done && keys_too && lane_ == 0, keys_empty());
      if (!done) await_turn(buffer);
      add_share(dq, state, index, part);
    }
    end_turn();
  }

  // Half of dq of a chunk to the sum, in its turn.
  __device__ __forceinline__ void add_share(const Dq &dq, uint32_t state, int index, int part) const {
    if constexpr (C::kOrdered) {
      this->put_or_add_dq(dq, (state & kFirst) != 0, index, part);
    } else {
      add_dq(dq, true, index, part);
    }
  }
  __device__ __forceinline__ void await_turn(int buffer) const {
    if constexpr (C::kOrdered) mbarrier_wait(may_add(), buffer);
  }
  __device__ __forceinline__ void end_turn() const {
    if constexpr (C::kOrdered) Tasks::end_turn(true);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The group that has dP, dS and dk
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void keys() {
    float dk[C::kD / 2], dp[C::kRows / 2];
    uint32_t w[C::kRows / 16][4];
    int n = 0;
    uint32_t met = 0;
#pragma unroll 1
    for (int item = 0; next_block(item);) {
#pragma unroll
      for (float &x : dk) x = 0.f;
      const int end = n + (b().begin < b().end ? chunks() : 0);
      int chunk = b().end - 1;
      mbarrier_wait(v_full(), item & 1);
      mbarrier_arrive_if(n == end && lane_ == 0, v_empty());
#pragma unroll 1
      for (; n < end; ++n) {
        const int at = uniform(n & 1);
        const bool edge = masked(chunk);
        mbarrier_wait(dout_full(0), n & 1);
        fence_operand(dp);
        wgmma_fence();
        start_dp(dp, dout_tile(0));
        wgmma_wait<0>();
        fence_operand(dp);
        mbarrier_arrive_if(n + 1 == end && lane_ == 0, v_empty());
        bool careful = false;
        if (edge) careful = agree(zero_if_finite(dp) + zero_if_finite(delta_row(0)) != 0.f, n, met);
        derivatives(dp, n);
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, dout_empty(0));
        if (careful) mark_masked(dp, chunk);
        round(w, dp);
        mbarrier_wait_cluster(ds_empty(at), n >> 1 & 1 ^ 1);
        put_ds(w, at, edge, careful);
        mbarrier_wait(q_full(at), n >> 1 & 1);
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
        if (--chunk < b().begin) chunk = b().end - 1;
      }
      store(a_.problem.dk, dk, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk);
      item = b().item;
      finish_block(item++);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------

  // As the kernel counts chunks with masked pairs.
  __device__ __forceinline__ bool agree(bool doubts, int n, uint32_t &state) const {
    const bool careful = Tasks::agree(doubts, n, state & kMet);
    state ^= kMet;
    return careful;
  }
};

template <class C>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(C::kThreads, 1)
    backward_wide(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  BackwardWide<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90
