// SPDX-License-Identifier: Apache-2.0
// The order in which blocks of rows are worked on: heads by sections whose keys fit the L2 cache together; within a section row block by
// row block over its heads, with a causal mask those that see most keys first.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "cuda/common/divisor.h"

namespace fa::cuda {

struct BlockOrder {
  struct Place {
    int row_block, batch, head;
  };

  int32_t row_blocks = 1;  // of the longest sequence
  int32_t last_section = 0;
  bool last_rows_first = false;
  Divisor section_blocks;  // heads x row_blocks
  Divisor section_heads;
  Divisor last_section_heads;
  Divisor heads;  // of one sequence

  BlockOrder() = default;
  BlockOrder(int64_t row_blocks, int64_t heads, int64_t batch, int64_t heads_per_section, bool last_rows_first)
      : row_blocks(static_cast<int32_t>(row_blocks)),
        last_section(static_cast<int32_t>((batch * heads - 1) / heads_per_section)),
        last_rows_first(last_rows_first),
        section_blocks(heads_per_section * row_blocks),
        section_heads(heads_per_section),
        last_section_heads(batch * heads - last_section * heads_per_section),
        heads(heads) {}

  FA_HD Place at(int index) const {
    const int section = section_blocks.quotient(index);
    index -= section * static_cast<int>(section_blocks.value);
    const Divisor &heads_here = section == last_section ? last_section_heads : section_heads;
    const int row_block = heads_here.quotient(index);
    const int head = section * static_cast<int>(section_heads.value) + index - row_block * static_cast<int>(heads_here.value);
    const int batch = heads.quotient(head);
    return {last_rows_first ? row_blocks - 1 - row_block : row_block, batch, head - batch * static_cast<int>(heads.value)};
  }
};

}  // namespace fa::cuda
