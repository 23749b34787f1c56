// SPDX-License-Identifier: Apache-2.0
// The problems of the benchmark of context parallelism, and what a model of GPUs and networks expects of them: what ranks compute, what
// travels, and what of that is hidden. The rates of the model are assumptions; docs/distributed.md says where they come from.
#pragma once

#include <cstdint>
#include <vector>

#include "flashattn/flashattn_dist.h"

namespace dist_bench {

constexpr int64_t kHeads = 64, kKeyHeads = 8, kDim = 128;

// Documents of 512 to 16384 rows, `rows` in all, of which a share of 512 / n or so is longer than n; always the same list.
std::vector<int64_t> packed_lengths(int64_t rows);

// Causal bf16 documents of these lengths, in heads as above. Keeps a pointer to `lengths`.
fa_dist_problem problem_of(const std::vector<int64_t> &lengths, int32_t ranks);

struct Prediction {
  double seconds = 0;  // of the slowest rank
  double share = 0;    // of one GPU's rate on the whole problem
};

// Of FA_DIST_GATHER without windows; `info` is the plan's. Messages take `slowed` times as long as at the rates of the model.
Prediction predict(const fa_dist_layout_info &info, bool backward, double slowed = 1);

}  // namespace dist_bench
