// SPDX-License-Identifier: Apache-2.0
// The order in which the forward works on tiles. A section that ends the launch has to be long: its first walks are the longest ones, and
// what follows them must keep the other multiprocessors busy.
#pragma once

#include "cuda/common/l2_head_order.h"

namespace fa::cuda::sm90 {

// Sections of heads, but for the last sequences, which are one section.
struct TileOrder {
  L2HeadOrder sections, end;
  int32_t end_tile = 0, end_batch = 0;  // where `end` begins

  TileOrder() = default;
  // `last_batch`: how many sequences those are, fewer than `batch`.
  TileOrder(int32_t row_blocks, int64_t heads, int64_t batch, int32_t heads_per_l2_group, int32_t last_batch, bool causal)
      : sections(row_blocks, heads, batch - last_batch, heads_per_l2_group, causal),
        end_tile(static_cast<int32_t>((batch - last_batch) * heads * row_blocks)),
        end_batch(static_cast<int32_t>(batch - last_batch)) {
    if (last_batch > 0) end = L2HeadOrder(row_blocks, heads, last_batch, last_batch * heads, causal);
  }

  FA_HD bool last_rows_first() const { return sections.last_rows_first; }
  FA_HD int32_t row_blocks() const { return sections.row_blocks; }
  FA_HD L2HeadOrder::Place at(int index) const {
    if (index < end_tile) return sections.at(index);
    L2HeadOrder::Place place = end.at(index - end_tile);
    place.batch += end_batch;
    return place;
  }
};

}  // namespace fa::cuda::sm90
