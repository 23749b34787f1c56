// SPDX-License-Identifier: Apache-2.0
// The map of cells that plans put into the workspace for masks as data.
#include <gtest/gtest.h>

#include <string>

#include "cuda/kernels/cell_map/cell_map.h"
#include "unit/cuda_plan_options.h"
#include "unit/cuda_plans.h"

namespace fa::cuda {
namespace {

// Masks as data get a map of cells behind the rest of the workspace where the kernel reads one, and none elsewhere.
TEST(CudaPlan, MasksAsDataGetACellMap) {
  constexpr size_t kMapBytes =
      2 * 16 * 4;  // of 1000 x 1000 pairs, one plane: visible and partial, 16 rows of cells, a word each
  int with = 0, without = 0;
  for_everything([&](const MaskedProblem &p, const Device &device, const std::string &text) {
    const auto check = [&](const auto &plan, size_t planes_of_map) {
      const ScoreSet scores = kernel_of(plan).scores;
      EXPECT_EQ(plan.cell_map, has_data_mask(p) && (scores & kDataMask) != 0) << text;
      EXPECT_EQ(scores_of(p) & ~scores, 0u) << text;
      if (plan.cell_map) {
        EXPECT_GT(plan.workspace_bytes, plan.cell_map_offset + planes_of_map) << text;
      }
      ++(plan.cell_map ? with : without);
    };
    check(forward_plan(p, device), 1);
    check(backward_plan(backward_of(p), device), 2);
  });
  EXPECT_GT(with, 0);
  EXPECT_GT(without, 0);
  for (const auto &[name, set] : options()) {
    MaskedProblem p = problem(1000, 1000, 64);
    set_dtype(p, Dtype::f32);
    p.fp32_products = true;  // the same kernel with and without a mask
    const size_t plain = backward_plan(backward_of(p), h200()).workspace_bytes;
    set(p);
    const BackwardPlan plan = backward_plan(backward_of(p), h200());
    if (!plan.cell_map) continue;
    EXPECT_GE(plan.cell_map_offset, plain) << name;
    EXPECT_GE(plan.workspace_bytes, plan.cell_map_offset + 2 * kMapBytes) << name;
  }
}

// One plane for each sequence and head that may have a mask of its own, and one for all that share it.
TEST(CudaPlan, PlanesOfTheCellMap) {
  MaskedProblem p = problem(100, 200, 64);
  const auto planes = [&] {
    DataMask mask;
    int64_t count = 0;
    describe_cell_map(p, /*backward=*/true, nullptr, mask, count);
    EXPECT_EQ(mask.by_query.rows, 2);
    EXPECT_EQ(mask.by_key.rows, 4);
    for (int64_t b = 0; b < p.batch; ++b)
      for (int64_t h = 0; h < p.heads_q; ++h) EXPECT_LT(mask.plane(static_cast<int>(b), static_cast<int>(h)), count);
    return count;
  };
  set_element_mask(p);
  EXPECT_EQ(planes(), p.batch * p.heads_q);
  p.element_mask.batch_stride = 0;
  EXPECT_EQ(planes(), p.heads_q);
  p.element_mask.head_stride = 0;
  EXPECT_EQ(planes(), 1);
  set_starts(p);
  EXPECT_EQ(planes(), p.batch);
  p.seqstart_k = nullptr;
  set_slices(p);
  EXPECT_EQ(planes(), 1) << "slices of padded sequences are the same for each";
  p.k_lengths.cu = &unreadable;
  EXPECT_EQ(planes(), p.batch);
}

// For backward the ranges of by_key lie between the map by queries and that by keys.
TEST(CudaPlan, RangesOfTheCellMap) {
  MaskedProblem p = problem(100, 4200, 64);
  set_element_mask(p);
  const auto workspace = reinterpret_cast<char *>(uintptr_t{1} << 20);
  DataMask mask;
  int64_t planes = 0;
  const size_t bytes = describe_cell_map(p, /*backward=*/true, workspace, mask, planes);
  const CellBits &queries = mask.by_query, &keys = mask.by_key;
  EXPECT_EQ(keys.rows, 66);
  const auto address = [](const void *at) { return reinterpret_cast<uintptr_t>(at); };
  EXPECT_GE(address(&keys.range(planes * keys.rows - 1)), address(queries.partial + planes * queries.rows * queries.words));
  EXPECT_EQ(address(&keys.range(0) + 1), address(keys.visible));
  EXPECT_EQ(address(&keys.range(0)) % sizeof(CellRange), 0u);
  EXPECT_GE(address(workspace + bytes), address(keys.partial + planes * keys.rows * keys.words));
  describe_cell_map(p, /*backward=*/false, workspace, mask, planes);
  EXPECT_EQ(mask.by_key.rows, 0);
}

}  // namespace
}  // namespace fa::cuda
