// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of the extend kernels. Host and device take its size from here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/common/segments.h"
#include "cuda/kernels/decode/shared_storage.h"

namespace fa::cuda::extend {

constexpr int32_t kWarpgroupRows = 64;  // rows of a consumer warpgroup
constexpr int32_t kWarpRows = 16;       // of a consumer warp
constexpr int32_t kProducerWarps = 4;
constexpr int32_t kDescriptorBytes = 96;  // of a WorkUnitDescriptor

// Wide heads: Q of every warpgroup, which has no registers for it beside out, as swizzle atoms.
constexpr bool holds_q_in_registers(int head_dim) { return head_dim <= 128; }
template <int kHeadDim, int kWarpgroups>
struct QueryTiles {
  alignas(1024) uint16_t rows[kWarpgroups][kHeadDim / 64][kWarpgroupRows][64];
};
struct NoQueryTiles {};

// K and V tiles take one stage each in turn, as swizzle atoms of 64 columns. uint64_t members are mbarriers.
template <int kHeadDim, int kWarpgroups, int kKvTile, int kStages, int kStages8Bit>
struct SharedStorage16Bit {
  uint16_t kv[kStages][kHeadDim / 64][kKvTile][64];
  uint64_t full[kStages], empty[kStages];
  uint64_t work_full[2], work_empty[2];  // a work descriptor
  uint64_t nan_vote[kWarpgroups];        // the warps of a warpgroup have voted on NaN
  uint64_t wg_order[kWarpgroups];        // a warpgroup may issue its wgmmas (ping-pong)
  uint32_t nan_flag[kWarpgroups][2];     // the results of this NaN vote and of the previous one
  alignas(8) char descriptor[2][kDescriptorBytes];
  std::conditional_t<holds_q_in_registers(kHeadDim), NoQueryTiles, QueryTiles<kHeadDim, kWarpgroups>> q;
};
// 8-bit KV is loaded into a pipeline of its own and widened into the 16-bit one.
template <int kHeadDim, int kWarpgroups, int kKvTile, int kStages, int kStages8Bit>
struct SharedStorage8Bit {
  uint16_t kv[kStages][kHeadDim / 64][kKvTile][64];
  uint8_t kv_8bit[kStages8Bit][kKvTile][kHeadDim];
  uint64_t full[kStages], empty[kStages];
  uint64_t work_full[2], work_empty[2];
  uint64_t nan_vote[kWarpgroups];
  uint64_t wg_order[kWarpgroups];
  uint64_t full_8bit[kStages8Bit][kProducerWarps];  // a producer warp's part of a stage has arrived
  uint32_t nan_flag[kWarpgroups][2];
  alignas(8) char descriptor[2][kDescriptorBytes];
  float row_scale[kWarpgroups * kWarpgroupRows];  // what a row of S is multiplied by
};

// Kernels whose consumer warps widen 8-bit KV in registers (token_8bit.cuh): it stays as it is, a key is one swizzle atom.
template <int kHeadDim, int kWarpgroups, int kKvTile, int kStages>
struct TokenStorage {
  uint8_t kv[kStages][kKvTile][kHeadDim];
  float scores[2][kKvTile / 16][2][32][4];            // of a tile, as fragments
  uint32_t q[kWarpgroups * 4][kHeadDim / 16][32][4];  // of each warp, as A operands of mma
  uint64_t full[kStages], empty[kStages];
  uint64_t work_full[2], work_empty[2];
  alignas(8) char descriptor[2][kDescriptorBytes];
};

template <int kHeadDim, int kWarpgroups, int kKvTile, int kStages, int kStages8Bit>
using SharedStorage = std::conditional_t<
    (kStages == 0), TokenStorage<kHeadDim, kWarpgroups, kKvTile, kStages8Bit>,
    std::conditional_t<(kStages8Bit > 0), SharedStorage8Bit<kHeadDim, kWarpgroups, kKvTile, kStages, kStages8Bit>,
                       SharedStorage16Bit<kHeadDim, kWarpgroups, kKvTile, kStages, kStages8Bit>>>;

// Kernels for FA_FLAG_SAME_BITS: the total of the segments that are folded so far (segments.cuh), behind SharedStorage. `out`:
// of each warp, four accumulators of each lane beside those of the other lanes. `stats`: M and L of the rows.
template <int kHeadDim, int kWarpgroups>
struct TotalOut {
  alignas(16) float lanes[kWarpgroups * 4][kHeadDim / 8][32][4];
};
// Beside Q of wide heads, and beside the pipeline of 8-bit KV, there is no room for O: it is in the workspace.
constexpr bool total_is_shared(int head_dim, int stages_8bit) { return head_dim <= (stages_8bit > 0 ? 64 : 128); }
struct NoTotalOut {};
template <int kHeadDim, int kWarpgroups, int kStages8Bit>
struct SegmentTotals {
  std::conditional_t<total_is_shared(kHeadDim, kStages8Bit), TotalOut<kHeadDim, kWarpgroups>, NoTotalOut> out;
  float stats[kWarpgroups * kWarpgroupRows][2];
  int32_t state[kWarpgroups * 4];  // of each warp, a SegmentState
};

// Kernels for masks as data, behind SharedStorage: what the producer tells of the next KV tile (masks.cuh). More tiles than it has are never loaded
// and not yet computed.
constexpr int32_t kTileNotes = 16;
struct TileNotes {
  uint32_t notes[kTileNotes];
};

template <int kHeadDim, int kWarpgroups, int kKvTile, int kStages, int kStages8Bit>
constexpr size_t segment_totals_offset() {
  return (sizeof(SharedStorage<kHeadDim, kWarpgroups, kKvTile, kStages, kStages8Bit>) + 15) / 16 * 16;
}
template <int kHeadDim, int kWarpgroups, int kKvTile, int kStages, int kStages8Bit>
constexpr size_t storage_bytes_of(bool same_bits, bool masks) {
  constexpr size_t kBehind = segment_totals_offset<kHeadDim, kWarpgroups, kKvTile, kStages, kStages8Bit>();
  return same_bits && kStages > 0 ? kBehind + sizeof(SegmentTotals<kHeadDim, kWarpgroups, kStages8Bit>)
         : masks                  ? kBehind + sizeof(TileNotes)
                                  : sizeof(SharedStorage<kHeadDim, kWarpgroups, kKvTile, kStages, kStages8Bit>);
}

// Kernels for FA_FLAG_SAME_BITS whose CTAs form clusters (cluster.cuh).
constexpr int32_t kClusterRows = 16;     // of a CTA
constexpr int32_t kClusterKvTile = 128;  // keys of a tile, and of a stage of K
using decode::kMaxClusterSize;

// A stage has kClusterKvTile keys of K, or, where several CTAs share a segment, fewer columns of V of so many more keys. uint64_t members are
// mbarriers. `out` and `stats` are DSMEM buffers.
template <int kHeadDim, int kStages>
struct ClusterStorage {
  static constexpr int kTiles = kSegmentKeys / kClusterKvTile;  // of a segment

  uint16_t kv[kStages][kClusterKvTile][kHeadDim];
  uint32_t q[kHeadDim / 16][32][4];                     // as A operands
  float scores[kTiles][2][kClusterKvTile / 16][32][4];  // of a segment, as fragments; then P as A operands
  float out[2][kClusterRows * kHeadDim];                // segments of a round, for the columns that this CTA owns
  float stats[2][kMaxClusterSize][kClusterRows][2];     // maximum and row sum
  float first_max[kClusterRows][8];                     // of S, of each warp's keys of the first tile
  float lane_sums[kTiles][kClusterRows][4];             // of P of a tile
  float rescale[kTiles][kClusterRows];                  // what out is multiplied by before a tile is added
  float row_stats[kClusterRows][2];                     // of the segment
  float running_max[kClusterRows], running_sum[kClusterRows][4];
  uint64_t full[kStages], empty[kStages];
  uint64_t scores_full;                  // all CTAs of the team have sent their scores
  uint64_t fold_full[2], fold_empty[2];  // `out` and `stats` have arrived; all CTAs of the cluster have folded them
};

}  // namespace fa::cuda::extend
