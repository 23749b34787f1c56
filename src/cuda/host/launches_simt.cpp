// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launches.h"
#include "cuda/kernels/bwd_simt/backward.h"
#include "cuda/kernels/fwd_simt/forward.h"

namespace fa::cuda::simt {
fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &) {
  char *workspace = static_cast<char *>(memory.workspace);
  auto &scored = launches.make_params<ScoreTextParams<ForwardParams>>();
  ForwardParams &params = scored.params;
  params.problem = p;
  params.row_blocks = plan.row_blocks;
  params.rows_per_token = plan.rows_per_token;
  params.num_splits = plan.num_splits;
  params.rows_per_page = static_cast<int32_t>(p.rows_per_page);
  params.max_logit = p.max_logit;
  params.max_logit_stride = p.max_logit_stride;
  params.vector_q = plan.vector.q;
  params.vector_k = plan.vector.k;
  params.vector_v = plan.vector.v;
  params.vector_out = plan.vector.out;
  params.q_descale = p.q_descale;
  params.k_descale = p.k_descale;
  params.v_descale = p.v_descale;
  params.mask = memory.mask;
  params.split_out = reinterpret_cast<float *>(workspace);
  params.split_lse = reinterpret_cast<float *>(workspace + plan.split_lse_offset);
  Launch launch = forward_launch(plan.shape, is_quantised(p.k.dtype), plan.blocks);
  use_score_text(memory.score_text, scored, launch);
  launches.add("forward kernel", launch, &params);
  add_merge(p, plan.num_splits, params.split_out, params.split_lse, launches);
  return FA_OK;
}

namespace {
void set_params(const BackwardProblem &b, const BackwardPlan &plan, const LaunchMemory &memory, BackwardParams &params) {
  const Problem &p = b.forward;
  set_rows(b, plan, /*lse_unit=*/1.f, /*p_exponent=*/0, memory.workspace, params);
  params.query_blocks = plan.query_blocks;
  params.key_blocks = plan.key_blocks;
  const int64_t query_blocks = p.batch * p.heads_q * plan.query_blocks, key_blocks = p.batch * p.heads_k * plan.key_blocks;
  params.blocks_dq = b.dq.data != nullptr ? query_blocks : 0;
  params.blocks_dk = b.dk.data != nullptr ? key_blocks : 0;
  params.blocks_dv = b.dv.data != nullptr ? key_blocks : 0;
  params.vector_q = plan.vector.q;
  params.vector_k = plan.vector.k;
  params.vector_v = plan.vector.v;
  params.vector_dout = plan.vector.dout;
  params.vector_dq = plan.vector.dq;
  params.vector_dk = plan.vector.dk;
  params.vector_dv = plan.vector.dv;
  params.mask = memory.mask;
}
}  // namespace

fa_status add_launches(const BackwardProblem &b, const BackwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &) {
  auto &scored = launches.make_params<ScoreTextParams<BackwardParams>>();
  BackwardParams &params = scored.params;
  set_params(b, plan, memory, params);
  launches.add("backward row kernel", backward_rows_launch(params), &params);
  Launch launch = backward_launch(plan.shape, params);
  use_score_text(memory.score_text, scored, launch);
  launches.add("backward kernel", launch, &params);
  if (b.dbias.data != nullptr) {
    Launch dbias = bias_launch(params);
    use_score_text(memory.score_text, scored, dbias, &ScoreTextLaunch::dbias);
    launches.add("dbias kernel", dbias, &params);
  }
  if (b.dsink != nullptr) launches.add("dsink kernel", backward_sink_launch(params), &params);
  return FA_OK;
}

void add_dbias_launch(const BackwardProblem &b, const BackwardPlan &plan, const LaunchMemory &memory, Launches &launches) {
  auto &scored = launches.make_params<ScoreTextParams<BackwardParams>>();
  set_params(b, plan, memory, scored.params);
  launches.add("dbias kernel", bias_launch(scored.params), &scored.params);
}

}  // namespace fa::cuda::simt
