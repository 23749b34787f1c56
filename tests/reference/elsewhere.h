// SPDX-License-Identifier: Apache-2.0
// The reference computed by another program: tests that run under an emulator have their expectations computed by a native process,
// because emulated arithmetic in double takes most of their time.
#pragma once

#include <cstdio>

#include "reference/attention.h"

namespace reference {

struct Answers {
  Exact exact;
  Result unfused;
};

// attention(s) and unfused(s, dtype). Where the environment names a program in FA_TEST_REFERENCE, it computes them; it is started once and
// asked through pipes. Sequences with a function (score, shown) are computed here. Throws std::runtime_error if the program fails.
Answers answers(const Sequence &s, fa_dtype dtype);

// Whether another program is asked.
bool asks_elsewhere();

// The other program: answers questions from `in` until it ends. False if it ends in the middle of one.
bool serve(std::FILE *in, std::FILE *out);

}  // namespace reference
