// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of jvp.cuh. Host and device take sizes and offsets from the struct.
#pragma once

#include <cstdint>

namespace fa::cuda::sm90 {

// Tiles of 64 rows lie in swizzle atoms of 64 rows x 64 columns.
template <int kD, int kStages>
struct JvpStorage {
  static constexpr int kAtoms = kD / 64, kAtomBytes = 64 * 64 * 2, kTileBytes = kAtoms * kAtomBytes;
  static constexpr int kWarpgroups = 2;  // consumer warpgroups, 64 queries each

  char q[kWarpgroups][kTileBytes], tq[kWarpgroups][kTileBytes];
  char k[kStages][2][kTileBytes], v[kStages][2][kTileBytes];  // and their tangents
  uint64_t q_full[kWarpgroups];
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

}  // namespace fa::cuda::sm90
