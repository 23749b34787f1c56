// SPDX-License-Identifier: Apache-2.0
// Shared memory of the backward kernels for sm_90a: work tiles, and the storage of backward.cuh. Host and device take sizes and offsets from
// the structs. Tiles lie in swizzle atoms of 64 columns (128 bytes a row), each a multiple of 1024 bytes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/philox.h"
#include "cuda/common/scores.h"

namespace fa::cuda::sm90 {

using Mbarrier = uint64_t;

// A work tile: the keys of one CTA or cluster, of one key head, with the Q tiles that see any of them. It lies in shared memory because the
// accumulators need the registers.
struct WorkTile {
  int32_t batch, head_k, key0;                   // key0: the first key
  int32_t q_start, k_start, seqlen_q, seqlen_k;  // where the sequence starts in a packed batch, and its used lengths
  int32_t band_first, band_last;                 // query i sees keys j with band_first <= j - i <= band_last
  int32_t workspace_begin, workspace_q_tiles;    // of the sequence: SequenceQTiles
  int32_t q_tile_begin, q_tile_end;              // Q tiles with visible pairs
  int32_t full_begin, full_end;                  // of these, the Q tiles without masked pairs
  int32_t work_index;                            // number among the work tiles of this CTA
  int32_t q_tiles_end;                           // persistent clusters: Q tiles of all work tiles up to the end of this one;
                                                 // single CTA with splits > 1: number among the work tiles that are split
  bool wg0_skips, wg1_skips;        // single CTA: consumer warpgroup 0 skips the first Q tile of the main loop, 1 the last
  int8_t split, splits;             // single CTA: this is one of `splits` parts of the main loop; SplitTail
  alignas(8) float nan_safe[2][2];  // single CTA, by stage of dS: not 0 if consumer warpgroup 0, or 1, has taken the
                                    // NaN-safe path
};
static_assert(sizeof(WorkTile) == 88);

// With masks as data the producer warp alone looks for visible Q tiles, and tells the consumers and the dq warps which ones it has loaded. The
// producer is fewer than kVisited iterations ahead of the dq warps.
struct VisitedQTile {
  int32_t q_tile, head_q;
  // What the cell map says of the Q tile's cells, two bits each: bit 2 n is visible, bit 2 n + 1 partial, for n = consumer warpgroup * cells of
  // queries + cell of queries. Where no pair is masked it is kAllCellsFull.
  uint32_t cell_codes;
  static constexpr uint32_t kAllCellsFull = 0x5555;
};
struct BackwardMaskedTiles {
  static constexpr int kVisited = 8;
  VisitedQTile visited[kVisited];  // by iteration of this CTA
  int32_t visible[2];              // Q tiles of a work tile, of all query heads; by stage of work tiles
};
struct NoBackwardMaskedTiles {};
struct DropoutStorage {
  DropoutKey key;
  int32_t kv_index;  // kernels for mixtures: of the producer warp, which has no register for it
};
struct NoDropout {};
// With a bias: tiles of it in a pipeline of their own, [64 keys each][query][64 keys].
template <int kStages>
struct BackwardBiasBarriers {
  Mbarrier full[kStages], empty[kStages];
};
template <int kTileKv, int kTileQ, int kStages>
struct BackwardBiasTiles {
  alignas(1024) uint16_t tile[kStages][kTileKv / 64][kTileQ][64];
};
// For mixtures, of 16 bits as above, or of fp32, [32 keys each][query][32 keys]. Memory for two tiles of 16 bits, or at head_dim 64 of fp32.
template <int kBytes>
struct BackwardBiasMemory {
  alignas(1024) char tile[kBytes];
};
struct NoBackwardBias {};

// For mixtures: which of a thread's pairs masks as data show.
template <int kConsumerWarpgroups>
struct BackwardShownPairs {
  uint32_t word[kConsumerWarpgroups * 128];
};
struct NoBackwardShownPairs {};

// lse and delta of the Q tile in each stage.
template <int kStages, int kStats>
struct BackwardRowStats {
  float lse[kStages][kStats], delta[kStages][kStats];
};
// With ALiBi by wgmma (alibi.cuh) the operands of its K step lie before them, in core matrices of 128 bytes: of the slope one for all queries, and zeros for
// the columns of K behind it; of the keys rows of eight.
template <int kStages, int kStats, int kTileQ>
struct BackwardAlibiStats {
  static constexpr int kKeyRows = 24;
  char slopes[kStages][128], zeros[128];
  uint16_t keys[kKeyRows][8];
  // compute-sanitizer takes an operand for contiguous memory, 32 bytes a query or key: this much of it must lie in shared memory.
  char room[kTileQ * 32 - 2432];
  float lse[kStages][kStats], delta[kStages][kStats];
};

// backward.cuh: two consumer warpgroups of 64 keys each, Q tiles of kTileQ queries.
template <int kD, int kConsumerWarpgroups, int kTileQ, int kStages, ScoreSet kScores>
struct SingleCtaStorage {
  static constexpr int kTileKv = kConsumerWarpgroups * 64, kAtoms = (kD + 63) / 64;
  static constexpr bool kMixtures = takes_mixtures(kScores);
  static constexpr int kBiasStages = kTileQ == 64 ? 2 : 1;  // as there is room
  static constexpr int kBiasTileBytes = kTileKv * kTileQ * 2, kBiasBytes = (kD <= 64 ? 4 : 2) * kBiasTileBytes;

  // Stages of K and V: a second one, for the next work tile, where there is room.
  // With Q tiles of 64 queries the columns of a warpgroup's dq lie in one swizzle atom of K: at head_dim 64 of 32 columns.
  static constexpr int kKeyAtoms = kD <= 64 && kTileQ == 64 ? 2 : kAtoms;
  static constexpr int kKvBytes = kTileKv * kAtoms * 128, kKvStages = kD <= 64 && kScores == kPlain ? 2 : 1;

  char k[kKvStages][kTileKv * kKeyAtoms * 128];  // (kTileKv, kD)
  char v[kKvStages][kKvBytes];                   // (kTileKv, kD)
  char q[kStages][kTileQ * kAtoms * 128];        // (kTileQ, kD)
  char dout[kStages][kTileQ * kAtoms * 128];     // (kTileQ, kD)
  char ds[2][kTileKv * kTileQ * 2];              // dS^T (kTileKv, kTileQ), of this Q tile and of the previous one
  float dq[kConsumerWarpgroups][kTileQ * kD / kConsumerWarpgroups];  // partials, in the layout of the accumulators
  static constexpr int kStats = (kTileQ + 31) / 32 * 32;             // TMA writes to multiples of 128 bytes
  std::conditional_t<has_alibi_by_wgmma(kScores), BackwardAlibiStats<kStages, kStats, kTileQ>,
                     BackwardRowStats<kStages, kStats>>
      stats;
  Mbarrier ds_full[2], ds_empty[2];
  Mbarrier dq_full[kConsumerWarpgroups], dq_empty[kConsumerWarpgroups];
  Mbarrier q_full[kStages], q_empty[kStages], dout_full[kStages], dout_empty[kStages];
  Mbarrier k_empty[kKvStages], v_empty[kKvStages];  // K, or V, of the work tile is no longer used
  Mbarrier loads_issued;                            // the producer has issued all loads of the work tile
  Mbarrier work_full[2], work_empty[2];
  WorkTile work_tiles[2][2];  // two stages; one for each consumer warpgroup
  std::conditional_t<(kScores & kDataMask) != 0, BackwardMaskedTiles, NoBackwardMaskedTiles> masked_tiles;
  alignas(16) std::conditional_t<(kScores & kDropout) != 0, DropoutStorage, NoDropout> dropout_key;
  std::conditional_t<kMixtures, BackwardShownPairs<kConsumerWarpgroups>, NoBackwardShownPairs> shown;
  static constexpr bool kHasBias = (kScores & (kTileBias | kTextTile)) != 0;  // with kMixtures: perhaps
  std::conditional_t<kHasBias, BackwardBiasBarriers<kBiasStages>, NoBackwardBias> bias_barriers;
  std::conditional_t<kMixtures, BackwardBiasMemory<kBiasBytes>,
                     std::conditional_t<kHasBias, BackwardBiasTiles<kTileKv, kTileQ, kBiasStages>, NoBackwardBias>>
      bias;
};

}  // namespace fa::cuda::sm90
