// SPDX-License-Identifier: Apache-2.0
// Sparse attention by index as ordinary attention: every query becomes a sequence of its own, whose keys are the rows that it lists.
#pragma once

#include "cpu/launch.h"

namespace fa::cpu {

// Both as plan_forward and forward, for problems with key_indices.
Plan plan_indices(const ScoredForward &problem, const Machine &machine);
bool forward_indices(const ScoredForward &problem, const Machine &machine, const Plan &plan, void *workspace,
                     Parallel &parallel);

}  // namespace fa::cpu
