// SPDX-License-Identifier: Apache-2.0
// Dropout bits: Philox4x32-7, and the rule that assigns its output to the elements of P.
//
// P of one batch entry b and query head h is divided into blocks of 16 x 16. Element (i, j), in block row i / 16 and block column j / 16, has a
// number of 15 bits of the call
//
//   counter = { 16 * (j / 16) + 4 * ((i % 8) / 2) + (j % 8) / 2,   i / 16,   b * heads_q + h,   low word of offset }
//   key     = { low word of seed,   high word of seed ^ high word of offset }
//
// namely of word 2 * ((i / 8) % 2) + (j / 8) % 2 of the result, which is rotated to the left by 8 bits if i is odd: of its low half if j is even, of its
// high half if j is odd, all bits but the highest. KeptNumbers says which numbers keep the element.
//
// Four elements share a word. Each has a byte of its own in the upper half of its number, and a byte of another one in the lower half. So
// the number of one element is uniform, and whether two elements that share a byte are kept has a correlation of at most 1/128.
//
// One call serves the 16 elements that two lanes own of a 16 x 16 tensor-core accumulator tile: lanes l and l ^ 4, of S as well as of S^T. So they draw
// for two tiles, each lane for one. The rule does not depend on tiles, backends or kernels.
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

// dropout_p is a multiple of 1 / kDropoutSteps.
constexpr uint32_t kDropoutSteps = 32768;

// Which numbers keep an element. Where less is kept than dropped these are the small ones: so the limit is at most half of kDropoutSteps, and as the
// bits of a number of fp16 neither infinite nor NaN (cuda/common/rng.cuh).
struct KeptNumbers {
  uint32_t limit = 0;
  bool below = false;  // numbers below the limit, else the others

  KeptNumbers() = default;
  // threshold: dropout_p times kDropoutSteps, rounded.
  FA_HD explicit KeptNumbers(uint32_t threshold)
      : limit(threshold <= kDropoutSteps / 2 ? threshold : kDropoutSteps - threshold), below(threshold > kDropoutSteps / 2) {}
  FA_HD bool keeps(uint32_t number) const { return (number < limit) == below; }
};

// Seed and offset of one call, after the device pointers have been read.
struct DropoutKey {
  uint32_t k0 = 0, k1 = 0, c3 = 0;
};

FA_HD DropoutKey dropout_key(uint64_t seed, uint64_t offset) {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(offset >> 32),
          static_cast<uint32_t>(offset)};
}

// The first two words of the counter for element (i, j). Tensor-core kernels compute the first one for all elements of a lane (cuda/common/rng.cuh).
FA_HD uint32_t dropout_counter0(int64_t i, int64_t j) {
  return static_cast<uint32_t>(16 * (j >> 4) + 4 * ((i & 7) >> 1) + ((j & 7) >> 1));
}
FA_HD uint32_t dropout_counter1(int64_t i) { return static_cast<uint32_t>(i >> 4); }
// The numbers of two elements of an odd row, as halves, from the word that they share with an even row.
FA_HD uint32_t dropout_word_of_odd_row(uint32_t word) { return word << 8 | word >> 24; }

// The number of element (i, j) of batch-head `bh` = b * heads_q + h, below kDropoutSteps.
FA_HD uint32_t dropout_number(const DropoutKey &key, uint32_t bh, int64_t i, int64_t j) {
  const Philox4 r = philox4x32(dropout_counter0(i, j), dropout_counter1(i), bh, key.c3, key.k0, key.k1);
  // Selected without an index, so that a GPU keeps the words in registers.
  const uint32_t left = (i & 8) ? r.word[2] : r.word[0], right = (i & 8) ? r.word[3] : r.word[1];
  const uint32_t word = (j & 8) ? right : left, of_row = (i & 1) ? dropout_word_of_odd_row(word) : word;
  return ((j & 1) ? of_row >> 16 : of_row) & (kDropoutSteps - 1);
}

}  // namespace fa
