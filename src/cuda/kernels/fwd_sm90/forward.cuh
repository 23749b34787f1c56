// SPDX-License-Identifier: Apache-2.0
// Exact attention forward with the asynchronous products of sm_90a.
//
// One block of threads a multiprocessor (or kBlocks) takes tiles of kRows query rows of one head, longest first, from a counter. One warp
// plans: it writes descriptions of the next tiles (tile.cuh) into a ring. One warp fetches K and V in chunks of kChunk keys through rings
// of kStages, and Q of the next tile while the current one is worked on; where Q has no second place, other warps do that. Each of
// kGroups warpgroups owns 64 rows: scores S and out in registers, the weights P as left operand straight from registers.
//
//   for every chunk, through all tiles:
//       S = Q K^T starts; out += P V of the chunk before starts
//       S is done: mask, P = exp2(S - m) while out += P V runs
//       out is done; if that was the last chunk of its tile, its rows are written
//       P is rounded
//
// The first scores of a tile are under way while the rows of the tile before are finished: the tensor cores need not wait for either.
//
// The row maximum m may lag behind the true one by 2^8, as in the sm_80 kernel: the usual chunk leaves out alone. Up to 128 columns the
// bulk does not even look for it: P is made with m as it is, and where its sum turns out too large m is raised afterwards.
//
// Chunks in which some pair is masked come first. A masked weight is zero, and zero times a NaN or Inf in V is NaN: when they have left
// anything in out that is not finite, their part is computed again pair by pair (`repair`).
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90/forward_rows.cuh"

namespace fa::cuda::sm90 {

template <class C>
class Forward : private ForwardRows<C> {
 public:
  using Block = ForwardRows<C>;
  using typename Block::Element;
  using typename Block::Tile;
  static constexpr int kKeys = C::kChunk;
  // At 256 columns the products take the time, and there are no registers to spare.
  static constexpr bool kRoomy = C::kDv < 256;
  // A step waits for V behind the start of S, and for K of the next one before its exponentials. Three groups gain nothing by that.
  static constexpr bool kEarly = kRoomy && C::kGroups == 2;
  // In the bulk P is made with the maximum as it is, and sums tell when that was too low. What is done then takes registers.
  static constexpr bool kLateMaximum = C::kDv <= 128 && !C::kScored;

  using Block::Block;

  __device__ __forceinline__ void run() {
    bool any = false;  // the first tile is worth doing
    if (threadIdx.x < 128) {
      if (warp_ == kFetchWarp) {
        if (elect_one()) init_barriers();
      } else if (warp_ == kPlanWarp) {
        any = plan_first();
      }
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (warp_ == kFetchWarp) {
        fetch();
      } else if (warp_ == kPlanWarp) {
        plan(any);
      } else if constexpr (C::kQueryWarps > 0) {
        fetch_queries(warp_ - kFirstQueryWarp);
      }
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      group_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128 - 1), 0);  // the same for the warp, and known to be
      consume();
    }
  }

 private:
  static constexpr int kFetchWarp = 0, kPlanWarp = 1, kFirstQueryWarp = 2;
  template <int kSize>
  using Slot = typename Block::template Slot<kSize>;

  using Block::exponentials, Block::find_seen, Block::finish_sums, Block::mask_scores, Block::mend, Block::raise_late,
      Block::round_weights;
  using Block::fetch, Block::fetch_queries, Block::init_barriers, Block::plan, Block::plan_first;
  using Block::group_, Block::lane_, Block::p_, Block::shared_, Block::warp_;
  using Block::k_empty, Block::k_full, Block::k_tile, Block::q_empty, Block::q_full, Block::q_tile, Block::v_empty,
      Block::v_full, Block::v_tile;
  using Block::out_, Block::out_max_, Block::s_, Block::sum_, Block::max_, Block::weights_;
  using Block::row_of, Block::scale_out, Block::score, Block::store_blind_rows, Block::store_rows, Block::store_unused_rows,
      Block::set_scale, Block::put_aside, Block::take_parts, Block::weigh;
  using Block::tile, Block::tile_empty, Block::tile_full;

  // ------------------------------------------------------------------------------------------------------------------
  // Products
  // ------------------------------------------------------------------------------------------------------------------

  // Of an operand that would lie at address 0, the one at place n of a ring (and part m of it). One addition stands between the place and
  // the product, not an address and what makes a descriptor of it.
  __device__ __forceinline__ uint64_t operand(uint64_t at_zero, int offset, int n, int bytes, int m = 0,
                                              int part_bytes = 0) const {
    const int moved = (offset >> 4) + n * (bytes >> 4) + m * (part_bytes >> 4);
    return (at_zero & 0xFFFFFFFF00000000) | (static_cast<uint32_t>(at_zero) + (shared_ >> 4) + static_cast<uint32_t>(moved));
  }

  // S = Q K^T of the next chunk of K, started.
  __device__ __forceinline__ void start_scores() {
    constexpr bool kShort = C::kFp8 || (C::kScored && !kRoomy);  // of registers: descriptors of Q would be kept in them
    const uint64_t q = kShort ? descriptor_k_major(q_tile(q_.stage()) + group_ * C::kQGroupBytes)
                              : operand(descriptor_k_major_uniform(0), 0, q_.stage(), C::kQBytes, group_, C::kQGroupBytes),
                   k = operand(descriptor_k_major_uniform(0), C::kQStages * C::kQBytes, k_.stage(), C::kKBytes);
#pragma unroll
    for (int d = 0; d < C::kD / C::kStepColumns; ++d) {
      Wgmma<Element, kKeys>::ss_k_k(s_, advance_descriptor(q, d / 4 * 64 * 128 + d % 4 * 32),
                                    advance_descriptor(k, d / 4 * kKeys * 128 + d % 4 * 32), d != 0);
    }
    wgmma_commit();
  }

  // out += P V of the next chunk of V, started; the first one of a tile overwrites.
  __device__ __forceinline__ void start_out(bool first) {
    const uint64_t v = operand(C::kFp8 ? descriptor_k_major_uniform(0) : descriptor_mn_major_uniform<kKeys>(0),
                               C::kQStages * C::kQBytes + C::kStages * C::kKBytes, v_.stage(), C::kVBytes);
#pragma unroll
    for (int n = 0; n < Block::kSteps; ++n) {
      if constexpr (C::kFp8) {
        Wgmma<Element, C::kDv>::rs_k(out_, weights_[n], advance_descriptor(v, n * 32), n != 0 || !first);
      } else {
        Wgmma<Element, C::kDv>::rs_mn(out_, weights_[n], advance_descriptor(v, n * 2048), n != 0 || !first);
      }
    }
    wgmma_commit();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over tiles and chunks
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void consume() {
#pragma unroll
    for (int n = 0; n < Block::kSteps; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) weights_[n][r] = 0;
    bool pending = false;  // the last weights of the tile before have not met V yet
    bool only = true;      // and they are its only ones
    while (true) {
      mbarrier_wait(tile_full(slot_.stage()), slot_.phase());
      const Tile &t = tile(slot_.stage());
      const int begin = t.begin[group_], edges = t.edges[group_], chunks = t.chunks;
      if (begin >= chunks) {  // no rows, no keys, or no more tiles
        if (pending) finish_before(only);
        pending = false;
        if (chunks < 0) {
          if (C::kOutSlabs > 0 && lane_ == 0) bulk_wait_group_read();  // shared memory ends with the block
          break;
        }
        pass(t);
        slot_.advance();
        continue;
      }
      if (t.row0 + C::kRows > t.seqlen_q) store_unused_rows(t);
      mbarrier_wait(q_full(q_.stage(), group_), q_.phase());
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Finite, so that -inf minus it is -inf. What stands in unused rows must not raise it, as all rows of a warp do that together.
        max_[r] = row_of(t, r) < t.seqlen_q ? -1e30f : 1e30f;
        sum_[r] = 0.f;
      }
      set_scale(t);
      for (int n = 0; n < begin; ++n) skip_keys();
      step<true>(t, begin, edges, chunks, pending, only);
      int i = begin + 1;
      const int head = Block::bulk_begin(t, begin, edges);
#pragma unroll 1
      for (; i < head; ++i) step<false>(t, i, edges, chunks, true, i == begin + 1);
      if (kEarly && i < chunks) mbarrier_wait(k_full(k_.stage()), k_.phase());
      bool fresh = i == begin + 1, more = false;  // fp8: out begins anew; some of it has been put aside
#pragma unroll 1
      for (; i < chunks; ++i) {
        inner_step(t, i, i + 1 == chunks, C::kFp8 ? fresh : i == begin + 1);
        if constexpr (C::kFp8) {
          fresh = (i + 1) % Block::kPartChunks == 0 && i + 1 < chunks;
          if (fresh) {
            put_aside(more);
            more = true;
          }
        }
      }
      finish_sums(tile(slot_.stage()));
      pending = true;
      only = begin + 1 == chunks;
      q_.advance();
      slot_.advance();
    }
  }

  __device__ __forceinline__ const Tile &tile_before() const {
    return tile((slot_.stage() + C::kTileSlots - 1) % C::kTileSlots);
  }

  // The last weights of the tile before meet V, and nothing else is to be done beside.
  __device__ __forceinline__ void finish_before(bool only) {
    mbarrier_wait(v_full(v_.stage()), v_.phase());
    if (only) clear_tail(tile_before());
    begin_products();
    start_out(only);
    wgmma_wait<0>();
    fence_operand(out_);
    mbarrier_arrive_if(lane_ == 0, v_empty(v_.stage()));
    v_.advance();
    complete_before();
  }

  // A tile of which this group sees nothing.
  __device__ __forceinline__ void pass(const Tile &t) {
    store_unused_rows(t);
    store_blind_rows(t);
    const int chunks = t.chunks;
    if (chunks > 0) {
      mbarrier_wait(q_full(q_.stage(), group_), q_.phase());
      mbarrier_arrive_if(lane_ == 0, q_empty(q_.stage(), group_));
      q_.advance();
    }
    for (int i = 0; i < chunks; ++i) {
      skip_keys();
      skip_values();
    }
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, tile_empty(slot_.stage()));
  }

  // A chunk that others see. It has to be there before it can be let go.
  __device__ __forceinline__ void skip_keys() {
    mbarrier_wait(k_full(k_.stage()), k_.phase());
    mbarrier_arrive_if(lane_ == 0, k_empty(k_.stage()));
    k_.advance();
  }
  __device__ __forceinline__ void skip_values() {
    mbarrier_wait(v_full(v_.stage()), v_.phase());
    mbarrier_arrive_if(lane_ == 0, v_empty(v_.stage()));
    v_.advance();
  }

  // The first chunk of a tile may hold rows of V past the end of the sequence: unused ones, or the next sequence. What is in them, NaN
  // included, must not count. Every group clears all of them: none waits for another.
  __device__ __forceinline__ void clear_tail(const Tile &t) const {
    if (C::kFp8 || (p_.k_lengths.cu == nullptr && p_.k_lengths.used == nullptr)) return;  // the copy of V has zeros there
    const int used = t.seqlen_k - t.chunk(t.begin[group_]) * kKeys;
    if (used >= kKeys) return;
    const uint32_t v = v_tile(v_.stage());
    for (int n = used * 8 + (threadIdx.x & 127); n < kKeys * 8; n += 128)
#pragma unroll
      for (int s = 0; s < C::kSlabsV; ++s) st_shared_16(v + s * kKeys * 128 + n * 16, 0, 0, 0, 0);
    fence_proxy_async();
    named_barrier(1 + group_, 128);
  }

  __device__ __forceinline__ void begin_products() {
    fence_operand(s_);
    fence_operand(out_);
    fence_operand(weights_);
    wgmma_fence();
  }

  // Weights of chunk i under the out of the chunk before it, which is the last one of the tile before when kFirst. `out`: there is one;
  // `first`: it is the first one of its tile.
  template <bool kFirst>
  __device__ __forceinline__ void step(const Tile &t, int i, int edges, int chunks, bool out, bool first) {
    // In front of the very first chunk, the product runs on whatever is there and nobody looks at it: one code serves all tiles.
    const auto await_values = [&] {
      if (!out) return;
      mbarrier_wait(v_full(v_.stage()), v_.phase());
      if (first) clear_tail(kFirst ? tile_before() : t);
    };
    mbarrier_wait(k_full(k_.stage()), k_.phase());
    if (!kEarly) await_values();
    begin_products();
    start_scores();
    const bool edge = i < edges;
    uint32_t seen[2];
    if (kRoomy && edge) find_seen(t, t.chunk(i) * kKeys, seen);  // under the products
    if (kEarly) await_values();
    wgmma_fence();
    start_out(first);
    wgmma_wait<1>();
    fence_operand(s_);
    mbarrier_arrive_if(lane_ == 0, k_empty(k_.stage()));
    mbarrier_arrive_if(lane_ == 0 && i + 1 == chunks, q_empty(q_.stage(), group_));
    k_.advance();
    if constexpr (C::kScored) score(t, t.chunk(i) * kKeys);
    if (edge) {
      if (!kRoomy) find_seen(t, t.chunk(i) * kKeys, seen);
      mask_scores(seen);
    }
    const bool grown = exponentials();
    compute_before_wait(sum_[0] + sum_[1]);
    wgmma_wait<0>();
    fence_operand(out_);
    fence_operand(weights_);
    round_weights();  // before anything else: S is free from here on
    if (out) {
      mbarrier_arrive_if(lane_ == 0, v_empty(v_.stage()));
      v_.advance();
    }
    if constexpr (kFirst) {
      if (out) complete_before();
      for (int n = 0; n < i; ++n) skip_values();
      edges_only_ = edges == chunks;
    } else {
      if (i == edges) mend(t);
      if (grown) scale_out();
    }
    out_max_[0] = max_[0];
    out_max_[1] = max_[1];
  }

  // The same for the bulk of a tile: nothing masked, the chunk before in the same tile. With kEarly, K is there.
  __device__ __forceinline__ void inner_step(const Tile &t, int i, bool last, bool first) {
    if (!kEarly) {
      mbarrier_wait(k_full(k_.stage()), k_.phase());
      mbarrier_wait(v_full(v_.stage()), v_.phase());
    }
    begin_products();
    start_scores();
    if (kEarly) {
      mbarrier_wait(v_full(v_.stage()), v_.phase());
      wgmma_fence();
    }
    start_out(first);
    wgmma_wait<1>();
    fence_operand(s_);
    mbarrier_arrive_if(lane_ == 0, k_empty(k_.stage()));
    mbarrier_arrive_if(lane_ == 0 && last, q_empty(q_.stage(), group_));
    k_.advance();
    if (kEarly && !last) mbarrier_wait(k_full(k_.stage()), k_.phase());
    if constexpr (C::kScored) score(t, t.chunk(i) * kKeys);
    float sum[2] = {0.f, 0.f};
    bool large;  // the maximum has to be raised
    if constexpr (kLateMaximum) {
      weigh(sum);
      large = __any_sync(~0u, C::kFp8 ? !(fmaxf(sum[0], sum[1]) <= Block::kMostSum) : !(sum[0] + sum[1] <= kLargeSum));
    } else {
      large = exponentials();
    }
    compute_before_wait(kLateMaximum ? sum[0] + sum[1] + sum_[0] : sum_[0] + sum_[1]);
    wgmma_wait<0>();
    fence_operand(out_);
    fence_operand(weights_);
    mbarrier_arrive_if(lane_ == 0, v_empty(v_.stage()));
    v_.advance();
    if (large) {
      if constexpr (kLateMaximum) raise_late(t, t.chunk(i) * kKeys, sum);
      scale_out();
    }
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    round_weights();
  }

  // The tile before has all its out.
  __device__ __forceinline__ void complete_before() {
    const Tile &t = tile_before();
    if (edges_only_) mend(t);
    if constexpr (C::kFp8) take_parts(t);
    store_rows(t);
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, tile_empty((slot_.stage() + C::kTileSlots - 1) % C::kTileSlots));
  }

  Slot<C::kQStages> q_;
  Slot<C::kStages> k_, v_;
  Slot<C::kTileSlots> slot_;
  bool edges_only_ = false;  // the tile before has masked chunks only
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks) forward(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  Forward<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90
