// SPDX-License-Identifier: Apache-2.0
// The bias of a consumer warp's 16 rows: from shared memory to the scores of a KV tile.
//
// The bias producer warp loads 64 rows for each warpgroup, in swizzle atoms of 64 keys. ldmatrix of such an atom gives a lane the pairs of keys
// that it holds in the accumulator of S.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

template <class C>
class BiasTile {
 public:
  using Element = typename C::Element;

  __device__ __forceinline__ BiasTile(const ForwardParams &params, const SharedMemory<C> &smem, const ConsumerThread &at)
      : a_(params), smem_(smem), at_(at) {}

  // Waits for the bias of the next KV tile.
  __device__ __forceinline__ void wait() const { mbarrier_wait(smem_.bias_full(state_.stage(), at_.wg), state_.phase()); }
  // Adds it to scores in the unit of q k^T. A bias of -inf makes a finite score -inf.
  __device__ __forceinline__ void add(float (&s)[C::kKeys / 2]) const {
    // Lane l gives the address of row l % 16 of the warp, and of keys 8 (l / 16) on.
    const uint32_t at = smem_.bias(state_.stage(), at_.wg) + (at_.warp * 16 + (at_.lane & 15)) * 128 +
                        (((at_.lane >> 4) ^ (at_.lane & 7)) << 4);
#pragma unroll
    for (int n = 0; n < C::kKeys / 16; ++n) {
      uint32_t pairs[4];
      ldmatrix_x4(pairs, (at ^ (n % 4 * 32)) + n / 4 * 64 * 128);
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        float *x = s + 8 * n + 2 * m;
        x[0] = fmaf(to_float<Element>(pairs[m] & 0xFFFFu), a_.raw.logit, x[0]);
        x[1] = fmaf(to_float<Element>(pairs[m] >> 16), a_.raw.logit, x[1]);
      }
    }
  }
  // Frees its stage.
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have read it
    mbarrier_arrive_if(at_.lane == 0, smem_.bias_empty(state_.stage(), at_.wg));
    state_.advance();
  }

 private:
  const ForwardParams &a_;
  const SharedMemory<C> smem_;
  const ConsumerThread at_;
  PipelineState<C::Storage::kBiasStages> state_;
};
struct NoBiasTile {
  template <class... Args>
  __device__ __forceinline__ explicit NoBiasTile(const Args &...) {}
};

}  // namespace fa::cuda::sm90
