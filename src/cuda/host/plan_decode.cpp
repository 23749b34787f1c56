// SPDX-License-Identifier: Apache-2.0
// Plans of the decode kernels: a few queries, which with the query heads that share their keys fill no more than one tile of rows; with
// 8-bit K and V any number of queries.
#include <algorithm>

#include "cuda/host/plan_stream_k.h"
#include "cuda/kernels/decode/table.h"

namespace fa::cuda {
namespace {

using decode::kShapes;
using decode::Shape;

// Choices among the shapes of one key width.
class Shapes {
 public:
  Shapes(const Needs &needs, const Device &device)
      : needs_(needs), device_(device), rows_(candidates(Family::decode, Pass::forward, needs)) {
    kv_8bit_ = needs.operands == k8BitKv;
    begin_ = kv_8bit_ ? decode::kFirst8Bit : 0;
    end_ = kv_8bit_ ? decode::kNumShapes : decode::kFirst8Bit;
  }

  // The first shape with room for `rows` rows; with 8-bit K and V else the one of the smallest head_dim that has most rows. -1: none.
  int32_t for_rows(int64_t rows) const {
    int32_t found = -1;
    if (rows_.empty()) return found;
    for (int32_t n = begin_; n < end_; ++n) {
      const Shape &shape = kShapes[n];
      if (shape.clustered || !can_use(n)) continue;
      const bool more = found < 0 || (shape.head_dim == kShapes[found].head_dim && shape.rows() > kShapes[found].rows());
      if (shape.rows() >= rows || (kv_8bit_ && more)) found = n;
      if (shape.rows() >= rows) break;
    }
    return found;
  }

  // For much work: the next shape, if by it an SM runs more warps for the same rows. They hide more latency, and start and end later.
  int32_t with_more_warps(int32_t n) const {
    const auto threads = [&](const Shape &shape) { return shape.threads() * shape.ctas_per_sm(device_.shared_bytes); };
    if (n + 1 >= end_ || !can_use(n + 1)) return n;
    const Shape &few = kShapes[n], &many = kShapes[n + 1];
    const bool same = !many.clustered && many.head_dim == few.head_dim && many.rows() == few.rows();
    return same && threads(many) > threads(few) ? n + 1 : n;
  }

  // The shape for clusters with the same tile as shape n; -1: none.
  int32_t clustered(int32_t n) const {
    for (int32_t m = begin_; m < end_; ++m) {
      const Shape &shape = kShapes[m];
      if (shape.clustered && shape.head_dim == kShapes[n].head_dim && shape.rows() == kShapes[n].rows() && can_use(m)) return m;
    }
    return -1;
  }

 private:
  bool can_use(int32_t n) const { return can_run(rows_[static_cast<size_t>(n)], needs_, device_); }

  const Needs &needs_;
  const Device &device_;
  std::span<const KernelRow> rows_;
  bool kv_8bit_;
  int32_t begin_, end_;
};

// CTAs of a cluster that share the keys of a work tile; 0: no clusters. Splits that depend on the sequence alone take none.
//
// CTAs of clusters of eight may have as little as one iteration each. CTAs with more keys want an SM of their own, which clusters do not get: their
// CTAs crowd where there is room for many.
int32_t cluster_of(const MaskedProblem &p, const Device &device, int64_t tiles, int64_t kv_tile) {
  constexpr int64_t kMinKeys = 128, kMaxKeys = 256;  // keys of a CTA
  if (splits_by_sequence(p) || !is_uniform(p)) return 0;
  const int64_t keys = p.k_lengths.max_len,
                wanted = std::max(ceil_div(keys, kMinKeys), std::min(kPortableCluster, ceil_div(keys, kv_tile))),
                ctas = std::min({largest_cluster(device), device.multiprocessors / tiles, wanted});
  return ctas > 1 && keys <= ctas * kMaxKeys ? static_cast<int32_t>(ctas) : 0;
}

}  // namespace

bool plan_decode(const ForwardProblem &p, const Needs &needs, const Device &device, ForwardPlan &plan) {
  const int64_t rows = p.q_lengths.max_len * p.group;
  const Shapes shapes(needs, device);
  int32_t found = shapes.for_rows(rows);
  if (found < 0) return false;
  constexpr int64_t kManyKeys = 4096;  // of an SM
  const bool many_keys = p.batch * p.heads_k >= ceil_div(kManyKeys * device.multiprocessors, p.k_lengths.max_len);
  if (!splits_by_sequence(p) && many_keys) found = shapes.with_more_warps(found);
  const Shape &shape = kShapes[found];
  const int64_t row_blocks = ceil_div(rows, shape.rows()), tiles = p.batch * p.heads_k * row_blocks,
                iterations = ceil_div(p.k_lengths.max_len, shape.kv_step()) + 1,
                ctas = int64_t{device.multiprocessors} * shape.ctas_per_sm(device.shared_bytes);
  if (tiles > kMaxWorkUnits / iterations) return false;

  plan.family = Family::decode;
  plan.shape = found;
  plan.row_blocks = static_cast<int32_t>(row_blocks);
  plan.rows_per_token = static_cast<int32_t>(p.group);
  plan.tma_kv = shape.column_warps() > 1 && is_wide_kv_tma_compatible(p, p.k, p.head_dim, decode::kWideBoxRows) &&
                (decode::is_latent(shape.head_dim) || is_wide_kv_tma_compatible(p, p.v, p.head_dim_v, decode::kWideBoxRows));
  plan.reason =
      "decode kernel for few queries: the query heads of a group share each KV tile, and the keys are split over many CTAs";
  if (const int32_t n = shapes.clustered(found); n >= 0) {
    plan.cluster = cluster_of(p, device, tiles, kShapes[n].kv_step());
    if (plan.cluster > 0) {
      plan.shape = n;
      plan.blocks = tiles * plan.cluster;
      plan.num_splits = plan.cluster;
      return true;
    }
  }
  StreamK work;
  work.tiles = tiles;
  work.iterations = iterations;
  work.ctas = work.max_partitions = ctas;
  work.min_iterations_log2 = shape.kv_step() < 128 ? 1 : 0;  // fewer than 128 keys are not worth a partial
  work.partials_per_partition = 2;
  work.split_min_iterations_log2 = shape.kv_step() > 256 ? 1 : 3;
  // Many tiles of rows fill the device without splits, whose partials would take much memory.
  work.max_splits = std::max<int64_t>(kMaxSplits / row_blocks, 1);
  work.rows = shape.rows();
  work.columns = shape.head_dim_v;
  work.uniform = is_uniform(p);
  work.max_coscheduled_log2 = row_blocks == 1 ? 3 : 0;
  plan_partition(work, p, plan);
  plan_combine(work, p, rows, 2 * int64_t{device.multiprocessors}, plan);  // these CTAs run beside this kernel's
  // Large launches that split no work tile are 1 to 2 % faster when they find the device empty (perhaps because their CTAs, a few less than
  // there are SMs, are then spread better), except where descales by row make arithmetic the limit: docs/performance.md.
  plan.allow_early_dependents = plan.split_tiles > 0 || !many_keys || p.k_descale.per_row || p.v_descale.per_row;
  return true;
}

}  // namespace fa::cuda
