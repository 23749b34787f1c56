// SPDX-License-Identifier: Apache-2.0
// A few queries over many keys: so many that every backend splits them, and with lengths for which some splits are empty.
#include "parity/runner.h"

namespace parity {
namespace {

Case base(const char *name) {
  Case c;
  c.seed = seed_for(name);
  c.dtype = FA_BFLOAT16;
  c.batch = 3;
  c.heads_q = 4;
  c.heads_k = 2;
  c.head_dim = c.head_dim_v = 64;
  c.q.seqlen = 1;
  c.k.seqlen = 1500;
  c.backward = 0;
  return c;
}

class Decode : public EveryBackend {};

// 1 to 64 rows per key head, in both 16-bit types.
TEST_P(Decode, HeadDimsAndQueries) {
  for (const int64_t head_dim : {64, 96, 128, 256}) {
    for (const auto &[seqlen_q, group] : {std::pair{1, 1}, {1, 8}, {3, 5}, {4, 8}, {16, 1}, {16, 4}}) {
      Case c = base("decode: head dims");
      c.dtype = group % 2 == 0 ? FA_BFLOAT16 : FA_FLOAT16;
      c.head_dim = c.head_dim_v = head_dim;
      c.heads_q = c.heads_k * group;
      c.q.seqlen = seqlen_q;
      c.mask = FA_MASK_CAUSAL;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// Every number of rows of a key head that CPU kernels group in blocks of their own, with gradients, and with NaN that some rows see and
// others do not.
TEST_P(Decode, UpToEightRows) {
  constexpr int64_t kDims[] = {64, 40, 128, 72};
  for (int64_t rows = 1; rows <= 8; ++rows) {
    for (const int64_t tokens : {1, 2}) {
      if (rows % tokens != 0) continue;
      Case c = base("decode: rows");
      c.dtype = (rows / 2 + tokens) % 4 == 0 ? FA_FLOAT16 : FA_BFLOAT16;
      c.head_dim = kDims[rows % 4];
      c.head_dim_v = kDims[(rows + tokens) % 4];
      c.heads_q = c.heads_k * rows / tokens;
      c.q.seqlen = tokens;
      c.k.seqlen = 333;
      c.mask = FA_MASK_CAUSAL;
      c.nan_keys = 1;
      c.backward = c.dlse = 1;
      EXPECT_TRUE(check(backend(), c));
      c.backward = c.dlse = 0;
      c.element_mask = 1;
      for (const int64_t role : {2, 3}) {
        c.nan_visible = role;
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

TEST_P(Decode, LengthsAndPages) {
  for (const int64_t page_size : {0, 1, 3, 16, 40, 256}) {
    for (const int64_t seqlen_q : {1, 6}) {
      Case c = base("decode: lengths");
      c.head_dim = c.head_dim_v = 128;
      c.q.seqlen = seqlen_q;
      c.k.used = {1500, 0, 70};
      c.page_size = page_size;
      c.spare_pages = page_size > 0 ? 3 : 0;
      c.mask = FA_MASK_CAUSAL;
      c.nan_keys = 1;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Decode, LeftPadding) {
  for (const int64_t head_dim : {64, 128, 256}) {
    for (const int64_t seqlen_q : {1, 6}) {
      for (const int64_t keys : {200, 1500}) {
        Case c = base("decode: left padding");
        c.head_dim = c.head_dim_v = head_dim;
        c.q.seqlen = seqlen_q;
        c.k.seqlen = keys;
        c.starts = {keys - 70, 0, keys + 9};
        if (seqlen_q == 6) c.k.used = {keys, keys - 40, keys};
        c.mask = FA_MASK_CAUSAL;
        c.alibi = head_dim == 64;
        c.nan_keys = 1;
        EXPECT_TRUE(check(backend(), c));
        c.batch = 1;  // which the host may split between heads
        c.starts = {30};
        c.k.used.clear();
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

// One sequence, which the host may split between heads: few keys and many, exactly as many as the host knows or fewer.
TEST_P(Decode, OneSequence) {
  for (const int64_t seqlen_k : {100, 1500, 5000}) {
    for (const int64_t used : {int64_t{-1}, int64_t{0}, int64_t{1}, seqlen_k / 3}) {
      for (const int64_t page_size : {0, 16}) {
        Case c = base("decode: one sequence");
        c.batch = 1;
        c.head_dim = c.head_dim_v = used % 2 == 0 ? 64 : 128;
        c.heads_q = page_size > 0 ? 16 : 6;  // 16 queries for two heads of keys, and 9
        c.q.seqlen = page_size > 0 ? 2 : 3;
        c.k.seqlen = seqlen_k;
        if (used >= 0) c.k.used = {used};
        c.page_size = page_size;
        c.mask = FA_MASK_CAUSAL;
        c.window_left = seqlen_k == 1500 ? 700 : -1;
        c.sink = page_size > 0;
        c.nan_keys = 1;
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

// One query for each of a few heads, which fill no more than half a tile of rows: lengths, pages and all terms of scores, by n from 0 to 5.
Case one_token(const char *name, int64_t head_dim, int64_t n) {
  constexpr int64_t kGroups[] = {1, 3, 7, 8, 5, 4}, kPageSizes[] = {0, 16, 1, 3, 48, 16};
  Case c = base(name);
  c.dtype = n % 2 == 0 ? FA_FLOAT16 : FA_BFLOAT16;
  c.head_dim = c.head_dim_v = head_dim;
  c.heads_q = c.heads_k * kGroups[n];
  c.k.seqlen = n < 4 ? 1500 : 300;
  if (n % 3 == 0) {
    c.batch = 1;
  } else {
    c.k.used = {c.k.seqlen, 0, 70};
  }
  c.page_size = kPageSizes[n];
  c.mask = n == 5 ? FA_MASK_NONE : FA_MASK_CAUSAL;
  if (n == 1 || n == 4) c.window_left = 130;
  if (n == 2 || n == 4) c.softcap = 5;
  if (n >= 3) c.alibi = n == 3 ? 2 : 1;
  c.sink = n > 1;
  c.nan_keys = 1;
  return c;
}

TEST_P(Decode, OneTokenOfAFewHeads) {
  for (const int64_t head_dim : {64, 128, 200, 256, 320, 512}) {
    for (int64_t n = 0; n < 6; ++n) {
      Case c = one_token("decode: one token", head_dim, n);
      if (n == 0) c.head_dim_v = 40;
      EXPECT_TRUE(check(backend(), c));
      if (head_dim <= 256) continue;
      c.heads_q = c.heads_k * (9 + n);  // rows of a second warp
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Decode, PackedWithUnusedQueries) {
  Case c = base("decode: packed");
  c.q.packed = c.k.packed = 1;
  c.q.slots = {1, 0, 5};
  c.k.slots = {700, 20, 2500};
  c.q.used = {1, 0, 3};
  c.k.used = {650, 20, 2500};
  c.q.max_slack = 2;
  c.mask = FA_MASK_CAUSAL;
  c.nan_keys = 1;
  EXPECT_TRUE(check(backend(), c));
}

TEST_P(Decode, MasksAndScores) {
  for (int64_t n = 0; n < kTerms; ++n) {
    Case c = base("decode: scores");
    c.q.seqlen = 5;
    c.mask = FA_MASK_CAUSAL;
    set_term(c, n);
    c.nan_keys = 1;
    EXPECT_TRUE(check(backend(), c));
    c.q.seqlen = 1;
    EXPECT_TRUE(check(backend(), c));
  }
}

// NaN that some rows of a tile see and others do not.
TEST_P(Decode, VisibleNan) {
  for (int64_t role = 1; role <= 3; ++role) {
    Case c = base("decode: visible NaN");
    c.q.seqlen = 8;
    c.mask = FA_MASK_CAUSAL;
    c.nan_visible = role;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Decode, AnyNumberOfSplits) {
  for (const int64_t splits : {1, 2, 7, 64, 1000}) {
    Case c = base("decode: splits");
    c.k.used = {1500, 3, 400};
    c.num_splits = splits;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Decode, LargeLogits) {
  Case c = base("decode: large logits");
  c.magnitude = 1000;
  EXPECT_TRUE(check(backend(), c));
}

// 8-bit KV caches. 1 to 160 rows per key head, which includes more than one row block.
TEST_P(Decode, QuantisedHeadDimsAndQueries) {
  int64_t n = 0;
  for (const int64_t head_dim : {64, 96, 128, 256}) {
    for (const auto &[seqlen_q, group] : {std::pair{1, 1}, {1, 8}, {3, 5}, {4, 8}, {16, 4}, {20, 8}}) {
      Case c = base("decode: quantised head dims");
      c.key_dtype = (n + head_dim / 64) % 2 == 0 ? FA_FLOAT8_E4M3 : FA_INT8;
      c.descale = n % 3;
      c.dtype = n++ % 4 < 2 ? FA_BFLOAT16 : FA_FLOAT16;
      c.head_dim = c.head_dim_v = head_dim;
      c.heads_q = c.heads_k * group;
      c.q.seqlen = seqlen_q;
      c.k.seqlen = seqlen_q * group > 16 ? 300 : 500;
      c.mask = FA_MASK_CAUSAL;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// The same numbers of rows over 8-bit KV, with queries of every dtype, magnitudes that differ between rows, pages, and descales of all kinds.
TEST_P(Decode, QuantisedUpToEightRows) {
  constexpr int64_t kDims[] = {64, 40, 128, 72}, kPages[] = {0, 16, 3};
  constexpr fa_dtype kQueries[] = {FA_FLOAT32, FA_BFLOAT16, FA_FLOAT16};
  for (int64_t rows = 1; rows <= 8; ++rows) {
    for (const int64_t tokens : {1, 2}) {
      if (rows % tokens != 0) continue;
      for (int64_t n = 0; n < 3; ++n) {
        Case c = base("decode: quantised rows");
        c.dtype = kQueries[n];
        c.key_dtype = (rows + tokens + n) % 4 == 0 ? FA_FLOAT8_E4M3 : FA_INT8;
        c.descale = (rows + n) % 3;
        c.factor_range = c.descale == 2 ? 8 : 0;
        c.head_dim = kDims[(rows + n) % 4];
        c.head_dim_v = kDims[(rows + tokens) % 4];
        c.heads_q = c.heads_k * rows / tokens;
        c.q.seqlen = tokens;
        c.k.seqlen = 333;
        c.page_size = kPages[(rows + tokens + n) % 3];
        c.mask = FA_MASK_CAUSAL;
        c.nan_keys = 1;
        EXPECT_TRUE(check(backend(), c));
        c.element_mask = 1;
        c.nan_visible = 1;
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
  for (const double magnitude : {0.0, 1e-30, 1e25}) {
    Case c = base("decode: quantised magnitudes");
    c.dtype = FA_FLOAT32;
    c.key_dtype = FA_INT8;
    c.descale = 1;
    c.heads_q = c.heads_k * 8;
    c.k.seqlen = 333;
    c.magnitude = magnitude;
    c.scale = magnitude > 1 ? 1 / magnitude : 0.125;
    EXPECT_TRUE(check(backend(), c));
    c.descale = 2;
    c.factor_range = 70;  // fp32 has room for such values
    EXPECT_TRUE(check(backend(), c));
  }
}

// The same over 8-bit KV with descales of all kinds: per head, and per row with small and with large differences.
TEST_P(Decode, QuantisedTokenOfAFewHeads) {
  for (const int64_t head_dim : {64, 128, 208, 256, 320, 512}) {
    for (int64_t n = 0; n < 6; ++n) {
      Case c = one_token("decode: one quantised token", head_dim, n);
      if (n == 0) c.head_dim_v = 48;
      c.key_dtype = (n + head_dim / 64) % 2 == 0 ? FA_FLOAT8_E4M3 : FA_INT8;
      c.descale = n % 3 == 0 ? 1 : 2;
      c.factor_range = n == 2 || n == 5 ? 8 : 0;
      c.num_splits = n == 2;
      EXPECT_TRUE(check(backend(), c));
    }
  }
  // A visible NaN affects only its own row.
  for (int64_t role = 1; role <= 3; ++role) {
    Case c = base("decode: one quantised token and NaN");
    c.key_dtype = FA_FLOAT8_E4M3;
    c.descale = role == 2 ? 2 : 1;
    c.nan_visible = role;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Decode, QuantisedLengthsAndPages) {
  for (const int64_t page_size : {0, 1, 3, 16, 40, 256}) {
    for (const int64_t seqlen_q : {1, 6, 70}) {
      Case c = base("decode: quantised lengths");
      c.key_dtype = (page_size + seqlen_q) % 2 == 0 ? FA_FLOAT8_E4M3 : FA_INT8;
      c.descale = seqlen_q == 6 ? 1 : 2;
      c.head_dim = c.head_dim_v = 128;
      c.q.seqlen = seqlen_q;
      c.k.seqlen = seqlen_q > 16 ? 300 : 900;
      c.k.used = {c.k.seqlen, 0, 70};
      c.page_size = page_size;
      c.spare_pages = page_size > 0 ? 3 : 0;
      c.mask = FA_MASK_CAUSAL;
      c.nan_keys = 1;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Decode, QuantisedAndPacked) {
  for (const int64_t descale : {1, 2}) {
    Case c = base("decode: quantised and packed");
    c.key_dtype = FA_FLOAT8_E4M3;
    c.descale = descale;
    c.q.packed = c.k.packed = 1;
    c.q.slots = {1, 0, 85};
    c.k.slots = {700, 20, 1200};
    c.q.used = {1, 0, 33};
    c.k.used = {650, 20, 1200};
    c.k.lead = 3;
    c.q.max_slack = 2;
    c.mask = FA_MASK_CAUSAL;
    c.nan_keys = 1;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Decode, QuantisedMasksAndScores) {
  for (int64_t n = 0; n < 7; ++n) {
    Case c = base("decode: quantised scores");
    c.key_dtype = n % 2 == 0 ? FA_INT8 : FA_FLOAT8_E4M3;
    c.descale = n % 3;
    c.q.seqlen = 5;
    c.mask = FA_MASK_CAUSAL;
    if (n < 5) set_term(c, n);
    if (n == 5) c.num_splits = 7;
    if (n == 6) c.flags = FA_FLAG_BATCH_INVARIANT;
    c.nan_keys = 1;
    EXPECT_TRUE(check(backend(), c));
    c.q.seqlen = 1;
    EXPECT_TRUE(check(backend(), c));
  }
}

// Descales that differ so much that P times a descale overflows or underflows in fp16, and queries beyond the range of fp16.
TEST_P(Decode, QuantisedExtremes) {
  for (const int64_t dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    Case c = base("decode: descales of values");
    c.dtype = dtype;
    c.key_dtype = FA_INT8;
    c.descale = 2;
    c.factor_range = dtype == FA_FLOAT16 ? 12 : 20;  // out has to fit, too
    EXPECT_TRUE(check(backend(), c));
  }
  Case c = base("decode: large queries");
  c.key_dtype = FA_FLOAT8_E4M3;
  c.descale = 1;
  c.magnitude = 1e7;
  c.scale = 1e-7;
  EXPECT_TRUE(check(backend(), c));
}

TEST_P(Decode, QuantisedVisibleNan) {
  for (const int64_t descale : {0, 2}) {
    for (int64_t role = 1; role <= 3; ++role) {
      Case c = base("decode: quantised visible NaN");
      c.key_dtype = FA_FLOAT8_E4M3;
      c.descale = descale;
      c.q.seqlen = 8;
      c.mask = FA_MASK_CAUSAL;
      c.nan_visible = role;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// More than 256 columns, with several tokens and more rows than a tile has: pages that TMA reads and others, descales of all kinds, score terms,
// NaN that is seen and that is not.
TEST_P(Decode, QuantisedWideHeads) {
  constexpr int64_t kPages[] = {0, 16, 3, 64, 24};
  int64_t n = 0;
  for (const int64_t head_dim : {512, 448, 320, 272}) {
    for (const auto &[seqlen_q, group] : {std::pair{1, 8}, {2, 8}, {4, 8}, {5, 3}, {16, 2}, {30, 8}}) {
      Case c = base("decode: quantised wide heads");
      c.dtype = n % 4 < 2 ? FA_BFLOAT16 : FA_FLOAT16;
      c.key_dtype = n % 3 == 0 ? FA_INT8 : FA_FLOAT8_E4M3;
      c.descale = (n + head_dim / 64) % 3;
      c.factor_range = c.descale == 2 && n % 2 == 0 ? 8 : 0;
      c.head_dim = head_dim;
      c.head_dim_v = n % 4 == 3 ? 208 : head_dim;
      c.heads_q = c.heads_k * group;
      c.q.seqlen = seqlen_q;
      c.k.seqlen = 300;
      c.k.used = {c.k.seqlen, 77, 200};
      c.mask = FA_MASK_CAUSAL;
      c.page_size = kPages[n % 5];
      c.spare_pages = c.page_size > 0 ? 3 : 0;
      if (n % 6 == 1) c.window_left = 90;
      if (n % 6 == 2) c.softcap = 5;
      if (n % 6 == 4) c.sink = 1;
      if (n % 6 == 5) c.num_splits = 3;
      c.nan_keys = 1;
      EXPECT_TRUE(check(backend(), c));
      if (c.key_dtype == FA_FLOAT8_E4M3) c.nan_visible = 1 + n % 3;
      EXPECT_TRUE(check(backend(), c));
      ++n;
    }
  }
}

FA_ON_EVERY_BACKEND(Decode);

}  // namespace
}  // namespace parity
