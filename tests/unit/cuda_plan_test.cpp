// SPDX-License-Identifier: Apache-2.0
// Plans of the CUDA backend on devices that need not be there: pure functions of shapes and device, the same in builds without CUDA.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

#include "cuda/common/launch.h"
#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// fp16 and bf16 differ in the kernel's name alone; the same question gets the same answer.
TEST(CudaPlan, SameForBothSixteenBitTypes) {
  for (const int64_t head_dim : {64, 128, 192, 256}) {
    MaskedProblem p = problem(1000, 1000, head_dim);
    const ForwardPlan bf16 = forward_plan(p, h200());
    EXPECT_EQ(kernel_name(p, bf16), kernel_name(p, forward_plan(p, h200())));
    set_dtype(p, Dtype::f16);
    const ForwardPlan f16 = forward_plan(p, h200());
    EXPECT_EQ(f16.shape, bf16.shape);
    EXPECT_EQ(f16.workspace_bytes, bf16.workspace_bytes);
    EXPECT_NE(kernel_name(p, f16).find("_f16_"), std::string::npos);
  }
}

TEST(CudaPlan, ManyRowsAreNoReasonToRefuse) {
  MaskedProblem p = problem(2048, 2048, 128);
  p.batch = 257;
  p.heads_q = p.heads_k = 32;
  p.group = 1;
  backward_plan(backward_of(p), h200());
}

// Problems with more CTAs than a launch can have, or more rows than an index can count, are refused with the numbers.
TEST(CudaPlan, WhatOneLaunchDoesNotHoldIsRefused) {
  MaskedProblem many = problem(64, 64, 128);
  many.batch = int64_t{1} << 40;
  MaskedProblem long_keys = problem(64, int64_t{1} << 33, 128);
  for (const auto &[p, number] : {std::pair{many, many.batch}, {long_keys, long_keys.k_lengths.max_len}}) {
    ForwardPlan forward;
    BackwardPlan backward;
    ErrorText error;
    EXPECT_EQ(plan_forward(forward_of(p), h200(), forward, error), FA_ERROR_UNSUPPORTED);
    EXPECT_NE(std::string(error.text).find(std::to_string(number)), std::string::npos) << error.text;
    EXPECT_EQ(plan_backward(backward_of(p), h200(), backward, error), FA_ERROR_UNSUPPORTED);
  }
}

// A list of launches that is full takes no more, and says so.
TEST(CudaPlan, AListOfLaunchesKnowsItsEnd) {
  Launches launches;
  const Launch launch{&unreadable, 32, 0, 1};
  for (int n = 0; n < Launches::kMaxEntries; ++n) launches.add("kernel", launch, nullptr);
  launches.add("no kernel", Launch{}, nullptr);
  EXPECT_FALSE(launches.overflowed());
  launches.add("kernel", launch, nullptr);
  EXPECT_TRUE(launches.overflowed());
  EXPECT_EQ(launches.end() - launches.begin(), Launches::kMaxEntries);

  Launches parameters;
  for (int n = 0; n < Launches::kMaxParams; ++n) parameters.make_params<int>();
  EXPECT_FALSE(parameters.overflowed());
  parameters.make_params<int>() = 1;
  EXPECT_TRUE(parameters.overflowed());
}

// fp32 queries beside fewer bits: CUDA cores, or for many rows Hopper's kernels for fp32, on a copy of K and V. A bias stays what it is.
TEST(CudaPlan, FewerBitsBesideFp32Queries) {
  for (const Dtype dtype : {Dtype::f16, Dtype::bf16, Dtype::e4m3}) {
    for (const int64_t queries : {1, 1000}) {
      MaskedProblem p = problem(queries, 2000, 64);
      set_dtype(p, Dtype::f32);
      p.k.dtype = p.v.dtype = dtype;
      const ForwardPlan plan = forward_plan(p, h200());
      EXPECT_EQ(plan.family, queries == 1 ? Family::simt : Family::sm90_fp32);
      EXPECT_EQ(plan.contiguous_copy, queries > 1);
      p.fp32_products = true;
      EXPECT_EQ(forward_plan(p, h200()).family, Family::simt);
      p.fp32_products = false;
      set_bias(p);
      p.bias.dtype = Dtype::bf16;
      EXPECT_EQ(forward_plan(p, h200()).family, Family::simt);
      set_dtype(p, Dtype::f32);
      p.bias.dtype = Dtype::bf16;
      EXPECT_EQ(forward_plan(p, h200()).family, Family::simt);
      EXPECT_EQ(backward_plan(backward_of(p), h200()).family, Family::simt);
    }
  }
}

// Lengths live on the device, and a captured graph serves other lengths: plans must not depend on them, nor read them.
TEST(CudaPlan, DeviceSideLengthsPlayNoPart) {
  const int32_t unreadable_length = -1;  // not a length
  for (const int64_t seqlen_q : {1, 3, 1000}) {
    MaskedProblem p = problem(seqlen_q, 50000, 128);
    const ForwardPlan without = forward_plan(p, h200());
    p.k_lengths.used = p.q_lengths.used = &unreadable_length;
    const BackwardPlan backward = backward_plan(backward_of(p), h200());
    p.k_lengths.used = reinterpret_cast<const int32_t *>(16);  // following it would crash
    p.q_lengths.used = reinterpret_cast<const int32_t *>(16);
    const ForwardPlan with = forward_plan(p, h200());
    EXPECT_EQ(with.num_splits, without.num_splits);
    EXPECT_EQ(with.blocks, without.blocks);
    EXPECT_EQ(with.workspace_bytes, without.workspace_bytes);
    EXPECT_EQ(backward_plan(backward_of(p), h200()).workspace_bytes, backward.workspace_bytes);
    p.k_lengths.cu = p.q_lengths.cu = reinterpret_cast<const void *>(16);
    EXPECT_EQ(forward_plan(p, h200()).num_splits, without.num_splits);
  }
}

TEST(CudaPlan, FewBlocksSplitTheKeys) {
  MaskedProblem p = problem(1, 100000, 128);
  p.batch = 1;
  EXPECT_GT(forward_plan(p, h200()).num_splits, 8);
  EXPECT_EQ(forward_plan(problem(100000, 100000, 128), h200()).num_splits, 1) << "enough blocks without";
  MaskedProblem short_keys = problem(1, 50, 128);
  EXPECT_EQ(forward_plan(short_keys, h200()).num_splits, 1) << "too few keys";
  set_block_mask(short_keys, 64);
  EXPECT_EQ(forward_plan(short_keys, h200()).num_splits, 1) << "too few keys";
  p.num_splits = 3;
  EXPECT_EQ(forward_plan(p, h200()).num_splits, 3) << "as asked for";
  p.num_splits = 1 << 20;
  EXPECT_LE(forward_plan(p, h200()).num_splits, 128);
}

// A row's bits must not depend on how many others share the launch.
TEST(CudaPlan, BatchInvariantProblemsAreSplitAlike) {
  for (const int64_t seqlen_q : {1, 500}) {
    MaskedProblem p = problem(seqlen_q, 100000, 128);
    p.batch_invariant = p.deterministic = true;
    std::set<int32_t> splits;
    for (const int64_t batch : {1, 2, 50, 1000}) {
      p.batch = batch;
      splits.insert(forward_plan(p, h200()).num_splits);
    }
    EXPECT_EQ(splits.size(), 1u) << seqlen_q;
  }
}

// Packed queries get kernels for FA_FLAG_SAME_BITS, whatever the batch is.
TEST(CudaPlan, BatchInvariantPackedQueries) {
  for (const bool bytes : {false, true}) {
    for (const int64_t head_dim : {64, 128, 256}) {
      if (bytes && head_dim == 256) continue;  // refused with that flag
      for (const int64_t batch : {1, 2, 50}) {
        for (const int64_t length : {1, 70, 1000, 16384}) {
          MaskedProblem p = problem(length, length, head_dim);
          p.batch = batch;
          p.batch_invariant = p.deterministic = true;
          p.q_lengths.cu = &unreadable;
          p.q_lengths.total = batch * length;
          if (bytes) {
            p.k.dtype = p.v.dtype = Dtype::e4m3;
            set_pages(p, 16);
          } else {
            p.k_lengths.cu = &unreadable;
            p.k_lengths.total = batch * length;
          }
          const ForwardPlan plan = forward_plan(p, h200());
          EXPECT_NE(plan.family, Family::sm80);
          EXPECT_NE(kernel_of(plan).features & kSameBits, 0u) << kernel_name(p, plan);
          Device before_hopper = h200();
          before_hopper.sm90 = false;
          const Family other = forward_plan(p, before_hopper).family;
          EXPECT_TRUE(other == Family::sm80 || other == Family::simt);
        }
      }
    }
  }
}

// The query heads that share keys fill the rows of one block when there are few queries. A block mask may tell them apart, for which kernels before Hopper
// have no room.
TEST(CudaPlan, GroupedHeadsShareABlock) {
  MaskedProblem p = problem(20, 4000, 128);
  EXPECT_EQ(forward_plan(p, h200()).rows_per_token, p.group);
  EXPECT_EQ(forward_plan(p, h200()).blocks, p.batch * p.heads_k * forward_plan(p, h200()).num_splits);
  set_block_mask(p, 64);
  EXPECT_EQ(forward_plan(p, h200()).rows_per_token, p.group) << "kernels that read a cell map for each head";
  Device before_hopper = h200();
  before_hopper.sm90 = false;
  EXPECT_EQ(forward_plan(p, before_hopper).rows_per_token, 1);
  EXPECT_EQ(forward_plan(problem(4096, 4096, 128), h200()).rows_per_token, 1) << "whole blocks without";
}

// Without a gradient to compute there is nothing to launch, and no limit of kernels counts.
TEST(CudaPlan, NoGradientAskedFor) {
  for (const auto &[name, device] : kDevices) {
    for (const int64_t head_dim : {64, 576}) {
      BackwardProblem b = backward_of(problem(300, 300, head_dim, 64));
      b.dq = b.dk = b.dv = Operand{};
      BackwardPlan plan;
      ErrorText error;
      ASSERT_EQ(plan_backward(b, device, plan, error), FA_OK) << name << ": " << error.text;
      EXPECT_EQ(plan.family, Family::none);
      EXPECT_EQ(plan.workspace_bytes, 0u);
      EXPECT_EQ(kernel_name(b, plan), "none");
    }
  }
}

TEST(CudaPlan, EmptyProblems) {
  MaskedProblem no_batch = problem(100, 100, 128), no_queries = problem(0, 100, 128), no_keys = problem(100, 0, 128);
  no_batch.batch = 0;
  for (const MaskedProblem &p : {no_batch, no_queries, no_keys}) {
    forward_plan(p, h200());
    backward_plan(backward_of(p), h200());
  }
}

// What the merge kernel cannot take is refused by the plan, so that a query says it.
TEST(CudaPlan, Merge) {
  MergePart parts[1];
  MergeProblem p;
  p.batch = 2;
  p.seqlen_q = 5;
  p.heads_q = 4;
  p.head_dim_v = 8;
  p.parts = parts;
  p.num_parts = 256;
  MergePlan plan;
  ErrorText error;
  ASSERT_EQ(plan_merge(p, kDevices[0].device, plan, error), FA_OK) << error.text;
  EXPECT_EQ(kernel_name(p, plan), "cuda_merge");
  EXPECT_STRNE(plan.reason, "");
  EXPECT_EQ(plan.workspace_bytes, 0u);
  p.num_parts = 257;
  EXPECT_EQ(plan_merge(p, kDevices[0].device, plan, error), FA_ERROR_UNSUPPORTED);
  EXPECT_STREQ(error.text, "num_parts is 257; on CUDA one call merges up to 256");
  p.num_parts = 1;
  p.batch = 1;
  p.heads_q = 4;
  p.seqlen_q = INT32_MAX;
  EXPECT_EQ(plan_merge(p, kDevices[0].device, plan, error), FA_OK) << error.text;
  p.seqlen_q = int64_t{INT32_MAX} + 1;
  EXPECT_EQ(plan_merge(p, kDevices[0].device, plan, error), FA_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(error.text).find("8589934592 rows"), std::string::npos) << error.text;
}

TEST(CudaPlan, Append) {
  AppendProblem p;
  p.batch = 2;
  p.heads_k = 4;
  p.heads_q = 8;
  p.head_dim = p.head_dim_v = 64;
  AppendPlan plan;
  ErrorText error;
  ASSERT_EQ(plan_append(p, kDevices[0].device, plan, error), FA_OK) << error.text;
  EXPECT_EQ(kernel_name(p, plan), "cuda_append");
  EXPECT_STRNE(plan.reason, "");
  p.k_cache.dtype = Dtype::i8;
  ASSERT_EQ(plan_append(p, kDevices[0].device, plan, error), FA_OK) << error.text;
  EXPECT_EQ(kernel_name(p, plan), "cuda_append_8bit");
  p.heads_q = (int64_t{1} << 20) - 4;
  EXPECT_EQ(plan_append(p, kDevices[0].device, plan, error), FA_OK) << error.text;
  ++p.heads_q;
  EXPECT_EQ(plan_append(p, kDevices[0].device, plan, error), FA_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(error.text).find("1048577 heads"), std::string::npos) << error.text;
}

}  // namespace
}  // namespace fa::cuda
