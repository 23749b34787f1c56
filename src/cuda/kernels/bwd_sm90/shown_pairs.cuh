// SPDX-License-Identifier: Apache-2.0
// Which pairs of S^T masks as data show, in the layout of a wgmma accumulator: 16 keys of a warp x queries.
#pragma once

#include "cuda/common/data_mask.cuh"
#include "cuda/common/score_text.cuh"

namespace fa::cuda::sm90 {

// Bit 16 r + 2 j + e of word w is element 4 (8 w + j) + 2 r + e of the accumulator: key lane / 4 + 8 r, query 64 w + 8 j + 2 (lane % 4) + e.
template <int kQueries>
struct ShownPairs {
  static constexpr int kWords = kQueries / 64;
  uint32_t word[kWords];

  __device__ __forceinline__ void set_all() {
#pragma unroll
    for (uint32_t &x : word) x = ~0u;
  }

  // Of queries from row0 on and the warp's 16 of the 64 keys from key0 on, both multiples of 64. cell_codes: those of VisitedQTile, from word 0's cell
  // on. All lanes take part: a lane reads the keys of two queries, and ballots transpose the bits to queries of a key.
  __device__ __forceinline__ void find(const DataMask &mask, const Problem &p, int batch, int head_q, int row0, int key0,
                                       uint32_t cell_codes) {
    // Read again: there are no registers for what the caller holds.
    const int lane = static_cast<int>(threadIdx.x & 31), warp = static_cast<int>(threadIdx.x >> 5 & 3);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t code = cell_codes >> 2 * w & 3;
      if (code < 2) {  // empty or full
        word[w] = code == 0 ? 0u : ~0u;
        continue;
      }
      uint32_t keys[2];  // of queries row0 + 64 w + lane and that + 32: 16 bits
#pragma unroll 1
      for (int n = 0; n < 2; ++n) {
        const uint64_t row = visible_key_bits(mask, p, batch, head_q, row0 + 64 * w + 32 * n + lane, key0);
        const uint32_t mine = static_cast<uint32_t>(row >> 16 * warp) & 0xFFFF;
        if (n == 0) {
          keys[0] = mine;
        } else {
          keys[1] = mine;
        }
      }
      uint32_t bits = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint64_t queries = 0;
#pragma unroll
        for (int key = 0; key < 8; ++key) {
          const uint32_t low = __ballot_sync(~0u, (keys[0] >> (8 * r + key) & 1) != 0),
                         high = __ballot_sync(~0u, (keys[1] >> (8 * r + key) & 1) != 0);
          if (lane >> 2 == key) queries = uint64_t{high} << 32 | low;
        }
        bits |= qk_fragment_bits(queries, lane) << 16 * r;
      }
      // Keeps the compiler from moving any of this to where the bits are used.
      asm volatile("" : "+r"(bits));
      word[w] = bits;
    }
  }

  // The same by a score text alone.
  __device__ __forceinline__ void find(const ScoreText &text, int row0, int key0, uint32_t cell_codes) {
    const int lane = static_cast<int>(threadIdx.x & 31), warp = static_cast<int>(threadIdx.x >> 5 & 3);
    const int key = key0 + 16 * warp + (lane >> 2), query = row0 + 2 * (lane & 3);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t code = cell_codes >> 2 * w & 3;
      uint32_t bits = code == 0 ? 0u : ~0u;
      if (ScoreText::kVisible && code > 1) {
#pragma unroll
        for (int n = 0; n < 32; ++n)
          if (!text.visible(query + 64 * w + 8 * (n / 4) + (n & 1), key + 8 * (n >> 1 & 1))) bits &= ~(1u << bit(n));
      }
      asm volatile("" : "+r"(bits));  // as above
      word[w] = bits;
    }
  }

  // Hides the pairs of which the element of an accumulator is `hidden`. x: its elements from kFirst on.
  template <int kFirst = 0, int kCount>
  __device__ __forceinline__ void hide(const float (&x)[kCount], float hidden) {
    static_assert(kWords == 1);
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (x[n] == hidden) word[0] &= ~(1u << bit(kFirst + n));
  }

  // Calls f(n) for the elements of 64 queries, those of word w, that are hidden. kFewAtOnce: where there are no registers to test many at once.
  template <bool kFewAtOnce = false, typename F>
  __device__ __forceinline__ void for_hidden(int w, F f) const {
    uint32_t bits = word[w];
#pragma unroll
    for (int n = 0; n < 32; ++n) {
      if (kFewAtOnce && n % 4 == 0) asm volatile("" : "+r"(bits));
      if ((bits >> bit(n) & 1) == 0) f(n);
    }
  }

 private:
  // Of element n of 64 queries.
  static constexpr __device__ __forceinline__ int bit(int n) { return 16 * (n >> 1 & 1) + 2 * (n / 4) + (n & 1); }
};

}  // namespace fa::cuda::sm90
