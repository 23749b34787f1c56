// SPDX-License-Identifier: Apache-2.0
// The kernels of a row of the table, for one dtype, and their launches.
#pragma once

#include "cuda/kernels/bwd_pre_post/backward_dq.cuh"
#include "cuda/kernels/bwd_sm80/backward.cuh"
#include "cuda/kernels/bwd_sm80/backward_bias.cuh"
#include "cuda/kernels/bwd_sm80/backward_specialized.cuh"

namespace fa::cuda::sm80 {

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinCtas) backward(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(1024) char shared[];
  if constexpr (C::kRoles == 2) {
    BackwardSpecialized<C>(params, shared).run();
  } else {
    Backward<C>(params, shared).run();
  }
}

template <class C>
BackwardLaunches backward_instance(const BackwardParams &a) {
  using Element = typename C::Element;
  const BackwardProblem &b = a.problem;
  const Problem &p = b.forward;
  BackwardLaunches launches{};
  launches.main = {reinterpret_cast<const void *>(&backward<C>), C::kThreads, C::kShape.shared_bytes(),
                   p.batch * p.heads_k * a.order.row_blocks};
  launches.dq = {reinterpret_cast<const void *>(&backward_dq<Element, C::kRows, C::kD, C::kDqTiles, C::kDqNt, C::kThreads>),
                 C::kThreads, 0, q_tiles_of_all_heads(a)};
  if constexpr (C::has(kTileBias | kAnyBias)) launches.bias = bias_launch<Element, C::kD, C::kDv>(b);
  return launches;
}

}  // namespace fa::cuda::sm80
