// SPDX-License-Identifier: Apache-2.0
// Many queries over keys most of which are cached already (speculation, chunked prefill over a paged cache): with the heads that share keys
// several row blocks, and keys that are split. Problems of this size have splits of one or two KV tiles. num_splits = 1 tests longer main
// loops.
#include <array>

#include "parity/runner.h"

namespace parity {
namespace {

Case base(const char *name) {
  Case c;
  c.seed = seed_for(name);
  c.dtype = FA_BFLOAT16;
  c.batch = 3;
  c.heads_q = 4;
  c.heads_k = 1;
  c.head_dim = c.head_dim_v = 128;
  c.q.seqlen = 20;
  c.k.seqlen = 1500;
  c.page_size = 16;
  c.mask = FA_MASK_CAUSAL;
  c.backward = 0;
  return c;
}

class Extend : public EveryBackend {
 protected:
  // The case as it is, and with an 8-bit KV cache: one format after the other, with and without descales.
  void check_formats(Case c) {
    EXPECT_TRUE(check(backend(), c));
    c.key_dtype = formats_ % 2 == 0 ? FA_FLOAT8_E4M3 : FA_INT8;
    c.descale = c.key_dtype == FA_INT8 ? 1 : formats_ / 2 % 2;
    ++formats_;
    EXPECT_TRUE(check(backend(), c));
  }

 private:
  int formats_ = 0;
};

// 33 to 150 rows per key head, in both 16-bit types, paged and not.
TEST_P(Extend, HeadDimsAndRows) {
  int64_t n = 0;
  for (const int64_t head_dim : {64, 96, 128}) {
    for (const auto &[seqlen_q, group] : {std::pair{16, 8}, {9, 8}, {3, 11}, {130, 1}, {50, 3}}) {
      Case c = base("extend: head dims");
      c.dtype = n++ % 2 == 0 ? FA_BFLOAT16 : FA_FLOAT16;
      c.batch = 1;
      c.k.seqlen = 700;
      c.head_dim = c.head_dim_v = head_dim;
      if (n % 5 == 0) c.head_dim_v = 64;
      c.heads_q = c.heads_k * group;
      c.q.seqlen = seqlen_q;
      c.page_size = n % 3 == 0 ? 0 : 16;
      check_formats(c);
    }
  }
}

// Wide heads: query heads of a group in one tile, which they fill or not, a prompt and a few tokens; keys split and not, windows, NaN that
// some tokens see and that none does.
TEST_P(Extend, WideHeadsInPages) {
  const bool cuda = backend().name().rfind("cuda", 0) == 0;
  const std::pair<int64_t, int64_t> dims[] = {{512, 512}, {384, 384}, {320, 320}, {448, 64}, {512, 384}};
  int64_t n = 0;
  for (const auto &[head_dim, head_dim_v] : dims) {
    for (const auto &[seqlen_q, group] : {std::pair{40, 8}, {70, 3}, {2, 8}, {16, 5}, {1, 20}, {7, 1}}) {
      Case c = base("extend: wide heads in pages");
      c.dtype = n++ % 2 == 0 ? FA_BFLOAT16 : FA_FLOAT16;
      if (!cuda && n % 12 != 1) continue;
      c.heads_k = n % 4 == 3 ? 2 : 1;
      c.heads_q = c.heads_k * group;
      c.head_dim = head_dim;
      c.head_dim_v = head_dim_v;
      c.q.seqlen = seqlen_q;
      c.k.seqlen = 904;
      c.k.used = {904, 333, n % 3 == 0 ? 0 : seqlen_q};
      if (n % 4 == 1) c.q.used = {seqlen_q, seqlen_q / 2, 0};
      c.page_size = std::array<int64_t, 7>{16, 64, 48, 256, 32, 0, 16}[static_cast<size_t>(n % 7)];
      if (n % 3 == 1) c.window_left = 200;
      if (n % 7 == 2) c.mask = FA_MASK_NONE;
      c.num_splits = n % 4;
      c.softcap = n % 6 == 5 ? 5 : 0;
      c.alibi = n % 6 == 5;
      c.sink = n % 2;
      c.nan_keys = 1;
      c.nan_visible = n % 5 == 3 ? 3 : 0;
      if (c.nan_visible == 0 && c.softcap == 0) {
        check_formats(c);
      } else {
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

// Prompts whose tiles of queries of one head fill the device: on Hopper other kernels read the pages. Boxes of 16 to 128 keys of a page; windows,
// before which no page is looked up; NaN that some tokens see and that none does.
TEST_P(Extend, PromptsInPages) {
  const bool cuda = backend().name().rfind("cuda", 0) == 0;
  int64_t n = 0;
  for (const auto &[head_dim, page_size] :
       {std::pair{64, 16}, {128, 64}, {256, 16}, {64, 256}, {128, 48}, {192, 64}, {128, 16}}) {
    Case c = base("extend: prompts in pages");
    if (++n % 5 != 2 && !cuda) continue;
    c.dtype = n % 2 == 0 ? FA_BFLOAT16 : FA_FLOAT16;
    c.heads_q = c.heads_k = cuda ? 45 : 2;
    c.head_dim = c.head_dim_v = head_dim;
    if (n == 5) c.head_dim_v = 64;
    c.q.seqlen = n == 4 ? 300 : 185;
    c.k.seqlen = 300;
    c.page_size = page_size;
    c.spare_pages = 2;
    c.k.used = {300, n == 3 ? 0 : 131, 200};
    if (n == 1) c.q.used = {185, 70, 0};
    if (n % 3 == 1) c.window_left = 70;
    if (n == 5) c.mask = FA_MASK_NONE;
    if (n == 7) {
      c.q.packed = 1;
      c.q.slots = {185, 20, 100};
    }
    if (n == 1 || n == 3) c.softcap = 5;
    c.alibi = n == 1 || n == 5;
    c.sink = n % 2;
    c.nan_keys = 1;
    c.nan_visible = n == 2 || n == 4 ? 3 : 0;
    EXPECT_TRUE(check(backend(), c));
  }
}

// The same over 8-bit caches, which on Hopper are widened in the workspace first: above head_dim 128 from 130 rows per key head on, below where many
// rows share a key and tiles fill the device.
TEST_P(Extend, QuantisedPrompts) {
  const bool hopper = backend().name() == "cuda";
  constexpr int64_t kPages[] = {16, 0, 64, 3, 24};
  int64_t count = 0;
  for (const auto &[head_dim, head_dim_v] :
       {std::pair<int64_t, int64_t>{256, 256}, {192, 128}, {192, 192}, {128, 128}, {64, 64}}) {
    for (auto [seqlen_q, group] : {std::pair<int64_t, int64_t>{150, 1}, {40, 8}, {300, 2}, {129, 3}, {70, 5}}) {
      const bool fills_device = head_dim <= 128;
      const int64_t n = count++;
      if (!hopper && (fills_device || n % 4 != 0)) continue;
      if (fills_device) seqlen_q = 180 + n % 13, group = 6;
      Case c = base("extend: quantised prompts");
      c.dtype = n % 2 == 0 ? FA_BFLOAT16 : FA_FLOAT16;
      c.key_dtype = n % 3 == 0 ? FA_INT8 : FA_FLOAT8_E4M3;
      c.descale = n % 3 == 2 || n == 6 ? 2 : c.key_dtype == FA_INT8 || n % 4 != 1;
      c.heads_k = fills_device ? 9 : 2;
      c.heads_q = c.heads_k * group;
      c.head_dim = head_dim;
      c.head_dim_v = head_dim_v;
      c.q.seqlen = seqlen_q;
      c.k.seqlen = 420;
      c.k.used = {420, 333, n % 4 == 3 ? 0 : seqlen_q / 2};
      if (n % 4 == 2) c.q.used = {seqlen_q, seqlen_q / 2, 0};
      if (n % 7 == 5) {
        c.q.packed = 1;
        c.q.slots = {seqlen_q, 3, seqlen_q / 2};
      }
      c.page_size = kPages[n % 5];
      c.spare_pages = c.page_size > 0 ? 3 : 0;
      if (n % 3 == 1) c.window_left = 90;
      if (n % 5 == 4) c.mask = FA_MASK_NONE;
      if (n % 4 == 1) c.softcap = 5;
      if (n % 8 == 3) c.alibi = 1;
      c.sink = n % 2;
      c.nan_keys = 1;
      EXPECT_TRUE(check(backend(), c));
      if (c.key_dtype == FA_FLOAT8_E4M3) c.nan_visible = 1 + n % 3;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// Options over pages and 8-bit keys and values. Hopper has kernels for contiguous keys of 16 bits, which read a copy where that pays: many rows see each key.
TEST_P(Extend, OptionsOfPrompts) {
  const bool hopper = backend().name() == "cuda";
  int64_t n = 0;
  for (const int64_t head_dim : {64, 128, 80, 256}) {
    for (int option = 0; option < 6; ++option, ++n) {
      if (!hopper && n % 3 != 0) continue;
      Case c = base("extend: options of prompts");
      c.dtype = n % 2 == 0 ? FA_BFLOAT16 : FA_FLOAT16;
      if (n % 3 != 1) {
        c.key_dtype = n % 3 == 0 ? FA_INT8 : FA_FLOAT8_E4M3;
        c.descale = n % 4 < 2 ? 1 : 2;
      } else if (n % 4 == 3) {
        c.dtype = FA_FLOAT32;
      }
      c.heads_k = hopper ? 5 : 2;
      c.heads_q = c.heads_k * 4;
      c.head_dim = c.head_dim_v = head_dim;
      c.q.seqlen = hopper ? 190 : 90;
      c.k.seqlen = 300;
      c.k.used = {300, 233, 150};
      if (n % 5 == 4 && c.key_dtype != 0) {
        c.page_size = 0;
        c.k.packed = n % 2;
        if (n % 2 == 1) c.k.slots = {300, 240, 150};
      } else {
        c.page_size = n % 2 == 0 ? 16 : 24;
      }
      c.spare_pages = c.page_size > 0 ? 3 : 0;
      if (option == 0) c.bias = 1, c.bias_padded = n % 2;
      if (option == 1) c.element_mask = 1 + n % 3;
      if (option == 2) c.block_q = c.block_k = 64;
      if (option == 3) c.dropout = 0.2;
      if (option == 4) c.starts = {0, 37, 150};
      if (option == 5) c.bias = 1, c.softcap = 5, c.max_logit = 1;
      if (n % 4 == 2) c.window_left = 70;
      c.sink = n % 2;
      c.nan_keys = c.key_dtype == 0;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// Masks as data over a cache: single tokens, trees of draft tokens, parts of prompts. Whole KV tiles are hidden (blocks, slices, left padding), shown and in part
// shown; heads have masks of their own or share one; keys that no query sees hold NaN.
TEST_P(Extend, MasksOverCaches) {
  int64_t n = 0;
  for (const auto &[seqlen_q, group] : {std::pair{1, 1}, {1, 8}, {4, 8}, {9, 3}, {17, 8}, {70, 2}, {150, 1}}) {
    for (int kind = 0; kind < 7; ++kind, ++n) {
      Case c = base("extend: masks");
      c.dtype = n % 2 == 0 ? FA_BFLOAT16 : FA_FLOAT16;
      c.head_dim = std::array{64, 128, 256, 80}[static_cast<size_t>(n % 4)];
      c.head_dim_v = n % 5 == 0 ? 64 : c.head_dim;
      if (c.head_dim <= 128 && n % 3 != 2) {
        c.key_dtype = n % 3 == 0 ? FA_FLOAT8_E4M3 : FA_INT8;
        c.descale = n % 4 != 1;
      }
      c.heads_k = 1 + n % 2;
      c.heads_q = c.heads_k * group;
      c.q.seqlen = seqlen_q;
      c.k.seqlen = 1100;
      c.k.used = {1100, 600, 200};
      c.page_size = std::array{0, 16, 1, 64, 24}[static_cast<size_t>(n % 5)];
      c.spare_pages = c.page_size > 0 ? 3 : 0;
      if (n % 6 == 5) c.mask = FA_MASK_NONE;
      if (kind == 0) c.element_mask = 1, c.element_by_size = kOverHeads;
      if (kind == 1) c.element_mask = 3, c.element_masked = 5, c.element_by_size = n % 2 * (kOverHeads | kOverBatch);
      if (kind == 2) c.element_mask = 2, c.element_by_stride = kOverBatch | kOverHeads, c.element_masked = 95;
      if (kind == 3) c.block_q = 64, c.block_k = 128, c.block_masked = 70;
      if (kind == 4) c.starts = {700, 300, 199};
      if (kind == 5) c.slices = 1;
      if (kind == 6) c.block_q = 7, c.block_k = 33, c.block_lists = 1, c.starts = {0, 5, 0}, c.block_masked = 80;
      if (n % 4 == 1) c.softcap = 5;
      if (n % 4 == 2) c.alibi = 1;
      if (n % 8 == 3) c.window_left = 300;
      c.sink = n % 2;
      c.nan_keys = c.key_dtype == 0;
      c.own_workspace = n % 9 == 0;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Extend, LengthsAndPages) {
  for (const int64_t page_size : {0, 1, 3, 16, 48, 256}) {
    for (const int64_t seqlen_q : {12, 45}) {
      Case c = base("extend: lengths");
      c.q.seqlen = seqlen_q;
      c.k.seqlen = 900;
      c.k.used = {900, 0, 77};
      c.page_size = page_size;
      c.spare_pages = page_size > 0 ? 3 : 0;
      c.num_splits = seqlen_q == 45;
      c.nan_keys = 1;
      c.own_workspace = page_size == 16;
      check_formats(c);
    }
  }
}

// Co-scheduled KV heads. The host knows the lengths, so that every CTA's work ends with a head, or does not know them. Split-KV partials of
// few heads go through the combine kernel; those of many (23 and more in the batch) are added by the CTA that finishes last. Each head_dim
// has few heads and many.
TEST_P(Extend, NeighbouringHeads) {
  int64_t n = 0;
  for (const auto &[heads_k, head_dim] : {std::pair{2, 128}, {4, 64}, {8, 128}, {12, 64}}) {
    for (const bool known : {true, false}) {
      Case c = base("extend: neighbouring heads");
      c.head_dim = c.head_dim_v = head_dim;
      c.heads_k = heads_k;
      c.heads_q = heads_k * 5;
      c.q.seqlen = n % 2 == 0 ? 9 : 21;  // rows of one consumer warpgroup, and of two
      c.k.seqlen = 900;
      if (!known) c.k.used = {900, 50, 611};
      c.page_size = n++ % 3 == 0 ? 0 : 16;
      c.nan_keys = 1;
      check_formats(c);
    }
  }
}

TEST_P(Extend, PackedWithUnusedQueries) {
  for (const int64_t page_size : {0, 16}) {
    Case c = base("extend: packed");
    c.q.packed = 1;
    c.q.slots = {1, 0, 85};
    c.q.used = {1, 0, 61};
    c.q.max_slack = 40;
    c.page_size = page_size;
    if (page_size == 0) {
      c.k.packed = 1;
      c.k.slots = {700, 20, 2500};
      c.k.lead = 3;
    }
    c.k.used = {650, 20, page_size == 0 ? 2500 : 1500};
    c.num_splits = page_size == 16;
    c.nan_keys = 1;
    check_formats(c);
  }
}

// Row blocks that see no key of some splits that other row blocks see.
TEST_P(Extend, Windows) {
  for (const int64_t splits : {0, 1, 3}) {
    Case c = base("extend: windows");
    c.batch = 1;
    c.q.seqlen = 400;
    c.k.seqlen = 700;
    c.window_left = 20;
    c.num_splits = splits;
    c.nan_keys = 1;
    check_formats(c);
  }
}

TEST_P(Extend, MasksAndScores) {
  for (const int64_t splits : {0, 1}) {
    for (int64_t n = 0; n < kTerms + 2; ++n) {
      Case c = base("extend: scores");
      c.num_splits = splits;
      c.batch = 2;
      c.k.seqlen = 700;
      c.q.seqlen = 36;
      set_term(c, n);
      if (n == kTerms) c.mask = FA_MASK_NONE;
      if (n == kTerms + 1) c.k.seqlen = 25;  // fewer keys than queries: rows that see nothing
      c.nan_keys = 1;
      check_formats(c);
    }
  }
}

// NaN that some rows of a tile see and others do not.
TEST_P(Extend, VisibleNan) {
  for (const int64_t dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (int64_t role = 1; role <= 3; ++role) {
      Case c = base("extend: visible NaN");
      c.dtype = dtype;
      c.k.seqlen = 200;
      c.num_splits = role % 2;
      c.nan_visible = role;
      EXPECT_TRUE(check(backend(), c));
      c.key_dtype = FA_FLOAT8_E4M3;
      c.descale = role % 2;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Extend, Splits) {
  for (const int64_t splits : {1, 2, 7, 64}) {
    Case c = base("extend: splits");
    c.q.seqlen = 11;
    c.k.used = {1500, 3, 400};
    c.num_splits = splits;
    check_formats(c);
  }
  Case c = base("extend: batch-invariant");
  c.q.seqlen = 60;
  c.k.seqlen = 2600;
  c.k.used = {2600, 100, 1400};
  c.flags = FA_FLAG_BATCH_INVARIANT;
  check_formats(c);
}

TEST_P(Extend, LargeLogits) {
  // Maxima that are raised now and then, up to maxima that are raised by more than the exponent range of fp32.
  for (const int64_t dtype : {FA_FLOAT16, FA_BFLOAT16}) {
    for (const double magnitude : {3., 10., 40., 200., 1000.}) {
      Case c = base("extend: large logits");
      c.dtype = dtype;
      c.batch = 2;
      c.q.seqlen = dtype == FA_FLOAT16 ? 33 : 12;
      c.magnitude = magnitude;
      c.num_splits = 1;
      c.nan_keys = 1;
      check_formats(c);
    }
  }
  Case c = base("extend: large logits");
  c.key_dtype = FA_FLOAT8_E4M3;
  c.descale = 1;
  c.magnitude = 1e7;  // beyond fp16
  c.scale = 1e-7;
  EXPECT_TRUE(check(backend(), c));
}

FA_ON_EVERY_BACKEND(Extend);

}  // namespace
}  // namespace parity
