// SPDX-License-Identifier: Apache-2.0
// The library's random bits against the tests' own statement of the rule, and against published vectors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "core/philox.h"
#include "cuda/common/rng.cuh"
#include "cuda/common/scores.h"
#include "reference/dropout.h"

namespace fa {
namespace {

void expect_words(const Philox4 &actual, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  EXPECT_EQ(actual.word[0], w0);
  EXPECT_EQ(actual.word[1], w1);
  EXPECT_EQ(actual.word[2], w2);
  EXPECT_EQ(actual.word[3], w3);
}

// Vectors of the Random123 distribution (kat_vectors).
TEST(Philox, KnownAnswers) {
  expect_words(philox4x32(0, 0, 0, 0, 0, 0), 0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48);
  expect_words(philox4x32(~0u, ~0u, ~0u, ~0u, ~0u, ~0u), 0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662);
  expect_words(philox4x32(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0), 0x4dfccaba, 0x190a87f0,
               0xc47362ba, 0xb6b5242a);
}

TEST(Dropout, NumbersFollowTheDocumentedRule) {
  std::mt19937_64 rng(1);
  for (int n = 0; n < 20000; ++n) {
    const uint64_t seed = rng(), offset = rng();
    const int64_t batch = static_cast<int64_t>(rng() % 9), head = static_cast<int64_t>(rng() % 7);
    const int64_t i = static_cast<int64_t>(rng() % 100000), j = static_cast<int64_t>(rng() % 100000);
    ASSERT_EQ(dropout_number(dropout_key(seed, offset), static_cast<uint32_t>(batch * 7 + head), i, j),
              reference::dropout_number(seed, offset, batch, 7, head, i, j));
  }
}

// As many numbers drop an element as the threshold says.
TEST(Dropout, ThresholdCountsNumbers) {
  for (uint32_t threshold = 1; threshold < kDropoutSteps; threshold += 1 + threshold % 97) {
    const KeptNumbers kept(threshold);
    uint32_t dropped = 0;
    for (uint32_t number = 0; number < kDropoutSteps; ++number) {
      dropped += !kept.keeps(number);
      ASSERT_EQ(kept.keeps(number), reference::dropout_keeps(number, threshold)) << number << ' ' << threshold;
    }
    ASSERT_EQ(dropped, threshold);
    ASSERT_LE(kept.limit, kDropoutSteps / 2);
  }
}

TEST(Dropout, MasksSayWhatIsKept) {
  std::mt19937 rng(3);
  for (int n = 0; n < 2000; ++n) {
    // Thresholds at the ends and in the middle of the range, and any other; numbers at the limit, and any other. The highest bit of a half does not count.
    const uint32_t edges[] = {1, 2, 0x3FFF, 0x4000, 0x4001, 0x7FFE, 0x7FFF};
    const uint32_t threshold = n < 700 ? edges[n % 7] : 1 + rng() % 0x7FFF;
    const KeptNumbers kept(threshold);
    const uint32_t near[] = {kept.limit - 1, kept.limit, kept.limit + 1, 0,
                             0x3FFF,         0x4000,     0x7FFF,         static_cast<uint32_t>(rng())};
    const uint32_t low = near[rng() % 8] & 0x7FFFu, high = near[rng() % 8] & 0x7FFFu;
    const uint32_t mask = cuda::KeptHalves(threshold).of(high << 16 | low | (rng() & 0x80008000u));
    ASSERT_EQ(mask & 0xFFFFu, kept.keeps(low) ? 0xFFFFu : 0u) << low << ' ' << threshold;
    ASSERT_EQ(mask >> 16, kept.keeps(high) ? 0xFFFFu : 0u) << high << ' ' << threshold;
  }
}

// What CUDA kernels call: the rounds of several calls at once, with the first two prepared per tile.
TEST(Dropout, TilesGiveTheSameBits) {
  std::mt19937_64 rng(2);
  const auto expect_call = [](const Philox4 &actual, uint32_t c0, uint32_t row_tile, uint32_t bh, const DropoutKey &key) {
    const auto expected = reference::philox4x32_7({c0, row_tile, bh, key.c3}, {key.k0, key.k1});
    expect_words(actual, expected[0], expected[1], expected[2], expected[3]);
  };
  for (int n = 0; n < 5000 && !HasFailure(); ++n) {
    const DropoutKey key = dropout_key(rng(), rng());
    const auto bh = static_cast<uint32_t>(rng()), c0 = static_cast<uint32_t>(rng());
    const auto row_tile = static_cast<uint32_t>(rng() % (1u << 27));
    const cuda::DropoutTile tiles[2] = {{key, bh, static_cast<int>(row_tile)}, {key, bh, static_cast<int>(row_tile + 1)}};
    Philox4 of_rows[2], of_keys[2];
    cuda::DropoutTile::bits(
        of_rows, [&](int i) -> const cuda::DropoutTile & { return tiles[i]; }, [&](int) { return c0; });
    cuda::DropoutTile::bits(
        of_keys, [&](int) -> const cuda::DropoutTile & { return tiles[0]; },
        [&](int i) { return c0 + 16 * static_cast<uint32_t>(i); });
    expect_call(tiles[0].bits(c0), c0, row_tile, bh, key);
    expect_call(of_rows[0], c0, row_tile, bh, key);
    expect_call(of_rows[1], c0, row_tile + 1, bh, key);
    expect_call(of_keys[0], c0, row_tile, bh, key);
    expect_call(of_keys[1], c0 + 16, row_tile, bh, key);
  }
}

// P of CUDA kernels, for every p: held high enough not to underflow, and within fp16.
TEST(Dropout, PIsHeldWithinHalfPrecision) {
  for (uint32_t threshold = 0; threshold < kDropoutSteps; ++threshold) {
    const float keep_scale = static_cast<float>(double{kDropoutSteps} / (kDropoutSteps - threshold));
    const int exponent = cuda::p_exponent(keep_scale);
    const float scale = std::ldexp(1.f, exponent), slack = cuda::rescale_threshold(exponent);
    ASSERT_GE(scale, keep_scale) << threshold;
    ASSERT_LT(scale, 2 * keep_scale) << threshold;
    ASSERT_GE(slack, 0) << threshold;
    ASSERT_LE(scale * std::exp2(slack), 32768.f) << threshold;
    if (keep_scale <= 128) {
      ASSERT_EQ(slack, cuda::kRescaleThreshold) << threshold;
    }
  }
  EXPECT_EQ(cuda::p_exponent(1), 0);  // without dropout
}

}  // namespace
}  // namespace fa
