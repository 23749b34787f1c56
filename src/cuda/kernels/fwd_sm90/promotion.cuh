// SPDX-License-Identifier: Apache-2.0
// fp8: promotion of out to a longer sum.
//
// The tensor cores keep 14 bits of a sum of fp8 products and truncate the rest, so a long sum of one sign loses precision. Every kInterval
// KV tiles the accumulator is added to a promoted sum and starts again from zero. The promoted sum is bf16 and added with bf16x2
// instructions. It lies in the staging memory of out, eight numbers a lane in each 16-byte vector; every warp has its own part.
#pragma once

#include "cuda/common/tma.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

template <class C>
class Promotion {
 public:
  using WorkTile = typename SharedMemory<C>::WorkTile;
  static constexpr int kInterval = 1536 / C::kKeys;

  __device__ __forceinline__ Promotion(const SharedMemory<C> &smem, const ConsumerThread &at) : smem_(smem), at_(at) {}

  // `promoted_before`: there is a promoted sum to add to.
  __device__ __forceinline__ void promote(const float (&acc)[C::kDv / 2], const float (&max)[2], bool promoted_before) {
    if (at_.lane == 0) bulk_wait_group_read();  // until TMA has read the previous tile's out
    __syncwarp();
    const auto both = [](float x) { return pack2<__nv_bfloat16>(x, x); };
    const uint32_t rescale[2] = {both(exp2_approx(max_[0] - max[0])), both(exp2_approx(max_[1] - max[1]))};
#pragma unroll
    for (int vector = 0; vector < C::kDv / 16; ++vector) {
      const float *out = acc + 8 * vector;
      uint32_t x[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) x[n] = pack2<__nv_bfloat16>(out[2 * n], out[2 * n + 1]);
      if (promoted_before) {
        const uint4 before = ld_shared_16(vector_address(vector));
        const uint32_t words[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) asm("fma.rn.bf16x2 %0, %1, %2, %0;\n" : "+r"(x[n]) : "r"(words[n]), "r"(rescale[n & 1]));
      }
      st_shared_16(vector_address(vector), x[0], x[1], x[2], x[3]);
    }
    max_[0] = max[0];
    max_[1] = max[1];
  }
  // Sets the factor of the promoted sum from the final maximum.
  __device__ __forceinline__ void finalize(const float (&max)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) scale_[r] = exp2_approx(max_[r] - max[r]);
  }
  // Adds the promoted sum to out, at the end of a work tile.
  __device__ __forceinline__ void add_to(float (&acc)[C::kDv / 2], const WorkTile &t) const {
    if (count(t) <= 0) return;
#pragma unroll
    for (int vector = 0; vector < C::kDv / 16; ++vector) {
      const uint4 x = ld_shared_16(vector_address(vector));
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float *out = acc + 8 * vector + 2 * n;
        out[0] = fmaf(__uint_as_float(words[n] << 16), scale_[n & 1], out[0]);
        out[1] = fmaf(__uint_as_float(words[n] & 0xFFFF0000u), scale_[n & 1], out[1]);
      }
    }
  }

 private:
  // How many times a work tile promotes out.
  __device__ __forceinline__ int count(const WorkTile &t) const {
    return (t.kv_tiles - 1) / kInterval - unmasked_begin(t, t.begin[at_.wg], t.masked_end[at_.wg]) / kInterval;
  }
  __device__ __forceinline__ uint32_t vector_address(int vector) const {
    static_assert(!C::kFp8 || C::kOutAtoms * 64 >= C::kDv);
    return smem_.out(at_.wg) + vector / 4 * 64 * 128 + at_.warp * 16 * 128 + vector % 4 * 512 + at_.lane * 16;
  }

  const SharedMemory<C> smem_;
  const ConsumerThread at_;
  float max_[2] = {0.f, 0.f};  // the maximum that the promoted sum is relative to
  float scale_[2] = {0.f, 0.f};
};

}  // namespace fa::cuda::sm90
