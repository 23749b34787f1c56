// SPDX-License-Identifier: Apache-2.0
// Plans of the MLA kernels, for latent caches: V is the first columns of wide K, in the same memory.
#include <algorithm>
#include <cmath>

#include "cuda/common/segments.h"
#include "cuda/host/plan_stream_k.h"
#include "cuda/kernels/decode/table.h"
#include "cuda/kernels/mla/table.h"

namespace fa::cuda {

namespace {

constexpr int64_t kWarpRows = 16;

// FA_FLAG_SAME_BITS: partitions of whole segments (mla/segments.cuh). Each may hand a total over, and store all segments but the last of a work
// tile that the partition before has begun. One that may store fewer waits for that partition, the less the more work tiles it has.
void plan_segments(int64_t rows, const Device &device, StreamK &work, ForwardPlan &plan) {
  constexpr int64_t kMostStoredBytes = int64_t{256} << 20, kMostStored = mla::SegmentStorage::kMostStored;
  const int64_t segments = work.iterations - 1;  // of a work tile, at most
  work.max_partitions = device.multiprocessors;
  work.min_iterations_log2 = 0;
  work.rows = ceil_div(std::min(rows, work.rows), kWarpRows) * kWarpRows;
  const int64_t of_all_ctas = work.ctas * work.rows * work.columns * int64_t{sizeof(float)},
                room = kMostStoredBytes / std::max<int64_t>(work.tiles / work.ctas, 1) / of_all_ctas;
  plan.stored_segments = static_cast<int32_t>(
      std::clamp<int64_t>(std::min(segments, ceil_div(work.tiles * segments, work.ctas)) - 1, 0, std::min(room, kMostStored)));
  plan.partial_warps = static_cast<int32_t>(work.rows / kWarpRows);
  work.partials_per_partition = 1 + plan.stored_segments;
}

// Partitions whose partials a combine kernel adds. The longer they are, the fewer partials it has: the sum of both times is least where a
// partition has some sqrt(iterations) / 4 KV tiles (measured: docs/notes/2026-11-22-latent.md). Segments of keys are long, and each has a partial.
void plan_many_partials(const ForwardProblem &p, const Device &device, bool segments, StreamK &work) {
  const int64_t iterations = work.iterations - 1,
                each = segments ? 1 : std::max<int64_t>(std::lround(std::sqrt(static_cast<double>(iterations)) / 4), 1);
  work.ctas = device.multiprocessors;
  work.max_partitions = std::min<int64_t>(work.ctas, work.tiles * ceil_div(iterations, each));
  work.min_iterations_log2 = 0;
  work.partials_per_partition = segments ? segments_per_partition(work) : 2;
  work.uniform = is_uniform(p);
}

}  // namespace

bool plan_mla(const ForwardProblem &p, const Needs &needs, const Device &device, ForwardPlan &plan) {
  using mla::kShapes, mla::Shape;
  const int64_t rows = p.q_lengths.max_len * p.group;
  const std::span<const KernelRow> kernels = candidates(Family::mla, Pass::forward, needs);
  if (kernels.empty() || p.head_dim <= kNarrowLatent) return false;
  const auto find = [&](bool pairs, bool combines) {
    int32_t n = 0;
    while (n < mla::kNumShapes &&
           (kShapes[n].pairs != pairs || kShapes[n].uses_combine_kernel != combines || kShapes[n].same_bits != p.same_bits ||
            !can_run(kernels[static_cast<size_t>(n)], needs, device)))
      ++n;
    return n;
  };
  int32_t found = find(false, false);
  if (found == mla::kNumShapes) return false;
  const int64_t row_blocks = ceil_div(rows, kShapes[found].rows()), tiles = p.batch * p.heads_k * row_blocks;
  const int64_t partial_bytes = int64_t{kShapes[found].rows()} * kShapes[found].head_dim_v * int64_t{sizeof(float)},
                segment_bytes =
                    p.same_bits ? tiles * (ceil_div(p.k_lengths.max_len, kLatentSegmentKeys) + 1) * partial_bytes : 0;
  if (!splits_by_sequence(p) && tiles * kManyPartials <= device.multiprocessors && segment_bytes <= kMostSegmentBytes) {
    if (const int32_t combining = find(false, true); combining < mla::kNumShapes) found = combining;
  }
  const Shape &shape = kShapes[found];
  const int64_t iterations = ceil_div(p.k_lengths.max_len, shape.same_bits ? kLatentSegmentKeys : shape.keys) + 1;
  if (p.batch * p.heads_k > kMaxWorkUnits / iterations / row_blocks) return false;

  plan.family = Family::mla;
  plan.shape = found;
  plan.row_blocks = static_cast<int32_t>(row_blocks);
  plan.rows_per_token = static_cast<int32_t>(p.group);
  // A partial with all rows costs the CTA that adds it as much as two KV tiles. Many are added in two levels, 2 sqrt(splits) of them one after
  // another: iterations / splits + 2 cost sqrt(splits) is least where splits is (iterations / cost)^(2/3). And where memory is the limit
  // slightly fewer CTAs than SMs do no harm: then all work tiles get equally many partitions, and a CTA works on one tile.
  const double cost = static_cast<double>(std::min<int64_t>(rows, shape.rows())) / 32,
               root = std::cbrt(static_cast<double>(iterations) / cost);
  const int64_t best_splits = std::max<int64_t>(std::lround(root * root), 1),
                whole_tiles = device.multiprocessors / tiles * tiles;
  StreamK work;
  work.tiles = tiles;
  work.iterations = iterations;
  work.ctas = 16 * whole_tiles >= 15 * device.multiprocessors ? whole_tiles : device.multiprocessors;
  work.max_partitions = std::min<int64_t>(shape.max_split_partials(), tiles * best_splits);
  work.min_iterations_log2 = 2;
  work.partials_per_partition = 1;
  work.split_min_iterations_log2 = 5;
  work.max_splits = kMaxSplits;
  work.rows = shape.rows();
  work.columns = shape.head_dim_v;
  // The rows of one query all see the same keys. Two blocks of them that read these at the same time share what L2 reads.
  work.max_coscheduled_log2 = p.q_lengths.max_len == 1 && row_blocks % 2 == 0 ? 1 : 0;
  if (shape.uses_combine_kernel) {
    plan_many_partials(p, device, shape.same_bits, work);
    plan.partial_warps = static_cast<int32_t>(work.rows / kWarpRows);
  } else if (shape.same_bits) {
    plan_segments(rows, device, work, plan);
  }
  plan_partition(work, p, plan);
  if (shape.uses_combine_kernel) plan_combine(work, p, rows, decode::kCombineMinCtas * int64_t{device.multiprocessors}, plan);
  if (shape.same_bits) reserve_totals(work.rows, work.columns, plan);
  // A CTA for every split: one that waits for others must have started after them.
  if (plan.fixed_splits > 0) plan.blocks = tiles * plan.fixed_splits;
  // Where every work tile gets two partitions, as far as the host knows, the CTAs that have them are a cluster.
  const int32_t paired = find(true, false);
  if (!shape.uses_combine_kernel && paired < mla::kNumShapes && plan.fixed_splits == 0 && plan.coscheduled_log2 == 0 &&
      std::min<int64_t>(plan.max_partitions, tiles * (iterations - 1) >> plan.min_iterations_log2) == 2 * tiles) {
    plan.shape = paired;
    plan.cluster = 2;
    plan.max_partitions = static_cast<int32_t>(2 * tiles);
    plan.blocks = plan.max_partitions;
  }
  plan.tma_kv = is_wide_kv_tma_compatible(p, p.k, p.head_dim, mla::kBoxRows);
  plan.reason = shape.same_bits
                    ? "MLA kernel for FA_FLAG_SAME_BITS: segments of 2048 keys are folded in the order of their keys"
                    : "MLA kernel: V is part of K, and the query heads share each KV tile";
  return true;
}

}  // namespace fa::cuda
