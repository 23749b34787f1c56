// SPDX-License-Identifier: Apache-2.0
// The forward-mode derivative of attention in double, by dual numbers: every operation carries its derivative, and no formula for the
// whole is used.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/attention.h"

namespace reference {

// Tangents of a sequence's q, k and v, shaped as these. Empty = zero.
struct Tangents {
  std::vector<double> q, k, v;
};

struct Jvp {
  std::vector<double> out, lse;                      // tangents, shaped as the results
  std::vector<double> out_magnitude, lse_magnitude;  // sum of the magnitudes of their terms, however much these cancel
  std::vector<double> through_out;                   // the part of it in which `out` is a factor
  // Of out: the sum of |P tx v| + |P tv|, and of |v| + |tv|: what roundings of P and of P tx are multiplied by, relative and absolute ones.
  std::vector<double> weighted, values;
  double largest_logit = 0;  // largest sum of the magnitudes that one visible logit was summed from
};

// The sequence has neither bias nor sink, dropout or score function.
Jvp jvp(const Sequence &s, const Tangents &tangents);

}  // namespace reference
