// SPDX-License-Identifier: Apache-2.0
// What this build contains: instances of the rows of the kernel tables. Their addresses are asked for by the functions in
// kernels/*/*.h (forward_kernel(), backward_launches(), ...), which instances.cpp defines for all families.
#pragma once

#include "cuda/host/registry.h"

namespace fa::cuda {

// Whether the instance of a kernel for `dtype` was compiled and linked: Device::is_built of a real device.
bool is_instance_built(const KernelRow &kernel, Dtype dtype);

}  // namespace fa::cuda
