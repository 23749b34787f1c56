// SPDX-License-Identifier: Apache-2.0
// AVX-512 (F, BW, DQ, VL) verbs; see cpu/simd.h.
#pragma once

// GCC 12 takes the deliberately undefined pass-through operands of its own intrinsics for mistakes (GCC bug 105593).
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#include <cstddef>

#include "cpu/simd_exp2.h"

namespace fa::cpu::FA_ISA {

struct Simd {
  using F = __m512;
  using I = __m512i;
  using M = __mmask16;
  static constexpr int kWidth = 16;
  static constexpr int kRegisters = 32;

  // Lanes 0 .. n - 1, for any n.
  static FA_INLINE M first(int n) { return n <= 0 ? M{0} : (n >= 16 ? M{0xFFFF} : static_cast<M>((1u << n) - 1)); }
  // The lanes whose bit is set.
  static FA_INLINE M lanes(uint32_t bits) { return static_cast<M>(bits); }

  static FA_INLINE F zero() { return _mm512_setzero_ps(); }
  static FA_INLINE F set(float x) { return _mm512_set1_ps(x); }
  static FA_INLINE F load(const float *p) { return _mm512_loadu_ps(p); }
  static FA_INLINE F load(const float *p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static FA_INLINE void store(float *p, F x) { _mm512_storeu_ps(p, x); }
  static FA_INLINE void store(float *p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }

  static FA_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static FA_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static FA_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static FA_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
  static FA_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }  // a b + c
  static FA_INLINE F fms(F a, F b, F c) { return _mm512_fmsub_ps(a, b, c); }  // a b - c
  static FA_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }            // b if either is NaN
  static FA_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }            // b if either is NaN
  static FA_INLINE F abs(F a) { return _mm512_abs_ps(a); }
  static FA_INLINE F copysign(F a, F b) {
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(_mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(b), _mm512_castps_si512(a), 0xCA));
  }

  static FA_INLINE M lt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  static FA_INLINE M eq(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  static FA_INLINE F select(M m, F a, F b) { return _mm512_mask_blend_ps(m, b, a); }  // m ? a : b
  static FA_INLINE bool any(M m) { return m != 0; }
  static FA_INLINE M mask_and(M a, M b) { return a & b; }
  static FA_INLINE M mask_or(M a, M b) { return a | b; }

  // 2^x: 0 for x = -inf and wherever the result underflows the normals gradually, +inf from 128 on, NaN for NaN.
  static FA_INLINE F exp2(F x) {
    const F f = _mm512_reduce_ps(x, 0x09);  // x - floor(x); 0 for +-inf
    F p = fma(set(kExp2C5), f, set(kExp2C4));
    p = fma(p, f, set(kExp2C3));
    p = fma(p, f, set(kExp2C2));
    p = fma(p, f, set(kExp2C1));
    p = fma(p, f, set(1.0f));
    return _mm512_scalef_ps(p, x);  // p 2^floor(x)
  }
  // The same for results that are rounded to bf16 and for sums of them.
  static FA_INLINE F rough_exp2(F x) {
    const F f = _mm512_reduce_ps(x, 0x09);
    F p = fma(set(kRoughExp2C4), f, set(kRoughExp2C3));
    p = fma(p, f, set(kRoughExp2C2));
    p = fma(p, f, set(kRoughExp2C1));
    p = fma(p, f, set(1.0f));
    return _mm512_scalef_ps(p, x);
  }

  static FA_INLINE float reduce_add(F a) { return _mm512_reduce_add_ps(a); }
  // to[n] = reduce_add(x[n]), to the bit.
  template <int N>
  static FA_INLINE void reduce_add(const F (&x)[N], float *to) {
    if constexpr (N % 4 != 0) {
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) to[n] = reduce_add(x[n]);
    } else {
      F t[4] = {zero(), zero(), zero(), zero()};
#pragma GCC unroll 4
      for (int n = 0; n < N / 4; ++n) t[n] = add_lanes(x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]);
      // Lane n of 128 bits, column m: the sum of x[4 m + n].
      const F sums = add_columns(t[0], t[1], t[2], t[3]);
      const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
      const F in_order = _mm512_permutexvar_ps(order, sums);
      // No masked store: what reads these sums soon could not take them from the store buffer.
      if constexpr (N == 4) {
        _mm_storeu_ps(to, _mm512_castps512_ps128(in_order));
      } else if constexpr (N == 8) {
        _mm256_storeu_ps(to, _mm512_castps512_ps256(in_order));
      } else {
        static_assert(N == 16);
        store(to, in_order);
      }
    }
  }
  static FA_INLINE float reduce_max(F a) { return _mm512_reduce_max_ps(a); }

  static FA_INLINE I iset(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static FA_INLINE I iload(const uint32_t *p) { return _mm512_loadu_si512(p); }
  static FA_INLINE void istore(uint32_t *p, I x) { _mm512_storeu_si512(p, x); }
  static FA_INLINE I iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
  static FA_INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static FA_INLINE I iand(I a, I b) { return _mm512_and_si512(a, b); }
  static FA_INLINE I ior(I a, I b) { return _mm512_or_si512(a, b); }
  static FA_INLINE I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
  template <int n>
  static FA_INLINE I shl(I a) {
    return _mm512_slli_epi32(a, n);
  }
  template <int n>
  static FA_INLINE I shr(I a) {
    return _mm512_srli_epi32(a, n);
  }
  static FA_INLINE M ilt(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }  // signed
  static FA_INLINE M ieq(I a, I b) { return _mm512_cmpeq_epi32_mask(a, b); }
  static FA_INLINE I iselect(M m, I a, I b) { return _mm512_mask_blend_epi32(m, b, a); }
  static FA_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }  // signed
  static FA_INLINE I to_int(F a) { return _mm512_cvttps_epi32(a); }   // towards zero
  static FA_INLINE I bits(F a) { return _mm512_castps_si512(a); }
  static FA_INLINE F from_bits(I a) { return _mm512_castsi512_ps(a); }
  // The two halves of the 64-bit products of the lanes of a (unsigned) and the constant b.
  static FA_INLINE void mul_wide(I a, uint32_t b, I &high, I &low) {
    const I vb = iset(b);
    const I even = _mm512_mul_epu32(a, vb);
    const I odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), vb);
    low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  }

  // Interleaves 2 kWidth numbers of 16 bits of two rows, or 4 kWidth bytes of four, within lanes of 128 bits: an element of the result has one number of each row.
  // Results of such columns are in order after order_lanes.
  static FA_INLINE void interleave_lanes(const char *const *rows, int64_t offset, I (&to)[2]) {
    const I a = _mm512_loadu_si512(rows[0] + offset), b = _mm512_loadu_si512(rows[1] + offset);
    to[0] = _mm512_unpacklo_epi16(a, b);
    to[1] = _mm512_unpackhi_epi16(a, b);
  }
  static FA_INLINE void interleave_lanes(const char *const *rows, int64_t offset, I (&to)[4]) {
    const I a = _mm512_loadu_si512(rows[0] + offset), b = _mm512_loadu_si512(rows[1] + offset);
    const I c = _mm512_loadu_si512(rows[2] + offset), d = _mm512_loadu_si512(rows[3] + offset);
    const I ab[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)};
    const I cd[2] = {_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d)};
    to[0] = _mm512_unpacklo_epi16(ab[0], cd[0]);
    to[1] = _mm512_unpackhi_epi16(ab[0], cd[0]);
    to[2] = _mm512_unpacklo_epi16(ab[1], cd[1]);
    to[3] = _mm512_unpackhi_epi16(ab[1], cd[1]);
  }
  static FA_INLINE void order_lanes(F (&x)[2]) {
    const I first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), rest = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const __m512d a = _mm512_castps_pd(x[0]), b = _mm512_castps_pd(x[1]);
    x[0] = _mm512_castpd_ps(_mm512_permutex2var_pd(a, first, b));
    x[1] = _mm512_castpd_ps(_mm512_permutex2var_pd(a, rest, b));
  }
  static FA_INLINE void order_lanes(F (&x)[4]) {
    const F a = _mm512_shuffle_f32x4(x[0], x[1], 0x44), b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
    const F c = _mm512_shuffle_f32x4(x[0], x[1], 0xEE), d = _mm512_shuffle_f32x4(x[2], x[3], 0xEE);
    x[0] = _mm512_shuffle_f32x4(a, b, 0x88);
    x[1] = _mm512_shuffle_f32x4(a, b, 0xDD);
    x[2] = _mm512_shuffle_f32x4(c, d, 0x88);
    x[3] = _mm512_shuffle_f32x4(c, d, 0xDD);
  }
  // kWidth bytes, widened and narrowed (they fit).
  static FA_INLINE I iload_i8(const int8_t *p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  }
  static FA_INLINE void istore_u8(uint8_t *p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(x));
  }

  // e4m3 in units of kE4m3Unit, which fp16 has: its exponents are those of e4m3, less 8. The sum carries into the highest bit of the exponent
  // where exponent and fraction are all ones: that NaN is one of fp16, too.
  static constexpr float kE4m3Unit = 256.0f;
  static FA_INLINE F load_e4m3_units(const uint8_t *p) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    const __m256i shifted = _mm256_slli_epi16(wide, 7), sum = _mm256_add_epi16(shifted, _mm256_set1_epi16(0x80));
    const __m256i half = _mm256_xor_si256(shifted, _mm256_and_si256(sum, _mm256_set1_epi16(0x4000)));
    return _mm512_cvtph_ps(half);
  }
  static FA_INLINE F load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
  }
  static FA_INLINE void store_f16(uint16_t *p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static FA_INLINE F load_bf16(const uint16_t *p) {
    const I wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    return from_bits(_mm512_slli_epi32(wide, 16));
  }
  static FA_INLINE void store_bf16(uint16_t *p, F x) {
    const I b = bits(x);
    const I odd = iand(shr<16>(b), iset(1));
    I r = shr<16>(iadd(b, iadd(odd, iset(0x7FFF))));
    const M nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    r = iselect(nan, ior(shr<16>(b), iset(0x40)), r);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtepi32_epi16(r));
  }

#if defined(__AVX512BF16__)
  static FA_INLINE __m512bh as_bf16(I a) { return __builtin_bit_cast(__m512bh, a); }
  // 2 * kWidth elements rounded to bf16, a first. Subnormal inputs and results become zero.
  static FA_INLINE I to_bf16(F a, F b) { return __builtin_bit_cast(I, _mm512_cvtne2ps_pbh(b, a)); }
  // c + a0 b0 + a1 b1 of the two bf16 numbers in every lane of a and b. Subnormal numbers are taken for zero, as operands and as results.
  static FA_INLINE F dot_bf16(I a, I b, F c) { return _mm512_dpbf16_ps(c, as_bf16(a), as_bf16(b)); }
  // Lanes are 16-bit integers, two in a lane of I.
  static FA_INLINE I max_u16(I a, I b) { return _mm512_max_epu16(a, b); }
  static FA_INLINE I min_u16(I a, I b) { return _mm512_min_epu16(a, b); }
  static FA_INLINE I add_u16(I a, I b) { return _mm512_add_epi16(a, b); }
  // (a0, b0, a1, b1, ..): the first 2 * kWidth of them, and the rest.
  static FA_INLINE void interleave_u16(I a, I b, I &first, I &rest) {
    const I low = _mm512_setr_epi32(0x200000, 0x210001, 0x220002, 0x230003, 0x240004, 0x250005, 0x260006, 0x270007, 0x280008,
                                    0x290009, 0x2A000A, 0x2B000B, 0x2C000C, 0x2D000D, 0x2E000E, 0x2F000F);
    first = _mm512_permutex2var_epi16(a, low, b);
    rest = _mm512_permutex2var_epi16(a, _mm512_add_epi16(low, _mm512_set1_epi16(16)), b);
  }
#endif

  // rows[i] lane j <- rows[j] lane i.
  static FA_INLINE void transpose(F (&r)[16]) {
    F t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
      const __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
      r[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
      r[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
      r[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
      r[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
      t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xDD);
      t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
      t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xDD);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
      r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xDD);
      r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
      r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xDD);
    }
  }

  static FA_INLINE void prefetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T0); }
  static FA_INLINE void prefetch_l2(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T1); }

 private:
  // Lane n of 128 bits: the sum of the four lanes of x_n, in the order of reduce_add.
  static FA_INLINE F add_lanes(F x0, F x1, F x2, F x3) {
    const F x01 = add(_mm512_shuffle_f32x4(x0, x1, 0x44), _mm512_shuffle_f32x4(x0, x1, 0xEE));
    const F x23 = add(_mm512_shuffle_f32x4(x2, x3, 0x44), _mm512_shuffle_f32x4(x2, x3, 0xEE));
    return add(_mm512_shuffle_f32x4(x01, x23, 0x88), _mm512_shuffle_f32x4(x01, x23, 0xDD));
  }
  // Column n of every lane: the sum of the four columns of x_n, in the order of reduce_add.
  static FA_INLINE F add_columns(F x0, F x1, F x2, F x3) {
    const F x01 = add(_mm512_unpacklo_ps(x0, x1), _mm512_unpackhi_ps(x0, x1));
    const F x23 = add(_mm512_unpacklo_ps(x2, x3), _mm512_unpackhi_ps(x2, x3));
    const __m512d a = _mm512_castps_pd(x01), b = _mm512_castps_pd(x23);
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
};

}  // namespace fa::cpu::FA_ISA
