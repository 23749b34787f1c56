// SPDX-License-Identifier: Apache-2.0
// What append.cpp hands to the kernel of one instruction set.
#pragma once

#include <cstdint>

#include "core/append.h"

namespace fa::cpu {

// Rows [row_begin, row_end) of the tensors of new rows: of the whole packed tensor, or numbered (b, i), i fastest.
struct AppendJob {
  const AppendProblem *problem = nullptr;
  int64_t row_begin = 0;
  int64_t row_end = 0;
};

#define FA_DECLARE_APPEND_KERNEL(isa)     \
  namespace isa {                         \
  void append_rows(const AppendJob &job); \
  }
FA_DECLARE_APPEND_KERNEL(portable)
FA_DECLARE_APPEND_KERNEL(avx2)
FA_DECLARE_APPEND_KERNEL(avx512)
FA_DECLARE_APPEND_KERNEL(neon)
FA_DECLARE_APPEND_KERNEL(sve256)
#undef FA_DECLARE_APPEND_KERNEL

}  // namespace fa::cpu
