// SPDX-License-Identifier: Apache-2.0
// What selection and plans need to know of a device and of this build.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/common/shared_memory.h"

namespace fa::cuda {

struct KernelRow;

// Whether the instance of `kernel` for `dtype` (see instance_dtype()) is in the build. FA_ONLY and CMAKE_CUDA_ARCHITECTURES leave some out.
using IsBuilt = bool (*)(const KernelRow &kernel, Dtype dtype);

// A build with every kernel.
inline bool everything_is_built(const KernelRow &, Dtype) { return true; }

struct Device {
  int32_t index = 0;
  int32_t compute_capability = 0;  // major * 10 + minor
  int32_t multiprocessors = 0;
  int32_t shared_bytes = 0;  // that one CTA may use
  int64_t l2_bytes = 0;
  bool sm90 = false;  // runs sm_90a code, and the context may use it
  IsBuilt is_built = everything_is_built;
  // Pairs times columns of the problems for which backward kernels without a NaN-safe path are used although pairs are hidden. Small problems would
  // lose more by the launches of a second pass than they gain. Tests choose smaller ones.
  double second_pass_from = 4e9;
};

// Keeps to kernels that devices of this compute capability run, too (fa_config::cuda_arch).
void restrict_to(int32_t cuda_arch, Device &device);

// Whether a build for `archs` (as CMAKE_CUDA_ARCHITECTURES, separated by spaces) has code for a device: machine code for its major
// version and no newer minor one, or PTX of a version that is not newer. Words without a number count as having everything.
bool built_for(const char *archs, int32_t compute_capability);

}  // namespace fa::cuda
