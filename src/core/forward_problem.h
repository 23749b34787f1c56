// SPDX-License-Identifier: Apache-2.0
// What forward has beyond the shared part of a problem: operands that are quantised.
#pragma once

#include "core/problem.h"

namespace fa {

// Columns of a row of q or k, and of v, that any kernel can hold.
constexpr int64_t kMaxHeadDim = 576, kMaxHeadDimV = 512;

// Factors of quantised operands, fp32; without data every factor is 1. One a row and head lies as its tensor does, with head_dim left
// out; one a sequence and key head has seq_stride 0 and is found by the sequence, also where keys are paged.
struct Descale {
  Operand factors;
  bool per_row = false;
};

// q may be fp8 if k and v are: then q_descale is one a sequence and key head.
struct ForwardProblem : Problem {
  Descale q_descale, k_descale, v_descale;
};

}  // namespace fa
