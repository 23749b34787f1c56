// SPDX-License-Identifier: Apache-2.0
// The NCCL transport with a library of NCCL's name that works in host memory (fake_nccl.cpp): what it finds, and what comes
// back when NCCL fails. Results over it are those of results_test.cpp with FA_TEST_DIST=cpu-nccl.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "dist/nccl_for_tests.h"
#include "dist/ranks.h"
#include "parity/cpu_context.h"

namespace dist_test {
namespace {

using parity::Case;
using parity::Data;

void set(void *communicator, const char *what, int value) {
  NcclForTests::instance().function<void (*)(void *, const char *, int)>("fake_nccl_set")(communicator, what, value);
}

// Communicators of one test alone.
std::vector<void *> make_communicators(int ranks) {
  std::vector<void *> all(static_cast<size_t>(ranks));
  NcclForTests::instance().function<int (*)(void **, int, const int *)>("ncclCommInitAll")(all.data(), ranks, nullptr);
  return all;
}

class Nccl : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!NcclForTests::instance().found()) GTEST_SKIP() << "FA_TEST_NCCL does not name the library of fake_nccl.cpp";
  }

  fa_status create(void *communicator, void *library, fa_dist *out = nullptr) {
    fa_dist_config config;
    fa_dist_config_init(&config, sizeof config);
    config.nccl_library = library;
    fa_dist dist = nullptr;
    const fa_status status = fa_dist_create(&dist, context_.get(), communicator, &config);
    text_ = fa_last_error(context_.get());
    if (out != nullptr) {
      *out = dist;
    } else {
      fa_dist_destroy(dist);
    }
    return status;
  }
  bool text_has(const char *part) const { return text_.find(part) != std::string::npos; }

  const parity::Context context_ = parity::cpu_context(1);
  std::string text_;
};

Case cut_case(const char *name) {
  Case c = parity::grouped_case(name, FA_FLOAT32, 0, 0);
  c.mask = FA_MASK_CAUSAL;
  c.batch = 1;
  c.head_dim = c.head_dim_v = 8;
  c.q.packed = c.k.packed = 1;
  c.q.slots = c.k.slots = {61};
  return c;
}

// Runs `body` on two ranks that have these communicators.
Outcome run_over(const std::vector<void *> &communicators, const std::function<void(RankCall &)> &body,
                 int64_t timeout_ms = 0) {
  Cut cut;
  cut.ranks = 2;
  cut.stages = 2;
  cut.place.nccl = true;
  cut.communicators = communicators;
  const Data data = parity::make_data(cut_case("dist.nccl"), nullptr, false);
  Network unused(2, 1);
  return run_ranks(data, cut, unused, timeout_ms, body);
}

TEST_F(Nccl, IsFoundByHandleAndByName) {
  const std::vector<void *> comms = make_communicators(2);
  EXPECT_EQ(create(comms[1], NcclForTests::instance().library()), FA_OK) << text_;
  EXPECT_EQ(create(comms[1], nullptr), FA_OK) << text_;  // the process has loaded a libnccl.so.2
}

TEST_F(Nccl, RefusesByName) {
  const std::vector<void *> comms = make_communicators(2);
  void *other = dlopen("libm.so.6", RTLD_NOW);
  ASSERT_NE(other, nullptr);
  EXPECT_EQ(create(comms[0], other), FA_ERROR_NOT_BUILT);
  EXPECT_TRUE(text_has("nccl_library") && text_has("ncclCommAbort")) << text_;
  dlclose(other);
  set(comms[0], "device", 3);
  EXPECT_EQ(create(comms[0], nullptr), FA_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(text_has("device 3") && text_has("CPU context")) << text_;
  EXPECT_EQ(create(nullptr, NcclForTests::instance().library()), FA_ERROR_INVALID_ARGUMENT);
}

TEST_F(Nccl, NonBlockingCommunicatorsGiveTheSameResults) {
  const std::vector<void *> comms = make_communicators(2);
  for (void *comm : comms) set(comm, "non_blocking", 1);
  Outcome outcome = run_over(comms, nullptr);
  EXPECT_EQ(verify(parity::make_data(cut_case("dist.nccl")), outcome), "");
}

// Each of the groups of prepare (1), forward (2) and backward (4) fails once. The rank says what NCCL says; the other one ends
// by its abort.
TEST_F(Nccl, FailuresComeBack) {
  for (int n = 0; n < 7; ++n) {
    const std::vector<void *> comms = make_communicators(2);
    set(comms[1], "fail_at", n);
    const Outcome outcome = run_over(comms, [&](RankCall &call) {
      call.run_all();
      EXPECT_EQ(call.status, FA_ERROR_TRANSPORT) << n;
      if (call.rank == 0) return;
      EXPECT_NE(call.error.find("unhandled system error"), std::string::npos) << call.error;
      EXPECT_EQ(call.forward(), FA_ERROR_TRANSPORT);
      EXPECT_EQ(fa_dist_status(call.dist), FA_ERROR_TRANSPORT);
      NcclForTests::instance().function<int (*)(void *)>("ncclCommAbort")(comms[0]);  // what a watchdog does
    });
    EXPECT_EQ(outcome.health[1], FA_ERROR_TRANSPORT);
  }
}

TEST_F(Nccl, StatusTellsErrorsOfEarlierOperations) {
  const std::vector<void *> comms = make_communicators(2);
  run_over(comms, [&](RankCall &call) {
    call.run_all();
    EXPECT_EQ(call.status, FA_OK) << call.error;
    EXPECT_EQ(fa_dist_status(call.dist), FA_OK);
    if (call.rank == 0) set(comms[0], "async_error", 6);
    EXPECT_EQ(fa_dist_status(call.dist) == FA_OK, call.rank == 1);
    if (call.rank == 0) {
      EXPECT_NE(std::string(fa_last_error(nullptr)).find("remote process"), std::string::npos) << fa_last_error(nullptr);
    }
  });
}

// A rank waits for one that never comes, and another thread ends that.
TEST_F(Nccl, AbortEndsACall) {
  for (const bool non_blocking : {false, true}) {
    const std::vector<void *> comms = make_communicators(2);
    for (void *comm : comms) set(comm, "non_blocking", non_blocking);
    run_over(comms, [&](RankCall &call) {
      if (!call.keep(fa_dist_prepare(call.dist, call.layout, &call.attention, nullptr))) return;
      if (call.rank == 1) return;
      std::thread watchdog([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        EXPECT_EQ(fa_dist_abort(call.dist), FA_OK);
        EXPECT_EQ(fa_dist_abort(call.dist), FA_OK);
      });
      EXPECT_EQ(call.forward(), FA_ERROR_TRANSPORT);
      EXPECT_NE(std::string(fa_last_error(call.context)).find("fa_dist_abort"), std::string::npos);
      watchdog.join();
      EXPECT_EQ(fa_dist_status(call.dist), FA_ERROR_TRANSPORT);
    });
  }
}

// On a non-blocking communicator the time-out ends it.
TEST_F(Nccl, TimeoutEndsACall) {
  const std::vector<void *> comms = make_communicators(2);
  set(comms[0], "non_blocking", 1);
  run_over(
      comms,
      [&](RankCall &call) {
        if (!call.keep(fa_dist_prepare(call.dist, call.layout, &call.attention, nullptr))) return;
        if (call.rank == 1) return;
        EXPECT_EQ(call.forward(), FA_ERROR_TRANSPORT);
        EXPECT_NE(std::string(fa_last_error(call.context)).find("in progress"), std::string::npos);
        fa_dist_abort(call.dist);
      },
      100);
}

}  // namespace
}  // namespace dist_test
