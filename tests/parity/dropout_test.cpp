// SPDX-License-Identifier: Apache-2.0
// Dropout with p near 1. A row keeps few keys, whose P is usually far below the row's largest: a kernel that rounds P before it multiplies by
// 1 / (1 - p) loses them to underflow. The error of such a row is small relative to other rows, so each row has its own bound.
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "parity/expectation.h"
#include "parity/runner.h"
#include "reference/number_formats.h"

namespace parity {
namespace {

constexpr double kLargest = 32767.0 / 32768;  // the largest p below 1 that is a multiple of 2^-15

class Dropout : public EveryBackend {
 protected:
  void expect_right(const Data &data) {
    const Execution e = execute(backend(), data);
    EXPECT_TRUE(verify(backend(), data, e));
    if (!e.ok()) return;
    for (const Role role : {kOut, kDq, kDk, kDv}) {
      EXPECT_EQ(wrong_row(data, role, e.outputs[role]), "") << "on " << backend().name() << ": " << describe(data.problem);
    }
  }

 private:
  // The first row of one head whose error is too large relative to the terms of its sum, or "".
  static std::string wrong_row(const Data &data, Role role, const HostTensor &actual) {
    const Case &c = data.problem;
    const double roundoff = reference::unit_roundoff(static_cast<fa_dtype>(c.dtype));
    // fp16 ends at steps of 2^-24, and P / (1 - p) of a few kept keys, or dS of many, may each be off by half a step. Others flush what is
    // below the normal numbers of fp32.
    const double underflow = c.dtype == FA_FLOAT16 ? std::ldexp(1.0, -18) : 1e-32;
    const auto columns = static_cast<size_t>(role == kOut || role == kDv ? c.head_dim_v : c.head_dim);
    const std::vector<Expected> &all = data.expected[role];
    for (size_t row = 0; row + columns <= all.size(); row += columns) {
      double error = 0, bound = 0;
      for (size_t n = row; n < row + columns; ++n) {
        const Expected &e = all[n];
        // Roundings of the output, of P or dS, and of what `out` was made from.
        const double allowed = roundoff * (std::abs(e.value) + 2 * e.magnitude + 2 * e.through_out) + underflow;
        error += std::pow(actual.get(e.element) - e.value, 2);
        bound += allowed * allowed;
      }
      if (!(error <= bound)) {
        char text[120];
        std::snprintf(text, sizeof text, "%s: row %zu: error %.3g, allowed %.3g", role_name(role), row / columns,
                      std::sqrt(error), std::sqrt(bound));
        return text;
      }
    }
    return "";
  }
};

// 1024 keys of scores that differ by a factor of e^6 and more, and values whose sum does not cancel.
Case wide_scores(int64_t dtype, double p, int64_t head_dim, int64_t head_dim_v) {
  Case c;
  c.seed = seed_for("dropout");
  c.dtype = dtype;
  c.batch = 1;
  c.heads_q = 2;
  c.heads_k = 1;
  c.head_dim = head_dim;
  c.head_dim_v = head_dim_v;
  c.q.seqlen = 20;
  c.k.seqlen = 1024;
  c.mask = FA_MASK_CAUSAL;
  c.magnitude = 3;
  c.dropout = p;
  c.dropout_seed = seed_for("dropout bits");
  return c;
}

// Values of mean `mean` times `factor`; dout times `factor`.
Tamper with_values(double mean, double factor) {
  return [mean, factor](Data &d) {
    const Case &c = d.problem;
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t n = 0; n < c.head_dim_v; ++n) {
        for (int64_t h = 0; h < c.heads_k; ++h) {
          for (int64_t j = 0; j < c.k.seqlen; ++j) {
            const int64_t element = d.element(kV, b, j, h, n);
            d.tensors[kV].set(element, factor * (mean + d.tensors[kV].get(element)));
          }
        }
        for (int64_t h = 0; h < c.heads_q; ++h) {
          for (int64_t i = 0; i < c.q.seqlen; ++i) {
            const int64_t element = d.element(kDout, b, i, h, n);
            d.tensors[kDout].set(element, factor * d.tensors[kDout].get(element));
          }
        }
      }
    }
  };
}

// One reference for all backends.
const Data &made(const Case &c, const Tamper &tamper) {
  static std::map<std::string, Data> cache;
  const std::string key = describe(c);
  if (cache.count(key) == 0) cache.emplace(key, make_data(c, tamper));
  return cache.at(key);
}

TEST_P(Dropout, NearOne) {
  for (const int64_t dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const double p : {0.9, 0.99, 0.999}) {
      for (const int64_t head_dim : {64, 128, 192, 512}) {
        Case c = wide_scores(dtype, p, head_dim, head_dim);
        if (head_dim > 128) c.num_splits = 1, c.heads_k = c.heads_q;  // with splits, or grouped heads, CUDA has other kernels
        expect_right(made(c, with_values(5, 1)));
      }
    }
  }
}

// The case that underflowed on CUDA first: every term of the scores, nine queries.
TEST_P(Dropout, NearOneWithBiasAndAlibi) {
  for (const int64_t dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const double p : {0.9, 0.99, 0.999}) {
      for (const double magnitude : {1.0, 3.0}) {
        Case c = wide_scores(dtype, p, 96, 128);
        if (p == 0.999) c.batch = 5;
        c.heads_q = c.heads_k = 4;
        c.q.seqlen = 9;
        c.bias = c.alibi = 1;
        c.bias_by_size = kOverBatch | kOverRows;
        c.magnitude = magnitude;
        expect_right(made(c, with_values(5, 1)));
      }
    }
  }
}

// 1 / (1 - p) is 32768, half of what fp16 holds. Small values keep the results within fp16.
TEST_P(Dropout, LargestProbability) {
  for (const int64_t dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t bias : {0, 1}) {
      Case c = wide_scores(dtype, kLargest, 64, 64);
      c.heads_q = 4;
      c.q.seqlen = 120;  // of half a million pairs fifteen are kept
      c.bias = bias;
      c.bias_by_size = kOverBatch | kOverRows;
      expect_right(made(c, with_values(5, 1.0 / 64)));
    }
  }
}

// All scores of the first half of the keys lie 2^7.8 above those of the second, just less than what makes a kernel that begins with the second
// half raise its maximum: together with 1 / (1 - p) P may not leave fp16.
TEST_P(Dropout, ScoresRiseByLessThanTheRescalingThreshold) {
  for (const int64_t dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const double p : {0.9, 0.99, 0.999}) {
      for (const int64_t head_dim : {64, 192}) {
        const auto rising = [&](Data &d) {
          with_values(5, 1)(d);
          const Case &c = d.problem;
          for (int64_t b = 0; b < c.batch; ++b) {
            for (int64_t n = 0; n < c.head_dim; ++n) {
              for (int64_t h = 0; h < c.heads_q; ++h) {
                for (int64_t i = 0; i < c.q.seqlen; ++i) d.tensors[kQ].set(d.element(kQ, b, i, h, n), n == 0 ? 1 : 0);
              }
              for (int64_t h = 0; h < c.heads_k; ++h) {
                for (int64_t j = 0; j < c.k.seqlen / 2; ++j) {
                  if (n == 0) d.tensors[kK].set(d.element(kK, b, j, h, n), 7.8 * std::log(2.0) / c.scale);
                }
                for (int64_t j = c.k.seqlen / 2; j < c.k.seqlen; ++j) {
                  if (n == 0) d.tensors[kK].set(d.element(kK, b, j, h, n), 0);
                }
              }
            }
          }
        };
        Case c = wide_scores(dtype, p, head_dim, head_dim);
        c.magnitude = 2;  // of q, which is replaced: another case than that of NearOne
        c.scale = 0.125;
        expect_right(made(c, rising));
      }
    }
  }
}

FA_ON_EVERY_BACKEND(Dropout);

// A query that sees no key, because the bias masks the only one of its window, may hold NaN. Where the NaN of the pair is dropped, it is in the sum of the row
// alone.
TEST_P(Dropout, NanInQueriesThatSeeNothing) {
  for (const int64_t head_dim : {64, 128, 256, 512}) {
    Case c = grouped_case("dropped NaN", FA_BFLOAT16, 64, 64);
    c.heads_q = 8;
    c.head_dim = c.head_dim_v = head_dim;
    c.mask = FA_MASK_CAUSAL;
    c.window_left = 0;
    c.bias = 1;
    c.bias_masked = 30;
    c.dropout = 0.9;
    c.nan_queries = 1;
    EXPECT_TRUE(check(backend(), c));
  }
}

}  // namespace
}  // namespace parity
