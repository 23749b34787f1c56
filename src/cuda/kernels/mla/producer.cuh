// SPDX-License-Identifier: Apache-2.0
// The warps that fetch keys, and one of them plans: which pieces of work this block of threads has, where their keys lie, and how they come
// to shared memory.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/mla/cta.cuh"

namespace fa::cuda::mla {

template <class C>
class Producer : private decode::WorkScheduler<Block<C>> {
 public:
  using Base = decode::WorkScheduler<Block<C>>;
  using Element = typename C::Element;

  using Base::Base;

  __device__ __forceinline__ void run() {
    const int warp = uniform(threadIdx.x >> 5) & 3;
    const int place = warp >> 1;
    uint32_t count = 0, pieces = 0;  // tiles and pieces of the block so far
    // Of what the launch before this one may still write lengths are wanted first. Other warps wait for a plan.
    if (!decode::lengths_known(p_)) pdl_wait();
    decode::StreamKScheduler<C> work(a_);
    this->for_each_work_unit(work, [&](int range) {
      pdl_wait();
      bool pair = false;
      if (warp == 0) pair = write_plan(pieces++, work, range);
#pragma unroll 1
      for (int tile = kv_tile_; tile < kv_tile_end_; ++tile, ++count) {
        // Queries go first: memory would give them last, when all blocks have asked for a ring of keys.
        if (count == 0) mbarrier_wait(this->asked(), 0);
        if (static_cast<int>(count & 1) == place)
          fetch(tile * C::kKeys + (warp & 1) * kHalf, place, warp & 1, (count >> 1 & 1) ^ 1);
      }
      if (C::kPairs && pair) {
        // The other block's out is to land in the first place of the ring. Its last tile was fetched when the tile before it was handed back up
        // to the parts of this warp, so that no barrier is further behind than these waits, in their order, take it to be.
        if (count > 0) {
#pragma unroll
          for (int part = 0; part < C::kParts; ++part) mbarrier_wait(free(0, part), (count - 1) >> 1 & 1);
        }
        mbarrier_arrive_remote_relaxed_if(lane_ == 0, map_to_cta(this->other_read(), cluster_cta_rank() ^ 1));
      }
    });
    if (warp == 0) this->write_end_of_work(pieces);
  }

 private:
  using Base::a_;
  using Base::free;
  using Base::full;
  using Base::head_;
  using Base::k_start_;
  using Base::keys_;
  using Base::kv_tile_;
  using Base::kv_tile_end_;
  using Base::lane_;
  using Base::p_;
  using Base::rows_;
  using Base::shared_tile;
  using Base::work_unit_;

  static constexpr int kHalf = C::kKeys / 2, kParts = C::kParts / 2;  // of a half

  // Many parts are added up in two levels: each of so many by the last one's block, and those sums by the block that has the item's end.
  static __device__ __forceinline__ int parts_together(int parts) {
    return parts < 12 ? 1 : parts < 50 ? 6 : parts < 100 ? 9 : 12;
  }

  // Whether the piece is of a pair.
  __device__ __forceinline__ bool write_plan(uint32_t n, const decode::StreamKScheduler<C> &work, int range) const {
    this->wait_descriptor_free(n);
    // Of the item's pieces this is number `index`; `parts` come before the last one, which adds them, through sums of `group` of them.
    const int first_range = work.partition_of(work_unit_.tile_begin), index = range - first_range,
              parts = work.partition_of(work_unit_.tile_end - 1) - first_range,
              item_counter = work.counter(work_unit_, first_range), group = a_.fixed_splits > 0 ? 1 : parts_together(parts);
    const bool pair = C::kPairs && rows_ > 0 && parts == 1 && first_range % 2 == 0 &&
                      work.partition_begin(first_range) == work_unit_.tile_begin &&
                      work.partition_begin(first_range + 2) == work_unit_.tile_end;
    if (lane_ == 0) {
      Plan &plan = this->descriptor(n & 1);
      this->fill_descriptor(plan);
      plan.slot = range;
      plan.counter = item_counter;
      plan.parts = index % group;
      plan.first_part = range - plan.parts;
      plan.part_step = 1;
      plan.awaited = range;
      plan.pair = pair;
      if (C::kPairs && pair) {
        plan.tile_continues = false;
        plan.parts = 0;
      } else if (!plan.tile_continues) {
        plan.parts = (index + group - 1) / group;
        plan.first_part = range - index;
        plan.part_step = group;
        plan.awaited = item_counter;
      } else if (index % group != group - 1 && index != parts - 1) {
        plan.parts = 0;
        plan.counter = min(range + group - 1 - index % group, range - index + parts - 1);
      }
      mbarrier_arrive(this->work_full(n & 1));
    }
    __syncwarp();
    return pair;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Keys
  // ------------------------------------------------------------------------------------------------------------------

  // A warp brings half a tile to its half of a place as parts of that get free, in eight steps of four rows or, by the copy engine, in groups
  // of eight. Where rows are missing the engine does not do.
  __device__ __forceinline__ void fetch(int key0, int place, int half, uint32_t free_parity) const {
    if (a_.tma_kv && key0 >= keys_.begin && key0 + kHalf <= keys_.end) {
      copy(key0, place, half, free_parity);
    } else {
      gather(key0, place, half, free_parity);
    }
  }

  struct Spot {
    int row, batch;  // as the tensor's description counts
  };
  __device__ __forceinline__ Spot spot_of(int key) const {
    const int32_t *table = p_.page_table;
    if (table == nullptr) return {static_cast<int>(k_start_) + key, p_.k_lengths.cu != nullptr ? 0 : work_unit_.batch};
    const int page = a_.page_size.quotient(key);
    return {key - page * static_cast<int>(a_.page_size.value),
            table[work_unit_.batch * p_.page_table_batch_stride + page * p_.page_table_page_stride]};
  }

  __device__ __forceinline__ void copy(int key0, int place, int half, uint32_t free_parity) const {
    constexpr int kGroups = kHalf / 8;
    const int group = lane_ & (kGroups - 1);
    const Spot spot = spot_of(key0 + group * 8);
    mbarrier_wait(free(place, half * kParts), free_parity);
    if (lane_ == 0) {
      mbarrier_arrive_expect_tx(full(place), C::kHalfBytes);
    } else {
      mbarrier_arrive(full(place));
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (part > 0) mbarrier_wait(free(place, half * kParts + part), free_parity);
      if (lane_ / (kGroups / kParts) == part) {
        const uint64_t policy = a_.row_blocks == 1 ? kEvictFirst : kEvictNormal;
        tma_load_5d(shared_tile(place) + half * C::kHalfBytes + group * C::kGroupBytes, &a_.k_map, full(place),
                    /*slab=*/0, spot.row, head_, spot.batch, policy);
      }
      __syncwarp();
    }
  }

  // By pieces of 16 bytes: one of the eight of every slab, of eight rows.
  __device__ __forceinline__ void gather(int key0, int place, int half, uint32_t free_parity) const {
    constexpr int kMine = kHalf / 4;
    const Element *k = static_cast<const Element *>(p_.k.data) + head_ * p_.k.head_stride;
    const int32_t *table = p_.page_table;
    if (table != nullptr) {
      table += work_unit_.batch * p_.page_table_batch_stride;
    } else {
      k += work_unit_.batch * p_.k.batch_stride + k_start_ * p_.k.seq_stride;
    }
    const int chunk = lane_ & 7, row = lane_ >> 3, first = key0 + row;
    const Element *from[kMine];
    uint32_t exists = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int key = first + i * 4;
      from[i] = k;
      if (key < keys_.begin || key >= keys_.end) continue;
      exists |= 1u << i;
      if (table == nullptr) {
        from[i] += key * p_.k.seq_stride;
      } else {
        const int page = a_.page_size.quotient(key);
        from[i] += table[page * p_.page_table_page_stride] * p_.k.batch_stride +
                   (key - page * static_cast<int>(a_.page_size.value)) * p_.k.seq_stride;
      }
      from[i] += chunk * 8;
    }
    const int columns = static_cast<int>(p_.head_dim) - chunk * 8;
#pragma unroll
    for (int part = 0; part < kParts; ++part) mbarrier_wait(free(place, half * kParts + part), free_parity);
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int valid = exists >> i & 1 ? columns : 0, in_group = row + i % 2 * 4;
      const uint32_t to =
          shared_tile(place) + half * C::kHalfBytes + i / 2 * C::kGroupBytes + in_group * 128 + ((chunk ^ in_group) << 4);
#pragma unroll
      for (int slab = 0; slab < C::kSlabs; ++slab) {
        cp_async_16(to + slab * C::kSlabBytes, slab * 64 < valid ? from[i] + slab * 64 : from[i], slab * 64 < valid ? 16 : 0);
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_proxy_async();
    mbarrier_arrive(full(place));
  }
};

}  // namespace fa::cuda::mla
