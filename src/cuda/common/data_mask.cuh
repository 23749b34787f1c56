// SPDX-License-Identifier: Apache-2.0
// Reading masks given as data (data_mask.h): bits of cells, and bits of the keys that one query sees in a partial cell.
#pragma once

#include "cuda/common/data_mask.h"
#include "cuda/common/ptx.cuh"

namespace fa::cuda {

constexpr int kFarKey = 1 << 30;  // beyond every key

// Bits [0, n).
__device__ __forceinline__ uint64_t bits_below(int n) { return n <= 0 ? 0 : n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; }
// Bits [begin, end).
__device__ __forceinline__ uint64_t bits_between(int begin, int end) { return bits_below(end) & ~bits_below(begin); }
// A distance in keys or cells, clamped so that 32 bits hold it.
__device__ __forceinline__ int clamped(int64_t n) {
  return static_cast<int>(n < -kFarKey ? -kFarKey : n > kFarKey ? kFarKey : n);
}

// Of cells [cell, cell + 32) of a row of cells; bit 0 is `cell`. Cells past the end of the row are 0.
__device__ __forceinline__ uint32_t cells_from(const uint32_t *row, int words, int cell) {
  const int word = cell >> 5;
  const uint32_t low = word < words ? row[word] : 0, high = word + 1 < words ? row[word + 1] : 0;
  return __funnelshift_r(low, high, cell & 31);
}

namespace detail {

// Keys [key0, key0 + 64) of one query that each kind of mask shows, as bits. key0 is a multiple of 64.
__device__ __forceinline__ uint64_t block_mask_bits(const DataMask &mask, int b, int h, int row, int key0) {
  const BlockMask &m = mask.block_mask;
  const uint8_t *blocks = m.data + b * m.batch_stride + h * m.head_stride + mask.mask_size_q.quotient(row) * m.row_stride;
  const int size = static_cast<int>(mask.mask_size_k.value), end = min(key0 + kCell, mask.max_keys);
  uint64_t bits = 0;
  int block = mask.mask_size_k.quotient(key0);
#pragma unroll 1
  for (int key = block * size; key < end; key += size, ++block) {
    if (blocks[block * m.col_stride] != 0) bits |= bits_between(key - key0, key - key0 + size);
  }
  return bits;
}

// The entries of one list: its first one, and their number.
struct BlockList {
  const int32_t *entries;
  int count;
};
__device__ __forceinline__ BlockList block_list(const BlockLists &lists, int b, int h, int block_row) {
  const int32_t count =
      lists.counts[b * lists.count_batch_stride + h * lists.count_head_stride + block_row * lists.count_row_stride];
  return {lists.indices + b * lists.batch_stride + h * lists.head_stride + block_row * lists.row_stride,
          min(max(count, 0), static_cast<int>(lists.max_blocks))};
}

__device__ __forceinline__ uint64_t block_list_bits(const DataMask &mask, int b, int h, int row, int key0) {
  const BlockLists &lists = mask.block_lists;
  const BlockList list = block_list(lists, b, h, mask.list_size_q.quotient(row));
  const int blocks = static_cast<int>(lists.blocks_k), size = mask.list_size_k;
  uint64_t bits = 0;
#pragma unroll 1
  for (int n = 0; n < list.count; ++n) {
    const int block = list.entries[n * lists.entry_stride];
    if (block >= 0 && block < blocks) bits |= bits_between(block * size - key0, block * size + size - key0);
  }
  return bits;
}

// Four bytes as four bits, 1 where the byte is not zero.
__device__ __forceinline__ uint32_t nonzero_bytes(uint32_t x) {
  const uint32_t top = ((x & 0x7F7F7F7Fu) + 0x7F7F7F7Fu | x) & 0x80808080u;
  return (top >> 7) * 0x10204080u >> 28;
}

template <bool kTogether = false>
__device__ __forceinline__ uint64_t element_mask_bits(const ElementMask &mask, int max_keys, int b, int h, int row, int key0) {
  const uint8_t *elements = mask.data + b * mask.batch_stride + h * mask.head_stride + row * mask.row_stride;
  if (mask.col_stride == 0) return ((mask.bits ? elements[0] & 1 : elements[0]) != 0) ? ~uint64_t{0} : 0;
  const int keys = min(max_keys - key0, kCell);
  uint64_t bits = 0;
  if (mask.bits) {
    elements += key0 / 8;
    if (keys == kCell && reinterpret_cast<uintptr_t>(elements) % 8 == 0) return *reinterpret_cast<const uint64_t *>(elements);
#pragma unroll 1
    for (int n = 0; n < (keys + 7) / 8; ++n) bits |= uint64_t{elements[n]} << 8 * n;
    return bits;
  }
  elements += key0 * mask.col_stride;
  if (mask.col_stride == 1 && keys == kCell && reinterpret_cast<uintptr_t>(elements) % 16 == 0) {
    constexpr int kUnroll = kTogether ? 4 : 1;
#pragma unroll kUnroll
    for (int n = 0; n < 4; ++n) {
      const uint4 x = reinterpret_cast<const uint4 *>(elements)[n];
      const uint32_t sixteen =
          nonzero_bytes(x.x) | nonzero_bytes(x.y) << 4 | nonzero_bytes(x.z) << 8 | nonzero_bytes(x.w) << 12;
      bits |= uint64_t{sixteen} << 16 * n;
    }
    return bits;
  }
#pragma unroll 1
  for (int n = 0; n < keys; ++n) bits |= uint64_t{elements[n * mask.col_stride] != 0} << n;
  return bits;
}

// The first row of the sequence as slices count it: over the packed tensor, or within the sequence.
__device__ __forceinline__ int64_t slice_origin(const Lengths &lengths, int b) {
  return lengths.cu != nullptr ? offset_of(lengths, b) : 0;
}

__device__ __forceinline__ uint64_t slice_bits(const DataMask &mask, const Problem &p, int b, int h, int row, int key0) {
  const int32_t *list = mask.slice_lists + (mask.plane(b, h) * mask.by_query.rows + row / kCell) * DataMask::kSliceList;
  const int64_t query = row + slice_origin(p.q_lengths, b), first_key = key0 + slice_origin(p.k_lengths, b);
  const int listed = list[0];
  const bool all = listed >= DataMask::kSliceList;  // the list is too short for them
  const int64_t count = all ? mask.slices.count : listed;
  uint64_t bits = 0;
#pragma unroll 1
  for (int64_t n = 0; n < count; ++n) {
    const Range keys = mask.slices[all ? n : list[1 + n]].keys(query);
    bits |= bits_between(clamped(keys.begin - first_key), clamped(keys.end - first_key));
  }
  return bits;
}

}  // namespace detail

// Keys [key0, key0 + 64) that the masks show to a query, as bits; key0 is a multiple of 64. Keys and queries past the end of the longest
// sequence may have any bit. With kTogether all bytes of a row are loaded before the first is used, which takes 16 registers.
template <bool kTogether = false>
__device__ __forceinline__ uint64_t visible_key_bits(const DataMask &mask, const Problem &p, int b, int h, int row, int key0) {
  if (row >= mask.max_queries || key0 >= mask.max_keys) return 0;
  uint64_t bits = ~uint64_t{0};
  if (mask.seqstart_k != nullptr) bits &= ~bits_below(max(mask.seqstart_k[b * mask.seqstart_k_stride], 0) - key0);
  if (mask.block_mask.data != nullptr) bits &= detail::block_mask_bits(mask, b, h, row, key0);
  if (mask.block_lists.given) bits &= detail::block_list_bits(mask, b, h, row, key0);
  if (mask.element_mask.given) bits &= detail::element_mask_bits<kTogether>(mask.element_mask, mask.max_keys, b, h, row, key0);
  if (mask.slices.given) bits &= detail::slice_bits(mask, p, b, h, row, key0);
  return bits;
}

// Of the 64 keys of a row, those that a lane holds in QkFragment (fragment.cuh): columns 8 j + 2 (lane & 3) + e as bits 2 j + e.
__device__ __forceinline__ uint32_t qk_fragment_bits(uint64_t keys, int lane) {
  keys = keys >> 2 * (lane & 3) & 0x0303030303030303;
  keys = (keys | keys >> 6) & 0x000F000F000F000F;
  keys = (keys | keys >> 12) & 0x000000FF000000FF;
  return static_cast<uint32_t>(keys | keys >> 24) & 0xFFFF;
}

// Whether the masks show a pair.
__device__ __forceinline__ bool is_pair_visible(const DataMask &mask, const Problem &p, int b, int h, int row, int key) {
  return (visible_key_bits(mask, p, b, h, row, key / kCell * kCell) >> (key % kCell) & 1) != 0;
}

// Whether the masks show some pair of queries [row0, row_end) and keys [key0, key_end). All lanes of a warp get the same arguments.
__device__ __forceinline__ bool any_visible(const DataMask &mask, int b, int h, int row0, int row_end, int key0, int key_end) {
  const CellBits &cells = mask.by_query;
  const uint32_t *plane = cells.visible + mask.plane(b, h) * cells.rows * cells.words;
  for (int row = row0 / kCell; row * kCell < row_end; ++row)
    for (int cell = key0 / kCell; cell * kCell < key_end; ++cell)
      if ((plane[row * cells.words + cell / 32] >> cell % 32 & 1) != 0) return true;
  return false;
}

// The first word, in by_query, of the row of cells that a query belongs to.
__device__ __forceinline__ int64_t row_of_cells(const DataMask &mask, int b, int h, int row) {
  return (mask.plane(b, h) * mask.by_query.rows + row / kCell) * mask.by_query.words;
}

// The last visible cell at or below `cell` of a row of cells; a number below `first` if none is from there on. 0 <= first <= cell.
__device__ __forceinline__ int last_visible_cell(const uint32_t *row, int cell, int first) {
  uint32_t below = (2u << (cell & 31)) - 1;  // bits up to the cell's
#pragma unroll 1
  for (int word = cell >> 5; word >= first >> 5; --word) {
    const uint32_t visible = row[word] & below;
    if (visible != 0) return word * 32 + 31 - __clz(static_cast<int>(visible));
    below = ~0u;
  }
  return first - 1;
}

// visible_key_bits(), but the masks themselves are read in partial cells alone.
__device__ __forceinline__ uint64_t visible_key_bits_by_map(const DataMask &mask, const Problem &p, int b, int h, int row,
                                                            int key0) {
  if (row >= mask.max_queries || key0 >= mask.max_keys) return 0;
  const int cell = key0 / kCell;
  const int64_t word = row_of_cells(mask, b, h, row) + cell / 32;
  if ((mask.by_query.partial[word] >> cell % 32 & 1) != 0) return visible_key_bits(mask, p, b, h, row, key0);
  return (mask.by_query.visible[word] >> cell % 32 & 1) != 0 ? ~uint64_t{0} : 0;
}

}  // namespace fa::cuda
