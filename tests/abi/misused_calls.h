// SPDX-License-Identifier: Apache-2.0
// Runs functions of which one argument is wrong, and has valid arguments for them.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "flashattn/flashattn.h"
#include "sample_problem.h"

namespace fa_test {

// Of functions of the library, with something wrong.
inline int misused_calls = 0;

// `text` is what fa_last_error says; every part must be in it.
inline void expect_refusal(fa_status status, fa_status expected, const char *text, const std::vector<std::string> &parts) {
  ++misused_calls;
  EXPECT_EQ(status, expected) << fa_status_name(status) << " instead of " << fa_status_name(expected) << ": " << text;
  for (const std::string &part : parts) EXPECT_NE(std::string(text).find(part), std::string::npos) << text << " lacks " << part;
}

class Calls : public testing::Test {
 protected:
  void SetUp() override {
    fa_config config;
    fa_config_init(&config, sizeof config);
    config.device_type = FA_DEVICE_CPU;
    config.num_threads = 1;
    ASSERT_EQ(fa_create(&ctx_, &config), FA_OK);
  }
  void TearDown() override { fa_destroy(ctx_); }

  fa_context ctx_ = nullptr;
};

// Two parts of a result and where to combine them.
struct SampleMerge {
  SampleProblem memory{Layout::padded};
  fa_tensor out_parts[2] = {memory.floats({2, 5, 4, 6}), memory.floats({2, 5, 4, 6})};
  fa_tensor lse_parts[2] = {memory.floats({2, 4, 5}), memory.floats({2, 4, 5})};
  fa_merge_problem merge;

  SampleMerge() {
    fa_merge_problem_init(&merge, sizeof merge);
    merge.num_parts = 2;
    merge.out_parts = out_parts;
    merge.lse_parts = lse_parts;
    merge.out = memory.floats({2, 5, 4, 6});
    merge.lse = memory.floats({2, 4, 5});
    memory.remember();
  }
};

// A plain problem and its tangents.
struct SampleJvp {
  SampleProblem memory{Layout::padded};
  fa_attention attention;
  fa_jvp jvp;

  SampleJvp() {
    fa_attention_init(&attention, sizeof attention);
    const fa_attention &a = memory.attention;
    attention.q = a.q, attention.k = a.k, attention.v = a.v, attention.out = a.out, attention.lse = a.lse;
    fa_jvp_init(&jvp, sizeof jvp);
    const fa_gradients &g = memory.gradients;
    jvp.tq = g.dq, jvp.tk = g.dk, jvp.tv = g.dv, jvp.tout = g.dout, jvp.tlse = g.dlse;
  }
};

// A minimal call of fa_append_kv in memory of `p`.
inline fa_append sample_append(SampleProblem &p) {
  fa_append append;
  fa_append_init(&append, sizeof append);
  append.k = p.floats({2, 3, 2, 8});
  append.k_cache = p.floats({2, 9, 2, 8});
  p.remember();
  return append;
}

}  // namespace fa_test
