// SPDX-License-Identifier: Apache-2.0
// Plans of the Hopper kernels for scores that are not plain: score texts, ALiBi, and mixtures of score terms.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/kernels/bwd_sm80/backward_table.h"
#include "cuda/kernels/bwd_sm90/backward_table.h"
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

}  // namespace
}  // namespace fa::cuda
