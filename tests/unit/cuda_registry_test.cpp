// SPDX-License-Identifier: Apache-2.0
// The registry of CUDA kernels, and what selection makes of builds that leave kernels out.
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>

#include "cuda/host/needs.h"
#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

TEST(CudaRegistry, RowsAreComplete) {
  std::set<std::string> instances;
  for (const KernelRow &kernel : all_kernels()) {
    const std::string name = instance_name(kernel, Dtype::bf16);
    EXPECT_TRUE(instances.insert(name).second) << name << " is there twice";
    EXPECT_EQ(name, std::string(kernel.set) + (kernel.any_dtype ? "_any_" : "_bf16_") + kernel.name);
    EXPECT_GT(kernel.head_dim, 0) << name;
    EXPECT_GT(kernel.head_dim_v, 0) << name;
    EXPECT_GT(kernel.rows, 0) << name;
    EXPECT_LE(kernel.shared_bytes, 227 * 1024) << name;
    EXPECT_TRUE(!kernel.sm90a || kernel.capability == 90) << name;
    EXPECT_EQ(&kernels_of(kernel.family, kernel.pass)[static_cast<size_t>(kernel.shape)], &kernel) << name;
  }
}

// The build compiles kernels whose tiles no device before sm_90 has room for only for sm_90 and newer, and the others for sm_80, too. Decode
// kernels may need sm_90 for their registers.
TEST(CudaRegistry, CapabilityFollowsSharedMemory) {
  int before_90 = 0, from_90 = 0;
  for (const KernelRow &kernel : all_kernels()) {
    const std::string name = instance_name(kernel, Dtype::bf16);
    const bool large = kernel.shared_bytes > kMaxSharedBytesBefore90;
    EXPECT_TRUE(!large || kernel.capability == 90) << name;
    if (kernel.family != Family::sm80) continue;
    EXPECT_EQ(kernel.capability, large ? 90 : 80) << name;
    ++(large ? from_90 : before_90);
  }
  EXPECT_GT(before_90, 0);
  EXPECT_GT(from_90, 0);
}

// Whatever a problem asks for, some kernel serves it on every device: the CUDA-core kernels take everything.
TEST(CudaRegistry, CudaCoreKernelsServeEverything) {
  for (const auto pass : {Pass::forward, Pass::backward}) {
    const KernelRow &last = kernels_of(Family::simt, pass).back();
    EXPECT_EQ(last.features, kAnyFeatures);
    EXPECT_EQ(last.scores, kAllAndScoreText);
    EXPECT_EQ(last.head_dim_v, kMaxHeadDimV);
    EXPECT_EQ(last.capability, 80);
    EXPECT_EQ(last.shared_bytes, 0) << "fits every device";
  }
  EXPECT_EQ(kernels_of(Family::simt, Pass::forward).back().head_dim, kMaxHeadDim);
}

// What the build of the tests below contains, by instance name, as FA_ONLY would.
std::function<bool(const std::string &)> in_build;
Device device_with(std::function<bool(const std::string &)> build, Device device = h200()) {
  in_build = std::move(build);
  device.is_built = [](const KernelRow &kernel, Dtype dtype) { return in_build(instance_name(kernel, dtype)); };
  return device;
}
bool begins_with(const std::string &name, const std::string &prefix) { return name.rfind(prefix, 0) == 0; }
Device device_without(const std::string &prefix) {
  return device_with([=](const std::string &name) { return !begins_with(name, prefix); });
}
Device device_with_only(const std::string &prefix) {
  return device_with([=](const std::string &name) { return begins_with(name, prefix); });
}

std::string forward_name(const MaskedProblem &p, const Device &device) { return kernel_name(p, forward_plan(p, device)); }
std::string backward_name(const MaskedProblem &p, const Device &device) {
  const BackwardProblem b = backward_of(p);
  return kernel_name(b, backward_plan(b, device));
}

// The next kernel in the order of preference: another shape of the family, then another family.
TEST(CudaSelect, TheNextKernelThatIsBuiltServes) {
  const MaskedProblem p = problem(1000, 1000, 128);
  EXPECT_EQ(forward_name(p, h200()), "sm90_fwd_bf16_d128");
  EXPECT_EQ(forward_name(p, device_without("sm90_fwd_bf16_d128")), "sm90_fwd_bf16_d192_128");
  EXPECT_EQ(forward_name(p, device_without("sm90_fwd_f16")), "sm90_fwd_bf16_d128");
  EXPECT_EQ(forward_name(p, device_without("sm90")), "extend_fwd_bf16_d128_split");
  EXPECT_EQ(forward_name(p, device_with_only("sm80")), "sm80_fwd_bf16_d128_split");
  EXPECT_EQ(forward_name(p, device_with_only("simt_fwd_any_d512")), "simt_fwd_bf16_d512");
  EXPECT_EQ(backward_name(p, h200()), "sm90_bwd_bf16_d128t");
  EXPECT_EQ(backward_name(p, device_without("sm90_bwd_bf16_d128t")), "sm90_bwd_bf16_d128n");
  EXPECT_EQ(backward_name(p, device_with([](const std::string &name) {
                            return !begins_with(name, "sm90_bwd_bf16_d128t") && !begins_with(name, "sm90_bwd_bf16_d128n");
                          })),
            "sm90_bwd_bf16_d128");
  EXPECT_EQ(backward_name(p, device_without("sm90_bwd_bf16_d128")), "sm90_bwd_bf16_d192_128");
  EXPECT_EQ(backward_name(p, device_without("sm90")), "sm80_bwd_bf16_d128");
  EXPECT_EQ(backward_name(p, device_with_only("simt")), "simt_bwd_bf16_d128");

  const MaskedProblem few = problem(1, 5000, 128);
  EXPECT_EQ(forward_name(few, h200()), "decode_fwd_bf16_d128_8_split");
  EXPECT_EQ(forward_name(few, device_without("decode_fwd_bf16_d128_8")), "decode_fwd_bf16_d128_16_split");
  EXPECT_EQ(forward_name(few, device_without("decode")), "extend_fwd_bf16_d128p_split");
  MaskedProblem few_8bit = few;
  few_8bit.k.dtype = few_8bit.v.dtype = Dtype::i8;
  EXPECT_EQ(forward_name(few_8bit, h200()), "decode_fwd_bf16_i8_d128_8_split");
  EXPECT_EQ(forward_name(few_8bit, device_without("decode_8bit_fwd_any_d128_8")), "decode_fwd_bf16_i8_d128_16_split");
  EXPECT_EQ(forward_name(few_8bit, device_without("decode_8bit")), "sm90_fwd_bf16_i8_d128p");
  EXPECT_EQ(forward_name(few_8bit, device_with_only("simt_fwd_any_d512")), "simt_fwd_bf16_i8_d512_split");

  ForwardProblem fp8 = forward_of(p);
  set_fp8(fp8, Dtype::f16);
  EXPECT_EQ(kernel_name(fp8, forward_plan(fp8, device_without("sm90_fwd_bf16"))), "sm90_fwd_e4m3_to_f16_d128e")
      << "the instance is named after out";
  EXPECT_EQ(kernel_name(fp8, forward_plan(fp8, device_without("sm90_fwd_f16"))), "simt_fwd_e4m3_to_f16_d128");

  MaskedProblem latent = problem(1, 5000, 576, 512);
  latent.heads_k = 1;
  latent.group = latent.heads_q;
  latent.v = latent.k;
  EXPECT_EQ(forward_name(latent, h200()), "mla_fwd_bf16_d576c_split");
  EXPECT_EQ(forward_name(latent, device_without("mla_fwd_bf16_d576c")), "mla_fwd_bf16_d576_split");
  EXPECT_EQ(forward_name(latent, device_without("mla")), "sm80_fwd_bf16_d576_512_split");
}

// Clusters and combine kernels have shapes of their own, which a build may lack.
TEST(CudaSelect, VariantsThatAreLeftOut) {
  MaskedProblem p = problem(1, 1024, 128);
  p.heads_q = 64;
  p.heads_k = p.group = 8;
  p.batch = 1;
  EXPECT_GT(forward_plan(p, h200()).cluster, 0);
  const ForwardPlan plan = forward_plan(p, device_without("decode_fwd_bf16_d128_8c"));
  EXPECT_EQ(kernel_name(p, plan), "decode_fwd_bf16_d128_8_split");
  EXPECT_EQ(plan.cluster, 0);
  MaskedProblem long_prompt = problem(40, 50000, 128);
  long_prompt.page_table = reinterpret_cast<const int32_t *>(&unreadable);
  long_prompt.page_size = 16;
  long_prompt.batch = 1;
  EXPECT_EQ(forward_name(long_prompt, h200()), "extend_fwd_bf16_d128p_split");
  EXPECT_EQ(forward_name(long_prompt, device_without("extend_fwd_bf16_d128p")), "extend_fwd_bf16_d256p_split")
      << "more columns";
  EXPECT_EQ(forward_name(long_prompt, device_without("extend")), "sm80_fwd_bf16_d128_split");
  // dbias beside a Hopper kernel is the second pass of another one.
  MaskedProblem biased = problem(1000, 1000, 128);
  set_bias(biased);
  BackwardProblem b = backward_of(biased);
  b.dbias = biased.bias;
  const auto dbias_kernel = [&](const Device &device) {
    const BackwardPlan plan = backward_plan(b, device);
    EXPECT_EQ(kernel_name(b, plan), "sm90_bwd_bf16_d128a");
    return std::string(kernels_of(Family::sm80, Pass::backward)[static_cast<size_t>(plan.dbias_shape)].name);
  };
  EXPECT_EQ(dbias_kernel(h200()), "d128b");
  EXPECT_EQ(dbias_kernel(device_without("sm80_bwd_bf16_d128b")), "d128g");
  EXPECT_EQ(kernel_name(b, backward_plan(b, device_without("sm80"))), "simt_bwd_bf16_d128");
}

// A problem that no kernel of the build serves is refused from the query on, with the name of the kernel that it wants.
TEST(CudaSelect, RefusalsNameTheKernelThatIsLeftOut) {
  ForwardPlan forward;
  BackwardPlan backward;
  ErrorText error;
  MaskedProblem p = problem(1000, 1000, 128);
  EXPECT_EQ(plan_forward(forward_of(p), device_with_only("sm90_bwd"), forward, error), FA_ERROR_NOT_BUILT);
  EXPECT_STREQ(
      error.text,
      "this build (FA_ONLY) leaves out the kernel for this problem, sm90_fwd_bf16_d128, and every other that could run it");
  EXPECT_EQ(plan_backward(backward_of(p), device_with_only("sm90_fwd"), backward, error), FA_ERROR_NOT_BUILT);
  EXPECT_STREQ(
      error.text,
      "this build (FA_ONLY) leaves out the kernel for this problem, sm90_bwd_bf16_d128t, and every other that could run it");
  // The instance of 8-bit K and V has another name than the kernel.
  p = problem(1, 5000, 128);
  p.k.dtype = p.v.dtype = Dtype::e4m3;
  EXPECT_EQ(plan_forward(forward_of(p), device_with_only("decode_fwd"), forward, error), FA_ERROR_NOT_BUILT);
  EXPECT_STREQ(
      error.text,
      "this build (FA_ONLY) leaves out the kernel for this problem, decode_8bit_fwd_any_d128_8, and every other that could "
      "run it");
  // What no build serves keeps its own refusal; what launches nothing needs no kernel.
  p = problem(64, 64, 128);
  p.batch = int64_t{1} << 40;
  EXPECT_EQ(plan_forward(forward_of(p), device_with_only("none"), forward, error), FA_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(error.text).find(std::to_string(p.batch)), std::string::npos) << error.text;
  EXPECT_EQ(plan_backward(backward_of(p), device_with_only("none"), backward, error), FA_ERROR_UNSUPPORTED);
  BackwardProblem nothing = backward_of(problem(64, 64, 128));
  nothing.dq = nothing.dk = nothing.dv = Operand{};
  EXPECT_EQ(plan_backward(nothing, device_with_only("none"), backward, error), FA_OK) << error.text;
}

// Whatever device it is, some kernel takes a score text, and plans say so.
TEST(CudaSelect, EveryDeviceRunsScoreTexts) {
  MaskedProblem p = problem(1000, 1000, 128);
  const ScoreCall call;
  for (const bool given : {false, true}) {
    p.score_text.given = given;
    ScoredForward forward;
    ScoredBackward backward;
    static_cast<ForwardProblem &>(forward) = forward_of(p);
    static_cast<BackwardProblem &>(backward) = backward_of(p);
    forward.score = backward.score = given ? &call : nullptr;
    for (const auto &[name, device] : kDevices) {
      ForwardPlan forward_plan;
      BackwardPlan backward_plan;
      ErrorText error;
      EXPECT_EQ(plan_forward(forward, device, forward_plan, error), FA_OK) << name << error.text;
      EXPECT_EQ(plan_backward(backward, device, backward_plan, error), FA_OK) << name << error.text;
      EXPECT_EQ(forward_plan.scored, given);
      EXPECT_EQ(backward_plan.scored, given);
      const std::string forward_name = kernel_name(p, forward_plan);
      EXPECT_EQ(forward_name.ends_with("_score") || forward_name.ends_with("_score_split"), given) << forward_name;
      EXPECT_EQ(kernel_name(backward, backward_plan).ends_with("_score"), given);
    }
  }
}

// A score text compiles the kernel of the forward, whether the build has it or not. Backward needs the instance for its dq.
TEST(CudaSelect, ScoreTextsInBuildsWithoutTheirKernels) {
  MaskedProblem p = problem(1000, 1000, 128);
  p.score_text.given = true;
  ForwardPlan forward;
  BackwardPlan backward;
  ErrorText error;
  EXPECT_EQ(plan_forward(forward_of(p), device_with_only("none"), forward, error), FA_OK) << error.text;
  EXPECT_EQ(kernel_name(p, forward), "sm90_fwd_bf16_d128g");
  EXPECT_EQ(plan_backward(backward_of(p), device_with_only("none"), backward, error), FA_ERROR_NOT_BUILT);
  EXPECT_NE(std::string(error.text).find("sm90_bwd_bf16_d128g"), std::string::npos) << error.text;
}

// A build with one kernel alone gives it the problems that it serves in a complete build, with the same plan.
TEST(CudaSelect, OneKernelAloneServesItsProblems) {
  std::set<std::string> reached;
  for (const int64_t seqlen_q : {1, 8, 300, 1000}) {
    for (const int64_t seqlen_k : {1000, 5000}) {
      for (const int64_t head_dim : {64, 96, 128, 192, 256, 512}) {
        for (const float softcap : {0.f, 30.f}) {
          for (const Dtype keys : {Dtype::f16, Dtype::i8}) {
            MaskedProblem p = problem(seqlen_q, seqlen_k, head_dim);
            set_dtype(p, Dtype::f16);
            p.softcap = softcap;
            p.k.dtype = p.v.dtype = keys;
            const ForwardPlan plan = forward_plan(p, h200());
            const std::string instance = instance_name(kernel_of(plan), Dtype::f16);
            const ForwardPlan alone = forward_plan(p, device_with([=](const std::string &name) { return name == instance; }));
            EXPECT_EQ(kernel_name(p, alone), kernel_name(p, plan));
            EXPECT_EQ(alone.workspace_bytes, plan.workspace_bytes) << instance;
            EXPECT_EQ(alone.blocks, plan.blocks) << instance;
            reached.insert(instance);
          }
        }
      }
    }
  }
  EXPECT_GT(reached.size(), 20u);
}

// TMA is the plan's decision, and the query's reason says it.
TEST(CudaSelect, ReasonsSayHowTensorsAreReached) {
  const auto reason = [](const MaskedProblem &p) { return reason_of(forward_plan(p, h200())); };
  const auto has = [](const std::string &text, const char *part) { return text.find(part) != std::string::npos; };
  MaskedProblem p = problem(1000, 1000, 128);
  EXPECT_TRUE(forward_plan(p, h200()).tma_out);
  EXPECT_EQ(reason(p), "Hopper kernel (wgmma, TMA) for plain scores; TMA stores out");
  p.out.seq_stride = 1032;  // whole 16-byte vectors
  p.out.batch_stride = int64_t{1} << 40;
  EXPECT_FALSE(forward_plan(p, h200()).tma_out);
  EXPECT_EQ(reason(p), "Hopper kernel (wgmma, TMA) for plain scores; registers store out");
  p.out.seq_stride = 1029;
  EXPECT_EQ(reason(p),
            "Hopper kernel (wgmma, TMA) for plain scores; registers store out; not aligned for 16-byte vectors: out");
  p = problem(1000, 1000, 192, 128);
  EXPECT_FALSE(forward_plan(p, h200()).tma_out) << "that kernel has no shared memory for it";

  // Extend: pages that boxes of 16 rows divide; many rows.
  p = problem(300, 5000, 128);
  p.page_table = reinterpret_cast<const int32_t *>(&unreadable);
  p.num_pages = 1000;
  for (const int64_t page_size : {16, 48, 24, 1}) {
    p.page_size = page_size;
    const ForwardPlan plan = forward_plan(p, h200());
    ASSERT_EQ(plan.family, Family::extend);
    EXPECT_EQ(plan.tma_kv, page_size % 16 == 0) << page_size;
    EXPECT_TRUE(has(reason(p), plan.tma_kv ? "; TMA loads K and V" : "; cp.async gathers the rows of K and V")) << reason(p);
  }
  p.page_size = 16;
  for (const int64_t head_dim : {72, 128}) {
    p.head_dim = p.head_dim_v = head_dim;
    EXPECT_EQ(forward_plan(p, h200()).tma_kv, head_dim == 128) << "whole swizzle atoms";
  }
  p.q_lengths.max_len = 16;
  for (const int64_t group : {4, 8}) {
    p.heads_q = (p.group = group) * p.heads_k;
    EXPECT_EQ(forward_plan(p, h200()).tma_kv, group == 8) << "more than 64 rows";
  }

  // MLA: K in boxes of 8 rows.
  p = problem(1, 5000, 576, 512);
  p.v = p.k;
  p.page_table = reinterpret_cast<const int32_t *>(&unreadable);
  for (const int64_t page_size : {8, 64, 12}) {
    p.page_size = page_size;
    const ForwardPlan plan = forward_plan(p, h200());
    ASSERT_EQ(plan.family, Family::mla);
    EXPECT_EQ(plan.tma_kv, page_size % 8 == 0) << page_size;
  }

  // Vectors.
  p = problem(1000, 1000, 128);
  set_block_mask(p, 64);
  EXPECT_FALSE(has(reason(p), "not aligned")) << reason(p);
  p.k.seq_stride = p.out.seq_stride = 129;
  EXPECT_TRUE(has(reason(p), "; not aligned for 16-byte vectors: k, out")) << reason(p);
  BackwardProblem b = backward_of(problem(1000, 1000, 128));
  EXPECT_EQ(reason_of(backward_plan(b, h200())), "Hopper kernel (wgmma, TMA) for plain scores");
  b.dk.seq_stride = b.dq.seq_stride = 129;
  EXPECT_EQ(reason_of(backward_plan(b, h200())),
            "Hopper kernel (wgmma, TMA) for plain scores; not aligned for 16-byte vectors: dk");
  b.dout.seq_stride = 129;
  EXPECT_EQ(reason_of(backward_plan(b, h200())), "tensor-core kernel for plain scores; not aligned for 16-byte vectors: dout");
}

}  // namespace
}  // namespace fa::cuda
