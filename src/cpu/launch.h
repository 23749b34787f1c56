// SPDX-License-Identifier: Apache-2.0
// All that the rest of the library sees of the CPU backend: plan, then run.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/append.h"
#include "core/parallel.h"
#include "core/score.h"
#include "core/status.h"

namespace fa::cpu {

// What a plan may depend on besides the problem. Results never depend on `threads`.
struct Machine {
  fa_cpu_isa isa = FA_CPU_ISA_PORTABLE;
  int32_t threads = 1;
};

// The instruction set that FA_CPU_ISA_AUTO stands for on this processor (and operating system), and whether it has a given one.
// Asking for AMX is what makes the operating system permit it to this process.
fa_cpu_isa best_isa();
bool has_isa(fa_cpu_isa isa);
// Whether its kernels multiply numbers of bf16, and compute nothing else: AMX, AVX512_BF16 and NEON_BF16.
bool multiplies_bf16(fa_cpu_isa isa);
// Whether its kernels, or on this processor those beside them, multiply numbers of fp16 where a sequence has very few queries: NEON_FHM and NEON_BF16.
bool multiplies_f16(fa_cpu_isa isa);
// What computes the problems for which `isa` has no kernels of its own: the best of the others where multiplies_bf16(isa), and for NEON_FHM.
fa_cpu_isa vector_isa(fa_cpu_isa isa);

// How a problem will run: pure function of problem shape and machine, reads no tensor data (so lengths count at their maxima).
struct Plan {
  const char *kernel = "";  // static string
  const char *reason = "";  // static string: why this kernel
  size_t workspace_bytes = 0;
  int32_t num_splits = 1;
  int32_t tasks = 1;  // scratch areas in the workspace = parallel tasks to start
};

Plan plan_forward(const ScoredForward &problem, const Machine &machine);
Plan plan_backward(const ScoredBackward &problem, const Machine &machine);
Plan plan_jvp(const JvpProblem &problem, const Machine &machine);
Plan plan_merge(const MergeProblem &problem, const Machine &machine);
Plan plan_append(const AppendProblem &problem, const Machine &machine);

// Run a plan. `workspace` is 256-byte aligned and holds plan.workspace_bytes of any content; merging and appending need none. Lengths and
// page tables have been checked. False if the host's parallel_for did not run every task.
bool forward(const ScoredForward &problem, const Machine &machine, const Plan &plan, void *workspace, Parallel &parallel);
bool backward(const ScoredBackward &problem, const Machine &machine, const Plan &plan, void *workspace, Parallel &parallel);
bool jvp(const JvpProblem &problem, const Machine &machine, const Plan &plan, void *workspace, Parallel &parallel);
bool merge(const MergeProblem &problem, const Machine &machine, const Plan &plan, Parallel &parallel);
bool append(const AppendProblem &problem, const Machine &machine, const Plan &plan, Parallel &parallel);

}  // namespace fa::cpu
