// SPDX-License-Identifier: Apache-2.0
// The append kernel for SVE with vectors of 256 bits.
#define FA_TARGET_SVE256
#include "cpu/append_kernels.h"
