// SPDX-License-Identifier: Apache-2.0
// The order in which work tiles add to dq in deterministic mode, where all main loops have the same Q tiles.
#pragma once

#include <cstdint>

#include "core/host_device.h"
#include "cuda/common/divisor.h"

namespace fa::cuda::sm90 {

// The main loop of work tile r of a head goes down from Q tile begin(r) - 1 to 0, and then from the last Q tile to begin(r). begin(r) grows with r, so work
// tiles that start at the same time come to a Q tile one after another, and none waits long. dq has two sums: work tiles add to the first one before they have
// passed Q tile 0, and to the second one afterwards, in ascending order of r in either. So a work tile waits for lower ones alone, which start earlier.
struct CyclicOrder {
  int32_t q_tiles = 0, work_tiles = 0;  // of a head; 0: not in use
  Divisor by_q_tiles, by_work_tiles;

  CyclicOrder() = default;
  CyclicOrder(int32_t q_tiles, int32_t work_tiles)
      : q_tiles(q_tiles), work_tiles(work_tiles), by_q_tiles(q_tiles), by_work_tiles(work_tiles) {}
  FA_HD int begin(int work_tile) const { return by_work_tiles.quotient(work_tile * q_tiles); }

  struct Place {
    int q_tile, position;  // position: how many work tiles add to this sum before
    bool second;
  };
  // Where work tile `work_tile` is when n further Q tiles follow.
  FA_HD Place at(int work_tile, int n) const {
    Place x{begin(work_tile) + n, work_tile, true};
    if (x.q_tile < q_tiles) return x;
    x.q_tile -= q_tiles;
    x.position -=
        by_q_tiles.quotient((x.q_tile + 1) * work_tiles + q_tiles - 1);  // those that begin at this Q tile or below it
    x.second = false;
    return x;
  }
};

}  // namespace fa::cuda::sm90
