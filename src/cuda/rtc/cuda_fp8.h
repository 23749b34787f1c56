// SPDX-License-Identifier: Apache-2.0
// Stands in for <cuda_fp8.h> where kernels are compiled at run time, which must not need a toolkit.
#pragma once
#include <cuda_fp16.h>
struct __nv_fp8_e4m3 {
  unsigned char bits;
};
typedef unsigned char __nv_fp8_storage_t;
enum __nv_fp8_interpretation_t { __NV_E4M3 };
inline __device__ __half __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t x, __nv_fp8_interpretation_t) {
  unsigned int pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((unsigned short)x));
  return {(unsigned short)pair};
}
