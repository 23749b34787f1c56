// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of forward.cuh. Host and device take sizes and offsets from the struct.
#pragma once

#include <cstdint>

#include "cuda/common/bf16_parts.h"
#include "cuda/common/sequence_rows.h"

namespace fa::cuda::sm90_fp32 {

constexpr int kRows = 128;  // queries of a CTA: 64 for each consumer warpgroup

// The work of a CTA, in shared memory: the producer warp has no register that could hold it.
struct ForwardWork {
  int32_t batch, head_q, head_k;
  int32_t row0;                  // first query
  int32_t tile_begin, tile_end;  // KV tiles with visible pairs
  int32_t last_block;
  SequenceRows q, k;
};

// A plane of rows lies in swizzle atoms of 64 columns. Planes of K and V pass through one pipeline, in the order in which
// they are used; above 128 columns, where Q fills the shared memory, atom by atom.
template <int kD, int kKeys, int kStages>
struct ForwardStorage {
  static constexpr bool kByAtoms = kD > 128;
  static constexpr int kQPlaneBytes = kRows * kD * 2, kStageBytes = kKeys * (kByAtoms ? 64 : kD) * 2;

  char q[kPlanes][kQPlaneBytes];
  char stage[kStages][kStageBytes];
  uint64_t q_full, full[kStages], empty[kStages];
  uint64_t first_s;  // the first warpgroup has computed its first S
  ForwardWork work;
};

}  // namespace fa::cuda::sm90_fp32
