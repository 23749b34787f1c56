// SPDX-License-Identifier: Apache-2.0
// Exact attention forward over latent KV caches (multi-head latent attention, MLA). A row of the cache is both K (576 columns) and V (its
// first 512 columns), shared by many query heads. Each row is loaded once and serves both matmuls. FlashMLA is the closest published design.
//
//   S = Q K^T, O = softmax(S) V     Q [64][576]  K [kKeys][576]  V = K[:, :512]  out [64][512]
//
// A CTA owns 64 rows (query tokens x heads) of one KV head of a sequence, and loops over K tiles of 64 keys. Warp roles:
//
//   producer warps (4)       load half a K tile each, or, with 8-bit K, a quarter of every tile, as soon as slices of its stage are free, across
//                            the ends of work units; the first one is also the scheduler warp
//   softmax warpgroup        S = Q K^T, P = exp2(S - m); stores P and each row's rescale factor to shared memory
//   two PV warpgroups        256 columns of out each: out = rescale * out + P V, in slices of 16 keys, while the softmax warpgroup still
//                            exponentiates the later slices
//
// Shared memory: 2 K tiles [64][576] | Q [64][320] (the other columns in registers) | P [2][64][64] | rescale factors, mbarriers, work units
//
// Work is partitioned by the stream-K scheduler of the decode kernels. The CTA with the last keys of a work tile keeps its accumulators in
// registers and adds the partials of the other CTAs to them; with many partials, some CTAs add groups of them first, or, with few work tiles, a
// combine kernel adds all. A row's maximum is its own, and depends only on the row's keys so far. So the bits of a row depend only on its keys
// and on where they are split. Kernels for FA_FLAG_SAME_BITS split keys at fixed places, and fold what they have of each part in order
// (segments.cuh).
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/decode/combine.cuh"
#include "cuda/kernels/mla/producer.cuh"
#include "cuda/kernels/mla/pv_warpgroups.cuh"
#include "cuda/kernels/mla/softmax_warpgroup.cuh"

namespace fa::cuda::mla {

// Initialises the barriers, and assigns the roles to the warpgroups of a CTA.
template <class C>
__device__ __forceinline__ void run_mla(const Cta<C> &cta) {
  if (threadIdx.x == 0) {
    for (int n = 0; n < C::kStages; ++n) {
      mbarrier_init(cta.full(n), C::k8BitKv ? C::kProducerWarps * 32 : 64);
      if constexpr (C::kEarlyAtoms < C::kAtoms) mbarrier_init(cta.early_full(n), C::kProducerWarps * 32);
      for (int slice = 0; slice < C::kSlices; ++slice) {
        mbarrier_init(cta.empty(n, slice), C::kPvThreads);
        mbarrier_init(cta.p_full(n, slice), C::kSoftmaxThreads);
      }
    }
    mbarrier_init(cta.epilogue_full(), C::kSoftmaxThreads);
    mbarrier_init(cta.epilogue_empty(), C::kPvThreads);
    mbarrier_init(cta.softmax_sync(), C::kSoftmaxThreads);
    mbarrier_init(cta.q_requested(), C::kSoftmaxThreads);
    mbarrier_init(cta.dsmem_empty(), 1);
    mbarrier_init(cta.dsmem_stats_full(), 1);
    mbarrier_init(cta.dsmem_out_full(), 1);
    for (int n = 0; n < 2; ++n) {
      mbarrier_init(cta.work_full(n), 1);
      mbarrier_init(cta.work_empty(n), C::kPvThreads + C::kSoftmaxThreads);
    }
    if constexpr (C::k8BitKv) {
      for (int n = 0; n < C::kProducerWarps * 2; ++n) mbarrier_init(cta.bytes_full(n / 2, n % 2), 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (C::kPairs) {  // until the peer CTA's barriers are initialised, too
    cluster_arrive_relaxed();
    cluster_wait();
  }
  // setmaxnreg: (2 x 168 + 136 + 40) x 128 = 64K registers in all.
  const int wg = uniform(threadIdx.x >> 7);
  if (wg < 2) {
    setmaxnreg_alloc<168>();
    PvWarpgroups<C>(cta).run();
  } else if (wg == 2) {
    setmaxnreg_alloc<136>();
    SoftmaxWarpgroup<C>(cta).run();
  } else {
    setmaxnreg_dealloc<40>();
    Producer<C>(cta.a_, cta.memory_).run();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) mla(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  pdl_launch_dependents();
  run_mla(Cta<C>(params, shared));
#endif
}

// The kernels of a row of the table, for one type of operands of the MMA and of K.
template <typename Element, int kShapeIndex, Format kFormat = Format::same>
decode::Kernels instance() {
  constexpr Shape kShape = kShapes[kShapeIndex];
  using ThisConfig = Config<Element, kFormat, kShape.head_dim, kShape.head_dim_v, kShape.keys, kShape.stages, kShape.held,
                            kShape.pairs, kShape.lists, kShape.same_bits, kShape.uses_combine_kernel>;
  static_assert(ThisConfig::kSharedBytes == kShape.shared_bytes() && ThisConfig::kThreads == kShape.threads());
  return {reinterpret_cast<const void *>(&mla<ThisConfig>), decode::combine_kernel<CombineConfig<ThisConfig>>()};
}

}  // namespace fa::cuda::mla
