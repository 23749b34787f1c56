// SPDX-License-Identifier: Apache-2.0
// Merges partial results over disjoint sets of keys: fa_merge, and the combine kernel of a forward with KV splits.
#pragma once

#include "core/problem.h"
#include "cuda/common/launch.h"

namespace fa::cuda {

constexpr int kMaxMergeParts = 256;
constexpr int64_t kMaxMergeRows = int64_t{4} * INT32_MAX;  // of one call: four rows per CTA, 2^31 - 1 CTAs per grid

// fa_merge: the caller describes every part.
struct MergeListParams {
  MergeProblem problem;  // kernels use `parts` below: problem.parts is host memory
  MergePart parts[kMaxMergeParts];
};

// Split-KV partials in the workspace of a forward: out (num_parts, batch, heads_q, max_tokens, head_dim_v), lse (num_parts, batch,
// heads_q, max_tokens), both fp32.
struct MergeSplitParams {
  Problem problem;
  int32_t num_parts;
  int32_t max_tokens;
  const float *out;
  const float *lse;
};

Launch merge_launch(const MergeListParams &params);
Launch merge_launch(const MergeSplitParams &params);

}  // namespace fa::cuda
