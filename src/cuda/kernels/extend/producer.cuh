// SPDX-License-Identifier: Apache-2.0
// The warps that fetch keys and values, one of which plans. Each has a quarter of every tile.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/extend/cta.cuh"

namespace fa::cuda::extend {

template <class C>
class Producer : private decode::Planner<Cta<C>> {
 public:
  using Base = decode::Planner<Cta<C>>;
  using KvElement = typename C::KvElement;

  using Base::Base;

  __device__ __forceinline__ void run() {
    warp_ = static_cast<int>(uniform(threadIdx.x >> 5)) & 3;
    // Of what the launch before this one may still write lengths are wanted first. Other warps wait for a plan.
    if (!decode::lengths_known(p_)) pdl_wait();
    uint32_t unit = 0;
    Scheduler scheduler(a_);
    if (C::kUsesCombineKernel && static_cast<int>(blockIdx.x >> scheduler.coscheduled_log2()) >= scheduler.ranges() &&
        threadIdx.x % 128 == 0) {
      pdl_wait();
      scheduler.publish_no_tile();
    }
    this->each_piece(scheduler, [&](int range) {
      pdl_wait();
      if (warp_ == 0) {
        // Those who are to make room may be waiting for what is gathered.
        if (!__all_sync(~0u, this->has_place(unit))) drain();
        write_descriptor(unit++, scheduler, range);
      }
      // Pages are asked for two tiles ahead.
      int page = load_page(this->tile_), next = load_page(this->tile_ + 1);
#pragma unroll 1
      for (int tile = this->tile_; tile < this->end_tile_; ++tile) {
        const int later = load_page(tile + 2);
        const KvLocation place = locate_key(tile, page);
        const bool whole_runs = has_whole_runs(tile);
        load_tile(p_.k, a_.k_map, p_.head_dim, place, whole_runs);
        load_tile(p_.v, a_.v_map, p_.head_dim_v, place, whole_runs);
        page = next;
        next = later;
      }
    });
    drain();
    if (warp_ == 0) this->write_end(unit);
  }

 private:
  using Base::a_;
  using Base::lane_;
  using Base::p_;
  using Scheduler = decode::Work<C, C::k8BitKv>;  // whose registers are for what widens

  __device__ __forceinline__ void write_descriptor(uint32_t n, const Scheduler &scheduler, int range) const {
    this->await_place(n);
    const decode::Piece &piece = this->piece_;
    const bool begins = piece.first == piece.begin;
    const int first_partition = C::kUsesCombineKernel ? 0 : scheduler.range_of(piece.begin);
    if (lane_ == 0) {
      WorkUnitDescriptor &plan = this->plan(n & 1);
      this->describe(plan);
      if constexpr (C::kUsesCombineKernel) {
        plan.partial_slot = piece.whole() ? -1 : scheduler.slot(a_, range, begins);
      } else {
        plan.partial_slot = plan.part ? scheduler.slot(a_, range) : -1;
        plan.first_partial = scheduler.slot(a_, first_partition);
        plan.num_partials = begins ? 0 : range - first_partition;
        plan.counter = scheduler.counter(piece, first_partition);
      }
      mbarrier_arrive(this->planned(n & 1));
      if (C::kUsesCombineKernel && scheduler.publishes_tile(piece, piece.last == scheduler.range_begin(range + 1))) {
        decode::Cut cut{};
        cut.q_start = this->q_start_;
        cut.head = this->head_;
        cut.first_row = this->row0_;
        cut.rows = max(this->rows_, 0);
        scheduler.publish_tile(cut, piece, range);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ int first_key(int tile) const { return tile * C::kKvTile + warp_ * C::kWarpKeys; }
  // Of this lane's key of a tile: its page, -1 where there is no key, and where it lies.
  __device__ __forceinline__ int load_page(int tile) const {
    const int key = first_key(tile) + lane_ % C::kWarpKeys;
    if (tile >= this->end_tile_ || key < this->keys_.begin || key >= this->keys_.end) return -1;
    return this->page_of(this->piece_.batch, key);
  }
  __device__ __forceinline__ KvLocation locate_key(int tile, int page) const {
    if (page < 0) return {0, -1};
    return this->locate_in_page(page, this->piece_.batch, this->k_start_, first_key(tile) + lane_ % C::kWarpKeys);
  }

  // Whether this warp's keys of a tile all exist, each run of them in one page.
  __device__ __forceinline__ bool has_whole_runs(int tile) const {
    const int first = first_key(tile);
    return first >= this->keys_.begin && first + C::kWarpKeys <= this->keys_.end &&
           (p_.page_table == nullptr || static_cast<int>(a_.page_size.value) % C::kRun == 0);
  }

  // This warp's keys of a tile to the next slot, once that is free; bytes to a place of their own.
  __device__ __forceinline__ void load_tile(const Operand &from, const CUtensorMap &map, int64_t columns, const KvLocation &place,
                                        bool whole_runs) {
    if (whole_runs && a_.tma_kv) {
      load_tma(map, place);
    } else {
      load_cp_async(from, columns, place, whole_runs);
    }
    if constexpr (C::k8BitKv) {
      load_8bit_.advance();
      add_in_flight();
    }
  }

  // A slab of a run a lane; bytes, a run.
  __device__ __forceinline__ void load_tma(const CUtensorMap &map, const KvLocation &place) {
    const uint32_t there = C::k8BitKv ? this->full_8bit(load_8bit_.stage(), warp_) : this->full(pipe_.stage());
    if constexpr (!C::k8BitKv) {
      drain();
      mbarrier_wait(this->empty(pipe_.stage()), pipe_.phase() ^ 1);
    }
    constexpr int kAtoms = C::k8BitKv ? 1 : C::kAtoms, kBoxPitch = C::kPitch / kAtoms;
    if (lane_ == 0) mbarrier_expect_tx(there, C::kWarpKeys * C::kPitch);
    __syncwarp();                                          // and all have widened what was in the place
    const int slab = lane_ % C::kRun, run = lane_ - slab;  // the run's first key
    if (lane_ < C::kWarpKeys && slab < kAtoms) {
      const uint64_t policy = a_.row_blocks == 1 ? kEvictFirst : kEvictNormal;
      const uint32_t to = C::k8BitKv ? smem_8bit(load_8bit_.stage()) : smem_atom(pipe_.stage(), slab);
      tma_load_5d(to + run * kBoxPitch, &map, there, slab, place.row - slab, this->head_, place.batch, policy);
    }
    if constexpr (C::k8BitKv) {
      if (lane_ == 0) mbarrier_arrive_for_warp(there);
    } else {
      mbarrier_arrive(there);
      pipe_.advance();
    }
  }

  // By pieces of 16 bytes; zeros where there is nothing. Slots are said to be full some gathers later, so that nobody waits in between.
  __device__ __forceinline__ void load_cp_async(const Operand &from, int64_t columns, const KvLocation &place, bool whole_runs) {
    const int64_t offset = place.batch * from.batch_stride + max(place.row, 0) * from.seq_stride;
    const int chunk = lane_ % kChunks, first = lane_ / kChunks, size = chunk * kChunkColumns < columns ? 16 : 0;
    const KvElement *base =
        static_cast<const KvElement *>(from.data) + this->head_ * from.head_stride + (size > 0 ? chunk * kChunkColumns : 0);
    const uint32_t to = C::k8BitKv ? smem_8bit(load_8bit_.stage()) + lane_ * 16 : smem_chunk(chunk);
    // Of the i-th rows that the warp fetches together.
    const auto locate_in_page = [&](int i) { return C::k8BitKv ? to + i * kWarpLoadBytes : row_group(to, i); };
    if (!C::k8BitKv) mbarrier_wait(this->empty(pipe_.stage()), pipe_.phase() ^ 1);
    if (whole_runs) {
#pragma unroll
      for (int run = 0; run < C::kWarpKeys / C::kRun; ++run) {
        const KvElement *row = base + __shfl_sync(~0u, offset, run * C::kRun) + first * from.seq_stride;
#pragma unroll
        for (int i = run * C::kRun / kRowsPerLoad; i < (run + 1) * C::kRun / kRowsPerLoad; ++i, row += kRowsPerLoad * from.seq_stride)
          cp_async_16(locate_in_page(i), row, size);
      }
    } else {
#pragma unroll 4
      for (int i = 0; i < C::kWarpKeys / kRowsPerLoad; ++i) {
        const int64_t tile_sum = __shfl_sync(~0u, offset, i * kRowsPerLoad + first);
        const bool exists = __shfl_sync(~0u, place.row, i * kRowsPerLoad + first) >= 0;
        cp_async_16(locate_in_page(i), base + tile_sum, exists ? size : 0);
      }
    }
    if constexpr (C::k8BitKv) {
      cp_async_mbarrier_arrive(this->full_8bit(load_8bit_.stage(), warp_));
    } else {
      cp_async_commit();
      if (in_flight_ == 0) oldest_ = pipe_;
      pipe_.advance();
      add_in_flight();
    }
  }

  // One more tile is under way: the first of too many is awaited.
  __device__ __forceinline__ void add_in_flight() {
    if (in_flight_ == kMaxInFlight) {
      if constexpr (!C::k8BitKv) cp_async_wait<kMaxInFlight>();
      release_oldest();
    } else {
      ++in_flight_;
    }
  }
  // All that is under way is there.
  __device__ __forceinline__ void drain() {
    if (in_flight_ == 0) return;
    if constexpr (!C::k8BitKv) cp_async_wait<0>();
    for (; in_flight_ > 0; --in_flight_) release_oldest();
  }
  // The first tile that is gathered, but not said to be full. Bytes are awaited and widened into the next slot.
  __device__ __forceinline__ void release_oldest() {
    if constexpr (C::k8BitKv) {
      mbarrier_wait(this->full_8bit(oldest_.stage(), warp_), oldest_.phase());
      mbarrier_wait(this->empty(pipe_.stage()), pipe_.phase() ^ 1);
      widen();
    }
    fence_proxy_async();  // for the products
    mbarrier_arrive(this->full(C::k8BitKv ? pipe_.stage() : oldest_.stage()));
    if constexpr (C::k8BitKv) pipe_.advance();
    oldest_.advance();
  }
  __device__ __forceinline__ void widen() const {
    // Eight lanes at a time write to different banks: of 128 columns those of the second slab begin with their second half.
    const int chunk = lane_ % kChunks, second = chunk / 4;
    const uint32_t from = smem_8bit(oldest_.stage()) + lane_ * 16,
                   to[2] = {smem_chunk(2 * chunk + second), smem_chunk(2 * chunk + 1 - second)};
    constexpr int kBatch = 4;
#pragma unroll
    for (int first = 0; first < C::kWarpKeys / kRowsPerLoad; first += kBatch) {
      uint4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) x[i] = ld_shared_16(from + (first + i) * kWarpLoadBytes);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const auto store = [&](uint32_t at, uint32_t low, uint32_t high) {
          const decode::HalfPairs a = decode::widen_adjacent<C::kFormat>(low), b = decode::widen_adjacent<C::kFormat>(high);
          st_shared_16(row_group(at, first + i), a.first, a.second, b.first, b.second);
        };
        store(to[0], second ? x[i].z : x[i].x, second ? x[i].w : x[i].y);
        store(to[1], second ? x[i].x : x[i].z, second ? x[i].y : x[i].w);
      }
    }
  }

  // A piece of 16 bytes of a row, of so many; rows that a warp fetches together.
  static constexpr int kChunkColumns = 16 / static_cast<int>(sizeof(KvElement)), kChunks = C::kD / kChunkColumns, kRowsPerLoad = 32 / kChunks;
  static constexpr int kWarpLoadBytes = 32 * 16;
  // Where the warp's keys begin in the next slot: eight columns of this lane's row of the first rows, and of those i times further on.
  __device__ __forceinline__ uint32_t smem_chunk(int columns8) const {
    const int row = lane_ / kChunks;
    return smem_atom(pipe_.stage(), columns8 / 8) + row * 128 + ((columns8 % 8 ^ row) << 4);
  }
  static __device__ __forceinline__ uint32_t row_group(uint32_t first, int i) {
    const int key = i * kRowsPerLoad;
    return (first ^ ((key & 7) << 4)) + key * 128;
  }
  // The warp's keys of a slab.
  __device__ __forceinline__ uint32_t smem_atom(int stage, int slab) const {
    return this->tile(stage) + slab * C::kAtomBytes + warp_ * C::kWarpKeys * 128;
  }
  // The warp's keys of a tile of bytes, row after row.
  __device__ __forceinline__ uint32_t smem_8bit(int n) const {
    return this->smem_ + C::kStage8BitOffset + n * C::kStage8BitBytes + warp_ * C::kWarpKeys * C::kPitch;
  }

  // The ring has room for tiles that are gathered, for what is worked on and for what may be worked on next.
  static constexpr int kMaxInFlight = C::k8BitKv ? C::kStages8Bit - 1 : C::kStages - 3;
  using OldestState = PipelineState<C::k8BitKv ? C::kStages8Bit : C::kStages>;

  int warp_;
  PipelineState<C::kStages> pipe_;  // the next slot to fill
  OldestState oldest_;              // the first tile under way
  OldestState load_8bit_;                // of bytes: the next one's place
  int in_flight_ = 0;
};

}  // namespace fa::cuda::extend
