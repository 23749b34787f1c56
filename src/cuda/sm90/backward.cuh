// SPDX-License-Identifier: Apache-2.0
// Exact attention backward with the asynchronous products of sm_90a: dk and dv, and the sum for dq.
//
// A block of threads owns 128 keys of one key head, with K and V in shared memory, and walks over the queries that see them, head after
// head of the GQA group, in chunks of kRows. One warp fetches Q, dO and their statistics through rings of kStages. Each of two
// warpgroups owns 64 keys, with their dk and dv in registers, and computes scores transposed, keys as rows:
//
//   for every chunk:
//       S^T = K Q^T starts; the copy engine adds dq of the chunk before to the sum over blocks of keys; dP^T = V dO^T starts
//       S is done: P^T = exp2(S^T - lse) under dP, rounded
//       dP is done: dv += P^T dO starts, under it dS^T = P^T (dP^T - delta), rounded, to shared memory
//       the first half of dk += dS^T Q starts; when all dS of the chunk is there:
//       dq = dS K, a half of the columns a warpgroup, and the other half of dk start; under the latter dq goes to shared memory
//
// P and dS enter dv and dk as left operands straight from registers.
//
// Zero times NaN is NaN. In chunks with masked pairs the block asks whether S or dP, which are non-finite where an operand is, hold
// anything that is not finite: only then the products go one query (or key) at a time over the visible pairs.
#pragma once

#include <math_constants.h>

#include "core/mask.h"
#include "cuda/common/hopper.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/score.cuh"
#include "cuda/sm90/backward.h"

namespace fa::cuda::sm90 {

template <typename Element_, int kD_, int kGroups_, int kRows_, int kStages_>
struct BackwardConfig {
  using Element = Element_;
  static constexpr int kD = kD_, kGroups = kGroups_, kRows = kRows_, kStages = kStages_;
  static constexpr int kThreads = (kGroups + 1) * 128, kKeys = kGroups * 64, kSlabs = (kD + 63) / 64;
  static constexpr int kConsumers = kGroups * 128, kConsumerRegisters = 240, kProducerRegisters = 24;
  static constexpr int kKBytes = kKeys * kSlabs * 128, kQBytes = kRows * kSlabs * 128;
  // dq of a chunk: 16 rows x kDqColumns a warp.
  static constexpr int kDqColumns = kD / kGroups, kDqWarpBytes = 16 * kDqColumns * 4;
  static constexpr int kDsBytes = kKeys * kRows * 2, kStatBytes = kRows * 4;
  static constexpr int kQOffset = 2 * kKBytes, kDsOffset = kQOffset + 2 * kStages * kQBytes;
  static constexpr int kDqOffset = kDsOffset + 2 * kDsBytes, kStatOffset = kDqOffset + kGroups * 4 * kDqWarpBytes;
  static constexpr int kBarrierOffset = kStatOffset + 2 * kStages * kStatBytes;
  static constexpr int kBlockOffset = kBarrierOffset + (4 + 4 * kStages) * 8, kSharedBytes = kBlockOffset + 64;
  static_assert(kRows == 64 && kGroups == 2 && kDqColumns <= 64);
};

// What a masked weight is rounded to: the bits of no visible one.
constexpr float kMasked = -0.f;
constexpr uint32_t kMaskedHalf = 0x8000u;

// What a block of threads works on. Lies in shared memory: the registers belong to the accumulators.
struct Block {
  int batch, head_k, key0;
  int q_start, k_start, seqlen_q, seqlen_k;
  int first, last;             // query i sees keys j with first <= j - i <= last
  int begin, end;              // chunks of queries with visible pairs
  int inner_begin, inner_end;  // of these, the ones without masked pairs
};
static_assert(sizeof(Block) <= 64);

template <class C>
class Backward {
 public:
  using Element = typename C::Element;

  __device__ __forceinline__ Backward(const BackwardParams &params, char *shared)
      : a_(params),
        p_(params.problem.forward),
        b_(*reinterpret_cast<Block *>(shared + C::kBlockOffset)),
        shared_(smem_address(shared)),
        lane_(threadIdx.x & 31),
        warp_((threadIdx.x >> 5) & 3) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      b_ = find_block();
      barrier_init(k_full(), 1);
      barrier_init(v_full(), 1);
      for (int n = 0; n < 2; ++n) barrier_init(ds_full(n), C::kGroups * 4);
      for (int n = 0; n < C::kStages; ++n) {
        barrier_init(q_full(n), 1);
        barrier_init(q_empty(n), C::kGroups * 4);
        barrier_init(dout_full(n), 1);
        barrier_init(dout_empty(n), C::kGroups * 4);
      }
      barrier_init_fence();
    } else if (threadIdx.x == 32) {
      for (const CUtensorMap *map : {&a_.k_map, &a_.q_map, &a_.lse_map, &a_.v_map, &a_.dout_map, &a_.delta_map})
        prefetch_map(map);
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

  __device__ __forceinline__ uint32_t k_tile() const { return shared_; }
  __device__ __forceinline__ uint32_t v_tile() const { return shared_ + C::kKBytes; }
  __device__ __forceinline__ uint32_t q_tile(int n) const { return shared_ + C::kQOffset + n * C::kQBytes; }
  __device__ __forceinline__ uint32_t dout_tile(int n) const { return q_tile(C::kStages + n); }
  __device__ __forceinline__ uint32_t ds_tile(int n) const {
    return shared_ + C::kDsOffset + n * C::kDsBytes;
  }  // (keys, queries)
  __device__ __forceinline__ uint32_t dq_tile() const {
    return shared_ + C::kDqOffset + (group_ * 4 + warp_) * C::kDqWarpBytes;
  }
  __device__ __forceinline__ uint32_t lse_row(int n) const { return shared_ + C::kStatOffset + n * C::kStatBytes; }
  __device__ __forceinline__ uint32_t delta_row(int n) const { return lse_row(C::kStages + n); }
  __device__ __forceinline__ uint32_t k_full() const { return shared_ + C::kBarrierOffset; }
  __device__ __forceinline__ uint32_t v_full() const { return k_full() + 8; }
  __device__ __forceinline__ uint32_t ds_full(int n) const { return k_full() + 16 + n * 8; }
  __device__ __forceinline__ uint32_t q_full(int n) const { return ds_full(2 + n); }
  __device__ __forceinline__ uint32_t q_empty(int n) const { return q_full(C::kStages + n); }
  __device__ __forceinline__ uint32_t dout_full(int n) const { return q_full(2 * C::kStages + n); }
  __device__ __forceinline__ uint32_t dout_empty(int n) const { return q_full(3 * C::kStages + n); }

  using Slot = RingPlace<C::kStages>;

  // ------------------------------------------------------------------------------------------------------------------
  // Which keys, which queries
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ Block find_block() const {
    Block b;
    const BlockOrder::Place place = a_.order.at(static_cast<int>(blockIdx.x));
    b.key0 = place.row_block * C::kKeys;
    b.batch = place.batch;
    b.head_k = place.head;
    const Sequence q = sequence_of(p_.q_lengths, b.batch), k = sequence_of(p_.k_lengths, b.batch);
    b.q_start = static_cast<int>(q.start);
    b.k_start = static_cast<int>(k.start);
    const Diagonal<int32_t> diagonal(a_.limits, static_cast<int>(q.len), static_cast<int>(k.len));
    b.seqlen_q = diagonal.seqlen_q;
    b.seqlen_k = diagonal.seqlen_k;
    b.first = diagonal.shift - diagonal.left;
    b.last = diagonal.shift + diagonal.right;
    b.begin = b.end = b.inner_begin = b.inner_end = 0;
    if (b.key0 >= b.seqlen_k) return b;
    const RangeOf<int32_t> queries = diagonal.visible_queries({b.key0, min(b.key0 + C::kKeys, b.seqlen_k)});
    if (queries.empty()) return b;
    b.begin = queries.begin / C::kRows;
    b.end = (queries.end + C::kRows - 1) / C::kRows;
    if (b.key0 + C::kKeys > b.seqlen_k) return b;
    // Rows that see every key of the block.
    b.inner_begin = (max(b.key0 + C::kKeys - 1 - b.last, 0) + C::kRows - 1) / C::kRows;
    b.inner_end = max(min(b.key0 - b.first + 1, b.seqlen_q), 0) / C::kRows;
    return b;
  }

  // Index of the first chunk of a head in the workspace.
  __device__ __forceinline__ int chunks_at(int head_q) const {
    return (b_.batch * static_cast<int>(p_.heads_q) + head_q) * a_.row_chunks;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Fetching
  // ------------------------------------------------------------------------------------------------------------------

  template <int kTileRows>
  __device__ __forceinline__ void fetch_tile(uint32_t tile, const CUtensorMap &map, uint32_t barrier, int row, int head,
                                             int batch, uint64_t policy) const {
#pragma unroll
    for (int s = 0; s < C::kSlabs; ++s) load_box(tile + s * kTileRows * 128, &map, barrier, s * 64, row, head, batch, policy);
  }

  __device__ __forceinline__ void produce() const {
    const Block b = b_;
    if (b.begin == b.end) return;
    const int k_row = (p_.k_lengths.cu != nullptr ? b.k_start : 0) + b.key0, q_row = p_.q_lengths.cu != nullptr ? b.q_start : 0;
    const int q_batch = p_.q_lengths.cu != nullptr ? 0 : b.batch, k_batch = p_.k_lengths.cu != nullptr ? 0 : b.batch;
    if (elect_one()) {
      barrier_expect(k_full(), C::kKBytes);
      fetch_tile<C::kKeys>(k_tile(), a_.k_map, k_full(), k_row, b.head_k, k_batch, kEvictFirst);
    }
    Slot slot;
    bool first = true;
    for (int g = 0; g < static_cast<int>(p_.group); ++g) {
      const int head_q = b.head_k * static_cast<int>(p_.group) + g;
      for (int chunk = b.end - 1; chunk >= b.begin; --chunk) {
        barrier_wait(q_empty(slot.at()), slot.parity() ^ 1);
        if (elect_one()) {
          barrier_expect(q_full(slot.at()), C::kQBytes + C::kStatBytes);
          fetch_tile<C::kRows>(q_tile(slot.at()), a_.q_map, q_full(slot.at()), q_row + chunk * C::kRows, head_q, q_batch,
                               kEvictLast);
          load_box(lse_row(slot.at()), &a_.lse_map, q_full(slot.at()), 0, chunks_at(head_q) + chunk, 0, 0, kEvictFirst);
          if (first) {
            barrier_expect(v_full(), C::kKBytes);
            fetch_tile<C::kKeys>(v_tile(), a_.v_map, v_full(), k_row, b.head_k, k_batch, kEvictFirst);
          }
        }
        first = false;
        barrier_wait(dout_empty(slot.at()), slot.parity() ^ 1);
        if (elect_one()) {
          barrier_expect(dout_full(slot.at()), C::kQBytes + C::kStatBytes);
          fetch_tile<C::kRows>(dout_tile(slot.at()), a_.dout_map, dout_full(slot.at()), q_row + chunk * C::kRows, head_q,
                               q_batch, kEvictLast);
          load_box(delta_row(slot.at()), &a_.delta_map, dout_full(slot.at()), 0, chunks_at(head_q) + chunk, 0, 0, kEvictFirst);
        }
        slot.step();
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Products, each started and not awaited
  // ------------------------------------------------------------------------------------------------------------------

  // 64 keys of K or V times the rows of a chunk.
  __device__ __forceinline__ void start_scores(float (&s)[C::kRows / 2], uint32_t keys, uint32_t rows) const {
    const uint64_t a = uniform_rows_operand(keys + group_ * 64 * 128), b = uniform_rows_operand(rows);
#pragma unroll
    for (int d = 0; d < C::kD / 16; ++d) {
      Product<Element, C::kRows>::rows_rows(s, advance_operand(a, d / 4 * C::kKeys * 128 + d % 4 * 32),
                                            advance_operand(b, d / 4 * C::kRows * 128 + d % 4 * 32), d != 0);
    }
    products_commit();
  }
  // gradient += weights * rows of a chunk, queries 16 kFirst to 16 kEnd.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void start_gradient(float (&gradient)[C::kD / 2], const uint32_t (&weights)[C::kRows / 16][4],
                                                 uint32_t rows) const {
    const uint64_t b = uniform_columns_operand<C::kRows>(rows);
#pragma unroll
    for (int n = kFirst; n < kEnd; ++n)
      Product<Element, C::kD>::registers_columns(gradient, weights[n], advance_operand(b, n * 2048), 1);
    products_commit();
  }
  // dS K: all queries of the chunk, this group's share of the columns.
  __device__ __forceinline__ void start_dq(uint32_t ds) {
    const uint64_t a = uniform_columns_operand<C::kKeys>(ds),
                   b = uniform_columns_operand<C::kKeys>(k_tile() + group_ * C::kKeys * 128);
#pragma unroll
    for (int n = 0; n < C::kKeys / 16; ++n) {
      Product<Element, C::kDqColumns>::columns_columns(dq_, advance_operand(a, n * 2048), advance_operand(b, n * 2048), n != 0);
    }
    products_commit();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over the chunks
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void consume() {
#pragma unroll
    for (int n = 0; n < C::kD / 2; ++n) dk_[n] = dv_[n] = 0.f;
    if (b_.begin < b_.end) {
      barrier_wait(k_full(), 0);
      barrier_wait(v_full(), 0);
      const int group = static_cast<int>(p_.group);
      const int chunks = (b_.end - b_.begin) * group;
      Slot slot;
      int head = chunks_at(b_.head_k * group), chunk = b_.end - 1, before = -1;
#pragma unroll 1
      for (int n = 0; n < chunks; ++n) {
        at_ = uniform(slot.at());
        buffer_ = uniform(n & 1);
        step(slot.parity(), n >> 1 & 1, chunk, before);
        before = head + chunk;
        slot.step();
        if (--chunk < b_.begin) {
          chunk = b_.end - 1;
          head += a_.row_chunks;
        }
      }
      add_dq(before);
      copies_wait();
    }
    store_gradient(a_.problem.dk, dk_, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk);
    store_gradient(a_.problem.dv, dv_, 1.f, static_cast<int>(p_.head_dim_v), a_.vector_dv);
  }

  // One chunk, up to its dq in shared memory; `before` is the place in the workspace of the one before, whose dq is there, or -1.
  __device__ __forceinline__ void step(uint32_t parity, uint32_t ds_parity, int chunk, int before) {
    const bool masked = chunk < b_.inner_begin || chunk >= b_.inner_end;
    barrier_wait(q_full(at_), parity);
    barrier_wait(dout_full(at_), parity);
    hold(s_);
    products_begin();
    start_scores(s_, k_tile(), q_tile(at_));
    add_dq(before);
    hold(dp_);
    products_begin();
    start_scores(dp_, v_tile(), dout_tile(at_));
    products_wait<1>();
    hold(s_);
    float finite = 0.f;  // or NaN
    if (masked) finite = zero_if_finite(s_);
    weights();
    if (masked) for_masked(chunk, [&](int n) { s_[n] = kMasked; });
    round(p_weights_, s_);
    products_wait<0>();
    hold(dp_);
    bool careful = false;
    if (masked) careful = named_barrier_or(1, C::kConsumers, finite + zero_if_finite(dp_) + finite_deltas() != 0.f);
    if (careful) {
      multiply_carefully(chunk, ds_parity);
    } else {
      multiply(ds_parity);
    }
    __syncwarp();
    barrier_arrive_if(lane_ == 0, q_empty(at_));
    barrier_arrive_if(lane_ == 0, dout_empty(at_));
  }

  // From P and dP to dv, dk and dq. One half of dk runs while the barrier waits for the other group's dS, one while dq leaves.
  __device__ __forceinline__ void multiply(uint32_t ds_parity) {
    constexpr int kHalf = C::kRows / 32;
    const uint32_t ds = ds_tile(buffer_);
    hold(p_weights_);
    hold(dv_);
    products_begin();
    start_gradient<0, 2 * kHalf>(dv_, p_weights_, dout_tile(at_));
    derivatives();
    round(ds_weights_, dp_);
    put_ds(ds);
    hold(ds_weights_);
    hold(dk_);
    products_begin();
    start_gradient<0, kHalf>(dk_, ds_weights_, q_tile(at_));
    barrier_wait(ds_full(buffer_), ds_parity);  // every warp's dS is there
    products_begin();
    start_dq(ds);
    start_gradient<kHalf, 2 * kHalf>(dk_, ds_weights_, q_tile(at_));
    products_wait<1>();
    hold(dq_);
    put_dq();
    products_wait<0>();
    hold(dv_);
    hold(dk_);
  }

  // NaN if any of x is NaN or Inf.
  static __device__ __forceinline__ float zero_if_finite(const float (&x)[C::kRows / 2]) {
    float zero[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int n = 0; n < C::kRows / 2; ++n) zero[n % 4] = fmaf(x[n], 0.f, zero[n % 4]);
    return (zero[0] + zero[1]) + (zero[2] + zero[3]);
  }

  // Calls f(n) for every element of a tile of scores whose pair is masked.
  template <typename F>
  __device__ __forceinline__ void for_masked(int chunk, F f) const {
    const int row0 = chunk * C::kRows + 2 * (lane_ & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = b_.key0 + group_ * 64 + warp_ * 16 + (lane_ >> 2) + 8 * r;
      const int begin = key - b_.last - row0;
      const int end = key < b_.seqlen_k ? min(key - b_.first + 1, b_.seqlen_q) - row0 : begin;
#pragma unroll
      for (int j = 0; j < C::kRows / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e < begin || 8 * j + e >= end) f(4 * j + 2 * r + e);
    }
  }

  // The statistics of this lane's queries 8 j and 8 j + 1.
  __device__ __forceinline__ float2 stat(uint32_t row, int j) const {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(row + 8 * (lane_ & 3) + j * 32) : "memory");
    return x;
  }

  // S to P, in place.
  __device__ __forceinline__ void weights() {
    const float c = p_.softmax_scale * kLog2e;
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      const float2 lse = stat(lse_row(at_), j);
#pragma unroll
      for (int r = 0; r < 4; ++r) s_[4 * j + r] = exp2_approx(fmaf(s_[4 * j + r], c, -((r & 1) ? lse.y : lse.x)));
    }
  }

  // dP to dS, in place.
  __device__ __forceinline__ void derivatives() {
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) {
      const float2 delta = stat(delta_row(at_), j);
#pragma unroll
      for (int r = 0; r < 4; ++r) dp_[4 * j + r] = s_[4 * j + r] * (dp_[4 * j + r] - ((r & 1) ? delta.y : delta.x));
    }
  }

  // NaN if any row's delta is NaN or Inf, as where the row's out is.
  __device__ __forceinline__ float finite_deltas() const {
    float zero = 0.f;
#pragma unroll
    for (int n = 0; n < C::kRows / 32; ++n) zero = fmaf(ld_shared_float(delta_row(at_) + (n * 32 + lane_) * 4), 0.f, zero);
    return zero;
  }

  static __device__ __forceinline__ void round(uint32_t (&w)[C::kRows / 16][4], const float (&x)[C::kRows / 2]) {
#pragma unroll
    for (int n = 0; n < C::kRows / 16; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) w[n][r] = pack2<Element>(x[8 * n + 2 * r], x[8 * n + 2 * r + 1]);
  }

  // This warp's 16 keys of dS^T, for both groups.
  __device__ __forceinline__ void put_ds(uint32_t ds) const {
    const int key = group_ * 64 + warp_ * 16 + (lane_ & 15);
#pragma unroll
    for (int n = 0; n < C::kRows / 16; ++n) {
      stmatrix_x4(ds + key * 128 + (((2 * n + (lane_ >> 4)) ^ (key & 7)) << 4), ds_weights_[n][0], ds_weights_[n][1],
                  ds_weights_[n][2], ds_weights_[n][3]);
    }
    shared_fence_for_copies();
    __syncwarp();
    barrier_arrive_if(lane_ == 0, ds_full(buffer_));
  }

  // A chunk of the sum is a sequence of 16 x 8 tiles, [group][warp][j], each four numbers a lane as the accumulators hold them.
  // This warp's part to its place in shared memory. What lay there before has long been read.
  __device__ __forceinline__ void put_dq() const {
    copies_wait_read();
    __syncwarp();
#pragma unroll
    for (int j = 0; j < C::kDqColumns / 8; ++j) {
      st_shared_16(dq_tile() + j * 512 + lane_ * 16, __float_as_uint(dq_[4 * j]), __float_as_uint(dq_[4 * j + 1]),
                   __float_as_uint(dq_[4 * j + 2]), __float_as_uint(dq_[4 * j + 3]));
    }
  }
  // From there the copy engine adds it to that of chunk `index`, if there is one.
  __device__ __forceinline__ void add_dq(int index) const {
    shared_fence_for_copies();
    __syncwarp();
    add_floats_if(index >= 0 && a_.dq_sum != nullptr,
                  a_.dq_sum + int64_t{index} * (C::kRows * C::kD) + (group_ * 4 + warp_) * (C::kDqWarpBytes / 4), dq_tile(),
                  C::kDqWarpBytes);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // NaN and Inf that masked pairs would let through
  // ------------------------------------------------------------------------------------------------------------------

  // multiply() over the visible pairs alone.
  __device__ __forceinline__ void multiply_carefully(int chunk, uint32_t ds_parity) {
    const uint32_t ds = ds_tile(buffer_);
    derivatives();
#pragma unroll
    for (int n = 0; n < C::kRows / 2; ++n) dp_[n] += 0.f;  // a visible -0 is no mask
    for_masked(chunk, [&](int n) { dp_[n] = kMasked; });
    round(ds_weights_, dp_);
    put_ds(ds);
    add_exactly(dv_, p_weights_, dout_tile(at_));
    add_exactly(dk_, ds_weights_, q_tile(at_));
    barrier_wait(ds_full(buffer_), ds_parity);
    dq_exactly(ds);
    put_dq();
  }

  // acc[8 j ..] += weight * tile element for the rows g (r = 0) and g + 8 of this warp, `bits` their weights, from one row of a tile.
  template <int kTileRows, int kColumns>
  __device__ __forceinline__ void add_row(float (&acc)[kColumns / 2], const uint32_t (&bits)[2], uint32_t tile, int row) const {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const uint32_t pair =
          ld_shared_4(tile + j / 8 * kTileRows * 128 + row * 128 + (((j % 8) ^ (row & 7)) << 4) + (lane_ & 3) * 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (bits[r] == kMaskedHalf) continue;
        acc[4 * j + 2 * r] += to_float<Element>(bits[r]) * to_float<Element>(pair & 0xFFFFu);
        acc[4 * j + 2 * r + 1] += to_float<Element>(bits[r]) * to_float<Element>(pair >> 16);
      }
    }
  }

  __device__ __forceinline__ void add_exactly(float (&gradient)[C::kD / 2], const uint32_t (&weights)[C::kRows / 16][4],
                                              uint32_t rows) const {
#pragma unroll 1
    for (int row = 0; row < C::kRows; ++row) {
      const int source = (lane_ & ~3) | ((row & 7) >> 1);  // the lane of the quad that holds this query's weights
      uint32_t bits[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t pair = 0;
#pragma unroll
        for (int n = 0; n < C::kRows / 16; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (row >> 3 == 2 * n + half) pair = weights[n][2 * half + r];
        pair = __shfl_sync(~0u, pair, source);
        bits[r] = (row & 1) ? pair >> 16 : pair & 0xFFFFu;
      }
      add_row<C::kRows, C::kD>(gradient, bits, rows, row);
    }
  }

  __device__ __forceinline__ void dq_exactly(uint32_t ds) {
#pragma unroll
    for (int n = 0; n < C::kDqColumns / 2; ++n) dq_[n] = 0.f;
#pragma unroll 1
    for (int key = 0; key < C::kKeys; ++key) {
      uint32_t bits[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp_ * 16 + (lane_ >> 2) + 8 * r;
        const uint32_t pair = ld_shared_4(ds + key * 128 + (((row / 8) ^ (key & 7)) << 4) + row % 8 / 2 * 4);
        bits[r] = (row & 1) ? pair >> 16 : pair & 0xFFFFu;
      }
      add_row<C::kKeys, C::kDqColumns>(dq_, bits, k_tile() + group_ * C::kKeys * 128, key);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Results
  // ------------------------------------------------------------------------------------------------------------------

  // dk or dv to the rows of the tensor, sixteen bytes a lane: the four lanes that share a row exchange the pieces of four column blocks.
  // Keys of the slot that are not used get zero; the last block also owns those beyond the grid.
  __device__ __forceinline__ void store_gradient(const Operand &t, const float (&acc)[C::kD / 2], float scale, int columns,
                                                 bool vectors) const {
    if (t.data == nullptr) return;
    const int slot = static_cast<int>(sequence_of(p_.k_lengths, b_.batch).slot);
    Element *base = static_cast<Element *>(t.data) + b_.batch * t.batch_stride + int64_t{b_.k_start} * t.seq_stride +
                    b_.head_k * t.head_stride;
    const int quad = lane_ & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = b_.key0 + group_ * 64 + warp_ * 16 + (lane_ >> 2) + 8 * r;
      const uint32_t keep = key < b_.seqlen_k ? ~0u : 0u;
#pragma unroll
      for (int j = 0; j < C::kD / 8; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x[n] = pack2<Element>(acc[4 * (j + n) + 2 * r] * scale, acc[4 * (j + n) + 2 * r + 1] * scale) & keep;
        transpose_quad(x, quad);
        const int column = (j + quad) * 8;
        if (key < slot) store_elements(base + key * t.seq_stride + column, x, columns - column, vectors);
      }
    }
    if (b_.key0 / C::kKeys != a_.order.row_blocks - 1) return;
    constexpr int kPieces = C::kD / 8;
    const int beyond = b_.key0 + C::kKeys;
    for (int n = static_cast<int>(threadIdx.x) - 128; n < (slot - beyond) * kPieces; n += C::kConsumers) {
      const int column = n % kPieces * 8;
      store_elements(base + (beyond + n / kPieces) * t.seq_stride + column, {0, 0, 0, 0}, columns - column, vectors);
    }
  }

  const BackwardParams &a_;
  const Problem &p_;
  Block &b_;
  const uint32_t shared_;
  const int lane_, warp_;  // warp_ within the group
  int group_;

  int at_, buffer_;  // the chunk's place in the rings, and that of its dS
  float s_[C::kRows / 2], dp_[C::kRows / 2], dq_[C::kDqColumns / 2];
  uint32_t p_weights_[C::kRows / 16][4], ds_weights_[C::kRows / 16][4];
  float dk_[C::kD / 2], dv_[C::kD / 2];
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) backward(const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  Backward<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90
