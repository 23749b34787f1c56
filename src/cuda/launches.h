// SPDX-License-Identifier: Apache-2.0
// From a plan to the launches that carry it out, with their parameters: one file launches_<family>.cpp a family of kernels.
#pragma once

#include "core/status.h"
#include "cuda/common/launch.h"
#include "cuda/plan.h"

namespace fa::cuda {

// Each appends the launches of a plan of its family. `workspace` holds plan.workspace_bytes.
namespace sm80 {
fa_status add_launches(const Problem &problem, const ForwardPlan &plan, void *workspace, Launches &launches, ErrorText &error);
fa_status add_launches(const BackwardProblem &problem, const BackwardPlan &plan, void *workspace, Launches &launches,
                       ErrorText &error);
}  // namespace sm80

}  // namespace fa::cuda
