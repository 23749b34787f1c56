// SPDX-License-Identifier: Apache-2.0
// Single rows of attention and its gradients by the formula in fp64, for tensors of which even one head is too large to compute whole.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "gpu/unfused.h"

namespace gpu {

// The query heads of one key head, as matrices of one sequence. Gradients take out and lse as given.
struct HeadGroup {
  static constexpr int kMaxHeads = 8;
  int heads = 1;
  Matrix q[kMaxHeads], out[kMaxHeads], lse[kMaxHeads], dout[kMaxHeads];
  Matrix k, v;
  Mask mask;
  double scale = 1;
};

// A row of a result and what bounds its rounding errors: the sum of the magnitudes of the terms that kernels round to the input
// dtype (P v, dS k, ...), and of the terms those were summed from.
struct SampledRow {
  std::vector<double> value, terms, inner;
};

struct SampledQuery {
  SampledRow out, dq;
  double lse = 0, largest_logit = 0;
};
struct SampledKey {
  SampledRow dk, dv;
};

// Row i of query head `head` of the group; row j of the keys.
SampledQuery sample_query(const HeadGroup &group, int head, int64_t i, cudaStream_t stream);
SampledKey sample_key(const HeadGroup &group, int64_t j, cudaStream_t stream);

// Elements of one row of a matrix.
std::vector<double> read_row(const Matrix &matrix, int64_t row, cudaStream_t stream);

}  // namespace gpu
