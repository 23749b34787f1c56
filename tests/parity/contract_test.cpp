// SPDX-License-Identifier: Apache-2.0
// The numerical contract, one test per line: rows without keys, what is written beside results, masks by a bias, and the sizes of numbers.
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "parity/contract.h"
#include "parity/expectation.h"

namespace parity {
namespace {

TEST_P(Contract, RowWithoutKeysIsZeroAndMinusInfinity) {
  Case c = base("empty rows");
  c.mask = FA_MASK_CAUSAL;
  c.k.seqlen = 60;  // rows 0 .. 39 see nothing
  const auto data = cached_data(c);
  const Execution e = execute(backend(), *data);
  EXPECT_TRUE(verify(backend(), *data, e));
  if (!e.ok()) return;
  for (int64_t i = 0; i < 40; ++i) {
    EXPECT_EQ(e.outputs[kLse].get(data->row_element(kLse, 1, 2, i)), -kInfinity);
    for (int64_t d = 0; d < c.head_dim; ++d) EXPECT_EQ(e.outputs[kDq].get(data->element(kDq, 1, i, 2, d)), 0) << i;
    for (int64_t d = 0; d < c.head_dim_v; ++d) EXPECT_EQ(e.outputs[kOut].get(data->element(kOut, 1, i, 2, d)), 0) << i;
  }
}

// The contents of such a row, even NaN, contribute nothing to dk and dv.
TEST_P(Contract, RowWithoutKeysContributesNothing) {
  for (int64_t kind = 0; kind < 3 + kNumWhole; ++kind) {
    Case c = base("silent rows", kind >= 3 ? kWhole[kind - 3] : kAny);
    c.nan_queries = 1;
    if (kind == 0 || kind >= 3) {
      c.mask = FA_MASK_CAUSAL;
      c.k.seqlen = 60;
    } else if (kind == 1) {
      c.block_q = c.block_k = 40;
      c.block_masked = 80;
    } else {
      c.bias = 1;
      c.bias_by_stride = kOverBatch | kOverHeads;
      c.bias_masked = 97;
    }
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Contract, SinkAloneIsTheLse) {
  Case c = base("sink alone");
  c.sink = 1;
  c.k.seqlen = 0;
  const auto data = cached_data(c);
  const Execution e = execute(backend(), *data);
  EXPECT_TRUE(verify(backend(), *data, e));
  if (e.ok()) {
    EXPECT_FLOAT_EQ(static_cast<float>(e.outputs[kLse].get(data->row_element(kLse, 0, 1, 3))),
                    static_cast<float>(data->tensors[kSink].get(data->tensors[kSink].element(1))));
  }
}

TEST_P(Contract, ZeroLengthSequencesAreLegal) {
  Case c = base("zero lengths");
  c.batch = 5;
  c.q.packed = c.k.packed = 1;
  c.q.slots = {0, 3, 0, 5, 0};
  c.k.slots = {4, 0, 0, 6, 0};
  EXPECT_TRUE(check(backend(), c));
}

// Outputs may have negative strides in every dimension but head_dim.
TEST_P(Contract, OutputsWithNegativeStrides) {
  Case c = base("backwards");
  c.q.layout = c.q.grad_layout = c.k.grad_layout = kNegative;
  c.lse_odd = 1;  // which is negative
  c.bias = c.sink = 1;
  const int64_t rows = c.q.seqlen, columns = c.k.seqlen;
  EXPECT_TRUE(check(backend(), make_data(c, [&](Data &d) {
                      d.tensors[kDbias] = HostTensor(FA_FLOAT32, {c.batch, c.heads_q, rows, columns},
                                                     {-columns * rows * c.heads_q, -columns * rows, -columns, -1});
                      d.tensors[kDsink] = HostTensor(FA_FLOAT32, {c.heads_q}, {-2});
                    })));
}

// Every gradient is written as a whole, with zeros outside the used lengths.
TEST_P(Contract, GradientsOutsideTheLengthsAreZero) {
  Case c = base("gradients of the unused");
  c.bias = 1;
  c.q.used = {90, 0};
  c.k.used = {100, 7};
  const auto data = cached_data(c);
  const Execution e = execute(backend(), *data);
  EXPECT_TRUE(verify(backend(), *data, e));
  if (!e.ok()) return;
  for (int64_t h = 0; h < c.heads_q; ++h) {
    for (int64_t i = 0; i < c.q.seqlen; ++i) {
      for (int64_t j = 0; j < c.k.seqlen; ++j) {
        const double x = e.outputs[kDbias].get(e.outputs[kDbias].element(0, h, i, j));
        ASSERT_EQ(x == 0, i >= 90 || j >= 100) << h << " " << i << " " << j << ": " << x;
        ASSERT_EQ(e.outputs[kDbias].get(e.outputs[kDbias].element(1, h, i, j)), 0);
      }
      ASSERT_EQ(e.outputs[kDq].get(data->element(kDq, 1, i, h, 0)), 0);
    }
  }
  for (int64_t h = 0; h < c.heads_k; ++h) {
    for (int64_t j = 100; j < c.k.seqlen; ++j) ASSERT_EQ(e.outputs[kDv].get(data->element(kDv, 0, j, h, 0)), 0);
  }
}

// A bias of -inf and a block mask that mask the same pairs give the same result.
TEST_P(Contract, MinusInfinityInBiasIsAMask) {
  Case c = base("bias as mask");
  c.block_q = c.block_k = 1;
  const Data blocks = make_data(c);
  Case with_bias = c;
  with_bias.block_q = with_bias.block_k = 0;
  with_bias.bias = 1;
  const Data bias = make_data(with_bias, [&](Data &d) {
    for (const Role role : {kQ, kK, kV, kDout, kDlse}) d.tensors[role] = blocks.tensors[role];
    const HostTensor &mask = blocks.tensors[kBlockMask];
    HostTensor &values = d.tensors[kBias];
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t h = 0; h < c.heads_q; ++h) {
        for (int64_t i = 0; i < c.q.seqlen; ++i) {
          for (int64_t j = 0; j < c.k.seqlen; ++j) {
            values.set(values.element(b, h, i, j), mask.get(mask.element(b, h, i, j)) != 0 ? 0 : -kInfinity);
          }
        }
      }
    }
  });
  EXPECT_TRUE(check(backend(), bias));
  const Execution from_bias = execute(backend(), bias);
  if (from_bias.ok()) {
    Execution relabelled = from_bias;
    relabelled.outputs[kDbias] = HostTensor();
    EXPECT_TRUE(verify(backend(), blocks, relabelled));
  }
}

// A bias that kernels load in tiles, with every broadcast and beside every arithmetic mask: 16-bit operands, rows of the bias on 16 bytes.
TEST_P(Contract, BiasInTiles) {
  int64_t n = 0;
  for (const Columns &columns : {kWhole[0], kWhole[1]}) {
    for (int64_t broadcast = 0; broadcast < 16; ++broadcast, ++n) {
      Case c = base("bias in tiles", columns);
      c.seed += n;
      c.dtype = n % 7 < 3 ? FA_FLOAT16 : FA_BFLOAT16;
      c.q.seqlen = 140;
      c.k.seqlen = 275;
      c.heads_k = 2;
      c.bias = c.bias_padded = 1;
      (broadcast < 8 ? c.bias_by_size : c.bias_by_stride) = broadcast % 8;
      c.bias_masked = n % 3 == 0 ? 0 : n % 3 == 1 ? 20 : 98;
      c.nan_keys = c.nan_queries = c.nan_bias = 1;
      if (n % 5 == 1 || n % 5 == 2) c.mask = FA_MASK_CAUSAL;
      if (n % 5 == 2 || n % 5 == 3) c.window_left = 90;
      if (n % 4 == 3) {
        c.batch = 3;
        c.q.packed = c.k.packed = 1;
        c.q.slots = {70, 0, 140};
        c.k.slots = {90, 20, 275};
        c.k.used = {90, 10, 260};
      }
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// A bias that hides the keys behind each row's own, as -inf or as a number so low that it does the same. Kernels that begin with the last keys meet
// the largest score of a row late.
TEST_P(Contract, BiasOfLowNumbersHides) {
  for (const double low : {-kInfinity, -6e4, -1e9}) {
    for (const Columns &columns : {kWhole[0], kWhole[1]}) {
      for (const int64_t dtype : {FA_FLOAT16, FA_BFLOAT16}) {
        if (low == -1e9 && dtype == FA_FLOAT16) continue;  // no such number
        Case c = base("low bias", columns);
        c.dtype = dtype;
        c.batch = 1;
        c.heads_q = c.heads_k = 2;
        c.q.seqlen = 100;
        c.k.seqlen = 400;
        c.bias = c.bias_padded = 1;
        c.bias_by_size = kOverHeads;
        const Data data = make_data(c, [&](Data &d) {
          HostTensor &bias = d.tensors[kBias];
          for (int64_t i = 0; i < c.q.seqlen; ++i) {
            for (int64_t j = 0; j < c.k.seqlen; ++j) {
              if (j > 3 * i) bias.set(bias.element(0, 0, i, j), low);
            }
          }
        });
        EXPECT_TRUE(check(backend(), data));
      }
    }
  }
}

// Backward is finite for any negative lse: it computes exp(S - lse), never exp(-lse).
TEST_P(Contract, BackwardIsFiniteForVeryNegativeLse) {
  for (const double logit : {-88.0, -122.0, -1000.0, -10000.0}) {
    for (const int64_t seqlen_q : {1, 100}) {
      Case c = base("negative lse");
      c.q.seqlen = seqlen_q;
      c.scale = 1;
      const Data data = make_data(c, [&](Data &d) {
        for (int64_t b = 0; b < c.batch; ++b) {
          for (int64_t h = 0; h < c.heads_q; ++h) {
            for (int64_t i = 0; i < seqlen_q; ++i) d.tensors[kQ].set(d.element(kQ, b, i, h, 0), 100);
          }
          for (int64_t h = 0; h < c.heads_k; ++h) {
            for (int64_t j = 0; j < c.k.seqlen; ++j) d.tensors[kK].set(d.element(kK, b, j, h, 0), logit / 100);
          }
        }
      });
      EXPECT_TRUE(check(backend(), data)) << "logits around " << logit;
    }
  }
}

TEST_P(Contract, ErrorIsAtMostTwiceTheUnfusedOne) {
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t mask : {FA_MASK_NONE, FA_MASK_CAUSAL}) {
      Case c = base("error bound");
      c.dtype = dtype;
      c.mask = mask;
      c.batch = 1;
      c.head_dim = c.head_dim_v = 64;
      c.q.seqlen = c.k.seqlen = 200;
      const auto data = cached_data(c);
      const Execution e = execute(backend(), *data);
      ASSERT_TRUE(e.ok()) << e.error;
      for (const Role role : {kOut, kDq, kDk, kDv}) {
        const Errors found = errors(*data, role, e.outputs[role]);
        const double rounding = dtype == FA_FLOAT32 ? 0x1p-24 : dtype == FA_FLOAT16 ? 0x1p-11 : 0x1p-8;
        EXPECT_LE(found.library_rms, 2 * found.unfused_rms + rounding * found.value_rms)
            << role_name(role) << " " << describe(c);
        // In fp32 both are a few roundings, and which has the largest of thousands is luck: a tenth of all seeds would fail.
        if (dtype == FA_FLOAT32) continue;
        EXPECT_LE(found.library, 2 * found.unfused + rounding * found.largest_value) << role_name(role) << " " << describe(c);
      }
      EXPECT_TRUE(verify(backend(), *data, e));  // every element, bounded by what was summed
    }
  }
}

// Attention over values of one is one for any number of keys: row sums of P are fp32 or better.
TEST_P(Contract, RowsOfPSumToOne) {
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t seqlen_q : {1, 30}) {
      Case c = base("ones");
      c.dtype = dtype;
      c.batch = 1;
      c.backward = 0;
      c.q.seqlen = seqlen_q;
      c.k.seqlen = 5000;
      c.head_dim = c.head_dim_v = 8;
      const Data data = make_data(
          c,
          [](Data &d) {
            for (int64_t h = 0; h < d.problem.heads_k; ++h) {
              for (int64_t j = 0; j < d.problem.k.seqlen; ++j) set_row(d, kV, 0, j, h, 1);
            }
          },
          /*with_expected=*/false);
      const Execution e = execute(backend(), data);
      ASSERT_TRUE(e.ok()) << e.error;
      for (int64_t i = 0; i < seqlen_q; ++i) {
        EXPECT_NEAR(e.outputs[kOut].get(data.element(kOut, 0, i, 0, 3)), 1, dtype == FA_FLOAT32 ? 2e-6 : 0) << describe(c);
      }
    }
  }
}

TEST_P(Contract, LargeLogitsDoNotOverflow) {
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t seqlen_q : {1, 100}) {
      Case c = base("large logits");
      c.dtype = dtype;
      c.q.seqlen = seqlen_q;
      c.magnitude = 500;
      c.scale = 4;  // logits have a standard deviation of 4 * 500 * sqrt(24)
      EXPECT_TRUE(check(backend(), c));
      c.mask = FA_MASK_CAUSAL;
      c.sink = 1;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// The maximum of a row grows in some keys by so much that what was summed up before counts less, but still counts.
TEST_P(Contract, MaximaGrow) {
  const std::vector<int64_t> keys[] = {{40, 70, 140, 300, 620}, {1, 2, 3, 130, 257, 690}, {5, 64, 128, 192, 256, 512}};
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const std::vector<int64_t> &grows_at : keys) {
      Case c = base("growth");
      c.dtype = dtype;
      c.batch = 1;
      c.q.seqlen = 150;
      c.k.seqlen = 700;
      c.scale = 1;
      c.lse = 1;
      c.mask = dtype == FA_FLOAT32 ? FA_MASK_NONE : FA_MASK_CAUSAL;
      const Data data = make_data(c, [&](Data &d) {
        for (int64_t h = 0; h < c.heads_q; ++h) {
          for (int64_t i = 0; i < c.q.seqlen; ++i) {
            d.tensors[kQ].set(d.element(kQ, 0, i, h, 0), 1);
            for (int64_t column = 1; column < c.head_dim; ++column) d.tensors[kQ].set(d.element(kQ, 0, i, h, column), 0.125);
          }
        }
        for (int64_t h = 0; h < c.heads_k; ++h) {
          double logit = -20;
          for (int64_t j = 0; j < c.k.seqlen; ++j) {
            if (std::find(grows_at.begin(), grows_at.end(), j) != grows_at.end()) logit += 6.25;  // 9 in base 2
            d.tensors[kK].set(d.element(kK, 0, j, h, 0), logit);
          }
        }
      });
      EXPECT_TRUE(check(backend(), data)) << "grows at key " << grows_at[0];
    }
  }
}

TEST_P(Contract, SoftcapDoesNotOverflow) {
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const double softcap : {1.0, 30.0, 1e4}) {
      Case c = base("softcap");
      c.dtype = dtype;
      c.magnitude = 500;
      c.scale = 4;
      c.softcap = softcap;
      EXPECT_TRUE(check(backend(), c));
      c.q.seqlen = 1;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// Subnormal bf16 numbers count where the others are so large that the logits are ordinary. The tile unit of a CPU reads them as zero.
TEST_P(Contract, SubnormalBf16CountsBesideHugeNumbers) {
  for (const Role small : {kQ, kK}) {
    for (const int64_t seqlen_q : {3, 60, 200}) {  // a vector of dot products, one block of queries, several
      Case c = base("subnormal");
      c.dtype = FA_BFLOAT16;
      c.batch = 1;
      c.q.seqlen = seqlen_q;
      c.k.seqlen = 300;
      c.scale = 1;
      c.lse = 1;
      c.backward = 0;
      c.dlse = 0;
      const Data data = make_data(c, [&](Data &d) {
        std::mt19937_64 rng(static_cast<uint64_t>(c.seed));
        for (const Role role : {kQ, kK}) {
          const Side &side = role == kQ ? c.q : c.k;
          // 2^-131 to 2^-127, and 2^127: logits are sums of 24 numbers of up to +-1.
          for (int64_t i = 0; i < side.seqlen; ++i) {
            for (int64_t h = 0; h < (role == kQ ? c.heads_q : c.heads_k); ++h) {
              for (int64_t column = 0; column < c.head_dim; ++column) {
                const double sign = rng() % 2 == 0 ? 1 : -1;
                const double value = role == small ? std::ldexp(1.0, -127 - static_cast<int>(rng() % 5)) : std::ldexp(1.0, 127);
                d.tensors[role].set(d.element(role, 0, i, h, column), sign * value);
              }
            }
          }
        }
      });
      ASSERT_GT(std::abs(data.tensors[small].get(data.element(small, 0, 0, 0, 0))), 0) << "the test lost its subnormal numbers";
      EXPECT_TRUE(check(backend(), data)) << role_name(small) << " is subnormal";
    }
  }
}

// The same in backward, for S = Q K^T and for dP = dO V^T. (Forward may take subnormal values for zero, and with its out delta is wrong.)
TEST_P(Contract, GradientsOfSubnormalBf16BesideHugeNumbers) {
  const std::pair<Role, Role> pairs[] = {{kQ, kK}, {kK, kQ}, {kDout, kV}};  // subnormal, huge
  for (const auto &[small, huge] : pairs) {
    for (const int64_t causal : {0, 1}) {
      const bool scores = small == kQ || small == kK;
      Case c = base("subnormal gradients");
      c.dtype = FA_BFLOAT16;
      c.batch = 1;
      c.q.seqlen = 100;
      c.k.seqlen = 160;
      c.scale = scores ? 1 : 0.2;
      if (causal != 0) c.mask = FA_MASK_CAUSAL;
      c.dlse = 0;
      const Data data = make_data(c, [&, small = small, huge = huge](Data &d) {
        std::mt19937_64 rng(static_cast<uint64_t>(c.seed));
        const auto fill = [&](Role role, auto magnitude) {
          const bool queries = role == kQ || role == kDout;
          const int64_t columns = role == kQ || role == kK ? c.head_dim : c.head_dim_v;
          for (int64_t i = 0; i < (queries ? c.q : c.k).seqlen; ++i) {
            for (int64_t h = 0; h < (queries ? c.heads_q : c.heads_k); ++h) {
              for (int64_t column = 0; column < columns; ++column) {
                const double sign = rng() % 2 == 0 ? 1 : -1;
                d.tensors[role].set(d.element(role, 0, i, h, column), sign * magnitude());
              }
            }
          }
        };
        fill(small, [&] { return std::ldexp(1.0, -127 - static_cast<int>(rng() % 5)); });
        // Small enough for sums over 160 of them.
        fill(huge, [&] { return std::ldexp(1.0, scores ? 127 : 120); });
        // dq and dk are sums of numbers of up to 2^127 times these.
        if (scores) fill(kDout, [&] { return std::ldexp(1.0, -10 - static_cast<int>(rng() % 4)); });
      });
      ASSERT_GT(std::abs(data.tensors[small].get(data.element(small, 0, 0, 0, 0))), 0) << "the test lost its subnormal numbers";
      EXPECT_TRUE(check(backend(), data)) << role_name(small) << " is subnormal";
    }
  }
}

FA_ON_EVERY_BACKEND(Contract);

}  // namespace
}  // namespace parity
