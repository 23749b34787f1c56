// SPDX-License-Identifier: Apache-2.0
#define FA_TARGET_AVX2
#include "cpu/jvp.h"
