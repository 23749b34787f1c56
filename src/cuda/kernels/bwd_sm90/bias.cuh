// SPDX-License-Identifier: Apache-2.0
// The bias of S^T in the layout of a wgmma accumulator: 16 keys of a warp x queries.
#pragma once

#include <math_constants.h>

#include "cuda/common/ptx.cuh"

namespace fa::cuda::sm90 {

// TMA stores a tile of the bias query by query, 64 keys (128 bytes, swizzled) of each. ldmatrix transposes it.
template <typename Element, int kQueries>
struct BiasPairs {
  uint32_t pairs[kQueries / 16][4];  // two queries of a key

  // Of this warp's 16 keys of a warpgroup's tile.
  __device__ __forceinline__ void load(uint32_t tile, int warp, int lane) {
    // Lane l gives the address of query l % 8 of matrix l / 8. Matrices 0 and 1 are keys 0 to 7 and 8 to 15 of eight queries, 2 and 3 the same
    // keys of the next eight queries.
    const int query = (lane >> 4) * 8 + (lane & 7), keys = warp * 2 + ((lane >> 3) & 1);
    const uint32_t at = tile + query * 128 + ((keys ^ (lane & 7)) << 4);
#pragma unroll
    for (int n = 0; n < kQueries / 16; ++n) ldmatrix_x4_trans(pairs[n], at + n * 16 * 128);
  }
  // Of element n of the accumulator.
  __device__ __forceinline__ float at(int n) const {
    const uint32_t pair = pairs[n / 8][n % 8 / 2];
    return to_float<Element>(n & 1 ? pair >> 16 : pair & 0xFFFFu);
  }
  // Whether any element is not finite.
  __device__ __forceinline__ bool any_nonfinite() const {
    uint32_t found[2] = {};
#pragma unroll
    for (int n = 0; n < kQueries / 4; ++n) found[n & 1] = nan_where_nonfinite<Element>(pairs[n / 4][n % 4], found[n & 1]);
    return ((found[0] | found[1]) & 0x7FFF7FFFu) != 0;
  }
};

// For mixtures: the bias of a Q tile x this warp's 16 keys, natural logits, as they are in the accumulator.
template <typename Element>
class BiasColumns {
 public:
  // tile: a stage of memory for a bias. wg: the warpgroup, which has 64 keys of it.
  __device__ __forceinline__ BiasColumns(uint32_t tile, bool fp32, int wg, int warp, int lane) : fp32_(fp32) {
    if (fp32) {
      // Boxes of 32 keys. This lane's first query and key of a step: the other ones are an XOR away.
      const int query = 2 * (lane & 3), vector = (warp & 1) * 4 + (lane >> 4);
      at_ = tile + (wg * 2 + (warp >> 1)) * 64 * 128 + query * 128 + ((vector ^ query) << 4) + (lane >> 2 & 3) * 4;
    } else {  // as BiasPairs::load()
      const int query = (lane >> 4) * 8 + (lane & 7), keys = warp * 2 + ((lane >> 3) & 1);
      at_ = tile + wg * 64 * 128 + query * 128 + ((keys ^ (lane & 7)) << 4);
    }
  }
  // Adds the bias, times `unit`, of kCount / 4 column blocks, and NaN to `finite` where one is not finite.
  template <int kCount>
  __device__ __forceinline__ void add(float (&x)[kCount], float unit, float &finite) const {
    if (fp32_) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const uint32_t query = n & 1, key = n >> 1 & 1;  // one up, eight up
        add(x[n], ld_shared_float((at_ ^ (query << 4 | key << 5)) + n / 4 * 8 * 128 + query * 128), unit, finite);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kCount; n += 8) {
        uint32_t pairs[4];
        ldmatrix_x4_trans(pairs, at_ + n / 8 * 16 * 128);
#pragma unroll
        for (int m = 0; m < 8; ++m)
          add(x[n + m], to_float<Element>(m & 1 ? pairs[m / 2] >> 16 : pairs[m / 2] & 0xFFFFu), unit, finite);
      }
    }
  }

 private:
  static __device__ __forceinline__ void add(float &x, float bias, float unit, float &finite) {
    x = fmaf(bias, unit, x);
    finite = fmaf(bias, 0.f, finite);
  }

  const bool fp32_;
  uint32_t at_;
};

}  // namespace fa::cuda::sm90
