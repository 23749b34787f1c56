// SPDX-License-Identifier: Apache-2.0
// Exact attention forward with the asynchronous products of sm_90a.
//
// One block of threads a multiprocessor takes tiles of kRows query rows of one head, longest first, from a counter. One warp plans: it
// writes descriptions of the next tiles (tile.cuh) into a ring. One warp fetches: K and V in chunks of kChunk keys through rings of
// kStages, and Q of the next tile while the current one is worked on. Each of kGroups warpgroups owns 64 rows: scores S and out in
// registers, the weights P as left operand straight from registers.
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

#include <math_constants.h>

#include "core/mask.h"
#include "cuda/common/hopper.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/score.cuh"
#include "cuda/sm90/forward_block.cuh"

namespace fa::cuda::sm90 {

constexpr float kLag = 8.0f;
constexpr float kLargeSum = 256.0f;  // 2^kLag

template <class C>
class Forward : private ForwardBlock<C> {
 public:
  using Block = ForwardBlock<C>;
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
    if (threadIdx.x < 128) {
      if (warp_ == kFetchWarp) {
        if (elect_one()) init_barriers();
      } else if (warp_ == kPlanWarp) {
        plan_first();
      }
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      give_registers<C::kProducerRegisters>();
      if (warp_ == kFetchWarp) {
        fetch();
      } else if (warp_ == kPlanWarp) {
        plan();
      }
    } else {
      take_registers<C::kConsumerRegisters>();
      group_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128 - 1), 0);  // the same for the warp, and known to be
      consume();
    }
  }

 private:
  static constexpr int kFetchWarp = 0, kPlanWarp = 1;
  template <int kSize>
  using Slot = typename Block::template Slot<kSize>;

  using Block::a_;
  using Block::fetch;
  using Block::init_barriers;
  using Block::k_empty;
  using Block::k_full;
  using Block::k_tile;
  using Block::lane_;
  using Block::p_;
  using Block::plan;
  using Block::plan_first;
  using Block::q_empty;
  using Block::q_full;
  using Block::q_tile;
  using Block::tile;
  using Block::tile_empty;
  using Block::tile_full;
  using Block::v_empty;
  using Block::v_full;
  using Block::v_tile;
  using Block::warp_;

  // ------------------------------------------------------------------------------------------------------------------
  // Products
  // ------------------------------------------------------------------------------------------------------------------

  // S = Q K^T of the next chunk of K, started.
  __device__ __forceinline__ void start_scores() {
    const uint64_t q = rows_operand(q_tile(q_.at()) + group_ * C::kQGroupBytes), k = rows_operand(k_tile(k_.at()));
#pragma unroll
    for (int d = 0; d < C::kD / 16; ++d) {
      Product<Element, kKeys>::rows_rows(s_, advance_operand(q, d / 4 * 64 * 128 + d % 4 * 32),
                                         advance_operand(k, d / 4 * kKeys * 128 + d % 4 * 32), d != 0);
    }
    products_commit();
  }

  // out += P V of the next chunk of V, started; the first one of a tile overwrites.
  __device__ __forceinline__ void start_out(bool first) {
    const uint64_t v = columns_operand<kKeys>(v_tile(v_.at()));
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      Product<Element, C::kDv>::registers_columns(out_, weights_[n], advance_operand(v, n * 2048), n != 0 || !first);
    }
    products_commit();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over tiles and chunks
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void consume() {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n)
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
        if (chunks < 0) break;
        pass(t);
        slot_.step();
        continue;
      }
      if (t.row0 + C::kRows > t.seqlen_q) store_unused_rows(t);
      barrier_wait(q_full(q_.at()), q_.parity());
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Finite, so that -inf minus it is -inf. What stands in unused rows must not raise it, as all rows of a warp do that together.
        max_[r] = row_of(t, r) < t.seqlen_q ? -1e30f : 1e30f;
        sum_[r] = 0.f;
      }
      if (begin > 0) skip_keys();
      step<true>(t, begin, edges, chunks, pending, only);
      const int head = min(chunks, max(edges + 1, begin + 2));
      int i = begin + 1;
#pragma unroll 1
      for (; i < head; ++i) step<false>(t, i, edges, chunks, true, i == begin + 1);
      if (kEarly && i < chunks) barrier_wait(k_full(k_.at()), k_.parity());
#pragma unroll 1
      for (; i < chunks; ++i) inner_step(t, i, i + 1 == chunks);
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
      barrier_wait(q_full(q_.at()), q_.parity());
      barrier_arrive_if(lane_ == 0, q_empty(q_.at()));
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
    if (p_.k_lengths.cu == nullptr && p_.k_lengths.used == nullptr) return;
    const int used = t.seqlen_k - t.chunk(t.begin[group_]) * kKeys;
    if (used >= kKeys) return;
    const uint32_t v = v_tile(v_.at());
    for (int n = used * 8 + (threadIdx.x & 127); n < kKeys * 8; n += 128)
#pragma unroll
      for (int s = 0; s < C::kSlabsV; ++s) st_shared_16(v + s * kKeys * 128 + n * 16, 0, 0, 0, 0);
    shared_fence_for_copies();
    named_barrier_sync(1 + group_, 128);
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
    barrier_arrive_if(lane_ == 0 && i + 1 == chunks, q_empty(q_.at()));
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
      if (i > 0) skip_values();
      edges_only_ = edges == chunks;
    } else {
      if (i == edges) mend(t);
      if (grown) scale_out();
    }
    out_max_[0] = max_[0];
    out_max_[1] = max_[1];
  }

  // The same for the bulk of a tile: nothing masked, the chunk before in the same tile and not its first. With kEarly, K is there.
  __device__ __forceinline__ void inner_step(const Tile &t, int i, bool last) {
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
    start_out(false);
    products_wait<1>();
    hold(s_);
    barrier_arrive_if(lane_ == 0, k_empty(k_.at()));
    barrier_arrive_if(lane_ == 0 && last, q_empty(q_.at()));
    k_.step();
    if (kEarly && !last) barrier_wait(k_full(k_.at()), k_.parity());
    if constexpr (C::kScored) score(t, t.chunk(i) * kKeys);
    float sum[2] = {0.f, 0.f};
    bool large;  // the maximum has to be raised
    if constexpr (kLateMaximum) {
      weigh(sum);
      large = __any_sync(~0u, !(sum[0] + sum[1] <= kLargeSum));
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

  __device__ __forceinline__ void scale_out() {
#pragma unroll
    for (int j = 0; j < C::kDv / 2; ++j) out_[j] *= factor_[(j >> 1) & 1];
  }

  // The tile before has all its out.
  __device__ __forceinline__ void complete_before() {
    const Tile &t = tile_before();
    if (edges_only_) mend(t);
    store_rows(t);
    __syncwarp();
    barrier_arrive_if(lane_ == 0, tile_empty((slot_.at() + C::kTileSlots - 1) % C::kTileSlots));
  }

  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) weights_[n][r] = pack2<Element>(s_[8 * n + 2 * r], s_[8 * n + 2 * r + 1]);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int row_of(const Tile &t, int r) const {
    return t.row0 + group_ * 64 + warp_ * 16 + (lane_ >> 2) + 8 * r;
  }
  // What turns S into logits in base 2.
  __device__ __forceinline__ float scale() const { return C::kScored ? 1.f : p_.softmax_scale * kLog2e; }

  // S with softcap and ALiBi, in base 2, keys from key0 on.
  __device__ __forceinline__ void score(const Tile &t, int key0) {
    const ScoreScale product(p_);
    if (product.cap > 0) {
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j) s_[j] = product.capped(s_[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j) s_[j] = product.scaled(s_[j]);
    }
    if (const float slope = t.alibi; slope != 0.f) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto distance = static_cast<float>(row_of(t, r) + t.seqlen_k - t.seqlen_q - key0 - 2 * (lane_ & 3));
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) s_[4 * j + 2 * r + e] -= slope * fabsf(distance - static_cast<float>(8 * j + e));
      }
    }
  }
  // The same for one pair.
  __device__ __forceinline__ float logit(const Tile &t, float raw, int row, int key) const {
    if constexpr (!C::kScored) return raw * scale();
    const ScoreScale product(p_);
    const float x = product.cap > 0 ? product.capped(raw) : product.scaled(raw);
    return x - t.alibi * fabsf(static_cast<float>(row + t.seqlen_k - t.seqlen_q - key));
  }

  // S to P, in place. True if m was raised: then out has to be multiplied by factor_.
  __device__ __forceinline__ bool exponentials() {
    const float c = scale();
    float top[4] = {fmaxf(s_[0], s_[1]), fmaxf(s_[2], s_[3]), fmaxf(s_[4], s_[5]), fmaxf(s_[6], s_[7])};
#pragma unroll
    for (int j = 8; j < kKeys / 2; j += 2) top[(j / 2) % 4] = fmaxf(top[(j / 2) % 4], fmaxf(s_[j], s_[j + 1]));
    top[0] = fmaxf(top[0], top[2]) * c;
    top[1] = fmaxf(top[1], top[3]) * c;
    const bool grown = __any_sync(~0u, top[0] - kLag > max_[0] || top[1] - kLag > max_[1]);
    if (grown) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = top[r];
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        const float raised = fmaxf(max_[r], x);
        factor_[r] = exp2_approx(max_[r] - raised);
        max_[r] = raised;
        sum_[r] *= factor_[r];
      }
    }
    float sum[2];
    weigh(sum);
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    return grown;
  }

  // S to P in place, with the maximum as it is, and the sums of this lane's two rows.
  __device__ __forceinline__ void weigh(float (&sum)[2]) {
    const float c = scale();
    float parts[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < kKeys / 2; ++j) {
      s_[j] = exp2_approx(fmaf(s_[j], c, -max_[(j >> 1) & 1]));
      parts[(j >> 1) & 3] += s_[j];
    }
    sum[0] = parts[0] + parts[2];
    sum[1] = parts[1] + parts[3];
  }

  // P that was made with a maximum too low by more than kLag, or holds NaN: the maximum is raised, and P and its sums are made relative to
  // it; out has still to be multiplied by factor_. Where fp32 does not hold them, from S again.
  __device__ __forceinline__ void raise_late(const Tile &t, int key0, float (&sum)[2]) {
    float raised[2];
    bool lost = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = 0.f;  // of what is not NaN
#pragma unroll
      for (int j = 0; j < kKeys / 4; ++j) top = fmaxf(top, s_[4 * (j / 2) + 2 * r + (j & 1)]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      // By the exponent of the largest, but by no more than exp2_approx still makes a number of.
      raised[r] = max_[r] + static_cast<float>(min(max((__float_as_int(top) >> 23) - 127, 0), 120));
      factor_[r] = exp2_approx(max_[r] - raised[r]);
      // Infinite, or max_ so large that it moves in coarse steps.
      lost |= !(fmaxf(top, sum[r]) * factor_[r] <= kLargeSum);
    }
    if (__any_sync(~0u, lost)) {
      factor_[0] = factor_[1] = 1.f;
      sum[0] = sum[1] = 0.f;
      scores_again(t, key0);
      exponentials();
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max_[r] = raised[r];
        sum_[r] *= factor_[r];
        sum[r] *= factor_[r];
      }
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j) s_[j] *= factor_[(j >> 1) & 1];
    }
  }

  // S of a chunk without masked pairs from global memory, shared out among lanes as in `repair`.
  __device__ __forceinline__ void scores_again(const Tile &t, int key0) {
    const Element *q = row_of_lane(t);
#pragma unroll 1
    for (int n = 0; n < kKeys; ++n) {
      const float x = dot(q, row_at(p_.k, t.k_batch, t.k_row + key0 + n, t.head_k));
      const int at = n - 2 * (lane_ & 3);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float mine = __shfl_sync(~0u, x, ((lane_ >> 2) + 8 * r) * 2);
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (at == 8 * j + e) s_[4 * j + 2 * r + e] = mine;
      }
    }
  }

  __device__ __forceinline__ RangeOf<int32_t> keys_of_row(const Tile &t, int row) const {
    return Diagonal<int32_t>(a_.limits, t.seqlen_q, t.seqlen_k).visible_keys({row, row + 1});
  }

  // Of the columns 0, 1, 8, 9, 16, 17, .. that a lane holds, those below `end`, as bits.
  static __device__ __forceinline__ uint32_t columns_below(int end) {
    const int count = 2 * (end >> 3) + min(end & 7, 2);
    return end <= 0 ? 0u : count >= 32 ? ~0u : (1u << count) - 1u;
  }
  // Of the keys from key0 on, those that this lane's two rows see, as bits.
  __device__ __forceinline__ void find_seen(const Tile &t, int key0, uint32_t (&seen)[2]) const {
    static_assert(kKeys <= 128);
    const int first = key0 + 2 * (lane_ & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RangeOf<int32_t> keys = keys_of_row(t, row_of(t, r));
      seen[r] = columns_below(keys.end - first) & ~columns_below(keys.begin - first);
    }
  }
  __device__ __forceinline__ void mask_scores(const uint32_t (&seen)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if ((seen[r] >> (2 * j + e) & 1) == 0) s_[4 * j + 2 * r + e] = -CUDART_INF_F;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // NaN and Inf in V that masked pairs would let through
  // ------------------------------------------------------------------------------------------------------------------

  // Called when out holds the edge chunks and nothing else.
  __device__ __forceinline__ void mend(const Tile &t) {
    float zero = 0.f;
#pragma unroll
    for (int j = 0; j < C::kDv / 2; ++j) zero = fmaf(out_[j], 0.f, zero);
    if (__any_sync(~0u, zero != 0.f)) repair(t);
  }

  // out of the edge chunks again, from the visible pairs alone and from global memory. Lane l takes half of the columns of the dot
  // products of row l / 2 of this warp.
  __device__ __forceinline__ void repair(const Tile &t) {
    const int row = row_of(t, 0) - (lane_ >> 2) + (lane_ >> 1);
    const RangeOf<int32_t> keys = keys_of_row(t, row);
    const int source = ((lane_ >> 1) & 7) * 4;  // a lane that holds this row's maximum
    const float low = __shfl_sync(~0u, out_max_[0], source), high = __shfl_sync(~0u, out_max_[1], source);
    const float max = (lane_ >> 4) ? high : low;
    const Element *q = row_of_lane(t);
#pragma unroll
    for (int j = 0; j < C::kDv / 2; ++j) out_[j] = 0.f;
#pragma unroll 1
    for (int i = t.begin[group_]; i < t.edges[group_]; ++i) {
      const int key0 = t.chunk(i) * kKeys;
#pragma unroll 1
      for (int key = key0; key < min(key0 + kKeys, t.seqlen_k); ++key) {
        const Element *v = row_at(p_.v, t.k_batch, t.k_row + key, t.head_k);
        const float x = dot(q, row_at(p_.k, t.k_batch, t.k_row + key, t.head_k));
        const bool visible = row < t.seqlen_q && key >= keys.begin && key < keys.end;
        const float weight = to_float<Element>(pack2<Element>(exp2_approx(logit(t, x, row, key) - max), 0.f) & 0xFFFFu);
        float w[2];
        bool seen[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int holder = ((lane_ >> 2) + 8 * r) * 2;
          w[r] = __shfl_sync(~0u, weight, holder);
          seen[r] = __shfl_sync(~0u, static_cast<int>(visible), holder) != 0;
        }
        v += 2 * (lane_ & 3);
        int columns;  // opaque, or the compiler keeps a comparison with every column in registers across the loop
        asm volatile("mov.u32 %0, %1;\n" : "=r"(columns) : "r"(static_cast<int>(p_.head_dim_v)));
#pragma unroll
        for (int j = 0; j < C::kDv / 8; ++j) {
          if (8 * j >= columns) continue;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float x = element(v, 8 * j + e);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              if (seen[r]) out_[4 * j + 2 * r + e] = fmaf(w[r], x, out_[4 * j + 2 * r + e]);
            }
          }
        }
      }
    }
  }

  // q of row lane_ / 2 of this warp, and its product with a row of k; the other lane of the row takes half of the columns.
  __device__ __forceinline__ const Element *row_of_lane(const Tile &t) const {
    const int row = t.row0 + group_ * 64 + warp_ * 16 + (lane_ >> 1);
    return row_at(p_.q, t.q_batch, t.q_row - t.row0 + min(row, t.seqlen_q - 1), t.head_q);
  }
  __device__ __forceinline__ float dot(const Element *q, const Element *k) const {
    float x = 0.f;
#pragma unroll 1
    for (int column = lane_ & 1; column < p_.head_dim; column += 2) x = fmaf(element(q, column), element(k, column), x);
    return x + __shfl_xor_sync(~0u, x, 1);
  }
  // One at a time: the accumulators leave no registers for loads ahead.
  static __device__ __forceinline__ float element(const Element *row, int column) {
    unsigned short bits;
    asm volatile("ld.global.u16 %0, [%1];\n" : "=h"(bits) : "l"(row + column));
    return to_float<Element>(bits);
  }
  static __device__ __forceinline__ Element *row_at(const Operand &x, int batch, int64_t row, int head) {
    return static_cast<Element *>(x.data) + batch * x.batch_stride + row * x.seq_stride + head * x.head_stride;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Results
  // ------------------------------------------------------------------------------------------------------------------

  // Completes the sums and writes lse. out has still to be multiplied by inverse_. Both rows at a time: a lone chain would wait at every
  // step.
  __device__ __forceinline__ void finish_sums(const Tile &t) {
    const int row = row_of(t, 0), rows = t.seqlen_q;
    float *lse = lse_at(t, row);
#pragma unroll
    for (int r = 0; r < 2; ++r) sum_[r] += __shfl_xor_sync(~0u, sum_[r], 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) sum_[r] += __shfl_xor_sync(~0u, sum_[r], 2);
    float factor[2] = {1.f, 1.f};
    if (p_.sink != nullptr) {
      const float sink = p_.sink[t.head_q * p_.sink_stride] * kLog2e;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float raised = fmaxf(max_[r], sink);
        factor[r] = exp2_approx(max_[r] - raised);
        sum_[r] = sum_[r] * factor[r] + exp2_approx(sink - raised);
        max_[r] = raised;
      }
    }
    float log[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      inverse_[r] = sum_[r] == 0.f ? 0.f : __fdividef(factor[r], sum_[r]);
      log[r] = sum_[r] == 0.f ? -CUDART_INF_F : (max_[r] + __log2f(sum_[r])) * kLn2;
    }
    if (p_.lse.data != nullptr && (lane_ & 3) == 0) {
      if (row < rows) *lse = log[0];
      if (row + 8 < rows) lse[8 * p_.lse.seq_stride] = log[1];
    }
  }

  __device__ __forceinline__ void store_rows(const Tile &t) const {
    if (a_.vector_out) {
      store_pieces<true>(t);
    } else {
      store_pieces<false>(t);
    }
  }
  // Sixteen bytes a lane: the four lanes that share a row exchange the pieces of four column blocks.
  template <bool kVectors>
  __device__ __forceinline__ void store_pieces(const Tile &t) const {
    const int quad = lane_ & 3, columns = static_cast<int>(p_.head_dim_v);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(t, r);
      Element *dst = out_at(t, row) + quad * 8;
      const int valid = row < t.seqlen_q ? columns - quad * 8 : 0;
#pragma unroll
      for (int j = 0; j < C::kDv / 8; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x[n] = pack2<Element>(out_[4 * (j + n) + 2 * r] * inverse_[r], out_[4 * (j + n) + 2 * r + 1] * inverse_[r]);
        transpose_quad(x, quad);
        store_elements(dst + j * 8, x, valid - j * 8, kVectors);
      }
    }
  }

  __device__ __forceinline__ float *lse_at(const Tile &t, int row) const {
    return p_.lse.data + t.lse + (row - t.row0) * p_.lse.seq_stride;
  }
  __device__ __forceinline__ Element *out_at(const Tile &t, int row) const {
    return static_cast<Element *>(p_.out.data) + t.out + (row - t.row0) * p_.out.seq_stride;
  }

  __device__ __forceinline__ void store_row(const Tile &t, int row, float lse) const {
    if (p_.lse.data != nullptr && lane_ == 0) *lse_at(t, row) = lse;
    auto *dst = reinterpret_cast<unsigned short *>(out_at(t, row));
    for (int column = lane_; column < p_.head_dim_v; column += 32) dst[column] = 0;
  }
  // Rows of this group that are used but see no key: out = 0, lse = -inf or the sink.
  __device__ __forceinline__ void store_blind_rows(const Tile &t) const {
    const float lse = p_.sink != nullptr ? p_.sink[t.head_q * p_.sink_stride] : -CUDART_INF_F;
    const int row0 = t.row0 + group_ * 64;
    for (int row = row0 + warp_; row < min(row0 + 64, t.seqlen_q); row += 4) store_row(t, row, lse);
  }
  // Rows that are not used.
  __device__ __forceinline__ void store_unused_rows(const Tile &t) const {
    for (int row = max(t.row0, t.seqlen_q) + group_ * 4 + warp_; row < t.unused_end; row += C::kGroups * 4)
      store_row(t, row, -CUDART_INF_F);
  }

  int group_;

  Slot<C::kQStages> q_;
  Slot<C::kStages> k_, v_;
  Slot<C::kTileSlots> slot_;
  float s_[kKeys / 2];
  uint32_t weights_[kKeys / 16][4];
  float out_[C::kDv / 2];
  float max_[2], sum_[2], factor_[2], inverse_[2];
  float out_max_[2];         // the maximum that out is relative to; kept up to date as long as out may have to be mended
  bool edges_only_ = false;  // the tile before has masked chunks only
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) forward(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  Forward<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90
