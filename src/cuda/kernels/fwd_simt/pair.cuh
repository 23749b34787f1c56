// SPDX-License-Identifier: Apache-2.0
// One pair (query, key): whether it is visible, its logit, whether dropout keeps it. For tiles on an edge of a mask and for general scores.
// Logits are natural here, and functions exact to fp32: P is exp(logit - lse), and rounding the product of lse and log2(e) alone would cost
// fp32 operands half of their accuracy.
#pragma once

#include <math_constants.h>

#include "cuda/common/mask.cuh"
#include "cuda/common/score.cuh"

namespace fa::cuda::simt {

struct Pairs {
  const Problem &p;
  int b;
  PairMask mask;

  __device__ __forceinline__ Pairs(const Problem &problem, int batch, int seqlen_q, int seqlen_k)
      : p(problem), b(batch), mask(problem.band, seqlen_q, seqlen_k) {}

  __device__ __forceinline__ bool visible(int head, int row, int key) const {
    return mask.visible(mask.offset(key), row) && (p.block_mask.data == nullptr || p.block_mask.visible(b, head, row, key));
  }

  __device__ __forceinline__ float slope_of(int head) const {
    return p.alibi_slopes != nullptr ? p.alibi_slopes[b * p.alibi_batch_stride + head * p.alibi_head_stride] : 0.f;
  }

  // tanh of the scaled product over softcap.
  __device__ __forceinline__ float cap(float raw) const { return tanhf(raw * p.softmax_scale / p.softcap); }

  // Of a visible pair. -inf if its bias masks it, whatever the product is, NaN included. `slope` is slope_of(head).
  __device__ __forceinline__ float logit(float raw, int head, float slope, int row, int key) const {
    float x = p.softcap > 0 ? p.softcap * cap(raw) : raw * p.softmax_scale;
    if (slope != 0) x -= slope * fabsf(static_cast<float>(row + mask.seqlen_k - mask.seqlen_q - key));
    if (p.bias.data != nullptr) {
      const float bias = load_score(
          p.bias, b * p.bias.batch_stride + head * p.bias.head_stride + row * p.bias.row_stride + key * p.bias.col_stride);
      if (bias == -CUDART_INF_F) return bias;
      x += bias;
    }
    return x;
  }

  __device__ __forceinline__ bool kept(int head, int row, int key) const {
    if (p.dropout.threshold == 0) return true;
    const uint32_t bh = static_cast<uint32_t>(b * static_cast<int>(p.heads_q) + head);
    return dropout_bits(load_dropout_key(p.dropout), bh, row, key) >= p.dropout.threshold;
  }
};

// e^x.
__device__ __forceinline__ float exponential(float x) { return exp2_approx(x * kLog2e); }

}  // namespace fa::cuda::simt
