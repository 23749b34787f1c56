// SPDX-License-Identifier: Apache-2.0
// Failures inside the library: a status and one sentence, written once where the failure is found.
#pragma once

#include "flashattn/flashattn.h"

namespace fa {

// One sentence naming the argument and its value. As long as fa_plan_info::reason.
struct ErrorText {
  char text[sizeof(fa_plan_info::reason)] = {0};
};

// Writes the sentence and returns `code`, so that a failure is one return statement.
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
fa_status
fail(ErrorText &error, fa_status code, const char *format, ...);

const char *status_name(fa_status code);
const char *status_description(fa_status code);

}  // namespace fa

// Hands a failure on to the caller.
#define FA_RETURN_IF_ERROR(expression)                                    \
  do {                                                                    \
    const fa_status fa_status_of_expression = (expression);               \
    if (fa_status_of_expression != FA_OK) return fa_status_of_expression; \
  } while (false)
