// SPDX-License-Identifier: Apache-2.0
// Products of a few rows of bf16 by vdpbf16ps, with keys and values where they lie. Two keys, interleaved when they are loaded, are a step
// of O += P V; the odd key of a pair is added before the even one.
#pragma once

#include "cpu/forward_blocks.h"
#include "cpu/pack_tiles.h"

namespace fa::cpu::FA_ISA {

// ROWS rows and NV pairs of vectors from column c on of values that lie at values[n] + offset; p[r * ldp + i] is P of keys 2 i and 2 i + 1.
template <int ROWS, int NV>
FA_INLINE void add_pairs(const char *const *values, int pairs, int64_t offset, int64_t c, int64_t dim, const uint32_t *p,
                         int64_t ldp, float *o, int64_t ldo, Ahead &ahead) {
  F acc[ROWS][2 * NV];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < 2 * NV; ++v) acc[r][v] = Simd::load(o + r * ldo + c + v * kWidth);
  }
  for (int i = 0; i < pairs; ++i) {
    ahead.step();
    const auto *even = reinterpret_cast<const uint16_t *>(values[2 * i] + offset),
               *odd = reinterpret_cast<const uint16_t *>(values[2 * i + 1] + offset);
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      I left, right;
      Simd::interleave_u16(load_pairs(even, c + v * 2 * kWidth, dim), load_pairs(odd, c + v * 2 * kWidth, dim), left, right);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const I w = Simd::iset(p[r * ldp + i]);
        acc[r][2 * v] = Simd::dot_bf16(w, left, acc[r][2 * v]);
        acc[r][2 * v + 1] = Simd::dot_bf16(w, right, acc[r][2 * v + 1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < 2 * NV; ++v) Simd::store(o + r * ldo + c + v * kWidth, acc[r][v]);
  }
}

// The same for heads of `rows` rows each, whose values lie `head_bytes` apart, and all `dim` columns; rows of o have as many as a multiple of
// 2 kWidth.
__attribute__((noinline)) inline void add_pair_rows(const char *const *values, int pairs, int64_t offset, int64_t head_bytes,
                                                    int64_t heads, int64_t dim, int64_t rows, const uint32_t *p, int64_t ldp,
                                                    float *o, int64_t ldo, Ahead &ahead) {
  for (int64_t h = 0; h < heads; ++h, offset += head_bytes, p += rows * ldp, o += rows * ldo) {
    for_row_groups<kMostBlockRows>(
        rows, [&]<int ROWS>(int64_t r) __attribute__((always_inline)) {
          constexpr int kMost = kBlockSums / ROWS / 2 < 4 ? kBlockSums / ROWS / 2 : 4;
          const uint32_t *w = p + r * ldp;
          float *to = o + r * ldo;
          int64_t c = 0;
          for (; c + kMost * 2 * kWidth <= dim; c += kMost * 2 * kWidth)
            add_pairs<ROWS, kMost>(values, pairs, offset, c, INT64_MAX, w, ldp, to, ldo, ahead);
          for (; c < dim; c += 2 * kWidth) add_pairs<ROWS, 1>(values, pairs, offset, c, dim, w, ldp, to, ldo, ahead);
        });
  }
}

// A row of floats rounded to bf16 in its own place. Columns [n, round_up(n, 2 kWidth)) become zero.
FA_INLINE void round_in_place(float *row, int64_t n) {
  for (int64_t c = 0; c < n; c += 2 * kWidth) {
    const bool whole = n - c >= 2 * kWidth;
    const F x = whole ? Simd::load(row + c) : Simd::load(row + c, static_cast<int>(min64(n - c, kWidth)));
    const F y = whole ? Simd::load(row + c + kWidth) : Simd::load(row + c + kWidth, static_cast<int>(max64(n - c - kWidth, 0)));
    Simd::istore(reinterpret_cast<uint32_t *>(row) + c / 2, Simd::to_bf16(x, y));
  }
}

// Where the values of a piece of one head lie; in place of those outside keys [begin, end) of the piece a row of zeros.
struct PieceValues {
  const char *rows[kPieceKeys];

  FA_INLINE PieceValues(const KeyPiece &piece, int begin, int end, int64_t offset) {
    alignas(64) static constexpr char kZeros[kMaxHeadDimV * sizeof(uint16_t)] = {};
    for (int n = 0; n < kPieceKeys; ++n) rows[n] = n >= begin && n < end ? piece.rows[n] + offset : kZeros;
  }
};

}  // namespace fa::cpu::FA_ISA
