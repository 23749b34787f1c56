// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of backward.cuh. Host and device take sizes and offsets from the struct.
#pragma once

#include <cstdint>

#include "core/philox.h"
#include "cuda/common/bf16_parts.h"
#include "cuda/common/sequence_rows.h"

namespace fa::cuda::sm90_fp32 {

constexpr int kOwnRows = 128;  // of a CTA: 64 for each consumer warpgroup
constexpr int kTileRows = 64;  // of the tiles that are streamed
// Rows of a head's lse and delta in the workspace are padded to multiples of these. Kernels for score terms share them with the kernel for dbias,
// simt::kRowPadding.
constexpr int stat_rows(bool scored) { return scored ? 128 : kTileRows; }

// The work of a CTA, in shared memory: there is no register that could hold it.
struct BackwardWork {
  int32_t batch, own_head, head_k;  // own_head: of the own rows
  int32_t own0;                     // first own row
  int32_t tile_begin, tile_end;     // streamed tiles with visible pairs
  int32_t owns_queries, last_block;
  SequenceRows q, k;
};

// Planes of rows lie in swizzle atoms of 64 columns. Streamed planes pass atom by atom through one pipeline, in the order
// in which they are used.
template <int kD, int kStages>
struct BackwardStorage {
  static constexpr int kOwnAtomBytes = kOwnRows * 128, kAtomBytes = kTileRows * 128;

  char own[2][kPlanes][kD / 64][kOwnAtomBytes];  // Q and dO, or K and V
  char atom[kStages][kAtomBytes];
  float lse[2][kTileRows], delta[2][kTileRows];  // of streamed queries
  uint64_t own_full, full[kStages], empty[kStages];
  uint64_t stats_full[2], stats_empty[2];
  BackwardWork work;
  DropoutKey dropout;  // of kernels with dropout
};

}  // namespace fa::cuda::sm90_fp32
