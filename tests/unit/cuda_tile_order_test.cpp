// SPDX-License-Identifier: Apache-2.0
// The order of work tiles on Hopper: L2 head groups, sections of a launch, its split end, and cyclic order.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "cuda/host/planners.h"
#include "cuda/kernels/bwd_sm90/cyclic_order.h"
#include "cuda/kernels/bwd_sm90/split_tail.h"
#include "cuda/kernels/fwd_sm90/shared_storage.h"
#include "cuda/kernels/fwd_sm90/tile_order.h"
#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// Every KV tile of a forward work tile is loaded once: masked ones at the right end, masked ones at the left end, the others, each last key first.
TEST(CudaTileOrder, KvTilesOfAWindow) {
  sm90::ForwardWorkTile<3> t{};
  t.first = 7;
  for (t.left_masked = 0; t.left_masked < 5; ++t.left_masked) {
    for (t.right_masked = 0; t.right_masked < 5; ++t.right_masked) {
      for (int inner = t.left_masked > 0 ? 1 : 0; inner < 6; ++inner) {
        t.kv_tiles = t.left_masked + t.right_masked + inner;
        std::vector<int> expected;
        for (int n = 1; n <= t.right_masked; ++n) expected.push_back(t.first + t.kv_tiles - n);
        for (int n = 1; n <= t.left_masked; ++n) expected.push_back(t.first + t.left_masked - n);
        for (int n = 1; n <= inner; ++n) expected.push_back(t.first + t.left_masked + inner - n);
        for (int n = 0; n < t.kv_tiles; ++n) EXPECT_EQ(t.kv_tile(n), expected[static_cast<size_t>(n)]) << n;
      }
    }
  }
}

TEST(CudaTileOrder, WhatAWindowShowsAWarpgroup) {
  const sm90::WindowTiles nothing;
  EXPECT_EQ(nothing.skipped(), 0);
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(nothing.shows_all(i)) << i;
    EXPECT_EQ(nothing.loaded(i, 5), i);
  }
  const sm90::WindowTiles window(/*skipped=*/2, /*full_begin=*/3, /*full=*/4);
  EXPECT_EQ(window.skipped(), 2);
  for (int i = 2; i < 12; ++i) {
    EXPECT_EQ(window.shows_all(i), i >= 3 && i < 7) << i;
    EXPECT_EQ(window.loaded(i, 8), i < 8 ? i - 2 : i);
  }
  const sm90::WindowTiles largest(255, 255, 255);
  EXPECT_EQ(largest.skipped(), 255);
  EXPECT_TRUE(largest.shows_all(509));
  EXPECT_FALSE(largest.shows_all(254) || largest.shows_all(510));
}

TEST(CudaTileOrder, L2HeadGroupsHaveOneSize) {
  const Device &device = kDevices[0].device;
  for (const int64_t head_dim : {64, 128, 256}) {
    for (const int64_t seqlen : {512, 2048, 4096, 16384}) {
      for (const bool causal : {false, true}) {
        MaskedProblem p = problem(seqlen, seqlen, head_dim);
        p.batch = 16384 / seqlen;
        p.heads_q = p.heads_k = 2048 / head_dim;
        p.group = 1;
        if (causal) p.band.right = 0;
        ForwardPlan forward;
        BackwardPlan backward;
        ErrorText error;
        ASSERT_EQ(plan_forward(forward_of(p), device, forward, error), FA_OK) << error.text;
        ASSERT_EQ(plan_backward(backward_of(p), device, backward, error), FA_OK) << error.text;
        const int64_t heads = p.batch * p.heads_q;
        for (const int64_t section : {forward.heads_per_l2_group, backward.heads_per_l2_group}) {
          const int64_t sections = (heads + section - 1) / section;
          EXPECT_LT(section * sections - heads, sections)
              << "D" << head_dim << " S" << seqlen << ": " << section << " of " << heads;
        }
        // A launch must not end with one small group of heads whose main loops are long.
        if (causal) {
          EXPECT_GE(std::max<int64_t>(forward.heads_per_l2_group, forward.last_batch * p.heads_q), std::min<int64_t>(heads, 12))
              << "D" << head_dim << " S" << seqlen;
        }
      }
    }
  }
}

TEST(CudaTileOrder, HopperLaunchesEndWithALargeHeadGroup) {
  const auto last_batch = [](int64_t seqlen, bool causal) {
    MaskedProblem p = problem(seqlen, seqlen, 128);
    p.batch = 16384 / seqlen;
    p.heads_q = p.heads_k = 16;
    p.group = 1;
    if (causal) p.band.right = 0;
    const ForwardPlan plan = forward_plan(p, h200());
    EXPECT_LT(plan.last_batch, p.batch);
    EXPECT_TRUE(plan.last_batch == 0 || plan.last_batch * p.heads_q > plan.heads_per_l2_group);
    return plan.last_batch;
  };
  EXPECT_EQ(last_batch(1024, true), 3);  // of 16: 288 tiles for 132 SMs
  EXPECT_EQ(last_batch(1024, false), 0) << "all tiles take the same time";
  EXPECT_EQ(last_batch(4096, true), 0) << "it would not fit the L2 cache";
  EXPECT_EQ(last_batch(16384, true), 0) << "there is one sequence";
}

// The device finds tiles of packed sequences one sequence at a time: an L2 group is heads of one sequence, and all groups have about one size.
TEST(CudaTileOrder, L2HeadGroupsOfPackedSequencesAreWithinOne) {
  for (const int64_t heads : {1, 3, 16, 32}) {
    for (const int64_t seqlen : {300, 2047, 16384}) {
      for (const bool causal : {false, true}) {
        MaskedProblem p = problem(seqlen, seqlen, 128);
        const int32_t cu[2] = {};
        p.q_lengths.cu = p.k_lengths.cu = cu;
        p.q_lengths.total = p.k_lengths.total = 64 * 1024;
        p.batch = 64;
        p.heads_q = p.heads_k = heads;
        p.group = 1;
        if (causal) p.band.right = 0;
        const ForwardPlan plan = forward_plan(p, h200());
        EXPECT_EQ(plan.family, Family::sm90);
        EXPECT_EQ(plan.last_batch, 0);
        EXPECT_TRUE(plan.heads_per_l2_group >= 1 && plan.heads_per_l2_group <= heads) << plan.heads_per_l2_group;
      }
    }
  }
}

TEST(CudaTileOrder, HopperTilesComeOnceAndTheLongestOfASectionFirst) {
  for (const int32_t last_batch : {0, 1, 2, 4}) {
    for (const int32_t section : {1, 4, 7, 15}) {
      constexpr int32_t kBlocks = 4, kHeads = 3, kBatch = 5;
      const sm90::TileOrder order(kBlocks, kHeads, kBatch, section, last_batch, /*causal=*/true);
      std::set<std::array<int, 3>> seen;
      std::vector<int> row_blocks;
      for (int n = 0; n < kBlocks * kHeads * kBatch; ++n) {
        const L2HeadOrder::Place place = order.at(n);
        seen.insert({place.row_block, place.batch, place.head});
        EXPECT_TRUE(place.row_block >= 0 && place.row_block < kBlocks && place.head >= 0 && place.head < kHeads &&
                    place.batch >= 0 && place.batch < kBatch);
        if (n >= (kBatch - last_batch) * kHeads * kBlocks) {
          EXPECT_GE(place.batch, kBatch - last_batch);
          row_blocks.push_back(place.row_block);
        }
      }
      EXPECT_EQ(seen.size(), size_t{kBlocks * kHeads * kBatch}) << section << " heads, " << last_batch << " sequences";
      EXPECT_TRUE(std::is_sorted(row_blocks.rbegin(), row_blocks.rend())) << "the end is one section";
    }
  }
}

// The backward's order, whose last group may be the longest one: all of its row blocks come in order.
TEST(CudaTileOrder, BackwardTilesComeOnceAndTheLastGroupIsLong) {
  for (const int32_t last_heads : {0, 1, 6, 14, 15, 40}) {
    for (const int32_t section : {1, 4, 7, 15}) {
      constexpr int32_t kBlocks = 4, kHeads = 3, kBatch = 5, kAll = kHeads * kBatch;
      const L2HeadOrder order(kBlocks, kHeads, kBatch, section, /*last_rows_first=*/false, last_heads);
      const int32_t first_groups = order.last_l2_group * section, last_group = kAll - first_groups;
      EXPECT_GE(last_group, std::min(last_heads, kAll));
      EXPECT_LT(last_group, std::max(last_heads, 1) + section);
      std::set<std::array<int, 3>> seen;
      std::vector<int> row_blocks;
      for (int n = 0; n < kBlocks * kAll; ++n) {
        const L2HeadOrder::Place place = order.at_long_end(n);
        seen.insert({place.row_block, place.batch, place.head});
        EXPECT_TRUE(place.row_block >= 0 && place.row_block < kBlocks && place.head >= 0 && place.head < kHeads &&
                    place.batch >= 0 && place.batch < kBatch);
        if (n < first_groups * kBlocks) continue;
        EXPECT_GE(place.batch * kHeads + place.head, first_groups);
        row_blocks.push_back(place.row_block);
      }
      EXPECT_EQ(seen.size(), size_t{kBlocks * kAll}) << section << " heads, at least " << last_heads << " at the end";
      EXPECT_TRUE(std::is_sorted(row_blocks.begin(), row_blocks.end())) << "the end is one section";
    }
  }
}

// Every Q tile of the split work tiles is in one split, and the splits of a work tile are numbered in their order.
TEST(CudaTileOrder, SplitTailHasEveryQTileOnce) {
  for (const int tiles : {1, 2, 4, 17, 67, 68, 118}) {
    for (const int q_tiles : {16, 17, 31, 64, 129, 1024}) {
      for (const int units : {std::min(132, 8 * tiles), std::min(132, 2 * tiles)}) {
        if (units < tiles) continue;
        sm90::SplitTail tail;
        tail.units = units;
        tail.q_tiles = q_tiles;
        tail.total = tiles * q_tiles;
        tail.by_units = Divisor(units);
        tail.by_q_tiles = Divisor(q_tiles);
        tail.by_total = Divisor(tail.total);
        int next = 0, tile = -1, split = 0, splits = 0;
        for (int unit = 0; unit < units; ++unit) {
          for (bool second : {false, true}) {
            const sm90::SplitTail::Split x = tail.split_of(unit, second);
            EXPECT_EQ(x.tile * q_tiles + x.begin, next);
            EXPECT_TRUE(x.begin < x.end && x.end <= q_tiles) << x.begin << " to " << x.end;
            if (x.tile != tile) {
              EXPECT_EQ(split, splits) << "the work tile before has all of its splits";
              tile = x.tile, split = 0, splits = x.splits;
            }
            EXPECT_EQ(x.split, split++);
            EXPECT_EQ(x.splits, splits);
            EXPECT_LE(splits, (units + tiles - 1) / tiles + 1);
            next = x.tile * q_tiles + x.end;
            if (!x.crosses) break;
          }
        }
        EXPECT_EQ(next, tail.total);
        EXPECT_EQ(split, splits);
      }
    }
  }
}

// Cyclic order: of either sum for dq of a Q tile, the work tiles that add to it have the positions 0, 1, ... in ascending order, so each waits for lower ones
// alone. Every work tile adds to every Q tile once, and every Q tile has something in its second sum.
TEST(CudaTileOrder, CyclicOrderHasEveryPositionOnce) {
  for (const int work_tiles : {1, 2, 3, 22, 64, 128, 300}) {
    for (const int q_tiles : {1, 2, 5, 35, 103, 205}) {
      const sm90::CyclicOrder order(q_tiles, work_tiles);
      std::vector<std::array<int, 2>> next(static_cast<size_t>(q_tiles));
      for (int work_tile = 0; work_tile < work_tiles; ++work_tile) {
        std::set<int> visited;
        for (int n = q_tiles - 1; n >= 0; --n) {
          const sm90::CyclicOrder::Place place = order.at(work_tile, n);
          ASSERT_TRUE(place.q_tile >= 0 && place.q_tile < q_tiles);
          visited.insert(place.q_tile);
          EXPECT_EQ(place.position, next[static_cast<size_t>(place.q_tile)][place.second]++)
              << work_tile << " of " << work_tiles;
        }
        EXPECT_EQ(visited.size(), static_cast<size_t>(q_tiles));
      }
      for (const auto &both : next) EXPECT_TRUE(both[0] + both[1] == work_tiles && both[1] > 0);
    }
  }
}

// Which backward launches are split at their end, and which of their L2 groups are one there.
TEST(CudaTileOrder, EndOfTheBackwardLaunch) {
  const auto plan = [](int64_t seqlen, int64_t head_dim, auto vary) {
    BackwardProblem b = backward_of(problem(seqlen, seqlen, head_dim));
    b.forward.batch = 1;
    b.forward.heads_q = b.forward.heads_k = 10;
    b.forward.group = 1;
    vary(b.forward);
    return backward_plan(b, h200());
  };
  const auto plain = [](MaskedProblem &) {};
  const auto causal = [](MaskedProblem &p) { p.band.right = 0; };
  for (const int64_t head_dim : {64, 96, 128}) {
    const BackwardPlan split = plan(2100, head_dim, plain);  // 170 work tiles for 132 CTAs
    EXPECT_EQ(split.split_tiles, 170 - 132);
    EXPECT_EQ(split.split_units, 132);
    EXPECT_GE(split.workspace_bytes, split.split_offset + size_t{38} * static_cast<size_t>(split.splits_per_tile) * 128 * 2 *
                                                              static_cast<size_t>(head_dim) * 4);
    for (const BackwardPlan &whole :
         {plan(2100, head_dim, causal), plan(2100, head_dim, [](MaskedProblem &p) { p.deterministic = true; }),
          plan(2100, head_dim, [](MaskedProblem &p) { p.heads_k = 5, p.group = 2; }), plan(700, head_dim, plain),
          plan(2100, head_dim, [](MaskedProblem &p) { p.softcap = 20; }),
          plan(2100, head_dim, [](MaskedProblem &p) { p.heads_q = p.heads_k = 7; })})
      EXPECT_EQ(whole.split_tiles, 0);
    EXPECT_EQ(plan(4096, head_dim, causal).last_heads > 0, head_dim != 64);
    EXPECT_EQ(plan(1024, head_dim, causal).last_heads, 0);
    EXPECT_EQ(plan(4096, head_dim, plain).last_heads, 0);
  }
  // Two sequences that share their keys: heads of the second one alone are the last group.
  const int32_t lengths[] = {16384, 4096};
  const auto sharing = [&](int64_t heads, int64_t keys, auto vary) {
    return plan(keys, 128,
                [&](MaskedProblem &p) {
                  p.band.right = 0;
                  p.batch = 2;
                  p.heads_q = 8 * heads, p.heads_k = heads, p.group = 8;
                  p.q_lengths.max_len = keys / 4;
                  p.k.batch_stride = p.v.batch_stride = 0;
                  p.k_lengths.used = lengths;
                  vary(p);
                })
        .last_heads;
  };
  EXPECT_EQ(sharing(8, 16384, plain), 4);
  EXPECT_EQ(sharing(2, 16384, plain), 2);
  EXPECT_EQ(sharing(8, 262144, plain), 0) << "many work tiles";
  EXPECT_EQ(sharing(8, 16384, [](MaskedProblem &p) { p.deterministic = true; }), 0);
  EXPECT_EQ(sharing(8, 16384, [](MaskedProblem &p) { p.batch = 1; }), 0);
  EXPECT_EQ(sharing(8, 16384, [](MaskedProblem &p) { p.k.batch_stride = 1 << 24; }), 0) << "sequences with their own keys";
}

}  // namespace
}  // namespace fa::cuda
