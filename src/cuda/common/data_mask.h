// SPDX-License-Identifier: Apache-2.0
// Masks given as data, as kernels see them: block mask, block lists, element mask, slices and the first key of left padding (seqstart_k).
//
// All of them become one thing. The cell map says of each cell of 64 queries x 64 keys whether the masks show some pair of it (visible), and
// whether they may hide some pair (partial). Kernels for the map visit visible cells alone, and ask for single pairs in partial cells alone
// (data_mask.cuh). Bands and lengths are not part of the map, kernels apply them as ever.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/common/divisor.h"

namespace fa::cuda {

constexpr int kCell = 64;  // queries and keys

// From the first visible cell of a row of cells to the last: [begin, end). Where no cell is visible, begin lies beyond every cell and end is 0: the least begin
// and the greatest end of several rows bound the visible cells of all of them.
struct CellRange {
  int32_t begin, end;
};

// Bits of cells in the workspace, contiguous: (planes, rows of cells, words), bit c % 32 of word c / 32 for cell c of a row.
struct CellBits {
  uint32_t *visible = nullptr;
  uint32_t *partial = nullptr;  // of cells that are visible
  int32_t rows = 0, words = 0;  // of a plane

  // Of DataMask::by_key: the range of the visible cells of row `row`, counted over all planes. The ranges lie in front of `visible`, the last one first, and so
  // need no pointer of their own, which would move what lies behind it in the parameters of every kernel.
  FA_HD CellRange &range(int64_t row) const { return reinterpret_cast<CellRange *>(visible)[-1 - row]; }
};

struct DataMask : MaskSources {
  BlockMask block_mask;
  Divisor mask_size_q, mask_size_k;  // of block_mask; sizes above every sequence's length are clamped
  Divisor list_size_q;               // of block_lists
  int32_t list_size_k = 0;
  // A plane is of one sequence and query head, or of all that share it: plane b * batch_planes + h * head_planes.
  int32_t batch_planes = 0, head_planes = 0;
  int32_t max_queries = 0, max_keys = 0;  // no sequence is longer
  CellBits by_query;                      // rows of cells are queries
  CellBits by_key;                        // its transpose, for backward; else null
  // (planes, by_query.rows, kSliceList): how many slices meet the queries of a row of cells, and the numbers of the first of them.
  int32_t *slice_lists = nullptr;

  static constexpr int kSliceList = 8;

  // Whether there is a map, that is, any mask.
  FA_HD bool given() const { return by_query.visible != nullptr; }
  FA_HD int64_t plane(int b, int h) const { return int64_t{b} * batch_planes + h * head_planes; }
};

}  // namespace fa::cuda
