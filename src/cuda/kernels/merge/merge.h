// SPDX-License-Identifier: Apache-2.0
// Combines partial results over disjoint key sets: fa_merge, and the last step of a forward that was split over the keys.
#pragma once

#include "core/problem.h"
#include "cuda/common/launch.h"

namespace fa::cuda {

constexpr int kMaxMergeParts = 256;
constexpr int64_t kMaxMergeRows =
    int64_t{4} * INT32_MAX;  // of one call: a thread block takes four, and a grid has 2^31 - 1 blocks

// Parts the caller describes one by one.
struct MergeListParams {
  MergeProblem problem;  // problem.parts is host memory and not used
  MergePart parts[kMaxMergeParts];
};

// Parts a split forward left in its workspace: out (num_parts, batch, heads_q, max_tokens, head_dim_v), lse (num_parts, batch,
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
