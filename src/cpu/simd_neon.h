// SPDX-License-Identifier: Apache-2.0
// NEON verbs of any 64-bit Arm processor; see cpu/simd.h. With FEAT_BF16 or FEAT_FHM (a source compiled for it) also what the kernels for its
// products of 16-bit numbers need.
#pragma once

#include <arm_neon.h>

#include <cstddef>

#include "cpu/simd_exp2.h"

namespace fa::cpu::FA_ISA {

struct Simd {
  using F = float32x4_t;
  using I = uint32x4_t;
  using M = uint32x4_t;  // 0 or all ones per lane
  static constexpr int kWidth = 4;
  static constexpr int kRegisters = 32;

  // Lanes 0 .. n - 1, for any n.
  static FA_INLINE M first(int n) { return ilt(iota(), iset(static_cast<uint32_t>(n))); }
  // The lanes whose bit is set.
  static FA_INLINE M lanes(uint32_t bits) {
    constexpr uint32_t kBits[4] = {1, 2, 4, 8};
    return vtstq_u32(iset(bits), vld1q_u32(kBits));
  }

  static FA_INLINE F zero() { return vdupq_n_f32(0.0f); }
  static FA_INLINE F set(float x) { return vdupq_n_f32(x); }
  static FA_INLINE F load(const float *p) { return vld1q_f32(p); }
  static FA_INLINE F load(const float *p, int n) {
    if (n >= kWidth) return load(p);
    float32x2_t low = vdup_n_f32(0.0f), high = low;
    if (n >= 2) {
      low = vld1_f32(p);
      if (n == 3) high = vld1_lane_f32(p + 2, high, 0);
    } else if (n == 1) {
      low = vld1_lane_f32(p, low, 0);
    }
    return vcombine_f32(low, high);
  }
  static FA_INLINE void store(float *p, F x) { vst1q_f32(p, x); }
  static FA_INLINE void store(float *p, F x, int n) {
    if (n >= kWidth) return store(p, x);
    if (n >= 2) {
      vst1_f32(p, vget_low_f32(x));
      if (n == 3) vst1q_lane_f32(p + 2, x, 2);
    } else if (n == 1) {
      vst1q_lane_f32(p, x, 0);
    }
  }

  static FA_INLINE F add(F a, F b) { return vaddq_f32(a, b); }
  static FA_INLINE F sub(F a, F b) { return vsubq_f32(a, b); }
  static FA_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
  static FA_INLINE F div(F a, F b) { return vdivq_f32(a, b); }
  static FA_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }             // a b + c
  static FA_INLINE F fms(F a, F b, F c) { return vfmaq_f32(vnegq_f32(c), a, b); }  // a b - c
  static FA_INLINE F max(F a, F b) { return vmaxnmq_f32(a, b); }                   // the other one if one is NaN
  static FA_INLINE F min(F a, F b) { return vminnmq_f32(a, b); }                   // the other one if one is NaN
  static FA_INLINE F abs(F a) { return vabsq_f32(a); }
  static FA_INLINE F copysign(F a, F b) { return vbslq_f32(iset(0x80000000u), b, a); }

  static FA_INLINE M lt(F a, F b) { return vcltq_f32(a, b); }
  static FA_INLINE M eq(F a, F b) { return vceqq_f32(a, b); }
  static FA_INLINE F select(M m, F a, F b) { return vbslq_f32(m, a, b); }  // m ? a : b
  static FA_INLINE bool any(M m) { return vmaxvq_u32(m) != 0; }
  static FA_INLINE M mask_and(M a, M b) { return vandq_u32(a, b); }
  static FA_INLINE M mask_or(M a, M b) { return vorrq_u32(a, b); }

  // 2^x: 0 below -126 (-inf included), +inf from 128 on, NaN for NaN.
  static FA_INLINE F exp2(F x) {
    const F c = vminq_f32(set(128.0f), vmaxq_f32(set(-126.0f), x));  // NaN for NaN
    const F n = vrndmq_f32(c);                                       // floor
    const F f = sub(c, n);
    F p = fma(set(kExp2C5), f, set(kExp2C4));
    p = fma(p, f, set(kExp2C3));
    p = fma(p, f, set(kExp2C2));
    p = fma(p, f, set(kExp2C1));
    p = fma(p, f, set(1.0f));
    const I power = vshlq_n_u32(vreinterpretq_u32_s32(vcvtq_s32_f32(n)), 23);  // 0 for NaN
    return from_bits(vbicq_u32(iadd(bits(p), power), vcltq_f32(x, set(-126.0f))));
  }

  static FA_INLINE float reduce_add(F a) { return vaddvq_f32(a); }
  // to[n] = reduce_add(x[n]), to the bit: both add neighbours, then the two sums.
  template <int N>
  static FA_INLINE void reduce_add(const F (&x)[N], float *to) {
    if constexpr (N % 4 != 0) {
      for (int n = 0; n < N; ++n) to[n] = reduce_add(x[n]);
    } else {
      for (int n = 0; n < N; n += 4) store(to + n, vpaddq_f32(vpaddq_f32(x[n], x[n + 1]), vpaddq_f32(x[n + 2], x[n + 3])));
    }
  }
  static FA_INLINE float reduce_max(F a) { return vmaxnmvq_f32(a); }

  static FA_INLINE I iset(uint32_t x) { return vdupq_n_u32(x); }
  static FA_INLINE I iload(const uint32_t *p) { return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t *>(p))); }
  static FA_INLINE void istore(uint32_t *p, I x) { vst1q_u8(reinterpret_cast<uint8_t *>(p), vreinterpretq_u8_u32(x)); }
  static FA_INLINE I iota() {
    constexpr uint32_t kLanes[4] = {0, 1, 2, 3};
    return vld1q_u32(kLanes);
  }
  static FA_INLINE I iadd(I a, I b) { return vaddq_u32(a, b); }
  static FA_INLINE I iand(I a, I b) { return vandq_u32(a, b); }
  static FA_INLINE I ior(I a, I b) { return vorrq_u32(a, b); }
  static FA_INLINE I ixor(I a, I b) { return veorq_u32(a, b); }
  template <int n>
  static FA_INLINE I shl(I a) {
    return vshlq_n_u32(a, n);
  }
  template <int n>
  static FA_INLINE I shr(I a) {
    return vshrq_n_u32(a, n);
  }
  static FA_INLINE M ilt(I a, I b) { return vcltq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)); }  // signed
  static FA_INLINE M ieq(I a, I b) { return vceqq_u32(a, b); }
  static FA_INLINE I iselect(M m, I a, I b) { return vbslq_u32(m, a, b); }
  static FA_INLINE F to_float(I a) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a)); }  // signed
  static FA_INLINE I bits(F a) { return vreinterpretq_u32_f32(a); }
  static FA_INLINE F from_bits(I a) { return vreinterpretq_f32_u32(a); }
  // The two halves of the 64-bit products of the lanes of a (unsigned) and the constant b.
  static FA_INLINE void mul_wide(I a, uint32_t b, I &high, I &low) {
    const I first = vreinterpretq_u32_u64(vmull_n_u32(vget_low_u32(a), b));
    const I rest = vreinterpretq_u32_u64(vmull_high_n_u32(a, b));
    low = vuzp1q_u32(first, rest);
    high = vuzp2q_u32(first, rest);
  }

  // kWidth bytes, widened and narrowed (they fit).
  static FA_INLINE I iload_i8(const int8_t *p) { return vreinterpretq_u32_s32(vmovl_s16(four_i8(p))); }
  static FA_INLINE void istore_u8(uint8_t *p, I x) {
    const uint16x4_t words = vmovn_u32(x);
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(words, words))), 0);
    __builtin_memcpy(p, &bytes, sizeof bytes);
  }

  // e4m3 in units of kE4m3Unit, which fp16 has: its exponents are those of e4m3, less 8. The sum carries into the highest bit of the exponent
  // where exponent and fraction are all ones: that NaN is one of fp16, too.
  static constexpr float kE4m3Unit = 256.0f;
  static FA_INLINE F load_e4m3_units(const uint8_t *p) {
    const uint16x4_t shifted = vshl_n_u16(vreinterpret_u16_s16(four_i8(reinterpret_cast<const int8_t *>(p))), 7);
    const uint16x4_t carry = vand_u16(vadd_u16(shifted, vdup_n_u16(0x80)), vdup_n_u16(0x4000));
    return vcvt_f32_f16(vreinterpret_f16_u16(veor_u16(shifted, carry)));
  }
  static FA_INLINE F load_f16(const uint16_t *p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
  static FA_INLINE void store_f16(uint16_t *p, F x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
  static FA_INLINE F load_bf16(const uint16_t *p) { return from_bits(vshll_n_u16(vld1_u16(p), 16)); }
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  static FA_INLINE void store_bf16(uint16_t *p, F x) { vst1_u16(p, vreinterpret_u16_bf16(vcvt_bf16_f32(x))); }
  // 2 * kWidth elements rounded to bf16, a first.
  static FA_INLINE I to_bf16(F a, F b) { return vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(a), b)); }
  // 2 * kWidth bytes as bf16, which has all of their numbers.
  static FA_INLINE I i8_to_bf16(const int8_t *p) {
    const int16x8_t x = vmovl_s8(vld1_s8(p));
    return upper_halves(vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x)));
  }
  // By way of fp16, as load_e4m3_units.
  static FA_INLINE I e4m3_to_bf16(const uint8_t *p) {
    const uint16x8_t shifted = vreinterpretq_u16_s16(vshll_n_s8(vld1_s8(reinterpret_cast<const int8_t *>(p)), 7));
    const uint16x8_t carry = vandq_u16(vaddq_u16(shifted, vdupq_n_u16(0x80)), vdupq_n_u16(0x4000));
    const float16x8_t x = vreinterpretq_f16_u16(veorq_u16(shifted, carry));
    return upper_halves(mul(vcvt_f32_f16(vget_low_f16(x)), set(256.0f)), mul(vcvt_high_f32_f16(x), set(256.0f)));
  }
  // c + A B of 2 x 2 sums (row, column): a has two rows of four bf16 numbers, b two columns of four. The products of a row's first two
  // numbers are added to each other and then to c, then those of the last two. Every sum is rounded to odd: cut off, with the last bit set
  // where that changes it. Subnormal numbers are taken for zero, as operands and as results.
  static FA_INLINE F multiply_bf16(I a, I b, F c) {
    return vbfmmlaq_f32(c, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
  }
  // Lanes are 16-bit integers, two in a lane of I.
  static FA_INLINE I max_u16(I a, I b) {
    return vreinterpretq_u32_u16(vmaxq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
  }
  static FA_INLINE I min_u16(I a, I b) {
    return vreinterpretq_u32_u16(vminq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
  }
  static FA_INLINE I add_u16(I a, I b) {
    return vreinterpretq_u32_u16(vaddq_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
  }
  // (a0, b0, a1, b1, ..): the first 2 * kWidth of them, and the rest.
  static FA_INLINE void interleave_u16(I a, I b, I &first, I &rest) {
    first = vreinterpretq_u32_u16(vzip1q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
    rest = vreinterpretq_u32_u16(vzip2q_u16(vreinterpretq_u16_u32(a), vreinterpretq_u16_u32(b)));
  }
  // The same for lanes of 32 bits.
  static FA_INLINE void interleave_u32(I a, I b, I &first, I &rest) {
    first = vzip1q_u32(a, b);
    rest = vzip2q_u32(a, b);
  }
  // The upper 16 bits of each lane, those of a first: of numbers that fit in bf16.
  static FA_INLINE I upper_halves(F a, F b) {
    return vreinterpretq_u32_u16(vuzp2q_u16(vreinterpretq_u16_f32(a), vreinterpretq_u16_f32(b)));
  }
  // (a0, a2, b0, b2) and (a1, a3, b1, b3).
  static FA_INLINE void separate(F a, F b, F &even, F &odd) {
    even = vuzp1q_f32(a, b);
    odd = vuzp2q_f32(a, b);
  }
  static FA_INLINE void store_halves(uint16_t *first, uint16_t *second, I x) {
    vst1_u16(first, vget_low_u16(vreinterpretq_u16_u32(x)));
    vst1_u16(second, vget_high_u16(vreinterpretq_u16_u32(x)));
  }
  // The first half of a and that of b; the second halves.
  static FA_INLINE F first_halves(F a, F b) {
    return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
  }
  static FA_INLINE F second_halves(F a, F b) {
    return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
  }
#else
  static FA_INLINE void store_bf16(uint16_t *p, F x) {
    const I b = bits(x), odd = iand(shr<16>(b), iset(1));
    const I r = iadd(b, iadd(odd, iset(0x7FFF)));
    vst1_u16(p, vshrn_n_u32(iselect(eq(x, x), r, ior(b, iset(0x400000))), 16));
  }
#endif

#if defined(__ARM_FEATURE_FP16_FML)
  // c + a b of 2 * kWidth fp16 numbers: lane n takes products n, then kWidth + n. They are exact, sums are rounded as those of fp32.
  static FA_INLINE F fma_f16(I a, I b, F c) {
    const float16x8_t x = vreinterpretq_f16_u32(a), y = vreinterpretq_f16_u32(b);
    return vfmlalq_high_f16(vfmlalq_low_f16(c, x, y), x, y);
  }
  // low + a_n b and high + a_n b for fp16 number n of a, and for the first kWidth of b and the others.
  template <int n>
  static FA_INLINE void fma_f16_lane(I a, I b, F &low, F &high) {
    const float16x8_t x = vreinterpretq_f16_u32(a), y = vreinterpretq_f16_u32(b);
    low = vfmlalq_laneq_low_f16(low, y, x, n);
    high = vfmlalq_laneq_high_f16(high, y, x, n);
  }
#endif

  static FA_INLINE F load_four(const float *p) { return load(p); }
  static FA_INLINE float32x2_t load_two(const float *p) { return vld1_f32(p); }
  // c + a_n b for lane n of a.
  template <int n>
  static FA_INLINE F fma_lane(float32x2_t a, F b, F c) {
    return vfmaq_lane_f32(c, b, a, n);
  }
  template <int n>
  static FA_INLINE F fma_lane(F a, F b, F c) {
    return vfmaq_laneq_f32(c, b, a, n);
  }

  // rows[i] lane j <- rows[j] lane i.
  static FA_INLINE void transpose(F (&r)[4]) {
    const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(r[0], r[1])), b = vreinterpretq_f64_f32(vtrn2q_f32(r[0], r[1]));
    const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(r[2], r[3])), d = vreinterpretq_f64_f32(vtrn2q_f32(r[2], r[3]));
    r[0] = vreinterpretq_f32_f64(vzip1q_f64(a, c));
    r[1] = vreinterpretq_f32_f64(vzip1q_f64(b, d));
    r[2] = vreinterpretq_f32_f64(vzip2q_f64(a, c));
    r[3] = vreinterpretq_f32_f64(vzip2q_f64(b, d));
  }

  static FA_INLINE void prefetch(const void *p) { __builtin_prefetch(p); }
  static FA_INLINE void prefetch_l2(const void *p) { __builtin_prefetch(p, 0, 2); }

 private:
  static FA_INLINE int16x4_t four_i8(const int8_t *p) {
    uint32_t bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    return vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(bytes))));
  }
};

}  // namespace fa::cpu::FA_ISA
