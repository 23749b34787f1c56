// SPDX-License-Identifier: Apache-2.0
// Plans of every kind of problem on every device: each has a kernel that fits, and each kernel has a problem.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

#include "cuda/kernels/bwd_sm80/backward_table.h"
#include "cuda/kernels/fwd_sm80/forward_table.h"
#include "unit/cuda_plan_options.h"
#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// Wide heads have tensor-core kernels on every device with every option, and small CTAs serve devices that have room for as many as they are made for.
TEST(CudaPlan, TensorCoresOnEveryDevice) {
  for_everything([&](const MaskedProblem &p, const Device &device, const std::string &text) {
    if (p.q.dtype == Dtype::f32) return;
    const BackwardProblem b = backward_of(p);
    const BackwardPlan backward = backward_plan(b, device);
    EXPECT_NE(forward_plan(p, device).family, Family::simt) << text;
    EXPECT_NE(backward.family, Family::simt) << text;
    EXPECT_EQ(backward.dq_sum_by_lane, device.compute_capability >= 90) << text;
    if (backward.family != Family::sm80) return;
    const sm80::BackwardShape &shape = sm80::kBackwardShapes[backward.shape];
    if (shape.scores != kPlain) return;
    EXPECT_LE(shape.min_blocks * (shape.shared_bytes() + kReservedSharedBytes), device.shared_bytes + kReservedSharedBytes)
        << text;
  });
}

TEST(CudaPlan, EveryProblemHasAKernelThatFits) {
  for_everything([&](const MaskedProblem &p, const Device &device, const std::string &text) {
    const ForwardPlan forward = forward_plan(p, device);
    EXPECT_LE(kernel_of(forward).shared_bytes, device.shared_bytes) << text;
    EXPECT_GE(forward.blocks, 1) << text;
    EXPECT_STRNE(forward.reason, "") << text;
    EXPECT_TRUE(is_kernel_name(kernel_name(p, forward))) << kernel_name(p, forward);
    const BackwardProblem b = backward_of(p);
    const BackwardPlan backward = backward_plan(b, device);
    EXPECT_LE(kernel_of(backward).shared_bytes, device.shared_bytes) << text;
    EXPECT_STRNE(backward.reason, "") << text;
    EXPECT_TRUE(is_kernel_name(kernel_name(b, backward))) << kernel_name(b, backward);
    EXPECT_LT(kernel_name(b, backward).size(), sizeof(fa_plan_info::kernel)) << text;
  });
}

// Rows of keys with more than 512 columns have forward kernels on every device, and a refusal of backward that says why.
TEST(CudaPlan, WiderKeysThanValues) {
  for (const auto &[name, device] : kDevices) {
    for (const auto &[option, set] : options()) {
      for (const int64_t head_dim : {520, 576}) {
        MaskedProblem p = problem(300, 400, head_dim, 512);
        set(p);
        const ForwardPlan forward = forward_plan(p, device);
        EXPECT_LE(kernel_of(forward).shared_bytes, device.shared_bytes) << name << ", " << option;
        BackwardPlan backward;
        ErrorText error;
        EXPECT_EQ(plan_backward(backward_of(p), device, backward, error), FA_ERROR_UNSUPPORTED) << name << ", " << option;
        EXPECT_NE(std::string(error.text).find("head_dim is " + std::to_string(head_dim)), std::string::npos) << error.text;
      }
    }
  }
}

// A line of a table that no problem on any device reaches would only enlarge the binary.
TEST(CudaPlan, EveryLineOfTheTablesIsReached) {
  std::set<std::pair<Family, int32_t>> forward, backward, jvp;
  const auto reach = [](auto &rows, const auto &plan) { rows.insert({plan.family, plan.shape}); };
  for (const auto &[device_name, device] : kDevices) {
    for (const auto &[option, set] : options()) {
      for (int64_t head_dim = 32; head_dim <= 576; head_dim += 32) {
        for (int64_t head_dim_v = 32; head_dim_v <= 512; head_dim_v += 32) {
          MaskedProblem p = problem(1000, 1000, head_dim, head_dim_v);
          set(p);
          for (const int64_t seqlen : {200, 1000}) {
            p.q_lengths.max_len = p.k_lengths.max_len = seqlen;
            reach(forward, forward_plan(p, device));
          }
          ForwardProblem with_max = forward_of(p);
          with_max.max_logit = &unreadable;
          reach(forward, forward_plan(with_max, device));
          for (const int64_t batch : {2, 20}) {
            MaskedProblem pages = p;
            pages.batch = batch;
            set_pages(pages, 64);
            reach(forward, forward_plan(pages, device));
          }
          set_fp8(p, Dtype::bf16);
          reach(forward, forward_plan(p, device));
          set_dtype(p, Dtype::bf16);
          for (const int64_t keys : {500, 9000}) {
            MaskedProblem same = problem(500, keys, head_dim, head_dim_v);
            set_dtype(same, Dtype::bf16);
            same.same_bits = same.batch_invariant = same.deterministic = true;
            for (const auto &[keys_of, paged] : {std::pair{Dtype::bf16, false}, {Dtype::i8, false}, {Dtype::bf16, true}}) {
              same.k.dtype = same.v.dtype = keys_of;
              if (paged) set_pages(same, 16);
              for (const int64_t queries : {1, 16, 500, 2000}) {
                same.q_lengths.max_len = queries;
                ForwardPlan plan;
                ErrorText error;
                if (plan_forward(forward_of(same), device, plan, error) == FA_OK) reach(forward, plan);
              }
            }
          }
          for (const int64_t seqlen_q : {1, 4, 8, 16}) {
            MaskedProblem few = problem(seqlen_q, 1000, head_dim, head_dim_v);
            set(few);
            reach(forward, forward_plan(few, device));
            Device without = device;
            without.sm90 = false;
            reach(forward, forward_plan(few, without));
            few.k.dtype = few.v.dtype = Dtype::i8;
            reach(forward, forward_plan(few, device));
            few.k.dtype = few.v.dtype = Dtype::bf16;
            few.k_lengths.max_len = 1 << 20;
            reach(forward, forward_plan(few, device));
            few.batch = 1000;
            reach(forward, forward_plan(few, device));
            few.k.dtype = few.v.dtype = Dtype::e4m3;
            for (const bool factors_of_rows : {false, true}) {
              ForwardProblem bytes = forward_of(few);
              bytes.k_descale.per_row = bytes.v_descale.per_row = factors_of_rows;
              reach(forward, forward_plan(bytes, device));
            }
          }
          MaskedProblem mla = p;
          mla.v = mla.k;
          for (const int64_t seqlen_q : {int64_t{1}, p.q_lengths.max_len}) {
            if (head_dim_v > head_dim) continue;
            mla.q_lengths.max_len = seqlen_q;
            for (const int64_t keys : {512, 1000}) {
              mla.k_lengths.max_len = keys;
              for (const int64_t batch : {p.batch, 24 / p.heads_k, int64_t{200}}) {  // few work tiles, some, and many
                MaskedProblem latent = mla;
                latent.batch = batch;
                reach(forward, forward_plan(latent, device));
              }
              MaskedProblem same = mla;
              same.same_bits = same.batch_invariant = same.deterministic = true;
              for (const Dtype keys_of : {Dtype::bf16, Dtype::i8}) {
                same.k.dtype = same.v.dtype = keys_of;
                ForwardPlan of_same;
                ErrorText error;
                if (plan_forward(forward_of(same), device, of_same, error) == FA_OK) reach(forward, of_same);
              }
            }
          }
          // The same in bytes, and with lists of keys, which are masks of their own.
          for (const Dtype dtype : {Dtype::bf16, Dtype::e4m3}) {
            ForwardProblem latent = forward_of(mla);
            latent.k.dtype = latent.v.dtype = dtype;
            for (const int64_t queries : {int64_t{1}, int64_t{5}, p.q_lengths.max_len}) {
              latent.q_lengths.max_len = queries;
              reach(forward, forward_plan(latent, device));
            }
            if (has_data_mask(latent) || latent.general_score() || latent.band.right < Band::kUnlimited) continue;
            latent.key_indices = {true, reinterpret_cast<const int32_t *>(&unreadable), 0, 512, 1, 512};
            reach(forward, forward_plan(latent, device));
          }
          if (head_dim > 512) continue;  // forward alone
          for (const auto &[queries, keys] : {std::pair{512, 1000}, {1000, 1000}, {1000, 3000}, {30000, 30000}}) {
            p.q_lengths.max_len = queries;
            p.k_lengths.max_len = keys;
            for (const int64_t right : {p.band.right, int64_t{0}}) {  // and under a causal mask
              MaskedProblem masked = p;
              masked.band.right = right;
              reach(backward, backward_plan(backward_of(masked), device));
              Device without = device;
              without.sm90 = false;
              reach(backward, backward_plan(backward_of(masked), without));
            }
          }
          set_dtype(p, Dtype::f32);
          reach(forward, forward_plan(p, device));
          reach(backward, backward_plan(backward_of(p), device));
        }
      }
    }
  }
  for (const int64_t head_dim : {8, 64, 72, 104}) {
    reach(jvp, jvp_plan(jvp_of(problem(1000, 1000, head_dim)), h200()));
  }
  const auto count = [](Pass pass) {
    size_t rows = 0;
    for (const KernelRow &kernel : all_kernels()) rows += kernel.pass == pass;
    return rows;
  };
  EXPECT_EQ(forward.size(), count(Pass::forward));
  EXPECT_EQ(backward.size(), count(Pass::backward));
  EXPECT_EQ(jvp.size(), count(Pass::jvp));
}

// Kernels that are not for every score evaluate theirs unasked: no problem without it may get them.
TEST(CudaPlan, KernelsForBiasOrDropoutGetProblemsThatHaveIt) {
  for_everything([&](const MaskedProblem &p, const Device &device, const std::string &text) {
    const auto fits = [&](ScoreSet scores) {
      const ScoreSet own = scores & (kTileBias | kDropout);
      return scores == kAll || (own & ~scores_of(p)) == 0;
    };
    const ForwardPlan forward = forward_plan(p, device);
    EXPECT_TRUE(forward.family != Family::sm80 || fits(sm80::kForwardShapes[forward.shape].scores)) << text;
    const BackwardPlan backward = backward_plan(backward_of(p), device);
    EXPECT_TRUE(backward.family != Family::sm80 || fits(sm80::kBackwardShapes[backward.shape].scores)) << text;
  });
}

}  // namespace
}  // namespace fa::cuda
