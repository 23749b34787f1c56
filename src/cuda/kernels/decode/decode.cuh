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
// 8-bit KV of more than 256 columns has a main loop of its own (wide_8bit.cuh).
//
// The maximum of a row is its own and exact in every step. The bits of a row depend on its keys and on how they are split, not
// on neighbouring rows.
#pragma once

#include "cuda/kernels/decode/epilogue.cuh"
#include "cuda/kernels/decode/orientation_kq.cuh"
#include "cuda/kernels/decode/orientation_qk.cuh"
#include "cuda/kernels/decode/wide_8bit.cuh"

namespace fa::cuda::decode {

// Whether programmatic dependent launch exists: a launch may start while the previous one still runs.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasPdl = true;
#else
constexpr bool kHasPdl = false;
#endif

template <class C>
using Attention = std::conditional_t<(C::kColumnWarps > 1), Wide8Bit<C>,
                                     std::conditional_t<C::kWarpRows == 8, OrientationKq<C>, OrientationQk<C>>>;

template <class C>
using ParamsOf = std::conditional_t<(C::kColumnWarps > 1), WideParams, Params>;

// Main loop over the KV steps of a work unit. `after_first_loads` is called once, when the first loads are in flight.
template <class C, typename F>
__device__ __forceinline__ void mainloop(const Cta<C> &cta, Attention<C> &attention, F after_first_loads) {
  // The page table is read two steps ahead of the loads.
  KvPlace place = cta.locate_key(0), next = cta.locate_key(1);
  cta.load_q();
  attention.init_accumulators();
  // The first iterations only issue loads.
  int next_stage = 0;  // the stage to load; the one after it is computed on
#pragma unroll 1
  for (int step = 1 - C::kStages; step < cta.work_unit.steps; ++step) {
    if (step >= 0) {
      if (step == 0) after_first_loads();
      cp_async_wait<C::kStages - 2>();
      if (step == 0) {
        __syncthreads();  // Q and K and V of this step have arrived
        attention.load_q_fragments();
      } else {
        cta.sync_group();  // this step's K and V have arrived, and the previous step's stage is no longer read
      }
    }
    cta.load_kv(next_stage, step + C::kStages - 1, place);
    next_stage = next_stage == C::kStages - 1 ? 0 : next_stage + 1;
    place = next;
    next = cta.locate_key(step + C::kStages + 1);
    const int key0 = cta.first_key(step);
    if (step >= 0 && key0 < cta.warp_visible.end && key0 + C::kKvTile > cta.warp_visible.begin)
      attention.process_kv_tile(next_stage, key0);
  }
}

// Processes all work units of this CTA.
template <class C>
__device__ __forceinline__ void decode_partitions(const Params &params, char *shared) {
  Cta<C> cta(params, shared);
  Attention<C> attention(cta);
  const Epilogue<C> epilogue(cta);
  if (!cta.lengths_known()) pdl_wait();
  StreamKScheduler<C, true> scheduler(params);
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
      cta.set_work_unit(work_unit);
      if (kHasPdl && iteration < 0 && partition < num_ctas() && cta.lengths_known()) cta.prefetch_kv();
      pdl_wait();
      const auto publish = [&] { epilogue.publish_split_tile(scheduler, partition, ends_partition); };
      if constexpr (C::kColumnWarps > 1) {
        attention.mainloop(publish);
      } else {
        mainloop(cta, attention, publish);
      }
      // Epilogue.
      cta.sync_group();  // the pipeline buffers are no longer read
      attention.store_partial_out();
      __syncthreads();
      // Recomputed where the main loop has no register for it.
      if (C::kD > 128) cta.q_start = sequence_of(params.problem.q_lengths, opaque(cta.work_unit.batch)).start;
      epilogue.store_results(scheduler, partition);
      if (ends_partition && partition + num_ctas() >= scheduler.partitions()) return;
      iteration = cta.work_unit.end;
      __syncthreads();  // the next work unit reuses shared memory
      scheduler.reload(cta.work_unit.batch);
      if (ends_partition) break;
    }
  }
}

}  // namespace fa::cuda::decode
