// SPDX-License-Identifier: Apache-2.0
// Plans of Hopper's forward kernels: persistent CTAs over tiles of queries of one head.
#include <algorithm>
#include <numeric>

#include "cuda/host/kv_copy.h"
#include "cuda/host/plan_stream_k.h"
#include "cuda/kernels/fwd_sm90/forward_table.h"
#include "cuda/kernels/fwd_sm90/transposed_v.h"

namespace fa::cuda {
namespace {

// The order of the tiles: which heads make up an L2 group, and how many sequences at the end are one group.
//
// Under a causal mask a group begins with its longest tiles. Behind those of the last group there have to be some tiles for every CTA, or
// most of the device waits for them; but the keys of the group should stay in the L2 cache. Other groups are as small as the end of the
// launch allows: when all tiles of a head are worked on at once, memory is read at an even pace. CTAs with one consumer warpgroup do better
// with large groups. Tiles of packed sequences are found on the device, a sequence at a time (fwd_sm90/scheduler.cuh): their groups are heads of
// one sequence.
void set_l2_groups(const ForwardProblem &p, const Device &device, const sm90::ForwardShape &shape, ForwardPlan &plan) {
  constexpr int64_t kTilesPerCta = 2, kFewRowBlocks = 4;
  const bool causal = is_causal(p), packed = p.q_lengths.cu != nullptr;
  const int64_t heads = p.heads_q / plan.rows_per_token;  // those of a work tile count as one
  plan.heads_per_l2_group =
      l2_group_of(p, device, heads, kv_head_bytes(p) * plan.rows_per_token / p.group,
                  causal ? ceil_div(device.multiprocessors / 8, plan.rows_per_token) : 1, /*l2_divisor=*/4);
  bool one_head = false;  // is a group
  if (packed) plan.heads_per_l2_group = static_cast<int32_t>(ceil_div(heads, ceil_div(heads, plan.heads_per_l2_group)));
  if (causal && !packed) {
    const int64_t wanted = ceil_div(kTilesPerCta * plan.blocks, std::max<int64_t>(plan.row_blocks * heads, 1)),
                  fit = device.l2_bytes / 2 / std::max<int64_t>(kv_head_bytes(p) * p.heads_k, 1), batch = std::min(wanted, fit);
    if (batch * heads > plan.heads_per_l2_group && batch < p.batch) plan.last_batch = static_cast<int32_t>(batch);
    one_head = plan.last_batch > 0 && shape.groups > 1;
  } else if (!causal) {
    // Tiles that queries do not fill are the ones to end with.
    one_head = plan.row_blocks <= kFewRowBlocks || p.q_lengths.max_len % shape.rows() == 0;
  }
  if (one_head) plan.heads_per_l2_group = 1;
}

// Above head_dim 256: whether CTAs with half as many rows, in clusters, finish before persistent CTAs do: those leave SMs idle, or under a
// causal mask wait for the longest work tile.
bool has_few_tiles(const ForwardProblem &p, const Device &device, const sm90::ForwardShape &shape, bool causal) {
  const int64_t tiles = ceil_div(p.q_lengths.max_len, shape.rows()) * p.heads_q * p.batch;
  return tiles * (causal ? 1 : 2) <= device.multiprocessors;
}

constexpr int64_t kNarrowHead = 256;

// Kernels for K and V in pages are for wider heads, and want pages that TMA can read: in boxes of at least 16 rows, or groups of eight of a
// contiguous sequence. `p`: in_pages().
bool takes_pages(const ForwardProblem &p) {
  constexpr int64_t kAtomColumns = 64, kMaxRowStride = int64_t{1} << 35;
  const auto readable = [&](const Operand &t, int64_t columns) {
    return is_tma_compatible(t, p.k_lengths, columns) && columns % kAtomColumns == 0 && t.seq_stride < kMaxRowStride &&
           page_dimension(p, t).count <= INT32_MAX;
  };
  return p.k_lengths.cu == nullptr && p.page_size % (p.page_table != nullptr ? 16 : 8) == 0 && p.page_size <= INT32_MAX &&
         p.num_pages <= INT32_MAX && readable(p.k, p.head_dim) && readable(p.v, p.head_dim_v);
}

// The same for narrower heads, of which boxes are swizzle atoms of one page each.
bool takes_narrow_pages(const Problem &p) {
  constexpr int32_t kBoxRows = 16;  // at least: each lane of a producer warp loads one box of a KV tile
  return p.k_lengths.cu == nullptr && is_kv_tma_compatible(p, p.k, p.head_dim, kBoxRows) &&
         is_kv_tma_compatible(p, p.v, p.head_dim_v, kBoxRows);
}

// Query heads that are rows of one work tile of 64 rows: as many of a group as divide it.
int64_t tile_heads_of(const Problem &p) {
  constexpr int64_t kRows = 64;
  int64_t heads = std::min(p.group, kRows);
  while (p.group % heads != 0) --heads;
  return heads;
}

// Row blocks of clusters whose tiles have the heads of a group as rows.
int64_t packed_row_blocks(const Problem &p, int64_t tile_heads) { return ceil_div(p.q_lengths.max_len, 2 * (64 / tile_heads)); }

// Whether contiguous keys are better read as a page of their sequence: by a few queries, or tiles for less than half of the device, which may then
// split the keys; or if tiles with the heads of a group as rows are fewer by half (up to head_dim 320, whose own kernel is faster, by two
// thirds).
bool prefers_packed_rows(const Problem &p, const Device &device) {
  constexpr int64_t kFewQueries = 16, kOwnKernel = 320, kRows = 128;
  const int64_t tiles = ceil_div(p.q_lengths.max_len, kRows) * p.heads_q * p.batch;
  if (p.q_lengths.max_len <= kFewQueries || tiles * 2 < device.multiprocessors) return true;
  const int64_t tile_heads = tile_heads_of(p), fewer = std::max(p.head_dim, p.head_dim_v) <= kOwnKernel ? 3 : 2;
  return packed_row_blocks(p, tile_heads) * fewer <= ceil_div(p.q_lengths.max_len, kRows) * tile_heads;
}

// Splits of the keys, where with them the device's clusters are done sooner: in so many waves, each as long as the KV tiles of a split and
// what its partial result costs. A launch more has to gain a tenth. As for the kernels of any device, lengths are not known.
int32_t splits_of(const Problem &p, const Device &device, const sm90::ForwardShape &shape, int64_t tiles) {
  constexpr int64_t kMinKvTiles = 4, kMaxSplits = 64, kMaxWaves = 8, kPartialTiles = 6;
  const int64_t kv_tiles = std::max<int64_t>(ceil_div(p.k_lengths.max_len, shape.kv_tile), 1),
                fit = std::min<int64_t>(kMaxSplits, INT32_MAX / shape.cluster() / tiles);
  if (p.num_splits > 0) return static_cast<int32_t>(std::min<int64_t>({p.num_splits, kv_tiles, fit}));
  const int64_t room = std::max(device.multiprocessors / shape.cluster(), 1),
                most = std::min(fit, ceil_div(kv_tiles, kMinKvTiles));
  int64_t best = 1, time = ceil_div(tiles, room) * (kv_tiles + 1) * 9 / 10;
  for (int64_t waves = 1; waves <= kMaxWaves; ++waves) {
    const int64_t splits = std::min(waves * room / tiles, most);
    if (splits < 2) continue;
    const int64_t with_splits = ceil_div(tiles * splits, room) * (ceil_div(kv_tiles, splits) + kPartialTiles);
    if (with_splits < time) time = with_splits, best = splits;
  }
  return static_cast<int32_t>(best);
}

// The queries of a sequence. Packed sequences count with their mean length: where prompts are mixed with single tokens most tiles would have
// one row.
int64_t mean_queries(const Problem &p) {
  return p.q_lengths.cu != nullptr ? p.q_lengths.total / std::max<int64_t>(p.batch, 1) : p.q_lengths.max_len;
}

// Times for a key of a head, in hundredths of what a row of queries takes in Hopper's kernels: of a row in those of a family, and of the copy. Those of extend,
// decode and the copy were measured over e4m3 (H200, head_dim 64 to 256), the others are estimates.
int64_t row_time(Family family) {
  switch (family) {
    case Family::sm90:
      return 100;
    case Family::extend:
      return 130;
    case Family::sm80:
      return 200;
    case Family::decode:
      return 500;
    case Family::sm90_fp32:
      return 650;
    default:
      return 2500;
  }
}
int64_t copy_time(const Problem &p) { return 5600 * (dtype_bytes(p.k.dtype) + 2 * dtype_bytes(p.q.dtype)); }

}  // namespace

PageDimension page_dimension(const Problem &p, const Operand &t) {
  const int64_t page = p.num_pages > 1 ? t.batch_stride : 0, head = p.heads_k > 1 ? t.head_stride : 0,
                stride = std::max<int64_t>(std::gcd(page, head), 1);
  if (page == 0 && head == 0) return {t.seq_stride, 0, 0, 1};
  return {stride, page / stride, head / stride, (p.num_pages - 1) * (page / stride) + (p.heads_k - 1) * (head / stride) + 1};
}

ForwardProblem in_pages(const ForwardProblem &p, int64_t copied_keys, void *copy) {
  ForwardProblem pages = p;
  if (is_quantised(p.k.dtype)) {
    pages = with_copied_kv(p, copied_keys, copy);
    pages.page_size = copied_keys;
    pages.num_pages = p.batch;
  } else if (p.page_table == nullptr) {
    pages.page_size = p.k_lengths.max_len;
    pages.num_pages = p.batch;
  }
  return pages;
}

bool plan_sm90(const ForwardProblem &p, const Needs &needs, const Device &device, ForwardPlan &plan) {
  const bool causal = is_causal(p), widens = needs.operands == k8BitKv, paged = (needs.features & kPagedKv) != 0 || widens;
  const int64_t copied_keys = widens ? copied_keys_of(p) : 0;
  const bool wide = std::max(p.head_dim, p.head_dim_v) > kNarrowHead,
             asks = needs.operands == k16Bit ? paged || prefers_packed_rows(p, device) : widens;
  const auto readable = [&] {
    if (wide) return takes_pages(in_pages(p, copied_keys, nullptr));
    return widens ? takes_narrow_pages(in_pages(p, copied_keys, nullptr)) : takes_narrow_pages(p);
  };
  bool pages = (wide ? asks : paged) && copied_keys >= 0 && readable();
  if (paged && !pages) return false;
  const KernelRow *chosen = nullptr;
  const auto find = [&] {
    for (const KernelRow &kernel : candidates(Family::sm90, Pass::forward, needs)) {
      const sm90::ForwardShape &shape = sm90::kForwardShapes[kernel.shape];
      if (shape.same_bits != ((needs.features & kSameBits) != 0) || shape.pages != pages || (pages && shape.wide() != wide))
        continue;
      const bool triangle = causal && p.k_lengths.max_len <= shape.max_causal;
      if (p.q_lengths.max_len > (triangle ? shape.max_causal : shape.max_queries) || !can_run(kernel, needs, device)) continue;
      if ((p.block_mask.data != nullptr && shape.is_too_coarse(p.block_mask.size_k)) ||
          (p.block_lists.given && shape.is_too_coarse(p.block_lists.size_k))) {
        continue;
      }
      if (chosen != nullptr && (!shape.wide() || takes_mixtures(shape.scores))) continue;
      chosen = &kernel;
      if (shape.head_dim <= 256 || shape.wide() || !has_few_tiles(p, device, shape, causal)) break;
    }
  };
  find();
  if (chosen == nullptr && pages && !paged) {
    pages = false;
    find();
  }
  if (chosen == nullptr) return false;
  const sm90::ForwardShape &shape = sm90::kForwardShapes[chosen->shape];
  const int64_t tile_heads = shape.packs_heads() ? tile_heads_of(p) : 1,
                row_blocks =
                    shape.packs_heads() ? packed_row_blocks(p, tile_heads) : ceil_div(p.q_lengths.max_len, shape.rows());
  if (p.heads_q * p.batch > INT32_MAX / 2 / row_blocks) return false;
  const int64_t transposed_v_keys = shape.fp8 ? sm90::transposed_v_keys(p.k_lengths, p.batch) : 0;
  if (transposed_v_keys > INT32_MAX) return false;
  plan.family = Family::sm90;
  plan.shape = chosen->shape;
  plan.row_blocks = static_cast<int32_t>(row_blocks);
  plan.rows_per_token = static_cast<int32_t>(tile_heads);
  plan.tiles = static_cast<int32_t>(row_blocks * (p.heads_q / tile_heads) * p.batch);
  plan.blocks =
      shape.persistent() ? std::min(plan.tiles, device.multiprocessors * shape.blocks_at_once()) : plan.tiles * shape.cluster();
  plan.counters = plan.tiles > plan.blocks ? 2 : 0;
  set_l2_groups(p, device, shape, plan);
  // wgmma wants 8-bit V transposed: a kernel writes V^T to the workspace first.
  plan.transposed_v_keys = transposed_v_keys;
  plan.workspace_bytes = static_cast<size_t>((p.k_lengths.cu != nullptr ? 1 : p.batch) * p.heads_k * p.head_dim_v) *
                         static_cast<size_t>(transposed_v_keys);
  plan.tma_kv = true;
  if (shape.packs_heads()) {
    plan.num_splits = splits_of(p, device, shape, plan.tiles);
    plan.blocks *= plan.num_splits;
    if (plan.num_splits > 1) {
      const size_t rows = static_cast<size_t>(plan.num_splits) * p.batch * p.heads_q * p.q_lengths.max_len;
      plan.split_lse_offset = align_up(rows * p.head_dim_v * sizeof(float));
      plan.workspace_bytes = plan.split_lse_offset + align_up(rows * sizeof(float));
    }
  }
  if (widens) {
    plan.copied_keys = copied_keys;
    plan.copy_offset = align_up(plan.workspace_bytes);
    plan.workspace_bytes = plan.copy_offset + copied_kv_bytes(p, copied_keys);
  }
  if (shape.workspace_total) reserve_totals(shape.rows(), shape.head_dim_v, plan);
  plan.tma_out = shape.out_atoms > 0 && is_tma_compatible(p.out, p.q_lengths, p.head_dim_v);
  plan.reason =
      shape.same_bits ? "Hopper kernel (wgmma, TMA) for FA_FLAG_SAME_BITS and plain scores: segments of 1024 keys are "
                        "folded in the order of their keys"
      : widens
          ? "Hopper kernel (wgmma, TMA) for pages; a kernel before it widens 8-bit K and V to 16 bits, as contiguous sequences"
      : shape.packs_heads()
          ? "Hopper kernel (wgmma, TMA) for pages or few queries of wide heads: the query heads of a group share each KV tile"
      : shape.pages ? "Hopper kernel (wgmma, TMA) for pages and tiles of queries of one head"
                    : hopper_reason(shape.scores, p.score_text.given);
  return true;
}

// Hopper's kernel works on whole tiles of queries of one head, each with all of its keys. Others do better with a few queries, which wait for
// memory alone and fill no tile; where their splits put more than half of the device to work; or where they put the heads of a group into one
// tile, if that takes half as many tiles (of 128 rows or more).
bool beats_sm90(const Problem &p, const Device &device, const ForwardPlan &other, const ForwardPlan &hopper) {
  constexpr int64_t kFewQueries = 16;
  if (sm90::kForwardShapes[hopper.shape].packs_heads()) return false;
  const int64_t row_blocks = ceil_div(p.q_lengths.max_len, std::max(kernel_of(hopper).rows, 128));
  if (other.family == Family::simt) return p.q_lengths.max_len <= kFewQueries;  // in a build that leaves sm80 kernels out
  return p.q_lengths.max_len <= kFewQueries ||
         (other.num_splits > 1 && row_blocks * p.heads_q * p.batch * 2 < device.multiprocessors) ||
         (other.rows_per_token > 1 && int64_t{other.row_blocks} * 2 <= row_blocks * p.group);
}

bool reads_pages_by_heads(const ForwardPlan &hopper) {
  const sm90::ForwardShape &shape = sm90::kForwardShapes[hopper.shape];
  return shape.pages && !shape.packs_heads();
}

bool copying_may_be_better(const Problem &p, const ForwardPlan &other) {
  return mean_queries(p) * p.group * row_time(other.family) > copy_time(p);
}

bool copying_is_better(const Problem &p, const Device &device, const ForwardPlan &other, const ForwardPlan &plan) {
  if (plan.family == Family::sm90 && sm90::kForwardShapes[plan.shape].packs_heads()) {
    constexpr int32_t kFewRowBlocks = 4;  // of decode; each reads all keys again, from L2 at best
    return other.row_blocks > kFewRowBlocks;
  }
  const int64_t queries = mean_queries(p), tile = kernel_of(plan).rows, tiles = ceil_div(queries, tile),
                idle = std::max<int64_t>(device.multiprocessors * 100 / std::max<int64_t>(tiles * p.heads_q * p.batch, 1), 100);
  return queries * p.group * row_time(other.family) >
         tiles * tile * p.group * idle * row_time(plan.family) / 100 + copy_time(p);
}

// Work tiles of sm90 take 0.85 of the time of as many rows of extend, whether queries fill them or not; and extend gives all SMs keys where there
// are few work tiles.
bool extend_reads_pages_better(const Problem &p, const Device &device, const ForwardPlan &extend, const ForwardPlan &hopper) {
  constexpr int64_t kFewQueries = 16;
  const int64_t queries = mean_queries(p);
  const int64_t tile = kernel_of(hopper).rows, tiles = ceil_div(queries, tile), shared_tile = kernel_of(extend).rows,
                shared_tiles = ceil_div(queries * p.group, shared_tile);
  if (queries <= kFewQueries || tiles * p.heads_q * p.batch < device.multiprocessors) return true;
  return shared_tiles * shared_tile * 100 < tiles * tile * p.group * 85;
}

}  // namespace fa::cuda
