// SPDX-License-Identifier: Apache-2.0
// The least cost of a problem: floating-point operations (of attention: the matrix products over visible pairs) and bytes moved.
#pragma once

#include "core/append.h"
#include "core/problem.h"

namespace fa {

struct Cost {
  double flops = 0;
  double bytes = 0;
};

Cost cost_of(const Problem &problem);
Cost cost_of(const BackwardProblem &problem);
Cost cost_of(const JvpProblem &problem);
Cost cost_of(const MergeProblem &problem);
Cost cost_of(const AppendProblem &problem);

// Number of query-key pairs of one sequence that are visible in the band.
double visible_pairs(const Band &band, int64_t seqlen_q, int64_t seqlen_k);

}  // namespace fa
