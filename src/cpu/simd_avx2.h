// SPDX-License-Identifier: Apache-2.0
// AVX2 + FMA + F16C verbs; see cpu/simd.h.
#pragma once

#include <immintrin.h>

#include <cstddef>

#include "cpu/simd_exp2.h"

namespace fa::cpu::avx2 {

struct Simd {
  using F = __m256;
  using I = __m256i;
  struct M {
    __m256 bits;
  };
  static constexpr int kWidth = 8;
  static constexpr int kRegisters = 16;

  // Lanes 0 .. n - 1, for any n.
  static FA_INLINE M first(int n) { return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), iota()))}; }
  // The lanes whose bit is set.
  static FA_INLINE M lanes(uint32_t bits) {
    const I bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return ieq(iand(iset(bits), bit), bit);
  }

  static FA_INLINE F zero() { return _mm256_setzero_ps(); }
  static FA_INLINE F set(float x) { return _mm256_set1_ps(x); }
  static FA_INLINE F load(const float *p) { return _mm256_loadu_ps(p); }
  static FA_INLINE F load(const float *p, int n) { return _mm256_maskload_ps(p, _mm256_castps_si256(first(n).bits)); }
  static FA_INLINE void store(float *p, F x) { _mm256_storeu_ps(p, x); }
  static FA_INLINE void store(float *p, F x, int n) { _mm256_maskstore_ps(p, _mm256_castps_si256(first(n).bits), x); }

  static FA_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  static FA_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static FA_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static FA_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
  static FA_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }  // a b + c
  static FA_INLINE F fms(F a, F b, F c) { return _mm256_fmsub_ps(a, b, c); }  // a b - c
  static FA_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }            // b if either is NaN
  static FA_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }            // b if either is NaN
  static FA_INLINE F abs(F a) { return _mm256_andnot_ps(set(-0.0f), a); }
  static FA_INLINE F copysign(F a, F b) { return _mm256_or_ps(_mm256_and_ps(set(-0.0f), b), _mm256_andnot_ps(set(-0.0f), a)); }

  static FA_INLINE M lt(F a, F b) { return {_mm256_cmp_ps(a, b, _CMP_LT_OQ)}; }
  static FA_INLINE M eq(F a, F b) { return {_mm256_cmp_ps(a, b, _CMP_EQ_OQ)}; }
  static FA_INLINE F select(M m, F a, F b) { return _mm256_blendv_ps(b, a, m.bits); }  // m ? a : b
  static FA_INLINE bool any(M m) { return _mm256_movemask_ps(m.bits) != 0; }
  static FA_INLINE M mask_and(M a, M b) { return {_mm256_and_ps(a.bits, b.bits)}; }
  static FA_INLINE M mask_or(M a, M b) { return {_mm256_or_ps(a.bits, b.bits)}; }

  // 2^x: 0 below -126 (-inf included), +inf from 128 on, NaN for NaN.
  static FA_INLINE F exp2(F x) {
    const F c = min(set(128.0f), max(set(-126.0f), x));
    const F n = _mm256_floor_ps(c);
    const F f = sub(c, n);
    F p = fma(set(kExp2C5), f, set(kExp2C4));
    p = fma(p, f, set(kExp2C3));
    p = fma(p, f, set(kExp2C2));
    p = fma(p, f, set(kExp2C1));
    p = fma(p, f, set(1.0f));
    const F r = from_bits(iadd(bits(p), shl<23>(_mm256_cvtps_epi32(n))));
    return _mm256_and_ps(r, _mm256_cmp_ps(x, set(-126.0f), _CMP_NLT_UQ));
  }

  static FA_INLINE float reduce_add(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  // to[n] = reduce_add(x[n]), to the bit.
  template <int N>
  static FA_INLINE void reduce_add(const F (&x)[N], float *to) {
    if constexpr (N % 4 != 0) {
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) to[n] = reduce_add(x[n]);
    } else {
      const auto halves = [](F a) __attribute__((always_inline)) {
        return _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
      };
#pragma GCC unroll 2
      for (int n = 0; n < N; n += 4) {
        const __m128 a = halves(x[n]), b = halves(x[n + 1]), c = halves(x[n + 2]), d = halves(x[n + 3]);
        const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
        const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
        _mm_storeu_ps(to + n, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
      }
    }
  }
  static FA_INLINE float reduce_max(F a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }

  static FA_INLINE I iset(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static FA_INLINE I iload(const uint32_t *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
  static FA_INLINE void istore(uint32_t *p, I x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), x); }
  static FA_INLINE I iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
  static FA_INLINE I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
  static FA_INLINE I iand(I a, I b) { return _mm256_and_si256(a, b); }
  static FA_INLINE I ior(I a, I b) { return _mm256_or_si256(a, b); }
  static FA_INLINE I ixor(I a, I b) { return _mm256_xor_si256(a, b); }
  template <int n>
  static FA_INLINE I shl(I a) {
    return _mm256_slli_epi32(a, n);
  }
  template <int n>
  static FA_INLINE I shr(I a) {
    return _mm256_srli_epi32(a, n);
  }
  static FA_INLINE M ilt(I a, I b) { return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(b, a))}; }  // signed
  static FA_INLINE M ieq(I a, I b) { return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b))}; }
  static FA_INLINE I iselect(M m, I a, I b) { return bits(select(m, from_bits(a), from_bits(b))); }
  static FA_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }  // signed
  static FA_INLINE I bits(F a) { return _mm256_castps_si256(a); }
  static FA_INLINE F from_bits(I a) { return _mm256_castsi256_ps(a); }
  // The two halves of the 64-bit products of the lanes of a (unsigned) and the constant b.
  static FA_INLINE void mul_wide(I a, uint32_t b, I &high, I &low) {
    const I vb = iset(b);
    const I even = _mm256_mul_epu32(a, vb);
    const I odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), vb);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  }

  // kWidth bytes, widened and narrowed (they fit).
  static FA_INLINE I iload_i8(const int8_t *p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
  }
  static FA_INLINE void istore_u8(uint8_t *p, I x) {
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packus_epi16(words, words));
  }

  // e4m3 in units of kE4m3Unit, which fp16 has: its exponents are those of e4m3, less 8. The sum carries into the highest bit of the exponent
  // where exponent and fraction are all ones: that NaN is one of fp16, too.
  static constexpr float kE4m3Unit = 256.0f;
  static FA_INLINE F load_e4m3_units(const uint8_t *p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
    const __m128i shifted = _mm_slli_epi16(wide, 7), sum = _mm_add_epi16(shifted, _mm_set1_epi16(0x80));
    const __m128i half = _mm_xor_si128(shifted, _mm_and_si128(sum, _mm_set1_epi16(0x4000)));
    return _mm256_cvtph_ps(half);
  }
  static FA_INLINE F load_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  }
  static FA_INLINE void store_f16(uint16_t *p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  static FA_INLINE F load_bf16(const uint16_t *p) {
    const I wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return from_bits(_mm256_slli_epi32(wide, 16));
  }
  static FA_INLINE void store_bf16(uint16_t *p, F x) {
    const I b = bits(x);
    const I odd = iand(shr<16>(b), iset(1));
    I r = shr<16>(iadd(b, iadd(odd, iset(0x7FFF))));
    r = iselect({_mm256_cmp_ps(x, x, _CMP_UNORD_Q)}, ior(shr<16>(b), iset(0x40)), r);
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), packed);
  }

  // rows[i] lane j <- rows[j] lane i.
  static FA_INLINE void transpose(F (&r)[8]) {
    F t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
      t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
      r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
      r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
      r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const F low = r[i], high = r[i + 4];
      r[i] = _mm256_permute2f128_ps(low, high, 0x20);
      r[i + 4] = _mm256_permute2f128_ps(low, high, 0x31);
    }
  }

  static FA_INLINE void prefetch(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T0); }
  static FA_INLINE void prefetch_l2(const void *p) { _mm_prefetch(static_cast<const char *>(p), _MM_HINT_T1); }
};

}  // namespace fa::cpu::avx2
