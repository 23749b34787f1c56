// SPDX-License-Identifier: Apache-2.0
// The order in which the forward takes work tiles: the L2-aware head order, with one larger group of heads at the end of the launch.
//
// Under a causal mask a group of heads starts with its longest work tiles. At the end of the launch enough tiles must follow these to keep
// the other SMs busy, so the last group has to be long.
#pragma once

#include "cuda/common/l2_head_order.h"

namespace fa::cuda::sm90 {

// The last sequences form one group of heads; all heads before them are in groups that fit the L2 cache.
struct TileOrder {
  L2HeadOrder l2_order, tail_order;
  int32_t tail_tile = 0, tail_batch = 0;  // the first tile and the first sequence of the last group

  TileOrder() = default;
  // `last_batch`: the number of sequences in the last group, fewer than `batch`; may be 0.
  TileOrder(int32_t row_blocks, int64_t heads, int64_t batch, int32_t heads_per_l2_group, int32_t last_batch, bool causal)
      : l2_order(row_blocks, heads, batch - last_batch, heads_per_l2_group, causal),
        tail_tile(static_cast<int32_t>((batch - last_batch) * heads * row_blocks)),
        tail_batch(static_cast<int32_t>(batch - last_batch)) {
    if (last_batch > 0) tail_order = L2HeadOrder(row_blocks, heads, last_batch, last_batch * heads, causal);
  }

  FA_HD bool last_rows_first() const { return l2_order.last_rows_first; }
  FA_HD int32_t row_blocks() const { return l2_order.row_blocks; }
  FA_HD L2HeadOrder::Place at(int index) const {
    if (index < tail_tile) return l2_order.at(index);
    L2HeadOrder::Place place = tail_order.at(index - tail_tile);
    place.batch += tail_batch;
    return place;
  }
};

}  // namespace fa::cuda::sm90
