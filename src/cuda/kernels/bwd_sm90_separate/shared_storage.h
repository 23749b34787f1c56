// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of backward_separate.cuh. Host and device take sizes and offsets from the struct.
#pragma once

#include "cuda/kernels/bwd_sm90/shared_storage.h"

namespace fa::cuda::sm90 {

// Tiles of a main loop, in order: [begin, end), and of these [full_begin, full_end) without masked pairs.
struct StreamedTiles {
  int32_t begin, end, full_begin, full_end;
  int32_t own_row;  // first query (dq) or first key (dk, dv) of this CTA
  int32_t head_q;   // dq: of this CTA
};

// Every tile has 64 rows. Tiles lie in swizzle atoms of 64 rows x 64 columns. kMixtures: of a kernel for mixtures of score terms.
template <int kD, int kTileStages, int kAtomStages, bool kMixtures = false>
struct SeparateStorage {
  static constexpr int kAtoms = kD / 64, kAtomBytes = 64 * 64 * 2, kTileBytes = kAtoms * kAtomBytes;

  char own[2][kTileBytes];  // the operands of this CTA's rows: Q and dO, or K and V; for dv K alone
  // The streamed operand that S (dv: P^T dO) and the gradient are products of. For dv, own[1] is a further stage in front of these.
  char tile[kTileStages][kTileBytes];
  char atom[kAtomStages][kAtomBytes];  // the other streamed operand, which passes through atom by atom
  char ds[kAtomBytes];                 // dS^T, for dv P^T: (64 keys, 64 queries)
  float lse[2][64], delta[2][64];
  Mbarrier own_full[2];
  Mbarrier tile_full[kTileStages + 1][kAtoms], tile_empty[kTileStages + 1][kAtoms];
  Mbarrier atom_full[kAtomStages], atom_empty[kAtomStages];
  Mbarrier stats_full[2], stats_empty[2];
  Mbarrier ds_full, ds_empty;
  StreamedTiles streamed;
  alignas(16) WorkTile work_tiles[1];
  alignas(16) std::conditional_t<kMixtures, DropoutStorage, NoDropout> dropout_key;
};

}  // namespace fa::cuda::sm90
