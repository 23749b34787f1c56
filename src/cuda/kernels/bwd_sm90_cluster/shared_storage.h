// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of the backward clusters (cluster_cta.cuh). Host and device take sizes and offsets from the structs.
#pragma once

#include <type_traits>

#include "cuda/kernels/bwd_sm90/shared_storage.h"

namespace fa::cuda::sm90 {

// Barriers that the kernels use besides those that they share.
struct PRegistersBarriers {
  Mbarrier own_ds_full[2];  // dS of this CTA's keys; ds_full is for the peer's
  Mbarrier dq_full[2], dq_empty;
};
struct PSmemBarriers {
  Mbarrier p_full, p_empty, vote;
};
struct PSmemOrderedBarriers {
  Mbarrier p_full, p_empty, vote;
  Mbarrier dq_may_add, dq_added, dq_added_seen;
};

// What all clusters have. A CTA owns 64 keys.
template <int kD, int kDv, int kTileQ, int kStages, int kDoutStages, bool kPThroughSmem, bool kOrdered>
struct ClusterStorage {
  static constexpr int kAtoms = kD / 64, kAtomsV = kDv / 64, kHalfAtoms = (kD / 2 + 63) / 64;

  char k[2][64 * kHalfAtoms * 128];                // (64, kD / 2), twice: the two halves of the columns
  char v[64 * kAtomsV * 128];                      // (64, kDv)
  char peer_k[64 * kHalfAtoms * 128];              // (64, kD / 2) of the peer's keys: the columns that this CTA computes dq of
  char q[kStages][kTileQ * kAtoms * 128];          // (kTileQ, kD)
  char dout[kDoutStages][kTileQ * kAtomsV * 128];  // (kTileQ, kDv)
  float exchange[kPThroughSmem ? 64 * kTileQ : kTileQ * kD / 2];  // P, or dq, in the layout of the accumulators
  char ds[2][2][64 * kTileQ * 2];  // dS^T (64, kTileQ): two stages, of this CTA's keys and of the peer's
  float lse[kStages][kTileQ], delta[kDoutStages][kTileQ];
  Mbarrier k_full, v_full, dout_full[kDoutStages], dout_empty[kDoutStages];
  std::conditional_t<!kPThroughSmem, PRegistersBarriers, std::conditional_t<kOrdered, PSmemOrderedBarriers, PSmemBarriers>> own;
  Mbarrier ds_full[2], ds_empty[2], ds_consumed[2], q_full[kStages], q_empty[kStages];
  alignas(16) uint32_t
      flags[4];  // whether dq needs the NaN-safe path: the peer's word for each stage of dS, and two of the kernel's own
};

// A cluster that computes one work tile.
template <class Cluster>
struct OneTileClusterStorage {
  Cluster cluster;
  WorkTile work_tiles[1];
};

// A persistent cluster.
template <class Cluster, ScoreSet kScores>
struct PersistentClusterStorage {
  Cluster cluster;
  Mbarrier peer_k_full, k_empty, v_empty;
  Mbarrier loads_issued;           // the producer has issued all loads of the work tile
  Mbarrier next_full, next_empty;  // next_index, from CTA 0 to CTA 1
  Mbarrier work_full[2], work_empty[2];
  alignas(16) int32_t next_index;
  alignas(16) WorkTile work_tiles[2];
  std::conditional_t<(kScores & kDataMask) != 0, BackwardMaskedTiles, NoBackwardMaskedTiles> masked_tiles;
  alignas(16) std::conditional_t<(kScores & kDropout) != 0, DropoutStorage, NoDropout> dropout_key;
  std::conditional_t<takes_mixtures(kScores), BackwardShownPairs<1>, NoBackwardShownPairs> shown;
};

}  // namespace fa::cuda::sm90
