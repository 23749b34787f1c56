// SPDX-License-Identifier: Apache-2.0
#define FA_TARGET_PORTABLE
#include "cpu/jvp.h"
