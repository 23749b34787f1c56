// SPDX-License-Identifier: Apache-2.0
// The four producer warps of the extend kernel. Each loads a quarter of every K and V tile; warp 0 also writes the work
// descriptors.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/extend/cta.cuh"
#include "cuda/kernels/extend/masks.cuh"

namespace fa::cuda::extend {

template <class C>
class Producer : private decode::WorkScheduler<Cta<C>> {
 public:
  using Base = decode::WorkScheduler<Cta<C>>;
  using KvElement = typename C::KvElement;

  using Base::Base;

  __device__ __forceinline__ void run() {
    warp_ = static_cast<int>(uniform(threadIdx.x >> 5)) & 3;
    // Of the data that the previous launch may still write, the lengths are needed first. The other warps wait for a
    // descriptor.
    if (!decode::lengths_known<C>(p_)) pdl_wait();
    uint32_t unit = 0;
    Scheduler scheduler(a_);
    if (C::kUsesCombineKernel) this->publish_no_tile_if_idle(scheduler);
    this->for_each_work_unit(scheduler, [&](int partition) {
      pdl_wait();
      if constexpr (C::kMasks) {
        load_visited_tiles([&] { describe_work_unit(unit, scheduler, partition); });
      } else {
        describe_work_unit(unit, scheduler, partition);
        load_all_tiles();
      }
    });
    drain();
    if (warp_ == 0) this->write_end_of_work(unit);
  }

 private:
  using Base::a_;
  using Base::lane_;
  using Base::p_;
  using Scheduler = decode::StreamKScheduler<C, C::k8BitKv>;  // recomputes values, since widening needs the registers

  // By warp 0: the descriptor of work unit `unit`, which is then counted.
  __device__ __forceinline__ void describe_work_unit(uint32_t &unit, const Scheduler &scheduler, int partition) {
    if (warp_ == 0) {
      // The consumers may be unable to free the descriptor before the loads in flight are published.
      if (!__all_sync(~0u, this->is_descriptor_free(unit))) drain();
      write_descriptor(unit++, scheduler, partition);
    }
  }
  __device__ __forceinline__ void load_all_tiles() {
    // The page table is read two tiles ahead.
    int page = load_page(this->kv_tile_), next = load_page(this->kv_tile_ + 1);
#pragma unroll 1
    for (int tile = this->kv_tile_; tile < this->kv_tile_end_; ++tile) {
      const int later = load_page(tile + 2);
      load_kv_tile(tile, page);
      page = next;
      next = later;
    }
  }
  // Kernels for masks as data. The consumers get a note on the first tile with the descriptor that `describe` writes, and with each tile one on the next, which
  // they so know before its keys have arrived.
  template <typename F>
  __device__ __forceinline__ void load_visited_tiles(F describe) {
    constexpr int kNone = -1;
    VisitedTiles<C> visited;
    int tile = kNone, page = -1, next = this->kv_tile_;
#pragma unroll 1
    do {
      next = visited.next(next, this->kv_tile_end_, a_, this->work_unit_.batch, this->head_, this->row0_, this->rows_, lane_);
      const int next_page = load_page(next);
      if (warp_ == 0 && lane_ == 0) st_shared_4(this->tile_note(notes_.count), visited.note(next));
      ++notes_.count;
      if (tile == kNone) {
        this->kv_tile_ = next;
        describe();
      } else {
        load_kv_tile(tile, page);
      }
      tile = next++;
      page = next_page;
    } while (tile < this->kv_tile_end_);
  }
  __device__ __forceinline__ void load_kv_tile(int tile, int page) {
    const KvPlace place = locate_key(tile, page);
    const bool whole_runs = has_whole_runs(tile);
    load_tile(p_.k, a_.k_map, p_.head_dim, place, whole_runs);
    load_tile(p_.v, a_.v_map, p_.head_dim_v, place, whole_runs);
  }

  __device__ __forceinline__ void write_descriptor(uint32_t n, const Scheduler &scheduler, int partition) const {
    this->wait_descriptor_free(n);
    const decode::WorkUnit &work_unit = this->work_unit_;
    const bool begins_tile = work_unit.begin == work_unit.tile_begin;
    const int first_partition = C::kUsesCombineKernel || C::kSameBits ? 0 : scheduler.partition_of(work_unit.tile_begin);
    if (lane_ == 0) {
      WorkUnitDescriptor &descriptor = this->descriptor(n & 1);
      this->fill_descriptor(descriptor);
      if constexpr (C::kUsesCombineKernel && C::kSameBits) {
        descriptor.partial = work_unit.whole() ? -1 : scheduler.segment_partial(a_, work_unit.begin);
        descriptor.first_partial = work_unit.first_step;
        descriptor.num_partials = work_unit.end - work_unit.begin;
        descriptor.counter = 1 << scheduler.coscheduled_log2();
      } else if constexpr (C::kUsesCombineKernel) {
        descriptor.partial = work_unit.whole() ? -1 : scheduler.partial_of(a_, partition, begins_tile);
      } else if constexpr (C::kSameBits) {
        descriptor.counter = scheduler.partial_of(a_, partition);
        descriptor.partial = descriptor.tile_continues ? descriptor.counter : -1;
        descriptor.first_partial = descriptor.counter - 1;
        descriptor.num_partials = begins_tile ? 0 : 1;
      } else {
        descriptor.partial = descriptor.tile_continues ? scheduler.partial_of(a_, partition) : -1;
        descriptor.first_partial = scheduler.partial_of(a_, first_partition);
        descriptor.num_partials = begins_tile ? 0 : partition - first_partition;
        descriptor.counter = scheduler.counter(work_unit, first_partition);
      }
      mbarrier_arrive(this->work_full(n & 1));
      if (C::kUsesCombineKernel) this->publish_tile(scheduler, partition);
    }
    __syncwarp();
  }

  __device__ __forceinline__ int first_key(int tile) const { return tile * C::kKvTile + warp_ * C::kWarpKeys; }
  // The page of this lane's key of a tile (-1 where there is no key), and the key's place.
  __device__ __forceinline__ int load_page(int tile) const {
    const int key = first_key(tile) + lane_ % C::kWarpKeys;
    if (tile >= this->kv_tile_end_ || key < this->keys_.begin || key >= this->keys_.end) return -1;
    return this->kv_locator().page_of(this->work_unit_.batch, key);
  }
  __device__ __forceinline__ KvPlace locate_key(int tile, int page) const {
    if (page < 0) return {0, -1};
    return this->kv_locator().place(page, this->work_unit_.batch, this->k_start_, first_key(tile) + lane_ % C::kWarpKeys);
  }

  // Whether this warp's keys of a tile all exist and each run of them lies in one page.
  __device__ __forceinline__ bool has_whole_runs(int tile) const {
    const int first = first_key(tile);
    return first >= this->keys_.begin && first + C::kWarpKeys <= this->keys_.end &&
           this->kv_locator().template whole_runs<C::kRun>();
  }

  // Loads this warp's keys of a K or V tile into the next stage once that is empty; 8-bit KV goes to a stage of the 8-bit
  // pipeline.
  __device__ __forceinline__ void load_tile(const Operand &from, const CUtensorMap &map, int64_t columns, const KvPlace &place,
                                            bool whole_runs) {
    if (whole_runs && a_.tma_kv) {
      load_tma(map, place);
    } else {
      load_cp_async(from, columns, place, whole_runs);
    }
    if constexpr (C::kWidens) {
      load_8bit_.advance();
      add_in_flight();
    }
  }

  // By TMA: each lane issues one atom of one run; with 8-bit KV one whole run.
  __device__ __forceinline__ void load_tma(const CUtensorMap &map, const KvPlace &place) {
    const uint32_t there = C::kWidens ? this->full_8bit(load_8bit_.stage(), warp_) : this->full(pipe_.stage());
    if constexpr (!C::kWidens) {
      drain();
      mbarrier_wait(this->empty(pipe_.stage()), pipe_.phase() ^ 1);
    }
    constexpr int kAtoms = C::kWidens ? 1 : C::kAtoms, kBoxPitch = C::kPitch / kAtoms;
    if (lane_ == 0) mbarrier_expect_tx(there, C::kWarpKeys * C::kPitch);
    __syncwarp();                                          // and all lanes have widened the previous contents of the stage
    const int atom = lane_ % C::kRun, run = lane_ - atom;  // run: the run's first key
    if (lane_ < C::kWarpKeys && atom < kAtoms) {
      const uint64_t policy = a_.row_blocks == 1 ? kEvictFirst : kEvictNormal;
      const uint32_t to = C::kWidens ? smem_8bit(load_8bit_.stage()) : smem_atom(pipe_.stage(), atom);
      tma_load_5d(to + run * kBoxPitch, &map, there, 0, place.row - atom, atom, this->head_, place.outer, policy);
    }
    if constexpr (C::kWidens) {
      if (lane_ == 0) mbarrier_arrive_for_warp(there);
    } else {
      mbarrier_arrive(there);
      pipe_.advance();
    }
  }

  // By cp.async in vectors of 16 bytes; keys that do not exist become zeros. Stages are published some loads later, so that the
  // warp does not wait in between.
  __device__ __forceinline__ void load_cp_async(const Operand &from, int64_t columns, const KvPlace &place, bool whole_runs) {
    const int64_t offset = place.outer * from.batch_stride + max(place.row, 0) * from.seq_stride;
    const int vector = lane_ % kVectors, first = lane_ / kVectors, size = vector * kVectorColumns < columns ? 16 : 0;
    const KvElement *base =
        static_cast<const KvElement *>(from.data) + this->head_ * from.head_stride + (size > 0 ? vector * kVectorColumns : 0);
    const uint32_t to = C::kWidens ? smem_8bit(load_8bit_.stage()) + lane_ * 16 : smem_vector(vector);
    // The i-th group of rows that the warp loads together.
    const auto smem_rows = [&](int i) { return C::kWidens ? to + i * kWarpLoadBytes : row_group(to, i); };
    if constexpr (kPublishesEarly) {
      const auto stage_is_free = [&] { return mbarrier_test_wait(this->empty(pipe_.stage()), pipe_.phase() ^ 1); };
      while (in_flight_ > 0 && !__all_sync(~0u, stage_is_free())) publish_early();
    }
    if (!C::kWidens) mbarrier_wait(this->empty(pipe_.stage()), pipe_.phase() ^ 1);
    if (whole_runs) {
#pragma unroll
      for (int run = 0; run < C::kWarpKeys / C::kRun; ++run) {
        const KvElement *row = base + __shfl_sync(~0u, offset, run * C::kRun) + first * from.seq_stride;
#pragma unroll
        for (int i = run * C::kRun / kRowsPerLoad; i < (run + 1) * C::kRun / kRowsPerLoad;
             ++i, row += kRowsPerLoad * from.seq_stride)
          cp_async_16(smem_rows(i), row, size);
      }
    } else {
#pragma unroll 4
      for (int i = 0; i < C::kWarpKeys / kRowsPerLoad; ++i) {
        const int64_t row_offset = __shfl_sync(~0u, offset, i * kRowsPerLoad + first);
        const bool exists = __shfl_sync(~0u, place.row, i * kRowsPerLoad + first) >= 0;
        cp_async_16(smem_rows(i), base + row_offset, exists ? size : 0);
      }
    }
    if constexpr (C::kWidens) {
      cp_async_mbarrier_arrive(this->full_8bit(load_8bit_.stage(), warp_));
    } else {
      cp_async_commit();
      if (in_flight_ == 0) oldest_ = pipe_;
      pipe_.advance();
      add_in_flight();
    }
  }

  // Counts one more tile in flight. If there are too many, waits for the oldest one and publishes it.
  __device__ __forceinline__ void add_in_flight() {
    if (in_flight_ == kMaxInFlight) {
      if constexpr (!C::kWidens) cp_async_wait<kMaxInFlight>();
      publish_oldest();
    } else {
      ++in_flight_;
    }
  }
  // Publishes the oldest tile in flight because no stage is free: the consumers wait for it.
  __device__ __forceinline__ void publish_early() {
    static_assert(!kPublishesEarly || kMaxInFlight == 3);
    if (in_flight_ == 3) {
      cp_async_wait<2>();
    } else if (in_flight_ == 2) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    publish_oldest();
    --in_flight_;
  }
  // Waits for all tiles in flight and publishes them.
  __device__ __forceinline__ void drain() {
    if (in_flight_ == 0) return;
    if constexpr (!C::kWidens) cp_async_wait<0>();
    for (; in_flight_ > 0; --in_flight_) publish_oldest();
  }
  // Publishes the oldest tile in flight: marks its stage as full. 8-bit KV is first awaited and widened into the next stage of
  // the 16-bit pipeline.
  __device__ __forceinline__ void publish_oldest() {
    if constexpr (C::kWidens) {
      mbarrier_wait(this->full_8bit(oldest_.stage(), warp_), oldest_.phase());
      mbarrier_wait(this->empty(pipe_.stage()), pipe_.phase() ^ 1);
      widen();
    }
    fence_proxy_async();  // makes the stores visible to wgmma
    mbarrier_arrive(this->full(C::kWidens ? pipe_.stage() : oldest_.stage()));
    if constexpr (C::kWidens) pipe_.advance();
    oldest_.advance();
  }
  __device__ __forceinline__ void widen() const {
    // Each eight lanes write to different banks: with 128 columns, the lanes of the second atom begin with its second half.
    const int vector = lane_ % kVectors, second = vector / 4;
    const uint32_t from = smem_8bit(oldest_.stage()) + lane_ * 16,
                   to[2] = {smem_vector(2 * vector + second), smem_vector(2 * vector + 1 - second)};
    constexpr int kBatch = 4;
#pragma unroll
    for (int first = 0; first < C::kWarpKeys / kRowsPerLoad; first += kBatch) {
      uint4 x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) x[i] = ld_shared_16(from + (first + i) * kWarpLoadBytes);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const auto store = [&](uint32_t at, uint32_t low, uint32_t high) {
          const HalfPairs a = widen_adjacent<C::kFormat>(low), b = widen_adjacent<C::kFormat>(high);
          st_shared_16(row_group(at, first + i), a.first, a.second, b.first, b.second);
        };
        store(to[0], second ? x[i].z : x[i].x, second ? x[i].w : x[i].y);
        store(to[1], second ? x[i].x : x[i].z, second ? x[i].y : x[i].w);
      }
    }
  }

  // Columns per 16-byte vector, vectors per row, and rows that the warp loads at once.
  static constexpr int kVectorColumns = 16 / static_cast<int>(sizeof(KvElement)), kVectors = C::kD / kVectorColumns,
                       kRowsPerLoad = 32 / kVectors;
  static constexpr int kWarpLoadBytes = 32 * 16;
  // The address in the next stage of eight columns of this lane's row among the first rows of the warp, and of the i-th rows
  // after those.
  __device__ __forceinline__ uint32_t smem_vector(int columns8) const {
    const int row = lane_ / kVectors;
    return smem_atom(pipe_.stage(), columns8 / 8) + row * 128 + ((columns8 % 8 ^ row) << 4);
  }
  static __device__ __forceinline__ uint32_t row_group(uint32_t first, int i) {
    const int key = i * kRowsPerLoad;
    return (first ^ ((key & 7) << 4)) + key * 128;
  }
  // The warp's keys of an atom.
  __device__ __forceinline__ uint32_t smem_atom(int stage, int atom) const {
    return this->tile(stage) + atom * C::kAtomBytes + warp_ * C::kWarpKeys * 128;
  }
  // The warp's keys of an 8-bit tile, row after row.
  __device__ __forceinline__ uint32_t smem_8bit(int n) const { return this->kv_8bit(n) + warp_ * C::kWarpKeys * C::kPitch; }

  // Stages must remain for the tiles in flight, for those being computed on and for those that may be computed on next. Kernels with few stages
  // publish a tile when the stage of the next one is not free.
  static constexpr bool kPublishesEarly = C::kSameBits && !C::kWidens && C::kStages == 5;
  static constexpr int kMaxInFlight = C::kWidens ? C::kStages8Bit - 1 : C::kStages - (kPublishesEarly ? 2 : 3);
  using OldestState = PipelineState<C::kWidens ? C::kStages8Bit : C::kStages>;

  int warp_;
  PipelineState<C::kStages> pipe_;  // the next stage to fill
  OldestState oldest_;              // the oldest tile in flight
  OldestState load_8bit_;           // 8-bit KV: the next stage to load
  int in_flight_ = 0;
  NotesOf<C> notes_;
};

}  // namespace fa::cuda::extend
