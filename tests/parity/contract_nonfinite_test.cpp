// SPDX-License-Identifier: Apache-2.0
// The numerical contract, one test per line: NaN and infinity that must not reach results, and those that must.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "parity/contract.h"

namespace parity {
namespace {

TEST_P(Contract, NanInMaskedKeysStaysThere) {
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (int64_t kind = 0; kind < 5 + 2 * kNumWhole; ++kind) {
      Case c = base("masked keys", kind >= 5 ? kWhole[(kind - 5) / 2] : kAny);
      c.dtype = dtype;
      c.nan_keys = 1;
      if (kind == 0 || (kind >= 5 && kind % 2 == 1)) {
        c.window_left = 10;  // the first keys
        c.mask = FA_MASK_CAUSAL;
      } else if (kind == 1 || kind >= 5) {
        c.mask = FA_MASK_CAUSAL_TOP_LEFT;  // the last keys
      } else if (kind == 2) {
        c.block_q = 1000;
        c.block_k = 7;
        c.block_by_size = kOverHeads;
      } else {
        c.bias = 1;
        c.bias_by_size = kOverRows | kOverHeads;
        c.bias_masked = 40;
        c.bias_padded = kind == 4;
      }
      if (kind >= 5 && dtype == FA_FLOAT32) continue;  // as kinds 0 and 1
      EXPECT_TRUE(check(backend(), c));
      if (kind >= 5) continue;
      c.q.seqlen = 1;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// Unused rows hold NaN in every tensor of the suite; here they lie inside the blocks that kernels work on.
TEST_P(Contract, NanPastSequsedStaysThereWhenPadded) {
  for (int64_t kind = 0; kind < 2 + kNumWhole; ++kind) {
    Case c = base("padded tail", kind >= 2 ? kWhole[kind - 2] : kAny);
    const int64_t seqlen_q = kind == 0 ? 1 : 100;
    c.q.seqlen = seqlen_q;
    c.q.used = {seqlen_q, (seqlen_q + 1) / 2};
    c.k.used = {129, 1};
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Contract, NanPastSequsedStaysThereWhenPacked) {
  for (int64_t kind = 0; kind < 1 + kNumWhole; ++kind) {
    Case c = base("packed tail", kind >= 1 ? kWhole[kind - 1] : kAny);
    c.q.packed = c.k.packed = 1;
    c.q.slots = {50, 70};
    c.k.slots = {60, 70};
    c.q.used = {49, 10};
    c.k.used = {59, 33};
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Contract, NanInPageTailsStaysThere) {
  for (const int64_t seqlen_q : {1, 100}) {
    Case c = base("page tails");
    c.backward = 0;
    c.q.seqlen = seqlen_q;
    c.page_size = 64;
    c.k.used = {65, 127};
    EXPECT_TRUE(check(backend(), c));
  }
}

// A sequence of NaN between two others does not affect them.
TEST_P(Contract, NanInANeighbourStaysThere) {
  for (int64_t kind = 0; kind < 2 + kNumWhole; ++kind) {
    Case c = base("neighbour", kind >= 2 ? kWhole[kind - 2] : kAny);
    const bool packed = kind > 0;
    c.batch = 3;
    c.q.packed = c.k.packed = packed;
    c.q.slots = {20, 33, 40};
    c.k.slots = {50, 9, 45};
    const Data data = make_data(c, [](Data &d) {
      for (int64_t h = 0; h < d.problem.heads_k; ++h) {
        for (int64_t j = 0; j < used_rows(d.problem, d.problem.k, 1); ++j) {
          set_row(d, kK, 1, j, h, kNan);
          set_row(d, kV, 1, j, h, kInfinity);
        }
      }
    });
    EXPECT_TRUE(check(backend(), data));
  }
}

// NaN in one key, value, query or incoming gradient reaches exactly the rows that see it: the comparison demands NaN where the
// reference has NaN and a number everywhere else.
TEST_P(Contract, VisibleNanReachesTheRowsThatSeeIt) {
  for (const int64_t which : {1, 2, 3, 4}) {
    for (const int64_t mask : {0, 1, 2, 3, 4, 5, 6, 7, 8}) {
      const bool whole = mask >= 5 && mask <= 7;
      for (int64_t round = 0; round < (whole ? kNumWhole : 3); ++round) {
        Case c = base("visible nan", whole ? kWhole[round] : kAny);
        if (whole) c.batch = c.heads_k = 1, c.heads_q = 2;
        c.seed += round;
        c.k.seqlen = 100;
        c.nan_visible = which;
        c.mask = mask == 0 || mask == 4 || mask == 5 ? FA_MASK_CAUSAL : FA_MASK_NONE;
        if (mask == 1 || mask == 6) c.window_left = c.window_right = 20;
        if (mask == 2 || mask == 8) c.bias = 1, c.bias_masked = 30, c.bias_padded = mask == 8;
        if (mask == 3) c.block_q = c.block_k = 16;
        if (mask == 4) c.softcap = 20;
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

// Whatever the bits of a NaN are: quiet or signalling, of either sign, with any payload (but that of poison, all ones). In fp32, exponents made of such bits have come
// out as numbers.
TEST_P(Contract, NanOfAnyBitsStaysNan) {
  constexpr uint32_t kBits[] = {0x7fc00000, 0xffc00000, 0x7fc0dead, 0xffc0dead, 0x7f800001,
                                0xff800001, 0x7fbfffff, 0xffa5a5a5, 0x7fffffff, 0xffedcba9};
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t seqlen_q : {1, 3, 60}) {
      for (const Role role : {kQ, kK, kV, kDout, kBias}) {
        for (const uint32_t bits : kBits) {
          Case c = base("nan bits");
          c.dtype = dtype;
          c.batch = 1;
          c.heads_q = c.heads_k = 2;
          c.q.seqlen = seqlen_q;
          c.k.seqlen = 70;
          c.bias = role == kBias;
          if (role == kQ && bits == kBits[2]) c.softcap = 20;
          const Data data = make_data(c, [&](Data &d) {
            HostTensor &t = d.tensors[role];
            const int64_t element = role == kBias ? t.element(0, 1, seqlen_q - 1, 3) : d.element(role, 0, 0, 1, 0);
            // The upper half of the pattern is the bf16 of the same kind; fp16 has three bits less of exponent.
            const auto half = static_cast<uint16_t>(bits >> 16 | (bits & 0xffff ? 1 : 0));
            const auto fp16 =
                static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x7c00 | (bits >> 13 & 0x3ff) | (bits & 0x1fff ? 1 : 0));
            const size_t bytes = dtype == FA_FLOAT32 ? 4 : 2;
            unsigned char *to = t.bytes().data() + static_cast<size_t>(element) * bytes;
            const void *from = dtype == FA_FLOAT32    ? static_cast<const void *>(&bits)
                               : dtype == FA_BFLOAT16 ? static_cast<const void *>(&half)
                                                      : static_cast<const void *>(&fp16);
            std::memcpy(to, from, bytes);
            ASSERT_TRUE(std::isnan(t.get(element))) << std::hex << bits;
          });
          EXPECT_TRUE(check(backend(), data)) << role_name(role) << " with a NaN of bits " << std::hex << bits;
        }
      }
    }
  }
}

// A logit of -infinity hides its key. The same problem with finite logits that are as low as matters has the answer.
TEST_P(Contract, InfiniteKeysCanBeHidden) {
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t seqlen_q : {1, 60, 200}) {
      for (const int64_t mask : {FA_MASK_NONE, FA_MASK_CAUSAL}) {
        Case c = base("infinite keys");
        c.dtype = dtype;
        c.batch = c.heads_q = c.heads_k = 1;
        c.q.seqlen = seqlen_q;
        c.k.seqlen = 300;
        c.mask = mask;
        c.backward = 0;
        const auto with = [&](double low) {
          return make_data(c, [&](Data &d) {
            for (int64_t i = 0; i < seqlen_q; ++i)
              d.tensors[kQ].set(d.element(kQ, 0, i, 0, 5), 0.5 + static_cast<double>(i % 3));
            for (const int64_t j : {3, 40, 290}) d.tensors[kK].set(d.element(kK, 0, j, 0, 5), low);
          });
        };
        const Data finite = with(-60000), infinite = with(-kInfinity);
        const Execution expected = execute(backend(), finite), e = execute(backend(), infinite);
        EXPECT_TRUE(verify(backend(), finite, expected));
        ASSERT_TRUE(e.ok() && expected.ok()) << e.error;
        for (int64_t i = 0; i < seqlen_q; ++i) {
          const int64_t lse = finite.row_element(kLse, 0, 0, i);
          ASSERT_NEAR(e.outputs[kLse].get(lse), expected.outputs[kLse].get(lse), 1e-4) << describe(c);
          for (int64_t column = 0; column < c.head_dim_v; ++column) {
            const int64_t out = finite.element(kOut, 0, i, 0, column);
            ASSERT_NEAR(e.outputs[kOut].get(out), expected.outputs[kOut].get(out), dtype == FA_BFLOAT16 ? 0.02 : 0.003)
                << describe(c);
          }
        }
      }
    }
  }
}

// An infinite value that a row sees is its result, unless another one of the opposite sign is.
TEST_P(Contract, InfiniteValuesAreResults) {
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t seqlen_q : {1, 60, 200}) {
      Case c = base("infinite values");
      c.dtype = dtype;
      c.batch = c.heads_q = c.heads_k = 1;
      c.q.seqlen = seqlen_q;
      c.k.seqlen = 64;
      c.backward = 0;
      const Data data = make_data(c, [&](Data &d) { d.tensors[kV].set(d.element(kV, 0, 40, 0, 2), -kInfinity); });
      const Execution e = execute(backend(), data);
      ASSERT_TRUE(e.ok()) << e.error;
      for (int64_t i = 0; i < seqlen_q; ++i) {
        for (int64_t column = 0; column < c.head_dim_v; ++column) {
          const double out = e.outputs[kOut].get(data.element(kOut, 0, i, 0, column));
          if (column == 2) {
            ASSERT_EQ(out, -kInfinity) << describe(c);
          } else {
            ASSERT_TRUE(std::isfinite(out)) << describe(c) << " column " << column;
          }
        }
      }
    }
  }
}

// A sink of NaN or +infinity makes the rows of its head NaN that see a key; -infinity is no sink. Other heads are not affected.
TEST_P(Contract, SinksThatAreNotFinite) {
  for (const int64_t dtype : {FA_FLOAT32, FA_BFLOAT16}) {
    for (const int64_t seqlen_q : {1, 5, 100}) {
      Case c = base("wild sinks", dtype == FA_BFLOAT16 ? kWhole[0] : kAny);
      c.dtype = dtype;
      c.heads_q = c.heads_k = 4;
      c.q.seqlen = seqlen_q;
      c.sink = 1;
      const Data data = make_data(c, [](Data &d) {
        HostTensor &sink = d.tensors[kSink];
        sink.set(sink.element(0), kNan);
        sink.set(sink.element(1), kInfinity);
        sink.set(sink.element(3), -kInfinity);
      });
      EXPECT_TRUE(check(backend(), data));
      const Execution e = execute(backend(), data);
      if (!e.ok()) continue;
      for (const int64_t h : {0, 1}) {
        EXPECT_TRUE(std::isnan(e.outputs[kLse].get(data.row_element(kLse, 1, h, 0)))) << h;
        EXPECT_TRUE(std::isnan(e.outputs[kOut].get(data.element(kOut, 1, 0, h, 0)))) << h;
        EXPECT_TRUE(std::isnan(e.outputs[kDsink].get(e.outputs[kDsink].element(h)))) << h;
      }
      EXPECT_EQ(e.outputs[kDsink].get(e.outputs[kDsink].element(3)), 0);
    }
  }
}

// Rows of such heads that see no key have an lse that is not finite. Other heads are not affected.
TEST_P(Contract, SinksThatAreNotFiniteInRowsWithoutKeys) {
  Case c = base("wild sinks alone");
  c.backward = 0;
  c.heads_q = c.heads_k = 4;
  c.mask = FA_MASK_CAUSAL;
  c.k.seqlen = 60;  // rows 0 .. 39 see nothing
  c.sink = 1;
  const Data data = make_data(c, [](Data &d) {
    HostTensor &sink = d.tensors[kSink];
    sink.set(sink.element(0), kNan);
    sink.set(sink.element(1), kInfinity);
    sink.set(sink.element(3), -kInfinity);
  });
  const Execution e = execute(backend(), data);
  ASSERT_TRUE(e.ok()) << e.error;
  for (int64_t i = 0; i < c.q.seqlen; ++i) {
    const auto lse = [&](int64_t h) { return e.outputs[kLse].get(data.row_element(kLse, 1, h, i)); };
    const auto out = [&](int64_t h) { return e.outputs[kOut].get(data.element(kOut, 1, i, h, 5)); };
    for (const int64_t h : {0, 1}) {
      EXPECT_FALSE(std::isfinite(lse(h))) << i;
      EXPECT_NE(lse(h), -kInfinity) << i;
      EXPECT_TRUE(std::isnan(out(h)) || (i < 40 && out(h) == 0)) << i;
    }
    EXPECT_TRUE(std::isfinite(lse(2)) && std::isfinite(out(2))) << i;
    EXPECT_EQ(lse(3) == -kInfinity, i < 40) << i;
    EXPECT_TRUE(std::isfinite(out(3))) << i;
  }
}

TEST_P(Contract, VisibleNanReachesADecodingRow) {
  for (const int64_t which : {2, 3}) {
    Case c = base("visible nan, one query");
    c.q.seqlen = 1;
    c.k.seqlen = 700;
    c.nan_visible = which;
    EXPECT_TRUE(check(backend(), c));
    c.window_left = 100;  // most likely nobody sees it now
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Contract, NanInTheBiasOfMaskedPairsStaysThere) {
  for (const int64_t seqlen_q : {1, 100}) {
    for (const int64_t blocks : {0, 1}) {
      Case c = base("masked bias");
      c.q.seqlen = seqlen_q;
      c.bias = c.nan_bias = 1;
      c.bias_padded = blocks;
      c.mask = blocks ? FA_MASK_NONE : FA_MASK_CAUSAL;
      c.block_q = c.block_k = blocks * 24;
      c.window_left = 60;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

}  // namespace
}  // namespace parity
