// SPDX-License-Identifier: Apache-2.0
#define FA_TARGET_NEON
#include "unit/simd_checks.h"
