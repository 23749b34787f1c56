// SPDX-License-Identifier: Apache-2.0
// FA_FLAG_SAME_BITS with few sequences: one token, whose query heads of a KV head are at most kClusterRows rows. A cluster of CTAs has all keys of
// one KV head of one sequence, and folds the segments of keys (segments.cuh) through distributed shared memory (DSMEM).
//
// Where a head has fewer segments than the cluster has CTAs, a team of 2, 4 or 8 CTAs shares each segment. That changes no bit: within a segment
// the scores of a key do not depend on other keys; maximum, row sums and out are chains over all keys, but those of out have nothing to do with each
// other from column to column. So a CTA of a team
//
//   1. computes S = Q K^T of some of the segment's keys,
//   2. sends S to all CTAs of its team,
//   3. computes P of all keys, which every CTA of the team repeats,
//   4. computes out = P V of some of the columns, for all keys in order.
//
// Where a head has more segments than that, each CTA is a team of its own, and takes every n-th segment in rounds.
//
//   fold   at the end of a round each CTA sends out of its segment, cut into column blocks, to the CTAs that own these, with maximum and row sum of
//          each row. A CTA folds the segments of a round for the columns that it owns, one round behind, and stores them in the end
//
// Four producer warps load K and V, one stage of keys after the other; eight consumer warps do the rest. All of them are in lockstep
// within a segment, which costs nothing while loads run ahead: the pipeline holds what memory delivers in 4 us.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/extend/cluster_consumer.cuh"
#include "cuda/kernels/extend/cluster_producer.cuh"

namespace fa::cuda::extend {

// Every CTA waits for the previous launch, so that a dependent launch that waits for this one has waited for both.
template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) extend_clustered(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  pdl_launch_dependents();
  decode::prefetch_params(params, smem_address(shared) + offsetof(typename C::Storage, lane_sums));
  ClusterCta<C> cta(params, shared);
  if (threadIdx.x == 0) {
    init_pipeline<C::kStages>(cta.full(0), cta.empty(0), C::kConsumerWarps, kProducerWarps * 32);
    mbarrier_init(cta.scores_full(), 1);
    for (int buffer = 0; buffer < 2; ++buffer) {
      mbarrier_init(cta.fold_full(buffer), 1);
      mbarrier_init(cta.fold_empty(buffer), cta.fold_warps() << cta.cluster_log2);
    }
    mbarrier_init_fence();
  }
  cluster_arrive_relaxed();
  const bool lengths_known = decode::lengths_known<C>(cta.problem);
  if (!lengths_known) pdl_wait();
  cta.find_work();
  // Consumer warps wait for the registers of the producer warps, which prefetch before all warps wait for the mbarriers.
  constexpr int kMbarriersReady = 2;
  if (cta.warp >= C::kConsumerWarps) {
    setmaxnreg_dealloc<C::kProducerRegisters>();
    if (params.tma_kv && threadIdx.x == C::kConsumerThreads) {
      tma_prefetch_descriptor(&params.k_map);
      tma_prefetch_descriptor(&params.v_map);
    }
    ClusterProducer<C> producer(cta);
    if (lengths_known) producer.prefetch_keys();
    named_barrier(kMbarriersReady, C::kThreads);
    pdl_wait();
    producer.load_segments();
    cluster_wait();
  } else {
    setmaxnreg_alloc<C::kConsumerRegisters>();
    named_barrier(kMbarriersReady, C::kThreads);
    pdl_wait();
    ClusterConsumer<C>(cta).run();
  }
#endif
}

}  // namespace fa::cuda::extend
