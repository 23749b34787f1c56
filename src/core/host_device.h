// SPDX-License-Identifier: Apache-2.0
// FA_HD marks small functions that host and device code share, FA_UNROLL their loops that the device has to unroll.
#pragma once

#if defined(__CUDACC__)
#define FA_HD __host__ __device__ __forceinline__
#define FA_UNROLL _Pragma("unroll")
#else
#define FA_HD inline __attribute__((always_inline))
#define FA_UNROLL
#endif
