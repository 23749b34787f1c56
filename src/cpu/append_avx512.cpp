// SPDX-License-Identifier: Apache-2.0
// The append kernel for avx512.
#define FA_TARGET_AVX512
#include "cpu/append_kernels.h"
