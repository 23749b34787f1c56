// SPDX-License-Identifier: Apache-2.0
// Tile ranges of the mask rule against the rule written out pair by pair.
#include "core/mask.h"

#include <gtest/gtest.h>

#include <vector>

namespace fa {
namespace {

// The documented rule for one pair.
bool sees(const Band &band, int64_t seqlen_q, int64_t seqlen_k, int64_t i, int64_t j) {
  const int64_t diagonal = band.top_left ? i : i + seqlen_k - seqlen_q;
  return j >= diagonal - band.left && j <= diagonal + band.right;
}

std::vector<Band> bands() {
  std::vector<Band> all;
  for (const int64_t left : {int64_t{0}, int64_t{1}, int64_t{3}, int64_t{40}, Band::kUnlimited}) {
    for (const int64_t right : {int64_t{0}, int64_t{2}, int64_t{40}, Band::kUnlimited}) {
      for (const bool top_left : {false, true}) all.push_back({left, right, top_left});
    }
  }
  return all;
}

// Calls visit(band, seqlen_q, seqlen_k) for every small problem.
template <typename Visit>
void each_problem(Visit visit) {
  for (const Band &band : bands()) {
    for (int64_t seqlen_q = 0; seqlen_q <= 9; ++seqlen_q) {
      for (int64_t seqlen_k = 0; seqlen_k <= 9; ++seqlen_k) visit(band, seqlen_q, seqlen_k);
    }
  }
}

template <typename Visit>
void each_range(int64_t length, Visit visit) {
  for (int64_t begin = 0; begin <= length; ++begin) {
    for (int64_t end = begin; end <= length; ++end) visit(Range{begin, end});
  }
}

bool contains(Range range, int64_t x) { return x >= range.begin && x < range.end; }

TEST(Mask, VisibleKeysAreTheUnionOverRows) {
  each_problem([](const Band &band, int64_t seqlen_q, int64_t seqlen_k) {
    each_range(seqlen_q, [&](Range rows) {
      const Range keys = visible_keys(band, seqlen_q, seqlen_k, rows);
      ASSERT_TRUE(keys.empty() || (keys.begin >= 0 && keys.end <= seqlen_k));
      for (int64_t j = 0; j < seqlen_k; ++j) {
        bool seen = false;
        for (int64_t i = rows.begin; i < rows.end; ++i) seen = seen || sees(band, seqlen_q, seqlen_k, i, j);
        ASSERT_EQ(contains(keys, j), seen) << "left " << band.left << " right " << band.right << " rows " << rows.begin << ".."
                                           << rows.end << " key " << j << " of " << seqlen_q << " x " << seqlen_k;
      }
    });
  });
}

TEST(Mask, InteriorKeysAreSeenByEveryRow) {
  each_problem([](const Band &band, int64_t seqlen_q, int64_t seqlen_k) {
    each_range(seqlen_q, [&](Range rows) {
      if (rows.empty()) return;
      const Range keys = interior_keys(band, seqlen_q, seqlen_k, rows);
      for (int64_t j = 0; j < seqlen_k; ++j) {
        bool by_all = true;
        for (int64_t i = rows.begin; i < rows.end; ++i) by_all = by_all && sees(band, seqlen_q, seqlen_k, i, j);
        ASSERT_EQ(contains(keys, j), by_all) << "left " << band.left << " right " << band.right << " key " << j;
      }
    });
  });
}

TEST(Mask, VisibleQueriesAreTheUnionOverKeys) {
  each_problem([](const Band &band, int64_t seqlen_q, int64_t seqlen_k) {
    each_range(seqlen_k, [&](Range keys) {
      const Range rows = visible_queries(band, seqlen_q, seqlen_k, keys);
      for (int64_t i = 0; i < seqlen_q; ++i) {
        bool seen = false;
        for (int64_t j = keys.begin; j < keys.end; ++j) seen = seen || sees(band, seqlen_q, seqlen_k, i, j);
        ASSERT_EQ(contains(rows, i), seen) << "left " << band.left << " right " << band.right << " row " << i;
      }
    });
  });
}

TEST(Mask, NoRowsSeeNothing) {
  EXPECT_TRUE(visible_keys(Band{}, 5, 5, Range{3, 3}).empty());
  EXPECT_TRUE(interior_keys(Band{}, 5, 5, Range{3, 3}).empty());
  EXPECT_TRUE(visible_queries(Band{}, 5, 5, Range{3, 3}).empty());
}

// Limits near 2^60 and lengths near 2^40 add up without overflow.
TEST(Mask, LargestSizes) {
  constexpr int64_t kLong = int64_t{1} << 40;
  const Range keys = visible_keys(Band{}, kLong, kLong, Range{0, kLong});
  EXPECT_EQ(keys.begin, 0);
  EXPECT_EQ(keys.end, kLong);
  EXPECT_EQ(visible_queries(Band{}, 1, kLong, Range{0, 1}).size(), 1);
}

}  // namespace
}  // namespace fa
