// SPDX-License-Identifier: Apache-2.0
// The producer warps: they determine this CTA's work units and load their K tiles to shared memory. The first of them is also the scheduler
// warp: it describes work units to the other warpgroups.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/kv_loader.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/mla/cta.cuh"

namespace fa::cuda::mla {

template <class C>
class Producer : private decode::WorkScheduler<Cta<C>> {
 public:
  using Base = decode::WorkScheduler<Cta<C>>;
  using KvElement = typename C::KvElement;

  using Scheduler = decode::StreamKScheduler<C, true>;  // recomputes values, since registers are scarce

  using Base::Base;

  __device__ __forceinline__ void run() {
    const int warp = uniform(threadIdx.x >> 5) & 3;
    const int stage = warp >> 1;
    uint32_t tile_count = 0, work_units = 0;  // of the CTA so far
    // Lengths on the device may still be written by the previous launch, and are read first. The other warps wait for a work unit.
    if (!decode::lengths_known<C>(p_)) pdl_wait();
    Scheduler work(a_);
    if (C::kUsesCombineKernel) this->publish_no_tile_if_idle(work);
    this->for_each_work_unit(work, [&](int partition) {
      pdl_wait();
      // A query with a list of its own is a sequence. Its place is that of the sequence whose keys it lists (host/key_lists.h).
      if constexpr (C::kLists) q_start_ = a_.listed.queries.quotient(work_unit_.batch);
      bool pair = false;
      if (warp == 0) pair = publish_work_unit(work_units++, work, partition);
      if constexpr (C::k8BitKv) {
        load_8bit(tile_count, warp);
      } else {
        // The page table is read one of this warp's tiles ahead.
        int page = page_of(kv_tile_ + static_cast<int>((tile_count & 1) ^ stage));
#pragma unroll 1
        for (int tile = kv_tile_; tile < kv_tile_end_; ++tile, ++tile_count) {
          // Q is loaded first: behind the K tiles of all CTAs memory would deliver it last.
          if (tile_count == 0) mbarrier_wait(this->q_requested(), 0);
          if (static_cast<int>(tile_count & 1) != stage) continue;
          load_half(tile, page, stage, warp & 1, (tile_count >> 1 & 1) ^ 1);
        }
      }
      if (C::kPairs && pair) {
        // Tells the peer CTA that its out may be written to this CTA's first stage. That stage's barriers are at most one phase behind the
        // one waited for: this warp loaded its half of the last tile after it had waited for the slices of the tile before.
        if (tile_count > 0) {
#pragma unroll
          for (int slice = 0; slice < C::kSlices; ++slice) mbarrier_wait(empty(0, slice), (tile_count - 1) >> 1 & 1);
        }
        mbarrier_arrive_remote_relaxed_if(lane_ == 0, map_to_cta(this->dsmem_empty(), cluster_cta_rank() ^ 1));
      }
    });
    if (warp == 0) this->write_end_of_work(work_units);
  }

 private:
  using Base::a_;
  using Base::empty;
  using Base::full;
  using Base::head_;
  using Base::k_start_;
  using Base::keys_;
  using Base::kv_tile_;
  using Base::kv_tile_end_;
  using Base::lane_;
  using Base::p_;
  using Base::q_start_;
  using Base::rows_;
  using Base::shared_tile;
  using Base::work_unit_;

  static constexpr int kHalf = C::kKeys / 2, kSlices = C::kSlices / 2;  // keys and slices of half a K tile

  // Many partials are combined in two levels: the last CTA of every group adds those of its group, the work tile's last CTA adds the groups.
  static __device__ __forceinline__ int partials_per_group(int partials) {
    return partials < 12 ? 1 : partials < 50 ? 6 : partials < 100 ? 9 : 12;
  }

  // Describes work unit n of this CTA. Returns whether its work tile is divided between the two CTAs of a cluster.
  __device__ __forceinline__ bool publish_work_unit(uint32_t n, const Scheduler &work, int partition) const {
    this->wait_descriptor_free(n);
    if constexpr (C::kUsesCombineKernel) {
      publish_partial(n, work, partition);
      return false;
    } else if constexpr (C::kSameBits) {
      publish_segments(n, work.partial_of(a_, partition));
      return false;
    }
    // The unit is number `index` of its work tile; `partials` units come before the last one, which combines them in groups of `group_size`.
    const int first_partition = work.partition_of(work_unit_.tile_begin), index = partition - first_partition,
              partials = work.partition_of(work_unit_.tile_end - 1) - first_partition,
              counter = work.counter(work_unit_, first_partition),
              group_size = a_.fixed_splits > 0 ? 1 : partials_per_group(partials);
    const int own_partial = work.partial_of(a_, partition);
    const bool pair = C::kPairs && rows_ > 0 && partials == 1 && first_partition % 2 == 0 &&
                      work.partition_begin(first_partition) == work_unit_.tile_begin &&
                      work.partition_begin(first_partition + 2) == work_unit_.tile_end;
    if (lane_ == 0) {
      WorkUnitDescriptor &work_unit = this->descriptor(n & 1);
      this->fill_descriptor(work_unit);
      work_unit.partial = own_partial;
      work_unit.counter = counter;
      work_unit.partials = index % group_size;
      work_unit.first_partial = own_partial - work_unit.partials;
      work_unit.partial_step = 1;
      work_unit.awaited_counter = own_partial;
      work_unit.pair = pair;
      // A row block without rows has no partials: nobody may count one, or reset the counter of those that are counted.
      if ((C::kPairs && pair) || rows_ <= 0) {
        work_unit.tile_continues = false;
        work_unit.partials = 0;
      } else if (!work_unit.tile_continues) {
        work_unit.partials = (index + group_size - 1) / group_size;
        work_unit.first_partial = own_partial - index;
        work_unit.partial_step = group_size;
        work_unit.awaited_counter = counter;
      } else if (index % group_size != group_size - 1 && index != partials - 1) {
        work_unit.partials = 0;
        work_unit.counter = min(own_partial + group_size - 1 - index % group_size, own_partial - index + partials - 1);
      }
      mbarrier_arrive(this->work_full(n & 1));
    }
    __syncwarp();
    return pair;
  }

  // The same where a combine kernel adds the partials. Where it cannot compute the work tile itself, the tile is published, too.
  __device__ __forceinline__ void publish_partial(uint32_t n, const Scheduler &work, int partition) const {
    if (lane_ == 0) {
      WorkUnitDescriptor &work_unit = this->descriptor(n & 1);
      if constexpr (C::kSameBits) {  // first of all: registers are scarce
        work_unit.first_partial = work_unit_.first_step;
        work_unit.counter = work_unit_.steps;
      }
      this->fill_descriptor(work_unit);
      work_unit.tile_continues = rows_ > 0 && !work_unit_.whole();
      if constexpr (C::kSameBits) {
        work_unit.partial =
            work_unit.tile_continues ? work.segment_partial(a_, work_unit_.begin) : work.partial_of(a_, partition);
        work_unit.partial_step = 1 << work.coscheduled_log2();
      } else {
        work_unit.partial = work.partial_of(a_, partition, work_unit_.begin == work_unit_.tile_begin);
      }
      work_unit.partials = 0;
      work_unit.pair = false;
      mbarrier_arrive(this->work_full(n & 1));
      this->publish_tile(work, partition);
    }
    __syncwarp();
  }

  // The same for FA_FLAG_SAME_BITS: each CTA takes over the total of the partition before it. Where no row is used there is none.
  __device__ __forceinline__ void publish_segments(uint32_t n, int own_partial) const {
    if (lane_ == 0) {
      WorkUnitDescriptor &work_unit = this->descriptor(n & 1);
      this->fill_descriptor(work_unit);
      work_unit.tile_continues &= rows_ > 0;
      work_unit.partial = work_unit.counter = own_partial;
      work_unit.partials = rows_ > 0 && work_unit_.begin != work_unit_.tile_begin;
      work_unit.first_partial = work_unit.awaited_counter = own_partial - 1;
      work_unit.partial_step = 1;
      work_unit.pair = false;
      mbarrier_arrive(this->work_full(n & 1));
    }
    __syncwarp();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Loading K
  // ------------------------------------------------------------------------------------------------------------------

  // Each warp loads half a K tile, as the slices of its half become free. TMA loads groups of eight rows. Where some of the rows do not exist
  // or are not visible to any token, cp.async gathers the others instead, four rows at a time.
  // `page`: of this lane's key. It becomes that of this warp's next tile, which is loaded as soon as the address of the key is known.
  __device__ __forceinline__ void load_half(int tile, int &page, int stage, int half, uint32_t empty_parity) const {
    const int key0 = tile * C::kKeys + half * kHalf;
    if (!C::kLists && a_.tma_kv && key0 >= keys_.begin && key0 + kHalf <= keys_.end) {
      constexpr int kRowGroups = kHalf / 8;
      const int row_group = lane_ & (kRowGroups - 1);
      const KvPlace place = place_of(__shfl_sync(~0u, page, row_group * 8), key0 + row_group * 8);
      page = page_of(tile + 2);
      load_tma(place, stage, half, empty_parity);
    } else {
      static_assert(kHalf == 32, "a lane finds the row of one key");
      const int next_page = page_of(tile + 2);
      const uint32_t rows_seen = __ballot_sync(~0u, page >= 0);
      int64_t offset = head_ * p_.k.head_stride;
      if (page >= 0) {
        const KvPlace place = place_of(page, key0 + lane_);
        offset += place.outer * p_.k.batch_stride + place.row * p_.k.seq_stride;
      }
      page = next_page;
      load_gather(offset, rows_seen, stage, half, empty_parity);
    }
  }

  // The page of this lane's key of a tile, -1 where no token sees it. The thread tells the warp's half of the tile: registers are scarce.
  __device__ __forceinline__ int page_of(int tile) const {
    const int key = tile * C::kKeys + (C::k8BitKv ? key_8bit() : opaque(threadIdx.x) & (2 * kHalf - 1));
    if constexpr (C::kLists) {
      if (tile >= kv_tile_end_ || key >= a_.listed.lists.count) return -1;
      const ListLocator locator{a_.listed};
      int b = a_.listed.queries.quotient(work_unit_.batch);
      const int j = *locator.address(b, a_.listed.queries.remainder(work_unit_.batch), key);
      asm volatile("" : "+r"(b) : "r"(j));  // the sequence is looked up behind that load, when its address takes no registers
      return locator.entry(b, sequence_of(a_.listed.k_lengths, b), j);
    } else {
      if (tile >= kv_tile_end_ || key < keys_.begin || key >= keys_.end) return -1;
      return KvLocator{p_, a_.page_size}.page_of(work_unit_.batch, key);
    }
  }
  // Where the row of a key of this work unit lies. Entries of lists are rows.
  __device__ __forceinline__ KvPlace place_of(int page, int key) const {
    if constexpr (C::kLists) return {page, 0};
    return KvLocator{p_, a_.page_size}.place(page, work_unit_.batch, k_start_, key);
  }

  // `place`: of the first row of this lane's group of rows.
  __device__ __forceinline__ void load_tma(const KvPlace &place, int stage, int half, uint32_t empty_parity) const {
    constexpr int kRowGroups = kHalf / 8;
    const int row_group = lane_ & (kRowGroups - 1);
    mbarrier_wait(empty(stage, half * kSlices), empty_parity);
    if (lane_ == 0) {
      mbarrier_arrive_expect_tx(full(stage), C::kHalfBytes);
    } else {
      mbarrier_arrive(full(stage));
    }
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice > 0) mbarrier_wait(empty(stage, half * kSlices + slice), empty_parity);
      if (lane_ / (kRowGroups / kSlices) == slice) {
        const uint64_t policy = a_.row_blocks == 1 ? kEvictFirst : kEvictNormal;
        tma_load_5d(shared_tile(stage) + half * C::kHalfBytes + row_group * C::kRowGroupBytes, &a_.k_map, full(stage), 0,
                    place.row, /*atom=*/0, head_, place.outer, policy);
      }
      __syncwarp();
    }
  }

  // Gathers rows by cp.async, four at a time: a lane loads one of the eight 16-byte vectors of every atom. Lane i has the offset of row i from
  // where K begins; rows that are not in `rows_seen` become zero.
  __device__ __forceinline__ void load_gather(int64_t offset, uint32_t rows_seen, int stage, int half,
                                              uint32_t empty_parity) const {
    constexpr int kRowsAtOnce = 4, kLoads = kHalf / kSlices / kRowsAtOnce;
    const int vector = lane_ & 7, row = lane_ >> 3, columns = static_cast<int>(p_.head_dim) - vector * 8;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      mbarrier_wait(empty(stage, half * kSlices + slice), empty_parity);
#pragma unroll
      for (int n = slice * kLoads; n < (slice + 1) * kLoads; ++n) {
        const int row_in_group = row + n % 2 * kRowsAtOnce;
        const KvElement *src =
            static_cast<const KvElement *>(p_.k.data) + vector * 8 + __shfl_sync(~0u, offset, n * kRowsAtOnce + row);
        const int valid = rows_seen >> (n * kRowsAtOnce + row) & 1 ? columns : 0;
        const uint32_t dst = shared_tile(stage) + half * C::kHalfBytes + n / 2 * C::kRowGroupBytes + row_in_group * 128 +
                             ((vector ^ row_in_group) << 4);
#pragma unroll
        for (int atom = 0; atom < C::kAtoms; ++atom) {
          cp_async_16(dst + atom * C::kAtomBytes, atom * 64 < valid ? src + atom * 64 : src, atom * 64 < valid ? 16 : 0);
        }
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    publish(rows_seen, stage, half);
  }

  // Publishes half a K tile.
  __device__ __forceinline__ void publish(uint32_t rows_seen, int stage, int half) const {
    if (C::kLists && lane_ == 0) st_shared_4(this->shared_listed(stage, half), rows_seen);
    fence_proxy_async();
    mbarrier_arrive(full(stage));
  }

  // ------------------------------------------------------------------------------------------------------------------
  // 8-bit K, which becomes fp16
  // ------------------------------------------------------------------------------------------------------------------

  static constexpr int kPartBytes = 8 * 64;  // of eight rows and 64 columns

  // Each warp has two groups of eight rows of every K tile: number `warp`, and number kGroupStride + `warp`, whose slice is released later.
  static constexpr int kGroupStride = C::kKeys / 16, kGroupBytes = kGroupStride * C::kRowGroupBytes;
  // The key of this lane in a tile: lanes 0 to 7 have the rows of the first group, 8 to 15 those of the second, and the others the same again.
  static __device__ __forceinline__ int key_8bit() {
    const int thread = opaque(threadIdx.x);
    return (thread & 8) * kGroupStride + ((thread >> 5 & 3) << 3) + (thread & 7);
  }
  // Where the row of this lane's key lies, and which of the warp's sixteen rows exist and are visible to some token.
  struct Rows8Bit {
    KvPlace place;
    uint32_t seen;
  };

  // Loads the K tiles of the work unit. The bytes of a group arrive in the second half of the memory that they will fill, as soon as its slice is
  // free, in parts of eight rows and 64 columns.
  __device__ __forceinline__ void load_8bit(uint32_t &tile_count, int warp) const {
    static_assert(C::kProducerWarps * 16 == C::kKeys && 2 * kPartBytes == C::kAtomBytes);
    if (kv_tile_ == kv_tile_end_) return;
    // The page table is read one tile ahead.
    int page = page_of(kv_tile_);
    // Q is loaded first: behind the K tiles of all CTAs memory would deliver it last.
    if (tile_count == 0) mbarrier_wait(this->q_requested(), 0);
#pragma unroll 1
    for (int tile = kv_tile_; tile < kv_tile_end_; ++tile, ++tile_count) {
      const int stage = static_cast<int>(tile_count & 1);
      const uint32_t groups = shared_tile(stage) + warp * C::kRowGroupBytes;
      const Rows8Bit rows = {place_of(max(page, 0), tile * C::kKeys + key_8bit()), __ballot_sync(~0u, page >= 0)};
#pragma unroll 1
      for (int n = 0; n < 2; ++n) {
        mbarrier_wait(empty(stage, n * (C::kSlices / 2) + (warp >> 1)), (tile_count >> 1 & 1) ^ 1);
        request_8bit(tile, rows, n, groups + n * kGroupBytes + C::kRowGroupBytes / 2, this->bytes_full(warp, n));
      }
      page = page_of(tile + 1);  // while bytes arrive: a list of keys takes two lookups, one after the other
#pragma unroll 1
      for (int n = 0; n < 2; ++n) {
        mbarrier_wait(this->bytes_full(warp, n), tile_count & 1);
        widen<0, C::kEarlyAtoms>(groups + n * kGroupBytes);
      }
      if (C::kLists && (lane_ & ~8) == 0) st_shared_1(this->shared_listed(stage, lane_ >> 3) + warp, rows.seen >> lane_ & 0xFF);
      if constexpr (C::kEarlyAtoms < C::kAtoms) {
        fence_proxy_async();
        mbarrier_arrive(this->early_full(stage));
#pragma unroll 1
        for (int n = 0; n < 2; ++n) widen<C::kEarlyAtoms, C::kAtoms>(groups + n * kGroupBytes);
      }
      fence_proxy_async();
      mbarrier_arrive(full(stage));
    }
  }

  // Requests the bytes of group n: from TMA or, where some of the tile's rows do not exist or are not visible to any token, by cp.async, as zeros
  // for those. The barrier `arrived` has an arrival of each lane.
  __device__ __forceinline__ void request_8bit(int tile, const Rows8Bit &rows, int n, uint32_t bytes, uint32_t arrived) const {
    const int key0 = tile * C::kKeys;
    if (!C::kLists && a_.tma_kv && key0 >= keys_.begin && key0 + C::kKeys <= keys_.end) {
      if (lane_ == n * 8) {
        mbarrier_arrive_expect_tx(arrived, C::kRowGroupBytes / 2);
        tma_load_5d(bytes, &a_.k_map, arrived, 0, rows.place.row, /*atom=*/0, head_, rows.place.outer,
                    a_.row_blocks == 1 ? kEvictFirst : kEvictNormal);
      } else {
        mbarrier_arrive(arrived);
      }
      __syncwarp();
    } else {
      // A lane loads one 16-byte vector of each part.
      const int64_t offset = head_ * p_.k.head_stride + rows.place.outer * p_.k.batch_stride + rows.place.row * p_.k.seq_stride;
      const int row = n * 8 + (lane_ >> 2), vector = lane_ & 3,
                columns = rows.seen >> row & 1 ? static_cast<int>(p_.head_dim) - vector * 16 : 0;
      const auto *k = static_cast<const KvElement *>(p_.k.data), *src = k + __shfl_sync(~0u, offset, row) + vector * 16;
      bytes += static_cast<uint32_t>(lane_) * 16;
#pragma unroll
      for (int atom = 0; atom < C::kAtoms; ++atom) {
        cp_async_16(bytes + atom * kPartBytes, atom * 64 < columns ? src + atom * 64 : k, atom * 64 < columns ? 16 : 0);
      }
      cp_async_mbarrier_arrive(arrived);
    }
  }

  // Widens parts kFirst to kEnd - 1 of a group in place: part n goes to 1 KB from 1 KB n on, where no part behind it lies. A lane widens vectors of
  // 16 bytes, each to two neighbours, and reads kAhead of them before it stores the first.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void widen(uint32_t group) const {
    constexpr int kAhead = C::kFormat == Format::i8 && !C::kLists ? 4 : 3;
    static_assert(kEnd - kFirst >= kAhead);
    const int r = opaque(lane_) >> 2, v = opaque(lane_) & 3;
    const uint32_t from = group + C::kRowGroupBytes / 2 + static_cast<uint32_t>(opaque(lane_)) * 16,
                   to[2] = {group + r * 128 + ((2 * v ^ r) << 4), group + r * 128 + (((2 * v + 1) ^ r) << 4)};
    uint4 ahead[kAhead];
#pragma unroll
    for (int n = kFirst; n < kFirst + kAhead; ++n) ahead[n - kFirst] = ld_shared_16(from + n * kPartBytes);
#pragma unroll
    for (int n = kFirst; n < kEnd; ++n) {
      uint4 &x = ahead[(n - kFirst) % kAhead];
      __syncwarp();  // all lanes have read what is overwritten
      const auto store = [&](uint32_t at, uint32_t low, uint32_t high) {
        const HalfPairs a = widen_adjacent<C::kFormat>(low), b = widen_adjacent<C::kFormat>(high);
        st_shared_16(at + n * C::kAtomBytes, a.first, a.second, b.first, b.second);
      };
      store(to[0], x.x, x.y);
      store(to[1], x.z, x.w);
      if (n + kAhead < kEnd) x = ld_shared_16(from + (n + kAhead) * kPartBytes);
    }
  }
};

}  // namespace fa::cuda::mla
