// SPDX-License-Identifier: Apache-2.0
// Sizes and layouts: head dims, grouped heads, lengths around block boundaries and at zero, every memory layout.
#include "parity/runner.h"

namespace parity {
namespace {

Case base(const char *name) {
  Case c;
  c.seed = seed_for(name);
  c.q.seqlen = 37;
  c.k.seqlen = 50;
  c.dlse = 1;
  return c;
}

class Shapes : public EveryBackend {};

TEST_P(Shapes, HeadDims) {
  const std::pair<int64_t, int64_t> dims[] = {{1, 1},    {2, 2},    {8, 8},     {31, 31},   {40, 40},   {64, 64},   {72, 72},
                                              {80, 80},  {96, 96},  {128, 128}, {192, 192}, {192, 128}, {256, 256}, {512, 512},
                                              {64, 512}, {512, 64}, {257, 300}, {1, 128},   {128, 1},   {33, 17}};
  for (const auto &[head_dim, head_dim_v] : dims) {
    for (const int64_t dtype : {FA_FLOAT32, FA_BFLOAT16}) {
      Case c = base("head dims");
      c.dtype = dtype;
      c.batch = 1;
      c.head_dim = head_dim;
      c.head_dim_v = head_dim_v;
      EXPECT_TRUE(check(backend(), c));
      c.mask = FA_MASK_CAUSAL;
      c.softcap = 10;  // kernels have a plain and a general form
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// cu_seqlens may begin with more rows than a tile has, such as those of another call's sequences. They keep what they have.
TEST_P(Shapes, PackedBehindRowsOfOthers) {
  for (const int64_t dtype : {int64_t{FA_FLOAT32}, int64_t{FA_BFLOAT16}}) {
    for (const int64_t head_dim : {64, 128}) {
      for (const int64_t lead : {127, 300, 700}) {
        Case c = base("rows before the first sequence");
        c.dtype = dtype;
        c.head_dim = c.head_dim_v = head_dim;
        c.batch = 3;
        c.q.packed = c.k.packed = 1;
        c.q.slots = c.k.slots = {150, 0, 65};
        c.q.lead = c.k.lead = lead;
        c.q.trail = c.k.trail = 200;
        c.mask = FA_MASK_CAUSAL;
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

// Gradients of wide heads: tensor-core kernels want rows and dout on 16 bytes, and tiles of 64 queries and keys. Head dims and dtypes
// take the variants in turn, so that each kernel meets most of them.
TEST_P(Shapes, WideHeads) {
  const std::vector<std::pair<const char *, void (*)(Case &)>> variants = {
      {"full", [](Case &) {}},
      {"causal, more queries", [](Case &c) { c.mask = FA_MASK_CAUSAL, c.q.seqlen = 260, c.q.grad_layout = kBhsd; }},
      {"window", [](Case &c) { c.window_left = 70, c.window_right = 20, c.k.grad_layout = kBshd; }},
      {"packed",
       [](Case &c) {
         c.batch = 4;
         c.q.packed = c.k.packed = 1;
         c.q.slots = {150, 0, 65, 128};
         c.k.slots = {200, 70, 0, 129};
         c.k.used = {190, 64, 0, 100};
         c.q.used = {140, 0, 65, 128};
         c.mask = FA_MASK_CAUSAL;
         c.nan_keys = c.nan_queries = 1;
       }},
      {"lengths",
       [](Case &c) {
         c.q.used = {100, 64};
         c.k.used = {64, 170};
         c.mask = FA_MASK_CAUSAL;
         c.window_left = 90;
         c.nan_keys = c.nan_queries = 1;
       }},
      {"left padding",
       [](Case &c) {
         c.starts = {0, 77}, c.mask = FA_MASK_CAUSAL, c.nan_keys = 1;
       }},
      {"softcap and ALiBi", [](Case &c) { c.softcap = 10, c.alibi = 1, c.mask = FA_MASK_CAUSAL, c.q.seqlen = 130; }},
      {"softcap, NaN in k", [](Case &c) { c.softcap = 5, c.nan_visible = 2, c.mask = FA_MASK_CAUSAL; }},
      {"NaN in q", [](Case &c) { c.nan_visible = 1, c.mask = FA_MASK_CAUSAL; }},
      {"NaN in v", [](Case &c) { c.nan_visible = 3, c.window_left = 30, c.window_right = 0; }},
      {"NaN in dout", [](Case &c) { c.nan_visible = 4, c.mask = FA_MASK_CAUSAL, c.flags = FA_FLAG_DETERMINISTIC; }},
      {"dk alone", [](Case &c) { c.skipped_gradients = 1 | 4; }},
      {"dv alone", [](Case &c) { c.skipped_gradients = 1 | 2; }},
      {"dq and dv, sink", [](Case &c) { c.skipped_gradients = 2, c.sink = 1, c.mask = FA_MASK_CAUSAL; }},
      {"bias and dropout", [](Case &c) { c.bias = 1, c.bias_masked = 10, c.dropout = 0.3, c.mask = FA_MASK_CAUSAL; }},
      {"element mask and ALiBi", [](Case &c) { c.element_mask = 1, c.alibi = 1, c.nan_keys = 1, c.k.seqlen = 330; }},
      {"blocks, softcap and dropout",
       [](Case &c) { c.block_q = c.block_k = 64, c.softcap = 10, c.dropout = 0.2, c.k.seqlen = 330; }},
  };
  size_t next = static_cast<size_t>(run_seed());
  // CPUs have no kernels of their own for wide heads. On CUDA many tiles of queries may have another kernel than a few.
  const bool cuda = backend().name().rfind("cuda", 0) == 0;
  const std::vector<int64_t> half{FA_FLOAT16, FA_BFLOAT16};
  const auto run = [&](int64_t head_dim, int64_t head_dim_v, int64_t heads, int of_each, const std::vector<int64_t> &dtypes) {
    for (const int64_t dtype : dtypes) {
      for (int n = 0; n < of_each; ++n) {
        const auto &[text, vary] = variants[++next % variants.size()];
        Case c = base("wide heads");
        c.dtype = dtype;
        c.heads_k = 1;
        c.head_dim = head_dim;
        c.head_dim_v = head_dim_v;
        c.q.seqlen = 150;
        c.k.seqlen = 200;
        c.q.grad_layout = kBshd;
        vary(c);
        if (heads > 0) {
          c.heads_q = c.heads_k = heads;
          c.backward = 0;
        }
        EXPECT_TRUE(check(backend(), c)) << text;
      }
    }
  };
  for (const auto &[head_dim, head_dim_v] :
       std::vector<std::pair<int64_t, int64_t>>{{320, 320}, {264, 320}, {384, 384}, {384, 72}, {512, 512}, {400, 512}})
    run(head_dim, head_dim_v, 0, cuda ? 7 : 1, half);
  if (!cuda) return;
  for (const auto &[head_dim, head_dim_v] : std::vector<std::pair<int64_t, int64_t>>{{320, 320}, {264, 320}, {320, 72}})
    run(head_dim, head_dim_v, 35, 1, half);
  // In fp32 the kernels of Hopper's tensor cores for dq, dk and dv apart begin at 129 columns.
  for (const auto &[head_dim, head_dim_v] :
       std::vector<std::pair<int64_t, int64_t>>{{256, 256}, {192, 192}, {129, 250}, {150, 40}, {61, 192}})
    run(head_dim, head_dim_v, 0, static_cast<int>(variants.size()), {FA_FLOAT32});
}

TEST_P(Shapes, EveryHeadDimUpTo70) {
  for (int64_t head_dim = 1; head_dim <= 70; ++head_dim) {
    Case c = base("every head dim");
    c.batch = 1;
    c.heads_q = c.heads_k = 1;
    c.head_dim = head_dim;
    c.head_dim_v = 71 - head_dim;
    c.q.seqlen = 9;
    c.k.seqlen = 20;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Shapes, GroupedHeads) {
  for (const auto &[heads_q, heads_k] : {std::pair{1, 1}, {3, 3}, {6, 2}, {8, 1}, {5, 1}, {14, 2}}) {
    for (const int64_t seqlen_q : {1, 4, 40}) {
      Case c = base("grouped heads");
      c.heads_q = heads_q;
      c.heads_k = heads_k;
      c.q.seqlen = seqlen_q;
      c.mask = FA_MASK_CAUSAL;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Shapes, LengthsAroundBlocks) {
  for (const int64_t seqlen_q : {1, 2, 3, 11, 12, 13, 47, 48, 49, 95, 96, 97, 128}) {
    for (const int64_t seqlen_k : {1, 2, 31, 32, 33, 64, 127, 128, 129}) {
      Case c = base("lengths");
      c.batch = 1;
      c.head_dim = c.head_dim_v = 8;
      c.q.seqlen = seqlen_q;
      c.k.seqlen = seqlen_k;
      EXPECT_TRUE(check(backend(), c));
      c.mask = FA_MASK_CAUSAL;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Shapes, LongSequences) {
  for (const auto &[seqlen_q, seqlen_k] : {std::pair{1, 3000}, {3, 1025}, {520, 513}, {257, 1030}, {1030, 257}}) {
    for (const int64_t mask : {FA_MASK_NONE, FA_MASK_CAUSAL}) {
      Case c = base("long");
      c.batch = 1;
      c.heads_k = 1;
      c.head_dim = c.head_dim_v = 8;
      c.q.seqlen = seqlen_q;
      c.k.seqlen = seqlen_k;
      c.mask = mask;
      EXPECT_TRUE(check(backend(), c));
      c.bias = 1;
      c.bias_by_size = kOverBatch | kOverHeads | kOverRows;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

TEST_P(Shapes, NothingToDo) {
  for (const int64_t batch : {0, 2}) {
    for (const int64_t seqlen_q : {0, 5}) {
      for (const int64_t seqlen_k : {0, 5}) {
        Case c = base("nothing");
        c.batch = batch;
        c.q.seqlen = seqlen_q;
        c.k.seqlen = seqlen_k;
        c.sink = c.bias = 1;
        c.bias_by_size = kOverBatch;
        EXPECT_TRUE(check(backend(), c));
        c.q.packed = c.k.packed = 1;
        c.q.slots.assign(static_cast<size_t>(batch), seqlen_q);
        c.k.slots.assign(static_cast<size_t>(batch), seqlen_k);
        c.q.lead = c.k.trail = 2;
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

class Layouts : public EveryBackend {};

TEST_P(Layouts, EveryPair) {
  for (int64_t layout_q = 0; layout_q < kNumLayouts; ++layout_q) {
    for (int64_t layout_k = 0; layout_k < kNumLayouts; ++layout_k) {
      for (const int64_t packed : {0, 1}) {
        Case c = base("layouts");
        c.dtype = packed ? FA_FLOAT16 : FA_FLOAT32;
        c.heads_q = 4;
        c.head_dim = 24;
        c.q.layout = layout_q;
        c.k.layout = layout_k;
        c.q.grad_layout = layout_k == kShared ? kBhsd : layout_k;
        c.k.grad_layout = layout_q == kShared ? kSbhd : layout_q;
        c.lse_odd = layout_q % 2;
        c.q.packed = c.k.packed = packed;
        c.q.slots = {20, 1};
        c.k.slots = {33, 40};
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

TEST_P(Layouts, ShortQueries) {
  for (int64_t layout = 0; layout < kNumLayouts; ++layout) {
    for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
      Case c = base("short queries");
      c.dtype = dtype;
      c.heads_q = 6;
      c.head_dim = 40;
      c.q.seqlen = 1;
      c.k.seqlen = 300;
      c.q.layout = c.k.layout = layout;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

FA_ON_EVERY_BACKEND(Shapes);
FA_ON_EVERY_BACKEND(Layouts);

}  // namespace
}  // namespace parity
