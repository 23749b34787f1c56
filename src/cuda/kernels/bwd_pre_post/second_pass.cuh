// SPDX-License-Identifier: Apache-2.0
// The launches of a second backward pass, which runs where the first one has found NaN or Inf (BackwardRows::only_if).
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"

namespace fa::cuda {

// Whether a launch has anything to do. Those of a second pass are launched by PDL and each waits for the one before it, so that launches that end at
// once follow each other closely.
__device__ __forceinline__ bool is_pass_needed(const BackwardRows &params) {
  if (params.only_if == nullptr) return true;
  pdl_wait();
  return *params.only_if != 0;
}

}  // namespace fa::cuda
