// SPDX-License-Identifier: Apache-2.0
// New rows for a cache: the plan, and the way into the kernel of the chosen instruction set.
#include <algorithm>

#include "cpu/append_job.h"
#include "cpu/launch.h"

namespace fa::cpu {
namespace {

struct Kernel {
  void (*run)(const AppendJob &job);
  const char *name;
};

Kernel kernel_of(fa_cpu_isa isa) {
#if defined(__x86_64__)
  if (isa == FA_CPU_ISA_AVX512) return {avx512::append_rows, "cpu_append_avx512"};
  if (isa == FA_CPU_ISA_AVX2) return {avx2::append_rows, "cpu_append_avx2"};
#elif defined(FA_HAVE_NEON)
#if defined(FA_HAVE_SVE256)
  if (isa == FA_CPU_ISA_SVE256) return {sve256::append_rows, "cpu_append_sve256"};
#endif
  if (isa == FA_CPU_ISA_NEON) return {neon::append_rows, "cpu_append_neon"};
#endif
  (void)isa;
  return {portable::append_rows, "cpu_append_portable"};
}

// Below this many bytes a task a second thread costs more than it brings.
constexpr double kTaskBytes = 64 * 1024;

int32_t task_count(const AppendProblem &p, const Machine &machine) {
  const int64_t columns = (p.heads_q + p.heads_k) * p.head_dim + p.heads_k * p.head_dim_v;
  const double bytes = static_cast<double>(p.rows) * static_cast<double>(columns) * dtype_bytes(p.k.dtype);
  const double tasks = std::min(bytes / kTaskBytes, static_cast<double>(std::min<int64_t>(machine.threads, p.rows)));
  return std::max(static_cast<int32_t>(tasks), 1);
}

}  // namespace

Plan plan_append(const AppendProblem &problem, const Machine &machine) {
  Plan plan;
  plan.kernel = kernel_of(vector_isa(machine.isa)).name;
  plan.reason = "new rows are copied, rotated and quantised one row at a time";
  plan.tasks = task_count(problem, machine);
  return plan;
}

bool append(const AppendProblem &problem, const Machine &machine, const Plan &plan, Parallel &parallel) {
  struct Context {
    const AppendProblem &problem;
    Kernel kernel;
    int32_t tasks;
  } context{problem, kernel_of(vector_isa(machine.isa)), plan.tasks};
  if (problem.seqused_k != nullptr) {
    for (int64_t b = 0; b < problem.batch; ++b) {
      problem.seqused_k[b * problem.seqused_k_stride] =
          static_cast<int32_t>(appended_length(problem, append_sequence(problem, b)));
    }
  }
  if (problem.rows == 0) return true;
  return parallel.run(
      context.tasks,
      [](void *c, int32_t task) {
        const auto &[p, kernel, tasks] = *static_cast<Context *>(c);
        kernel.run({&p, p.rows * task / tasks, p.rows * (task + 1) / tasks});
      },
      &context);
}

}  // namespace fa::cpu
