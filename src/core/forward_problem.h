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

// The keys that each query sees, by number within their sequence: (batch, seqlen_q, count) int32. Packed: batch_stride is 0 and rows are
// counted over the whole batch. Entries outside the used keys are no keys.
struct KeyIndices {
  bool given = false;  // lists without entries show nothing
  const int32_t *data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t entry_stride = 0;
  int64_t count = 0;
};

// q may be fp8 if k and v are. q_descale is per sequence and key head.
struct ForwardProblem : MaskedProblem {
  Descale q_descale, k_descale, v_descale;
  float *max_logit = nullptr;  // (heads_q), or null
  int64_t max_logit_stride = 0;
  KeyIndices key_indices;
  // Pages are the keys that queries list, and the kernel finds them itself (cuda/host/key_lists.h).
  bool finds_listed_keys = false;
  int64_t rows_per_page = 0;  // of k where page_table numbers rows over all pages, which are then its pages of one row; else 0
};

}  // namespace fa
