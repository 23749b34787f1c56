// SPDX-License-Identifier: Apache-2.0
// fa_append_kv: rotates new rows and writes them to the cache.
#pragma once

#include "core/append.h"
#include "cuda/common/launch.h"

namespace fa::cuda {

// A row is divided into work units, and these into work tiles, one per CTA at a time: append.cu. Units of a head's rotary columns come
// first, then those of the columns that are only copied.
struct AppendParams {
  AppendProblem problem;
  int32_t units_q, units_k, units_v;  // work units of one head of a row
  int32_t units;                      // work units of a row. 8-bit caches: heads of q, k and v
  int32_t tiles_per_row;
  bool vector_tables;  // rows of the tables are aligned to 16 bytes
  int64_t work_tiles;  // rows * tiles_per_row
};

constexpr int64_t kMaxAppendHeads = int64_t{1} << 20;  // of q and k together

// Sets every field of `params` but the problem, which the caller has set.
Launch append_launch(AppendParams &params);

}  // namespace fa::cuda
