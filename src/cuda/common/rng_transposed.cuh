// SPDX-License-Identifier: Apache-2.0
// Dropout bits of S^T, keys as rows, for the backward.
#pragma once

#include "cuda/common/rng.cuh"

namespace fa::cuda {

// The first word of the counter of a call for this lane's elements of the 16 keys from key0 on, a multiple of 16, and 16 queries. The next 16 keys have a counter 16 larger.
__device__ __forceinline__ uint32_t transposed_lane_dropout_counter0(int key0, int lane) {
  return static_cast<uint32_t>(key0 + 4 * (lane & 3) + (lane >> 3));
}
// Each lane has eight words of two calls, those of even keys for the first two of four tiles of 16 queries, the others for the last two. Returns what is kept of this lane's pairs of all
// four at kept_bit(), still to be combined with KeptHalves::inverted().
__device__ __forceinline__ uint32_t exchange_kept_transposed(const KeptOfCalls &kept, int lane) {
  const bool odd = owns_odd_rows(lane);
  // Bits of even keys lie in bytes 0, of odd ones in bytes 2. The byte of even queries, then that of odd ones:
  const uint32_t own = __byte_perm(kept.even, kept.odd, odd ? 0x62 : 0x40);
  const uint32_t others = __shfl_xor_sync(~0u, __byte_perm(kept.even, kept.odd, odd ? 0x40 : 0x62), 4);
  return __byte_perm(own, others, odd ? 0x1504 : 0x5140);
}
// numbers[r]: those of the two pairs that register r of an A operand holds, of the even query in the low half.
__device__ __forceinline__ void transposed_dropout_numbers(const Philox4 &x, int lane, uint32_t (&numbers)[4]) {
  // Words are (query / 8, key / 8). Of an even query the half of its key's parity, and the same half of the rotated word.
  const uint32_t select = owns_odd_rows(lane) ? 0x2132 : 0x0310;
#pragma unroll
  for (int n = 0; n < 4; ++n) numbers[n] = __byte_perm(x.word[n], 0, select);
}

}  // namespace fa::cuda
