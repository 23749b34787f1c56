// SPDX-License-Identifier: Apache-2.0
#include "cuda/common/merge.h"
#include "cuda/common/operand.h"
#include "cuda/launches.h"
#include "cuda/sm80/backward.h"
#include "cuda/sm80/forward.h"

namespace fa::cuda::sm80 {

fa_status add_launches(const Problem &p, const ForwardPlan &plan, void *workspace, Launches &launches, ErrorText &) {
  const ForwardShape &shape = kForwardShapes[plan.shape];
  char *memory = static_cast<char *>(workspace);
  auto &params = launches.make_params<ForwardParams>();
  params.problem = p;
  params.row_blocks = plan.row_blocks;
  params.rows_per_token = plan.rows_per_token;
  params.heads_per_section = plan.heads_per_section;
  params.num_splits = plan.num_splits;
  params.vector_q = takes_vectors(p.q, p.head_dim);
  params.vector_k = takes_vectors(p.k, p.head_dim);
  params.vector_v = takes_vectors(p.v, p.head_dim_v);
  params.vector_out = takes_vectors(p.out, p.head_dim_v);
  params.split_out = reinterpret_cast<float *>(memory);
  params.split_lse = reinterpret_cast<float *>(memory + plan.split_lse_offset);
  launches.add("forward kernel", {forward_kernel(plan.shape, p.q.dtype), shape.threads(), shape.shared_bytes(), plan.blocks},
               &params);
  if (plan.num_splits == 1) return FA_OK;

  auto &merge = launches.make_params<MergeSplitParams>();
  merge.problem = p;
  merge.num_parts = plan.num_splits;
  merge.max_tokens = static_cast<int32_t>(p.q_lengths.max_len);
  merge.out = params.split_out;
  merge.lse = params.split_lse;
  launches.add("merge kernel", merge_launch(merge), &merge);
  return FA_OK;
}

fa_status add_launches(const BackwardProblem &b, const BackwardPlan &plan, void *workspace, Launches &launches, ErrorText &) {
  const BackwardShape &shape = kBackwardShapes[plan.shape];
  const Problem &p = b.forward;
  char *memory = static_cast<char *>(workspace);
  auto &params = launches.make_params<BackwardParams>();
  params.problem = b;
  params.key_blocks = plan.key_blocks;
  params.row_chunks = plan.row_chunks;
  params.chunk_rows = shape.rows;
  params.head_dim_bucket = shape.head_dim;
  params.vector_q = takes_vectors(p.q, p.head_dim);
  params.vector_k = takes_vectors(p.k, p.head_dim);
  params.vector_v = takes_vectors(p.v, p.head_dim_v);
  params.vector_dout = takes_vectors(b.dout, p.head_dim_v);
  params.deterministic = p.deterministic || p.batch_invariant;
  params.row_lse = reinterpret_cast<float *>(memory);
  params.row_delta = reinterpret_cast<float *>(memory + plan.row_delta_offset);
  params.dq_sum = b.dq.data != nullptr ? reinterpret_cast<float *>(memory + plan.dq_sum_offset) : nullptr;
  params.turn = reinterpret_cast<int32_t *>(memory + plan.turn_offset);

  const BackwardLaunches kernels = backward_launches(plan.shape, p.q.dtype, params);
  launches.add("backward row kernel", backward_rows_launch(params), &params);
  if (b.dq.data != nullptr || b.dk.data != nullptr || b.dv.data != nullptr)
    launches.add("backward kernel", kernels.main, &params);
  if (b.dq.data != nullptr) launches.add("dq kernel", kernels.dq, &params);
  if (b.dbias.data != nullptr) launches.add("dbias kernel", kernels.bias, &params);
  if (b.dsink != nullptr) launches.add("dsink kernel", backward_sink_launch(params), &params);
  return FA_OK;
}

}  // namespace fa::cuda::sm80
