// SPDX-License-Identifier: Apache-2.0
// What a score text defines, without compiling it.
#include "core/score_text.h"

#include <gtest/gtest.h>

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

TEST(ScoreText, EndsAnywhere) {
  const std::string text =
      "template <class real> real score(real s, const Position &p) { /* x */ return \"a\\\"\"[p.h] + 'b'; } // end";
  for (size_t n = 0; n <= text.size(); ++n) scan_score_text(std::string_view(text).substr(0, n));
}

}  // namespace
}  // namespace fa
