// SPDX-License-Identifier: Apache-2.0
// Score functions misused: sources, handles, and the fields of a problem that go with them. The documented status, a sentence that names
// the argument and its value, and nothing written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "flashattn/flashattn.h"
#include "sample_problem.h"

namespace fa_test {
namespace {

float same(float s, const fa_score_position *, const fa_score_aux *) { return s; }
float one(float, const fa_score_position *, const fa_score_aux *) { return 1; }
int32_t all(const fa_score_position *, const fa_score_aux *) { return 1; }
fa_score_tile partial(const fa_score_position *, int64_t, int64_t, const fa_score_aux *) { return FA_SCORE_TILE_PARTIAL; }
void same_run(float *, float *derivative, const fa_score_position *, int64_t keys, const fa_score_aux *) {
  for (int64_t n = 0; derivative != nullptr && n < keys; ++n) derivative[n] = 1;
}

fa_context cpu_context() {
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CPU;
  config.num_threads = 1;
  fa_context ctx = nullptr;
  EXPECT_EQ(fa_create(&ctx, &config), FA_OK);
  return ctx;
}

fa_score_source valid_source() {
  fa_score_source source;
  fa_score_source_init(&source, sizeof source);
  source.score = same;
  source.derivative = one;
  return source;
}

class MisusedScore : public testing::Test {
 protected:
  void SetUp() override { ctx_ = cpu_context(); }
  void TearDown() override { fa_destroy(ctx_); }

  void expect_text(const std::string &where, const std::vector<std::string> &parts) {
    for (const std::string &part : parts) {
      EXPECT_NE(std::string(fa_last_error(ctx_)).find(part), std::string::npos)
          << where << ": " << fa_last_error(ctx_) << " lacks " << part;
    }
  }

  // All functions that take the problem refuse it, and write nothing.
  void expect_refusals(const std::string &where, SampleProblem &p, fa_status status, const std::vector<std::string> &text,
                       bool forward = true) {
    p.remember();
    fa_plan_info info;
    fa_plan_info_init(&info, sizeof info);
    const fa_attention *a = &p.attention;
    const fa_gradients *g = &p.gradients;
    const auto check = [&](fa_status got) {
      EXPECT_EQ(got, status) << where << ": " << fa_last_error(ctx_);
      expect_text(where, text);
    };
    if (forward) {
      check(fa_forward_query(ctx_, a, &info));
      EXPECT_EQ(info.status, status);
      EXPECT_STREQ(info.reason, fa_last_error(ctx_));
      check(fa_forward_prepare(ctx_, a));
      check(fa_forward(ctx_, a, nullptr, 0, nullptr));
    }
    check(fa_backward_query(ctx_, a, g, &info));
    EXPECT_EQ(info.status, status);
    check(fa_backward_prepare(ctx_, a, g));
    check(fa_backward(ctx_, a, g, nullptr, 0, nullptr));
    EXPECT_TRUE(p.untouched()) << where;
  }

  fa_score make(const fa_score_source &source) {
    fa_score score = nullptr;
    EXPECT_EQ(fa_score_create(ctx_, &source, &score), FA_OK) << fa_last_error(ctx_);
    return score;
  }

  fa_context ctx_ = nullptr;
};

TEST_F(MisusedScore, Sources) {
  const std::string longest(65536, ' '), too_long(65537, ' ');
  const char with_null[] = "a\0b";
  struct Case {
    const char *what;
    fa_status status;
    std::vector<std::string> text;
    std::function<void(fa_score_source &)> apply;
  };
  const Case cases[] = {
      {"reserved", FA_ERROR_INVALID_ARGUMENT, {"source.reserved", "7"}, [](fa_score_source &s) { s.reserved = 7; }},
      {"length of no text",
       FA_ERROR_INVALID_ARGUMENT,
       {"source.text_length", "5"},
       [](fa_score_source &s) { s.text_length = 5; }},
      {"empty text", FA_ERROR_INVALID_ARGUMENT, {"source.text", "empty"}, [](fa_score_source &s) { s.text = ""; }},
      {"long text",
       FA_ERROR_INVALID_ARGUMENT,
       {"source.text", "65536"},
       [&](fa_score_source &s) { s.text = too_long.c_str(); }},
      {"long length",
       FA_ERROR_INVALID_ARGUMENT,
       {"source.text_length", "65537", "65536"},
       [&](fa_score_source &s) { s.text = too_long.c_str(), s.text_length = 65537; }},
      {"absurd length",
       FA_ERROR_INVALID_ARGUMENT,
       {"source.text_length", "18446744073709551615"},
       [&](fa_score_source &s) { s.text = "a", s.text_length = UINT64_MAX; }},
      {"null in the text",
       FA_ERROR_INVALID_ARGUMENT,
       {"source.text", "null", "byte 1", "3"},
       [&](fa_score_source &s) { s.text = with_null, s.text_length = 3; }},
      {"derivative of nothing",
       FA_ERROR_INVALID_ARGUMENT,
       {"source.derivative", "source.score"},
       [](fa_score_source &s) { s.score = nullptr, s.visible = all; }},
      {"backward run of nothing",
       FA_ERROR_INVALID_ARGUMENT,
       {"source.run_backward", "source.score"},
       [](fa_score_source &s) { s.score = s.derivative = nullptr, s.run_backward = same_run, s.visible = all; }},
      {"nothing",
       FA_ERROR_INVALID_ARGUMENT,
       {"source", "neither"},
       [](fa_score_source &s) { s.score = s.derivative = nullptr; }},
      {"text alone on the CPU",
       FA_ERROR_INVALID_ARGUMENT,
       {"source.score", "NULL", "CPU"},
       [](fa_score_source &s) { s.score = s.derivative = nullptr, s.text = "text"; }},
      {"struct_size", FA_ERROR_STRUCT_VERSION, {"source", "struct_size", "8"}, [](fa_score_source &s) { s.struct_size = 8; }},
      {"no struct_size",
       FA_ERROR_STRUCT_VERSION,
       {"source", "struct_size", "0"},
       [](fa_score_source &s) { s.struct_size = 0; }},
  };
  for (const Case &c : cases) {
    fa_score_source source = valid_source();
    c.apply(source);
    fa_score score = reinterpret_cast<fa_score>(&source);
    EXPECT_EQ(fa_score_create(ctx_, &source, &score), c.status) << c.what << ": " << fa_last_error(ctx_);
    EXPECT_EQ(score, nullptr) << c.what;
    expect_text(c.what, c.text);
  }
  const fa_score_source source = valid_source();
  fa_score score = nullptr;
  EXPECT_EQ(fa_score_create(ctx_, nullptr, &score), FA_ERROR_INVALID_ARGUMENT);
  expect_text("no source", {"source", "NULL"});
  EXPECT_EQ(fa_score_create(ctx_, &source, nullptr), FA_ERROR_INVALID_ARGUMENT);
  expect_text("no out", {"out", "NULL"});
  EXPECT_EQ(fa_score_create(nullptr, &source, &score), FA_ERROR_INVALID_ARGUMENT);
  fa_score_destroy(nullptr);

  // What is at the limit is fine, and so is every function alone.
  std::vector<fa_score_source> fine(6, valid_source());
  fine[0].text = longest.c_str();
  fine[1].text = too_long.c_str(), fine[1].text_length = 65536;
  fine[2].derivative = nullptr;
  for (size_t n = 3; n < fine.size(); ++n) fine[n].score = fine[n].derivative = nullptr;
  fine[3].visible = all;
  fine[4].tile = partial;
  fine[5].run = same_run;
  for (const fa_score_source &s : fine) fa_score_destroy(make(s));
}

TEST_F(MisusedScore, Fields) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr int64_t kB = SampleProblem::kBatch, kH = SampleProblem::kHeadsQ, kQ = SampleProblem::kSeqQ,
                    kK = SampleProblem::kSeqK;
  constexpr uint32_t kAll = FA_SCORE_BY_BATCH | FA_SCORE_BY_HEAD | FA_SCORE_BY_QUERY | FA_SCORE_BY_KEY;
  struct Case {
    const char *what;
    fa_status status;
    std::vector<std::string> text;
    std::function<void(SampleProblem &, fa_score_tensor *)> apply;
  };
  const fa_status kArgument = FA_ERROR_INVALID_ARGUMENT;
  const auto shape = [](int d, int64_t size) {
    return [d, size](SampleProblem &, fa_score_tensor *t) { t[1].tensor.shape[d] = size; };
  };
  const std::vector<Case> cases = {
      {"tensors without score",
       kArgument,
       {"score_tensors", "score is NULL"},
       [](SampleProblem &p, auto *) { p.attention.score = nullptr; }},
      {"a number of tensors without score",
       kArgument,
       {"num_score_tensors 2", "score is NULL"},
       [](SampleProblem &p, auto *) { p.attention.score = nullptr, p.attention.score_tensors = nullptr; }},
      {"a scalar without score",
       kArgument,
       {"score_scalars[6]", "0.5", "score is NULL"},
       [](SampleProblem &p, auto *) {
         p.attention.score = nullptr, p.attention.score_tensors = nullptr, p.attention.num_score_tensors = 0;
         p.attention.score_scalars[6] = 0.5f;
       }},
      {"NaN without score",
       kArgument,
       {"score_scalars[0]", "nan", "score is NULL"},
       [&](SampleProblem &p, auto *) {
         p.attention.score = nullptr, p.attention.score_tensors = nullptr, p.attention.num_score_tensors = 0;
         p.attention.score_scalars[0] = nan;
       }},
      {"reserved",
       kArgument,
       {"attention.score_reserved", "9"},
       [](SampleProblem &p, auto *) { p.attention.score_reserved = 9; }},
      {"nine tensors",
       kArgument,
       {"num_score_tensors", "9", "8"},
       [](SampleProblem &p, auto *) { p.attention.num_score_tensors = 9; }},
      {"-1 tensors",
       kArgument,
       {"num_score_tensors", "-1"},
       [](SampleProblem &p, auto *) { p.attention.num_score_tensors = -1; }},
      {"no tensors",
       kArgument,
       {"score_tensors", "num_score_tensors", "2"},
       [](SampleProblem &p, auto *) { p.attention.score_tensors = nullptr; }},
      {"no number",
       kArgument,
       {"score_tensors", "num_score_tensors", "0"},
       [](SampleProblem &p, auto *) { p.attention.num_score_tensors = 0; }},
      {"tensor reserved", kArgument, {"score_tensors[1].reserved", "3"}, [](SampleProblem &, auto *t) { t[1].reserved = 3; }},
      {"unknown access", kArgument, {"score_tensors[1].access", "0x20"}, [](SampleProblem &, auto *t) { t[1].access = 32; }},
      {"any and more", kArgument, {"score_tensors[1].access", "0x11"}, [](SampleProblem &, auto *t) { t[1].access = 17; }},
      {"absent tensor",
       kArgument,
       {"score_tensors[1].tensor", "absent"},
       [](SampleProblem &, auto *t) { t[1].tensor = fa_tensor{}; }},
      {"no data",
       kArgument,
       {"score_tensors[1].tensor.data", "NULL"},
       [](SampleProblem &, auto *t) { t[1].tensor.data = nullptr; }},
      {"dtype",
       FA_ERROR_DTYPE,
       {"score_tensors[1].tensor.dtype", "0x00000007"},
       [](SampleProblem &, auto *t) { t[1].tensor.dtype = 7; }},
      {"ndim",
       FA_ERROR_SHAPE,
       {"score_tensors[1].tensor.ndim", "3", "4"},
       [](SampleProblem &, auto *t) { t[1].tensor.ndim = 3; }},
      {"impossible ndim of a table",
       FA_ERROR_SHAPE,
       {"score_tensors[0].tensor.ndim", "5"},
       [](SampleProblem &, auto *t) { t[0].tensor.ndim = 5; }},
      {"alignment",
       FA_ERROR_ALIGNMENT,
       {"score_tensors[1].tensor.data"},
       [](SampleProblem &, auto *t) { t[1].tensor.data = static_cast<char *>(t[1].tensor.data) + 2; }},
      {"batch", FA_ERROR_SHAPE, {"score_tensors[1].tensor.shape[0]", "3", "2", "batch"}, shape(0, 3)},
      {"heads", FA_ERROR_SHAPE, {"score_tensors[1].tensor.shape[1]", "2", "4", "heads_q"}, shape(1, 2)},
      {"queries", FA_ERROR_SHAPE, {"score_tensors[1].tensor.shape[2]", "7", "5", "seqlen_q"}, shape(2, 7)},
      {"keys", FA_ERROR_SHAPE, {"score_tensors[1].tensor.shape[3]", "5", "7", "seqlen_k"}, shape(3, 5)},
      {"a dimension without its bit",
       FA_ERROR_SHAPE,
       {"score_tensors[1].tensor.shape[2]", "5", "1", "access 0xb"},
       [](SampleProblem &, auto *t) { t[1].access &= ~uint32_t{FA_SCORE_BY_QUERY}; }},
      {"bits that are not adjacent",
       FA_ERROR_SHAPE,
       {"score_tensors[1].tensor.stride[3]", "2"},
       [](SampleProblem &, auto *t) { t[1].tensor.dtype = FA_BIT, t[1].tensor.stride[3] = 2; }},
      {"bits in reverse",
       FA_ERROR_SHAPE,
       {"score_tensors[1].tensor.stride[3]", "-1"},
       [](SampleProblem &, auto *t) { t[1].tensor.dtype = FA_BIT, t[1].tensor.stride[3] = -1; }},
      {"rows of bits within a byte",
       FA_ERROR_SHAPE,
       {"score_tensors[1].tensor.stride[0]", "140"},
       [](SampleProblem &, auto *t) { t[1].tensor.dtype = FA_BIT; }},
  };
  for (const Layout layout : {Layout::padded}) {
    for (const Case &c : cases) {
      SampleProblem p(layout);
      fa_score_tensor tensors[2] = {{p.floats({3}), FA_SCORE_BY_ANY, 0}, {p.floats({kB, kH, kQ, kK}), kAll, 0}};
      const fa_score score = make(valid_source());
      p.attention.score = score;
      p.attention.score_tensors = tensors;
      p.attention.num_score_tensors = 2;
      c.apply(p, tensors);
      expect_refusals(c.what, p, c.status, c.text);
      fa_score_destroy(score);
    }
  }
  // The sample itself is fine, and so are sizes of 1.
  SampleProblem p(Layout::padded);
  fa_score_tensor tensors[8] = {{p.floats({3}), FA_SCORE_BY_ANY, 0}, {p.floats({kB, kH, kQ, kK}), kAll, 0}};
  for (int n = 2; n < 8; ++n) tensors[n] = {p.floats({1, n % 2 == 0 ? kH : 1, 1, 1}), n % 2 == 0 ? kAll : 0u, 0};
  p.attention.score = make(valid_source());
  p.attention.score_tensors = tensors;
  p.attention.num_score_tensors = 8;
  p.attention.score_scalars[7] = nan;
  EXPECT_EQ(fa_forward(ctx_, &p.attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  EXPECT_EQ(fa_backward(ctx_, &p.attention, &p.gradients, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  fa_score_destroy(p.attention.score);
}

// No output may lie in a tensor of the function.
TEST_F(MisusedScore, Overlap) {
  const fa_score score = make(valid_source());
  const std::pair<const char *, std::function<fa_tensor(SampleProblem &)>> outputs[] = {
      {"out", [](SampleProblem &p) { return p.attention.out; }},
      {"lse", [](SampleProblem &p) { return p.attention.lse; }},
      {"max_logit", [](SampleProblem &p) { return p.attention.max_logit; }},
      {"dq", [](SampleProblem &p) { return p.gradients.dq; }},
      {"dk", [](SampleProblem &p) { return p.gradients.dk; }},
      {"dv", [](SampleProblem &p) { return p.gradients.dv; }},
      {"dbias", [](SampleProblem &p) { return p.gradients.dbias; }},
      {"dsink", [](SampleProblem &p) { return p.gradients.dsink; }}};
  for (const auto &[name, output] : outputs) {
    SampleProblem p(Layout::padded);
    fa_score_tensor tensor{output(p), FA_SCORE_BY_ANY, 0};
    p.attention.score = score;
    p.attention.score_tensors = &tensor;
    p.attention.num_score_tensors = 1;
    p.remember();
    const fa_status status = name[0] == 'd' ? fa_backward(ctx_, &p.attention, &p.gradients, nullptr, 0, nullptr)
                                            : fa_forward(ctx_, &p.attention, nullptr, 0, nullptr);
    EXPECT_EQ(status, FA_ERROR_INVALID_ARGUMENT) << name;
    expect_text(name, {std::string(name) + ".data", "score_tensors[0].tensor.data"});
    EXPECT_TRUE(p.untouched()) << name;
  }
  fa_score_destroy(score);
}

TEST_F(MisusedScore, Handles) {
  SampleProblem p(Layout::padded);
  fa_context other = cpu_context();
  const fa_score_source source = valid_source();
  fa_score of_other = nullptr;
  ASSERT_EQ(fa_score_create(other, &source, &of_other), FA_OK);
  p.attention.score = of_other;
  expect_refusals("another context", p, FA_ERROR_INVALID_ARGUMENT, {"score is 0x", "another context"});
  fa_destroy(other);
  expect_refusals("another context, destroyed", p, FA_ERROR_INVALID_ARGUMENT, {"score is 0x", "another context"});
  fa_context later = cpu_context();  // often at the same address
  EXPECT_EQ(fa_forward(later, &p.attention, nullptr, 0, nullptr), FA_ERROR_INVALID_ARGUMENT);
  fa_destroy(later);
  fa_score_destroy(of_other);
  uint64_t nothing[16] = {};
  p.attention.score = reinterpret_cast<fa_score>(nothing);
  expect_refusals("no handle", p, FA_ERROR_INVALID_ARGUMENT, {"score is 0x", "no score function"});
  fa_score_destroy(reinterpret_cast<fa_score>(nothing));  // no effect
}

// Backward has no derivative of its own to fall back to.
TEST_F(MisusedScore, NoDerivative) {
  for (const bool run : {false, true}) {
    fa_score_source source = valid_source();
    source.derivative = nullptr;
    if (run) source.score = nullptr, source.run = same_run;
    SampleProblem p(Layout::padded);
    p.attention.score = make(source);
    expect_refusals("no derivative", p, FA_ERROR_INVALID_ARGUMENT, {"score", "derivative", "run_backward", "NULL"}, false);
    EXPECT_EQ(fa_forward(ctx_, &p.attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
    fa_score_destroy(p.attention.score);
    // A mask needs none.
    source.score = nullptr;
    source.run = nullptr;
    source.visible = all;
    p.attention.score = make(source);
    EXPECT_EQ(fa_backward(ctx_, &p.attention, &p.gradients, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
    fa_score_destroy(p.attention.score);
  }
}

// A handle that is destroyed during a call serves the call to its end, whether by the function itself or by another thread.
TEST_F(MisusedScore, DestroyedInUse) {
  for (const bool by_thread : {false, true}) {
    struct User {
      fa_score score = nullptr;
      bool by_thread = false;
      int calls = 0;
    } user;
    user.by_thread = by_thread;
    fa_score_source source = valid_source();
    source.user = &user;
    source.score = [](float s, const fa_score_position *, const fa_score_aux *aux) {
      User &u = *static_cast<User *>(aux->user);
      if (u.calls++ == 0) {
        if (u.by_thread) {
          std::thread([&] { fa_score_destroy(u.score); }).join();
        } else {
          fa_score_destroy(u.score);
        }
      }
      return s;
    };
    SampleProblem p(Layout::padded), kept(Layout::padded);
    p.attention.score = user.score = make(source);
    EXPECT_EQ(fa_forward(ctx_, &p.attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
    EXPECT_GT(user.calls, 1);
    kept.attention.score = make(valid_source());
    EXPECT_EQ(fa_forward(ctx_, &kept.attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
    fa_score_destroy(kept.attention.score);
    EXPECT_TRUE(p.same_contents(kept));
  }
}

// The library keeps its own copy of the source.
TEST_F(MisusedScore, TheSourceIsCopied) {
  fa_score_source source = valid_source();
  std::string text = "some text";
  source.text = text.c_str();
  SampleProblem p(Layout::padded);
  p.attention.score = make(source);
  text.assign(text.size(), 'x');
  std::memset(static_cast<void *>(&source), 0x5A, sizeof source);
  EXPECT_EQ(fa_forward(ctx_, &p.attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  fa_score_destroy(p.attention.score);
}

}  // namespace
}  // namespace fa_test
