// SPDX-License-Identifier: Apache-2.0
// The __global__ functions of kernels for sm_90a. The algorithm is the run() of a class that stands for a CTA, which has an SM to itself:
//
//   struct Cta {
//     using Params = ...;                            // the kernel's only parameter
//     static constexpr int kThreads = ...;
//     __device__ Cta(const Params &, char *shared);  // dynamic shared memory
//     __device__ void run();
//   };
#pragma once

namespace fa::cuda {

template <class Cta>
__global__ void __launch_bounds__(Cta::kThreads, 1) sm90_kernel(const __grid_constant__ typename Cta::Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  Cta(params, shared).run();
#endif
}

// The same in clusters of two CTAs.
template <class Cta>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(Cta::kThreads, 1)
    sm90_cluster_kernel(const __grid_constant__ typename Cta::Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  Cta(params, shared).run();
#endif
}

}  // namespace fa::cuda
