// SPDX-License-Identifier: Apache-2.0
// FA_HD marks the small functions that host and device code share, so that each rule exists once.
#pragma once

#if defined(__CUDACC__)
#define FA_HD __host__ __device__ __forceinline__
#else
#define FA_HD inline __attribute__((always_inline))
#endif
