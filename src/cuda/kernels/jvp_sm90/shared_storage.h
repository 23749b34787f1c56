// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of jvp.cuh. Host and device take sizes and offsets from the struct.
#pragma once

#include <cstdint>

#include "cuda/common/sequence_rows.h"

namespace fa::cuda::sm90 {

// A block of queries of one head. The producer warp describes it to the consumers.
struct JvpWorkTile {
  int batch, head_q;
  int row0;         // counted within the sequence; -1: there is no more work
  bool last_block;  // of the sequence's head: it also zeroes the rows beyond the grid
  SequenceRows q;
  int k_len;
};

// Tiles of 64 rows lie in swizzle atoms of 64 rows x 64 columns.
template <int kD, int kStages>
struct JvpStorage {
  static constexpr int kAtoms = (kD + 63) / 64, kAtomBytes = 64 * 64 * 2, kTileBytes = kAtoms * kAtomBytes;
  static constexpr int kWarpgroups = 2;  // consumer warpgroups, 64 queries each
  static constexpr int kWorkStages = 2;

  char q[kWarpgroups][kTileBytes], tq[kWarpgroups][kTileBytes];
  char k[kStages][2][kTileBytes], v[kStages][2][kTileBytes];  // and their tangents
  uint64_t q_full[kWarpgroups], q_empty[kWarpgroups];
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  uint64_t work_full[kWorkStages], work_empty[kWorkStages];
  JvpWorkTile work_tiles[kWorkStages];
};

}  // namespace fa::cuda::sm90
