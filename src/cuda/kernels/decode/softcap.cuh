// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/common/scores.h"

namespace fa::cuda::decode {

// Softcap of a raw product of Q and K, in units of that product. tanh(x) = 1 - 2 / (1 + e^2x). The error is 2^-23 of the cap,
// far below that of a product of 16-bit numbers.
__device__ __forceinline__ float apply_softcap(float product, const RawUnit &raw) {
  return fmaf(-2.f * raw.cap, reciprocal_approx(1.f + exp2_approx(product * raw.cap_exponent)), raw.cap);
}

}  // namespace fa::cuda::decode
