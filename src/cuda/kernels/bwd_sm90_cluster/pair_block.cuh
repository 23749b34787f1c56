// SPDX-License-Identifier: Apache-2.0
// Pairs of blocks of threads for the backward of wide heads: shared memory, fetching, products, and how dq of 128 keys is added up.
//
// 64 keys are as many as the registers of a multiprocessor hold dk and dv of, and too few for dq: the additions to its sum would be what
// everything waits for. So two blocks, a cluster, own 128 keys, 64 each, and exchange dS: each multiplies dS of all 128 keys by half of K's
// columns. A block holds its own K and V, and of the other's K its half of the columns.
//
// Of a block's two warpgroups one has dv, one dk. Who computes what else is up to backward_pair.cuh and backward_pair_scores.cuh.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90/backward_block.cuh"

namespace fa::cuda::sm90 {

// Without a branch around it.
__device__ __forceinline__ void barrier_wait_if(bool condition, uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "setp.eq.b32 done, %2, 0;\n"
      "again:\n"
      "@!done mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity), "r"(static_cast<int>(condition))
      : "memory");
}

// kOrdered: blocks of keys can add to dq in an order. kHandsP: P goes from one warpgroup to the other through shared memory, and dq to the sum from registers; else the copy engine adds it.
template <typename Element_, int kD_, int kDv_, int kRows_, int kStages_, int kDoutStages_, bool kHandsP_, bool kScored_,
          bool kOrdered_>
struct PairConfig {
  using Element = Element_;
  static constexpr int kD = kD_, kDv = kDv_, kRows = kRows_, kStages = kStages_, kDoutStages = kDoutStages_;
  static constexpr bool kHandsP = kHandsP_, kScored = kScored_, kOrdered = kOrdered_, kShuffledNumbers = false,
                        kAdderFences = true;
  static constexpr bool kStays = false;
  static constexpr int kThreads = 384, kKeys = 128, kSlabs = kD / 64, kValueSlabs = kDv / 64;
  static constexpr int kConsumers = 256, kConsumerRegisters = kHandsP ? 240 : 232, kProducerRegisters = kHandsP ? 24 : 40;
  // K lies as two halves of its columns, each in slabs of its own, so that either is an operand for dq.
  static constexpr int kHalf = kD / 2, kHalfSlabs = (kHalf + 63) / 64;
  static constexpr int kDqColumns = kHalf % 64 == 0 ? 64 : kHalf, kDqParts = kHalf / kDqColumns;  // of a product for dq
  static constexpr int kHalfBytes = 64 * kHalfSlabs * 128, kKBytes = 2 * kHalfBytes, kVBytes = 64 * kValueSlabs * 128;
  static constexpr int kQBytes = kRows * kSlabs * 128, kDoutBytes = kRows * kValueSlabs * 128;
  static constexpr int kShares = 2, kShareBytes = kRows * kHalf * 4;
  static constexpr int kHandedBytes = kHandsP ? 64 * kRows * 4 : kShareBytes, kDsBytes = 64 * kRows * 2, kStatBytes = kRows * 4;
  // K | V | half of the other block's K | ring of Q | ring of dO | P or dq | dS and the other block's, two of each | lse, delta | barriers |
  // flags
  static constexpr int kQOffset = kKBytes + kVBytes + kHalfBytes, kDoutOffset = kQOffset + kStages * kQBytes;
  static constexpr int kHandedOffset = kDoutOffset + kDoutStages * kDoutBytes, kDsOffset = kHandedOffset + kHandedBytes;
  static constexpr int kStatOffset = kDsOffset + 4 * kDsBytes,
                       kBarrierOffset = kStatOffset + (kStages + kDoutStages) * kStatBytes;
  static constexpr int kHanded = !kHandsP ? 5 : kOrdered ? 6 : 3, kBarriers = 8 + kHanded + 2 * (kStages + kDoutStages);
  static constexpr int kFlagOffset = kBarrierOffset + (kBarriers + 1) / 2 * 16, kBlockOffset = kFlagOffset + 16;
  static constexpr int kSharedBytes = kBlockOffset + 64;
  static_assert(kRows == 64 && kD % 64 == 0 && kDv % 64 == 0 && kHalf % kDqColumns == 0 && kBlockOffset % 16 == 0);
  static_assert((kDoutStages & (kDoutStages - 1)) == 0);
};

// Of pairs that stay. Behind what all pairs have: barriers | the number of the next block of keys | two descriptions
template <class Pair>
struct StayingConfig : Pair {
  static constexpr bool kStays = true, kShuffledNumbers = true;
  static constexpr int kStayOffset = Pair::kBlockOffset, kStayBarriers = 10,
                       kBlockOffset = kStayOffset + kStayBarriers * 8 + 16, kSharedBytes = kBlockOffset + 2 * 64;
};

template <class C>
class PairBlock : protected BackwardBlock<C> {
 protected:
  using Base = BackwardBlock<C>;
  using Base::a_, Base::b, Base::blocks_, Base::lane_, Base::p_, Base::place_, Base::shared_, Base::warp_;
  using Base::add_exactly, Base::add_row, Base::chunks_at, Base::round, Base::stat, Base::zero_if_finite;
  using typename Base::Element, typename Base::Stats;
  using Slot = PipelineState<C::kStages>;
  using Dq = float[C::kDqColumns / 2];  // a part of a chunk's dq

  __device__ __forceinline__ PairBlock(const BackwardParams &params, char *shared)
      : Base(params, shared), rank_(static_cast<int>(blockIdx.x) & 1) {}

  __device__ __forceinline__ uint32_t k_tile() const { return shared_; }
  __device__ __forceinline__ uint32_t v_tile() const { return shared_ + C::kKBytes; }
  // This block's half of the columns.
  __device__ __forceinline__ uint32_t other_k_tile() const { return v_tile() + C::kVBytes; }
  __device__ __forceinline__ uint32_t q_tile(int n) const { return shared_ + C::kQOffset + n * C::kQBytes; }
  __device__ __forceinline__ uint32_t dout_tile(int n) const { return shared_ + C::kDoutOffset + n * C::kDoutBytes; }
  // (keys, queries), of this block's keys (0) and of the other's (1)
  __device__ __forceinline__ uint32_t ds_tile(int n, int whose) const {
    return shared_ + C::kDsOffset + (2 * n + whose) * C::kDsBytes;
  }
  __device__ __forceinline__ uint32_t lse_row(int n) const { return shared_ + C::kStatOffset + n * C::kStatBytes; }
  __device__ __forceinline__ uint32_t delta_row(int n) const { return lse_row(C::kStages + n); }
  __device__ __forceinline__ uint32_t k_full() const { return shared_ + C::kBarrierOffset; }
  __device__ __forceinline__ uint32_t v_full() const { return k_full() + 8; }
  __device__ __forceinline__ uint32_t dout_full(int n) const { return k_full() + 16 + n * 8; }
  __device__ __forceinline__ uint32_t dout_empty(int n) const { return dout_full(C::kDoutStages + n); }
  // kHanded that each design uses in its own way.
  __device__ __forceinline__ uint32_t handed(int n) const { return dout_full(2 * C::kDoutStages + n); }
  // The half of the other block's K, which dq is the first to need. backward_pair.cuh waits for it together with K.
  __device__ __forceinline__ uint32_t other_k_full() const {
    if constexpr (C::kStays) return staying(0);
    return k_full();
  }
  __device__ __forceinline__ uint32_t ds_full(int n) const { return handed(C::kHanded + n); }
  __device__ __forceinline__ uint32_t ds_empty(int n) const { return ds_full(2 + n); }
  __device__ __forceinline__ uint32_t ds_used(int n) const { return ds_full(4 + n); }
  __device__ __forceinline__ uint32_t q_full(int n) const { return ds_full(6 + n); }
  __device__ __forceinline__ uint32_t q_empty(int n) const { return q_full(C::kStages + n); }
  // Numbers that travel with dS: of the other block (0, 1), and two more.
  __device__ __forceinline__ uint32_t flag(int n) const { return shared_ + C::kFlagOffset + n * 4; }
  __device__ __forceinline__ int first_key() const { return b().key0 + rank_ * 64; }
  __device__ __forceinline__ bool masked(int chunk) const { return chunk < b().inner_begin || chunk >= b().inner_end; }
  // The limits of the walk in registers: shared memory answers late while products read from it, and a chunk asks for one after another.
  struct Walk {
    int begin, end, inner_begin, inner_end;
    __device__ __forceinline__ bool masked(int chunk) const { return chunk < inner_begin || chunk >= inner_end; }
  };
  __device__ __forceinline__ Walk walk() const {
    const Block &block = b();
    return {block.begin, block.end, block.inner_begin, block.inner_end};
  }
  __device__ __forceinline__ int chunks() const { return (b().end - b().begin) * static_cast<int>(p_.group); }
  // The place in the other block's shared memory.
  __device__ __forceinline__ uint32_t there(uint32_t address) const { return map_to_cta(address, rank_ ^ 1); }

  // ------------------------------------------------------------------------------------------------------------------
  // Fetching
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void prefetch_maps() const {
    for (const CUtensorMap *map : {&a_.k_map, &a_.q_map, &a_.lse_map, &a_.v_map, &a_.dout_map, &a_.delta_map})
      tma_prefetch_descriptor(map);
  }

  __device__ __forceinline__ void produce() const {
    const Block block = b();
    if (block.begin == block.end) return pdl_wait();
    const bool packed_q = p_.q_lengths.cu != nullptr, packed_k = p_.k_lengths.cu != nullptr;
    const int k_row = (packed_k ? block.k_start : 0) + block.key0, q_row = packed_q ? block.q_start : 0;
    const int q_batch = packed_q ? 0 : block.batch, k_batch = packed_k ? 0 : block.batch;
    if (elect_one()) {
      mbarrier_arrive_expect_tx(k_full(), C::kKBytes + (C::kHandsP ? C::kHalfBytes : 0));
      if constexpr (!C::kHandsP) mbarrier_arrive_expect_tx(other_k_full(), C::kHalfBytes);
#pragma unroll
      for (int n = 0; n < 2 * C::kHalfSlabs; ++n)
        fetch_keys(k_tile() + n * 64 * 128, k_full(), n / C::kHalfSlabs, n % C::kHalfSlabs, k_row + rank_ * 64, block.head_k,
                   k_batch);
    }
    PipelineState<C::kDoutStages> dout_slot;
    Slot slot;
    for (int g = 0; g < static_cast<int>(p_.group); ++g) {
      const int head_q = block.head_k * static_cast<int>(p_.group) + g;
      for (int chunk = block.end - 1; chunk >= block.begin; --chunk) {
        const bool first = g == 0 && chunk == block.end - 1;
        mbarrier_wait(q_empty(slot.stage()), slot.phase() ^ 1);
        if (elect_one()) {
          mbarrier_arrive_expect_tx(q_full(slot.stage()), C::kQBytes + C::kStatBytes);
          this->template fetch_tile<C::kRows>(q_tile(slot.stage()), a_.q_map, q_full(slot.stage()), q_row + chunk * C::kRows,
                                              head_q, q_batch, kEvictLast);
          if (first) {
            mbarrier_arrive_expect_tx(v_full(), C::kVBytes);
            this->template fetch_tile<64, C::kValueSlabs>(v_tile(), a_.v_map, v_full(), k_row + rank_ * 64, block.head_k,
                                                          k_batch, kEvictFirst);
            pdl_wait();
          }
          tma_load_4d(lse_row(slot.stage()), &a_.lse_map, q_full(slot.stage()), 0, chunks_at(head_q) + chunk, 0, 0,
                      kEvictFirst);
        }
        mbarrier_wait(dout_empty(dout_slot.stage()), dout_slot.phase() ^ 1);
        if (elect_one()) {
          mbarrier_arrive_expect_tx(dout_full(dout_slot.stage()), C::kDoutBytes + C::kStatBytes);
          this->template fetch_tile<C::kRows, C::kValueSlabs>(dout_tile(dout_slot.stage()), a_.dout_map,
                                                              dout_full(dout_slot.stage()), q_row + chunk * C::kRows, head_q,
                                                              q_batch, kEvictLast);
          tma_load_4d(delta_row(dout_slot.stage()), &a_.delta_map, dout_full(dout_slot.stage()), 0, chunks_at(head_q) + chunk,
                      0, 0, kEvictFirst);
          for (int s = 0; first && s < C::kHalfSlabs; ++s)
            fetch_keys(other_k_tile() + s * 64 * 128, other_k_full(), rank_, s, k_row + (rank_ ^ 1) * 64, block.head_k,
                       k_batch);
        }
        dout_slot.advance();
        slot.advance();
      }
    }
  }
  // A slab of half of the columns of 64 keys.
  __device__ __forceinline__ void fetch_keys(uint32_t tile, uint32_t barrier, int half, int slab, int row, int head,
                                             int batch) const {
    tma_load_4d(tile, &a_.k_map, barrier, half * C::kHalf + slab * 64, row, head, batch, kEvictFirst);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Pairs that stay: one block of keys after another, item 0, 1, ... of this pair
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t staying(int n) const { return shared_ + C::kStayOffset + n * 8; }
  __device__ __forceinline__ uint32_t keys_empty() const { return staying(1); }
  __device__ __forceinline__ uint32_t v_empty() const { return staying(2); }
  __device__ __forceinline__ uint32_t fetched() const { return staying(3); }
  __device__ __forceinline__ uint32_t told() const { return staying(4); }
  __device__ __forceinline__ uint32_t heard() const { return staying(5); }
  __device__ __forceinline__ uint32_t planned(int n) const { return staying(6 + n); }
  __device__ __forceinline__ uint32_t done(int n) const { return staying(8 + n); }
  __device__ __forceinline__ uint32_t message() const { return staying(C::kStayBarriers); }

  // Readers: warps that arrive with finish_block(). Warps that multiply with K.
  __device__ __forceinline__ void init_stay(int readers, int key_readers) const {
    mbarrier_init(other_k_full(), 1);
    mbarrier_init(keys_empty(), key_readers);
    mbarrier_init(v_empty(), 4);
    mbarrier_init(fetched(), 1);
    mbarrier_init(told(), 1);
    mbarrier_init(heard(), 1);
    for (int n = 0; n < 2; ++n) {
      mbarrier_init(planned(n), 1);
      mbarrier_init(done(n), readers);
    }
  }

  // Describes the item, `count` chunks up to its end, once the one before the last is done: false behind the last.
  __device__ __forceinline__ bool plan_item(int item, int &count) const {
    mbarrier_wait(done(item & 1), item >> 1 & 1 ^ 1);
    const int index = item > 0 ? next_index(item) : static_cast<int>(blockIdx.x) / 2;
    const bool more = index < a_.blocks;
    if (lane_ == 0) {
      Block &next = blocks_[item & 1];
      next.item = item;
      if (more) {
        this->find_block(index, next);
        count += (next.end - next.begin) * static_cast<int>(p_.group);
        next.chunks = count;
      } else {
        next.batch = -1;
      }
      mbarrier_arrive(planned(item & 1));
    }
    __syncwarp();
    return more;
  }
  // One block of the pair takes it, when all of the one before has been fetched, and tells the other, which may be behind.
  __device__ __forceinline__ int next_index(int item) const {
    int index = 0;
    if (rank_ == 0) {
      mbarrier_wait(fetched(), item & 1 ^ 1);
      pdl_wait();
      if (lane_ == 0) index = static_cast<int>(gridDim.x) / 2 + atomicAdd(a_.taken, 1);
      index = __shfl_sync(~0u, index, 0);
      mbarrier_wait_cluster(heard(), item & 1);
      if (lane_ == 0) st_async(there(message()), index, there(told()));
    } else {
      if (lane_ == 0) mbarrier_arrive_expect_tx(told(), 4);
      mbarrier_wait_cluster(told(), item & 1 ^ 1);
      index = static_cast<int>(ld_shared_4(message()));
      __syncwarp();
      mbarrier_arrive_remote_if(lane_ == 0, there(heard()));
    }
    return index;
  }
  __device__ __forceinline__ bool next_block(int item) {
    mbarrier_wait(planned(item & 1), item >> 1 & 1);
    place_ = item & 1;
    return static_cast<int>(ld_shared_4(shared_ + C::kBlockOffset + place_ * static_cast<int>(sizeof(Block)))) >= 0;
  }
  __device__ __forceinline__ void finish_block(int item) const {
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, done(item & 1));
  }
  // Calls f(n) for every item with the number of chunks before it, to which f adds those of this one.
  template <typename F>
  __device__ __forceinline__ void each_item(F f) {
    int n = 0;
    for (int item = 0; next_block(item); ++item) {
      f(n);
      finish_block(item);
    }
  }

  using DoutSlot = PipelineState<C::kDoutStages>;
  __device__ __forceinline__ void fetch_item(Slot &slot, DoutSlot &dout_slot) const {
    if (b().begin == b().end) {
      pdl_wait();
      fetch_v(false);
      fetch_k(false);
      fetch_other_k(false);
    } else {
      fetch_some(slot, dout_slot);
    }
    mbarrier_arrive_if(lane_ == 0, fetched());
  }
  __device__ __forceinline__ void fetch_some(Slot &slot, DoutSlot &dout_slot) const {
    const bool packed = p_.q_lengths.cu != nullptr;
    for (int g = 0; g < static_cast<int>(p_.group); ++g) {
      const int head_q = b().head_k * static_cast<int>(p_.group) + g;
      for (int chunk = b().end - 1; chunk >= b().begin; --chunk) {
        const int row = (packed ? b().q_start : 0) + chunk * C::kRows, batch = packed ? 0 : b().batch;
        const bool first = g == 0 && chunk == b().end - 1;
        if (first && b().item == 0) fetch_k(true);
        const int at = slot.stage(), dout_at = dout_slot.stage();
        mbarrier_wait(q_empty(at), slot.phase() ^ 1);
        if (elect_one()) {
          mbarrier_arrive_expect_tx(q_full(at), C::kQBytes + C::kStatBytes);
          this->template fetch_tile<C::kRows>(q_tile(at), a_.q_map, q_full(at), row, head_q, batch, kEvictLast);
        }
        if (first) {
          fetch_v(true);
          pdl_wait();
        }
        if (elect_one()) tma_load_4d(lse_row(at), &a_.lse_map, q_full(at), 0, chunks_at(head_q) + chunk, 0, 0, kEvictFirst);
        mbarrier_wait(dout_empty(dout_at), dout_slot.phase() ^ 1);
        if (elect_one()) {
          mbarrier_arrive_expect_tx(dout_full(dout_at), C::kDoutBytes + C::kStatBytes);
          this->template fetch_tile<C::kRows, C::kValueSlabs>(dout_tile(dout_at), a_.dout_map, dout_full(dout_at), row, head_q,
                                                              batch, kEvictLast);
          tma_load_4d(delta_row(dout_at), &a_.delta_map, dout_full(dout_at), 0, chunks_at(head_q) + chunk, 0, 0, kEvictFirst);
        }
        if (first) {
          if (b().item > 0) fetch_k(true);
          fetch_other_k(true);
        }
        slot.advance();
        dout_slot.advance();
      }
    }
  }

  // K, V, the half of the other block's K: or nothing, once those of the item before have been used.
  __device__ __forceinline__ void fetch_k(bool any) const {
    mbarrier_wait(keys_empty(), b().item & 1 ^ 1);
    if (!elect_one()) return;
    mbarrier_arrive_expect_tx(k_full(), any ? C::kKBytes : 0);
    if (!any) return;
#pragma unroll
    for (int n = 0; n < 2 * C::kHalfSlabs; ++n)
      fetch_keys(k_tile() + n * 64 * 128, k_full(), n / C::kHalfSlabs, n % C::kHalfSlabs, key_row(rank_), b().head_k,
                 key_batch());
  }
  __device__ __forceinline__ void fetch_other_k(bool any) const {
    if (!elect_one()) return;
    mbarrier_arrive_expect_tx(other_k_full(), any ? C::kHalfBytes : 0);
    if (!any) return;
#pragma unroll
    for (int s = 0; s < C::kHalfSlabs; ++s)
      fetch_keys(other_k_tile() + s * 64 * 128, other_k_full(), rank_, s, key_row(rank_ ^ 1), b().head_k, key_batch());
  }
  __device__ __forceinline__ void fetch_v(bool any) const {
    mbarrier_wait(v_empty(), b().item & 1 ^ 1);
    if (!elect_one()) return;
    mbarrier_arrive_expect_tx(v_full(), any ? C::kVBytes : 0);
    if (any) {
      this->template fetch_tile<64, C::kValueSlabs>(v_tile(), a_.v_map, v_full(), key_row(rank_), b().head_k, key_batch(),
                                                    kEvictFirst);
    }
  }
  __device__ __forceinline__ int key_row(int rank) const {
    return (p_.k_lengths.cu != nullptr ? b().k_start : 0) + b().key0 + rank * 64;
  }
  __device__ __forceinline__ int key_batch() const { return p_.k_lengths.cu != nullptr ? 0 : b().batch; }

  // ------------------------------------------------------------------------------------------------------------------
  // Products, each started and not awaited
  // ------------------------------------------------------------------------------------------------------------------

  // K Q^T and V dO^T: 64 keys times the rows of a chunk. Where K is given as a number known to be uniform and worked out in every chunk, its
  // operands are not kept from chunk to chunk, for which there are too few uniform registers.
  __device__ __forceinline__ void start_scores(float (&s)[C::kRows / 2], uint32_t keys, uint32_t rows) const {
    const uint64_t a = descriptor_k_major_uniform(keys), b = descriptor_k_major_uniform(rows);
#pragma unroll
    for (int d = 0; d < C::kD / 16; ++d) {
      const int half = d / (C::kHalf / 16), step = d % (C::kHalf / 16);
      Wgmma<Element, C::kRows>::ss_k_k(s, advance_descriptor(a, half * C::kHalfBytes + step / 4 * 64 * 128 + step % 4 * 32),
                                       advance_descriptor(b, d / 4 * C::kRows * 128 + d % 4 * 32), d != 0);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void start_dp(float (&dp)[C::kRows / 2], uint32_t rows) const {
    const uint64_t a = descriptor_k_major_uniform(v_tile()), b = descriptor_k_major_uniform(rows);
#pragma unroll
    for (int d = 0; d < C::kDv / 16; ++d) {
      Wgmma<Element, C::kRows>::ss_k_k(dp, advance_descriptor(a, d / 4 * 64 * 128 + d % 4 * 32),
                                       advance_descriptor(b, d / 4 * C::kRows * 128 + d % 4 * 32), d != 0);
    }
    wgmma_commit();
  }
  // gradient += weights * rows of a chunk.
  template <int kCount>
  __device__ __forceinline__ void start_gradient(float (&gradient)[kCount], const uint32_t (&weights)[C::kRows / 16][4],
                                                 uint32_t rows) const {
    const uint64_t b = descriptor_mn_major_uniform<C::kRows>(rows);
#pragma unroll
    for (int n = 0; n < C::kRows / 16; ++n)
      Wgmma<Element, 2 * kCount>::rs_mn(gradient, weights[n], advance_descriptor(b, n * 2048), 1);
    wgmma_commit();
  }
  // A part of the columns of dS K, over the keys of both blocks.
  __device__ __forceinline__ void start_dq(Dq &dq, int buffer, int part) const {
#pragma unroll
    for (int whose = 0; whose < 2; ++whose) {
      const uint64_t a = descriptor_mn_major_uniform<64>(ds_tile(buffer, whose)),
                     b = descriptor_mn_major_uniform<64>(dq_keys(whose, part));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        Wgmma<Element, C::kDqColumns>::ss_mn_mn(dq, advance_descriptor(a, n * 2048), advance_descriptor(b, n * 2048),
                                                whose != 0 || n != 0);
      }
    }
    wgmma_commit();
  }
  // Of this block's half of the columns of K.
  __device__ __forceinline__ uint32_t dq_keys(int whose, int part) const {
    return (whose == 0 ? k_tile() + rank_ * C::kHalfBytes : other_k_tile()) + part * 64 * 128;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Between products
  // ------------------------------------------------------------------------------------------------------------------

  // This warp's 16 keys of dS^T, for products of this block; and, from one lane behind a fence, for those of the other.
  __device__ __forceinline__ void write_ds(const uint32_t (&w)[C::kRows / 16][4], int buffer) const {
    const int key = warp_ * 16 + (lane_ & 15);
#pragma unroll
    for (int n = 0; n < C::kRows / 16; ++n) {
      stmatrix_x4(ds_tile(buffer, 0) + key * 128 + (((2 * n + (lane_ >> 4)) ^ (key & 7)) << 4), w[n][0], w[n][1], w[n][2],
                  w[n][3]);
    }
  }
  __device__ __forceinline__ void send_ds(int buffer, int bytes, int from) const {
    bulk_copy_to_cta(there(ds_tile(buffer, 1) + from), ds_tile(buffer, 0) + from, bytes, there(ds_full(buffer)));
  }
  // Neither block may overwrite it before both have multiplied it. A warp tells both that this one has: the arrival there, which stands for
  // all that came before it, takes a thousand cycles.
  __device__ __forceinline__ void release_ds(bool any, int buffer) const {
    __syncwarp();
    mbarrier_arrive_if(any && lane_ == 0, ds_used(buffer));
  }
  __device__ __forceinline__ void pass_release(int n) const {
    const int buffer = n & 1;
    mbarrier_wait(ds_used(buffer), n >> 1 & 1);
    mbarrier_arrive_if(lane_ == 0, ds_empty(buffer));
    mbarrier_arrive_remote_if(lane_ == 0, there(ds_empty(buffer)));
  }

  // Q of the chunk that follows; after the last one nothing is awaited, and the product of what is there is not used.
  __device__ __forceinline__ void await_q(bool more, int at, uint32_t parity) const {
    mbarrier_wait(q_full(at), more ? parity : parity ^ 1);
  }

  __device__ __forceinline__ void dq_exactly(Dq &dq, int buffer, int part) const {
#pragma unroll
    for (float &x : dq) x = 0.f;
#pragma unroll 1
    for (int key = 0; key < C::kKeys; ++key) {
      const uint32_t ds = ds_tile(buffer, key / 64) + key % 64 * 128;
      uint32_t bits[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp_ * 16 + (lane_ >> 2) + 8 * r;
        const uint32_t pair = ld_shared_4(ds + (((row / 8) ^ (key & 7)) << 4) + row % 8 / 2 * 4);
        bits[r] = (row & 1) ? pair >> 16 : pair & 0xFFFFu;
      }
      this->template add_row<64, C::kDqColumns>(dq, bits, dq_keys(key / 64, part), key % 64);
    }
  }

  template <int kCount>
  __device__ __forceinline__ void store(const Operand &t, const float (&acc)[kCount], float scale, int columns,
                                        bool vectors) const {
    this->store_gradient(t, acc, scale, columns, vectors, first_key(), rank_ * 128 + warp_ * 32 + lane_, 256);
  }

  const int rank_;  // of the block in its pair
};

}  // namespace fa::cuda::sm90
