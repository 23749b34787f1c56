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

// Where what is kept of the elements of a wgmma accumulator lies, 32 of them in a word: that of even elements in the low half, that of odd ones in the high half. Kernels shift
// the signs of two elements at a time into it.
FA_HD constexpr uint32_t kept_bit(int element) { return 1u << (element % 32 / 2 + 16 * (element % 2)); }
FA_HD uint32_t append_kept(uint32_t kept, uint32_t signs) { return (kept >> 1 & 0x7FFF7FFFu) | (signs & 0x80008000u); }

// Compares both halves x of a word of random bits with the threshold.
class KeptSigns {
 public:
  KeptSigns() = default;
  FA_HD explicit KeptSigns(uint32_t threshold)
      : addend_(((0x8000u - threshold) & 0xFFFFu) * 0x10001u), small_(threshold <= 0x8000u ? ~0u : 0u) {}

  // The sign of each half says whether x >= threshold; the other bits say nothing. Let y be x + 0x8000 - threshold, modulo 2^16: where x and the threshold are
  // on one side of 0x8000 the sign of y says it, and elsewhere that of x.
  FA_HD uint32_t of(uint32_t x) const {
#ifdef __CUDA_ARCH__
    const uint32_t y = __viaddmin_u16x2(x, addend_, ~0u);  // an addition in one instruction of sm_90
#else
    const uint32_t y = ((x + (addend_ & 0xFFFF0000u)) & 0xFFFF0000u) | ((x + addend_) & 0xFFFFu);
#endif
    return (x & y) | ((x | y) & small_);
  }

 private:
  uint32_t addend_ = 0;  // 0x8000 - threshold, twice
  uint32_t small_ = 0;   // all ones where the threshold is at most 0x8000
};

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

}  // namespace fa::cuda
