// SPDX-License-Identifier: Apache-2.0
// The arithmetic of FA_FLAG_SAME_BITS on Hopper, contract 2 of docs/numerics.md, one row at a time. It knows nothing of how the kernels compute:
// products are sums of integers, and the device computes ex2 and its like.
#pragma once

#include "parity/same_bits_model.h"

namespace parity {

ModelRow cuda_model_row(const SameBitsProblem &p, const SameBitsSequence &s, int64_t row, int64_t head);

}  // namespace parity
