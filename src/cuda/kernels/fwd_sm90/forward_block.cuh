// SPDX-License-Identifier: Apache-2.0
// One block of threads of the forward: its sizes, its shared memory, and the warps that plan and fetch. What is computed is in forward.cuh.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/fwd_sm90/work_tile.cuh"

namespace fa::cuda::sm90 {

template <typename Element_, typename Out_, int kD_, int kDv_, int kGroups_, int kChunk_, int kQStages_, int kStages_,
          int kOutSlabs_, int kBlocks_, bool kScored_>
struct ForwardConfig {
  using Element = Element_;
  using Out = Out_;
  static constexpr bool kFp8 = sizeof(Element) == 1;  // V comes transposed
  static constexpr int kD = kD_, kDv = kDv_, kGroups = kGroups_, kChunk = kChunk_, kQStages = kQStages_, kStages = kStages_;
  static constexpr int kOutSlabs = kOutSlabs_;  // of out at a time leave through shared memory of their own, by the copy engine
  static constexpr int kBlocks = kBlocks_;      // on a multiprocessor
  static constexpr bool kScored = kScored_;     // softcap or ALiBi
  static constexpr int kTileSlots = 4;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kRows = kGroups * 64;
  // Where Q has one place, every group frees its part at its own time: warps of their own wait for that, or K and V would wait, too. With
  // general scores registers do not suffice for that; fp8 was not tried.
  static constexpr int kQueryWarps = kQStages == 1 && !kScored && !kFp8 ? 2 : 0;
  static constexpr int kSlabColumns = 128 / sizeof(Element);
  static constexpr int kSlabs = (kD + kSlabColumns - 1) / kSlabColumns, kSlabsV = (kDv + 63) / 64;
  static constexpr int kStepColumns = 32 / sizeof(Element);  // summed by one product instruction
  static constexpr int kQGroupBytes = 64 * kSlabs * 128;
  static constexpr int kQBytes = kGroups * kQGroupBytes;
  static constexpr int kKBytes = kChunk * kSlabs * 128, kVBytes = kFp8 ? kDv * 128 : kChunk * kSlabsV * 128;
  static constexpr int kVFetched = kFp8 ? kDv * kChunk : kVBytes;  // bytes that the copy engine brings
  static constexpr int kOutGroupBytes = 64 * kOutSlabs * 128;
  static constexpr int kOutOffset = kQStages * kQBytes + kStages * (kKBytes + kVBytes);
  static constexpr int kBarrierOffset = kOutOffset + kGroups * kOutGroupBytes;
  static constexpr int kTileOffset = kBarrierOffset + (2 * kQStages * kGroups + 4 * kStages + 2 * kTileSlots + 1) * 8;
  static constexpr int kSharedBytes = kTileOffset + kTileSlots * sizeof(Tile<kGroups>);
  // What the first warpgroup gives up of its share at the launch is what the others may take.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * kBlocks) / 8 * 8;
  static constexpr int kProducerRegisters = kGroups == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kGroups == 3 ? 160 : kGroups == 2 ? 232 : 2 * kLaunchRegisters - kProducerRegisters;
  static_assert(kGroups * (kConsumerRegisters - kLaunchRegisters) <= kLaunchRegisters - kProducerRegisters);
  static_assert(kChunk * 128 % 1024 == 0 && kChunk % kStepColumns == 0 && (!kFp8 || kChunk <= kLongestChunk));
  static_assert(kSlabsV % (kOutSlabs > 0 ? kOutSlabs : 1) == 0);
  // A group passes over the chunks that only groups below it see before it completes the tile before. The rings hold those.
  static_assert((kGroups - 1) * 64 <= kStages * kChunk);
};

template <class C>
class ForwardBlock {
 public:
  using Element = typename C::Element;
  using Tile = sm90::Tile<C::kGroups>;
  static constexpr int kKeys = C::kChunk;
  // Tiles past the end of a packed sequence are not handed out. Tiles of one warpgroup are over so soon that planning holds them up: it is
  // left as short as it can be.
  static constexpr bool kFindsTiles = C::kGroups > 1;
  static constexpr int kPlanningChunks = 3;  // to be fetched when the next tile is taken: planning it takes their time

  __device__ __forceinline__ ForwardBlock(const ForwardParams &params, char *shared)
      : a_(params),
        p_(params.problem),
        tiles_(reinterpret_cast<Tile *>(shared + C::kTileOffset)),
        shared_(smem_address(shared)),
        lane_(threadIdx.x & 31),
        warp_((threadIdx.x >> 5) & 3) {}

  __device__ __forceinline__ void init_barriers() const {
    tma_prefetch_descriptor(&a_.q_map);
    tma_prefetch_descriptor(&a_.k_map);
    tma_prefetch_descriptor(&a_.v_map);
    if (C::kOutSlabs > 0) tma_prefetch_descriptor(&a_.out_map);
    constexpr int kWarps = C::kGroups * 4;
    for (int n = 0; n < C::kQStages; ++n) {
      for (int g = 0; g < C::kGroups; ++g) {
        mbarrier_init(q_full(n, g), 1);
        mbarrier_init(q_empty(n, g), 4);
      }
    }
    for (int n = 0; n < C::kStages; ++n) {
      mbarrier_init(k_full(n), 1);
      mbarrier_init(k_empty(n), kWarps);
      mbarrier_init(v_full(n), 1);
      mbarrier_init(v_empty(n), kWarps);
    }
    for (int n = 0; n < C::kTileSlots; ++n) {
      mbarrier_init(tile_full(n), 1);
      mbarrier_init(tile_empty(n), kWarps + 1 + C::kQueryWarps);  // and those that fetch
    }
    mbarrier_init(tile_wanted(), 1);
    mbarrier_init_fence();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Shared memory
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t q_tile(int n) const { return shared_ + n * C::kQBytes; }
  __device__ __forceinline__ uint32_t k_tile(int n) const { return shared_ + C::kQStages * C::kQBytes + n * C::kKBytes; }
  __device__ __forceinline__ uint32_t v_tile(int n) const { return k_tile(C::kStages) + n * C::kVBytes; }
  __device__ __forceinline__ uint32_t out_tile(int group) const { return shared_ + C::kOutOffset + group * C::kOutGroupBytes; }
  // Every group's rows of Q come and go on their own: no group waits for another one's last scores.
  __device__ __forceinline__ uint32_t q_full(int n, int group) const {
    return shared_ + C::kBarrierOffset + (n * C::kGroups + group) * 8;
  }
  __device__ __forceinline__ uint32_t q_empty(int n, int group) const { return q_full(C::kQStages + n, group); }
  __device__ __forceinline__ uint32_t k_full(int n) const { return q_full(2 * C::kQStages, n); }
  __device__ __forceinline__ uint32_t k_empty(int n) const { return k_full(C::kStages + n); }
  __device__ __forceinline__ uint32_t v_full(int n) const { return k_full(2 * C::kStages + n); }
  __device__ __forceinline__ uint32_t v_empty(int n) const { return k_full(3 * C::kStages + n); }

  __device__ __forceinline__ uint32_t tile_full(int n) const { return k_full(4 * C::kStages + n); }
  __device__ __forceinline__ uint32_t tile_empty(int n) const { return tile_full(C::kTileSlots + n); }
  __device__ __forceinline__ uint32_t tile_wanted() const { return tile_full(2 * C::kTileSlots); }
  __device__ __forceinline__ Tile &tile(int n) const { return tiles_[n]; }

  template <int kSize>
  using Slot = PipelineState<kSize>;

  // ------------------------------------------------------------------------------------------------------------------
  // Planning and fetching
  // ------------------------------------------------------------------------------------------------------------------

  // The first tile's description need not wait for barriers to be there.
  __device__ __forceinline__ bool plan_first() { return plan_tile(blockIdx.x, tile(0)); }
  // A tile is taken from the counter when most of the one before has been fetched, no sooner: what a block has taken nobody else can do,
  // and at the end of the launch all would wait for it. `any`: the first one is worth doing.
  __device__ __forceinline__ void plan(bool any) {
    Slot<C::kTileSlots> slot;
    uint32_t wanted = 0;
    for (int index = blockIdx.x; index < a_.tiles;) {
      if (kFindsTiles && !any) break;  // and none behind it
      if (kFindsTiles || any) {
        __syncwarp();
        if (C::kQStages == 1) prefetch_q(tile(slot.stage()));
        mbarrier_arrive_if(lane_ == 0, tile_full(slot.stage()));
        slot.advance();
        mbarrier_wait(tile_wanted(), wanted);
        wanted ^= 1;
      }
      index += static_cast<int>(gridDim.x);
      if (lane_ == 0 && a_.counters != nullptr) index = static_cast<int>(gridDim.x) + atomicAdd(a_.counters, 1);
      index = __shfl_sync(~0u, index, 0);
      if (index < a_.tiles) {
        mbarrier_wait(tile_empty(slot.stage()), slot.phase() ^ 1);
        any = plan_tile(index, tile(slot.stage()));
      }
    }
    mbarrier_wait(tile_empty(slot.stage()), slot.phase() ^ 1);
    if (lane_ == 0) {
      Tile &end = tile(slot.stage());
      end.chunks = -1;
      for (int g = 0; g < C::kGroups; ++g) end.begin[g] = 0;
      mbarrier_arrive(tile_full(slot.stage()));
      // The last block to come here leaves the counters as it found them.
      if (a_.counters != nullptr && atomicAdd(a_.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
        a_.counters[0] = 0;
        a_.counters[1] = 0;
      }
    }
  }

  __device__ __forceinline__ void fetch() {
    Slot<C::kQStages> q;
    Slot<C::kStages> k, v;
    Slot<C::kTileSlots> slot;
    if (C::kFp8) pdl_wait();  // that makes the copy of V
    while (true) {
      const Tile t = take_tile(slot);
      if (t.chunks < 0) break;
      if (t.chunks > 0) {
        fetch_tile(t, q, k, v);
      } else {
        want_tile();
      }
    }
  }
  // Of every kQueryWarps-th group, from `first` on.
  __device__ __forceinline__ void fetch_queries(int first) {
    Slot<C::kQStages> q;
    Slot<C::kTileSlots> slot;
    while (true) {
      const Tile t = take_tile(slot);
      if (t.chunks < 0) break;
      if (t.chunks == 0) continue;
      for (int g = first; g < C::kGroups; g += C::kQueryWarps) fetch_q(t, q, g);
      q.advance();
    }
  }

 private:
  // Whether there is something to do. With kFindsTiles nothing else comes behind a tile with which there is not.
  __device__ __forceinline__ bool plan_tile(int index, Tile &t) {
    L2HeadOrder::Place place;
    if (!kFindsTiles || p_.q_lengths.cu == nullptr) {
      place = a_.order.at(index);
    } else if (!packed_.find(a_, index, lane_, place)) {
      return false;
    }
    const bool any = sm90::plan_tile<C::kGroups, kKeys, C::kScored, C::kFp8>(a_, place, lane_, t);
    return kFindsTiles || any;
  }
  // Where Q has one place it is asked for late: from memory to the L2 cache it comes as soon as the tile is known.
  __device__ __forceinline__ void prefetch_q(const Tile &t) const {
    static_assert(C::kGroups * C::kSlabs <= 32);
    if (lane_ < C::kGroups * C::kSlabs && t.chunks > 0)
      tma_prefetch_4d(&a_.q_map, lane_ % C::kSlabs * C::kSlabColumns, t.q_row + lane_ / C::kSlabs * 64, t.head_q, t.q_batch);
  }
  __device__ __forceinline__ void want_tile() const { mbarrier_arrive_if(lane_ == 0, tile_wanted()); }

  // A copy of the next description.
  __device__ __forceinline__ Tile take_tile(Slot<C::kTileSlots> &slot) const {
    mbarrier_wait(tile_full(slot.stage()), slot.phase());
    const Tile t = tile(slot.stage());
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, tile_empty(slot.stage()));
    slot.advance();
    return t;
  }

  __device__ __forceinline__ void fetch_q(const Tile &t, const Slot<C::kQStages> &q, int group) const {
    mbarrier_wait(q_empty(q.stage(), group), q.phase() ^ 1);
    if (elect_one()) {
      mbarrier_arrive_expect_tx(q_full(q.stage(), group), C::kQGroupBytes);
#pragma unroll
      for (int s = 0; s < C::kSlabs; ++s)
        tma_load_4d(q_tile(q.stage()) + group * C::kQGroupBytes + s * 64 * 128, &a_.q_map, q_full(q.stage(), group),
                    s * C::kSlabColumns, t.q_row + group * 64, t.head_q, t.q_batch, kEvictFirst);
    }
  }
  __device__ __forceinline__ void fetch_tile(const Tile &t, Slot<C::kQStages> &q, Slot<C::kStages> &k,
                                             Slot<C::kStages> &v) const {
    const auto fetch_k = [&](int chunk) {
      mbarrier_wait(k_empty(k.stage()), k.phase() ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(k_full(k.stage()), C::kKBytes);
#pragma unroll
        for (int s = 0; s < C::kSlabs; ++s)
          tma_load_4d(k_tile(k.stage()) + s * kKeys * 128, &a_.k_map, k_full(k.stage()), s * C::kSlabColumns,
                      t.k_row + chunk * kKeys, t.head_k, t.k_batch, kEvictLast);
      }
      k.advance();
    };
    fetch_k(t.chunk(0));
    if (C::kQueryWarps == 0) {
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g) fetch_q(t, q, g);
      q.advance();
    }
    for (int i = 0; i < t.chunks; ++i) {
      if (i + 1 < t.chunks) fetch_k(t.chunk(i + 1));
      mbarrier_wait(v_empty(v.stage()), v.phase() ^ 1);
      if (elect_one()) {
        mbarrier_arrive_expect_tx(v_full(v.stage()), C::kVFetched);
        if constexpr (C::kFp8) {
          tma_load_4d(v_tile(v.stage()), &a_.v_map, v_full(v.stage()), t.v_key + t.chunk(i) * kKeys, 0, t.head_k, t.k_batch,
                      kEvictLast);
        } else {
#pragma unroll
          for (int s = 0; s < C::kSlabsV; ++s)
            tma_load_4d(v_tile(v.stage()) + s * kKeys * 128, &a_.v_map, v_full(v.stage()), s * 64, t.k_row + t.chunk(i) * kKeys,
                        t.head_k, t.k_batch, kEvictLast);
        }
      }
      v.advance();
      if (i == max(t.chunks - kPlanningChunks, 0)) want_tile();
    }
  }

 protected:
  const ForwardParams &a_;
  const Problem &p_;
  Tile *const tiles_;
  const uint32_t shared_;
  const int lane_, warp_;  // warp_ within the group

 private:
  PackedTiles<C::kRows> packed_;  // the planning warp's
};

}  // namespace fa::cuda::sm90
