// SPDX-License-Identifier: Apache-2.0
// The forward kernels for avx2.
#define FA_TARGET_AVX2
#include "cpu/forward_kernels.h"
