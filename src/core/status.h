// SPDX-License-Identifier: Apache-2.0
// A failure is a status and one sentence, written where the failure is detected.
#pragma once

#include <cstdio>

#include "flashattn/flashattn.h"

namespace fa {

// One sentence that names the argument and its value. It has the size of fa_plan_info::reason.
struct ErrorText {
  char text[sizeof(fa_plan_info::reason)] = {0};
};

// Writes the sentence and returns `code`: `return fail(...)` reports a failure.
#if defined(__MINGW32__)
__attribute__((format(__MINGW_PRINTF_FORMAT, 3, 4)))
#elif defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
fa_status
fail(ErrorText &error, fa_status code, const char *format, ...);

const char *status_name(fa_status code);
const char *status_description(fa_status code);

}  // namespace fa

// Returns from the calling function if `expression` is a failure.
#define FA_RETURN_IF_ERROR(expression)                                    \
  do {                                                                    \
    const fa_status fa_status_of_expression = (expression);               \
    if (fa_status_of_expression != FA_OK) return fa_status_of_expression; \
  } while (false)
