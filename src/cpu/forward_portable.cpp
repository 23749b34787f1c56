// SPDX-License-Identifier: Apache-2.0
// The forward kernels for portable.
#define FA_TARGET_PORTABLE
#include "cpu/forward_kernels.h"
