// SPDX-License-Identifier: Apache-2.0
// Plans of the Hopper kernels for heads of more than 256 columns.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/host/planners.h"
#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// Pages of wide heads. Query heads that share keys are rows of one tile of 64; few tiles split the keys.
TEST(CudaPlanHopper, PagesOfWideHeads) {
  const auto paged = [](int64_t queries, int64_t keys, int64_t head_dim, int64_t group, int64_t page_size = 64) {
    MaskedProblem p = problem(queries, keys, head_dim);
    p.batch = 4;
    p.heads_q = group * p.heads_k;
    p.group = group;
    set_pages(p, page_size);
    return p;
  };
  const auto name = [](const MaskedProblem &p) { return kernel_name(p, forward_plan(p, h200())); };
  struct {
    int64_t queries, group, tile_heads, row_blocks;
  } const shapes[] = {{4096, 8, 8, 256}, {4096, 1, 1, 32}, {4096, 3, 3, 98}, {4096, 5, 5, 171}, {4096, 128, 64, 2048},
                      {4096, 71, 1, 32}, {17, 8, 8, 2},    {16, 8, 8, 1},    {2, 8, 8, 1}};
  for (const auto &[queries, group, tile_heads, row_blocks] : shapes) {
    const MaskedProblem p = paged(queries, 4096, 512, group);
    const ForwardPlan plan = forward_plan(p, h200());
    const int64_t tiles = row_blocks * p.heads_q / tile_heads * p.batch, splits = std::clamp<int64_t>(66 / tiles, 1, 16);
    EXPECT_EQ(kernel_name(p, plan), splits > 1 ? "sm90_fwd_bf16_d512p_split" : "sm90_fwd_bf16_d512p")
        << queries << " " << group;
    EXPECT_EQ(plan.rows_per_token, tile_heads) << group;
    EXPECT_EQ(plan.row_blocks, row_blocks) << group;
    EXPECT_EQ(plan.tiles, tiles);
    EXPECT_EQ(plan.num_splits, splits);
    EXPECT_EQ(plan.blocks, 2 * tiles * splits);
    const size_t rows = static_cast<size_t>(splits * p.batch * p.heads_q * queries);
    EXPECT_GE(plan.workspace_bytes, splits > 1 ? rows * (512 + 1) * sizeof(float) : 0);
    EXPECT_EQ(plan.workspace_bytes == 0, splits == 1);
  }
  // Splits that end a second wave early, but not those that cost more than they save.
  for (const auto &[batch, splits] : {std::pair{32, 1}, {33, 1}, {40, 4}, {64, 1}}) {
    MaskedProblem p = paged(4, 8192, 512, 8);
    p.batch = batch;
    EXPECT_EQ(forward_plan(p, h200()).num_splits, splits) << batch;
  }
  for (const auto &[head_dim, expected] :
       std::vector<std::pair<int64_t, std::string>>{{320, "d384p"}, {384, "d384p"}, {448, "d512p"}, {512, "d512p"}}) {
    for (const int64_t page_size : {16, 48, 64, 256})
      EXPECT_EQ(name(paged(1000, 1000, head_dim, 8, page_size)), "sm90_fwd_bf16_" + expected);
    MaskedProblem p = paged(1000, 1000, head_dim, 8);
    p.softcap = 30;
    EXPECT_EQ(name(p), "sm90_fwd_bf16_d512gp");
    p.softcap = 0;
    p.num_splits = 3;
    EXPECT_EQ(name(p), "sm90_fwd_bf16_" + expected + "_split");
    EXPECT_EQ(forward_plan(p, h200()).num_splits, 3);
  }
  // Tokens that one tile of the decode kernel holds are its, in 16 bits and in 8.
  EXPECT_EQ(name(paged(1, 1000, 512, 16)), "decode_fwd_bf16_d512_16_split");
  EXPECT_EQ(name(paged(1, 1000, 512, 32)), "sm90_fwd_bf16_d512p_split");
  MaskedProblem bytes = paged(1, 1000, 512, 8);
  bytes.k.dtype = bytes.v.dtype = Dtype::e4m3;
  // Up to four tiles of the decode kernel over 8-bit KV.
  for (const int64_t queries : {1, 2, 8}) {
    bytes.q_lengths.max_len = queries;
    EXPECT_EQ(name(bytes), "decode_fwd_bf16_e4m3_d512_16_split");
    EXPECT_TRUE(forward_plan(bytes, h200()).tma_kv);
  }
  // More of them: a kernel widens it in the workspace, unless that would take more than a gigabyte.
  for (const auto &[queries, splits] : {std::pair{9, 4}, {1000, 1}}) {
    bytes.q_lengths.max_len = queries;
    const ForwardPlan plan = forward_plan(bytes, h200());
    EXPECT_EQ(kernel_name(bytes, plan), splits > 1 ? "sm90_fwd_bf16_e4m3_d512p_split" : "sm90_fwd_bf16_e4m3_d512p");
    EXPECT_EQ(plan.num_splits, splits);
    EXPECT_EQ(plan.copied_keys, 1024);
    const size_t rows = static_cast<size_t>(splits * bytes.batch * bytes.heads_q * queries), copy = 2 * 4 * 2 * 1024 * 512 * 2;
    EXPECT_GE(plan.copy_offset, splits > 1 ? rows * 513 * sizeof(float) : 0);
    EXPECT_EQ(plan.workspace_bytes, plan.copy_offset + copy);
  }
  bytes.k_lengths.max_len = 1 << 17;
  EXPECT_EQ(forward_plan(bytes, h200()).family, Family::decode);
  // Contiguous keys: few queries or tiles, and tiles that are fewer by half (D320: by two thirds).
  const std::tuple<int64_t, int64_t, int64_t, int64_t, std::string> contiguous[] = {
      {2, 4, 4096, 512, "d512p_split"},   {2, 72, 4096, 512, "d512p_split"}, {2, 1000, 4096, 512, "d512"},
      {2, 1000, 4096, 320, "d320"},       {20, 64, 4096, 512, "d512p"},      {20, 65, 4096, 512, "d512"},
      {20, 32, 4096, 320, "d384p_split"}, {20, 33, 4096, 320, "d320"},       {20, 64, 4100, 512, "d512"}};
  for (const auto &[batch, queries, keys, head_dim, expected] : contiguous) {
    MaskedProblem p = problem(queries, keys, head_dim);
    p.batch = batch;
    p.heads_q = 16;
    p.group = 8;
    EXPECT_EQ(name(p), "sm90_fwd_bf16_" + expected) << queries << " " << keys << " " << head_dim;
  }
  // What keeps the pages from TMA, and what the kernel does not do. A copy has no pages.
  const std::tuple<const char *, bool, void (*)(MaskedProblem &)> others[] = {
      {"pages of 8", true, [](MaskedProblem &p) { set_pages(p, 8); }},
      {"rows that end within a swizzle atom", true,
       [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 328, set_pages(p, 64); }},
      {"batch-invariant", false, [](MaskedProblem &p) { p.batch_invariant = p.deterministic = true; }},
      {"left padding", true, [](MaskedProblem &p) { set_starts(p); }},
      {"more steps of pages and heads than TMA counts", true,
       [](MaskedProblem &p) { p.num_pages = INT32_MAX, p.k.batch_stride += 8; }},
  };
  for (const auto &[text, copied, change] : others) {
    MaskedProblem p = paged(1000, 1000, 512, 8);
    change(p);
    const ForwardPlan plan = forward_plan(p, h200());
    EXPECT_EQ(plan.contiguous_copy, copied) << text;
    EXPECT_TRUE(copied ? plan.family == Family::sm90 : plan.family == Family::sm80 || plan.family == Family::simt) << text;
  }
}

// Pages and heads are one dimension of a tensor map, in steps of which both are multiples.
TEST(CudaPlanHopper, StepsOfPagesAndHeads) {
  const auto of = [](bool by_head, auto... change) {
    MaskedProblem p = problem(100, 640, 384);
    set_pages(p, 64, by_head);
    (change(p), ...);
    const PageDimension d = page_dimension(p, p.k);
    return std::vector<int64_t>{d.stride, d.page_step, d.head_step, d.count};
  };
  EXPECT_EQ(of(false), (std::vector<int64_t>{384, 128, 1, 19 * 128 + 2}));
  EXPECT_EQ(of(true), (std::vector<int64_t>{64 * 384, 2, 1, 19 * 2 + 2}));
  EXPECT_EQ(of(false, [](MaskedProblem &p) { p.k.batch_stride += 128; }), (std::vector<int64_t>{128, 385, 3, 19 * 385 + 4}));
  EXPECT_EQ(of(false, [](MaskedProblem &p) { p.heads_k = 1; }), (std::vector<int64_t>{64 * 2 * 384, 1, 0, 20}));
  EXPECT_EQ(of(false, [](MaskedProblem &p) { p.num_pages = 1; }), (std::vector<int64_t>{384, 0, 1, 2}));
  EXPECT_EQ(of(false, [](MaskedProblem &p) { p.num_pages = p.heads_k = 1; }), (std::vector<int64_t>{768, 0, 0, 1}));
}

// Heads of more than 256 columns: a CTA for 64 rows of out, or of one gradient.
TEST(CudaPlanHopper, WideHeads) {
  for (const auto &[head_dim, head_dim_v, name, with_softcap] :
       std::vector<std::tuple<int64_t, int64_t, std::string, std::string>>{
           {264, 264, "d320", "d384g"}, {64, 320, "d320", "d384g"}, {328, 8, "d384", "d384g"}, {384, 512, "d512", "d512g"}}) {
    MaskedProblem p = problem(1000, 900, head_dim);
    p.head_dim_v = head_dim_v;
    // Up to 320 columns: clusters for few tiles of queries, which under a causal mask take the longest one's time.
    for (const bool causal : {false, true})
      for (const int64_t heads : {8, 9, 16, 17}) {
        MaskedProblem q = p;
        q.heads_q = q.heads_k = heads;
        q.batch = q.group = 1;
        if (causal) q.band.right = 0;
        const bool clusters = name != "d320" || 8 * heads * (causal ? 1 : 2) <= h200().multiprocessors;
        const ForwardPlan forward = forward_plan(q, h200());
        EXPECT_EQ(kernel_name(q, forward), "sm90_fwd_bf16_" + (name == "d320" && clusters ? "d320c" : name)) << heads;
        EXPECT_EQ(forward.tiles, 8 * heads);
        EXPECT_EQ(forward.blocks, clusters ? 2 * forward.tiles : std::min(forward.tiles, h200().multiprocessors));
        EXPECT_EQ(forward.counters, forward.blocks < forward.tiles ? 2 : 0);
        q.softcap = 30;
        EXPECT_EQ(kernel_name(q, forward_plan(q, h200())), clusters ? "sm90_fwd_bf16_d512g" : "sm90_fwd_bf16_d320g");
      }
    BackwardProblem b = backward_of(p);
    const BackwardPlan plan = backward_plan(b, h200());
    EXPECT_EQ(kernel_name(b, plan), "sm90_bwd_bf16_" + name);
    EXPECT_EQ(plan.q_tiles, 16);
    EXPECT_EQ(plan.key_blocks, 15);
    // No sum of dq, nothing to order: the workspace has lse and delta alone.
    EXPECT_EQ(plan.dq_sum_columns, 0);
    EXPECT_EQ(plan.dq_semaphores, 0);
    EXPECT_FALSE(plan.zero_dq_sum);
    EXPECT_EQ(plan.workspace_bytes, 2 * plan.row_delta_offset);
    const int64_t of_queries = 16 * p.heads_q * p.batch, of_keys = 15 * p.heads_k * p.batch;
    EXPECT_EQ(plan.blocks, of_queries + 2 * of_keys);
    // Gradients that are not asked for have no CTAs.
    b.dv.data = nullptr;
    EXPECT_EQ(backward_plan(b, h200()).blocks, of_queries + of_keys);
    b.dq.data = nullptr;
    EXPECT_EQ(backward_plan(b, h200()).blocks, of_keys);
    b = backward_of(p);
    b.forward.deterministic = true;
    EXPECT_EQ(backward_plan(b, h200()).shape, plan.shape);
    b.forward.softcap = 30;
    EXPECT_EQ(kernel_name(b, backward_plan(b, h200())), "sm90_bwd_bf16_" + with_softcap + "_ordered");
  }
}

// One score term of heads of more than 256 columns, where fewer columns have kernels for that alone.
TEST(CudaPlanHopper, OneTermOfWideHeads) {
  struct Term {
    const char *text;
    void (*set)(MaskedProblem &);
    bool map = false;
  };
  const Term terms[] = {
      {"dropout", [](MaskedProblem &p) { p.dropout.threshold = 6554; }},
      {"bias", [](MaskedProblem &p) { set_bias(p); }},
      {"block mask", [](MaskedProblem &p) { set_block_mask(p, 64); }, true},
      {"small blocks", [](MaskedProblem &p) { set_block_mask(p, 16); }, true},
      {"block lists", [](MaskedProblem &p) { set_block_lists(p); }, true},
      {"slices", [](MaskedProblem &p) { set_slices(p); }, true},
      {"element mask", [](MaskedProblem &p) { set_element_mask(p); }, true},
  };
  for (const Term &term : terms) {
    for (const int64_t head_dim : {264, 320, 384, 512}) {
      for (const int64_t heads : {10, 40}) {  // few tiles of queries (fewer yet, and keys are split on sm80 kernels), and many
        MaskedProblem p = problem(1000, 900, head_dim);
        p.heads_q = p.heads_k = heads;
        p.batch = p.group = 1;
        term.set(p);
        const std::string text = std::string(term.text) + ", head_dim " + std::to_string(head_dim);
        const ForwardPlan forward = forward_plan(p, h200());
        EXPECT_EQ(kernel_name(p, forward), "sm90_fwd_bf16_d512all") << text;
        EXPECT_EQ(forward.blocks, 2 * 8 * heads) << text;
        EXPECT_EQ(forward.cell_map, term.map) << text;
        BackwardProblem b = backward_of(p);
        b.forward.deterministic = heads == 10;
        const BackwardPlan backward = backward_plan(b, h200());
        EXPECT_EQ(kernel_name(b, backward), heads == 10 ? "sm90_bwd_bf16_d512all_ordered" : "sm90_bwd_bf16_d512all") << text;
        EXPECT_EQ(backward.cell_map, term.map) << text;
        EXPECT_EQ(backward.dq_sum_columns, 0) << text;
      }
    }
  }
  // max_logit has a kernel of its own up to 320 columns, whether tiles are few or many.
  for (const int64_t head_dim : {320, 328}) {
    for (const int64_t heads : {10, 40}) {
      MaskedProblem p = problem(1000, 900, head_dim);
      p.heads_q = p.heads_k = heads;
      p.batch = p.group = 1;
      ForwardProblem f = forward_of(p);
      f.max_logit = &unreadable;
      ForwardPlan plan;
      ErrorText error;
      ASSERT_EQ(plan_forward(f, h200(), plan, error), FA_OK) << error.text;
      EXPECT_EQ(kernel_name(f, plan), head_dim == 320 ? "sm90_fwd_bf16_d320x" : "sm90_fwd_bf16_d512all");
    }
  }
}

}  // namespace
}  // namespace fa::cuda
