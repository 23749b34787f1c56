// SPDX-License-Identifier: Apache-2.0
// The warps that fetch keys and values, one of which plans. Each has a quarter of every tile.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/extend/cta.cuh"

namespace fa::cuda::extend {

template <class C>
class Producer : private decode::Planner<Block<C>> {
 public:
  using Base = decode::Planner<Block<C>>;
  using KeyElement = typename C::KeyElement;

  using Base::Base;

  __device__ __forceinline__ void run() {
    warp_ = static_cast<int>(uniform(threadIdx.x >> 5)) & 3;
    // Of what the launch before this one may still write lengths are wanted first. Other warps wait for a plan.
    if (!decode::lengths_known(p_)) pdl_wait();
    uint32_t pieces = 0;
    TheWork work(a_);
    if (C::kUsesCombineKernel && static_cast<int>(blockIdx.x >> work.coscheduled_log2()) >= work.ranges() &&
        threadIdx.x % 128 == 0) {
      pdl_wait();
      work.note_none();
    }
    this->each_piece(work, [&](int range) {
      pdl_wait();
      if (warp_ == 0) {
        // Those who are to make room may be waiting for what is gathered.
        if (!__all_sync(~0u, this->has_place(pieces))) settle();
        write_plan(pieces++, work, range);
      }
      // Pages are asked for two tiles ahead.
      int page = page_in(this->tile_), next = page_in(this->tile_ + 1);
#pragma unroll 1
      for (int tile = this->tile_; tile < this->end_tile_; ++tile) {
        const int later = page_in(tile + 2);
        const Place place = place_in(tile, page);
        const bool whole_runs = has_whole_runs(tile);
        fetch(p_.k, a_.k_map, p_.head_dim, place, whole_runs);
        fetch(p_.v, a_.v_map, p_.head_dim_v, place, whole_runs);
        page = next;
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
  using TheWork = decode::Work<C, C::k8BitKv>;  // whose registers are for what widens

  __device__ __forceinline__ void write_plan(uint32_t n, const TheWork &work, int range) const {
    this->await_place(n);
    const decode::Piece &piece = this->piece_;
    const bool begins = piece.first == piece.begin;
    const int first_range = C::kUsesCombineKernel ? 0 : work.range_of(piece.begin);
    if (lane_ == 0) {
      Plan &plan = this->plan(n & 1);
      this->describe(plan);
      if constexpr (C::kUsesCombineKernel) {
        plan.slot = piece.whole() ? -1 : work.slot(a_, range, begins);
      } else {
        plan.slot = plan.part ? work.slot(a_, range) : -1;
        plan.first_part = work.slot(a_, first_range);
        plan.parts = begins ? 0 : range - first_range;
        plan.counter = work.counter(piece, first_range);
      }
      mbarrier_arrive(this->planned(n & 1));
      if (C::kUsesCombineKernel && work.is_noted(piece, piece.last == work.range_begin(range + 1))) {
        decode::Cut cut{};
        cut.q_start = this->q_start_;
        cut.head = this->head_;
        cut.first_row = this->row0_;
        cut.rows = max(this->rows_, 0);
        work.note(cut, piece, range);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ int first_key(int tile) const { return tile * C::kKeys + warp_ * C::kFetched; }
  // Of this lane's key of a tile: its page, -1 where there is no key, and where it lies.
  __device__ __forceinline__ int page_in(int tile) const {
    const int key = first_key(tile) + lane_ % C::kFetched;
    if (tile >= this->end_tile_ || key < this->keys_.begin || key >= this->keys_.end) return -1;
    return this->page_of(this->piece_.batch, key);
  }
  __device__ __forceinline__ Place place_in(int tile, int page) const {
    if (page < 0) return {0, -1};
    return this->place_of(page, this->piece_.batch, this->k_start_, first_key(tile) + lane_ % C::kFetched);
  }

  // Whether this warp's keys of a tile all exist, each run of them in one page.
  __device__ __forceinline__ bool has_whole_runs(int tile) const {
    const int first = first_key(tile);
    return first >= this->keys_.begin && first + C::kFetched <= this->keys_.end &&
           (p_.page_table == nullptr || static_cast<int>(a_.page_size.value) % C::kRun == 0);
  }

  // This warp's keys of a tile to the next slot, once that is free; bytes to a place of their own.
  __device__ __forceinline__ void fetch(const Operand &from, const CUtensorMap &map, int64_t columns, const Place &place,
                                        bool whole_runs) {
    if (whole_runs && a_.tma_kv) {
      copy(map, place);
    } else {
      gather(from, columns, place, whole_runs);
    }
    if constexpr (C::k8BitKv) {
      coming_.advance();
      more_under_way();
    }
  }

  // A slab of a run a lane; bytes, a run.
  __device__ __forceinline__ void copy(const CUtensorMap &map, const Place &place) {
    const uint32_t there = C::k8BitKv ? this->staged(coming_.stage(), warp_) : this->full(ring_.stage());
    if constexpr (!C::k8BitKv) {
      settle();
      mbarrier_wait(this->free(ring_.stage()), ring_.phase() ^ 1);
    }
    constexpr int kSlabs = C::k8BitKv ? 1 : C::kSlabs, kBoxPitch = C::kPitch / kSlabs;
    if (lane_ == 0) mbarrier_expect_tx(there, C::kFetched * C::kPitch);
    __syncwarp();                                          // and all have widened what was in the place
    const int slab = lane_ % C::kRun, run = lane_ - slab;  // the run's first key
    if (lane_ < C::kFetched && slab < kSlabs) {
      const uint64_t policy = a_.row_blocks == 1 ? kEvictFirst : kEvictNormal;
      const uint32_t to = C::k8BitKv ? bytes(coming_.stage()) : slab_of(ring_.stage(), slab);
      tma_load_5d(to + run * kBoxPitch, &map, there, slab, place.row - slab, this->head_, place.batch, policy);
    }
    if constexpr (C::k8BitKv) {
      if (lane_ == 0) mbarrier_arrive_for_warp(there);
    } else {
      mbarrier_arrive(there);
      ring_.advance();
    }
  }

  // By pieces of 16 bytes; zeros where there is nothing. Slots are said to be full some gathers later, so that nobody waits in between.
  __device__ __forceinline__ void gather(const Operand &from, int64_t columns, const Place &place, bool whole_runs) {
    const int64_t offset = place.batch * from.batch_stride + max(place.row, 0) * from.seq_stride;
    const int chunk = lane_ % kChunks, first = lane_ / kChunks, size = chunk * kColumns < columns ? 16 : 0;
    const KeyElement *base =
        static_cast<const KeyElement *>(from.data) + this->head_ * from.head_stride + (size > 0 ? chunk * kColumns : 0);
    const uint32_t to = C::k8BitKv ? bytes(coming_.stage()) + lane_ * 16 : in_tile(chunk);
    // Of the i-th rows that the warp fetches together.
    const auto place_of = [&](int i) { return C::k8BitKv ? to + i * kPieceBytes : of_rows(to, i); };
    if (!C::k8BitKv) mbarrier_wait(this->free(ring_.stage()), ring_.phase() ^ 1);
    if (whole_runs) {
#pragma unroll
      for (int run = 0; run < C::kFetched / C::kRun; ++run) {
        const KeyElement *row = base + __shfl_sync(~0u, offset, run * C::kRun) + first * from.seq_stride;
#pragma unroll
        for (int i = run * C::kRun / kAtOnce; i < (run + 1) * C::kRun / kAtOnce; ++i, row += kAtOnce * from.seq_stride)
          cp_async_16(place_of(i), row, size);
      }
    } else {
#pragma unroll 4
      for (int i = 0; i < C::kFetched / kAtOnce; ++i) {
        const int64_t its = __shfl_sync(~0u, offset, i * kAtOnce + first);
        const bool exists = __shfl_sync(~0u, place.row, i * kAtOnce + first) >= 0;
        cp_async_16(place_of(i), base + its, exists ? size : 0);
      }
    }
    if constexpr (C::k8BitKv) {
      cp_async_mbarrier_arrive(this->staged(coming_.stage(), warp_));
    } else {
      cp_async_commit();
      if (under_way_ == 0) gathered_ = ring_;
      ring_.advance();
      more_under_way();
    }
  }

  // One more tile is under way: the first of too many is awaited.
  __device__ __forceinline__ void more_under_way() {
    if (under_way_ == kUnderWay) {
      if constexpr (!C::k8BitKv) cp_async_wait<kUnderWay>();
      say_full();
    } else {
      ++under_way_;
    }
  }
  // All that is under way is there.
  __device__ __forceinline__ void settle() {
    if (under_way_ == 0) return;
    if constexpr (!C::k8BitKv) cp_async_wait<0>();
    for (; under_way_ > 0; --under_way_) say_full();
  }
  // The first tile that is gathered, but not said to be full. Bytes are awaited and widened into the next slot.
  __device__ __forceinline__ void say_full() {
    if constexpr (C::k8BitKv) {
      mbarrier_wait(this->staged(gathered_.stage(), warp_), gathered_.phase());
      mbarrier_wait(this->free(ring_.stage()), ring_.phase() ^ 1);
      widen();
    }
    fence_proxy_async();  // for the products
    mbarrier_arrive(this->full(C::k8BitKv ? ring_.stage() : gathered_.stage()));
    if constexpr (C::k8BitKv) ring_.advance();
    gathered_.advance();
  }
  __device__ __forceinline__ void widen() const {
    // Eight lanes at a time write to different banks: of 128 columns those of the second slab begin with their second half.
    const int chunk = lane_ % kChunks, second = chunk / 4;
    const uint32_t from = bytes(gathered_.stage()) + lane_ * 16,
                   to[2] = {in_tile(2 * chunk + second), in_tile(2 * chunk + 1 - second)};
    constexpr int kBatch = 4;
#pragma unroll
    for (int first = 0; first < C::kFetched / kAtOnce; first += kBatch) {
      uint4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) x[i] = ld_shared_16(from + (first + i) * kPieceBytes);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const auto store = [&](uint32_t at, uint32_t low, uint32_t high) {
          const decode::Pairs a = decode::widen_neighbours<C::kFormat>(low), b = decode::widen_neighbours<C::kFormat>(high);
          st_shared_16(of_rows(at, first + i), a.first, a.second, b.first, b.second);
        };
        store(to[0], second ? x[i].z : x[i].x, second ? x[i].w : x[i].y);
        store(to[1], second ? x[i].x : x[i].z, second ? x[i].y : x[i].w);
      }
    }
  }

  // A piece of 16 bytes of a row, of so many; rows that a warp fetches together.
  static constexpr int kColumns = 16 / static_cast<int>(sizeof(KeyElement)), kChunks = C::kD / kColumns, kAtOnce = 32 / kChunks;
  static constexpr int kPieceBytes = 32 * 16;
  // Where the warp's keys begin in the next slot: eight columns of this lane's row of the first rows, and of those i times further on.
  __device__ __forceinline__ uint32_t in_tile(int columns8) const {
    const int row = lane_ / kChunks;
    return slab_of(ring_.stage(), columns8 / 8) + row * 128 + ((columns8 % 8 ^ row) << 4);
  }
  static __device__ __forceinline__ uint32_t of_rows(uint32_t first, int i) {
    const int key = i * kAtOnce;
    return (first ^ ((key & 7) << 4)) + key * 128;
  }
  // The warp's keys of a slab.
  __device__ __forceinline__ uint32_t slab_of(int slot, int slab) const {
    return this->tile(slot) + slab * C::kSlabBytes + warp_ * C::kFetched * 128;
  }
  // The warp's keys of a tile of bytes, row after row.
  __device__ __forceinline__ uint32_t bytes(int n) const {
    return this->shared_ + C::kStagedOffset + n * C::kStagedBytes + warp_ * C::kFetched * C::kPitch;
  }

  // The ring has room for tiles that are gathered, for what is worked on and for what may be worked on next.
  static constexpr int kUnderWay = C::k8BitKv ? C::kStaged - 1 : C::kSlots - 3;
  using Gathered = PipelineState<C::k8BitKv ? C::kStaged : C::kSlots>;

  int warp_;
  PipelineState<C::kSlots> ring_;  // the next slot to fill
  Gathered gathered_;              // the first tile under way
  Gathered coming_;                // of bytes: the next one's place
  int under_way_ = 0;
};

}  // namespace fa::cuda::extend
