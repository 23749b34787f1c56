// SPDX-License-Identifier: Apache-2.0
// Dropout bits: Philox4x32-7, and the rule that assigns its output to the elements of P.
//
// P of one batch entry b and query head h is divided into blocks of 16 x 16. Element (i, j), in block row i / 16 and block column j / 16,
// takes 16 bits of the call
//
//   counter = { 32 * (j / 16) + 4 * (i % 8) + (j % 8) / 2,   i / 16,   b * heads_q + h,   low word of offset }
//   key     = { low word of seed,   high word of seed ^ high word of offset }
//
// namely word 2 * ((i / 8) % 2) + (j / 8) % 2 of the result: its low half if j is even, its high half if j is odd. The element is kept if
// these 16 bits, as an unsigned number, are >= round(65536 * dropout_p). One call serves the eight elements that one thread owns of a
// 16 x 16 tensor-core accumulator tile. The rule does not depend on tiles, backends or kernels.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fa {

// The fewest rounds that pass every test of BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The generator takes much of a kernel's
// time, so there are no more.
constexpr int kPhiloxRounds = 7;

struct Philox4 {
  uint32_t word[4];
};

FA_HD Philox4 philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Seed and offset of one call, after the device pointers have been read.
struct DropoutKey {
  uint32_t k0 = 0, k1 = 0, c3 = 0;
};

FA_HD DropoutKey dropout_key(uint64_t seed, uint64_t offset) {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32),
          static_cast<uint32_t>(offset)};
}

FA_HD uint32_t dropout_counter0(int64_t i, int64_t j) {
  return static_cast<uint32_t>(32 * (j >> 4) + 4 * (i & 7) + ((j & 7) >> 1));
}
FA_HD uint32_t dropout_counter1(int64_t i) { return static_cast<uint32_t>(i >> 4); }

// The 16 random bits of element (i, j) of batch-head `bh` = b * heads_q + h.
FA_HD uint32_t dropout_bits(const DropoutKey &key, uint32_t bh, int64_t i, int64_t j) {
  const Philox4 r = philox4x32(dropout_counter0(i, j), dropout_counter1(i), bh, key.c3, key.k0, key.k1);
  // Selected without an index, so that a GPU keeps the words in registers.
  const uint32_t left = (i & 8) ? r.word[2] : r.word[0], right = (i & 8) ? r.word[3] : r.word[1];
  const uint32_t word = (j & 8) ? right : left;
  return (j & 1) ? word >> 16 : word & 0xFFFFu;
}

}  // namespace fa
