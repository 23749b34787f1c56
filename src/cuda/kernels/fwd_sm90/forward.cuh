// SPDX-License-Identifier: Apache-2.0
// Exact attention forward for Hopper (sm_90a): wgmma, TMA, warp specialisation, persistent CTAs.
//
//   O = softmax(scale Q K^T) V     Q [seqlen_q][D]   K [seqlen_k][D]   V [seqlen_k][Dv]   for each head of each sequence
//
// A CTA takes work tiles of kRows query rows of one head from a counter, longest first.
//
//   scheduler warp         takes the next work tile and writes its description to shared memory (scheduler.cuh)
//   producer warp          loads K and V tiles of kKeys keys by TMA through pipelines of kStages stages; loads Q if it has two stages
//   Q producer warps       load Q where it has a single stage: they wait for the last S = Q K^T of the previous work tile
//   consumer warpgroups    64 rows each: S and out are accumulators in registers, P is an A operand in registers
//
// The main loop is software-pipelined by one KV tile, and runs across the ends of work tiles. One iteration:
//
//   issue S = Q K^T of this KV tile;  issue out += P V of the previous KV tile
//   wait for S;                       mask, P = exp2(S - m) while out += P V runs
//   wait for out;                     if that was the last KV tile of a work tile, store its rows
//   convert P to 16 (or 8) bits
//
// So the first S of a work tile runs while the rows of the previous work tile are finished, and the tensor cores do not idle in between.
//
// Lazy rescaling: the row maximum m may be too small by up to kRescaleThreshold (in base 2), as in the sm_80 kernel. Most KV tiles leave
// out alone. With head_dim_v up to 128 the unmasked iterations do not even compute the maximum. They make P with the current m, and where
// the sum of P turns out too large, m is raised afterwards.
//
// KV tiles with masked pairs come first. P of a masked pair is 0, and 0 times NaN or Inf in V is NaN. If out is not finite after the masked
// tiles, the warp recomputes their part over the visible pairs only (nan_safe_recompute).
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90/alibi.cuh"
#include "cuda/kernels/fwd_sm90/consumer.cuh"
#include "cuda/kernels/fwd_sm90/producer.cuh"
#include "cuda/kernels/fwd_sm90/scheduler.cuh"
#include "cuda/kernels/fwd_sm90/segments.cuh"

namespace fa::cuda::sm90 {

template <class C>
__device__ __forceinline__ void run_forward(const ForwardParams &params, const SharedMemory<C> &smem) {
  constexpr int kProducerWarp = 0, kSchedulerWarp = 1, kFirstQWarp = 2, kBiasWarp = 3, kVWarp = 3;
  const int warp = (threadIdx.x >> 5) & 3;
  Scheduler<C> scheduler(params, smem);
  bool has_work = false;  // whether the first work tile has rows
  if (threadIdx.x < 128) {
    if (warp == kProducerWarp) {
      if (elect_one()) smem.init_barriers(params);
    } else if (warp == kSchedulerWarp) {
      has_work = scheduler.first();
    }
  } else if constexpr (C::kAlibiByWgmma) {
    write_alibi_keys(smem, static_cast<int>(threadIdx.x) - 128);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    setmaxnreg_dealloc<C::kProducerRegisters>();
    if (warp == kProducerWarp) {
      if constexpr (C::kPages) {
        Producer<C>(params, smem).template load_pages</*kIsK=*/true>();
      } else {
        Producer<C>(params, smem).load_kv();
      }
    } else if (warp == kSchedulerWarp) {
      scheduler.run(has_work);
    } else if constexpr (C::kQProducerWarps > 0) {
      if ((!C::kHasBias && !C::kPages) || warp < kFirstQWarp + C::kQProducerWarps)
        Producer<C>(params, smem).load_q_tiles(warp - kFirstQWarp);
    }
    if constexpr (C::kPages) {
      if (warp == kVWarp) Producer<C>(params, smem).template load_pages</*kIsK=*/false>();
    }
    if constexpr (C::kStagesBias) {
      if (warp == kBiasWarp) Producer<C>(params, smem).load_bias();
    }
  } else {
    setmaxnreg_alloc<C::kConsumerRegisters>();
    const int wg =
        __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128 - 1), 0);  // warp-uniform, and known to the compiler to be
    using Consumer = std::conditional_t<C::kSameBits, SegmentConsumer<C>, Consumer<C>>;
    Consumer(params, smem, {wg, warp, static_cast<int>(threadIdx.x & 31)}).mainloop();
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm) forward(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  run_forward<C>(params, SharedMemory<C>(shared));
#endif
}

}  // namespace fa::cuda::sm90
