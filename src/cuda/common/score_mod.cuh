// SPDX-License-Identifier: Apache-2.0
// Score terms: what happens to a score between S = Q K^T and the softmax, and to its gradient in the backward. This file is their only
// definition. Every kernel that takes a term calls it, in the forward and in the backward.
//
//   logit = transform(softmax_scale q k^T) + offset + bias
//
//   step        terms     may depend on                       derivative by the scaled score
//   transform   softcap   the score                           ScoreMods::logit() computes it
//   offset      ALiBi     the head, the distance query-key    1
//   bias        bias      the pair                            1; dbias is the sum of dS over the pairs that share an element
//
// ScoreMods has the formulas. The set of terms that it applies is a template argument, so a kernel has no code for the terms that it is not
// built for (ScoreSet). Inner loops have no branches, but for the kernels that take every term (kLogAlibi). Two functions choose the set that a
// problem needs, by branches that are uniform over the grid:
//
//   apply_score_mods   all scores of a fragment, in the forward
//   with_score_mods    anything else: the caller's code for one score or for a tile
//
// Scores stay in the unit of q k^T (RawUnit) in the forward: softmax_scale and log2(e) enter with the exponential, at no cost. What is added to
// logits is divided by softmax_scale before. The backward knows lse, so there ScoreMods::logit() goes to logits directly.
//
// Dropout acts on P, behind the softmax: rng.cuh.
#pragma once

#include <math_constants.h>

#include "core/problem.h"
#include "cuda/common/fragment.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/scores.h"

namespace fa::cuda {

// ----------------------------------------------------------------------------------------------------------------------
// Units and functions
// ----------------------------------------------------------------------------------------------------------------------

// For operands of 16 and 8 bits: logits in base 2, approximate functions. tanh(x) = 1 - 2 / (1 + e^2x) has an error of 2^-23, far below that
// of a product of 16-bit numbers.
struct Base2Math {
  static constexpr float kLogit = kLog2e;  // 1 of a natural logit
  RawUnit raw;

  __device__ __forceinline__ float factor() const { return raw.factor; }
  __device__ __forceinline__ float cap() const { return raw.cap; }
  // cap * tanh(softmax_scale s / softcap).
  __device__ __forceinline__ float scaled_tanh(float s, float cap) const {
    return fmaf(-2.f * cap, reciprocal_approx(1.f + exp2_approx(s * raw.cap_exponent)), cap);
  }
  // log(1 + x) for x >= 0.
  static __device__ __forceinline__ float log1p(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(1.f + x));
    return y * kLn2;
  }
};

// The same with a tanh of one instruction, in tanh_unit().
struct FastTanhMath : Base2Math {
  static __device__ __forceinline__ float cap() { return 1.f; }
  __device__ __forceinline__ float scaled_tanh(float s, float cap) const {
    return cap * tanh_approx(s * (raw.cap_exponent * (kLn2 / 2)));
  }
};

// For operands of fp32: natural logits, functions that are exact to fp32.
struct NaturalMath {
  static constexpr float kLogit = 1.f;
  float softmax_scale, softcap;

  __device__ __forceinline__ float factor() const { return softcap > 0 ? softcap : softmax_scale; }
  __device__ __forceinline__ float scaled_tanh(float s, float cap) const { return cap * tanhf(s * softmax_scale / softcap); }
  static __device__ __forceinline__ float log1p(float x) { return log1pf(x); }
};

// The same for all scores of a tile: the host has divided.
struct NaturalTileMath : NaturalMath {
  float tanh_scale;  // of natural_tanh_scale()

  __device__ __forceinline__ float scaled_tanh(float s, float cap) const { return cap * tanhf(s * tanh_scale); }
};

// ----------------------------------------------------------------------------------------------------------------------
// State of a head
// ----------------------------------------------------------------------------------------------------------------------

// Whether the problem has a transform, and an offset.
__device__ __forceinline__ bool has_transform(const Problem &p) { return p.softcap > 0; }
__device__ __forceinline__ bool has_offset(const Problem &p) { return p.alibi_slopes != nullptr; }
// Whether it has neither, so that apply_score_mods() would change nothing.
__device__ __forceinline__ bool has_plain_scores(const Problem &p) { return p.softcap <= 0 && p.alibi_slopes == nullptr; }

// Of a problem with an offset. `logit`: 1 of a natural logit in the unit that offsets are added in.
__device__ __forceinline__ HeadTerms load_head_terms(const Problem &p, float logit, int batch, int head) {
  return {logit * p.alibi_slopes[batch * p.alibi_batch_stride + head * p.alibi_head_stride]};
}
// Of any problem.
__device__ __forceinline__ HeadTerms head_terms(const Problem &p, float logit, int batch, int head) {
  return has_offset(p) ? load_head_terms(p, logit, batch, head) : HeadTerms{0.f};
}

// ----------------------------------------------------------------------------------------------------------------------
// One score
// ----------------------------------------------------------------------------------------------------------------------

// The terms kTerms. With kLogAlibi, ALiBi is logarithmic; kernels for all terms (kAnyBias) choose for each score, because a copy of their loops
// for each formula would spill registers. `s` is an element of Q K^T. `distance` is query + seqlen_k - seqlen_q - key, with either sign.
template <ScoreSet kTerms, class Math = Base2Math>
struct ScoreMods {
  static constexpr bool has(ScoreSet terms) { return (kTerms & terms) != 0; }
  const Math &math;
  float alibi_log_scale;  // with kLogAlibi

  // Softcap: score -> cap * tanh(score / cap). The result is in the unit that `cap` is in.
  __device__ __forceinline__ float transform(float s, float cap) const {
    if constexpr (has(kSoftcap)) s = math.scaled_tanh(s, cap);
    return s;
  }
  // ALiBi: score - slope |distance|, or score - slope log(1 + alibi_log_scale |distance|).
  __device__ __forceinline__ float add_offset(float s, const HeadTerms &head, float distance) const {
    distance = fabsf(distance);
    if constexpr (has(kLogAlibi)) {
      if (!has(kAnyBias) || alibi_log_scale > 0) distance = Math::log1p(alibi_log_scale * distance);
    }
    if constexpr (has(kAlibi)) s = fmaf(-head.slope, distance, s);
    return s;
  }

  // Forward: the score with its terms, in the unit of Math, like `head`.
  __device__ __forceinline__ float forward(float s, const HeadTerms &head, float distance) const {
    return add_offset(transform(s, math.cap()), head, distance);
  }
  // Backward: the logit with its terms plus `offset` (-lse, the bias), in the unit of Math, like `head`. `derivative` becomes that of the logit
  // by the scaled score: dS of the scaled score is P (dP - delta) times it.
  __device__ __forceinline__ float logit(float s, float offset, const HeadTerms &head, float distance,
                                         float &derivative) const {
    const float x = transform(s, 1.f);  // with softcap its tanh: the softcap is part of the factor
    derivative = has(kSoftcap) ? fmaf(-x, x, 1.f) : 1.f;
    return fmaf(x, math.factor(), add_offset(offset, head, distance));
  }
};

// Calls f with the ScoreMods of the problem, in a kernel that is built for the terms kBuilt. with_offset() chooses the offset alone.
template <ScoreSet kBuilt, class Math, typename F>
__device__ __forceinline__ void with_offset(const Problem &p, const Math &math, F f) {
  constexpr ScoreSet kOtherwise = (kBuilt & kAnyBias) != 0 ? kBuilt : kBuilt & ~kLogAlibi;
  if (kBuilt != kOtherwise && p.alibi_log_scale > 0) {
    f(ScoreMods<kBuilt, Math>{math, p.alibi_log_scale});
  } else {
    f(ScoreMods<kOtherwise, Math>{math, p.alibi_log_scale});
  }
}
template <ScoreSet kBuilt, class Math, typename F>
__device__ __forceinline__ void with_score_mods(const Problem &p, const Math &math, F f) {
  if ((kBuilt & kSoftcap) != 0 && has_transform(p)) {
    with_offset<kBuilt>(p, math, f);
  } else {
    with_offset<kBuilt & ~kSoftcap>(p, math, f);
  }
}

// ----------------------------------------------------------------------------------------------------------------------
// Fragments
// ----------------------------------------------------------------------------------------------------------------------

// Transforms all scores of a fragment.
template <class Fragment, class Mods, typename Scores>
__device__ __forceinline__ void transform_fragment(Scores &s, const Mods &mods) {
#pragma unroll
  for (int n = 0; n < Fragment::kElements; ++n) element(s, n) = mods.transform(element(s, n), mods.math.cap());
}

// Adds the offsets of row r. `distance`: of the row's query to the lane's first key (query + seqlen_k - seqlen_q - key0 - first_key).
template <class Fragment, class Mods, typename Scores>
__device__ __forceinline__ void add_row_offsets(Scores &s, int r, const Mods &mods, const HeadTerms &head, int distance) {
  const auto first = static_cast<float>(distance);  // one conversion for all keys
#pragma unroll
  for (int m = 0; m < Fragment::kKeysOfLane; ++m) {
    const int n = Fragment::at(r, m);
    element(s, n) = mods.add_offset(element(s, n), head, first - static_cast<float>(Fragment::key(n)));
  }
}

// The forward of all scores of a fragment, in either orientation, in a kernel that is built for the terms kBuilt. head(r) and distance(r) are
// called only if the problem has an offset.
template <class Fragment, ScoreSet kBuilt, class Math = Base2Math, typename Scores, typename Head, typename Distance>
__device__ __forceinline__ void apply_score_mods(Scores &s, const Problem &p, const RawUnit &raw, Head head,
                                                 Distance distance) {
  const Math math{raw};
  if (has_transform(p)) transform_fragment<Fragment>(s, ScoreMods<kSoftcap, Math>{math});
  if (has_offset(p)) {
    constexpr ScoreSet kOffset = kAlibi | kLogAlibi;
    with_offset<kBuilt & kOffset>(p, math, [&](const auto &mods) {
#pragma unroll
      for (int r = 0; r < Fragment::kRows; ++r) add_row_offsets<Fragment>(s, r, mods, head(r), distance(r));
    });
  }
}

// ----------------------------------------------------------------------------------------------------------------------
// Bias
// ----------------------------------------------------------------------------------------------------------------------

// Adds a bias, where 1 of a natural logit is `logit`. A bias of -inf masks the pair. With kMasked it does so whatever the score is, NaN
// included; without, it is only added, which is enough where the score is finite.
template <bool kMasked>
__device__ __forceinline__ float add_bias(float s, float bias, float logit) {
  return kMasked && bias == -CUDART_INF_F ? bias : fmaf(bias, logit, s);
}

__device__ __forceinline__ float load_score(const ScoreTensor &t, int64_t index) {
  if (t.dtype == Dtype::f32) return static_cast<const float *>(t.data)[index];
  const uint16_t bits = static_cast<const uint16_t *>(t.data)[index];
  return t.dtype == Dtype::bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

// Adds a row's bias to the scores of row r of a fragment, from global memory. Element `at` of the tensor is that of the lane's first key. `keys`: the
// keys of the lane that have one, as bits.
template <class Fragment, bool kMasked, typename Scores>
__device__ __forceinline__ void add_row_bias(Scores &s, int r, const ScoreTensor &t, int64_t at, uint32_t keys,
                                             const RawUnit &raw) {
#pragma unroll
  for (int m = 0; m < Fragment::kKeysOfLane; ++m) {
    float &x = element(s, Fragment::at(r, m));
    if (keys >> m & 1)
      x = add_bias<kMasked>(x, load_score(t, at + Fragment::key(Fragment::at(r, m)) * t.col_stride), raw.logit);
  }
}
// The same for a QkFragment of which all keys have one, two neighbours at a time (takes_pairs).
template <class Fragment, class Element, bool kMasked = false, typename Scores>
__device__ __forceinline__ void add_row_bias_pairs(Scores &s, int r, const ScoreTensor &t, int64_t at, const RawUnit &raw) {
  if (t.dtype == Dtype::f32) {
    const auto *pairs = reinterpret_cast<const float2 *>(static_cast<const float *>(t.data) + at);
#pragma unroll
    for (int j = 0; j < Fragment::kKeysOfLane / 2; ++j) {
      const float2 bias = pairs[4 * j];
      float *x = &element(s, Fragment::at(r, 2 * j));
      x[0] = add_bias<kMasked>(x[0], bias.x, raw.logit);
      x[1] = add_bias<kMasked>(x[1], bias.y, raw.logit);
    }
  } else {
    const auto *pairs = reinterpret_cast<const uint32_t *>(static_cast<const Element *>(t.data) + at);
#pragma unroll
    for (int j = 0; j < Fragment::kKeysOfLane / 2; ++j) {
      const uint32_t bias = pairs[4 * j];
      float *x = &element(s, Fragment::at(r, 2 * j));
      x[0] = add_bias<kMasked>(x[0], to_float<Element>(bias & 0xFFFFu), raw.logit);
      x[1] = add_bias<kMasked>(x[1], to_float<Element>(bias >> 16), raw.logit);
    }
  }
}

// The bias of one pair, 0 if the problem has none. The key must lie inside the sequence.
__device__ __forceinline__ float load_bias(const ScoreTensor &t, int batch, int head, int row, int key) {
  if (t.data == nullptr) return 0.f;
  return load_score(t, batch * t.batch_stride + head * t.head_stride + row * t.row_stride + key * t.col_stride);
}

}  // namespace fa::cuda
