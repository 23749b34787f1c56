// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with keys and values where they lie, without packing: blocks of some keys x some rows whose sums fill the
// registers, so that a number that was loaded and widened serves every row of the block. A sum is one chain over ascending columns, or
// keys, and its lanes are added in one order (Simd::reduce_add), so that results do not depend on how keys and rows are grouped.
#pragma once

#include "cpu/pack.h"

namespace fa::cpu::FA_ISA {

// Keys that are handled together: enough independent sums to keep the multipliers busy, few enough memory streams.
constexpr int kKeysTogether = 4;
// Keys ahead of the current ones that are prefetched: the latency of memory over the time of a key.
constexpr int64_t kPrefetchKeys = 8;
// Sums of a block, which leave registers for its operands, and the most rows of one.
constexpr int kBlockSums = Simd::kRegisters == 32 ? 16 : 8;
constexpr int kMostBlockRows = kBlockSums / 2;

// Calls body.operator()<KEYS>(j, rows, ahead) for the keys [begin, end), kTogether or one at a time: rows are the KEYS rows from j on, ahead
// those to prefetch.
template <int kTogether, class Body>
FA_INLINE void for_keys(const Rows &source, int64_t begin, int64_t end, Body body) {
  const auto some = [&]<int KEYS>(int64_t j) __attribute__((always_inline)) {
    const char *rows[KEYS], *ahead[KEYS];
#pragma GCC unroll 8
    for (int n = 0; n < KEYS; ++n) {
      rows[n] = source.row(j + n);
      ahead[n] = source.row(min64(j + n + kPrefetchKeys, end - 1));
    }
    body.template operator()<KEYS>(j, rows, ahead);
  };
  int64_t j = begin;
  for (; j + kTogether <= end; j += kTogether) some.template operator()<kTogether>(j);
  for (; j < end; ++j) some.template operator()<1>(j);
}

// Calls body.operator()<ROWS>(r) for rows 0 .. rows - 1, kMost or a smaller power of two at a time.
template <int kMost, class Body>
FA_INLINE void for_row_groups(int64_t rows, Body body) {
  int64_t r = 0;
  for (; r + kMost <= rows; r += kMost) body.template operator()<kMost>(r);
  if constexpr (kMost > 4) {
    if (r + 4 <= rows) body.template operator()<4>(r), r += 4;
  }
  if constexpr (kMost > 2) {
    if (r + 2 <= rows) body.template operator()<2>(r), r += 2;
  }
  if constexpr (kMost > 1) {
    if (r < rows) body.template operator()<1>(r);
  }
}
// Rows of a block of KEYS keys. The last keys of a run, which come one at a time, are not worth the code for several rows.
template <int KEYS>
constexpr int kRowsTogether = KEYS == 1 ? 1 : kMostBlockRows;

// s[r * lds + j] = q_r k_j for one block of ROWS queries (zero-padded to whole vectors) and KEYS keys.
template <class Element, int KEYS, int ROWS>
FA_INLINE void dot_block(const char *const *keys, int64_t offset, int64_t dim, const float *q, int64_t ldq, float *s,
                         int64_t lds) {
  static_assert(KEYS * ROWS <= kBlockSums);
  F acc[ROWS * KEYS];
#pragma GCC unroll 16
  for (int n = 0; n < ROWS * KEYS; ++n) acc[n] = Simd::zero();
  const auto step = [&](int64_t c, auto load) __attribute__((always_inline)) {
    F y[KEYS];
#pragma GCC unroll 4
    for (int j = 0; j < KEYS; ++j) y[j] = load(reinterpret_cast<const typename Element::Type *>(keys[j] + offset) + c);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const F x = Simd::load(q + r * ldq + c);
#pragma GCC unroll 4
      for (int j = 0; j < KEYS; ++j) acc[r * KEYS + j] = Simd::fma(x, y[j], acc[r * KEYS + j]);
    }
  };
  int64_t c = 0;
  for (; c + kWidth <= dim; c += kWidth)
    step(
        c, [](const auto *y) __attribute__((always_inline)) { return Element::load(y); });
  if (c < dim) {
    const int n = static_cast<int>(dim - c);
    step(
        c, [n](const auto *y) __attribute__((always_inline)) { return Element::load(y, n); });
  }
  float sums[ROWS * KEYS];
  Simd::reduce_add(acc, sums);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) __builtin_memcpy(s + r * lds, sums + r * KEYS, sizeof(float) * KEYS);
}

// The same for KEYS keys and any number of rows.
template <class Element, int KEYS>
FA_INLINE void dot_rows(const char *const (&keys)[KEYS], int64_t offset, int64_t dim, const float *q, int64_t ldq, int64_t rows,
                        float *s, int64_t lds) {
  for_row_groups<kRowsTogether<KEYS>>(
      rows, [&]<int ROWS>(int64_t r) __attribute__((always_inline)) {
        constexpr int kKeys = KEYS < kBlockSums / ROWS ? KEYS : kBlockSums / ROWS;
#pragma GCC unroll 4
        for (int n = 0; n < KEYS; n += kKeys)
          dot_block<Element, kKeys, ROWS>(keys + n, offset, dim, q + r * ldq, ldq, s + r * lds + n, lds);
      });
}

// s[r * lds + j - begin] = q_r k_j for keys [begin, end) of one head.
template <class Element>
inline void dot_products(const Rows &keys, int64_t begin, int64_t end, int64_t dim, const float *q, int64_t ldq, int64_t rows,
                         float *s, int64_t lds) {
  for_keys<kKeysTogether>(keys, begin, end, [&]<int KEYS>(int64_t j, const char *const(&k)[KEYS], const char *const(&)[KEYS]) {
    dot_rows<Element>(k, 0, dim, q, ldq, rows, s + j - begin, lds);
  });
}

// o_r += sum over KEYS keys of s[r * lds + j] v_j, for ROWS rows and NV vectors from column c on. Values of a quantised dtype are multiplied by
// `factors` (KEYS) before, unless it is null.
template <class Element, int KEYS, int ROWS, int NV>
FA_INLINE void add_weighted(const char *const (&values)[KEYS], int64_t offset, int64_t c, const float *s, int64_t lds, float *o,
                            int64_t ldo, const float *factors) {
  F acc[ROWS][NV];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = Simd::load(o + r * ldo + c + v * kWidth);
  }
#pragma GCC unroll 8
  for (int j = 0; j < KEYS; ++j) {
    const auto *value = reinterpret_cast<const typename Element::Type *>(values[j] + offset) + c;
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      F x = Element::load(value + v * kWidth);
      if (Element::kQuantised && factors != nullptr) x = Simd::mul(x, Simd::set(factors[j]));
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) acc[r][v] = Simd::fma(Simd::set(s[r * lds + j]), x, acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) Simd::store(o + r * ldo + c + v * kWidth, acc[r][v]);
  }
}

// The same for the last n columns, fewer than a vector has. Few head dims have such columns: small code is worth more than fast code.
template <class Element>
__attribute__((noinline)) void add_weighted_tail(const char *const *values, int keys, int64_t offset, int64_t c, int n,
                                                 const float *s, int64_t lds, int rows, float *o, int64_t ldo,
                                                 const float *factors) {
#pragma GCC unroll 1
  for (int j = 0; j < keys; ++j) {
    F x = Element::load(reinterpret_cast<const typename Element::Type *>(values[j] + offset) + c, n);
    if (Element::kQuantised && factors != nullptr) x = Simd::mul(x, Simd::set(factors[j]));
#pragma GCC unroll 1
    for (int r = 0; r < rows; ++r)
      Simd::store(o + r * ldo + c, Simd::fma(Simd::set(s[r * lds + j]), x, Simd::load(o + r * ldo + c)));
  }
}

// The same for all `dim` columns.
template <class Element, int KEYS, int ROWS>
FA_INLINE void add_weighted_rows(const char *const (&values)[KEYS], int64_t offset, int64_t dim, const float *s, int64_t lds,
                                 float *o, int64_t ldo, const float *factors = nullptr) {
  constexpr int kMost = kBlockSums / ROWS < 8 ? kBlockSums / ROWS : 8;
  const int64_t vectors = dim / kWidth;
  int64_t v = 0;
  for (; v + kMost <= vectors; v += kMost)
    add_weighted<Element, KEYS, ROWS, kMost>(values, offset, v * kWidth, s, lds, o, ldo, factors);
  if constexpr (kMost > 2) {
    for (; v + 2 <= vectors; v += 2) add_weighted<Element, KEYS, ROWS, 2>(values, offset, v * kWidth, s, lds, o, ldo, factors);
  }
  for (; v < vectors; ++v) add_weighted<Element, KEYS, ROWS, 1>(values, offset, v * kWidth, s, lds, o, ldo, factors);
  const int n = static_cast<int>(dim - vectors * kWidth);
  if (n > 0) add_weighted_tail<Element>(values, KEYS, offset, vectors * kWidth, n, s, lds, ROWS, o, ldo, factors);
}

// The same for one key and one row, where a masked P is found among others.
template <class Element>
__attribute__((noinline)) void add_weighted_row(const char *value, int64_t dim, const float *s, float *o,
                                                const float *factors = nullptr) {
  const char *const values[1] = {value};
  add_weighted_rows<Element, 1, 1>(values, 0, dim, s, 0, o, 0, factors);
}

}  // namespace fa::cpu::FA_ISA
