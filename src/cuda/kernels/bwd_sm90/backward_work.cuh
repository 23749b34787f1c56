// SPDX-License-Identifier: Apache-2.0
// What a backward kernel for sm_90a works on: the description of a work tile, and the Q tiles that it visits.
#pragma once

#include <cstddef>

#include "cuda/common/data_mask.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90/backward.h"
#include "cuda/kernels/bwd_sm90/shared_storage.h"

namespace fa::cuda::sm90 {

// A CTA's work tiles. C is a kernel's configuration. C::kTileKv keys make a work tile, C::kTileQ queries a Q tile.
template <class C>
struct BackwardWork {
  // With kLaneFromShuffle the lane comes from a shuffle. Otherwise ptxas reads threadIdx again wherever it is short of
  // registers.
  __device__ __forceinline__ BackwardWork(const BackwardParams &params, char *shared)
      : params(params),
        problem(params.problem.forward),
        work_tiles(reinterpret_cast<WorkTile *>(shared + offsetof(typename C::Storage, work_tiles))),
        smem(smem_address(shared)),
        lane(C::kLaneFromShuffle ? __shfl_sync(~0u, threadIdx.x & 31, threadIdx.x & 31) : threadIdx.x & 31),
        warp((C::kLaneFromShuffle ? uniform(threadIdx.x >> 5) : threadIdx.x >> 5) & 3) {}

  // Address in shared memory: a member of the storage by its offset, or element n of an array of elements of `bytes` bytes.
  __device__ __forceinline__ uint32_t at(uint32_t offset, int n = 0, uint32_t bytes = 0) const {
    return smem + offset + n * bytes;
  }
  __device__ __forceinline__ WorkTile &work() const { return work_tiles[work_stage]; }
  __device__ __forceinline__ BackwardMaskedTiles &masked_tiles() const {
    using Storage = typename C::Storage;
    return *reinterpret_cast<BackwardMaskedTiles *>(reinterpret_cast<char *>(work_tiles) - offsetof(Storage, work_tiles) +
                                                    offsetof(Storage, masked_tiles));
  }

  // Kernels for mixtures: which terms the problem has.
  __device__ __forceinline__ bool has_bias() const { return problem.bias.data != nullptr; }
  __device__ __forceinline__ bool drops() const { return problem.dropout.threshold > 0; }

  // A member of what is visited in iteration n of all work tiles, when its Q, or its dO, has arrived. One lane reads, the one that frees Q.
  template <typename T>
  __device__ __forceinline__ T visited(int n, T VisitedQTile::*member) const {
    return __shfl_sync(~0u, lane == 0 ? masked_tiles().visited[n % BackwardMaskedTiles::kVisited].*member : T{}, 0);
  }

  // Describes number `index` of the order of work tiles. It writes field after field: the warps that call it have few
  // registers.
  __device__ __forceinline__ void describe_work_tile(int index, WorkTile &b) const {
    const L2HeadOrder::Place place = params.order.at_long_end(index);
    const int key0 = place.row_block * C::kTileKv;
    b.key0 = key0;
    b.batch = place.batch;
    b.head_k = place.head;
    b.q_tile_begin = b.q_tile_end = b.full_begin = b.full_end = 0;
    const Sequence k = unpadded_keys(problem.k_lengths, place.batch);
    b.k_start = static_cast<int>(k.start);
    const int seqlen_k = static_cast<int>(k.len);
    const Sequence q = sequence_of(problem.q_lengths, place.batch);
    b.q_start = static_cast<int>(q.start);
    describe_workspace(place.batch, q, b);
    const Diagonal<int32_t> diagonal(params.limits, static_cast<int>(q.len), seqlen_k);
    b.seqlen_q = diagonal.seqlen_q;
    b.seqlen_k = diagonal.seqlen_k;
    const int first = diagonal.shift - diagonal.left, last = diagonal.shift + diagonal.right;
    b.band_first = first;
    b.band_last = last;
    if (key0 >= diagonal.seqlen_k) return;
    const RangeOf<int32_t> queries = diagonal.visible_queries({key0, min(key0 + C::kTileKv, diagonal.seqlen_k)});
    if (queries.empty()) return;
    b.q_tile_begin = queries.begin / C::kTileQ;
    b.q_tile_end = (queries.end + C::kTileQ - 1) / C::kTileQ;
    if (key0 + C::kTileKv > diagonal.seqlen_k) return;
    // Queries that see every key of the work tile.
    b.full_begin = (max(key0 + C::kTileKv - 1 - last, 0) + C::kTileQ - 1) / C::kTileQ;
    b.full_end = max(min(key0 - first + 1, diagonal.seqlen_q), 0) / C::kTileQ;
  }
  // The same for `keys` keys from key0 on, a part of the work tile.
  __device__ __forceinline__ void describe_full_q_tiles(int key0, int keys, WorkTile &b) const {
    b.full_begin = b.full_end = 0;
    if (key0 + keys > b.seqlen_k) return;
    b.full_begin = (max(key0 + keys - 1 - b.band_last, 0) + C::kTileQ - 1) / C::kTileQ;
    b.full_end = max(min(key0 - b.band_first + 1, b.seqlen_q), 0) / C::kTileQ;
  }

  __device__ __forceinline__ void describe_workspace(int batch, const Sequence &q, WorkTile &b) const {
    const SequenceQTiles tiles = q_tiles_of_sequence(problem, q, batch, C::kTileQ, params.q_tiles);
    b.workspace_begin = tiles.begin;
    b.workspace_q_tiles = tiles.count;
  }

  // Where the Q tiles with masked pairs of a work tile are its last ones at most, the others begin with one of the work tile's own: CTAs at work on one
  // head then add to different rows of dq. The loop has the same Q tiles, `shift` tiles further up; those that would lie past the last one without masked
  // pairs are the first ones. Which Q tile it is matters only to the warps that load Q and that add dq.
  struct RotatedQTiles {
    int shift, begin, end;
    // The Q tile at a place of the main loop.
    __device__ __forceinline__ int operator()(int place) const {
      if (place >= end) return place;
      return place + shift < end ? place + shift : place + shift - (end - begin);
    }
  };
  __device__ __forceinline__ RotatedQTiles rotated_q_tiles() const {
    if constexpr (C::kRotates) {
      const WorkTile &t = work(), &upper = work_tiles[work_stage + C::kTilesPerWorkStage - 1];  // upper: of the upper keys
      if (is_cyclic()) return {params.cyclic.begin(t.key0 / C::kTileKv), 0, t.q_tile_end};
      const int begin = t.q_tile_begin, end = min(min(t.full_end, upper.full_end), t.q_tile_end);
      if (params.ordered || upper.full_begin > begin || end <= begin) return {0, 0, 0};
      return {static_cast<int>(int64_t{t.key0} * (end - begin) / max(t.seqlen_k, 1)), begin, end};
    } else {
      return {0, 0, 0};
    }
  }

  // Deterministic mode in cyclic order (cyclic_order.h).
  __device__ __forceinline__ bool is_cyclic() const { return C::kDqTransposed && params.cyclic.q_tiles > 0; }

  // Index in the workspace of the first Q tile of a query head.
  __device__ __forceinline__ int workspace_q_tile(int head_q) const {
    return work().workspace_begin + head_q * work().workspace_q_tiles;
  }

  // With masks as data: of 32 Q tiles of a query head, from `q_tile` down to `first`, those that the work tile sees, and of these the ones in which the cell
  // map says that a pair may be masked; bit l is q_tile - l. All lanes take part.
  struct QTileBits {
    uint32_t visible;
    uint32_t cell_codes;  // of this lane's Q tile (VisitedQTile)
  };
  __device__ __forceinline__ QTileBits q_tiles_from(const WorkTile &t, int head_q, int q_tile, int first) const {
    constexpr int kCells = C::kTileQ / kCell;
    constexpr uint32_t kAllCells = (1u << kCells) - 1;
    const DataMask &mask = params.mask;
    q_tile -= lane;
    uint32_t any = 0, codes = 0;
    bool full = true;
    if (C::kMixtures && !mask.given()) {
      any = q_tile >= first;
    } else if (q_tile >= first) {
      int64_t word =
          (mask.plane(t.batch, head_q) * mask.by_key.rows + t.key0 / kCell) * mask.by_key.words + q_tile * kCells / 32;
      const int shift = q_tile * kCells % 32;
#pragma unroll 1
      for (int n = 0; n < C::kTileKv / kCell && t.key0 + n * kCell < t.seqlen_k; ++n) {
        if (C::kMixtures && n > 0) word += mask.by_key.words;
        const int64_t at = C::kMixtures ? word : word + n * mask.by_key.words;
        const uint32_t visible = mask.by_key.visible[at] >> shift & kAllCells,
                       partial = mask.by_key.partial[at] >> shift & kAllCells;
        any |= visible;
        full = full && visible == kAllCells && partial == 0;
#pragma unroll
        for (int cell = 0; cell < kCells; ++cell)
          codes |= ((visible >> cell & 1) | (partial >> cell & 1) << 1) << 2 * (n * kCells + cell);
      }
    }
    return {__ballot_sync(~0u, any != 0), full ? VisitedQTile::kAllCellsFull : codes};
  }
  // The visible Q tiles of a work tile: how many of all query heads, and a range of the Q tiles of a head that holds them.
  struct VisibleQTiles {
    int count = 0, begin = 0, end = 0;
  };
  __device__ __forceinline__ VisibleQTiles visible_q_tiles(const WorkTile &t) const {
    // Lane 0 may write them next, so it alone reads them.
    int begin = __shfl_sync(~0u, lane == 0 ? t.q_tile_begin : 0, 0),
        last = __shfl_sync(~0u, lane == 0 ? t.q_tile_end : 0, 0) - 1;
    if (!C::kMixtures || params.mask.given()) narrow_to_visible(t, begin, last);
    const int group = static_cast<int>(problem.group);
    int count = 0;
    for (int g = 0; g < group; ++g) {
      for (int q_tile = last; q_tile >= begin; q_tile -= 32)
        count += __popc(q_tiles_from(t, t.head_k * group + g, q_tile, begin).visible);
    }
    return {count, begin, last + 1};
  }
  __device__ __forceinline__ void set_q_tiles(const VisibleQTiles &x, WorkTile &t) const {
    if (x.count == 0) {
      t.q_tile_begin = t.q_tile_end = 0;
    } else {
      t.q_tile_begin = x.begin;
      t.q_tile_end = x.end;
    }
  }
  // Leaves out the Q tiles before the first one that the cell map shows to the work tile's keys, in any query head, and those behind the last one. A lane reads
  // the range of a row of cells.
  __device__ __forceinline__ void narrow_to_visible(const WorkTile &t, int &begin, int &last) const {
    constexpr int kRows = C::kTileKv / kCell, kCells = C::kTileQ / kCell;
    const CellBits &map = params.mask.by_key;
    int first_cell = kFarKey, cells_end = 0;
#pragma unroll 1
    for (int n = lane; n < kRows * static_cast<int>(problem.group); n += 32) {
      const int row = t.key0 / kCell + n % kRows;
      if (row >= map.rows) continue;
      const CellRange range =
          map.range(params.mask.plane(t.batch, t.head_k * static_cast<int>(problem.group) + n / kRows) * map.rows + row);
      first_cell = min(first_cell, range.begin);
      cells_end = max(cells_end, range.end);
    }
    begin = max(begin, __reduce_min_sync(~0u, first_cell) / kCells);
    last = min(last, (__reduce_max_sync(~0u, cells_end) + kCells - 1) / kCells - 1);
  }

  // Calls f(query head, Q tile, cell codes) for the Q tiles of the work tile, in the order of the main loop. With masks as data for the visible ones.
  template <typename F>
  __device__ __forceinline__ void for_each_q_tile(F f) const {
    const WorkTile &t = work();
    if constexpr (C::kHasDataMask) {
      // Counts in head_q: a register less than with a counter beside it.
      for (int head_q = t.head_k * static_cast<int>(problem.group); head_q < (t.head_k + 1) * static_cast<int>(problem.group);
           ++head_q) {
        for (int q_tile = t.q_tile_end - 1; q_tile >= t.q_tile_begin; q_tile -= 32) {
          QTileBits tiles = q_tiles_from(t, head_q, q_tile, t.q_tile_begin);
          for (; tiles.visible != 0; tiles.visible &= tiles.visible - 1) {
            const int n = __ffs(static_cast<int>(tiles.visible)) - 1;
            f(head_q, q_tile - n, __shfl_sync(~0u, tiles.cell_codes, n));
          }
        }
      }
    } else {
      for (int g = 0; g < static_cast<int>(problem.group); ++g) {
        const int head_q = t.head_k * static_cast<int>(problem.group) + g;
        const auto q_tile_at = rotated_q_tiles();
        for (int i = t.q_tile_end - 1; i >= t.q_tile_begin; --i) f(head_q, q_tile_at(i), VisitedQTile::kAllCellsFull);
      }
    }
  }

  // How many work tiles before this one see the Q tile: this one's position in the order in which they add to dq. The work tiles that bands and
  // lengths show to a Q tile are consecutive.
  __device__ __forceinline__ int dq_order_position(int q_tile, [[maybe_unused]] int head_q = 0) const {
    const int first = max(0, q_tile * C::kTileQ + work().band_first) / C::kTileKv, mine = work().key0 / C::kTileKv;
    if constexpr (!C::kHasDataMask) {
      return mine - first;
    } else {
      if (C::kMixtures && !params.mask.given()) return mine - first;
      // With masks as data, those of them that the cell map shows. A lane has the 16 work tiles of a word.
      constexpr int kTilesOfWord = 32 * kCell / C::kTileKv;
      const DataMask &mask = params.mask;
      const uint32_t *row =
          mask.by_query.visible +
          (mask.plane(work().batch, head_q) * mask.by_query.rows + q_tile * (C::kTileQ / kCell)) * mask.by_query.words;
      int position = 0;
#pragma unroll 1
      for (int word = first / kTilesOfWord + lane; word * kTilesOfWord < mine; word += 32) {
        uint32_t cells = row[word];
        if (C::kTileQ > kCell && q_tile * (C::kTileQ / kCell) + 1 < mask.by_query.rows)
          cells |= row[word + mask.by_query.words];
        // Bit 2 n is work tile n of the word.
        const uint32_t tiles = (cells | cells >> 1) & 0x55555555u;
        const int begin = max(first - word * kTilesOfWord, 0), end = min(mine - word * kTilesOfWord, kTilesOfWord);
        position += __popc(tiles & static_cast<uint32_t>(bits_below(2 * end) & ~bits_below(2 * begin)));
      }
      return __reduce_add_sync(~0u, position);
    }
  }

  const BackwardParams &params;
  const Problem &problem;
  WorkTile *const work_tiles;
  int work_stage = 0;  // of the current work tile
  const uint32_t smem;
  const int lane, warp;  // warp_ within the warpgroup
};

}  // namespace fa::cuda::sm90
