// SPDX-License-Identifier: Apache-2.0
// The forward pass and the merge: plans, workspace, and the way into the kernels of the chosen instruction set.
#include <algorithm>

#include "cpu/block_lists.h"
#include "cpu/forward_indices.h"
#include "cpu/forward_job.h"
#include "cpu/launch.h"

namespace fa::cpu {
namespace {

struct Kernels {
  void (*forward_worker)(const ForwardJob &job, int32_t worker);
  void (*merge_rows)(const MergeJob &job);
  const char *names[3];  // by ForwardMode
  const char *merge_name;
};

#define FA_KERNELS(isa)                                                                                           \
  {                                                                                                               \
    isa::forward_worker, isa::merge_rows, {"cpu_fwd_tiled_" #isa, "cpu_fwd_split_" #isa, "cpu_fwd_vector_" #isa}, \
        "cpu_merge_" #isa                                                                                         \
  }

const Kernels &kernels_of(fa_cpu_isa isa) {
  static constexpr Kernels kPortable = FA_KERNELS(portable);
#if defined(__x86_64__)
  static constexpr Kernels kAvx2 = FA_KERNELS(avx2), kAvx512 = FA_KERNELS(avx512);
#if defined(FA_HAVE_AVX512_BF16)
  static constexpr Kernels kAvx512Bf16 = FA_KERNELS(avx512_bf16);
  if (isa == FA_CPU_ISA_AVX512_BF16) return kAvx512Bf16;
#endif
#if defined(FA_HAVE_AMX)
  static constexpr Kernels kAmx = FA_KERNELS(amx);
  if (isa == FA_CPU_ISA_AMX) return kAmx;
#endif
  if (isa == FA_CPU_ISA_AVX512) return kAvx512;
  if (isa == FA_CPU_ISA_AVX2) return kAvx2;
#elif defined(FA_HAVE_NEON)
  static constexpr Kernels kNeon = FA_KERNELS(neon);
#if defined(FA_HAVE_NEON_BF16)
  static constexpr Kernels kNeonBf16 = FA_KERNELS(neon_bf16);
  if (isa == FA_CPU_ISA_NEON_BF16) return kNeonBf16;
#endif
#if defined(FA_HAVE_NEON_FHM)
  static constexpr Kernels kNeonFhm = FA_KERNELS(neon_fhm);
  if (isa == FA_CPU_ISA_NEON_FHM) return kNeonFhm;
#endif
#if defined(FA_HAVE_SVE256)
  static constexpr Kernels kSve256 = FA_KERNELS(sve256);
  if (isa == FA_CPU_ISA_SVE256) return kSve256;
#endif
  if (isa == FA_CPU_ISA_NEON) return kNeon;
#endif
  (void)isa;
  return kPortable;
}
#undef FA_KERNELS

// What computes a problem. It depends on dtypes alone, not on lengths: a sequence has the same bits alone and in any batch.
struct Choice {
  fa_cpu_isa isa = FA_CPU_ISA_PORTABLE;
  ForwardProducts products = ForwardProducts::kFma;
  VectorUnit unit = VectorUnit::kNone;
};

Choice choose(const MaskedProblem &p, const Machine &machine) {
  const bool same = p.k.dtype == p.q.dtype && p.v.dtype == p.q.dtype;
  const bool amx = machine.isa == FA_CPU_ISA_AMX, neon_bf16 = machine.isa == FA_CPU_ISA_NEON_BF16;
  const auto tiles = [&](bool vectors_by_tiles) -> Choice {
    const VectorUnit unit = neon_bf16 ? VectorUnit::kNeon : (vectors_by_tiles ? VectorUnit::kTiles : VectorUnit::kNone);
    return {machine.isa, ForwardProducts::kTiles, unit};
  };
  if (same && multiplies_bf16(machine.isa) && (p.q.dtype == Dtype::bf16 || (p.q.dtype == Dtype::f16 && amx)))
    return tiles(amx && p.q.dtype == Dtype::bf16);
  const bool bytes = p.k.dtype == p.v.dtype && (p.k.dtype == Dtype::i8 || p.k.dtype == Dtype::e4m3);
  const bool vectors_by_digits = amx && p.k.dtype == Dtype::i8;
  // Bytes are widened to bf16 where they are packed, but not on a processor with vectors of 256 bits on Arm: these widen as they load, which takes very few
  // queries fewer instructions. FA_FLAG_SAME_BITS has bytes in fp32, with few queries, too.
  const bool widens = multiplies_bf16(machine.isa) && (!neon_bf16 || vector_isa(machine.isa) == FA_CPU_ISA_NEON);
  if (bytes && !p.same_bits && p.q.dtype == Dtype::bf16 && widens) return tiles(vectors_by_digits);
  // Very few queries alone gain by the following, and FA_FLAG_SAME_BITS treats them as more.
  if (!p.same_bits) {
    if (bytes && vectors_by_digits) return {machine.isa, ForwardProducts::kFma, VectorUnit::kTiles};
    if (same && p.q.dtype == Dtype::f16 && multiplies_f16(machine.isa))
      return {FA_CPU_ISA_NEON_FHM, ForwardProducts::kFma, VectorUnit::kNeon};
  }
  return {vector_isa(machine.isa), ForwardProducts::kFma, VectorUnit::kNone};
}

// Tiles of AMX always have the largest blocks: what smaller ones cost there, where products take less time than reading packed keys, is not known.
int64_t block_rows_of(const ScoredForward &p, const Choice &choice, const Machine &machine) {
  const bool amx_tiles = choice.isa == FA_CPU_ISA_AMX && choice.products == ForwardProducts::kTiles;
  return block_rows(p, choice.products, amx_tiles ? 1 : machine.threads);
}

ForwardLayout layout_of(const ScoredForward &p, const Choice &choice, const Machine &machine, int32_t tasks) {
  return forward_layout(p, choice.products, block_rows_of(p, choice, machine), choice.unit, tasks);
}

// The tiled kernels beside an instruction set that multiplies for ForwardMode::kVector alone are those of the vectors that it is compiled with.
const char *name_of(const Choice &choice, ForwardMode mode) {
  fa_cpu_isa isa = choice.isa;
  if (choice.products == ForwardProducts::kFma && mode != ForwardMode::kVector) {
    if (choice.unit == VectorUnit::kNeon) isa = FA_CPU_ISA_NEON;
    if (choice.unit == VectorUnit::kTiles) isa = FA_CPU_ISA_AVX512;
  }
  return kernels_of(isa).names[static_cast<int>(mode)];
}

const char *reason_of(ForwardMode mode) {
  switch (mode) {
    case ForwardMode::kTiled:
      return "keys and values are packed once for all queries of a key head";
    case ForwardMode::kTiledSplit:
      return "the queries of a key head fit one block: segments of keys are shared among threads";
    case ForwardMode::kVector:
      return "very few queries a key head: dot products on unpacked keys, split among threads";
  }
  return "";
}

// Below this much work a second thread costs more than it brings.
constexpr double kParallelFlops = 2e6;

int32_t worker_count(const MaskedProblem &p, const Machine &machine, ForwardMode mode, int64_t block_rows) {
  const double flops = 2.0 * static_cast<double>(p.batch * p.heads_q) * static_cast<double>(p.q_lengths.max_len) *
                       static_cast<double>(p.k_lengths.max_len) * static_cast<double>(p.head_dim + p.head_dim_v);
  if (flops < kParallelFlops) return 1;
  const int64_t pieces = mode == ForwardMode::kTiled ? query_blocks(p.group, p.q_lengths.max_len, block_rows)
                                                     : (p.k_lengths.max_len + split_keys(mode) - 1) / split_keys(mode);
  return static_cast<int32_t>(std::clamp<int64_t>(p.batch * p.heads_k * std::max<int64_t>(pieces, 1), 1, machine.threads));
}

}  // namespace

Plan plan_forward(const ScoredForward &problem, const Machine &machine) {
  if (problem.key_indices.given) return plan_indices(problem, machine);
  const ForwardMode mode = forward_mode(problem, problem.group * problem.q_lengths.max_len);
  Plan plan;
  const Choice choice = choose(problem, machine);
  plan.kernel = name_of(choice, mode);
  plan.reason = reason_of(mode);
  plan.tasks = worker_count(problem, machine, mode, block_rows_of(problem, choice, machine));
  const ForwardLayout layout = layout_of(problem, choice, machine, plan.tasks);
  plan.num_splits = mode == ForwardMode::kTiled ? 1 : static_cast<int32_t>(layout.max_splits);
  plan.workspace_bytes = layout.total_bytes;
  return plan;
}

bool forward(const ScoredForward &problem, const Machine &machine, const Plan &plan, void *workspace, Parallel &parallel) {
  if (problem.key_indices.given) return forward_indices(problem, machine, plan, workspace, parallel);
  const Choice choice = choose(problem, machine);
  ForwardJob job;
  job.problem = &problem;
  job.layout = layout_of(problem, choice, machine, plan.tasks);
  job.workspace = static_cast<char *>(workspace);
  make_block_list_bits(problem, reinterpret_cast<uint64_t *>(job.workspace + job.layout.list_bits_at));
  Schedule schedule(workspace, job.layout.slots, problem.batch * problem.heads_k);
  job.schedule = &schedule;

  struct Context {
    const ForwardJob &job;
    const Kernels &kernels;
  } context{job, kernels_of(choice.isa)};
  return parallel.run(
      plan.tasks,
      [](void *c, int32_t task) {
        const auto &[j, kernels] = *static_cast<Context *>(c);
        kernels.forward_worker(j, task);
      },
      &context);
}

Plan plan_merge(const MergeProblem &problem, const Machine &machine) {
  constexpr int64_t kParallelRows = 256;  // with fewer rows for each, a second thread costs more than it brings
  const int64_t rows = problem.batch * problem.seqlen_q * problem.heads_q;
  Plan plan;
  plan.kernel = kernels_of(machine.isa).merge_name;
  plan.reason = "the parts of a row are combined one row at a time";
  plan.tasks = static_cast<int32_t>(std::clamp<int64_t>(rows / kParallelRows, 1, machine.threads));
  return plan;
}

bool merge(const MergeProblem &problem, const Machine &machine, const Plan &plan, Parallel &parallel) {
  struct Context {
    const MergeProblem &problem;
    const Kernels &kernels;
    int64_t rows;
    int32_t tasks;
  } context{problem, kernels_of(machine.isa), problem.batch * problem.seqlen_q * problem.heads_q, plan.tasks};
  return parallel.run(
      context.tasks,
      [](void *c, int32_t task) {
        const auto &[problem, kernels, rows, tasks] = *static_cast<Context *>(c);
        kernels.merge_rows({&problem, rows * task / tasks, rows * (task + 1) / tasks});
      },
      &context);
}

}  // namespace fa::cpu
