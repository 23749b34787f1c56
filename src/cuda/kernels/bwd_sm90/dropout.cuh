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

  // Keys from key0 on and queries from row0 on, both multiples of 16, of batch-head bh = b * heads_q + h.
  // smem_key: address of the problem's key in shared memory, from where it is read each time: round keys held in registers would spill others.
  __device__ __forceinline__ void draw(uint32_t smem_key, uint32_t threshold, uint32_t bh, int row0, int key0, int lane) {
    const DropoutKey key{ld_shared_4(smem_key), ld_shared_4(smem_key + 4), ld_shared_4(smem_key + 8)};
    const uint32_t c0 = transposed_dropout_counter0(key0, lane);
    const KeptSigns kept_signs(threshold);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t bits = 0;  // of this lane's calls: of even keys in the low half, of odd ones in the high half
#pragma unroll
      for (int n = 0; n < 4; n += 2) {  // two calls at a time: one hides the latency of the other
        const DropoutTile tiles[2] = {{key, bh, row0 / 16 + 4 * w + n}, {key, bh, row0 / 16 + 4 * w + n + 1}};
        Philox4 x[2];
        DropoutTile::bits(
            x, [&](int i) -> const DropoutTile & { return tiles[i]; }, [&](int) { return c0; });
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
          for (int r = 0; r < 4; ++r) bits = append_kept(bits, kept_signs.of(x[i].word[r]));  // queries r / 2, keys r % 2
        }
      }
      kept[w] = exchange_kept_pairs(bits, lane);
    }
  }
};

}  // namespace fa::cuda::sm90
