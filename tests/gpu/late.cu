// SPDX-License-Identifier: Apache-2.0
#include "gpu/device.h"
#include "gpu/late.h"

namespace gpu {
namespace {

__global__ void copy_late_kernel(const LateCopies all) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
  for (int n = 0; n < 20; ++n) __nanosleep(1000);
  for (const auto &copy : all.copies) {
    for (size_t n = threadIdx.x; n < copy.count; n += blockDim.x) copy.to[n] = copy.from[n];
  }
}

}  // namespace

void copy_late(const LateCopies &all, cudaStream_t stream) {
  copy_late_kernel<<<1, 1024, 0, stream>>>(all);
  check(cudaGetLastError(), "copy_late");
}

}  // namespace gpu
