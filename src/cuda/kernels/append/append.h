// SPDX-License-Identifier: Apache-2.0
// New rows into a cache, rotated on the way: fa_append_kv.
#pragma once

#include "core/append.h"
#include "cuda/common/launch.h"

namespace fa::cuda {

// The parts of a row's work: runs of units, one a thread. A unit of a rotated row is the pairs that share two pieces (or are in one),
// then come pieces that are only copied.
struct AppendParams {
  AppendProblem problem;
  int32_t units_q, units_k, units_v;  // of one head of a row
  int32_t units;                      // of a row: every head of q, k and v; for quantised caches the number of these heads
  int32_t blocks_per_row;
  bool vector_tables;  // rows of the tables start on 16 bytes
  int64_t items;       // rows * blocks_per_row
};

constexpr int64_t kMaxAppendHeads = int64_t{1} << 20;  // of q and k together

// Sets all of `params` but the problem.
Launch append_launch(AppendParams &params);

}  // namespace fa::cuda
