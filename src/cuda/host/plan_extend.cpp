// SPDX-License-Identifier: Apache-2.0
// Plans of the kernels for queries that extend a cache: any number of queries, which with the query heads that share their keys are cut into
// tiles of rows.
#include <algorithm>

#include "cuda/common/segments.h"
#include "cuda/host/plan_stream_k.h"
#include "cuda/kernels/decode/table.h"
#include "cuda/kernels/extend/table.h"

namespace fa::cuda {

namespace {

// FA_FLAG_SAME_BITS: segments of a work tile, at most; and bytes of the partials of all.
int64_t segments_of(const ForwardProblem &p) { return ceil_div(p.k_lengths.max_len, kSegmentKeys) + 1; }
int64_t segment_bytes(const ForwardProblem &p, const extend::Shape &shape) {
  const int64_t tiles = p.batch * p.heads_k * ceil_div(p.q_lengths.max_len * p.group, shape.rows());
  return tiles * segments_of(p) * shape.rows() * shape.head_dim * int64_t{sizeof(float)};
}

// FA_FLAG_SAME_BITS with one token: the CTAs of a cluster for each KV head; 0: no clusters. A cluster lives in one GPC, and a CTA takes all of an SM.
// GPCs have 8 to 18 SMs: an H200 of 132 SMs had room for 7 clusters of 16, 15 of 8 and 30 of 4. One more would have to wait for the others, so
// clusters fill 7/8 of the device at most.
int32_t cluster_of(const ForwardProblem &p, const Device &device) {
  constexpr int64_t kLeast = 4;
  const int64_t tiles = p.batch * p.heads_k, room = int64_t{device.multiprocessors} * 7 / 8,
                segments = ceil_div(p.k_lengths.max_len, kSegmentKeys);
  int64_t ctas = largest_cluster(device);
  while (ctas >= kLeast && ctas * tiles > room) ctas /= 2;
  const bool gains = ceil_div(segments, ctas) <= ceil_div(segments * tiles, device.multiprocessors);
  return ctas >= kLeast && gains ? static_cast<int32_t>(ctas) : 0;
}

bool plan_clusters(const ForwardProblem &p, const Needs &needs, const Device &device, std::span<const KernelRow> kernels,
                   ForwardPlan &plan) {
  const int32_t cluster = cluster_of(p, device);
  if (cluster == 0) return false;
  for (int32_t n = 0; n < extend::kNumShapes; ++n) {
    const extend::Shape &shape = extend::kShapes[n];
    if (!shape.clustered || !can_run(kernels[static_cast<size_t>(n)], needs, device)) continue;
    if (p.q_lengths.max_len * p.group > shape.rows()) continue;
    plan.family = Family::extend;
    plan.shape = n;
    plan.row_blocks = 1;
    plan.rows_per_token = static_cast<int32_t>(p.group);
    plan.cluster = cluster;
    plan.blocks = p.batch * p.heads_k * cluster;
    plan.num_splits = cluster;
    // Unlike cp.async, TMA takes no time of the producer warps: a CTA that has an SM for itself reads more than these issue.
    plan.tma_kv = is_kv_tma_compatible(p, p.k, p.head_dim, extend::kBoxRows) &&
                  is_kv_tma_compatible(p, p.v, p.head_dim_v, extend::kBoxRows);
    plan.reason = "extend kernel for FA_FLAG_SAME_BITS: a cluster of CTAs for each KV head shares its segments of 1024 keys";
    return true;
  }
  return false;
}

// FA_FLAG_SAME_BITS with one token over 8-bit K and V: the kernel that widens them in registers, or -1. Few columns stay with the kernels for them.
int32_t find_one_token(const ForwardProblem &p, const Needs &needs, const Device &device, std::span<const KernelRow> kernels) {
  for (int32_t n = 0; n < extend::kNumShapes; ++n) {
    const extend::Shape &shape = extend::kShapes[n];
    if (shape.one_token() && std::max(p.head_dim, p.head_dim_v) > 64 &&
        can_run(kernels[static_cast<size_t>(n)], needs, device) && p.q_lengths.max_len * p.group <= shape.rows() &&
        segment_bytes(p, shape) <= kMostSegmentBytes)
      return n;
  }
  return -1;
}

}  // namespace

bool plan_extend(const ForwardProblem &p, const Needs &needs, const Device &device, ForwardPlan &plan) {
  using extend::kShapes, extend::Shape;
  // With a few partials for each work tile the last CTA of the tile adds the others to its own; more are added by a combine kernel. Under
  // FA_FLAG_SAME_BITS a CTA in the middle of a work tile has to wait for the total of the one before it, so the combine kernel begins to pay with
  // 2.5 CTAs for each tile.
  const auto has_few = [&](int64_t tiles) {
    return p.same_bits ? tiles * 5 <= device.multiprocessors * 2 : tiles * kManyPartials <= device.multiprocessors;
  };
  const int64_t rows = p.q_lengths.max_len * p.group;
  const bool kv_8bit = is_quantised(p.k.dtype), masked = (needs.scores & kMasked) != 0;
  const std::span<const KernelRow> kernels = candidates(Family::extend, Pass::forward, needs);
  if (kernels.empty()) return false;
  if (p.same_bits && plan_clusters(p, needs, device, kernels, plan)) return true;
  int32_t found = p.same_bits ? find_one_token(p, needs, device, kernels) : -1;
  for (int32_t n = 0; found < 0 && n < extend::kNumShapes; ++n) {
    const Shape &shape = kShapes[n];
    if (!can_run(kernels[static_cast<size_t>(n)], needs, device)) continue;
    if (shape.same_bits != p.same_bits || shape.clustered || shape.one_token() || shape.masks != masked) continue;
    const bool few_tiles = has_few(p.batch * p.heads_k * ceil_div(rows, shape.rows()));
    // Under FA_FLAG_SAME_BITS the combine kernel has a partial for each segment of every work tile.
    const bool combines = few_tiles && (!p.same_bits || segment_bytes(p, shape) <= kMostSegmentBytes);
    // Kernels for masks leave all partials to the combine kernel.
    const bool wants_combine_kernel = !splits_by_sequence(p) && (combines || masked);
    if (shape.uses_combine_kernel == wants_combine_kernel) found = n;
  }
  if (found < 0) return false;
  const Shape &shape = kShapes[found];
  const int64_t row_blocks = ceil_div(rows, shape.rows()),
                iterations = shape.same_bits ? segments_of(p) : ceil_div(p.k_lengths.max_len, shape.keys) + 1;
  if (p.batch * p.heads_k > kMaxWorkUnits / iterations / row_blocks) return false;

  plan.family = Family::extend;
  plan.shape = found;
  plan.row_blocks = static_cast<int32_t>(row_blocks);
  plan.rows_per_token = static_cast<int32_t>(p.group);
  // Heads with one tile of rows each take equally long, and co-scheduled they read memory in step. Several tiles of rows do not under a causal
  // mask. Many rows over 8-bit K and V wait for wgmma and for the widening of K and V, not for memory: they want all SMs.
  const bool in_step = row_blocks == 1 && (!kv_8bit || rows <= extend::kWarpgroupRows);
  StreamK work;
  work.tiles = p.batch * p.heads_k * row_blocks;
  work.iterations = iterations;
  work.ctas = work.max_partitions = device.multiprocessors;
  work.min_iterations_log2 = 0;
  work.partials_per_partition = shape.uses_combine_kernel ? 2 : 1;
  work.split_min_iterations_log2 = 3;
  // Many tiles of rows fill the device without splits, whose partials would take much memory.
  work.max_splits = std::max<int64_t>(kBatchInvariantSplits / row_blocks, 1);
  work.rows = shape.rows();
  work.columns = shape.head_dim;
  work.uniform = in_step && is_uniform(p);
  work.max_coscheduled_log2 = in_step ? 3 : 0;
  if (shape.same_bits && shape.uses_combine_kernel) {
    work.partials_per_partition = segments_per_partition(work);
  } else if (shape.same_bits) {
    // Of each partition: the total that it hands over, and segments for which the total before them is not there yet. Each warp stores its
    // rows, and M and L of them in place of eight columns.
    constexpr int64_t kMostStoredBytes = int64_t{32} << 20;
    work.rows = ceil_div(std::min(rows, work.rows), extend::kWarpRows) * extend::kWarpRows;
    work.columns += 8;
    plan.partial_warps = static_cast<int32_t>(work.rows / extend::kWarpRows);
    plan.stored_segments = static_cast<int32_t>(std::clamp<int64_t>(
        kMostStoredBytes / (work.ctas * work.rows * work.columns * 4), 1, std::min<int64_t>(iterations, 64)));
    work.partials_per_partition = 1 + plan.stored_segments;
  }
  plan_partition(work, p, plan);
  if (plan.stored_segments > 0) plan.counters *= shape.rows() / extend::kWarpRows;
  // A CTA for every split: one that waits for others must have started after them.
  if (plan.fixed_splits > 0) plan.blocks = work.tiles * plan.fixed_splits;
  // No combine CTA finds room beside this kernel's, and partials are large: as many CTAs as an SM holds.
  if (shape.uses_combine_kernel) plan_combine(work, p, rows, decode::kCombineMinCtas * int64_t{device.multiprocessors}, plan);
  if (shape.same_bits && !shape.one_token() && !extend::total_is_shared(shape.head_dim, shape.stages_8bit))
    reserve_totals(shape.rows(), shape.head_dim, plan);
  // Few rows wait for memory alone, which cp.async reads faster in whole rows than TMA in atoms. With more rows wgmma wants the issue slots
  // that cp.async takes; and with 8-bit K and V the producer warps want them, for widening.
  plan.tma_kv = (kv_8bit || rows > extend::kWarpgroupRows) && is_kv_tma_compatible(p, p.k, p.head_dim, extend::kBoxRows) &&
                is_kv_tma_compatible(p, p.v, p.head_dim_v, extend::kBoxRows);
  plan.reason = shape.same_bits
                    ? "extend kernel for FA_FLAG_SAME_BITS: segments of 1024 keys are folded in the order of their keys"
                    : "extend kernel: queries and the query heads of a group share each KV tile, and the keys are "
                      "split over many CTAs";
  return true;
}

}  // namespace fa::cuda
