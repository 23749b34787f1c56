// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/plan_stream_k.h"
#include "cuda/common/swizzle_atom.h"

#include <algorithm>

#include "cuda/common/swizzle_atom.h"
#include "cuda/kernels/decode/table.h"

namespace fa::cuda {
namespace {

// The number of partitions for `ctas` CTAs, and how many neighbouring work tiles are co-scheduled. A work tile is worth at most
// `max_partitions_per_tile` partitions.
int64_t count_partitions(const StreamK &work, const Problem &p, int64_t ctas, int64_t max_partitions_per_tile,
                         ForwardPlan &plan) {
  int32_t &coscheduled_log2 = plan.coscheduled_log2;
  constexpr int64_t kMaxTilesPerPartition = 2;
  const auto fills_device = [&](int64_t partitions, int32_t log2) {
    return work.tiles / p.batch % (1 << log2) == 0 && (partitions << log2) * 16 >= ctas * 15;
  };
  // Partitions of one or two whole work tiles, or of equal parts of one: a CTA that goes on to another work tile has to start anew.
  for (int32_t log2 = work.max_coscheduled_log2; work.uniform && log2 >= 0; --log2) {
    const int64_t tiles = work.tiles >> log2, partitions = ctas >> log2;
    if (tiles == 0 || partitions == 0) continue;
    if (tiles <= partitions && fills_device(partitions / tiles * tiles, log2)) {
      coscheduled_log2 = log2;
      return std::min(partitions / tiles, max_partitions_per_tile) * tiles;
    }
    const int64_t tiles_each = ceil_div(tiles, partitions);
    if (tiles_each <= kMaxTilesPerPartition && tiles % tiles_each == 0 && fills_device(tiles / tiles_each, log2)) {
      coscheduled_log2 = log2;
      return tiles / tiles_each;
    }
  }
  // With more work tiles it is better that not all CTAs reach the end of one at the same time.
  for (coscheduled_log2 = std::min(work.max_coscheduled_log2, 2); !fills_device(ctas >> coscheduled_log2, coscheduled_log2);)
    --coscheduled_log2;
  return ctas >> coscheduled_log2;
}

}  // namespace

int64_t largest_cluster(const Device &device) {
  constexpr int64_t kLargeChip = 121;
  return device.sm90 && device.multiprocessors >= kLargeChip ? decode::kMaxClusterSize : kPortableCluster;
}

int32_t segments_per_partition(const StreamK &work) {
  const int64_t segments = work.tiles * work.iterations;
  return static_cast<int32_t>(ceil_div(segments, std::min(work.ctas, segments)));
}

bool is_uniform(const MaskedProblem &p) {
  const auto known = [](const Lengths &lengths) { return lengths.cu == nullptr && lengths.used == nullptr; };
  return p.batch == 1 || (known(p.q_lengths) && known(p.k_lengths) && p.seqstart_k == nullptr);
}

void plan_partition(const StreamK &work, const MaskedProblem &p, ForwardPlan &plan) {
  int64_t partials = 0;
  if (splits_by_sequence(p)) {
    plan.fixed_splits = static_cast<int32_t>(
        std::min({p.num_splits > 0 ? int64_t{p.num_splits} : kBatchInvariantSplits, work.max_splits, work.iterations}));
    plan.min_iterations_log2 = p.num_splits > 0 ? 0 : work.split_min_iterations_log2;
    plan.blocks = std::min(work.ctas, work.tiles * plan.fixed_splits);
    plan.num_splits = plan.fixed_splits;
    partials = plan.fixed_splits > 1 ? work.tiles * plan.fixed_splits : 0;
    plan.counters = static_cast<int32_t>(plan.fixed_splits > 1 ? work.tiles : 0);
  } else {
    plan.min_iterations_log2 = work.min_iterations_log2;
    const int64_t ctas = std::min({work.ctas, work.tiles * work.iterations, work.max_partitions}),
                  max_per_tile = std::max<int64_t>((work.iterations - 1) >> plan.min_iterations_log2, 1);
    plan.max_partitions = static_cast<int32_t>(count_partitions(work, p, ctas, max_per_tile, plan));
    plan.blocks = int64_t{plan.max_partitions} << plan.coscheduled_log2;
    const int64_t tiles = work.tiles >> plan.coscheduled_log2;
    plan.num_splits = static_cast<int32_t>(std::clamp<int64_t>(ceil_div(plan.max_partitions, tiles), 1, max_per_tile));
    partials = work.partials_per_partition * ctas;
    plan.counters = static_cast<int32_t>(plan.blocks);
  }
  plan.split_lse_offset = align_up(static_cast<size_t>(partials * work.rows * work.columns) * sizeof(float));
  plan.workspace_bytes = plan.split_lse_offset + align_up(static_cast<size_t>(partials * work.rows) * 2 * sizeof(float));
}

void plan_combine(const StreamK &work, const MaskedProblem &p, int64_t rows, int64_t ctas, ForwardPlan &plan) {
  // Partitions of whole work tiles split none, if the work tiles are alike.
  if (plan.fixed_splits > 0) {
    plan.split_tiles = static_cast<int32_t>(plan.fixed_splits > 1 ? work.tiles : 0);
  } else if (const int64_t tiles = work.tiles >> plan.coscheduled_log2; !is_uniform(p) || tiles % plan.max_partitions != 0) {
    plan.split_tiles_by_partition = tiles > plan.max_partitions;
    plan.split_tiles = static_cast<int32_t>(std::min<int64_t>(tiles, plan.max_partitions) << plan.coscheduled_log2);
  }
  const int64_t slices = ceil_div(std::min(rows, work.rows) * work.columns, decode::kCombineColumns);
  if (plan.split_tiles > 0) plan.combine_ctas = plan.split_tiles * std::clamp<int64_t>(ctas / plan.split_tiles, 1, slices);
  plan.counters = 0;
  plan.split_tiles_offset = plan.workspace_bytes;
  plan.workspace_bytes +=
      align_up(static_cast<size_t>(plan.fixed_splits > 0 ? plan.split_tiles : work.ctas) * decode::kSplitTileBytes);
}

bool is_kv_tma_compatible(const Problem &p, const Operand &tensor, int64_t columns, int32_t box_rows) {
  constexpr int64_t kAtomColumns = 64;  // of a 128-byte swizzle atom of 16-bit elements
  if (!is_tma_compatible(tensor, p.k_lengths, columns) || (!is_quantised(tensor.dtype) && columns % kAtomColumns != 0))
    return false;
  if (p.page_table != nullptr) return p.page_size % box_rows == 0 && p.page_size <= INT32_MAX && p.num_pages <= INT32_MAX;
  return p.k_lengths.cu != nullptr || p.batch <= INT32_MAX;
}
bool is_wide_kv_tma_compatible(const Problem &p, const Operand &tensor, int64_t columns, int32_t box_rows) {
  return columns % kWideAtom == 0 && is_kv_tma_compatible(p, tensor, columns, box_rows);
}

}  // namespace fa::cuda
