// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of forward_wide.cuh. Host and device take sizes and offsets from the struct.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/philox.h"

namespace fa::cuda::sm90 {

// Kernels for mixtures: what the dropout bits of the CTA's head depend on, besides rows and keys. `head`: fa::dropout_head().
struct alignas(16) WideDropout {
  DropoutKey key;
  uint32_t head;
};
struct NoWideDropout {};

// Tiles of 64 rows lie in swizzle atoms of 64 rows x 64 columns. K passes through atom by atom, V in parts: with 512 columns a stage has half
// of the columns of each PV warpgroup, otherwise all.
// kMixtures: of a kernel for mixtures of score terms.
template <int kD, bool kMixtures = false>
struct WideStorage {
  static constexpr int kAtoms = kD / 64, kAtomBytes = 64 * 64 * 2, kTileBytes = kAtoms * kAtomBytes;
  static constexpr int kFirstAtoms = (kAtoms + 1) / 2, kSecondAtoms = kAtoms / 2;  // of out, by PV warpgroup
  static constexpr int kParts = kAtoms == 8 ? 2 : 1;                               // of a tile of V
  static constexpr int kPartAtoms = kFirstAtoms / kParts;                          // what both have room for
  // As many as the softmax warpgroup has registers for.
  static constexpr int kQRegisterAtoms = kAtoms != 8 ? kAtoms : kMixtures ? 2 : 3;
  static constexpr int kQAtoms = kAtoms - kQRegisterAtoms;                              // that stay in shared memory
  static constexpr int kKParts = kAtoms == 5 ? 1 : 2, kKStageAtoms = kAtoms / kKParts;  // of a tile of K
  static constexpr int kPStages = 2, kVStages = 2;
  static constexpr int kKStages =
      (28 - kPStages - kQAtoms - kVStages * 2 * kPartAtoms) / kKStageAtoms;  // what is left of shared memory
  static_assert(kQRegisterAtoms <= kVStages * 2 * kPartAtoms);

  char q[kQAtoms > 0 ? kQAtoms : 1][kAtomBytes];
  char v[kVStages][2][kPartAtoms * kAtomBytes];
  char k[kKStages][kKStageAtoms * kAtomBytes];
  char p[kPStages][kAtomBytes];                // (64 queries, 64 keys)
  float rescale[kPStages][64];                 // with which rows of out are multiplied before a tile is added, and at the end
  alignas(16) uint32_t rescales[kPStages][4];  // of the warps: whether they multiply at all
  uint64_t q_full, k_full[kKStages], k_empty[kKStages];
  uint64_t v_full[kVStages][2], v_empty[kVStages][2];  // of the parts of the PV warpgroups
  uint64_t p_full[kPStages], p_empty[kPStages];
  std::conditional_t<kMixtures, WideDropout, NoWideDropout> dropout;
};

}  // namespace fa::cuda::sm90
