// SPDX-License-Identifier: Apache-2.0
#define FA_TARGET_NEON_BF16
#include "unit/bf16_unit_call.h"
