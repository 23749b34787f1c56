// SPDX-License-Identifier: Apache-2.0
// ALiBi by wgmma in the forward (common/alibi.cuh): the operands of its K step, and the maximum that it moves.
//
// The step multiplies [64][16] by [16][kKeys]. Every row of the first operand holds the three parts of the slope, and each of the columns of the second that
// meet them holds j - key0.
#pragma once

#include "cuda/common/alibi.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

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

// Writes the slope of a head, in the unit of q k^T, for the work tile in a stage. All lanes of the warp take part.
template <class C>
__device__ __forceinline__ void describe_alibi(const SharedMemory<C> &smem, float slope, float scale, int lane, int stage) {
  SlopeParts<typename C::Element>(slope).write(smem.alibi_slopes(stage), lane);
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
