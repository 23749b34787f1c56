// SPDX-License-Identifier: Apache-2.0
// ALiBi by wgmma: one more K step of S = Q K^T in place of arithmetic for each score.
//
// No query sees keys ahead of its place i on the diagonal (kAlibi without kAlibiAhead), so its score of key j falls by slope (i - j). With key0 the first
// key of the KV tile:
//
//   - slope (i - j) = slope (j - key0)        grows along the keys and is the same for all queries: wgmma adds it to S
//                   - slope (i - key0)        is the same for all keys: in the forward it moves the maximum that P is relative to, in the backward lse
//
// The step multiplies j - key0, which 16 bits represent, by the slope as a sum of three numbers of 16 bits. So products are exact, and S changes by one
// rounding of the accumulator. That is relative to slope * keys of the tile: heads with a large slope, or one below 0, get their terms score by score
// (score_mod.cuh).
#pragma once

#include "cuda/common/scores.h"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"

namespace fa::cuda {

// The largest slope, of natural logits, that is left to wgmma; and the largest in the unit of q k^T, which keeps fp16 finite.
constexpr float kMaxWgmmaSlope = 4.f, kMaxRawWgmmaSlope = 30000.f;

// Whether wgmma adds a slope in the unit of q k^T.
__device__ __forceinline__ bool takes_alibi_by_wgmma(const RawUnit &raw, float slope) {
  return slope >= 0.f && slope <= fminf(kMaxWgmmaSlope * raw.logit, kMaxRawWgmmaSlope);
}

// A slope as the sum of three numbers, each of which is rounded to 16 bits.
template <typename Element>
struct SlopeParts {
  float high, middle, low;

  __device__ __forceinline__ explicit SlopeParts(float slope)
      : high(rounded<Element>(slope)), middle(rounded<Element>(slope - high)), low(slope - high - middle) {}

  // Writes a core matrix of eight rows, which are the same: the parts, then zeros. wgmma reads it for all rows of the operand. All lanes of the warp take
  // part.
  __device__ __forceinline__ void write(uint32_t core_matrix, int lane) const {
    if (lane >= 8) return;
    st_shared_16(core_matrix + lane * 16, pack2<Element>(high, middle), pack2<Element>(low, 0.f), 0, 0);
    fence_proxy_async();
  }
};

}  // namespace fa::cuda
