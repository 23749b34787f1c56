// SPDX-License-Identifier: Apache-2.0
// Masks as data (common/data_mask.h) in the extend kernel: which KV tiles the producer and the consumers visit, and which pairs of a tile are hidden.
#pragma once

#include <math_constants.h>

#include "cuda/common/natural_scores.cuh"
#include "cuda/kernels/extend/epilogue.cuh"

namespace fa::cuda::extend {

// Notes on KV tiles, as a warp keeps them: the last one that it has read, and how many it has read or written. Other kernels have none.
struct Notes {
  uint32_t last, count = 0;
};
struct NoNotes {};
template <class C>
using NotesOf = std::conditional_t<C::kMasks, Notes, NoNotes>;

// What the cell map says of the KV tiles of a work unit, whose rows may be of several rows of cells and of heads with masks of their own. The producer warps
// ask, and leave out tiles without a visible pair.
template <class C>
class VisitedTiles {
 public:
  // The first visited tile from `tile` on, or `end`.
  __device__ __forceinline__ int next(int tile, int end, const Params &a, int batch, int head, int row0, int rows, int lane) {
    while (tile < end) {
      if (tile / kTiles != word_) {
        word_ = tile / kTiles;
        load(a, batch, head, row0, rows, lane);
      }
      const uint32_t visible = visible_ >> tile % kTiles * kCells;
      if (visible != 0) return min(tile + (__ffs(static_cast<int>(visible)) - 1) / kCells, end);
      tile = (word_ + 1) * kTiles;
    }
    return end;
  }
  // The tile that next() has found, and in the lowest bit whether masks as data may hide some pair of it.
  __device__ __forceinline__ uint32_t note(int tile) const {
    return static_cast<uint32_t>(tile) << 1 | ((full_ >> tile % kTiles * kCells & kTileCells) != kTileCells);
  }

 private:
  static constexpr int kCells = C::kKvTile / kCell, kTiles = 32 / kCells;  // cells of a tile, and tiles of a word of the map
  static constexpr uint32_t kTileCells = (1u << kCells) - 1;

  // Each lane reads the words of some heads. Not through L1, as all that the launches before may have written.
  __device__ __forceinline__ void load(const Params &a, int batch, int head, int row0, int rows, int lane) {
    const DataMask &mask = a.mask;
    const CellBits &cells = mask.by_query;
    const int heads = static_cast<int>(a.group.value), planes = mask.head_planes != 0 ? heads : 1,
              row = a.group.quotient(row0) / kCell, row_end = a.group.quotient(row0 + rows - 1) / kCell + 1;
    uint32_t visible = 0, full = ~0u;
    if (word_ < cells.words) {
#pragma unroll 1
      for (int plane = lane; plane < planes; plane += 32) {
        const int64_t first = mask.plane(batch, head * heads + plane) * cells.rows;
#pragma unroll 1
        for (int n = row; n < row_end; ++n) {
          const int64_t at = (first + n) * cells.words + word_;
          const uint32_t of_row = __ldcg(cells.visible + at);
          visible |= of_row;
          full &= of_row & ~__ldcg(cells.partial + at);
        }
      }
    }
    visible_ = __reduce_or_sync(~0u, visible);
    full_ = __reduce_and_sync(~0u, full) & visible_;
  }

  int word_ = -1;
  uint32_t visible_ = 0, full_ = 0;  // cells of the word in which some pair is visible, and all pairs
};

// The pairs of a warp's 16 rows and the cells of a tile that masks as data hide: for each cell 16 bits of each of the lane's two rows of S
// (pair_bit()). Each lane reads the keys of a row in one cell.
template <class C, int kCells>
__device__ __forceinline__ void hidden_by_data(const WarpRows<C> &rows, int key0, uint32_t (&hidden)[kCells]) {
  const int lane = opaque(rows.cta.lane()), row = rows.first_row() + lane % 16, cell = lane / 16;
  uint64_t keys = 0;
  if (cell < kCells && row < rows.work->rows) {
    keys = visible_key_bits</*kTogether=*/true>(rows.cta.params().mask, rows.cta.problem(), rows.work->batch, rows.head_of(row),
                                                rows.token_of(row), key0 + cell * kCell);
  }
#pragma unroll
  for (int c = 0; c < kCells; ++c) {
    uint32_t shown = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) shown |= qk_fragment_bits(__shfl_sync(~0u, keys, 16 * c + (lane >> 2) + 8 * r), lane) << 16 * r;
    hidden[c] = ~shown;
  }
}
template <int kScores, int kCells>
__device__ __forceinline__ void hide(float (&s)[kScores], const uint32_t (&hidden)[kCells]) {
#pragma unroll
  for (int n = 0; n < kScores; ++n)
    if ((hidden[n / 32] >> pair_bit(n % 32) & 1) != 0) s[n] = -CUDART_INF_F;
}

}  // namespace fa::cuda::extend
