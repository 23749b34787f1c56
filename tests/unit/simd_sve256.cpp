// SPDX-License-Identifier: Apache-2.0
#define FA_TARGET_SVE256
#include "unit/simd_checks.h"
