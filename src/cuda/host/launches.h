// SPDX-License-Identifier: Apache-2.0
// From a plan to the launches that carry it out, with their parameters: one file launches_<family>.cpp a family of kernels.
#pragma once

#include "core/forward_problem.h"
#include "core/status.h"
#include "cuda/common/launch.h"
#include "cuda/host/driver.h"
#include "cuda/host/plan.h"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"
#include "cuda/kernels/merge/merge.h"

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

// What the row kernels of a backward pass need to know, `lse_unit` and `p_exponent` as in BackwardRows.
inline void set_rows(const BackwardProblem &b, const BackwardPlan &plan, float lse_unit, int p_exponent, void *workspace,
                     BackwardRows &rows) {
  char *memory = static_cast<char *>(workspace);
  rows.problem = b;
  rows.row_chunks = plan.row_chunks;
  rows.chunk_rows = plan.chunk_rows;
  rows.chunk_turns = plan.chunk_turns;
  rows.zero_dq_sum = plan.zero_dq_sum;
  rows.head_dim_bucket = plan.dq_sum_columns;
  rows.lse_unit = lse_unit;
  rows.p_exponent = static_cast<int8_t>(p_exponent);
  rows.row_lse = reinterpret_cast<float *>(memory);
  rows.row_delta = reinterpret_cast<float *>(memory + plan.row_delta_offset);
  const bool sum = b.dq.data != nullptr && plan.dq_sum_columns > 0;
  rows.dq_sum = sum ? reinterpret_cast<float *>(memory + plan.dq_sum_offset) : nullptr;
  rows.turn = plan.chunk_turns > 0 ? reinterpret_cast<int32_t *>(memory + plan.turn_offset) : nullptr;
}

// Each appends the launches of a plan of its family. `workspace` holds plan.workspace_bytes. `counters` are the plan's, of Counters, for
// this launch.
namespace sm80 {
fa_status add_launches(const Problem &problem, const ForwardPlan &plan, void *workspace, Launches &launches, ErrorText &error);
fa_status add_launches(const BackwardProblem &problem, const BackwardPlan &plan, void *workspace, Launches &launches,
                       ErrorText &error);
}  // namespace sm80

namespace simt {
fa_status add_launches(const ForwardProblem &problem, const ForwardPlan &plan, void *workspace, Launches &launches,
                       ErrorText &error);
fa_status add_launches(const BackwardProblem &problem, const BackwardPlan &plan, void *workspace, Launches &launches,
                       ErrorText &error);
}  // namespace simt

namespace sm90 {
fa_status add_launches(const ForwardProblem &problem, const ForwardPlan &plan, const Driver &driver, void *workspace,
                       int32_t *counters, Launches &launches, ErrorText &error);
fa_status add_launches(const BackwardProblem &problem, const BackwardPlan &plan, const Driver &driver, void *workspace,
                       Launches &launches, ErrorText &error);
}  // namespace sm90

namespace decode {
// Sets all of them but counters.
struct Params;
void set_params(const ForwardProblem &problem, const ForwardPlan &plan, void *workspace, Params &params);
// Keys or values for the copy engine, in boxes of `box_rows` rows and `box_columns` columns, some slabs or all of the bucket:
// (batch or pages, heads, slabs of 64 columns, rows, 64). Bytes are one slab, as they lie. False if it cannot fetch them.
bool describe_rows(const Driver &driver, const Problem &problem, const Operand &tensor, int64_t columns, int32_t box_columns,
                   int32_t box_rows, CUtensorMapL2promotion promotion, CUtensorMap &map);
fa_status add_launches(const ForwardProblem &problem, const ForwardPlan &plan, void *workspace, Launches &launches,
                       ErrorText &error);
}  // namespace decode

namespace extend {
fa_status add_launches(const ForwardProblem &problem, const ForwardPlan &plan, const Driver &driver, void *workspace,
                       int32_t *counters, Launches &launches, ErrorText &error);
}  // namespace extend

namespace mla {
fa_status add_launches(const ForwardProblem &problem, const ForwardPlan &plan, const Driver &driver, void *workspace,
                       int32_t *counters, Launches &launches, ErrorText &error);
}  // namespace mla

}  // namespace fa::cuda
