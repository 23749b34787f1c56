// SPDX-License-Identifier: Apache-2.0
// Plans of the Hopper kernels, backward: which kernel a problem gets.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/host/planners.h"
#include "cuda/kernels/bwd_sm80/backward_table.h"
#include "cuda/kernels/bwd_sm90/backward_table.h"
#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// Blocks of 64 keys, of which the two warpgroups of a work tile may see different ones.
TEST(CudaPlanHopper, BackwardOfNarrowBlocks) {
  const auto kernel = [](int64_t head_dim, int64_t seqlen, int64_t size, bool listed = false) {
    MaskedProblem p = problem(seqlen, seqlen, head_dim);
    if (listed) {
      set_block_lists(p);
      p.block_lists.size_k = size;
    } else {
      set_block_mask(p, size);
    }
    const BackwardPlan plan = backward_plan(backward_of(p), h200());
    // A second pass, for NaN, is that of a kernel with the path.
    EXPECT_TRUE(sm90::kBackwardShapes[plan.shape].nan_safe || sm90::kBackwardShapes[plan.nan_safe_shape].nan_safe);
    return std::string(kernel_of(plan).name);
  };
  for (const bool listed : {false, true}) {
    for (const int64_t size : {16, 64, 192}) {
      EXPECT_EQ(kernel(64, 4096, size, listed), "d64b64n") << size;
      EXPECT_EQ(kernel(128, 4096, size, listed), "d128b64n") << size;
    }
    for (const int64_t size : {128, 256}) {
      EXPECT_EQ(kernel(64, 4096, size, listed), "d64bn") << size;
      EXPECT_EQ(kernel(128, 4096, size, listed), "d128bn") << size;
    }
  }
  EXPECT_EQ(kernel(128, 500, 64), "d128b") << "too small for a second pass";
  EXPECT_EQ(kernel(64, 500, 64), "d64b64") << "too small for a second pass";
  EXPECT_EQ(kernel(64, 500, 128), "d64b") << "too small for a second pass";
}

// The tiles of a batch-invariant backward depend on no length and number, and it adds to dq in order. With a NaN-safe path or without, by the batch.
TEST(CudaPlanHopper, BatchInvariantBackward) {
  for (const auto &[head_dim, head_dim_v, name] : {std::tuple<int64_t, int64_t, std::string>{64, 64, "d64"},
                                                   {96, 96, "d96"},
                                                   {128, 128, "d128"},
                                                   {192, 128, "d192_128"},
                                                   {192, 192, "d192"},
                                                   {256, 256, "d256o"},
                                                   {320, 320, "d320"},
                                                   {512, 512, "d512"}}) {
    std::set<std::string> kernels;
    for (const int64_t batch : {1, 2, 50}) {
      for (const int64_t length : {1, 70, 1000, 2049, 16384}) {
        for (const bool causal : {false, true}) {
          for (const bool packed : {false, true}) {
            BackwardProblem b = backward_of(problem(length, length, head_dim, head_dim_v));
            MaskedProblem &p = b.forward;
            p.batch = batch;
            p.batch_invariant = p.deterministic = true;
            if (causal) p.band.right = 0;
            if (packed) {
              p.q_lengths.cu = p.k_lengths.cu = &unreadable;
              p.q_lengths.total = p.k_lengths.total = batch * length;
            }
            const BackwardPlan plan = backward_plan(b, h200());
            ASSERT_EQ(plan.family, Family::sm90) << head_dim;
            kernels.insert(kernel_of(plan).name);
            EXPECT_FALSE(plan.cyclic);
            EXPECT_EQ(plan.split_tiles, 0);
            EXPECT_FALSE(plan.zero_dq_sum) << "the first work tile stores";
          }
        }
      }
    }
    EXPECT_TRUE(kernels.count(name) == 1);
    EXPECT_TRUE(kernels.size() == 1 || (kernels.size() == 2 && kernels.count(name + "n") == 1)) << name;
  }
  // What has the same bits has the same tiles.
  for (size_t n = 0; n < std::size(sm90::kBackwardShapes); ++n) {
    const sm90::BackwardShape &shape = sm90::kBackwardShapes[n];
    if (shape.nan_safe || !shape.has_bits_of_nan_safe()) continue;
    const sm90::BackwardShape &next =
        *std::find_if(std::begin(sm90::kBackwardShapes) + static_cast<ptrdiff_t>(n), std::end(sm90::kBackwardShapes),
                      [](const sm90::BackwardShape &x) { return x.nan_safe; });
    EXPECT_EQ(next.rows, shape.rows) << shape.name;
    EXPECT_EQ(next.keys(), shape.keys()) << shape.name;
    EXPECT_EQ(next.scores, shape.scores) << shape.name;
  }
}

TEST(CudaPlanHopper, HopperBackwardKernels) {
  const auto family = [](const BackwardProblem &b, const Device &device = h200()) { return backward_plan(b, device).family; };
  const BackwardProblem plain = backward_of(problem(1000, 1000, 128));
  EXPECT_EQ(family(plain), Family::sm90);
  Device without = h200();
  without.sm90 = false;
  EXPECT_EQ(family(plain, without), Family::sm80);
  const std::vector<std::pair<const char *, void (*)(BackwardProblem &)>> others = {
      {"bias that TMA cannot read", [](BackwardProblem &b) { set_bias(b.forward, 3); }},
      {"q at an odd address", [](BackwardProblem &b) { b.forward.q.data = static_cast<char *>(b.forward.q.data) + 2; }},
      {"rows of dout that do not start on 16 bytes", [](BackwardProblem &b) { b.dout.seq_stride = 129; }},
      {"rows that are not whole 16-byte vectors", [](BackwardProblem &b) { b.forward.head_dim = b.forward.head_dim_v = 127; }},
      {"more keys than TMA can count", [](BackwardProblem &b) { b.forward.k_lengths.total = int64_t{1} << 32; }},
  };
  for (const auto &[text, change] : others) {
    BackwardProblem b = plain;
    change(b);
    EXPECT_EQ(family(b), Family::sm80) << text;
  }
  BackwardProblem b = plain;
  set_block_mask(b.forward, 64);
  EXPECT_EQ(family(b), Family::sm90);
  for (const auto set : {set_element_mask, set_starts, set_slices, set_block_lists}) {
    for (const int64_t head_dim : {64, 256}) {
      for (const bool deterministic : {false, true}) {
        b = backward_of(problem(1000, 1000, head_dim));
        b.forward.deterministic = deterministic;
        set(b.forward);
        const BackwardPlan plan = backward_plan(b, h200());
        EXPECT_EQ(plan.family, Family::sm90) << head_dim << deterministic;
        // In deterministic mode the first work tile stores its part of dq. Where masks as data decide which one that is, clusters want a zeroed sum.
        EXPECT_EQ(plan.zero_dq_sum, head_dim == 256 && (!deterministic || set != set_starts)) << deterministic;
      }
    }
  }
  b = plain;
  b.forward.dropout.threshold = 6554;
  EXPECT_EQ(family(b), Family::sm90);
  b = plain;
  set_bias(b.forward);
  EXPECT_EQ(family(b), Family::sm90);
  EXPECT_LT(backward_plan(b, h200()).dbias_shape, 0);
  // dbias is the second pass of another kernel, without which that kernel does all of it.
  b.dbias = b.forward.bias;
  const BackwardPlan with_dbias = backward_plan(b, h200());
  EXPECT_EQ(with_dbias.family, Family::sm90);
  ASSERT_GE(with_dbias.dbias_shape, 0);
  EXPECT_TRUE(stages_bias(sm80::kBackwardShapes[with_dbias.dbias_shape].scores));
  EXPECT_GE(sm80::kBackwardShapes[with_dbias.dbias_shape].head_dim, b.forward.head_dim);
  // Gradients may lie anywhere: they are not read.
  b = plain;
  b.dk.seq_stride = b.dq.seq_stride = 129;
  EXPECT_EQ(family(b), Family::sm90);
  // Heads get the first bucket with room for them.
  for (const auto &[head_dim, head_dim_v, bucket, bucket_v] : std::vector<std::array<int64_t, 4>>{{8, 8, 64, 64},
                                                                                                  {64, 64, 64, 64},
                                                                                                  {64, 72, 96, 96},
                                                                                                  {72, 64, 96, 96},
                                                                                                  {96, 96, 96, 96},
                                                                                                  {96, 104, 128, 128},
                                                                                                  {128, 128, 128, 128},
                                                                                                  {136, 64, 192, 128},
                                                                                                  {192, 128, 192, 128},
                                                                                                  {64, 136, 192, 192},
                                                                                                  {192, 192, 192, 192},
                                                                                                  {200, 64, 256, 256},
                                                                                                  {256, 256, 256, 256}}) {
    b = plain;
    b.forward.head_dim = head_dim;
    b.forward.head_dim_v = head_dim_v;
    const BackwardPlan plan = backward_plan(b, h200());
    const std::string text = std::to_string(head_dim) + ", " + std::to_string(head_dim_v);
    EXPECT_EQ(plan.family, Family::sm90) << text;
    EXPECT_EQ(sm90::kBackwardShapes[plan.shape].head_dim, bucket) << text;
    EXPECT_EQ(sm90::kBackwardShapes[plan.shape].head_dim_v, bucket_v) << text;
    EXPECT_EQ(plan.dq_sum_columns, bucket) << text;
  }
  // Softcap and ALiBi have kernels of their own, fewer of them.
  for (const auto &[head_dim, head_dim_v, bucket] :
       std::vector<std::array<int64_t, 3>>{{64, 64, 64}, {96, 96, 128}, {192, 128, 192}, {200, 64, 256}}) {
    b = plain;
    b.forward.head_dim = head_dim;
    b.forward.head_dim_v = head_dim_v;
    const int32_t unscored = backward_plan(b, h200()).shape;
    EXPECT_FALSE(sm90::kBackwardShapes[unscored].scored());
    b.forward.softcap = 30;
    BackwardPlan plan = backward_plan(b, h200());
    EXPECT_EQ(plan.family, Family::sm90) << head_dim;
    EXPECT_EQ(plan.zero_dq_sum, bucket >= 192) << head_dim;
    EXPECT_TRUE(sm90::kBackwardShapes[plan.shape].scored()) << head_dim;
    EXPECT_EQ(sm90::kBackwardShapes[plan.shape].head_dim, bucket) << head_dim;
    b.forward.softcap = 0;
    static float slope = 0;
    b.forward.alibi_slopes = &slope;
    EXPECT_EQ(backward_plan(b, h200()).shape, plan.shape) << head_dim;
    // That for head_dim 64 has no logarithmic formula.
    b.forward.alibi_log_scale = 0.5f;
    plan = backward_plan(b, h200());
    EXPECT_EQ(plan.family, Family::sm90) << head_dim;
    EXPECT_EQ(sm90::kBackwardShapes[plan.shape].head_dim, std::max<int64_t>(bucket, 128)) << head_dim;
  }
  // For few work tiles the clusters are persistent: an even number of CTAs.
  b = plain;
  b.forward.head_dim = b.forward.head_dim_v = 256;
  for (const int64_t keys : {1, 129, 1024, 1025}) {
    b.forward.k_lengths.max_len = keys;
    for (const int multiprocessors : {1, 131, 132}) {
      Device device = h200();
      device.multiprocessors = multiprocessors;
      const BackwardPlan plan = backward_plan(b, device);
      const bool persistent = keys <= 1024;
      EXPECT_EQ(sm90::kBackwardShapes[plan.shape].persistent(), persistent) << keys;
      const int64_t all = 2 * ((keys + 127) / 128) * b.forward.heads_k * b.forward.batch,
                    most = std::max(multiprocessors / 2 * 2, 2);
      EXPECT_EQ(plan.blocks, persistent ? std::min(all, most) : all) << keys;
      EXPECT_TRUE(plan.zero_dq_sum) << keys;
    }
  }
  // Deterministic gradients: key blocks add their two halves of a query tile of dq in order. The kernels are the same up to 192 columns.
  for (const int64_t head_dim : {64, 96, 128, 192, 256}) {
    b = plain;
    b.forward.head_dim = b.forward.head_dim_v = head_dim;
    b.forward.k_lengths.max_len = head_dim == 192 ? 512 : 2048;
    EXPECT_EQ(backward_plan(b, h200()).zero_dq_sum, head_dim == 256) << head_dim;  // that one adds from registers
    b.forward.k_lengths.max_len = 8192;
    const BackwardPlan unordered = backward_plan(b, h200());
    EXPECT_EQ(unordered.zero_dq_sum, head_dim != 64) << "64 work tiles see a Q tile";
    b.forward.band = {1024, 0, false};
    EXPECT_EQ(backward_plan(b, h200()).zero_dq_sum, head_dim > 128) << "ten do in a window";
    b.forward.band = {Band::kUnlimited, Band::kUnlimited, false};
    b.forward.deterministic = true;
    const BackwardPlan ordered = backward_plan(b, h200());
    EXPECT_EQ(ordered.family, Family::sm90) << head_dim;
    EXPECT_FALSE(ordered.zero_dq_sum) << head_dim;
    // In order at most eight blocks of keys of a head are worked on at once, if there are heads enough. In cyclic order there is no need.
    EXPECT_EQ(ordered.cyclic, head_dim == 128);
    EXPECT_GE(ordered.heads_per_l2_group,
              ordered.cyclic
                  ? 1
                  : std::min(b.forward.heads_k * b.forward.batch, int64_t{h200().multiprocessors} / (head_dim >= 192 ? 16 : 8)))
        << head_dim;
    EXPECT_GE(ordered.heads_per_l2_group, unordered.heads_per_l2_group) << head_dim;
    // CTAs or clusters are persistent, except for long sequences of keys with 256 columns.
    EXPECT_EQ(unordered.blocks, head_dim == 256 ? 2 * 64 * b.forward.heads_k * b.forward.batch : h200().multiprocessors);
    if (head_dim == 256) {
      EXPECT_EQ(ordered.blocks, h200().multiprocessors);
    }
    EXPECT_EQ(ordered.shape == unordered.shape, head_dim < 256) << head_dim;
    EXPECT_TRUE(sm90::kBackwardShapes[ordered.shape].ordered) << head_dim;
    if (ordered.cyclic) {  // two sums for dq
      EXPECT_GE(ordered.dq_semaphore_offset - ordered.dq_sum_offset,
                (unordered.dq_semaphore_offset - unordered.dq_sum_offset) * 2 - 256);
      EXPECT_EQ(ordered.dq_semaphores, 2 * unordered.dq_semaphores);
    } else {
      EXPECT_EQ(ordered.workspace_bytes, unordered.workspace_bytes) << head_dim;
    }
    EXPECT_GE(ordered.workspace_bytes,
              ordered.dq_semaphore_offset + 2 * b.forward.batch * b.forward.heads_q * ordered.q_tiles * sizeof(int32_t))
        << head_dim;
  }
}

// TMA stores dk and dv where the kernel can stage them and their rows are whole 16-byte vectors of the operands' dtype.
TEST(CudaPlanHopper, TmaStoresDkAndDv) {
  const auto plan_of = [](int64_t head_dim, auto set) {
    BackwardProblem b = backward_of(problem(4096, 4096, head_dim));
    set(b);
    return backward_plan(b, h200());
  };
  for (const int64_t head_dim : {40, 64, 104, 128}) {
    const BackwardPlan plan = plan_of(head_dim, [](BackwardProblem &) {});
    EXPECT_TRUE(plan.tma_dk && plan.tma_dv) << head_dim;
  }
  const auto registers = [](const BackwardPlan &plan) { return !plan.tma_dk && !plan.tma_dv; };
  EXPECT_TRUE(registers(plan_of(96, [](BackwardProblem &) {}))) << "dq has no room for dk";
  EXPECT_TRUE(registers(plan_of(256, [](BackwardProblem &) {}))) << "a cluster";
  EXPECT_TRUE(registers(plan_of(128, [](BackwardProblem &b) { b.forward.deterministic = true; })));
  EXPECT_TRUE(registers(plan_of(128, [](BackwardProblem &b) { b.forward.dropout.threshold = 6554; })));
  EXPECT_TRUE(registers(plan_of(128, [](BackwardProblem &b) { b.dk.dtype = b.dv.dtype = Dtype::f32; })));
  // Each of them by itself.
  const BackwardPlan odd = plan_of(128, [](BackwardProblem &b) { b.dk.data = static_cast<char *>(b.dk.data) + 2; });
  EXPECT_FALSE(odd.tma_dk);
  EXPECT_TRUE(odd.tma_dv);
  const BackwardPlan unwanted = plan_of(128, [](BackwardProblem &b) { b.dv.data = nullptr; });
  EXPECT_TRUE(unwanted.tma_dk);
  EXPECT_FALSE(unwanted.tma_dv);
}

// Partial sums of dk and dv are fp32. Hopper's kernels up to 256 columns store them, those with CTAs for each gradient do not.
TEST(CudaPlanHopper, KeyGradientsOfFp32) {
  for (const int64_t head_dim : {64, 128, 256, 320, 512}) {
    for (const bool of_v : {false, true}) {
      BackwardProblem b = backward_of(problem(1000, 1000, head_dim));
      (of_v ? b.dv : b.dk).dtype = Dtype::f32;
      EXPECT_EQ(backward_plan(b, h200()).family == Family::sm90, head_dim <= 256) << head_dim;
    }
  }
}

// Kernels without a NaN-safe path serve what every query sees whole, and large problems with a mask, behind which a second pass stands ready.
TEST(CudaPlanHopper, KernelsWithoutNanSafePath) {
  Device device = h200();
  device.second_pass_from = 0;
  const auto plan_of = [&](int64_t head_dim, int64_t seqlen_q, int64_t seqlen_k, auto set) {
    BackwardProblem b = backward_of(problem(seqlen_q, seqlen_k, head_dim));
    set(b.forward);
    return backward_plan(b, device);
  };
  const auto is_safe = [](const BackwardPlan &plan) { return sm90::kBackwardShapes[plan.shape].nan_safe; };
  const auto plain = [](MaskedProblem &) {};
  const auto causal = [](MaskedProblem &p) { p.band.right = 0; };
  const auto window = [](int64_t left) { return [=](MaskedProblem &p) { p.band = {left, 0, false}; }; };
  const auto deterministic = [](MaskedProblem &p) { p.deterministic = true; };
  const int32_t lengths = 0;
  const float sink = 0;
  for (const int64_t head_dim : {40, 64, 96, 104, 128}) {
    const int64_t rows = head_dim > 96 ? 80 : head_dim > 64 ? 64 : 128;
    for (const int64_t seqlen : {960, 1000, 1024, 4096, 16384, 100000}) {
      const BackwardPlan plan = plan_of(head_dim, seqlen, 700, plain);
      EXPECT_FALSE(is_safe(plan)) << seqlen;
      EXPECT_EQ(plan.q_tiles, (seqlen + rows - 1) / rows);
      EXPECT_LT(plan.nan_safe_shape, 0) << "no pair is hidden";
      EXPECT_GT(plan.nonfinite_offset, 0u);
      EXPECT_LT(plan.nonfinite_offset, plan.workspace_bytes);
    }
    for (const int64_t seqlen : {2048, 4096, 16384}) {
      const BackwardPlan plan = plan_of(head_dim, seqlen, seqlen, causal);
      ASSERT_FALSE(is_safe(plan)) << seqlen;
      ASSERT_GE(plan.nan_safe_shape, 0);
      // The flag lies behind what either pass writes.
      const BackwardPlan second = nan_safe_pass(backward_of(problem(seqlen, seqlen, head_dim)), plan);
      EXPECT_TRUE(is_safe(second));
      EXPECT_EQ(second.q_tiles, seqlen / (head_dim > 64 ? 64 : 128));
      EXPECT_LT(second.nan_safe_shape, 0);
      EXPECT_EQ(second.nonfinite_offset, 0u) << "the second pass must not clear it";
      EXPECT_LE(second.workspace_bytes, plan.nonfinite_offset);
      EXPECT_LT(plan.nonfinite_offset, plan.workspace_bytes);
    }
    EXPECT_FALSE(is_safe(plan_of(head_dim, 4096, 4096, window(3000))));
    EXPECT_FALSE(is_safe(plan_of(head_dim, 4096, 2048, causal)));
    EXPECT_FALSE(is_safe(plan_of(head_dim, 2048, 4096, causal)));
    EXPECT_FALSE(is_safe(plan_of(head_dim, 4096, 2048, [](MaskedProblem &p) { p.band = {Band::kUnlimited, 0, true}; })));
    EXPECT_FALSE(is_safe(plan_of(head_dim, 4096, 4096, [&](MaskedProblem &p) { p.sink = &sink; })));
    EXPECT_FALSE(is_safe(plan_of(head_dim, 4096, 4096, deterministic)));
    EXPECT_FALSE(is_safe(plan_of(head_dim, 16384, 16384, deterministic)));
    // Keys that are not used may hold anything.
    const BackwardPlan shorter = plan_of(head_dim, 4096, 4096, [&](MaskedProblem &p) { p.k_lengths.used = &lengths; });
    EXPECT_FALSE(is_safe(shorter));
    EXPECT_GE(shorter.nan_safe_shape, 0);
  }
  // Score terms: so does a block mask, whatever it shows.
  const auto dropout = [](MaskedProblem &p) { p.dropout.threshold = 6554, p.dropout.keep_scale = 1.f / 0.9f; };
  EXPECT_FALSE(is_safe(plan_of(128, 1024, 1024, dropout)));
  EXPECT_TRUE(is_safe(plan_of(64, 1024, 1024, dropout))) << "gained nothing";
  EXPECT_FALSE(is_safe(plan_of(128, 1024, 1024, [](MaskedProblem &p) { p.softcap = 30; })));
  // With Q tiles of 80 rows.
  EXPECT_EQ(plan_of(128, 512, 700, plain).q_tiles, 8) << "seven Q tiles are 560 rows";
  EXPECT_EQ(plan_of(128, 4096, 4096, window(1024)).q_tiles, 64) << "main loops are short";
  EXPECT_FALSE(is_safe(plan_of(128, 4096, 4096, window(1024))));
  // Under a causal mask those of 64 rows serve heads without groups.
  EXPECT_TRUE(is_safe(plan_of(128, 1024, 1024, causal)));
  const auto alone = [&](auto set) {
    return plan_of(128, 1024, 1024, [&](MaskedProblem &p) {
      causal(p);
      p.heads_k = p.heads_q, p.group = 1;
      set(p);
    });
  };
  EXPECT_FALSE(is_safe(alone(plain)));
  EXPECT_EQ(alone(plain).q_tiles, 16);
  EXPECT_TRUE(is_safe(alone(deterministic)));
  EXPECT_TRUE(is_safe(alone([&](MaskedProblem &p) { p.q_lengths.cu = &lengths; })));
  EXPECT_TRUE(is_safe(alone([&](MaskedProblem &p) { p.band.right = Band::kUnlimited, p.k_lengths.used = &lengths; })));
  // The second pass has to pay.
  device = h200();
  const MaskedProblem p = problem(4096, 4096, 128);
  const double heads = static_cast<double>(p.batch * p.heads_q);
  device.second_pass_from = heads * 4096 * 4096 * 128 / 4;  // with more than 64 columns four times as many
  EXPECT_FALSE(is_safe(plan_of(128, 4096, 4096, causal)));
  EXPECT_TRUE(is_safe(plan_of(128, 4095, 4095, causal)));
  EXPECT_FALSE(is_safe(plan_of(128, 4095, 4095, plain)));
  device.second_pass_from = heads * 4096 * 4096 * 64;
  EXPECT_FALSE(is_safe(plan_of(64, 4096, 4096, causal)));
  EXPECT_TRUE(is_safe(plan_of(64, 4095, 4095, causal)));
}

}  // namespace
}  // namespace fa::cuda
