// SPDX-License-Identifier: Apache-2.0
// The forward kernels for sm_80 and newer, as plan and launcher see them.
#pragma once

#include "core/problem.h"
#include "cuda/common/divisor.h"
#include "cuda/common/l2_head_order.h"
#include "cuda/common/scores.h"
#include "cuda/kernels/fwd_sm80/forward_table.h"

namespace fa::cuda::sm80 {

// A problem and how it is cut. The kernel's only parameter.
struct ForwardParams {
  Problem problem;
  Diagonal<int32_t>::Limits limits;  // problem.band's
  L2HeadOrder order;                 // of row blocks; its heads are those of q, or of k when packed
  Divisor num_splits;                // key ranges a row block is split into
  Divisor rows_per_token;            // 1, or the GQA group (packed): query heads that share a key head are rows of one block
  Divisor group;                     // heads of q for one head of k
  Divisor page_size;
  Divisor mask_size_q, mask_size_k;               // of block_mask
  bool vector_q, vector_k, vector_v, vector_out;  // 16-byte accesses are legal
  bool pair_bias;                                 // two neighbours of bias can be read at once
  RawUnit raw;
  // Where splits leave their results, null when there is one: out (num_splits, batch, heads_q, max_seqlen_q, head_dim_v), lse
  // (num_splits, batch, heads_q, max_seqlen_q).
  float *split_out;
  float *split_lse;
  // Read by kernels with dropout (common/scores.h). Their m lies p_exponent below the row maximum, so that P = 2^(S - m) and the row sum are
  // both 2^p_exponent times as large. The factor cancels in out = sum of P V / row sum, and in lse = m + log2(row sum).
  float p_exponent;
  float rescale_threshold;
};

// The kernel's address for cudaLaunchKernel, null if this build leaves it out. `shape` indexes kForwardShapes.
const void *forward_kernel(int shape, Dtype dtype);

}  // namespace fa::cuda::sm80
