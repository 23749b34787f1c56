// SPDX-License-Identifier: Apache-2.0
// Runs problems of which one thing is wrong through every function that takes it.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "flashattn/flashattn.h"
#include "sample_problem.h"

namespace fa_test {

enum Calls : unsigned {
  kForward = 1,      // fa_forward
  kBackward = 2,     // fa_backward
  kAskForward = 4,   // fa_forward_query, fa_forward_prepare
  kAskBackward = 8,  // fa_backward_query, fa_backward_prepare
  kRuns = kForward | kBackward,
  kAnyForward = kForward | kAskForward,
  kAnyBackward = kBackward | kAskBackward,
  kAll = kAnyForward | kAnyBackward,
};

struct Misuse {
  std::string what;
  unsigned calls;
  fa_status status;
  std::vector<std::string> text;  // what the sentence must contain
  std::function<void(SampleProblem &)> apply;
  Layout layout = Layout::padded;
};

class MisusedProblem : public testing::Test {
 protected:
  void SetUp() override {
    fa_config config;
    fa_config_init(&config, sizeof config);
    config.device_type = FA_DEVICE_CPU;
    config.num_threads = 2;
    ASSERT_EQ(fa_create(&ctx_, &config), FA_OK);
  }
  void TearDown() override { fa_destroy(ctx_); }

  void check(const Misuse &misuse) {
    const auto call = [&](unsigned which, const char *function, auto &&run) {
      if (!(misuse.calls & which)) return;
      SampleProblem p(misuse.layout);
      misuse.apply(p);
      p.remember();
      const fa_status status = run(p);
      ++calls_;
      const std::string text = fa_last_error(ctx_);
      const std::string where =
          std::string(function) + ", " + misuse.what + ": " + fa_status_name(status) + ", \"" + text + "\"";
      EXPECT_EQ(status, misuse.status) << where;
      for (const std::string &part : misuse.text) EXPECT_NE(text.find(part), std::string::npos) << where << " lacks " << part;
      EXPECT_TRUE(p.untouched()) << where << " wrote to memory";
    };
    const auto query = [&](SampleProblem &p, bool backward) {
      fa_plan_info info;
      fa_plan_info_init(&info, sizeof info);
      const fa_status status =
          backward ? fa_backward_query(ctx_, &p.attention, &p.gradients, &info) : fa_forward_query(ctx_, &p.attention, &info);
      EXPECT_EQ(info.status, status);
      EXPECT_STREQ(info.kernel, "");
      EXPECT_EQ(std::string(info.reason), std::string(fa_last_error(ctx_)));
      return status;
    };
    call(kAskForward, "fa_forward_query", [&](SampleProblem &p) { return query(p, false); });
    call(kAskBackward, "fa_backward_query", [&](SampleProblem &p) { return query(p, true); });
    call(kAskForward, "fa_forward_prepare", [&](SampleProblem &p) { return fa_forward_prepare(ctx_, &p.attention); });
    call(kAskBackward, "fa_backward_prepare",
         [&](SampleProblem &p) { return fa_backward_prepare(ctx_, &p.attention, &p.gradients); });
    call(kForward, "fa_forward", [&](SampleProblem &p) { return fa_forward(ctx_, &p.attention, nullptr, 0, nullptr); });
    call(kBackward, "fa_backward",
         [&](SampleProblem &p) { return fa_backward(ctx_, &p.attention, &p.gradients, nullptr, 0, nullptr); });
  }

  void check_all(const std::vector<Misuse> &cases) {
    for (const Misuse &misuse : cases) check(misuse);
    std::printf("misuse: %zu cases, %d calls\n", cases.size(), calls_);
  }

  fa_context ctx_ = nullptr;
  int calls_ = 0;
};

}  // namespace fa_test
