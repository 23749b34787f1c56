// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of backward.cuh. Host and device take sizes and offsets from the struct.
#pragma once

#include <cstdint>

#include "core/philox.h"
#include "cuda/common/bf16_parts.h"
#include "cuda/common/sequence_rows.h"

namespace fa::cuda::sm90_fp32 {

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

// Planes of rows lie in swizzle atoms of 64 columns. Streamed planes pass atom by atom through a pipeline of kStages stages, in the order
// in which they are used.
//
// Above 128 columns the planes of 128 own rows do not fit: both consumer warpgroups have the same 64, and a pipeline each. CTAs of dv have no second operand
// of own rows. Its place, which lies before that of the pipelines, is more stages for them.
//
// kSecondPlanes: the planes of the second operand that lie in shared memory. The last plane, which one product in six reads, may pass through the
// pipelines instead.
template <int kD, int kStages, int kSecondPlanes>
struct BackwardStorage {
  static constexpr bool kSharesRows = kD > 128, kStreamsLastPlane = kSecondPlanes < kPlanes;
  static constexpr int kOwnRows = kSharesRows ? 64 : 128, kPipelines = kSharesRows ? 2 : 1;
  static constexpr int kOwnAtomBytes = kOwnRows * 128, kAtomBytes = kTileRows * 128;
  static constexpr int kStagesOfDv = kSharesRows ? kStages + kSecondPlanes * (kD / 64) / kPipelines : kStages;
  static_assert(kSecondPlanes >= kPlanes - 1 && (kSharesRows || !kStreamsLastPlane));

  char own[kPlanes + kSecondPlanes][kD / 64][kOwnAtomBytes];  // planes of Q and of dO, or of K and of V
  char atom[kPipelines * kStages][kAtomBytes];
  float lse[2 * kPipelines][kTileRows], delta[2 * kPipelines][kTileRows];  // of streamed queries
  uint64_t own_full[kPipelines];                                           // with two pipelines one for each operand
  uint64_t full[kPipelines * kStagesOfDv], empty[kPipelines * kStagesOfDv];
  uint64_t stats_full[2 * kPipelines], stats_empty[2 * kPipelines];
  BackwardWork work;
  DropoutKey dropout;  // of kernels with dropout
  uint32_t base;       // address of this, which kernels for more than 128 columns read at each use
};

}  // namespace fa::cuda::sm90_fp32
