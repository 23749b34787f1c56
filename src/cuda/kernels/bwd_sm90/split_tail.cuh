// SPDX-License-Identifier: Apache-2.0
// The sum of the gradients of keys whose last work tiles are split (split_tail.h).
#pragma once

#include "cuda/kernels/bwd_sm90/backward_cta.cuh"

namespace fa::cuda::sm90 {

// Adds a gradient of a split.
template <int kCount>
__device__ __forceinline__ void add_split(float (&sum)[kCount], const float4 *split) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float4 x = __ldcg(split + j * 32);
    sum[4 * j] += x.x, sum[4 * j + 1] += x.y, sum[4 * j + 2] += x.z, sum[4 * j + 3] += x.w;
  }
}

// Writes this warp's dk and dv of a split to the workspace. In the warp that comes last of those with the same keys, dk and dv become the sum of
// all splits, in their order, and it returns true.
template <class C>
__device__ __forceinline__ bool add_splits(const BackwardCta<C> &cta, int wg, float (&dk)[C::kD / 2], float (&dv)[C::kD / 2]) {
  const SplitTail &tail = cta.params.split_tail;
  const int warp = wg * 4 + cta.warp, tile = cta.work().q_tiles_end, splits = cta.work().splits;
  constexpr int kWarpVectors = C::kD / 4 * 32, kSplitVectors = C::kConsumerWarpgroups * 4 * kWarpVectors;
  float4 *first = reinterpret_cast<float4 *>(tail.partials) + int64_t{tile} * tail.max_splits * kSplitVectors +
                  warp * kWarpVectors + opaque(cta.lane);
  float4 *mine = first + cta.work().split * kSplitVectors;
#pragma unroll
  for (int j = 0; j < C::kD / 8; ++j) {
    __stcg(mine + j * 32, float4_of(dk, j));
    __stcg(mine + (C::kD / 8 + j) * 32, float4_of(dv, j));
  }
  __threadfence();
  __syncwarp();
  int before = 0;
  if (cta.lane == 0) before = atomicAdd(tail.counters + tile * C::kConsumerWarpgroups * 4 + warp, 1);
  before = __shfl_sync(~0u, before, 0);
  if (before != splits - 1) return false;
  __threadfence();
#pragma unroll
  for (int i = 0; i < C::kD / 2; ++i) dk[i] = dv[i] = 0.f;
#pragma unroll 1
  for (int n = 0; n < splits; ++n) {
    add_split(dk, first + n * kSplitVectors);
    add_split(dv, first + n * kSplitVectors + C::kD / 8 * 32);
  }
  return true;
}

}  // namespace fa::cuda::sm90
