// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "cuda/host/launches.h"
#include "cuda/kernels/bwd_sm80/backward.h"
#include "cuda/kernels/fwd_sm80/forward.h"

namespace fa::cuda::sm80 {
namespace {

// Sizes of absent tensors are 0. A divisor beyond every row and key makes every quotient 0.
Divisor divisor(int64_t value) { return Divisor(std::clamp<int64_t>(value, 1, int64_t{1} << 30)); }

ScoreTextParams<BackwardParams> &make_params(const BackwardProblem &b, const BackwardPlan &plan, const LaunchMemory &memory,
                                             Launches &launches) {
  const MaskedProblem &p = b.forward;
  auto &scored = launches.make_params<ScoreTextParams<BackwardParams>>();
  BackwardParams &params = scored.params;
  const int exponent = p_exponent(p.dropout.keep_scale);
  set_rows(b, plan, kLog2e, exponent, memory.workspace, params);
  params.order =
      L2HeadOrder(plan.key_blocks, std::max<int64_t>(p.heads_k, 1), std::max<int64_t>(p.batch, 1), plan.heads_per_l2_group,
                  /*last_rows_first=*/false);
  params.vector_q = plan.vector.q;
  params.vector_k = plan.vector.k;
  params.vector_v = plan.vector.v;
  params.vector_dout = plan.vector.dout;
  params.deterministic = p.deterministic;
  params.mask_size_q = divisor(p.block_mask.size_q);
  params.mask_size_k = divisor(p.block_mask.size_k);
  params.raw = raw_unit(p);
  params.keep_scale = std::ldexp(p.dropout.keep_scale, -exponent);
  params.mask = memory.mask;
  return scored;
}

}  // namespace

fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &) {
  const ForwardShape &shape = kForwardShapes[plan.shape];
  char *workspace = static_cast<char *>(memory.workspace);
  auto &scored = launches.make_params<ScoreTextParams<ForwardParams>>();
  ForwardParams &params = scored.params;
  params.problem = p;
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.order = L2HeadOrder(plan.row_blocks, std::max<int64_t>(plan.rows_per_token == 1 ? p.heads_q : p.heads_k, 1),
                             std::max<int64_t>(p.batch, 1), plan.heads_per_l2_group, !params.limits.unlimited_right());
  params.num_splits = divisor(plan.num_splits);
  params.rows_per_token = divisor(plan.rows_per_token);
  params.group = divisor(p.group);
  params.page_size = divisor(p.page_size);
  params.mask_size_q = divisor(p.block_mask.size_q);
  params.mask_size_k = divisor(p.block_mask.size_k);
  params.vector_q = plan.vector.q;
  params.vector_k = plan.vector.k;
  params.vector_v = plan.vector.v;
  params.vector_out = plan.vector.out;
  params.pair_bias = takes_pairs(p.bias);
  params.raw = raw_unit(p);
  const int exponent = p_exponent(p.dropout.keep_scale);
  params.p_exponent = static_cast<float>(exponent);
  params.rescale_threshold = p.max_logit != nullptr || p.same_bits ? 0.f : rescale_threshold(exponent);
  params.max_logit = p.max_logit;
  params.max_logit_stride = p.max_logit_stride;
  params.mask = memory.mask;
  params.split_out = reinterpret_cast<float *>(workspace);
  params.split_lse = reinterpret_cast<float *>(workspace + plan.split_lse_offset);
  Launch launch{forward_kernel(plan.shape, p.q.dtype), shape.threads(), shape.shared_bytes(), plan.blocks};
  use_score_text(memory.score_text, scored, launch);
  launches.add("forward kernel", launch, &params);
  add_merge(p, plan.num_splits, params.split_out, params.split_lse, launches);
  return FA_OK;
}

fa_status add_launches(const BackwardProblem &b, const BackwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &) {
  ScoreTextParams<BackwardParams> &scored = make_params(b, plan, memory, launches);
  BackwardParams &params = scored.params;
  BackwardLaunches kernels = backward_launches(plan.shape, b.forward.q.dtype, params);
  use_score_text(memory.score_text, scored, kernels.main);
  launches.add("backward row kernel", backward_rows_launch(params), &params);
  if (b.dq.data != nullptr || b.dk.data != nullptr || b.dv.data != nullptr)
    launches.add("backward kernel", kernels.main, &params);
  if (b.dq.data != nullptr) launches.add("dq kernel", kernels.dq, &params);
  if (b.dbias.data != nullptr) launches.add("dbias kernel", kernels.bias, &params);
  if (b.dsink != nullptr) launches.add("dsink kernel", backward_sink_launch(params), &params);
  return FA_OK;
}

void add_dbias_launch(const BackwardProblem &b, const BackwardPlan &plan, int shape, const LaunchMemory &memory,
                      Launches &launches) {
  BackwardParams &params = make_params(b, plan, memory, launches).params;
  launches.add("dbias kernel", backward_launches(shape, b.forward.q.dtype, params).bias, &params);
}

}  // namespace fa::cuda::sm80
