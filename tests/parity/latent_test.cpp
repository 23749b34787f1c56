// SPDX-License-Identifier: Apache-2.0
// Latent caches (MLA): one wide row per key, whose first columns are also the value. Many query heads share a key head.
#include <utility>

#include "parity/runner.h"

namespace parity {
namespace {

Case base(const char *name) {
  Case c;
  c.seed = seed_for(name);
  c.dtype = FA_BFLOAT16;
  c.batch = 3;
  c.heads_q = 16;
  c.heads_k = 1;
  c.head_dim = 576;
  c.head_dim_v = 512;
  c.v_in_k = 1;
  c.q.seqlen = 2;
  c.k.seqlen = 400;
  c.k.used = {400, 0, 70};
  c.mask = FA_MASK_CAUSAL;
  c.nan_keys = 1;
  c.backward = 0;
  return c;
}

class Latent : public EveryBackend {};

// Less than one row block of 64 rows, exactly one, and several, some of them partial.
TEST_P(Latent, HeadsAndQueries) {
  for (const auto &[seqlen_q, heads] : {std::pair{1, 16}, {1, 64}, {1, 128}, {2, 20}, {3, 30}, {17, 8}, {150, 1}}) {
    for (const fa_dtype dtype : {FA_BFLOAT16, FA_FLOAT16, FA_FLOAT32}) {
      if (dtype == FA_FLOAT32 && seqlen_q * heads > 20) continue;
      Case c = base("latent: heads");
      c.dtype = dtype;
      c.heads_q = heads;
      c.q.seqlen = seqlen_q;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Latent, PagesAndKeyHeads) {
  for (const int64_t page_size : {1, 3, 16, 40, 64, 256}) {
    for (const int64_t heads_k : {1, 2}) {
      Case c = base("latent: pages");
      c.page_size = page_size;
      c.spare_pages = 3;
      c.heads_k = heads_k;
      c.heads_q = 20 * heads_k;
      c.k.layout = page_size == 16 ? kBhsd : kBshd;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Latent, PackedWithUnusedQueries) {
  Case c = base("latent: packed");
  c.heads_q = 48;
  c.q.packed = c.k.packed = 1;
  c.q.slots = {1, 0, 5};
  c.k.slots = {300, 20, 700};
  c.q.used = {1, 0, 3};
  c.k.used = {290, 20, 700};
  c.q.max_slack = 2;
  EXPECT_TRUE(check(backend(), c));
}

TEST_P(Latent, MasksAndScores) {
  for (int64_t n = 0; n < 8; ++n) {
    Case c = base("latent: scores");
    c.q.seqlen = 5;
    c.mask = n == 1 ? FA_MASK_CAUSAL_TOP_LEFT : n == 7 ? FA_MASK_NONE : FA_MASK_CAUSAL;
    if (n == 0) c.window_left = 90;
    if (n == 2) c.sink = 1;
    if (n == 3) c.scale = 0.1;
    if (n == 4) c.softcap = 5;
    if (n == 5) c.bias = 1;
    if (n == 6) c.dropout = 0.2;
    EXPECT_TRUE(check(backend(), c));
  }
}

// NaN that some rows of a tile see and others do not.
TEST_P(Latent, VisibleNan) {
  for (const int64_t role : {1, 2}) {
    Case c = base("latent: visible NaN");
    c.heads_q = 12;
    c.q.seqlen = 8;
    c.nan_visible = role;
    EXPECT_TRUE(check(backend(), c));
    c.k.used = {400, 20, 5};
    c.seed += 1;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Latent, AnyNumberOfSplits) {
  for (const int64_t splits : {0, 1, 2, 7, 64, 1000}) {
    Case c = base("latent: splits");
    c.heads_q = 35;
    c.k.seqlen = 800;
    c.k.used = {800, 3, 200};
    c.num_splits = splits;
    EXPECT_TRUE(check(backend(), c));
    c.num_splits = 0;
    c.flags = FA_FLAG_BATCH_INVARIANT;
    if (splits == 0) {
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// So many split-KV partials that they are combined in two levels.
TEST_P(Latent, ManyPartials) {
  for (const auto &[keys, heads] : {std::pair{3600, 40}, {14000, 2}}) {
    Case c = base("latent: many partials");
    c.batch = 1;
    c.heads_q = heads;
    c.q.seqlen = 1;
    c.k.seqlen = keys;
    c.k.used = {keys - 3};
    EXPECT_TRUE(check(backend(), c));
  }
}

// Two CTAs per row block of many, which exchange halves of their results. With other lengths on the device than planned they do not. Those of few
// row blocks store partials for another kernel.
TEST_P(Latent, Pairs) {
  for (int64_t n = 0; n < 7; ++n) {
    Case c = base("latent: pairs");
    c.seed += n;
    c.batch = n < 5 ? 24 : 2;
    c.q.seqlen = n % 2 == 0 ? 2 : 1;
    c.heads_q = std::vector<int64_t>{2, 20, 12, 72, 12, 72, 12}[static_cast<size_t>(n)];
    c.k.seqlen = 512;
    c.k.used = {};
    if (n == 1) c.page_size = 16;
    if (n == 2) c.sink = 1;
    if (n >= 3) c.k.used.assign(static_cast<size_t>(c.batch), 512);
    if (n >= 3) c.k.used[n % 2] = n % 2 == 1 ? 449 : 100;
    EXPECT_TRUE(check(backend(), c));
  }
}

// Caches of 8 bits: one token of up to 16 heads, which other kernels serve than more rows; descales by head or by row.
TEST_P(Latent, Bytes) {
  int64_t n = 0;
  for (const auto &[seqlen_q, heads] : {std::pair{1, 3}, {1, 8}, {1, 16}, {1, 17}, {2, 8}, {1, 64}}) {
    for (const fa_dtype key_dtype : {FA_FLOAT8_E4M3, FA_INT8}) {
      for (const int64_t descale : {0, 1, 2}) {
        Case c = base("latent: bytes");
        c.seed += n;
        c.dtype = n % 2 == 0 ? FA_BFLOAT16 : FA_FLOAT16;
        c.key_dtype = key_dtype;
        c.descale = descale;
        c.factor_range = descale == 2 ? 6 : 0;
        c.heads_q = heads;
        c.q.seqlen = seqlen_q;
        c.nan_keys = key_dtype == FA_FLOAT8_E4M3;
        const int64_t other = n++ % 7;
        if (other == 1) c.page_size = 64;
        if (other == 2) c.page_size = 3;
        if (other == 3) c.sink = 1;
        if (other == 4) c.softcap = 5;
        if (other == 5) c.window_left = 90;
        if (other == 6) c.num_splits = 3;
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

// The same with other widths, packed, and over so many keys that their partials are many.
TEST_P(Latent, BytesOfOtherShapes) {
  for (const auto &[head_dim, head_dim_v] : {std::pair{576, 512}, {560, 512}, {576, 64}, {528, 496}, {384, 256}, {512, 512}}) {
    Case c = base("latent: widths of bytes");
    c.key_dtype = FA_FLOAT8_E4M3;
    c.descale = 1;
    c.head_dim = head_dim;
    c.head_dim_v = head_dim_v;
    c.q.seqlen = 1;
    EXPECT_TRUE(check(backend(), c));
    const int64_t heads = std::exchange(c.heads_q, 20);  // other kernels
    EXPECT_TRUE(check(backend(), c));
    c.heads_q = heads;
    c.k.layout = kBhsd;
    c.batch = 1;
    c.k.seqlen = 7000;
    c.k.used = {6990};
    EXPECT_TRUE(check(backend(), c));
    c.flags = FA_FLAG_BATCH_INVARIANT;
    EXPECT_TRUE(check(backend(), c));
  }
  for (const int64_t descale : {1, 2}) {  // maxima rise again and again
    Case c = base("latent: large logits of bytes");
    c.key_dtype = FA_FLOAT8_E4M3;
    c.descale = descale;
    c.factor_range = descale == 2 ? 6 : 0;
    c.magnitude = 30;
    c.q.seqlen = 1;
    EXPECT_TRUE(check(backend(), c));
  }
  Case c = base("latent: packed bytes");
  c.key_dtype = FA_INT8;
  c.descale = 1;
  c.q.packed = c.k.packed = 1;
  c.q.slots = {1, 0, 1};
  c.k.slots = {300, 20, 700};
  c.q.used = {1, 0, 1};
  c.k.used = {290, 20, 700};
  c.nan_keys = 0;
  EXPECT_TRUE(check(backend(), c));
}

TEST_P(Latent, LargeLogits) {
  Case c = base("latent: large logits");
  c.magnitude = 300;
  EXPECT_TRUE(check(backend(), c));
}

// Other widths, values in their own memory, and rows that are not whole 16-byte vectors.
TEST_P(Latent, OtherShapes) {
  for (const auto &[head_dim, head_dim_v] : {std::pair{512, 512}, {320, 256}, {576, 64}, {520, 512}, {573, 510}, {96, 64}}) {
    for (const int64_t v_in_k : {0, 1}) {
      Case c = base("latent: widths");
      c.head_dim = head_dim;
      c.head_dim_v = head_dim_v;
      c.v_in_k = v_in_k;
      EXPECT_TRUE(check(backend(), c));
      c.k.layout = kOdd;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Latent, BackwardOnTheCpu) {
  if (backend().name().find("cpu") == std::string::npos) GTEST_SKIP() << "forward alone";
  for (const fa_dtype dtype : {FA_FLOAT32, FA_BFLOAT16}) {
    Case c = base("latent: backward");
    c.dtype = dtype;
    c.q.seqlen = 40;
    c.k.seqlen = 60;
    c.k.used = {60, 0, 33};
    c.backward = 1;
    EXPECT_TRUE(check(backend(), c));
  }
}

FA_ON_EVERY_BACKEND(Latent);

}  // namespace
}  // namespace parity
