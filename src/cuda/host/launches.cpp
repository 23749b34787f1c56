// SPDX-License-Identifier: Apache-2.0
// The launcher of each family, and what launchers share.
#include "cuda/host/launches.h"

#include <iterator>

namespace fa::cuda {
namespace {

using ForwardLauncher = fa_status (*)(const ForwardProblem &, const ForwardPlan &, const LaunchMemory &, Launches &,
                                      ErrorText &);
using BackwardLauncher = fa_status (*)(const BackwardProblem &, const BackwardPlan &, const LaunchMemory &, Launches &,
                                       ErrorText &);

// By Family. A null entry: the family has no kernel for the pass.
constexpr ForwardLauncher kForward[] = {sm80::add_launches,   simt::add_launches,   sm90::add_launches,
                                        decode::add_launches, extend::add_launches, mla::add_launches};
constexpr BackwardLauncher kBackward[] = {
    sm80::add_launches, simt::add_launches, sm90::add_launches, nullptr, nullptr, nullptr};
static_assert(std::size(kForward) == kNumFamilies && std::size(kBackward) == kNumFamilies);

}  // namespace

fa_status make_launches(const ForwardProblem &problem, const ForwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                        ErrorText &error) {
  return kForward[static_cast<int>(plan.family)](problem, plan, memory, launches, error);
}

fa_status make_launches(const BackwardProblem &problem, const BackwardPlan &plan, const LaunchMemory &memory,
                        Launches &launches, ErrorText &error) {
  if (plan.family == Family::none) return FA_OK;
  return kBackward[static_cast<int>(plan.family)](problem, plan, memory, launches, error);
}

void add_merge(const Problem &p, int32_t num_splits, const float *out, const float *lse, Launches &launches) {
  if (num_splits == 1) return;
  auto &merge = launches.make_params<MergeSplitParams>();
  merge.problem = p;
  merge.num_parts = num_splits;
  merge.max_tokens = static_cast<int32_t>(p.q_lengths.max_len);
  merge.out = out;
  merge.lse = lse;
  launches.add("merge kernel", merge_launch(merge), &merge);
}

void set_rows(const BackwardProblem &b, const BackwardPlan &plan, float lse_unit, int p_exponent, void *workspace,
              BackwardRows &rows) {
  char *memory = static_cast<char *>(workspace);
  rows.problem = b;
  rows.q_tiles = plan.q_tiles;
  rows.q_tile_rows = plan.q_tile_rows;
  rows.dq_semaphores = plan.dq_semaphores;
  rows.zero_dq_sum = plan.zero_dq_sum;
  rows.head_dim_bucket = plan.dq_sum_columns;
  rows.more_counters = static_cast<int16_t>(plan.split_counters);
  rows.lse_unit = lse_unit;
  rows.p_exponent = static_cast<int8_t>(p_exponent);
  rows.row_lse = reinterpret_cast<float *>(memory);
  rows.row_delta = reinterpret_cast<float *>(memory + plan.row_delta_offset);
  const bool sum = b.dq.data != nullptr && plan.dq_sum_columns > 0;
  rows.dq_sum = sum ? reinterpret_cast<float *>(memory + plan.dq_sum_offset) : nullptr;
  rows.dq_semaphore = plan.dq_semaphores > 0 ? reinterpret_cast<int32_t *>(memory + plan.dq_semaphore_offset) : nullptr;
}

}  // namespace fa::cuda
