// SPDX-License-Identifier: Apache-2.0
// Shared by the two references on the device: which pairs are visible, and sums over a CTA.
#pragma once

#include "gpu/unfused.h"

namespace gpu {

constexpr int kThreads = 256;

__device__ inline bool visible(const Mask &mask, int64_t seqlen_q, int64_t seqlen_k, int64_t i, int64_t j) {
  const int64_t diagonal = i + (mask.kind == FA_MASK_CAUSAL_TOP_LEFT ? 0 : seqlen_k - seqlen_q);
  if (mask.kind != FA_MASK_NONE && j > diagonal) return false;
  if (mask.window_left >= 0 && j < diagonal - mask.window_left) return false;
  return mask.window_right < 0 || j <= diagonal + mask.window_right;
}

// Combines one number of each of kThreads threads; all get the result.
template <typename Number, typename Op>
__device__ Number over_block(Number mine, Op op) {
  __shared__ Number all[kThreads];
  __syncthreads();
  all[threadIdx.x] = mine;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) all[threadIdx.x] = op(all[threadIdx.x], all[threadIdx.x + half]);
  }
  __syncthreads();
  return all[0];
}

}  // namespace gpu
