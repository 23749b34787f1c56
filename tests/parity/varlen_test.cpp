// SPDX-License-Identifier: Apache-2.0
// Sequences of different lengths: packed, shortened by seqused, and paged.
#include "parity/expectation.h"
#include "parity/runner.h"

namespace parity {
namespace {

Case base(const char *name) {
  Case c;
  c.seed = seed_for(name);
  c.batch = 4;
  c.heads_q = 4;
  c.head_dim = c.head_dim_v = 24;
  c.q.slots = {17, 0, 1, 60};
  c.k.slots = {30, 5, 0, 71};
  c.dlse = 1;
  return c;
}

class Varlen : public EveryBackend {};

TEST_P(Varlen, PackedSides) {
  for (const int64_t packed : {1, 2, 3}) {
    for (const int64_t bits : {32, 64}) {
      for (const int64_t mask : {FA_MASK_NONE, FA_MASK_CAUSAL, FA_MASK_CAUSAL_TOP_LEFT}) {
        Case c = base("packed");
        c.q.packed = packed & 1;
        c.k.packed = packed >> 1;
        c.q.cu_bits = bits;
        c.k.cu_bits = 96 - bits;
        c.mask = mask;
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

// Rows before the first and after the last offset are not touched.
TEST_P(Varlen, LeadingAndTrailingRows) {
  for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    Case c = base("trailing");
    c.dtype = dtype;
    c.q.packed = c.k.packed = 1;
    c.q.lead = 3;
    c.q.trail = 40;
    c.k.lead = 7;
    c.k.trail = 65;
    EXPECT_TRUE(check(backend(), c));
    c.mask = FA_MASK_CAUSAL;
    c.bias = 1;
    EXPECT_TRUE(check(backend(), c));
  }
}

// Tiles of packed queries are found among all sequences by their offsets: more of them than a warp has lanes, and the first one far from row 0.
TEST_P(Varlen, ManySequences) {
  for (const int64_t dtype : {FA_FLOAT32, FA_BFLOAT16}) {
    Case c = base("many");
    c.dtype = dtype;
    c.batch = 70;
    c.heads_q = 3;
    c.heads_k = 1;
    c.q.packed = c.k.packed = 1;
    c.q.lead = 300;
    c.q.trail = 150;
    c.q.slots.resize(c.batch);
    c.k.slots.resize(c.batch);
    for (int64_t n = 0; n < c.batch; ++n) {
      c.q.slots[n] = n % 9 == 4 ? 0 : n * 37 % 83;
      c.k.slots[n] = n % 11 == 5 ? 0 : n * 29 % 71;
    }
    c.sink = 1;
    EXPECT_TRUE(check(backend(), c));
    c.mask = FA_MASK_CAUSAL;
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Varlen, MaxSeqlenIsOnlyABound) {
  for (const int64_t slack : {-1, 0, 1, 500}) {
    Case c = base("bound");
    c.q.packed = c.k.packed = 1;
    c.q.max_slack = c.k.max_slack = slack;
    EXPECT_TRUE(check(backend(), c));
    c.bias = 1;
    c.block_q = 16;
    c.block_k = 9;
    EXPECT_TRUE(check(backend(), c));
  }
}

// Gaps between sequences: slots larger than what is used.
TEST_P(Varlen, SeqUsed) {
  for (const int64_t packed : {0, 1, 2, 3}) {
    for (const int64_t used : {1, 2, 3}) {
      for (const int64_t mask : {FA_MASK_NONE, FA_MASK_CAUSAL}) {
        Case c = base("used");
        c.q.packed = packed & 1;
        c.k.packed = packed >> 1;
        c.q.seqlen = 60;
        c.k.seqlen = 71;
        if (used & 1) c.q.used = {16, 0, 1, 33};
        if (used & 2) c.k.used = {30, 4, 0, 65};
        c.q.index_stride = c.k.index_stride = 1 + packed % 2;
        c.q.max_of_used = c.k.max_of_used = 1;
        c.q.max_slack = c.k.max_slack = 0;
        c.mask = mask;
        EXPECT_TRUE(check(backend(), c));
        c.bias = c.sink = 1;
        c.alibi = 2;
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

TEST_P(Varlen, NothingUsed) {
  Case c = base("nothing used");
  c.q.packed = 1;
  c.k.used = {0, 0, 0, 0};
  EXPECT_TRUE(check(backend(), c));
  c.q.used = {0, 0, 0, 0};
  EXPECT_TRUE(check(backend(), c));
}

TEST_P(Varlen, ManyShortSequences) {
  Case c = base("many");
  c.batch = 60;
  c.q.packed = c.k.packed = 1;
  c.q.slots.clear();
  c.k.slots.clear();
  for (int64_t b = 0; b < c.batch; ++b) {
    c.q.slots.push_back(b % 5);
    c.k.slots.push_back(b % 7);
  }
  c.mask = FA_MASK_CAUSAL;
  EXPECT_TRUE(check(backend(), c));
}

// Sequences of many blocks of rows beside shorter ones and none, more of them than a warp has lanes; slots longer than what is used, and
// than the longest sequence in use.
TEST_P(Varlen, BlocksOfRowsThatAreNotThere) {
  for (const int64_t head_dim : {64, 128}) {
    for (const int64_t mask : {FA_MASK_NONE, FA_MASK_CAUSAL}) {
      Case c = base("blocks");
      c.dtype = FA_BFLOAT16;
      c.batch = 37;
      c.heads_q = 2;
      c.heads_k = 1;
      c.head_dim = c.head_dim_v = head_dim;
      c.backward = 0;
      c.mask = mask;
      c.q.packed = c.k.packed = 1;
      c.q.slots.assign(static_cast<size_t>(c.batch), 0);
      for (size_t b = 0; b < c.q.slots.size(); b += 4) c.q.slots[b] = static_cast<int64_t>(b % 3 * 70);
      c.q.slots[2] = 530;
      c.q.slots[33] = 400;
      c.k.slots = c.q.slots;
      c.q.max_slack = c.k.max_slack = 700;
      if (head_dim == 128) {
        c.q.used = c.q.slots;
        for (int64_t &rows : c.q.used) rows -= rows / 5;
        c.q.max_of_used = 1;
        c.q.max_slack = 0;
      }
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// Backward over sequences most of which have none of the key tiles of the longest one: runs of tiles without keys, shorter and longer than a warp has
// lanes, at the first tiles of a launch and at the last.
TEST_P(Varlen, KeyTilesThatAreNotThere) {
  for (const int64_t head_dim : {64, 128}) {
    for (const int64_t longest : {0, 20, 44}) {
      Case c = base("key tiles");
      c.dtype = FA_BFLOAT16;
      c.batch = 45;
      c.heads_q = c.heads_k = head_dim == 64 ? 4 : 3;
      c.head_dim = c.head_dim_v = head_dim;
      c.mask = longest == 20 ? FA_MASK_CAUSAL : FA_MASK_NONE;
      c.flags = longest == 44 ? FA_FLAG_DETERMINISTIC : 0;
      c.q.packed = c.k.packed = 1;
      c.q.slots.assign(static_cast<size_t>(c.batch), 0);
      for (size_t b = 1; b < c.q.slots.size(); b += 6) c.q.slots[b] = static_cast<int64_t>(b * 3);
      c.k.slots = c.q.slots;
      c.q.slots[static_cast<size_t>(longest)] = c.k.slots[static_cast<size_t>(longest)] = 520;
      c.k.slots[3] = 150;  // no queries: dk and dv are zero
      if (head_dim == 64) {
        c.k.used = c.k.slots;
        for (int64_t &rows : c.k.used) rows -= rows / 3;
      }
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// Nearly one row block per SM of common GPUs, with upper bounds for many more: some CTAs find no work.
TEST_P(Varlen, FewerRowBlocksThanSms) {
  for (const int64_t head_dim : {64, 128}) {
    for (const int64_t sequences : {64, 56, 48}) {
      Case c = base("few blocks");
      c.dtype = FA_FLOAT16;
      c.batch = sequences;
      c.heads_q = 2;
      c.heads_k = 1;
      c.head_dim = c.head_dim_v = head_dim;
      c.backward = 0;
      c.q.packed = c.k.packed = 1;
      c.q.slots.assign(static_cast<size_t>(c.batch), 20);
      c.k.slots = c.q.slots;
      c.q.max_slack = c.k.max_slack = 700;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

class Paged : public EveryBackend {};

TEST_P(Paged, PageSizes) {
  for (const int64_t page_size : {1, 3, 16, 64, 256}) {
    for (const int64_t dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
      for (const int64_t seqlen_q : {1, 5, 50}) {
        Case c = base("pages");
        c.dtype = dtype;
        c.backward = 0;
        c.page_size = page_size;
        c.spare_pages = 2;
        c.q.seqlen = seqlen_q;
        c.k.seqlen = 150;
        c.k.used = {150, 0, 1, 67};
        c.mask = FA_MASK_CAUSAL;
        EXPECT_TRUE(check(backend(), c));
        c.bias = 1;
        c.k.max_slack = 5;
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

TEST_P(Paged, LengthFromThePageTable) {
  Case c = base("full pages");
  c.backward = 0;
  c.page_size = 16;
  c.k.seqlen = 48;
  EXPECT_TRUE(check(backend(), c));
}

TEST_P(Paged, EveryLayout) {
  for (int64_t layout = 0; layout < kNumLayouts; ++layout) {
    for (const int64_t packed : {0, 1}) {
      Case c = base("paged layouts");
      c.backward = 0;
      c.page_size = 9;
      c.k.layout = layout;
      c.k.seqlen = 100;
      c.k.used = {100, 99, 0, 10};
      c.q.packed = packed;
      EXPECT_TRUE(check(backend(), c));
    }
  }
}

// Where the keys lie in memory does not change one bit of the result.
TEST_P(Paged, EqualsContiguous) {
  for (const int64_t page_size : {1, 3, 16, 64, 256}) {
    for (const int64_t seqlen_q : {1, 40}) {
      Case c = base("paged and contiguous");
      c.backward = 0;
      c.flags = FA_FLAG_FP32_PRODUCTS;  // the tensor-core kernels for fp32 do not read pages
      c.q.seqlen = seqlen_q;
      c.k.seqlen = 300;
      c.k.used = {300, 1, 256, 77};
      c.mask = FA_MASK_CAUSAL;
      const Data contiguous = make_data(c, nullptr, /*with_expected=*/false);
      c.page_size = page_size;
      const auto same_values = [&](Data &paged_data) {
        for (int64_t b = 0; b < c.batch; ++b) {
          for (int64_t j = 0; j < c.k.used[static_cast<size_t>(b)]; ++j) {
            for (const Role role : {kK, kV}) copy_row(contiguous, b, j, paged_data, b, j, role);
          }
        }
        paged_data.tensors[kQ] = contiguous.tensors[kQ];
      };
      const Data in_pages = make_data(c, same_values, /*with_expected=*/false);
      const Execution expected = execute(backend(), contiguous);
      const Execution actual = execute(backend(), in_pages);
      ASSERT_TRUE(expected.ok() && actual.ok()) << expected.error << actual.error;
      EXPECT_TRUE(same_bits(in_pages, expected, actual));
    }
  }
}

FA_ON_EVERY_BACKEND(Varlen);
FA_ON_EVERY_BACKEND(Paged);

}  // namespace
}  // namespace parity
