// SPDX-License-Identifier: Apache-2.0
// Stands in for <cuda_fp16.h> where kernels are compiled at run time, which must not need a toolkit.
#pragma once
struct __half {
  unsigned short bits;
};
inline __device__ __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline __device__ float __half2float(__half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
