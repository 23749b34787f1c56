// SPDX-License-Identifier: Apache-2.0
// Plans of problems for decode, extend and MLA kernels: few queries over many keys, more queries over a cache, 8-bit KV caches, latent caches.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "cuda/kernels/decode/table.h"
#include "cuda/kernels/extend/table.h"
#include "cuda/kernels/mla/table.h"
#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// For sequences of equal length, stream-K partitions end with work tiles if that leaves few CTAs idle.
TEST(CudaPlan, SharesEndWithItems) {
  int64_t reached = 0;
  for (const auto &[name, device] : kDevices) {
    for (const int64_t head_dim : {64, 128, 256}) {
      for (int64_t batch = 1; batch <= 256; batch *= 2) {
        MaskedProblem p = problem(1, 100000, head_dim);
        p.batch = batch;
        const ForwardPlan plan = forward_plan(p, device);
        if (plan.family != Family::decode || plan.fixed_splits > 0) continue;
        const int64_t room = int64_t{device.multiprocessors} * decode::kShapes[plan.shape].ctas_per_sm(device.shared_bytes);
        const int64_t heads = batch * p.heads_k, items = heads >> plan.coscheduled_log2;
        if (heads > room || room / heads * heads * 16 < room * 15) continue;
        ++reached;
        EXPECT_TRUE(plan.max_partitions % items == 0 || items == plan.max_partitions * 2)
            << name << ", " << head_dim << ", " << batch;
      }
    }
  }
  EXPECT_GT(reached, 0);
}

// The largest head_dim whose decode kernel fits the shared memory of a device.
int64_t largest_decode_head_dim(const Device &device) {
  return device.shared_bytes >= 227 * 1024 ? 256 : device.shared_bytes >= 163 * 1024 ? 128 : 64;
}

// The workspace of stream-K partitions depends on the device, not on the problem. Where splits depend on the sequence alone, the plan stays
// with decode kernels of as many rows.
TEST(CudaPlan, DecodeWorkspace) {
  for (const auto &[name, device] : kDevices) {
    for (const int64_t head_dim : {64, 128, 256}) {
      std::set<size_t> sizes;
      for (const int64_t batch : {64, 1000}) {
        for (const int64_t seqlen_k : {10000, 1000000}) {
          MaskedProblem p = problem(1, seqlen_k, head_dim);
          p.batch = batch;
          const ForwardPlan plan = forward_plan(p, device);
          ASSERT_EQ(plan.family == Family::decode, head_dim <= largest_decode_head_dim(device)) << name << ", " << head_dim;
          if (plan.family != Family::decode) continue;
          const decode::Shape &shape = decode::kShapes[plan.shape];
          sizes.insert(plan.workspace_bytes);
          EXPECT_EQ(plan.fixed_splits, 0);
          const int64_t room = int64_t{device.multiprocessors} * shape.ctas_per_sm(device.shared_bytes);
          EXPECT_LE(plan.blocks, room) << name;
          EXPECT_GE(plan.blocks * 16, room * 15) << name;
          EXPECT_EQ(plan.blocks, int64_t{plan.max_partitions} << plan.coscheduled_log2) << name;
          MaskedProblem uneven = p;
          uneven.k_lengths.used = reinterpret_cast<const int32_t *>(&unreadable);
          const ForwardPlan even_shares = forward_plan(uneven, device);
          EXPECT_GE(even_shares.blocks * 16, room * 15) << name;
          EXPECT_LE(even_shares.blocks, room) << name;
          EXPECT_EQ(even_shares.workspace_bytes, plan.workspace_bytes) << name;
          for (const bool invariant : {false, true}) {
            MaskedProblem cut = p;
            cut.batch_invariant = invariant;
            cut.num_splits = invariant ? 0 : 5;
            const ForwardPlan pieces = forward_plan(cut, device);
            ASSERT_EQ(pieces.family, Family::decode);
            EXPECT_EQ(decode::kShapes[pieces.shape].rows(), shape.rows());
            EXPECT_EQ(pieces.num_splits, pieces.fixed_splits);
          }
        }
      }
      EXPECT_EQ(sizes.size(), head_dim <= largest_decode_head_dim(device) ? 1u : 0u) << name << " D" << head_dim;
    }
  }
}

// Whether an even stream-K partition of work tiles with `keys` keys each, as the device makes it, splits a tile.
bool cuts_alike(const ForwardPlan &plan, int64_t items, int64_t keys) {
  const int64_t step = decode::kShapes[plan.shape].kv_step(), steps = (keys + step - 1) / step, units = items * steps,
                ranges = std::min<int64_t>(std::max<int64_t>(units >> plan.min_iterations_log2, 1), plan.max_partitions);
  for (int64_t range = 1; range < ranges; ++range) {
    if (range * units / ranges % steps != 0) return true;
  }
  return false;
}

// The plan of the combine kernel of a decode, which has no counters: the work tiles that may be split, where the device records the splits,
// and the number of CTAs.
TEST(CudaPlan, DecodeSums) {
  int64_t none = 0, by_item = 0, by_range = 0, more_than_beside = 0;
  for (const auto &[name, device] : kDevices) {
    for (const auto &[head_dim, keys] :
         {std::pair{64, Dtype::bf16}, {64, Dtype::e4m3}, {128, Dtype::bf16}, {256, Dtype::bf16}}) {
      for (const int64_t batch : {1, 2, 11, 33, 64, 66, 127, 1000}) {
        for (const int64_t heads_k : {1, 2, 8}) {
          for (const auto &[num_splits, invariant] : {std::pair{0, false}, {1, false}, {5, false}, {0, true}}) {
            for (const bool alike : {true, false}) {
              MaskedProblem p = problem(1, 10000, head_dim);
              p.batch = batch;
              p.heads_k = heads_k;
              p.heads_q = heads_k * p.group;
              p.k.dtype = p.v.dtype = keys;
              p.num_splits = num_splits;
              p.batch_invariant = invariant;
              if (!alike) p.k_lengths.used = reinterpret_cast<const int32_t *>(&unreadable);
              const ForwardPlan plan = forward_plan(p, device);
              if (plan.family != Family::decode) continue;
              ASSERT_EQ(plan.cluster, 0);
              const decode::Shape &shape = decode::kShapes[plan.shape];
              const auto text = [&, device_name = name] {
                return std::string(device_name) + ", D" + std::to_string(shape.head_dim) + ", batch " + std::to_string(batch) +
                       ", heads " + std::to_string(heads_k) + ", splits " + std::to_string(num_splits) +
                       (invariant ? ", invariant" : "") + (alike ? "" : ", unlike");
              };
              const int64_t heads = batch * heads_k, items = heads >> plan.coscheduled_log2,
                            room = int64_t{device.multiprocessors} * shape.ctas_per_sm(device.shared_bytes);
              EXPECT_EQ(plan.counters, 0) << text();
              if (plan.fixed_splits > 0) {
                EXPECT_EQ(plan.split_tiles, plan.fixed_splits > 1 ? heads : 0) << text();
                EXPECT_FALSE(plan.split_tiles_by_partition) << text();
              } else {
                // Sequences that may be unlike can have any cut; of others shares may end where items do.
                const bool all_alike = alike || batch == 1, cut = !all_alike || cuts_alike(plan, items, 10000);
                EXPECT_EQ(plan.split_tiles, cut ? std::min<int64_t>(items, plan.max_partitions) << plan.coscheduled_log2 : 0)
                    << text();
                EXPECT_EQ(plan.split_tiles_by_partition, cut && items > plan.max_partitions) << text();
                for (int64_t keys_now = 1; !cut && !alike && keys_now < 10000; keys_now = keys_now * 5 / 4 + 1) {
                  EXPECT_FALSE(cuts_alike(plan, items, keys_now)) << text() << ", " << keys_now << " keys";
                }
              }
              const int64_t slots = plan.fixed_splits == 0  ? 2 * plan.blocks
                                    : plan.fixed_splits > 1 ? heads * plan.fixed_splits
                                                            : 0;
              EXPECT_GE(plan.split_lse_offset, static_cast<size_t>(slots * shape.rows() * shape.head_dim) * 4) << text();
              // An even partition needs the same workspace for every problem, because lengths on the device may split any tile.
              EXPECT_EQ(plan.split_tiles_offset % 16, 0u) << text();
              EXPECT_GE(plan.split_tiles_offset, plan.split_lse_offset + static_cast<size_t>(slots * shape.rows()) * 8)
                  << text();
              EXPECT_LE(plan.split_tiles_offset +
                            static_cast<size_t>((plan.fixed_splits > 0 ? plan.split_tiles : room) * decode::kSplitTileBytes),
                        plan.workspace_bytes)
                  << text();
              EXPECT_LE(plan.split_tiles, plan.fixed_splits > 0 ? heads : room) << text();
              // As many blocks for each cut, and they shall stand beside the kernel that cuts.
              if (plan.split_tiles == 0) {
                EXPECT_EQ(plan.combine_ctas, 0) << text();
                ++none;
                continue;
              }
              EXPECT_EQ(plan.combine_ctas % plan.split_tiles, 0) << text();
              EXPECT_GE(plan.combine_ctas, plan.split_tiles) << text();
              EXPECT_LE(plan.combine_ctas, std::max<int64_t>(2 * device.multiprocessors, plan.split_tiles)) << text();
              // No block without columns to sum.
              EXPECT_LT((plan.combine_ctas / plan.split_tiles - 1) * decode::kCombineColumns, p.group * shape.head_dim)
                  << text();
              ++(plan.split_tiles_by_partition ? by_range : by_item);
              more_than_beside += plan.combine_ctas > 2 * device.multiprocessors;
            }
          }
        }
      }
    }
  }
  for (const int64_t reached : {none, by_item, by_range, more_than_beside}) EXPECT_GT(reached, 0);
}

MaskedProblem latent_cache(int64_t seqlen_q, int64_t seqlen_k, int64_t heads) {
  MaskedProblem p = problem(seqlen_q, seqlen_k, 576, 512);
  p.heads_q = p.group = heads;
  p.heads_k = 1;
  p.v = p.k;
  return p;
}

// Kernels for latent caches serve values that lie in their keys, any number of queries, and plain scores.
TEST(CudaPlan, LatentCaches) {
  const auto family = [](const MaskedProblem &p) { return forward_plan(p, h200()).family; };
  for (const int64_t heads : {1, 16, 128}) {
    for (const int64_t seqlen_q : {1, 2, 3000}) EXPECT_EQ(family(latent_cache(seqlen_q, 5000, heads)), Family::mla);
  }
  MaskedProblem p = latent_cache(1, 5000, 16);
  EXPECT_EQ(kernel_name(p, forward_plan(p, h200())), "mla_fwd_bf16_d576c_split");
  p.num_splits = 3;
  EXPECT_EQ(kernel_name(p, forward_plan(p, h200())), "mla_fwd_bf16_d576_split");
  p = latent_cache(1, 5000, 16);
  p.v.data = static_cast<char *>(p.k.data) + 16;
  EXPECT_EQ(family(p), Family::sm80);
  p = latent_cache(1, 5000, 16);
  p.v.seq_stride = 1024;
  EXPECT_EQ(family(p), Family::sm80);
  p = latent_cache(1, 5000, 16);
  p.softcap = 30;
  EXPECT_EQ(family(p), Family::simt);
  p = latent_cache(1, 5000, 16);
  Device older = h200();
  older.sm90 = false;
  EXPECT_EQ(forward_plan(p, older).family, Family::sm80);
}

// One token of up to 16 heads over 8-bit KV: TMA loads whole swizzle atoms from pages of whole boxes.
TEST(CudaPlan, LatentCachesOf8Bits) {
  const auto bytes = [](int64_t heads, int64_t head_dim) {
    MaskedProblem p = latent_cache(1, 5000, heads);
    p.head_dim = head_dim;
    p.k.dtype = p.v.dtype = Dtype::e4m3;
    return p;
  };
  for (const int64_t head_dim : {576, 560}) {
    const MaskedProblem p = bytes(16, head_dim);
    const ForwardPlan plan = forward_plan(p, h200());
    EXPECT_EQ(kernel_name(p, plan), "decode_fwd_bf16_e4m3_d576_16_split");
    EXPECT_EQ(plan.tma_kv, head_dim == 576);
    EXPECT_EQ(reason_of(plan).find("TMA loads K and V") != std::string::npos, head_dim == 576);
  }
  MaskedProblem p = bytes(16, 576);
  const int32_t page_table = 0;
  p.page_table = &page_table;
  p.num_pages = 100;
  for (const int64_t page_size : {16, 64, 24, 1}) {
    p.page_size = page_size;
    EXPECT_EQ(forward_plan(p, h200()).tma_kv, page_size % 16 == 0) << page_size;
  }
  EXPECT_EQ(forward_plan(bytes(17, 576), h200()).family, Family::mla);
  // What the MLA kernels do not take runs in row blocks.
  p = bytes(64, 576);
  p.softcap = 30;
  EXPECT_EQ(kernel_name(p, forward_plan(p, h200())), "decode_fwd_bf16_e4m3_d576_16_split");
  EXPECT_EQ(forward_plan(p, h200()).row_blocks, 4);
}

// CTAs that may form pairs: as many as there are partitions, whatever the bounds of lengths allow.
TEST(CudaPlan, LatentPairs) {
  for (const auto &[batch, keys, pairs] : {std::tuple{3, 512, false},
                                           {23, 512, true},
                                           {23, 700, false},
                                           {23, 400, false},
                                           {62, 5000, true},
                                           {61, 5000, false},
                                           {66, 5000, true},
                                           {67, 5000, false}}) {
    MaskedProblem p = latent_cache(1, keys, 16);
    p.batch = batch;
    const ForwardPlan plan = forward_plan(p, h200());
    EXPECT_EQ(plan.cluster, pairs ? 2 : 0) << batch << " x " << keys;
    EXPECT_EQ(mla::kShapes[plan.shape].pairs, pairs) << batch << " x " << keys;
    if (pairs) {
      EXPECT_EQ(plan.blocks, 2 * batch);
    }
  }
}

// Every share has room for a part, and few heads are cut into no more parts than are added up in time.
TEST(CudaPlan, LatentWorkspace) {
  for (const int64_t heads : {16, 64, 128}) {
    for (const int64_t batch : {1, 64}) {
      MaskedProblem p = latent_cache(1, 8192, heads);
      p.batch = batch;
      const ForwardPlan plan = forward_plan(p, h200());
      EXPECT_EQ(plan.row_blocks, (heads + 63) / 64);
      EXPECT_LE(plan.max_partitions, h200().multiprocessors);
      if (batch == 1) {  // three KV tiles of 128 each, in CTAs that do not add partials
        EXPECT_TRUE(mla::kShapes[plan.shape].uses_combine_kernel);
        EXPECT_EQ(plan.max_partitions << plan.coscheduled_log2, 43 * plan.row_blocks);
        EXPECT_GT(plan.combine_ctas, 0);
        EXPECT_EQ(plan.counters, 0);
      }
      if (batch == 64) {
        EXPECT_EQ(plan.max_partitions << plan.coscheduled_log2, 128) << "shares that do not cross items";
      }
      EXPECT_EQ(plan.cluster, batch == 64 && heads < 128 ? 2 : 0) << "pairs where an item has two shares";
      EXPECT_GE(plan.workspace_bytes, static_cast<size_t>((plan.max_partitions << plan.coscheduled_log2) * 64) * (512 + 2) * 4);
      p.batch_invariant = p.deterministic = true;
      const ForwardPlan pieces = forward_plan(p, h200());
      EXPECT_EQ(pieces.cluster, 0);
      EXPECT_EQ(pieces.counters, batch * plan.row_blocks);
      EXPECT_EQ(pieces.blocks, batch * plan.row_blocks * pieces.fixed_splits) << "CTAs wait for those before them";
      EXPECT_GE(pieces.workspace_bytes,
                static_cast<size_t>(batch * plan.row_blocks * pieces.fixed_splits * 64) * (512 + 2) * 4);
    }
  }
}

// Decode kernels serve a few queries whose rows fit one CTA, on every device whose shared memory holds their pipelines.
TEST(CudaPlan, DecodeKernels) {
  const auto family = [](const MaskedProblem &p, const Device &device = h200()) { return forward_plan(p, device).family; };
  const MaskedProblem plain = problem(4, 4000, 128);
  ASSERT_EQ(plain.group, 4) << "16 rows";
  const std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> ours = {
      {"plain", [](MaskedProblem &) {}},
      {"pages", [](MaskedProblem &p) { p.page_table = reinterpret_cast<const int32_t *>(&unreadable); }},
      {"softcap and ALiBi", [](MaskedProblem &p) { p.softcap = 30, p.alibi_slopes = &unreadable; }},
      {"a window", [](MaskedProblem &p) { p.band.left = 100, p.band.right = 0; }},
      {"lengths on the device", [](MaskedProblem &p) { p.q_lengths.cu = p.k_lengths.cu = &unreadable; }},
      {"splits", [](MaskedProblem &p) { p.num_splits = 2; }},
      {"batch-invariant", [](MaskedProblem &p) { p.batch_invariant = p.deterministic = true; }},
      {"32 rows", [](MaskedProblem &p) { p.q_lengths.max_len = 8; }},
      {"out that does not start on 16 bytes", [](MaskedProblem &p) { p.out.seq_stride = 129; }},
  };
  for (const auto &[text, change] : ours) {
    MaskedProblem p = plain;
    change(p);
    EXPECT_EQ(family(p), Family::decode) << text;
    Device without = h200();
    without.sm90 = false;
    EXPECT_EQ(family(p, without), Family::decode) << text;
  }
  const std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> others = {
      {"bias", [](MaskedProblem &p) { set_bias(p); }},
      {"block mask", [](MaskedProblem &p) { set_block_mask(p, 64); }},
      {"dropout", [](MaskedProblem &p) { p.dropout.threshold = 6554; }},
      {"17 queries", [](MaskedProblem &p) { p.q_lengths.max_len = 17; }},
      {"36 rows", [](MaskedProblem &p) { p.q_lengths.max_len = 9; }},
      {"68 rows", [](MaskedProblem &p) { p.heads_q = 17 * p.heads_k, p.group = 17; }},
      {"rows that do not start on 16 bytes", [](MaskedProblem &p) { p.k.seq_stride = 129; }},
      {"rows that are not whole 16-byte vectors", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 127; }},
      {"head_dim 264", [](MaskedProblem &p) { p.head_dim = 264; }},
      {"a sequence's own queries unknown, batch-invariant",
       [](MaskedProblem &p) { p.batch_invariant = p.deterministic = true, p.q_lengths.cu = &unreadable; }},
  };
  for (const auto &[text, change] : others) {
    MaskedProblem p = plain;
    change(p);
    EXPECT_NE(family(p), Family::decode) << text;
  }
  // The first line with room for the rows, on smaller devices the first that fits.
  const auto name = [](int64_t seqlen_q, int64_t head_dim, const Device &device) {
    const MaskedProblem p = problem(seqlen_q, 5000, head_dim);  // more keys than clusters take
    return kernel_name(p, forward_plan(p, device));
  };
  EXPECT_EQ(name(1, 128, h200()), "decode_fwd_bf16_d128_8_split");
  EXPECT_EQ(name(2, 128, h200()), "decode_fwd_bf16_d128_16_split") << "eight rows, of two tokens";
  EXPECT_EQ(name(4, 128, h200()), "decode_fwd_bf16_d128_16_split");
  EXPECT_EQ(name(5, 128, h200()), "decode_fwd_bf16_d128_32_split");
  EXPECT_EQ(name(9, 128, h200()), "extend_fwd_bf16_d128p_split");
  Device plain_90 = h200();
  plain_90.sm90 = false;
  EXPECT_EQ(name(9, 128, plain_90), "decode_fwd_bf16_d128_64_split");
  EXPECT_EQ(name(1, 96, h200()), "decode_fwd_bf16_d128_8_split");
  EXPECT_EQ(name(1, 136, h200()), "decode_fwd_bf16_d256_8_split");
  EXPECT_EQ(name(2, 136, h200()), "decode_fwd_bf16_d256_16_split");
  EXPECT_EQ(name(9, 256, h200()), "extend_fwd_bf16_d256p_split");
  EXPECT_EQ(name(9, 256, plain_90), "sm80_fwd_bf16_d256_split");
  Device a100 = h200();
  a100.shared_bytes = 163 * 1024;
  EXPECT_EQ(name(1, 128, a100), "decode_fwd_bf16_d128_16s_split");
  EXPECT_EQ(name(5, 128, a100), "decode_fwd_bf16_d128_32_split");
  a100.compute_capability = 80;
  EXPECT_EQ(name(5, 128, a100), "sm80_fwd_bf16_d128_split");
  EXPECT_EQ(name(1, 256, a100), "sm80_fwd_bf16_d256_split");
}

// Few heads with few keys each, of equal length: one cluster per head, of as many CTAs as the device has for it.
TEST(CudaPlan, DecodeByClusters) {
  MaskedProblem p = problem(1, 2048, 128);
  p.batch = 1;
  p.heads_q = 64;
  p.heads_k = p.group = 8;
  const auto cluster = [&](const Device &device = h200()) {
    const ForwardPlan plan = forward_plan(p, device);
    EXPECT_EQ(decode::kShapes[plan.shape].clustered, plan.cluster > 0);
    if (plan.cluster > 0) {
      EXPECT_EQ(plan.blocks, p.batch * p.heads_k * plan.cluster);
      EXPECT_LE(plan.blocks, device.multiprocessors);
      EXPECT_EQ(plan.workspace_bytes, 0u);
      EXPECT_EQ(plan.counters, 0);
      EXPECT_EQ(plan.split_tiles, 0);
      EXPECT_EQ(plan.combine_ctas, 0) << "the CTAs combine in distributed shared memory";
    }
    return plan.cluster;
  };
  EXPECT_EQ(cluster(), 16);
  p.k_lengths.max_len = 300;
  EXPECT_EQ(cluster(), 5) << "64 keys are one step of the four warps of a CTA; with up to eight CTAs one step each is enough";
  p.k_lengths.max_len = 128;
  EXPECT_EQ(cluster(), 2) << "two steps";
  p.k_lengths.max_len = 64;
  EXPECT_EQ(cluster(), 0) << "one step";
  p.k_lengths.max_len = 512;
  EXPECT_EQ(cluster(), 8);
  p.k_lengths.max_len = 1024;
  EXPECT_EQ(cluster(), 8) << "128 keys per CTA: more than eight CTAs get two steps each";
  p.k_lengths.max_len = 1025;
  EXPECT_EQ(cluster(), 9);
  p.k_lengths.max_len = 4096;
  EXPECT_EQ(cluster(), 16);
  p.k_lengths.max_len = 4097;
  EXPECT_EQ(cluster(), 0) << "more than 256 keys per CTA";
  p.k_lengths.max_len = 1024;
  p.k_lengths.used = reinterpret_cast<const int32_t *>(&unreadable);
  EXPECT_EQ(cluster(), 8) << "a sequence alone may have any length";
  p.batch = 2;
  EXPECT_EQ(cluster(), 0) << "unlike sequences";
  p.k_lengths.used = nullptr;
  EXPECT_EQ(cluster(), 8);
  p.num_splits = 4;
  EXPECT_EQ(cluster(), 0);
  p.num_splits = 0;
  p.batch_invariant = p.deterministic = true;
  EXPECT_EQ(cluster(), 0);
  p.batch_invariant = false;
  p.q_lengths.max_len = 4;
  EXPECT_EQ(cluster(), 0) << "32 rows";
  p.q_lengths.max_len = 1;
  Device slice = h200();
  slice.multiprocessors = 114;
  p.batch = 1;
  p.k_lengths.max_len = 2048;
  EXPECT_EQ(cluster(slice), 8) << "as many as every chip has";
  slice = h200();
  slice.sm90 = false;
  EXPECT_EQ(cluster(slice), 8) << "a newer chip";
  EXPECT_EQ(cluster(kDevices[1].device), 0) << "sm_80";
}

// With many keys per SM there are more warps, unless the splits must not depend on the batch.
TEST(CudaPlan, DecodeWithMuchToDo) {
  MaskedProblem p = problem(1, 8192, 128);
  for (const int64_t tokens : {1, 4}) {
    p.q_lengths.max_len = tokens;
    const std::string rows = tokens == 1 ? "8" : "16";
    for (const int64_t batch : {32, 33}) {  // 2 * 33 * 8192 >= 132 * 4096
      p.batch = batch;
      EXPECT_EQ(kernel_name(p, forward_plan(p, h200())),
                "decode_fwd_bf16_d128_" + rows + (batch == 32 ? "_split" : "x12_split"));
    }
    p.batch_invariant = p.deterministic = true;
    EXPECT_EQ(kernel_name(p, forward_plan(p, h200())), "decode_fwd_bf16_d128_" + rows + "_split");
    p.batch_invariant = false;
  }
  // Where no head is cut, such a launch has the device for itself from its start.
  for (const int64_t batch : {8, 33, 64, 66}) {
    p.q_lengths.max_len = 1;
    p.batch = batch;
    const ForwardPlan plan = forward_plan(p, h200());
    EXPECT_EQ(plan.split_tiles > 0, batch == 8 || batch == 33) << batch;
    EXPECT_EQ(plan.allow_early_dependents, plan.split_tiles > 0) << batch;
  }
  p.k_lengths.max_len = 1024;
  EXPECT_TRUE(forward_plan(p, h200()).allow_early_dependents) << "too short";
}

// More rows than decode kernels have, or more queries on pages: blocks of rows, whose keys are split.
// fp8 queries are for kernels that know them, however many rows they make.
TEST(CudaPlan, QuantisedQueriesOfManyRows) {
  for (const auto &[name, device] : kDevices) {
    for (const int64_t seqlen_q : {1, 10, 16}) {
      MaskedProblem p = problem(seqlen_q, 10000, 128);
      p.heads_q = 8 * p.heads_k;
      p.group = 8;
      p.q.dtype = p.k.dtype = p.v.dtype = Dtype::e4m3;
      const ForwardPlan plan = forward_plan(p, device);
      EXPECT_TRUE(plan.family == Family::simt || plan.family == Family::sm90) << name << " " << kernel_name(p, plan);
    }
  }
}

TEST(CudaPlan, ExtendKernels) {
  MaskedProblem p = problem(300, 50000, 128);
  p.page_table = reinterpret_cast<const int32_t *>(&unreadable);
  p.page_size = 16;
  ForwardPlan plan = forward_plan(p, h200());
  ASSERT_EQ(plan.family, Family::extend);
  EXPECT_EQ(kernel_name(p, plan), "extend_fwd_bf16_d128_split");
  const extend::Shape &shape = extend::kShapes[plan.shape];
  EXPECT_EQ(plan.row_blocks, (300 * p.group + shape.rows() - 1) / shape.rows());
  EXPECT_EQ(plan.max_partitions, h200().multiprocessors);
  EXPECT_GE(plan.counters, plan.max_partitions);
  EXPECT_GE(plan.workspace_bytes,
            static_cast<size_t>(plan.max_partitions * shape.rows()) * static_cast<size_t>(shape.head_dim + 2) * 4);
  // Heads with one row block each are co-scheduled: eight KV heads at a time, in partitions of two heads. 8-bit KV with more than 64 rows is not.
  MaskedProblem speculation = problem(16, 8192, 128);
  speculation.batch = 32;
  speculation.heads_q = 64;
  speculation.heads_k = speculation.group = 8;
  for (const Dtype keys : {Dtype::bf16, Dtype::e4m3}) {
    speculation.k.dtype = speculation.v.dtype = keys;
    const ForwardPlan in_step = forward_plan(speculation, h200());
    ASSERT_EQ(in_step.family, Family::extend);
    EXPECT_EQ(in_step.coscheduled_log2, keys == Dtype::bf16 ? 3 : 0);
    EXPECT_EQ(in_step.blocks, keys == Dtype::bf16 ? 128 : h200().multiprocessors);
  }
  EXPECT_EQ(plan.split_tiles, 0);
  EXPECT_EQ(plan.combine_ctas, 0);
  // Few heads have many split-KV partials, for which there is a combine kernel.
  MaskedProblem lone = p;
  lone.batch = lone.group = 1;
  lone.q_lengths.max_len = 40;
  for (const int32_t heads : {1, 3, 8, 22, 23}) {
    lone.heads_q = lone.heads_k = heads;
    const ForwardPlan few = forward_plan(lone, h200());
    ASSERT_EQ(few.family, Family::extend);
    EXPECT_EQ(few.split_tiles, heads == 23 ? 0 : heads) << heads;
    EXPECT_EQ(few.counters > 0, heads == 23) << heads;
    EXPECT_EQ(few.combine_ctas % std::max(few.split_tiles, 1), 0) << heads;
    EXPECT_EQ(few.combine_ctas > 0, heads < 23) << heads;
    if (heads == 1) {
      EXPECT_EQ(few.max_partitions, h200().multiprocessors);
    }
  }
  for (const bool invariant : {false, true}) {
    MaskedProblem cut = p;
    cut.batch_invariant = invariant;
    cut.num_splits = invariant ? 0 : 5;
    cut.q_lengths.max_len = 64;  // two blocks of rows
    const ForwardPlan pieces = forward_plan(cut, h200());
    ASSERT_EQ(pieces.family, Family::extend);
    EXPECT_EQ(pieces.fixed_splits, invariant ? 8 : 5);
    EXPECT_EQ(pieces.counters, p.batch * p.heads_k * 2);
    EXPECT_EQ(pieces.blocks, p.batch * p.heads_k * 2 * pieces.fixed_splits) << "CTAs wait for those before them";
  }
  const std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> others = {
      {"bias", [](MaskedProblem &q) { set_bias(q); }},
      {"dropout", [](MaskedProblem &q) { q.dropout.threshold = 1; }},
      {"rows that are not whole 16-byte vectors", [](MaskedProblem &q) { q.head_dim = q.head_dim_v = 124; }},
      {"head_dim 264", [](MaskedProblem &q) { q.head_dim = 264; }},
  };
  for (const auto &[text, change] : others) {
    MaskedProblem other = p;
    change(other);
    EXPECT_NE(forward_plan(other, h200()).family, Family::extend) << text;
  }
}

// With any number of queries and on any device, but many rows are for kernels that read a copy, and on Hopper some for extend.
TEST(CudaPlan, QuantisedKeysAreForDecodeKernels) {
  for (const NamedDevice &device : kDevices) {
    for (const int64_t seqlen_q : {1, 16, 2048}) {
      for (const Dtype dtype : {Dtype::e4m3, Dtype::i8}) {
        ForwardProblem p = forward_of(problem(seqlen_q, 4096, 128));
        p.k.dtype = p.v.dtype = dtype;
        if (seqlen_q == 2048) {
          const ForwardPlan of_copy = forward_plan(p, device.device);
          EXPECT_EQ(of_copy.copied_keys, 4096) << device.name;
          EXPECT_EQ(of_copy.family, device.device.sm90 ? Family::sm90 : Family::sm80) << device.name;
          EXPECT_EQ(of_copy.contiguous_copy, !device.device.sm90) << device.name;
          continue;
        }
        if (device.device.sm90 && seqlen_q > 1) {
          EXPECT_EQ(forward_plan(p, device.device).family, Family::extend);
          (dtype == Dtype::i8 ? p.k_descale : p.v_descale).per_row = true;
        }
        const ForwardPlan plan = forward_plan(p, device.device);
        ASSERT_EQ(plan.family, Family::decode) << device.name;
        ASSERT_GE(plan.shape, decode::kFirst8Bit) << device.name;
        EXPECT_EQ(kernel_name(p, plan).rfind(dtype == Dtype::i8 ? "decode_fwd_bf16_i8_d128" : "decode_fwd_bf16_e4m3_d128", 0),
                  0u);
        // Any number of rows, in as many blocks as they need.
        const int64_t rows = seqlen_q * p.group, room = decode::kShapes[plan.shape].rows();
        EXPECT_GE(plan.row_blocks * room, rows) << device.name;
        EXPECT_LT((plan.row_blocks - 1) * room, rows) << device.name;
        // Cuts that depend on the sequence alone take memory for few pieces of each.
        p.num_splits = 64;
        EXPECT_LE(forward_plan(p, device.device).workspace_bytes,
                  size_t{64} * p.batch * p.heads_k * (room + rows) * (decode::kShapes[plan.shape].head_dim + 2) * 4)
            << device.name;
      }
    }
  }
  // What these kernels do not take is left to CUDA cores.
  const std::vector<std::pair<const char *, void (*)(MaskedProblem &)>> others = {
      {"dropout", [](MaskedProblem &p) { p.dropout.threshold = 1; }},
      {"rows that are not whole 16-byte vectors", [](MaskedProblem &p) { p.head_dim = p.head_dim_v = 40; }},
      {"fp32 queries", [](MaskedProblem &p) { p.q.dtype = p.out.dtype = Dtype::f32; }},
  };
  for (const auto &[text, change] : others) {
    MaskedProblem p = problem(1, 4096, 128);
    p.k.dtype = p.v.dtype = Dtype::e4m3;
    change(p);
    const ForwardPlan plan = forward_plan(p, h200());
    EXPECT_EQ(plan.family, Family::simt) << text;
    EXPECT_EQ(kernel_name(p, plan).rfind("simt_fwd_", 0), 0u) << text;
  }
}

}  // namespace
}  // namespace fa::cuda
