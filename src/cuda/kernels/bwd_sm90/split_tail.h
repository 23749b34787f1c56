// SPDX-License-Identifier: Apache-2.0
// How the last work tiles of a backward launch are divided among all CTAs.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "cuda/common/divisor.h"

namespace fa::cuda::sm90 {

// Work tiles at the end of a launch whose main loops are divided among several CTAs. Where all main loops are equally long, the work tiles
// of the last, partial round would leave the other CTAs idle. Their Q tiles, `total` in all, are divided into `units` equal runs, one for a
// CTA; a run that crosses the end of a work tile is two splits. Each split writes its dk and dv to `partials`, and the last one of a work
// tile adds them up in the order of the splits.
struct SplitTail {
  int32_t first_tile = 0;  // the first work tile that is split
  int32_t units = 0;       // 0: none is
  int32_t q_tiles = 0;     // of a work tile
  int32_t total = 0;
  int32_t max_splits = 0;  // of a work tile
  Divisor by_units, by_q_tiles, by_total;
  float *partials = nullptr;    // (split tiles, max_splits, consumer warps, 2 head_dim / 4, 32 lanes, 4)
  int32_t *counters = nullptr;  // (split tiles, consumer warps): splits that have been written; zeroed by backward_rows

  FA_HD int begin_of_unit(int unit) const { return by_units.quotient(unit * total); }
  FA_HD int unit_of(int q_tile) const { return by_total.quotient((q_tile + 1) * units - 1); }

  struct Split {
    int tile, begin, end;  // number of the work tile among those that are split, and its Q tiles
    int split, splits;
    bool crosses;  // this is the first of two splits of the unit
  };
  FA_HD int tile_of(int unit, bool second) const { return by_q_tiles.quotient(begin_of_unit(unit)) + second; }
  FA_HD Split split_of(int unit, bool second) const {
    Split x;
    x.tile = tile_of(unit, second);
    const int from = x.tile * q_tiles;
    x.begin = second ? 0 : begin_of_unit(unit) - from;
    x.end = begin_of_unit(unit + 1) - from;
    x.crosses = x.end > q_tiles;
    if (x.crosses) x.end = q_tiles;
    const int first_unit = unit_of(from);
    x.split = unit - first_unit;
    x.splits = unit_of(from + q_tiles - 1) - first_unit + 1;
    return x;
  }
};

}  // namespace fa::cuda::sm90
