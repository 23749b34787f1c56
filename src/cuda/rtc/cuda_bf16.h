// SPDX-License-Identifier: Apache-2.0
// Stands in for <cuda_bf16.h> where kernels are compiled at run time, which must not need a toolkit.
#pragma once
struct __nv_bfloat16 {
  unsigned short bits;
};
