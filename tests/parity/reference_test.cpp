// SPDX-License-Identifier: Apache-2.0
// The yardstick itself: number formats bit by bit, the random bits against published vectors, and the reference's gradients
// against differences of its own forward in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "parity/case.h"
#include "reference/attention.h"
#include "reference/dropout.h"
#include "reference/elsewhere.h"
#include "reference/number_formats.h"

namespace parity {
namespace {

using reference::philox4x32_7;
using Words = std::array<uint32_t, 4>;

// Vectors of the Random123 distribution (kat_vectors).
TEST(ReferencePhilox, KnownAnswers) {
  EXPECT_EQ(philox4x32_7({0, 0, 0, 0}, {0, 0}), (Words{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  EXPECT_EQ(philox4x32_7({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}), (Words{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
  EXPECT_EQ(philox4x32_7({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}));
}

TEST(ReferenceDropout, KeepsTheRightShare) {
  for (const double p : {0.25, 0.9}) {
    int64_t dropped = 0;
    for (int64_t i = 0; i < 300; ++i) {
      for (int64_t j = 0; j < 300; ++j)
        dropped += !reference::dropout_keeps(reference::dropout_number(7, 9, 1, 4, 2, i, j),
                                             static_cast<uint32_t>(std::lround(32768 * p)));
    }
    EXPECT_NEAR(static_cast<double>(dropped) / 90000, p, 4 * std::sqrt(p * (1 - p) / 90000)) << p;
  }
}

// Four elements have bytes of one word. Of any two of a block of 16 x 16 what is kept has no correlation that 4000 blocks could show (the documented bound is 1/128).
TEST(ReferenceDropout, ElementsOfABlockAreNotCorrelated) {
  constexpr int kBlocks = 4000;
  for (const double p : {0.1, 0.5, 0.8}) {
    const auto dropped = static_cast<uint32_t>(std::lround(32768 * p));
    std::vector<std::array<int8_t, 256>> kept(kBlocks);
    for (int block = 0; block < kBlocks; ++block)
      for (int n = 0; n < 256; ++n)
        kept[static_cast<size_t>(block)][static_cast<size_t>(n)] = reference::dropout_keeps(
            reference::dropout_number(11, 13, 1, 4, 2, 16 * (block / 64) + n / 16, 16 * (block % 64) + n % 16), dropped);
    double largest = 0;
    for (size_t a = 0; a < 256; ++a) {
      for (size_t b = 0; b < a; ++b) {
        double sum = 0;
        for (const auto &x : kept) sum += (x[a] - (1 - p)) * (x[b] - (1 - p));
        largest = std::max(largest, std::abs(sum) / (kBlocks * p * (1 - p)));
      }
    }
    EXPECT_LT(largest, 6 / std::sqrt(kBlocks)) << p;  // 6 standard deviations, of 32640 pairs
  }
}

double through(fa_dtype dtype, double value) { return reference::round_to(dtype, value); }

TEST(ReferenceFormats, RoundToNearestEven) {
  EXPECT_EQ(through(FA_FLOAT16, 1 + std::ldexp(1, -11)), 1);  // tie to even
  EXPECT_EQ(through(FA_FLOAT16, 1 + 3 * std::ldexp(1, -11)), 1 + std::ldexp(1, -9));
  EXPECT_EQ(through(FA_FLOAT16, 65519), 65504);
  EXPECT_EQ(through(FA_FLOAT16, 65520), INFINITY);
  EXPECT_EQ(through(FA_FLOAT16, std::ldexp(1, -24)), std::ldexp(1, -24));  // smallest subnormal
  EXPECT_EQ(through(FA_FLOAT16, std::ldexp(1, -25)), 0);
  EXPECT_EQ(through(FA_BFLOAT16, 1 + std::ldexp(1, -8)), 1);
  EXPECT_EQ(through(FA_BFLOAT16, -3.14159), -3.140625);
  EXPECT_EQ(through(FA_BFLOAT16, 1e39), INFINITY);
  EXPECT_TRUE(std::isnan(through(FA_BFLOAT16, NAN)));
  EXPECT_TRUE(std::isnan(through(FA_FLOAT16, NAN)));
}

// Every 16-bit pattern survives decoding and encoding.
TEST(ReferenceFormats, EveryPatternRoundTrips) {
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const auto pattern = static_cast<uint16_t>(bits);
      const double value = reference::load(&pattern, dtype);
      if (std::isnan(value)) continue;
      uint16_t back = 0;
      reference::store(&back, dtype, value);
      ASSERT_EQ(back, pattern);
    }
  }
}

// bfloat16 is the upper half of a float.
TEST(ReferenceFormats, BfloatIsHalfOfAFloat) {
  for (uint32_t bits = 0; bits < 0x10000; bits += 7) {
    const auto pattern = static_cast<uint16_t>(bits);
    const uint32_t wide = bits << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    if (!std::isnan(value)) {
      EXPECT_EQ(reference::load(&pattern, FA_BFLOAT16), value);
    }
  }
}

reference::Sequence random_sequence(std::mt19937_64 &rng) {
  std::normal_distribution<double> normal;
  reference::Sequence s;
  s.heads_q = 4;
  s.heads_k = 2;
  s.seqlen_q = 5;
  s.seqlen_k = 6;
  s.head_dim = 3;
  s.head_dim_v = 2;
  const auto fill = [&](std::vector<double> &values, int64_t size) {
    values.resize(static_cast<size_t>(size));
    for (double &value : values) value = normal(rng);
  };
  fill(s.q, 4 * 5 * 3);
  fill(s.k, 2 * 6 * 3);
  fill(s.v, 2 * 6 * 2);
  fill(s.bias, 4 * 5 * 6);
  fill(s.sink, 4);
  fill(s.slopes, 4);
  fill(s.dout, 4 * 5 * 2);
  fill(s.dlse, 4 * 5);
  s.mask = FA_MASK_CAUSAL;
  s.window_left = 4;
  s.scale = 0.7;
  s.softcap = 3;
  s.dropout_threshold = 20000;
  s.dropout_seed = 5;
  s.bias[3] = -std::numeric_limits<double>::infinity();
  return s;
}

double loss(const reference::Sequence &s) {
  const reference::Result r = reference::attention(s).value;
  double sum = 0;
  for (size_t n = 0; n < r.out.size(); ++n) sum += r.out[n] * s.dout[n];
  for (size_t n = 0; n < r.lse.size(); ++n) sum += std::isfinite(r.lse[n]) ? r.lse[n] * s.dlse[n] : 0;
  return sum;
}

// What another program computes is what this one would.
TEST(ReferenceElsewhere, AnswersAsHere) {
  if (!reference::asks_elsewhere()) GTEST_SKIP() << "FA_TEST_REFERENCE is not set";
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("reference elsewhere")));
  for (int round = 0; round < 4; ++round) {
    reference::Sequence s = random_sequence(rng);
    s.first_key = 1;
    s.has_slices = true;
    s.slices = {{0, 5, 0, 6, FA_SLICE_FULL}};
    s.elements.assign(4 * 5 * 6, true);
    s.elements[7] = false;
    const reference::Answers elsewhere = reference::answers(s, FA_FLOAT32);
    const auto compare = [](const reference::Result &a, const reference::Result &b, double tolerance) {
      for (const auto array :
           {&reference::Result::out, &reference::Result::lse, &reference::Result::max_logit, &reference::Result::dq,
            &reference::Result::dk, &reference::Result::dv, &reference::Result::dbias, &reference::Result::dsink}) {
        ASSERT_EQ((a.*array).size(), (b.*array).size());
        for (size_t n = 0; n < (a.*array).size(); ++n) {
          if ((a.*array)[n] == (b.*array)[n]) continue;  // infinities, too
          EXPECT_NEAR((a.*array)[n], (b.*array)[n], tolerance) << "element " << n;
        }
      }
    };
    const reference::Exact exact = reference::attention(s);
    compare(elsewhere.exact.value, exact.value, 1e-12);
    compare(elsewhere.exact.magnitude, exact.magnitude, 1e-12);
    compare(elsewhere.exact.through_out, exact.through_out, 1e-12);
    compare(elsewhere.unfused, reference::unfused(s, FA_FLOAT32), 1e-4);
    EXPECT_NEAR(elsewhere.exact.largest_logit, exact.largest_logit, 1e-12);
  }
}

TEST(ReferenceGradients, AreDifferencesOfForward) {
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("reference gradients")));
  for (int round = 0; round < 4; ++round) {
    const reference::Sequence s = random_sequence(rng);
    const reference::Result r = reference::attention(s).value;
    const auto compare = [&](std::vector<double> reference::Sequence::*input, const std::vector<double> &gradient) {
      for (size_t n = 0; n < gradient.size(); ++n) {
        constexpr double kStep = 1e-5;
        reference::Sequence up = s, down = s;
        (up.*input)[n] += kStep;
        (down.*input)[n] -= kStep;
        EXPECT_NEAR((loss(up) - loss(down)) / (2 * kStep), gradient[n], 1e-8) << "element " << n;
      }
    };
    compare(&reference::Sequence::q, r.dq);
    compare(&reference::Sequence::k, r.dk);
    compare(&reference::Sequence::v, r.dv);
    compare(&reference::Sequence::bias, r.dbias);
    compare(&reference::Sequence::sink, r.dsink);
  }
}

}  // namespace
}  // namespace parity
