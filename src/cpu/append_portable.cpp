// SPDX-License-Identifier: Apache-2.0
// The append kernel for portable.
#define FA_TARGET_PORTABLE
#include "cpu/append_kernels.h"
