// SPDX-License-Identifier: Apache-2.0
// Packing for a unit that multiplies bf16: rows of any stride and page layout become tiles (cpu/tile_operands.h) of 1 KiB, one after another,
// so that loading a tile never meets rows whose distance puts them into the same cache banks. What lies past the end of a sequence is never
// read; tiles hold zeros there. Head dims are padded with zeros to a multiple of kTileDepth.
#pragma once

#include <type_traits>

#include "cpu/pack.h"
#include "cpu/tile_operands.h"

namespace fa::cpu::FA_ISA {

// The magnitudes that occur in packed numbers.
class Magnitudes {
 public:
  // Two bf16 numbers in every lane, or two of fp16.
  FA_INLINE void see(I pairs) {
    const I magnitude = Simd::iand(pairs, Simd::iset(0x7FFF7FFF));
    largest_ = Simd::max_u16(largest_, magnitude);
    smallest_ =
        Simd::min_u16(smallest_, Simd::add_u16(magnitude, Simd::iset(0xFFFFFFFF)));  // less one, so that 0 is the largest
  }
  void see(const Magnitudes &others) {
    largest_ = Simd::max_u16(largest_, others.largest_);
    smallest_ = Simd::min_u16(smallest_, others.smallest_);
  }
  bool finite() const { return top() < 0x7F80; }
  bool finite_f16() const { return top() < 0x7C00; }  // where they are fp16
  // At least 2^64, or not finite.
  bool huge() const { return top() >= (127 + 64) << 7; }
  // Not zero, but below the smallest normal number: the tile unit takes it for zero.
  bool subnormal() const {
    uint16_t lanes[2 * kWidth];
    Simd::istore(reinterpret_cast<uint32_t *>(lanes), smallest_);
    uint16_t low = 0xFFFF;
    for (const uint16_t x : lanes) low = x < low ? x : low;
    return low < 0x7F;
  }

 private:
  uint16_t top() const {
    uint16_t lanes[2 * kWidth];
    Simd::istore(reinterpret_cast<uint32_t *>(lanes), largest_);
    uint16_t top = 0;
    for (const uint16_t x : lanes) top = x > top ? x : top;
    return top;
  }

  I largest_ = Simd::iset(0), smallest_ = Simd::iset(0xFFFFFFFF);
};

// Elements [i, i + 2 kWidth) of a row of `dim`, in pairs; zeros past its end.
FA_INLINE I load_pairs(const uint16_t *row, int64_t i, int64_t dim) {
  if (__builtin_expect(i + 2 * kWidth <= dim, 1)) return Simd::iload(reinterpret_cast<const uint32_t *>(row + i));
  uint32_t pairs[kWidth] = {};
  if (i < dim) __builtin_memcpy(pairs, row + i, static_cast<size_t>(dim - i) * sizeof(uint16_t));
  return Simd::iload(pairs);
}

// Of a row of `dim` numbers.
inline Magnitudes magnitudes_of(const char *row, int64_t dim) {
  Magnitudes seen;
  for (int64_t i = 0; i < dim; i += 2 * kWidth) seen.see(load_pairs(reinterpret_cast<const uint16_t *>(row), i, dim));
  return seen;
}

// In place of Magnitudes where nobody asks.
struct NoMagnitudes {
  FA_INLINE void see(I) {}
};

// What of a row is packed: load(row, i, dim, seen) is elements [i, i + 2 kWidth) in pairs, zeros past its end; `seen` sees the numbers of the row.
struct WholeBf16 {
  template <class Seen>
  static FA_INLINE I load(const uint16_t *row, int64_t i, int64_t dim, Seen &seen) {
    const I pairs = load_pairs(row, i, dim);
    seen.see(pairs);
    return pairs;
  }
};

// x = high + low, where `high` is a bf16 number: x rounded to nearest, ties away from zero. If x is a finite fp16 number, so is `low`, and it is 0 or
// normal. If x is not finite neither part means anything.
FA_INLINE F high_part(F x) {
  return Simd::from_bits(Simd::iand(Simd::iadd(Simd::bits(x), Simd::iset(0x8000)), Simd::iset(0xFFFF0000)));
}
enum class Part { kHigh, kLow };
template <Part kPart>
FA_INLINE I part_of(F a, F b) {
  const F high_a = high_part(a), high_b = high_part(b);
  return kPart == Part::kHigh ? Simd::to_bf16(high_a, high_b) : Simd::to_bf16(Simd::sub(a, high_a), Simd::sub(b, high_b));
}
// One part of fp16 numbers.
template <Part kPart>
struct PartOfF16 {
  template <class Seen>
  static FA_INLINE I load(const uint16_t *row, int64_t i, int64_t dim, Seen &seen) {
    const I pairs = load_pairs(row, i, dim);
    seen.see(pairs);
    if (__builtin_expect(i + 2 * kWidth <= dim, 1))
      return part_of<kPart>(Simd::load_f16(row + i), Simd::load_f16(row + i + kWidth));
    uint16_t numbers[2 * kWidth];
    Simd::istore(reinterpret_cast<uint32_t *>(numbers), pairs);
    return part_of<kPart>(Simd::load_f16(numbers), Simd::load_f16(numbers + kWidth));
  }
};

// Numbers of bf16 that one of a tensor is packed into.
template <class Element>
constexpr int kPartsOf = std::is_same_v<Element, ElementF16> ? 2 : 1;

// Packs each part of numbers by pack<Seen, What>(to), the second one `part` elements behind the first.
template <class Element, class Pack>
inline Magnitudes pack_parts(uint16_t *to, int64_t part, Pack pack) {
  if constexpr (kPartsOf<Element> == 1) {
    return pack.template operator()<Magnitudes, WholeBf16>(to);
  } else {
    pack.template operator()<NoMagnitudes, PartOfF16<Part::kLow>>(to + part);
    return pack.template operator()<Magnitudes, PartOfF16<Part::kHigh>>(to);
  }
}
// The parts of what a kernel computes, for kPartsOf<Element>.
template <int kParts>
FA_INLINE void parts_of(F a, F b, I (&parts)[kParts]) {
  if constexpr (kParts == 1) {
    parts[0] = Simd::to_bf16(a, b);
  } else {
    parts[0] = part_of<Part::kHigh>(a, b);
    parts[1] = part_of<Part::kLow>(a, b);
  }
}

// Rows ahead of the one being packed that are fetched into the cache; 0 where the caller does that. Rows of one head lie a page or so apart, where processors do not
// prefetch by themselves.
constexpr int64_t kRowsAhead = 16;

// Rows for the left side of a product: tile (strip, step, half) has 16 rows of elements [32 step, 32 step + 32), two halves a strip of
// 32 rows. `row(r)` is where row r begins, or null for a row of zeros; rows past `rows` are zero.
template <class Seen = Magnitudes, int64_t kAhead = kRowsAhead, class What = WholeBf16, class RowOf>
inline Seen pack_left(int64_t rows, int64_t dim, RowOf row, uint16_t *to) {
  Seen seen;
  const int64_t steps = round_up(dim, kTileDepth) / kTileDepth;
  for (int64_t r = 0; r < round_up(rows, 2 * kTileRows); ++r) {
    if (kAhead > 0 && r + kAhead < rows) prefetch_row(row(r + kAhead), dim * 2);
    const auto *from = r < rows ? reinterpret_cast<const uint16_t *>(row(r)) : nullptr;
    uint16_t *tile = to + (r / 32 * steps * 2 + r / 16 % 2) * kTileBf16;
    for (int64_t step = 0; step < steps; ++step, tile += 2 * kTileBf16) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < kTileDepth; i += 2 * kWidth) {
        store_left(tile, r % 16, i, from != nullptr ? What::load(from, step * kTileDepth + i, dim, seen) : Simd::iset(0));
      }
    }
  }
  return seen;
}

// Columns `cols` of `rows` rows of a product A K^T in fp32, for numbers that the tile unit would get wrong: left(r, c) is elements [c, c + kWidth) of
// row r of A, and column j belongs to key `first` + j. Columns past the last key are zero.
template <class Element, class Left>
inline void exact_products(Left left, int64_t rows, const Rows &keys, int64_t first, int64_t key_count, Range cols, int64_t dim,
                           float *to, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t j = cols.begin; j < cols.end; ++j) {
      F sum = Simd::zero();
      if (first + j < key_count) {
        const auto *key = reinterpret_cast<const uint16_t *>(keys.row(first + j));
        for (int64_t c = 0; c < dim; c += kWidth) {
          const F y = c + kWidth <= dim ? Element::load(key + c) : Element::load(key + c, static_cast<int>(dim - c));
          sum = Simd::fma(left(r, c), y, sum);
        }
      }
      to[r * ld + j] = Simd::reduce_add(sum);
    }
  }
}
// `left` of exact_products: row(r) is where row r begins, or null for a row of zeros.
template <class Element, class RowOf>
FA_INLINE auto numbers_of(int64_t dim, RowOf row) {
  return [dim, row](int64_t r, int64_t c) {
    const auto *from = reinterpret_cast<const uint16_t *>(row(r));
    if (from == nullptr) return Simd::zero();
    return c + kWidth <= dim ? Element::load(from + c) : Element::load(from + c, static_cast<int>(dim - c));
  };
}

// The transpose of rows [0, rows) for the left side of a product, whose rows are then their columns: tile (panel of 32 columns, step of
// 32 rows, half of the columns) has 16 columns of 32 rows. Panels are `panel_elements` apart. `row(r)` is where row r begins, or null for
// a row of zeros.
template <class Seen = Magnitudes, class What = WholeBf16, class RowOf>
inline Seen pack_left_transposed(int64_t rows, int64_t dim, RowOf row, int64_t panel_elements, uint16_t *to) {
  Seen seen;
  constexpr int64_t kRowsTogether = 2 * kWidth;  // pairs of these become kWidth lanes
  for (int64_t r = 0; r < round_up(rows, kTileDepth); r += kRowsTogether) {
    const uint16_t *from[kRowsTogether];
    for (int64_t i = 0; i < kRowsTogether; ++i) {
      from[i] = r + i < rows ? reinterpret_cast<const uint16_t *>(row(r + i)) : nullptr;
    }
    uint16_t *const tiles = to + r / kTileDepth * 2 * kTileBf16;
    for (int64_t c = 0; c < round_up(dim, kTilePanel); c += 2 * kWidth) {
      F first[kWidth], rest[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) {
        const I even = from[2 * i] != nullptr ? What::load(from[2 * i], c, dim, seen) : Simd::iset(0);
        const I odd = from[2 * i + 1] != nullptr ? What::load(from[2 * i + 1], c, dim, seen) : Simd::iset(0);
        I x, y;
        Simd::interleave_u16(even, odd, x, y);
        first[i] = Simd::from_bits(x);
        rest[i] = Simd::from_bits(y);
      }
      const auto store = [&](F(&columns)[kWidth], int64_t at) __attribute__((always_inline)) {
        Simd::transpose(columns);
        uint16_t *tile = tiles + at / kTilePanel * panel_elements + at % kTilePanel / kTileRows * kTileBf16;
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) store_left(tile, at % kTileRows + i, r % kTileDepth, Simd::bits(columns[i]));
      };
      store(first, c);
      store(rest, c + kWidth);
    }
  }
  return seen;
}

// Keys [begin, end) for the right side of Q K^T, whose columns they are: tile (panel of 32 keys, step, half) has elements 32 step .. of
// 16 keys.
template <class Seen = Magnitudes, class What = WholeBf16>
inline Seen pack_key_tiles(const Rows &keys, int64_t begin, int64_t end, int64_t dim, uint16_t *to) {
  if constexpr (kQuads) {
    return pack_left<Seen, kRowsAhead, What>(
        end - begin, dim, [&](int64_t r) { return keys.row(begin + r); }, to);
  }
  Seen seen;
  const int64_t steps = round_up(dim, kTileDepth) / kTileDepth;
  for (int64_t first = begin; first < end; first += kTilePanel, to += steps * 2 * kTileBf16) {
    for (int64_t group = 0; group < kTilePanel; group += kWidth) {
      const uint16_t *rows[kWidth];
      const int64_t n = min64(end - first - group, kWidth);
      for (int r = 0; r < kWidth; ++r)
        rows[r] = r < n ? reinterpret_cast<const uint16_t *>(keys.row(first + group + r)) : nullptr;
      for (int64_t j = first + group + kWidth; j < min64(end, first + group + 2 * kWidth); ++j)
        prefetch_row(keys.row(j), dim * 2);
      uint16_t *const column = to + group / kTileRows * kTileBf16 + group % kTileRows * 2;
      for (int64_t i = 0; i < steps * kTileDepth; i += 2 * kWidth) {
        F pairs[kWidth];
#pragma GCC unroll 16
        for (int r = 0; r < kWidth; ++r) {
          pairs[r] = Simd::from_bits(r < n ? What::load(rows[r], i, dim, seen) : Simd::iset(0));
        }
        Simd::transpose(pairs);
        uint16_t *const tile = column + i / kTileDepth * 2 * kTileBf16 + i % kTileDepth / 2 * kTileDepth;
#pragma GCC unroll 16
        for (int c = 0; c < kWidth; ++c) {
          Simd::istore(reinterpret_cast<uint32_t *>(tile + c * kTileDepth), Simd::bits(pairs[c]));
        }
      }
    }
  }
  return seen;
}

// Values [begin, end) for the right side of P V, whose rows they are: tile (panel of 32 columns, step of 32 keys, half) has 16 columns.
// Panels are `panel_elements` apart.
template <class Seen = Magnitudes, int64_t kAhead = kRowsAhead, class What = WholeBf16>
inline Seen pack_value_tiles(const Rows &values, int64_t begin, int64_t end, int64_t dim, int64_t panel_elements,
                             uint16_t *to) {
  if constexpr (kQuads) {
    return pack_left_transposed<Seen, What>(
        end - begin, dim, [&](int64_t r) { return values.row(begin + r); }, panel_elements, to);
  }
  Seen seen;
  const int64_t padded = round_up(dim, kTilePanel);
  for (int64_t j = begin; j < begin + round_up(end - begin, kTileDepth); j += 2) {
    const auto *even = j < end ? reinterpret_cast<const uint16_t *>(values.row(j)) : nullptr;
    const auto *odd = j + 1 < end ? reinterpret_cast<const uint16_t *>(values.row(j + 1)) : nullptr;
    for (int64_t ahead = j + kAhead; kAhead > 0 && ahead < min64(end, j + kAhead + 2); ++ahead)
      prefetch_row(values.row(ahead), dim * 2);
    const int64_t key = j - begin;
    uint16_t *tile = to + key / kTileDepth * 2 * kTileBf16 + key % kTileDepth / 2 * kTileDepth;
    for (int64_t c = 0; c < padded; c += kTilePanel, tile += panel_elements) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < kTilePanel; i += 2 * kWidth) {
        const I x = even != nullptr ? What::load(even, c + i, dim, seen) : Simd::iset(0);
        const I y = odd != nullptr ? What::load(odd, c + i, dim, seen) : Simd::iset(0);
        I pairs[2];
        Simd::interleave_u16(x, y, pairs[0], pairs[1]);
#pragma GCC unroll 2
        for (int n = 0; n < 2; ++n) {
          const int64_t column = i + n * kWidth;
          Simd::istore(reinterpret_cast<uint32_t *>(tile + column / kTileRows * kTileBf16 + column % kTileRows * 2), pairs[n]);
        }
      }
    }
  }
  return seen;
}

// Bytes of e4m3 or int8 as numbers of bf16, which represents all of them exactly.
template <class Element>
FA_INLINE void widen_row(const char *from, int64_t dim, uint16_t *to) {
  const auto *bytes = reinterpret_cast<const typename Element::Type *>(from);
  for (int64_t c = 0; c < dim; c += 2 * kWidth) {
    const auto load = [&](int64_t at) __attribute__((always_inline)) {
      if (__builtin_expect(at + kWidth <= dim, 1)) return Element::load(bytes + at);
      return at < dim ? Element::load(bytes + at, static_cast<int>(dim - at)) : Simd::zero();
    };
    Simd::istore(reinterpret_cast<uint32_t *>(to + c), Simd::to_bf16(load(c), load(c + kWidth)));
  }
}
inline void widen_row(Dtype dtype, const char *from, int64_t dim, uint16_t *to) {
  dtype == Dtype::e4m3 ? widen_row<ElementE4m3>(from, dim, to) : widen_row<ElementI8>(from, dim, to);
}

// Packs rows [begin, end) of bytes, kTilePanel of them at a time: pack(rows, count, n) packs `count` rows of bf16, which are those from begin + n on.
template <class Pack>
inline Magnitudes pack_widened(Dtype dtype, const Rows &bytes, int64_t begin, int64_t end, int64_t dim, Pack pack) {
  alignas(64) uint16_t wide[kTilePanel * kMaxHeadDim];
  const int64_t pitch = round_up(dim, 2 * kWidth);
  static_assert(kMaxHeadDim % (2 * kWidth) == 0);
  Magnitudes seen;
  for (int64_t first = begin; first < end; first += kTilePanel) {
    const int64_t count = min64(end - first, kTilePanel);
    for (int64_t n = 0; n < count; ++n) {
      if (first + n + kRowsAhead < end) prefetch_row(bytes.row(first + n + kRowsAhead), dim);
      widen_row(dtype, bytes.row(first + n), dim, wide + n * pitch);
    }
    Rows rows;
    rows.data = reinterpret_cast<const char *>(wide);
    rows.stride = pitch * int64_t{sizeof(uint16_t)};
    seen.see(pack(rows, count, first - begin));
  }
  return seen;
}

}  // namespace fa::cpu::FA_ISA
