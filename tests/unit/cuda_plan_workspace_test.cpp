// SPDX-License-Identifier: Apache-2.0
// How much workspace plans ask for.
#include <gtest/gtest.h>

#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// Four times the length takes at most about four times the workspace, never sixteen; more batch never less.
TEST(CudaPlan, WorkspaceGrowsAtMostLinearly) {
  for (const auto &[name, device] : kDevices) {
    for (const int64_t head_dim : {64, 128, 256}) {
      for (const int64_t seqlen : {1, 100, 4096, 65536}) {
        const MaskedProblem once = problem(seqlen, seqlen, head_dim), more = problem(4 * seqlen, 4 * seqlen, head_dim);
        const size_t small = backward_plan(backward_of(once), device).workspace_bytes,
                     large = backward_plan(backward_of(more), device).workspace_bytes;
        EXPECT_GE(large, small) << name;
        EXPECT_LE(large, 5 * small + 4096) << name;
        MaskedProblem batch = once;
        batch.batch *= 3;
        EXPECT_GE(backward_plan(backward_of(batch), device).workspace_bytes, small) << name;
      }
    }
  }
}

// Packed sequences take workspace for the rows that there are, not for as many as the longest one has each.
TEST(CudaPlan, PackedWorkspaceIsForTheRowsThatThereAre) {
  for (const auto &[name, device] : kDevices) {
    for (const int64_t head_dim : {64, 128, 256, 512}) {
      MaskedProblem p = problem(16384, 16384, head_dim);
      p.batch = 1;
      const size_t padded = backward_plan(backward_of(p), device).workspace_bytes;
      const int32_t unread[2] = {};
      p.batch = 64;
      p.q_lengths.cu = p.k_lengths.cu = unread;
      p.q_lengths.total = p.k_lengths.total = 16384;
      for (const int64_t longest : {256, 16384}) {
        p.q_lengths.max_len = p.k_lengths.max_len = longest;
        // A sequence may begin and end within a Q tile.
        EXPECT_LE(backward_plan(backward_of(p), device).workspace_bytes, 2 * padded) << name << head_dim << ' ' << longest;
      }
    }
  }
}

// Forward needs memory for splits only, and for no more of them than fill the device.
TEST(CudaPlan, ForwardWorkspaceIsForSplits) {
  int64_t whole = 0, split = 0;
  for (const auto &[name, device] : kDevices) {
    for (const int64_t seqlen_q : {1, 16, 512, 8192}) {
      for (const int64_t seqlen_k : {1, 1000, 100000}) {
        const MaskedProblem p = problem(seqlen_q, seqlen_k, 128);
        const ForwardPlan plan = forward_plan(p, device);
        if (plan.family == Family::decode || plan.family == Family::extend) continue;
        EXPECT_EQ(plan.workspace_bytes > 0, plan.num_splits > 1) << name;
        ++(plan.num_splits == 1 ? whole : split);
        if (plan.num_splits == 1) continue;
        EXPECT_LE(plan.blocks, 8 * device.multiprocessors) << name;
        const auto rows = static_cast<size_t>(plan.num_splits * p.batch * p.heads_q * seqlen_q);
        EXPECT_GE(plan.workspace_bytes, rows * static_cast<size_t>(p.head_dim_v + 1) * 4) << name;
        EXPECT_LE(plan.workspace_bytes, rows * static_cast<size_t>(p.head_dim_v + 1) * 4 + 1024) << name;
      }
    }
  }
  EXPECT_GT(whole, 0);
  EXPECT_GT(split, 0);
}

// Sizes past 32 bits are no smaller workspaces.
TEST(CudaPlan, HugeProblemsDoNotWrapAround) {
  MaskedProblem p = problem(1 << 20, 1 << 20, 128);
  p.batch = 1 << 6;
  const BackwardPlan plan = backward_plan(backward_of(p), h200());
  const double rows = static_cast<double>(p.batch) * static_cast<double>(p.heads_q) * (1 << 20);
  EXPECT_GE(static_cast<double>(plan.workspace_bytes), rows * 4 * static_cast<double>(p.head_dim));
  EXPECT_GE(static_cast<double>(plan.dq_sum_offset), rows * 8);
  p.num_splits = 100;
  const ForwardPlan forward = forward_plan(p, h200());
  EXPECT_EQ(forward.blocks % forward.num_splits, 0);
  EXPECT_GE(static_cast<double>(forward.workspace_bytes), rows * 4 * static_cast<double>(p.head_dim_v * forward.num_splits));
}

}  // namespace
}  // namespace fa::cuda
