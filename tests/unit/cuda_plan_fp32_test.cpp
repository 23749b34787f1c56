// SPDX-License-Identifier: Apache-2.0
// Which kernels serve fp32 operands: tensor cores on Hopper, CUDA cores elsewhere and for what the former lack.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels/bwd_simt/backward_table.h"
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

TEST(CudaPlanFp32, TensorCoresByHeadDim) {
  for (const auto &[head_dim, bucket] : std::vector<std::pair<int64_t, std::string>>{{8, "d64"},
                                                                                     {33, "d64"},
                                                                                     {64, "d64"},
                                                                                     {65, "d128"},
                                                                                     {128, "d128"},
                                                                                     {129, "d192"},
                                                                                     {192, "d192"},
                                                                                     {193, "d256"},
                                                                                     {256, "d256"}}) {
    const MaskedProblem p = fp32_problem(1000, 1000, head_dim);
    EXPECT_EQ(forward_name(p), "sm90_fwd_f32_" + bucket);
    EXPECT_EQ(backward_name(p), "sm90_bwd_f32_" + bucket);
  }
  EXPECT_EQ(forward_name(fp32_problem(1000, 1000, 257)), "simt_fwd_f32_d512");
  EXPECT_EQ(backward_name(fp32_problem(1000, 1000, 257)), "simt_bwd_f32_d512");
  MaskedProblem narrow_v = fp32_problem(1000, 1000, 40);
  narrow_v.head_dim_v = 128;
  EXPECT_EQ(forward_name(narrow_v), "sm90_fwd_f32_d128");
  narrow_v.head_dim = 150;
  EXPECT_EQ(backward_name(narrow_v), "sm90_bwd_f32_d192");
}

// What the kernels have, and what leaves a problem to CUDA cores.
TEST(CudaPlanFp32, WhatTensorCoresServe) {
  using Change = void (*)(MaskedProblem &);
  struct Line {
    const char *text;
    std::string forward, backward;  // "": CUDA cores
    Change change;
  };
  const std::vector<Line> lines = {
      {"causal", "d64", "d64", [](MaskedProblem &p) { p.band.right = 0; }},
      {"window", "d64", "d64", [](MaskedProblem &p) { p.band.left = p.band.right = 100; }},
      {"deterministic", "d64", "d64", [](MaskedProblem &p) { p.deterministic = true; }},
      {"rows that are not whole 16-byte vectors", "d64", "d64", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 61; }},
      {"a stride that TMA cannot express", "d64", "d64", [](MaskedProblem &p) { p.v.batch_stride = int64_t{1} << 40; }},
      {"left padding alone", "d64", "d64", [](MaskedProblem &p) { set_starts(p); }},
      {"softcap", "d64g", "d64g", [](MaskedProblem &p) { p.softcap = 30; }},
      {"ALiBi", "d64g", "d64g", [](MaskedProblem &p) { p.alibi_slopes = &unreadable; }},
      {"dropout", "d64g", "d64g", [](MaskedProblem &p) { p.dropout.threshold = 6554; }},
      {"block mask", "d64g", "d64g", [](MaskedProblem &p) { set_block_mask(p, 128); }},
      {"slices", "d64g", "d64g", [](MaskedProblem &p) { set_slices(p); }},
      {"bias", "d64g", "d64g", [](MaskedProblem &p) { set_bias(p); }},
      {"all of them, deterministic", "d128g", "d128g",
       [](MaskedProblem &p) {
         p.head_dim = p.head_dim_v = 100;
         p.softcap = 30;
         p.alibi_slopes = &unreadable;
         set_bias(p, 3);
         set_slices(p);
         p.dropout.threshold = 6554;
         p.deterministic = true;
       }},
      {"bias and masks, 128 columns", "d128g", "d128m",
       [](MaskedProblem &p) {
         p.head_dim = p.head_dim_v = 128;
         p.alibi_slopes = &unreadable;
         set_bias(p);
         set_slices(p);
       }},
      {"softcap, 128 columns", "d128g", "d128g",
       [](MaskedProblem &p) {
         p.head_dim = p.head_dim_v = 128;
         p.softcap = 30;
       }},
      {"FA_FLAG_FP32_PRODUCTS", "", "", [](MaskedProblem &p) { p.fp32_products = true; }},
      {"FA_FLAG_FP32_PRODUCTS and bias", "", "",
       [](MaskedProblem &p) {
         p.fp32_products = true;
         set_bias(p);
       }},
      {"batch-invariant", "d64", "d64", [](MaskedProblem &p) { p.batch_invariant = p.deterministic = true; }},
      {"batch-invariant, at most 16 packed queries", "d64", "d64",
       [](MaskedProblem &p) {
         p.batch_invariant = p.deterministic = true;
         p.q_lengths.cu = &unreadable;
         p.q_lengths.max_len = p.q_lengths.total = 16;
       }},
      {"16 queries", "", "", [](MaskedProblem &p) { p.q_lengths.max_len = 16; }},
      {"more keys than it counts", "", "", [](MaskedProblem &p) { p.k_lengths.total = int64_t{1} << 32; }},
      {"bias and 129 columns", "d192g", "d192g",
       [](MaskedProblem &p) {
         p.head_dim = 129;
         set_bias(p);
       }},
      {"softcap, dropout and masks, 256 columns", "d256g", "d256g",
       [](MaskedProblem &p) {
         p.head_dim = p.head_dim_v = 256;
         p.softcap = 30;
         p.dropout.threshold = 6554;
         set_slices(p);
       }},
      {"bias and 257 columns", "", "",
       [](MaskedProblem &p) {
         p.head_dim = 257;
         set_bias(p);
       }},
  };
  for (const Line &line : lines) {
    MaskedProblem p = fp32_problem(1000, 1000, 64);
    line.change(p);
    const ForwardPlan forward = forward_plan(p, h200());
    const BackwardPlan backward = backward_plan(backward_of(p), h200());
    const auto check = [&](const std::string &bucket, Family family, const std::string &name, const std::string &prefix,
                           const char *reason) {
      if (bucket.empty()) {
        EXPECT_EQ(family, Family::simt) << line.text;
        return;
      }
      EXPECT_EQ(name, prefix + bucket) << line.text;
      const bool scored = bucket.back() == 'g' || bucket.back() == 'm';
      EXPECT_EQ(std::string(reason).find("score terms or masks as data") != std::string::npos, scored) << line.text;
    };
    check(line.forward, forward.family, kernel_name(p, forward), "sm90_fwd_f32_", forward.reason);
    check(line.backward, backward.family, kernel_name(kernel_of(backward), Dtype::f32, Dtype::f32, Dtype::f32), "sm90_bwd_f32_",
          backward.reason);
  }
  MaskedProblem splits = fp32_problem(1000, 1000, 64);
  splits.num_splits = 2;
  EXPECT_EQ(forward_name(splits), "simt_fwd_f32_d64_split");
  // The largest logit stays with CUDA cores: here a row's maximum may be too low by the threshold of lazy rescaling.
  float largest;
  ForwardProblem max_logit = forward_of(fp32_problem(1000, 1000, 64));
  max_logit.max_logit = &largest;
  ForwardPlan plan;
  ErrorText error;
  ASSERT_EQ(plan_forward(max_logit, h200(), plan, error), FA_OK);
  EXPECT_EQ(plan.family, Family::simt);
}

// dbias comes from CUDA cores, behind kernels on tensor cores whose rows of lse and delta it reads.
TEST(CudaPlanFp32, GradientOfTheBias) {
  MaskedProblem p = fp32_problem(1000, 1000, 128);
  set_bias(p);
  BackwardProblem b = backward_of(p);
  b.dbias = p.bias;
  const BackwardPlan plan = backward_plan(b, h200());
  EXPECT_EQ(kernel_name(b, plan), "sm90_bwd_f32_d128m");
  EXPECT_EQ(plan.q_tile_rows, simt::kRowPadding);
  MaskedProblem wide = fp32_problem(1000, 1000, 256);
  set_bias(wide);
  b = backward_of(wide);
  b.dbias = wide.bias;
  const BackwardPlan of_wide = backward_plan(b, h200());
  EXPECT_EQ(kernel_name(b, of_wide), "sm90_bwd_f32_d256g");
  EXPECT_EQ(of_wide.q_tile_rows, simt::kRowPadding);
}

// CTAs have 128 rows of dq, or of dk and dv; above 128 columns 64 rows of one gradient.
TEST(CudaPlanFp32, Grid) {
  for (const int64_t head_dim : {128, 129, 256}) {
    MaskedProblem p = fp32_problem(1000, 2000, head_dim);
    const bool wide = head_dim > 128;
    const int64_t rows = wide ? 64 : 128, of_queries = p.batch * p.heads_q * ((1000 + rows - 1) / rows),
                  of_keys = p.batch * p.heads_k * ((2000 + rows - 1) / rows);
    BackwardProblem b = backward_of(p);
    EXPECT_EQ(backward_plan(b, h200()).blocks, of_queries + (wide ? 2 : 1) * of_keys) << head_dim;
    BackwardProblem without_dv = b;
    without_dv.dv = Operand{};
    EXPECT_EQ(backward_plan(without_dv, h200()).blocks, of_queries + of_keys) << head_dim;
    BackwardProblem dv_alone = b;
    dv_alone.dq = dv_alone.dk = Operand{};
    EXPECT_EQ(backward_plan(dv_alone, h200()).blocks, of_keys) << head_dim;
    BackwardProblem dq_alone = b;
    dq_alone.dk = dq_alone.dv = Operand{};
    EXPECT_EQ(backward_plan(dq_alone, h200()).blocks, of_queries) << head_dim;
  }
}

// Masks as data have a cell map behind the planes.
TEST(CudaPlanFp32, CellMap) {
  MaskedProblem p = fp32_problem(1000, 1000, 64);
  const size_t without = forward_plan(p, h200()).workspace_bytes,
               backward_without = backward_plan(backward_of(p), h200()).workspace_bytes;
  set_slices(p);
  const ForwardPlan plan = forward_plan(p, h200());
  EXPECT_TRUE(plan.cell_map);
  EXPECT_EQ(plan.cell_map_offset, without);
  const BackwardPlan backward = backward_plan(backward_of(p), h200());
  EXPECT_TRUE(backward.cell_map);
  EXPECT_GE(backward.cell_map_offset, backward_without);
  // Where left padding is masked like any other, as beside a bias, it is no padding that is skipped.
  MaskedProblem left = fp32_problem(1000, 1000, 64);
  set_starts(left);
  EXPECT_FALSE(forward_plan(left, h200()).cell_map);
  set_bias(left);
  EXPECT_TRUE(forward_plan(left, h200()).cell_map);
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
  huge.batch = int64_t{1} << 21;
  EXPECT_EQ(forward_plan(huge, h200()).family, Family::simt);
}

}  // namespace
}  // namespace fa::cuda
