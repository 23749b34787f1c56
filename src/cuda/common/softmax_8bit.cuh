// SPDX-License-Identifier: Apache-2.0
// Descales of 8-bit KV in the scores and in P, for either orientation (common/fragment.cuh).
//
// Where each key has a descale of its own, S is multiplied by the descales of K before anything else, and P by the descales f
// of V. P times f can have any magnitude, so it is kept relative to a reference u of its own, the running maximum of
// S + log2 |f|:
//
//   2^(S - m) f = 2^(S + log2 f - u) 2^(u - m)
//
// Out is relative to 2^u, too, until the epilogue. m and the row sums are those of the softmax without descales.
#pragma once

#include <math_constants.h>

#include "cuda/common/kv_8bit.cuh"
#include "cuda/common/softmax.cuh"

namespace fa::cuda {

// The descales of this lane's keys 2 j and 2 j + 1 of a tile.
template <class Fragment>
__device__ __forceinline__ float2 descale_pair(uint32_t descales, int j, int lane) {
  constexpr int kGap = Fragment::key(Fragment::at(0, 1)) - Fragment::key(Fragment::at(0, 0));
  const uint32_t first = descales + (Fragment::first_key(lane) + Fragment::key(Fragment::at(0, 2 * j))) * 4;
  if constexpr (kGap == 1) {
    return ld_shared_float2(first);
  } else {
    return {ld_shared_float(first), ld_shared_float(first + kGap * 4)};
  }
}

// Multiplies S by the scale of Q's row and the descale of the key; without per_row the former includes the head's descale.
template <class Fragment, typename Scores>
__device__ __forceinline__ void apply_k_descales(Scores &s, const float (&row_scale)[Fragment::kRows], bool per_row,
                                                 uint32_t descales, int lane) {
#pragma unroll
  for (int j = 0; j < Fragment::kKeysOfLane / 2; ++j) {
    float2 descale{1.f, 1.f};
    if (per_row) descale = descale_pair<Fragment>(descales, j, lane);
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      element(s, Fragment::at(r, 2 * j)) *= row_scale[r] * descale.x;
      element(s, Fragment::at(r, 2 * j + 1)) *= row_scale[r] * descale.y;
    }
  }
}

// The reference u of P and out.
template <class Fragment>
struct PvReference {
  static constexpr int kRows = Fragment::kRows;

  float u[kRows];
  float rescale[kRows];  // after u has been raised: what out has to be multiplied by

  __device__ __forceinline__ void raise(int r, float to) {
    const float raised = fmaxf(u[r], to);
    rescale[r] = exp2_approx(u[r] - raised);
    u[r] = raised;
  }
  // Raises u of all rows of the warp to at least max + exponent if some row is below that. Returns whether it has.
  __device__ __forceinline__ bool raise_above(const float (&max)[kRows], float exponent) {
    bool exceeds = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) exceeds |= !(max[r] + exponent <= u[r]);
    if (!__any_sync(~0u, exceeds)) return false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) raise(r, max[r] + exponent);
    return true;
  }
  // The same, to the largest S + log2 |f| of the tile.
  template <typename Scores>
  __device__ __forceinline__ bool raise_to_tile(const Scores &s, float scale, uint32_t descales, int lane) {
    float top[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) top[r] = -CUDART_INF_F;
#pragma unroll
    for (int j = 0; j < Fragment::kKeysOfLane / 2; ++j) {
      const float2 descale = descale_pair<Fragment>(descales, j, lane);
      const float log2_descale[2] = {__log2f(fabsf(descale.x)), __log2f(fabsf(descale.y))};
#pragma unroll
      for (int r = 0; r < kRows; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          top[r] = fmaxf(top[r], fmaf(element(s, Fragment::at(r, 2 * j + h)), scale, log2_descale[h]));
    }
    bool exceeds = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) exceeds |= top[r] > u[r];
    if (!__any_sync(~0u, exceeds)) return false;
    Fragment::reduce(top, MaxOp{});
#pragma unroll
    for (int r = 0; r < kRows; ++r) raise(r, top[r]);
    return true;
  }
};

// S becomes P = 2^(S - m) in place, times the descales of V relative to 2^u; adds to the row sums. With kMasked, masked
// elements become kMaskedP.
template <DescaleMode kMode, bool kMasked, class Fragment, typename Scores>
__device__ __forceinline__ void exponentiate_descaled(OnlineSoftmax<Fragment> &softmax, Scores &s, float scale,
                                                      const float (&u)[Fragment::kRows], uint32_t descales, int lane) {
  float to_u[Fragment::kRows];
  if constexpr (kMode == DescaleMode::similar) {
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) to_u[r] = exp2_approx(softmax.max[r] - u[r]);
  }
#pragma unroll
  for (int j = 0; j < Fragment::kKeysOfLane / 2; ++j) {
    float descale[2] = {1.f, 1.f}, log2_descale[2] = {0.f, 0.f};
    if constexpr (kMode != DescaleMode::none) {
      const float2 pair = descale_pair<Fragment>(descales, j, lane);
      descale[0] = pair.x, descale[1] = pair.y;
    }
    if constexpr (kMode == DescaleMode::per_key) {
      log2_descale[0] = __log2f(fabsf(descale[0])), log2_descale[1] = __log2f(fabsf(descale[1]));
    }
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float &x = element(s, Fragment::at(r, 2 * j + h));
        float p = softmax.template exponentiate_one<false>(x, r, scale);
        if constexpr (kMode == DescaleMode::similar) p *= to_u[r] * descale[h];
        if constexpr (kMode == DescaleMode::per_key)
          p = copysignf(exp2_approx(fmaf(x, scale, log2_descale[h]) - u[r]), descale[h]);
        x = kMasked && x == -CUDART_INF_F ? kMaskedP : p;
      }
  }
}

// P of a tile whose values have descales of their own. `rescale_out` is called when `reference` has been raised. Without
// kHasSimilarMode DescaleMode::similar is not used.
template <int kKvTile, bool kHasSimilarMode, bool kMasked, class Fragment, typename Scores, typename RescaleOut>
__device__ __forceinline__ void exponentiate_per_row(OnlineSoftmax<Fragment> &softmax, Scores &s, float scale,
                                                     PvReference<Fragment> &reference, uint32_t descales, int lane,
                                                     RescaleOut rescale_out) {
  const uint32_t bound = kHasSimilarMode ? similar_descale_max<kKvTile>(descales, lane) : 0;
  if (kHasSimilarMode && bound != 0) {
    if (reference.raise_above(softmax.max, exponent_above(bound))) rescale_out();
    exponentiate_descaled<DescaleMode::similar, kMasked>(softmax, s, scale, reference.u, descales, lane);
  } else {
    if (reference.raise_to_tile(s, scale, descales, lane)) rescale_out();
    exponentiate_descaled<DescaleMode::per_key, kMasked>(softmax, s, scale, reference.u, descales, lane);
  }
}

}  // namespace fa::cuda
