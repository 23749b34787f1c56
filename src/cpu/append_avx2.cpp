// SPDX-License-Identifier: Apache-2.0
// The append kernel for avx2.
#define FA_TARGET_AVX2
#include "cpu/append_kernels.h"
