// SPDX-License-Identifier: Apache-2.0
// The forward kernels for neon.
#define FA_TARGET_NEON
#include "cpu/forward_kernels.h"
