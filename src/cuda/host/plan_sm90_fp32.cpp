// SPDX-License-Identifier: Apache-2.0
// Plans of the kernels of fp32 operands on Hopper's tensor cores: planes of bf16 numbers in the workspace, then one CTA
// for each 128 queries of a head, or in backward for each 128 rows of a gradient, 64 above head_dim 128.
#include <algorithm>

#include "cuda/host/planners.h"
#include "cuda/kernels/bf16_planes/planes.h"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"
#include "cuda/kernels/bwd_sm90_fp32/table.h"
#include "cuda/kernels/fwd_sm90_fp32/table.h"

namespace fa::cuda {
namespace {

// Fewer queries leave most of a CTA's rows empty. Where sequences have lengths of their own, and a sequence is to get the same bits in any batch, the longest
// one has no say.
bool has_few_queries(const Problem &p) {
  constexpr int64_t kFewQueries = 16;
  const bool own_lengths = p.q_lengths.cu != nullptr || p.q_lengths.used != nullptr;
  return p.q_lengths.max_len <= kFewQueries && !(p.batch_invariant && own_lengths);
}

// Places the planes of q, k and v, and of dout if there are four, behind `bytes` of the workspace. Whether one launch
// writes them and TMA describes them.
template <size_t kCount>
bool place_planes(const Problem &p, size_t (&offsets)[kCount], size_t &bytes) {
  const PlaneShape shapes[4] = {{p.q_lengths, p.batch, p.heads_q, p.head_dim},
                                {p.k_lengths, p.batch, p.heads_k, p.head_dim},
                                {p.k_lengths, p.batch, p.heads_k, p.head_dim_v},
                                {p.q_lengths, p.batch, p.heads_q, p.head_dim_v}};
  int64_t blocks = 0;
  for (size_t n = 0; n < kCount; ++n) {
    if (shapes[n].plane_bytes() >= kMaxPlaneBytes || shapes[n].rows > INT32_MAX) return false;
    blocks += shapes[n].blocks();
    offsets[n] = bytes;
    bytes += align_up(static_cast<size_t>(kPlanes * shapes[n].plane_bytes()));
  }
  return blocks <= INT32_MAX;
}

constexpr const char *reason(ScoreSet scores) {
  return scores == kPlain ? "Hopper kernel (wgmma, TMA) for fp32: products of bf16 parts"
                          : "Hopper kernel (wgmma, TMA) for fp32 with score terms or masks as data: products of bf16 parts";
}

}  // namespace

bool plan_sm90_fp32(const ForwardProblem &p, const Needs &needs, const Device &device, ForwardPlan &plan) {
  for (const KernelRow &kernel : candidates(Family::sm90_fp32, Pass::forward, needs)) {
    if (!can_run(kernel, needs, device)) continue;
    const int64_t row_blocks = ceil_div(p.q_lengths.max_len, kernel.rows);
    size_t bytes = 0;
    ForwardPlan placed;
    if (p.heads_q * p.batch > INT32_MAX / 2 / row_blocks || !place_planes(p, placed.planes_offset, bytes)) return false;
    plan = placed;
    plan.family = Family::sm90_fp32;
    plan.shape = kernel.shape;
    plan.row_blocks = static_cast<int32_t>(row_blocks);
    plan.blocks = row_blocks * p.heads_q * p.batch;
    plan.heads_per_l2_group =
        l2_group_of(p, device, p.heads_q, kv_head_bytes(p) * 3 / 2 / p.group, is_causal(p) ? device.multiprocessors : 1);
    plan.workspace_bytes = bytes;
    plan.tma_kv = true;
    plan.reason = reason(kernel.scores);
    return true;
  }
  return false;
}

// A CTA has 128 queries with all of their keys. CUDA cores have a quarter of the speed of tensor cores, but divide keys
// among CTAs.
bool beats_sm90_fp32(const Problem &p, const Device &device, const ForwardPlan &other, const ForwardPlan &sm90_fp32) {
  constexpr int64_t kTimesFaster = 4;
  return has_few_queries(p) ||
         (!p.batch_invariant && other.num_splits > 1 && sm90_fp32.blocks * kTimesFaster <= device.multiprocessors);
}

fa_status plan_backward_sm90_fp32(const BackwardProblem &b, const Needs &needs, const Device &device, bool &found,
                                  BackwardPlan &plan, ErrorText &error) {
  const Problem &p = b.forward;
  const std::span<const KernelRow> kernels = candidates(Family::sm90_fp32, Pass::backward, needs);
  const auto row =
      std::find_if(kernels.begin(), kernels.end(), [&](const KernelRow &kernel) { return can_run(kernel, needs, device); });
  found = row != kernels.end() && !has_few_queries(p);
  if (!found) return FA_OK;
  plan.q_tile_rows = sm90_fp32::stat_rows(row->scores != kPlain);
  plan.q_tiles = static_cast<int32_t>(ceil_div(p.q_lengths.max_len, plan.q_tile_rows));
  const size_t rows = static_cast<size_t>(q_tiles_of_a_head(p, plan.q_tile_rows, plan.q_tiles) * p.heads_q) *
                      static_cast<size_t>(plan.q_tile_rows);
  plan.row_delta_offset = align_up(rows * sizeof(float));
  size_t bytes = plan.row_delta_offset + align_up(rows * sizeof(float));
  if (!place_planes(p, plan.planes_offset, bytes)) {
    plan = {};
    found = false;
    return FA_OK;
  }
  plan.workspace_bytes = bytes;
  plan.query_blocks = static_cast<int32_t>(ceil_div(p.q_lengths.max_len, row->rows));
  plan.key_blocks = static_cast<int32_t>(ceil_div(p.k_lengths.max_len, row->rows));
  // CTAs of dk and dv, and those of dq, are one launch. Those of wide heads compute one gradient each.
  const bool is_wide = sm90_fp32::kBackwardShapes[row->shape].is_wide();
  FA_RETURN_IF_ERROR(
      check_grid(int64_t{plan.q_tiles} + plan.key_blocks * (is_wide ? int64_t{2} : 1), p.heads_q, p.batch, error));
  plan.family = Family::sm90_fp32;
  plan.shape = row->shape;
  plan.reason = reason(row->scores);
  plan.zero_dq_sum = false;
  plan.blocks = b.dq.data != nullptr ? p.batch * p.heads_q * plan.query_blocks : 0;
  const int key_gradients = (b.dk.data != nullptr) + (b.dv.data != nullptr);
  plan.blocks += p.batch * p.heads_k * plan.key_blocks * (is_wide ? key_gradients : std::min(key_gradients, 1));
  plan.heads_per_l2_group = l2_group_of(
      p, device, p.heads_k, (p.q_lengths.max_len * p.group + p.k_lengths.max_len) * (p.head_dim + p.head_dim_v) * 6, 1);
  return FA_OK;
}

}  // namespace fa::cuda
