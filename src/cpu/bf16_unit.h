// SPDX-License-Identifier: Apache-2.0
// What multiplies blocks of bf16 in forward (cpu/forward_bf16.h) and backward (cpu/backward_bf16.h): the tile unit (AMX), vectors
// (vdpbf16ps, AVX512_BF16), or products of 2 x 4 and 4 x 2 numbers (bfmmla, NEON_BF16).
// All read packed operands (cpu/pack_tiles.h) and have the same verb:
//
//   multiply<kAdd>(rows, steps, left, right, c)     C = A B, or with kAdd C = C + A B, for `rows` <= 32 rows and 32 columns
//
// The depth of the product is 32 * steps. Rows of C are written in whole groups: of 16 by the tile unit, of 8 by the others.
// The tile unit also adds up several products: multiply<kAdd>(rows, steps, products, c).
// Products of bf16 are exact; all units take subnormal operands for zero
// and give zero where a sum is subnormal. Results differ by rounding:
//   tdpbf16ps  sums even and odd products apart, rounded to nearest
//   vdpbf16ps  adds the two products of a pair one after the other, rounded to nearest
//   bfmmla     adds the sum of a pair's products; sums are rounded to odd
#pragma once

#include <type_traits>

#include "cpu/tile_operands.h"

namespace fa::cpu::FA_ISA {

// Tiles of 16 rows x 32 elements: `half` elements lie between the tile of rows 0 .. 15 and that of rows 16 .. 31, `step` between steps.
struct LeftTiles {
  const uint16_t *at;
  int64_t half;
  int64_t step;
};

// 32 x 32 sums: `row` floats from row to row, `column` to columns 16 .. 31, `half` to rows 16 .. 31.
struct Sums {
  float *at;
  int64_t row;
  int64_t column;
  int64_t half;
};

// The right operand: two tiles per step, of columns 0 .. 15 and 16 .. 31.
constexpr int64_t kRightStep = 2 * kTileBf16;

#if defined(FA_TARGET_AMX)
// 2 x 2 tiles of sums, so that every tile loaded is used twice.
class Bf16Unit {
 public:
  struct Product {
    LeftTiles left;
    const uint16_t *right;
  };
  struct Nothing {
    FA_INLINE void operator()() const {}
  };

  template <bool kAdd>
  void multiply(int64_t rows, int64_t steps, LeftTiles left, const uint16_t *right, Sums c) {
    multiply<kAdd, 1>(rows, steps, {{left, right}}, c);
  }
  template <bool kAdd, int kProducts>
  void multiply(int64_t rows, int64_t steps, const Product (&products)[kProducts], Sums c) {
    rows > kTileRows ? halves<2, kAdd>(steps, products, c, Nothing{}) : halves<1, kAdd>(steps, products, c, Nothing{});
  }
  // Calls between() after every step, whose products the unit computes while vectors do what that does.
  template <bool kAdd, class Between>
  FA_INLINE void multiply_beside(int64_t rows, int64_t steps, LeftTiles left, const uint16_t *right, Sums c, Between between) {
    const Product products[] = {{left, right}};
    rows > kTileRows ? halves<2, kAdd>(steps, products, c, between) : halves<1, kAdd>(steps, products, c, between);
  }

 private:
  template <int kHalves, bool kAdd, int kProducts, class Between>
  FA_INLINE void halves(int64_t steps, const Product (&products)[kProducts], Sums c, Between between) {
    const int64_t row_bytes = c.row * int64_t{sizeof(float)};
    if constexpr (kAdd) {
      tiles_.template load<0>(c.at, row_bytes);
      tiles_.template load<1>(c.at + c.column, row_bytes);
      if constexpr (kHalves == 2) tiles_.template load<2>(c.at + c.half, row_bytes);
      if constexpr (kHalves == 2) tiles_.template load<3>(c.at + c.half + c.column, row_bytes);
    } else {
      tiles_.template zero<0>();
      tiles_.template zero<1>();
      if constexpr (kHalves == 2) tiles_.template zero<2>();
      if constexpr (kHalves == 2) tiles_.template zero<3>();
    }
    for (auto [left, right] : products) {
      for (int64_t i = 0; i < steps; ++i, left.at += left.step, right += kRightStep) {
        // Beside vectors it is 1.02 times as fast to load all four first.
        constexpr bool kLoadsFirst = !std::is_same_v<Between, Nothing>;
        if constexpr (kLoadsFirst) {
          tiles_.template load<4>(left.at);
          if constexpr (kHalves == 2) tiles_.template load<5>(left.at + left.half);
          tiles_.template load<6>(right);
        } else {
          tiles_.template load<6>(right);
          tiles_.template load<4>(left.at);
        }
        tiles_.template load<7>(right + kTileBf16);
        tiles_.template dot<0, 4, 6>();
        if constexpr (kHalves == 2 && !kLoadsFirst) tiles_.template load<5>(left.at + left.half);
        tiles_.template dot<1, 4, 7>();
        if constexpr (kHalves == 2) tiles_.template dot<2, 5, 6>();
        if constexpr (kHalves == 2) tiles_.template dot<3, 5, 7>();
        between();
      }
    }
    tiles_.template store<0>(c.at, row_bytes);
    tiles_.template store<1>(c.at + c.column, row_bytes);
    if constexpr (kHalves == 2) tiles_.template store<2>(c.at + c.half, row_bytes);
    if constexpr (kHalves == 2) tiles_.template store<3>(c.at + c.half + c.column, row_bytes);
  }

  Tiles tiles_;
};
#elif defined(FA_TARGET_AVX512_BF16)
// 8 x 2 vectors of sums: a pair of A is broadcast and multiplied with two vectors of pairs of B. Sixteen independent sums cover the
// latency of vdpbf16ps (5 or 6 cycles, at most two a cycle).
class Bf16Unit {
 public:
  template <bool kAdd>
  void multiply(int64_t rows, int64_t steps, LeftTiles left, const uint16_t *right, Sums c) {
    for (int64_t r = 0; r < rows; r += kRows) {
      const int64_t half = r / kTileRows, row = r % kTileRows;
      eight_rows<kAdd>(steps, left.at + half * left.half + row * kTileDepth, left.step, right,
                       c.at + half * c.half + row * c.row, c.row, c.column);
    }
  }

 private:
  static constexpr int kRows = 8;

  template <bool kAdd>
  static __attribute__((noinline)) void eight_rows(int64_t steps, const uint16_t *left, int64_t left_step,
                                                   const uint16_t *right, float *c, int64_t row, int64_t column) {
    F acc[kRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      acc[r][0] = kAdd ? Simd::load(c + r * row) : Simd::zero();
      acc[r][1] = kAdd ? Simd::load(c + r * row + column) : Simd::zero();
    }
    for (int64_t step = 0; step < steps; ++step, left += left_step, right += kRightStep) {
      for (int64_t pair = 0; pair < kTileDepth; pair += 2) {
        const I b0 = Simd::iload(reinterpret_cast<const uint32_t *>(right + pair / 2 * kTileDepth));
        const I b1 = Simd::iload(reinterpret_cast<const uint32_t *>(right + pair / 2 * kTileDepth + kTileBf16));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          uint32_t a;
          __builtin_memcpy(&a, left + r * kTileDepth + pair, sizeof a);
          const I x = Simd::iset(a);
          acc[r][0] = Simd::dot_bf16(x, b0, acc[r][0]);
          acc[r][1] = Simd::dot_bf16(x, b1, acc[r][1]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Simd::store(c + r * row, acc[r][0]);
      Simd::store(c + r * row + column, acc[r][1]);
    }
  }
};
#elif defined(FA_TARGET_NEON_BF16)
// 8 rows x 8 columns of sums, as 4 x 4 vectors of 2 x 2: eight loads for sixteen products. Sixteen independent sums cover the latency of
// bfmmla.
class Bf16Unit {
 public:
  template <bool kAdd>
  void multiply(int64_t rows, int64_t steps, LeftTiles left, const uint16_t *right, Sums c) {
    for (int64_t r = 0; r < rows; r += kSide) {
      const uint16_t *a = left.at + r / kTileRows * left.half + left_at(r % kTileRows, 0);
      float *sums = c.at + r / kTileRows * c.half + r % kTileRows * c.row;
      for (int64_t n = 0; n < kTilePanel; n += kSide) {
        block<kAdd>(steps, a, left.step, right + n / kTileRows * kTileBf16 + left_at(n % kTileRows, 0),
                    sums + n / kTileRows * c.column + n % kTileRows, c.row);
      }
    }
  }

 private:
  static constexpr int kSide = 8, kPairs = kSide / 2;  // of rows, and of columns

  template <bool kAdd>
  static __attribute__((noinline)) void block(int64_t steps, const uint16_t *left, int64_t left_step, const uint16_t *right,
                                              float *c, int64_t row) {
    F acc[kPairs][kPairs];  // [i][j]: rows 2i and 2i + 1, columns 2j and 2j + 1
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kPairs; j += 2) {
        const F even = kAdd ? Simd::load(c + 2 * i * row + 2 * j) : Simd::zero();
        const F odd = kAdd ? Simd::load(c + (2 * i + 1) * row + 2 * j) : Simd::zero();
        acc[i][j] = Simd::first_halves(even, odd);
        acc[i][j + 1] = Simd::second_halves(even, odd);
      }
    }
    for (int64_t step = 0; step < steps; ++step, left += left_step, right += kRightStep) {
#pragma GCC unroll 8
      for (int64_t k = 0; k < kTileDepth; k += 4) {
        I a[kPairs], b[kPairs];
#pragma GCC unroll 4
        for (int i = 0; i < kPairs; ++i) {
          a[i] = Simd::iload(reinterpret_cast<const uint32_t *>(left + left_at(2 * i, k)));
          b[i] = Simd::iload(reinterpret_cast<const uint32_t *>(right + left_at(2 * i, k)));
        }
#pragma GCC unroll 4
        for (int i = 0; i < kPairs; ++i) {
#pragma GCC unroll 4
          for (int j = 0; j < kPairs; ++j) acc[i][j] = Simd::multiply_bf16(a[i], b[j], acc[i][j]);
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < kPairs; j += 2) {
        Simd::store(c + 2 * i * row + 2 * j, Simd::first_halves(acc[i][j], acc[i][j + 1]));
        Simd::store(c + (2 * i + 1) * row + 2 * j, Simd::second_halves(acc[i][j], acc[i][j + 1]));
      }
    }
  }
};
#endif

// An operand whose numbers are sums of parts, each in tiles of its own: the second part lies `part` elements behind the first.
struct LeftParts {
  LeftTiles tiles;
  int64_t part;
};
struct RightParts {
  const uint16_t *at;
  int64_t part;
};

// C = A B, or with kAdd C = C + A B, of numbers that have kParts parts. With two, C = A B sums up all four products of parts, which are exact, so that S and
// dP are as exact as in fp32. C + A B leaves out low low, which is less than 2^-16 of a product. The smaller products come first.
template <bool kAdd, int kParts, class Unit>
FA_INLINE void multiply_parts(Unit &unit, int64_t rows, int64_t steps, LeftParts a, RightParts b, Sums c) {
  if constexpr (kParts == 1) {
    unit.template multiply<kAdd>(rows, steps, a.tiles, b.at, c);
  } else {
    const LeftTiles high = a.tiles, low{high.at + a.part, high.half, high.step};
    if constexpr (kAdd) {
      unit.template multiply<true>(rows, steps, {{low, b.at}, {high, b.at + b.part}, {high, b.at}}, c);
    } else {
      unit.template multiply<false>(rows, steps, {{low, b.at + b.part}, {low, b.at}, {high, b.at + b.part}, {high, b.at}}, c);
    }
  }
}

}  // namespace fa::cpu::FA_ISA
