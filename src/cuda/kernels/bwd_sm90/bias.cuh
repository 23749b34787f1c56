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

// The same from global memory, with any strides and dtype, for kernels without shared memory for it. Rows and keys behind the end of the sequence have
// the bias of its last ones: these pairs are masked.
class BiasInPlace {
 public:
  // Of 64 keys from first_key on and queries from row0 on.
  __device__ __forceinline__ BiasInPlace(const ScoreTensor &bias, const WorkTile &t, int head_q, int row0, int first_key,
                                         int warp, int lane)
      : bias_(bias),
        head_(t.batch * bias.batch_stride + head_q * bias.head_stride),
        row0_(row0),
        key0_(first_key + warp * 16),
        last_row_(t.seqlen_q - 1),
        last_key_(t.seqlen_k - 1),
        lane_(lane) {}

  // Brings the bias of 64 queries to L1, ahead of add(), whose loads follow one another.
  __device__ __forceinline__ void fetch() const {
    const int bytes = bias_.dtype == Dtype::f32 ? 4 : 2;
#pragma unroll
    for (int row = 0; row < 64; row += 32)
#pragma unroll
      for (int key = 0; key < 16; key += 15)
        asm volatile("{\n.reg .u32 x;\nld.global.u8 x, [%0];\n}\n" ::"l"(static_cast<const char *>(bias_.data) +
                                                                         (row_at(row + lane_) + key_at(key)) * bytes));
  }
  template <int kCount>
  __device__ __forceinline__ void add(float (&x)[kCount], float unit, float &) const {
    if (bias_.dtype == Dtype::f32) {
      add(x, [&](int64_t at) { return static_cast<const float *>(bias_.data)[at] * unit; });
    } else {
      const bool bf16 = bias_.dtype == Dtype::bf16;
      add(x, [&](int64_t at) {
        const uint32_t bits = static_cast<const uint16_t *>(bias_.data)[at];
        return (bf16 ? to_float<__nv_bfloat16>(bits) : to_float<__half>(bits)) * unit;
      });
    }
  }

 private:
  template <int kCount, typename Load>
  __device__ __forceinline__ void add(float (&x)[kCount], Load load) const {
    int64_t keys[2] = {key_at(lane_ >> 2), key_at((lane_ >> 2) + 8)};
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
#pragma unroll
      for (int query = 0; query < 2; ++query) {
        const int64_t row = row_at(2 * (lane_ & 3) + 2 * n + query);
#pragma unroll
        for (int key = 0; key < 2; ++key) x[n + 2 * key + query] += load(row + keys[key]);
      }
      // Eight loads at a time: there are no registers for more.
      if (n % 8 == 4)
        asm volatile("" : "+l"(keys[0]), "+l"(keys[1]), "+f"(x[n]), "+f"(x[n + 1]), "+f"(x[n + 2]), "+f"(x[n + 3]));
    }
  }
  // In elements, the offsets of a row and of a key, counted from the first of the tile.
  __device__ __forceinline__ int64_t row_at(int row) const { return min(row0_ + row, last_row_) * bias_.row_stride; }
  __device__ __forceinline__ int64_t key_at(int key) const { return head_ + min(key0_ + key, last_key_) * bias_.col_stride; }

  const ScoreTensor &bias_;
  const int64_t head_;
  const int row0_, key0_, last_row_, last_key_, lane_;
};

}  // namespace fa::cuda::sm90
