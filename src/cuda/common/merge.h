// SPDX-License-Identifier: Apache-2.0
// Combines partial results over disjoint key sets: fa_merge, and the last step of a forward that was split over the keys.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace fa::cuda {

constexpr int kMaxMergeParts = 256;

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

cudaError_t launch_merge(const MergeListParams &params, cudaStream_t stream);
cudaError_t launch_merge(const MergeSplitParams &params, cudaStream_t stream);

}  // namespace fa::cuda
