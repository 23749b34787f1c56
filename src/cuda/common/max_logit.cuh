// SPDX-License-Identifier: Apache-2.0
// max_logit: the largest visible logit of a query head, which all CTAs of a forward raise in global memory. Before the forward it is -inf
// (kernels/max_logit).
#pragma once

#include "cuda/common/scores.h"

namespace fa::cuda {

__device__ __forceinline__ float load_relaxed(const float *at) {
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];\n" : "=f"(x) : "l"(at));
  return x;
}

// Raises *to to x, which is not NaN.
__device__ __forceinline__ void atomic_max(float *to, float x) {
  x += 0.f;  // -0 has the bits of a negative number
  // Non-negative numbers are ordered as their bits are, negative ones the other way round.
  if (x >= 0.f) {
    atomicMax(reinterpret_cast<int *>(to), __float_as_int(x));
  } else {
    atomicMin(reinterpret_cast<unsigned *>(to), __float_as_uint(x));
  }
}

// Raises *max_logit to a natural logit; NaN changes nothing.
__device__ __forceinline__ void raise_natural_max_logit(float *max_logit, float logit) {
  if (logit > load_relaxed(max_logit)) atomic_max(max_logit, logit);
}
// The same for a logit in base 2.
__device__ __forceinline__ void raise_max_logit(float *max_logit, float logit) {
  raise_natural_max_logit(max_logit, logit * kLn2);
}

}  // namespace fa::cuda
