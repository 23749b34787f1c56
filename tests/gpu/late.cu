// SPDX-License-Identifier: Apache-2.0
#include "gpu/device.h"
#include "gpu/late.h"

namespace gpu {
namespace {

struct Three {
  Numbers numbers[3];
};

__global__ void copy_late_kernel(const Three all) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
  for (int n = 0; n < 20; ++n) __nanosleep(1000);
  for (const Numbers &numbers : all.numbers) {
    for (size_t n = threadIdx.x; n < numbers.count; n += blockDim.x) numbers.to[n] = numbers.from[n];
  }
}

}  // namespace

void copy_late(const std::array<Numbers, 3> &all, cudaStream_t stream) {
  copy_late_kernel<<<1, 1024, 0, stream>>>({{all[0], all[1], all[2]}});
  check(cudaGetLastError(), "copy_late");
}

}  // namespace gpu
