// SPDX-License-Identifier: Apache-2.0
// Plans of problems with FA_FLAG_SAME_BITS.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// FA_FLAG_SAME_BITS on CUDA: the kernels of Hopper that are made for it, whatever the shape of the call, and a refusal that names what they do
// not take. Without the flag nothing gets these kernels. Other devices, and other score terms, have the sm80 kernels for any score terms.
TEST(CudaPlan, SameBitsHaveTheirKernels) {
  for (const auto &[head_dim, key_dtype] : {std::pair{8, Dtype::bf16},
                                            {64, Dtype::bf16},
                                            {72, Dtype::bf16},
                                            {128, Dtype::bf16},
                                            {136, Dtype::bf16},
                                            {256, Dtype::bf16},
                                            {16, Dtype::i8},
                                            {128, Dtype::e4m3}}) {
    for (const auto &[queries, keys] : {std::pair{1, 1}, {1, 100000}, {16, 5000}, {300, 300}, {1000, 1000}, {9000, 9000}}) {
      for (const int32_t num_splits : {0, 1, 3, 64}) {
        MaskedProblem p = problem(queries, keys, head_dim);
        p.same_bits = p.batch_invariant = p.deterministic = true;
        p.num_splits = num_splits;
        p.k.dtype = p.v.dtype = key_dtype;
        p.softcap = head_dim == 72 ? 5.0f : 0.0f;
        const ForwardPlan plan = forward_plan(p, h200());
        // Prompts with plain scores and contiguous keys, whose tiles fill half of the device.
        const bool prompt = queries > 300 && head_dim != 72 && key_dtype == Dtype::bf16;
        ASSERT_EQ(plan.family, prompt ? Family::sm90 : Family::extend);
        EXPECT_TRUE((kernel_of(plan).features & kSameBits) != 0);
        EXPECT_EQ(plan.fixed_splits, 0);
        EXPECT_LE(plan.blocks, h200().multiprocessors);
        p.num_splits = 0;
        const ForwardPlan other = forward_plan(p, h200());
        EXPECT_EQ(plan.workspace_bytes, other.workspace_bytes) << "num_splits is a hint that these kernels do not need";
        p.same_bits = false;
        const ForwardPlan without = forward_plan(p, h200());
        EXPECT_FALSE((kernel_of(without).features & kSameBits) != 0);
      }
    }
  }
}

TEST(CudaPlan, SameBitsWithoutSplits) {
  Device ampere = h200();
  ampere.sm90 = false;
  const struct {
    const char *kernel;
    std::function<void(MaskedProblem &)> set;
    Device device;
  } cases[] = {
      {"sm80_fwd_bf16_d128g", [](MaskedProblem &) {}, ampere},
      {"sm80_fwd_bf16_d128g", [](MaskedProblem &p) { p.softcap = 5; }, ampere},
      {"sm80_fwd_bf16_d256g", [](MaskedProblem &p) { p.head_dim = 136; }, ampere},
      {"sm80_fwd_bf16_d128g", [](MaskedProblem &p) { set_bias(p); }, h200()},
      {"sm80_fwd_bf16_d128g", [](MaskedProblem &p) { set_block_mask(p, 64); }, h200()},
      {"sm80_fwd_bf16_d128g", [](MaskedProblem &p) { set_element_mask(p); }, h200()},
      {"sm80_fwd_bf16_d128g", [](MaskedProblem &p) { set_slices(p); }, ampere},
      {"sm80_fwd_bf16_d128g", [](MaskedProblem &p) { p.k.seq_stride += 1; }, ampere},
  };
  for (const auto &[kernel, set, device] : cases) {
    for (const int64_t queries : {1, 16, 300, 5000}) {
      for (const int32_t num_splits : {0, 1, 64}) {
        for (const bool paged : {false, true}) {
          MaskedProblem p = problem(queries, 9000, 128);
          p.same_bits = p.batch_invariant = p.deterministic = true;
          p.num_splits = num_splits;
          if (paged) set_pages(p, 16);
          set(p);
          const ForwardPlan plan = forward_plan(p, device);
          EXPECT_EQ(kernel_name(p, plan), kernel);
          EXPECT_EQ(plan.num_splits, 1) << "num_splits is a hint that these kernels do not follow";
        }
      }
    }
  }
}

TEST(CudaPlan, SameBitsAreRefusedByName) {
  Device ampere = h200();
  ampere.sm90 = false;
  const struct {
    const char *text;
    std::function<void(MaskedProblem &)> set;
    Device device;
  } cases[] = {
      {"head_dim is 264", [](MaskedProblem &p) { p.head_dim = 264; }, ampere},
      {"q.dtype is float32", [](MaskedProblem &p) { set_dtype(p, Dtype::f32); }, ampere},
      {"q.dtype is float32", [](MaskedProblem &p) { set_dtype(p, Dtype::f32); }, h200()},
      {"out.dtype is float32", [](MaskedProblem &p) { p.out.dtype = Dtype::f32; }, h200()},
      {"head_dim is 264", [](MaskedProblem &p) { p.head_dim = 264; }, h200()},
      {"k has rows of 128 columns that are not whole vectors of 16 bytes", [](MaskedProblem &p) { p.k.seq_stride += 1; },
       h200()},
      {"k has 4294967296 packed rows", [](MaskedProblem &p) { p.k_lengths.total = int64_t{1} << 32; }, h200()},
  };
  for (const auto &[text, set, device] : cases) {
    MaskedProblem p = problem(64, 64, 128);
    p.same_bits = p.batch_invariant = p.deterministic = true;
    set(p);
    ForwardPlan forward;
    BackwardPlan backward;
    ErrorText error;
    EXPECT_EQ(plan_forward(forward_of(p), device, forward, error), FA_ERROR_UNSUPPORTED) << text;
    EXPECT_NE(std::string(error.text).find(text), std::string::npos) << error.text;
    EXPECT_EQ(plan_backward(backward_of(p), device, backward, error), FA_ERROR_UNSUPPORTED) << text;
    EXPECT_NE(std::string(error.text).find(text), std::string::npos) << error.text;
  }
  // Forward alone: no backward has these.
  const auto over_bytes = [](ForwardProblem &p) { p.k.dtype = p.v.dtype = Dtype::i8; };
  const struct {
    const char *text;
    std::function<void(ForwardProblem &)> set;
    Device device = h200();
  } forward_cases[] = {
      {"max_logit is given", [](ForwardProblem &p) { p.max_logit = &unreadable; }},
      {"q.dtype is float8_e4m3", [](ForwardProblem &p) { p.q.dtype = p.k.dtype = p.v.dtype = Dtype::e4m3; }},
      {"k.dtype is int8; FA_FLAG_SAME_BITS covers float16 and bfloat16 on CUDA, and on Hopper", over_bytes, ampere},
      {"k.dtype is int8", [&](ForwardProblem &p) { over_bytes(p), set_bias(p); }},
      {"head_dim is 144, and 144 of v; FA_FLAG_SAME_BITS covers up to 128 with k and v of 8 bits",
       [&](ForwardProblem &p) { over_bytes(p), p.head_dim = p.head_dim_v = 144; }},
      {"v_descale has a number for each row", [&](ForwardProblem &p) { over_bytes(p), p.v_descale.per_row = true; }},
  };
  for (const auto &[text, set, device] : forward_cases) {
    ForwardProblem p = forward_of(problem(64, 64, 128));
    p.same_bits = p.batch_invariant = p.deterministic = true;
    set(p);
    ForwardPlan plan;
    ErrorText error;
    EXPECT_EQ(plan_forward(p, device, plan, error), FA_ERROR_UNSUPPORTED) << text;
    EXPECT_NE(std::string(error.text).find(text), std::string::npos) << error.text;
  }
}

}  // namespace
}  // namespace fa::cuda
