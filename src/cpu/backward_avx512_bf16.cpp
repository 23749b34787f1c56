// SPDX-License-Identifier: Apache-2.0
// The backward kernels for AVX512_BF16: bf16 products by vdpbf16ps, everything else in AVX-512.
#define FA_TARGET_AVX512_BF16
#include "cpu/backward.h"
