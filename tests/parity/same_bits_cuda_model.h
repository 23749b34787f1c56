// SPDX-License-Identifier: Apache-2.0
// The arithmetics of FA_FLAG_SAME_BITS on CUDA, contracts 2, 3 and 4 of docs/numerics.md, one row at a time, with the tensor cores of Hopper. They know
// nothing of how the kernels compute: products are sums of integers, and the device computes ex2 and its like.
#pragma once

#include "parity/same_bits_model.h"

namespace parity {

ModelRow cuda_segments_row(const SameBitsProblem &p, const SameBitsSequence &s, int64_t row, int64_t head);
ModelRow cuda_no_splits_row(const SameBitsProblem &p, const SameBitsSequence &s, int64_t row, int64_t head);
// The same on devices whose CTAs have less than 105 KB of shared memory.
ModelRow cuda_small_no_splits_row(const SameBitsProblem &p, const SameBitsSequence &s, int64_t row, int64_t head);

}  // namespace parity
