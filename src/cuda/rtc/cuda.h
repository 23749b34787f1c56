// SPDX-License-Identifier: Apache-2.0
// Stands in for <cuda.h> where kernels are compiled at run time, which must not need a toolkit.
#pragma once
struct alignas(FA_TENSOR_MAP_ALIGNMENT) CUtensorMap {
  unsigned long long opaque[16];
};
