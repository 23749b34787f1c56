// SPDX-License-Identifier: Apache-2.0
// The CUDA-core forward kernels, as plan and launcher see them.
#pragma once

#include "core/forward_problem.h"
#include "cuda/common/data_mask.h"
#include "cuda/common/launch.h"
#include "cuda/kernels/fwd_simt/forward_table.h"

namespace fa::cuda::simt {

// The kernel's only parameter: a problem, and how it is divided among CTAs.
struct ForwardParams {
  Problem problem;
  int32_t row_blocks;      // of the longest sequence
  int32_t rows_per_token;  // 1, or with packed GQA the group: the query heads of one key head are rows of one CTA
  int32_t num_splits;      // split-KV: the key ranges of a row block
  bool vector_q, vector_k, vector_v, vector_out;  // 16-byte accesses are legal
  // Split-KV partials, as merge.h takes them: out (num_splits, batch, heads_q, max_seqlen_q, head_dim_v) and lse (num_splits, batch, heads_q,
  // max_seqlen_q), each of one split's keys alone.
  float *split_out;
  float *split_lse;
  Descale q_descale, k_descale, v_descale;  // of quantised operands
  DataMask mask;
  int32_t rows_per_page;  // ForwardProblem::rows_per_page
  float *max_logit;       // (heads_q), or null
  int64_t max_logit_stride;
};

// Launch of shape kForwardShapes[shape] with `blocks` CTAs.
Launch forward_launch(int shape, bool quantised, int64_t blocks);

}  // namespace fa::cuda::simt
