// SPDX-License-Identifier: Apache-2.0
// The forward kernels for NEON_BF16: bf16 products by bfmmla, everything else in NEON.
#define FA_TARGET_NEON_BF16
#include "cpu/forward_kernels.h"
