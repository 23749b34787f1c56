// SPDX-License-Identifier: Apache-2.0
// The keys that queries list (kv_indices), as kernels find them: kv_loader.cuh has the arithmetic.
#pragma once

#include "core/forward_problem.h"
#include "cuda/common/divisor.h"

namespace fa::cuda {

// `lists` counts keys within a sequence of `k_lengths`, through `page_table` if that is not null. A key's entry is the number of its row in memory:
// o * outer_step + r * row_step of row r of page or sequence o.
struct ListedKeys {
  KeyIndices lists;
  Lengths k_lengths;
  const int32_t *page_table;
  int64_t page_table_batch_stride, page_table_page_stride;
  Divisor page_size;
  Divisor queries;  // of a sequence, where they are not packed
  int64_t outer_step, row_step;
};

}  // namespace fa::cuda
