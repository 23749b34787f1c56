// SPDX-License-Identifier: Apache-2.0
// fp32 as the sum of three bf16 numbers, for products of fp32 on tensor cores.
//
//   a = a0 + a1 + a2      a0 = round(a), a1 = round(a - a0), a2 = a - a0 - a1: 8 bits each, exact
//   a b                   six of the nine products of parts; the others are below 2^-23 of |a b|
//
// The products of parts are exact. An accumulator adds the small ones first: wgmma rounds every addition toward zero, and
// so only those of a0 b0 do it at the size of the result. For each part n of b, from the last one to b0, these are the
// products with parts 2 - n, ..., 0 of a.
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "cuda/common/bf16_parts.h"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/ptx.cuh"

namespace fa::cuda {

// Two floats as bf16 parts, `x` in the low halves. Where a number is not finite, or rounds to infinity, the parts are not
// its sum.
__device__ __forceinline__ void split_pair_finite(float x, float y, uint32_t (&parts)[kPlanes]) {
  parts[0] = pack2<__nv_bfloat16>(x, y);
#pragma unroll
  for (int n = 1; n < kPlanes; ++n) {
    x -= __uint_as_float(parts[n - 1] << 16);
    y -= __uint_as_float(parts[n - 1] & 0xFFFF0000u);
    parts[n] = pack2<__nv_bfloat16>(x, y);
  }
}

// The number that is split in place of x: what rounds to infinity comes one bf16 lower, and what is not finite has no
// further parts.
struct Bf16Parts {
  static constexpr float kLargest = 3.3895313892515355e38f;  // of bf16
  float rest;
  uint32_t bits;  // of the part, in the low half

  __device__ __forceinline__ explicit Bf16Parts(float x) {
    const bool finite = fabsf(x) < CUDART_INF_F;
    const float first = finite ? fminf(fmaxf(x, -kLargest), kLargest) : x;
    bits = pack2<__nv_bfloat16>(first, 0.f);
    rest = finite ? x - __uint_as_float(bits << 16) : 0.f;
  }
  __device__ __forceinline__ void next() {
    bits = pack2<__nv_bfloat16>(rest, 0.f);
    rest -= __uint_as_float(bits << 16);
  }
};

// Elements of a wgmma accumulator as A operands of the next product, one for each part.
template <int kCount>
__device__ __forceinline__ void split_fragment(const float (&x)[kCount], uint32_t (&a)[kPlanes][kCount / 8][4]) {
#pragma unroll
  for (int n = 0; n < kCount / 2; ++n) {
    uint32_t parts[kPlanes];
    split_pair_finite(x[2 * n], x[2 * n + 1], parts);
#pragma unroll
    for (int i = 0; i < kPlanes; ++i) a[i][n / 4][n % 4] = parts[i];
  }
}
// The number in the low or the high halves of parts.
__device__ __forceinline__ float sum_of_parts(const uint32_t (&parts)[kPlanes], bool high) {
  const auto part = [&](int i) { return __uint_as_float(high ? parts[i] & 0xFFFF0000u : parts[i] << 16); };
  return part(0) + part(1) + part(2);
}

// Whether an element of `sum` that is not NaN yet would get a number that is not finite, in any lane of the warp.
template <int kCount>
__device__ __forceinline__ bool adds_nonfinite(const float (&sum)[kCount], const float (&x)[kCount]) {
  if (!__any_sync(~0u, isnan(nan_if_nonfinite(x)))) return false;
  bool adds = false;
#pragma unroll
  for (int n = 0; n < kCount; ++n) adds |= !(fabsf(x[n]) < CUDART_INF_F) && !isnan(sum[n]);
  return __any_sync(~0u, adds);
}

// acc += P T over the pairs for which visible(row r of the lane, row of T) holds, in fp32. row_at(n) is row n of T, of
// `columns` columns. With kMaskedByBits pairs of which P is kMaskedP are not visible either. In a place where registers are short, so that
// accumulators are rotated past four of them.
template <bool kMaskedByBits = false, int kSteps, int kCount, typename Visible, typename RowAt>
__device__ __forceinline__ void add_visible_pairs(float (&acc)[kCount], const uint32_t (&p)[kPlanes][kSteps][4], int columns,
                                                  int lane, Visible visible, RowAt row_at) {
#pragma unroll 1
  for (int j = 0; j < kCount / 4; ++j) {
    const int column = 8 * j + 2 * (lane & 3);
    float sum[4] = {};
#pragma unroll 1
    for (int n = 0; n < 16 * kSteps; ++n) {
      uint32_t bits[kPlanes][2];
#pragma unroll
      for (int i = 0; i < kPlanes; ++i) p_of_key(p[i], n, bits[i], lane);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!visible(r, n) || (kMaskedByBits && bits[0][r] == kMaskedPBits)) continue;
        const float factor = sum_of_parts({bits[0][r], bits[1][r], bits[2][r]}, false);
        const float *from = row_at(n);
#pragma unroll
        for (int c = 0; c < 2; ++c)
          if (column + c < columns) sum[2 * r + c] = fmaf(factor, from[column + c], sum[2 * r + c]);
      }
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) sum[n] += acc[n];
#pragma unroll
    for (int n = 0; n + 4 < kCount; ++n) acc[n] = acc[n + 4];
#pragma unroll
    for (int n = 0; n < 4; ++n) acc[kCount - 4 + n] = sum[n];
  }
}

}  // namespace fa::cuda
