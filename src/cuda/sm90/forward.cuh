// SPDX-License-Identifier: Apache-2.0
// Exact attention forward with the asynchronous products of sm_90a.
//
// One block of threads a multiprocessor takes tiles of kRows query rows of one head, longest first, from a counter. One warp fetches: K and
// V in chunks of kChunk keys through rings of kStages, Q and the description of the next tile while the current one is worked on. Each of
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
// The row maximum m may lag behind the true one by 2^8, as in the sm_80 kernel: the usual chunk leaves out alone.
//
// Chunks in which some pair is masked come first. A masked weight is zero, and zero times a NaN or Inf in V is NaN: when they have left
// anything in out that is not finite, their part is computed again pair by pair (`repair`).
#pragma once

#include <math_constants.h>

#include "core/mask.h"
#include "cuda/common/hopper.cuh"
#include "cuda/common/score.cuh"
#include "cuda/sm90/forward.h"

namespace fa::cuda::sm90 {

template <typename Element_, int kD_, int kDv_, int kGroups_, int kChunk_, int kQStages_, int kStages_>
struct ForwardConfig {
  using Element = Element_;
  static constexpr int kD = kD_, kDv = kDv_, kGroups = kGroups_, kChunk = kChunk_, kQStages = kQStages_, kStages = kStages_;
  static constexpr int kTileSlots = 4;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kRows = kGroups * 64;
  static constexpr int kSlabs = (kD + 63) / 64, kSlabsV = (kDv + 63) / 64;
  static constexpr int kQGroupBytes = 64 * kSlabs * 128;
  static constexpr int kQBytes = kGroups * kQGroupBytes;
  static constexpr int kKBytes = kChunk * kSlabs * 128, kVBytes = kChunk * kSlabsV * 128;
  static constexpr int kBarrierOffset = kQStages * kQBytes + kStages * (kKBytes + kVBytes);
  static constexpr int kTileOffset = kBarrierOffset + (2 * kQStages + 4 * kStages + 2 * kTileSlots) * 8;
  static constexpr int kSharedBytes = kTileOffset + kTileSlots * 64;
  static constexpr int kConsumerRegisters = kGroups == 3 ? 160 : 240, kProducerRegisters = kGroups == 3 ? 32 : 24;
  static_assert(kChunk * 128 % 1024 == 0);
};

constexpr float kLag = 8.0f;

// A block of query rows of one head, and the chunks of keys it sees.
struct Tile {
  int64_t q_start;
  int batch, head_q;
  int row_block, row0;
  int seqlen_q, seqlen_k, slot_q;
  int first, chunks;          // chunks [first, first + chunks); chunks < 0: no more tiles
  int edge_left, edge_right;  // of these, how many at each end have masked pairs

  __device__ __forceinline__ int edges() const { return edge_left + edge_right; }
  // Chunks in the order of work: the right edge from the last one down, the left edge, the others from the last one down.
  __device__ __forceinline__ int chunk(int i) const {
    const int last = first + chunks - 1;
    if (i < edge_right || edge_left == 0) return last - i;
    const int left = i - edge_right;
    return left < edge_left ? first + left : last - (i - edge_left);
  }
};
static_assert(sizeof(Tile) <= 64);

template <class C>
class Forward {
 public:
  using Element = typename C::Element;
  static constexpr int kKeys = C::kChunk;

  __device__ __forceinline__ Forward(const ForwardParams &params, char *shared)
      : a_(params),
        p_(params.problem),
        tiles_(reinterpret_cast<Tile *>(shared + C::kTileOffset)),
        shared_(smem_address(shared)),
        lane_(threadIdx.x & 31),
        warp_((threadIdx.x >> 5) & 3) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int n = 0; n < C::kQStages; ++n) {
        barrier_init(q_full(n), 1);
        barrier_init(q_empty(n), C::kGroups * 4);
      }
      for (int n = 0; n < C::kStages; ++n) {
        barrier_init(k_full(n), 1);
        barrier_init(k_empty(n), C::kGroups * 4);
        barrier_init(v_full(n), 1);
        barrier_init(v_empty(n), C::kGroups * 4);
      }
      for (int n = 0; n < C::kTileSlots; ++n) {
        barrier_init(tile_full(n), 1);
        barrier_init(tile_empty(n), C::kGroups * 4);
      }
      barrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      give_registers<C::kProducerRegisters>();
      if (threadIdx.x < 32) produce();
    } else {
      take_registers<C::kConsumerRegisters>();
      group_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128 - 1), 0);  // the same for the warp, and known to be
      consume();
    }
  }

 private:
  // ------------------------------------------------------------------------------------------------------------------
  // Shared memory
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t q_tile(int n) const { return shared_ + n * C::kQBytes; }
  __device__ __forceinline__ uint32_t k_tile(int n) const { return shared_ + C::kQStages * C::kQBytes + n * C::kKBytes; }
  __device__ __forceinline__ uint32_t v_tile(int n) const { return k_tile(C::kStages) + n * C::kVBytes; }
  __device__ __forceinline__ uint32_t q_full(int n) const { return shared_ + C::kBarrierOffset + n * 8; }
  __device__ __forceinline__ uint32_t q_empty(int n) const { return q_full(C::kQStages + n); }
  __device__ __forceinline__ uint32_t k_full(int n) const { return q_full(2 * C::kQStages + n); }
  __device__ __forceinline__ uint32_t k_empty(int n) const { return k_full(C::kStages + n); }
  __device__ __forceinline__ uint32_t v_full(int n) const { return k_full(2 * C::kStages + n); }
  __device__ __forceinline__ uint32_t v_empty(int n) const { return k_full(3 * C::kStages + n); }

  __device__ __forceinline__ uint32_t tile_full(int n) const { return k_full(4 * C::kStages + n); }
  __device__ __forceinline__ uint32_t tile_empty(int n) const { return tile_full(C::kTileSlots + n); }
  __device__ __forceinline__ Tile &tile(int n) const { return tiles_[n]; }

  // A place in a ring and how often it has been passed, as parity.
  template <int kSize>
  struct Slot {
    int at = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void step() {
      if (++at == kSize) {
        at = 0;
        parity ^= 1;
      }
    }
  };

  // ------------------------------------------------------------------------------------------------------------------
  // Tiles
  // ------------------------------------------------------------------------------------------------------------------

  // Tiles are numbered longest first with a causal mask, section by section of heads.
  __device__ __forceinline__ Tile find_tile(int index) const {
    Tile t;
    const int heads = static_cast<int>(p_.heads_q), all_heads = static_cast<int>(p_.batch) * heads;
    const int per_section = a_.heads_per_section * a_.row_blocks;
    const int section = index / per_section, first_head = section * a_.heads_per_section;
    const int heads_here = min(a_.heads_per_section, all_heads - first_head);
    index -= section * per_section;
    t.row_block = index / heads_here;
    const int head = first_head + index - t.row_block * heads_here;
    if (p_.band.right < Band::kUnlimited) t.row_block = a_.row_blocks - 1 - t.row_block;
    t.batch = head / heads;
    t.head_q = head - t.batch * heads;
    const Sequence q = sequence_of(p_.q_lengths, t.batch), k = sequence_of(p_.k_lengths, t.batch);
    t.q_start = q.start;
    t.seqlen_q = static_cast<int>(q.len);
    t.seqlen_k = static_cast<int>(k.len);
    t.slot_q = static_cast<int>(q.slot);
    t.row0 = t.row_block * C::kRows;
    t.first = t.chunks = t.edge_left = t.edge_right = 0;
    if (t.row0 >= t.seqlen_q) return t;
    const Range rows{t.row0, min(t.row0 + C::kRows, t.seqlen_q)};
    const Range keys = visible_keys(p_.band, t.seqlen_q, t.seqlen_k, rows);
    if (keys.empty()) return t;
    t.first = static_cast<int>(keys.begin) / kKeys;
    const int end = (static_cast<int>(keys.end) + kKeys - 1) / kKeys;
    t.chunks = end - t.first;
    const Range inner = interior_keys(p_.band, t.seqlen_q, t.seqlen_k, rows);
    const int inner_begin = (static_cast<int>(inner.begin) + kKeys - 1) / kKeys,
              inner_end = static_cast<int>(inner.end) / kKeys;
    if (inner_begin >= inner_end) {
      t.edge_right = t.chunks;
    } else {
      t.edge_left = inner_begin - t.first;
      t.edge_right = end - inner_end;
    }
    return t;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Fetching
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void produce() {
    Slot<C::kQStages> q;
    Slot<C::kStages> k, v;
    Slot<C::kTileSlots> slot;
    if (elect_one()) {
      prefetch_map(&a_.q_map);
      prefetch_map(&a_.k_map);
      prefetch_map(&a_.v_map);
    }
    int index = blockIdx.x;
    while (true) {
      const bool more = index < a_.tiles;
      Tile t{};
      t.chunks = -1;
      int next = 0;
      if (more) {
        t = find_tile(index);
        if (lane_ == 0 && a_.counters != nullptr) next = atomicAdd(a_.counters, 1);
      }
      barrier_wait(tile_empty(slot.at), slot.parity ^ 1);
      if (lane_ == 0) {
        tile(slot.at) = t;
        barrier_arrive(tile_full(slot.at));
      }
      slot.step();
      if (!more) break;
      if (t.chunks > 0) fetch_tile(t, q, k, v);
      index = a_.counters != nullptr ? static_cast<int>(gridDim.x) + __shfl_sync(~0u, next, 0)
                                     : index + static_cast<int>(gridDim.x);
    }
    // The last block to come here leaves the counters as it found them.
    if (lane_ == 0 && a_.counters != nullptr && atomicAdd(a_.counters + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      a_.counters[0] = 0;
      a_.counters[1] = 0;
    }
  }

  __device__ __forceinline__ void fetch_tile(const Tile &t, Slot<C::kQStages> &q, Slot<C::kStages> &k,
                                             Slot<C::kStages> &v) const {
    const int q_row = static_cast<int>(t.q_start) + t.row0, head_k = t.head_q / static_cast<int>(p_.group);
    const int k_row = p_.k_lengths.cu != nullptr ? static_cast<int>(offset_of(p_.k_lengths, t.batch)) : 0;
    const int q_batch = p_.q_lengths.cu != nullptr ? 0 : t.batch, k_batch = p_.k_lengths.cu != nullptr ? 0 : t.batch;
    const auto fetch_k = [&](int chunk) {
      barrier_wait(k_empty(k.at), k.parity ^ 1);
      if (elect_one()) {
        barrier_expect(k_full(k.at), C::kKBytes);
#pragma unroll
        for (int s = 0; s < C::kSlabs; ++s)
          load_box(k_tile(k.at) + s * kKeys * 128, &a_.k_map, k_full(k.at), s * 64, k_row + chunk * kKeys, head_k, k_batch,
                   kEvictLast);
      }
      k.step();
    };
    fetch_k(t.chunk(0));
    barrier_wait(q_empty(q.at), q.parity ^ 1);
    if (elect_one()) {
      barrier_expect(q_full(q.at), C::kQBytes);
#pragma unroll
      for (int g = 0; g < C::kGroups; ++g)
#pragma unroll
        for (int s = 0; s < C::kSlabs; ++s)
          load_box(q_tile(q.at) + g * C::kQGroupBytes + s * 64 * 128, &a_.q_map, q_full(q.at), s * 64, q_row + g * 64, t.head_q,
                   q_batch, kEvictFirst);
    }
    q.step();
    for (int i = 0; i < t.chunks; ++i) {
      if (i + 1 < t.chunks) fetch_k(t.chunk(i + 1));
      barrier_wait(v_empty(v.at), v.parity ^ 1);
      if (elect_one()) {
        barrier_expect(v_full(v.at), C::kVBytes);
#pragma unroll
        for (int s = 0; s < C::kSlabsV; ++s)
          load_box(v_tile(v.at) + s * kKeys * 128, &a_.v_map, v_full(v.at), s * 64, k_row + t.chunk(i) * kKeys, head_k, k_batch,
                   kEvictLast);
      }
      v.step();
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Products
  // ------------------------------------------------------------------------------------------------------------------

  // S = Q K^T of the next chunk of K, started.
  __device__ __forceinline__ void start_scores() {
    const uint64_t q = rows_operand(q_tile(q_.at) + group_ * C::kQGroupBytes), k = rows_operand(k_tile(k_.at));
#pragma unroll
    for (int d = 0; d < C::kD / 16; ++d) {
      Product<Element, kKeys>::rows_rows(s_, advance_operand(q, d / 4 * 64 * 128 + d % 4 * 32),
                                         advance_operand(k, d / 4 * kKeys * 128 + d % 4 * 32), d != 0);
    }
    products_commit();
  }

  // out += P V of the next chunk of V, started; the first one of a tile overwrites.
  __device__ __forceinline__ void start_out(bool first) {
    const uint64_t v = columns_operand<kKeys>(v_tile(v_.at));
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      Product<Element, C::kDv>::registers_columns(out_, weights_[n], advance_operand(v, n * 2048), n != 0 || !first);
    }
    products_commit();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over tiles and chunks
  // ------------------------------------------------------------------------------------------------------------------

  // The tile worked on: where its description lies, its chunks, how many of them are masked.
  struct Place {
    int slot = -1;
    int chunks = 0, edges = 0;
  };

  __device__ __forceinline__ void consume() {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) weights_[n][r] = 0;
    Place now;
    int before = -1;    // the slot of the tile whose last weights have not met V yet
    bool first = true;  // and whether they are its only ones
    while (next_tile(now)) {
      barrier_wait(q_full(q_.at), q_.parity);
      max_[0] = max_[1] = -1e30f;  // finite, so that -inf minus it is -inf
      sum_[0] = sum_[1] = 0.f;
      step<true>(now, 0, before, first);
      int i = 1;
      const int head = min(now.chunks, max(now.edges + 1, 2));
#pragma unroll 1
      for (; i < head; ++i) step<false>(now, i, now.slot, i == 1);
#pragma unroll 1
      for (; i < now.chunks - 1; ++i) inner_step();
      if (i < now.chunks) step<false>(now, i, now.slot, false);
      finish_sums(tile(now.slot));
      before = now.slot;
      first = now.chunks == 1;
      q_.step();
    }
    if (before < 0) return;
    barrier_wait(v_full(v_.at), v_.parity);
    if (first) clear_tail(tile(before));
    begin_products();
    start_out(first);
    products_wait<0>();
    hold(out_);
    complete(before, edges_only_);
  }

  // The first chunk of a tile may hold rows of V past the end of the sequence: unused ones, or the next sequence. What is in them, NaN
  // included, must not count. Every group clears all of them: none waits for another.
  __device__ __forceinline__ void clear_tail(const Tile &t) const {
    const int used = t.seqlen_k - t.chunk(0) * kKeys;
    if (used >= kKeys || (p_.k_lengths.cu == nullptr && p_.k_lengths.used == nullptr)) return;
    const uint32_t v = v_tile(v_.at);
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

  // Weights of chunk i under the out of the chunk before it, which is the last one of tile `before` when kFirst.
  template <bool kFirst>
  __device__ __forceinline__ void step(const Place &now, int i, int before, bool first) {
    // In front of the very first chunk, the product runs on whatever is there and nobody looks at it: one code serves all tiles.
    const bool out = !kFirst || before >= 0;
    barrier_wait(k_full(k_.at), k_.parity);
    if (out) {
      barrier_wait(v_full(v_.at), v_.parity);
      if (first) clear_tail(tile(before));
    }
    begin_products();
    start_scores();
    start_out(first);
    products_wait<1>();
    hold(s_);
    barrier_arrive_if(lane_ == 0, k_empty(k_.at));
    barrier_arrive_if(lane_ == 0 && i + 1 == now.chunks, q_empty(q_.at));
    k_.step();
    if (i < now.edges) {
      const Tile &t = tile(now.slot);
      mask_scores(t, t.chunk(i) * kKeys);
    }
    const bool grown = exponentials();
    order_after(sum_[0] + sum_[1]);
    products_wait<0>();
    hold(out_);
    hold(weights_);
    round_weights();  // before anything else: S is free from here on
    if constexpr (kFirst) {
      if (out) {
        barrier_arrive_if(lane_ == 0, v_empty(v_.at));
        v_.step();
        complete(before, edges_only_);
      }
      edges_only_ = now.edges == now.chunks;
    } else {
      barrier_arrive_if(lane_ == 0, v_empty(v_.at));
      v_.step();
      if (i == now.edges) mend(tile(now.slot));
      if (grown) scale_out();
    }
    out_max_[0] = max_[0];
    out_max_[1] = max_[1];
  }

  // The same for the bulk of a tile: nothing masked, the chunk before in the same tile and not its first, one more after it.
  __device__ __forceinline__ void inner_step() {
    barrier_wait(k_full(k_.at), k_.parity);
    barrier_wait(v_full(v_.at), v_.parity);
    begin_products();
    start_scores();
    start_out(false);
    products_wait<1>();
    hold(s_);
    barrier_arrive_if(lane_ == 0, k_empty(k_.at));
    k_.step();
    const bool grown = exponentials();
    order_after(sum_[0] + sum_[1]);
    products_wait<0>();
    hold(out_);
    hold(weights_);
    barrier_arrive_if(lane_ == 0, v_empty(v_.at));
    v_.step();
    if (grown) scale_out();
    round_weights();
  }

  __device__ __forceinline__ void scale_out() {
#pragma unroll
    for (int j = 0; j < C::kDv / 2; ++j) out_[j] *= factor_[(j >> 1) & 1];
  }

  // The tile in `slot` has all its out.
  __device__ __forceinline__ void complete(int slot, bool edges_only) {
    const Tile &t = tile(slot);
    if (edges_only) mend(t);
    store_rows(t);
    __syncwarp();
    barrier_arrive_if(lane_ == 0, tile_empty(slot));
  }

  // The next tile that sees any key. Rows of the others are written here.
  __device__ __forceinline__ bool next_tile(Place &place) {
    while (true) {
      const int slot = slot_.at;
      barrier_wait(tile_full(slot), slot_.parity);
      slot_.step();
      const Tile &t = tile(slot);
      if (t.chunks < 0) return false;
      if (t.row0 + C::kRows > t.seqlen_q) store_unused_rows(t);
      if (t.chunks > 0) {
        place.slot = slot;
        place.chunks = t.chunks;
        place.edges = t.edges();
        return true;
      }
      store_blind_rows(t);
      __syncwarp();
      barrier_arrive_if(lane_ == 0, tile_empty(slot));
    }
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
  __device__ __forceinline__ float scale() const { return p_.softmax_scale * kLog2e; }

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
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < kKeys / 2; ++j) {
      const float x = fmaf(s_[j], c, -max_[(j >> 1) & 1]);
      s_[j] = exp2_approx(x);
      sum[(j >> 1) & 3] += s_[j];
    }
    sum_[0] += sum[0] + sum[2];
    sum_[1] += sum[1] + sum[3];
    return grown;
  }

  __device__ __forceinline__ void mask_scores(const Tile &t, int key0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Range keys = visible_keys(p_.band, t.seqlen_q, t.seqlen_k, int64_t{row_of(t, r)});
      const int first = key0 + 2 * (lane_ & 3);
      const int begin = static_cast<int>(keys.begin) - first, end = static_cast<int>(keys.end) - first;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e < begin || 8 * j + e >= end) s_[4 * j + 2 * r + e] = -CUDART_INF_F;
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // NaN and Inf in V that masked pairs would let through
  // ------------------------------------------------------------------------------------------------------------------

  // Called when out holds the edge chunks and nothing else.
  __device__ __forceinline__ void mend(const Tile &t) {
    float zero = 0.f;
#pragma unroll
    for (int j = 0; j < C::kDv / 2; ++j) zero = fmaf(out_[j], 0.f, zero);
    if (t.edges() > 0 && __any_sync(~0u, zero != 0.f)) repair(t);
  }

  // out of the edge chunks again, from the visible pairs alone and from global memory. Lane l takes half of the columns of the dot
  // products of row l / 2 of this warp.
  __device__ __forceinline__ void repair(const Tile &t) {
    const int head_k = t.head_q / static_cast<int>(p_.group), row = row_of(t, 0) - (lane_ >> 2) + (lane_ >> 1);
    const Sequence keys_of = sequence_of(p_.k_lengths, t.batch);
    const Range keys = visible_keys(p_.band, t.seqlen_q, t.seqlen_k, int64_t{row});
    const int source = ((lane_ >> 1) & 7) * 4;  // a lane that holds this row's maximum
    const float low = __shfl_sync(~0u, out_max_[0], source), high = __shfl_sync(~0u, out_max_[1], source);
    const float max = (lane_ >> 4) ? high : low;
    const Element *q = row_at(p_.q, t.batch, t.q_start + min(row, t.seqlen_q - 1), t.head_q);
#pragma unroll
    for (int j = 0; j < C::kDv / 2; ++j) out_[j] = 0.f;
#pragma unroll 1
    for (int i = 0; i < t.edges(); ++i) {
      const int key0 = t.chunk(i) * kKeys;
#pragma unroll 1
      for (int key = key0; key < min(key0 + kKeys, t.seqlen_k); ++key) {
        const Element *k = row_at(p_.k, t.batch, keys_of.start + key, head_k),
                      *v = row_at(p_.v, t.batch, keys_of.start + key, head_k);
        float x = 0.f;
#pragma unroll 1
        for (int column = lane_ & 1; column < p_.head_dim; column += 2) x = fmaf(element(q, column), element(k, column), x);
        x += __shfl_xor_sync(~0u, x, 1);
        const bool visible = row < t.seqlen_q && key >= keys.begin && key < keys.end;
        const float weight = to_float<Element>(pack2<Element>(exp2_approx(fmaf(x, scale(), -max)), 0.f) & 0xFFFFu);
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

  // Completes the sums and writes lse. out has still to be multiplied by inverse_.
  __device__ __forceinline__ void finish_sums(const Tile &t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(t, r);
      float sum = sum_[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      float factor = 1.f;
      if (p_.sink != nullptr) {
        const float sink = p_.sink[t.head_q * p_.sink_stride] * kLog2e;
        const float raised = fmaxf(max_[r], sink);
        factor = exp2_approx(max_[r] - raised);
        sum = sum * factor + exp2_approx(sink - raised);
        max_[r] = raised;
      }
      inverse_[r] = sum == 0.f ? 0.f : factor / sum;
      if (p_.lse.data != nullptr && (lane_ & 3) == 0 && row < t.seqlen_q) {
        *lse_at(t, row) = sum == 0.f ? -CUDART_INF_F : (max_[r] + log2f(sum)) * kLn2;
      }
    }
  }

  // Sixteen bytes a lane: the four lanes that share a row exchange the pieces of four column blocks.
  __device__ __forceinline__ void store_rows(const Tile &t) const {
    const int quad = lane_ & 3, columns = static_cast<int>(p_.head_dim_v);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(t, r);
      Element *dst = out_at(t, row);
#pragma unroll
      for (int j = 0; j < C::kDv / 8; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x[n] = pack2<Element>(out_[4 * (j + n) + 2 * r] * inverse_[r], out_[4 * (j + n) + 2 * r + 1] * inverse_[r]);
        transpose_quad(x, quad);
        const int column = (j + quad) * 8;
        if (row < t.seqlen_q) store_piece(dst + column, uint4{x[0], x[1], x[2], x[3]}, columns - column);
      }
    }
  }
  // Word n of lane q of the quad changes places with word q of lane n.
  static __device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int quad) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      const bool high = (quad & bit) != 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n & bit) continue;
        const uint32_t sent = high ? x[n] : x[n | bit];
        const uint32_t got = __shfl_xor_sync(~0u, sent, bit);
        if (high) {
          x[n] = got;
        } else {
          x[n | bit] = got;
        }
      }
    }
  }
  // Eight elements, of which `valid` lie in the row.
  __device__ __forceinline__ void store_piece(Element *dst, const uint4 &x, int valid) const {
    if (a_.vector_out) {
      if (valid > 0) *reinterpret_cast<uint4 *>(dst) = x;
    } else {
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (e < valid) reinterpret_cast<unsigned short *>(dst)[e] = static_cast<unsigned short>(words[e / 2] >> (16 * (e & 1)));
      }
    }
  }

  __device__ __forceinline__ float *lse_at(const Tile &t, int row) const {
    return p_.lse.data + t.batch * p_.lse.batch_stride + t.head_q * p_.lse.head_stride + (t.q_start + row) * p_.lse.seq_stride;
  }
  __device__ __forceinline__ Element *out_at(const Tile &t, int row) const {
    return row_at(p_.out, t.batch, t.q_start + row, t.head_q);
  }

  __device__ __forceinline__ void store_row(const Tile &t, int row, float lse) const {
    if (p_.lse.data != nullptr && lane_ == 0) *lse_at(t, row) = lse;
    auto *dst = reinterpret_cast<unsigned short *>(out_at(t, row));
    for (int column = lane_; column < p_.head_dim_v; column += 32) dst[column] = 0;
  }
  // Rows that are used but see no key: out = 0, lse = -inf or the sink.
  __device__ __forceinline__ void store_blind_rows(const Tile &t) const {
    const float lse = p_.sink != nullptr ? p_.sink[t.head_q * p_.sink_stride] : -CUDART_INF_F;
    for (int row = t.row0 + group_ * 4 + warp_; row < min(t.row0 + C::kRows, t.seqlen_q); row += C::kGroups * 4)
      store_row(t, row, lse);
  }
  // Rows of the slot that are not used. The last tile also owns what the slot holds beyond the grid.
  __device__ __forceinline__ void store_unused_rows(const Tile &t) const {
    const int end = t.row_block == a_.row_blocks - 1 ? t.slot_q : min(t.row0 + C::kRows, t.slot_q);
    for (int row = max(t.row0, t.seqlen_q) + group_ * 4 + warp_; row < end; row += C::kGroups * 4)
      store_row(t, row, -CUDART_INF_F);
  }

  const ForwardParams &a_;
  const Problem &p_;
  Tile *const tiles_;
  const uint32_t shared_;
  const int lane_, warp_;  // warp_ within the group
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
