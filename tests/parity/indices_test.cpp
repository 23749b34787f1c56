// SPDX-License-Identifier: Apache-2.0
// Sparse attention by index (kv_indices): every query sees the rows of its key sequence that it lists.
#include <random>

#include "parity/runner.h"

namespace parity {
namespace {

Case base(const char *name) {
  Case c;
  c.seed = seed_for(name);
  c.batch = 3;
  c.heads_q = 8;
  c.heads_k = 2;
  c.head_dim = c.head_dim_v = 64;
  c.q.seqlen = 3;
  c.k.seqlen = 300;
  c.k.used = {300, 0, 70};
  c.key_indices = 100;
  c.nan_keys = 1;
  c.backward = 0;
  return c;
}

class Indices : public EveryBackend {};

// Few rows of a key head and many: every way in which the CPU computes a sequence.
TEST_P(Indices, HeadsAndQueries) {
  for (const fa_dtype dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const auto &[queries, heads] : {std::pair{1, 2}, {1, 16}, {4, 64}, {2, 256}, {70, 2}}) {
      Case c = base("indices: heads");
      c.dtype = dtype;
      c.heads_q = heads;
      c.q.seqlen = queries;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Indices, Lists) {
  for (const int64_t n : {1, 7, 64, 255, 256, 257, 1200}) {
    Case c = base("indices: lists");
    c.dtype = n % 2 == 0 ? FA_FLOAT32 : FA_BFLOAT16;
    c.key_indices = n;
    EXPECT_TRUE(check(backend(), c));
    c.heads_q = 64;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Indices, Layouts) {
  for (int64_t layout = 0; layout < kNumLayouts; ++layout) {
    Case c = base("indices: layouts");
    c.q.layout = layout;
    c.k.layout = (layout + 1) % kNumLayouts;
    c.nan_keys = c.k.layout != kShared;
    c.lse_odd = layout % 2;
    EXPECT_TRUE(check(backend(), c));
    c.page_size = 16;
    EXPECT_TRUE(check(backend(), c));
    c.q.seqlen = 1;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Indices, Packed) {
  for (const int64_t keys : {0, 1, 2}) {
    Case c = base("indices: packed");
    c.q.packed = 1;
    c.q.slots = {1, 0, 5};
    c.q.used = {1, 0, 3};
    c.q.lead = 4;
    c.q.trail = 3;
    c.q.max_slack = 1;
    if (keys == 1) {
      c.k.packed = 1;
      c.k.slots = {300, 20, 90};
      c.k.used = {290, 20, 70};
      c.k.lead = 7;
    }
    if (keys == 2) c.page_size = 5;
    EXPECT_TRUE(check(backend(), c));
    c.q.used = {};
    c.q.cu_bits = 64;
    EXPECT_TRUE(check(backend(), c));
  }
}

Case latent(const char *name) {
  Case c = base(name);
  c.dtype = FA_BFLOAT16;
  c.heads_q = 16;
  c.heads_k = 1;
  c.head_dim = 576;
  c.head_dim_v = 512;
  c.v_in_k = 1;
  return c;
}

// One block of rows of a query and several, whose lists end within a tile of keys, lists of several splits, and one that is shorter than a tile.
TEST_P(Indices, LatentCaches) {
  for (const int64_t page_size : {0, 64}) {
    for (const auto &[heads, entries] : {std::pair{16, 100}, {128, 100}, {128, 700}, {40, 7}}) {
      Case c = latent("indices: latent");
      c.page_size = page_size;
      c.heads_q = heads;
      c.key_indices = entries;
      EXPECT_TRUE(check(backend(), c));
      c.dtype = FA_FLOAT16;
      c.sink = 1;
      c.q.seqlen = 1;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// Queries and keys in any layout: kernels that read lists by themselves, and those that cannot.
TEST_P(Indices, LatentLayouts) {
  for (int64_t n = 0; n < 8; ++n) {
    Case c = latent("indices: latent layouts");
    c.heads_q = n % 2 == 0 ? 128 : 70;
    if (n == 1) c.q.layout = kBhsd;
    if (n == 2) c.lse_odd = 1;
    if (n == 3) c.q.used = {3, 0, 2};
    if (n == 4 || n == 5) {
      c.q.packed = 1;
      c.q.slots = {1, 0, 5};
    }
    if (n == 5 || n == 6) {
      c.k.packed = 1;
      c.k.slots = {300, 20, 90};
      c.k.used = {290, 20, 70};
    }
    if (n == 7) c.num_splits = 3;
    EXPECT_TRUE(check(backend(), c));
    c.flags = FA_FLAG_BATCH_INVARIANT;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Indices, QuantisedLatentCaches) {
  for (const fa_dtype dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const fa_dtype key_dtype : {FA_FLOAT8_E4M3, FA_INT8}) {
      for (const int64_t descale : {0, 1, 2}) {
        Case c = latent("indices: quantised latent");
        c.dtype = dtype;
        c.key_dtype = key_dtype;
        c.descale = descale;
        c.heads_q = descale == 0 ? 128 : 24;
        c.page_size = dtype == FA_FLOAT16 ? 64 : 0;
        c.sink = 1;
        EXPECT_TRUE(check(backend(), c));
        c.q.packed = 1;
        c.q.slots = {2, 3, 1};
        EXPECT_TRUE(check(backend(), c));
        c.key_indices = 0;  // and without lists
        c.mask = FA_MASK_CAUSAL;
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

// Descales per sequence, which queries of several sequences bring with them, and per row.
TEST_P(Indices, QuantisedKeys) {
  for (const int64_t descale : {0, 1, 2}) {
    for (const fa_dtype dtype : {FA_FLOAT8_E4M3, FA_INT8}) {
      Case c = base("indices: quantised");
      c.dtype = FA_BFLOAT16;
      c.key_dtype = dtype;
      if (dtype == FA_FLOAT8_E4M3) c.query_dtype = dtype;
      c.descale = descale;
      EXPECT_TRUE(check(backend(), c));
      c.q.seqlen = 1;
      c.page_size = 16;
      EXPECT_TRUE(check(backend(), c));
      c.page_size = 0;
      c.q.packed = c.k.packed = 1;
      c.q.slots = {2, 3, 1};
      c.k.slots = {300, 20, 90};
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Indices, Options) {
  for (int64_t n = 0; n < 7; ++n) {
    Case c = base("indices: options");
    if (n == 0) c.softcap = 5;
    if (n == 1) c.sink = 1;
    if (n == 2) c.scale = 0.3;
    if (n == 3) c.max_logit = 1;
    if (n == 4) c.lse = 0;
    if (n == 5) c.num_splits = 3;
    if (n == 6) c.q.used = {3, 0, 2};
    c.own_workspace = n % 2;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Indices, VisibleNan) {
  for (const int64_t role : {1, 2, 3}) {
    Case c = base("indices: visible NaN");
    c.k.used = {};
    c.nan_visible = role;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Indices, NothingToSee) {
  for (int64_t n = 0; n < 3; ++n) {
    Case c = base("indices: nothing");
    if (n == 0) c.batch = 0;
    if (n == 1) c.k.seqlen = 0;
    if (n == 2) c.q.seqlen = 0;
    if (n != 2) c.k.used = {};
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Indices, Random) {
  std::mt19937_64 rng(static_cast<uint64_t>(seed_for("indices: random")));
  for (int64_t n = scaled(60); n > 0 && !HasFailure(); --n) {
    Case c = random_case(rng);
    c.mask = FA_MASK_NONE;
    c.window_left = c.window_right = -1;
    c.bias = c.block_q = c.block_k = c.block_lists = c.element_mask = c.slices = c.alibi = c.score = c.backward = 0;
    c.nan_bias = 0;
    c.alibi_log_scale = c.dropout = 0;
    c.starts.clear();
    c.key_indices = std::uniform_int_distribution<int64_t>(1, 300)(rng);
    EXPECT_TRUE(check(backend(), c));
  }
}

FA_ON_EVERY_BACKEND(Indices);

}  // namespace
}  // namespace parity
