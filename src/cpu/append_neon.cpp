// SPDX-License-Identifier: Apache-2.0
// The append kernel for neon.
#define FA_TARGET_NEON
#include "cpu/append_kernels.h"
