// SPDX-License-Identifier: Apache-2.0
// The L2-aware order of work tiles: heads in groups whose keys and values fit the L2 cache together. Within a group, row block after row block
// over its heads; under a causal mask the row blocks that see most keys come first.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/host_device.h"
#include "cuda/common/divisor.h"

namespace fa::cuda {

struct L2HeadOrder {
  struct Place {
    int row_block, batch, head;
  };

  int32_t row_blocks = 1;  // of the longest sequence
  int32_t last_l2_group = 0;
  bool last_rows_first = false;
  Divisor l2_group_row_blocks;  // heads x row_blocks
  Divisor l2_group_heads;
  Divisor last_l2_group_heads;
  Divisor heads;  // of one sequence

  L2HeadOrder() = default;
  // The last group has at least `last_heads` heads. With more than heads_per_l2_group of them, at_long_end() has to be used.
  L2HeadOrder(int64_t row_blocks, int64_t heads, int64_t batch, int64_t heads_per_l2_group, bool last_rows_first,
              int64_t last_heads = 0)
      : row_blocks(static_cast<int32_t>(row_blocks)),
        last_l2_group(static_cast<int32_t>(std::min((batch * heads - 1) / heads_per_l2_group,
                                                    std::max<int64_t>(batch * heads - last_heads, 0) / heads_per_l2_group))),
        last_rows_first(last_rows_first),
        l2_group_row_blocks(heads_per_l2_group * row_blocks),
        l2_group_heads(heads_per_l2_group),
        last_l2_group_heads(batch * heads - last_l2_group * heads_per_l2_group),
        heads(heads) {}

  FA_HD Place at(int index) const { return in_group(l2_group_row_blocks.quotient(index), index); }
  // The same where the last group may be the longest one.
  FA_HD Place at_long_end(int index) const {
    const int group = l2_group_row_blocks.quotient(index);
    return in_group(group < last_l2_group ? group : last_l2_group, index);
  }

 private:
  FA_HD Place in_group(int group, int index) const {
    index -= group * static_cast<int>(l2_group_row_blocks.value);
    const Divisor &heads_here = group == last_l2_group ? last_l2_group_heads : l2_group_heads;
    const int row_block = heads_here.quotient(index);
    const int head = group * static_cast<int>(l2_group_heads.value) + index - row_block * static_cast<int>(heads_here.value);
    const int batch = heads.quotient(head);
    return {last_rows_first ? row_blocks - 1 - row_block : row_block, batch, head - batch * static_cast<int>(heads.value)};
  }
};

}  // namespace fa::cuda
