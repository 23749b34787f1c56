// SPDX-License-Identifier: Apache-2.0
// What every element of every output must be, and the comparison.
#pragma once

#include <string>

#include "parity/data.h"

namespace parity {

// Runs the reference on the inputs of `data` and fills data.expected.
void fill_expected(Data &data);

// Compares one output of the library, in memory order, with data.expected: every expected element was written and is close
// enough, every other byte is still poison. Returns "" or what is wrong.
std::string mismatch(const Data &data, Role role, const HostTensor &actual);

// Largest |actual - exact| and |unfused - exact| of one output, relative to nothing; elements that are not finite do not count.
struct Errors {
  double library = 0;
  double unfused = 0;
  double largest_value = 0;
  // Their root mean squares.
  double library_rms = 0;
  double unfused_rms = 0;
  double value_rms = 0;
};
Errors errors(const Data &data, Role role, const HostTensor &actual);

}  // namespace parity
