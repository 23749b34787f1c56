// SPDX-License-Identifier: Apache-2.0
// The copy of 8-bit K and V in the type of the queries, for forward kernels that read pages: its kernel's parameters.
#pragma once

#include "core/forward_problem.h"
#include "cuda/common/divisor.h"
#include "cuda/common/launch.h"

namespace fa::cuda::sm90 {

constexpr int32_t kWidenedKeys = 64;  // of a CTA

// The copy has the keys that some query of a sequence sees, and zeros in the rest of their KV tiles. Both 16-bit types represent every number
// of e4m3 and int8 exactly. Descales are left to the kernel that reads the copy, but K has the sign of its own: the softmax wants a positive scale.
struct WidenParams {
  Problem problem;
  Diagonal<int32_t>::Limits limits;
  Divisor page_size;
  Operand k, v;        // the copies
  Descale k_descale;   // one per sequence and head
  int32_t key_blocks;  // of kWidenedKeys keys, of a sequence
};

Launch widen_launch(const WidenParams &params);

}  // namespace fa::cuda::sm90
