// SPDX-License-Identifier: Apache-2.0
// What a score text sees: positions, tensors and scalars, and the functions of mathematics. Only programs that are compiled at run time include
// this file. The header that the host writes for them (score_program.cpp) does, and defines before:
//
//   kDtypes, kAccess, kDims   of the tensors
//   kLayout                   how their elements may be loaded, a set of TensorLayout
//   kTileTensor               the tensor that a kernel may have staged, or -1
//   FA_SCORE_EXACT            1: operands are fp32, and functions exact to fp32
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/common/ptx.cuh"
#include "cuda/common/score_text.h"

namespace fa::cuda::score_text {

using Index = int32_t;
using fa_score_tile = int32_t;
constexpr fa_score_tile FA_SCORE_TILE_PARTIAL = 0, FA_SCORE_TILE_EMPTY = 1, FA_SCORE_TILE_FULL = 2;

// As fa_score_position.
struct Position {
  Index b, h, i, j, s_q, s_k;
  int64_t start_q, start_k;
  // For distance(): i and j as the kernel set them, and as floats.
  Index first_i, first_j;
  float i_number, j_number;
};
// An element of kTileTensor, where the kernel has staged it: that of the pair that the function is called for.
struct StagedElement {
  bool given;
  float value;
  Index b, h;  // of the pair
};
// As fa_score_aux. Tensors are read by element() and of_pair().
struct Aux {
  const ScoreTextTensor (&tensors)[8];
  const float (&scalars)[8];
  // Whether keys come in pairs, of which the first is even; then the key of the pair of query and key that the function is
  // called for, and half of it.
  bool in_pairs;
  Index j, half_j;
  bool odd;
  StagedElement staged;
};

// A number and its derivative by the score: what the text computes with where the derivative is wanted and the text has none.
struct Dual {
  float v, d;

  __device__ __forceinline__ Dual() : v(0.f), d(0.f) {}
  __device__ __forceinline__ Dual(float value, float derivative) : v(value), d(derivative) {}
  __device__ __forceinline__ Dual(float value) : v(value), d(0.f) {}
  __device__ __forceinline__ Dual(double value) : v(static_cast<float>(value)), d(0.f) {}
  __device__ __forceinline__ Dual(int value) : v(static_cast<float>(value)), d(0.f) {}
  __device__ __forceinline__ Dual(long value) : v(static_cast<float>(value)), d(0.f) {}
  __device__ __forceinline__ Dual(long long value) : v(static_cast<float>(value)), d(0.f) {}

  friend __device__ __forceinline__ Dual operator+(Dual a, Dual b) { return {a.v + b.v, a.d + b.d}; }
  friend __device__ __forceinline__ Dual operator-(Dual a, Dual b) { return {a.v - b.v, a.d - b.d}; }
  friend __device__ __forceinline__ Dual operator*(Dual a, Dual b) { return {a.v * b.v, fmaf(a.d, b.v, a.v * b.d)}; }
  friend __device__ __forceinline__ Dual operator/(Dual a, Dual b) {
    const float q = a.v / b.v;
    return {q, (a.d - q * b.d) / b.v};
  }
  friend __device__ __forceinline__ Dual operator-(Dual a) { return {-a.v, -a.d}; }
  friend __device__ __forceinline__ Dual operator+(Dual a) { return a; }
  __device__ __forceinline__ Dual &operator+=(Dual b) { return *this = *this + b; }
  __device__ __forceinline__ Dual &operator-=(Dual b) { return *this = *this - b; }
  __device__ __forceinline__ Dual &operator*=(Dual b) { return *this = *this * b; }
  __device__ __forceinline__ Dual &operator/=(Dual b) { return *this = *this / b; }
  friend __device__ __forceinline__ bool operator<(Dual a, Dual b) { return a.v < b.v; }
  friend __device__ __forceinline__ bool operator>(Dual a, Dual b) { return a.v > b.v; }
  friend __device__ __forceinline__ bool operator<=(Dual a, Dual b) { return a.v <= b.v; }
  friend __device__ __forceinline__ bool operator>=(Dual a, Dual b) { return a.v >= b.v; }
  friend __device__ __forceinline__ bool operator==(Dual a, Dual b) { return a.v == b.v; }
  friend __device__ __forceinline__ bool operator!=(Dual a, Dual b) { return a.v != b.v; }
};

// ----------------------------------------------------------------------------------------------------------------------
// Mathematics: in float approximate as the library's own terms are, or with FA_SCORE_EXACT exact to fp32; in double exact; with derivatives.
// ----------------------------------------------------------------------------------------------------------------------

#if FA_SCORE_EXACT
#define FA_SCORE_FUNCTION(name, exact, approximate) \
  __device__ __forceinline__ float name(float x) { return exact; }
#else
#define FA_SCORE_FUNCTION(name, exact, approximate) \
  __device__ __forceinline__ float name(float x) { return approximate; }
#endif
constexpr float kLog2OfE = 1.4426950408889634f, kLnOf2 = 0.6931471805599453f;

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}
FA_SCORE_FUNCTION(exp, ::expf(x), exp2_approx(x *kLog2OfE))
FA_SCORE_FUNCTION(exp2, ::exp2f(x), exp2_approx(x))
FA_SCORE_FUNCTION(log, ::logf(x), log2_approx(x) * kLnOf2)
FA_SCORE_FUNCTION(log2, ::log2f(x), log2_approx(x))
// 1 - 2 / (1 + e^2x): an error of 2^-23, that of the library's softcap.
FA_SCORE_FUNCTION(tanh, ::tanhf(x), fmaf(-2.f, reciprocal_approx(1.f + exp2_approx(x * (2 * kLog2OfE))), 1.f))
// As the softcap of kernels for Hopper: 2^-11.
FA_SCORE_FUNCTION(tanh_approx, ::tanhf(x), fa::cuda::tanh_approx(x))
FA_SCORE_FUNCTION(sin, ::sinf(x), __sinf(x))
FA_SCORE_FUNCTION(cos, ::cosf(x), __cosf(x))
#undef FA_SCORE_FUNCTION
__device__ __forceinline__ float sqrt(float x) { return ::sqrtf(x); }
__device__ __forceinline__ float rsqrt(float x) { return ::rsqrtf(x); }
__device__ __forceinline__ float floor(float x) { return ::floorf(x); }
__device__ __forceinline__ float ceil(float x) { return ::ceilf(x); }
__device__ __forceinline__ float abs(float x) { return ::fabsf(x); }
__device__ __forceinline__ float fabs(float x) { return ::fabsf(x); }
__device__ __forceinline__ int abs(int x) { return x < 0 ? -x : x; }
__device__ __forceinline__ int64_t abs(int64_t x) { return x < 0 ? -x : x; }
__device__ __forceinline__ float fma(float x, float y, float z) { return ::fmaf(x, y, z); }
__device__ __forceinline__ float pow(float x, float y) { return exp2(y * log2(x)); }

#define FA_SCORE_DOUBLE(name) \
  __device__ __forceinline__ double name(double x) { return ::name(x); }
FA_SCORE_DOUBLE(exp)
FA_SCORE_DOUBLE(exp2)
FA_SCORE_DOUBLE(log)
FA_SCORE_DOUBLE(log2)
FA_SCORE_DOUBLE(tanh)
FA_SCORE_DOUBLE(sqrt)
FA_SCORE_DOUBLE(fabs)
FA_SCORE_DOUBLE(floor)
FA_SCORE_DOUBLE(ceil)
#undef FA_SCORE_DOUBLE
__device__ __forceinline__ double abs(double x) { return ::fabs(x); }

__device__ __forceinline__ Dual exp(Dual x) {
  const float y = exp(x.v);
  return {y, y * x.d};
}
__device__ __forceinline__ Dual exp2(Dual x) {
  const float y = exp2(x.v);
  return {y, y * kLnOf2 * x.d};
}
__device__ __forceinline__ Dual log(Dual x) { return {log(x.v), x.d / x.v}; }
__device__ __forceinline__ Dual log2(Dual x) { return {log2(x.v), x.d * kLog2OfE / x.v}; }
__device__ __forceinline__ Dual tanh(Dual x) {
  const float y = tanh(x.v);
  return {y, fmaf(-y, y, 1.f) * x.d};
}
__device__ __forceinline__ Dual tanh_approx(Dual x) {
  const float y = tanh_approx(x.v);
  return {y, fmaf(-y, y, 1.f) * x.d};
}
__device__ __forceinline__ Dual sin(Dual x) { return {sin(x.v), cos(x.v) * x.d}; }
__device__ __forceinline__ Dual cos(Dual x) { return {cos(x.v), -sin(x.v) * x.d}; }
__device__ __forceinline__ Dual sqrt(Dual x) {
  const float y = sqrt(x.v);
  return {y, x.d * 0.5f / y};
}
__device__ __forceinline__ Dual rsqrt(Dual x) {
  const float y = rsqrt(x.v);
  return {y, x.d * -0.5f * y / x.v};
}
__device__ __forceinline__ Dual floor(Dual x) { return {floor(x.v)}; }
__device__ __forceinline__ Dual ceil(Dual x) { return {ceil(x.v)}; }
__device__ __forceinline__ Dual abs(Dual x) { return x.v < 0.f ? -x : x; }
__device__ __forceinline__ Dual fabs(Dual x) { return abs(x); }
__device__ __forceinline__ Dual fma(Dual x, Dual y, Dual z) { return x * y + z; }
// The exponent must not depend on the score.
__device__ __forceinline__ Dual pow(Dual x, Dual y) {
  const float power = pow(x.v, y.v);
  return {power, y.v * power / x.v * x.d};
}

template <class A, class B>
__device__ __forceinline__ constexpr auto min(A a, B b) -> decltype(true ? a : b) {
  return b < a ? b : a;
}
template <class A, class B>
__device__ __forceinline__ constexpr auto max(A a, B b) -> decltype(true ? a : b) {
  return a < b ? b : a;
}
template <class A, class B, class C>
__device__ __forceinline__ constexpr auto clamp(A x, B low, C high) -> decltype(true   ? x
                                                                                : true ? low
                                                                                       : high) {
  return x < low ? low : high < x ? high : x;
}

// ----------------------------------------------------------------------------------------------------------------------
// Tensors. `n` must be a constant.
// ----------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float load_element(const void *data, uint32_t dtype, int64_t at) {
  switch (dtype) {
    case 0x00012002u:  // FA_FLOAT32
      return static_cast<const float *>(data)[at];
    case 0x00011002u:  // FA_FLOAT16
      return to_float<__half>(static_cast<const unsigned short *>(data)[at]);
    case 0x00011004u:  // FA_BFLOAT16
      return to_float<__nv_bfloat16>(static_cast<const unsigned short *>(data)[at]);
    case 0x00012000u:  // FA_INT32
      return static_cast<float>(static_cast<const int *>(data)[at]);
    case 0x00010800u:  // FA_INT8
      return static_cast<float>(static_cast<const signed char *>(data)[at]);
    case 0x00014000u:  // FA_INT64
      return static_cast<float>(static_cast<const long long *>(data)[at]);
    case 0x0001080Au: {  // FA_FLOAT8_E4M3: fp16 with a bias that is smaller by 8
      const uint32_t bits = static_cast<const unsigned char *>(data)[at], magnitude = bits & 0x7F;
      const float x = to_float<__half>(magnitude << 7 | (bits & 0x80) << 8) * 256.f;
      return magnitude == 0x7F ? __int_as_float(0x7FFFFFFF) : x;
    }
    case 0x00010106u:  // FA_BIT
      return static_cast<float>(static_cast<const unsigned char *>(data)[at >> 3] >> (at & 7) & 1);
    default:
      return static_cast<float>(static_cast<const unsigned char *>(data)[at]);
  }
}

// Element 2 half or 2 half + 1 of a tensor with kLayoutPairs. Both are loaded at once, by plain loads: the compiler makes
// one of two with the same address. With __ldg() or asm it does not.
__device__ __forceinline__ float load_of_two(const void *data, uint32_t dtype, int64_t half, bool odd) {
  if (dtype == 0x00012002u || dtype == 0x00012000u) {
    const unsigned long long two = static_cast<const unsigned long long *>(data)[half];
    const auto bits = static_cast<uint32_t>(odd ? two >> 32 : two);
    return dtype == 0x00012000u ? static_cast<float>(static_cast<int>(bits)) : __uint_as_float(bits);
  }
  const uint32_t two = static_cast<const uint32_t *>(data)[half], bits = odd ? two >> 16 : two & 0xFFFFu;
  return dtype == 0x00011002u ? to_float<__half>(bits) : to_float<__nv_bfloat16>(bits);
}

// The element at indices of the dimensions `dims` (bits), computed in Offset.
template <class Offset>
__device__ __forceinline__ float load_at(const Aux &aux, int n, uint32_t dims, const int64_t (&index)[4]) {
  const ScoreTextTensor &t = aux.tensors[n];
  const uint32_t last = kDims[n] - 1;
  const bool unit = (kLayout[n] & kLayoutUnit) != 0 && (dims >> last & 1) != 0,
             pairs = unit && (kLayout[n] & kLayoutPairs) != 0 && aux.in_pairs;
  Offset at = 0;
#pragma unroll
  for (uint32_t d = 0; d < 4; ++d) {
    if ((dims >> d & 1) == 0 || (unit && d == last)) continue;
    const auto stride = static_cast<Offset>(t.stride[d]);
    at += static_cast<Offset>(index[d]) * (pairs ? stride / 2 : stride);
  }
  if (pairs) {  // a text that has not moved the key reads that of the pair: the compiler sees it
    const bool own = index[last] == aux.j;
    at += own ? static_cast<Offset>(aux.half_j) : static_cast<Offset>(index[last] >> 1);
    return load_of_two(t.data, kDtypes[n], at, own ? aux.odd : (index[last] & 1) != 0);
  }
  if (unit) at += static_cast<Offset>(index[last]);
  return load_element(t.data, kDtypes[n], at);
}
__device__ __forceinline__ float load_at(const Aux &aux, int n, uint32_t dims, int64_t i0, int64_t i1, int64_t i2, int64_t i3) {
  const int64_t index[4] = {i0, i1, i2, i3};
  return (kLayout[n] & kLayoutSmall) != 0 ? load_at<int32_t>(aux, n, dims, index) : load_at<int64_t>(aux, n, dims, index);
}

// An element of tensor n, by the indices of its dimensions.
__device__ __forceinline__ float element(const Aux &aux, int n, int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) {
  return load_at(aux, n, (1u << kDims[n]) - 1, i0, i1, i2, i3);
}
// The element of a tensor that is indexed by the pair.
__device__ __forceinline__ float of_pair(const Aux &aux, int n, const Position &p) {
  // A text may have moved the position. Where it has not, the compiler sees that.
  const bool own = p.i == p.first_i && p.j == p.first_j && p.b == aux.staged.b && p.h == aux.staged.h;
  if (n == kTileTensor && aux.staged.given && own) return aux.staged.value;
  return load_at(aux, n, kAccess[n], p.b, p.h, p.i, p.j);
}
// The key that a query is aligned with, bottom-right.
__device__ __forceinline__ Index diagonal(const Position &p) { return p.i + p.s_k - p.s_q; }
// diagonal(p) - p.j as a float, exact up to 2^24. Kernels convert few numbers for it, where static_cast would convert one for each pair.
__device__ __forceinline__ float distance(const Position &p) {
  // A text may have moved the position. Where it has not, the compiler sees that.
  const float i = p.i == p.first_i ? p.i_number : static_cast<float>(p.i),
              j = p.j == p.first_j ? p.j_number : static_cast<float>(p.j);
  return i + static_cast<float>(p.s_k - p.s_q) - j;
}

}  // namespace fa::cuda::score_text

#ifndef INFINITY
#define INFINITY __int_as_float(0x7F800000)
#endif

// For texts that say std::
namespace std {
template <class T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
  static __device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }
};
template <>
struct numeric_limits<fa::cuda::score_text::Dual> {
  static __device__ __forceinline__ fa::cuda::score_text::Dual infinity() { return {__int_as_float(0x7F800000)}; }
};
using fa::cuda::score_text::abs;
using fa::cuda::score_text::ceil;
using fa::cuda::score_text::clamp;
using fa::cuda::score_text::cos;
using fa::cuda::score_text::exp;
using fa::cuda::score_text::exp2;
using fa::cuda::score_text::fabs;
using fa::cuda::score_text::floor;
using fa::cuda::score_text::fma;
using fa::cuda::score_text::log;
using fa::cuda::score_text::log2;
using fa::cuda::score_text::pow;
using fa::cuda::score_text::sin;
using fa::cuda::score_text::sqrt;
using fa::cuda::score_text::tanh;
}  // namespace std
