// SPDX-License-Identifier: Apache-2.0
// Properties of plans: partitions, balance, what travels; and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>

#include "dist/ranks.h"

namespace dist_test {
namespace {

fa_dist_problem problem(const std::vector<int64_t> &lengths, int32_t ranks, fa_mask_kind mask = FA_MASK_CAUSAL) {
  fa_dist_problem p;
  fa_dist_problem_init(&p, sizeof p);
  p.lengths = lengths.data();
  p.num_documents = static_cast<int64_t>(lengths.size());
  p.heads_q = 8;
  p.heads_k = 2;
  p.head_dim = p.head_dim_v = 64;
  p.dtype = FA_BFLOAT16;
  p.mask = mask;
  p.num_ranks = ranks;
  return p;
}

// Row by row, as slowly as it can be said.
bool sees(const fa_dist_problem &p, int64_t i, int64_t j) {
  if (p.mask != FA_MASK_NONE && j > i) return false;
  if ((p.window & FA_WINDOW_LEFT) && j < i - p.window_left) return false;
  return !((p.window & FA_WINDOW_RIGHT) && j > i + p.window_right);
}

TEST(Plan, IsAPartitionForAnyProblem) {
  std::mt19937_64 rng(static_cast<uint64_t>(parity::seed_for("dist.plan")));
  for (int64_t n = 0; n < parity::scaled(400); ++n) {
    std::vector<int64_t> lengths(rng() % 12);
    for (int64_t &length : lengths) length = static_cast<int64_t>(rng() % (rng() % 4 == 0 ? 200 : 30));
    fa_dist_problem p = problem(lengths, 1 + static_cast<int32_t>(rng() % 16), static_cast<fa_mask_kind>(rng() % 3));
    p.way = static_cast<fa_dist_way>(rng() % 3);
    if (rng() % 3 == 0) p.flags = FA_DIST_CONTIGUOUS;
    if (rng() % 3 == 0) {
      p.window = FA_WINDOW_LEFT | FA_WINDOW_RIGHT;
      p.window_left = static_cast<int64_t>(rng() % 40);
      p.window_right = static_cast<int64_t>(rng() % 40);
    }
    const LayoutHandle layout = plan(p);
    const fa_dist_layout_info info = info_of(layout);
    const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    ASSERT_EQ(info.total_rows, total);
    ASSERT_EQ(info.rank_offsets[0], 0);
    ASSERT_EQ(info.rank_offsets[p.num_ranks], total);
    for (int64_t at = 0; at < total; ++at) {
      ASSERT_EQ(info.inverse[info.permutation[at]], at);
      ASSERT_TRUE(!(p.flags & FA_DIST_CONTIGUOUS) || info.permutation[at] == at);
    }
    std::vector<int64_t> starts(1, 0);
    for (const int64_t length : lengths) starts.push_back(starts.back() + length);
    std::vector<int64_t> rows(static_cast<size_t>(p.num_ranks), 0), work(rows);
    // Rows of other ranks that a rank sees: what may travel, and no other row.
    int64_t bytes = 0;
    const int64_t row_bytes = p.heads_k * (p.head_dim + p.head_dim_v) * 2;
    for (int32_t r = 0; r < p.num_ranks; ++r) {
      std::vector<bool> seen(static_cast<size_t>(total), false);
      for (int64_t m = 0; m < info.num_pieces; ++m) {
        const fa_dist_piece &piece = info.pieces[m];
        if (piece.rank != r) continue;
        ASSERT_EQ(piece.local_row, rows[static_cast<size_t>(r)]);
        rows[static_cast<size_t>(r)] += piece.row_end - piece.row_begin;
        const int64_t start = starts[static_cast<size_t>(piece.document)],
                      length = lengths[static_cast<size_t>(piece.document)];
        EXPECT_EQ(piece.whole == 1, piece.row_end - piece.row_begin == length);
        int64_t first = length, last = 0;
        for (int64_t i = piece.row_begin; i < piece.row_end; ++i) {
          EXPECT_EQ(info.permutation[info.rank_offsets[r] + piece.local_row + i - piece.row_begin], start + i);
          for (int64_t j = 0; j < length; ++j) {
            if (!sees(p, i, j)) continue;
            ++work[static_cast<size_t>(r)];
            seen[static_cast<size_t>(start + j)] = true;
            first = std::min(first, j);
            last = std::max(last, j + 1);
          }
        }
        EXPECT_EQ(piece.key_begin, first);
        EXPECT_EQ(piece.key_end, last);
      }
      EXPECT_EQ(work[static_cast<size_t>(r)], info.work[r]);
      int64_t foreign = 0;
      for (int64_t at = 0; at < total; ++at) {
        const int64_t position = info.inverse[at];
        const bool own = position >= info.rank_offsets[r] && position < info.rank_offsets[r + 1];
        foreign += seen[static_cast<size_t>(at)] && !own;
      }
      EXPECT_EQ(info.forward_bytes[r], foreign * row_bytes) << "rank " << r;
      bytes += info.forward_bytes[r];
      EXPECT_EQ(rows[static_cast<size_t>(r)], info.rank_offsets[r + 1] - info.rank_offsets[r]);
      EXPECT_LE(rows[static_cast<size_t>(r)], (total + p.num_ranks - 1) / p.num_ranks);
    }
    // Gradients go back over the same rows, in fp32.
    EXPECT_EQ(std::accumulate(info.backward_bytes, info.backward_bytes + p.num_ranks, int64_t{0}), bytes * 3);
  }
}

TEST(Plan, ZigzagBalancesOneCausalDocument) {
  for (int32_t ranks = 2; ranks <= 64; ranks *= 2) {
    const std::vector<int64_t> lengths = {65536};
    const LayoutHandle layout = plan(problem(lengths, ranks));
    const fa_dist_layout_info info = info_of(layout);
    EXPECT_LE(info.imbalance, 1.001) << ranks;
    EXPECT_EQ(info.num_pieces, 2 * ranks - 1);  // the chunks in the middle are neighbours
  }
}

// Documents of whole blocks of 16 rows are cut at blocks, so that dropout works, and ranks keep their limits on rows and work.
TEST(Plan, CutsAtBlocksWhereDocumentsHaveBlocks) {
  std::mt19937_64 rng(static_cast<uint64_t>(parity::seed_for("dist.blocks")));
  int64_t cut = 0;
  double worst = 0;
  for (int64_t n = 0; n < parity::scaled(200); ++n) {
    const int32_t ranks = 2 + static_cast<int32_t>(rng() % 15);
    const int64_t total = ranks * 16 * (64 + static_cast<int64_t>(rng() % 512));
    std::vector<int64_t> lengths;
    for (int64_t sum = 0; sum < total; sum += lengths.back())
      lengths.push_back(std::min(total - sum, 16 * (1 + static_cast<int64_t>(rng() % (rng() % 4 == 0 ? 2000 : 100)))));
    fa_dist_problem p = problem(lengths, ranks, rng() % 3 == 0 ? FA_MASK_NONE : FA_MASK_CAUSAL);
    if (rng() % 4 == 0) p.window = FA_WINDOW_LEFT, p.window_left = static_cast<int64_t>(rng() % 4000);
    if (rng() % 4 == 0) p.flags = FA_DIST_CONTIGUOUS;
    const LayoutHandle layout = plan(p);
    const fa_dist_layout_info info = info_of(layout);
    for (int64_t m = 0; m < info.num_pieces; ++m) {
      cut += 1 - info.pieces[m].whole;
      EXPECT_EQ(info.pieces[m].row_begin % 16, 0);
      EXPECT_EQ(info.pieces[m].row_end % 16, 0);
    }
    for (int32_t r = 0; r < ranks; ++r) EXPECT_EQ(info.rank_offsets[r + 1] - info.rank_offsets[r], total / ranks);
    // One row more, and there are no blocks.
    ++lengths.front();
    const LayoutHandle without_blocks = plan(p);
    const double imbalance = info_of(without_blocks).imbalance;
    if (p.window == 0) worst = std::max(worst, info.imbalance / imbalance);
    EXPECT_LE(info.imbalance, imbalance * (p.window == 0 ? 1.04 : 1.2))
        << ranks << " ranks, " << total << " rows, " << lengths.size() << " documents";
  }
  EXPECT_GT(cut, 0);
  std::printf("imbalance up to %.3f times that without blocks\n", worst);
}

// Heavy-tailed lists of documents of 512 to 16k rows; docs/distributed.md quotes what this prints.
TEST(Plan, BalancesPackedDocuments) {
  constexpr int kLists = 200;
  for (const int32_t ranks : {2, 4, 8, 16}) {
    double sum = 0, worst = 0, cut = 0, documents = 0;
    for (int seed = 0; seed < kLists; ++seed) {
      std::mt19937_64 rng(static_cast<uint64_t>(seed));
      std::vector<int64_t> lengths;
      for (int64_t total = 0; total < 131072; total += lengths.back()) {
        const double u = static_cast<double>(rng() % 100000 + 1) / 100001;
        lengths.push_back(std::min({static_cast<int64_t>(512 / u), int64_t{16384}, 131072 - total}));
      }
      const LayoutHandle layout = plan(problem(lengths, ranks));
      const fa_dist_layout_info info = info_of(layout);
      sum += info.imbalance;
      worst = std::max(worst, info.imbalance);
      documents += static_cast<double>(lengths.size());
      cut += static_cast<double>(lengths.size());
      for (int64_t n = 0; n < info.num_pieces; ++n) cut -= info.pieces[n].whole;
    }
    EXPECT_LE(worst, 1.05) << ranks;
    EXPECT_LE(cut, documents / 3) << ranks;
    std::printf("%d ranks: mean %.3f, worst %.3f, %.1f of %.1f documents cut\n", int{ranks}, sum / kLists, worst, cut / kLists,
                documents / kLists);
  }
}

// With a window, only the rows inside it travel, however long the document is.
TEST(Plan, WindowsNeedAHalo) {
  for (const int64_t length : {4096, 65536}) {
    const std::vector<int64_t> lengths = {length};
    fa_dist_problem p = problem(lengths, 8);
    p.window = FA_WINDOW_LEFT;
    p.window_left = 100;
    const LayoutHandle layout = plan(p);
    const fa_dist_layout_info info = info_of(layout);
    EXPECT_EQ(info.num_pieces, 8);
    for (int32_t r = 0; r < 8; ++r) EXPECT_EQ(info.forward_bytes[r], r == 0 ? 0 : 100 * 2 * 128 * 2);
  }
}

// Stages have at least 64 MB of keys, in forward 400 MB inside a host. Between hosts forward begins with one head where a rank has nothing
// else to do. What the caller says is kept.
TEST(Plan, StagesAreFewAndLong) {
  const struct {
    int64_t rows;
    int32_t ranks, stages;
    const char *reason;
  } rows[] = {{16384, 2, 1, "1 stages"},
              {65536, 2, 2, "2 stages, 1 in forward"},
              {262144, 2, 4, "4 stages, 1 in forward"},
              {262144, 4, 4, "4 stages, 1 in forward"},
              {524288, 8, 4, "4 stages"},
              {65536, 16, 3, "3 stages, the first divided in forward"},
              {262144, 16, 4, "4 stages, the first divided in forward"}};
  for (const auto &row : rows) {
    const std::vector<int64_t> lengths = {row.rows};
    fa_dist_problem p = problem(lengths, row.ranks);
    p.heads_k = 8;
    p.head_dim = p.head_dim_v = 128;
    const LayoutHandle layout = plan(p);
    fa_dist_layout_info info = info_of(layout);
    EXPECT_EQ(info.num_stages, row.stages) << row.rows;
    const auto stages_in_reason = [&] {
      const std::string reason = info.reason;
      return reason.substr(reason.find("), ") + 3);
    };
    EXPECT_EQ(stages_in_reason(), row.reason) << row.rows << " rows, " << row.ranks << " ranks";
    p.num_stages = 3;
    const LayoutHandle forced = plan(p);
    info = info_of(forced);
    EXPECT_EQ(info.num_stages, 3);
    EXPECT_EQ(stages_in_reason(), "3 stages");
  }
  const std::vector<int64_t> lengths = {5000, 500, 500};  // some whole ones on every rank
  fa_dist_problem p = problem(lengths, 2);
  const LayoutHandle layout = plan(p);
  const fa_dist_layout_info info = info_of(layout);
  ASSERT_GT(info.num_stages, 0);
  EXPECT_EQ(std::string(info.reason).find("divided"), std::string::npos) << info.reason;
}

// Cut documents are work of all ranks alike, whoever has their rows.
TEST(Plan, AllToAllSharesCutDocuments) {
  const std::vector<int64_t> lengths = {5000, 100, 90, 80, 70, 4000};
  fa_dist_problem p = problem(lengths, 2);
  p.way = FA_DIST_ALL_TO_ALL;
  const LayoutHandle layout = plan(p);
  const fa_dist_layout_info info = info_of(layout);
  EXPECT_EQ(info.way, FA_DIST_ALL_TO_ALL);
  EXPECT_EQ(info.num_stages, 1);
  EXPECT_LE(info.imbalance, 1.001);
  int64_t all = 0;
  for (const int64_t length : lengths) all += length * (length + 1) / 2;
  EXPECT_NEAR(static_cast<double>(info.work[0] + info.work[1]), static_cast<double>(all), 2);
  p.num_ranks = 3;
  fa_dist_layout none = nullptr;
  EXPECT_EQ(fa_dist_plan(&p, &none), FA_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(fa_last_error(nullptr)).find("heads_k"), std::string::npos) << fa_last_error(nullptr);
}

TEST(Plan, RefusesWhatIsWrongByName) {
  const std::vector<int64_t> good = {10, 20}, negative = {10, -1}, huge = {INT32_MAX, 1};
  const struct {
    const char *name;
    std::function<void(fa_dist_problem &)> spoil;
  } cases[] = {{"flags", [](auto &p) { p.flags = 8; }},
               {"num_documents", [](auto &p) { p.num_documents = -1; }},
               {"lengths", [](auto &p) { p.lengths = nullptr; }},
               {"lengths[1]", [&](auto &p) { p.lengths = negative.data(); }},
               {"lengths[1]", [&](auto &p) { p.lengths = huge.data(); }},
               {"num_ranks", [](auto &p) { p.num_ranks = 0; }},
               {"num_ranks", [](auto &p) { p.num_ranks = 1025; }},
               {"heads_q", [](auto &p) { p.heads_q = 7; }},
               {"heads_k", [](auto &p) { p.heads_k = 0; }},
               {"head_dim", [](auto &p) { p.head_dim = 0; }},
               {"head_dim_v", [](auto &p) { p.head_dim_v = 1000; }},
               {"dtype", [](auto &p) { p.dtype = FA_INT8; }},
               {"mask", [](auto &p) { p.mask = 9; }},
               {"window", [](auto &p) { p.window = 16; }},
               {"window_left", [](auto &p) { p.window_left = 3; }},
               {"window_right", [](auto &p) { p.window_right = -3; }},
               {"way", [](auto &p) { p.way = 17; }},
               {"num_stages", [](auto &p) { p.num_stages = 3; }},
               {"struct_size", [](auto &p) { p.struct_size = 4; }}};
  for (const auto &c : cases) {
    fa_dist_problem p = problem(good, 2);
    c.spoil(p);
    fa_dist_layout layout = nullptr;
    EXPECT_NE(fa_dist_plan(&p, &layout), FA_OK) << c.name;
    EXPECT_EQ(layout, nullptr);
    EXPECT_NE(std::string(fa_last_error(nullptr)).find(c.name), std::string::npos) << fa_last_error(nullptr);
  }
  fa_dist_problem p = problem(good, 2);
  EXPECT_EQ(fa_dist_plan(&p, nullptr), FA_ERROR_INVALID_ARGUMENT);
}

TEST(Rows, ReorderRefusesWhatDoesNotFit) {
  const std::vector<int64_t> lengths = {10};
  const LayoutHandle layout = plan(problem(lengths, 2));
  parity::HostTensor whole(FA_FLOAT32, {10, 3}, {3, 1}), local(FA_FLOAT32, {5, 3}, {3, 1}), wrong(FA_FLOAT32, {4, 3}, {3, 1}),
      half(FA_FLOAT16, {5, 3}, {3, 1});
  const auto at = [](parity::HostTensor &t) { return t.at(t.bytes().data()); };
  const fa_tensor w = at(whole), l = at(local), x = at(wrong), h = at(half);
  EXPECT_EQ(fa_dist_scatter_rows(layout.get(), 0, 0, &w, &l), FA_OK) << fa_last_error(nullptr);
  EXPECT_EQ(fa_dist_scatter_rows(layout.get(), 0, 0, &w, &x), FA_ERROR_SHAPE);
  EXPECT_EQ(fa_dist_scatter_rows(layout.get(), 0, 1, &w, &l), FA_ERROR_SHAPE);
  EXPECT_EQ(fa_dist_scatter_rows(layout.get(), 0, 0, &w, &h), FA_ERROR_DTYPE);
  EXPECT_EQ(fa_dist_scatter_rows(layout.get(), 2, 0, &w, &l), FA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fa_dist_scatter_rows(layout.get(), 0, 2, &w, &l), FA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fa_dist_gather_rows(nullptr, 0, 0, &l, &w), FA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fa_dist_gather_rows(layout.get(), 0, 0, nullptr, &w), FA_ERROR_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace dist_test
