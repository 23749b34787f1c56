// SPDX-License-Identifier: Apache-2.0
// Properties of a tensor that plans and kernels use.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace fa::cuda {

// The element type of K and V: the queries' own type, or 8 bits with descales.
enum class Format { same, e4m3, i8 };

// Whether every row starts on 16 bytes and is a multiple of 16 bytes long.
FA_HD bool has_16_byte_rows(const Operand &t, int64_t head_dim) {
  const int64_t elements = 16 / dtype_bytes(t.dtype);
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 &&
         (t.batch_stride | t.seq_stride | t.head_stride | head_dim) % elements == 0;
}

}  // namespace fa::cuda
