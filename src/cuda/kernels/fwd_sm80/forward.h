// SPDX-License-Identifier: Apache-2.0
// The forward kernels for sm_80 and newer, as plan and launcher see them.
#pragma once

#include "core/problem.h"
#include "cuda/common/data_mask.h"
#include "cuda/common/divisor.h"
#include "cuda/common/l2_head_order.h"
#include "cuda/common/scores.h"
#include "cuda/kernels/fwd_sm80/forward_table.h"

namespace fa::cuda::sm80 {

// The kernel's only parameter: a problem, and how it is divided among CTAs.
struct ForwardParams {
  Problem problem;
  Diagonal<int32_t>::Limits limits;  // problem.band's
  L2HeadOrder order;                 // of row blocks; its heads are those of q, or of k with packed GQA
  Divisor num_splits;                // split-KV: the key ranges of a row block
  Divisor rows_per_token;            // 1, or with packed GQA the group: the query heads of one key head are rows of one CTA
  Divisor group;                     // heads of q for one head of k
  Divisor page_size;
  Divisor mask_size_q, mask_size_k;               // of block_mask, which kernels without kDataMask read as it is
  bool vector_q, vector_k, vector_v, vector_out;  // 16-byte accesses are legal
  bool pair_bias;                                 // the bias of keys 2 n and 2 n + 1 can be loaded at once
  RawUnit raw;
  // Split-KV partials, null without splits: out (num_splits, batch, heads_q, max_seqlen_q, head_dim_v) and lse (num_splits, batch, heads_q,
  // max_seqlen_q), each of one split's keys alone.
  float *split_out;
  float *split_lse;
  // Read by kernels with dropout (common/scores.h). Their m lies p_exponent below the row maximum, so that P = 2^(S - m) and the row sum are
  // both 2^p_exponent times as large. The factor cancels in out = sum of P V / row sum, and in lse = m + log2(row sum).
  float p_exponent;
  float rescale_threshold;
  DataMask mask;  // read by kernels with kDataMask
  // (heads_q), or null; read by kernels with kMaxLogit. With it, and for FA_FLAG_SAME_BITS, rescale_threshold is 0: m is exact.
  float *max_logit;
  int64_t max_logit_stride;
};

// The kernel's address for cudaLaunchKernel; null if this build leaves it out. `shape` indexes kForwardShapes.
const void *forward_kernel(int shape, Dtype dtype);

}  // namespace fa::cuda::sm80
