// SPDX-License-Identifier: Apache-2.0
// Dropout bits of a tile of 16 rows of one head (core/philox.h has the rule). Of the generator's counter only the first word differs
// between the elements of such a tile, so half of the first two rounds is done once a tile. The functions are compiled for the host, too, where a
// unit test runs them.
#pragma once

#include "core/host_device.h"
#include "core/philox.h"
#include "core/problem.h"

namespace fa::cuda {

FA_HD DropoutKey load_dropout_key(const Dropout &dropout) {
  const uint64_t seed = dropout.seed_ptr != nullptr ? *dropout.seed_ptr : dropout.seed;
  const uint64_t offset = dropout.offset + (dropout.offset_ptr != nullptr ? *dropout.offset_ptr : 0);
  return dropout_key(seed, offset);
}

// Where what is kept of the elements of a wgmma accumulator lies, 32 of them in a word: that of even elements in the low half, that of odd ones in the high half.
FA_HD constexpr uint32_t kept_bit(int element) { return 1u << (element % 32 / 2 + 16 * (element % 2)); }

// Which of the numbers in the halves of a word are kept.
class KeptHalves {
 public:
  KeptHalves() = default;
  FA_HD explicit KeptHalves(uint32_t threshold) {
    const KeptNumbers kept(threshold);
    limit_ = kept.limit * 0x10001u, inverted_ = kept.below ? ~0u : 0u;
  }

  // 0xFFFF in each half of x whose number is kept, 0 elsewhere.
  FA_HD uint32_t of(uint32_t x) const { return reach_limit(x) ^ inverted_; }
  // The same, to be inverted by all bits of inverted().
  FA_HD uint32_t reach_limit(uint32_t x) const {
#ifdef __CUDA_ARCH__
    // The bits of numbers of fp16 that are not negative are in the order of the numbers, and NaN, above infinity, is `unordered`.
    uint32_t reached;
    asm("{\n"
        ".reg .b32 number;\n"
        "abs.f16x2 number, %1;\n"
        "set.geu.u32.f16x2 %0, number, %2;\n"
        "}\n"
        : "=r"(reached)
        : "r"(x), "r"(limit_));
    return reached;
#else
    const uint32_t low = (x & 0x7FFFu) >= (limit_ & 0xFFFFu) ? 0xFFFFu : 0u,
                   high = (x >> 16 & 0x7FFFu) >= limit_ >> 16 ? 0xFFFF0000u : 0u;
    return high | low;
#endif
  }
  FA_HD uint32_t inverted() const { return inverted_; }

 private:
  uint32_t limit_ = 0;     // KeptNumbers::limit, twice
  uint32_t inverted_ = 0;  // all ones where numbers below the limit are kept
};

// What is kept of the elements of two calls of the generator, still to be combined with KeptHalves::inverted(): bit n of each half of a word tells of halves of the n-th
// word of the calls.
struct KeptOfCalls {
  uint32_t even = 0, odd = 0;  // of even and of odd rows

  FA_HD void set(int n, const KeptHalves &kept, uint32_t word) {
    even |= kept.reach_limit(word) & (0x10001u << n);
    odd |= kept.reach_limit(dropout_word_of_odd_row(word)) & (0x10001u << n);
  }
};

// Two lanes l and l ^ 4 own the elements of a call: of S^T the rows are keys, elsewhere they are queries.
FA_HD bool owns_odd_rows(int lane) { return (lane >> 2 & 1) != 0; }

class DropoutTile {
 public:
  FA_HD DropoutTile() {}
  // Of rows 16 * row_tile on, batch-head bh = b * heads_q + h.
  FA_HD DropoutTile(const DropoutKey &key, uint32_t bh, int row_tile) : k0_(key.k0), k1_(key.k1), first_(key.c3 ^ key.k1) {
    const uint64_t head = uint64_t{kM1} * bh;
    const uint64_t tile = uint64_t{kM0} * (high(head) ^ static_cast<uint32_t>(row_tile) ^ key.k0);
    second0_ = low(head) ^ (key.k0 + kW0);
    second2_ = high(tile) ^ (key.k1 + kW1);
    second3_ = low(tile);
  }

  // philox4x32(c0, row_tile, bh, key.c3, key.k0, key.k1)
  FA_HD Philox4 bits(uint32_t c0) const {
    Philox4 c[1];
    bits(
        c, [&](int) -> const DropoutTile & { return *this; }, [&](int) { return c0; });
    return c[0];
  }
  // c[n] = tile(n).bits(c0(n)), for tiles of one key. A round depends on the round before it, so the rounds of the calls alternate: the compiler keeps this
  // order where registers are short, and the multiplications of one call hide the latency of the others.
  template <int kCount, typename Tile, typename C0>
  static FA_HD void bits(Philox4 (&c)[kCount], Tile tile, C0 c0) {
    uint64_t p0[kCount], p1[kCount];
    FA_UNROLL
    for (int n = 0; n < kCount; ++n) p0[n] = uint64_t{kM0} * c0(n);
    FA_UNROLL
    for (int n = 0; n < kCount; ++n) p1[n] = uint64_t{kM1} * (high(p0[n]) ^ tile(0).first_);  // first_ depends on the key alone
    FA_UNROLL
    for (int n = 0; n < kCount; ++n) {
      const DropoutTile &t = tile(n);
      c[n] = {{high(p1[n]) ^ t.second0_, low(p1[n]), low(p0[n]) ^ t.second2_, t.second3_}};
    }
    FA_UNROLL
    for (int round = 2; round < kPhiloxRounds; ++round) {
      FA_UNROLL
      for (int n = 0; n < kCount; ++n) p0[n] = uint64_t{kM0} * c[n].word[0], p1[n] = uint64_t{kM1} * c[n].word[2];
      FA_UNROLL
      for (int n = 0; n < kCount; ++n) {
        const DropoutTile &t = tile(n);
        const uint32_t k0 = t.k0_ + round * kW0, k1 = t.k1_ + round * kW1;
        c[n] = {{high(p1[n]) ^ c[n].word[1] ^ k0, low(p1[n]), high(p0[n]) ^ c[n].word[3] ^ k1, low(p0[n])}};
      }
    }
  }

 private:
  static constexpr uint32_t kM0 = 0xD2511F53u, kM1 = 0xCD9E8D57u, kW0 = 0x9E3779B9u, kW1 = 0xBB67AE85u;
  static FA_HD uint32_t high(uint64_t x) { return static_cast<uint32_t>(x >> 32); }
  static FA_HD uint32_t low(uint64_t x) { return static_cast<uint32_t>(x); }

  uint32_t k0_, k1_;
  uint32_t first_;                        // of the first round
  uint32_t second0_, second2_, second3_;  // of the second
};

#ifdef __CUDACC__
// The first word of the counter of a call for this lane's elements of the 16 keys from key0 on, a multiple of 16. Rows are queries; the next 16 keys have a counter 16 larger.
__device__ __forceinline__ uint32_t lane_dropout_counter0(int key0, int lane) {
  return static_cast<uint32_t>(key0 + 4 * (lane >> 3) + (lane & 3));
}
// Each lane has eight words of two calls, those of even rows for the first two of four tiles of 16 keys, the others for the last two. Returns what is kept of this lane's elements of all
// four at kept_bit(), still to be combined with KeptHalves::inverted().
__device__ __forceinline__ uint32_t exchange_kept(const KeptOfCalls &kept, int lane) {
  const bool odd = owns_odd_rows(lane);
  const uint32_t others = __shfl_xor_sync(~0u, odd ? kept.even : kept.odd, 4);
  return __byte_perm(odd ? kept.odd : kept.even, others, odd ? 0x2604 : 0x6240);
}
#endif

}  // namespace fa::cuda
