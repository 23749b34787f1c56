// SPDX-License-Identifier: Apache-2.0
// FA_FLAG_DETERMINISTIC: equal bits in every run, whatever the workspace and the outputs contain before. The problems are large enough that
// many CTAs run concurrently.
#include "gpu/attention.h"
#include "gpu/device.h"

namespace gpu {
namespace {

constexpr int kRuns = 30;

// Every backward kernel: dtypes, head dims, plain and general scores; causal, grouped heads and packed sequences one after another.
std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const fa_dtype dtype : {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16}) {
    for (const int64_t head_dim : {64, 96, 128, 192, 256, 320, 384, 512}) {
      for (const bool general : {false, true}) {
        Shape shape;
        shape.dtype = dtype;
        shape.flags = FA_FLAG_DETERMINISTIC;
        shape.head_dim = head_dim;
        shape.seqlen_q = dtype == FA_FLOAT32 ? 500 : 1500;
        shape.seqlen_k = dtype == FA_FLOAT32 ? 700 : 2000;
        shape.softcap = general ? 20 : 0;
        shape.dropout = general ? 0.1f : 0;
        shape.name = std::string(dtype == FA_FLOAT32   ? "Float32"
                                 : dtype == FA_FLOAT16 ? "Half"
                                                       : "Bfloat16") +
                     "D" + std::to_string(head_dim) + (general ? "General" : "");
        const auto add = [&](const char *variant, auto vary) {
          Shape varied = shape;
          varied.name += variant;
          vary(varied);
          all.push_back(varied);
        };
        add("Full", [](Shape &s) { s.batch = 2; });
        add("CausalGrouped", [](Shape &s) { s.mask = {FA_MASK_CAUSAL}, s.heads_q = 8; });
        if (!general && dtype != FA_FLOAT32) {  // Hopper has kernels for that alone
          add("Capped", [](Shape &s) { s.mask = {FA_MASK_CAUSAL}, s.heads_q = 8, s.softcap = 20; });
        }
        add("Packed", [](Shape &s) {
          s.mask = {FA_MASK_CAUSAL, 600, -1};
          s.heads_k = 1;
          s.slots_q = {s.seqlen_q, 1, 0, 333};
          s.slots_k = {s.seqlen_k, 700, 50, 333};
          s.used_k = {s.seqlen_k - 100, 700, 50, 300};
        });
      }
    }
  }
  // Large enough for kernels without a NaN-safe path under a mask.
  for (const int64_t head_dim : {64, 96, 128}) {
    Shape large;
    large.name = "LargeD" + std::to_string(head_dim) + "Causal";
    large.flags = FA_FLAG_DETERMINISTIC;
    large.head_dim = head_dim;
    large.heads_q = large.heads_k = 32;
    large.seqlen_q = 2100;
    large.seqlen_k = 2222;
    large.mask = {FA_MASK_CAUSAL};
    all.push_back(large);
  }
  // Many keys: work tiles add to dq in cyclic order.
  Shape cyclic;
  cyclic.name = "CyclicD128";
  cyclic.flags = FA_FLAG_DETERMINISTIC;
  cyclic.head_dim = 128;
  cyclic.heads_q = 8;
  cyclic.heads_k = 4;
  cyclic.seqlen_q = 2300;
  cyclic.seqlen_k = 5000;
  all.push_back(cyclic);
  return all;
}

class Determinism : public OnGpu, public ::testing::WithParamInterface<Shape> {};

TEST_P(Determinism, ThirtyRuns) {
  Attention attention(context_, stream_, GetParam());
  std::vector<uint64_t> first;
  for (int run = 0; run < kRuns; ++run) {
    attention.reset();
    ASSERT_EQ(attention.forward(), "");
    ASSERT_EQ(attention.backward(), "");
    if (!attention.refusal().empty()) GTEST_SKIP() << attention.refusal();
    if (run == 0) first = attention.hashes();
    ASSERT_EQ(attention.hashes(), first) << "run " << run << " of " << attention.kernel();
  }
  RecordProperty("kernel", attention.kernel());
  EXPECT_EQ(attention.faults(), "");
}

INSTANTIATE_TEST_SUITE_P(Every, Determinism, ::testing::ValuesIn(shapes()),
                         [](const ::testing::TestParamInfo<Shape> &info) { return info.param.name; });

}  // namespace
}  // namespace gpu
