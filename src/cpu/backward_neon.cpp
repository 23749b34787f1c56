// SPDX-License-Identifier: Apache-2.0
// The backward kernels for neon.
#define FA_TARGET_NEON
#include "cpu/backward.h"
