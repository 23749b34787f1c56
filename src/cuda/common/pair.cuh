// SPDX-License-Identifier: Apache-2.0
// One pair (query, key): whether it is visible, its logit, whether dropout keeps it. For tiles on an edge of a mask and for general scores.
// Logits are natural here, and functions exact to fp32: P is exp(logit - lse), and rounding the product of lse and log2(e) alone would cost
// fp32 operands half of their accuracy.
#pragma once

#include <math_constants.h>

#include "cuda/common/data_mask.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/rng.cuh"
#include "cuda/common/score_mod.cuh"

namespace fa::cuda {

struct Pairs {
  const Problem &p;
  const DataMask &data_mask;
  int b;
  PairMask mask;

  __device__ __forceinline__ Pairs(const Problem &problem, const DataMask &data, int batch, int seqlen_q, int seqlen_k)
      : p(problem), data_mask(data), b(batch), mask(problem.band, seqlen_q, seqlen_k) {}

  // Keys [key0, key0 + kCell) that masks given as data show to a query, as bits; key0 is a multiple of kCell.
  __device__ __forceinline__ uint64_t shown_keys(int head, int row, int key0) const {
    return data_mask.given() ? masked_keys(data_mask, p, b, head, row, key0) : ~uint64_t{0};
  }
  // Whether band and lengths leave a pair visible.
  __device__ __forceinline__ bool in_band(int row, int key) const { return mask.visible(mask.offset(key), row); }

  __device__ __forceinline__ HeadTerms head_terms(int head) const { return cuda::head_terms(p, NaturalMath::kLogit, b, head); }

  // Of a visible pair. -inf if its bias masks it, whatever the product is, NaN included. `terms` is head_terms(head).
  __device__ __forceinline__ float logit(float raw, int head, const HeadTerms &terms, int row, int key) const {
    const float bias = load_bias(p.bias, b, head, row, key);
    float derivative;
    return bias == -CUDART_INF_F ? bias : logit_plus(bias, raw, terms, row, key, derivative);
  }
  // Of the logit by the scaled product.
  __device__ __forceinline__ float derivative(float raw, const HeadTerms &terms, int row, int key) const {
    float x;
    logit_plus(0.f, raw, terms, row, key, x);
    return x;
  }

  __device__ __forceinline__ bool kept(int head, int row, int key) const {
    if (p.dropout.threshold == 0) return true;
    const uint32_t bh = static_cast<uint32_t>(b * static_cast<int>(p.heads_q) + head);
    return dropout_bits(load_dropout_key(p.dropout), bh, row, key) >= p.dropout.threshold;
  }

 private:
  // Not inlined: that would take registers from accumulators.
  static __device__ __noinline__ uint64_t masked_keys(const DataMask &mask, const Problem &problem, int batch, int head,
                                                      int row, int key0) {
    return visible_key_bits_by_map(mask, problem, batch, head, row, key0);
  }

  __device__ __forceinline__ float logit_plus(float offset, float raw, const HeadTerms &terms, int row, int key,
                                              float &derivative) const {
    float x;
    with_score_mods<kAll>(p, NaturalMath{p}, [&](const auto &mods) {
      x = mods.logit(raw, offset, terms, static_cast<float>(row + mask.seqlen_k - mask.seqlen_q - key), derivative);
    });
    return x;
  }
};

// e^x.
__device__ __forceinline__ float exponential(float x) { return exp2_approx(x * kLog2e); }

}  // namespace fa::cuda
