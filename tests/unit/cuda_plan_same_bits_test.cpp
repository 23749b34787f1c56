// SPDX-License-Identifier: Apache-2.0
// Plans of problems with FA_FLAG_SAME_BITS.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/common/segments.h"
#include "cuda/kernels/extend/table.h"
#include "cuda/kernels/mla/table.h"
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

// One token over few sequences: a cluster of CTAs for each KV head, where no CTA then has more segments than without, and the device has room.
TEST(CudaPlan, SameBitsOfFewSequencesHaveClusters) {
  const auto plan_of = [](int64_t batch, int64_t heads, int64_t keys, const std::function<void(MaskedProblem &)> &set = {}) {
    MaskedProblem p = problem(1, keys, 128);
    p.batch = batch;
    p.heads_k = heads;
    p.group = 8;
    p.heads_q = heads * p.group;
    p.same_bits = p.batch_invariant = p.deterministic = true;
    if (set) set(p);
    p.heads_q = heads * p.group;
    return forward_plan(p, h200());
  };
  const struct {
    int64_t batch, heads, keys;
    int32_t cluster;
  } cases[] = {{1, 8, 1, 8},     {1, 8, 2048, 8},   {1, 8, 8192, 8}, {1, 8, 8193, 0},   {1, 8, 131072, 0},
               {1, 1, 8192, 16}, {1, 7, 16384, 16}, {2, 7, 8192, 8}, {2, 8, 8192, 0},   {2, 8, 4096, 4},
               {3, 8, 2048, 4},  {4, 7, 4096, 4},   {4, 8, 2048, 0}, {1, 7, 24000, 16}, {2, 7, 24000, 8}};
  for (const auto &[batch, heads, keys, cluster] : cases) {
    const ForwardPlan plan = plan_of(batch, heads, keys);
    ASSERT_EQ(plan.family, Family::extend);
    EXPECT_EQ(plan.cluster, cluster) << batch << " x " << heads << " x " << keys;
    EXPECT_EQ(extend::kShapes[plan.shape].clustered, cluster > 0);
    if (cluster == 0) continue;
    EXPECT_EQ(plan.blocks, batch * heads * cluster);
    EXPECT_EQ(plan.workspace_bytes, 0u);
    EXPECT_EQ(plan.counters, 0);
    EXPECT_LE(plan.blocks, h200().multiprocessors);
  }
  EXPECT_EQ(plan_of(1, 8, 2048, [](MaskedProblem &p) { p.group = 16; }).cluster, 8);
  for (const auto &set : std::vector<std::function<void(MaskedProblem &)>>{
           [](MaskedProblem &p) { p.q_lengths.max_len = 2; },
           [](MaskedProblem &p) { p.group = 17; },
           [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 136; },
           [](MaskedProblem &p) { p.k.dtype = p.v.dtype = Dtype::e4m3; },
           [](MaskedProblem &p) { p.same_bits = false; },
       }) {
    const ForwardPlan plan = plan_of(1, 8, 8192, set);
    EXPECT_FALSE(plan.family == Family::extend && extend::kShapes[plan.shape].clustered);
  }
}

// One token over 8-bit KV of more than 64 columns, at most 16 heads of a key head, plain scores: consumer warps share tiles of 16 rows. A CTA folds
// whole work tiles, the combine kernel the others, for whose segments there is room.
TEST(CudaPlan, SameBitsOfTokensOver8BitKv) {
  const auto plan_of = [](int64_t batch, int64_t keys, const std::function<void(MaskedProblem &)> &set = {}) {
    MaskedProblem p = problem(1, keys, 128);
    p.batch = batch;
    p.heads_k = 8;
    p.group = 8;
    p.k.dtype = p.v.dtype = Dtype::e4m3;
    p.same_bits = p.batch_invariant = p.deterministic = true;
    if (set) set(p);
    p.heads_q = p.heads_k * p.group;
    return forward_plan(p, h200());
  };
  for (const int64_t batch : {1, 3, 8, 32, 90}) {
    for (const int64_t keys : {1, 1024, 1025, 8192, 40000}) {
      const ForwardPlan plan = plan_of(batch, keys);
      ASSERT_EQ(plan.family, Family::extend);
      const extend::Shape &shape = extend::kShapes[plan.shape];
      EXPECT_TRUE(shape.one_token()) << batch << " x " << keys;
      EXPECT_EQ(shape.rows(), 16);
      EXPECT_LE(plan.blocks, h200().multiprocessors);
      EXPECT_EQ(plan.counters, 0);
      EXPECT_EQ(plan.stored_segments, 0);
      const int64_t segments = batch * 8 * ((keys + 1023) / 1024);
      EXPECT_GE(plan.workspace_bytes, static_cast<size_t>(segments * 16 * (128 + 2) * 4));
    }
  }
  // One work tile for each CTA: none is cut.
  EXPECT_EQ(plan_of(16, 8192).combine_ctas, 0);
  EXPECT_GT(plan_of(1, 8192).combine_ctas, 0);
  for (const auto &[head_dim, head_dim_v] : {std::pair{16, 16}, {64, 64}, {80, 48}, {64, 128}}) {
    const ForwardPlan plan = plan_of(4, 8192, [&](MaskedProblem &p) { p.head_dim = head_dim, p.head_dim_v = head_dim_v; });
    EXPECT_EQ(extend::kShapes[plan.shape].one_token(), std::max(head_dim, head_dim_v) > 64)
        << head_dim << " and " << head_dim_v;
  }
  EXPECT_TRUE(extend::kShapes[plan_of(4, 8192, [](MaskedProblem &p) { p.k.dtype = p.v.dtype = Dtype::i8; }).shape].one_token());
  for (const auto &set : std::vector<std::function<void(MaskedProblem &)>>{
           [](MaskedProblem &p) { p.q_lengths.max_len = 2; },
           [](MaskedProblem &p) { p.group = 17; },
           [](MaskedProblem &p) { p.softcap = 5; },
           [](MaskedProblem &p) { p.k.dtype = p.v.dtype = Dtype::bf16; },
           [](MaskedProblem &p) { p.batch = 600, p.k_lengths.max_len = 131072; },  // 5 GB of segments
           [](MaskedProblem &p) { p.same_bits = false; },
       }) {
    const ForwardPlan plan = plan_of(4, 8192, set);
    EXPECT_FALSE(plan.family == Family::extend && extend::kShapes[plan.shape].one_token());
  }
}

MaskedProblem latent_same_bits(int64_t batch, int64_t queries, int64_t keys, int64_t heads, int64_t head_dim = 576) {
  MaskedProblem p = problem(queries, keys, head_dim, std::min<int64_t>(head_dim, 512));
  p.batch = batch;
  p.heads_q = p.group = heads;
  p.heads_k = 1;
  p.v = p.k;
  p.same_bits = p.batch_invariant = p.deterministic = true;
  return p;
}

// Latent caches have an arithmetic and a kernel of their own. Every CTA has room for what it hands over, stores, and has folded so far.
TEST(CudaPlan, SameBitsOfLatentCaches) {
  for (const int64_t heads : {1, 16, 24, 64, 128}) {
    for (const int64_t queries : {1, 4, 300}) {
      for (const int64_t batch : {1, 5, 64, 300}) {
        for (const int64_t keys : {1, 1024, 8192, 40000}) {
          MaskedProblem p = latent_same_bits(batch, queries, keys, heads);
          const ForwardPlan plan = forward_plan(p, h200());
          ASSERT_EQ(plan.family, Family::mla);
          const mla::Shape &shape = mla::kShapes[plan.shape];
          EXPECT_TRUE(shape.same_bits);
          EXPECT_EQ(same_bits_contract(needs_of(forward_of(p)), h200()), kLatentContract);
          EXPECT_EQ(plan.fixed_splits, 0);
          EXPECT_EQ(plan.cluster, 0);
          EXPECT_EQ(plan.blocks, plan.max_partitions << plan.coscheduled_log2);
          EXPECT_LE(plan.blocks, h200().multiprocessors);
          // Few work tiles: all segments of theirs are stored for a combine kernel. Else every CTA stores some, and hands a total over.
          const int64_t tiles = batch * plan.row_blocks, segments = (keys + kLatentSegmentKeys - 1) / kLatentSegmentKeys;
          EXPECT_EQ(shape.uses_combine_kernel, tiles * 6 <= h200().multiprocessors);
          EXPECT_EQ(plan.counters, shape.uses_combine_kernel ? 0 : plan.blocks);
          EXPECT_EQ(plan.partial_warps, shape.uses_combine_kernel ? 4 : std::min<int64_t>((heads * queries + 15) / 16, 4));
          EXPECT_LE(plan.stored_segments, mla::SegmentStorage::kMostStored);
          const int64_t rows = plan.blocks * plan.partial_warps * 16,
                        stored_rows = shape.uses_combine_kernel ? tiles * segments * 64 : rows * (1 + plan.stored_segments);
          EXPECT_LE(static_cast<size_t>(stored_rows * 512 * 4), plan.split_lse_offset);
          EXPECT_LE(plan.split_lse_offset + static_cast<size_t>(stored_rows * 8), plan.totals_offset);
          EXPECT_LE(plan.totals_offset + static_cast<size_t>(rows * 512 * 4), plan.workspace_bytes);
          p.num_splits = 7;
          EXPECT_EQ(forward_plan(p, h200()).workspace_bytes, plan.workspace_bytes) << "num_splits is a hint";
          p.num_splits = 0;
          MaskedProblem bytes = p;
          bytes.k.dtype = bytes.v.dtype = Dtype::e4m3;
          const ForwardPlan of_bytes = forward_plan(bytes, h200());
          EXPECT_TRUE(mla::kShapes[of_bytes.shape].same_bits);
          if (!shape.uses_combine_kernel) {
            EXPECT_EQ(of_bytes.workspace_bytes, plan.workspace_bytes);
          }
          p.same_bits = false;
          EXPECT_FALSE(mla::kShapes[forward_plan(p, h200()).shape].same_bits);
        }
      }
    }
  }
  // 64 sequences of 4 segments: two CTAs each, of which the second one may store all of its segments but the last.
  const ForwardPlan plan = forward_plan(latent_same_bits(64, 1, 8192, 64), h200());
  EXPECT_EQ(plan.blocks, 128);
  EXPECT_EQ(plan.stored_segments, 1);
  // Narrow rows, and values elsewhere, have the arithmetic of other kernels.
  EXPECT_EQ(forward_plan(latent_same_bits(4, 1, 8192, 16, 256), h200()).family, Family::extend);
  const struct {
    const char *text;
    std::function<void(ForwardProblem &)> set;
  } refused[] = {
      {"head_dim is 576, and 512 of v; FA_FLAG_SAME_BITS covers up to 256 on CUDA", [](ForwardProblem &p) { p.softcap = 5; }},
      {"head_dim is 576, and 512 of v; FA_FLAG_SAME_BITS covers up to 256",
       [](ForwardProblem &p) { p.v.data = &unreadable_v; }},
      {"v_descale has a number for each row",
       [](ForwardProblem &p) { p.k.dtype = p.v.dtype = Dtype::i8, p.v_descale.per_row = true; }},
      {"head_dim is 576, and 520 of v; FA_FLAG_SAME_BITS covers up to 576, and 512 of v, with v in the rows of k",
       [](ForwardProblem &p) { p.head_dim_v = 520; }},
      {"max_logit is given", [](ForwardProblem &p) { p.max_logit = &unreadable; }},
      {"k has rows of 576 columns that are not whole vectors",
       [](ForwardProblem &p) { p.k.seq_stride += 1, p.v.seq_stride += 1; }},
  };
  for (const auto &[text, set] : refused) {
    ForwardProblem p = forward_of(latent_same_bits(2, 64, 64, 16));
    set(p);
    ForwardPlan none;
    ErrorText error;
    EXPECT_EQ(plan_forward(p, h200(), none, error), FA_ERROR_UNSUPPORTED) << text;
    EXPECT_NE(std::string(error.text).find(text), std::string::npos) << error.text;
  }
  BackwardPlan none;
  ErrorText error;
  EXPECT_EQ(plan_backward(backward_of(latent_same_bits(2, 64, 64, 16, 512)), h200(), none, error), FA_ERROR_UNSUPPORTED);
  EXPECT_NE(std::string(error.text).find("head_dim is 512"), std::string::npos) << error.text;
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
