// SPDX-License-Identifier: Apache-2.0
// Results of 1 to 16 ranks against the fp64 reference, within the library's contract.
#include <gtest/gtest.h>

#include <algorithm>

#include "dist/ranks.h"
#include "parity/cpu_context.h"
#include "parity/expectation.h"

namespace dist_test {
namespace {

using parity::Case;
using parity::Data;

int64_t pick(std::mt19937_64 &rng, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1));
}

void set_lengths(Case &c, std::vector<int64_t> lengths) {
  c.batch = static_cast<int64_t>(lengths.size());
  c.q.packed = c.k.packed = 1;
  c.q.slots = c.k.slots = std::move(lengths);
}

// A few documents, every option that pieces of documents support, and sometimes one that they do not.
Case random_case(std::mt19937_64 &rng, int32_t ranks) {
  Case c;
  c.seed = static_cast<int64_t>(rng() >> 1);
  const int64_t dtypes[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};
  c.dtype = dtypes[rng() % 3];
  c.heads_k = pick(rng, 1, 4);
  c.heads_q = c.heads_k * pick(rng, 1, 3);
  c.head_dim = pick(rng, 1, 3) * 8;
  c.head_dim_v = rng() % 2 ? c.head_dim : pick(rng, 1, 20);
  std::vector<int64_t> lengths(static_cast<size_t>(pick(rng, 1, 4)));
  for (int64_t &length : lengths) length = pick(rng, 0, rng() % 3 == 0 ? 120 : 40);
  set_lengths(c, lengths);
  c.q.grad_layout = c.k.grad_layout = pick(rng, 0, 1) ? parity::kOdd : parity::kBshd;
  c.mask = pick(rng, FA_MASK_NONE, FA_MASK_CAUSAL_TOP_LEFT);
  if (rng() % 3 == 0) c.window_left = pick(rng, 0, 50);
  if (rng() % 3 == 0) c.window_right = pick(rng, 0, 50);
  if (rng() % 4 == 0) c.softcap = 4;
  if (rng() % 4 == 0) c.alibi = pick(rng, 1, 2);
  if (c.alibi && rng() % 2) c.alibi_log_scale = 0.5;
  if (rng() % 3 == 0) c.sink = 1;
  if (rng() % 4 == 0) {
    c.dropout = 0.25;
    c.dropout_seed = pick(rng, 0, 1000);
    c.dropout_by_pointer = pick(rng, 0, 1);
    // Lengths whose cuts are likely to be at blocks of the random bits.
    if (rng() % 4 != 0) {
      for (int64_t &length : lengths) length = rng() % 2 ? pick(rng, 0, 2) * 16 : 0;
      lengths[rng() % lengths.size()] = pick(rng, 1, ranks > 4 ? 1 : 3) * 32 * ranks;
      set_lengths(c, lengths);
    }
  }
  if (rng() % 4 == 0) {
    c.bias = 1;
    c.bias_by_size = rng() % 3 == 0 ? int64_t{parity::kOverHeads} : 0;
    c.bias_by_stride = rng() % 4 == 0 ? int64_t{parity::kOverBatch} : 0;
    if (rng() % 3 == 0) c.bias_dtype = FA_FLOAT32;
    c.bias_odd = rng() % 3 == 0;
    c.bias_padded = pick(rng, 0, 1);
    c.bias_masked = rng() % 3 == 0 ? 30 : 0;
    c.dbias_fp32 = pick(rng, 0, 1);
    c.nan_bias = pick(rng, 0, 1);
  }
  if (rng() % 4 == 0) c.scale = 0.4;
  c.dlse = rng() % 2;
  c.backward = rng() % 5 != 0;
  c.skipped_gradients = rng() % 4 == 0 ? pick(rng, 0, 31) : 0;
  c.flags = rng() % 4 == 0 ? FA_FLAG_DETERMINISTIC : 0;
  c.nan_keys = rng() % 2;
  c.nan_queries = rng() % 2;
  return c;
}

Cut random_cut(std::mt19937_64 &rng, const Case &c, Cut cut) {
  const int32_t ranks = cut.ranks;
  cut.way = static_cast<fa_dist_way>(pick(rng, FA_DIST_AUTO, FA_DIST_ALL_TO_ALL));
  if (cut.way == FA_DIST_ALL_TO_ALL && c.heads_k % ranks != 0) cut.way = FA_DIST_AUTO;
  if (cut.way <= FA_DIST_GATHER && rng() % 2) cut.stages = static_cast<int32_t>(pick(rng, 1, c.heads_k));
  if (rng() % 4 == 0) cut.flags = FA_DIST_CONTIGUOUS;
  cut.own_workspace = rng() % 2;
  return cut;
}

// The argument that this rank count refuses; "" = none.
std::string refused(const Case &c, const Cut &cut) {
  const LayoutHandle layout = plan(problem_of(c, cut));
  const fa_dist_layout_info info = info_of(layout);
  if (std::all_of(info.pieces, info.pieces + info.num_pieces, [](const fa_dist_piece &p) { return p.whole == 1; })) return "";
  const bool blocks = std::all_of(info.pieces, info.pieces + info.num_pieces,
                                  [](const fa_dist_piece &p) { return p.whole == 1 || p.row_begin % 16 == 0; });
  if (c.dropout > 0 && info.way != FA_DIST_ALL_TO_ALL && !blocks) return "dropout_p";
  if (c.alibi && info.way == FA_DIST_RING) return "alibi_slopes";
  if (c.alibi && info.way == FA_DIST_GATHER && c.mask == FA_MASK_NONE && c.window_right != 0) return "alibi_slopes";
  if (c.bias && info.way == FA_DIST_ALL_TO_ALL) return "bias";
  if (c.bias && c.backward && !(c.skipped_gradients & 8) && c.bias_by_size && c.heads_q > 1 && info.way == FA_DIST_GATHER &&
      info.num_stages > 1) {
    return "dbias";
  }
  return "";
}

std::string check(const Case &c, const Cut &cut) {
  const std::string text = "\n  " + describe(cut) + " FA_TEST_CASE='" + parity::describe(c) + "'";
  const Data data = parity::make_data(c);
  Network network(cut.ranks, static_cast<uint64_t>(c.seed), cut.place.cuda);
  const Outcome outcome = run_ranks(data, cut, network);
  if (!network.fault().empty()) return network.fault() + text;
  const std::string field = refused(c, cut);
  if (!field.empty()) {
    for (size_t r = 0; r < outcome.statuses.size(); ++r) {
      if (outcome.statuses[r] != FA_ERROR_UNSUPPORTED || outcome.errors[r].find(field) == std::string::npos) {
        return "rank " + std::to_string(r) + " does not refuse " + field + ": " + outcome.errors[r] + text;
      }
    }
    return "";
  }
  const std::string faults = verify(data, outcome);
  return faults.empty() ? "" : faults + text;
}

class Ranks : public ::testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    const std::string why = missing(place_of_tests(), GetParam());
    if (!why.empty()) GTEST_SKIP() << why;
  }
  static Cut new_cut() {
    Cut cut;
    cut.ranks = GetParam();
    cut.place = place_of_tests();
    return cut;
  }
};

TEST_P(Ranks, RandomProblems) {
  std::mt19937_64 rng(static_cast<uint64_t>(parity::seed_for("dist")) + static_cast<uint64_t>(GetParam()));
  for (int64_t n = 0; n < parity::scaled(90); ++n) {
    const Case c = random_case(rng, GetParam());
    EXPECT_EQ(check(c, random_cut(rng, c, new_cut())), "");
  }
}

// One long document: each way, each mask, head groups that do not divide, dlse and a sink.
TEST_P(Ranks, OneDocument) {
  for (const fa_dist_way way : {FA_DIST_GATHER, FA_DIST_RING, FA_DIST_ALL_TO_ALL}) {
    for (const int64_t mask : {FA_MASK_NONE, FA_MASK_CAUSAL, FA_MASK_CAUSAL_TOP_LEFT}) {
      for (const int64_t left : {-1, 9}) {
        Case c = parity::grouped_case("dist.one", FA_BFLOAT16, 0, 0);
        c.heads_k = way == FA_DIST_ALL_TO_ALL ? GetParam() : 3;
        c.heads_q = 2 * c.heads_k;
        c.mask = mask;
        c.window_left = left;
        c.sink = 1;
        set_lengths(c, {197});
        Cut cut = new_cut();
        cut.way = way;
        cut.stages = way == FA_DIST_GATHER ? 2 : 0;
        EXPECT_EQ(check(c, cut), "");
      }
    }
  }
}

// Rows and head_dim that CUDA's kernels for tensor cores take, in documents of which some are cut.
TEST_P(Ranks, LongDocuments) {
  if (GetParam() > 4) GTEST_SKIP() << "the reference takes too long";
  for (const fa_dist_way way : {FA_DIST_GATHER, FA_DIST_ALL_TO_ALL}) {
    for (const int64_t head_dim : {64, 128}) {
      Case c = parity::grouped_case("dist.long", head_dim == 64 ? FA_FLOAT16 : FA_BFLOAT16, 0, 0);
      c.head_dim = c.head_dim_v = head_dim;
      c.heads_k = way == FA_DIST_ALL_TO_ALL ? GetParam() : 2;
      c.heads_q = 2 * c.heads_k;
      c.mask = FA_MASK_CAUSAL;
      c.window_left = head_dim == 64 ? 100 : -1;
      c.sink = 1;
      c.flags = head_dim == 64 ? FA_FLAG_DETERMINISTIC : 0;
      set_lengths(c, {330, 90, 33});
      Cut cut = new_cut();
      cut.way = way;
      cut.stages = way == FA_DIST_GATHER ? 2 : 0;
      EXPECT_EQ(check(c, cut), "");
    }
  }
}

// A bias that kernels load in tiles, and one that they cannot; its gradient in rows whose first key is not the document's; with dropout beside it.
TEST_P(Ranks, BiasOfLongDocuments) {
  if (GetParam() != 2) GTEST_SKIP() << "the reference takes too long; random problems have other numbers of ranks";
  for (const fa_dist_way way : {FA_DIST_GATHER, FA_DIST_RING}) {
    for (const int64_t odd : {0, 1}) {
      for (const int64_t left : {-1, 100}) {
        Case c = parity::grouped_case("dist.bias.long", left < 0 ? FA_FLOAT16 : FA_BFLOAT16, 0, 0);
        c.head_dim = c.head_dim_v = odd ? 128 : 64;
        c.heads_k = 2;
        c.heads_q = 4;
        c.mask = FA_MASK_CAUSAL;
        c.window_left = left;
        c.bias = 1;
        c.bias_odd = odd;
        c.bias_padded = 1 - odd;
        c.bias_dtype = odd ? FA_FLOAT32 : 0;
        c.bias_by_size = way == FA_DIST_RING && odd ? int64_t{parity::kOverHeads} : 0;
        c.dbias_fp32 = left < 0;
        c.dropout = left < 0 ? 0.2 : 0;
        if (c.dropout > 0) {
          set_lengths(c, {0, 96 * GetParam()});
        } else {
          set_lengths(c, {70, 200, 33});
        }
        Cut cut = new_cut();
        cut.way = way;
        cut.stages = way == FA_DIST_GATHER ? 2 : 0;
        EXPECT_EQ(refused(c, cut), "");
        EXPECT_EQ(check(c, cut), "");
      }
    }
  }
}

// Ranks without rows of their own compute rows of others all the same.
TEST_P(Ranks, FewerRowsThanRanks) {
  for (const fa_dist_way way : {FA_DIST_GATHER, FA_DIST_RING, FA_DIST_ALL_TO_ALL}) {
    for (const int64_t length : {0, 1, 2, 3, 7}) {
      Case c = parity::grouped_case("dist.few", FA_FLOAT32, 0, 0);
      c.heads_k = way == FA_DIST_ALL_TO_ALL ? GetParam() : 3;
      c.heads_q = 2 * c.heads_k;
      set_lengths(c, {length});
      Cut cut = new_cut();
      cut.way = way;
      EXPECT_EQ(check(c, cut), "");
    }
  }
}

// Dropout drops the same elements as on one rank where documents stay whole: the reference has the bits of the document's number.
TEST_P(Ranks, DropoutOfWholeDocuments) {
  Case c = parity::grouped_case("dist.dropout", FA_FLOAT32, 0, 0);
  c.dropout = 0.3;
  c.dropout_seed = 12345;
  c.alibi = 2;
  set_lengths(c, std::vector<int64_t>(static_cast<size_t>(GetParam()) * 3, 21));
  Cut cut = new_cut();
  EXPECT_EQ(refused(c, cut), "");
  EXPECT_EQ(check(c, cut), "");
}

// And where they are cut, if that is at blocks of the random bits: by every way, mask and order of the pieces, with windows that begin anywhere. The
// document that is cut is not the first one.
TEST_P(Ranks, DropoutOfCutDocuments) {
  const int64_t ranks = GetParam();
  if (ranks > 4) GTEST_SKIP() << "ways and masks take long with many ranks, which random problems have";
  for (const fa_dist_way way : {FA_DIST_GATHER, FA_DIST_RING, FA_DIST_ALL_TO_ALL}) {
    for (const int64_t mask : {FA_MASK_NONE, FA_MASK_CAUSAL}) {
      for (const int64_t left : {-1, 21, 70}) {
        for (const int64_t right : {-1, 21}) {
          if (right >= 0 && (mask != FA_MASK_NONE || left > 21)) continue;
          Case c = parity::grouped_case("dist.dropout.cut", left < 0 ? FA_FLOAT32 : FA_BFLOAT16, 0, 0);
          c.heads_k = way == FA_DIST_ALL_TO_ALL ? ranks : 3;
          c.heads_q = (ranks > 4 ? 1 : 2) * c.heads_k;
          c.head_dim = c.head_dim_v = 8;
          c.mask = mask;
          c.window_left = left;
          c.window_right = right;
          c.sink = 1;
          c.dropout = 0.3;
          c.dropout_seed = 12345;
          c.dropout_offset = 77;
          c.dropout_by_pointer = left >= 0;
          c.nan_keys = c.nan_queries = 1;
          set_lengths(c, {0, ranks * (ranks > 4 ? 32 : 64)});
          Cut cut = new_cut();
          cut.way = way;
          cut.stages = way == FA_DIST_GATHER ? 2 : 0;
          EXPECT_EQ(refused(c, cut), "") << describe(cut) << " " << parity::describe(c);
          EXPECT_EQ(check(c, cut), "");
        }
      }
    }
  }
}

// Tiles of tensor cores, in pieces that do not begin where tiles do; with two stages of heads.
TEST_P(Ranks, DropoutOfLongDocuments) {
  if (GetParam() != 2) GTEST_SKIP() << "the reference takes too long; random problems have other numbers of ranks";
  for (const fa_dist_way way : {FA_DIST_GATHER, FA_DIST_ALL_TO_ALL}) {
    for (const int64_t head_dim : {64, 128}) {
      Case c = parity::grouped_case("dist.dropout.long", head_dim == 64 ? FA_FLOAT16 : FA_BFLOAT16, 0, 0);
      c.head_dim = c.head_dim_v = head_dim;
      c.heads_k = way == FA_DIST_ALL_TO_ALL ? GetParam() : 2;
      c.heads_q = 2 * c.heads_k;
      c.mask = FA_MASK_CAUSAL;
      c.window_left = head_dim == 64 ? 130 : -1;
      c.dropout = 0.2;
      c.dropout_seed = 5;
      set_lengths(c, {0, GetParam() * 96});
      Cut cut = new_cut();
      cut.way = way;
      cut.stages = way == FA_DIST_GATHER ? 2 : 0;
      EXPECT_EQ(refused(c, cut), "");
      EXPECT_EQ(check(c, cut), "");
    }
  }
}

TEST_P(Ranks, EqualBitsOnEachRun) {
  std::mt19937_64 rng(static_cast<uint64_t>(parity::seed_for("dist.bits")));
  for (const fa_dist_way way : {FA_DIST_GATHER, FA_DIST_RING, FA_DIST_ALL_TO_ALL}) {
    Case c = parity::grouped_case("dist.bits", FA_BFLOAT16, 0, 0);
    if (way == FA_DIST_ALL_TO_ALL) c.heads_q = 2 * (c.heads_k = GetParam());
    c.mask = FA_MASK_CAUSAL;
    c.sink = 1;
    c.flags = FA_FLAG_DETERMINISTIC;
    set_lengths(c, {150, 30, 7});
    const Data data = parity::make_data(c, nullptr, false);
    Cut cut = new_cut();
    cut.way = way;
    std::array<parity::HostTensor, parity::kNumRoles> first;
    for (int run = 0; run < 4; ++run) {
      Network network(cut.ranks, rng(), cut.place.cuda);
      Outcome outcome = run_ranks(data, cut, network);
      for (size_t r = 0; r < outcome.statuses.size(); ++r) ASSERT_EQ(outcome.statuses[r], FA_OK) << outcome.errors[r];
      if (run == 0) first = outcome.outputs;
      for (size_t n = 0; n < first.size(); ++n) {
        EXPECT_TRUE(first[n].bytes() == outcome.outputs[n].bytes()) << parity::role_name(static_cast<parity::Role>(n));
      }
    }
  }
}

// The plan and the query say how many bytes arrive, and so many do.
TEST_P(Ranks, BytesAreThosePredicted) {
  for (const fa_dist_way way : {FA_DIST_GATHER, FA_DIST_RING, FA_DIST_ALL_TO_ALL}) {
    Case c = parity::grouped_case("dist.bytes", FA_FLOAT16, 0, 0);
    if (way == FA_DIST_ALL_TO_ALL) c.heads_q = 2 * (c.heads_k = GetParam());
    c.mask = FA_MASK_CAUSAL;
    c.dlse = 0;  // the plan does not know of it
    set_lengths(c, {100, 64, 3});
    Cut cut = new_cut();
    cut.way = way;
    const Data data = parity::make_data(c, nullptr, false);
    const LayoutHandle layout = plan(problem_of(c, cut));
    const fa_dist_layout_info info = info_of(layout);
    Network network(cut.ranks, 1, cut.place.cuda);
    const uint64_t agreement = 512 * (static_cast<uint64_t>(cut.ranks) - 1);
    run_ranks(data, cut, network, 0, [&](RankCall &call) {
      fa_dist_info query;
      fa_dist_info_init(&query, sizeof query);
      if (!call.keep(fa_dist_query(call.dist, call.layout, &call.attention, nullptr, &query))) return;
      EXPECT_EQ(query.received_bytes, static_cast<uint64_t>(info.forward_bytes[call.rank]));
      if (!call.keep(fa_dist_query(call.dist, call.layout, &call.attention, &call.gradients, &query))) return;
      EXPECT_EQ(query.received_bytes, static_cast<uint64_t>(info.backward_bytes[call.rank]));
      call.run_all();
      EXPECT_EQ(call.status, FA_OK) << call.error;
      if (cut.place.nccl) return;
      EXPECT_EQ(network.received_bytes(call.rank),
                agreement + static_cast<uint64_t>(info.forward_bytes[call.rank] + info.backward_bytes[call.rank]));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, Ranks, ::testing::Values(1, 2, 3, 4, 8, 16), ::testing::PrintToStringParamName());

// One rank computes what fa_forward and fa_backward compute, bit for bit.
TEST(OneRank, HasTheBitsOfTheLibrary) {
  Case c = parity::grouped_case("dist.single", FA_BFLOAT16, 0, 0);
  c.mask = FA_MASK_CAUSAL;
  c.sink = 1;
  c.alibi = 2;
  c.dropout = 0.2;
  c.q.grad_layout = c.k.grad_layout = parity::kBshd;
  set_lengths(c, {90, 0, 33});
  Data data = parity::make_data(c, nullptr, false);
  Cut cut;
  cut.ranks = 1;
  Network network(1, 1);
  const Outcome outcome = run_ranks(data, cut, network);
  ASSERT_EQ(outcome.statuses.at(0), FA_OK) << outcome.errors.at(0);

  fa_attention attention = data.options();
  attention.dropout_seed = static_cast<uint64_t>(c.dropout_seed);
  attention.dropout_offset = static_cast<uint64_t>(c.dropout_offset);
  fa_gradients gradients;
  fa_gradients_init(&gradients, sizeof gradients);
  for (int n = 0; n < parity::kNumRoles; ++n) {
    parity::HostTensor &t = data.tensors[static_cast<size_t>(n)];
    if (t.present()) parity::field(attention, gradients, static_cast<parity::Role>(n)) = t.at(t.bytes().data());
  }
  const parity::Context context = parity::cpu_context(1);
  ASSERT_EQ(fa_forward(context.get(), &attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(context.get());
  ASSERT_EQ(fa_backward(context.get(), &attention, &gradients, nullptr, 0, nullptr), FA_OK) << fa_last_error(context.get());
  for (const parity::Role role : {parity::kOut, parity::kLse, parity::kDq, parity::kDk, parity::kDv, parity::kDsink}) {
    EXPECT_TRUE(outcome.outputs[role].bytes() == data.tensors[role].bytes()) << parity::role_name(role);
  }
}

}  // namespace
}  // namespace dist_test
