// SPDX-License-Identifier: Apache-2.0
// The CUDA-core forward kernels, as plan and launcher see them.
#pragma once

#include "core/forward_problem.h"
#include "cuda/common/launch.h"
#include "cuda/kernels/fwd_simt/forward_table.h"

namespace fa::cuda::simt {

// A problem and how it is cut. The kernel's only parameter.
struct ForwardParams {
  Problem problem;
  int32_t row_blocks;      // blocks of rows of the longest sequence
  int32_t rows_per_token;  // 1, or the GQA group: query heads that share a key head are rows of one block
  int32_t num_splits;      // key ranges a row block is split into
  bool vector_q, vector_k, vector_v, vector_out;  // 16-byte accesses are legal
  // Where splits leave their results, as merge.h takes them: out (num_splits, batch, heads_q, max_seqlen_q, head_dim_v), lse
  // (num_splits, batch, heads_q, max_seqlen_q).
  float *split_out;
  float *split_lse;
  Descale q_descale, k_descale, v_descale;  // of quantised operands
};

// Launch of shape kForwardShapes[shape] with `blocks` blocks of threads.
Launch forward_launch(int shape, bool quantised, int64_t blocks);

}  // namespace fa::cuda::simt
