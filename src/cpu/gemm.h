// SPDX-License-Identifier: Apache-2.0
// The matrix products of the CPU kernels: C (m x n) from A (m x k) and a packed panel of B (k x n), n = 1 or 2 vectors.
//
// One element of A is broadcast and multiplied with one row of the panel, so A may be row-major or k-major ("transposed") at the
// same speed. The accumulators of kMr rows fill the register file: 12 x 2 of 32 registers, 6 x 2 of 16. An element of C is one
// chain of multiply-adds over ascending k, whatever m and the position of its row in a strip, so results do not depend on how
// rows are grouped.
#pragma once

#include "cpu/simd.h"

namespace fa::cpu::FA_ISA {

constexpr int kMr = Simd::kRegisters == 32 ? 12 : 6;  // rows of a strip
constexpr int kNr = 2 * kWidth;                       // columns of a panel

// What becomes of C.
enum class Output {
  store,     // C = A B
  add,       // C = C + A B
  scale_add  // C = diag(scale) C + A B
};

// Hides a value from the optimiser. GCC would otherwise derive the address of every row on its own, run out of registers and keep
// some in vector registers, whose moves take issue slots from the multiply-adds (measured: 4 %).
template <class T>
FA_INLINE T opaque(T x) {
  asm("" : "+r"(x));
  return x;
}

#if defined(FA_LANE_PRODUCTS)
// acc += A B for MR rows of a k-major A, four, two or one of whose rows are loaded at a time.
template <int MR, int NV>
FA_INLINE void multiply_by_lanes(int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb, F (&acc)[MR][NV]) {
  for (int64_t i = 0; i < k; ++i, a += lda, b += ldb) {
    F row[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) row[v] = Simd::load(b + v * kWidth);
    const auto lane = [&]<int n>(int r, auto x) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) acc[r + n][v] = Simd::fma_lane<n>(x, row[v], acc[r + n][v]);
    };
#pragma GCC unroll 3
    for (int r = 0; r < MR / 4 * 4; r += 4) {
      const F x = Simd::load_four(a + r);
      lane.template operator()<0>(r, x);
      lane.template operator()<1>(r, x);
      lane.template operator()<2>(r, x);
      lane.template operator()<3>(r, x);
    }
    if constexpr (MR % 4 >= 2) {
      const auto x = Simd::load_two(a + MR / 4 * 4);
      lane.template operator()<0>(MR / 4 * 4, x);
      lane.template operator()<1>(MR / 4 * 4, x);
    }
    if constexpr (MR % 2 == 1) lane.template operator()<0>(MR - 1, Simd::set(a[MR - 1]));
  }
}

// The same for a row-major A, two of whose columns are taken at a time: four would leave no register for rows of B.
template <int MR, int NV>
FA_INLINE void multiply_rows_by_lanes(int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb, F (&acc)[MR][NV]) {
  // Rows are reached from every fourth one by 1, 2 or 3 times lda: what one addressing mode can express.
  constexpr int kBases = (MR + 3) / 4;
  const float *base[kBases];
#pragma GCC unroll 3
  for (int n = 0; n < kBases; ++n) base[n] = opaque(a + 4 * n * lda);
  const int64_t lda3 = opaque(3 * lda);
  const auto at = [&](int r) __attribute__((always_inline)) { return base[r / 4] + (r % 4 == 3 ? lda3 : r % 4 * lda); };
  int64_t i = 0;
  for (; i + 2 <= k; i += 2, b += 2 * ldb) {
    F row[2][NV];
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) row[n][v] = Simd::load(b + n * ldb + v * kWidth);
    }
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      auto x = Simd::load_two(at(r));
      asm("" : "+w"(x));  // GCC would load each element by itself
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) acc[r][v] = Simd::fma_lane<0>(x, row[0][v], acc[r][v]);
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) acc[r][v] = Simd::fma_lane<1>(x, row[1][v], acc[r][v]);
    }
#pragma GCC unroll 3
    for (int n = 0; n < kBases; ++n) base[n] += 2;
  }
  if (i == k) return;
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r) {
    const F x = Simd::set(*at(r));
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) acc[r][v] = Simd::fma(x, Simd::load(b + v * kWidth), acc[r][v]);
  }
}
#endif

// acc += A B for MR rows and NV vectors. A(r, i) is a[r * lda + i], or a[i * lda + r] if kTransA; row i of B
// is b[i * ldb ..].
template <int MR, int NV, bool kTransA>
FA_INLINE void multiply(int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb, F (&acc)[MR][NV]) {
#if defined(FA_LANE_PRODUCTS)
  // Multiply-adds take an element of A from a lane of a vector of A, because broadcasting takes an issue slot from a multiply-add.
  if constexpr (kTransA) return multiply_by_lanes<MR, NV>(k, a, lda, b, ldb, acc);
  if constexpr (!kTransA) return multiply_rows_by_lanes<MR, NV>(k, a, lda, b, ldb, acc);
#else
  // Row-major rows are reached from every fourth one by 1, 2 or 3 times lda: what one addressing mode can express.
  constexpr int kBases = kTransA ? 1 : (MR + 3) / 4;
  const float *base[kBases];
#pragma GCC unroll 3
  for (int n = 0; n < kBases; ++n) base[n] = opaque(a + 4 * n * lda);
  const int64_t lda3 = opaque(3 * lda);
  for (int64_t i = 0; i < k; ++i) {
    F row[NV];
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) row[v] = Simd::load(b + v * kWidth);
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      const F x = Simd::set(kTransA ? base[0][r] : base[kTransA ? 0 : r / 4][r % 4 == 3 ? lda3 : r % 4 * lda]);
#pragma GCC unroll 2
      for (int v = 0; v < NV; ++v) acc[r][v] = Simd::fma(x, row[v], acc[r][v]);
    }
#pragma GCC unroll 3
    for (int n = 0; n < kBases; ++n) base[n] += kTransA ? lda : 1;
    b += ldb;
  }
#endif
}

template <int MR, int NV, bool kTransA, Output kOutput>
FA_INLINE void gemm_strip(int64_t k, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc,
                          const float *scale) {
  F acc[MR][NV];
  const float *from = c;
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r, from = opaque(from + ldc)) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) {
      if constexpr (kOutput == Output::store) acc[r][v] = Simd::zero();
      if constexpr (kOutput == Output::add) acc[r][v] = Simd::load(from + v * kWidth);
      if constexpr (kOutput == Output::scale_add) acc[r][v] = Simd::mul(Simd::set(scale[r]), Simd::load(from + v * kWidth));
    }
  }
  multiply<MR, NV, kTransA>(k, a, lda, b, ldb, acc);
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r, c = opaque(c + ldc)) {
#pragma GCC unroll 2
    for (int v = 0; v < NV; ++v) Simd::store(c + v * kWidth, acc[r][v]);
  }
}

// Calls body.operator()<MR>(row) for strips that cover m rows: as many of kMr as fit, then 8 (if kMr is 12), 4, 2, 1.
template <class Body>
FA_INLINE void for_strips(int64_t m, Body body) {
  int64_t r = 0;
  for (; m - r >= kMr; r += kMr) body.template operator()<kMr>(r);
  if constexpr (kMr > 8) {
    if (m - r >= 8) body.template operator()<8>(r), r += 8;
  }
  if (m - r >= 4) body.template operator()<4>(r), r += 4;
  if (m - r >= 2) body.template operator()<2>(r), r += 2;
  if (m - r >= 1) body.template operator()<1>(r);
}

// One panel: C (m x NV vectors, row stride ldc) from A (m x k) and B (k x NV vectors, contiguous). `scale` (m) only for
// Output::scale_add.
template <int NV, bool kTransA, Output kOutput>
__attribute__((noinline)) void gemm_panel(int64_t m, int64_t k, const float *a, int64_t lda, const float *b, float *c,
                                          int64_t ldc, const float *scale = nullptr) {
  for_strips(
      m, [&]<int MR>(int64_t r) __attribute__((always_inline)) {
        gemm_strip<MR, NV, kTransA, kOutput>(k, a + (kTransA ? r : r * lda), lda, b, NV * kWidth, c + r * ldc, ldc,
                                             kOutput == Output::scale_add ? scale + r : nullptr);
      });
}

// All panels of B (k x n): panels of kNr columns, each k * kNr floats and `panel_stride` floats after the one before; the last one
// may be narrower, kWidth columns, when n (a multiple of kWidth) is an odd number of vectors.
template <bool kTransA, Output kOutput>
inline void gemm(int64_t m, int64_t n, int64_t k, const float *a, int64_t lda, const float *b, int64_t panel_stride, float *c,
                 int64_t ldc, const float *scale = nullptr) {
  for (; n >= kNr; n -= kNr, b += panel_stride, c += kNr) gemm_panel<2, kTransA, kOutput>(m, k, a, lda, b, c, ldc, scale);
  if (n > 0) gemm_panel<1, kTransA, kOutput>(m, k, a, lda, b, c, ldc, scale);
}

}  // namespace fa::cpu::FA_ISA
