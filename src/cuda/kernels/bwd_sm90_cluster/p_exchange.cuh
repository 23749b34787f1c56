// SPDX-License-Identifier: Apache-2.0
// Backward clusters (cluster_cta.cuh) whose two consumer warpgroups compute different things: one has P, dv and dq, the other
// dP, dS and dk. P goes from the first to the second through shared memory. This is what the kernels with this division share
// besides ClusterCta.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/bwd_sm90_cluster/cluster_cta.cuh"

namespace fa::cuda::sm90 {

// One CTA of a backward cluster in which P goes through shared memory.
template <class C>
struct PExchange {
  using Dq = typename ClusterCta<C>::Dq;
  using Storage = typename C::Storage;
  static_assert(C::kPThroughSmem && C::kDoutStages == 1 && C::kDqParts == 2);

  __device__ __forceinline__ PExchange(const BackwardParams &params, char *shared) : cluster(params, shared) {}

  __device__ __forceinline__ uint32_t smem_p() const { return cluster.smem_exchange(); }
  __device__ __forceinline__ uint32_t p_full() const { return cluster.cta.at(offsetof(Storage, cluster.own.p_full)); }
  __device__ __forceinline__ uint32_t p_empty() const { return cluster.cta.at(offsetof(Storage, cluster.own.p_empty)); }
  __device__ __forceinline__ uint32_t vote() const { return cluster.cta.at(offsetof(Storage, cluster.own.vote)); }
  __device__ __forceinline__ uint32_t vote_flag(int n) const { return cluster.flag(2 + n); }
  // The place of column block j of this thread. Threads with the same number in the two warpgroups hold the same elements.
  __device__ __forceinline__ uint32_t p_address(int j) const {
    return smem_p() + (j * 128 + cluster.cta.warp * 32 + cluster.cta.lane) * 16;
  }

  // Stores P of iteration n for the other warpgroup, in fp32. `shown`: for mixtures, ShownPairs of this thread.
  __device__ __forceinline__ void store_p(const float (&p)[C::kTileQ / 2], int n, [[maybe_unused]] uint32_t shown = 0) const {
    mbarrier_wait(p_empty(), (n & 1) ^ 1);
    if constexpr (C::kMixtures) st_shared_4(smem_shown(), shown);
#pragma unroll
    for (int j = 0; j < C::kTileQ / 8; ++j) {
      st_shared_16(p_address(j), __float_as_uint(p[4 * j]), __float_as_uint(p[4 * j + 1]), __float_as_uint(p[4 * j + 2]),
                   __float_as_uint(p[4 * j + 3]));
    }
    mbarrier_arrive(p_full());
  }
  // dS^T = P^T (dP^T - delta) of iteration n, in place of dP^T, with that P. Returns what store_p() was given as `shown`.
  __device__ __forceinline__ uint32_t compute_ds(float (&dp)[C::kTileQ / 2], int n) const {
    const auto p_of = [&](int j) {
      const uint4 p = ld_shared_16(p_address(j));
      return float4{__uint_as_float(p.x), __uint_as_float(p.y), __uint_as_float(p.z), __uint_as_float(p.w)};
    };
    const auto delta_of = [&](int j) { return cluster.cta.row_stat(cluster.smem_delta(0), j); };
    uint32_t shown = ~0u;
    mbarrier_wait(p_full(), n & 1);
    if constexpr (C::kMixtures) {
      cluster.cta.compute_ds_dropped(dp, p_of, delta_of, cluster.cta.params.keep_scale);
      shown = ld_shared_4(smem_shown());
    } else if constexpr (C::kHasScoreText) {
      cluster.cta.compute_visible_ds(dp, p_of, delta_of);
    } else {
      cluster.cta.compute_ds(dp, p_of, delta_of);
    }
    mbarrier_arrive(p_empty());
    return shown;
  }
  __device__ __forceinline__ uint32_t smem_shown() const {
    return cluster.cta.at(offsetof(Storage, shown), cluster.cta.warp * 32 + cluster.cta.lane, 4);
  }

  // Stores this warp's 16 keys of dS^T for this CTA and sends them to the peer. For a partial Q tile the peer also gets the
  // flag that says whether dq needs the NaN-safe path.
  __device__ __forceinline__ void store_ds(const uint32_t (&ds16)[C::kTileQ / 16][4], int ds_stage, bool partial,
                                           bool nan_safe) const {
    cluster.store_ds_own(ds16, ds_stage);
    fence_proxy_async();
    __syncwarp();
    if (cluster.cta.lane != 0) return;
    cluster.send_ds_to_peer(ds_stage, C::kDsBytes / 4, cluster.cta.warp * (C::kDsBytes / 4));
    if (cluster.cta.warp != 0) return mbarrier_arrive(cluster.ds_full(ds_stage));
    if (partial) st_async(cluster.in_peer(cluster.flag(ds_stage)), nan_safe, cluster.in_peer(cluster.ds_full(ds_stage)));
    mbarrier_arrive_expect_tx(cluster.ds_full(ds_stage), C::kDsBytes + (partial ? 4 : 0));  // arrives from the peer
  }

  // Adds part `part` of dq of a Q tile, number `index` in the workspace, to dq_sum straight from registers. dq_sum of a Q tile
  // is a sequence of 16 x 8 tiles, [kDqColumns columns][warp][j], each with four numbers per lane as the accumulators hold them.
  __device__ __forceinline__ void add_dq(const Dq &dq, bool any, int index, int part) const {
    any = any && cluster.cta.params.dq_sum != nullptr;
    for_each_fragment(dq, index, part, [&](float *sum, const float *x) {
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(sum),
                   "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(static_cast<int>(any))
                   : "memory");
    });
  }
  // The same where dq_sum was not zeroed: the first work tile in the order stores its part.
  __device__ __forceinline__ void store_or_add_dq(const Dq &dq, bool first, int index, int part) const {
    if (cluster.cta.params.dq_sum == nullptr) return;
    for_each_fragment(dq, index, part, [&](float *sum, const float *x) {
      asm volatile(
          "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
          "@p st.global.v4.f32 [%0], {%1, %2, %3, %4};\n@!p red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n}\n" ::"l"(sum),
          "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(static_cast<int>(first))
          : "memory");
    });
  }
  // Calls f(address in dq_sum, four accumulators) for every 16 x 8 tile.
  template <typename F>
  __device__ __forceinline__ void for_each_fragment(const Dq &dq, int index, int part, F f) const {
    constexpr int kTiles = C::kDqColumns / 8;
    float *sum = cluster.cta.params.dq_sum + int64_t{index} * (C::kTileQ * C::kD) +
                 ((cluster.rank * C::kDqParts + part) * 4 + cluster.cta.warp) * (kTiles * 128) + cluster.cta.lane * 4;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) f(sum + j * 128, &dq[4 * j]);
  }

  // Whether any thread of the two warpgroups found a non-finite value in iteration n, a partial Q tile. `parity`: of the number
  // of partial Q tiles before it. There are two flags; a flag is used again after the next vote, when all threads have read it.
  __device__ __forceinline__ bool any_nonfinite(bool nonfinite, int n, uint32_t parity) const {
    const uint32_t flag_address = vote_flag(static_cast<int>(parity));
    if (nonfinite) asm volatile("red.shared.max.s32 [%0], %1;\n" ::"r"(flag_address), "r"(n + 1) : "memory");
    mbarrier_arrive(vote());
    mbarrier_wait(vote(), parity);
    return static_cast<int>(ld_shared_4(flag_address)) == n + 1;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Deterministic mode: the order in which work tiles add to dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t dq_may_add() const { return cluster.cta.at(offsetof(Storage, cluster.own.dq_may_add)); }
  __device__ __forceinline__ uint32_t dq_added() const { return cluster.cta.at(offsetof(Storage, cluster.own.dq_added)); }
  __device__ __forceinline__ uint32_t dq_added_seen() const {
    return cluster.cta.at(offsetof(Storage, cluster.own.dq_added_seen));
  }

  // Two warps that compute nothing do what reduce_dq() does for half of the columns of dq. One waits until the work tiles
  // before this one have added theirs, and signals dq_may_add. The other waits for dq_added, and counts on when the additions
  // have arrived. That takes 1500 cycles, and in the warpgroup itself would be a fence that holds up its wgmma.
  //
  // No barrier gets ahead of a warp that waits for it: dq_may_add of a Q tile is signalled only when the second warp has seen
  // dq_added of the one before. n: Q tiles before this work tile.
  __device__ __forceinline__ void wait_dq_order(int &n) const {
    for_each_q_tile(n, [&](int32_t *counter, int q_tile, int head_q) {
      const int position = cluster.cta.params.ordered ? cluster.cta.dq_order_position(q_tile, head_q) : 0;
      while (cluster.cta.params.ordered && load_relaxed(counter) != position) {
      }
      if (n > 0) mbarrier_wait(dq_added_seen(), (n - 1) & 1);
      mbarrier_arrive_if(cluster.cta.lane == 0, dq_may_add());
    });
  }
  __device__ __forceinline__ void advance_dq_order(int &n) const {
    for_each_q_tile(n, [&](int32_t *counter, int, int) {
      mbarrier_wait(dq_added(), n & 1);
      mbarrier_arrive_if(cluster.cta.lane == 0, dq_added_seen());
      if (cluster.cta.params.ordered && cluster.cta.lane == 0) count_released(counter);
      __syncwarp();
    });
  }
  // Called by the warpgroup with dq when it has issued the additions of a Q tile.
  __device__ __forceinline__ void signal_dq_added(bool any) const {
    __syncwarp();
    mbarrier_arrive_if(any && cluster.cta.lane == 0, dq_added());
  }

  // Calls f(counter, q_tile, head_q) for every Q tile of the main loop and counts them. Without masks as data head_q is not used.
  template <typename F>
  __device__ __forceinline__ void for_each_q_tile(int &n, F f) const {
    if constexpr (C::kHasDataMask) {
      cluster.cta.for_each_q_tile([&](int head_q, int q_tile, uint32_t) {
        f(order_counter(cluster.cta.workspace_q_tile(head_q) + q_tile), q_tile, head_q);
        ++n;
      });
    } else {
      for (int g = 0; g < static_cast<int>(cluster.cta.problem.group); ++g) {
        const int first =
            cluster.cta.workspace_q_tile(cluster.cta.work().head_k * static_cast<int>(cluster.cta.problem.group) + g);
        for (int q_tile = cluster.cta.work().q_tile_end - 1; q_tile >= cluster.cta.work().q_tile_begin; --q_tile, ++n)
          f(order_counter(first + q_tile), q_tile, 0);
      }
    }
  }
  // Of this CTA's part of dq of a Q tile, number `index` in the workspace.
  __device__ __forceinline__ int32_t *order_counter(int index) const {
    return cluster.cta.params.dq_semaphore + index * C::kDqPartials + cluster.rank;
  }

  ClusterCta<C> cluster;
};

}  // namespace fa::cuda::sm90
