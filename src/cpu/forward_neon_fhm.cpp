// SPDX-License-Identifier: Apache-2.0
// The forward kernels for NEON_FHM: products of very few fp16 queries by fmlal, everything else in NEON.
#define FA_TARGET_NEON_FHM
#include "cpu/forward_kernels.h"
