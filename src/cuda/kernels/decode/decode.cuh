// SPDX-License-Identifier: Apache-2.0
// Exact attention forward for a few queries per sequence over many keys. Bound by reading K and V once.
//
// A CTA owns all rows of one KV head, i.e. tokens x query heads of the group, so that all of them share one read of K and V.
// The CTA has kKvGroups KV groups of kRowWarps warps each. The groups take KV tiles of kKvTile keys in turn; each has a
// cp.async pipeline of its own, and the groups synchronise only at the end of a work unit. The warps of a group share its KV
// tiles and have kWarpRows rows each. stream_k.cuh decides which CTA gets which keys.
//
//   shared memory   Q [kRows][kD] | per KV group: pipeline of kStages x (K [kKvTile][kD], V [kKvTile][kD], descales) |
//                   maximum and row sum [kKvGroups][kRows] | Q's scale [kRows] (8-bit KV) |
//                   DSMEM buffer and mbarrier (clusters)
//                   In the epilogue each group's fp32 out [kRows][kD] reuses its pipeline.
//
//   prologue        load Q, issue the loads of the first kStages - 1 KV steps
//   main loop       wait for K and V of this KV step, issue those of kStages - 1 steps later, read the page table
//                   two steps ahead of that
//                   S = Q K^T, mask S where the tile touches an edge, P = exp2(S - max), out += P V
//   epilogue        sum out of the KV groups through shared memory; store the result or a split-KV partial (epilogue.cuh)
//
// The maximum of a row is its own and exact in every step. The bits of a row depend on its keys and on how they are split, not
// on neighbouring rows.
#pragma once

#include "cuda/kernels/decode/orientation_kq.cuh"
#include "cuda/kernels/decode/orientation_qk.cuh"

namespace fa::cuda::decode {

// Whether programmatic dependent launch exists: a launch may start while the previous one still runs.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasPdl = true;
#else
constexpr bool kHasPdl = false;
#endif

template <class C>
class Decode : protected std::conditional_t<C::kRows == 8, OrientationKq<C>, OrientationQk<C>> {
 public:
  using Base = std::conditional_t<C::kRows == 8, OrientationKq<C>, OrientationQk<C>>;
  using Base::Base;
  using typename Base::Element;
  using typename Base::Scheduler;

  __device__ __forceinline__ void run() {
    if (!lengths_known()) pdl_wait();
    Scheduler scheduler(a_);
    const auto num_ctas = [&] { return static_cast<int>(gridDim.x >> scheduler.coscheduled_log2()); };
    int partition = static_cast<int>(blockIdx.x >> scheduler.coscheduled_log2());
    if (partition >= scheduler.partitions()) {
      pdl_wait();
      if (threadIdx.x == 0) scheduler.publish_no_tile();
    }
#pragma unroll 1
    for (; partition < scheduler.partitions(); partition += num_ctas()) {
      int iteration = -1;  // the partition's first iteration
#pragma unroll 1
      while (true) {
        const int begin = scheduler.partition_begin(partition), end = scheduler.partition_begin(partition + 1);
        const WorkUnit work_unit = scheduler.at(iteration < 0 ? begin : iteration, end);
        const bool ends_partition = work_unit.end == end;
        set_work_unit(work_unit);
        if (kHasPdl && iteration < 0 && partition < num_ctas() && lengths_known()) this->prefetch_kv();
        pdl_wait();
        mainloop([&] { this->publish_split_tile(scheduler, partition, ends_partition); });
        epilogue(scheduler, partition);
        if (ends_partition && partition + num_ctas() >= scheduler.partitions()) return;
        iteration = work_unit_.end;
        __syncthreads();  // the next work unit reuses shared memory
        scheduler.reload(work_unit_.batch);
        if (ends_partition) break;
      }
    }
  }

 protected:
  using Base::a_;
  using Base::first_key;
  using Base::lengths_known;
  using Base::load_kv;
  using Base::load_q;
  using Base::locate_key;
  using Base::p_;
  using Base::q_start_;
  using Base::set_work_unit;
  using Base::sync_group;
  using Base::warp_visible_;
  using Base::work_unit_;

  // ------------------------------------------------------------------------------------------------------------------
  // Main loop over the KV steps of a work unit
  // ------------------------------------------------------------------------------------------------------------------

  // `after_first_loads` is called once, when the first loads are in flight.
  template <typename F>
  __device__ __forceinline__ void mainloop(F after_first_loads) {
    // The page table is read two steps ahead of the loads.
    KvLocation location = locate_key(0), next = locate_key(1);
    load_q();
    this->init_accumulators();
    // The first iterations only issue loads.
    int next_stage = 0;  // the stage to load; the one after it is computed on
#pragma unroll 1
    for (int step = 1 - C::kStages; step < work_unit_.steps; ++step) {
      if (step >= 0) {
        if (step == 0) after_first_loads();
        cp_async_wait<C::kStages - 2>();
        if (step == 0) {
          __syncthreads();  // Q and K and V of this step have arrived
          this->load_q_fragments();
        } else {
          sync_group();  // this step's K and V have arrived, and the previous step's stage is no longer read
        }
      }
      load_kv(next_stage, step + C::kStages - 1, location);
      next_stage = next_stage == C::kStages - 1 ? 0 : next_stage + 1;
      location = next;
      next = locate_key(step + C::kStages + 1);
      const int key0 = first_key(step);
      if (step >= 0 && key0 < warp_visible_.end && key0 + C::kKvTile > warp_visible_.begin)
        this->process_kv_tile(next_stage, key0);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Epilogue
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void epilogue(const Scheduler &scheduler, int partition) {
    sync_group();  // the pipeline buffers are no longer read
    this->store_partial_out();
    __syncthreads();
    // Recomputed where the main loop has no register for it.
    if (C::kD > 128) q_start_ = sequence_of(p_.q_lengths, opaque(work_unit_.batch)).start;
    this->store_results(scheduler, partition);
  }
};

}  // namespace fa::cuda::decode
