// SPDX-License-Identifier: Apache-2.0
// What kernels that are compiled with a score text (docs/score_functions.md) get besides their ordinary parameters.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "cuda/common/scores.h"

namespace fa::cuda {

// The terms that a kernel is built for: those of its line in a table, or in a program that is compiled at run time those
// that the problem has.
constexpr ScoreSet scores_of_program(ScoreSet of_line) {
#ifdef FA_PROGRAM_SCORES
  return FA_PROGRAM_SCORES;
#else
  return of_line;
#endif
}

// How the elements of a score tensor may be loaded, bits. Programs know them as constants.
enum TensorLayout : uint32_t {
  kLayoutUnit = 1,   // elements of the last dimension lie side by side
  kLayoutPairs = 2,  // two of them can be loaded at once, the first one even
  kLayoutSmall = 4,  // 32 bits hold every offset
};

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
