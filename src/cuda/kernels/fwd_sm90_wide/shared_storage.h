// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of forward_wide.cuh. Host and device take sizes and offsets from the struct.
#pragma once

#include <cstdint>

namespace fa::cuda::sm90 {

// Tiles of 64 rows lie in swizzle atoms of 64 rows x 64 columns. K passes through atom by atom; V has kStages tiles.
template <int kD, int kStages>
struct WideStorage {
  static constexpr int kAtoms = kD / 64, kAtomBytes = 64 * 64 * 2, kTileBytes = kAtoms * kAtomBytes;
  static constexpr int kKAtomStages = 26 - (1 + kStages) * kAtoms;  // what is left of shared memory

  char q[kTileBytes];
  char v[kStages][kTileBytes];
  char k[kKAtomStages][kAtomBytes];
  char p[kAtomBytes];                // (64 queries, 64 keys)
  float rescale[64];                 // with which rows of out are multiplied before a tile is added, and at the end
  alignas(16) uint32_t rescales[4];  // of the warps: whether they multiply at all
  uint64_t q_full, k_full[kKAtomStages], k_empty[kKAtomStages];
  uint64_t v_full[kStages][kAtoms], v_empty[kStages][kAtoms];
  uint64_t p_full, p_empty;
};

}  // namespace fa::cuda::sm90
