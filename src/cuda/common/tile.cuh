// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit rows in shared memory: how they are swizzled, and how a block of threads fills them from tensors of any
// stride, alignment and length, paged or not.
#pragma once

#include "cuda/common/ptx.cuh"

namespace fa::cuda {

// Byte offset of 16-byte chunk `chunk` of row `row`. Rows of 128 n bytes XOR the chunk's low three bits with the row, rows of
// 128 n + 64 bytes its low two bits with the row pair: either way eight consecutive rows of one chunk lie in different banks.
template <int kPitchBytes>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  static_assert(kPitchBytes % 64 == 0);
  if constexpr (kPitchBytes % 128 == 0) {
    return row * kPitchBytes + ((chunk ^ (row & 7)) << 4);
  } else {
    return row * kPitchBytes + ((chunk ^ ((row >> 1) & 3)) << 4);
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
  int page_size;

  __device__ __forceinline__ const Element *row(int r) const {
    if (page_table == nullptr) return base + r * row_stride;
    const int page = r / page_size;
    return base + page_table[page * page_entry_stride] * page_stride + (r - page * page_size) * row_stride;
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

// Fills a tile of kRows x kColumns from rows first .. first + kRows - 1. Vector sources arrive by cp.async (the caller commits and
// waits), others before the next barrier.
template <int kRows, int kColumns, int kThreads, typename Element>
__device__ __forceinline__ void load_tile(uint32_t tile, const RowSource<Element> &source, int first) {
  constexpr int kPitch = kColumns * 2, kChunks = kColumns / 8, kLoads = kRows * kChunks / kThreads;
  static_assert(kRows * kChunks % kThreads == 0);
  const int thread = static_cast<int>(threadIdx.x);
  // Where the i-th chunk of this thread lies; the column is the same for all of them when the threads cover whole rows.
  const auto row_of = [&](int i) {
    if constexpr (kThreads % kChunks == 0) return thread / kChunks + i * (kThreads / kChunks);
    return (thread + i * kThreads) / kChunks;
  };
  const auto chunk_of = [&](int i) { return kThreads % kChunks == 0 ? thread % kChunks : (thread + i * kThreads) % kChunks; };

  if (source.vectors && source.page_table == nullptr && first + kRows <= source.rows) {
    // The usual case: no row is checked, and what differs between threads is one offset.
    const Element *base = source.base + first * source.row_stride;
    if constexpr (kThreads % kChunks == 0) {
      const int64_t offset = row_of(0) * source.row_stride + chunk_of(0) * 8;
      const int bytes = chunk_of(0) * 8 < source.columns ? 16 : 0;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        cp_async_16(tile + swizzled<kPitch>(row_of(i), chunk_of(0)),
                    base + i * (kThreads / kChunks) * source.row_stride + offset, bytes);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int r = row_of(i), c = chunk_of(i);
        cp_async_16(tile + swizzled<kPitch>(r, c), base + r * source.row_stride + c * 8, c * 8 < source.columns ? 16 : 0);
      }
    }
    return;
  }
#pragma unroll 2
  for (int i = 0; i < kLoads; ++i) {
    const int r = row_of(i), c = chunk_of(i);
    const bool valid = c * 8 < source.columns && first + r < source.rows;
    const uint32_t dst = tile + swizzled<kPitch>(r, c);
    const Element *src = valid ? source.row(first + r) + c * 8 : source.base;
    if (source.vectors) {
      cp_async_16(dst, src, valid ? 16 : 0);
    } else {
      copy_elements(dst, src, valid ? source.columns - c * 8 : 0);
    }
  }
}

}  // namespace fa::cuda
