// SPDX-License-Identifier: Apache-2.0
// What forward has beyond the shared part of a problem: keys and values that are quantised.
#pragma once

#include "core/problem.h"

namespace fa {

// Columns of a row that any kernel can hold.
constexpr int64_t kMaxHeadDim = 512;

// Factors of quantised keys or values, fp32; without data every factor is 1. One a row and head lies as its tensor does, with
// head_dim left out; one a sequence and head has seq_stride 0 and is found by the sequence, also where keys are paged.
struct Descale {
  Operand factors;
  bool per_row = false;
};

struct ForwardProblem : Problem {
  Descale k_descale, v_descale;
};

}  // namespace fa
