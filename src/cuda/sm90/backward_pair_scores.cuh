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

#include "cuda/sm90/pair_block.cuh"

namespace fa::cuda::sm90 {

template <class C>
class BackwardPairScores : PairBlock<C> {
 public:
  __device__ __forceinline__ BackwardPairScores(const BackwardParams &params, char *shared) : Pair(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      this->find_block(static_cast<int>(blockIdx.x) / 2, b());
      barrier_init(k_full(), 1);
      barrier_init(other_k_full(), 1);
      barrier_init(v_full(), 1);
      for (int n = 0; n < 2; ++n) {
        barrier_init(own_ds_full(n), 4);
        barrier_init(ds_full(n), 1);
        barrier_init(ds_used(n), 4);
        barrier_init(ds_empty(n), 2);
      }
      for (int n = 0; n < 2; ++n) barrier_init(dq_full(n), 4);
      barrier_init(dq_empty(), 1);
      for (int n = 0; n < C::kDoutStages; ++n) {
        barrier_init(dout_full(n), 1);
        barrier_init(dout_empty(n), 4);
      }
      for (int n = 0; n < C::kStages; ++n) {
        barrier_init(q_full(n), 1);
        barrier_init(q_empty(n), 8);
      }
      barrier_init_fence();
    } else if (threadIdx.x == 32) {
      this->prefetch_maps();
    }
    __syncthreads();
    cluster_sync();
    if (threadIdx.x < 128) {
      give_registers<C::kProducerRegisters>();
      if (warp_ == 0) this->produce();
      if (warp_ == 1) pass_ds();
      if (warp_ > 1) {
        uint32_t parity = 0;
        wait_for_previous();
        this->template add_shares<2>(rank_, dq_tile(), dq_full(warp_ & 1), dq_empty(), parity, warp_ & 1);
        copies_wait();
      }
    } else {
      take_registers<C::kConsumerRegisters>();
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
  using Pair::add_exactly, Pair::add_row, Pair::await_q, Pair::chunks, Pair::delta_row, Pair::dout_empty, Pair::dout_full,
      Pair::dout_tile, Pair::dq_exactly, Pair::ds_empty, Pair::ds_full, Pair::ds_tile, Pair::first_key, Pair::flag,
      Pair::k_full, Pair::lse_row, Pair::masked, Pair::other_k_full, Pair::q_empty, Pair::q_full, Pair::q_tile, Pair::ds_used,
      Pair::release_ds, Pair::round, Pair::start_dp, Pair::start_dq, Pair::start_gradient, Pair::start_scores, Pair::stat,
      Pair::store, Pair::there, Pair::v_full, Pair::zero_if_finite;
  using typename Pair::Dq, typename Pair::Element, typename Pair::Slot, typename Pair::Stats, typename Pair::Walk;
  static_assert(!C::kHandsP && C::kDqParts == 1);
  // Whether S of the next chunk runs beside dv: there are registers for it beside P, and a place for its Q.
  static constexpr bool kAhead = C::kStages > 2;
  // Whether there are registers for lse and delta of a chunk ahead of their use.
  static constexpr bool kStatsAhead = !C::kScored && C::kDv <= 128;

  // Of this block's keys; ds_full is that of the other's.
  __device__ __forceinline__ uint32_t own_ds_full(int n) const { return this->handed(n); }
  __device__ __forceinline__ uint32_t dq_full(int n) const { return this->handed(3 + n); }
  __device__ __forceinline__ uint32_t dq_empty() const { return this->handed(5); }
  __device__ __forceinline__ uint32_t dq_tile() const { return shared_ + C::kHandedOffset; }
  __device__ __forceinline__ uint32_t own_flag(int n) const { return flag(2 + n); }

  // ------------------------------------------------------------------------------------------------------------------
  // The group that has S, dP and dv
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void scores() const {
    float dv[C::kDv / 2];
#pragma unroll
    for (float &x : dv) x = 0.f;
    const int count = b().begin < b().end ? chunks() : 0;
    if (count > 0) {
      float s[C::kRows / 2], dp[C::kRows / 2];
      uint32_t p[C::kRows / 16][4], ds[C::kRows / 16][4];
      Slot slot;
      const Walk walk = this->walk();
      int chunk = walk.end - 1, head_q = b().head_k * static_cast<int>(p_.group);
      Stats lse, delta;
      barrier_wait(k_full(), 0);
      barrier_wait(q_full(0), 0);
      if constexpr (kStatsAhead) this->load_stats(lse, lse_row(0));
      hold(s);
      products_begin();
      start_scores(s, q_tile(0));
      products_wait<0>();
      hold(s);
      barrier_wait(v_full(), 0);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const int at = uniform(slot.at()), buffer = uniform(n & 1), dout_at = uniform(n % C::kDoutStages);
        slot.step();
        const int next = uniform(slot.at());
        const bool edge = walk.masked(chunk);
        barrier_wait(dout_full(dout_at), n / C::kDoutStages & 1);
        if constexpr (kStatsAhead) this->load_stats(delta, delta_row(dout_at));
        hold(dp);
        products_begin();
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
        barrier_arrive_if(lane_ == 0, q_empty(at));
        products_wait<0>();
        hold(dp);
        bool careful = false;
        if (edge) {
          finite += zero_if_finite(dp) + zero_if_finite(delta_row(dout_at));
          careful = named_barrier_or(1, 128, finite != 0.f);
        }
        if (careful) {
          derivatives(dp, e, delta, delta_row(dout_at));
#pragma unroll
          for (float &x : dp) x += 0.f;  // a visible -0 is no mask
          this->template for_masked<C::kRows>(first_key(), chunk * C::kRows, [&](int i) { dp[i] = kMasked; });
          round(ds, dp);
          put_ds(ds, n, edge, true);
          add_exactly(dv, p, dout_tile(dout_at));
          await_q(n + 1 < count, next, slot.parity());
          if constexpr (kStatsAhead) this->load_stats(lse, lse_row(next));
          hold(s);
          products_begin();
          start_scores(s, q_tile(next));
        } else {
          if constexpr (kAhead) await_q(n + 1 < count, next, slot.parity());
          if constexpr (kAhead && kStatsAhead) this->load_stats(lse, lse_row(next));
          hold(p);
          hold(dv);
          if constexpr (kAhead) hold(s);
          products_begin();
          if constexpr (kAhead) start_scores(s, q_tile(next));
          start_gradient(dv, p, dout_tile(dout_at));
          derivatives(dp, e, delta, delta_row(dout_at));
          round(ds, dp);
          put_ds(ds, n, edge, false);
          if constexpr (!kAhead) {
            await_q(n + 1 < count, next, slot.parity());
            if constexpr (kStatsAhead) this->load_stats(lse, lse_row(next));
            hold(s);
            products_begin();
            start_scores(s, q_tile(next));
          }
          products_wait<kAhead ? 0 : 1>();
          hold(dv);
        }
        __syncwarp();
        barrier_arrive_if(lane_ == 0, dout_empty(dout_at));
        products_wait<0>();
        hold(s);
        if (--chunk < walk.begin) {
          chunk = walk.end - 1;
          ++head_q;
        }
      }
    }
    store(a_.problem.dv, dv, 1.f, static_cast<int>(p_.head_dim_v), a_.vector_dv);
  }

  // dP to dS, in place.
  __device__ __forceinline__ void derivatives(float (&dp)[C::kRows / 2], const float (&p)[C::kRows / 2], const Stats &ahead,
                                              uint32_t row) const {
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      const float2 delta = kStatsAhead ? ahead[j] : stat(row, j);
#pragma unroll
      for (int r = 0; r < 4; ++r) dp[4 * j + r] = p[4 * j + r] * (dp[4 * j + r] - ((r & 1) ? delta.y : delta.x));
    }
  }

  // This warp's 16 keys of dS^T of the n-th chunk, for this block and the other, once both have multiplied what was there. At the mask's
  // edge they also have to know whether to add with care.
  __device__ __forceinline__ void put_ds(const uint32_t (&ds)[C::kRows / 16][4], int n, bool edge, bool careful) const {
    const int buffer = uniform(n & 1);
    barrier_wait_there(ds_empty(buffer), n >> 1 & 1 ^ 1);
    this->write_ds(ds, buffer);
    __syncwarp();
    if (lane_ != 0) return;
    if (warp_ == 0 && edge) {
      st_shared_4(own_flag(buffer), careful);
      store_there(there(flag(buffer)), careful, there(ds_full(buffer)));
    }
    barrier_arrive(own_ds_full(buffer));
  }
  // A warp sends dS of every chunk to the other block, and passes on that the chunk before has been multiplied. The fence, which waits for
  // what a thread has stored, is that of those who read.
  __device__ __forceinline__ void pass_ds() const {
    const int count = b().begin < b().end ? chunks() : 0;
    int chunk = b().end - 1;
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      const int buffer = n & 1;
      barrier_wait(own_ds_full(buffer), n >> 1 & 1);
      if (elect_one()) {
        shared_fence_for_copies();
        this->send_ds(buffer, C::kDsBytes, 0);
        barrier_expect(ds_full(buffer), C::kDsBytes + (masked(chunk) ? 4 : 0));  // from the other block
      }
      __syncwarp();
      if (n > 0) this->pass_release(n - 1);
      if (--chunk < b().begin) chunk = b().end - 1;
    }
    if (count > 0) this->pass_release(count - 1);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The group that has dk and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void gradients() const {
    float dk[C::kD / 2];
#pragma unroll
    for (float &x : dk) x = 0.f;
    const int count = b().begin < b().end ? chunks() : 0;
    if (count > 0) {
      Dq dq;
#pragma unroll
      for (float &x : dq) x = 0.f;
      Slot slot;
      const Walk walk = this->walk();
      int chunk = walk.end - 1;
      barrier_wait(k_full(), 0);
      barrier_wait(other_k_full(), 0);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const int at = uniform(slot.at()), buffer = uniform(n & 1);
        const uint32_t parity = n >> 1 & 1;
        barrier_wait(q_full(at), slot.parity());
        barrier_wait(own_ds_full(buffer), parity);
        shared_fence_for_copies();
        bool careful = false;
        if (walk.masked(chunk)) {
          barrier_wait(ds_full(buffer), parity);
          // By the lane that will let them go.
          if (lane_ == 0) careful = (ld_shared_4(own_flag(buffer)) | ld_shared_4(flag(buffer))) != 0;
          careful = __shfl_sync(~0u, careful, 0);
        }
        if (careful) {
          hand_over_dq(dq, n);
          dk_exactly(dk, buffer, q_tile(at));
          __syncwarp();
          barrier_arrive_if(lane_ == 0, q_empty(at));
          dq_exactly(dq, buffer, 0);
        } else {
          hold(dk);
          products_begin();
          start_dk(dk, buffer, q_tile(at));
          hand_over_dq(dq, n);
          barrier_wait(ds_full(buffer), parity);
          hold(dq);
          products_begin();
          start_dq(dq, buffer, 0);
          products_wait<1>();
          hold(dk);
          __syncwarp();
          barrier_arrive_if(lane_ == 0, q_empty(at));
          products_wait<0>();
          hold(dq);
        }
        release_ds(true, buffer);
        slot.step();
        if (--chunk < walk.begin) chunk = walk.end - 1;
      }
      hand_over_dq(dq, count);
    }
    store(a_.problem.dk, dk, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk);
  }

  // dq of the chunk before the n-th to shared memory, once the copy engine has read the one before from there, and to the warp that has it
  // added.
  __device__ __forceinline__ void hand_over_dq(const Dq &dq, int n) const {
    barrier_wait(dq_empty(), n == 0 ? 1 : n & 1);
    this->put_share(dq, dq_tile());
    __syncwarp();
    barrier_arrive_if(n > 0 && lane_ == 0, dq_full((n - 1) & 1));
  }
  // dk += dS^T Q of this block's keys.
  __device__ __forceinline__ void start_dk(float (&dk)[C::kD / 2], int buffer, uint32_t rows) const {
    const uint64_t a = uniform_rows_operand(ds_tile(buffer, 0)), b = uniform_columns_operand<C::kRows>(rows);
#pragma unroll
    for (int n = 0; n < C::kRows / 16; ++n)
      Product<Element, C::kD>::rows_columns(dk, advance_operand(a, n * 32), advance_operand(b, n * 2048), 1);
    products_commit();
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
