// SPDX-License-Identifier: Apache-2.0
// Masks given as data: each alone and together, the forms of one mask against each other, lists and ranges that are partly wrong, NaN behind
// every kind of mask, and the largest logit.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "parity/expectation.h"
#include "parity/runner.h"

namespace parity {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A problem that crosses tiles and blocks of keys and that has sizes which are no multiples of 8 or 64.
Case base(const char *name, int64_t dtype = FA_FLOAT32) {
  Case c = grouped_case(name, dtype, 131, 333);
  c.nan_keys = c.nan_queries = 1;
  return c;
}

class Masks : public EveryBackend {
 protected:
  // Prompts, decoding by dot products and by tiles; keys in every layout; every dtype in turn. Every second case has ordinary numbers where
  // nobody looks: NaN there makes kernels handle whole tiles pair by pair.
  void each(const char *name, const std::function<void(Case &)> &vary) {
    const int64_t dtypes[] = {FA_FLOAT32, FA_BFLOAT16, FA_FLOAT16};
    size_t turn = 0;
    for (const int64_t queries : {131, 131, 1, 23}) {
      Case c = base(name, dtypes[turn % 3]);
      c.nan_keys = c.nan_queries = turn++ % 2;
      c.q.seqlen = queries;
      vary(c);
      EXPECT_TRUE(check(backend(), c));
    }
    for (const int64_t queries : {131, 3}) {
      Case c = base(name, dtypes[turn % 3]);
      c.nan_keys = c.nan_queries = turn++ % 2;
      c.q.packed = c.k.packed = 1;
      c.q.slots = {queries, 0};
      c.k.slots = {333, 40};
      c.q.lead = 3;
      c.k.lead = 5;
      c.q.trail = c.k.trail = 2;
      c.max_logit = 1;
      vary(c);
      EXPECT_TRUE(check(backend(), c));
    }
    for (const int64_t queries : {131, 1}) {
      Case c = base(name, dtypes[turn % 3]);
      c.nan_keys = c.nan_queries = turn++ % 2;
      c.q.seqlen = queries;
      c.page_size = 48;
      c.k.used = {333, 57};
      c.backward = 0;
      vary(c);
      EXPECT_TRUE(check(backend(), c));
    }
  }
};

// Every form with some of the broadcasts: as many cases as the suite keeps references for.
TEST_P(Masks, Elements) {
  int64_t form = 0;
  for (const int64_t by_size : {0, 1, 2, 4, 8, 7, 11, 15}) {
    form = form % 3 + 1;
    const std::string name = "elements " + std::to_string(form) + " " + std::to_string(by_size);
    each(name.c_str(), [&](Case &c) {
      c.element_mask = form;
      c.element_by_size = by_size;
      c.element_odd = by_size % 3 == 1;
      c.element_masked = by_size % 2 == 0 ? 50 : 90;
    });
  }
}

TEST_P(Masks, Starts) {
  each("starts", [](Case &c) { c.starts = {0, 17}; });
  each("far starts", [](Case &c) { c.starts = {300, 40}; });  // past whole blocks of keys, and of all keys
  each("starts and causal", [](Case &c) {
    c.starts = {270, 3};
    c.mask = FA_MASK_CAUSAL;
    c.window_left = 50;
  });
  each("starts and scores", [](Case &c) {
    c.starts = {100, 3};
    c.softcap = 5;
    c.alibi = 1;
    c.dropout = 0.2;
    c.sink = 1;
    c.bias = c.page_size == 0;
  });
}

// Alone, left padding needs no mask: kernels leave the keys out. Under a causal mask that is aligned to the top left it does.
TEST_P(Masks, StartsAlone) {
  int64_t turn = 0;
  for (const int64_t head_dim : {64, 96, 128, 192, 256}) {
    for (const int64_t mask : {FA_MASK_NONE, FA_MASK_CAUSAL, FA_MASK_CAUSAL_TOP_LEFT}) {
      for (const bool packed : {false, true}) {
        Case c = base(("starts alone " + std::to_string(turn)).c_str(), turn % 2 == 0 ? FA_BFLOAT16 : FA_FLOAT16);
        c.head_dim = c.head_dim_v = head_dim;
        c.batch = 3;
        c.heads_q = 2;
        c.heads_k = 1;
        c.q.seqlen = 140;
        c.k.seqlen = 280;
        c.mask = mask;
        c.starts = {131, 0, 277};
        if (packed) {
          c.q.packed = c.k.packed = 1;
          c.q.slots = {140, 70, 0};
          c.k.slots = {280, 20, 200};
          c.k.used = {250, 20, 200};
        }
        c.window_left = turn % 3 == 2 ? 60 : -1;
        c.sink = turn % 2;
        c.softcap = turn % 5 == 4 ? 5 : 0;
        c.alibi = turn % 4 == 3;
        c.flags = turn % 3 == 1 ? FA_FLAG_DETERMINISTIC : 0;
        ++turn;
        EXPECT_TRUE(check(backend(), c));
      }
    }
  }
}

TEST_P(Masks, BlockLists) {
  int64_t form = 0;
  for (const auto &[rows, columns] : {std::pair{64, 64}, {128, 32}, {7, 100}, {1000, 1}, {1, 1000}}) {
    form = form % 2 + 1;
    const std::string name = "lists " + std::to_string(form) + " " + std::to_string(rows);
    each(name.c_str(), [&, rows = rows, columns = columns](Case &c) {
      c.block_q = rows;
      c.block_k = columns;
      c.block_lists = form;
      c.block_by_size = rows % 4;
      c.block_masked = rows == 64 ? 75 : 40;
    });
  }
}

// Coordinates are rows of packed tensors, and rows of a sequence otherwise.
TEST_P(Masks, Slices) {
  each("no slices", [](Case &c) { c.slices = 1; });
  each("overlapping slices", [](Case &c) {
    c.slices = 1;
    c.slice_list = {0, 100, 0, 200, 0, 50, 140, 100, 300, 1, 50, 140, 100, 300, 1, 20, 60, 250, 340, 2, 90, 131, 0, 333, 3};
  });
  each("slices that reach outside", [](Case &c) {
    c.slices = 1;
    c.slice_list = {-40,       70, -100,      250, 1, -3,        400, 30,   1000, 2, INT32_MIN, INT32_MAX, 320,
                    INT32_MAX, 0,  INT32_MIN, 10,  0, INT32_MAX, 3,   1000, 2000, 0, 333,       0};
  });
  each("inverted and empty slices", [](Case &c) {
    c.slices = 1;
    c.slice_list = {90, 20, 0, 300, 0, 10, 10, 0, 300, 0, 0, 131, 200, 100, 1, 0, 131, INT32_MAX, INT32_MIN, 0, 4, 9, 7, 20, 0};
  });
  each("documents", [](Case &c) {
    c.slices = 1;
    for (int64_t begin = 0; begin < 340; begin += 37) {
      c.slice_list.insert(c.slice_list.end(), {begin, begin + 37, begin, begin + 37, 1});
    }
    c.q.seqlen = std::max<int64_t>(c.q.seqlen, 100);
  });
}

// More cells of queries than a word of the cell map has. Most keys see few of them, far from each other, or none.
TEST_P(Masks, FewOfManyTiles) {
  for (const int64_t head_dim : {64, 128, 264}) {
    Case c = base("few of many tiles", FA_BFLOAT16);
    c.q.seqlen = c.k.seqlen = 2200;
    c.heads_q = 2;
    c.heads_k = 1;
    c.head_dim = c.head_dim_v = head_dim;
    c.slices = 1;
    c.slice_list = {0,   150, 0,    150,  1,   700, 800, 130,  260,  0,    2150, 2200, 600,
                    640, 0,   1400, 1500, 250, 260, 0,   2100, 2200, 2100, 2200, 1};
    EXPECT_TRUE(check(backend(), c));
  }
}

TEST_P(Masks, Together) {
  each("all masks", [](Case &c) {
    c.element_mask = 3;
    c.element_masked = 20;
    c.starts = {9, 2};
    c.block_q = 64;
    c.block_k = 32;
    c.block_masked = 20;
    c.block_lists = 2;
    c.slices = 1;
    c.slice_list = {0, 90, 0, 333, 1, 60, 140, 20, 300, 0};
    c.mask = FA_MASK_CAUSAL_TOP_LEFT;
    c.window_right = 250;
    c.max_logit = 1;
  });
  each("all masks and scores", [](Case &c) {
    c.element_mask = 1;
    c.element_masked = 20;
    c.starts = {9, 2};
    c.slices = 1;
    c.slice_list = {0, 90, 0, 333, 1, 60, 140, 20, 300, 0};
    c.softcap = 3;
    c.alibi = 2;
    c.sink = 1;
    c.dropout = 0.3;
    c.bias = 1;
    c.bias_masked = 10;
    c.nan_bias = 1;
    c.max_logit = 1;
  });
}

// Rows that see their first key in the last tile, and rows whose only key is the first or the last one.
TEST_P(Masks, FirstKeyInTheLastTile) {
  each("late key", [](Case &c) {
    c.slices = 1;
    const int64_t lead_q = c.q.packed ? c.q.lead : 0, lead_k = c.k.packed ? c.k.lead : 0;
    for (int64_t i = 0; i < 131; ++i) {
      const int64_t key = i % 3 == 0 ? 332 : i % 3 == 1 ? 0 : 260 + i % 70;
      c.slice_list.insert(c.slice_list.end(), {lead_q + i, lead_q + i + 1, lead_k + key, lead_k + key + 1, 0});
    }
  });
}

// Quantised keys: what is masked is not even read through its descale.
TEST_P(Masks, QuantisedKeys) {
  for (const int64_t queries : {1, 40, 131}) {
    Case c = base("quantised");
    c.dtype = FA_BFLOAT16;
    c.key_dtype = FA_FLOAT8_E4M3;
    c.descale = 2;
    c.q.seqlen = queries;
    c.element_mask = 3;
    c.element_by_size = kOverHeads;
    c.element_masked = 80;
    c.starts = {30, 0};
    c.max_logit = 1;
    c.backward = 0;
    EXPECT_TRUE(check(backend(), c));
  }
}

// --- One mask in many forms --------------------------------------------------------------------------------------------------------

// Blocks of 16 x 16 of which a third is visible; the same for all heads and sequences.
bool shown(int64_t i, int64_t j) { return (i / 16 * 7 + j / 16 * 5) % 3 == 0; }

Case in_form(const char *form, int64_t queries, int64_t dtype) {
  Case c = base("forms", dtype);
  c.flags = FA_FLAG_DETERMINISTIC;
  c.q.seqlen = queries;
  const std::string name = form;
  if (name == "bits") c.element_mask = 3;
  if (name == "bools") c.element_mask = 2;
  if (name == "bytes") c.element_mask = 1;
  if (c.element_mask) c.element_by_size = name == "bits" ? kOverBatch | kOverHeads : static_cast<int64_t>(kOverBatch);
  if (name == "bias") c.bias = 1, c.bias_dtype = FA_FLOAT32;
  if (name == "blocks" || name == "lists") {
    c.block_q = c.block_k = 16;
    c.block_lists = name == "lists";
    c.block_by_size = kOverBatch | kOverHeads;
  }
  if (name == "slices") {
    c.slices = 1;
    for (int64_t i = 0; i < queries; i += 16) {
      for (int64_t j = 0; j < c.k.seqlen; j += 16) {
        if (!shown(i, j)) continue;
        c.slice_list.insert(c.slice_list.end(), {i, i + 16, j, j + 16, 0});
        if (i % 32 == 0) c.slice_list.insert(c.slice_list.end(), {i, i + 9, j + 3, j + 16, 1});  // again, in part
      }
    }
  }
  return c;
}

// Puts the mask into whatever tensor the case has for it.
void write_mask(Data &data) {
  HostTensor &elements = data.tensors[kElementMask], &bias = data.tensors[kBias], &blocks = data.tensors[kBlockMask];
  HostTensor &counts = data.tensors[kBlockCounts], &indices = data.tensors[kBlockIndices];
  for (HostTensor *t : {&elements, &bias}) {
    if (!t->present()) continue;
    for (int64_t b = 0; b < t->size(0); ++b) {
      for (int64_t h = 0; h < t->size(1); ++h) {
        for (int64_t i = 0; i < t->size(2); ++i) {
          for (int64_t j = 0; j < t->size(3); ++j) {
            t->set(t->element(b, h, i, j), t == &bias ? (shown(i, j) ? 0 : -kInfinity) : shown(i, j));
          }
        }
      }
    }
  }
  for (int64_t i = 0; blocks.present() && i < blocks.size(2); ++i) {
    for (int64_t j = 0; j < blocks.size(3); ++j) blocks.set(blocks.element(0, 0, i, j), shown(16 * i, 16 * j));
  }
  for (int64_t i = 0; counts.present() && i < counts.size(2); ++i) {
    int64_t count = 0;
    for (int64_t j = ceil(data.problem.k.seqlen / 16.0) - 1; j >= 0; --j) {
      if (shown(16 * i, 16 * j)) indices.set(indices.element(0, 0, i, count++), static_cast<double>(j));
    }
    counts.set(counts.element(0, 0, i), static_cast<double>(count));
  }
}

TEST_P(Masks, OneMaskInManyForms) {
  for (const int64_t dtype : {FA_FLOAT32, FA_BFLOAT16}) {
    for (const int64_t queries : {131, 30, 1}) {
      const Case first = in_form("bits", queries, dtype);
      // NaN would be put where each form masks; the forms agree about that, but not before the mask is written.
      const auto data_of = [&](const char *form) {
        Case c = in_form(form, queries, dtype);
        c.nan_keys = c.nan_queries = 0;
        return make_data(c, write_mask, /*with_expected=*/true);
      };
      const Data bits = data_of("bits");
      const Execution result = execute(backend(), bits);
      EXPECT_TRUE(verify(backend(), bits, result));
      for (const char *form : {"bools", "bytes", "blocks", "lists", "slices", "bias"}) {
        SCOPED_TRACE(form);
        Data other = data_of(form);
        // The seed draws other inputs when a form has more tensors before them; all forms get those of the first.
        for (const Role role : {kQ, kK, kV, kDout, kDlse}) other.tensors[role] = bits.tensors[role];
        for (std::vector<Expected> &e : other.expected) e.clear();
        fill_expected(other);
        const Execution e = execute(backend(), other);
        EXPECT_TRUE(verify(backend(), other, e));
        if (std::string(form) == "bias") continue;  // the general score rounds otherwise
        for (const Role role : {kOut, kLse, kDq, kDk, kDv}) {
          EXPECT_EQ(result.outputs[role].bytes(), e.outputs[role].bytes()) << role_name(role) << " differs bitwise";
        }
      }
    }
  }
}

// Slices against cu_seqlens: documents of one packed tensor.
TEST_P(Masks, DocumentsBySlicesAreThoseByOffsets) {
  Case packed = base("documents by offsets");
  packed.batch = 4;
  packed.q.packed = packed.k.packed = 1;
  packed.q.slots = packed.k.slots = {100, 1, 60, 39};
  packed.mask = FA_MASK_CAUSAL;
  packed.nan_keys = packed.nan_queries = 0;
  Case flat = packed;
  flat.batch = 1;
  flat.q.packed = flat.k.packed = 0;
  flat.q.slots = flat.k.slots = {};
  flat.q.seqlen = flat.k.seqlen = 200;
  flat.mask = FA_MASK_NONE;
  flat.slices = 1;
  flat.slice_list = {0, 100, 0, 100, 1, 100, 101, 100, 101, 1, 101, 161, 101, 161, 1, 161, 200, 161, 200, 1};
  const Data by_offsets = make_data(packed);
  const Data by_slices = make_data(
      flat,
      [&](Data &d) {
        for (int64_t b = 0; b < packed.batch; ++b) {
          for (int64_t i = 0; i < packed.q.slots[static_cast<size_t>(b)]; ++i) {
            for (const Role role : {kQ, kK, kV, kDout}) copy_row(by_offsets, b, i, d, 0, slot_start(packed.q, b) + i, role);
          }
        }
      },
      /*with_expected=*/true);
  EXPECT_TRUE(check(backend(), by_offsets));
  EXPECT_TRUE(check(backend(), by_slices));
}

// --- The largest logit -------------------------------------------------------------------------------------------------------------

TEST_P(Masks, MaxLogit) {
  each("max_logit", [](Case &c) { c.max_logit = 1; });
  each("max_logit of causal scores", [](Case &c) {
    c.max_logit = 1;
    c.mask = FA_MASK_CAUSAL;
    c.softcap = 5;
    c.alibi = 2;
    c.sink = 1;
    c.dropout = 0.5;
    c.bias = 1;
    c.bias_masked = 20;
  });
  each("max_logit without keys", [](Case &c) {
    c.max_logit = 1;
    c.slices = 1;
    c.sink = 1;
  });
  Case none = base("max_logit without queries");
  none.max_logit = 1;
  none.q.seqlen = 0;
  EXPECT_TRUE(check(backend(), none));
  none.batch = 0;
  none.q.seqlen = 5;
  EXPECT_TRUE(check(backend(), none));
}

// Against the maximum taken here, with the largest logit in a masked and in a visible pair.
TEST_P(Masks, MaxLogitIsThatOfVisiblePairs) {
  for (const bool visible : {false, true}) {
    for (const int64_t queries : {131, 20, 1}) {
      Case c = base("largest logit");
      c.q.seqlen = queries;
      c.max_logit = 1;
      c.element_mask = 3;
      c.nan_keys = c.nan_queries = 0;
      const Data data = make_data(c, [&](Data &d) {
        HostTensor &mask = d.tensors[kElementMask];
        for (int64_t h = 0; h < c.heads_q; ++h) {
          mask.set(mask.element(1, h, queries / 2, 300), visible);
          for (int64_t n = 0; n < c.head_dim; ++n) {
            d.tensors[kQ].set(d.element(kQ, 1, queries / 2, h, n), 4);
            d.tensors[kK].set(d.element(kK, 1, 300, h / 2, n), 4);
            for (const int64_t key : {299, 301}) d.tensors[kK].set(d.element(kK, 1, key, h / 2, n), -4);
          }
        }
      });
      const Execution e = execute(backend(), data);
      EXPECT_TRUE(verify(backend(), data, e));
      const double largest = 16 * std::sqrt(32.0);
      for (int64_t h = 0; h < c.heads_q; ++h) {
        const double value = e.outputs[kMaxLogit].get(e.outputs[kMaxLogit].element(h));
        if (visible) {
          EXPECT_NEAR(value, largest, 1e-4);
        } else {
          EXPECT_LT(value, largest - 10);
        }
      }
    }
  }
}

FA_ON_EVERY_BACKEND(Masks);

}  // namespace
}  // namespace parity
