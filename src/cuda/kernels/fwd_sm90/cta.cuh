// SPDX-License-Identifier: Apache-2.0
// One CTA of the forward: its configuration, its shared memory and barriers, the scheduler warp and the producer warps. The consumer
// warpgroups are in forward.cuh (main loop) and consumer.cuh.
//
// Shared memory, every operand as 128-byte swizzle atoms [atom][row][128 bytes]:
//
//   Q [kQStages][warpgroup][atom][64][128 B] | K [kStages][atom][kKeys][128 B] | V [kStages][atom][kKeys][128 B]
//   | out [warpgroup][kOutAtoms][64][128 B] | mbarriers | WorkTile [kWorkStages]
//
// fp8: V comes transposed, [kStages][kDv][128 B].
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/fwd_sm90/work_tile.cuh"

namespace fa::cuda::sm90 {

template <typename Element_, typename Out_, int kD_, int kDv_, int kConsumerWarpgroups_, int kKeys_, int kQStages_,
          int kStages_, int kOutAtoms_, int kCtasPerSm_, bool kHasScoreMod_>
struct ForwardConfig {
  using Element = Element_;
  using Out = Out_;
  static constexpr bool kFp8 = sizeof(Element) == 1;  // V comes transposed
  static constexpr int kD = kD_, kDv = kDv_, kConsumerWarpgroups = kConsumerWarpgroups_, kKeys = kKeys_, kQStages = kQStages_,
                       kStages = kStages_;
  static constexpr int kOutAtoms =
      kOutAtoms_;  // atoms of out that are staged in shared memory for one TMA store; 0: no staging
  static constexpr int kCtasPerSm = kCtasPerSm_;
  static constexpr bool kHasScoreMod = kHasScoreMod_;  // softcap or ALiBi
  static constexpr int kWorkStages = 4;
  static constexpr int kThreads = (kConsumerWarpgroups + 1) * 128;
  static constexpr int kRows = kConsumerWarpgroups * 64;
  // With a single Q stage each consumer warpgroup frees its rows of Q at its own time. Dedicated warps wait for that and load Q, so that the
  // producer warp of K and V does not stall. Kernels with a score_mod have too few registers for it; fp8 was not tried.
  static constexpr int kQProducerWarps = kQStages == 1 && !kHasScoreMod && !kFp8 ? 2 : 0;
  static constexpr int kAtomColumns = 128 / sizeof(Element);
  static constexpr int kAtoms = (kD + kAtomColumns - 1) / kAtomColumns, kVAtoms = (kDv + 63) / 64;
  static constexpr int kMmaK = 32 / sizeof(Element);  // the K extent of one wgmma
  static constexpr int kQWarpgroupBytes = 64 * kAtoms * 128;
  static constexpr int kQBytes = kConsumerWarpgroups * kQWarpgroupBytes;
  static constexpr int kKBytes = kKeys * kAtoms * 128, kVBytes = kFp8 ? kDv * 128 : kKeys * kVAtoms * 128;
  static constexpr int kVLoadedBytes = kFp8 ? kDv * kKeys : kVBytes;  // bytes of one TMA load of V
  static constexpr int kOutWarpgroupBytes = 64 * kOutAtoms * 128;
  static constexpr int kOutOffset = kQStages * kQBytes + kStages * (kKBytes + kVBytes);
  static constexpr int kBarrierOffset = kOutOffset + kConsumerWarpgroups * kOutWarpgroupBytes;
  static constexpr int kWorkOffset =
      kBarrierOffset + (2 * kQStages * kConsumerWarpgroups + 4 * kStages + 2 * kWorkStages + 1) * 8;
  static constexpr int kSharedBytes = kWorkOffset + kWorkStages * sizeof(WorkTile<kConsumerWarpgroups>);
  // setmaxnreg moves registers from the first warpgroup (scheduler and producers) to the consumers. They can take only what it gives up.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * kCtasPerSm) / 8 * 8;
  static constexpr int kProducerRegisters = kConsumerWarpgroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumerWarpgroups == 3   ? 160
                                            : kConsumerWarpgroups == 2 ? 232
                                                                       : 2 * kLaunchRegisters - kProducerRegisters;
  static_assert(kConsumerWarpgroups * (kConsumerRegisters - kLaunchRegisters) <= kLaunchRegisters - kProducerRegisters);
  static_assert(kKeys * 128 % 1024 == 0 && kKeys % kMmaK == 0 && (!kFp8 || kKeys <= kLongestChunk));
  static_assert(kVAtoms % (kOutAtoms > 0 ? kOutAtoms : 1) == 0);
  // Before a warpgroup finishes the previous work tile, it skips the KV tiles that only lower warpgroups see. The K and V pipelines must hold
  // all of them, or the skipping warpgroup and the producer would wait for each other.
  static_assert((kConsumerWarpgroups - 1) * 64 <= kStages * kKeys);
};

template <class C>
class ForwardCta {
 public:
  using Element = typename C::Element;
  using WorkTile = sm90::WorkTile<C::kConsumerWarpgroups>;
  static constexpr int kKeys = C::kKeys;
  // Whether the scheduler warp skips tiles past the end of packed sequences (PackedScheduler). With one consumer warpgroup a work tile is so
  // short that scheduling is the bottleneck: there the scheduler does as little as possible, and empty tiles are passed over one by one.
  static constexpr bool kFindsPackedTiles = C::kConsumerWarpgroups > 1;
  // The next work tile is requested when this many KV tiles are still to be loaded; describing it takes about that long.
  static constexpr int kScheduleAhead = 3;

  __device__ __forceinline__ ForwardCta(const ForwardParams &params, char *shared)
      : a_(params),
        p_(params.problem),
        work_tiles_(reinterpret_cast<WorkTile *>(shared + C::kWorkOffset)),
        shared_(smem_address(shared)),
        lane_(threadIdx.x & 31),
        warp_((threadIdx.x >> 5) & 3) {}

  __device__ __forceinline__ void init_barriers() const {
    tma_prefetch_descriptor(&a_.q_map);
    tma_prefetch_descriptor(&a_.k_map);
    tma_prefetch_descriptor(&a_.v_map);
    if (C::kOutAtoms > 0) tma_prefetch_descriptor(&a_.out_map);
    constexpr int kWarps = C::kConsumerWarpgroups * 4;
    for (int n = 0; n < C::kQStages; ++n) {
      for (int wg = 0; wg < C::kConsumerWarpgroups; ++wg) {
        mbarrier_init(q_full(n, wg), 1);
        mbarrier_init(q_empty(n, wg), 4);
      }
    }
    for (int n = 0; n < C::kStages; ++n) {
      mbarrier_init(k_full(n), 1);
      mbarrier_init(k_empty(n), kWarps);
      mbarrier_init(v_full(n), 1);
      mbarrier_init(v_empty(n), kWarps);
    }
    for (int n = 0; n < C::kWorkStages; ++n) {
      mbarrier_init(work_full(n), 1);
      mbarrier_init(work_empty(n), kWarps + 1 + C::kQProducerWarps);  // consumer warps, and the warps that load
    }
    mbarrier_init(work_request(), 1);
    mbarrier_init_fence();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Shared memory and barriers
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t q_tile(int n) const { return shared_ + n * C::kQBytes; }
  __device__ __forceinline__ uint32_t k_tile(int n) const { return shared_ + C::kQStages * C::kQBytes + n * C::kKBytes; }
  __device__ __forceinline__ uint32_t v_tile(int n) const { return k_tile(C::kStages) + n * C::kVBytes; }
  __device__ __forceinline__ uint32_t out_tile(int wg) const { return shared_ + C::kOutOffset + wg * C::kOutWarpgroupBytes; }
  // Each warpgroup has barriers of its own for its 64 rows of Q, so no warpgroup waits for the last S of another.
  __device__ __forceinline__ uint32_t q_full(int n, int wg) const {
    return shared_ + C::kBarrierOffset + (n * C::kConsumerWarpgroups + wg) * 8;
  }
  __device__ __forceinline__ uint32_t q_empty(int n, int wg) const { return q_full(C::kQStages + n, wg); }
  __device__ __forceinline__ uint32_t k_full(int n) const { return q_full(2 * C::kQStages, n); }
  __device__ __forceinline__ uint32_t k_empty(int n) const { return k_full(C::kStages + n); }
  __device__ __forceinline__ uint32_t v_full(int n) const { return k_full(2 * C::kStages + n); }
  __device__ __forceinline__ uint32_t v_empty(int n) const { return k_full(3 * C::kStages + n); }

  __device__ __forceinline__ uint32_t work_full(int n) const { return k_full(4 * C::kStages + n); }
  __device__ __forceinline__ uint32_t work_empty(int n) const { return work_full(C::kWorkStages + n); }
  __device__ __forceinline__ uint32_t work_request() const { return work_full(2 * C::kWorkStages); }
  __device__ __forceinline__ WorkTile &work_tile(int n) const { return work_tiles_[n]; }

  // ------------------------------------------------------------------------------------------------------------------
  // Scheduler and producer warps
  // ------------------------------------------------------------------------------------------------------------------

  // The first work tile. It is described before the barriers are initialised: __syncthreads publishes both.
  __device__ __forceinline__ bool schedule_first() { return describe_work_tile(blockIdx.x, work_tile(0)); }
  // The scheduler warp. It takes the next work tile from the counter when most of the current tile has been loaded, and no sooner: a tile
  // that this CTA has taken cannot go to another one, and at the end of the launch all would wait for it. `has_work`: the first tile has rows.
  __device__ __forceinline__ void schedule(bool has_work) {
    PipelineState<C::kWorkStages> work;
    uint32_t request_phase = 0;
    for (int index = blockIdx.x; index < a_.tiles;) {
      if (kFindsPackedTiles && !has_work) break;  // no later tile has rows either
      if (kFindsPackedTiles || has_work) {
        __syncwarp();
        if (C::kQStages == 1) prefetch_q(work_tile(work.stage()));
        mbarrier_arrive_if(lane_ == 0, work_full(work.stage()));
        work.advance();
        mbarrier_wait(work_request(), request_phase);
        request_phase ^= 1;
      }
      index += static_cast<int>(gridDim.x);
      if (lane_ == 0 && a_.counters != nullptr) index = static_cast<int>(gridDim.x) + atomicAdd(a_.counters, 1);
      index = __shfl_sync(~0u, index, 0);
      if (index < a_.tiles) {
        mbarrier_wait(work_empty(work.stage()), work.phase() ^ 1);
        has_work = describe_work_tile(index, work_tile(work.stage()));
      }
    }
    mbarrier_wait(work_empty(work.stage()), work.phase() ^ 1);
    if (lane_ == 0) {
      WorkTile &end = work_tile(work.stage());
      end.kv_tiles = -1;
      for (int wg = 0; wg < C::kConsumerWarpgroups; ++wg) end.begin[wg] = 0;
      mbarrier_arrive(work_full(work.stage()));
      // The last CTA to finish resets both counters for the next launch.
      if (a_.counters != nullptr && atomicAdd(a_.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
        a_.counters[0] = 0;
        a_.counters[1] = 0;
      }
    }
  }

  // The producer warp: loads K and V of every work tile, and Q where no Q producer warps do.
  __device__ __forceinline__ void load_kv() {
    PipelineState<C::kQStages> q;
    PipelineState<C::kStages> k, v;
    PipelineState<C::kWorkStages> work;
    if (C::kFp8) pdl_wait();  // for the kernel that writes the transposed copy of V
    while (true) {
      const WorkTile t = take_work(work);
      if (t.kv_tiles < 0) break;
      if (t.kv_tiles > 0) {
        load_tile(t, q, k, v);
      } else {
        request_work();
      }
    }
  }
  // A Q producer warp loads the rows of every kQProducerWarps-th warpgroup, from first_wg on.
  __device__ __forceinline__ void load_q_tiles(int first_wg) {
    PipelineState<C::kQStages> q;
    PipelineState<C::kWorkStages> work;
    while (true) {
      const WorkTile t = take_work(work);
      if (t.kv_tiles < 0) break;
      if (t.kv_tiles == 0) continue;
      for (int wg = first_wg; wg < C::kConsumerWarpgroups; wg += C::kQProducerWarps) load_q(t, q, wg);
      q.advance();
    }
  }

 private:
  // Whether the tile is to be handed to the consumers. With kFindsPackedTiles false means that there are no more tiles.
  __device__ __forceinline__ bool describe_work_tile(int index, WorkTile &t) {
    L2HeadOrder::Place place;
    if (!kFindsPackedTiles || p_.q_lengths.cu == nullptr) {
      place = a_.order.at(index);
    } else if (!packed_scheduler_.find(a_, index, lane_, place)) {
      return false;
    }
    const bool has_work =
        sm90::describe_work_tile<C::kConsumerWarpgroups, kKeys, C::kHasScoreMod, C::kFp8>(a_, place, lane_, t);
    return kFindsPackedTiles || has_work;
  }
  // With a single Q stage Q is loaded late. A prefetch brings it to the L2 cache as soon as the work tile is known.
  __device__ __forceinline__ void prefetch_q(const WorkTile &t) const {
    static_assert(C::kConsumerWarpgroups * C::kAtoms <= 32);
    if (lane_ < C::kConsumerWarpgroups * C::kAtoms && t.kv_tiles > 0)
      tma_prefetch_4d(&a_.q_map, lane_ % C::kAtoms * C::kAtomColumns, t.q_row + lane_ / C::kAtoms * 64, t.head_q, t.q_batch);
  }
  __device__ __forceinline__ void request_work() const { mbarrier_arrive_if(lane_ == 0, work_request()); }

  // A copy of the next work tile, in registers.
  __device__ __forceinline__ WorkTile take_work(PipelineState<C::kWorkStages> &work) const {
    mbarrier_wait(work_full(work.stage()), work.phase());
    const WorkTile t = work_tile(work.stage());
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, work_empty(work.stage()));
    work.advance();
    return t;
  }

  __device__ __forceinline__ void load_q(const WorkTile &t, const PipelineState<C::kQStages> &q, int wg) const {
    mbarrier_wait(q_empty(q.stage(), wg), q.phase() ^ 1);
    if (elect_one()) {
      mbarrier_arrive_expect_tx(q_full(q.stage(), wg), C::kQWarpgroupBytes);
#pragma unroll
      for (int s = 0; s < C::kAtoms; ++s)
        tma_load_4d(q_tile(q.stage()) + wg * C::kQWarpgroupBytes + s * 64 * 128, &a_.q_map, q_full(q.stage(), wg),
                    s * C::kAtomColumns, t.q_row + wg * 64, t.head_q, t.q_batch, kEvictFirst);
    }
  }
  __device__ __forceinline__ void load_tile(const WorkTile &t, PipelineState<C::kQStages> &q, PipelineState<C::kStages> &k,
                                            PipelineState<C::kStages> &v) const {
    const auto load_k = [&](int kv_tile) {
      mbarrier_wait(k_empty(k.stage()), k.phase() ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(k_full(k.stage()), C::kKBytes);
#pragma unroll
        for (int s = 0; s < C::kAtoms; ++s)
          tma_load_4d(k_tile(k.stage()) + s * kKeys * 128, &a_.k_map, k_full(k.stage()), s * C::kAtomColumns,
                      t.k_row + kv_tile * kKeys, t.head_k, t.k_batch, kEvictLast);
      }
      k.advance();
    };
    load_k(t.kv_tile(0));
    if (C::kQProducerWarps == 0) {
#pragma unroll
      for (int wg = 0; wg < C::kConsumerWarpgroups; ++wg) load_q(t, q, wg);
      q.advance();
    }
    for (int i = 0; i < t.kv_tiles; ++i) {
      if (i + 1 < t.kv_tiles) load_k(t.kv_tile(i + 1));
      mbarrier_wait(v_empty(v.stage()), v.phase() ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(v_full(v.stage()), C::kVLoadedBytes);
        if constexpr (C::kFp8) {
          tma_load_4d(v_tile(v.stage()), &a_.v_map, v_full(v.stage()), t.v_key + t.kv_tile(i) * kKeys, 0, t.head_k, t.k_batch,
                      kEvictLast);
        } else {
#pragma unroll
          for (int s = 0; s < C::kVAtoms; ++s)
            tma_load_4d(v_tile(v.stage()) + s * kKeys * 128, &a_.v_map, v_full(v.stage()), s * 64,
                        t.k_row + t.kv_tile(i) * kKeys, t.head_k, t.k_batch, kEvictLast);
        }
      }
      v.advance();
      if (i == max(t.kv_tiles - kScheduleAhead, 0)) request_work();
    }
  }

 protected:
  const ForwardParams &a_;
  const Problem &p_;
  WorkTile *const work_tiles_;
  const uint32_t shared_;
  const int lane_, warp_;  // warp_ within the warpgroup

 private:
  PackedScheduler<C::kRows> packed_scheduler_;  // used by the scheduler warp only
};

}  // namespace fa::cuda::sm90
