// SPDX-License-Identifier: Apache-2.0
// What kernels that are compiled with a score text (docs/score_functions.md) get besides their ordinary parameters.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fa::cuda {

struct ScoreTextTensor {
  const void *data;
  int64_t stride[4];  // in elements; 0 where the size is 1
};
struct ScoreTextArgs {
  ScoreTextTensor tensors[8];
  float scalars[8];
};

// The only parameter of such a kernel. Code that has the ordinary parameters at hand finds the rest behind them.
template <class Params>
struct ScoreTextParams {
  Params params;
  ScoreTextArgs args;
};
template <class Params>
FA_HD const ScoreTextArgs &score_text_args(const Params &params) {
  return reinterpret_cast<const ScoreTextParams<Params> &>(params).args;
}

}  // namespace fa::cuda
