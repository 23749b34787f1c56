// SPDX-License-Identifier: Apache-2.0
// Plans of Hopper's forward kernels: persistent CTAs over tiles of queries of one head.
#include <algorithm>

#include "cuda/host/planners.h"
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
  plan.heads_per_l2_group =
      l2_group_of(p, device, p.heads_q, kv_head_bytes(p) / p.group, causal ? device.multiprocessors / 8 : 1, /*l2_divisor=*/4);
  bool one_head = false;  // is a group
  if (packed) plan.heads_per_l2_group = static_cast<int32_t>(ceil_div(p.heads_q, ceil_div(p.heads_q, plan.heads_per_l2_group)));
  if (causal && !packed) {
    const int64_t wanted = ceil_div(kTilesPerCta * plan.blocks, std::max<int64_t>(plan.row_blocks * p.heads_q, 1)),
                  fit = device.l2_bytes / 2 / std::max<int64_t>(kv_head_bytes(p) * p.heads_k, 1), batch = std::min(wanted, fit);
    if (batch * p.heads_q > plan.heads_per_l2_group && batch < p.batch) plan.last_batch = static_cast<int32_t>(batch);
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

}  // namespace

bool plan_sm90(const ForwardProblem &p, const Needs &needs, const Device &device, ForwardPlan &plan) {
  const bool causal = is_causal(p);
  const KernelRow *chosen = nullptr;
  for (const KernelRow &kernel : candidates(Family::sm90, Pass::forward, needs)) {
    const sm90::ForwardShape &shape = sm90::kForwardShapes[kernel.shape];
    if (shape.same_bits != ((needs.features & kSameBits) != 0)) continue;
    const bool triangle = causal && p.k_lengths.max_len <= shape.max_causal;
    if (p.q_lengths.max_len > (triangle ? shape.max_causal : shape.max_queries) || !can_run(kernel, needs, device)) continue;
    if ((p.block_mask.data != nullptr && shape.is_too_coarse(p.block_mask.size_k)) ||
        (p.block_lists.given && shape.is_too_coarse(p.block_lists.size_k))) {
      continue;
    }
    if (chosen != nullptr && !shape.wide()) continue;
    chosen = &kernel;
    if (shape.head_dim <= 256 || shape.wide() || !has_few_tiles(p, device, shape, causal)) break;
  }
  if (chosen == nullptr) return false;
  const sm90::ForwardShape &shape = sm90::kForwardShapes[chosen->shape];
  const int64_t row_blocks = ceil_div(p.q_lengths.max_len, shape.rows());
  if (p.heads_q * p.batch > INT32_MAX / 2 / row_blocks) return false;
  const int64_t transposed_v_keys = shape.fp8 ? sm90::transposed_v_keys(p.k_lengths, p.batch) : 0;
  if (transposed_v_keys > INT32_MAX) return false;
  plan.family = Family::sm90;
  plan.shape = chosen->shape;
  plan.row_blocks = static_cast<int32_t>(row_blocks);
  plan.tiles = static_cast<int32_t>(row_blocks * p.heads_q * p.batch);
  plan.blocks =
      shape.persistent() ? std::min(plan.tiles, device.multiprocessors * shape.blocks_at_once()) : plan.tiles * shape.cluster();
  plan.counters = plan.tiles > plan.blocks ? 2 : 0;
  set_l2_groups(p, device, shape, plan);
  // wgmma wants 8-bit V transposed: a kernel writes V^T to the workspace first.
  plan.transposed_v_keys = transposed_v_keys;
  plan.workspace_bytes = static_cast<size_t>((p.k_lengths.cu != nullptr ? 1 : p.batch) * p.heads_k * p.head_dim_v) *
                         static_cast<size_t>(transposed_v_keys);
  plan.tma_kv = true;
  plan.tma_out = shape.out_atoms > 0 && is_tma_compatible(p.out, p.q_lengths, p.head_dim_v);
  plan.reason = shape.same_bits
                    ? "Hopper kernel (wgmma, TMA) for FA_FLAG_SAME_BITS and plain scores: segments of 1024 keys are "
                      "folded in the order of their keys"
                    : hopper_reason(shape.scores);
  return true;
}

// Hopper's kernel works on whole tiles of queries of one head, each with all of its keys. Others do better with a few queries, which wait for
// memory alone and fill no tile; where their splits put more than half of the device to work; or where they put the heads of a group into one
// tile, if that takes half as many tiles (of 128 rows or more).
bool beats_sm90(const Problem &p, const Device &device, const ForwardPlan &other, const ForwardPlan &sm90) {
  constexpr int64_t kFewQueries = 16;
  const int64_t row_blocks = ceil_div(p.q_lengths.max_len, std::max(kernel_of(sm90).rows, 128));
  if (other.family == Family::simt) return p.q_lengths.max_len <= kFewQueries;  // of a score text
  return p.q_lengths.max_len <= kFewQueries ||
         (other.num_splits > 1 && row_blocks * p.heads_q * p.batch * 2 < device.multiprocessors) ||
         (other.rows_per_token > 1 && int64_t{other.row_blocks} * 2 <= row_blocks * p.group);
}

}  // namespace fa::cuda
