// SPDX-License-Identifier: Apache-2.0
// Swizzled tiles of 16-bit rows in shared memory, and how a CTA fills them from tensors of any stride, alignment and length, paged or not.
#pragma once

#include "cuda/common/divisor.h"
#include "cuda/common/ptx.cuh"

namespace fa::cuda {

// Byte offset of 16-byte vector `vector` of row `row`. Rows of 128 n bytes XOR the low three bits of the vector index with the row, rows of
// 128 n + 64 bytes the low two bits with the row pair, rows of 32 bytes the one bit with the row quad. In each case the same vector of eight
// consecutive rows lies in different banks.
template <int kPitchBytes>
__device__ __forceinline__ uint32_t swizzled(int row, int vector) {
  static_assert(kPitchBytes % 64 == 0 || kPitchBytes == 32);
  if constexpr (kPitchBytes % 128 == 0) {
    return row * kPitchBytes + ((vector ^ (row & 7)) << 4);
  } else if constexpr (kPitchBytes == 32) {
    return row * kPitchBytes + ((vector ^ ((row >> 2) & 1)) << 4);
  } else {
    return row * kPitchBytes + ((vector ^ ((row >> 1) & 3)) << 4);
  }
}

// Where the rows of one head of one sequence lie in global memory.
template <typename Element>
struct RowSource {
  const Element *base;        // row 0, element 0; paged: page 0, row 0 of the head
  int64_t row_stride;         // elements
  int rows;                   // rows from here on are read as zero
  int columns;                // columns from here on are read as zero
  bool vectors;               // 16-byte loads are legal: base, strides and `columns` are multiples of 8 elements
  const int32_t *page_table;  // null: not paged
  int64_t page_entry_stride;
  int64_t page_stride;  // elements
  Divisor page_size;

  __device__ __forceinline__ const Element *row(int r) const {
    if (page_table == nullptr) return base + r * row_stride;
    const int page = page_size.quotient(r);
    return base + page_table[page * page_entry_stride] * page_stride +
           (r - page * static_cast<int>(page_size.value)) * row_stride;
  }

  // Whether load_whole_tile can read this tile.
  __device__ __forceinline__ bool whole(int first, int tile_rows) const {
    return vectors && page_table == nullptr && first + tile_rows <= rows;
  }
};

// Eight elements from memory of any alignment, zero from `valid` on, to 16 bytes of shared memory.
template <typename Element>
__device__ __forceinline__ void copy_elements(uint32_t dst, const Element *src, int valid) {
  uint32_t words[4] = {0, 0, 0, 0};
  const auto *bits = reinterpret_cast<const unsigned short *>(src);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < valid) words[e / 2] |= static_cast<uint32_t>(bits[e]) << (16 * (e & 1));
  }
  st_shared_16(dst, words[0], words[1], words[2], words[3]);
}

// Which 16-byte vectors of a tile of kRows x kColumns a thread loads: one vector column, every kStep-th row. The last threads load none where
// the number of vectors per row is not a power of two, or rows are few.
template <int kRows, int kColumns, int kThreads>
struct TileThreadMap {
  static constexpr int kPitch = kColumns * 2, kVectors = kColumns / 8;
  static constexpr int step() {
    int rows = 1;
    while (2 * rows * kVectors <= kThreads && 2 * rows <= kRows) rows *= 2;
    return rows;
  }
  static constexpr int kStep = step(), kLoads = kRows / kStep;
  static_assert(kVectors <= kThreads && kRows % kStep == 0);
  const int thread;  // of kThreads

  __device__ __forceinline__ bool any() const { return kStep * kVectors == kThreads || thread < kStep * kVectors; }
  __device__ __forceinline__ int row(int i) const { return thread / kVectors + i * kStep; }
  __device__ __forceinline__ int vector() const { return thread % kVectors; }
};

// Fills a tile from rows first .. first + kRows - 1, all of which exist: no row is checked, and what differs between threads is one
// offset. Arrives by cp.async; the caller commits and waits.
template <int kRows, int kColumns, int kThreads, typename Element>
__device__ __forceinline__ void load_full_tile(uint32_t tile, const RowSource<Element> &source, int first,
                                               int thread = static_cast<int>(threadIdx.x)) {
  using Map = TileThreadMap<kRows, kColumns, kThreads>;
  const Map map{thread};
  if (!map.any()) return;
  const Element *base = source.base + first * source.row_stride;
  const int64_t offset = map.row(0) * source.row_stride + map.vector() * 8;
  const int bytes = map.vector() * 8 < source.columns ? 16 : 0;
#pragma unroll
  for (int i = 0; i < Map::kLoads; ++i) {
    cp_async_16(tile + swizzled<Map::kPitch>(map.row(i), map.vector()), base + i * Map::kStep * source.row_stride + offset,
                bytes);
  }
}

// Fills a tile from any rows. address_of(r) is row r of the tile, or null for zeros; columns from `columns` on are zero. Vector
// rows arrive by cp.async, others before the next barrier.
template <typename Element, int kRows, int kColumns, int kThreads, typename AddressOf>
__device__ __forceinline__ void load_rows(uint32_t tile, bool vectors, int columns, AddressOf address_of,
                                          int thread = static_cast<int>(threadIdx.x)) {
  using Map = TileThreadMap<kRows, kColumns, kThreads>;
  const Map map{thread};
  if (!map.any()) return;
  const int c = map.vector();
  if (vectors) {
#pragma unroll 2
    for (int i = 0; i < Map::kLoads; ++i) {
      const int r = map.row(i);
      const Element *row = address_of(r);
      const bool valid = row != nullptr && c * 8 < columns;
      if (valid) {
        cp_async_16(tile + swizzled<Map::kPitch>(r, c), row + c * 8);
      } else {
        st_shared_16(tile + swizzled<Map::kPitch>(r, c), 0, 0, 0, 0);
      }
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < Map::kLoads; ++i) {
      const int r = map.row(i);
      const Element *row = address_of(r);
      copy_elements(tile + swizzled<Map::kPitch>(r, c), row + c * 8, row != nullptr ? columns - c * 8 : 0);
    }
  }
}

// Either of the two, as rows first .. first + kRows - 1 of the source allow.
template <int kRows, int kColumns, int kThreads, typename Element>
__device__ __forceinline__ void load_tile(uint32_t tile, const RowSource<Element> &source, int first,
                                          int thread = static_cast<int>(threadIdx.x)) {
  if (source.whole(first, kRows)) {
    load_full_tile<kRows, kColumns, kThreads>(tile, source, first, thread);
  } else {
    load_rows<Element, kRows, kColumns, kThreads>(
        tile, source.vectors, source.columns, [&](int r) { return first + r < source.rows ? source.row(first + r) : nullptr; },
        thread);
  }
}

}  // namespace fa::cuda
