// SPDX-License-Identifier: Apache-2.0
// Logits in base 2 from raw q k^T, for problems with softcap, bias, ALiBi or dropout.
#pragma once

#include <math_constants.h>

#include "core/problem.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/rng.cuh"
#include "cuda/common/scores.h"

namespace fa::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float load_score(const ScoreTensor &t, int64_t index) {
  if (t.dtype == Dtype::f32) return static_cast<const float *>(t.data)[index];
  const uint16_t bits = static_cast<const uint16_t *>(t.data)[index];
  return t.dtype == Dtype::bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

// The part of a logit that depends on the raw product alone, times log2(e): scaled, and with softcap c turned into c * tanh(logit / c).
struct ScoreScale {
  float factor;  // softmax_scale * log2(e), or softmax_scale / softcap with softcap
  float cap;     // softcap * log2(e), or 0

  __device__ __forceinline__ explicit ScoreScale(const Problem &p)
      : factor(p.softcap > 0 ? p.softmax_scale / p.softcap : p.softmax_scale * kLog2e), cap(p.softcap * kLog2e) {}

  __device__ __forceinline__ float scaled(float raw) const { return raw * factor; }
  // tanh(x) = 1 - 2 / (1 + e^2x). Its error is 2^-23 of the cap, far below that of a product of 16-bit numbers.
  __device__ __forceinline__ float capped(float raw) const {
    return fmaf(-2.f * cap, reciprocal_approx(1.f + exp2_approx(raw * (factor * 2.f * kLog2e))), cap);
  }
};

// What the score of one (batch, query head) depends on besides the raw product; rows and keys count within the sequence.
struct ScoreTerms {
  ScoreScale product;
  float alibi;      // slope * log2(e), or 0
  int diagonal;     // seqlen_k - seqlen_q
  int64_t bias_at;  // index of element (0, 0)

  __device__ __forceinline__ ScoreTerms(const Problem &p, int b, int h, int seqlen_q, int seqlen_k)
      : product(p),
        alibi(p.alibi_slopes != nullptr ? p.alibi_slopes[b * p.alibi_batch_stride + h * p.alibi_head_stride] * kLog2e : 0.f),
        diagonal(seqlen_k - seqlen_q),
        bias_at(b * p.bias.batch_stride + h * p.bias.head_stride) {}

  // The logit times log2(e). Must not be called for keys outside the sequence when there is a bias.
  __device__ __forceinline__ float logit(const Problem &p, float raw, int row, int key) const {
    float x = product.cap > 0 ? product.capped(raw) : product.scaled(raw);
    if (alibi != 0) x -= alibi * fabsf(static_cast<float>(row + diagonal - key));
    if (p.bias.data != nullptr) {
      const float bias = load_score(p.bias, bias_at + row * p.bias.row_stride + key * p.bias.col_stride);
      if (bias == -CUDART_INF_F) return bias;  // masks whatever the product is, NaN included
      x += kLog2e * bias;
    }
    return x;
  }
};

}  // namespace fa::cuda
