// SPDX-License-Identifier: Apache-2.0
// The warps that fetch keys and values, one of which plans. Each has a quarter of every tile.
#pragma once

#include "cuda/decode/boxes.cuh"
#include "cuda/extend/block.cuh"

namespace fa::cuda::extend {

// More bytes to wait for in this phase, without an arrival.
__device__ __forceinline__ void barrier_expect_more(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}

template <class C>
class Producer : private decode::Planner<Block<C>, true> {
 public:
  using Base = decode::Planner<Block<C>, true>;
  using Element = typename C::Element;

  using Base::Base;

  __device__ __forceinline__ void run() {
    warp_ = static_cast<int>(uniform(threadIdx.x >> 5)) & 3;
    uint32_t pieces = 0;
    decode::Work<C> work(a_);
    this->each_piece(work, [&](int range) {
      if (warp_ == 0) {
        // Those who are to make room may be waiting for what is gathered.
        if (!__all_sync(~0u, this->has_place(pieces))) settle();
        write_plan(pieces++, work, range);
      }
      // Pages are asked for two tiles ahead.
      Place place = place_in(this->tile_), next = place_in(this->tile_ + 1);
#pragma unroll 1
      for (int tile = this->tile_; tile < this->end_tile_; ++tile) {
        const Place later = place_in(tile + 2);
        const bool whole_runs = has_whole_runs(tile);
        fetch(p_.k, a_.k_map, p_.head_dim, place, whole_runs);
        fetch(p_.v, a_.v_map, p_.head_dim_v, place, whole_runs);
        place = next;
        next = later;
      }
    });
    settle();
    if (warp_ == 0) this->write_end(pieces);
  }

 private:
  using Base::a_;
  using Base::lane_;
  using Base::p_;

  __device__ __forceinline__ void write_plan(uint32_t n, const decode::Work<C> &work, int range) const {
    this->await_place(n);
    const decode::Piece &piece = this->piece_;
    const int first_range = work.range_of(piece.begin);
    if (lane_ == 0) {
      Plan &plan = this->plan(n & 1);
      this->describe(plan);
      plan.first_part = first_range;
      plan.parts = piece.first == piece.begin ? 0 : range - first_range;
      plan.counter = work.counter(piece);
      plan.slot = range;
      barrier_arrive(this->planned(n & 1));
    }
    __syncwarp();
  }

  // Where a key lies, as the tensors' strides count; row -1 is read as zero.
  struct Place {
    int batch, row;
  };
  __device__ __forceinline__ int first_key(int tile) const { return tile * C::kKeys + warp_ * C::kFetched; }
  // Of this lane's key of a tile.
  __device__ __forceinline__ Place place_in(int tile) const {
    const int key = first_key(tile) + lane_ % C::kFetched;
    if (tile >= this->end_tile_ || key < this->keys_.begin || key >= this->keys_.end) return {0, -1};
    const int32_t *table = p_.page_table;
    if (table == nullptr) return {p_.k_lengths.cu != nullptr ? 0 : this->piece_.batch, static_cast<int>(this->k_start_) + key};
    const int page = a_.page_size.quotient(key);
    return {table[this->piece_.batch * p_.page_table_batch_stride + page * p_.page_table_page_stride],
            key - page * static_cast<int>(a_.page_size.value)};
  }

  // Whether this warp's keys of a tile all exist, each run of them in one page.
  __device__ __forceinline__ bool has_whole_runs(int tile) const {
    const int first = first_key(tile);
    return first >= this->keys_.begin && first + C::kFetched <= this->keys_.end &&
           (p_.page_table == nullptr || static_cast<int>(a_.page_size.value) % C::kRun == 0);
  }

  // This warp's keys of a tile to the next slot, once that is free.
  __device__ __forceinline__ void fetch(const Operand &from, const CUtensorMap &map, int64_t columns, const Place &place,
                                        bool whole_runs) {
    if (whole_runs && a_.copied) {
      copy(map, place);
    } else {
      gather(from, columns, place, whole_runs);
    }
    ring_.step();
  }

  // A run a lane.
  __device__ __forceinline__ void copy(const CUtensorMap &map, const Place &place) {
    const uint32_t full = this->full(ring_.at());
    settle();
    barrier_wait(this->free(ring_.at()), ring_.parity() ^ 1);
    if (lane_ == 0) barrier_expect_more(full, C::kFetched / C::kRun * C::kRunBytes);
    __syncwarp();
    if (lane_ < C::kFetched && lane_ % C::kRun == 0) {
      const uint64_t policy = a_.row_blocks == 1 ? kEvictFirst : decode::kEvictNormal;
      const int run = (warp_ * C::kFetched + lane_) / C::kRun;
      decode::load_rows_box(this->tile(ring_.at()) + run * C::kRunBytes, &map, full, place.row, this->head_, place.batch,
                            policy);
    }
    barrier_arrive(full);
  }

  // By pieces of 16 bytes; zeros where there is nothing. Slots are said to be full some gathers later, so that nobody waits in between.
  __device__ __forceinline__ void gather(const Operand &from, int64_t columns, const Place &place, bool whole_runs) {
    constexpr int kChunks = C::kD / 8, kAtOnce = 32 / kChunks;
    const int64_t offset = place.batch * from.batch_stride + max(place.row, 0) * from.seq_stride;
    const int chunk = lane_ % kChunks, first = lane_ / kChunks, bytes = chunk * 8 < columns ? 16 : 0;
    const Element *base =
        static_cast<const Element *>(from.data) + this->head_ * from.head_stride + (bytes > 0 ? chunk * 8 : 0);
    const uint32_t to = this->tile(ring_.at()) + warp_ * C::kFetched / C::kRun * C::kRunBytes + chunk / 8 * C::kSlabBytes +
                        first * 128 + ((chunk % 8 ^ first) << 4);
    // Of the i-th rows that the warp fetches together.
    const auto place_of = [&](int i) {
      const int key = i * kAtOnce;
      return (to ^ ((key & 7) << 4)) + key / C::kRun * C::kRunBytes + key % C::kRun * 128;
    };
    barrier_wait(this->free(ring_.at()), ring_.parity() ^ 1);
    if (whole_runs) {
#pragma unroll
      for (int run = 0; run < C::kFetched / C::kRun; ++run) {
        const Element *row = base + __shfl_sync(~0u, offset, run * C::kRun) + first * from.seq_stride;
#pragma unroll
        for (int i = run * C::kRun / kAtOnce; i < (run + 1) * C::kRun / kAtOnce; ++i, row += kAtOnce * from.seq_stride)
          cp_async_16(place_of(i), row, bytes);
      }
    } else {
#pragma unroll 4
      for (int i = 0; i < C::kFetched / kAtOnce; ++i) {
        const int64_t its = __shfl_sync(~0u, offset, i * kAtOnce + first);
        const bool exists = __shfl_sync(~0u, place.row, i * kAtOnce + first) >= 0;
        cp_async_16(place_of(i), base + its, exists ? bytes : 0);
      }
    }
    cp_async_commit();
    if (under_way_ == 0) gathered_ = ring_.at();
    if (under_way_ == kUnderWay) {
      cp_async_wait<kUnderWay>();
      say_full();
    } else {
      ++under_way_;
    }
  }
  // All that is gathered is there.
  __device__ __forceinline__ void settle() {
    if (under_way_ == 0) return;
    cp_async_wait<0>();
    for (; under_way_ > 0; --under_way_) say_full();
  }
  // The first slot that is gathered, but not said to be full.
  __device__ __forceinline__ void say_full() {
    shared_fence_for_copies();  // for the products
    barrier_arrive(this->full(gathered_));
    gathered_ = gathered_ + 1 == C::kSlots ? 0 : gathered_ + 1;
  }

  // The ring has room for these, for what is worked on and for what may be worked on next.
  static constexpr int kUnderWay = C::kSlots - 3;

  int warp_;
  RingPlace<C::kSlots> ring_;
  int gathered_ = 0, under_way_ = 0;
};

}  // namespace fa::cuda::extend
