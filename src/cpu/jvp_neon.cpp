// SPDX-License-Identifier: Apache-2.0
// The forward-mode derivative for neon.
#define FA_TARGET_NEON
#include "cpu/jvp.h"
