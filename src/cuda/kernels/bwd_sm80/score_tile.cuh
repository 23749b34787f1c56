// SPDX-License-Identifier: Apache-2.0
// A tile of S^T of the backward: kMt * 16 keys (rows) x kNt * 8 queries (columns) of one warp, laid out as KqFragment<kMt, kNt>.
#pragma once

#include "cuda/common/data_mask.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/rng_transposed.cuh"
#include "cuda/common/score_mod.cuh"

namespace fa::cuda::sm80 {

// A bit per element of a tile, of this lane.
using PairBits = uint32_t;

template <int kMt, int kNt>
struct ScoreTile {
  using Fragment = KqFragment<kMt, kNt>;
  using Scores = Accumulator<kMt, kNt>;
  static_assert(Fragment::kElements <= 32 && kNt % 2 == 0);

  // Key and query of element (i, j, r) of this lane, in the tile, and its bit in PairBits. Loops run over i, j and r: ptxas then keeps the bits
  // as predicates. A loop over n of KqFragment costs a selection and a logical operation for every bit.
  static __device__ __forceinline__ int key_of(int i, int r) {
    return 16 * i + static_cast<int>(threadIdx.x & 31) / 4 + 8 * (r >> 1);
  }
  static __device__ __forceinline__ int query_of(int j, int r) {
    return 8 * j + 2 * static_cast<int>(threadIdx.x & 3) + (r & 1);
  }
  static __device__ __forceinline__ constexpr int bit_of(int i, int j, int r) { return (i * kNt + j) * 4 + r; }

  // Calls f(i, j, r) for every element.
  template <typename F>
  static __device__ __forceinline__ void for_each(F f) {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int j = 0; j < kNt; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) f(i, j, r);
  }

  // The pairs that band and sequence leave visible, of the tile that begins at (row0, key0).
  static __device__ __forceinline__ PairBits visible(const PairMask &mask, int row0, int key0) {
    PairBits bits = 0;
    key0 = opaque(key0);
    for_each([&](int i, int j, int r) {
      if (mask.visible(mask.offset(key0 + key_of(i, r)), row0 + query_of(j, r))) bits |= 1u << bit_of(i, j, r);
    });
    return bits;
  }

  // The pairs that masks given as data show. Lane n asks for the keys of query row0 + n; the warp calls this as one. Not inlined: that would take
  // registers from the main loop, and few tiles need it.
  static __device__ __noinline__ PairBits shown(const DataMask &mask, const Problem &p, int b, int h, int row0, int key0) {
    constexpr int kQueries = 8 * kNt;
    static_assert(kQueries <= 32 && kMt <= 2 && kCell % (16 * kMt) == 0);
    const int lane = static_cast<int>(threadIdx.x & 31);
    const uint64_t keys = visible_key_bits(mask, p, b, h, row0 + lane % kQueries, key0 / kCell * kCell);
    const auto of_tile = static_cast<uint32_t>(keys >> key0 % kCell);
    PairBits bits = 0;
#pragma unroll
    for (int j = 0; j < kNt; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t of_query = __shfl_sync(~0u, of_tile, query_of(j, e)) >> key_of(0, 0);
#pragma unroll
        for (int i = 0; i < kMt; ++i)
#pragma unroll
          for (int half = 0; half < 2; ++half) bits |= (of_query >> (16 * i + 8 * half) & 1) << bit_of(i, j, 2 * half + e);
      }
    return bits;
  }

  // Dropout numbers of kMt x 16 keys from key0 on x 16 queries of a row tile, in the order of an A operand: a half of a word for each.
  static __device__ __forceinline__ void dropout_numbers(uint32_t (&numbers)[kMt][4], const DropoutTile &dropout, int key0) {
    const int lane = static_cast<int>(threadIdx.x & 31);
    const uint32_t c0 = transposed_lane_dropout_counter0(key0, lane);
    Philox4 x[kMt];
    DropoutTile::bits(
        x, [&](int) -> const DropoutTile & { return dropout; }, [&](int i) { return c0 + 16 * i; });
#pragma unroll
    for (int i = 0; i < kMt; ++i) transposed_dropout_numbers(x[i], lane, numbers[i]);
  }

  // The bias of the visible pairs, from global memory. `slice`: index of element (0, 0) of its batch entry and head.
  static __device__ __forceinline__ void load_bias(Scores &bias, PairBits visible, const ScoreTensor &t, int64_t slice,
                                                   int row0, int key0) {
    const int64_t at = slice + (row0 + query_of(0, 0)) * t.row_stride + (key0 + key_of(0, 0)) * t.col_stride;
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
};

// dS = P (dP - delta) of one element, from P as it was converted for dv. A visible -0 must not look masked: + 0.
template <bool kMasked>
__device__ __forceinline__ float ds_of(float p, float dp, float delta) {
  const float d = p * (dp - delta);
  return !kMasked ? d : is_masked_p(p) ? kMaskedP : d + 0.f;
}

// Element e of the pair that a register of an A operand holds.
template <typename Element>
__device__ __forceinline__ float half_of(uint32_t pair, int e) {
  return to_float<Element>(e != 0 ? pair >> 16 : pair & 0xFFFFu);
}

}  // namespace fa::cuda::sm80
