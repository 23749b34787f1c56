// SPDX-License-Identifier: Apache-2.0
// Before a forward that computes max_logit: -inf for every query head. Forward kernels raise it.
#pragma once

#include <cstdint>

#include "cuda/common/launch.h"

namespace fa::cuda {

struct MaxLogitParams {
  float *max_logit;  // (heads)
  int64_t stride, heads;
};

Launch max_logit_launch(const MaxLogitParams &params);

}  // namespace fa::cuda
