// SPDX-License-Identifier: Apache-2.0
#include "cpu/block_lists.h"

#include <algorithm>
#include <cstring>

namespace fa::cpu {

int64_t block_list_words(const BlockLists &lists) { return (lists.blocks_k + 63) / 64; }

size_t block_list_bytes(const MaskedProblem &p) {
  const BlockLists &lists = p.block_lists;
  if (!lists.given) return 0;
  const int64_t planes = (lists.per_batch ? p.batch : 1) * (lists.per_head ? p.heads_q : 1);
  return static_cast<size_t>(planes * lists.blocks_q * block_list_words(lists)) * sizeof(uint64_t);
}

void make_block_list_bits(const MaskedProblem &p, uint64_t *bits) {
  const BlockLists &lists = p.block_lists;
  if (!lists.given || p.batch == 0) return;
  const int64_t batches = lists.per_batch ? p.batch : 1, heads = lists.per_head ? p.heads_q : 1;
  const int64_t words = block_list_words(lists);
  std::memset(bits, 0, block_list_bytes(p));
  for (int64_t b = 0; b < batches; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t row = 0; row < lists.blocks_q; ++row, bits += words) {
        const int64_t given =
            lists.counts[b * lists.count_batch_stride + h * lists.count_head_stride + row * lists.count_row_stride];
        const int64_t count = std::clamp<int64_t>(given, 0, lists.max_blocks);
        const int32_t *entries = lists.indices + b * lists.batch_stride + h * lists.head_stride + row * lists.row_stride;
        for (int64_t n = 0; n < count; ++n) {
          const int64_t block = entries[n * lists.entry_stride];
          if (block >= 0 && block < lists.blocks_k) bits[block / 64] |= uint64_t{1} << (block % 64);
        }
      }
    }
  }
}

}  // namespace fa::cpu
