// SPDX-License-Identifier: Apache-2.0
// One (query, key) pair: whether it is visible, its logit, whether dropout keeps it. For tiles on an edge of a mask and for general
// scores; interior tiles of plain problems need none of this. Logits are natural here and functions exact to fp32: a weight is
// exp(logit - lse), and a rounded product of lse and log2(e) alone would cost fp32 operands half their accuracy.
#pragma once

#include <math_constants.h>

#include "cuda/common/score.cuh"

namespace fa::cuda::simt {

struct Pairs {
  const Problem &p;
  int b, seqlen_q, seqlen_k;
  int left, right, shift;  // of the band, limits that exclude nothing cut to what 32 bits hold

  __device__ __forceinline__ Pairs(const Problem &problem, int batch, int queries, int keys)
      : p(problem), b(batch), seqlen_q(queries), seqlen_k(keys) {
    constexpr int64_t kFar = int64_t{1} << 30;
    left = static_cast<int>(p.band.left < kFar ? p.band.left : kFar);
    right = static_cast<int>(p.band.right < kFar ? p.band.right : kFar);
    shift = static_cast<int>(p.band.shift(queries, keys));
  }

  __device__ __forceinline__ bool visible(int head, int row, int key) const {
    const int from_diagonal = key - row - shift;
    if (row >= seqlen_q || key >= seqlen_k || from_diagonal < -left || from_diagonal > right) return false;
    return p.block_mask.data == nullptr || p.block_mask.visible(b, head, row, key);
  }

  __device__ __forceinline__ float slope_of(int head) const {
    return p.alibi_slopes != nullptr ? p.alibi_slopes[b * p.alibi_batch_stride + head * p.alibi_head_stride] : 0.f;
  }

  // tanh of the scaled product over softcap.
  __device__ __forceinline__ float cap(float raw) const { return tanhf(raw * p.softmax_scale / p.softcap); }

  // Of a visible pair; -inf if its bias masks it, whatever the product is, NaN included. `slope` is slope_of(head).
  __device__ __forceinline__ float logit(float raw, int head, float slope, int row, int key) const {
    float x = p.softcap > 0 ? p.softcap * cap(raw) : raw * p.softmax_scale;
    if (slope != 0) x -= slope * fabsf(static_cast<float>(row + seqlen_k - seqlen_q - key));
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
