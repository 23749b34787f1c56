// SPDX-License-Identifier: Apache-2.0
// The forward kernels for avx512.
#define FA_TARGET_AVX512
#include "cpu/forward_kernels.h"
