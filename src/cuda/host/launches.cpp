// SPDX-License-Identifier: Apache-2.0
// The launcher of each family, and what launchers share.
#include "cuda/host/launches.h"

#include <iterator>

#include "cuda/host/key_lists.h"
#include "cuda/host/kv_copy.h"
#include "cuda/kernels/cell_map/cell_map.h"
#include "cuda/kernels/max_logit/max_logit.h"

namespace fa::cuda {
namespace {

using ForwardLauncher = fa_status (*)(const ForwardProblem &, const ForwardPlan &, const LaunchMemory &, Launches &,
                                      ErrorText &);
using BackwardLauncher = fa_status (*)(const BackwardProblem &, const BackwardPlan &, const LaunchMemory &, Launches &,
                                       ErrorText &);

// By Family. A null entry: the family has no kernel for the pass.
constexpr ForwardLauncher kForward[] = {sm80::add_launches,   simt::add_launches, sm90::add_launches,     decode::add_launches,
                                        extend::add_launches, mla::add_launches,  sm90_fp32::add_launches};
constexpr BackwardLauncher kBackward[] = {
    sm80::add_launches, simt::add_launches, sm90::add_launches, nullptr, nullptr, nullptr, sm90_fp32::add_launches};
static_assert(std::size(kForward) == kNumFamilies && std::size(kBackward) == kNumFamilies);

// Launches the kernels that build the cell map of the problem's masks, and describes the masks in `memory`.
void add_cell_map(const MaskedProblem &p, bool backward, size_t offset, LaunchMemory &memory, Launches &launches) {
  auto &scored = launches.make_params<ScoreTextParams<CellMapParams>>();
  CellMapParams &params = scored.params;
  int64_t planes = 0;
  describe_cell_map(p, backward, static_cast<char *>(memory.workspace) + offset, memory.mask, planes);
  params.mask = memory.mask;
  params.q_lengths = p.q_lengths;
  params.k_lengths = p.k_lengths;
  params.planes = static_cast<int32_t>(planes);
  params.head_planes = memory.mask.head_planes != 0 ? static_cast<int32_t>(p.heads_q) : 1;
  Launch launch = cell_map_launch(params);
  use_score_text(memory.score_text, scored, launch, &ScoreTextLaunch::cell_map);
  launches.add("cell map kernel", launch, &params);
  if (backward) launches.add("transposed cell map kernel", transposed_cell_map_launch(params), &params);
}

// Tells the kernels of a plan without a cell map to skip the left padding of the keys.
void skip_left_padding(MaskedProblem &p) {
  p.k_lengths.left_padding = p.seqstart_k;
  p.k_lengths.left_padding_stride = p.seqstart_k_stride;
}

}  // namespace

fa_status make_launches(const ForwardProblem &problem, const ForwardPlan &plan, LaunchMemory memory, Launches &launches,
                        ErrorText &error) {
  if (problem.key_indices.given) {
    auto &params = launches.make_params<KeyListParams>();
    ForwardProblem single;
    size_t bytes = 0;
    void *const tables = static_cast<char *>(memory.workspace) + plan.key_lists_offset;
    FA_RETURN_IF_ERROR(list_keys(problem, plan.finds_listed_keys, tables, single, params, bytes, error));
    if (plan.finds_listed_keys) {
      memory.listed_keys = &params.keys;
    } else {
      launches.add("key list kernel", key_lists_launch(params), &params);
    }
    return make_launches(single, plan, memory, launches, error);
  }
  if (plan.contiguous_copy) {
    void *const copy = static_cast<char *>(memory.workspace) + plan.copy_offset;
    ForwardPlan of_copy = plan;
    of_copy.contiguous_copy = false;
    of_copy.copied_keys = 0;
    return make_launches(add_kv_copy(problem, plan.copied_keys, kMostTileKeys, copy, launches), of_copy, memory, launches,
                         error);
  }
  if (plan.cell_map) add_cell_map(problem, /*backward=*/false, plan.cell_map_offset, memory, launches);
  if (problem.max_logit != nullptr) {
    auto &params = launches.make_params<MaxLogitParams>();
    params = {problem.max_logit, problem.max_logit_stride, problem.heads_q};
    launches.add("max_logit kernel", max_logit_launch(params), &params);
  }
  const ForwardLauncher launcher = kForward[static_cast<int>(plan.family)];
  if (plan.cell_map || problem.seqstart_k == nullptr) return launcher(problem, plan, memory, launches, error);
  ForwardProblem skipping = problem;
  skip_left_padding(skipping);
  return launcher(skipping, plan, memory, launches, error);
}

fa_status make_launches(const BackwardProblem &problem, const BackwardPlan &plan, LaunchMemory memory, Launches &launches,
                        ErrorText &error) {
  if (plan.family == Family::none) return FA_OK;
  if (plan.cell_map) add_cell_map(problem.forward, /*backward=*/true, plan.cell_map_offset, memory, launches);
  const BackwardLauncher launcher = kBackward[static_cast<int>(plan.family)];
  if (plan.cell_map || problem.forward.seqstart_k == nullptr) return launcher(problem, plan, memory, launches, error);
  BackwardProblem skipping = problem;
  skip_left_padding(skipping.forward);
  return launcher(skipping, plan, memory, launches, error);
}

fa_status make_launches(const JvpProblem &problem, const JvpPlan &plan, const LaunchMemory &memory, Launches &launches,
                        ErrorText &error) {
  if (problem.forward.seqstart_k == nullptr) return sm90::add_launches(problem, plan, memory, launches, error);
  JvpProblem skipping = problem;
  skip_left_padding(skipping.forward);
  return sm90::add_launches(skipping, plan, memory, launches, error);
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
  rows.head_dim_bucket = static_cast<int16_t>(plan.dq_sum_columns);
  rows.dq_sum_by_lane = plan.dq_sum_by_lane;
  rows.more_counters = static_cast<int16_t>(plan.split_counters);
  rows.lse_unit = lse_unit;
  rows.p_exponent = static_cast<int8_t>(p_exponent);
  rows.row_lse = reinterpret_cast<float *>(memory);
  rows.row_delta = reinterpret_cast<float *>(memory + plan.row_delta_offset);
  const bool sum = b.dq.data != nullptr && plan.dq_sum_columns > 0;
  rows.dq_sum = sum ? reinterpret_cast<float *>(memory + plan.dq_sum_offset) : nullptr;
  rows.dq_semaphore = plan.dq_semaphores > 0 ? reinterpret_cast<int32_t *>(memory + plan.dq_semaphore_offset) : nullptr;
  rows.nonfinite = plan.nonfinite_offset > 0 ? reinterpret_cast<int32_t *>(memory + plan.nonfinite_offset) : nullptr;
  rows.only_if = nullptr;
}

}  // namespace fa::cuda
