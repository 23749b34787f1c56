// SPDX-License-Identifier: Apache-2.0
// What a score text defines, and how kernels may read its tensors, without compiling it.
#include "core/score_text.h"

#include <gtest/gtest.h>

#include <string>

#include "core/score.h"

namespace fa {
namespace {

TEST(ScoreText, FindsTheFunctionsItDefines) {
  const ScoreTextInfo none = scan_score_text("int other(int x) { return score(x) + visible(x); }");
  EXPECT_FALSE(none.score || none.derivative || none.visible || none.tile);
  const ScoreTextInfo all = scan_score_text(
      "template <class real> real score(real s, const Position &p, const Aux &) { return s; }\n"
      "template <class real>\nreal derivative (real s, const Position &p, const Aux &) { return 1; }\n"
      "bool visible(const Position &p, const Aux &) { return p.i > p.j; }\n"
      "int tile(const Position &p, int, int, const Aux &) { return 0; }");
  EXPECT_TRUE(all.score && all.derivative && all.visible && all.tile);
  EXPECT_TRUE(all.masks_pairs());
  EXPECT_NE(all.id, none.id);
}

TEST(ScoreText, CommentsAndStringsDefineNothing) {
  const ScoreTextInfo info = scan_score_text(
      "// score(\n/* visible( p.h */ const char *x = \"tile(\\\" p.b\"; char y = '\"';\nint derivative_2(int);");
  EXPECT_FALSE(info.score || info.derivative || info.visible || info.tile || info.reads_head || info.reads_batch);
}

TEST(ScoreText, KnowsWhetherItMayDependOnSequenceAndHead) {
  const auto reads = [](const char *body) {
    const ScoreTextInfo info = scan_score_text(body);
    return std::pair(info.reads_batch, info.reads_head);
  };
  EXPECT_EQ(reads("bool visible(const Position &p, const Aux &) { return p.i + p.s_k > p.j; }"), std::pair(false, false));
  EXPECT_EQ(reads("bool visible(const Position &p, const Aux &) { return p.b > 0; }"), std::pair(true, false));
  EXPECT_EQ(reads("bool visible(const Position &p, const Aux &) { return (&p)->h > 0; }"), std::pair(false, true));
  EXPECT_EQ(reads("bool visible(const Position &p, const Aux &) { auto [b, h, i, j, q, k, m, n] = p; return h; }"),
            std::pair(true, true));
}

TEST(ScoreText, KnowsWhetherItIncludesFiles) {
  EXPECT_TRUE(scan_score_text("#include <cmath>\nint x;").includes);
  EXPECT_TRUE(scan_score_text("  #  include_next \"x.h\"").includes);
  EXPECT_FALSE(scan_score_text("// #include <cmath>\n#define include 3\n").includes);
}

TEST(ScoreText, KnowsTheTensorsItReadsByPair) {
  const auto read = [](const char *body) { return scan_score_text(body).read_by_pair; };
  EXPECT_EQ(read("float f(const Position &p, const Aux &aux) { return of_pair(aux, 0, p) + of_pair( aux,3 , p); }"), 9u);
  EXPECT_EQ(read("float f(const Position &p, const Aux &aux) { return element(aux, 1, p.i) + of_pair(aux, 8, p); }"), 0u);
  EXPECT_EQ(read("float f(const Position &p, const Aux &aux) { return of_pair(aux, n, p); } // of_pair(aux, 2, p)"), 0u);
  EXPECT_EQ(read("of_pair(aux,"), 0u);
}

TEST(ScoreText, KnowsWhetherItNamesInfinity) {
  EXPECT_TRUE(scan_score_text("float f() { return -std::numeric_limits<float>::infinity(); }").names_infinity);
  EXPECT_TRUE(scan_score_text("float f() { return -INFINITY; }").names_infinity);
  EXPECT_FALSE(scan_score_text("float f() { return infinity_2; } // infinity").names_infinity);
}

// A tensor of (1, 2, 64, 96) in a call with a text; what differs is changed by the cases.
struct TensorCase {
  std::string text =
      "template <class real> real score(real s, const Position &p, const Aux &aux) { return s + of_pair(aux, 0, p); }";
  Dtype operands = Dtype::bf16;
  fa_dtype dtype = FA_BFLOAT16;
  uint32_t access = FA_SCORE_BY_HEAD | FA_SCORE_BY_QUERY | FA_SCORE_BY_KEY;
  int64_t shape[4] = {1, 2, 64, 96}, stride[4] = {0, 6144, 96, 1};
  int64_t offset = 0;  // bytes

  ScoreCall call() const {
    alignas(16) static char memory[64];
    fa_attention attention;
    fa_attention_init(&attention, sizeof attention);
    fa_score_tensor tensor{};
    tensor.access = access;
    tensor.tensor.data = memory + offset;
    tensor.tensor.dtype = dtype;
    tensor.tensor.ndim = 4;
    std::copy_n(shape, 4, tensor.tensor.shape);
    std::copy_n(stride, 4, tensor.tensor.stride);
    attention.score_tensors = &tensor;
    attention.num_score_tensors = 1;
    fa_score_source source;
    fa_score_source_init(&source, sizeof source);
    source.text = text.c_str();
    MaskedProblem p;
    p.q.dtype = operands;
    p.batch = 1;
    p.heads_q = 2;
    p.q_lengths.max_len = 64;
    p.k_lengths.max_len = 96;
    ScoreCall result;
    result.text = scan_score_text(text);
    Pointers pointers;
    ErrorText error;
    EXPECT_EQ(normalise_score(attention, &source, p, result, pointers, error), FA_OK) << error.text;
    return result;
  }
};

TEST(ScoreText, FindsTheTensorThatKernelsStage) {
  const auto staged = [](const auto &change) {
    TensorCase c;
    change(c);
    return c.call().tile_tensor;
  };
  EXPECT_EQ(staged([](TensorCase &) {}), 0);
  EXPECT_EQ(staged([](TensorCase &c) { c.operands = Dtype::f16; }), -1);
  EXPECT_EQ(staged([](TensorCase &c) { c.operands = Dtype::f16, c.dtype = FA_FLOAT16; }), 0);
  EXPECT_EQ(staged([](TensorCase &c) { c.dtype = FA_FLOAT32; }), -1);
  EXPECT_EQ(staged([](TensorCase &c) { c.offset = 8; }), -1);
  EXPECT_EQ(staged([](TensorCase &c) { c.stride[2] = 100; }), -1);
  EXPECT_EQ(staged([](TensorCase &c) { c.stride[1] = -6144; }), -1);
  EXPECT_EQ(staged([](TensorCase &c) { c.stride[3] = 2; }), -1);
  EXPECT_EQ(staged([](TensorCase &c) { c.shape[2] = 1; }), 0);
  EXPECT_EQ(staged([](TensorCase &c) { c.shape[3] = 1; }), -1);
  EXPECT_EQ(staged([](TensorCase &c) { c.access = FA_SCORE_BY_ANY; }), -1);
  EXPECT_EQ(staged([](TensorCase &c) { c.access = FA_SCORE_BY_HEAD | FA_SCORE_BY_KEY, c.shape[2] = 1; }), -1);
  EXPECT_EQ(staged([](TensorCase &c) { c.text.replace(c.text.find("of_pair(aux, 0, p)"), 18, "element(aux, 0, 1)"); }), -1);
}

TEST(ScoreText, KnowsWhetherAScoreMayMask) {
  const auto masks = [](const auto &change) {
    TensorCase c;
    c.access = FA_SCORE_BY_HEAD;
    c.shape[2] = c.shape[3] = 1;
    change(c);
    return masks_by_score(c.call());
  };
  EXPECT_FALSE(masks([](TensorCase &) {}));
  EXPECT_TRUE(masks([](TensorCase &c) { c.access |= FA_SCORE_BY_QUERY, c.shape[2] = 64; }));
  EXPECT_TRUE(masks([](TensorCase &c) { c.access |= FA_SCORE_BY_KEY, c.shape[3] = 96; }));
  EXPECT_TRUE(masks([](TensorCase &c) { c.access = FA_SCORE_BY_ANY; }));
  EXPECT_FALSE(masks([](TensorCase &c) { c.access = FA_SCORE_BY_ANY, c.dtype = FA_INT32; }));
  EXPECT_TRUE(masks([](TensorCase &c) { c.text += " // INFINITY\nconst float x = -INFINITY;"; }));
  EXPECT_FALSE(masks([](TensorCase &c) {
    c.access = FA_SCORE_BY_ANY, c.text = "bool visible(const Position &p, const Aux &) { return p.i > p.j; }";
  }));
}

TEST(ScoreText, EndsAnywhere) {
  const std::string text =
      "template <class real> real score(real s, const Position &p) { /* x */ return \"a\\\"\"[p.h] + 'b'; } // end";
  for (size_t n = 0; n <= text.size(); ++n) scan_score_text(std::string_view(text).substr(0, n));
}

}  // namespace
}  // namespace fa
