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
  pdl_launch_dependents();
  pdl_wait();
  return *params.only_if != 0;
}

// Calls f(number of a Q tile) for those of this CTA, the last ones first: one in a first pass.
template <typename F>
__device__ __forceinline__ void for_each_q_tile(const BackwardRows &params, F f) {
  int index = q_tiles_of_all_heads(params) - 1 - static_cast<int>(blockIdx.x);
  do {
    f(index);
    index -= static_cast<int>(gridDim.x);
  } while (params.only_if != nullptr && index >= 0);
}

}  // namespace fa::cuda
