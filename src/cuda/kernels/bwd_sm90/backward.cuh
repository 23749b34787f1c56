// SPDX-License-Identifier: Apache-2.0
// Exact attention backward with the asynchronous products of sm_90a: dk and dv, and the sum for dq.
//
// A block of threads works on one block of keys after another, as many blocks of threads as there are multiprocessors: 128 keys of one key
// head, with K and V in shared memory, and a walk over the queries that see them, head after head of the GQA group, in chunks of kRows. A
// warp takes the next block of keys and describes it, one fetches Q, dO and their statistics through rings of kStages, those of the next
// block under the last chunks of this one. Each of two warpgroups owns 64 keys, with their dk and dv in registers, and computes scores
// transposed, keys as rows:
//
//   for every chunk:
//       S^T = K Q^T and dP^T = V dO^T start, dP of 64 queries
//       S is done: P^T = exp2(S^T - lse) under dP, rounded
//       dP is done: dv += P^T dO starts, under it dS^T = P^T (dP^T - delta), rounded, to shared memory
//       a first part of dk += dS^T Q starts; under it dS of the other 64 queries, if there are any
//       dq = dS K of the chunk before, a half of the columns or of the queries a warpgroup, and the rest of dk start; under the latter
//       dq goes to shared memory, from where the copy engine, on the word of a warp a group, adds it to the sum over blocks of keys
//
// P and dS enter dv and dk as left operands straight from registers. dq needs dS of both groups: a chunk behind, neither waits for what the
// other has just begun, and one's exponentials fall under the other's products.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90/backward_block.cuh"

namespace fa::cuda::sm90 {

template <typename Element_, int kD_, int kGroups_, int kRows_, int kStages_, bool kScored_>
struct BackwardConfig {
  using Element = Element_;
  static constexpr int kD = kD_, kGroups = kGroups_, kRows = kRows_, kStages = kStages_;
  static constexpr bool kScored = kScored_;
  static constexpr int kThreads = (kGroups + 1) * 128, kKeys = kGroups * 64, kSlabs = (kD + 63) / 64;
  static constexpr int kConsumers = kGroups * 128, kConsumerRegisters = 240, kProducerRegisters = 24;
  static constexpr bool kShuffledNumbers = !kScored;  // those for other scores would spill them
  static constexpr bool kAdderFences = true;          // dq that lies in shared memory, not those that put it there
  static constexpr int kParts = kRows / 64;           // of a chunk: dP has registers for 64 queries
  static constexpr int kKBytes = kKeys * kSlabs * 128, kQBytes = kRows * kSlabs * 128;
  // dq of a chunk: 64 rows x kDqColumns a warpgroup, 16 rows a warp.
  static constexpr int kDqRowParts = kRows / 64, kDqColumns = kD * kDqRowParts / kGroups;
  static constexpr int kShares = kGroups, kShareBytes = 64 * kDqColumns * 4;
  static constexpr int kDsBytes = kKeys * kRows * 2, kStatBytes = kRows * 4;
  static constexpr int kQOffset = 2 * kKBytes, kDsOffset = kQOffset + 2 * kStages * kQBytes;
  static constexpr int kDqOffset = kDsOffset + 2 * kDsBytes, kStatOffset = kDqOffset + kShares * kShareBytes;
  static constexpr int kBarrierOffset = kStatOffset + 2 * kStages * kStatBytes;
  static constexpr int kBlockOffset = kBarrierOffset + (12 + 2 * kGroups + 4 * kStages) * 8,
                       kSharedBytes = kBlockOffset + 4 * 64;
  // Columns of a slab of K: those of a group's dq lie in one. A slab is 64 wide, whatever of it is used.
  static constexpr int kKeyColumns = kD / kSlabs;
  static_assert(kRows % 64 == 0 && kGroups % kDqRowParts == 0 && kDqColumns == kKeyColumns);
};

template <class C>
class Backward : BackwardBlock<C> {
 public:
  __device__ __forceinline__ Backward(const BackwardParams &params, char *shared) : Base(params, shared) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      mbarrier_init(k_full(), 1);
      mbarrier_init(v_full(), 1);
      mbarrier_init(keys_empty(), C::kGroups * 4);
      mbarrier_init(fetched(), 1);
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(planned(n), 1);
        mbarrier_init(done(n), C::kGroups * 4 + C::kShares + 1);
      }
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(ds_full(n), C::kGroups * 4);
        mbarrier_init(ds_empty(n), C::kGroups * 4);
      }
      for (int n = 0; n < C::kGroups; ++n) {
        mbarrier_init(dq_full(n), 4);
        mbarrier_init(dq_empty(n), 1);
      }
      for (int n = 0; n < C::kStages; ++n) {
        mbarrier_init(q_full(n), 1);
        mbarrier_init(q_empty(n), C::kGroups * 4);
        mbarrier_init(dout_full(n), 1);
        mbarrier_init(dout_empty(n), C::kGroups * 4);
      }
      mbarrier_init_fence();
    } else if (threadIdx.x == 32) {
      for (const CUtensorMap *map : {&a_.k_map, &a_.q_map, &a_.lse_map, &a_.v_map, &a_.dout_map, &a_.delta_map})
        tma_prefetch_descriptor(map);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      static_assert(C::kShares == 2);
      if (warp_ == 0) {
        produce();
      } else if (warp_ == 3) {
        plan();
      } else {
        add_dq(warp_ - 1);
      }
    } else {
      setmaxnreg_alloc<C::kConsumerRegisters>();
      group_ = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128 - 1), 0);  // the same for the warp, and known to be
      consume();
    }
  }

 private:
  using Base = BackwardBlock<C>;
  using Base::a_, Base::b, Base::blocks_, Base::lane_, Base::place_, Base::p_, Base::shared_, Base::warp_;
  using Base::add_exactly, Base::add_row, Base::chunks_at, Base::round, Base::stat, Base::zero_if_finite;
  using typename Base::Element, typename Base::Stats;

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
  __device__ __forceinline__ uint32_t dq_tile(int group) const { return shared_ + C::kDqOffset + group * C::kShareBytes; }
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
  __device__ __forceinline__ uint32_t keys_empty() const { return q_full(4 * C::kStages); }
  __device__ __forceinline__ uint32_t fetched() const { return q_full(4 * C::kStages + 1); }
  __device__ __forceinline__ uint32_t planned(int n) const { return q_full(4 * C::kStages + 2 + n); }
  __device__ __forceinline__ uint32_t done(int n) const { return q_full(4 * C::kStages + 4 + n); }

  // Whether there are registers for lse, and for delta, of a chunk ahead of their use.
  static constexpr bool kLseAhead = !C::kScored && C::kParts == 1, kDeltaAhead = kLseAhead && C::kD < 128;
  using Slot = PipelineState<C::kStages>;

  __device__ __forceinline__ int first_key() const { return b().key0 + group_ * 64; }

  // ------------------------------------------------------------------------------------------------------------------
  // One block of keys after another: item 0, 1, ... of this block of threads
  // ------------------------------------------------------------------------------------------------------------------

  // Describes them, two places in shared memory. The next one is taken when all of this one has been fetched, so that those that start late
  // are taken late, by whoever is free.
  __device__ __forceinline__ void plan() const {
    int index = static_cast<int>(blockIdx.x);
    for (int item = 0;; ++item) {
      mbarrier_wait(done(item & 1), item >> 1 & 1 ^ 1);
      if (item > 0) {
        mbarrier_wait(fetched(), item & 1 ^ 1);
        pdl_wait();
        if (lane_ == 0) index = static_cast<int>(gridDim.x) + atomicAdd(a_.taken, 1);
        index = __shfl_sync(~0u, index, 0);
      }
      const bool more = index < a_.blocks;
      if (lane_ == 0) {
        Block &next = blocks_[(item & 1) * kDescriptions];
        next.item = item;
        if (more) {
          this->find_block(index, next);
        } else {
          next.batch = -1;
        }
        if constexpr (kPassesOver) {
          next.half = more && second_is_blind(next);
          Block &second = blocks_[(item & 1) * kDescriptions + 1];
          second = next;
          second.begin += next.half;
        }
        mbarrier_arrive(planned(item & 1));
      }
      __syncwarp();
      if (!more) return;
    }
  }
  // Whether the second warpgroup sees nothing of the last chunk of the walk, as under a causal mask. It passes over that chunk if no other
  // head follows, and has a description of its own, where the walk is shorter.
  static constexpr bool kPassesOver = C::kParts == 1;
  static constexpr int kDescriptions = kPassesOver ? 2 : 1;
  __device__ __forceinline__ bool second_is_blind(const Block &next) const {
    return p_.group == 1 && next.begin < next.end && (next.begin + 1) * C::kRows - 1 + next.last < next.key0 + 64;
  }
  __device__ __forceinline__ bool next_block(int item) {
    mbarrier_wait(planned(item & 1), item >> 1 & 1);
    place_ = (item & 1) * kDescriptions;
    return b().batch >= 0;
  }
  __device__ __forceinline__ void finish_block(int item) const {
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, done(item & 1));
  }

  __device__ __forceinline__ void add_dq(int share) {
    uint32_t parity = 0;
    pdl_wait();
    for (int item = 0; next_block(item); ++item) {
      this->add_shares(share, dq_tile(share), dq_full(share), dq_empty(share), parity);
      finish_block(item);
    }
    bulk_wait_group();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Fetching
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void produce() {
    Slot slot;
    for (int item = 0; next_block(item); ++item) {
      if (b().begin == b().end) {
        pdl_wait();
        fetch_keys(item, 0);
      } else {
        fetch(slot, item);
      }
      mbarrier_arrive_if(lane_ == 0, fetched());
      finish_block(item);
    }
  }

  // K and V, or nothing, once those of the item before have been used.
  __device__ __forceinline__ void fetch_keys(int item, uint32_t bytes) const {
    mbarrier_wait(keys_empty(), item & 1 ^ 1);
    if (!elect_one()) return;
    const bool packed = p_.k_lengths.cu != nullptr;
    const int row = (packed ? b().k_start : 0) + b().key0, batch = packed ? 0 : b().batch;
    mbarrier_arrive_expect_tx(k_full(), bytes);
    if (bytes > 0)
      this->template fetch_tile<C::kKeys, C::kSlabs, C::kKeyColumns>(k_tile(), a_.k_map, k_full(), row, b().head_k, batch,
                                                                     kEvictFirst);
    mbarrier_arrive_expect_tx(v_full(), bytes);
    if (bytes > 0) this->template fetch_tile<C::kKeys>(v_tile(), a_.v_map, v_full(), row, b().head_k, batch, kEvictFirst);
  }

  __device__ __forceinline__ void fetch(Slot &slot, int item) const {
    const bool packed = p_.q_lengths.cu != nullptr;
    bool first = true;
    for (int g = 0; g < static_cast<int>(p_.group); ++g) {
      const int head_q = b().head_k * static_cast<int>(p_.group) + g;
      for (int chunk = b().end - 1; chunk >= b().begin; --chunk) {
        const int row = (packed ? b().q_start : 0) + chunk * C::kRows, batch = packed ? 0 : b().batch;
        mbarrier_wait(q_empty(slot.stage()), slot.phase() ^ 1);
        if (elect_one()) {
          mbarrier_arrive_expect_tx(q_full(slot.stage()), C::kQBytes + C::kStatBytes);
          this->template fetch_tile<C::kRows>(q_tile(slot.stage()), a_.q_map, q_full(slot.stage()), row, head_q, batch,
                                              kEvictLast);
        }
        // The places of the first K and V are free, those of others as soon as the item before is done.
        if (first && item == 0) {
          fetch_keys(item, C::kKBytes);
          pdl_wait();
        }
        if (elect_one())
          tma_load_4d(lse_row(slot.stage()), &a_.lse_map, q_full(slot.stage()), 0, chunks_at(head_q) + chunk, 0, 0,
                      kEvictFirst);
        mbarrier_wait(dout_empty(slot.stage()), slot.phase() ^ 1);
        if (elect_one()) {
          mbarrier_arrive_expect_tx(dout_full(slot.stage()), C::kQBytes + C::kStatBytes);
          this->template fetch_tile<C::kRows>(dout_tile(slot.stage()), a_.dout_map, dout_full(slot.stage()), row, head_q, batch,
                                              kEvictLast);
          tma_load_4d(delta_row(slot.stage()), &a_.delta_map, dout_full(slot.stage()), 0, chunks_at(head_q) + chunk, 0, 0,
                      kEvictFirst);
        }
        if (first && item > 0) fetch_keys(item, C::kKBytes);
        first = false;
        slot.advance();
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Products, each started and not awaited
  // ------------------------------------------------------------------------------------------------------------------

  // 64 keys of K or V, whose slabs have kColumns, times kCount rows of a chunk.
  template <int kCount, int kColumns = 64>
  __device__ __forceinline__ void start_scores(float (&s)[kCount / 2], uint32_t keys, uint32_t rows) const {
    constexpr int kSteps = kColumns / 16;
    const uint64_t a = descriptor_k_major_uniform(keys + group_ * 64 * 128), b = descriptor_k_major_uniform(rows);
#pragma unroll
    for (int d = 0; d < C::kD / 16; ++d) {
      Wgmma<Element, kCount>::ss_k_k(s, advance_descriptor(a, d / kSteps * C::kKeys * 128 + d % kSteps * 32),
                                     advance_descriptor(b, d / 4 * C::kRows * 128 + d % 4 * 32), d != 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dp(int part) { start_scores<64>(dp_, v_tile(), dout_tile(at_) + part * 64 * 128); }
  // gradient += weights * rows of a chunk from 16 `from` on: kCount steps of 16, of the weights from kFirst on.
  template <int kFirst, int kCount, int kSteps>
  __device__ __forceinline__ void start_gradient(float (&gradient)[C::kD / 2], const uint32_t (&weights)[kSteps][4],
                                                 uint32_t rows, int from) const {
    const uint64_t b = descriptor_mn_major_uniform<C::kRows>(rows);
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      Wgmma<Element, C::kD>::rs_mn(gradient, weights[kFirst + n], advance_descriptor(b, (from + n) * 2048), 1);
    wgmma_commit();
  }
  // dS K: this group's share of the queries and columns. `second`: where the keys begin that the second half of dS is multiplied by.
  __device__ __forceinline__ void start_dq(uint32_t ds, int second = C::kKeys / 2 * 128) {
    const uint64_t a = descriptor_mn_major_uniform<C::kKeys>(dq_rows(ds)),
                   b = descriptor_mn_major_uniform<C::kKeys>(dq_columns());
    constexpr int kSteps = C::kKeys / 16;
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      Wgmma<Element, C::kDqColumns>::ss_mn_mn(dq_, advance_descriptor(a, n * 2048),
                                              advance_descriptor(b, n / (kSteps / 2) * second + n % (kSteps / 2) * 2048),
                                              n != 0);
    }
    wgmma_commit();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over the chunks
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void consume() {
    Slot slot;
    int n = 0;
#pragma unroll 1
    for (int item = 0; next_block(item);) {
      if constexpr (kPassesOver) place_ += group_;
#pragma unroll
      for (int i = 0; i < C::kD / 2; ++i) dk_[i] = dv_[i] = 0.f;
      mbarrier_wait(k_full(), item & 1);
      mbarrier_wait(v_full(), item & 1);
      const bool half = kPassesOver && b().half;
      if (b().begin < b().end || half) {
        int chunk = b().end - 1;
        head_ = 0;
        any_before_ = false;
        careful_before_ = false;
        if (!kPassesOver || chunk >= b().begin) {
#pragma unroll 1
          do {
            at_ = uniform(slot.stage());
            buffer_ = uniform(n & 1);
            step(slot.phase(), n, chunk);
            ++n;
            slot.advance();
            if (--chunk < b().begin) {
              chunk = b().end - 1;
              ++head_;
            }
            any_before_ = true;
          } while (head_ < static_cast<int>(p_.group));
        }
        if (kPassesOver && b().half && group_ == 1) {
          at_ = uniform(slot.stage());
          buffer_ = uniform(n & 1);
          pass_over(slot.phase(), n);
          ++n;
          slot.advance();
        }
        finish_dq(kPassesOver ? opaque(n) : n, kPassesOver && b().half);
      }
      __syncwarp();
      mbarrier_arrive_if(lane_ == 0, keys_empty());
      this->store_gradient(a_.problem.dk, dk_, p_.softmax_scale, static_cast<int>(p_.head_dim), a_.vector_dk, first_key(),
                           group_ * 128 + warp_ * 32 + opaque(lane_), C::kConsumers);
      this->store_gradient(a_.problem.dv, dv_, 1.f, static_cast<int>(p_.head_dim_v), a_.vector_dv, first_key(),
                           group_ * 128 + warp_ * 32 + opaque(lane_), C::kConsumers);
      item = b().item;
      finish_block(item++);
    }
  }

  // The n-th chunk of all, all but its dq, and dq of the one before.
  __device__ __forceinline__ void step(uint32_t parity, int n, int chunk) {
    // Whether pairs are masked says which part of dP comes first: with several, dO is waited for and that is known before S starts.
    bool masked;
    if constexpr (C::kParts > 1) masked = chunk < b().inner_begin || chunk >= b().inner_end;
    mbarrier_wait(q_full(at_), parity);
    if constexpr (C::kParts > 1) mbarrier_wait(dout_full(at_), parity);
    Stats lse;
    if constexpr (kLseAhead) this->load_stats(lse, lse_row(at_));
    fence_operand(s_);
    wgmma_fence();
    start_scores<C::kRows, C::kKeyColumns>(s_, k_tile(), q_tile(at_));
    if constexpr (C::kParts == 1) masked = chunk < b().inner_begin || chunk >= b().inner_end;
    // For dq of the chunk before. By those who multiply dS: behind put_ds() the fence would wait for this warp's stores.
    if (any_before_) await_ds(n - 1);
    fence_proxy_async();
    if constexpr (C::kParts == 1) mbarrier_wait(dout_full(at_), parity);
    fence_operand(dp_);
    wgmma_fence();
    start_dp(masked ? C::kParts - 1 : 0);
    wgmma_wait<1>();
    fence_operand(s_);
    float finite = 0.f;  // or NaN
    if (masked) finite = zero_if_finite(s_);
    if constexpr (kLseAhead) {
      this->weigh(s_, lse);
    } else {
      this->weigh(p_weights_, s_, lse_row(at_), first_key(), chunk * C::kRows,
                  this->alibi_slope(b().head_k * static_cast<int>(p_.group) + head_));
    }
    if (masked) this->mask_weights(p_weights_, s_, first_key(), chunk * C::kRows);
    this->round_weights(p_weights_, s_);
    if constexpr (kDeltaAhead) this->load_stats(delta_, delta_row(at_));
    wgmma_wait<0>();
    fence_operand(dp_);
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
    mbarrier_arrive_if(lane_ == 0, q_empty(at_));
    mbarrier_arrive_if(lane_ == 0, dout_empty(at_));
  }

  __device__ __forceinline__ void redo_dp(int part) {
    fence_operand(dp_);
    wgmma_fence();
    start_dp(part);
    wgmma_wait<0>();
    fence_operand(dp_);
  }

  // From P and dP of the first part to dv and dk, and dq of the chunk before. dk goes in steps of its own: under the last dq leaves.
  __device__ __forceinline__ void multiply(int n) {
    const uint32_t ds = ds_tile(buffer_);
    fence_operand(p_weights_);
    fence_operand(dv_);
    wgmma_fence();
    start_gradient<0, C::kRows / 16>(dv_, p_weights_, dout_tile(at_), 0);
    derivatives(0);
    round(ds_weights_[0], dp_);
    mbarrier_wait(ds_empty(buffer_), n >> 1 & 1 ^ 1);
    put_ds(ds, 0);
    if constexpr (C::kParts == 1) {
      fence_operand(ds_weights_[0]);
      fence_operand(dk_);
      wgmma_fence();
      start_gradient<0, 2>(dk_, ds_weights_[0], q_tile(at_), 0);
    } else {
      fence_operand(dp_);
      fence_operand(ds_weights_[0]);
      fence_operand(dk_);
      wgmma_fence();
      start_dp(1);
      start_gradient<0, 4>(dk_, ds_weights_[0], q_tile(at_), 0);
      wgmma_wait<1>();
      fence_operand(dp_);
      derivatives(1);
      round(ds_weights_[1], dp_);
      put_ds(ds, 1);
      fence_operand(ds_weights_[1]);
    }
    wgmma_fence();
    start_dq(ds_tile(buffer_ ^ 1));
    if constexpr (C::kParts == 1) {
      start_gradient<2, 2>(dk_, ds_weights_[0], q_tile(at_), 2);
    } else {
      start_gradient<0, 4>(dk_, ds_weights_[1], q_tile(at_), 4);
    }
    wgmma_wait<1>();
    fence_operand(dq_);
    if (careful_before_) dq_exactly(ds_tile(buffer_ ^ 1));
    put_dq(n - 1, any_before_);
    wgmma_wait<0>();
    fence_operand(dv_);
    fence_operand(dk_);
  }

  // The n-th chunk of all, of which this group sees nothing: dq of the one before, and dS as where all pairs are masked.
  __device__ __forceinline__ void pass_over(uint32_t parity, int n) {
    mbarrier_wait(q_full(at_), parity);
    mbarrier_wait(dout_full(at_), parity);
    if (any_before_) finish_dq(n, false);
    careful_before_ = named_barrier_or(1, C::kConsumers, false);
    mbarrier_wait(ds_empty(buffer_), n >> 1 & 1 ^ 1);
#pragma unroll
    for (auto &w : ds_weights_[0])
#pragma unroll
      for (uint32_t &x : w) x = kMaskedHalf | kMaskedHalf << 16;
    put_ds(ds_tile(buffer_), 0);
    mbarrier_arrive_if(lane_ == 0, q_empty(at_));
    mbarrier_arrive_if(lane_ == 0, dout_empty(at_));
  }

  // dq of the last of so many chunks. Of `half` of the keys: dS of the others is zero, and is multiplied by the first ones, too, in which NaN
  // and Inf have been looked for.
  __device__ __forceinline__ void finish_dq(int chunks, bool half) {
    const uint32_t ds = ds_tile((chunks - 1) & 1);
    await_ds(chunks - 1);
    fence_proxy_async();
    if (careful_before_) {
      dq_exactly(ds);
    } else {
      fence_operand(dq_);
      wgmma_fence();
      start_dq(ds, half ? 0 : C::kKeys / 2 * 128);
      wgmma_wait<0>();
      fence_operand(dq_);
    }
    put_dq(chunks - 1, true);
  }

  // dP of a part of the chunk to dS, in place.
  __device__ __forceinline__ void derivatives(int part) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 delta = kDeltaAhead ? delta_[j] : stat(delta_row(at_), part * 8 + j);
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
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, ds_full(buffer_));
  }

  // Every warp's dS of the block's n-th chunk is there. Of the chunk before the first nothing is, and nothing of its dq is used.
  __device__ __forceinline__ void await_ds(int n) const { mbarrier_wait(ds_full(n & 1), n >> 1 & 1); }

  // This warp's part of the n-th chunk to its place in shared memory, once that of the chunk before has been read from there, and to the
  // warp that adds it up. Not if there is no such chunk.
  __device__ __forceinline__ void put_dq(int n, bool any) const {
    __syncwarp();
    mbarrier_arrive_if(any && lane_ == 0, ds_empty(n & 1));
    mbarrier_wait(dq_empty(group_), any ? (n & 1) ^ 1 : n & 1);
    this->put_share(dq_, dq_tile(group_));
    __syncwarp();
    mbarrier_arrive_if(any && lane_ == 0, dq_full(group_));
  }

  // ------------------------------------------------------------------------------------------------------------------
  // NaN and Inf that masked pairs would let through
  // ------------------------------------------------------------------------------------------------------------------

  // multiply() over the visible pairs alone.
  __device__ __forceinline__ void multiply_carefully(int chunk, int n) {
    const uint32_t ds = ds_tile(buffer_);
    mbarrier_wait(ds_empty(buffer_), n >> 1 & 1 ^ 1);
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
    if (!any_before_) return;
    dq_exactly(ds_tile(buffer_ ^ 1));
    put_dq(n - 1, true);
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

  Stats delta_;                  // with kDeltaAhead
  int head_;                     // of the group
  bool any_before_;              // chunks of this block of keys before the one at hand
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
