// SPDX-License-Identifier: Apache-2.0
// Plans of the forward-mode derivative.
#include <gtest/gtest.h>

#include <string>

#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

TEST(CudaPlan, ForwardModeDerivative) {
  const auto plan_of = [](MaskedProblem p) { return jvp_plan(jvp_of(p), h200()); };
  const auto name_of = [&](int64_t head_dim, int64_t head_dim_v = 0) {
    const MaskedProblem p = problem(300, 400, head_dim, head_dim_v);
    return kernel_name(jvp_of(p), plan_of(p));
  };
  EXPECT_EQ(name_of(64), "sm90_jvp_bf16_d64");
  EXPECT_EQ(name_of(8, 40), "sm90_jvp_bf16_d64");
  EXPECT_EQ(name_of(64, 72), "sm90_jvp_bf16_d96");
  EXPECT_EQ(name_of(128), "sm90_jvp_bf16_d128");
  EXPECT_TRUE(is_kernel_name(name_of(128)));
  MaskedProblem p = problem(300, 400, 128);
  EXPECT_EQ(plan_of(p).workspace_bytes, 0u);
  EXPECT_EQ(plan_of(p).tiles, p.batch * p.heads_q * 3) << "row blocks of 128 queries";
  EXPECT_EQ(plan_of(p).blocks, plan_of(p).tiles);
  EXPECT_EQ(plan_of(p).counters, 0);
  const JvpPlan large = plan_of(problem(3000, 400, 128));
  EXPECT_EQ(large.blocks, h200().multiprocessors) << "persistent CTAs";
  EXPECT_EQ(large.counters, 2);
  EXPECT_STRNE(plan_of(p).reason, "");
  // What changes neither the tiles nor their order of work does not change the plan's kernel.
  for (void (*set)(MaskedProblem &) :
       {+[](MaskedProblem &x) { x.batch_invariant = x.deterministic = true; }, +[](MaskedProblem &x) { set_starts(x); },
        +[](MaskedProblem &x) { x.deterministic = true; }, +[](MaskedProblem &x) { x.band.right = 0; }}) {
    MaskedProblem other = p;
    set(other);
    EXPECT_EQ(kernel_name(jvp_of(other), plan_of(other)), "sm90_jvp_bf16_d128");
  }
  // Nothing to compute, and outputs without anything to compute them from.
  p.k_lengths.max_len = 0;
  EXPECT_EQ(plan_of(p).tiles, p.batch * p.heads_q * 3);
  MaskedProblem empty = problem(300, 400, 128);
  empty.batch = 0;
  EXPECT_EQ(plan_of(empty).blocks, 0);
}

// What the kernels of the forward-mode derivative do not take is refused with a sentence that begins with the argument.
TEST(CudaPlan, ForwardModeDerivativeRefuses) {
  const auto refusal = [](const JvpProblem &j, const Device &device = h200()) {
    JvpPlan plan;
    ErrorText error;
    EXPECT_EQ(plan_jvp(j, device, plan, error), FA_ERROR_UNSUPPORTED);
    EXPECT_NE(std::string(error.text).find("fa_forward_jvp"), std::string::npos) << error.text;
    return std::string(error.text);
  };
  const auto begins = [](const std::string &text, const std::string &start) {
    return text.compare(0, start.size(), start) == 0;
  };
  const struct {
    const char *start;
    void (*change)(JvpProblem &j);
  } refusals[] = {
      {"q.dtype is float32,", [](JvpProblem &j) { set_dtype(j.forward, Dtype::f32); }},
      {"softcap is 30,", [](JvpProblem &j) { j.forward.softcap = 30; }},
      {"alibi_slopes is given,", [](JvpProblem &j) { j.forward.alibi_slopes = &unreadable; }},
      {"seqstart_k is given beside a mask",
       [](JvpProblem &j) {
         set_starts(j.forward);
         j.forward.band.right = 0;
         j.forward.band.top_left = true;
       }},
      {"head_dim of q is 136,", [](JvpProblem &j) { j.forward.head_dim = 136; }},
      {"head_dim of v is 256,", [](JvpProblem &j) { j.forward.head_dim_v = 256; }},
      {"q at ", [](JvpProblem &j) { j.forward.head_dim = 60; }},
      {"v at ", [](JvpProblem &j) { j.forward.head_dim_v = 4; }},
      {"k at ", [](JvpProblem &j) { j.forward.k.seq_stride = -128; }},
      {"tq at ", [](JvpProblem &j) { j.tq.seq_stride = 130; }},
      {"tk at ", [](JvpProblem &j) { j.tk.head_stride = -128; }},
      {"tv at ", [](JvpProblem &j) { j.tv.data = reinterpret_cast<char *>(&unreadable) + 2; }},
      {"k at ", [](JvpProblem &j) { j.forward.k_lengths.total = int64_t{1} << 31; }},
  };
  for (const auto &[start, change] : refusals) {
    JvpProblem j = jvp_of(problem(300, 400, 64));
    change(j);
    EXPECT_TRUE(begins(refusal(j), start)) << refusal(j) << " does not begin with " << start;
  }
  for (const auto &[name, device] : kDevices) {
    if (device.sm90) continue;
    const std::string text = refusal(jvp_of(problem(300, 400, 64)), device);
    EXPECT_TRUE(begins(text, "device_type is FA_DEVICE_CUDA")) << name << ": " << text;
  }
  // An unaligned tout is stored element by element, and says so.
  JvpProblem j = jvp_of(problem(300, 400, 64));
  j.tout.seq_stride = 65;
  EXPECT_NE(reason_of(jvp_plan(j, h200())).find("not aligned for 16-byte vectors: tout"), std::string::npos);
  // A build without the kernel.
  JvpPlan plan;
  ErrorText error;
  Device none = h200();
  none.is_built = [](const KernelRow &, Dtype) { return false; };
  EXPECT_EQ(plan_jvp(j, none, plan, error), FA_ERROR_NOT_BUILT);
  EXPECT_NE(std::string(error.text).find("sm90_jvp_bf16_d64,"), std::string::npos) << error.text;
}

}  // namespace
}  // namespace fa::cuda
