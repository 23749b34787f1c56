// SPDX-License-Identifier: Apache-2.0
// Plans of the Hopper kernels, forward and of both passes: which kernel a problem gets.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/host/planners.h"
#include "cuda/kernels/bwd_sm80/backward_table.h"
#include "cuda/kernels/bwd_sm90/backward_table.h"
#include "cuda/kernels/fwd_sm90/forward_table.h"
#include "cuda/kernels/fwd_sm90/transposed_v.h"
#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// Kernels with a score text: those of Hopper where it is the only score term, else mma.sync; fp32 and dbias on CUDA cores.
TEST(CudaPlanHopper, ScoreTexts) {
  const auto scored = [](int64_t head_dim) {
    MaskedProblem p = problem(1000, 1000, head_dim);
    p.score_text.given = true;
    return p;
  };
  const auto names = [](const MaskedProblem &p, const Device &device = h200()) {
    const BackwardProblem b = backward_of(p);
    return std::pair(kernel_name(p, forward_plan(p, device)), kernel_name(b, backward_plan(b, device)));
  };
  EXPECT_EQ(names(scored(64)), std::pair(std::string("sm90_fwd_bf16_d64r"), std::string("sm90_bwd_bf16_d64g")));
  EXPECT_EQ(names(scored(128)), std::pair(std::string("sm90_fwd_bf16_d128g"), std::string("sm90_bwd_bf16_d128g")));
  EXPECT_EQ(names(scored(256)), std::pair(std::string("sm90_fwd_bf16_d256g"), std::string("sm90_bwd_bf16_d256g")));
  EXPECT_EQ(names(scored(512)), std::pair(std::string("sm80_fwd_bf16_d512g"), std::string("sm80_bwd_bf16_d512gs")));
  const std::pair smooth(std::string("sm80_fwd_bf16_d128m"), std::string("sm80_bwd_bf16_d128m")),
      general(std::string("sm80_fwd_bf16_d128g"), std::string("sm80_bwd_bf16_d128g"));
  EXPECT_EQ(names(scored(128), kDevices[1].device), smooth);
  const std::vector<std::tuple<const char *, void (*)(MaskedProblem &), std::pair<std::string, std::string>>> others = {
      {"softcap", [](MaskedProblem &p) { p.softcap = 30; }, smooth},
      {"ALiBi", [](MaskedProblem &p) { p.alibi_slopes = &unreadable; }, smooth},
      {"bias", [](MaskedProblem &p) { set_bias(p); }, general},
      {"dropout", [](MaskedProblem &p) { p.dropout.threshold = 6554; }, general},
      {"rows that do not start on 16 bytes", [](MaskedProblem &p) { p.k.seq_stride = 129; }, smooth},
  };
  for (const auto &[text, change, expected] : others) {
    MaskedProblem p = scored(128);
    p.num_splits = 1;
    change(p);
    EXPECT_EQ(names(p), expected) << text;
  }
  // dbias beside a text.
  MaskedProblem biased = scored(128);
  set_bias(biased);
  BackwardProblem with_dbias = backward_of(biased);
  with_dbias.dbias = biased.bias;
  EXPECT_EQ(kernel_name(with_dbias, backward_plan(with_dbias, h200())), "simt_bwd_bf16_d128");

  // A tensor that kernels can stage.
  const auto staged = [&](int64_t head_dim) {
    MaskedProblem p = scored(head_dim);
    p.score_text.tile_tensor = 2;
    return p;
  };
  EXPECT_EQ(names(staged(64)), std::pair(std::string("sm90_fwd_bf16_d64a"), std::string("sm90_bwd_bf16_d64a")));
  EXPECT_EQ(names(staged(128)), std::pair(std::string("sm90_fwd_bf16_d128a"), std::string("sm90_bwd_bf16_d128a")));
  EXPECT_EQ(names(staged(256)), std::pair(std::string("sm90_fwd_bf16_d256a"), std::string("sm90_bwd_bf16_d256g")));
  EXPECT_EQ(names(staged(128), kDevices[1].device), smooth);
  MaskedProblem staged_masked = staged(128);
  staged_masked.score_text.masks = true;
  EXPECT_EQ(names(staged_masked), std::pair(std::string("sm90_fwd_bf16_d128b"), std::string("sm90_bwd_bf16_d128b")));

  // A text that masks pairs: the cell map tells of tiles.
  MaskedProblem masked = scored(128);
  masked.score_text.masks = true;
  const ForwardPlan plan = forward_plan(masked, h200());
  EXPECT_EQ(kernel_name(masked, plan), "sm90_fwd_bf16_d128b");
  EXPECT_TRUE(plan.cell_map);
  const size_t one_plane = plan.workspace_bytes;
  masked.score_text.by_head = true;
  EXPECT_GT(forward_plan(masked, h200()).workspace_bytes, one_plane);
  EXPECT_EQ(names(masked).second, "sm90_bwd_bf16_d128b");
  set_slices(masked);
  EXPECT_EQ(names(masked), std::pair(std::string("sm90_fwd_bf16_d128b"), std::string("sm80_bwd_bf16_d128g")));
}

// Hopper kernels serve problems that TMA can read, unless other kernels split the keys or fill their rows with several heads. A build or a
// context without them uses the other kernels.
TEST(CudaPlanHopper, HopperKernels) {
  const auto family = [](const MaskedProblem &p, const Device &device = h200()) { return forward_plan(p, device).family; };
  MaskedProblem plain = problem(1000, 1000, 128);
  const ForwardPlan plan = forward_plan(plain, h200());
  EXPECT_EQ(plan.family, Family::sm90);
  EXPECT_EQ(plan.tiles, 6 * plain.heads_q * plain.batch);
  EXPECT_EQ(plan.blocks, std::min(plan.tiles, h200().multiprocessors)) << "persistent CTAs";
  EXPECT_EQ(plan.num_splits, 1);
  Device without = h200();
  without.sm90 = false;
  EXPECT_EQ(family(plain, without), Family::sm80);
  const std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> others = {
      {"bias of which the heads are in descending order", [](MaskedProblem &p) { set_bias(p), p.bias.head_stride = -8; }},
      {"rows that do not start on 16 bytes", [](MaskedProblem &p) { p.k.seq_stride = 129; }},
      {"rows that are not whole 16-byte vectors", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 127; }},
      {"more rows than it counts", [](MaskedProblem &p) { p.k_lengths.total = int64_t{1} << 32; }},
      {"head_dim 520", [](MaskedProblem &p) { p.head_dim = 520; }},
      {"a few queries, dropout", [](MaskedProblem &p) { p.q_lengths.max_len = 16, p.dropout.threshold = 6554; }},
  };
  for (const auto &[text, change] : others) {
    MaskedProblem p = plain;
    change(p);
    EXPECT_EQ(family(p), Family::sm80) << text;
  }
  // Problems that TMA cannot read or whose keys are split are for the extend kernels, if these have room for the columns.
  const std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> extending = {
      {"pages", [](MaskedProblem &p) { p.page_table = reinterpret_cast<const int32_t *>(&unreadable); }},
      {"pages, head_dim 256",
       [](MaskedProblem &p) {
         p.head_dim = p.head_dim_v = 256;
         p.page_table = reinterpret_cast<const int32_t *>(&unreadable);
       }},
      {"pages, head_dim 192, values of 128",
       [](MaskedProblem &p) {
         p.head_dim = 192, p.head_dim_v = 128;
         p.page_table = reinterpret_cast<const int32_t *>(&unreadable);
       }},
      {"splits", [](MaskedProblem &p) { p.num_splits = 2; }},
      {"batch-invariant", [](MaskedProblem &p) { p.batch_invariant = true; }},
      {"a stride that TMA cannot express", [](MaskedProblem &p) { p.v.batch_stride = int64_t{1} << 40; }},
      {"few queries of heads that share keys", [](MaskedProblem &p) { p.q_lengths.max_len = 64, p.num_splits = 1; }},
      {"few blocks and many keys",
       [](MaskedProblem &p) { p.heads_q = p.heads_k = p.group = p.batch = 1, p.k_lengths.max_len = 4096; }},
  };
  for (const auto &[text, change] : extending) {
    MaskedProblem p = plain;
    change(p);
    EXPECT_EQ(family(p), Family::extend) << text;
    EXPECT_EQ(family(p, without), Family::sm80) << text;
  }
  const std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> ours = {
      {"softcap", [](MaskedProblem &p) { p.softcap = 30; }},
      {"ALiBi", [](MaskedProblem &p) { p.alibi_slopes = &unreadable; }},
      {"block mask", [](MaskedProblem &p) { set_block_mask(p, 128); }},
      {"blocks of 64", [](MaskedProblem &p) { set_block_mask(p, 64); }},
      {"blocks of 128, head_dim 256", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 256, set_block_mask(p, 128); }},
      {"blocks of 64, head_dim 256", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 256, set_block_mask(p, 64); }},
      {"element mask", [](MaskedProblem &p) { set_element_mask(p); }},
      {"left padding", [](MaskedProblem &p) { set_starts(p); }},
      {"slices", [](MaskedProblem &p) { set_slices(p); }},
      {"block lists", [](MaskedProblem &p) { set_block_lists(p); }},
      {"dropout", [](MaskedProblem &p) { p.dropout.threshold = 6554; }},
      {"dropout, head_dim 256", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 256, p.dropout.threshold = 6554; }},
      {"bias", [](MaskedProblem &p) { set_bias(p); }},
      {"bias, head_dim 256", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 256, set_bias(p); }},
      {"bias of fp32, head_dim 136", [](MaskedProblem &p) { p.head_dim = 136, set_bias(p), p.bias.dtype = Dtype::f32; }},
      {"dropout and softcap, head_dim 136",
       [](MaskedProblem &p) { p.head_dim = 136, p.softcap = 30, p.dropout.threshold = 6554; }},
      {"bias, broadcast",
       [](MaskedProblem &p) { set_bias(p), p.bias.batch_stride = p.bias.head_stride = p.bias.row_stride = 0; }},
      {"head_dim 264", [](MaskedProblem &p) { p.head_dim = 264; }},
      {"head_dim 264, softcap", [](MaskedProblem &p) { p.head_dim_v = 264, p.softcap = 30; }},
      {"one split asked for", [](MaskedProblem &p) { p.num_splits = 1; }},
      {"one tile",
       [](MaskedProblem &p) { p.heads_q = p.heads_k = p.group = p.batch = 1, p.q_lengths.max_len = p.k_lengths.max_len = 17; }},
      {"few queries of heads with keys of their own",
       [](MaskedProblem &p) { p.heads_k = 8, p.group = 1, p.q_lengths.max_len = 64, p.num_splits = 1; }},
      {"lengths on the device", [](MaskedProblem &p) { p.q_lengths.cu = p.k_lengths.cu = &unreadable; }},
  };
  for (const auto &[text, change] : ours) {
    MaskedProblem p = plain;
    change(p);
    EXPECT_EQ(family(p), Family::sm90) << text;
  }
}

// ALiBi by wgmma, where no query sees keys ahead of it.
TEST(CudaPlanHopper, CausalAlibi) {
  const auto kernel = [](void (*change)(MaskedProblem &)) {
    MaskedProblem p = problem(1000, 1000, 128);
    p.alibi_slopes = &unreadable;
    p.band.right = 0;
    change(p);
    return std::string(kernel_of(forward_plan(p, h200())).name);
  };
  EXPECT_EQ(kernel([](MaskedProblem &) {}), "d128l");
  EXPECT_EQ(kernel([](MaskedProblem &p) { p.head_dim = p.head_dim_v = 64; }), "d64l");
  EXPECT_EQ(kernel([](MaskedProblem &p) { p.band.left = 100; }), "d128l");
  EXPECT_EQ(kernel([](MaskedProblem &p) { set_starts(p); }), "d128l");
  EXPECT_EQ(kernel([](MaskedProblem &p) { p.band.right = 1; }), "d128g");
  EXPECT_EQ(kernel([](MaskedProblem &p) { p.band.top_left = true; }), "d128g");
  EXPECT_EQ(kernel([](MaskedProblem &p) { p.alibi_log_scale = 0.5f; }), "d128g");
  EXPECT_EQ(kernel([](MaskedProblem &p) { p.softcap = 30; }), "d128g");
  EXPECT_EQ(kernel([](MaskedProblem &p) { p.head_dim = p.head_dim_v = 192; }), "d256g");

  // Backward: large problems, and from 65 columns on long main loops. A second pass serves slopes that wgmma does not take.
  const auto names = [](int64_t head_dim, int64_t seqlen, void (*change)(MaskedProblem &), double second_pass_from = 0) {
    MaskedProblem p = problem(seqlen, seqlen, head_dim);
    p.alibi_slopes = &unreadable;
    p.band.right = 0;
    change(p);
    Device device = h200();
    device.second_pass_from = second_pass_from;
    const BackwardPlan plan = backward_plan(backward_of(p), device);
    const int32_t second = plan.nan_safe_shape;
    return std::pair(std::string(kernel_of(plan).name), std::string(second >= 0 ? sm90::kBackwardShapes[second].name : ""));
  };
  const auto as_is = [](MaskedProblem &) {};
  const std::pair<std::string, std::string> narrow("d64ln", "d64g"), tall("d128lt", "d128g"), general("d128gn", "d128g");
  EXPECT_EQ(names(64, 1000, as_is), narrow);
  EXPECT_EQ(names(40, 1000, [](MaskedProblem &p) { p.band.left = 100; }), narrow);
  EXPECT_EQ(names(64, 1000, [](MaskedProblem &p) { p.deterministic = true; }), narrow);
  EXPECT_EQ(names(128, 4096, as_is), tall);
  EXPECT_EQ(names(96, 4096, [](MaskedProblem &p) { p.deterministic = true; }), tall);
  EXPECT_EQ(names(128, 1000, as_is), general);
  EXPECT_EQ(names(128, 4096, [](MaskedProblem &p) { p.band.left = 1024; }), general);
  EXPECT_EQ(names(128, 4096, [](MaskedProblem &p) { p.band.right = 1; }), general);
  EXPECT_EQ(names(128, 4096, [](MaskedProblem &p) { p.band.top_left = true; }), general);
  EXPECT_EQ(names(128, 4096, [](MaskedProblem &p) { p.alibi_log_scale = 0.5f; }), general);
  EXPECT_EQ(names(128, 4096, [](MaskedProblem &p) { p.softcap = 30; }), general);
  EXPECT_EQ(names(64, 1000, as_is, 1e18), std::pair(std::string("d64g"), std::string()));
}

// Mixtures of score terms, and biases that the kernels for a bias alone do not take.
TEST(CudaPlanHopper, Mixtures) {
  struct Mixture {
    const char *text;
    void (*set)(MaskedProblem &);
    bool backward = true;  // up to head_dim 128 Hopper's backward wants to load a bias by TMA
    bool map = false;
  };
  const Mixture mixtures[] = {
      {"bias and softcap", [](MaskedProblem &p) { p.softcap = 30, set_bias(p); }},
      {"bias and ALiBi", [](MaskedProblem &p) { p.alibi_slopes = &unreadable, set_bias(p); }},
      {"bias and dropout", [](MaskedProblem &p) { p.dropout.threshold = 6554, set_bias(p); }},
      {"bias and slices", [](MaskedProblem &p) { set_slices(p), set_bias(p); }, true, true},
      {"bias of fp32", [](MaskedProblem &p) { set_bias(p), p.bias.dtype = Dtype::f32; }},
      {"bias of fp32 and dropout",
       [](MaskedProblem &p) { set_bias(p), p.bias.dtype = Dtype::f32, p.dropout.threshold = 6554; }},
      {"bias with rows that do not start on 16 bytes", [](MaskedProblem &p) { set_bias(p, 3); }, false},
      {"bias of fp32 with such rows", [](MaskedProblem &p) { set_bias(p, 3), p.bias.dtype = Dtype::f32; }, false},
      {"bias that is broadcast over keys", [](MaskedProblem &p) { set_bias(p), p.bias.col_stride = 0; }, false},
      {"dropout and softcap", [](MaskedProblem &p) { p.softcap = 30, p.dropout.threshold = 6554; }},
      {"dropout and ALiBi", [](MaskedProblem &p) { p.alibi_slopes = &unreadable, p.dropout.threshold = 6554; }},
      {"dropout and left padding", [](MaskedProblem &p) { set_starts(p), p.dropout.threshold = 6554; }, true, true},
      {"block mask and softcap", [](MaskedProblem &p) { p.softcap = 30, set_block_mask(p, 128); }, true, true},
      {"blocks of 16 and ALiBi", [](MaskedProblem &p) { p.alibi_slopes = &unreadable, set_block_mask(p, 16); }, true, true},
      {"element mask and ALiBi", [](MaskedProblem &p) { p.alibi_slopes = &unreadable, set_element_mask(p); }, true, true},
      {"block lists and everything",
       [](MaskedProblem &p) {
         set_block_lists(p), set_bias(p), p.softcap = 30, p.alibi_slopes = &unreadable, p.alibi_log_scale = 0.5f;
         p.dropout.threshold = 6554;
       },
       true, true},
  };
  for (const Mixture &m : mixtures) {
    for (const int64_t head_dim : {64, 128}) {
      MaskedProblem p = problem(1000, 1000, head_dim);
      m.set(p);
      const std::string text = std::string(m.text) + ", head_dim " + std::to_string(head_dim),
                        name = "bf16_d" + std::to_string(head_dim);
      const ForwardPlan forward = forward_plan(p, h200());
      EXPECT_EQ(kernel_name(p, forward), "sm90_fwd_" + name + "all") << text;
      EXPECT_EQ(forward.cell_map, m.map) << text;
      EXPECT_NE(reason_of(forward).find("mixtures of score terms"), std::string::npos) << reason_of(forward);
      BackwardProblem b = backward_of(p);
      const BackwardPlan backward = backward_plan(b, h200());
      EXPECT_EQ(kernel_name(b, backward), m.backward ? "sm90_bwd_" + name + "all" : "sm80_bwd_" + name + "g") << text;
      EXPECT_EQ(backward.cell_map, m.map) << text;
      if (p.bias.data == nullptr || !m.backward) continue;
      b.dbias = p.bias;
      const BackwardPlan with_dbias = backward_plan(b, h200());
      EXPECT_EQ(with_dbias.family, Family::sm90) << text;
      ASSERT_GE(with_dbias.dbias_shape, 0) << text;
      EXPECT_EQ(sm80::kBackwardShapes[with_dbias.dbias_shape].scores & kAllByTiles, kAllByTiles) << text;
    }
    MaskedProblem wide = problem(1000, 1000, 192, 256);
    m.set(wide);
    EXPECT_EQ(kernel_name(wide, forward_plan(wide, h200())), "sm90_fwd_bf16_d256all") << m.text;
    BackwardProblem wide_b = backward_of(wide);
    if (wide.bias.data != nullptr && wide.bias.col_stride != 0) wide_b.dbias = wide.bias;
    EXPECT_EQ(kernel_name(wide_b, backward_plan(wide_b, h200())), "sm90_bwd_bf16_d256all") << m.text;
    MaskedProblem wider = problem(1000, 1000, 264, 512);
    m.set(wider);
    const ForwardPlan wider_forward = forward_plan(wider, h200());
    EXPECT_EQ(kernel_name(wider, wider_forward), "sm90_fwd_bf16_d512all") << m.text;
    EXPECT_EQ(wider_forward.cell_map, m.map) << m.text;
    const BackwardProblem wider_b = backward_of(wider);
    const BackwardPlan wider_backward = backward_plan(wider_b, h200());
    EXPECT_EQ(kernel_name(wider_b, wider_backward), "sm90_bwd_bf16_d512all") << m.text;
    EXPECT_EQ(wider_backward.cell_map, m.map) << m.text;
    // max_logit beside them.
    MaskedProblem p = problem(1000, 1000, 128);
    m.set(p);
    ForwardProblem f = forward_of(p);
    f.max_logit = &unreadable;
    ForwardPlan plan;
    ErrorText error;
    ASSERT_EQ(plan_forward(f, h200(), plan, error), FA_OK) << error.text;
    EXPECT_EQ(kernel_name(f, plan), "sm90_fwd_bf16_d128all") << m.text;
  }
}

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
  EXPECT_EQ(name(bytes), "decode_fwd_bf16_e4m3_d512_16_split");
  // More of them over 8-bit KV: a kernel widens it in the workspace, unless that would take more than a gigabyte.
  for (const auto &[queries, splits] : {std::pair{2, 4}, {1000, 1}}) {
    bytes.q_lengths.max_len = queries;
    const ForwardPlan plan = forward_plan(bytes, h200());
    EXPECT_EQ(kernel_name(bytes, plan), splits > 1 ? "sm90_fwd_bf16_e4m3_d512p_split" : "sm90_fwd_bf16_e4m3_d512p");
    EXPECT_EQ(plan.num_splits, splits);
    EXPECT_EQ(plan.widened_keys, 1024);
    const size_t rows = static_cast<size_t>(splits * bytes.batch * bytes.heads_q * queries), copy = 2 * 4 * 2 * 1024 * 512 * 2;
    EXPECT_GE(plan.widened_offset, splits > 1 ? rows * 513 * sizeof(float) : 0);
    EXPECT_EQ(plan.workspace_bytes, plan.widened_offset + copy);
  }
  bytes.k_lengths.max_len = 1 << 17;
  EXPECT_EQ(forward_plan(bytes, h200()).family, Family::simt);
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
  // What keeps the pages from TMA, and what the kernel does not do, is as before.
  const std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> others = {
      {"pages of 8", [](MaskedProblem &p) { set_pages(p, 8); }},
      {"rows that end within a swizzle atom", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 328, set_pages(p, 64); }},
      {"batch-invariant", [](MaskedProblem &p) { p.batch_invariant = true; }},
      {"left padding", [](MaskedProblem &p) { set_starts(p); }},
      {"more steps of pages and heads than TMA counts",
       [](MaskedProblem &p) { p.num_pages = INT32_MAX, p.k.batch_stride += 8; }},
  };
  for (const auto &[text, change] : others) {
    MaskedProblem p = paged(1000, 1000, 512, 8);
    change(p);
    const Family family = forward_plan(p, h200()).family;
    EXPECT_TRUE(family == Family::sm80 || family == Family::simt) << text;
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

// fp8 queries: Hopper kernels if descales are per head and results have 16 bits, with workspace for the copy of the values; else CUDA cores.
TEST(CudaPlanHopper, QuantisedQueries) {
  for (const NamedDevice &device : kDevices) {
    for (const Dtype results : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
      ForwardProblem p = forward_of(problem(2048, 1000, 128));
      set_fp8(p, results);
      const auto plan_of = [&] {
        ForwardPlan plan;
        ErrorText error;
        EXPECT_EQ(plan_forward(p, device.device, plan, error), FA_OK) << error.text;
        return plan;
      };
      const bool hopper = device.device.sm90 && results != Dtype::f32;
      const ForwardPlan plan = plan_of();
      EXPECT_EQ(plan.family, hopper ? Family::sm90 : Family::simt) << device.name;
      const std::string name = std::string(hopper ? "sm90" : "simt") + "_fwd_e4m3_to_" +
                               (results == Dtype::f32    ? "f32"
                                : results == Dtype::bf16 ? "bf16"
                                                         : "f16") +
                               "_d128";
      EXPECT_EQ(kernel_name(p, plan).rfind(name, 0), 0u) << kernel_name(p, plan);
      if (hopper) {
        EXPECT_TRUE(sm90::kForwardShapes[plan.shape].fp8);
        EXPECT_EQ(plan.workspace_bytes, size_t{2 * 2 * 128} * 1024);
      }
      p.v_descale.per_row = true;
      EXPECT_EQ(plan_of().family, Family::simt);
      p.v_descale.per_row = false;
      p.softcap = 30;
      EXPECT_EQ(plan_of().family, Family::simt);
    }
  }
}

// In the copy of the values every packed sequence has room for all of its keys, and for zeros up to the end of a KV tile.
TEST(CudaPlanHopper, CopiedKeysOfSequencesLieApart) {
  for (const int64_t step : {0, 1, 15, 127, 128, 129, 1000}) {
    for (int64_t b = 0; b < 20; ++b) {
      const int64_t begin = sm90::transposed_v_key(b * step, b), next = sm90::transposed_v_key((b + 1) * step, b + 1);
      EXPECT_EQ(begin % 128, 0);
      EXPECT_GE(next, begin + step + sm90::kMaxKvTile - 1);
    }
  }
}

// CTAs of one warpgroup, three per SM, where tiles are short.
TEST(CudaPlanHopper, HopperKernelsForShortSequences) {
  const auto kernel = [](int64_t queries, int64_t keys, int64_t head_dim, bool causal) {
    MaskedProblem p = problem(queries, keys, head_dim);
    p.heads_q = p.heads_k = 16;
    p.group = 1;
    p.batch = 64;
    if (causal) p.band.right = 0;
    const ForwardPlan plan = forward_plan(p, h200());
    EXPECT_EQ(plan.family, Family::sm90);
    const sm90::ForwardShape &shape = sm90::kForwardShapes[plan.shape];
    EXPECT_EQ(plan.blocks, std::min(plan.tiles, h200().multiprocessors * shape.blocks_at_once()));
    return std::string(shape.name);
  };
  EXPECT_EQ(kernel(256, 4096, 64, false), "d64s");
  EXPECT_EQ(kernel(257, 257, 64, false), "d64");
  EXPECT_EQ(kernel(512, 512, 64, true), "d64s");
  EXPECT_EQ(kernel(512, 4096, 64, true), "d64") << "most of the keys are seen";
  EXPECT_EQ(kernel(513, 513, 64, true), "d64");
  EXPECT_EQ(kernel(256, 256, 128, true), "d128s");
  EXPECT_EQ(kernel(512, 512, 128, true), "d128");
}

}  // namespace
}  // namespace fa::cuda
