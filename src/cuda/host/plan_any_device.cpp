// SPDX-License-Identifier: Apache-2.0
// Plans of the forward kernels that every device runs: sm80 on tensor cores (mma.sync), simt on CUDA cores; and what planners share.
#include <algorithm>
#include <cinttypes>

#include "cuda/host/planners.h"
#include "cuda/kernels/fwd_simt/forward_table.h"
#include "cuda/kernels/fwd_sm80/forward_table.h"

namespace fa::cuda {
namespace {

// What the partition of a forward problem needs to know of its kernel.
struct Tile {
  int32_t rows;  // of queries that a CTA owns
  int32_t keys;  // of a KV tile
  int32_t ctas_per_sm;
};

// Splits of the keys, for problems with fewer CTAs than the device has room for. A rule of shapes alone: lengths are on the device, and a
// captured graph must serve other lengths too.
int32_t choose_splits(const Problem &p, const Tile &tile, const Device &device, int64_t ctas) {
  constexpr int64_t kMinKvTiles = 4, kMaxSplits = 128;
  const int64_t kv_tiles = std::max<int64_t>(ceil_div(p.k_lengths.max_len, tile.keys), 1),
                max_splits = std::min<int64_t>(kMaxSplits, INT32_MAX / ctas);  // all of them are one launch
  if (p.same_bits) return 1;
  if (p.num_splits > 0) return static_cast<int32_t>(std::min<int64_t>({p.num_splits, kv_tiles, max_splits}));
  // A row's bits must not depend on what else runs, so with batch invariance the number of CTAs may not matter.
  if (p.batch_invariant) return 1;
  const int64_t room = int64_t{device.multiprocessors} * tile.ctas_per_sm;
  if (ctas * 5 >= room * 4) return 1;
  return static_cast<int32_t>(std::clamp<int64_t>(room / ctas, 1, std::min(max_splits, ceil_div(kv_tiles, kMinKvTiles))));
}

// K and V of a head are shared by `sharing` heads of the grid. Under a causal mask a group begins with its longest tiles, and if it is short, so
// does the end of the launch. Two CTAs of a head at a time, which read the same keys together, are enough for the L2 cache: that many heads are a
// group, whether their keys fit together or not.
int32_t l2_group_of_keys(const Problem &p, const Device &device, int64_t heads, int64_t sharing, int32_t ctas_per_sm) {
  return l2_group_of(p, device, heads, kv_head_bytes(p) / sharing,
                     is_causal(p) ? int64_t{device.multiprocessors} * ctas_per_sm / 2 : 1);
}

}  // namespace

const char *tensor_core_reason(ScoreSet scores) {
  return scores != kPlain ? "tensor-core kernel with general scores (softcap, bias, block mask, ALiBi or dropout)"
                          : "tensor-core kernel for plain scores";
}

const char *why_cuda_cores(std::span<const KernelRow> rows, const Needs &needs, const Device &device) {
  if ((needs.features & kFp32Products) != 0) return "CUDA-core kernel: FA_FLAG_FP32_PRODUCTS keeps to fp32 multiply-adds";
  if (needs.operands == kFp32) return "CUDA-core kernel: fp32 operands are multiplied in fp32";
  if (needs.operands == kMixed)
    return "CUDA-core kernel: with fp32 queries or results, operands of fewer bits are widened to fp32";
  if (needs.operands != k16Bit) return "CUDA-core kernel: fp8 and int8 operands are widened to fp32";
  const auto serves = [&](const KernelRow &row) { return can_serve(row, needs); };
  if (std::none_of(rows.begin(), rows.end(), serves))
    return "CUDA-core kernel: no tensor-core kernel takes this head_dim with these score terms";
  const auto has_room = [&](const KernelRow &row) { return serves(row) && fits(row, device); };
  return std::any_of(rows.begin(), rows.end(), has_room)
             ? "CUDA-core kernel: this build leaves out the tensor-core kernel for this problem"
             : "CUDA-core kernel: the tensor-core kernel for this head_dim does not fit the device's shared memory";
}

fa_status check_grid(int64_t ctas_per_head, int64_t heads, int64_t batch, ErrorText &error) {
  if (heads * batch <= INT32_MAX / ctas_per_head) return FA_OK;
  return fail(error, FA_ERROR_UNSUPPORTED,
              "batch %" PRId64 " x %" PRId64 " heads x %" PRId64 " CTAs are more than one launch holds", batch, heads,
              ctas_per_head);
}

int32_t l2_group_of(const Problem &p, const Device &device, int64_t heads, int64_t head_bytes, int64_t at_least,
                    int64_t l2_divisor) {
  const int64_t total = std::max<int64_t>(heads * p.batch, 1),
                fit = device.l2_bytes / l2_divisor / std::max<int64_t>(head_bytes, 1);
  const int64_t groups = ceil_div(total, std::clamp<int64_t>(std::max(fit, at_least), 1, total));
  return static_cast<int32_t>(ceil_div(total, groups));
}

fa_status plan_any_device(const ForwardProblem &p, const Needs &needs, const Device &device, ForwardPlan &plan,
                          ErrorText &error) {
  Tile tile;
  const std::span<const KernelRow> tensor_core = kernels_of(Family::sm80, Pass::forward),
                                   cuda_core = kernels_of(Family::simt, Pass::forward);
  const auto runs = [&](const KernelRow &row) { return can_run(row, needs, device); };
  if (const auto row = std::find_if(tensor_core.begin(), tensor_core.end(), runs); row != tensor_core.end()) {
    const sm80::ForwardShape &shape = sm80::kForwardShapes[row->shape];
    plan.family = Family::sm80;
    plan.shape = row->shape;
    tile = {shape.rows(), shape.kv_tile, shape.min_blocks};
    plan.reason = tensor_core_reason(shape.scores);
  } else if (const auto row = std::find_if(cuda_core.begin(), cuda_core.end(), runs); row != cuda_core.end()) {
    const simt::ForwardShape &shape = simt::kForwardShapes[row->shape];
    plan.family = Family::simt;
    plan.shape = row->shape;
    tile = {shape.rows(), shape.kv_tile(), 1};
    plan.reason = why_cuda_cores(tensor_core, needs, device);
  } else {
    return FA_ERROR_NOT_BUILT;
  }

  // Few tokens leave most rows of a tile empty: let the query heads that share keys fill them. Masks as data may differ between heads, dropout
  // does.
  const int64_t tokens = std::max<int64_t>(p.q_lengths.max_len, 1);
  if (p.group > 1 && !has_data_mask(p) && p.dropout.threshold == 0 &&
      ceil_div(tokens * p.group, tile.rows) < ceil_div(tokens, tile.rows) * p.group) {
    plan.rows_per_token = static_cast<int32_t>(p.group);
  }
  plan.row_blocks = static_cast<int32_t>(std::max<int64_t>(ceil_div(tokens * plan.rows_per_token, tile.rows), 1));
  const int64_t heads = plan.rows_per_token == 1 ? p.heads_q : p.heads_k;
  FA_RETURN_IF_ERROR(check_grid(plan.row_blocks, heads, p.batch, error));
  const int64_t ctas = plan.row_blocks * heads * p.batch;
  plan.num_splits = choose_splits(p, tile, device, std::max<int64_t>(ctas, 1));
  plan.blocks = ctas * plan.num_splits;
  plan.heads_per_l2_group = l2_group_of_keys(p, device, heads, plan.rows_per_token == 1 ? p.group : 1, tile.ctas_per_sm);
  if (plan.num_splits > 1) {
    const size_t rows = static_cast<size_t>(plan.num_splits) * p.batch * p.heads_q * tokens;
    plan.split_lse_offset = align_up(rows * p.head_dim_v * sizeof(float));
    plan.workspace_bytes = plan.split_lse_offset + align_up(rows * sizeof(float));
  }
  return FA_OK;
}

}  // namespace fa::cuda
