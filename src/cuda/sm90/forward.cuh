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

#include "cuda/common/hopper.cuh"
#include "cuda/sm90/forward_rows.cuh"

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
      give_registers<C::kProducerRegisters>();
      if (warp_ == kFetchWarp) {
        fetch();
      } else if (warp_ == kPlanWarp) {
        plan(any);
      } else if constexpr (C::kQueryWarps > 0) {
        fetch_queries(warp_ - kFirstQueryWarp);
      }
    } else {
      take_registers<C::kConsumerRegisters>();
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
    const uint64_t q = kShort ? rows_operand(q_tile(q_.at()) + group_ * C::kQGroupBytes)
                              : operand(uniform_rows_operand(0), 0, q_.at(), C::kQBytes, group_, C::kQGroupBytes),
                   k = operand(uniform_rows_operand(0), C::kQStages * C::kQBytes, k_.at(), C::kKBytes);
#pragma unroll
    for (int d = 0; d < C::kD / C::kStepColumns; ++d) {
      Product<Element, kKeys>::rows_rows(s_, advance_operand(q, d / 4 * 64 * 128 + d % 4 * 32),
                                         advance_operand(k, d / 4 * kKeys * 128 + d % 4 * 32), d != 0);
    }
    products_commit();
  }

  // out += P V of the next chunk of V, started; the first one of a tile overwrites.
  __device__ __forceinline__ void start_out(bool first) {
    const uint64_t v = operand(C::kFp8 ? uniform_rows_operand(0) : uniform_columns_operand<kKeys>(0),
                               C::kQStages * C::kQBytes + C::kStages * C::kKBytes, v_.at(), C::kVBytes);
#pragma unroll
    for (int n = 0; n < Block::kSteps; ++n) {
      if constexpr (C::kFp8) {
        Product<Element, C::kDv>::registers_rows(out_, weights_[n], advance_operand(v, n * 32), n != 0 || !first);
      } else {
        Product<Element, C::kDv>::registers_columns(out_, weights_[n], advance_operand(v, n * 2048), n != 0 || !first);
      }
    }
    products_commit();
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
      barrier_wait(tile_full(slot_.at()), slot_.parity());
      const Tile &t = tile(slot_.at());
      const int begin = t.begin[group_], edges = t.edges[group_], chunks = t.chunks;
      if (begin >= chunks) {  // no rows, no keys, or no more tiles
        if (pending) finish_before(only);
        pending = false;
        if (chunks < 0) {
          if (C::kOutSlabs > 0 && lane_ == 0) copies_wait_read();  // shared memory ends with the block
          break;
        }
        pass(t);
        slot_.step();
        continue;
      }
      if (t.row0 + C::kRows > t.seqlen_q) store_unused_rows(t);
      barrier_wait(q_full(q_.at(), group_), q_.parity());
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
      if (kEarly && i < chunks) barrier_wait(k_full(k_.at()), k_.parity());
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
      finish_sums(tile(slot_.at()));
      pending = true;
      only = begin + 1 == chunks;
      q_.step();
      slot_.step();
    }
  }

  __device__ __forceinline__ const Tile &tile_before() const { return tile((slot_.at() + C::kTileSlots - 1) % C::kTileSlots); }

  // The last weights of the tile before meet V, and nothing else is to be done beside.
  __device__ __forceinline__ void finish_before(bool only) {
    barrier_wait(v_full(v_.at()), v_.parity());
    if (only) clear_tail(tile_before());
    begin_products();
    start_out(only);
    products_wait<0>();
    hold(out_);
    barrier_arrive_if(lane_ == 0, v_empty(v_.at()));
    v_.step();
    complete_before();
  }

  // A tile of which this group sees nothing.
  __device__ __forceinline__ void pass(const Tile &t) {
    store_unused_rows(t);
    store_blind_rows(t);
    const int chunks = t.chunks;
    if (chunks > 0) {
      barrier_wait(q_full(q_.at(), group_), q_.parity());
      barrier_arrive_if(lane_ == 0, q_empty(q_.at(), group_));
      q_.step();
    }
    for (int i = 0; i < chunks; ++i) {
      skip_keys();
      skip_values();
    }
    __syncwarp();
    barrier_arrive_if(lane_ == 0, tile_empty(slot_.at()));
  }

  // A chunk that others see. It has to be there before it can be let go.
  __device__ __forceinline__ void skip_keys() {
    barrier_wait(k_full(k_.at()), k_.parity());
    barrier_arrive_if(lane_ == 0, k_empty(k_.at()));
    k_.step();
  }
  __device__ __forceinline__ void skip_values() {
    barrier_wait(v_full(v_.at()), v_.parity());
    barrier_arrive_if(lane_ == 0, v_empty(v_.at()));
    v_.step();
  }

  // The first chunk of a tile may hold rows of V past the end of the sequence: unused ones, or the next sequence. What is in them, NaN
  // included, must not count. Every group clears all of them: none waits for another.
  __device__ __forceinline__ void clear_tail(const Tile &t) const {
    if (C::kFp8 || (p_.k_lengths.cu == nullptr && p_.k_lengths.used == nullptr)) return;  // the copy of V has zeros there
    const int used = t.seqlen_k - t.chunk(t.begin[group_]) * kKeys;
    if (used >= kKeys) return;
    const uint32_t v = v_tile(v_.at());
    for (int n = used * 8 + (threadIdx.x & 127); n < kKeys * 8; n += 128)
#pragma unroll
      for (int s = 0; s < C::kSlabsV; ++s) st_shared_16(v + s * kKeys * 128 + n * 16, 0, 0, 0, 0);
    shared_fence_for_copies();
    named_barrier(1 + group_, 128);
  }

  __device__ __forceinline__ void begin_products() {
    hold(s_);
    hold(out_);
    hold(weights_);
    products_begin();
  }

  // Weights of chunk i under the out of the chunk before it, which is the last one of the tile before when kFirst. `out`: there is one;
  // `first`: it is the first one of its tile.
  template <bool kFirst>
  __device__ __forceinline__ void step(const Tile &t, int i, int edges, int chunks, bool out, bool first) {
    // In front of the very first chunk, the product runs on whatever is there and nobody looks at it: one code serves all tiles.
    const auto await_values = [&] {
      if (!out) return;
      barrier_wait(v_full(v_.at()), v_.parity());
      if (first) clear_tail(kFirst ? tile_before() : t);
    };
    barrier_wait(k_full(k_.at()), k_.parity());
    if (!kEarly) await_values();
    begin_products();
    start_scores();
    const bool edge = i < edges;
    uint32_t seen[2];
    if (kRoomy && edge) find_seen(t, t.chunk(i) * kKeys, seen);  // under the products
    if (kEarly) await_values();
    products_begin();
    start_out(first);
    products_wait<1>();
    hold(s_);
    barrier_arrive_if(lane_ == 0, k_empty(k_.at()));
    barrier_arrive_if(lane_ == 0 && i + 1 == chunks, q_empty(q_.at(), group_));
    k_.step();
    if constexpr (C::kScored) score(t, t.chunk(i) * kKeys);
    if (edge) {
      if (!kRoomy) find_seen(t, t.chunk(i) * kKeys, seen);
      mask_scores(seen);
    }
    const bool grown = exponentials();
    order_after(sum_[0] + sum_[1]);
    products_wait<0>();
    hold(out_);
    hold(weights_);
    round_weights();  // before anything else: S is free from here on
    if (out) {
      barrier_arrive_if(lane_ == 0, v_empty(v_.at()));
      v_.step();
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
      barrier_wait(k_full(k_.at()), k_.parity());
      barrier_wait(v_full(v_.at()), v_.parity());
    }
    begin_products();
    start_scores();
    if (kEarly) {
      barrier_wait(v_full(v_.at()), v_.parity());
      products_begin();
    }
    start_out(first);
    products_wait<1>();
    hold(s_);
    barrier_arrive_if(lane_ == 0, k_empty(k_.at()));
    barrier_arrive_if(lane_ == 0 && last, q_empty(q_.at(), group_));
    k_.step();
    if (kEarly && !last) barrier_wait(k_full(k_.at()), k_.parity());
    if constexpr (C::kScored) score(t, t.chunk(i) * kKeys);
    float sum[2] = {0.f, 0.f};
    bool large;  // the maximum has to be raised
    if constexpr (kLateMaximum) {
      weigh(sum);
      large = __any_sync(~0u, C::kFp8 ? !(fmaxf(sum[0], sum[1]) <= Block::kMostSum) : !(sum[0] + sum[1] <= kLargeSum));
    } else {
      large = exponentials();
    }
    order_after(kLateMaximum ? sum[0] + sum[1] + sum_[0] : sum_[0] + sum_[1]);
    products_wait<0>();
    hold(out_);
    hold(weights_);
    barrier_arrive_if(lane_ == 0, v_empty(v_.at()));
    v_.step();
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
    barrier_arrive_if(lane_ == 0, tile_empty((slot_.at() + C::kTileSlots - 1) % C::kTileSlots));
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
