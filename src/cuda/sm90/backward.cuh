// SPDX-License-Identifier: Apache-2.0
// Exact attention backward with the asynchronous products of sm_90a: dk and dv, and the sum for dq.
//
// A block of threads owns 128 keys of one key head, with K and V in shared memory, and walks over the queries that see them, head after
// head of the GQA group, in chunks of kRows. One warp fetches Q, dO and their statistics through rings of kStages. Each of two
// warpgroups owns 64 keys, with their dk and dv in registers, and computes scores transposed, keys as rows:
//
//   for every chunk:
//       S^T = K Q^T and dP^T = V dO^T start, dP of 64 queries
//       S is done: P^T = exp2(S^T - lse) under dP, rounded
//       dP is done: dv += P^T dO starts, under it dS^T = P^T (dP^T - delta), rounded, to shared memory
//       a first part of dk += dS^T Q starts; under it dS of the other 64 queries, if there are any
//       dq = dS K, a half of the columns or of the queries a warpgroup, and the rest of dk start; under the latter dq goes to shared
//       memory, from where the copy engine, on the word of a warp a group, adds it to the sum over blocks of keys
//
// P and dS enter dv and dk as left operands straight from registers. dq needs dS of both groups; with kLag it is that of the chunk before.
#pragma once

#include "cuda/sm90/backward_block.cuh"

namespace fa::cuda::sm90 {

template <typename Element_, int kD_, int kGroups_, int kRows_, int kStages_>
struct BackwardConfig {
  using Element = Element_;
  static constexpr int kD = kD_, kGroups = kGroups_, kRows = kRows_, kStages = kStages_;
  static constexpr int kThreads = (kGroups + 1) * 128, kKeys = kGroups * 64, kSlabs = (kD + 63) / 64;
  static constexpr int kConsumers = kGroups * 128, kConsumerRegisters = 240, kProducerRegisters = 24;
  static constexpr int kLag = kRows > 64 ? 1 : 0;  // chunks that dq is behind
  static constexpr int kParts = kRows / 64;        // of a chunk: dP has registers for 64 queries
  static constexpr int kKBytes = kKeys * kSlabs * 128, kQBytes = kRows * kSlabs * 128;
  // dq of a chunk: 64 rows x kDqColumns a warpgroup, 16 rows a warp.
  static constexpr int kDqRowParts = kRows / 64, kDqColumns = kD * kDqRowParts / kGroups, kDqBytes = 64 * kDqColumns * 4;
  static constexpr int kDsBytes = kKeys * kRows * 2, kStatBytes = kRows * 4;
  static constexpr int kQOffset = 2 * kKBytes, kDsOffset = kQOffset + 2 * kStages * kQBytes;
  static constexpr int kDqOffset = kDsOffset + 2 * kDsBytes, kStatOffset = kDqOffset + kGroups * kDqBytes;
  static constexpr int kBarrierOffset = kStatOffset + 2 * kStages * kStatBytes;
  static constexpr int kBlockOffset = kBarrierOffset + (4 + 2 + 2 * kGroups + 4 * kStages) * 8,
                       kSharedBytes = kBlockOffset + 64;
  static_assert(kRows % 64 == 0 && kGroups % kDqRowParts == 0 && kDqColumns == 64);
};

template <class C>
class Backward : BackwardBlock<C> {
 public:
  __device__ __forceinline__ Backward(const BackwardParams &params, char *shared) : Base(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      b_ = this->find_block(static_cast<int>(blockIdx.x));
      barrier_init(k_full(), 1);
      barrier_init(v_full(), 1);
      for (int n = 0; n < 2; ++n) {
        barrier_init(ds_full(n), C::kGroups * 4);
        barrier_init(ds_empty(n), C::kGroups * 4);
      }
      for (int n = 0; n < C::kGroups; ++n) {
        barrier_init(dq_full(n), 4);
        barrier_init(dq_empty(n), 1);
      }
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
      if (warp_ > 0 && warp_ <= C::kGroups) add_dq(warp_ - 1);
    } else {
      take_registers<C::kConsumerRegisters>();
      group_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128 - 1), 0);  // the same for the warp, and known to be
      consume();
    }
  }

 private:
  using Base = BackwardBlock<C>;
  using Base::a_, Base::b_, Base::lane_, Base::p_, Base::shared_, Base::warp_;
  using Base::add_exactly, Base::add_row, Base::chunks_at, Base::round, Base::stat, Base::zero_if_finite;
  using typename Base::Element;

  // ------------------------------------------------------------------------------------------------------------------
  // Shared memory
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t k_tile() const { return shared_; }
  __device__ __forceinline__ uint32_t v_tile() const { return shared_ + C::kKBytes; }
  __device__ __forceinline__ uint32_t q_tile(int n) const { return shared_ + C::kQOffset + n * C::kQBytes; }
  __device__ __forceinline__ uint32_t dout_tile(int n) const { return q_tile(C::kStages + n); }
  // (keys, queries), slabs of 64 queries
  __device__ __forceinline__ uint32_t ds_tile(int n) const { return shared_ + C::kDsOffset + n * C::kDsBytes; }
  // Of dS and of K what this group's share of dq is the product of.
  __device__ __forceinline__ uint32_t dq_rows(uint32_t ds) const { return ds + group_ % C::kDqRowParts * C::kKeys * 128; }
  __device__ __forceinline__ uint32_t dq_columns() const { return k_tile() + group_ / C::kDqRowParts * C::kKeys * 128; }
  __device__ __forceinline__ uint32_t dq_tile(int group) const { return shared_ + C::kDqOffset + group * C::kDqBytes; }
  __device__ __forceinline__ uint32_t lse_row(int n) const { return shared_ + C::kStatOffset + n * C::kStatBytes; }
  __device__ __forceinline__ uint32_t delta_row(int n) const { return lse_row(C::kStages + n); }
  __device__ __forceinline__ uint32_t k_full() const { return shared_ + C::kBarrierOffset; }
  __device__ __forceinline__ uint32_t v_full() const { return k_full() + 8; }
  __device__ __forceinline__ uint32_t ds_full(int n) const { return k_full() + 16 + n * 8; }
  __device__ __forceinline__ uint32_t ds_empty(int n) const { return ds_full(2 + n); }
  __device__ __forceinline__ uint32_t dq_full(int group) const { return ds_full(4 + group); }
  __device__ __forceinline__ uint32_t dq_empty(int group) const { return dq_full(C::kGroups + group); }
  __device__ __forceinline__ uint32_t q_full(int n) const { return dq_full(2 * C::kGroups + n); }
  __device__ __forceinline__ uint32_t q_empty(int n) const { return q_full(C::kStages + n); }
  __device__ __forceinline__ uint32_t dout_full(int n) const { return q_full(2 * C::kStages + n); }
  __device__ __forceinline__ uint32_t dout_empty(int n) const { return q_full(3 * C::kStages + n); }

  using Slot = RingPlace<C::kStages>;

  __device__ __forceinline__ int first_key() const { return b_.key0 + group_ * 64; }

  // ------------------------------------------------------------------------------------------------------------------
  // Fetching
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void produce() const {
    const Block b = b_;
    if (b.begin == b.end) return;
    const int k_row = (p_.k_lengths.cu != nullptr ? b.k_start : 0) + b.key0, q_row = p_.q_lengths.cu != nullptr ? b.q_start : 0;
    const int q_batch = p_.q_lengths.cu != nullptr ? 0 : b.batch, k_batch = p_.k_lengths.cu != nullptr ? 0 : b.batch;
    if (elect_one()) {
      barrier_expect(k_full(), C::kKBytes);
      this->template fetch_tile<C::kKeys>(k_tile(), a_.k_map, k_full(), k_row, b.head_k, k_batch, kEvictFirst);
    }
    Slot slot;
    bool first = true;
    for (int g = 0; g < static_cast<int>(p_.group); ++g) {
      const int head_q = b.head_k * static_cast<int>(p_.group) + g;
      for (int chunk = b.end - 1; chunk >= b.begin; --chunk) {
        barrier_wait(q_empty(slot.at()), slot.parity() ^ 1);
        if (elect_one()) {
          barrier_expect(q_full(slot.at()), C::kQBytes + C::kStatBytes);
          this->template fetch_tile<C::kRows>(q_tile(slot.at()), a_.q_map, q_full(slot.at()), q_row + chunk * C::kRows, head_q,
                                              q_batch, kEvictLast);
          load_box(lse_row(slot.at()), &a_.lse_map, q_full(slot.at()), 0, chunks_at(head_q) + chunk, 0, 0, kEvictFirst);
          if (first) {
            barrier_expect(v_full(), C::kKBytes);
            this->template fetch_tile<C::kKeys>(v_tile(), a_.v_map, v_full(), k_row, b.head_k, k_batch, kEvictFirst);
          }
        }
        first = false;
        barrier_wait(dout_empty(slot.at()), slot.parity() ^ 1);
        if (elect_one()) {
          barrier_expect(dout_full(slot.at()), C::kQBytes + C::kStatBytes);
          this->template fetch_tile<C::kRows>(dout_tile(slot.at()), a_.dout_map, dout_full(slot.at()), q_row + chunk * C::kRows,
                                              head_q, q_batch, kEvictLast);
          load_box(delta_row(slot.at()), &a_.delta_map, dout_full(slot.at()), 0, chunks_at(head_q) + chunk, 0, 0, kEvictFirst);
        }
        slot.step();
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The sum for dq
  // ------------------------------------------------------------------------------------------------------------------

  // Adds a group's share of dq, chunk after chunk, to the sum over blocks of keys. In deterministic mode blocks add to a chunk in ascending
  // order: `turn` counts those that have. One only waits for blocks that started before it. Walks go down from the last chunk, so that
  // under a causal mask, too, all blocks of a head begin with the same chunk and keep their distance.
  __device__ __forceinline__ void add_dq(int group) const {
    const Block b = b_;
    const bool wanted = a_.dq_sum != nullptr, ordered = wanted && a_.turn != nullptr;
    uint32_t parity = 0;
    for (int g = 0; g < static_cast<int>(p_.group); ++g) {
      const int first = chunks_at(b.head_k * static_cast<int>(p_.group) + g);
      for (int chunk = b.end - 1; chunk >= b.begin; --chunk) {
        const int64_t part = int64_t{first + chunk} * C::kGroups + group;
        int32_t *turn = a_.turn + part;
        // Blocks that see the chunk are consecutive. No acquire: additions happen at the L2 cache, these after the others have arrived.
        const int place = b.key0 / C::kKeys - max(0, chunk * C::kRows + b.first) / C::kKeys;
        if (ordered) {
          while (load_relaxed(turn) != place) {
          }
        }
        barrier_wait(dq_full(group), parity);
        if (elect_one()) {
          if (wanted) add_floats(a_.dq_sum + part * (C::kDqBytes / 4), dq_tile(group), C::kDqBytes);
          copies_wait_read();
          barrier_arrive(dq_empty(group));
          if (ordered) {
            copies_wait();
            count_released(turn);
          }
        }
        __syncwarp();
        parity ^= 1;
      }
    }
    copies_wait();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Products, each started and not awaited
  // ------------------------------------------------------------------------------------------------------------------

  // 64 keys of K or V times kCount rows of a chunk.
  template <int kCount>
  __device__ __forceinline__ void start_scores(float (&s)[kCount / 2], uint32_t keys, uint32_t rows) const {
    const uint64_t a = uniform_rows_operand(keys + group_ * 64 * 128), b = uniform_rows_operand(rows);
#pragma unroll
    for (int d = 0; d < C::kD / 16; ++d) {
      Product<Element, kCount>::rows_rows(s, advance_operand(a, d / 4 * C::kKeys * 128 + d % 4 * 32),
                                          advance_operand(b, d / 4 * C::kRows * 128 + d % 4 * 32), d != 0);
    }
    products_commit();
  }
  __device__ __forceinline__ void start_dp(int part) { start_scores<64>(dp_, v_tile(), dout_tile(at_) + part * 64 * 128); }
  // gradient += weights * rows of a chunk from 16 `from` on: kCount steps of 16, of the weights from kFirst on.
  template <int kFirst, int kCount, int kSteps>
  __device__ __forceinline__ void start_gradient(float (&gradient)[C::kD / 2], const uint32_t (&weights)[kSteps][4],
                                                 uint32_t rows, int from) const {
    const uint64_t b = uniform_columns_operand<C::kRows>(rows);
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      Product<Element, C::kD>::registers_columns(gradient, weights[kFirst + n], advance_operand(b, (from + n) * 2048), 1);
    products_commit();
  }
  // dS K: this group's share of the queries and columns.
  __device__ __forceinline__ void start_dq(uint32_t ds) {
    const uint64_t a = uniform_columns_operand<C::kKeys>(dq_rows(ds)), b = uniform_columns_operand<C::kKeys>(dq_columns());
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
      int chunk = b_.end - 1;
#pragma unroll 1
      for (int n = 0; n < chunks; ++n) {
        at_ = uniform(slot.at());
        buffer_ = uniform(n & 1);
        step(slot.parity(), n, chunk);
        slot.step();
        if (--chunk < b_.begin) chunk = b_.end - 1;
      }
      finish_dq(chunks);
    }
    const int thread = static_cast<int>(threadIdx.x) - 128;
    this->store_gradient(a_.problem.dk, dk_, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk, first_key(), thread,
                         C::kConsumers);
    this->store_gradient(a_.problem.dv, dv_, 1.f, static_cast<int>(p_.head_dim_v), a_.vector_dv, first_key(), thread,
                         C::kConsumers);
  }

  // The block's n-th chunk, all but its dq, and dq of the one before: so no group waits for what the other has just begun.
  __device__ __forceinline__ void step(uint32_t parity, int n, int chunk) {
    const bool masked = chunk < b_.inner_begin || chunk >= b_.inner_end;
    barrier_wait(q_full(at_), parity);
    barrier_wait(dout_full(at_), parity);
    hold(s_);
    products_begin();
    start_scores<C::kRows>(s_, k_tile(), q_tile(at_));
    hand_over_dq(n > C::kLag);
    hold(dp_);
    products_begin();
    start_dp(masked ? C::kParts - 1 : 0);
    products_wait<1>();
    hold(s_);
    float finite = 0.f;  // or NaN
    if (masked) finite = zero_if_finite(s_);
    weights();
    if (masked) this->template for_masked<C::kRows>(first_key(), chunk * C::kRows, [&](int at) { s_[at] = kMasked; });
    round(p_weights_, s_);
    products_wait<0>();
    hold(dp_);
    bool careful = false;
    if (masked) {
      finite += zero_if_finite(dp_) + zero_if_finite(delta_row(at_));
      for (int part = C::kParts - 2; part >= 0; --part) {
        redo_dp(part);
        finite += zero_if_finite(dp_);
      }
      careful = named_barrier_or(1, C::kConsumers, finite != 0.f);
    }
    if (careful) {
      multiply_carefully(chunk, n);
    } else {
      multiply(n);
    }
    careful_before_ = careful;
    __syncwarp();
    barrier_arrive_if(lane_ == 0, q_empty(at_));
    barrier_arrive_if(lane_ == 0, dout_empty(at_));
  }

  __device__ __forceinline__ void redo_dp(int part) {
    hold(dp_);
    products_begin();
    start_dp(part);
    products_wait<0>();
    hold(dp_);
  }

  // From P and dP of the first part to dv, dk and dq. dk goes in steps of its own: under one of them the barrier waits for the other
  // group's dS, under one dq leaves.
  __device__ __forceinline__ void multiply(int n) {
    const uint32_t ds = ds_tile(buffer_);
    hold(p_weights_);
    hold(dv_);
    products_begin();
    start_gradient<0, C::kRows / 16>(dv_, p_weights_, dout_tile(at_), 0);
    derivatives(0);
    round(ds_weights_[0], dp_);
    if constexpr (C::kLag > 0) barrier_wait(ds_empty(buffer_), n >> 1 & 1 ^ 1);
    put_ds(ds, 0);
    if constexpr (C::kParts == 1) {
      hold(ds_weights_[0]);
      hold(dk_);
      products_begin();
      start_gradient<0, 2>(dk_, ds_weights_[0], q_tile(at_), 0);
    } else {
      hold(dp_);
      hold(ds_weights_[0]);
      hold(dk_);
      products_begin();
      start_dp(1);
      start_gradient<0, 4>(dk_, ds_weights_[0], q_tile(at_), 0);
      products_wait<1>();
      hold(dp_);
      derivatives(1);
      round(ds_weights_[1], dp_);
      put_ds(ds, 1);
      hold(ds_weights_[1]);
    }
    await_ds(n - C::kLag);
    products_begin();
    start_dq(ds_tile(buffer_ ^ C::kLag));
    if constexpr (C::kParts == 1) {
      start_gradient<2, 2>(dk_, ds_weights_[0], q_tile(at_), 2);
    } else {
      start_gradient<0, 4>(dk_, ds_weights_[1], q_tile(at_), 4);
    }
    products_wait<1>();
    hold(dq_);
    if (C::kLag > 0 && careful_before_) dq_exactly(ds_tile(buffer_ ^ 1));
    put_dq(n - C::kLag);
    products_wait<0>();
    hold(dv_);
    hold(dk_);
  }

  // What is left of dq after the last chunk.
  __device__ __forceinline__ void finish_dq(int chunks) {
    if constexpr (C::kLag > 0) {
      hand_over_dq(chunks > 1);
      const uint32_t ds = ds_tile((chunks - 1) & 1);
      await_ds(chunks - 1);
      if (careful_before_) {
        dq_exactly(ds);
      } else {
        hold(dq_);
        products_begin();
        start_dq(ds);
        products_wait<0>();
        hold(dq_);
      }
      put_dq(chunks - 1);
    }
    hand_over_dq(true);
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

  // dP of a part of the chunk to dS, in place.
  __device__ __forceinline__ void derivatives(int part) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 delta = stat(delta_row(at_), part * 8 + j);
#pragma unroll
      for (int r = 0; r < 4; ++r) dp_[4 * j + r] = s_[part * 32 + 4 * j + r] * (dp_[4 * j + r] - ((r & 1) ? delta.y : delta.x));
    }
  }

  // This warp's 16 keys of a part of dS^T, for both groups.
  __device__ __forceinline__ void put_ds(uint32_t ds, int part) const {
    const int key = group_ * 64 + warp_ * 16 + (lane_ & 15);
    const auto &w = ds_weights_[part];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      stmatrix_x4(ds + part * C::kKeys * 128 + key * 128 + (((2 * n + (lane_ >> 4)) ^ (key & 7)) << 4), w[n][0], w[n][1],
                  w[n][2], w[n][3]);
    }
    if (part != C::kParts - 1) return;
    shared_fence_for_copies();
    __syncwarp();
    barrier_arrive_if(lane_ == 0, ds_full(buffer_));
  }

  // Every warp's dS of the block's n-th chunk is there. Of the chunk before the first nothing is, and nothing of its dq is used.
  __device__ __forceinline__ void await_ds(int n) const { barrier_wait(ds_full(n & 1), n >> 1 & 1); }

  // A chunk of the sum is a sequence of 16 x 8 tiles, [group][warp][j], each four numbers a lane as the accumulators hold them.
  // This warp's part of the n-th chunk to its place in shared memory, once that of the chunk before has been read from there.
  __device__ __forceinline__ void put_dq(int n) const {
    if constexpr (C::kLag > 0) {
      __syncwarp();
      barrier_arrive_if(n >= 0 && lane_ == 0, ds_empty(n & 1));
    }
    barrier_wait(dq_empty(group_), n < 0 ? 1 : (n & 1) ^ 1);
    const uint32_t part = dq_tile(group_) + warp_ * (C::kDqBytes / 4);
#pragma unroll
    for (int j = 0; j < C::kDqColumns / 8; ++j) {
      st_shared_16(part + j * 512 + lane_ * 16, __float_as_uint(dq_[4 * j]), __float_as_uint(dq_[4 * j + 1]),
                   __float_as_uint(dq_[4 * j + 2]), __float_as_uint(dq_[4 * j + 3]));
    }
  }
  // To the warp that adds it up.
  __device__ __forceinline__ void hand_over_dq(bool any) const {
    shared_fence_for_copies();
    __syncwarp();
    barrier_arrive_if(any && lane_ == 0, dq_full(group_));
  }

  // ------------------------------------------------------------------------------------------------------------------
  // NaN and Inf that masked pairs would let through
  // ------------------------------------------------------------------------------------------------------------------

  // multiply() over the visible pairs alone.
  __device__ __forceinline__ void multiply_carefully(int chunk, int n) {
    const uint32_t ds = ds_tile(buffer_);
    if constexpr (C::kLag > 0) barrier_wait(ds_empty(buffer_), n >> 1 & 1 ^ 1);
#pragma unroll
    for (int part = 0; part < C::kParts; ++part) {
      if (part > 0) redo_dp(part);
      derivatives(part);
#pragma unroll
      for (float &x : dp_) x += 0.f;  // a visible -0 is no mask
      this->template for_masked<64>(first_key(), chunk * C::kRows + part * 64, [&](int at) { dp_[at] = kMasked; });
      round(ds_weights_[part], dp_);
      put_ds(ds, part);
      add_exactly(dk_, ds_weights_[part], q_tile(at_) + part * 64 * 128);
    }
    add_exactly(dv_, p_weights_, dout_tile(at_));
    if (n < C::kLag) return;
    await_ds(n - C::kLag);
    dq_exactly(ds_tile(buffer_ ^ C::kLag));
    put_dq(n - C::kLag);
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
        const uint32_t pair = ld_shared_4(dq_rows(ds) + key * 128 + (((row / 8) ^ (key & 7)) << 4) + row % 8 / 2 * 4);
        bits[r] = (row & 1) ? pair >> 16 : pair & 0xFFFFu;
      }
      add_row<C::kKeys, C::kDqColumns>(dq_, bits, dq_columns(), key);
    }
  }

  int group_;

  int at_, buffer_;              // the chunk's place in the rings, and that of its dS
  bool careful_before_ = false;  // the chunk before had to be multiplied carefully
  float s_[C::kRows / 2], dp_[32], dq_[C::kDqColumns / 2];
  uint32_t p_weights_[C::kRows / 16][4], ds_weights_[C::kParts][4][4];
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
