// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels/max_logit/max_logit.h"

#include <math_constants.h>

namespace fa::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) clear_max_logit(const __grid_constant__ MaxLogitParams a) {
  const int64_t head = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (head < a.heads) a.max_logit[head * a.stride] = -CUDART_INF_F;
}

}  // namespace

Launch max_logit_launch(const MaxLogitParams &a) {
  return {reinterpret_cast<const void *>(&clear_max_logit), kThreads, 0, (a.heads + kThreads - 1) / kThreads};
}

}  // namespace fa::cuda
