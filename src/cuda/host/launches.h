// SPDX-License-Identifier: Apache-2.0
// From a plan to the launches that carry it out, with their parameters: launches_<family>.cpp for each family of kernels. They decide nothing:
// they copy the plan into the kernels' parameters and make tensor maps.
#pragma once

#include <cstdint>

#include "core/forward_problem.h"
#include "core/status.h"
#include "cuda/common/data_mask.h"
#include "cuda/common/launch.h"
#include "cuda/common/listed_keys.h"
#include "cuda/common/score_text.h"
#include "cuda/host/driver.h"
#include "cuda/host/plan.h"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"
#include "cuda/kernels/merge/merge.h"

namespace fa::cuda {

// The kernels of a plan that are compiled with a score text, and what the text reads.
struct ScoreTextLaunch {
  CUkernel main = nullptr, cell_map = nullptr, dbias = nullptr;
  ScoreTextArgs args{};
};

// Numbers of launches of a backward pass, where a caller has something to do between them (BackwardSteps). A family that says nothing reads keys
// from its first launch on, and writes their gradients to its last.
struct LaunchSteps {
  int32_t first_with_keys = 0, first_behind_key_gradients = INT32_MAX;
};

// What a launch gets besides its problem and plan.
struct LaunchMemory {
  const Driver &driver;
  void *workspace;                              // plan.workspace_bytes
  int32_t *counters;                            // plan.counters, of Counters, for this launch alone
  DataMask mask;                                // of the problem, where plan.cell_map is set; make_launches() fills it in
  const ScoreTextLaunch *score_text = nullptr;  // where plan.scored is set
  const ListedKeys *listed_keys = nullptr;      // where plan.finds_listed_keys is set; make_launches() fills it in
  LaunchSteps *steps = nullptr;                 // where the caller has steps
};

// Appends the launches of a plan by the launcher of its family.
fa_status make_launches(const ForwardProblem &problem, const ForwardPlan &plan, LaunchMemory memory, Launches &launches,
                        ErrorText &error);
fa_status make_launches(const BackwardProblem &problem, const BackwardPlan &plan, LaunchMemory memory, Launches &launches,
                        ErrorText &error);
fa_status make_launches(const JvpProblem &problem, const JvpPlan &plan, const LaunchMemory &memory, Launches &launches,
                        ErrorText &error);

// The launchers, one for each family and pass.
#define FA_FORWARD_LAUNCHER                                                                                  \
  fa_status add_launches(const ForwardProblem &problem, const ForwardPlan &plan, const LaunchMemory &memory, \
                         Launches &launches, ErrorText &error)
#define FA_BACKWARD_LAUNCHER                                                                                   \
  fa_status add_launches(const BackwardProblem &problem, const BackwardPlan &plan, const LaunchMemory &memory, \
                         Launches &launches, ErrorText &error)
namespace sm80 {
FA_FORWARD_LAUNCHER;
FA_BACKWARD_LAUNCHER;
// The launch of dbias alone, by the second pass of kernel `shape`, behind the launch of the row kernel.
void add_dbias_launch(const BackwardProblem &problem, const BackwardPlan &plan, int shape, const LaunchMemory &memory,
                      Launches &launches);
}  // namespace sm80
namespace simt {
FA_FORWARD_LAUNCHER;
FA_BACKWARD_LAUNCHER;
// The launch of dbias alone, behind the launch of the row kernel, of a plan whose Q tiles have kRowPadding rows.
void add_dbias_launch(const BackwardProblem &problem, const BackwardPlan &plan, const LaunchMemory &memory, Launches &launches);
}  // namespace simt
namespace sm90 {
FA_FORWARD_LAUNCHER;
FA_BACKWARD_LAUNCHER;
fa_status add_launches(const JvpProblem &problem, const JvpPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &error);
}  // namespace sm90
namespace decode {
FA_FORWARD_LAUNCHER;
// The parameters that decode, extend and MLA kernels share: all but counters, which decode kernels do not have.
struct Params;
void set_params(const ForwardProblem &problem, const ForwardPlan &plan, void *workspace, Params &params);
}  // namespace decode
namespace extend {
FA_FORWARD_LAUNCHER;
}  // namespace extend
namespace mla {
FA_FORWARD_LAUNCHER;
}  // namespace mla
namespace sm90_fp32 {
FA_FORWARD_LAUNCHER;
FA_BACKWARD_LAUNCHER;
}  // namespace sm90_fp32
#undef FA_FORWARD_LAUNCHER
#undef FA_BACKWARD_LAUNCHER

// Makes a launch one of the kernel that was compiled with the score text, if there is one, and completes its parameters.
template <typename Params>
void use_score_text(const ScoreTextLaunch *text, ScoreTextParams<Params> &params, Launch &launch,
                    CUkernel ScoreTextLaunch::*kernel = &ScoreTextLaunch::main) {
  if (text == nullptr) return;
  params.args = text->args;
  launch.kernel = text->*kernel;
  launch.at_run_time = true;
}

// The last launch of a forward with splits: combines the partials in the workspace.
void add_merge(const Problem &problem, int32_t num_splits, const float *out, const float *lse, Launches &launches);

// The parameters of the row kernels of a backward pass; `lse_unit` and `p_exponent` as in BackwardRows.
void set_rows(const BackwardProblem &problem, const BackwardPlan &plan, float lse_unit, int p_exponent, void *workspace,
              BackwardRows &rows);

}  // namespace fa::cuda
