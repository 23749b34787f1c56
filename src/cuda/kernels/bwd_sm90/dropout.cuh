// SPDX-License-Identifier: Apache-2.0
// Dropout bits of S^T in the layout of a wgmma accumulator: 16 keys of a warp x queries.
#pragma once

#include "cuda/common/rng_transposed.cuh"

namespace fa::cuda::sm90 {

// Which pairs of a warp's 16 keys and kQueries queries are dropped: bit n of word w is element 32 w + n of the accumulator.
template <int kQueries>
struct DroppedPairs {
  static constexpr int kWords = kQueries / 64;
  uint32_t word[kWords];

  __device__ __forceinline__ bool dropped(int n) const { return (word[n / 32] >> n % 32 & 1) != 0; }

  // Keys from key0 on and queries from row0 on, both multiples of 16, of batch-head bh = b * heads_q + h.
  // smem_key: address of the problem's key in shared memory, from where it is read each time: round keys held in registers would spill others.
  __device__ __forceinline__ void draw(uint32_t smem_key, uint32_t threshold, uint32_t bh, int row0, int key0, int lane) {
    const DropoutKey key{ld_shared_4(smem_key), ld_shared_4(smem_key + 4), ld_shared_4(smem_key + 8)};
    const uint32_t c0 = transposed_dropout_counter0(key0, lane);
    threshold <<= 16;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      uint32_t bits = 0;
#pragma unroll
      for (int n = 0; n < 4; n += 2) {  // two calls at a time: one hides the latency of the other
        const DropoutTile tiles[2] = {{key, bh, row0 / 16 + 4 * w + n}, {key, bh, row0 / 16 + 4 * w + n + 1}};
        Philox4 x[2];
        DropoutTile::bits(
            x, [&](int i) -> const DropoutTile & { return tiles[i]; }, [&](int) { return c0; });
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t pairs[4];
          exchange_dropout_bits(x[i], lane, pairs);
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const int at = 8 * (n + i) + 4 * (r >> 1) + 2 * (r & 1);  // register r of an A operand: keys r & 1, queries r >> 1
            if (pairs[r] << 16 < threshold) bits |= 1u << at;
            if (pairs[r] < threshold) bits |= 2u << at;
          }
        }
      }
      // Keeps the compiler from moving the comparisons to where the bits are used: what they compare takes eight registers.
      asm volatile("" : "+r"(bits));
      word[w] = bits;
    }
  }
};

}  // namespace fa::cuda::sm90
