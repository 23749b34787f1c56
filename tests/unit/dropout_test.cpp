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
  expect_words(philox4x32_10(0, 0, 0, 0, 0, 0), 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
  expect_words(philox4x32_10(~0u, ~0u, ~0u, ~0u, ~0u, ~0u), 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
  expect_words(philox4x32_10(0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0), 0xd16cfe09, 0x94fdcceb,
               0x5001e420, 0x24126ea1);
}

TEST(Dropout, BitsFollowTheDocumentedRule) {
  std::mt19937_64 rng(1);
  for (int n = 0; n < 20000; ++n) {
    const uint64_t seed = rng(), offset = rng();
    const int64_t batch = static_cast<int64_t>(rng() % 9), head = static_cast<int64_t>(rng() % 7);
    const int64_t i = static_cast<int64_t>(rng() % 100000), j = static_cast<int64_t>(rng() % 100000);
    ASSERT_EQ(dropout_bits(dropout_key(seed, offset), static_cast<uint32_t>(batch * 7 + head), i, j),
              reference::dropout_bits(seed, offset, batch, 7, head, i, j));
  }
}

// What CUDA kernels call: the rounds of several calls at once, with the first two prepared per tile.
TEST(Dropout, TilesGiveTheSameBits) {
  std::mt19937_64 rng(2);
  const auto expect_call = [](const Philox4 &actual, uint32_t c0, uint32_t row_tile, uint32_t bh, const DropoutKey &key) {
    const auto expected = reference::philox4x32_10({c0, row_tile, bh, key.c3}, {key.k0, key.k1});
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
        [&](int i) { return c0 + 32 * static_cast<uint32_t>(i); });
    expect_call(tiles[0].bits(c0), c0, row_tile, bh, key);
    expect_call(of_rows[0], c0, row_tile, bh, key);
    expect_call(of_rows[1], c0, row_tile + 1, bh, key);
    expect_call(of_keys[0], c0, row_tile, bh, key);
    expect_call(of_keys[1], c0 + 32, row_tile, bh, key);
  }
}

// P of CUDA kernels, for every p: held high enough not to underflow, and within fp16.
TEST(Dropout, PIsHeldWithinHalfPrecision) {
  for (int threshold = 0; threshold < 65536; ++threshold) {
    const float keep_scale = static_cast<float>(65536.0 / (65536 - threshold));
    const int exponent = cuda::p_exponent(keep_scale);
    const float scale = std::ldexp(1.f, exponent), slack = cuda::rescale_threshold(exponent);
    ASSERT_GE(scale, std::min(keep_scale, 32768.f)) << threshold;
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
