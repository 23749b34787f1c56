// SPDX-License-Identifier: Apache-2.0
// Failures inside the library: a status and one sentence, written once where the failure is found.
#pragma once

#include "flashattn/flashattn.h"

namespace fa {

struct ErrorText {
  char text[320] = {0};
};

// Writes the sentence and returns `code`, so that a failure is one return statement.
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
fa_status
fail(ErrorText &error, fa_status code, const char *format, ...);

}  // namespace fa
