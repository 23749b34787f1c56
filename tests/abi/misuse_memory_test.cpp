// SPDX-License-Identifier: Apache-2.0
// Tensors that share memory, interleave, or have no elements.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "flashattn/flashattn.h"
#include "misused_problem.h"
#include "sample_problem.h"

namespace fa_test {
namespace {

// Outputs that begin inside another tensor, by whichever name.
TEST_F(MisusedProblem, OutputsMovedIntoOtherTensors) {
  std::vector<Misuse> cases;
  const auto moved = [&](const char *output, fa_tensor &(*to)(SampleProblem &), const char *other,
                         fa_tensor &(*from)(SampleProblem &), int64_t bytes, unsigned calls, Layout layout = Layout::padded) {
    cases.push_back({std::string(output) + " inside " + other,
                     calls,
                     FA_ERROR_INVALID_ARGUMENT,
                     {std::string(output) + ".data and " + other + ".data", "own memory"},
                     [=](SampleProblem &p) { to(p).data = static_cast<char *>(from(p).data) + bytes; },
                     layout});
  };
  using P = SampleProblem;
  const auto q = [](P &p) -> fa_tensor & { return p.attention.q; };
  const auto k = [](P &p) -> fa_tensor & { return p.attention.k; };
  const auto v = [](P &p) -> fa_tensor & { return p.attention.v; };
  const auto out = [](P &p) -> fa_tensor & { return p.attention.out; };
  const auto lse = [](P &p) -> fa_tensor & { return p.attention.lse; };
  const auto used = [](P &p) -> fa_tensor & { return p.attention.seqused_k; };
  const auto blocks = [](P &p) -> fa_tensor & { return p.attention.block_mask; };
  const auto cu = [](P &p) -> fa_tensor & { return p.attention.cu_seqlens_k; };
  const auto pages = [](P &p) -> fa_tensor & { return p.attention.page_table; };
  const auto bias = [](P &p) -> fa_tensor & { return p.attention.bias; };
  const auto slopes = [](P &p) -> fa_tensor & { return p.attention.alibi_slopes; };
  const auto dout = [](P &p) -> fa_tensor & { return p.gradients.dout; };
  const auto dq = [](P &p) -> fa_tensor & { return p.gradients.dq; };
  const auto dk = [](P &p) -> fa_tensor & { return p.gradients.dk; };
  const auto dv = [](P &p) -> fa_tensor & { return p.gradients.dv; };
  const auto dbias = [](P &p) -> fa_tensor & { return p.gradients.dbias; };
  const auto dsink = [](P &p) -> fa_tensor & { return p.gradients.dsink; };
  const auto elements = [](P &p) -> fa_tensor & { return p.attention.element_mask; };
  const auto starts = [](P &p) -> fa_tensor & { return p.attention.seqstart_k; };
  const auto slices = [](P &p) -> fa_tensor & { return p.attention.slices; };
  const auto counts = [](P &p) -> fa_tensor & { return p.attention.block_counts; };
  const auto indices = [](P &p) -> fa_tensor & { return p.attention.block_indices; };
  const auto largest = [](P &p) -> fa_tensor & { return p.attention.max_logit; };
  moved("lse", lse, "element_mask", elements, 16, kAnyForward);
  moved("lse", lse, "seqstart_k", starts, 0, kAnyForward);
  moved("out", out, "slices", slices, 8, kAnyForward);
  moved("lse", lse, "block_counts", counts, 4, kAnyForward);
  moved("lse", lse, "block_indices", indices, 4, kAnyForward);
  moved("lse", lse, "max_logit", largest, 4, kAnyForward);
  moved("max_logit", largest, "q", q, 4, kAnyForward);
  moved("max_logit", largest, "element_mask", elements, 4, kAnyForward);
  moved("dq", dq, "element_mask", elements, 4, kAnyBackward);
  moved("dk", dk, "slices", slices, 4, kAnyBackward);
  moved("dv", dv, "block_indices", indices, 0, kAnyBackward);
  moved("dsink", dsink, "block_counts", counts, 4, kAnyBackward);
  moved("dsink", dsink, "seqstart_k", starts, 4, kAnyBackward);
  moved("out", out, "q", q, 8, kAnyForward);
  moved("out", out, "k", k, 8, kAnyForward);
  moved("out", out, "v", v, 8, kAnyForward);
  moved("out", out, "v", v, -8, kAnyForward);
  moved("lse", lse, "bias", bias, 100, kAnyForward);
  moved("lse", lse, "out", out, 100, 0);
  moved("out", out, "lse", lse, 100, kAnyForward);
  moved("lse", lse, "block_mask", blocks, 0, kAnyForward);
  moved("lse", lse, "alibi_slopes", slopes, 4, kAnyForward);
  moved("lse", lse, "cu_seqlens_k", cu, 4, kAnyForward, Layout::packed);
  moved("lse", lse, "page_table", pages, 4, kAnyForward, Layout::paged);
  moved("lse", lse, "seqused_k", used, 4, kAnyForward);
  moved("dq", dq, "q", q, 8, kAnyBackward);
  moved("dk", dk, "out", out, 8, kAnyBackward);
  moved("dv", dv, "dout", dout, 8, kAnyBackward);
  moved("dq", dq, "dk", dk, 8, kAnyBackward);
  moved("dbias", dbias, "bias", bias, 8, kAnyBackward);
  moved("dsink", dsink, "lse", lse, 8, kAnyBackward);
  moved("dsink", dsink, "alibi_slopes", slopes, 8, kAnyBackward);
  check_all(cases);
  // Eight bits of a mask share a byte.
  const std::vector<Misuse> bits{{"lse in the last byte of bits",
                                  kAnyForward,
                                  FA_ERROR_INVALID_ARGUMENT,
                                  {"lse.data and element_mask.data"},
                                  [](SampleProblem &p) {
                                    fa_tensor &mask = p.attention.element_mask;
                                    mask.dtype = FA_BIT;
                                    mask.shape[0] = 1;
                                    mask.stride[2] = 8;
                                    p.attention.lse.data = static_cast<char *>(mask.data) + 4;
                                  },
                                  Layout::padded}};
  check_all(bits);
  SampleProblem beside(Layout::padded);
  beside.attention.element_mask.dtype = FA_BIT;
  beside.attention.element_mask.shape[0] = 1;
  beside.attention.element_mask.stride[2] = 8;
  beside.attention.lse.data = static_cast<char *>(beside.attention.element_mask.data) + 8;  // five rows of a byte, then room
  EXPECT_EQ(fa_forward(ctx_, &beside.attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  // Numbers that are given by address.
  SampleProblem p(Layout::padded);
  p.attention.dropout_offset_ptr = static_cast<const uint64_t *>(p.attention.out.data) + 1;
  p.remember();
  EXPECT_EQ(fa_forward(ctx_, &p.attention, nullptr, 0, nullptr), FA_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fa_last_error(ctx_)).find("out.data and dropout_offset_ptr"), std::string::npos) << fa_last_error(ctx_);
  EXPECT_TRUE(p.untouched());
}

// Slices of one allocation that interleave are legal: inputs and outputs of forward in one, gradients in another.
TEST_F(MisusedProblem, InterleavedViews) {
  SampleProblem plain(Layout::padded), views(Layout::padded);
  constexpr int64_t kDim = SampleProblem::kDim, kDimV = SampleProblem::kDimV;
  // As many keys as queries, so that they can share rows.
  for (SampleProblem *p : {&plain, &views}) {
    fa_attention &a = p->attention;
    fa_gradients &g = p->gradients;
    a.k = p->floats({2, 5, 2, kDim});
    a.v = p->floats({2, 5, 2, kDimV});
    g.dk = p->floats({2, 5, 2, kDim});
    g.dv = p->floats({2, 5, 2, kDimV});
    a.seqused_k = fa_tensor{};
    p->remove_score_tensors();
  }
  const auto slice = [](fa_tensor &t, const fa_tensor &whole, int64_t &first) {
    const fa_tensor before = t;
    t.data = static_cast<float *>(whole.data) + first;
    t.stride[0] = whole.stride[0];
    t.stride[1] = whole.stride[1];
    first += t.shape[2] * t.shape[3];
    for (int64_t row = 0; row < 10; ++row) {
      std::copy_n(static_cast<const float *>(before.data) + row * t.shape[2] * t.shape[3], t.shape[2] * t.shape[3],
                  static_cast<float *>(t.data) + row * t.stride[1]);
    }
  };
  fa_attention &a = views.attention;
  fa_gradients &g = views.gradients;
  const fa_tensor inputs = views.floats({2, 5, 4 * kDim + 2 * kDim + 2 * kDimV + 4 * kDimV}),
                  gradients = views.floats({2, 5, 4 * kDim + 2 * kDim + 2 * kDimV + 4 * kDimV});
  int64_t first = 0;
  for (fa_tensor *t : {&a.q, &a.k, &a.v, &a.out}) slice(*t, inputs, first);
  first = 0;
  for (fa_tensor *t : {&g.dq, &g.dk, &g.dv, &g.dout}) slice(*t, gradients, first);
  for (SampleProblem *p : {&plain, &views}) {
    ASSERT_EQ(fa_forward(ctx_, &p->attention, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
    ASSERT_EQ(fa_backward(ctx_, &p->attention, &p->gradients, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  }
  const auto same = [](const fa_tensor &x, const fa_tensor &y) {
    const int64_t columns = x.shape[2] * x.shape[3];
    for (int64_t row = 0; row < 10; ++row) {
      for (int64_t c = 0; c < columns; ++c) {
        ASSERT_EQ(static_cast<const float *>(x.data)[row * columns + c],
                  static_cast<const float *>(y.data)[row * y.stride[1] + c]);
      }
    }
  };
  same(plain.attention.out, a.out);
  same(plain.gradients.dq, g.dq);
  same(plain.gradients.dk, g.dk);
  same(plain.gradients.dv, g.dv);
}

// Sizes beside a 0 are not limited by memory; a call must not count to them.
TEST_F(MisusedProblem, ManyEmptySequencesTakeNoTime) {
  SampleProblem p(Layout::padded);
  fa_attention a;
  fa_gradients g;
  fa_attention_init(&a, sizeof a);
  fa_gradients_init(&g, sizeof g);
  const int64_t batch = int64_t{1} << 37;
  const auto empty = [&](int64_t dim) {
    fa_tensor t = p.floats({1, 1, 4, dim});
    t.shape[0] = batch;
    t.shape[1] = 0;
    return t;
  };
  a.q = empty(8);
  a.k = empty(8);
  a.v = empty(6);
  a.out = empty(6);
  a.lse = p.floats({1, 4, 1});
  a.lse.shape[0] = batch;
  a.lse.shape[2] = 0;
  g.dout = empty(6);
  g.dq = empty(8);
  g.dk = empty(8);
  g.dv = empty(6);
  p.remember();
  EXPECT_EQ(fa_forward(ctx_, &a, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  EXPECT_EQ(fa_backward(ctx_, &a, &g, nullptr, 0, nullptr), FA_OK) << fa_last_error(ctx_);
  EXPECT_TRUE(p.untouched());
}

// Tensors without elements may have any strides: NumPy gives zeros, other programs leave them unset.
TEST_F(MisusedProblem, TensorsWithoutElementsMayHaveAnyStrides) {
  for (const int64_t stride : {int64_t{0}, int64_t{-3}, INT64_MAX}) {
    for (const bool no_batch : {false, true}) {
      SampleProblem p(Layout::padded);
      fa_attention a;
      fa_gradients g;
      fa_attention_init(&a, sizeof a);
      fa_gradients_init(&g, sizeof g);
      const auto empty = [&](std::initializer_list<int64_t> shape, int rows) {
        fa_tensor t = p.floats(shape);
        t.shape[no_batch ? 0 : rows] = 0;
        std::fill_n(t.stride, 4, stride);
        return t;
      };
      a.q = empty({2, 5, 4, 8}, 1);
      a.k = empty({2, 7, 2, 8}, 1);
      a.v = empty({2, 7, 2, 6}, 1);
      a.out = empty({2, 5, 4, 6}, 1);
      a.lse = empty({2, 4, 5}, 2);
      a.bias = empty({1, 4, 5, 7}, 2);
      if (no_batch) a.bias.shape[0] = 0;
      g.dout = empty({2, 5, 4, 6}, 1);
      g.dq = empty({2, 5, 4, 8}, 1);
      g.dk = empty({2, 7, 2, 8}, 1);
      g.dv = empty({2, 7, 2, 6}, 1);
      if (!no_batch) a.bias.shape[3] = 0;
      g.dbias = a.bias;
      g.dbias.data = g.dq.data;
      p.remember();
      EXPECT_EQ(fa_forward(ctx_, &a, nullptr, 0, nullptr), FA_OK) << stride << ": " << fa_last_error(ctx_);
      EXPECT_EQ(fa_backward(ctx_, &a, &g, nullptr, 0, nullptr), FA_OK) << stride << ": " << fa_last_error(ctx_);
      EXPECT_TRUE(p.untouched());
    }
  }
}

}  // namespace
}  // namespace fa_test
