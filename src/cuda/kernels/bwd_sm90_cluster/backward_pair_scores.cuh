// SPDX-License-Identifier: Apache-2.0
// Exact attention backward for wide heads, as backward.cuh, by pairs of blocks of threads (pair_block.cuh), where the registers of one
// warpgroup hold dv, S and dP of 64 keys. P never leaves it, and dS goes one way:
//
//   scores:     S^T = K Q^T is there; dP^T = V dO^T, under it P^T = exp2(S^T - lse)
//               dv += P^T dO, under it dS^T = P^T (dP^T - delta), to shared memory here and there
//               S^T of the next chunk
//   gradients:  dk += dS^T Q, from shared memory, while dS of the other block comes
//               dq = dS K, half of the columns; under the next dk to shared memory, from where the copy engine, on the word of a warp,
//               adds it to the sum
//
// The first waits for the second only if that is two chunks behind.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90_cluster/pair_block.cuh"

namespace fa::cuda::sm90 {

template <class C>
class BackwardPairScores : PairBlock<C> {
 public:
  __device__ __forceinline__ BackwardPairScores(const BackwardParams &params, char *shared) : Pair(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      this->init_stay(12, 8);
      mbarrier_init(k_full(), 1);
      mbarrier_init(v_full(), 1);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(own_ds_full(n), 4);
        mbarrier_init(ds_full(n), 1);
        mbarrier_init(ds_used(n), 4);
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
      if (warp_ == 0) produce();
      if (warp_ == 1) this->each_item([&](int &n) { pass_ds(n); });
      if (warp_ > 1) {
        uint32_t parity = 0;
        pdl_wait();
        this->each_item([&](int &n) {
          this->template add_shares<2>(rank_, dq_tile(), dq_full(warp_ & 1), dq_empty(), parity, (warp_ + n) & 1);
          n = b().chunks;
        });
        bulk_wait_group();
      }
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      if (uniform(threadIdx.x / 128) == 1) {
        scores();
      } else {
        gradients();
      }
    }
    cluster_sync();  // until then the other block may still write here
  }

 private:
  using Pair = PairBlock<C>;
  using Pair::a_, Pair::b, Pair::lane_, Pair::p_, Pair::rank_, Pair::shared_, Pair::warp_;
  using Pair::add_exactly, Pair::add_row, Pair::chunks, Pair::delta_row, Pair::dout_empty, Pair::dout_full, Pair::dout_tile,
      Pair::dq_exactly, Pair::ds_empty, Pair::ds_full, Pair::ds_tile, Pair::ds_used, Pair::finish_block, Pair::first_key,
      Pair::flag, Pair::k_full, Pair::keys_empty, Pair::lse_row, Pair::masked, Pair::next_block, Pair::other_k_full,
      Pair::q_empty, Pair::q_full, Pair::q_tile, Pair::release_ds, Pair::round, Pair::start_dp, Pair::start_dq,
      Pair::start_gradient, Pair::start_scores, Pair::stat, Pair::store, Pair::there, Pair::v_empty, Pair::v_full,
      Pair::zero_if_finite;
  using typename Pair::Dq, typename Pair::DoutSlot, typename Pair::Element, typename Pair::Slot, typename Pair::Stats,
      typename Pair::Walk;
  static_assert(!C::kHandsP && C::kDqParts == 1);
  // Whether S of the next chunk runs beside dv: there are registers for it beside P, and a place for its Q.
  static constexpr bool kAhead = C::kStages > 2;
  // Whether there are registers for lse and delta of a chunk ahead of their use.
  static constexpr bool kStatsAhead = !C::kScored && C::kDv <= 128;
  // Whether dS is worked out when the products that run under it have all been started, see late_one().
  static constexpr bool kLate = kAhead && kStatsAhead;

  // Of this block's keys; ds_full is that of the other's.
  __device__ __forceinline__ uint32_t own_ds_full(int n) const { return this->handed(n); }
  __device__ __forceinline__ uint32_t dq_full(int n) const { return this->handed(2 + n); }
  __device__ __forceinline__ uint32_t dq_empty() const { return this->handed(4); }
  __device__ __forceinline__ uint32_t dq_tile() const { return shared_ + C::kHandedOffset; }
  __device__ __forceinline__ uint32_t own_flag(int n) const { return flag(2 + n); }

  // The next block of keys is described when all of this one has been fetched; its chunks are the last that others still have.
  __device__ __forceinline__ void produce() {
    Slot slot;
    DoutSlot dout_slot;
    int count = 0;
    this->plan_item(0, count);
    for (int item = 0; next_block(item); ++item) {
      this->fetch_item(slot, dout_slot);
      this->plan_item(item + 1, count);
      finish_block(item);
    }
  }
  // As a number that is worked out in every chunk, where operands that are kept would leave too few uniform registers.
  __device__ __forceinline__ uint32_t keys_tile() const { return kLate ? uniform(this->k_tile()) : this->k_tile(); }
  __device__ __forceinline__ void await_q(bool more, int at, uint32_t parity) const {
    barrier_wait_if(more, q_full(at), parity);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The group that has S, dP and dv
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void scores() {
    float dv[C::kDv / 2];
    Slot slot;
    int n = 0;
#pragma unroll 1
    for (int item = 0; next_block(item);) {
#pragma unroll
      for (float &x : dv) x = 0.f;
      mbarrier_wait(k_full(), item & 1);
      if (b().begin < b().end) {
        weigh_chunks(dv, slot, n);
      } else {
        mbarrier_wait(v_full(), item & 1);
        mbarrier_arrive_if(lane_ == 0, v_empty());
      }
      __syncwarp();
      mbarrier_arrive_if(lane_ == 0, keys_empty());
      store(a_.problem.dv, dv, 1.f, static_cast<int>(p_.head_dim_v), a_.vector_dv);
      item = b().item;
      finish_block(item++);
    }
  }

  // n: chunks of all items before.
  __device__ __forceinline__ void weigh_chunks(float (&dv)[C::kDv / 2], Slot &slot, int &n) const {
    float s[C::kRows / 2], dp[C::kRows / 2];
    uint32_t p[C::kRows / 16][4], ds[C::kRows / 16][4];
    const Walk walk = this->walk();
    const int end = b().chunks;
    int chunk = walk.end - 1, head_q = b().head_k * static_cast<int>(p_.group);
    Stats lse, delta;
    {
      const int at = uniform(slot.stage());
      mbarrier_wait(q_full(at), slot.phase());
      if constexpr (kStatsAhead) this->load_stats(lse, lse_row(at));
      fence_operand(s);
      wgmma_fence();
      start_scores(s, keys_tile(), q_tile(at));
      wgmma_wait<0>();
      fence_operand(s);
    }
    mbarrier_wait(v_full(), b().item & 1);
#pragma unroll 1
    do {
      const int at = uniform(slot.stage()), buffer = uniform(n & 1), dout_at = uniform(n % C::kDoutStages);
      slot.advance();
      const int next = uniform(slot.stage());
      const uint32_t k = keys_tile();
      const bool edge = walk.masked(chunk);
      mbarrier_wait(dout_full(dout_at), n / C::kDoutStages & 1);
      if constexpr (kStatsAhead) this->load_stats(delta, delta_row(dout_at));
      fence_operand(dp);
      wgmma_fence();
      start_dp(dp, dout_tile(dout_at));
      float finite = 0.f;  // or NaN
      if (edge) finite = zero_if_finite(s);
      float e[C::kRows / 2];  // P
#pragma unroll
      for (int i = 0; i < C::kRows / 2; ++i) e[i] = s[i];
      if constexpr (kStatsAhead) {
        this->weigh(e, lse);
      } else {
        this->weigh(p, e, lse_row(at), first_key(), chunk * C::kRows, this->alibi_slope(head_q));
      }
      if (edge) this->mask_weights(p, e, first_key(), chunk * C::kRows);
      this->round_weights(p, e);
      __syncwarp();
      mbarrier_arrive_if(lane_ == 0, q_empty(at));
      wgmma_wait<0>();
      fence_operand(dp);
      mbarrier_arrive_if(n + 1 == end && lane_ == 0, v_empty());
      bool careful = false;
      if (edge) {
        finite += zero_if_finite(dp) + zero_if_finite(delta_row(dout_at));
        careful = named_barrier_or(1, 128, finite != 0.f);
      }
      if (careful) {
        derivatives(dp, e, delta, delta_row(dout_at), 1.f);
#pragma unroll
        for (float &x : dp) x += 0.f;  // a visible -0 is no mask
        this->template for_masked<C::kRows>(first_key(), chunk * C::kRows, [&](int i) { dp[i] = kMasked; });
        round(ds, dp);
        if constexpr (kLate) await_ds(buffer, n);
        put_ds(ds, n, edge, true);
        add_exactly(dv, p, dout_tile(dout_at));
        await_q(n + 1 < end, next, slot.phase());
        if (kStatsAhead && n + 1 < end) this->load_stats(lse, lse_row(next));
        fence_operand(s);
        wgmma_fence();
        start_scores(s, k, q_tile(next));
      } else {
        if constexpr (kAhead) await_q(n + 1 < end, next, slot.phase());
        if constexpr (kAhead && kStatsAhead) {
          if (n + 1 < end) this->load_stats(lse, lse_row(next));
        }
        fence_operand(p);
        fence_operand(dv);
        if constexpr (kAhead) fence_operand(s);
        wgmma_fence();
        if constexpr (kAhead) start_scores(s, k, q_tile(next));
        start_gradient(dv, p, dout_tile(dout_at));
        if constexpr (kLate) await_ds(buffer, n);
        derivatives(dp, e, delta, delta_row(dout_at), late_one());
        round(ds, dp);
        put_ds(ds, n, edge, false);
        if constexpr (!kAhead) {
          await_q(n + 1 < end, next, slot.phase());
          fence_operand(s);
          wgmma_fence();
          start_scores(s, k, q_tile(next));
        }
        wgmma_wait<kAhead ? 0 : 1>();
        fence_operand(dv);
      }
      __syncwarp();
      mbarrier_arrive_if(lane_ == 0, dout_empty(dout_at));
      wgmma_wait<0>();
      fence_operand(s);
      if (--chunk < walk.begin) {
        chunk = walk.end - 1;
        ++head_q;
      }
    } while (++n < end);
  }

  // dP to dS, in place.
  __device__ __forceinline__ void derivatives(float (&dp)[C::kRows / 2], const float (&p)[C::kRows / 2], const Stats &ahead,
                                              uint32_t row, float one) const {
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      const float2 delta = kStatsAhead ? ahead[j] : stat(row, j);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float d = (r & 1) ? delta.y : delta.x;
        dp[4 * j + r] = p[4 * j + r] * (kLate ? fmaf(dp[4 * j + r], one, -d) : dp[4 * j + r] - d);
      }
    }
  }
  // 1, as a number that is not known before the loop in front of it, a wait, has ended. All that dS needs is there when the products are
  // started under which it is to be worked out, and ptxas would do that between the first two of them, while the tensor cores wait for the rest.
  __device__ __forceinline__ float late_one() const {
    return kLate ? __int_as_float(static_cast<int>(uniform(0x3f800000u + static_cast<uint32_t>(lane_)))) : 1.f;
  }

  // Until both blocks have multiplied what was there.
  __device__ __forceinline__ void await_ds(int buffer, int n) const { mbarrier_wait_cluster(ds_empty(buffer), n >> 1 & 1 ^ 1); }
  // This warp's 16 keys of dS^T of the n-th chunk, for this block and the other, once both have multiplied what was there. At the mask's
  // edge they also have to know whether to add with care.
  __device__ __forceinline__ void put_ds(const uint32_t (&ds)[C::kRows / 16][4], int n, bool edge, bool careful) const {
    const int buffer = uniform(n & 1);
    if constexpr (!kLate) await_ds(buffer, n);
    this->write_ds(ds, buffer);
    __syncwarp();
    if (lane_ != 0) return;
    if (warp_ == 0 && edge) {
      st_shared_4(own_flag(buffer), careful);
      st_async(there(flag(buffer)), careful, there(ds_full(buffer)));
    }
    mbarrier_arrive(own_ds_full(buffer));
  }
  // A warp sends dS of every chunk to the other block, and passes on that the chunk before has been multiplied. The fence, which waits for
  // what a thread has stored, is that of those who read.
  __device__ __forceinline__ void pass_ds(int &n) const {
    const int first = n;
    int chunk = b().end - 1;
#pragma unroll 1
    for (; n < b().chunks; ++n) {
      const int buffer = n & 1;
      mbarrier_wait(own_ds_full(buffer), n >> 1 & 1);
      if (elect_one()) {
        fence_proxy_async();
        this->send_ds(buffer, C::kDsBytes, 0);
        mbarrier_arrive_expect_tx(ds_full(buffer), C::kDsBytes + (masked(chunk) ? 4 : 0));  // from the other block
      }
      __syncwarp();
      if (n > first) this->pass_release(n - 1);
      if (--chunk < b().begin) chunk = b().end - 1;
    }
    if (n > first) this->pass_release(n - 1);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The group that has dk and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void gradients() {
    float dk[C::kD / 2];
    Slot slot;
    int n = 0;
#pragma unroll 1
    for (int item = 0; next_block(item);) {
#pragma unroll
      for (float &x : dk) x = 0.f;
      mbarrier_wait(k_full(), item & 1);
      mbarrier_wait(other_k_full(), item & 1);
      if (b().begin < b().end) {
        add_chunks(dk, slot, n);
      } else {
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, keys_empty());
      }
      store(a_.problem.dk, dk, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk);
      item = b().item;
      finish_block(item++);
    }
  }

  __device__ __forceinline__ void add_chunks(float (&dk)[C::kD / 2], Slot &slot, int &n) const {
    Dq dq;
#pragma unroll
    for (float &x : dq) x = 0.f;
    const Walk walk = this->walk();
    const int end = b().chunks;
    int chunk = walk.end - 1;
    uint32_t first = 1;  // of the item
#pragma unroll 1
    do {
      const int at = uniform(slot.stage()), buffer = uniform(n & 1);
      const uint32_t parity = n >> 1 & 1;
      mbarrier_wait(q_full(at), slot.phase());
      mbarrier_wait(own_ds_full(buffer), parity);
      fence_proxy_async();
      bool careful = false;
      if (walk.masked(chunk)) {
        mbarrier_wait(ds_full(buffer), parity);
        // By the lane that will let them go.
        if (lane_ == 0) careful = (ld_shared_4(own_flag(buffer)) | ld_shared_4(flag(buffer))) != 0;
        careful = __shfl_sync(~0u, careful, 0);
      }
      if (careful) {
        hand_over_dq(dq, n, first);
        dk_exactly(dk, buffer, q_tile(at));
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, q_empty(at));
        dq_exactly(dq, buffer, 0);
      } else {
        fence_operand(dk);
        wgmma_fence();
        start_dk(dk, buffer, q_tile(at));
        hand_over_dq(dq, n, first);
        mbarrier_wait(ds_full(buffer), parity);
        fence_operand(dq);
        wgmma_fence();
        start_dq(dq, buffer, 0);
        wgmma_wait<1>();
        fence_operand(dk);
        __syncwarp();
        mbarrier_arrive_if(lane_ == 0, q_empty(at));
        wgmma_wait<0>();
        fence_operand(dq);
      }
      release_ds(true, buffer);
      first = 0;
      slot.advance();
      if (--chunk < walk.begin) chunk = walk.end - 1;
    } while (++n < end);
    mbarrier_arrive_if(lane_ == 0, keys_empty());
    hand_over_dq(dq, n, 0);
  }

  // dq of the chunk before the n-th to shared memory, once the copy engine has read the one before from there, and to the warp that has it
  // added. Under the first chunk of an item, behind which the last dq of the one before has left, something is written that nobody reads.
  __device__ __forceinline__ void hand_over_dq(const Dq &dq, int n, uint32_t first) const {
    mbarrier_wait(dq_empty(), (n & 1) ^ first);
    this->put_share(dq, dq_tile());
    __syncwarp();
    mbarrier_arrive_if(first == 0 && lane_ == 0, dq_full((n - 1) & 1));
  }
  // dk += dS^T Q of this block's keys.
  __device__ __forceinline__ void start_dk(float (&dk)[C::kD / 2], int buffer, uint32_t rows) const {
    const uint64_t a = descriptor_k_major_uniform(ds_tile(buffer, 0)), b = descriptor_mn_major_uniform<C::kRows>(rows);
#pragma unroll
    for (int n = 0; n < C::kRows / 16; ++n)
      Wgmma<Element, C::kD>::ss_k_mn(dk, advance_descriptor(a, n * 32), advance_descriptor(b, n * 2048), 1);
    wgmma_commit();
  }
  __device__ __forceinline__ void dk_exactly(float (&dk)[C::kD / 2], int buffer, uint32_t rows) const {
#pragma unroll 1
    for (int row = 0; row < C::kRows; ++row) {
      uint32_t bits[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = warp_ * 16 + (lane_ >> 2) + 8 * r;
        const uint32_t pair = ld_shared_4(ds_tile(buffer, 0) + key * 128 + (((row / 8) ^ (key & 7)) << 4) + row % 8 / 2 * 4);
        bits[r] = (row & 1) ? pair >> 16 : pair & 0xFFFFu;
      }
      this->template add_row<C::kRows, C::kD>(dk, bits, rows, row);
    }
  }
};

template <class C>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(C::kThreads, 1)
    backward_pair_scores(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  BackwardPairScores<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90
