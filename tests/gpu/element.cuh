// SPDX-License-Identifier: Apache-2.0
// Elements of any floating-point dtype as double, and back with one rounding.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "flashattn/flashattn.h"

namespace gpu {

__device__ inline double load_element(const void *data, fa_dtype dtype, int64_t index) {
  switch (dtype) {
    case FA_FLOAT16:
      return static_cast<double>(__half2float(static_cast<const __half *>(data)[index]));
    case FA_BFLOAT16:
      return static_cast<double>(__bfloat162float(static_cast<const __nv_bfloat16 *>(data)[index]));
    default:
      return static_cast<double>(static_cast<const float *>(data)[index]);
  }
}

__device__ inline void store_element(void *data, fa_dtype dtype, int64_t index, double value) {
  switch (dtype) {
    case FA_FLOAT16:
      static_cast<__half *>(data)[index] = __double2half(value);
      break;
    case FA_BFLOAT16:
      static_cast<__nv_bfloat16 *>(data)[index] = __double2bfloat16(value);
      break;
    default:
      static_cast<float *>(data)[index] = static_cast<float>(value);
  }
}

// Rounds to a dtype and comes back.
__device__ inline double rounded(fa_dtype dtype, double value) {
  switch (dtype) {
    case FA_FLOAT16:
      return static_cast<double>(__half2float(__double2half(value)));
    case FA_BFLOAT16:
      return static_cast<double>(__bfloat162float(__double2bfloat16(value)));
    default:
      return static_cast<double>(static_cast<float>(value));
  }
}

}  // namespace gpu
