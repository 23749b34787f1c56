// SPDX-License-Identifier: Apache-2.0
// The forward kernels for sm_80 and newer, as plan and launcher see them.
#pragma once

#include "core/problem.h"
#include "cuda/sm80/forward_table.h"

namespace fa::cuda::sm80 {

// A problem and how it is cut. The kernel's only parameter.
struct ForwardParams {
  Problem problem;
  int32_t row_blocks;         // blocks of rows of the longest sequence
  int32_t rows_per_token;     // 1, or the GQA group: query heads that share a key head are rows of one block
  int32_t heads_per_section;  // heads (of q, or of k when packed) whose keys and values fit the L2 cache together
  int32_t num_splits;         // key ranges a row block is split into
  bool vector_q, vector_k, vector_v, vector_out;  // 16-byte accesses are legal
  // Where splits leave their results, null when there is one: out (num_splits, batch, heads_q, max_seqlen_q, head_dim_v), lse
  // (num_splits, batch, heads_q, max_seqlen_q).
  float *split_out;
  float *split_lse;
};

// The kernel's address for cudaLaunchKernel, null if this build leaves it out. `shape` indexes kForwardShapes.
const void *forward_kernel(int shape, Dtype dtype);

}  // namespace fa::cuda::sm80
