// SPDX-License-Identifier: Apache-2.0
// Pairs of blocks of threads (pair_block.cuh) whose groups have different tasks: one has P, dv and dq, the other dP, dS and dk, and P goes from
// the first to the second through shared memory. What kernels that work so have in common between their products.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/bwd_sm90_cluster/pair_block.cuh"

namespace fa::cuda::sm90 {

template <class C>
class PairTasks : protected PairBlock<C> {
 protected:
  using Pair = PairBlock<C>;
  using Pair::a_, Pair::lane_, Pair::p_, Pair::rank_, Pair::shared_, Pair::warp_;
  using Pair::dout_tile, Pair::ds_full, Pair::delta_row, Pair::first_key, Pair::flag, Pair::handed, Pair::q_tile,
      Pair::start_gradient, Pair::stat, Pair::there;
  using typename Pair::Dq;
  static_assert(C::kHandsP && C::kDoutStages == 1 && C::kDqParts == 2);

  __device__ __forceinline__ PairTasks(const BackwardParams &params, char *shared) : Pair(params, shared) {}

  __device__ __forceinline__ uint32_t p_tile() const { return shared_ + C::kHandedOffset; }
  __device__ __forceinline__ uint32_t p_full() const { return handed(0); }
  __device__ __forceinline__ uint32_t p_empty() const { return handed(1); }
  __device__ __forceinline__ uint32_t agreed() const { return handed(2); }
  __device__ __forceinline__ uint32_t doubt(int n) const { return flag(2 + n); }
  // Threads of the two groups with the same number hold the same elements.
  __device__ __forceinline__ uint32_t p_place(int j) const { return p_tile() + (j * 128 + warp_ * 32 + lane_) * 16; }

  // P of the n-th chunk for the other group.
  __device__ __forceinline__ void hand_over(const float (&p)[C::kRows / 2], int n) const {
    mbarrier_wait(p_empty(), (n & 1) ^ 1);
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      st_shared_16(p_place(j), __float_as_uint(p[4 * j]), __float_as_uint(p[4 * j + 1]), __float_as_uint(p[4 * j + 2]),
                   __float_as_uint(p[4 * j + 3]));
    }
    mbarrier_arrive(p_full());
  }
  // dP to dS of the n-th chunk, in place, with that.
  __device__ __forceinline__ void derivatives(float (&dp)[C::kRows / 2], int n) const {
    mbarrier_wait(p_full(), n & 1);
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      const float2 delta = stat(delta_row(0), j);
      const uint4 p = ld_shared_16(p_place(j));
      dp[4 * j] = __uint_as_float(p.x) * (dp[4 * j] - delta.x);
      dp[4 * j + 1] = __uint_as_float(p.y) * (dp[4 * j + 1] - delta.y);
      dp[4 * j + 2] = __uint_as_float(p.z) * (dp[4 * j + 2] - delta.x);
      dp[4 * j + 3] = __uint_as_float(p.w) * (dp[4 * j + 3] - delta.y);
    }
    mbarrier_arrive(p_empty());
  }
  __device__ __forceinline__ void mark_masked(float (&ds)[C::kRows / 2], int chunk) const {
#pragma unroll
    for (float &x : ds) x += 0.f;  // a visible -0 is no mask
    this->template for_masked<C::kRows>(first_key(), chunk * C::kRows, [&](int i) { ds[i] = kMasked; });
  }

  // This warp's 16 keys of dS^T, for this block and the other. At the mask's edge the other also has to know whether to add with care.
  __device__ __forceinline__ void put_ds(const uint32_t (&w)[C::kRows / 16][4], int buffer, bool edge, bool careful) const {
    this->write_ds(w, buffer);
    fence_proxy_async();
    __syncwarp();
    if (lane_ != 0) return;
    this->send_ds(buffer, C::kDsBytes / 4, warp_ * (C::kDsBytes / 4));
    if (warp_ != 0) return mbarrier_arrive(ds_full(buffer));
    if (edge) st_async(there(flag(buffer)), careful, there(ds_full(buffer)));
    mbarrier_arrive_expect_tx(ds_full(buffer), C::kDsBytes + (edge ? 4 : 0));  // from the other block
  }

  // A part of dq of a chunk, number `index` of the workspace. A chunk of the sum is a sequence of 16 x 8 tiles, [kDqColumns columns][warp][j],
  // each four numbers a lane as the accumulators hold them.
  __device__ __forceinline__ void add_dq(const Dq &dq, bool wanted, int index, int part) const {
    wanted = wanted && a_.dq_sum != nullptr;
    each_tile(dq, index, part, [&](float *sum, const float *x) {
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(sum),
                   "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(static_cast<int>(wanted))
                   : "memory");
    });
  }
  // The same where nobody has cleared the sum: the first block of keys stores its share.
  __device__ __forceinline__ void put_or_add_dq(const Dq &dq, bool first, int index, int part) const {
    if (a_.dq_sum == nullptr) return;
    each_tile(dq, index, part, [&](float *sum, const float *x) {
      asm volatile(
          "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
          "@p st.global.v4.f32 [%0], {%1, %2, %3, %4};\n@!p red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(sum),
          "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(static_cast<int>(first))
          : "memory");
    });
  }
  template <typename F>
  __device__ __forceinline__ void each_tile(const Dq &dq, int index, int part, F f) const {
    constexpr int kTiles = C::kDqColumns / 8;
    float *sum = a_.dq_sum + int64_t{index} * (C::kRows * C::kD) + ((rank_ * C::kDqParts + part) * 4 + warp_) * (kTiles * 128) +
                 lane_ * 4;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) f(sum + j * 128, &dq[4 * j]);
  }

  // Whether any thread of the two groups has doubts about the n-th chunk, of those with masked pairs one of parity `parity`. A place is used
  // again when all have met once more.
  __device__ __forceinline__ bool agree(bool doubts, int n, uint32_t parity) const {
    const uint32_t place = doubt(static_cast<int>(parity));
    if (doubts) asm volatile("red.shared.max.s32 [%0], %1;\n" ::"r"(place), "r"(n + 1) : "memory");
    mbarrier_arrive(agreed());
    mbarrier_wait(agreed(), parity);
    return static_cast<int>(ld_shared_4(place)) == n + 1;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The order in which blocks of keys add dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t may_add() const { return handed(3); }
  __device__ __forceinline__ uint32_t added() const { return handed(4); }
  __device__ __forceinline__ uint32_t seen() const { return handed(5); }

  // What the order asks two warps, as add_shares() for half of a chunk's dq: one waits for the blocks of keys before this one and lets the group
  // add; the other counts on when the additions have arrived, which takes 1500 cycles, and in the group itself a fence that would hold up its
  // products. No barrier gets ahead of a warp that waits for it: a chunk may be added when the second warp has seen the one before.
  // n: chunks before this block of keys.
  __device__ __forceinline__ void await_turns(int &n) const {
    each_chunk(n, [&](int32_t *turn, int chunk) {
      const int place = this->place_in_order(chunk);
      while (a_.ordered && load_relaxed(turn) != place) {
      }
      if (n > 0) mbarrier_wait(seen(), (n - 1) & 1);
      mbarrier_arrive_if(lane_ == 0, may_add());
    });
  }
  __device__ __forceinline__ void pass_turns(int &n) const {
    each_chunk(n, [&](int32_t *turn, int) {
      mbarrier_wait(added(), n & 1);
      mbarrier_arrive_if(lane_ == 0, seen());
      if (a_.ordered && lane_ == 0) count_released(turn);
      __syncwarp();
    });
  }
  // Of the group, when it has added a chunk's dq.
  __device__ __forceinline__ void end_turn(bool any) const {
    __syncwarp();
    mbarrier_arrive_if(any && lane_ == 0, added());
  }

 private:
  // Calls f(turn, chunk) for every chunk of the walk and counts them.
  template <typename F>
  __device__ __forceinline__ void each_chunk(int &n, F f) const {
    for (int g = 0; g < static_cast<int>(p_.group); ++g) {
      const int first = this->chunks_at(this->b().head_k * static_cast<int>(p_.group) + g);
      for (int chunk = this->b().end - 1; chunk >= this->b().begin; --chunk, ++n)
        f(a_.turn + (first + chunk) * C::kShares + rank_, chunk);
    }
  }
};

}  // namespace fa::cuda::sm90
