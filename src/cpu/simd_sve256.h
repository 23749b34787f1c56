// SPDX-License-Identifier: Apache-2.0
// SVE verbs for processors whose vectors have exactly 256 bits; see cpu/simd.h. The length is known when this is compiled
// (-msve-vector-bits=256), so that vectors can be members and elements of arrays.
#pragma once

#include <arm_sve.h>

#include <cstddef>

#include "cpu/simd_exp2.h"

static_assert(__ARM_FEATURE_SVE_BITS == 256, "cpu/simd_sve256.h: compile for SVE vectors of 256 bits");

namespace fa::cpu::FA_ISA {

struct Simd {
  typedef svfloat32_t F __attribute__((arm_sve_vector_bits(256)));
  typedef svuint32_t I __attribute__((arm_sve_vector_bits(256)));
  typedef svbool_t M __attribute__((arm_sve_vector_bits(256)));
  static constexpr int kWidth = 8;
  static constexpr int kRegisters = 32;

  // Lanes 0 .. n - 1, for any n.
  static FA_INLINE M first(int n) { return svwhilelt_b32_s32(0, n); }
  // The lanes whose bit is set.
  static FA_INLINE M lanes(uint32_t bits) {
    return svcmpne_n_u32(all(), svand_u32_x(all(), iset(bits), svlsl_u32_x(all(), iset(1), iota())), 0);
  }

  static FA_INLINE F zero() { return svdup_n_f32(0.0f); }
  static FA_INLINE F set(float x) { return svdup_n_f32(x); }
  static FA_INLINE F load(const float *p) { return svld1_f32(all(), p); }
  static FA_INLINE F load(const float *p, int n) { return svld1_f32(first(n), p); }
  static FA_INLINE void store(float *p, F x) { svst1_f32(all(), p, x); }
  static FA_INLINE void store(float *p, F x, int n) { svst1_f32(first(n), p, x); }

  static FA_INLINE F add(F a, F b) { return svadd_f32_x(all(), a, b); }
  static FA_INLINE F sub(F a, F b) { return svsub_f32_x(all(), a, b); }
  static FA_INLINE F mul(F a, F b) { return svmul_f32_x(all(), a, b); }
  static FA_INLINE F div(F a, F b) { return svdiv_f32_x(all(), a, b); }
  static FA_INLINE F fma(F a, F b, F c) { return svmla_f32_x(all(), c, a, b); }   // a b + c
  static FA_INLINE F fms(F a, F b, F c) { return svnmls_f32_x(all(), c, a, b); }  // a b - c
  static FA_INLINE F max(F a, F b) { return svmaxnm_f32_x(all(), a, b); }         // the other one if one is NaN
  static FA_INLINE F min(F a, F b) { return svminnm_f32_x(all(), a, b); }         // the other one if one is NaN
  static FA_INLINE F abs(F a) { return svabs_f32_x(all(), a); }
  static FA_INLINE F copysign(F a, F b) {
    return from_bits(ior(iand(bits(a), iset(0x7FFFFFFFu)), iand(bits(b), iset(0x80000000u))));
  }

  static FA_INLINE M lt(F a, F b) { return svcmplt_f32(all(), a, b); }
  static FA_INLINE M eq(F a, F b) { return svcmpeq_f32(all(), a, b); }
  static FA_INLINE F select(M m, F a, F b) { return svsel_f32(m, a, b); }  // m ? a : b
  static FA_INLINE bool any(M m) { return svptest_any(all(), m); }
  static FA_INLINE M mask_and(M a, M b) { return svand_b_z(all(), a, b); }
  static FA_INLINE M mask_or(M a, M b) { return svorr_b_z(all(), a, b); }

  // 2^x: 0 below -126 (-inf included), +inf from 128 on, NaN for NaN.
  static FA_INLINE F exp2(F x) {
    const F c = svmin_f32_x(all(), set(128.0f), svmax_f32_x(all(), set(-126.0f), x));  // NaN for NaN
    const F n = svrintm_f32_x(all(), c);                                               // floor
    const F f = sub(c, n);
    F p = fma(set(kExp2C5), f, set(kExp2C4));
    p = fma(p, f, set(kExp2C3));
    p = fma(p, f, set(kExp2C2));
    p = fma(p, f, set(kExp2C1));
    p = fma(p, f, set(1.0f));
    const I power = svlsl_n_u32_x(all(), svreinterpret_u32_s32(svcvt_s32_f32_x(all(), n)), 23);  // 0 for NaN
    return select(lt(x, set(-126.0f)), zero(), from_bits(iadd(bits(p), power)));
  }

  // The upper half of the lanes is added to the lower half, until one is left.
  static FA_INLINE float reduce_add(F a) {
    a = add(a, svext_f32(a, a, 4));
    a = add(a, svext_f32(a, a, 2));
    a = add(a, svext_f32(a, a, 1));
    return svlastb_f32(svptrue_pat_b32(SV_VL1), a);
  }
  // to[n] = reduce_add(x[n]), to the bit.
  template <int N>
  static FA_INLINE void reduce_add(const F (&x)[N], float *to) {
    if constexpr (N % 4 != 0) {
      for (int n = 0; n < N; ++n) to[n] = reduce_add(x[n]);
    } else {
      for (int n = 0; n < N; n += 4) {
        // Lanes 0 and 1 of a, then of b: sums of their lanes n, n + 2, n + 4 and n + 6.
        const auto pairs = [](F a, F b) __attribute__((always_inline)) {
          a = add(a, svext_f32(a, a, 4));
          b = add(b, svext_f32(b, b, 4));
          return add(first_pairs(a, b), svreinterpret_f32_f64(svtrn2_f64(svreinterpret_f64_f32(a), svreinterpret_f64_f32(b))));
        };
        const F even = pairs(x[n], x[n + 2]), odd = pairs(x[n + 1], x[n + 3]);
        const F all_pairs = svreinterpret_f32_f64(svzip1_f64(svreinterpret_f64_f32(even), svreinterpret_f64_f32(odd)));
        store(to + n, add(svuzp1_f32(all_pairs, all_pairs), svuzp2_f32(all_pairs, all_pairs)), 4);
      }
    }
  }
  static FA_INLINE float reduce_max(F a) { return svmaxnmv_f32(all(), a); }

  static FA_INLINE I iset(uint32_t x) { return svdup_n_u32(x); }
  static FA_INLINE I iload(const uint32_t *p) {
    return svreinterpret_u32_u8(svld1_u8(svptrue_b8(), reinterpret_cast<const uint8_t *>(p)));
  }
  static FA_INLINE void istore(uint32_t *p, I x) {
    svst1_u8(svptrue_b8(), reinterpret_cast<uint8_t *>(p), svreinterpret_u8_u32(x));
  }
  static FA_INLINE I iota() { return svindex_u32(0, 1); }
  static FA_INLINE I iadd(I a, I b) { return svadd_u32_x(all(), a, b); }
  static FA_INLINE I iand(I a, I b) { return svand_u32_x(all(), a, b); }
  static FA_INLINE I ior(I a, I b) { return svorr_u32_x(all(), a, b); }
  static FA_INLINE I ixor(I a, I b) { return sveor_u32_x(all(), a, b); }
  template <int n>
  static FA_INLINE I shl(I a) {
    return svlsl_n_u32_x(all(), a, n);
  }
  template <int n>
  static FA_INLINE I shr(I a) {
    return svlsr_n_u32_x(all(), a, n);
  }
  static FA_INLINE M ilt(I a, I b) { return svcmplt_s32(all(), svreinterpret_s32_u32(a), svreinterpret_s32_u32(b)); }  // signed
  static FA_INLINE M ieq(I a, I b) { return svcmpeq_u32(all(), a, b); }
  static FA_INLINE I iselect(M m, I a, I b) { return svsel_u32(m, a, b); }
  static FA_INLINE F to_float(I a) { return svcvt_f32_s32_x(all(), svreinterpret_s32_u32(a)); }  // signed
  static FA_INLINE I bits(F a) { return svreinterpret_u32_f32(a); }
  static FA_INLINE F from_bits(I a) { return svreinterpret_f32_u32(a); }
  // The two halves of the 64-bit products of the lanes of a (unsigned) and the constant b.
  static FA_INLINE void mul_wide(I a, uint32_t b, I &high, I &low) {
    high = svmulh_u32_x(all(), a, iset(b));
    low = svmul_u32_x(all(), a, iset(b));
  }

  // kWidth bytes, widened and narrowed (they fit).
  static FA_INLINE I iload_i8(const int8_t *p) { return svld1sb_u32(all(), p); }
  static FA_INLINE void istore_u8(uint8_t *p, I x) { svst1b_u32(all(), p, x); }

  // e4m3 in units of kE4m3Unit, which fp16 has: its exponents are those of e4m3, less 8. The sum carries into the highest bit of the exponent
  // where exponent and fraction are all ones: that NaN is one of fp16, too.
  static constexpr float kE4m3Unit = 256.0f;
  static FA_INLINE F load_e4m3_units(const uint8_t *p) {
    const I shifted = shl<7>(iload_i8(reinterpret_cast<const int8_t *>(p)));
    const I carry = iand(iadd(shifted, iset(0x80)), iset(0x4000));
    return from_f16(ixor(shifted, carry));
  }
  static FA_INLINE F load_f16(const uint16_t *p) { return from_f16(svld1uh_u32(all(), p)); }
  static FA_INLINE void store_f16(uint16_t *p, F x) { svst1h_u32(all(), p, svreinterpret_u32_f16(svcvt_f16_f32_x(all(), x))); }
  static FA_INLINE F load_bf16(const uint16_t *p) { return from_bits(shl<16>(svld1uh_u32(all(), p))); }
  static FA_INLINE void store_bf16(uint16_t *p, F x) {
    const I b = bits(x), odd = iand(shr<16>(b), iset(1));
    const I r = iadd(b, iadd(odd, iset(0x7FFF)));
    svst1h_u32(all(), p, shr<16>(iselect(eq(x, x), r, ior(b, iset(0x400000)))));
  }

  // Four floats, and two, in each 128 bits.
  static FA_INLINE F load_four(const float *p) { return svld1rq_f32(all(), p); }
  static FA_INLINE F load_two(const float *p) {
    uint64_t two;
    __builtin_memcpy(&two, p, sizeof two);
    return svreinterpret_f32_u64(svdup_n_u64(two));
  }
  // c + a_n b for element n of load_four or load_two.
  template <int n>
  static FA_INLINE F fma_lane(F a, F b, F c) {
    return svmla_lane_f32(c, b, a, n);
  }

  // rows[i] lane j <- rows[j] lane i.
  static FA_INLINE void transpose(F (&r)[8]) {
#pragma GCC unroll 3
    for (int stage = 0; stage < 3; ++stage) {
      const F a0 = svzip1_f32(r[0], r[4]), a1 = svzip2_f32(r[0], r[4]), a2 = svzip1_f32(r[1], r[5]),
              a3 = svzip2_f32(r[1], r[5]);
      const F a4 = svzip1_f32(r[2], r[6]), a5 = svzip2_f32(r[2], r[6]), a6 = svzip1_f32(r[3], r[7]),
              a7 = svzip2_f32(r[3], r[7]);
      r[0] = a0, r[1] = a1, r[2] = a2, r[3] = a3, r[4] = a4, r[5] = a5, r[6] = a6, r[7] = a7;
    }
  }

  static FA_INLINE void prefetch(const void *p) { __builtin_prefetch(p); }
  static FA_INLINE void prefetch_l2(const void *p) { __builtin_prefetch(p, 0, 2); }

 private:
  static FA_INLINE svbool_t all() { return svptrue_b32(); }
  // The number in the lower half of each lane.
  static FA_INLINE F from_f16(I x) { return svcvt_f32_f16_x(all(), svreinterpret_f16_u32(x)); }
  // Lanes 0 and 1 of a, then of b, then 4 and 5 of both.
  static FA_INLINE F first_pairs(F a, F b) {
    return svreinterpret_f32_f64(svtrn1_f64(svreinterpret_f64_f32(a), svreinterpret_f64_f32(b)));
  }
};

}  // namespace fa::cpu::FA_ISA
