// SPDX-License-Identifier: Apache-2.0
// Score terms: what happens to a score between S = Q K^T and the softmax, and to its gradient in the backward.
//
// Scores stay in the unit of q k^T (RawUnit): softmax_scale and log2(e) enter with the exponential, at no cost. What is added to logits is
// divided by softmax_scale on the host.
//
// A term is a type with forward(score, ...) for one score, and with what its gradient needs; apply_*() runs it over a fragment in either
// orientation, behind one branch that is uniform over the grid. Terms compose by being applied in turn: softcap, ALiBi, bias, then masks.
// Where the inner loop has no room for branches, kernels are built for a set of terms (ScoreSet) and leave the others out.
//
// Dropout acts on P, behind the softmax: rng.cuh.
#pragma once

#include <math_constants.h>

#include "core/problem.h"
#include "cuda/common/fragment.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/scores.h"

namespace fa::cuda {

// score -> cap * tanh(score / cap). tanh(x) = 1 - 2 / (1 + e^2x): its error is 2^-23 of the cap, far below that of a product of 16-bit numbers.
struct Softcap {
  float cap, exponent;  // RawUnit's cap and cap_exponent

  __device__ __forceinline__ explicit Softcap(const RawUnit &raw) : Softcap(raw.cap, raw.cap_exponent) {}
  __device__ __forceinline__ Softcap(float cap, float exponent) : cap(cap), exponent(exponent) {}

  __device__ __forceinline__ float forward(float s) const {
    return fmaf(-2.f * cap, reciprocal_approx(1.f + exp2_approx(s * exponent)), cap);
  }
  // tanh itself, and its derivative 1 - tanh^2.
  __device__ __forceinline__ float tanh(float s) const {
    return fmaf(-2.f, reciprocal_approx(1.f + exp2_approx(s * exponent)), 1.f);
  }
  static __device__ __forceinline__ float derivative(float tanh) { return fmaf(-tanh, tanh, 1.f); }
};

// ALiBi: score - slope |query + seqlen_k - seqlen_q - key|. Its gradient is that of the score.
struct Alibi {
  // `distance`: query + seqlen_k - seqlen_q - key.
  static __device__ __forceinline__ float forward(float s, float slope, float distance) {
    return fmaf(-slope, fabsf(distance), s);
  }
};

// The slope of a query head in the unit of scores.
__device__ __forceinline__ float alibi_slope(const Problem &p, const RawUnit &raw, int batch, int head) {
  return raw.logit * p.alibi_slopes[batch * p.alibi_batch_stride + head * p.alibi_head_stride];
}

// Softcap over a fragment.
template <class Fragment, typename Scores>
__device__ __forceinline__ void apply_softcap(Scores &s, const RawUnit &raw) {
  const Softcap mod(raw);
#pragma unroll
  for (int n = 0; n < Fragment::kElements; ++n) element(s, n) = mod.forward(element(s, n));
}

// ALiBi over the keys of row r. `distance`: of the row's query to the lane's first key (query + seqlen_k - seqlen_q - key0 - first_key).
template <class Fragment, typename Scores>
__device__ __forceinline__ void apply_alibi(Scores &s, int r, float slope, int distance) {
  const auto first = static_cast<float>(distance);  // one conversion for all keys
#pragma unroll
  for (int m = 0; m < Fragment::kKeysOfLane; ++m) {
    const int n = Fragment::at(r, m);
    element(s, n) = Alibi::forward(element(s, n), slope, first - static_cast<float>(Fragment::key(n)));
  }
}

// The terms that every kernel with general scores takes: softcap, then ALiBi. slope(r) and distance(r) are called only with ALiBi.
template <class Fragment, typename Scores, typename Slope, typename Distance>
__device__ __forceinline__ void apply_score_mods(Scores &s, const Problem &p, const RawUnit &raw, Slope slope,
                                                 Distance distance) {
  if (p.softcap > 0) apply_softcap<Fragment>(s, raw);
  if (p.alibi_slopes != nullptr) {
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) apply_alibi<Fragment>(s, r, slope(r), distance(r));
  }
}

// Bias: score + bias / softmax_scale. A bias of -inf masks the pair, whatever its score is, NaN included.
__device__ __forceinline__ float add_bias(float s, float bias, const RawUnit &raw) {
  return bias == -CUDART_INF_F ? bias : fmaf(bias, raw.logit, s);
}

}  // namespace fa::cuda
