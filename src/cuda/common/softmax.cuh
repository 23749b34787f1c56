// SPDX-License-Identifier: Apache-2.0
// Online softmax of the queries that a lane holds: a running maximum m and a row sum l per query. In base 2, or in base e (exponential.cuh).
//
//   for every KV tile:   update_max(S)      m may grow; out and l are rescaled by 2^(m_old - m)
//                        exponentiate(S)    P = 2^(S scale - m), l += sum of P
//   at the end:          reduce_sums(), then epilogue.cuh computes lse and the factor of out from m and l
//
// The rule for the maximum is a parameter, the threshold of lazy rescaling in base 2. With 0 the maximum is exact. With 8 a row's m is raised
// only when a score exceeds it by more than 2^8: any m gives the same result after the final division, and one that is too low by at most 8
// loses no precision, so that most tiles neither reduce across lanes nor touch out.
//
// The order of row sums is the same in all kernels: within a tile a lane adds its keys in two chains, those of even and of odd tiles of eight
// (QkFragment) keys, then adds the chains to each other and to its running sum. Lanes are added once, at the end.
#pragma once

#include <math_constants.h>

#include "cuda/common/exponential.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/scores.h"

namespace fa::cuda {

// Finite, so that -inf minus it is -inf.
constexpr float kNoMax = -1e30f;

// The factor that turns scores in the unit of q k^T into exponents of two.
__device__ __forceinline__ float exponent_scale(const Problem &p) { return p.softmax_scale * kLog2e; }

// P of keys 16 k .. 16 k + 15 of 16 rows, as A operand of the next mma: elements 8 k .. 8 k + 7 of a QkFragment row tile.
template <typename Element, typename Scores>
__device__ __forceinline__ void convert_p(const Scores &p, int k, uint32_t (&a)[4]) {
#pragma unroll
  for (int r = 0; r < 4; ++r) a[r] = pack2<Element>(element(p, 8 * k + 2 * r), element(p, 8 * k + 2 * r + 1));
}
template <typename Element, int kSteps, typename Scores>
__device__ __forceinline__ void convert_p(const Scores &p, uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) convert_p<Element>(p, k, a[k]);
}

// The warps whose scores make up a row: here, one. Kernels in which several warps share the keys of a row pass their own (any, reduce_max).
struct OneWarp {
  __device__ __forceinline__ bool any(bool x) const { return __any_sync(~0u, x); }
  template <int kRows>
  __device__ __forceinline__ void reduce_max(float (&)[kRows]) const {}
};

// kMaxChains: in how many chains a lane looks for its largest score: two, or one in kernels that have no register to spare.
template <class Fragment, int kMaxChains = 2, class Base = Base2>
struct OnlineSoftmax {
  static constexpr int kRows = Fragment::kRows;

  float max[kRows];      // m, of score * scale
  float sum[kRows];      // l of this lane's keys, until reduce_sums()
  float rescale[kRows];  // after update_max() returned true: 2^(m_old - m), which out has still to be multiplied by

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      max[r] = kNoMax;
      sum[r] = 0.f;
    }
  }

  // The largest of this lane's scores of row r.
  template <typename Scores>
  static __device__ __forceinline__ float largest(const Scores &s, int r) {
    constexpr int kCount = Fragment::kKeysOfLane;
    const auto pair = [&](int m) { return fmaxf(element(s, Fragment::at(r, m)), element(s, Fragment::at(r, m + 1))); };
    float x[kMaxChains];
#pragma unroll
    for (int h = 0; h < kMaxChains; ++h) {
      x[h] = pair(2 * h % kCount);
#pragma unroll
      for (int m = 2 * (kMaxChains + h); m < kCount; m += 2 * kMaxChains) x[h] = fmaxf(x[h], pair(m));
    }
    return kMaxChains == 1 ? x[0] : fmaxf(x[0], x[kMaxChains - 1]);
  }

  // Raises m of all rows of the warp to their largest score if some row's score exceeds its m by more than `threshold`. Then l is rescaled,
  // and true is returned: the caller rescales out. scale(r) turns scores of row r into exponents of two. m is set `headroom` lower than the
  // largest score, so that P may reach 2^headroom. With kEachRow only the rows that exceed their own m are raised: then a row's m depends on its
  // own scores alone. rescale_row(r) is called when rescale[r] is known: kernels that are short of registers rescale out there, one row at a time.
  // kCompareUnscaled: scale and threshold enter the comparison as one fma, and scores are scaled only if m is raised.
  template <bool kEachRow = false, typename Scores, typename Scale, class Warps = OneWarp>
  __device__ __forceinline__ bool update_max(const Scores &s, Scale scale, float threshold, float headroom = 0.f,
                                             Warps &&warps = Warps{}) {
    return update_max<kEachRow>(s, scale, threshold, headroom, warps, [](int) {});
  }
  template <bool kEachRow = false, bool kCompareUnscaled = false, typename Scores, typename Scale, class Warps,
            typename RescaleRow>
  __device__ __forceinline__ bool update_max(const Scores &s, Scale scale, float threshold, float headroom, Warps &&warps,
                                             RescaleRow rescale_row) {
    float top[kRows];
    bool exceeds = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      top[r] = largest(s, r);
      if constexpr (kCompareUnscaled) {
        exceeds |= fmaf(top[r], scale(r), -threshold) > max[r];
      } else {
        top[r] *= scale(r);
        exceeds |= top[r] - threshold > max[r];
      }
    }
    const bool raises = warps.any(exceeds);
    if (raises) {
      if constexpr (kCompareUnscaled) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) top[r] *= scale(r);
      }
      Fragment::reduce(top, MaxOp{});
      warps.reduce_max(top);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (!kEachRow || top[r] - threshold > max[r]) {
          raise(r, top[r] - headroom);
        } else {
          rescale[r] = 1.f;
        }
        rescale_row(r);
      }
    }
    return raises;
  }

  // With one scale for all rows.
  template <bool kEachRow = false, typename Scores>
  __device__ __forceinline__ bool update_max(const Scores &s, float scale, float threshold, float headroom = 0.f) {
    return update_max<kEachRow>(
        s, [&](int) { return scale; }, threshold, headroom);
  }

  // The same with products rounded up. A bias or a score of -1e9 may stand for -inf: a maximum of which the rounding is a large exponent must not
  // make P that large.
  template <typename Scores, typename Scale, typename Threshold, typename Headroom>
  __device__ __forceinline__ bool update_max_rounded_up(const Scores &s, Scale scale, Threshold threshold, Headroom headroom) {
    float top[kRows];
    bool exceeds = false;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      top[r] = __fmul_ru(largest(s, r), scale());
      exceeds |= top[r] - threshold() > max[r];
    }
    if (!__any_sync(~0u, exceeds)) return false;
    Fragment::reduce(top, MaxOp{});
#pragma unroll
    for (int r = 0; r < kRows; ++r) raise(r, top[r] - headroom());
    return true;
  }

  // m of row r to at least `to`. A row that is not raised is multiplied by 1, which keeps its bits.
  __device__ __forceinline__ void raise(int r, float to) {
    const float raised = fmaxf(max[r], to);
    rescale[r] = Base::exp(max[r] - raised);
    max[r] = raised;
    sum[r] = __fmul_rn(sum[r], rescale[r]);  // rounded whatever it is added to: FA_FLAG_SAME_BITS
  }

  // P = 2^(S scale - m) of all keys in place; this lane's sums of the tile go to `tile_sum`, which the caller adds to `sum`. With kMasked what is
  // masked (-inf) becomes kMaskedP.
  template <bool kMasked, typename Scores, typename Scale>
  __device__ __forceinline__ void exponentiate(Scores &s, Scale scale, float (&tile_sum)[kRows]) const {
    exponentiate<kMasked>(s, scale, max, tile_sum);
  }
  // With another maximum than `max`.
  template <bool kMasked, typename Scores, typename Scale>
  static __device__ __forceinline__ void exponentiate(Scores &s, Scale scale, const float (&relative_to)[kRows],
                                                      float (&tile_sum)[kRows]) {
    float chain[kRows][2] = {}, c[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) c[r] = scale(r);
#pragma unroll
    for (int n = 0; n < Fragment::kElements; ++n) {
      const int r = Fragment::row(n);
      float &x = element(s, n);
      const float p = Base::exp(fmaf(x, c[r], -relative_to[r]));
      chain[r][n / 4 % 2] += p;
      x = kMasked && x == -CUDART_INF_F ? kMaskedP : p;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) tile_sum[r] = chain[r][0] + chain[r][1];
  }
  template <bool kMasked, typename Scores>
  __device__ __forceinline__ void exponentiate(Scores &s, float scale, float (&tile_sum)[kRows]) const {
    exponentiate<kMasked>(
        s, [&](int) { return scale; }, tile_sum);
  }

  // P of one score, for kernels that make P of the next 16 keys while the mma of the keys before run. Adds to the lane's sum of the tile. The
  // caller adds that to `sum` once per tile: one long sum of single P would lose precision with many keys.
  template <bool kMasked>
  __device__ __forceinline__ float exponentiate_one(float x, int r, float scale, float (&tile_sum)[kRows]) const {
    const float p = Base::exp(fmaf(x, scale, -max[r]));
    tile_sum[r] += p;
    return kMasked && x == -CUDART_INF_F ? kMaskedP : p;
  }
  template <bool kMasked>
  __device__ __forceinline__ float exponentiate_one(float x, int r, float scale) {
    return exponentiate_one<kMasked>(x, r, scale, sum);
  }
  // P of keys 16 k .. 16 k + 15 of row tile i of a QkFragment, in place and as A operand of the next mma. `s` holds the scores of the row tile.
  template <typename Element, bool kMasked, typename Scores>
  __device__ __forceinline__ void exponentiate_step(Scores &s, int i, int k, float scale, float (&tile_sum)[kRows],
                                                    uint32_t (&a)[4]) const {
#pragma unroll
    for (int n = 8 * k; n < 8 * k + 8; ++n) {
      float &x = element(s, n);
      x = exponentiate_one<kMasked>(x, 2 * i + n / 2 % 2, scale, tile_sum);
    }
    convert_p<Element>(s, k, a);
  }

  // l over all lanes of the warp that share a row.
  __device__ __forceinline__ void reduce_sums() { Fragment::reduce(sum, SumOp{}); }
};

}  // namespace fa::cuda
