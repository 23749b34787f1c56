// SPDX-License-Identifier: Apache-2.0
#define FA_TARGET_AVX512
#include "cpu/jvp.h"
