// SPDX-License-Identifier: Apache-2.0
// Lazy rescaling in which a row's own scores alone decide, for kernels whose bits must not depend on neighbouring rows: a row's maximum m is
// exact after its first KV tile. P of later tiles are made with the m that there is, and where they are too large the row raises m by a
// power of two, which costs no accuracy. Where they are not numbers any more, its scores are computed again.
//
// Under FA_FLAG_SAME_BITS the rule is part of the contract (docs/numerics.md, arithmetic 2, rule 3).
#pragma once

#include <math_constants.h>

#include "cuda/common/fragment.cuh"
#include "cuda/common/softmax.cuh"

namespace fa::cuda {

// On the sum of a lane's P of a tile: up to it each P is a finite number of either 16-bit type.
constexpr float kMaxLaneSumOfRow = 64.f;
// FA_FLAG_SAME_BITS: P from here on count as overflowed.
constexpr float kLargestP = 0x1p64f;

// As OnlineSoftmax::raise(); the product is rounded whatever it is added to.
template <class Softmax>
__device__ __forceinline__ void raise_row(Softmax &softmax, int r, float to) {
  const float raised = fmaxf(softmax.max[r], to);
  softmax.rescale[r] = exp2_approx(__fsub_rn(softmax.max[r], raised));
  softmax.sum[r] = __fmul_rn(softmax.sum[r], softmax.rescale[r]);
  softmax.max[r] = raised;
}

// For FA_FLAG_SAME_BITS, before P of a tile is computed: raises a row's maximum to its largest score where the row's own scores ask for it.
//
//   row                                         raised
//   has seen no key of the segment              always
//   has score modifiers (not `plain`)           always
//   has a P from kLargestP on                   in partial tiles (`masked`); in full ones raise_max_after() finds out
//
// rescale_out() is called where out, which is not all zeros, has to be multiplied by softmax.rescale.
template <class Fragment, class Softmax, typename Scores, typename Scale, typename RescaleOut>
__device__ __forceinline__ void raise_max_before(Softmax &softmax, const Scores &s, bool masked, bool plain, const Scale &scale,
                                                 RescaleOut rescale_out) {
  float top[2];
  bool raises[2], large[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) raises[r] = !plain || softmax.max[r] == kNoMax;
  if (!masked && !__any_sync(~0u, raises[0] || raises[1])) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r] = Softmax::largest(s, r);
    large[r] = masked && !raises[r] && exp2_approx(fmaf(top[r], scale(r), -softmax.max[r])) >= kLargestP;
  }
  const bool any_large = __any_sync(~0u, large[0] || large[1]);
  if (!any_large && !__any_sync(~0u, raises[0] || raises[1])) return;
  Fragment::reduce(top, MaxOp{});
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (any_large) {
      raises[r] |= large[r];
      raises[r] |= __shfl_xor_sync(~0u, raises[r], 1) != 0;
      raises[r] |= __shfl_xor_sync(~0u, raises[r], 2) != 0;
    }
    if (raises[r]) {
      raise_row(softmax, r, __fmul_rn(top[r], scale(r)));
    } else {
      softmax.rescale[r] = 1.f;
    }
  }
  if (plain && !any_large) return;  // out of these rows is 0
  if (!__any_sync(~0u, softmax.rescale[0] != 1.f || softmax.rescale[1] != 1.f)) return;
  rescale_out();
}

// Whether some row of the warp has to raise its maximum after P of a tile has been computed: a lane's sum is too large, or NaN.
__device__ __forceinline__ bool asks_for_raise(const float (&tile_sum)[2]) {
  return __any_sync(~0u, !(tile_sum[0] <= kMaxLaneSumOfRow) || !(tile_sum[1] <= kMaxLaneSumOfRow));
}
// With P in place of the scores: if `raises` (asks_for_raise()), raises the maximum of rows whose P are too large, and rescales P, `tile_sum` and
// the row sum. Returns whether out has still to be multiplied by softmax.rescale. recompute(overflowed) puts the scores of such rows back.
// With kSameBits `masked` says that the tile is partial: there raise_max_before() has raised rows that would overflow.
template <class Fragment, bool kSameBits, class Softmax, typename Scores, typename Scale, typename Recompute>
__device__ __forceinline__ bool raise_max_after(Softmax &softmax, Scores &s, float (&tile_sum)[2], bool raises, bool masked,
                                                const Scale &scale_of, Recompute recompute) {
  if (!raises) return false;
  bool overflowed[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if constexpr (kSameBits) {
      overflowed[r] = !masked && Softmax::largest(s, r) >= kLargestP;
    } else {
      overflowed[r] = !(tile_sum[r] < CUDART_INF_F) && softmax.sum[r] == softmax.sum[r];  // NaN stays NaN
    }
    overflowed[r] |= __shfl_xor_sync(~0u, overflowed[r], 1) != 0;
    overflowed[r] |= __shfl_xor_sync(~0u, overflowed[r], 2) != 0;
  }
  if (__any_sync(~0u, overflowed[0] || overflowed[1])) recompute(overflowed);
  const float scale[2] = {scale_of(0), scale_of(1)};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float most = overflowed[r] ? Softmax::largest(s, r) : tile_sum[r];
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    if (overflowed[r]) {
      raise_row(softmax, r, __fmul_rn(most, scale[r]));
      float chain[2] = {0.f, 0.f};
#pragma unroll
      for (int n = 2 * r; n < Fragment::kElements; n += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          s[n + e] = exp2_approx(fmaf(s[n + e], scale[r], -softmax.max[r]));
          chain[n / 4 % 2] += s[n + e];
        }
      tile_sum[r] = chain[0] + chain[1];
    } else {
      const int exponent = most > kMaxLaneSumOfRow ? min((__float_as_int(most) >> 23) - 127, 126) : 0;
      const float factor = __int_as_float((127 - exponent) << 23);
      softmax.rescale[r] = factor;
      softmax.max[r] += static_cast<float>(exponent);
      softmax.sum[r] = __fmul_rn(softmax.sum[r], factor);
      tile_sum[r] = __fmul_rn(tile_sum[r], factor);
#pragma unroll
      for (int n = 2 * r; n < Fragment::kElements; n += 4) {
        s[n] *= factor;
        s[n + 1] *= factor;
      }
    }
  }
  return true;
}

}  // namespace fa::cuda
