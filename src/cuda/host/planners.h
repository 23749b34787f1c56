// SPDX-License-Identifier: Apache-2.0
// The planners behind plan_forward(), plan_backward() and plan_jvp(), one for each family of kernels, and what they share. select.cpp alone decides
// which of them run, and in which order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/host/plan.h"

namespace fa::cuda {

// Each takes an empty plan and returns whether a kernel of the family can run the problem and is built: then the plan is complete, apart
// from `vector`; else it is still empty.
bool plan_decode(const ForwardProblem &problem, const Needs &needs, const Device &device, ForwardPlan &plan);
bool plan_extend(const ForwardProblem &problem, const Needs &needs, const Device &device, ForwardPlan &plan);
bool plan_mla(const ForwardProblem &problem, const Needs &needs, const Device &device, ForwardPlan &plan);
bool plan_sm90(const ForwardProblem &problem, const Needs &needs, const Device &device, ForwardPlan &plan);
bool plan_sm90_fp32(const ForwardProblem &problem, const Needs &needs, const Device &device, ForwardPlan &plan);
// The kernels that every device runs: sm80 (tensor cores) or, where none of these serves, simt (CUDA cores). FA_ERROR_NOT_BUILT where the
// build has neither.
fa_status plan_any_device(const ForwardProblem &problem, const Needs &needs, const Device &device, ForwardPlan &plan,
                          ErrorText &error);

// Pages and heads of K or V as one dimension of `count` steps of `stride` elements: page n of head h is at n page_step + h head_step.
struct PageDimension {
  int64_t stride, page_step, head_step, count;
};
PageDimension page_dimension(const Problem &problem, const Operand &tensor);
// The problem as Hopper's kernels for pages see it. Contiguous keys of a sequence are one page; so are those of the copy of 8-bit K and V, of
// `copied_keys` each.
ForwardProblem in_pages(const ForwardProblem &problem, int64_t copied_keys, void *copy);

// Whether the kernel of `other` serves a problem better than that of `hopper`, of family sm90.
bool beats_sm90(const Problem &problem, const Device &device, const ForwardPlan &other, const ForwardPlan &hopper);

// Whether a plan of family sm90 is for pages, and its work tiles have queries of one head each.
bool reads_pages_by_heads(const ForwardPlan &hopper);
// Whether a copy of K and V in 16 bits (kv_copy.h) and `plan`, which reads it, take less time than `other`, which reads K and V where they are.
bool copying_may_be_better(const Problem &p, const ForwardPlan &other);  // with any plan
bool copying_is_better(const Problem &p, const Device &device, const ForwardPlan &other, const ForwardPlan &plan);
// Whether extend, whose work tiles have the query heads of a group as rows, serves such a problem better.
bool extend_reads_pages_better(const Problem &problem, const Device &device, const ForwardPlan &extend,
                               const ForwardPlan &hopper);

// The same for the kernels of fp32 operands.
bool beats_sm90_fp32(const Problem &problem, const Device &device, const ForwardPlan &other, const ForwardPlan &sm90_fp32);

// Backward, the same. `found` says whether there is such a kernel.
fa_status plan_backward_sm90(const BackwardProblem &problem, const Needs &needs, const Device &device, bool &found,
                             BackwardPlan &plan, ErrorText &error);
fa_status plan_backward_sm90_fp32(const BackwardProblem &problem, const Needs &needs, const Device &device, bool &found,
                                  BackwardPlan &plan, ErrorText &error);
fa_status plan_backward_any_device(const BackwardProblem &problem, const Needs &needs, const Device &device, BackwardPlan &plan,
                                   ErrorText &error);

// The forward-mode derivative. FA_ERROR_UNSUPPORTED, with the name of the argument, where no kernel can do it.
fa_status plan_jvp_sm90(const JvpProblem &problem, const Needs &needs, const Device &device, JvpPlan &plan, ErrorText &error);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Arrays in the workspace begin on 256 bytes.
constexpr size_t align_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

// FA_FLAG_SAME_BITS: room in the workspace for the total (common/segment_total.cuh) of each CTA's `rows`, in fp32.
inline void reserve_totals(int64_t rows, int64_t columns, ForwardPlan &plan) {
  plan.totals_offset = align_up(plan.workspace_bytes);
  plan.workspace_bytes = plan.totals_offset + align_up(static_cast<size_t>(plan.blocks * rows * columns) * sizeof(float));
}

inline bool is_causal(const Problem &p) { return !Diagonal<int32_t>::Limits(p.band).unlimited_right(); }

// Why the reason of a plan is CUDA cores: what keeps tensor-core kernels `rows` from serving the problem.
const char *why_cuda_cores(std::span<const KernelRow> rows, const Needs &needs, const Device &device);
const char *tensor_core_reason(ScoreSet scores);
constexpr const char *hopper_reason(ScoreSet scores, bool score_text) {
  return score_text               ? "Hopper kernel (wgmma, TMA)"
         : takes_mixtures(scores) ? "Hopper kernel (wgmma, TMA) for mixtures of score terms"
         : scores & kDropout      ? "Hopper kernel (wgmma, TMA) for dropout"
         : scores & kDataMask     ? "Hopper kernel (wgmma, TMA) for masks as data"
         : scores & kMaxLogit     ? "Hopper kernel (wgmma, TMA) for plain scores with max_logit"
         : scores & kTileBias     ? "Hopper kernel (wgmma, TMA) for a bias"
         : scores & kSoftcap      ? "Hopper kernel (wgmma, TMA) for softcap and ALiBi"
         : scores & kAlibi        ? "Hopper kernel (wgmma, TMA) for ALiBi without keys ahead of a query"
                                  : "Hopper kernel (wgmma, TMA) for plain scores";
}

// Refuses grids with more CTAs than one launch holds.
fa_status check_grid(int64_t ctas_per_head, int64_t heads, int64_t batch, ErrorText &error);

// L2-aware head order: the number of heads whose tiles are worked on together, in groups of equal size. A group is the heads whose tensors,
// of `head_bytes` each, take 1 / l2_divisor of the L2 cache, or `at_least` heads. `heads` is of one sequence.
int32_t l2_group_of(const Problem &problem, const Device &device, int64_t heads, int64_t head_bytes, int64_t at_least,
                    int64_t l2_divisor = 2);
// Bytes of K and V of a head.
inline int64_t kv_head_bytes(const Problem &p) {
  return p.k_lengths.max_len * (p.head_dim + p.head_dim_v) * dtype_bytes(p.k.dtype);
}

}  // namespace fa::cuda
