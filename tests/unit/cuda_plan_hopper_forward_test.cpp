// SPDX-License-Identifier: Apache-2.0
// Plans of the Hopper kernels, forward: which kernel a problem gets.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels/fwd_sm90/forward_table.h"
#include "cuda/kernels/fwd_sm90/transposed_v.h"
#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// Hopper kernels serve problems that TMA can read, unless other kernels split the keys or fill their rows with several heads. A build or a
// context without them uses the other kernels.
TEST(CudaPlanHopper, HopperKernels) {
  const auto family = [](const MaskedProblem &p, const Device &device = h200()) { return forward_plan(p, device).family; };
  MaskedProblem plain = problem(1000, 1000, 128);
  const ForwardPlan plan = forward_plan(plain, h200());
  EXPECT_EQ(plan.family, Family::sm90);
  EXPECT_EQ(plan.tiles, 6 * plain.heads_q * plain.batch);
  EXPECT_EQ(plan.blocks, std::min(plan.tiles, h200().multiprocessors)) << "persistent CTAs";
  EXPECT_EQ(plan.num_splits, 1);
  Device without = h200();
  without.sm90 = false;
  EXPECT_EQ(family(plain, without), Family::sm80);
  const std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> others = {
      {"bias of which the heads are in descending order", [](MaskedProblem &p) { set_bias(p), p.bias.head_stride = -8; }},
      {"rows that do not start on 16 bytes", [](MaskedProblem &p) { p.k.seq_stride = 129; }},
      {"rows that are not whole 16-byte vectors", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 127; }},
      {"more rows than it counts", [](MaskedProblem &p) { p.k_lengths.total = int64_t{1} << 32; }},
      {"head_dim 520", [](MaskedProblem &p) { p.head_dim = 520; }},
      {"a few queries, dropout", [](MaskedProblem &p) { p.q_lengths.max_len = 16, p.dropout.threshold = 6554; }},
  };
  for (const auto &[text, change] : others) {
    MaskedProblem p = plain;
    change(p);
    EXPECT_EQ(family(p), Family::sm80) << text;
  }
  // Problems that TMA cannot read or whose keys are split are for the extend kernels, if these have room for the columns.
  const std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> extending = {
      {"pages", [](MaskedProblem &p) { p.page_table = reinterpret_cast<const int32_t *>(&unreadable); }},
      {"pages, head_dim 256",
       [](MaskedProblem &p) {
         p.head_dim = p.head_dim_v = 256;
         p.page_table = reinterpret_cast<const int32_t *>(&unreadable);
       }},
      {"pages, head_dim 192, values of 128",
       [](MaskedProblem &p) {
         p.head_dim = 192, p.head_dim_v = 128;
         p.page_table = reinterpret_cast<const int32_t *>(&unreadable);
       }},
      {"splits", [](MaskedProblem &p) { p.num_splits = 2; }},
      {"batch-invariant", [](MaskedProblem &p) { p.batch_invariant = p.deterministic = true; }},
      {"a stride that TMA cannot express", [](MaskedProblem &p) { p.v.batch_stride = int64_t{1} << 40; }},
      {"few queries of heads that share keys", [](MaskedProblem &p) { p.q_lengths.max_len = 64, p.num_splits = 1; }},
      {"few blocks and many keys",
       [](MaskedProblem &p) { p.heads_q = p.heads_k = p.group = p.batch = 1, p.k_lengths.max_len = 4096; }},
  };
  for (const auto &[text, change] : extending) {
    MaskedProblem p = plain;
    change(p);
    EXPECT_EQ(family(p), Family::extend) << text;
    EXPECT_EQ(family(p, without), Family::sm80) << text;
  }
  const std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> ours = {
      {"softcap", [](MaskedProblem &p) { p.softcap = 30; }},
      {"ALiBi", [](MaskedProblem &p) { p.alibi_slopes = &unreadable; }},
      {"block mask", [](MaskedProblem &p) { set_block_mask(p, 128); }},
      {"blocks of 64", [](MaskedProblem &p) { set_block_mask(p, 64); }},
      {"blocks of 128, head_dim 256", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 256, set_block_mask(p, 128); }},
      {"blocks of 64, head_dim 256", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 256, set_block_mask(p, 64); }},
      {"element mask", [](MaskedProblem &p) { set_element_mask(p); }},
      {"left padding", [](MaskedProblem &p) { set_starts(p); }},
      {"slices", [](MaskedProblem &p) { set_slices(p); }},
      {"block lists", [](MaskedProblem &p) { set_block_lists(p); }},
      {"dropout", [](MaskedProblem &p) { p.dropout.threshold = 6554; }},
      {"dropout, head_dim 256", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 256, p.dropout.threshold = 6554; }},
      {"bias", [](MaskedProblem &p) { set_bias(p); }},
      {"bias, head_dim 256", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 256, set_bias(p); }},
      {"bias of fp32, head_dim 136", [](MaskedProblem &p) { p.head_dim = 136, set_bias(p), p.bias.dtype = Dtype::f32; }},
      {"dropout and softcap, head_dim 136",
       [](MaskedProblem &p) { p.head_dim = 136, p.softcap = 30, p.dropout.threshold = 6554; }},
      {"bias, broadcast",
       [](MaskedProblem &p) { set_bias(p), p.bias.batch_stride = p.bias.head_stride = p.bias.row_stride = 0; }},
      {"head_dim 264", [](MaskedProblem &p) { p.head_dim = 264; }},
      {"head_dim 264, softcap", [](MaskedProblem &p) { p.head_dim_v = 264, p.softcap = 30; }},
      {"one split asked for", [](MaskedProblem &p) { p.num_splits = 1; }},
      {"one tile",
       [](MaskedProblem &p) { p.heads_q = p.heads_k = p.group = p.batch = 1, p.q_lengths.max_len = p.k_lengths.max_len = 17; }},
      {"few queries of heads with keys of their own",
       [](MaskedProblem &p) { p.heads_k = 8, p.group = 1, p.q_lengths.max_len = 64, p.num_splits = 1; }},
      {"lengths on the device", [](MaskedProblem &p) { p.q_lengths.cu = p.k_lengths.cu = &unreadable; }},
  };
  for (const auto &[text, change] : ours) {
    MaskedProblem p = plain;
    change(p);
    EXPECT_EQ(family(p), Family::sm90) << text;
  }
}

// fp8 queries: Hopper kernels if descales are per head and results have 16 bits, with workspace for the copy of the values; else CUDA cores.
TEST(CudaPlanHopper, QuantisedQueries) {
  for (const NamedDevice &device : kDevices) {
    for (const Dtype results : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
      ForwardProblem p = forward_of(problem(2048, 1000, 128));
      set_fp8(p, results);
      const auto plan_of = [&] {
        ForwardPlan plan;
        ErrorText error;
        EXPECT_EQ(plan_forward(p, device.device, plan, error), FA_OK) << error.text;
        return plan;
      };
      const bool hopper = device.device.sm90 && results != Dtype::f32;
      const ForwardPlan plan = plan_of();
      EXPECT_EQ(plan.family, hopper ? Family::sm90 : Family::simt) << device.name;
      const std::string name = std::string(hopper ? "sm90" : "simt") + "_fwd_e4m3_to_" +
                               (results == Dtype::f32    ? "f32"
                                : results == Dtype::bf16 ? "bf16"
                                                         : "f16") +
                               "_d128";
      EXPECT_EQ(kernel_name(p, plan).rfind(name, 0), 0u) << kernel_name(p, plan);
      if (hopper) {
        EXPECT_TRUE(sm90::kForwardShapes[plan.shape].fp8);
        EXPECT_EQ(plan.workspace_bytes, size_t{2 * 2 * 128} * 1024);
      }
      p.v_descale.per_row = true;
      EXPECT_EQ(plan_of().family, Family::simt);
      p.v_descale.per_row = false;
      p.softcap = 30;
      EXPECT_EQ(plan_of().family, Family::simt);
    }
  }
}

// In the copy of the values every packed sequence has room for all of its keys, and for zeros up to the end of a KV tile.
TEST(CudaPlanHopper, CopiedKeysOfSequencesLieApart) {
  for (const int64_t step : {0, 1, 15, 127, 128, 129, 1000}) {
    for (int64_t b = 0; b < 20; ++b) {
      const int64_t begin = sm90::transposed_v_key(b * step, b), next = sm90::transposed_v_key((b + 1) * step, b + 1);
      EXPECT_EQ(begin % 128, 0);
      EXPECT_GE(next, begin + step + sm90::kMaxKvTile - 1);
    }
  }
}

// CTAs of one warpgroup, three per SM, where tiles are short.
TEST(CudaPlanHopper, HopperKernelsForShortSequences) {
  const auto kernel = [](int64_t queries, int64_t keys, int64_t head_dim, bool causal) {
    MaskedProblem p = problem(queries, keys, head_dim);
    p.heads_q = p.heads_k = 16;
    p.group = 1;
    p.batch = 64;
    if (causal) p.band.right = 0;
    const ForwardPlan plan = forward_plan(p, h200());
    EXPECT_EQ(plan.family, Family::sm90);
    const sm90::ForwardShape &shape = sm90::kForwardShapes[plan.shape];
    EXPECT_EQ(plan.blocks, std::min(plan.tiles, h200().multiprocessors * shape.blocks_at_once()));
    return std::string(shape.name);
  };
  EXPECT_EQ(kernel(256, 4096, 64, false), "d64s");
  EXPECT_EQ(kernel(257, 257, 64, false), "d64");
  EXPECT_EQ(kernel(512, 512, 64, true), "d64s");
  EXPECT_EQ(kernel(512, 4096, 64, true), "d64") << "most of the keys are seen";
  EXPECT_EQ(kernel(513, 513, 64, true), "d64");
  EXPECT_EQ(kernel(256, 256, 128, true), "d128s");
  EXPECT_EQ(kernel(512, 512, 128, true), "d128");
}

}  // namespace
}  // namespace fa::cuda
