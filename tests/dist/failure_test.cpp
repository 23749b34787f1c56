// SPDX-License-Identifier: Apache-2.0
// Failures of one rank: every rank comes back, and says what happened.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "dist/ranks.h"
#include "parity/cpu_context.h"

namespace dist_test {
namespace {

using parity::Case;
using parity::Data;

Case small_case(const char *name) {
  Case c = parity::grouped_case(name, FA_FLOAT32, 0, 0);
  c.mask = FA_MASK_CAUSAL;
  c.sink = 1;
  c.batch = 2;
  c.head_dim = c.head_dim_v = 8;
  c.q.packed = c.k.packed = 1;
  c.q.slots = c.k.slots = {50, 11};
  return c;
}

Cut cut_over(int32_t ranks, fa_dist_way way = FA_DIST_GATHER) {
  Cut cut;
  cut.ranks = ranks;
  cut.way = way;
  cut.stages = way == FA_DIST_GATHER ? 2 : 0;
  return cut;
}

// A bias of zeros for the rows of a rank: one number.
void give_bias(RankCall &call, int64_t heads, int64_t keys) {
  static float zero = 0;
  fa_tensor &t = call.attention.bias;
  t = fa_tensor{};
  t.data = &zero;
  t.dtype = FA_FLOAT32;
  t.ndim = 4;
  const int64_t shape[] = {1, heads, call.attention.q.shape[0], keys};
  std::copy(std::begin(shape), std::end(shape), t.shape);
}

constexpr int64_t kSoon = 20000;  // longer than any test takes, so that a time-out shows as a hang

// Every rank names what differs on rank 1, in the same words, and the handles still work.
TEST(Prepare, TellsDifferencesOnAllRanks) {
  const struct {
    const char *name;
    std::function<void(RankCall &)> change;
  } cases[] = {{"softmax_scale", [](RankCall &c) { c.attention.softmax_scale = 0.5f; }},
               {"softcap", [](RankCall &c) { c.attention.softcap = 3; }},
               {"flags", [](RankCall &c) { c.attention.flags = FA_FLAG_DETERMINISTIC; }},
               {"dropout_seed", [](RankCall &c) { c.attention.dropout_seed = 99; }},
               {"heads of bias (0 = absent) is 0 on rank 0 and 1 on", [](RankCall &c) { give_bias(c, 1, 50); }},
               {"sink", [](RankCall &c) { c.attention.sink = fa_tensor{}, c.gradients.dsink = fa_tensor{}; }},
               {"dlse", [](RankCall &c) { c.gradients.dlse = fa_tensor{}; }},
               {"dq", [](RankCall &c) { c.gradients.dq = fa_tensor{}; }},
               {"dk", [](RankCall &c) { c.gradients.dk = fa_tensor{}; }},
               {"dv", [](RankCall &c) { c.gradients.dv = fa_tensor{}; }},
               {"dsink", [](RankCall &c) { c.gradients.dsink = fa_tensor{}; }},
               {"presence of gradients", [](RankCall &c) { c.backward = false; }}};
  const Data data = parity::make_data(small_case("dist.differ"), nullptr, false);
  for (const auto &changed : cases) {
    Network network(3, 1);
    std::vector<std::string> again(3);
    const Outcome outcome = run_ranks(data, cut_over(3), network, kSoon, [&](RankCall &call) {
      const RankCall good = call;
      if (call.rank == 1) changed.change(call);
      const fa_status status =
          fa_dist_prepare(call.dist, call.layout, &call.attention, call.backward ? &call.gradients : nullptr);
      const std::string text = fa_last_error(call.context);
      const fa_status without = call.forward();  // was not prepared
      call = good;
      call.run_all();
      again[static_cast<size_t>(call.rank)] = call.status == FA_OK ? "" : call.error;
      call.status = status;
      call.error = without == FA_ERROR_INVALID_ARGUMENT ? text : "forward ran unprepared";
    });
    for (size_t r = 0; r < 3; ++r) {
      EXPECT_EQ(outcome.statuses[r], FA_ERROR_INVALID_ARGUMENT) << changed.name;
      EXPECT_NE(outcome.errors[r].find(changed.name), std::string::npos) << outcome.errors[r];
      EXPECT_NE(outcome.errors[r].find("rank 1"), std::string::npos) << outcome.errors[r];
      EXPECT_EQ(outcome.errors[r], outcome.errors[0]);
      EXPECT_EQ(outcome.health[r], FA_OK);
      EXPECT_EQ(again[r], "") << changed.name;
    }
    EXPECT_EQ(network.fault(), "");
  }
}

TEST(Prepare, TellsDifferentLayouts) {
  const Data data = parity::make_data(small_case("dist.layouts"), nullptr, false);
  const std::vector<int64_t> others = {50, 11};
  Cut ring = cut_over(2, FA_DIST_RING);
  const LayoutHandle other = plan(problem_of(data.problem, ring));
  Network network(2, 1);
  const Outcome outcome = run_ranks(data, cut_over(2), network, kSoon, [&](RankCall &call) {
    if (call.rank == 1) call.layout = other.get();
    call.run_all();
  });
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(outcome.statuses[r], FA_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(outcome.errors[r].find("way is 1 on rank 0 and 2 on rank 1"), std::string::npos) << outcome.errors[r];
  }
}

// A rank that refuses its own arguments says why; the others learn which rank it was.
TEST(Prepare, TellsWhichRankRefuses) {
  const Data data = parity::make_data(small_case("dist.refuse"), nullptr, false);
  Network network(4, 1);
  const Outcome outcome = run_ranks(data, cut_over(4), network, kSoon, [&](RankCall &call) {
    if (call.rank == 2) call.attention.q.shape[0] += 1;
    call.run_all();
  });
  for (size_t r = 0; r < 4; ++r) {
    EXPECT_EQ(outcome.statuses[r], r == 2 ? FA_ERROR_SHAPE : FA_ERROR_INVALID_ARGUMENT);
    const char *text = r == 2 ? "q.shape[0]" : "rank 2 refuses its own arguments with FA_ERROR_SHAPE";
    EXPECT_NE(outcome.errors[r].find(text), std::string::npos) << outcome.errors[r];
  }
}

// So do structs and layouts that cannot be read at all.
TEST(Prepare, TellsWhichRankCannotReadItsArguments) {
  const Data data = parity::make_data(small_case("dist.unread"), nullptr, false);
  const LayoutHandle other = plan(problem_of(data.problem, cut_over(3)));
  const struct {
    const char *name;
    fa_status status;
    std::function<void(RankCall &)> spoil;
  } cases[] = {{"layout is NULL", FA_ERROR_INVALID_ARGUMENT, [](RankCall &c) { c.layout = nullptr; }},
               {"layout has 3 ranks", FA_ERROR_INVALID_ARGUMENT, [&](RankCall &c) { c.layout = other.get(); }},
               {"attention->struct_size", FA_ERROR_STRUCT_VERSION, [](RankCall &c) { c.attention.struct_size = 1; }},
               {"gradients->struct_size", FA_ERROR_STRUCT_VERSION, [](RankCall &c) { c.gradients.struct_size = 1; }}};
  for (const auto &spoiled : cases) {
    Network network(2, 1);
    const Outcome outcome = run_ranks(data, cut_over(2), network, kSoon, [&](RankCall &call) {
      if (call.rank == 1) spoiled.spoil(call);
      call.run_all();
    });
    EXPECT_EQ(outcome.statuses[1], spoiled.status);
    EXPECT_NE(outcome.errors[1].find(spoiled.name), std::string::npos) << outcome.errors[1];
    EXPECT_EQ(outcome.statuses[0], FA_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(outcome.errors[0].find("rank 1 refuses"), std::string::npos) << outcome.errors[0];
    EXPECT_EQ(outcome.health[0], FA_OK);
  }
}

// Each field that is refused is named, and nothing is written or sent.
TEST(Query, NamesWhatIsRefused) {
  const Data data = parity::make_data(small_case("dist.fields"), nullptr, false);
  float number = 0;
  fa_tensor some{};
  some.data = &number;
  some.ndim = 1;
  some.shape[0] = some.stride[0] = 1;
  some.dtype = FA_FLOAT32;
  std::vector<float> of_bias[2];
  const struct {
    const char *name;
    fa_status status;
    std::function<void(RankCall &)> change;
  } cases[] = {{"cu_seqlens_q", FA_ERROR_INVALID_ARGUMENT, [&](RankCall &c) { c.attention.cu_seqlens_q = some; }},
               {"cu_seqlens_k", FA_ERROR_INVALID_ARGUMENT, [&](RankCall &c) { c.attention.cu_seqlens_k = some; }},
               {"seqused_q", FA_ERROR_INVALID_ARGUMENT, [&](RankCall &c) { c.attention.seqused_q = some; }},
               {"seqused_k", FA_ERROR_INVALID_ARGUMENT, [&](RankCall &c) { c.attention.seqused_k = some; }},
               {"max_seqlen_q", FA_ERROR_INVALID_ARGUMENT, [&](RankCall &c) { c.attention.max_seqlen_q = 5; }},
               {"max_seqlen_k", FA_ERROR_INVALID_ARGUMENT, [&](RankCall &c) { c.attention.max_seqlen_k = 5; }},
               {"mask", FA_ERROR_INVALID_ARGUMENT, [&](RankCall &c) { c.attention.mask = FA_MASK_NONE; }},
               {"window", FA_ERROR_INVALID_ARGUMENT, [&](RankCall &c) { c.attention.window = FA_WINDOW_LEFT; }},
               {"page_table", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.page_table = some; }},
               {"bias.ndim", FA_ERROR_SHAPE, [&](RankCall &c) { c.attention.bias = some; }},
               {"bias.shape[0]", FA_ERROR_SHAPE, [&](RankCall &c) { give_bias(c, 1, 50), c.attention.bias.shape[0] = 2; }},
               {"bias.shape[1]", FA_ERROR_SHAPE, [&](RankCall &c) { give_bias(c, 3, 50); }},
               {"bias.shape[2]", FA_ERROR_SHAPE, [&](RankCall &c) { give_bias(c, 1, 50), c.attention.bias.shape[2] = 1; }},
               {"bias.shape[3] is 49; it must be at least 50 (keys of document 0)", FA_ERROR_SHAPE,
                [&](RankCall &c) { give_bias(c, 1, 49); }},
               {"bias.dtype", FA_ERROR_DTYPE, [&](RankCall &c) { give_bias(c, 1, 50), c.attention.bias.dtype = FA_INT32; }},
               {"plan with num_stages 1", FA_ERROR_UNSUPPORTED,
                [&](RankCall &c) { give_bias(c, 1, 50), c.gradients.dbias = c.attention.bias; }},
               {"dbias.data and bias.data", FA_ERROR_INVALID_ARGUMENT,
                [&](RankCall &c) {
                  give_bias(c, c.attention.q.shape[1], 50);
                  std::vector<float> &memory = of_bias[c.rank];
                  memory.resize(static_cast<size_t>(c.attention.q.shape[1] * c.attention.q.shape[0] * 50));
                  int64_t stride = 1;
                  for (int d = 3; d >= 0; stride *= c.attention.bias.shape[d--]) c.attention.bias.stride[d] = stride;
                  c.attention.bias.data = memory.data();
                  c.gradients.dbias = c.attention.bias;
                }},
               {"block_mask", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.block_mask = some; }},
               {"element_mask", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.element_mask = some; }},
               {"seqstart_k", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.seqstart_k = some; }},
               {"slices", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.slices = some; }},
               {"block_counts", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.block_counts = some; }},
               {"block_indices", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.block_indices = some; }},
               {"max_logit", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.max_logit = some; }},
               {"score", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.score = reinterpret_cast<fa_score>(&number); }},
               {"score", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.num_score_tensors = 1; }},
               {"k_descale", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.k_descale = some; }},
               {"dbias", FA_ERROR_INVALID_ARGUMENT, [&](RankCall &c) { c.gradients.dbias = some; }},
               {"FA_FLAG_SAME_BITS", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.flags = FA_FLAG_SAME_BITS; }},
               {"dropout_p", FA_ERROR_UNSUPPORTED, [&](RankCall &c) { c.attention.dropout_p = 0.5f; }},
               {"softcap", FA_ERROR_INVALID_ARGUMENT, [&](RankCall &c) { c.attention.softcap = -1; }},
               {"q.shape[1]", FA_ERROR_SHAPE, [&](RankCall &c) { c.attention.q.shape[1] = 2; }},
               {"k.ndim is 2", FA_ERROR_SHAPE, [&](RankCall &c) { c.attention.k.ndim = 2; }},
               {"out", FA_ERROR_INVALID_ARGUMENT, [&](RankCall &c) { c.attention.out = fa_tensor{}; }}};
  for (const auto &changed : cases) {
    Network network(2, 1);
    run_ranks(data, cut_over(2), network, kSoon, [&](RankCall &call) {
      changed.change(call);
      fa_dist_info info;
      fa_dist_info_init(&info, sizeof info);
      EXPECT_EQ(fa_dist_query(call.dist, call.layout, &call.attention, &call.gradients, &info), changed.status)
          << changed.name << ": " << fa_last_error(call.context);
      EXPECT_EQ(info.status, changed.status);
      EXPECT_NE(std::string(info.reason).find(changed.name), std::string::npos) << changed.name << ": " << info.reason;
      EXPECT_EQ(fa_dist_backward(call.dist, call.layout, &call.attention, &call.gradients, nullptr, 0, nullptr),
                changed.status);
    });
    EXPECT_EQ(network.calls(0) + network.calls(1), 0);
  }
}

// Ranks compute rows of others by all-to-all, and have no bias of these.
TEST(Query, RefusesABiasOfCutDocumentsByHeads) {
  const Data data = parity::make_data(small_case("dist.bias"), nullptr, false);
  Network network(2, 1);
  const Outcome outcome = run_ranks(data, cut_over(2, FA_DIST_ALL_TO_ALL), network, kSoon, [&](RankCall &call) {
    give_bias(call, 1, 50);
    call.run_all();
  });
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(outcome.statuses[r], FA_ERROR_UNSUPPORTED);
    EXPECT_NE(outcome.errors[r].find("bias is given, document 0 is cut over ranks"), std::string::npos) << outcome.errors[r];
  }
}

// Dropout needs cuts at blocks of the random bits. Every rank finds the same cut that is none, whoever has its rows.
TEST(Query, NamesTheCutThatDropoutCannotHave) {
  Case c = small_case("dist.dropout");
  c.q.slots = c.k.slots = {32, 96};
  c.heads_q = c.heads_k = 3;
  c.dropout = 0.5;
  c.sink = 0;
  const Data data = parity::make_data(c, nullptr, false);
  const struct {
    fa_dist_way way;
    uint32_t flags;
    const char *text;
  } cases[] = {{FA_DIST_GATHER, 0, "dropout_p is 0.5 and document 0 is cut at row 5;"},
               {FA_DIST_RING, FA_DIST_CONTIGUOUS, "dropout_p is 0.5 and document 1 is cut at row 10;"},
               {FA_DIST_ALL_TO_ALL, 0, ""}};
  for (const auto &one : cases) {
    Cut cut = cut_over(3, one.way);
    cut.flags = one.flags;
    Network network(3, 1);
    const Outcome outcome = run_ranks(data, cut, network, kSoon);
    for (size_t r = 0; r < 3; ++r) {
      const bool works = one.way == FA_DIST_ALL_TO_ALL;
      EXPECT_EQ(outcome.statuses[r], works ? FA_OK : FA_ERROR_UNSUPPORTED) << outcome.errors[r];
      EXPECT_NE(outcome.errors[r].find(one.text), std::string::npos) << outcome.errors[r];
      EXPECT_EQ(outcome.health[r], FA_OK);
    }
  }
}

// The transport of one rank fails at its n-th call, for every n: every rank returns, and the failing one says so from then on.
TEST(Transport, MayFailAtAnyCall) {
  Case c = small_case("dist.fail");
  c.heads_q = c.heads_k = 3;
  const Data data = parity::make_data(c, nullptr, false);
  for (const fa_dist_way way : {FA_DIST_GATHER, FA_DIST_RING, FA_DIST_ALL_TO_ALL}) {
    Network whole(3, 1);
    run_ranks(data, cut_over(3, way), whole, kSoon);
    const int64_t calls = whole.calls(1);
    ASSERT_GT(calls, 6);
    for (int64_t n = 0; n < calls; ++n) {
      Network network(3, static_cast<uint64_t>(n));
      network.fail_at(1, n);
      const Outcome outcome = run_ranks(data, cut_over(3, way), network, kSoon);
      EXPECT_EQ(outcome.statuses[1], FA_ERROR_TRANSPORT);
      EXPECT_NE(outcome.errors[1].find("failed with status 7"), std::string::npos) << outcome.errors[1];
      for (size_t r = 0; r < 3; ++r) {
        EXPECT_TRUE(outcome.statuses[r] == FA_OK || outcome.statuses[r] == FA_ERROR_TRANSPORT) << outcome.errors[r];
        EXPECT_EQ(outcome.health[r], FA_ERROR_TRANSPORT);
      }
      EXPECT_EQ(network.fault(), "");
    }
  }
}

// A rank that never calls: the others come back after their time-out.
TEST(Transport, DeadRankTimesOut) {
  const Data data = parity::make_data(small_case("dist.dead"), nullptr, false);
  Network network(3, 1);
  const Outcome outcome = run_ranks(data, cut_over(3), network, 100, [](RankCall &call) {
    if (call.rank == 0) return;
    call.run_all();
  });
  for (size_t r = 1; r < 3; ++r) {
    EXPECT_EQ(outcome.statuses[r], FA_ERROR_TRANSPORT);
    EXPECT_NE(outcome.errors[r].find("transport.wait failed"), std::string::npos) << outcome.errors[r];
  }
}

// A rank dies between preparing and forward, or between forward and backward.
TEST(Transport, RankDiesLater) {
  const Data data = parity::make_data(small_case("dist.dies"), nullptr, false);
  for (const int steps : {1, 2}) {
    Network network(4, 1);
    const Outcome outcome = run_ranks(data, cut_over(4), network, 300, [steps](RankCall &call) {
      if (call.rank != 3) return call.run_all();
      if (call.keep(fa_dist_prepare(call.dist, call.layout, &call.attention, &call.gradients)) && steps == 2) {
        call.keep(call.forward());
      }
    });
    for (size_t r = 0; r < 3; ++r) EXPECT_EQ(outcome.statuses[r], FA_ERROR_TRANSPORT) << outcome.errors[r];
  }
}

// fa_dist_abort() from another thread ends a call that waits, on this rank and on the others.
TEST(Abort, EndsAWaitingCall) {
  const Data data = parity::make_data(small_case("dist.abort"), nullptr, false);
  Network network(2, 1);
  std::atomic<fa_dist> waiting{nullptr};
  const Outcome outcome = run_ranks(data, cut_over(2), network, kSoon, [&](RankCall &call) {
    if (call.rank == 0) {
      waiting = call.dist;
      call.run_all();
      EXPECT_EQ(fa_dist_forward(call.dist, call.layout, &call.attention, nullptr, 0, nullptr), FA_ERROR_TRANSPORT);
      return;
    }
    while (waiting.load() == nullptr || network.calls(0) < 2) std::this_thread::yield();
    EXPECT_EQ(fa_dist_status(waiting.load()), FA_OK);
    EXPECT_EQ(fa_dist_abort(waiting.load()), FA_OK);
    EXPECT_EQ(fa_dist_status(waiting.load()), FA_ERROR_TRANSPORT);
    EXPECT_NE(std::string(fa_last_error(nullptr)).find("fa_dist_abort"), std::string::npos) << fa_last_error(nullptr);
    call.run_all();  // the network is down for this rank, too
  });
  EXPECT_EQ(outcome.statuses[0], FA_ERROR_TRANSPORT);
  EXPECT_NE(outcome.errors[0].find("fa_dist_abort"), std::string::npos) << outcome.errors[0];
  EXPECT_EQ(outcome.statuses[1], FA_ERROR_TRANSPORT);
}

TEST(Create, RefusesWhatIsWrongByName) {
  const parity::Context context = parity::cpu_context(1);
  Network network(2, 1);
  const auto create = [&](const std::function<void(fa_dist_config &, fa_dist_transport &)> &spoil, void *nccl = nullptr) {
    fa_dist_transport transport = network.transport(0);
    fa_dist_config config;
    fa_dist_config_init(&config, sizeof config);
    config.transport = &transport;
    spoil(config, transport);
    fa_dist dist = nullptr;
    const fa_status status = fa_dist_create(&dist, context.get(), nccl, &config);
    EXPECT_EQ(dist != nullptr, status == FA_OK);
    fa_dist_destroy(dist);
    return std::pair(status, std::string(fa_last_error(context.get())));
  };
  int32_t communicator = 0;
  const auto expect = [](const std::pair<fa_status, std::string> &result, fa_status status, const char *name) {
    EXPECT_EQ(result.first, status) << result.second;
    EXPECT_NE(result.second.find(name), std::string::npos) << result.second;
  };
  expect(create([](auto &, auto &) {}), FA_OK, "");
  const auto without = [](auto &c, auto &) { c.transport = nullptr; };
  expect(create([](auto &, auto &) {}, &communicator), FA_ERROR_INVALID_ARGUMENT, "nccl_comm");
  expect(create(without), FA_ERROR_INVALID_ARGUMENT, "transport");
  expect(create(without, &communicator), FA_ERROR_NOT_BUILT, "has not loaded libnccl.so.2");
  expect(create([](auto &c, auto &) { c.timeout_ms = -1; }), FA_ERROR_INVALID_ARGUMENT, "timeout_ms");
  expect(create([](auto &c, auto &) { c.reserved = 1; }), FA_ERROR_INVALID_ARGUMENT, "reserved");
  expect(create([](auto &, auto &t) { t.rank = 2; }), FA_ERROR_INVALID_ARGUMENT, "transport.rank");
  expect(create([](auto &, auto &t) { t.num_ranks = 0; }), FA_ERROR_INVALID_ARGUMENT, "transport.num_ranks");
  expect(create([](auto &, auto &t) { t.exchange = nullptr; }), FA_ERROR_INVALID_ARGUMENT, "transport.exchange");
  expect(create([](auto &, auto &t) { t.wait = nullptr; }), FA_ERROR_INVALID_ARGUMENT, "transport.wait");
  expect(create([](auto &, auto &t) { t.abort = nullptr; }), FA_ERROR_INVALID_ARGUMENT, "transport.abort");
  expect(create([](auto &, auto &t) { t.struct_size = 3; }), FA_ERROR_STRUCT_VERSION, "transport");
  fa_dist_config config;
  fa_dist_config_init(&config, sizeof config);
  EXPECT_EQ(fa_dist_create(nullptr, context.get(), nullptr, &config), FA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fa_dist_status(nullptr), FA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fa_dist_abort(nullptr), FA_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fa_dist_forward(nullptr, nullptr, nullptr, nullptr, 0, nullptr), FA_ERROR_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace dist_test
