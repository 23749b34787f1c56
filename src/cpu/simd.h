// SPDX-License-Identifier: Apache-2.0
// The vector vocabulary of the CPU kernels: one struct `Simd` of verbs per instruction set, and the functions written on top of them.
//
// Kernel sources are compiled once per instruction set, in files named *_amx.cpp, *_avx512_bf16.cpp, *_avx512.cpp, *_avx2.cpp,
// *_sve256.cpp, *_neon_bf16.cpp, *_neon_fhm.cpp, *_neon.cpp and *_portable.cpp. Such a file defines FA_TARGET_ and the name in capitals; this header then defines FA_ISA, the namespace inside fa::cpu
// that everything compiled for that instruction set must live in. Nothing that the linker could merge between instruction sets may be
// shared: kernels call no inline function from outside FA_ISA unless it is FA_HD (always inlined).
//
// AMX, AVX512_BF16 and NEON_BF16 compute forward and backward of bf16 alone (FA_BF16_UNIT), NEON_BF16 also forward of bf16 queries over keys of
// bytes, NEON_FHM forward of fp16. AMX kernels use the vectors of AVX-512. The tests also
// compile them with the model of the tile unit (cpu/tile.h), and then without AVX-512 for processors that lack it.
#pragma once

#include <cstdint>
#include <cstring>

#define FA_INLINE inline __attribute__((always_inline))

#if defined(FA_TARGET_AMX) || defined(FA_TARGET_AVX512_BF16) || defined(FA_TARGET_NEON_BF16)
#define FA_BF16_UNIT
#endif
#if defined(FA_TARGET_NEON_BF16) || defined(FA_TARGET_NEON_FHM)
#define FA_VECTOR_NEON  // cpu/forward_vector_neon.h
#endif
#if defined(FA_TARGET_NEON) || defined(FA_VECTOR_NEON) || defined(FA_TARGET_SVE256)
#define FA_LANE_PRODUCTS  // a multiply-add takes one factor from a lane of a vector (cpu/gemm.h)
#endif

#if defined(FA_TARGET_AMX)
#define FA_ISA amx
#if defined(__AVX512F__)
#include "cpu/simd_avx512.h"
#else
#include "cpu/simd_portable.h"
#endif
#elif defined(FA_TARGET_AVX512_BF16)
#define FA_ISA avx512_bf16
#include "cpu/simd_avx512.h"
#elif defined(FA_TARGET_AVX512)
#define FA_ISA avx512
#include "cpu/simd_avx512.h"
#elif defined(FA_TARGET_AVX2)
#define FA_ISA avx2
#include "cpu/simd_avx2.h"
#elif defined(FA_TARGET_NEON_BF16)
#define FA_ISA neon_bf16
#include "cpu/simd_neon.h"
#elif defined(FA_TARGET_NEON_FHM)
#define FA_ISA neon_fhm
#include "cpu/simd_neon.h"
#elif defined(FA_TARGET_SVE256)
#define FA_ISA sve256
#include "cpu/simd_sve256.h"
#elif defined(FA_TARGET_NEON)
#define FA_ISA neon
#include "cpu/simd_neon.h"
#elif defined(FA_TARGET_PORTABLE)
#define FA_ISA portable
#include "cpu/simd_portable.h"
#else
#error "cpu/simd.h: include it from a source named after an instruction set that defines its FA_TARGET_"
#endif

namespace fa::cpu::FA_ISA {

using F = Simd::F;  // kWidth floats
using I = Simd::I;  // kWidth 32-bit integers
using M = Simd::M;  // kWidth truth values
constexpr int kWidth = Simd::kWidth;

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.69314718055994531f;
constexpr float kInfinity = __builtin_inff();

FA_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
FA_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
FA_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// tanh with relative error below 4e-7 everywhere; +-1 for large arguments, NaN for NaN.
FA_INLINE F tanh(F x) {
  const F a = Simd::abs(x);
  // |x| >= 0.625: 1 - 2 / (exp(2|x|) + 1), with the sign of x.
  const F e = Simd::exp2(Simd::mul(a, Simd::set(2 * kLog2e)));
  const F big = Simd::sub(Simd::set(1.0f), Simd::div(Simd::set(2.0f), Simd::add(e, Simd::set(1.0f))));
  // |x| < 0.625: odd polynomial (Cephes).
  const F z = Simd::mul(x, x);
  F p = Simd::fma(Simd::set(-5.70498872745e-3f), z, Simd::set(2.06390887954e-2f));
  p = Simd::fma(p, z, Simd::set(-5.37397155531e-2f));
  p = Simd::fma(p, z, Simd::set(1.33314422036e-1f));
  p = Simd::fma(p, z, Simd::set(-3.33332819422e-1f));
  const F small = Simd::fma(Simd::mul(p, z), x, x);
  return Simd::select(Simd::lt(a, Simd::set(0.625f)), small, Simd::copysign(big, x));
}

// log2(x) with an error below 2 units in the last place, for normal numbers x >= 1.
FA_INLINE F log2(F x) {
  // x = 2^e (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2).
  constexpr uint32_t kSqrtHalf = 0x3F3504F3u;
  const I above = Simd::iadd(Simd::bits(x), Simd::iset(0u - kSqrtHalf));
  const F e = Simd::to_float(Simd::template shr<23>(above));
  const F f =
      Simd::sub(Simd::from_bits(Simd::iadd(Simd::iand(above, Simd::iset(0x7FFFFFu)), Simd::iset(kSqrtHalf))), Simd::set(1.0f));
  // log(1 + f) = f - f^2 / 2 + f^3 p(f) (Cephes).
  F p = Simd::fma(Simd::set(7.0376836292e-2f), f, Simd::set(-1.1514610310e-1f));
  p = Simd::fma(p, f, Simd::set(1.1676998740e-1f));
  p = Simd::fma(p, f, Simd::set(-1.2420140846e-1f));
  p = Simd::fma(p, f, Simd::set(1.4249322787e-1f));
  p = Simd::fma(p, f, Simd::set(-1.6668057665e-1f));
  p = Simd::fma(p, f, Simd::set(2.0000714765e-1f));
  p = Simd::fma(p, f, Simd::set(-2.4999993993e-1f));
  p = Simd::fma(p, f, Simd::set(3.3333331174e-1f));
  const F z = Simd::mul(f, f);
  const F tail = Simd::mul(z, Simd::fma(p, f, Simd::set(-0.5f)));
  return Simd::fma(Simd::add(f, tail), Simd::set(kLog2e), e);
}

// Memory formats of tensor elements: load and store kWidth or the first n (0 <= n <= kWidth) elements as floats. The partial forms
// touch no memory past element n; lanes past it are zero.
struct ElementF32 {
  static constexpr bool kQuantised = false;
  using Type = float;
  static FA_INLINE F load(const Type *p) { return Simd::load(p); }
  static FA_INLINE F load(const Type *p, int n) { return Simd::load(p, n); }
  static FA_INLINE void store(Type *p, F x) { Simd::store(p, x); }
  static FA_INLINE void store(Type *p, F x, int n) { Simd::store(p, x, n); }
};
// Loads and stores of n < kWidth elements, for formats that Simd loads and stores as a whole: by a copy of them.
template <class Element, typename T>
struct PartialByCopy {
  using Type = T;
  static FA_INLINE F load(const Type *p, int n) {
    Type buffer[kWidth] = {0};
    __builtin_memcpy(buffer, p, static_cast<size_t>(n) * sizeof(Type));
    return Element::load(buffer);
  }
  static FA_INLINE void store(Type *p, F x, int n) {
    Type buffer[kWidth];
    Element::store(buffer, x);
    __builtin_memcpy(p, buffer, static_cast<size_t>(n) * sizeof(Type));
  }
};
struct ElementF16 : PartialByCopy<ElementF16, uint16_t> {
  static constexpr bool kQuantised = false;
  using PartialByCopy<ElementF16, uint16_t>::load;
  using PartialByCopy<ElementF16, uint16_t>::store;
  static FA_INLINE F load(const Type *p) { return Simd::load_f16(p); }
  static FA_INLINE void store(Type *p, F x) { Simd::store_f16(p, x); }
};
struct ElementBf16 : PartialByCopy<ElementBf16, uint16_t> {
  static constexpr bool kQuantised = false;
  using PartialByCopy<ElementBf16, uint16_t>::load;
  using PartialByCopy<ElementBf16, uint16_t>::store;
  static FA_INLINE F load(const Type *p) { return Simd::load_bf16(p); }
  static FA_INLINE void store(Type *p, F x) { Simd::store_bf16(p, x); }
};

// Quantised formats: the number without its factor. Stores round to nearest, ties to even, and saturate.
struct ElementE4m3 : PartialByCopy<ElementE4m3, uint8_t> {
  using PartialByCopy<ElementE4m3, uint8_t>::load;
  using PartialByCopy<ElementE4m3, uint8_t>::store;
  static constexpr bool kQuantised = true;
  static constexpr float kLargest = 448.0f;
  static FA_INLINE F load(const Type *p) { return Simd::mul(Simd::load_e4m3_units(p), Simd::set(Simd::kE4m3Unit)); }
  static FA_INLINE void store(Type *p, F x) {
    const F magnitude = Simd::min(Simd::abs(x), Simd::set(kLargest));  // kLargest for NaN, too
    // From 2^-6 on: the fraction to 3 bits, the exponent from bias 127 to 7. Below: multiples of 2^-9.
    const I fp32 = Simd::bits(magnitude), odd = Simd::iand(Simd::shr<20>(fp32), Simd::iset(1));
    const I normal =
        Simd::iadd(Simd::shr<20>(Simd::iadd(fp32, Simd::iadd(odd, Simd::iset(0x7FFFF)))), Simd::iset(-(120u << 3)));
    const F shift = Simd::set(12582912.0f);  // 1.5 * 2^23
    const I subnormal = Simd::iand(Simd::bits(Simd::add(Simd::mul(magnitude, Simd::set(512.0f)), shift)), Simd::iset(0xF));
    I byte = Simd::iselect(Simd::lt(magnitude, Simd::set(0x1p-6f)), subnormal, normal);
    byte = Simd::iselect(Simd::eq(x, x), byte, Simd::iset(0x7F));
    Simd::istore_u8(p, Simd::ior(byte, Simd::shl<7>(Simd::shr<31>(Simd::bits(x)))));
  }
};
struct ElementI8 : PartialByCopy<ElementI8, int8_t> {
  using PartialByCopy<ElementI8, int8_t>::load;
  using PartialByCopy<ElementI8, int8_t>::store;
  static constexpr bool kQuantised = true;
  static constexpr float kLargest = 127.0f;
  static FA_INLINE F load(const Type *p) { return Simd::to_float(Simd::iload_i8(p)); }
  static FA_INLINE void store(Type *p, F x) {
    const F number = Simd::select(Simd::eq(x, x), x, Simd::zero());  // there is no NaN
    const F whole = Simd::max(Simd::min(number, Simd::set(kLargest)), Simd::set(-kLargest));
    // The low bits of the sum are the nearest integer in two's complement.
    Simd::istore_u8(reinterpret_cast<uint8_t *>(p),
                    Simd::iand(Simd::bits(Simd::add(whole, Simd::set(12582912.0f))), Simd::iset(0xFF)));
  }
};

// e4m3 in units of Simd::kE4m3Unit, which take an instruction less to load than whole numbers.
struct ElementE4m3Units : PartialByCopy<ElementE4m3Units, uint8_t> {
  using PartialByCopy<ElementE4m3Units, uint8_t>::load;
  static FA_INLINE F load(const Type *p) { return Simd::load_e4m3_units(p); }
};
// What sums of products take in place of Element. They are multiplied by kUnit at the end, which changes no bit of them.
template <class Element>
struct InUnits {
  using Type = Element;
  static constexpr float kUnit = 1.0f;
};
template <>
struct InUnits<ElementE4m3> {
  using Type = ElementE4m3Units;
  static constexpr float kUnit = Simd::kE4m3Unit;
};

}  // namespace fa::cpu::FA_ISA
