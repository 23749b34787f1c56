// SPDX-License-Identifier: Apache-2.0
// The only place that decides which family of kernels serves a problem. Within a family the first row of its table serves that can
// (registry.h), unless its planner says otherwise.
#include <algorithm>
#include <cinttypes>
#include <tuple>

#include "core/backend.h"
#include "cuda/common/operand.h"
#include "cuda/host/key_lists.h"
#include "cuda/host/kv_copy.h"
#include "cuda/host/planners.h"
#include "cuda/kernels/cell_map/cell_map.h"
#include "cuda/kernels/decode/shared_storage.h"

namespace fa::cuda {
namespace {

// Makes room for the cell map of a problem's masks behind the rest of a plan's workspace, if its kernel reads one.
template <typename Plan>
fa_status plan_cell_map(const MaskedProblem &p, bool backward, Plan &plan, ErrorText &error) {
  if (!has_data_mask(p) || (kernel_of(plan).scores & kDataMask) == 0) return FA_OK;
  DataMask mask;
  int64_t planes = 0;
  const size_t bytes = describe_cell_map(p, backward, nullptr, mask, planes);
  if (planes > INT32_MAX / 4 / std::max<int64_t>(int64_t{mask.by_query.rows} * mask.by_query.words, 1)) {
    return fail(error, FA_ERROR_UNSUPPORTED,
                "%" PRId64 " masks of %" PRId64 " x %" PRId64 " pairs have more cells than one launch holds", planes,
                p.q_lengths.max_len, p.k_lengths.max_len);
  }
  plan.cell_map = true;
  plan.cell_map_offset = align_up(plan.workspace_bytes);
  plan.workspace_bytes = plan.cell_map_offset + bytes;
  return FA_OK;
}

const char *dtype_name(Dtype dtype) {
  constexpr const char *kNames[] = {"float32", "float16", "bfloat16", "float8_e4m3", "int8"};
  return kNames[static_cast<int>(dtype)];
}

bool is_16_bit(Dtype dtype) { return dtype == Dtype::f16 || dtype == Dtype::bf16; }

// What no CUDA kernel takes, whatever the pass.
fa_status check_limits(const Problem &p, ErrorText &error) {
  constexpr int64_t kMaxRows = Diagonal<int32_t>::kLongest;
  if (p.q_lengths.max_len > kMaxRows || p.group > kMaxRows / std::max<int64_t>(p.q_lengths.max_len, 1) ||
      p.k_lengths.max_len > kMaxRows) {
    return fail(error, FA_ERROR_UNSUPPORTED,
                "seqlen_q is %" PRId64 " and seqlen_k %" PRId64 "; CUDA kernels count rows and keys up to 2^30 - 1024",
                p.q_lengths.max_len, p.k_lengths.max_len);
  }
  return FA_OK;
}

// Refuses by name what no kernel for FA_FLAG_SAME_BITS offers. core/validate.cpp has refused what no device covers.
fa_status check_same_bits(const ForwardProblem &p, const Needs &needs, const Device &device, ErrorText &error) {
  if (!p.same_bits) return FA_OK;
  const int32_t contract = same_bits_contract(needs, device);
  const KernelRow &offer = same_bits_offer(contract, needs.operands);
  const ScoreSet scores = needs.scores & ~offer.scores;
  const FeatureSet features = needs.features & ~offer.features & ~kEmpty;
  const bool kv_8bit = is_quantised(p.k.dtype);
  if (offer.operands == 0 || (features & kFp32RowResults) != 0) {
    for (const auto &[name, tensor] : {std::pair{"q", &p.q}, {"k", &p.k}, {"out", &p.out}}) {
      if (is_16_bit(tensor->dtype)) continue;
      return fail(error, FA_ERROR_UNSUPPORTED, "%s.dtype is %s; FA_FLAG_SAME_BITS covers float16 and bfloat16 on CUDA%s", name,
                  dtype_name(tensor->dtype),
                  kv_8bit ? ", and on Hopper float8_e4m3 and int8 of k and v alone, with plain scores, softcap and ALiBi" : "");
    }
  }
  if (p.head_dim > offer.head_dim || p.head_dim_v > offer.head_dim_v) {
    return fail(error, FA_ERROR_UNSUPPORTED,
                "head_dim is %" PRId64 ", and %" PRId64 " of v; FA_FLAG_SAME_BITS covers up to %d%s on CUDA", p.head_dim,
                p.head_dim_v, int{offer.head_dim},
                contract == kLatentContract ? ", and 512 of v, with v in the rows of k"
                : kv_8bit                   ? " with k and v of 8 bits"
                                            : "");
  }
  if ((features & kDescalePerRow) != 0) {
    return fail(error, FA_ERROR_UNSUPPORTED,
                "%s_descale has a number for each row; FA_FLAG_SAME_BITS covers one for each sequence and head on CUDA",
                p.k_descale.per_row ? "k" : "v");
  }
  if ((scores & kMaxLogit) != 0) {
    return fail(error, FA_ERROR_UNSUPPORTED,
                "max_logit is given, which FA_FLAG_SAME_BITS does not cover on Hopper without a bias or a mask as data");
  }
  for (const auto &[name, tensor, columns] :
       {std::tuple{"q", &p.q, p.head_dim}, {"k", &p.k, p.head_dim}, {"v", &p.v, p.head_dim_v}}) {
    if ((features & kUnalignedRows) == 0 || has_16_byte_rows(*tensor, columns)) continue;
    return fail(error, FA_ERROR_UNSUPPORTED,
                "%s has rows of %" PRId64
                " columns that are not whole vectors of 16 bytes; FA_FLAG_SAME_BITS covers only such rows on Hopper",
                name, columns);
  }
  if ((features & kHugePackedKv) != 0) {
    return fail(error, FA_ERROR_UNSUPPORTED, "k has %" PRId64 " packed rows; FA_FLAG_SAME_BITS covers up to 2^31 - 1 on Hopper",
                p.k_lengths.total);
  }
  if (scores != 0 || features != 0) {
    return fail(error, FA_ERROR_UNSUPPORTED, "FA_FLAG_SAME_BITS does not cover score terms %#x and features %#x on CUDA",
                unsigned{scores}, unsigned{features});
  }
  return FA_OK;
}
// A backward covers what its forward does.
fa_status check_same_bits(const BackwardProblem &b, const Device &device, ErrorText &error) {
  if (!b.forward.same_bits) return FA_OK;
  ForwardProblem forward;
  static_cast<MaskedProblem &>(forward) = b.forward;
  Needs needs = needs_of(forward);
  needs.features |= kSeparateV;  // no backward has V in the rows of K
  return check_same_bits(forward, needs, device, error);
}

// Forward: the first line that applies and has a kernel.
//
//   FA_FLAG_SAME_BITS     kNoSplitsContract                             sm80
//   FA_FLAG_SAME_BITS     kLatentContract                               mla
//   FA_FLAG_SAME_BITS     tiles for half of the device, unless          sm90
//                         beats_sm90() prefers the next
//   FA_FLAG_SAME_BITS     any                                           extend
//   K and V               rows and queries                              kernels
//   8-bit                 where copying_is_better()                     sm90 (16-bit copy)
//   any                   more than 32 rows, or masks as data, of       extend
//                         8-bit K and V or of at most 16 queries
//   any                   any, but of latent caches 16, where mla       decode
//                         takes more
//   any                   any                                           mla
//   8-bit                 any                                           sm90 (fp8), any device
//   16-bit, pages that    extend_reads_pages_better() or not            extend, sm90
//   both can read
//   16-bit, masks         beats_sm90() or not                           extend, sm90
//   16-bit, fp32          any, unless beats_sm90() prefers the next     sm90
//   fp32                  any, unless beats_sm90_fp32() prefers it      sm90_fp32
//   16-bit, fp32          any                                           extend, any device
//
// Rows are queries times the query heads of a group: decode kernels do best while one tile of them is enough.
fa_status choose(const ForwardProblem &p, const Needs &needs, const Device &device, ForwardPlan &plan, ErrorText &error) {
  constexpr int64_t kFewRows = 32, kFewQueries = 16;
  const bool kv_8bit = is_quantised(p.k.dtype);
  plan = {};
  if ((needs.features & kSameBits) != 0) {
    const int32_t contract = same_bits_contract(needs, device);
    const auto too_large = [&] {
      return fail(error, FA_ERROR_UNSUPPORTED,
                  "batch %" PRId64 " x %" PRId64 " heads are more than one launch of the kernel for FA_FLAG_SAME_BITS holds",
                  p.batch, p.heads_k);
    };
    if (contract == kNoSplitsContract) return plan_any_device(p, needs, device, plan, error);
    if (contract == kLatentContract) return plan_mla(p, needs, device, plan) ? FA_OK : too_large();
    // Both have the same arithmetic. With tiles for less than half of the device those of extend are faster.
    ForwardPlan sm90;
    const bool hopper = plan_sm90(p, needs, device, sm90), extend = plan_extend(p, needs, device, plan);
    const auto extend_is_better = [&] {
      if (reads_pages_by_heads(sm90)) return extend_reads_pages_better(p, device, plan, sm90);
      return sm90.tiles * 2 < device.multiprocessors || beats_sm90(p, device, plan, sm90);
    };
    if (hopper && (!extend || !extend_is_better())) {
      plan = sm90;
      return FA_OK;
    }
    return extend ? FA_OK : too_large();
  }
  // Several row blocks of `plan`, each of which reads all keys, by a kernel with larger tiles.
  const auto take_larger_tiles = [&] {
    ForwardPlan larger;
    if (plan.row_blocks == 1) return FA_OK;
    const bool is_better = decode::is_latent(static_cast<int32_t>(p.head_dim))
                               ? plan_mla(p, needs, device, larger)
                               : kv_8bit && plan_sm90(p, needs, device, larger) && copying_is_better(p, device, plan, larger);
    if (is_better) plan = larger;
    return FA_OK;
  };
  const bool masked = (needs.scores & kMasked) != 0;  // no decode kernel is for masks as data
  if ((p.q_lengths.max_len <= kFewQueries || kv_8bit) && (p.q_lengths.max_len * p.group > kFewRows || masked) &&
      plan_extend(p, needs, device, plan)) {
    return take_larger_tiles();
  }
  if (plan_decode(p, needs, device, plan)) return take_larger_tiles();
  if (plan_mla(p, needs, device, plan)) return FA_OK;
  if (kv_8bit) return plan_sm90(p, needs, device, plan) ? FA_OK : plan_any_device(p, needs, device, plan, error);
  ForwardPlan sm90, extend;
  const bool hopper = plan_sm90(p, needs, device, sm90);
  if (hopper && (reads_pages_by_heads(sm90) || masked) && plan_extend(p, needs, device, extend)) {
    const bool extend_is_better =
        masked ? beats_sm90(p, device, extend, sm90) : extend_reads_pages_better(p, device, extend, sm90);
    plan = extend_is_better ? extend : sm90;
    return FA_OK;
  }
  const fa_status status = plan_any_device(p, needs, device, plan, error);
  if (hopper && (status != FA_OK || !beats_sm90(p, device, plan, sm90))) {
    plan = sm90;
    return FA_OK;
  }
  ForwardPlan fp32;
  if (plan_sm90_fp32(p, needs, device, fp32) && (status != FA_OK || !beats_sm90_fp32(p, device, plan, fp32))) {
    plan = fp32;
    return FA_OK;
  }
  if (!plan_extend(p, needs, device, extend)) return status;
  plan = extend;
  return FA_OK;
}

// Backward: Hopper's kernels, else those that every device runs.
fa_status choose(const BackwardProblem &b, const Needs &needs, const Device &device, BackwardPlan &plan, ErrorText &error) {
  bool found = false;
  plan = {};
  FA_RETURN_IF_ERROR(plan_backward_sm90(b, needs, device, found, plan, error));
  if (!found) FA_RETURN_IF_ERROR(plan_backward_sm90_fp32(b, needs, device, found, plan, error));
  return found ? FA_OK : plan_backward_any_device(b, needs, device, plan, error);
}

// The forward-mode derivative has kernels for Hopper alone.
fa_status choose(const JvpProblem &j, const Needs &needs, const Device &device, JvpPlan &plan, ErrorText &error) {
  plan = {};
  return plan_jvp_sm90(j, needs, device, plan, error);
}

// Whether a build has every kernel of a plan, besides those that every build has. A score text compiles the kernel of the
// forward, whether the build has its instance or not; that of the backward needs the instance's kernel for dq.
bool is_built(const ForwardPlan &plan, const Needs &needs, const Device &device, Dtype dtype) {
  return (needs.scores & kScoreText) != 0 || device.is_built(kernel_of(plan), dtype);
}
bool is_built(const BackwardPlan &plan, const Needs &, const Device &device, Dtype dtype) {
  return device.is_built(kernel_of(plan), dtype) &&
         (plan.nan_safe_shape < 0 ||
          device.is_built(kernels_of(plan.family, Pass::backward)[static_cast<size_t>(plan.nan_safe_shape)], dtype)) &&
         (plan.dbias_shape < 0 ||
          device.is_built(kernels_of(Family::sm80, Pass::backward)[static_cast<size_t>(plan.dbias_shape)], dtype));
}
bool is_built(const JvpPlan &plan, const Needs &, const Device &device, Dtype dtype) {
  return device.is_built(kernel_of(plan), dtype);
}

// The best kernel of a complete build, if this build has it; else the best of those that it has; else a refusal that names the instance.
template <typename AnyProblem, typename Plan>
fa_status choose_built(const AnyProblem &problem, const Needs &needs, const Device &device, Plan &plan, ErrorText &error) {
  Device complete = device;
  complete.is_built = everything_is_built;
  FA_RETURN_IF_ERROR(choose(problem, needs, complete, plan, error));
  const KernelRow &best = kernel_of(plan);
  const Dtype dtype = instance_dtype(best, needs.q, needs.out);
  if (is_built(plan, needs, device, dtype) || choose(problem, needs, device, plan, error) == FA_OK) return FA_OK;
  return fail(error, FA_ERROR_NOT_BUILT,
              "this build (FA_ONLY) leaves out the kernel for this problem, %s, and every other that could run it",
              instance_name(best, dtype).c_str());
}

// "; not aligned for 16-byte vectors: k, v", naming the tensors that are accessed element by element, or "" if there are none.
std::string by_elements(std::initializer_list<std::pair<const char *, bool>> tensors) {
  std::string names;
  for (const auto &[name, vectors] : tensors) {
    if (!vectors) names += (names.empty() ? "" : ", ") + std::string(name);
  }
  return names.empty() ? "" : "; not aligned for 16-byte vectors: " + names;
}

// FA_FLAG_BATCH_INVARIANT of packed queries, for which Hopper has no kernels without FA_FLAG_SAME_BITS: those with it give more than is asked for. Lengths have
// no say here: with all of them a sequence gets the same bits.
void take_same_bits(const ForwardProblem &p, const Device &device, ForwardPlan &plan) {
  if (!p.batch_invariant || p.same_bits || (plan.family != Family::sm80 && plan.family != Family::simt)) return;
  ForwardProblem with_flag = p;
  with_flag.same_bits = with_flag.deterministic = true;
  ForwardPlan other;
  ErrorText refusal;
  if (plan_forward(with_flag, device, other, refusal) == FA_OK && other.family != Family::sm80 && other.family != Family::simt)
    plan = other;
}

// Makes `plan` that of a copy of K and V without pages in the type of the queries where it takes less time than `in_place`, whose kernel reads pages or
// 8-bit numbers themselves: few kernels for Hopper read pages, and few for tensor cores 8-bit numbers. Returns whether it does.
bool plan_contiguous_copy(const ForwardProblem &p, const Device &device, const ForwardPlan &in_place, ForwardPlan &plan) {
  const bool kv_8bit = is_quantised(p.k.dtype);
  const bool reads_slowly = in_place.family == Family::simt || in_place.family == Family::sm80 ||
                            (kv_8bit && in_place.family == Family::decode) ||
                            (in_place.family == Family::extend && (kv_8bit || (kernel_of(in_place).scores & kMasked) != 0));
  if (!reads_slowly || p.q.dtype == Dtype::e4m3 || (p.page_table == nullptr && p.k.dtype == p.q.dtype) || p.batch_invariant ||
      p.score_text.given || p.finds_listed_keys || p.rows_per_page != 0 || !copying_may_be_better(p, in_place)) {
    return false;
  }
  // Rounded into a copy of 16 bits, descales would cost more than is allowed (docs/notes/2026-11-30-cpu-8bit-prompts.md).
  const bool has_descales = p.k_descale.factors.data != nullptr || p.v_descale.factors.data != nullptr;
  if (kv_8bit && has_descales && p.q.dtype != Dtype::f32) return false;
  const int64_t keys = copied_keys_of(p);
  if (keys < 0) return false;
  // A plan reads no addresses, but asks how they are aligned.
  void *const workspace = reinterpret_cast<void *>(kWorkspaceAlignment);
  ForwardPlan contiguous;
  ErrorText no_kernel;
  if (plan_forward(with_copied_kv(p, keys, workspace), device, contiguous, no_kernel) != FA_OK ||
      !copying_is_better(p, device, in_place, contiguous)) {
    return false;
  }
  plan = contiguous;
  plan.contiguous_copy = true;
  plan.copied_keys = keys;
  plan.copy_offset = align_up(plan.workspace_bytes);
  plan.workspace_bytes = plan.copy_offset + copied_kv_bytes(p, keys);
  return true;
}

// The plan of a kernel that reads K and V where they are.
fa_status plan_in_place(const ForwardProblem &p, const Device &device, ForwardPlan &plan, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_limits(p, error));
  const Needs needs = needs_of(p);
  FA_RETURN_IF_ERROR(check_same_bits(p, needs, device, error));
  FA_RETURN_IF_ERROR(choose_built(p, needs, device, plan, error));
  FA_RETURN_IF_ERROR(plan_cell_map(p, /*backward=*/false, plan, error));
  plan.vector = needs.vector;
  if (plan.family == Family::simt) {  // these kernels take care of the end of a row themselves
    plan.vector.q = has_16_byte_rows(p.q, 0);
    plan.vector.k = has_16_byte_rows(p.k, 0);
    plan.vector.v = has_16_byte_rows(p.v, 0);
    plan.vector.out = has_16_byte_rows(p.out, 0);
  }
  return FA_OK;
}

// The plan of the single queries of a problem with kv_indices, and room for their page tables behind the rest of its workspace. A kernel that
// finds the keys by itself needs no tables.
fa_status plan_key_lists(const ForwardProblem &p, const Device &device, ForwardPlan &plan, ErrorText &error) {
  // A plan reads no addresses, but asks which tensors there are.
  void *const workspace = reinterpret_cast<void *>(kWorkspaceAlignment);
  ForwardProblem single;
  KeyListParams params;
  size_t bytes = 0;
  FA_RETURN_IF_ERROR(check_limits(p, error));
  if (finds_listed_keys(p)) {
    FA_RETURN_IF_ERROR(list_keys(p, /*kernel_finds_keys=*/true, workspace, single, params, bytes, error));
    ErrorText no_kernel;
    if (plan_forward(single, device, plan, no_kernel) == FA_OK) {
      plan.key_lists = plan.finds_listed_keys = true;
      return FA_OK;
    }
  }
  FA_RETURN_IF_ERROR(list_keys(p, /*kernel_finds_keys=*/false, workspace, single, params, bytes, error));
  FA_RETURN_IF_ERROR(plan_forward(single, device, plan, error));
  plan.key_lists = true;
  plan.key_lists_offset = align_up(plan.workspace_bytes);
  plan.workspace_bytes = plan.key_lists_offset + bytes;
  return FA_OK;
}

}  // namespace

fa_status plan_forward(const ForwardProblem &p, const Device &device, ForwardPlan &plan, ErrorText &error) {
  if (p.key_indices.given) return plan_key_lists(p, device, plan, error);
  const fa_status status = plan_in_place(p, device, plan, error);
  if (status != FA_OK && status != FA_ERROR_NOT_BUILT) return status;
  ForwardPlan best = plan;
  if (status == FA_OK) {
    take_same_bits(p, device, plan);
    best = plan;
  } else {
    Device complete = device;
    complete.is_built = everything_is_built;
    ErrorText refusal;
    if (plan_in_place(p, complete, best, refusal) != FA_OK) return status;
  }
  return plan_contiguous_copy(p, device, best, plan) ? FA_OK : status;
}

fa_status plan_backward(const BackwardProblem &b, const Device &device, BackwardPlan &plan, ErrorText &error) {
  const Problem &p = b.forward;
  if (b.empty()) {
    plan = BackwardPlan{};
    plan.family = Family::none;
    plan.reason = "no gradient is asked for";
    return FA_OK;
  }
  FA_RETURN_IF_ERROR(check_limits(p, error));
  FA_RETURN_IF_ERROR(check_same_bits(b, device, error));
  constexpr int64_t kMaxBackward = 512;
  if (p.head_dim > kMaxBackward) {
    return fail(error, FA_ERROR_UNSUPPORTED, "head_dim is %" PRId64 "; CUDA kernels for backward go up to %" PRId64, p.head_dim,
                kMaxBackward);
  }
  const Needs needs = needs_of(b);
  FA_RETURN_IF_ERROR(choose_built(b, needs, device, plan, error));
  FA_RETURN_IF_ERROR(plan_cell_map(b.forward, /*backward=*/true, plan, error));
  plan.vector = needs.vector;
  if (plan.family == Family::simt) {
    plan.vector.q = has_16_byte_rows(p.q, 0);
    plan.vector.k = has_16_byte_rows(p.k, 0);
    plan.vector.v = has_16_byte_rows(p.v, 0);
    plan.vector.dout = has_16_byte_rows(b.dout, 0);
    plan.vector.dq = has_16_byte_rows(b.dq, 0);
    plan.vector.dk = has_16_byte_rows(b.dk, 0);
    plan.vector.dv = has_16_byte_rows(b.dv, 0);
  }
  return FA_OK;
}

fa_status plan_jvp(const JvpProblem &j, const Device &device, JvpPlan &plan, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_limits(j.forward, error));
  const Needs needs = needs_of(j);
  FA_RETURN_IF_ERROR(choose_built(j, needs, device, plan, error));
  plan.vector = needs.vector;
  return FA_OK;
}

std::string kernel_name(const Problem &p, const ForwardPlan &plan) {
  const bool split = plan.num_splits > 1;
  return kernel_name(kernel_of(plan), p.q.dtype, p.k.dtype, p.out.dtype) + (plan.scored ? "_score" : "") +
         (plan.key_lists && !plan.finds_listed_keys ? "_listed" : "") + (split ? "_split" : "");
}

std::string kernel_name(const BackwardProblem &b, const BackwardPlan &plan) {
  if (plan.family == Family::none) return "none";
  const Problem &p = b.forward;
  const bool ordered = p.deterministic && plan.family != Family::simt;
  return kernel_name(kernel_of(plan), p.q.dtype, p.k.dtype, p.out.dtype) + (plan.scored ? "_score" : "") +
         (ordered ? "_ordered" : "");
}

std::string kernel_name(const JvpProblem &j, const JvpPlan &plan) {
  const Problem &p = j.forward;
  return kernel_name(kernel_of(plan), p.q.dtype, p.k.dtype, p.out.dtype);
}

std::string reason_of(const ForwardPlan &plan) {
  const std::string reason =
                        std::string(plan.key_lists         ? "every query is a sequence of the keys that it lists; "
                                    : plan.contiguous_copy ? "on a copy of K and V without pages, in the type of the queries; "
                                                           : "") +
                        plan.reason,
                    out = by_elements({{"out", plan.vector.out}});
  switch (plan.family) {
    case Family::sm90:
      return reason + (plan.tma_out ? "; TMA stores out" : "; registers store out") + (plan.tma_out ? "" : out);
    case Family::decode:
      return reason + (plan.tma_kv ? "; TMA loads K and V" : "") + out;
    case Family::extend:
    case Family::mla:
      return reason + (plan.tma_kv ? "; TMA loads K and V" : "; cp.async gathers the rows of K and V") + out;
    default:
      return reason + by_elements({{"q", plan.vector.q}, {"k", plan.vector.k}, {"v", plan.vector.v}, {"out", plan.vector.out}});
  }
}

std::string reason_of(const BackwardPlan &plan) {
  if (plan.family == Family::none) return plan.reason;
  const VectorAccess &vector = plan.vector;
  const bool hopper = plan.family == Family::sm90, cuda_cores = plan.family == Family::simt;
  return plan.reason + by_elements({{"q", vector.q},
                                    {"k", vector.k},
                                    {"v", vector.v},
                                    {"dout", vector.dout},
                                    {"dq", vector.dq || !cuda_cores},  // others write dq from their accumulator, by elements
                                    {"dk", vector.dk || !(hopper || cuda_cores)},
                                    {"dv", vector.dv || !(hopper || cuda_cores)}});
}

std::string reason_of(const JvpPlan &plan) {
  return plan.reason + by_elements({{"out", plan.vector.out}, {"tout", plan.vector.tout}});
}

fa_status plan_forward(const ScoredForward &problem, const Device &device, ForwardPlan &plan, ErrorText &error) {
  FA_RETURN_IF_ERROR(plan_forward(static_cast<const ForwardProblem &>(problem), device, plan, error));
  plan.scored = problem.score != nullptr;
  return FA_OK;
}

fa_status plan_backward(const ScoredBackward &problem, const Device &device, BackwardPlan &plan, ErrorText &error) {
  FA_RETURN_IF_ERROR(plan_backward(static_cast<const BackwardProblem &>(problem), device, plan, error));
  plan.scored = problem.score != nullptr && plan.family != Family::none;
  return FA_OK;
}

}  // namespace fa::cuda
