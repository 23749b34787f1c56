// SPDX-License-Identifier: Apache-2.0
// max_logit: the largest visible logit of a query head.
//
// Iterations that look for row maxima know their largest scores. The others hold P = 2^(S - m) and its row sums alone. There a lane's sum of a row
// bounds its P: no score exceeds the largest one so far, M, unless the sum exceeds 2^(M - m). Only then P is searched.
//
// The result does not depend on which work tile comes first: a score within 2^-10 of M is always searched for, so that M is the maximum of the
// same numbers in any order.
#pragma once

#include "cuda/common/max_logit.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

template <class C>
class HeadMax {
 public:
  // At the start of a work tile.
  __device__ __forceinline__ void begin() { found_ = -CUDART_INF_F; }

  // S of a KV tile, masked pairs -inf. Rows that do not exist have a maximum of 1e30.
  template <class Softmax, typename Scores>
  __device__ __forceinline__ void add_scores(const Softmax &softmax, const Scores &s, float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (softmax.max[r] < 1e29f) found_ = fmaxf(found_, Softmax::largest(s, r) * scale);
  }

  // Called when m or M has changed. before: SharedMemory::max_logit_before().
  __device__ __forceinline__ void set_limits(const float (&max)[2], float before) {
    const float largest = fmaxf(before * kLog2e, found_);  // of this lane: a lower one only makes more searches
#pragma unroll
    for (int r = 0; r < 2; ++r) limit_[r] = fminf(exp2_approx(largest - max[r]) * (1.f - 0x1p-10f), kMaxLaneSum);
  }
  // Whether a lane's sums allow for a P above M, or are so large that m must be raised. NaN counts as such.
  __device__ __forceinline__ bool exceeds(const float (&sum)[2]) const { return !(sum[0] <= limit_[0] && sum[1] <= limit_[1]); }
  // P of a KV tile. Where it has overflowed the scores are computed again, and come to add_scores().
  template <int kCount>
  __device__ __forceinline__ void search(const float (&p)[kCount], const float (&max)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = 0.f;
#pragma unroll
      for (int n = 0; n < kCount / 2; ++n) top = fmaxf(top, p[4 * (n / 2) + 2 * r + (n & 1)]);
      if (top > 0.f && top < CUDART_INF_F) found_ = fmaxf(found_, max[r] + __log2f(top));
    }
  }

  // At the end of a work tile.
  __device__ __forceinline__ void store(const ForwardParams &a, int head, int lane, float before) {
    const float found = warp_max(found_) * kLn2;
    // What is not below the head's maximum of some time ago, up to rounding: a read of the maximum now would hold the warp up.
    if (lane == 0 && found >= before - fabsf(before) * 0x1p-10f) atomic_max(a.max_logit + head * a.max_logit_stride, found);
  }

 private:
  // Two sums below it stay below the limit of update-free iterations (kMaxRowSum).
  static constexpr float kMaxLaneSum = 128.f;

  // By integers in the order of the numbers: non-negative ones are ordered as their bits are, negative ones the other way round.
  static __device__ __forceinline__ float warp_max(float x) {
    const auto flip = [](int bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); };
    return __int_as_float(flip(__reduce_max_sync(~0u, flip(__float_as_int(x)))));
  }

  // What the work tile has found, in base 2. M is the larger of it and of what the head had before. What other work tiles have found is not
  // written again: changed from base to base it could grow.
  float found_;
  float limit_[2];
};

}  // namespace fa::cuda::sm90
