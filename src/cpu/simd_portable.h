// SPDX-License-Identifier: Apache-2.0
// Verbs for any processor, written with the vector extensions of GCC and Clang; see cpu/simd.h. 128-bit vectors: what SSE2 and
// NEON have.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/simd_exp2.h"

namespace fa::cpu::FA_ISA {

struct Simd {
  typedef float F __attribute__((vector_size(16)));
  typedef uint32_t I __attribute__((vector_size(16)));
  typedef int32_t Signed __attribute__((vector_size(16)));
  using M = Signed;  // 0 or -1 per lane
  static constexpr int kWidth = 4;
#if defined(__aarch64__)
  static constexpr int kRegisters = 32;
#else
  static constexpr int kRegisters = 16;
#endif

  // Lanes 0 .. n - 1, for any n.
  static FA_INLINE M first(int n) { return (Signed)iota() < (Signed)iset(static_cast<uint32_t>(n)); }
  // The lanes whose bit is set.
  static FA_INLINE M lanes(uint32_t bits) { return (Signed)((iset(bits) & I{1, 2, 4, 8}) != iset(0)); }

  static FA_INLINE F zero() { return F{0, 0, 0, 0}; }
  static FA_INLINE F set(float x) { return F{x, x, x, x}; }
  static FA_INLINE F load(const float *p) {
    F x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static FA_INLINE F load(const float *p, int n) {
    F x = zero();
    for (int i = 0; i < kWidth; ++i) {
      if (i < n) x[i] = p[i];
    }
    return x;
  }
  static FA_INLINE void store(float *p, F x) { __builtin_memcpy(p, &x, sizeof x); }
  static FA_INLINE void store(float *p, F x, int n) {
    for (int i = 0; i < kWidth; ++i) {
      if (i < n) p[i] = x[i];
    }
  }

  static FA_INLINE F add(F a, F b) { return a + b; }
  static FA_INLINE F sub(F a, F b) { return a - b; }
  static FA_INLINE F mul(F a, F b) { return a * b; }
  static FA_INLINE F div(F a, F b) { return a / b; }
  static FA_INLINE F fma(F a, F b, F c) { return a * b + c; }  // fused where the compiler's target has it
  static FA_INLINE F fms(F a, F b, F c) { return a * b - c; }
  static FA_INLINE F max(F a, F b) { return select(a > b, a, b); }  // b if either is NaN
  static FA_INLINE F min(F a, F b) { return select(a < b, a, b); }  // b if either is NaN
  static FA_INLINE F abs(F a) { return from_bits(bits(a) & iset(0x7FFFFFFFu)); }
  static FA_INLINE F copysign(F a, F b) { return from_bits((bits(a) & iset(0x7FFFFFFFu)) | (bits(b) & iset(0x80000000u))); }

  static FA_INLINE M lt(F a, F b) { return a < b; }
  static FA_INLINE M eq(F a, F b) { return a == b; }
  static FA_INLINE F select(M m, F a, F b) { return from_bits(iselect(m, bits(a), bits(b))); }  // m ? a : b
  static FA_INLINE bool any(M m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }
  static FA_INLINE M mask_and(M a, M b) { return a & b; }
  static FA_INLINE M mask_or(M a, M b) { return a | b; }

  // 2^x: 0 below -126 (-inf included), +inf from 128 on, NaN for NaN.
  static FA_INLINE F exp2(F x) {
    const F c = min(set(128.0f), max(set(-126.0f), x));
    // Adding 1.5 * 2^23 leaves round(c) in the low bits of the sum; one less where that is above c gives the floor.
    const F shift = set(12582912.0f);
    const F rounded = c + shift;
    F n = rounded - shift;
    const M above = n > c;
    n = n - select(above, set(1.0f), zero());
    const I power = (bits(rounded) - (bits(shift) - iset(127)) + (I)above) << 23;  // 2^n, infinity for n = 128
    const F f = c - n;
    F p = fma(set(kExp2C5), f, set(kExp2C4));
    p = fma(p, f, set(kExp2C3));
    p = fma(p, f, set(kExp2C2));
    p = fma(p, f, set(kExp2C1));
    p = fma(p, f, set(1.0f));
    // The product is exact, and NaN for NaN: p is NaN then, and power any number.
    return from_bits(bits(p * from_bits(power)) & ~(I)(x < set(-126.0f)));
  }

  static FA_INLINE float reduce_add(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
  template <int N>
  static FA_INLINE void reduce_add(const F (&x)[N], float *to) {
    for (int n = 0; n < N; ++n) to[n] = reduce_add(x[n]);
  }
  static FA_INLINE float reduce_max(F a) {
    const float x = a[0] > a[2] ? a[0] : a[2], y = a[1] > a[3] ? a[1] : a[3];
    return x > y ? x : y;
  }

  static FA_INLINE I iset(uint32_t x) { return I{x, x, x, x}; }
  static FA_INLINE I iload(const uint32_t *p) {
    I x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static FA_INLINE void istore(uint32_t *p, I x) { __builtin_memcpy(p, &x, sizeof x); }
  static FA_INLINE I iota() { return I{0, 1, 2, 3}; }
  static FA_INLINE I iadd(I a, I b) { return a + b; }
  static FA_INLINE I iand(I a, I b) { return a & b; }
  static FA_INLINE I ior(I a, I b) { return a | b; }
  static FA_INLINE I ixor(I a, I b) { return a ^ b; }
  template <int n>
  static FA_INLINE I shl(I a) {
    return a << n;
  }
  template <int n>
  static FA_INLINE I shr(I a) {
    return a >> n;
  }
  static FA_INLINE M ilt(I a, I b) { return (Signed)a < (Signed)b; }  // signed
  static FA_INLINE M ieq(I a, I b) { return a == b; }
  static FA_INLINE I iselect(M m, I a, I b) { return ((I)m & a) | (~(I)m & b); }
  static FA_INLINE F to_float(I a) { return __builtin_convertvector((Signed)a, F); }  // signed
  static FA_INLINE I to_int(F a) { return (I) __builtin_convertvector(a, Signed); }   // towards zero
  static FA_INLINE I bits(F a) { return (I)a; }
  static FA_INLINE F from_bits(I a) { return (F)a; }
  // The two halves of the 64-bit products of the lanes of a (unsigned) and the constant b.
  static FA_INLINE void mul_wide(I a, uint32_t b, I &high, I &low) {
    for (int i = 0; i < kWidth; ++i) {
      const uint64_t product = uint64_t{a[i]} * b;
      high[i] = static_cast<uint32_t>(product >> 32);
      low[i] = static_cast<uint32_t>(product);
    }
  }

  static FA_INLINE I widen16(const uint16_t *p) { return I{p[0], p[1], p[2], p[3]}; }
  static FA_INLINE void narrow16(uint16_t *p, I x) {
    for (int i = 0; i < kWidth; ++i) p[i] = static_cast<uint16_t>(x[i]);
  }
  // Interleaves 2 kWidth numbers of 16 bits of two rows, or 4 kWidth bytes of four, within lanes of 128 bits: an element of the result has one number of each row.
  // Results of such columns are in order after order_lanes.
  static FA_INLINE void interleave_lanes(const char *const *rows, int64_t offset, I (&to)[2]) {
    uint16_t x[2 * kWidth][2];
    for (int r = 0; r < 2; ++r) {
      for (int64_t i = 0; i < 2 * kWidth; ++i) __builtin_memcpy(&x[i][r], rows[r] + offset + 2 * i, 2);
    }
    __builtin_memcpy(to, x, sizeof x);
  }
  static FA_INLINE void interleave_lanes(const char *const *rows, int64_t offset, I (&to)[4]) {
    char x[4 * kWidth][4];
    for (int r = 0; r < 4; ++r) {
      for (int64_t i = 0; i < 4 * kWidth; ++i) x[i][r] = rows[r][offset + i];
    }
    __builtin_memcpy(to, x, sizeof x);
  }
  template <int N>
  static FA_INLINE void order_lanes(F (&)[N]) {}
  // kWidth bytes, widened and narrowed (they fit).
  static FA_INLINE I iload_i8(const int8_t *p) { return (I)Signed{p[0], p[1], p[2], p[3]}; }
  static FA_INLINE void istore_u8(uint8_t *p, I x) {
    for (int i = 0; i < kWidth; ++i) p[i] = static_cast<uint8_t>(x[i]);
  }

  static constexpr float kE4m3Unit = 1.0f;
  static FA_INLINE F load_e4m3_units(const uint8_t *p) {
    const I byte = {p[0], p[1], p[2], p[3]}, magnitude = byte & iset(0x7F);
    // Exponent and fraction where fp32 has them; subnormals are multiples of 2^-9. (A product with 2^120 would do both, but its factor
    // is then a subnormal of fp32, which costs a processor a hundred cycles.)
    const I normal = (magnitude << 20) + iset(120u << 23), subnormal = bits(to_float(magnitude) * set(0x1p-9f));
    const I value = iselect(magnitude < iset(8), subnormal, normal);
    return from_bits(iselect(magnitude == iset(0x7F), iset(0x7FC00000), value) | ((byte & iset(0x80)) << 24));
  }
  static FA_INLINE F load_f16(const uint16_t *p) {
    // As for e4m3. A product with 2^112 would be zero for subnormal numbers where the processor takes those of fp32 for zero.
    const I h = widen16(p), magnitude = h & iset(0x7FFF);
    const I normal = (magnitude << 13) + iset(112u << 23), subnormal = bits(to_float(magnitude) * set(0x1p-24f));
    const I finite = iselect(magnitude < iset(0x400), subnormal, normal);
    const I wide = iselect(magnitude >= iset(0x7C00), (magnitude << 13) | iset(0x7F800000u), finite);
    return from_bits(wide | ((h & iset(0x8000)) << 16));
  }
  static FA_INLINE void store_f16(uint16_t *p, F x) {
    // Adding a power of two 13 bits above the last kept bit makes the float adder round to nearest even there; the scaling first
    // turns what does not fit into infinity.
    const I w = bits(x);
    const I twice = w + w;
    const F base = (abs(x) * set(0x1p112f)) * set(0x1p-110f);
    I bias = twice & iset(0xFF000000u);
    bias = iselect(bias < iset(0x71000000u), iset(0x71000000u), bias);
    const I sum = bits(from_bits((bias >> 1) + iset(0x07800000u)) + base);
    const I magnitude = ((sum >> 13) & iset(0x7C00)) + (sum & iset(0x0FFF));
    const I nan = iset(0x7E00);
    narrow16(p, ((w >> 16) & iset(0x8000)) | iselect(twice > iset(0xFF000000u), nan, magnitude));
  }
  static FA_INLINE F load_bf16(const uint16_t *p) { return from_bits(widen16(p) << 16); }
  static FA_INLINE void store_bf16(uint16_t *p, F x) {
    const I b = bits(x);
    const I r = (b + ((b >> 16) & iset(1)) + iset(0x7FFF)) >> 16;
    narrow16(p, iselect(x != x, (b >> 16) | iset(0x40), r));
  }

  // 2 * kWidth elements rounded to bf16, a first.
  static FA_INLINE I to_bf16(F a, F b) {
    uint16_t pair[2 * kWidth];
    store_bf16(pair, a);
    store_bf16(pair + kWidth, b);
    return iload(reinterpret_cast<const uint32_t *>(pair));
  }
  // Lanes are 16-bit integers, two in a lane of I.
  typedef uint16_t Halves __attribute__((vector_size(16)));
  static FA_INLINE I max_u16(I a, I b) {
    const Halves x = (Halves)a, y = (Halves)b, above = (Halves)(x > y);
    return (I)((x & above) | (y & ~above));
  }
  static FA_INLINE I min_u16(I a, I b) {
    const Halves x = (Halves)a, y = (Halves)b, below = (Halves)(x < y);
    return (I)((x & below) | (y & ~below));
  }
  static FA_INLINE I add_u16(I a, I b) { return (I)((Halves)a + (Halves)b); }
  // (a0, b0, a1, b1, ..): the first 2 * kWidth of them, and the rest.
  static FA_INLINE void interleave_u16(I a, I b, I &first, I &rest) {
    const Halves x = (Halves)a, y = (Halves)b;
    first = (I)Halves{x[0], y[0], x[1], y[1], x[2], y[2], x[3], y[3]};
    rest = (I)Halves{x[4], y[4], x[5], y[5], x[6], y[6], x[7], y[7]};
  }

  // rows[i] lane j <- rows[j] lane i.
  static FA_INLINE void transpose(F (&r)[4]) {
    F t[4];
    for (int i = 0; i < 4; ++i) t[i] = F{r[0][i], r[1][i], r[2][i], r[3][i]};
    for (int i = 0; i < 4; ++i) r[i] = t[i];
  }

  static FA_INLINE void prefetch(const void *p) { __builtin_prefetch(p); }
  static FA_INLINE void prefetch_l2(const void *p) { __builtin_prefetch(p, 0, 2); }
};

}  // namespace fa::cpu::FA_ISA
