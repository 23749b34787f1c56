// SPDX-License-Identifier: Apache-2.0
// Forward adds quantised operands and max_logit to the shared part of a problem.
#pragma once

#include "core/problem.h"

namespace fa {

// Largest head_dim of q and k, and of v, that kernels support.
constexpr int64_t kMaxHeadDim = 576, kMaxHeadDimV = 512;

// Descales of an operand, fp32. Without data every descale is 1. Descales per row and head have the layout of the operand without
// head_dim. Descales per sequence and key head have seq_stride 0, and the sequence is their batch index even if keys are paged.
struct Descale {
  Operand factors;
  bool per_row = false;
};

// q may be fp8 if k and v are. q_descale is per sequence and key head.
struct ForwardProblem : MaskedProblem {
  Descale q_descale, k_descale, v_descale;
  float *max_logit = nullptr;  // (heads_q), or null
  int64_t max_logit_stride = 0;
};

}  // namespace fa
