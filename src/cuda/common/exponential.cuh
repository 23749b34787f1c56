// SPDX-License-Identifier: Apache-2.0
// The base of the exponentials of a softmax: what turns its maximum m and its row sum l into P and lse.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/common/scores.h"

namespace fa::cuda {

// e^x.
__device__ __forceinline__ float exponential(float x) { return exp2_approx(x * kLog2e); }

// For operands of 16 and 8 bits: logits in base 2, fast functions.
struct Base2 {
  static constexpr float kLogit = kLog2e;  // 1 of a natural logit
  static __device__ __forceinline__ float exp(float x) { return exp2_approx(x); }
  static __device__ __forceinline__ float divide(float x, float y) { return __fdividef(x, y); }
  static __device__ __forceinline__ float lse(float max, float sum) { return (max + __log2f(sum)) * kLn2; }
};

// For operands of fp32: natural logits. Rounding m * log2(e) alone would cost half of the accuracy of fp32.
struct BaseE {
  static constexpr float kLogit = 1.f;
  static __device__ __forceinline__ float exp(float x) { return exponential(x); }
  static __device__ __forceinline__ float divide(float x, float y) { return x / y; }
  static __device__ __forceinline__ float lse(float max, float sum) { return max + logf(sum); }
};

}  // namespace fa::cuda
