// SPDX-License-Identifier: Apache-2.0
// Long sequences against attention as whole matrices in fp64: the error is at most twice that of the same computation in the input
// dtype, plus the rounding of the output.
#include "gpu/unfused.h"

#include <cmath>

#include "gpu/attention.h"
#include "gpu/device.h"

namespace gpu {
namespace {

double unit_roundoff(fa_dtype dtype) { return std::ldexp(1.0, dtype == FA_BFLOAT16 ? -8 : dtype == FA_FLOAT16 ? -11 : -24); }

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  const auto add = [&](const char *name, int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim, auto vary) {
    Shape shape;
    shape.name = name;
    shape.seqlen_q = seqlen_q;
    shape.seqlen_k = seqlen_k;
    shape.head_dim = head_dim;
    vary(shape);
    all.push_back(shape);
  };
  const Mask causal{FA_MASK_CAUSAL}, top_left{FA_MASK_CAUSAL_TOP_LEFT};
  add("D64", 4096, 4096, 64, [](Shape &s) { s.batch = 2; });
  add("D64Causal16k", 16384, 16384, 64, [&](Shape &s) { s.mask = causal, s.layout = Layout::bhsd; });
  add("D64Window16k", 16384, 16384, 64, [](Shape &s) { s.mask = {FA_MASK_NONE, 300, 500}; });
  add("D128CausalGrouped8k", 8192, 8192, 128,
      [&](Shape &s) { s.heads_q = 8, s.heads_k = 2, s.mask = causal, s.layout = Layout::gaps; });
  add("D128Half16k", 16384, 16384, 128, [](Shape &s) { s.dtype = FA_FLOAT16, s.heads_q = s.heads_k = 1; });
  add("D128CausalMoreKeys", 4096, 16384, 128, [&](Shape &s) { s.mask = causal; });
  add("D128CausalFewerKeys", 8192, 4096, 128, [&](Shape &s) { s.mask = causal; });
  add("D128TopLeft", 4096, 8192, 128, [&](Shape &s) { s.mask = top_left, s.dtype = FA_FLOAT16; });
  add("D128CausalWindow16k", 16384, 16384, 128, [](Shape &s) { s.mask = {FA_MASK_CAUSAL, 1024, -1}; });
  // Windows in which no key is seen by all rows of a work tile, and windows whose ends lie in different KV tiles for each warpgroup.
  add("D64CausalWindow128", 8192, 8192, 64, [](Shape &s) { s.mask = {FA_MASK_CAUSAL, 128, -1}; });
  add("D128NarrowWindow", 7000, 7100, 128, [](Shape &s) { s.mask = {FA_MASK_NONE, 90, 60}; });
  add("D96CausalWindow", 5000, 5100, 96, [](Shape &s) { s.mask = {FA_MASK_CAUSAL, 777, -1}; });
  add("D256CausalWindowHalf", 4000, 4100, 256, [](Shape &s) { s.dtype = FA_FLOAT16, s.mask = {FA_MASK_CAUSAL, 500, -1}; });
  add("D128WindowOfPacked", 0, 0, 128, [](Shape &s) {
    s.heads_q = 4, s.mask = {FA_MASK_CAUSAL, 300, -1};
    s.slots_q = s.slots_k = {4096, 1, 3000, 0, 700};
    s.used_k = {4096, 1, 2900, 0, 650};
  });
  add("D128Decode", 1, 16384, 128, [](Shape &s) { s.heads_q = 8, s.batch = 2; });
  add("D128FewQueriesGrouped", 5, 12000, 128, [&](Shape &s) { s.heads_q = 8, s.mask = causal; });
  add("D256Causal", 4096, 4096, 256, [&](Shape &s) { s.heads_k = 1, s.mask = causal; });
  add("D256Half", 4096, 4096, 256, [](Shape &s) { s.dtype = FA_FLOAT16; });
  add("D96", 4096, 4096, 96, [](Shape &s) { s.layout = Layout::bhsd; });
  // More work tiles of the backward than SMs, and a part of a round left: its Q tiles are divided among all CTAs.
  add("D64SplitTail", 2100, 2100, 64, [](Shape &s) { s.heads_q = s.heads_k = 10; });
  add("D128SplitTail", 2100, 2100, 128, [](Shape &s) { s.heads_q = s.heads_k = 10, s.layout = Layout::bhsd; });
  add("D96HalfSplitTail", 3000, 2000, 96, [](Shape &s) { s.batch = 2, s.heads_q = s.heads_k = 5, s.dtype = FA_FLOAT16; });
  add("D80Odd", 4096, 4000, 80, [](Shape &s) { s.layout = Layout::odd; });
  add("D192With128Causal", 4096, 4096, 192, [&](Shape &s) { s.head_dim_v = 128, s.mask = causal; });
  add("D192", 4096, 4096, 192, [](Shape &) {});
  add("D512", 4096, 4096, 512, [&](Shape &s) { s.mask = causal; });
  add("Float32D64", 4096, 4096, 64, [](Shape &s) { s.dtype = FA_FLOAT32; });
  add("Float32D128Causal", 4096, 4096, 128, [&](Shape &s) { s.dtype = FA_FLOAT32, s.mask = causal, s.heads_k = 1; });
  add("Float32D80OddCausal", 4096, 4000, 80, [&](Shape &s) { s.dtype = FA_FLOAT32, s.mask = causal, s.layout = Layout::odd; });
  add("Float32D64Window8k", 8192, 8192, 64, [](Shape &s) { s.dtype = FA_FLOAT32, s.mask = {FA_MASK_NONE, 300, 500}; });
  add("Float32D192Causal", 4096, 4096, 192, [&](Shape &s) { s.dtype = FA_FLOAT32, s.mask = causal, s.heads_k = 1; });
  add("Float32D256Causal", 3000, 4096, 256, [&](Shape &s) { s.dtype = FA_FLOAT32, s.mask = causal; });
  add("Float32D256", 2048, 4096, 256, [](Shape &s) { s.dtype = FA_FLOAT32, s.layout = Layout::odd; });
  add("Packed", 0, 0, 128, [&](Shape &s) {
    s.heads_q = 4, s.mask = causal;
    s.slots_q = {4096, 1, 9000, 0, 3000};
    s.slots_k = {4096, 700, 9000, 64, 3000};
    s.used_k = {4096, 650, 8000, 64, 2999};
    s.used_q = {4000, 1, 9000, 0, 3000};
  });
  return all;
}

class Unfused : public OnGpu, public ::testing::WithParamInterface<Shape> {
 protected:
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    ASSERT_EQ(cublasCreate(&blas_), CUBLAS_STATUS_SUCCESS);
    ASSERT_EQ(cublasSetStream(blas_, stream_), CUBLAS_STATUS_SUCCESS);
  }
  void TearDown() override {
    if (blas_ != nullptr) cublasDestroy(blas_);
    OnGpu::TearDown();
  }

  cublasHandle_t blas_ = nullptr;
};

// Forward's and backward's results, by tensor.
struct AllErrors {
  Errors out, lse, dq, dk, dv;
};

AllErrors errors_of(const Attention &a, cublasHandle_t blas, cudaStream_t stream) {
  const Shape &s = a.shape();
  const double roundoff = unit_roundoff(s.dtype);
  const auto exact = exact_attention(blas, stream), unfused = unfused_attention(s.dtype, blas, stream);
  for (const auto *attention : {&exact, &unfused})
    (*attention)->reserve(a.q_side().longest, a.k_side().longest, s.head_dim, s.columns_v(), s.backward);
  AllErrors errors;
  for (int64_t b = 0; b < static_cast<int64_t>(a.q_side().slots.size()); ++b) {
    if (a.q_side().used[static_cast<size_t>(b)] == 0 || a.k_side().used[static_cast<size_t>(b)] == 0) continue;
    for (int64_t h_k = 0; h_k < s.heads_k; ++h_k) {
      for (const auto *attention : {&exact, &unfused})
        (*attention)->keys(a.matrix(a.k, a.k_side(), b, h_k), a.matrix(a.v, a.k_side(), b, h_k));
      HeadResults want, other;
      for (int64_t h = h_k * s.group(); h < (h_k + 1) * s.group(); ++h) {
        const Matrix q = a.matrix(a.q, a.q_side(), b, h);
        const Matrix dout = s.backward ? a.matrix(a.dout, a.q_side(), b, h) : Matrix{};
        want = exact->head(q, dout, s.mask, a.scale());
        other = unfused->head(q, dout, s.mask, a.scale());
        errors.out.add(compare(a.matrix(a.out, a.q_side(), b, h), other.out, want.out, roundoff, stream));
        errors.lse.add(compare(a.lse_of(b, h), other.lse, want.lse, unit_roundoff(FA_FLOAT32), stream));
        if (s.backward) errors.dq.add(compare(a.matrix(a.dq, a.q_side(), b, h), other.dq, want.dq, roundoff, stream));
      }
      if (!s.backward) continue;
      errors.dk.add(compare(a.matrix(a.dk, a.k_side(), b, h_k), other.dk, want.dk, roundoff, stream));
      errors.dv.add(compare(a.matrix(a.dv, a.k_side(), b, h_k), other.dv, want.dv, roundoff, stream));
    }
  }
  return errors;
}

// fp32 arithmetic in another order is granted a few units of the largest result, and the random walk of a sum of `terms` products;
// fp16 underflows gradually.
void expect_close(const char *name, const Errors &e, const Shape &s, int64_t terms) {
  const double units = 8 + static_cast<double>(s.head_dim) / 4 + std::sqrt(static_cast<double>(terms));
  const double fp32 = units * unit_roundoff(FA_FLOAT32) * std::max(1.0, e.exact_max);
  const double smallest = s.dtype == FA_FLOAT16 ? std::ldexp(1.0, -25) : 0;
  EXPECT_LE(e.excess, 2 * e.unfused_max + fp32 + smallest) << name << ", largest error beyond rounding";
  const double library = std::sqrt(e.library_square), unfused = std::sqrt(e.unfused_square);
  EXPECT_LE(library, 2 * unfused + (unit_roundoff(s.dtype) + fp32) * std::sqrt(e.exact_square))
      << name << ", norm of the error";
  EXPECT_GT(e.exact_square, 0) << name;
}

TEST_P(Unfused, AtMostTwiceTheError) {
  Attention attention(context_, stream_, GetParam());
  ASSERT_EQ(attention.forward(), "");
  if (!attention.refusal().empty()) GTEST_SKIP() << attention.refusal();
  ASSERT_EQ(attention.backward(), "");
  ASSERT_EQ(attention.refusal(), "");
  const AllErrors errors = errors_of(attention, blas_, stream_);
  // Queries see keys, keys see the queries of all heads of their group.
  const int64_t keys = attention.k_side().longest, queries = attention.q_side().longest * GetParam().group();
  expect_close("out", errors.out, GetParam(), keys);
  expect_close("dq", errors.dq, GetParam(), keys);
  expect_close("dk", errors.dk, GetParam(), queries);
  expect_close("dv", errors.dv, GetParam(), queries);
  // lse is fp32 whatever the inputs are: no unfused error to excuse it.
  const double logit_units = 8 + static_cast<double>(GetParam().head_dim) / 4;
  EXPECT_LE(errors.lse.excess, logit_units * unit_roundoff(FA_FLOAT32) * (1 + errors.lse.exact_max)) << "lse";
  EXPECT_EQ(attention.faults(), "");
}

INSTANTIATE_TEST_SUITE_P(Long, Unfused, ::testing::ValuesIn(shapes()),
                         [](const ::testing::TestParamInfo<Shape> &info) { return info.param.name; });

}  // namespace
}  // namespace gpu
