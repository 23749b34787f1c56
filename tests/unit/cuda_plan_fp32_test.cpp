// SPDX-License-Identifier: Apache-2.0
// Which kernels serve fp32 operands: tensor cores on Hopper, CUDA cores elsewhere and for what the former lack.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

MaskedProblem fp32_problem(int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim) {
  MaskedProblem p = problem(seqlen_q, seqlen_k, head_dim);
  set_dtype(p, Dtype::f32);
  return p;
}
std::string forward_name(const MaskedProblem &p, const Device &device = h200()) {
  return kernel_name(p, forward_plan(p, device));
}
std::string backward_name(const MaskedProblem &p, const Device &device = h200()) {
  const BackwardProblem b = backward_of(p);
  return kernel_name(b, backward_plan(b, device));
}

TEST(CudaPlanFp32, TensorCoresUpToHeadDim128) {
  for (const auto &[head_dim, bucket] :
       std::vector<std::pair<int64_t, std::string>>{{8, "d64"}, {33, "d64"}, {64, "d64"}, {65, "d128"}, {128, "d128"}}) {
    const MaskedProblem p = fp32_problem(1000, 1000, head_dim);
    EXPECT_EQ(forward_name(p), "sm90_fwd_f32_" + bucket);
    EXPECT_EQ(backward_name(p), "sm90_bwd_f32_" + bucket);
  }
  const MaskedProblem wide = fp32_problem(1000, 1000, 129);
  EXPECT_EQ(forward_name(wide), "simt_fwd_f32_d256");
  EXPECT_EQ(backward_name(wide), "simt_bwd_f32_d256");
  MaskedProblem narrow_v = fp32_problem(1000, 1000, 40);
  narrow_v.head_dim_v = 128;
  EXPECT_EQ(forward_name(narrow_v), "sm90_fwd_f32_d128");
}

// What the kernels have, and what leaves a problem to CUDA cores.
TEST(CudaPlanFp32, WhatTensorCoresServe) {
  using Change = void (*)(MaskedProblem &);
  const std::vector<std::pair<const char *, Change>> served = {
      {"causal", [](MaskedProblem &p) { p.band.right = 0; }},
      {"window", [](MaskedProblem &p) { p.band.left = p.band.right = 100; }},
      {"deterministic", [](MaskedProblem &p) { p.deterministic = true; }},
      {"rows that are not whole 16-byte vectors", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 61; }},
      {"a stride that TMA cannot express", [](MaskedProblem &p) { p.v.batch_stride = int64_t{1} << 40; }},
  };
  const std::vector<std::pair<const char *, Change>> left = {
      {"FA_FLAG_FP32_PRODUCTS", [](MaskedProblem &p) { p.fp32_products = true; }},
      {"batch-invariant", [](MaskedProblem &p) { p.batch_invariant = true; }},
      {"softcap", [](MaskedProblem &p) { p.softcap = 30; }},
      {"dropout", [](MaskedProblem &p) { p.dropout.threshold = 6554; }},
      {"block mask", [](MaskedProblem &p) { set_block_mask(p, 128); }},
      {"bias", [](MaskedProblem &p) { set_bias(p); }},
      {"16 queries", [](MaskedProblem &p) { p.q_lengths.max_len = 16; }},
      {"more keys than it counts", [](MaskedProblem &p) { p.k_lengths.total = int64_t{1} << 32; }},
  };
  for (const bool serves : {true, false}) {
    for (const auto &[text, change] : serves ? served : left) {
      MaskedProblem p = fp32_problem(1000, 1000, 64);
      change(p);
      EXPECT_EQ(forward_plan(p, h200()).family, serves ? Family::sm90_fp32 : Family::simt) << text;
      EXPECT_EQ(backward_plan(backward_of(p), h200()).family, serves ? Family::sm90_fp32 : Family::simt) << text;
    }
  }
  MaskedProblem splits = fp32_problem(1000, 1000, 64);
  splits.num_splits = 2;
  EXPECT_EQ(forward_name(splits), "simt_fwd_f32_d64_split");
}

// Other devices keep to CUDA cores, and so does the flag for operands of 16 bits to the kernels that they have.
TEST(CudaPlanFp32, OtherDevicesAndOtherTypes) {
  for (const auto &[name, device] : kDevices) {
    const MaskedProblem p = fp32_problem(1000, 1000, 128);
    EXPECT_EQ(forward_plan(p, device).family, device.sm90 ? Family::sm90_fp32 : Family::simt) << name;
    EXPECT_EQ(backward_plan(backward_of(p), device).family, device.sm90 ? Family::sm90_fp32 : Family::simt) << name;
  }
  MaskedProblem p = problem(1000, 1000, 128);
  const std::string without = forward_name(p), backward_without = backward_name(p);
  p.fp32_products = true;
  EXPECT_EQ(forward_name(p), without);
  EXPECT_EQ(backward_name(p), backward_without);
}

// Few CTAs of 128 queries leave most of the device idle: CUDA cores divide the keys.
TEST(CudaPlanFp32, FewQueriesAndManyKeys) {
  MaskedProblem p = fp32_problem(128, 100000, 64);
  p.batch = 1;
  p.heads_q = p.heads_k = p.group = 1;
  EXPECT_EQ(forward_name(p), "simt_fwd_f32_d64_split");
  p.heads_q = p.heads_k = 64;
  EXPECT_EQ(forward_name(p), "sm90_fwd_f32_d64");
}

// Planes of q, k and v, and in backward of dout: six bytes for each element.
TEST(CudaPlanFp32, Workspace) {
  MaskedProblem p = fp32_problem(1000, 2000, 64);
  const ForwardPlan plan = forward_plan(p, h200());
  const auto planes = [&](int64_t rows, int64_t heads) { return static_cast<size_t>(p.batch * rows * heads * 64 * 6); };
  EXPECT_EQ(plan.planes_offset[0], 0u);
  EXPECT_EQ(plan.planes_offset[1], planes(1000, p.heads_q));
  EXPECT_EQ(plan.workspace_bytes, planes(1000, p.heads_q) + 2 * planes(2000, p.heads_k));
  const BackwardPlan backward = backward_plan(backward_of(p), h200());
  EXPECT_EQ(backward.workspace_bytes, backward.planes_offset[0] + 2 * planes(1000, p.heads_q) + 2 * planes(2000, p.heads_k));
  // Rows are padded to eight columns.
  MaskedProblem odd = p;
  odd.head_dim = odd.head_dim_v = 57;
  EXPECT_EQ(forward_plan(odd, h200()).workspace_bytes, plan.workspace_bytes);
  // Planes of more bytes than TMA has strides for.
  MaskedProblem huge = p;
  huge.batch = int64_t{1} << 20;
  EXPECT_EQ(forward_plan(huge, h200()).family, Family::simt);
}

}  // namespace
}  // namespace fa::cuda
