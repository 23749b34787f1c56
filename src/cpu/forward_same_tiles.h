// SPDX-License-Identifier: Apache-2.0
// FA_FLAG_SAME_BITS on the tile unit (AMX) for very few rows per key head, with keys and values where they lie. Sums have the order that the unit
// gives them where many rows share packed operands (cpu/tile.h): in 32 columns of S, or keys of O, the even and the odd products are two chains from zero,
// whose sum is added to what came before.
//
//   S^T = K Q^T   on the unit: 16 keys are its left operand. bf16: where they lie or, if they are not equally far apart or no whole steps, a copy; fp16:
//                 a copy of each part
//   O = P V       by vectors: two accumulators for 16 columns are the two chains. As in the unit, subnormal numbers count as zero
//
// fp16 has the products of parts in the order of multiply_parts: four of S, and three of O for all keys of a block.
#pragma once

#include "cpu/forward_vector_tiles.h"

namespace fa::cpu::FA_ISA {

// While it lives vectors take subnormal operands for zero and give zero for subnormal results.
class SubnormalsAreZero {
 public:
  SubnormalsAreZero() : before_(__builtin_ia32_stmxcsr()) { set(before_ | kFlushes); }
  ~SubnormalsAreZero() { set(before_); }
  SubnormalsAreZero(const SubnormalsAreZero &) = delete;
  SubnormalsAreZero &operator=(const SubnormalsAreZero &) = delete;

 private:
  static constexpr uint32_t kFlushes = 0x8040;  // FTZ and DAZ
  static void set(uint32_t mxcsr) {
    asm volatile("" : : : "memory");
    __builtin_ia32_ldmxcsr(mxcsr);
    asm volatile("" : : : "memory");
  }
  const uint32_t before_;
};

// a b + c, rounded once, of two numbers of bf16 and a sum. Portable vectors, beside the model of the unit, have no such instruction, and would take a
// subnormal product for zero before it is added.
FA_INLINE F fused(F a, F b, F c) {
#if defined(__AVX512F__)
  return Simd::fma(a, b, c);
#else
  for (int i = 0; i < kWidth; ++i)
    c[i] = static_cast<float>(static_cast<double>(a[i]) * static_cast<double>(b[i]) + static_cast<double>(c[i]));
  return c;
#endif
}

// out += P V of ROWS rows and the values [begin, end) of a step of kTileDepth keys, whose P are numbers of bf16.
template <int ROWS>
__attribute__((noinline)) void add_tile_step(const char *const *values, int begin, int end, int64_t offset, int64_t dim,
                                             const float *p, int64_t ldp, float *o, int64_t ldo, Ahead &ahead) {
  constexpr int kVectors = ROWS == 1 ? 8 : ROWS == 2 ? 4 : 2;
  const auto columns = [&]<int VECTORS>(int64_t c) __attribute__((always_inline)) {
    F chains[2][ROWS][VECTORS];  // even, odd
#pragma GCC unroll 2
    for (auto &chain : chains) {
#pragma GCC unroll 4
      for (auto &row : chain) {
#pragma GCC unroll 8
        for (F &sum : row) sum = Simd::zero();
      }
    }
    for (int pair = begin / 2 * 2; pair < end; pair += 2) {
      if (pair % 8 == 0) ahead.step();
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        const int n = pair + odd;
        if (n < begin || n >= end) continue;
        const auto *from = reinterpret_cast<const uint16_t *>(values[n] + offset) + c;
        F w[ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) w[r] = Simd::set(p[r * ldp + n]);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
          const int64_t left = dim - c - v * kWidth;
          const F x = left >= kWidth ? ElementBf16::load(from + v * kWidth)
                                     : ElementBf16::load(from + v * kWidth, static_cast<int>(left));
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) chains[odd][r][v] = fused(w[r], x, chains[odd][r][v]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) {
        float *to = o + r * ldo + c + v * kWidth;
        Simd::store(to, Simd::add(Simd::load(to), Simd::add(chains[0][r][v], chains[1][r][v])));
      }
    }
  };
  int64_t c = 0;
  for (; c + kVectors * kWidth <= dim; c += kVectors * kWidth) columns.template operator()<kVectors>(c);
  for (; c < dim; c += kWidth) columns.template operator()<1>(c);
}

// The same of fp16, of which P and values have two parts (multiply_parts). out gets the products of low parts of P. Those of high parts of P, with low and then with
// high parts of values, are added to it when it has the first ones of all keys of the block: until then they are `later`, rows of `dim` numbers, `ld_later` between the two. `probe` becomes
// NaN where a value is not finite, which has no parts.
template <int ROWS>
__attribute__((noinline)) void add_tile_step_of_parts(const char *const *values, int begin, int end, int64_t offset,
                                                      int64_t dim, const float *low, const float *high, int64_t ldp, float *o,
                                                      int64_t ldo, float *later, int64_t ld_later, F &probe, Ahead &ahead) {
  constexpr int kVectors = ROWS == 1 ? 4 : ROWS == 2 ? 2 : 1;
  const auto columns = [&]<int VECTORS>(int64_t c) __attribute__((always_inline)) {
    F chains[3][2][ROWS][VECTORS];  // products; even, odd
#pragma GCC unroll 3
    for (auto &product : chains) {
#pragma GCC unroll 2
      for (auto &chain : product) {
#pragma GCC unroll 4
        for (auto &row : chain) {
#pragma GCC unroll 4
          for (F &sum : row) sum = Simd::zero();
        }
      }
    }
    F nonfinite = probe;
    for (int pair = begin / 2 * 2; pair < end; pair += 2) {
      if (pair % 8 == 0) ahead.step();
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        const int n = pair + odd;
        if (n < begin || n >= end) continue;
        const auto *from = reinterpret_cast<const uint16_t *>(values[n] + offset) + c;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          const int64_t left = dim - c - v * kWidth;
          const F x = left >= kWidth ? ElementF16::load(from + v * kWidth)
                                     : ElementF16::load(from + v * kWidth, static_cast<int>(left));
          const F x_high = high_part(x), x_low = Simd::sub(x, x_high);
          nonfinite = Simd::fma(x, Simd::zero(), nonfinite);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; ++r) {
            const F p_low = Simd::set(low[r * ldp + n]), p_high = Simd::set(high[r * ldp + n]);
            chains[0][odd][r][v] = fused(p_low, x_high, chains[0][odd][r][v]);
            chains[1][odd][r][v] = fused(p_high, x_low, chains[1][odd][r][v]);
            chains[2][odd][r][v] = fused(p_high, x_high, chains[2][odd][r][v]);
          }
        }
      }
    }
    probe = nonfinite;
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = c + v * kWidth;
        const auto sum = [&](int product) __attribute__((always_inline)) {
          return Simd::add(chains[product][0][r][v], chains[product][1][r][v]);
        };
        float *to = o + r * ldo + column, *after = later + r * ldo + column;
        Simd::store(to, Simd::add(Simd::load(to), sum(0)));
        Simd::store(after, sum(1));
        Simd::store(after + ld_later, sum(2));
      }
    }
  };
  int64_t c = 0;
  for (; c + kVectors * kWidth <= dim; c += kVectors * kWidth) columns.template operator()<kVectors>(c);
  for (; c < dim; c += kWidth) columns.template operator()<1>(c);
}

// The products of a split of few rows.
class SameBitsTiles {
 public:
  // Queries of as many heads find room where a block of keys would be packed. A copy of 16 keys has that of its values or, in parts, that of the last head's queries:
  // there the room of the values is left to later().
  static constexpr int64_t most_heads(int64_t parts) { return kBlockKeys / kTileRows - (parts - 1); }

  SameBitsTiles(Tiles &tiles, char *memory, int64_t head_dim, int64_t heads, int64_t parts)
      : tiles_(tiles),
        steps_((head_dim + kTileDepth - 1) / kTileDepth),
        part_(heads * steps_ * kTileBytes),
        q_(memory),
        keys_(memory + parts * part_) {}

  // Queries as right operands: column r of a head's tiles is its row r.
  void pack_queries(const VectorSplit &split, const VectorArea &area) {
    for_heads(split, area, [&](const float *q, char *to) { pack_query_columns(q, area.ldq, split.rows, steps_, to); });
  }
  void pack_query_parts(const VectorSplit &split, const VectorArea &area) {
    for_heads(split, area, [&](const float *q, char *to) {
      pack_query_columns(
          q, area.ldq, split.rows, steps_, to,
          [](F a, F b) __attribute__((always_inline)) { return part_of<Part::kHigh>(a, b); });
      pack_query_columns(
          q, area.ldq, split.rows, steps_, to + part_,
          [](F a, F b) __attribute__((always_inline)) { return part_of<Part::kLow>(a, b); });
    });
  }

  // S of head h of a split and up to 16 keys: 16 columns of s, of which those past the last key are 0.
  FA_INLINE void scores(const KeyPiece &piece, bool even, const HeadRows &keys, int64_t h, int64_t rows, float *s, int64_t lds,
                        Ahead &ahead) {
    const KeyRows at = key_rows(piece, even, h * keys.head_bytes, keys.row_bytes, keys_, steps_ * kStepBytes);
    tiles_.template zero<0>();
    add_product(at, q_ + h * steps_ * kTileBytes, ahead);
    put(rows, s, lds);
  }
  // The same of fp16, in parts. `seen` sees the keys.
  FA_INLINE void scores_of_parts(const KeyPiece &piece, const HeadRows &keys, int64_t dim, int64_t h, int64_t rows, float *s,
                                 int64_t lds, Magnitudes &seen, Ahead &ahead) {
    const int64_t stride = steps_ * kStepBytes;
    char *const low = keys_ + kTileRows * stride;
    for (int64_t n = 0; n < kTileRows; ++n) {
      if (n >= piece.count) {
        __builtin_memset(keys_ + n * stride, 0, static_cast<size_t>(stride));
        __builtin_memset(low + n * stride, 0, static_cast<size_t>(stride));
        continue;
      }
      const auto *row = reinterpret_cast<const uint16_t *>(piece.rows[n] + h * keys.head_bytes);
      for (int64_t i = 0; i < steps_ * kTileDepth; i += 2 * kWidth) {
        uint16_t padded[2 * kWidth];
        const uint16_t *numbers = row + i;
        if (__builtin_expect(i + 2 * kWidth > dim, 0)) {
          Simd::istore(reinterpret_cast<uint32_t *>(padded), load_pairs(row, i, dim));
          numbers = padded;
        }
        seen.see(Simd::iload(reinterpret_cast<const uint32_t *>(numbers)));
        I parts[2];
        parts_of<2>(Simd::load_f16(numbers), Simd::load_f16(numbers + kWidth), parts);
        const int64_t at = n * stride + i * int64_t{sizeof(uint16_t)};
        Simd::istore(reinterpret_cast<uint32_t *>(keys_ + at), parts[0]);
        Simd::istore(reinterpret_cast<uint32_t *>(low + at), parts[1]);
      }
      ahead.step();
    }
    const char *const q = q_ + h * steps_ * kTileBytes;
    tiles_.template zero<0>();
    add_product({low, stride}, q + part_, ahead);
    add_product({keys_, stride}, q + part_, ahead);
    add_product({low, stride}, q, ahead);
    add_product({keys_, stride}, q, ahead);
    put(rows, s, lds);
  }
  // Room behind the copy of keys, for products of values that are added later.
  float *later(int64_t parts) const { return reinterpret_cast<float *>(keys_ + parts * kTileRows * steps_ * kStepBytes); }

  // P of `n` keys, a multiple of 2 kWidth, as numbers of bf16.
  static void round(float *p, int64_t n) {
    for (int64_t c = 0; c < n; c += 2 * kWidth) {
      alignas(64) uint32_t pairs[kWidth];
      Simd::istore(pairs, Simd::to_bf16(Simd::load(p + c), Simd::load(p + c + kWidth)));
      const auto *numbers = reinterpret_cast<const uint16_t *>(pairs);
      Simd::store(p + c, Simd::load_bf16(numbers));
      Simd::store(p + c + kWidth, Simd::load_bf16(numbers + kWidth));
    }
  }

 private:
  template <class Pack>
  void for_heads(const VectorSplit &split, const VectorArea &area, Pack pack) {
    for (int64_t h = 0; h < split.count; ++h) pack(area.q + h * split.rows * area.ldq, q_ + h * steps_ * kTileBytes);
  }
  // Adds products of 16 keys and the queries of a head to tile 0.
  FA_INLINE void add_product(KeyRows keys, const char *q, Ahead &ahead) {
    for (int64_t step = 0; step < steps_; ++step, q += kTileBytes) {
      tiles_.template load<1>(keys.at + step * kStepBytes, keys.stride);
      tiles_.template load<2>(q);
      tiles_.template dot<0, 1, 2>();
      ahead.step();
    }
  }
  // Writes tile 0 as rows of s.
  FA_INLINE void put(int64_t rows, float *s, int64_t lds) {
    alignas(64) float sums[kTileFloats];  // [key][row]
    tiles_.template store<0>(sums);
    for (int64_t key = 0; key < kTileRows; key += kWidth) {
      for (int64_t column = 0; column < rows; column += kWidth) {
        F block[kWidth];
#pragma GCC unroll 16
        for (int j = 0; j < kWidth; ++j) block[j] = Simd::load(sums + (key + j) * kTileRows + column);
        Simd::transpose(block);
        for (int64_t r = column; r < min64(rows, column + kWidth); ++r) Simd::store(s + r * lds + key, block[r - column]);
      }
    }
  }

  Tiles &tiles_;
  const int64_t steps_;
  const int64_t part_;  // bytes of one part of the queries
  char *const q_;
  char *const keys_;
};

}  // namespace fa::cpu::FA_ISA
