// SPDX-License-Identifier: Apache-2.0
// Plans of the forward-mode derivative, and what CUDA refuses of it.
#include <algorithm>
#include <cinttypes>

#include "cuda/host/planners.h"
#include "cuda/kernels/jvp_sm90/table.h"

namespace fa::cuda {
namespace {

// Why no kernel serves a problem.
fa_status refuse(const JvpProblem &j, const Needs &needs, const Device &device, ErrorText &error) {
  const MaskedProblem &p = j.forward;
  constexpr fa_status kRefused = FA_ERROR_UNSUPPORTED;
  if (!device.sm90) {
    return fail(
        error, kRefused,
        "device_type is FA_DEVICE_CUDA and the context uses kernels for compute capability %d.%d, but fa_forward_jvp has CUDA "
        "kernels for Hopper (9.0) alone; CPU contexts run it",
        device.compute_capability == 90 ? 8 : device.compute_capability / 10,
        device.compute_capability == 90 ? 0 : device.compute_capability % 10);
  }
  if (p.q.dtype == Dtype::f32)
    return fail(error, kRefused,
                "q.dtype is float32, but fa_forward_jvp has CUDA kernels for fp16 and bf16 alone; CPU contexts take fp32");
  if (p.softcap > 0)
    return fail(error, kRefused, "softcap is %g, but fa_forward_jvp has no CUDA kernel with softcap; CPU contexts take it",
                double{p.softcap});
  if (p.alibi_slopes != nullptr)
    return fail(error, kRefused,
                "alibi_slopes is given, but fa_forward_jvp has no CUDA kernel with ALiBi; CPU contexts take it");
  if (needs.scores != kPlain) {
    return fail(error, kRefused,
                "seqstart_k is given beside a mask that counts keys from the top left, but fa_forward_jvp has no CUDA kernel "
                "with both; CPU "
                "contexts take them");
  }
  int32_t widest = 0;
  for (const sm90::JvpShape &shape : sm90::kJvpShapes) widest = std::max(widest, shape.head_dim);
  for (const auto &[name, columns] : {std::pair{"q", p.head_dim}, {"v", p.head_dim_v}}) {
    if (columns > widest) {
      return fail(error, kRefused,
                  "head_dim of %s is %" PRId64 ", but CUDA kernels of fa_forward_jvp go up to %d; CPU contexts take more", name,
                  columns, widest);
    }
  }
  const struct {
    const char *name;
    const Operand &tensor;
    const Lengths &lengths;
    int64_t columns;
  } loaded[] = {{"q", p.q, p.q_lengths, p.head_dim},   {"k", p.k, p.k_lengths, p.head_dim},
                {"v", p.v, p.k_lengths, p.head_dim_v}, {"tq", j.tq, p.q_lengths, p.head_dim},
                {"tk", j.tk, p.k_lengths, p.head_dim}, {"tv", j.tv, p.k_lengths, p.head_dim_v}};
  for (const auto &[name, tensor, lengths, columns] : loaded) {
    if (tensor.data == nullptr || is_tma_compatible(tensor, lengths, columns)) continue;
    return fail(error, kRefused,
                "%s at %p has head_dim %" PRId64 " and strides %" PRId64 ", %" PRId64 ", %" PRId64
                ", but CUDA kernels of fa_forward_jvp need rows of whole 16-byte vectors on 16 bytes, no negative stride and "
                "fewer than 2^31 "
                "packed rows; CPU contexts take any",
                name, tensor.data, columns, tensor.batch_stride, tensor.seq_stride, tensor.head_stride);
  }
  return fail(error, kRefused, "fa_forward_jvp has no CUDA kernel for this problem; CPU contexts run it");
}

}  // namespace

fa_status plan_jvp_sm90(const JvpProblem &j, const Needs &needs, const Device &device, JvpPlan &plan, ErrorText &error) {
  const Problem &p = j.forward;
  for (const KernelRow &kernel : candidates(Family::sm90, Pass::jvp, needs)) {
    if (!can_run(kernel, needs, device)) continue;
    const int64_t row_blocks = ceil_div(p.q_lengths.max_len, kernel.rows);
    FA_RETURN_IF_ERROR(check_grid(std::max<int64_t>(row_blocks, 1), p.heads_q, p.batch, error));
    plan.family = Family::sm90;
    plan.shape = kernel.shape;
    plan.row_blocks = static_cast<int32_t>(row_blocks);
    plan.tiles = static_cast<int32_t>(row_blocks * p.heads_q * p.batch);
    plan.blocks = std::min(plan.tiles, device.multiprocessors);
    plan.counters = plan.tiles > plan.blocks ? 2 : 0;
    // K, V and their tangents of a head. Under a causal mask a group begins with its longest tiles: some of every SM follow them.
    plan.heads_per_l2_group =
        l2_group_of(p, device, p.heads_q, 2 * kv_head_bytes(p) / p.group, is_causal(p) ? device.multiprocessors / 8 : 1);
    plan.reason = "Hopper kernel (wgmma, TMA) for plain scores";
    return FA_OK;
  }
  return refuse(j, needs, device, error);
}

}  // namespace fa::cuda
