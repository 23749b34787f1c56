// SPDX-License-Identifier: Apache-2.0
// One pair (query, key): whether it is visible, its logit, whether dropout keeps it. For tiles on an edge of a mask and for general scores.
// Logits are natural here, and functions exact to fp32: P is exp(logit - lse), and rounding the product of lse and log2(e) alone would cost
// fp32 operands half of their accuracy.
#pragma once

#include <math_constants.h>

#include "cuda/common/data_mask.cuh"
#include "cuda/common/exponential.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/rng.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/score_text.cuh"

namespace fa::cuda {

struct Pairs {
  const Problem &p;
  const DataMask &data_mask;
  const ScoreTextArgs &text_args;
  int b;
  PairMask mask;

  __device__ __forceinline__ Pairs(const Problem &problem, const DataMask &data, const ScoreTextArgs &score_text_args,
                                   int batch, int seqlen_q, int seqlen_k)
      : p(problem), data_mask(data), text_args(score_text_args), b(batch), mask(problem.band, seqlen_q, seqlen_k) {}

  // Keys [key0, key0 + kCell) that masks given as data show to a query, as bits; key0 is a multiple of kCell.
  __device__ __forceinline__ uint64_t shown_keys(int head, int row, int key0) const {
    return data_mask.given() ? masked_keys(data_mask, p, b, head, row, key0) : ~uint64_t{0};
  }
  // Whether band and lengths leave a pair visible.
  __device__ __forceinline__ bool in_band(int row, int key) const { return mask.visible(mask.offset(key), row); }

  __device__ __forceinline__ HeadTerms head_terms(int head) const { return cuda::head_terms(p, NaturalMath::kLogit, b, head); }

  // Of a visible pair. -inf if its bias or the score text masks it, whatever the product is, NaN included. `terms` is head_terms(head).
  __device__ __forceinline__ float logit(float raw, int head, const HeadTerms &terms, int row, int key) const {
    const float bias = load_bias(p.bias, b, head, row, key);
    if (bias == -CUDART_INF_F) return bias;
    float derivative;
    if constexpr (ScoreText::kGiven) {
      const ScorePlace place = score_place(head);
      const ScoreText text{place, text_args};
      if (!text.visible(row, key)) return -CUDART_INF_F;
      const float score = text.score(raw * p.softmax_scale, row, key);
      return score == -CUDART_INF_F ? score : logit_plus(bias, score, terms, row, key, derivative);
    } else {
      return logit_plus(bias, raw, terms, row, key, derivative);
    }
  }
  // Of the logit by the scaled product.
  __device__ __forceinline__ float derivative(float raw, int head, const HeadTerms &terms, int row, int key) const {
    float x, of_text = 1.f;
    if constexpr (ScoreText::kGiven) {
      const ScorePlace place = score_place(head);
      raw = ScoreText{place, text_args}.score_and_derivative(raw * p.softmax_scale, row, key, static_cast<float>(row),
                                                             static_cast<float>(key), of_text);
    }
    logit_plus(0.f, raw, terms, row, key, x);
    return ScoreText::kGiven ? x * of_text : x;
  }

  __device__ __forceinline__ bool kept(int head, int row, int key) const {
    if (p.dropout.threshold == 0) return true;
    return KeptNumbers(p.dropout.threshold)
        .keeps(dropout_number(load_dropout_key(p.dropout), dropout_head(p, b, head), row + p.dropout.first_query,
                              key + p.dropout.first_key));
  }

 private:
  __device__ __forceinline__ ScorePlace score_place(int head) const {
    const auto start = [&](const Lengths &lengths) { return lengths.cu != nullptr ? sequence_of(lengths, b).start : 0; };
    return {b, head, mask.seqlen_q, mask.seqlen_k, start(p.q_lengths), start(p.k_lengths)};
  }

  // Not inlined: that would take registers from accumulators.
  static __device__ __noinline__ uint64_t masked_keys(const DataMask &mask, const Problem &problem, int batch, int head,
                                                      int row, int key0) {
    return visible_key_bits_by_map(mask, problem, batch, head, row, key0);
  }

  __device__ __forceinline__ float logit_plus(float offset, float raw, const HeadTerms &terms, int row, int key,
                                              float &derivative) const {
    float x;
    // What a text returns is scaled.
    with_score_mods<kAll>(p, NaturalMath{ScoreText::kGiven ? 1.f : p.softmax_scale, p.softcap}, [&](const auto &mods) {
      x = mods.logit(raw, offset, terms, static_cast<float>(row + mask.seqlen_k - mask.seqlen_q - key), derivative);
    });
    return x;
  }
};

}  // namespace fa::cuda
