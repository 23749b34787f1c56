// SPDX-License-Identifier: Apache-2.0
// Plans of the backward kernels. On tensor cores a CTA owns a tile of keys and iterates over tiles of queries; the statistics of the rows and
// the fp32 accumulator of dQ are in the workspace. On CUDA cores every gradient has CTAs of its own.
#include <algorithm>

#include "cuda/host/planners.h"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"
#include "cuda/kernels/bwd_simt/backward_table.h"
#include "cuda/kernels/bwd_sm80/backward_table.h"
#include "cuda/kernels/bwd_sm90/backward_table.h"

namespace fa::cuda {
namespace {

// Q tiles and workspace on tensor cores.
template <typename Shape>
void lay_out_workspace(const BackwardProblem &b, const Shape &shape, BackwardPlan &plan) {
  const Problem &p = b.forward;
  plan.q_tile_rows = shape.rows;
  plan.q_tiles = static_cast<int32_t>(std::max<int64_t>(ceil_div(p.q_lengths.max_len, shape.rows), 1));
  const size_t tiles = static_cast<size_t>(q_tiles_of_a_head(p, shape.rows, plan.q_tiles) * p.heads_q),
               rows = tiles * shape.rows, sums = plan.cyclic ? 2 : 1;
  plan.row_delta_offset = align_up(rows * sizeof(float));
  plan.dq_sum_offset = plan.row_delta_offset + align_up(rows * sizeof(float));
  plan.dq_semaphore_offset =
      plan.dq_sum_offset + (b.dq.data != nullptr ? align_up(sums * rows * plan.dq_sum_columns * sizeof(float)) : 0);
  plan.workspace_bytes =
      plan.dq_semaphore_offset + (plan.dq_semaphores > 0 ? align_up((tiles * plan.dq_semaphores + 1) * sizeof(int32_t)) : 0);
}

// Grid and workspace on tensor cores. At least `at_least` heads are an L2 group. Without semaphores dq is not summed in the workspace.
template <typename Shape>
fa_status plan_tensor_cores(const BackwardProblem &b, const Device &device, const Shape &shape, int32_t dq_semaphores,
                            int64_t at_least, BackwardPlan &plan, ErrorText &error) {
  const Problem &p = b.forward;
  plan.dq_semaphores = dq_semaphores;
  plan.dq_sum_columns = dq_semaphores > 0 ? shape.head_dim : 0;
  plan.dq_sum_by_lane = device.compute_capability >= 90;
  plan.key_blocks = static_cast<int32_t>(std::max<int64_t>(ceil_div(p.k_lengths.max_len, shape.keys()), 1));
  lay_out_workspace(b, shape, plan);
  FA_RETURN_IF_ERROR(check_grid(plan.key_blocks, p.heads_k, p.batch, error));
  const int64_t q_tiles = std::max<int64_t>(q_tiles_of_a_head(p, shape.rows, plan.q_tiles), 1);
  FA_RETURN_IF_ERROR(check_grid(q_tiles * shape.rows, p.heads_q, 1, error));

  // Q, dO and the accumulator of dQ, besides K and V.
  plan.heads_per_l2_group = l2_group_of(p, device, p.heads_k,
                                        p.q_lengths.max_len * p.group * (p.head_dim * 6 + p.head_dim_v * 2) +
                                            p.k_lengths.max_len * (p.head_dim + p.head_dim_v) * 2,
                                        at_least);
  return FA_OK;
}

// Under a causal mask an L2 group begins with its longest work tiles. At the end of the launch few tiles stand behind those of the last group, and most
// CTAs would wait for them, so the last two groups are one. With few tiles per head the group would outgrow the L2 cache, with many it gains nothing, nor
// does head_dim 64. In deterministic mode the chain of a head has to stay short.
bool merges_last_groups(const Problem &p, const sm90::BackwardShape &shape, const BackwardPlan &plan) {
  return shape.blocks() == 1 && shape.rows < 128 && is_causal(p) && !p.deterministic && plan.key_blocks >= 16 &&
         plan.key_blocks <= 64;
}

// Sequences that share their keys are parts of one document (src/dist), the last of them the shortest. How long it is, is known on the device alone. One of
// its heads is too little work to stand behind the longest work tile of that head: 8 % of the SMs' time goes by at the end, with 16k rows on two ranks. With
// four heads in the last group it is 4 %. A group with heads of both sequences was slower by 15 to 31 %.
constexpr int32_t kLastHeadsOfDocument = 4;
bool ends_with_short_sequence(const Problem &p, const sm90::BackwardShape &shape, const BackwardPlan &plan, int64_t ctas) {
  constexpr int64_t kMostTilesOfCta = 32, kSmallGroup = 4;  // of such groups work tiles are short
  return shape.blocks() == 1 && is_causal(p) && !p.deterministic && p.batch > 1 && p.k.batch_stride == 0 &&
         p.k_lengths.used != nullptr && p.group > kSmallGroup &&
         p.batch * p.heads_k * plan.key_blocks <= kMostTilesOfCta * ctas;
}

// Work tiles that see a Q tile, at most.
int64_t work_tiles_of_q_tile(const MaskedProblem &p, const sm90::BackwardShape &shape, const BackwardPlan &plan) {
  const Diagonal<int32_t>::Limits limits(p.band);
  const int64_t keys = int64_t{limits.left} + limits.right + shape.rows;  // that its queries see
  return std::min<int64_t>(plan.key_blocks, ceil_div(keys - 1, shape.keys()) + 1);
}

// Where no more work tiles than these see a Q tile, the first one stores its part of dq, and the accumulator is not zeroed. Zeroing takes a fifteenth of the
// time of short sequences and of windows. With more work tiles CTAs lose more by waiting for the first of them, unless they wait for one another anyway.
// Pairs that keep P in registers are fast enough to lose by it from 1k keys on; those that do not add from registers, and store only in order.
int64_t few_work_tiles(const Problem &p, const sm90::BackwardShape &shape) {
  if (shape.blocks() > 1) return shape.p_through_smem() ? 0 : 4;
  if (!sm90::has_plain_loop(shape.scores)) return 16;
  // Long iterations leave time for the first one.
  return shape.rows >= 128 ? 64 : shape.transposes_dq() && is_causal(p) ? 32 : 16;
}

// Whether the bands of all queries hold every key, whatever the lengths are.
bool has_unlimited_bands(const MaskedProblem &p) {
  return !is_causal(p) && Diagonal<int32_t>::Limits(p.band).left >= Diagonal<int32_t>::kLongest;
}
// Whether every query sees every key, and the host knows all lengths, which are the same for every sequence.
bool shows_all_pairs(const MaskedProblem &p) {
  return has_unlimited_bands(p) && p.q_lengths.cu == nullptr && p.q_lengths.used == nullptr && p.k_lengths.cu == nullptr &&
         p.k_lengths.used == nullptr && p.seqstart_k == nullptr && !p.masked_by_data();
}

// Whether a mask has blocks of keys narrower than a work tile of two warpgroups, which may then see different queries.
bool has_narrow_blocks(const MaskedProblem &p) {
  return (p.block_mask.data != nullptr && p.block_mask.size_k % 128 != 0) ||
         (p.block_lists.given && p.block_lists.size_k % 128 != 0);
}

// In deterministic mode work tiles of a head that start at the same time wait for one another in a chain. With more keys than these they add in cyclic
// order (cyclic_order.h) where all main loops are alike. That needs a second sum for dq, which costs more than a short chain.
constexpr int64_t kMostInChain = 2048;

// Kernels without a NaN-safe path serve problems in which every query sees every key. Where pairs are hidden a flag says whether a second pass is needed
// (nan_safe_pass), and only large problems gain more than its launches cost.
bool does_without_nan_safe_path(const MaskedProblem &p, const Device &device, const sm90::BackwardShape &shape) {
  const bool shows_all = shows_all_pairs(p);
  const int64_t queries = p.q_lengths.max_len, keys = p.k_lengths.max_len;
  const Diagonal<int32_t>::Limits limits(p.band);
  const int64_t span = int64_t{limits.left} + limits.right;
  if (shape.transposes_dq()) {  // Q tiles of 80 rows
    // Queries of a main loop with a mask, and keys in deterministic mode.
    constexpr int64_t kFewestMasked = 2048, kMostInTallChain = 4096;
    // Rows that fill up the last Q tile take a part of the gain, which is at least 5 %.
    const auto padded = [&](int64_t rows) { return ceil_div(queries, rows) * rows; };
    if (padded(shape.rows) * 19 > padded(64) * 20) return false;
    // In a long chain of deterministic mode they lose more than they gain.
    if (p.deterministic && has_unlimited_bands(p) && keys > kMostInTallChain && !shows_all) return false;
    if (!shows_all && std::min(queries, span) < kFewestMasked) return false;
  }
  if (shows_all) return true;
  // D128 with Q tiles of 64: windows gain, and by TMA stores of dk and dv a causal mask. Of longer main loops packed sequences did not; others were not
  // measured.
  const bool gains_causal = !limits.unlimited_right() && p.group == 1 && p.q_lengths.cu == nullptr && !p.deterministic;
  if (shape.head_dim == 128 && shape.rows == 64 && shape.scores == kPlain && span >= Diagonal<int32_t>::kLongest &&
      !gains_causal)
    return false;
  const int64_t rows = p.q_lengths.cu != nullptr ? p.q_lengths.total : p.batch * queries;
  const double pairs = static_cast<double>(rows * p.heads_q) * static_cast<double>(std::min(keys, span));
  // With 64 columns the gain is three times as large.
  return pairs * static_cast<double>(p.head_dim) >= (shape.head_dim > 64 ? 4 : 1) * device.second_pass_from;
}

// Where all main loops are equally long, the work tiles of the last round, which are fewer than the CTAs, are divided among them. Shorter main
// loops would lose by it, and deterministic sums must not depend on the number of a work tile.
void split_tail(const MaskedProblem &p, int64_t ctas, const sm90::BackwardShape &shape, BackwardPlan &plan) {
  constexpr int64_t kFewestQTiles = 16, kMostSplits = 8, kConsumerWarps = 8;
  const int64_t tiles = p.batch * p.heads_k * plan.key_blocks, last = tiles % std::max<int64_t>(ctas, 1);
  if (!shows_all_pairs(p) || p.k_lengths.max_len == 0 || p.deterministic || p.group != 1 || tiles < ctas || last == 0 ||
      last * 10 > ctas * 9)
    return;
  if (plan.q_tiles < kFewestQTiles || (ctas + 1) * last * plan.q_tiles > INT32_MAX) return;
  plan.split_tiles = static_cast<int32_t>(last);
  plan.split_units = static_cast<int32_t>(std::min(ctas, last * kMostSplits));
  // A run of units / tiles units may begin and end within a unit.
  plan.splits_per_tile = static_cast<int32_t>(ceil_div(plan.split_units, last) + 1);
  plan.split_counters = static_cast<int32_t>(last * kConsumerWarps);
  plan.workspace_bytes = align_up(plan.workspace_bytes + plan.split_counters * sizeof(int32_t));
  plan.split_offset = plan.workspace_bytes;
  plan.workspace_bytes +=
      static_cast<size_t>(last * plan.splits_per_tile) * shape.keys() * (shape.head_dim + shape.head_dim_v) * sizeof(float);
}

// dq, dk and dv have CTAs of their own, in one launch.
fa_status plan_separate_gradients(const BackwardProblem &b, const Device &device, const sm90::BackwardShape &shape,
                                  BackwardPlan &plan, ErrorText &error) {
  const Problem &p = b.forward;
  FA_RETURN_IF_ERROR(plan_tensor_cores(b, device, shape, /*dq_semaphores=*/0, /*at_least=*/1, plan, error));
  FA_RETURN_IF_ERROR(check_grid(int64_t{plan.q_tiles} + 2 * int64_t{plan.key_blocks}, p.heads_q, p.batch, error));
  plan.zero_dq_sum = false;
  const int64_t of_keys = p.batch * p.heads_k * plan.key_blocks;
  plan.blocks = b.dq.data != nullptr ? p.batch * p.heads_q * plan.q_tiles : 0;
  for (const Operand *gradient : {&b.dk, &b.dv}) plan.blocks += gradient->data != nullptr ? of_keys : 0;
  return FA_OK;
}

fa_status plan_cuda_cores(const BackwardProblem &b, const KernelRow &kernel, BackwardPlan &plan, ErrorText &error) {
  const Problem &p = b.forward;
  plan.family = Family::simt;
  plan.shape = kernel.shape;
  const int64_t queries = std::max<int64_t>(p.q_lengths.max_len, 1), keys = std::max<int64_t>(p.k_lengths.max_len, 1);
  plan.query_blocks = static_cast<int32_t>(ceil_div(queries, kernel.rows));
  plan.key_blocks = static_cast<int32_t>(ceil_div(keys, kernel.rows));
  plan.q_tile_rows = simt::kRowPadding;
  plan.q_tiles = static_cast<int32_t>(ceil_div(queries, plan.q_tile_rows));
  // dq, dk and dv are one launch.
  FA_RETURN_IF_ERROR(check_grid(int64_t{plan.query_blocks} + 2 * int64_t{plan.key_blocks}, p.heads_q, p.batch, error));
  const size_t rows = static_cast<size_t>(q_tiles_of_a_head(p, plan.q_tile_rows, plan.q_tiles) * p.heads_q) *
                      static_cast<size_t>(plan.q_tile_rows);
  plan.row_delta_offset = align_up(rows * sizeof(float));
  plan.workspace_bytes = plan.row_delta_offset + align_up(rows * sizeof(float));
  return FA_OK;
}

}  // namespace

fa_status plan_backward_sm90(const BackwardProblem &b, const Needs &needs, const Device &device, bool &found,
                             BackwardPlan &plan, ErrorText &error) {
  const Problem &p = b.forward;
  const std::span<const KernelRow> kernels = candidates(Family::sm90, Pass::backward, needs);
  const auto serves = [&](const KernelRow &kernel) {
    const sm90::BackwardShape &shape = sm90::kBackwardShapes[kernel.shape];
    // Kernels for wide heads would compute mostly with columns that are not there.
    if (shape.head_dim > 128 && 2 * std::max(p.head_dim, p.head_dim_v) <= shape.head_dim) return false;
    if (shape.skips_cells && !has_narrow_blocks(b.forward)) return false;
    return p.k_lengths.max_len <= shape.longest() && can_run(kernel, needs, device);
  };
  const auto row = std::find_if(kernels.begin(), kernels.end(), [&](const KernelRow &kernel) {
    const sm90::BackwardShape &shape = sm90::kBackwardShapes[kernel.shape];
    return serves(kernel) && (shape.nan_safe || does_without_nan_safe_path(b.forward, device, shape));
  });
  found = row != kernels.end();
  if (!found) return FA_OK;
  if (!sm90::kBackwardShapes[row->shape].nan_safe && !shows_all_pairs(b.forward)) {
    const auto nan_safe = std::find_if(row, kernels.end(), [&](const KernelRow &kernel) {
      return sm90::kBackwardShapes[kernel.shape].nan_safe && serves(kernel);
    });
    found = nan_safe != kernels.end();
    if (!found) return FA_OK;
    plan.nan_safe_shape = nan_safe->shape;
  }
  if (b.dbias.data != nullptr) {
    const std::span<const KernelRow> others = kernels_of(Family::sm80, Pass::backward);
    const auto other =
        std::find_if(others.begin(), others.end(), [&](const KernelRow &kernel) { return can_run(kernel, needs, device); });
    found = other != others.end();
    if (!found) return FA_OK;
    plan.dbias_shape = other->shape;
  }
  const sm90::BackwardShape &shape = sm90::kBackwardShapes[row->shape];
  plan.family = Family::sm90;
  plan.shape = row->shape;
  plan.reason = hopper_reason(shape.scores, b.forward.score_text.given);
  if (shape.design == sm90::Design::separate) return plan_separate_gradients(b, device, shape, plan, error);
  plan.cyclic = p.deterministic && shape.transposes_dq() && shows_all_pairs(b.forward) && p.k_lengths.max_len > kMostInChain;
  // In deterministic mode the CTAs that work on a head at the same time wait for one another in a chain: no more than eight of them.
  const int64_t at_once = device.multiprocessors / shape.blocks();
  // Grouped heads under a causal mask have long work tiles, and few: those of an L2 group should be as many as the CTAs, or the CTAs begin the
  // longest of the last head late. Measured with groups of 4; groups of 8 lost by it.
  constexpr int64_t kMostGrouped = 4;
  const int64_t at_least = plan.cyclic       ? 1
                           : p.deterministic ? at_once / 8
                           : is_causal(p) && p.group > 1 && p.group <= kMostGrouped
                               ? ceil_div(at_once, std::max<int64_t>(ceil_div(p.k_lengths.max_len, shape.keys()), 1))
                               : 1;
  FA_RETURN_IF_ERROR(
      plan_tensor_cores(b, device, shape, (plan.cyclic ? 2 : 1) * sm90::kDqSemaphoresPerTile, at_least, plan, error));
  // Persistent CTAs take their tiles of keys from a counter.
  plan.blocks = int64_t{plan.key_blocks} * p.heads_k * p.batch * shape.blocks();
  if (shape.persistent()) plan.blocks = std::min(plan.blocks, std::max<int64_t>(at_once, 1) * shape.blocks());
  if (shape.blocks() == 1 && shape.scores == kPlain) split_tail(b.forward, at_once, shape, plan);
  if (merges_last_groups(p, shape, plan)) plan.last_heads = 2 * plan.heads_per_l2_group;
  if (ends_with_short_sequence(b.forward, shape, plan, at_once)) {
    plan.last_heads =
        std::max(plan.last_heads, static_cast<int32_t>(std::min<int64_t>(b.forward.heads_k, kLastHeadsOfDocument)));
  }
  plan.zero_dq_sum =
      (!p.deterministic || !shape.first_stores_dq()) && work_tiles_of_q_tile(b.forward, shape, plan) > few_work_tiles(p, shape);
  // In deterministic mode work tiles wait for one another, and lost up to 3 % by it.
  const auto stored_by_tma = [&](const Operand &gradient, int64_t columns) {
    return shape.stages_dkv() && !p.deterministic && gradient.data != nullptr && gradient.dtype != Dtype::f32 &&
           is_tma_compatible(gradient, p.k_lengths, columns);
  };
  plan.tma_dk = stored_by_tma(b.dk, p.head_dim);
  plan.tma_dv = stored_by_tma(b.dv, p.head_dim_v);
  if (!shape.nan_safe) {
    plan.nonfinite_offset = plan.workspace_bytes;
    if (plan.nan_safe_shape >= 0)
      plan.nonfinite_offset = align_up(std::max(plan.workspace_bytes, nan_safe_pass(b, plan).workspace_bytes));
    plan.workspace_bytes = plan.nonfinite_offset + align_up(sizeof(int32_t));
  }
  return FA_OK;
}

BackwardPlan nan_safe_pass(const BackwardProblem &b, const BackwardPlan &plan) {
  BackwardPlan second = plan;
  second.shape = plan.nan_safe_shape;
  second.nan_safe_shape = -1;
  second.nonfinite_offset = 0;
  lay_out_workspace(b, sm90::kBackwardShapes[second.shape], second);
  return second;
}

fa_status plan_backward_any_device(const BackwardProblem &b, const Needs &needs, const Device &device, BackwardPlan &plan,
                                   ErrorText &error) {
  const std::span<const KernelRow> tensor_core = kernels_of(Family::sm80, Pass::backward),
                                   cuda_core = kernels_of(Family::simt, Pass::backward);
  // dbias beside a score text is compiled for CUDA cores alone.
  const bool text_and_dbias = b.forward.score_text.given && b.dbias.data != nullptr;
  const auto runs = [&](const KernelRow &row) {
    return can_run(row, needs, device) && !(row.family == Family::sm80 && text_and_dbias);
  };
  if (auto row = std::find_if(tensor_core.begin(), tensor_core.end(), runs); row != tensor_core.end()) {
    // A kernel of small CTAs leaves an SM half empty that has no room for as many as it is made for.
    const auto fills_sm = [&](const KernelRow &other) {
      return sm80::kBackwardShapes[other.shape].min_blocks <= ctas_that_fit(other.shared_bytes, device.shared_bytes);
    };
    const auto larger = std::find_if(row, tensor_core.end(), [&](const KernelRow &other) {
      return other.head_dim == row->head_dim && other.scores == row->scores && fills_sm(other) && runs(other);
    });
    if (larger != tensor_core.end()) row = larger;
    const sm80::BackwardShape &shape = sm80::kBackwardShapes[row->shape];
    plan.family = Family::sm80;
    plan.shape = row->shape;
    plan.reason = tensor_core_reason(shape.scores);
    return plan_tensor_cores(b, device, shape, sm80::kDqSemaphoresPerTile, /*at_least=*/1, plan, error);
  }
  const auto row = std::find_if(cuda_core.begin(), cuda_core.end(), runs);
  if (row == cuda_core.end()) return FA_ERROR_NOT_BUILT;
  plan.reason = text_and_dbias ? "CUDA-core kernel: dbias beside a score text" : why_cuda_cores(tensor_core, needs, device);
  return plan_cuda_cores(b, *row, plan, error);
}

}  // namespace fa::cuda
