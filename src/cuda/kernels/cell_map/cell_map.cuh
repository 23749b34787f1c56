// SPDX-License-Identifier: Apache-2.0
// The cell map of masks given as data. A warp, or with an element mask a CTA, finds the bits of 32 neighbouring cells of 64 queries x 64 keys: lane l has cell
// l of them.
//
// Every kind of mask gives two bits for a cell: `any` pair is visible, `all` pairs are. A cell is visible where every kind has `any`, and
// partial where some kind lacks `all`. Both may err on the safe side: two masks may each show pairs of a cell and none in common, and slices
// that cover a cell only together make it partial. Queries and keys past the end of a sequence have no say.
#pragma once

#include "cuda/common/data_mask.cuh"
#include "cuda/common/score_text.cuh"
#include "cuda/kernels/cell_map/cell_map.h"

namespace fa::cuda::cell_map_kernel {

constexpr int kWarps = kCellMapThreads / 32;

// What a kind of mask says of a lane's cell.
struct Cell {
  bool any = false, all = true;
};

// Queries [row0, row_end) of sequence b and head h, and this lane's keys [key0, key_end).
struct Cells {
  int b, h;
  int row0, row_end, key0, key_end;
  int word_key0, word_key_end;  // keys of all lanes
  int lane;

  __device__ __forceinline__ int keys() const { return max(key_end - key0, 0); }
};

__device__ __forceinline__ Cell from_block_mask(const DataMask &mask, const Cells &c) {
  const BlockMask &m = mask.block_mask;
  Cell cell;
  if (c.keys() == 0) return cell;
  const uint8_t *blocks = m.data + c.b * m.batch_stride + c.h * m.head_stride;
  const int row_end = mask.mask_size_q.quotient(c.row_end - 1), col_end = mask.mask_size_k.quotient(c.key_end - 1);
  for (int row = mask.mask_size_q.quotient(c.row0); row <= row_end; ++row)
    for (int col = mask.mask_size_k.quotient(c.key0); col <= col_end; ++col) {
      const bool visible = blocks[row * m.row_stride + col * m.col_stride] != 0;
      cell.any |= visible;
      cell.all &= visible;
    }
  return cell;
}

// Lanes take the entries of a list in turn, and mark the cells that a block touches and those that it fills.
__device__ __forceinline__ Cell from_block_lists(const DataMask &mask, const Cells &c) {
  const BlockLists &lists = mask.block_lists;
  const int size = mask.list_size_k, row_end = mask.list_size_q.quotient(c.row_end - 1);
  Cell cell;
  for (int row = mask.list_size_q.quotient(c.row0); row <= row_end; ++row) {
    const detail::BlockList list = detail::block_list(lists, c.b, c.h, row);
    uint32_t touched = 0, filled = 0;
    for (int n = c.lane; n < list.count; n += 32) {
      const int block = list.entries[n * lists.entry_stride];
      if (block < 0 || block >= static_cast<int>(lists.blocks_k)) continue;
      const int begin = block * size, end = begin + size;
      if (begin >= c.word_key_end || end <= c.word_key0) continue;
      const int from = max(begin - c.word_key0, 0), to = end - c.word_key0;
      // A block at the end of the keys fills its last cell, however long that is.
      const int filled_end = end >= c.word_key_end ? 32 : to / kCell;
      touched |= static_cast<uint32_t>(bits_between(from / kCell, (to + kCell - 1) / kCell));
      filled |= static_cast<uint32_t>(bits_between((from + kCell - 1) / kCell, filled_end));
    }
    touched = __reduce_or_sync(~0u, touched);
    filled = __reduce_or_sync(~0u, filled);
    cell.any |= (touched >> c.lane & 1) != 0;
    cell.all &= (filled >> c.lane & 1) != 0;
  }
  return cell;
}

// ands and ors of a warp's rows of an element mask, every kWarps-th from `first` on. kLoads rows are loaded at a time; the last ones more than once.
template <int kLoads, typename Row>
__device__ __forceinline__ void add_rows(int first, int rows, uint64_t &any, uint64_t &all, Row row) {
  for (int n = first; n < rows; n += kLoads * kWarps) {
    uint64_t bits[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) bits[i] = row(min(n + i * kWarps, rows - 1));
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      any |= bits[i];
      all &= bits[i];
    }
  }
}

// The warps of a CTA share the rows of the same cells: a row of 2048 keys is all that a warp has in flight at a time. All of them get the result.
__device__ __forceinline__ Cell from_element_mask(const DataMask &mask, const Cells &c) {
  __shared__ uint32_t any_cells, all_cells;
  if (threadIdx.x == 0) {
    any_cells = 0;
    all_cells = ~0u;
  }
  __syncthreads();
  const ElementMask &m = mask.element_mask;
  const uint64_t keys = bits_below(c.keys());
  const int rows = m.row_stride == 0 ? 1 : c.row_end - c.row0,  // 1: all queries share a row
      warp = static_cast<int>(threadIdx.x >> 5);
  uint64_t any = 0, all = ~uint64_t{0};
  const uint8_t *first = m.data + c.b * m.batch_stride + c.h * m.head_stride + c.row0 * m.row_stride + c.key0 / 8;
  if (keys == 0) {  // a lane past the keys reads nothing
  } else if (m.bits && m.col_stride != 0 && c.keys() == kCell && (reinterpret_cast<uintptr_t>(first) | m.row_stride) % 8 == 0) {
    add_rows<8>(warp, rows, any, all,
                [&](int n) { return __ldcs(reinterpret_cast<const unsigned long long *>(first + n * m.row_stride)); });
  } else {
    add_rows<4>(warp, rows, any, all, [&](int n) {
      return detail::element_mask_bits</*kTogether=*/true>(m, mask.max_keys, c.b, c.h, c.row0 + n, c.key0);
    });
  }
  const uint32_t has_any = __ballot_sync(~0u, (any & keys) != 0), has_all = __ballot_sync(~0u, (~all & keys) == 0);
  if (c.lane == 0) {
    atomicOr(&any_cells, has_any);
    atomicAnd(&all_cells, has_all);
  }
  __syncthreads();
  return {(any_cells >> c.lane & 1) != 0, (all_cells >> c.lane & 1) != 0};
}

// 32 slices at a time: a lane tests one against the queries and the keys of all lanes. Then every lane looks at each that meets them.
__device__ __forceinline__ Cell from_slices(const DataMask &mask, const Cells &c, int64_t q_origin, int64_t k_origin,
                                            int32_t *list) {
  Cell cell{false, false};
  const int64_t first_row = c.row0 + q_origin, last_row = c.row_end - 1 + q_origin;
  int listed = 0;
  for (int64_t from = 0; from < mask.slices.count; from += 32) {
    Slice s{};
    if (from + c.lane < mask.slices.count) s = mask.slices[from + c.lane];
    const int64_t top = first_row > s.q_begin ? first_row : s.q_begin, bottom = last_row < s.q_end - 1 ? last_row : s.q_end - 1;
    const bool meets_rows = s.known() && top <= bottom;
    // Ranges of keys begin and end later with each query.
    const int64_t begin = s.keys(top).begin - k_origin, end = s.keys(bottom).end - k_origin;
    const int64_t all_begin = s.keys(last_row).begin - k_origin, all_end = s.keys(first_row).end - k_origin;
    const bool all_rows = meets_rows && top == first_row && bottom == last_row;
    const uint32_t in_rows = __ballot_sync(~0u, meets_rows);
    if (list != nullptr && meets_rows) {
      const int at = listed + __popc(in_rows & ((1u << c.lane) - 1));
      if (at < DataMask::kSliceList - 1) list[1 + at] = static_cast<int32_t>(from + c.lane);
    }
    listed += __popc(in_rows);
    uint32_t hits = __ballot_sync(~0u, meets_rows && begin < c.word_key_end && end > c.word_key0);
    for (; hits != 0; hits &= hits - 1) {
      const int source = __ffs(static_cast<int>(hits)) - 1;
      const int64_t its_begin = __shfl_sync(~0u, begin, source), its_end = __shfl_sync(~0u, end, source);
      cell.any |= its_begin < c.key_end && its_end > c.key0;
      const int64_t its_all_begin = __shfl_sync(~0u, all_begin, source), its_all_end = __shfl_sync(~0u, all_end, source);
      cell.all |=
          __shfl_sync(~0u, static_cast<int>(all_rows), source) != 0 && its_all_begin <= c.key0 && its_all_end >= c.key_end;
    }
  }
  if (list != nullptr && c.lane == 0) list[0] = min(listed, DataMask::kSliceList);
  return cell;
}

// The text judges a cell as a tile; without tile() every pair is asked for.
__device__ __forceinline__ Cell from_score_text(const CellMapParams &a, const Cells &c, int queries, int keys) {
  if (c.keys() == 0) return {};
  const auto start = [&](const Lengths &lengths) { return lengths.cu != nullptr ? sequence_of(lengths, c.b).start : 0; };
  const ScorePlace place{c.b, c.h, queries, keys, start(a.q_lengths), start(a.k_lengths)};
  const ScoreText text{place, score_text_args(a)};
  if constexpr (ScoreText::kTile) {
    const int answer = text.tile(c.row0, c.key0, c.row_end - c.row0, c.keys());
    return {answer != 1, answer == 2};
  }
  Cell cell;
#pragma unroll 1
  for (int row = c.row0; row < c.row_end; ++row)
#pragma unroll 4
    for (int key = c.key0; key < c.key_end; ++key) {
      const bool visible = text.visible(row, key);
      cell.any |= visible;
      cell.all &= visible;
    }
  return cell;
}

__device__ __forceinline__ void find_cells(const CellMapParams &a) {
  pdl_launch_dependents();
  pdl_wait();
  const DataMask &mask = a.mask;
  const CellBits &map = mask.by_query;
  const int64_t index = has_cta_for_word(mask) ? blockIdx.x : int64_t{blockIdx.x} * kWarps + (threadIdx.x >> 5),
                strip = index / map.words;
  if (index >= int64_t{a.planes} * map.rows * map.words) return;
  const auto plane = static_cast<int>(strip / map.rows);
  const int row = static_cast<int>(strip - int64_t{plane} * map.rows), word = static_cast<int>(index - strip * map.words);
  const auto lane = static_cast<int>(threadIdx.x & 31);

  Cells c;
  c.lane = lane;
  c.b = plane / a.head_planes;  // 0 where sequences share a plane
  c.h = plane % a.head_planes;
  int queries = mask.max_queries, keys = mask.max_keys;
  int64_t q_origin = 0, k_origin = 0;
  if (mask.batch_planes != 0) {
    const Sequence q = sequence_of(a.q_lengths, c.b), k = sequence_of(a.k_lengths, c.b);
    queries = static_cast<int>(q.len);
    keys = static_cast<int>(k.len);
    q_origin = detail::slice_origin(a.q_lengths, c.b);
    k_origin = detail::slice_origin(a.k_lengths, c.b);
  }
  c.row0 = row * kCell;
  c.row_end = min(c.row0 + kCell, queries);
  c.word_key0 = word * 32 * kCell;
  c.word_key_end = min(c.word_key0 + 32 * kCell, keys);
  c.key0 = c.word_key0 + lane * kCell;
  c.key_end = min(c.key0 + kCell, keys);

  bool any = c.row0 < c.row_end && c.key0 < c.key_end, all = true;
  if (__any_sync(~0u, any)) {
    const auto add = [&](const Cell &cell) {
      any &= cell.any;
      all &= cell.all;
    };
    if (mask.element_mask.given) {
      add(from_element_mask(mask, c));
      if (threadIdx.x >= 32) return;  // the rest is for the first warp
    }
    if (mask.seqstart_k != nullptr) {
      const int64_t first = mask.seqstart_k[c.b * mask.seqstart_k_stride];
      add({first < c.key_end, first <= c.key0});
    }
    if (mask.block_mask.data != nullptr) add(from_block_mask(mask, c));
    if (mask.block_lists.given) add(from_block_lists(mask, c));
    if constexpr (ScoreText::kGiven) add(from_score_text(a, c, queries, keys));
    if (mask.slices.given) {
      int32_t *list = word == 0 ? mask.slice_lists + strip * DataMask::kSliceList : nullptr;
      add(from_slices(mask, c, q_origin, k_origin, list));
    }
  } else if (has_cta_for_word(mask) && threadIdx.x >= 32) {
    return;
  } else if (mask.slices.given && word == 0 && lane == 0) {
    mask.slice_lists[strip * DataMask::kSliceList] = 0;
  }
  // Empty ranges, which the kernel that transposes the map widens. In forward by_key has no rows.
  const CellBits &to = mask.by_key;
  const int to_row = word * 32 + lane;
  if (row == 0 && to_row < to.rows) to.range(int64_t{plane} * to.rows + to_row) = {kFarKey, 0};
  const uint32_t visible = __ballot_sync(~0u, any), partial = __ballot_sync(~0u, any && !all);
  if (lane == 0) {
    map.visible[index] = visible;
    map.partial[index] = partial;
  }
}

}  // namespace fa::cuda::cell_map_kernel
