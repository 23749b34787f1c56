// SPDX-License-Identifier: Apache-2.0
// From a plan to the launches that carry it out, with their parameters: one file launches_<family>.cpp a family of kernels.
#pragma once

#include "core/status.h"
#include "cuda/common/launch.h"
#include "cuda/common/merge.h"
#include "cuda/driver.h"
#include "cuda/plan.h"

namespace fa::cuda {

// The last launch of a forward that is split over the keys: combines the parts in the workspace.
inline void add_merge(const Problem &p, int32_t num_splits, const float *out, const float *lse, Launches &launches) {
  if (num_splits == 1) return;
  auto &merge = launches.make_params<MergeSplitParams>();
  merge.problem = p;
  merge.num_parts = num_splits;
  merge.max_tokens = static_cast<int32_t>(p.q_lengths.max_len);
  merge.out = out;
  merge.lse = lse;
  launches.add("merge kernel", merge_launch(merge), &merge);
}

// Each appends the launches of a plan of its family. `workspace` holds plan.workspace_bytes. `counters` are a pair of Counters for this
// launch, or null.
namespace sm80 {
fa_status add_launches(const Problem &problem, const ForwardPlan &plan, void *workspace, Launches &launches, ErrorText &error);
fa_status add_launches(const BackwardProblem &problem, const BackwardPlan &plan, void *workspace, Launches &launches,
                       ErrorText &error);
}  // namespace sm80

namespace simt {
fa_status add_launches(const Problem &problem, const ForwardPlan &plan, void *workspace, Launches &launches, ErrorText &error);
fa_status add_launches(const BackwardProblem &problem, const BackwardPlan &plan, void *workspace, Launches &launches,
                       ErrorText &error);
}  // namespace simt

namespace sm90 {
fa_status add_launches(const Problem &problem, const ForwardPlan &plan, const Driver &driver, int32_t *counters,
                       Launches &launches, ErrorText &error);
fa_status add_launches(const BackwardProblem &problem, const BackwardPlan &plan, const Driver &driver, void *workspace,
                       Launches &launches, ErrorText &error);
}  // namespace sm90

}  // namespace fa::cuda
