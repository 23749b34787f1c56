// SPDX-License-Identifier: Apache-2.0
// Dropout bits of S^T in the layout of a wgmma accumulator: 16 keys of a warp x queries.
#pragma once

#include "cuda/common/rng_transposed.cuh"

namespace fa::cuda::sm90 {

// Which pairs of a warp's 16 keys and kQueries queries are kept: a word for 64 queries (kept_bit()).
template <int kQueries>
struct DroppedPairs {
  static constexpr int kWords = kQueries / 64;
  uint32_t kept[kWords];

  // Whether element n of the accumulator is dropped.
  __device__ __forceinline__ bool dropped(int n) const { return (kept[n / 32] & kept_bit(n)) == 0; }
  // x, negated if element n is dropped: a shift and one lop3.
  __device__ __forceinline__ float negate_dropped(float x, int n) const {
    const uint32_t kept_at_sign = kept[n / 32] << (31 - (n % 32 / 2 + 16 * (n % 2)));
    return __uint_as_float(__float_as_uint(x) ^ (~kept_at_sign & 0x80000000u));
  }

  // Keys from key0 on and queries from row0 on, both multiples of 16, of batch-head bh = dropout_head().
  // smem_key: address of the problem's key in shared memory, from where it is read each time: round keys held in registers would spill others.
  __device__ __forceinline__ void draw(uint32_t smem_key, const Problem &p, uint32_t bh, int row0, int key0, int lane) {
    const DropoutKey key{ld_shared_4(smem_key), ld_shared_4(smem_key + 4), ld_shared_4(smem_key + 8)};
    const uint32_t c0 = transposed_lane_dropout_counter0(key0 + p.dropout.first_key, lane);
    const KeptHalves halves(p.dropout.threshold);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      // Two calls at a time: one hides the latency of the other.
      const int tile = (row0 + p.dropout.first_query) / 16 + 4 * w + (owns_odd_rows(lane) ? 2 : 0);
      const DropoutTile tiles[2] = {{key, bh, tile}, {key, bh, tile + 1}};
      Philox4 x[2];
      DropoutTile::bits(
          x, [&](int i) -> const DropoutTile & { return tiles[i]; }, [&](int) { return c0; });
      KeptOfCalls calls;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int r = 0; r < 4; ++r) calls.set(4 * i + r, halves, x[i].word[r]);  // queries r / 2, keys r % 2
      }
      kept[w] = exchange_kept_transposed(calls, lane) ^ halves.inverted();
    }
  }
};

}  // namespace fa::cuda::sm90
