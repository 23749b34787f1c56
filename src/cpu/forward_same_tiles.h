// SPDX-License-Identifier: Apache-2.0
// FA_FLAG_SAME_BITS on the tile unit (AMX) for very few rows per key head, with keys and values of bf16 where they lie. Sums have the order that the unit
// gives them where many rows share packed operands (cpu/tile.h): in 32 columns of S, or keys of O, the even and the odd products are two chains from zero,
// whose sum is added to what came before.
//
//   S^T = K Q^T   on the unit: 16 keys are its left operand, where they lie or, if they are not equally far apart or no whole steps, a copy
//   O = P V       by vectors: two accumulators for 16 columns are the two chains. As in the unit, subnormal numbers count as zero
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
          for (int r = 0; r < ROWS; ++r) chains[odd][r][v] = Simd::fma(w[r], x, chains[odd][r][v]);
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

// The products of a split of few rows.
class SameBitsTiles {
 public:
  // Queries of as many heads find room where a block of keys would be packed, and a copy of 16 keys where its values would be.
  static constexpr int64_t kMostHeads = kBlockKeys / kTileRows;

  SameBitsTiles(Tiles &tiles, char *memory, int64_t head_dim, int64_t heads)
      : tiles_(tiles),
        steps_((head_dim + kTileDepth - 1) / kTileDepth),
        q_(memory),
        keys_(memory + heads * steps_ * kTileBytes) {}

  // Queries as right operands: column r of a head's tiles is its row r.
  void pack_queries(const VectorSplit &split, const VectorArea &area) {
    for (int64_t h = 0; h < split.count; ++h)
      pack_query_columns(area.q + h * split.rows * area.ldq, area.ldq, split.rows, steps_, q_ + h * steps_ * kTileBytes);
  }

  // S of head h of a split and up to 16 keys: 16 columns of s, of which those past the last key are 0.
  FA_INLINE void scores(const KeyPiece &piece, bool even, const HeadRows &keys, int64_t h, int64_t rows, float *s, int64_t lds,
                        Ahead &ahead) {
    const auto [at, stride] = key_rows(piece, even, h * keys.head_bytes, keys.row_bytes, keys_, steps_ * kStepBytes);
    tiles_.template zero<0>();
    const char *q = q_ + h * steps_ * kTileBytes;
    for (int64_t step = 0; step < steps_; ++step, q += kTileBytes) {
      tiles_.template load<1>(at + step * kStepBytes, stride);
      tiles_.template load<2>(q);
      tiles_.template dot<0, 1, 2>();
      ahead.step();
    }
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
  Tiles &tiles_;
  const int64_t steps_;
  char *const q_;
  char *const keys_;
};

}  // namespace fa::cpu::FA_ISA
