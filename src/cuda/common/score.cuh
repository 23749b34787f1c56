// SPDX-License-Identifier: Apache-2.0
// From raw q k^T to logits, in base 2: the element-wise part that only problems with softcap, bias, ALiBi or dropout pay for.
#pragma once

#include <math_constants.h>

#include "core/philox.h"
#include "core/problem.h"
#include "cuda/common/ptx.cuh"

namespace fa::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float load_score(const ScoreTensor &t, int64_t index) {
  if (t.dtype == Dtype::f32) return static_cast<const float *>(t.data)[index];
  const uint16_t bits = static_cast<const uint16_t *>(t.data)[index];
  return t.dtype == Dtype::bf16 ? __uint_as_float(static_cast<uint32_t>(bits) << 16) : __half2float(__ushort_as_half(bits));
}

__device__ __forceinline__ DropoutKey load_dropout_key(const Dropout &dropout) {
  const uint64_t seed = dropout.seed_ptr != nullptr ? *dropout.seed_ptr : dropout.seed;
  const uint64_t offset = dropout.offset + (dropout.offset_ptr != nullptr ? *dropout.offset_ptr : 0);
  return dropout_key(seed, offset);
}

// What the score of one (batch, query head) depends on besides the raw product; rows and keys count within the sequence.
struct ScoreTerms {
  float scale;      // softmax_scale, or softmax_scale / softcap with softcap
  float softcap;    // softcap * log2(e), or 0
  float alibi;      // slope * log2(e), or 0
  int diagonal;     // seqlen_k - seqlen_q
  int64_t bias_at;  // index of element (0, 0)

  __device__ __forceinline__ ScoreTerms(const Problem &p, int b, int h, int seqlen_q, int seqlen_k)
      : scale(p.softcap > 0 ? p.softmax_scale / p.softcap : p.softmax_scale * kLog2e),
        softcap(p.softcap * kLog2e),
        alibi(p.alibi_slopes != nullptr ? p.alibi_slopes[b * p.alibi_batch_stride + h * p.alibi_head_stride] * kLog2e : 0.f),
        diagonal(seqlen_k - seqlen_q),
        bias_at(b * p.bias.batch_stride + h * p.bias.head_stride) {}

  // The logit times log2(e). Must not be called for keys outside the sequence when there is a bias.
  __device__ __forceinline__ float logit(const Problem &p, float raw, int row, int key) const {
    float x = raw * scale;
    if (softcap > 0) x = softcap * tanhf(x);
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
