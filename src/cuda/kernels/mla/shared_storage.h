// SPDX-License-Identifier: Apache-2.0
// The shared memory of a CTA of the MLA kernel. The host takes its size, the device its offsets.
#pragma once

#include <cstdint>

namespace fa::cuda::mla {

// K tiles lie in groups of eight rows, so that a single TMA load brings any eight consecutive rows of a page. Barriers are mbarriers.
template <int kHeadDim, int kHeadDimV, int kKeys, int kStages, int kQRegisterAtoms>
struct SharedStorage {
  static constexpr int kRows = 64, kSlices = kKeys / 16, kWorkUnitBytes = 96;

  // [row / 8][swizzle atom of 64 columns][8][64]. At the end of a work tile partials pass through here; in a cluster it is the DSMEM buffer.
  char k[kStages][kKeys * kHeadDim * 2];
  // [swizzle atom][64][64]. The other columns of Q are in registers of the softmax warpgroup.
  char q[kRows * (kHeadDim - 64 * kQRegisterAtoms) * 2];
  char p[kStages][kRows * kKeys * 2];  // [64][64]
  float rescale[kStages][kRows];       // factor of a row of out before P V of that stage is added
  uint32_t epilogue[kRows][4];         // per row: scale of out before partials are added, final scale, address in global memory
  float peer_stats[kRows][2];          // cluster: maximum and sum of a row in the peer CTA, later the scale of its out
  uint32_t flags[kStages][4];          // one word per softmax warp
  uint32_t listed[kStages][2];         // lists of keys: which keys of a K tile exist, a bit for each
  uint64_t full[kStages];              // a K tile has been loaded
  uint64_t empty[kStages][kSlices];    // both PV warpgroups have read these 16 keys of V
  uint64_t p_full[kStages][kSlices];   // P of these 16 keys is in shared memory
  uint64_t epilogue_full, epilogue_empty;     // the scales of a work unit are there; have been read, and the partial is stored
  uint64_t work_full[2], work_empty[2];       // a work unit is described; all warpgroups have finished it
  uint64_t softmax_sync;                      // the four softmax warps
  uint64_t q_requested;                       // the loads of the first Q have been issued
  uint64_t dsmem_empty;                       // cluster: the peer's K tiles have been read, its DSMEM buffer may be written
  uint64_t dsmem_stats_full, dsmem_out_full;  // cluster: the peer's maxima and sums, its out have arrived
  char work_units[2][kWorkUnitBytes];

  // The most partials of a work tile: their maxima and sums lie where K tiles, Q and P were, after the out of one partial.
  static constexpr int most_partials() {
    constexpr int kBytes = sizeof(k) + sizeof(q) + sizeof(p);
    return (kBytes - kRows * kHeadDimV * 4) / (kRows * 8);
  }
};

// FA_FLAG_SAME_BITS (segments.cuh): lies behind SharedStorage.
struct SegmentStorage {
  static constexpr int kRows = 64, kMostStored = 15;
  float total[kRows][2];  // maximum and sum of what the CTA has folded
  // Of each stored segment, and last of the one in registers: its maximum and sum, which become the scales of what comes before and of
  // the segment, when it is folded.
  float segments[kMostStored + 1][kRows][2];
  uint32_t actions[4];  // for the warps with the rows of each softmax warp
};

// 8-bit K: lies last.
struct ByteStorage {
  uint64_t bytes_full[4][2];  // the bytes of a producer warp's groups of eight rows have arrived
  uint64_t early_full[2];     // the first atoms of a K tile have been widened
};

}  // namespace fa::cuda::mla
