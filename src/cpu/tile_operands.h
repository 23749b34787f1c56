// SPDX-License-Identifier: Apache-2.0
// Where the elements of an operand lie in its tiles of 16 x 32 bf16 numbers, 1 KiB each. There are two formats:
//
//   pairs  what tdpbf16ps and vdpbf16ps read
//     left   rows one after another
//     right  elements (2i, n) and (2i + 1, n) next to each other: row i of a tile has these pairs of 16 columns
//   quads  what bfmmla reads
//     left   four elements of row 2i, then the same four of row 2i + 1, then the next four of both
//     right  the same of the transpose: a tile has 16 columns of 32 elements
#pragma once

#include "cpu/simd.h"
#include "cpu/tile.h"

namespace fa::cpu::FA_ISA {

constexpr int64_t kTilePanel = 2 * kTileRows;  // keys, or columns of values, whose two tiles lie next to each other

#if defined(FA_TARGET_NEON_BF16)
constexpr bool kQuads = true;
constexpr int64_t kRightRows = 4;  // rows of a right operand that lie next to each other

static_assert(kWidth == 4);

// Element (r, k) of a left tile; those up to the next multiple of kWidth follow. Neither is negative: shifts are their quotients.
FA_INLINE int64_t left_at(int64_t r, int64_t k) { return (r >> 1) * (2 * kTileDepth) + (k >> 2) * 8 + (r & 1) * 4 + (k & 3); }

// Elements [k, k + 2 kWidth) of row r of a left tile.
FA_INLINE void store_left(uint16_t *tile, int64_t r, int64_t k, I x) {
  uint16_t *const to = tile + left_at(r, k);
  Simd::store_halves(to, to + 8, x);
}

// Elements [c, c + 2 kWidth) of rows k .. k + 3 of a right operand, of a panel's two tiles.
FA_INLINE void store_right(uint16_t *tiles, int64_t k, int64_t c, const I (&rows)[kRightRows]) {
  I upper[2], lower[2];  // pairs of the columns c .. c + 3 and c + 4 .. c + 7
  Simd::interleave_u16(rows[0], rows[1], upper[0], upper[1]);
  Simd::interleave_u16(rows[2], rows[3], lower[0], lower[1]);
  uint16_t *to = tiles + c / kTileRows * kTileBf16 + left_at(c % kTileRows, k);
  for (int i = 0; i < 2; ++i) {
    I first, rest;
    Simd::interleave_u32(upper[i], lower[i], first, rest);
    Simd::istore(reinterpret_cast<uint32_t *>(to), first);
    Simd::istore(reinterpret_cast<uint32_t *>(to + 2 * kTileDepth), rest);
    to += 4 * kTileDepth;
  }
}
#else
constexpr bool kQuads = false;
constexpr int64_t kRightRows = 2;

FA_INLINE int64_t left_at(int64_t r, int64_t k) { return r * kTileDepth + k; }

FA_INLINE void store_left(uint16_t *tile, int64_t r, int64_t k, I x) {
  Simd::istore(reinterpret_cast<uint32_t *>(tile + left_at(r, k)), x);
}

FA_INLINE void store_right(uint16_t *tiles, int64_t k, int64_t c, const I (&rows)[kRightRows]) {
  I first, rest;
  Simd::interleave_u16(rows[0], rows[1], first, rest);
  const auto store = [&](int64_t column, I pairs) __attribute__((always_inline)) {
    Simd::istore(
        reinterpret_cast<uint32_t *>(tiles + column / kTileRows * kTileBf16 + k / 2 * kTileDepth + column % kTileRows * 2),
        pairs);
  };
  store(c, first);
  store(c + kWidth, rest);
}
#endif

}  // namespace fa::cpu::FA_ISA
