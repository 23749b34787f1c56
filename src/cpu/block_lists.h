// SPDX-License-Identifier: Apache-2.0
// Block lists as bits, so that kernels need not search a list for a block. Made once per call, before the parallel region.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.h"

namespace fa::cpu {

// (batch or 1, heads_q or 1, blocks_q) rows of one bit per block of keys, each row whole words.
int64_t block_list_words(const BlockLists &lists);      // per row
size_t block_list_bytes(const MaskedProblem &problem);  // 0 without lists
void make_block_list_bits(const MaskedProblem &problem, uint64_t *bits);

}  // namespace fa::cpu
