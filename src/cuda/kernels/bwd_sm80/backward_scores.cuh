// SPDX-License-Identifier: Apache-2.0
// What the backward kernel makes of a tile of raw S^T: the weights P, and the derivative of the scores.
//
// A warp holds kMt * 16 keys (rows) x kNt * 8 queries (columns) as accumulators. Element (i, j, r) of a lane is key 16 i + g +
// 8 (r / 2), query 8 j + 2 q + r % 2 of the tile (g = lane / 4, q = lane % 4) and bit (i kNt + j) 4 + r of a PairBits.
#pragma once

#include <math_constants.h>

#include "core/mask.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/rng.cuh"
#include "cuda/common/score.cuh"

namespace fa::cuda::sm80 {

// The band of one sequence in 32 bits: query i sees keys j with first <= j - i <= last, i < seqlen_q, j < seqlen_k.
struct BandLimits {
  int first, last, seqlen_q, seqlen_k;

  __device__ __forceinline__ BandLimits() {}
  __device__ __forceinline__ BandLimits(const Band &band, int seqlen_q, int seqlen_k) : seqlen_q(seqlen_q), seqlen_k(seqlen_k) {
    const Diagonal<int32_t> diagonal(Diagonal<int32_t>::Limits(band), seqlen_q, seqlen_k);
    first = diagonal.shift - diagonal.left;
    last = diagonal.shift + diagonal.right;
  }

  // Whether key j is visible to row i: visible(offset(j), i). Where the key does not exist the offset is out of reach for every
  // row.
  __device__ __forceinline__ uint32_t offset(int key) const {
    return key < seqlen_k ? static_cast<uint32_t>(key) - static_cast<uint32_t>(first) : 0xC0000000u;
  }
  __device__ __forceinline__ bool visible(uint32_t offset, int row) const {
    const uint32_t width = static_cast<uint32_t>(last) - static_cast<uint32_t>(first);  // less than 2^31
    return offset - static_cast<uint32_t>(row) <= width && row < seqlen_q;
  }

  // Whether any (all) of the pairs of a tile are visible.
  __device__ __forceinline__ bool any(int row0, int rows, int key0, int keys) const {
    return row0 < seqlen_q && key0 < seqlen_k && key0 + keys - 1 - row0 >= first && key0 - (row0 + rows - 1) <= last;
  }
  __device__ __forceinline__ bool all(int row0, int rows, int key0, int keys) const {
    return key0 + keys <= seqlen_k && key0 - (row0 + rows - 1) >= first && key0 + keys - 1 - row0 <= last;
  }
};

using PairBits = uint32_t;

template <typename Element, int kMt, int kNt>
struct ScoreTile {
  static_assert(kMt * kNt * 4 <= 32 && kNt % 2 == 0);
  using Tile = Accumulator<kMt, kNt>;

  static __device__ __forceinline__ int key_of(int i, int r) {
    return 16 * i + static_cast<int>(threadIdx.x & 31) / 4 + 8 * (r >> 1);
  }
  static __device__ __forceinline__ int row_of(int j, int r) { return 8 * j + 2 * static_cast<int>(threadIdx.x & 3) + (r & 1); }
  static __device__ __forceinline__ constexpr int bit_of(int i, int j, int r) { return (i * kNt + j) * 4 + r; }

  template <typename F>
  static __device__ __forceinline__ void for_each(F f) {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int j = 0; j < kNt; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) f(i, j, r);
  }

  // The pairs of the tile from (row0, key0) on that band and lengths leave visible.
  static __device__ __forceinline__ PairBits visible(const BandLimits &band, int row0, int key0) {
    PairBits bits = 0;
    key0 = opaque(key0);
    for_each([&](int i, int j, int r) {
      if (band.visible(band.offset(key0 + key_of(i, r)), row0 + row_of(j, r))) bits |= 1u << bit_of(i, j, r);
    });
    return bits;
  }

  // Random bits of the 16 keys x 16 queries from key0 and a row tile on, in the order of a packed fragment: 16 bits a weight. One call
  // serves eight pairs that share query % 8 and (key % 8) / 2; here two lanes (g even and odd) own halves of two such sets, so each
  // makes one call and they exchange halves.
  static __device__ __forceinline__ void random_bits(uint32_t (&bits)[4], const DropoutTile &dropout, int key0) {
    const uint32_t lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const bool odd = (g & 1) != 0;
    const Philox4 x = dropout.bits(2 * static_cast<uint32_t>(key0) + 4 * (2 * q + (g & 1)) + (g >> 1));
    // Words are (query / 8, key / 8), halves the parity of the key. This lane's call is for the query of its own parity.
    const uint32_t mine = odd ? 0x7632 : 0x5410, others = odd ? 0x5410 : 0x7632;
    const uint32_t even_first = odd ? 0x1054 : 0x5410, odd_first = odd ? 0x3276 : 0x7632;
#pragma unroll
    for (int n = 0; n < 4; n += 2) {
      const uint32_t own = __byte_perm(x.word[n], x.word[n + 1], mine);
      const uint32_t other = __shfl_xor_sync(~0u, __byte_perm(x.word[n], x.word[n + 1], others), 4);
      bits[n] = __byte_perm(own, other, even_first);
      bits[n + 1] = __byte_perm(own, other, odd_first);
    }
  }

  // The bias of the visible pairs.
  static __device__ __forceinline__ void load_bias(Tile &bias, PairBits visible, const ScoreTensor &t, int64_t slice, int row0,
                                                   int key0) {
    const int64_t at = slice + (row0 + row_of(0, 0)) * t.row_stride + (key0 + key_of(0, 0)) * t.col_stride;
    const auto load = [&](auto convert, const auto *first) {
      for_each([&](int i, int j, int r) {
        bias[i][j][r] = 0.f;
        if ((visible >> bit_of(i, j, r) & 1) == 0) return;
        bias[i][j][r] = convert(first[(8 * j + (r & 1)) * t.row_stride + (16 * i + 8 * (r >> 1)) * t.col_stride]);
      });
    };
    if (t.dtype == Dtype::f32) {
      load([](float x) { return x; }, static_cast<const float *>(t.data) + at);
    } else if (t.dtype == Dtype::bf16) {
      load([](uint16_t x) { return to_float<__nv_bfloat16>(x); }, static_cast<const uint16_t *>(t.data) + at);
    } else {
      load([](uint16_t x) { return to_float<__half>(x); }, static_cast<const uint16_t *>(t.data) + at);
    }
  }

  // Rounds a tile to the left operands of the next product.
  static __device__ __forceinline__ void pack(PFragment<kMt, kNt / 2> &w, const Tile &x) {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int k = 0; k < kNt / 2; ++k)
#pragma unroll
        for (int n = 0; n < 4; ++n)
          w[i][k][n] = pack2<Element>(x[i][2 * k + n / 2][2 * (n & 1)], x[i][2 * k + n / 2][2 * (n & 1) + 1]);
  }
};

}  // namespace fa::cuda::sm80
