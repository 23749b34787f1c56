// SPDX-License-Identifier: Apache-2.0
// The backward kernels for AMX: bf16 products on the tile unit, everything else in AVX-512.
#define FA_TARGET_AMX
#include "cpu/backward.h"
