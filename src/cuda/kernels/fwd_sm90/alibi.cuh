// SPDX-License-Identifier: Apache-2.0
// ALiBi by wgmma: one more K step of S = Q K^T in place of arithmetic for each score.
//
// No query sees keys ahead of its place i on the diagonal (kAlibi without kAlibiAhead), so its score of key j falls by slope (i - j). With key0 the first
// key of the KV tile:
//
//   - slope (i - j) = slope (j - key0)        grows along the keys and is the same for all queries: wgmma adds it to S
//                   - slope (i - key0)        is the same for all keys: it moves the maximum that P is relative to
//
// The step multiplies [64][16] by [16][kKeys]. Every row of the first operand holds the slope as a sum of three numbers of 16 bits, and each of the columns
// of the second that meet them holds j - key0, which 16 bits represent. So products are exact, and S changes by one rounding of the accumulator. That is
// relative to slope * kKeys: heads with a large slope, or one below 0, get their terms score by score (score_mod.cuh).
#pragma once

#include "cuda/common/score_mod.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

// The largest slope, of natural logits, that is left to wgmma; and the largest in the unit of q k^T, which keeps fp16 finite.
constexpr float kMaxWgmmaSlope = 4.f, kMaxRawWgmmaSlope = 30000.f;

// Whether wgmma adds a slope in the unit of q k^T.
__device__ __forceinline__ bool takes_alibi_by_wgmma(const ForwardParams &a, float slope) {
  return slope >= 0.f && slope <= fminf(kMaxWgmmaSlope * a.raw.logit, kMaxRawWgmmaSlope);
}

// Writes the operand of keys, for each a row of 16 bytes of which three columns are used, and the zeros behind it.
template <class C>
__device__ __forceinline__ void write_alibi_keys(const SharedMemory<C> &smem, int thread) {
  static_assert(C::kKeys + 8 <= 128 * C::kConsumerWarpgroups);
  if (thread >= C::kKeys + 8) return;
  const float key = thread < C::kKeys ? static_cast<float>(thread) : 0.f;
  st_shared_16(smem.alibi_keys() + thread * 16, pack2<typename C::Element>(key, key), pack2<typename C::Element>(key, 0.f), 0,
               0);
  fence_proxy_async();
}

// Writes the slope of a head, in the unit of q k^T, for the work tile in a stage. All lanes of the warp take part. wgmma reads one core matrix of
// eight rows for all 64.
template <class C>
__device__ __forceinline__ void describe_alibi(const SharedMemory<C> &smem, float slope, float scale, int lane, int stage) {
  using Element = typename C::Element;
  const float high = rounded<Element>(slope), middle = rounded<Element>(slope - high);
  if (lane < 8) {
    st_shared_16(smem.alibi_slopes(stage) + lane * 16, pack2<Element>(high, middle), pack2<Element>(slope - high - middle, 0.f),
                 0, 0);
    fence_proxy_async();
  }
  if (lane == 0) smem.storage().alibi.head[stage] = {slope, slope * scale};
}

// The head's slope, whoever adds it.
template <class C, class WorkTile>
__device__ __forceinline__ HeadTerms alibi_head(const SharedMemory<C> &smem, const WorkTile &t, int stage) {
  return {t.head.slope + smem.storage().alibi.head[stage].slope};
}

// A consumer's side: the maximum relative to scores as wgmma leaves them.
template <class C>
class AlibiByWgmma {
 public:
  using WorkTile = typename SharedMemory<C>::WorkTile;

  __device__ __forceinline__ AlibiByWgmma(const SharedMemory<C> &smem, const ConsumerThread &at) : smem_(smem), at_(at) {}

  // The KV tile begins with key0; or so many keys further than the one before.
  __device__ __forceinline__ void move_to(const WorkTile &t, int key0) {
    distance_ = static_cast<float>(key0 - (at_.row(t, 0) + t.seqlen_k - t.seqlen_q));
  }
  __device__ __forceinline__ void move_by(int keys) { distance_ += static_cast<float>(keys); }

  // From the maximum of logits to that of scores as wgmma leaves them, both in exponents of two; with kSign -1 the other way round.
  template <int kSign = 1>
  __device__ __forceinline__ void shift_max(int work_stage, const float (&max)[2], float (&shifted)[2]) const {
    const float slope = kSign * smem_.storage().alibi.head[work_stage].exponent;
    shifted[0] = fmaf(-slope, distance_, max[0]);
    shifted[1] = fmaf(-slope, distance_ - 8.f, max[1]);
  }

 private:
  const SharedMemory<C> smem_;
  const ConsumerThread at_;
  float distance_;  // from the lane's first row, on the diagonal, to the first key of the KV tile
};

}  // namespace fa::cuda::sm90
