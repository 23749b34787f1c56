// SPDX-License-Identifier: Apache-2.0
// Plans of prompts over a cache and of options beside one: pages, 8-bit K and V, copies of K and V, masks as data.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// Prompts from pages: tiles of queries of one head where they fill the device, and queries the tiles; else tiles that the heads of a group share.
TEST(CudaPlan, PromptsInPages) {
  const struct {
    const char *kernel;
    int64_t queries, heads_k, group, head_dim, page_size;
    std::function<void(MaskedProblem &)> set;
  } cases[] = {
      {"sm90_fwd_bf16_d128p", 4096, 8, 8, 128, 16, [](MaskedProblem &) {}},
      {"sm90_fwd_bf16_d64p", 4096, 8, 8, 64, 256, [](MaskedProblem &) {}},
      {"sm90_fwd_bf16_d256p", 4096, 8, 2, 192, 48, [](MaskedProblem &) {}},
      {"sm90_fwd_bf16_d128p", 512, 8, 8, 128, 16, [](MaskedProblem &) {}},
      {"sm90_fwd_bf16_d128p", 192, 35, 2, 128, 16, [](MaskedProblem &) {}},
      {"extend_fwd_bf16_d128", 4096, 8, 8, 96, 16, [](MaskedProblem &) {}},
      {"sm90_fwd_bf16_d128p", 512, 8, 8, 128, 16,
       [](MaskedProblem &p) { p.q_lengths.cu = &unreadable, p.q_lengths.total = p.batch * 510; }},
      {"extend_fwd_bf16_d128", 512, 8, 8, 128, 16,  // a prompt and single tokens
       [](MaskedProblem &p) { p.q_lengths.cu = &unreadable, p.batch = 64, p.q_lengths.total = 512 + 63; }},
      {"sm90_fwd_bf16_d128samep", 512, 8, 8, 128, 16,
       [](MaskedProblem &p) { p.same_bits = p.batch_invariant = p.deterministic = true; }},
      {"sm90_fwd_bf16_d256samep", 512, 8, 8, 256, 16,
       [](MaskedProblem &p) { p.same_bits = p.batch_invariant = p.deterministic = true; }},
      {"extend_fwd_bf16_d128", 200, 35, 2, 128, 16, [](MaskedProblem &) {}},  // tiles that queries do not fill
      {"extend_fwd_bf16_d128_split", 16, 40, 8, 128, 16, [](MaskedProblem &) {}},
      {"extend_fwd_bf16_d128_split", 512, 2, 8, 128, 16, [](MaskedProblem &) {}},  // few tiles
      {"extend_fwd_bf16_d128", 4096, 8, 8, 128, 24, [](MaskedProblem &) {}},
      {"sm90_fwd_bf16_d128gp", 4096, 8, 8, 128, 16, [](MaskedProblem &p) { p.softcap = 5; }},
      {"sm90_fwd_bf16_d64gp", 4096, 8, 8, 64, 16, [](MaskedProblem &p) { p.softcap = 5; }},
      {"extend_fwd_bf16_d128", 4096, 8, 8, 128, 16, [](MaskedProblem &p) { p.batch_invariant = p.deterministic = true; }},
      {"extend_fwd_bf16_d128", 4096, 8, 8, 128, 16, [](MaskedProblem &p) { p.num_splits = 3; }},
  };
  for (const auto &c : cases) {
    MaskedProblem p = problem(c.queries, 9000, c.head_dim);
    p.heads_k = c.heads_k;
    p.group = c.group;
    p.heads_q = c.heads_k * c.group;
    set_pages(p, c.page_size);
    c.set(p);
    EXPECT_EQ(kernel_name(p, forward_plan(p, h200())), c.kernel) << c.queries << " queries of " << p.heads_q << " heads";
  }
}

// The same of 8-bit K and V. A copy in 16 bits pays with many rows for each key, which tiles of queries hold and which fill the device.
TEST(CudaPlan, QuantisedPrompts) {
  const auto bytes = [](int64_t queries, int64_t heads_k, int64_t group, int64_t head_dim) {
    ForwardProblem p = forward_of(problem(queries, 9000, head_dim));
    p.k.dtype = p.v.dtype = Dtype::e4m3;
    p.batch = 3;
    p.heads_k = heads_k;
    p.group = group;
    p.heads_q = heads_k * group;
    set_pages(p, 3);  // whatever the pages, the copy has none
    return p;
  };
  const struct {
    const char *kernel;
    int64_t queries, heads_k, group, head_dim;
    std::function<void(ForwardProblem &)> set;
  } cases[] = {
      {"sm90_fwd_bf16_e4m3_d128p", 512, 8, 8, 128, [](ForwardProblem &) {}},
      {"sm90_fwd_bf16_e4m3_d64p", 512, 8, 8, 64, [](ForwardProblem &) {}},
      {"sm90_fwd_bf16_e4m3_d64p", 4096, 8, 1, 64, [](ForwardProblem &) {}},
      {"extend_fwd_bf16_e4m3_d64", 512, 50, 1, 64, [](ForwardProblem &) {}},         // few rows for each key
      {"extend_fwd_bf16_e4m3_d128_split", 512, 1, 8, 128, [](ForwardProblem &) {}},  // few tiles
      {"extend_fwd_bf16_e4m3_d128", 130, 8, 8, 128, [](ForwardProblem &) {}},        // tiles that queries do not fill
      {"sm90_fwd_bf16_e4m3_d96", 4096, 8, 8, 80, [](ForwardProblem &) {}},           // whose rows end within a swizzle atom
      {"sm90_fwd_bf16_e4m3_d128gp", 512, 8, 8, 128, [](ForwardProblem &p) { p.softcap = 5; }},
      {"sm90_fwd_bf16_e4m3_d256gp", 512, 8, 2, 256, [](ForwardProblem &p) { p.softcap = 5; }},
      {"extend_fwd_bf16_e4m3_d128", 512, 8, 8, 128, [](ForwardProblem &p) { p.num_splits = 3; }},
      {"extend_fwd_bf16_e4m3_d128", 512, 8, 8, 128, [](ForwardProblem &p) { p.batch = 64; }},  // a copy of more than a gigabyte
      {"sm90_fwd_bf16_e4m3_d128", 512, 8, 8, 128,
       [](ForwardProblem &p) { p.page_table = nullptr, p.k_lengths.cu = &unreadable, p.k_lengths.total = 3 * 9024; }},
      {"extend_fwd_bf16_e4m3_d128", 512, 8, 8, 128,  // a prompt and single tokens
       [](ForwardProblem &p) { p.q_lengths.cu = &unreadable, p.batch = 20, p.q_lengths.total = 512 + 19; }},
      {"decode_fwd_bf16_e4m3_d128_64", 512, 8, 8, 128,
       [](ForwardProblem &p) {
         p.k_descale.per_row = true;
         p.k_descale.factors.data = &unreadable;
       }},
      {"sm90_fwd_bf16_e4m3_d64gp", 512, 8, 8, 64, [](ForwardProblem &p) { p.softcap = 5; }},
      {"sm90_fwd_bf16_e4m3_d256p", 512, 8, 2, 256, [](ForwardProblem &) {}},
      {"sm90_fwd_bf16_e4m3_d256p", 150, 8, 2, 256, [](ForwardProblem &) {}},
      {"sm90_fwd_bf16_e4m3_d256p", 512, 8, 2, 192, [](ForwardProblem &) {}},
      {"decode_fwd_bf16_e4m3_d256_32_split", 64, 8, 2, 256, [](ForwardProblem &) {}},
      {"decode_fwd_bf16_e4m3_d256_32_split", 32, 2, 8, 256, [](ForwardProblem &) {}},
  };
  for (const auto &c : cases) {
    ForwardProblem p = bytes(c.queries, c.heads_k, c.group, c.head_dim);
    c.set(p);
    const ForwardPlan plan = forward_plan(p, h200());
    EXPECT_EQ(kernel_name(p, plan), c.kernel) << c.queries << " queries of " << p.heads_q << " heads, head_dim " << c.head_dim;
    EXPECT_EQ(plan.copied_keys, plan.family == Family::sm90 ? 9024 : 0);
    if (plan.family != Family::sm90) continue;
    EXPECT_EQ(plan.copy_offset, 0u);
    EXPECT_EQ(plan.workspace_bytes, static_cast<size_t>(p.batch * c.heads_k * plan.copied_keys * 2 * c.head_dim * 2));
    Device before_hopper = h200();
    before_hopper.sm90 = false;
    EXPECT_NE(forward_plan(p, before_hopper).family, Family::sm90);
  }
}

// Options that no kernel for Hopper has over pages, and none for tensor cores over 8-bit K and V: a copy has neither.
TEST(CudaPlan, ContiguousCopies) {
  using Set = void (*)(ForwardProblem &);
  const auto served = [](int64_t queries, bool bytes) {
    ForwardProblem p = forward_of(problem(queries, 3000, 128));
    p.batch = 3;
    p.heads_k = 8;
    p.heads_q = 32;
    p.group = 4;
    set_pages(p, 3);
    if (bytes) {
      p.k.dtype = p.v.dtype = Dtype::e4m3;
    }
    return p;
  };
  const std::tuple<const char *, Set> copied[] = {
      {"d128a", [](ForwardProblem &p) { set_bias(p); }},
      {"d128b", [](ForwardProblem &p) { set_element_mask(p); }},
      {"d128b64", [](ForwardProblem &p) { set_block_mask(p, 64); }},
      {"d128d", [](ForwardProblem &p) { p.dropout.threshold = 6554; }},
      {"d128", [](ForwardProblem &p) { set_starts(p); }},
      {"d128g", [](ForwardProblem &p) { set_starts(p), p.alibi_slopes = &unreadable; }},
      {"d256b", [](ForwardProblem &p) { p.head_dim = p.head_dim_v = 160, set_element_mask(p); }},
      {"d128d", [](ForwardProblem &p) { p.dropout.threshold = 6554, p.q_lengths.cu = &unreadable, p.q_lengths.total = 3000; }},
  };
  const Set not_copied[] = {
      [](ForwardProblem &p) { p.batch_invariant = p.deterministic = true; },
      [](ForwardProblem &p) { p.batch = 200; },                                                   // more than a gigabyte
      [](ForwardProblem &p) { p.head_dim = p.head_dim_v = p.k.dtype == Dtype::e4m3 ? 72 : 77; },  // no whole vectors
      [](ForwardProblem &p) { p.q_lengths.max_len = 4; },
      [](ForwardProblem &p) {  // which would be rounded
        if (p.k.dtype == Dtype::e4m3) p.v_descale.factors.data = &unreadable;
        if (p.k.dtype != Dtype::e4m3) p.batch_invariant = p.deterministic = true;
      },
  };
  for (const bool bytes : {false, true}) {
    for (const auto &[kernel, set] : copied) {
      ForwardProblem p = served(1000, bytes);
      set(p);
      const ForwardPlan plan = forward_plan(p, h200());
      EXPECT_EQ(kernel_name(p, plan), std::string(bytes ? "sm90_fwd_bf16_e4m3_" : "sm90_fwd_bf16_") + kernel);
      EXPECT_TRUE(plan.contiguous_copy);
      EXPECT_EQ(plan.copied_keys, 3008);
      EXPECT_EQ(plan.cell_map, p.masked_by_data());
      EXPECT_EQ(plan.workspace_bytes, plan.copy_offset + static_cast<size_t>(3 * 8 * 3008 * 2 * p.head_dim * 2));
      Device before_hopper = h200();
      before_hopper.sm90 = false;
      EXPECT_EQ(forward_plan(p, before_hopper).contiguous_copy, bytes) << kernel;  // pages cost the others nothing
    }
    ForwardProblem packed = served(1000, bytes);
    set_element_mask(packed);
    packed.page_table = nullptr;
    packed.k_lengths.cu = &unreadable;
    packed.k_lengths.total = 5000;
    const ForwardPlan of_packed = forward_plan(packed, h200());
    EXPECT_EQ(of_packed.contiguous_copy, bytes);
    EXPECT_EQ(of_packed.workspace_bytes - of_packed.copy_offset, bytes ? 5000u * 8 * 2 * 128 * 2 : of_packed.workspace_bytes);
    for (const Set set : not_copied) {
      ForwardProblem p = served(1000, bytes);
      set_bias(p);
      set(p);
      EXPECT_FALSE(forward_plan(p, h200()).contiguous_copy);
    }
  }
}

// Pages of fp32 are copied as they are.
TEST(CudaPlan, ContiguousCopiesOfFp32) {
  MaskedProblem p = problem(1000, 3000, 128);
  set_dtype(p, Dtype::f32);
  set_pages(p, 16);
  const ForwardPlan plan = forward_plan(p, h200());
  EXPECT_EQ(plan.family, Family::sm90_fp32);
  EXPECT_TRUE(plan.contiguous_copy);
}

// Masks as data over a cache: kernels of extend, with any number of rows, that read the cell map.
TEST(CudaPlan, MasksOverCaches) {
  using Set = void (*)(MaskedProblem &);
  const auto tree = [](int64_t queries, Set set) {
    MaskedProblem p = problem(queries, 8192, 128);
    p.batch = 4;
    p.heads_q = 32;
    p.heads_k = 8;
    p.group = 4;
    set_pages(p, 16);
    set_element_mask(p);
    set(p);
    return p;
  };
  const std::tuple<const char *, Set> masked[] = {
      {"extend_fwd_bf16_d128b_split", [](MaskedProblem &) {}},
      {"extend_fwd_bf16_d128b_split", [](MaskedProblem &p) { p.page_table = nullptr; }},
      {"extend_fwd_bf16_d128b_split", [](MaskedProblem &p) { p.softcap = 30, p.alibi_slopes = &unreadable; }},
      {"extend_fwd_bf16_d256b_split", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 256; }},
      {"extend_fwd_bf16_d64b_split", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 40; }},
      {"extend_fwd_bf16_e4m3_d128b_split", [](MaskedProblem &p) { p.k.dtype = p.v.dtype = Dtype::e4m3; }},
      {"extend_fwd_bf16_i8_d64b_split",
       [](MaskedProblem &p) { p.k.dtype = p.v.dtype = Dtype::i8, p.head_dim = p.head_dim_v = 64; }},
      {"sm80_fwd_bf16_d128g_split", [](MaskedProblem &p) { p.num_splits = 3; }},
      {"sm80_fwd_bf16_d128g", [](MaskedProblem &p) { p.batch_invariant = p.deterministic = true; }},
      {"sm80_fwd_bf16_d128g_split", [](MaskedProblem &p) { set_bias(p); }},
  };
  for (const auto &[kernel, set] : masked) {
    for (const int64_t queries : {1, 4, 16}) {
      const MaskedProblem p = tree(queries, set);
      const ForwardPlan plan = forward_plan(p, h200());
      EXPECT_EQ(kernel_name(p, plan), kernel) << queries;
      EXPECT_TRUE(plan.cell_map);
      EXPECT_EQ(plan.counters, 0);  // the combine kernel adds all partials
    }
  }
  // Left padding over pages is such a mask; without pages and in 16 bits keys are left out.
  MaskedProblem padded = tree(1, [](MaskedProblem &p) { p.element_mask = {}, set_starts(p); });
  EXPECT_EQ(forward_plan(padded, h200()).family, Family::extend);
  padded.page_table = nullptr;
  EXPECT_EQ(forward_plan(padded, h200()).family, Family::decode);
  // Rows without a copy, because a descale of heads would be rounded into it.
  ForwardProblem bytes = forward_of(tree(512, [](MaskedProblem &p) { p.k.dtype = p.v.dtype = Dtype::e4m3; }));
  EXPECT_TRUE(forward_plan(bytes, h200()).contiguous_copy);
  bytes.k_descale.factors.data = &unreadable;
  EXPECT_EQ(forward_plan(bytes, h200()).family, Family::extend);
}

}  // namespace
}  // namespace fa::cuda
