// SPDX-License-Identifier: Apache-2.0
// Dropout bits of S^T, keys as rows, for the backward.
#pragma once

#include "cuda/common/rng.cuh"

namespace fa::cuda {

// Bits of a 16 x 16 tile of S^T, keys as rows. One call serves eight pairs that share query % 8 and (key % 8) / 2. There two lanes (even and odd
// lane / 4) hold halves of two such sets: each makes one call, with this counter, and they exchange halves.
__device__ __forceinline__ uint32_t transposed_dropout_counter0(int key0, int lane) {
  const int g = lane >> 2;
  return static_cast<uint32_t>(2 * key0 + 4 * (2 * (lane & 3) + (g & 1)) + (g >> 1));
}
// The same with a bit for each pair of several calls, those of even keys in the low half of a word, those of odd keys in the high half. Returns this lane's pairs,
// those of even queries in the low half.
__device__ __forceinline__ uint32_t exchange_kept_pairs(uint32_t calls, int lane) {
  const uint32_t others = __shfl_xor_sync(~0u, calls, 4);
  return __byte_perm(calls, others, (lane >> 2 & 1) != 0 ? 0x3276 : 0x5410);
}
// bits[r]: 16 bits for each of the two pairs that register r of an A operand holds.
__device__ __forceinline__ void exchange_dropout_bits(const Philox4 &x, int lane, uint32_t (&bits)[4]) {
  const bool odd = (lane >> 2 & 1) != 0;
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

}  // namespace fa::cuda
