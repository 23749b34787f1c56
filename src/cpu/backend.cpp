// SPDX-License-Identifier: Apache-2.0
// The CPU as a backend: settings, threads and scratch memory around the kernels of launch.h.
#include "core/backend.h"

#include <cstdio>
#include <limits>

#include "core/validate.h"
#include "cpu/forward_layout.h"
#include "cpu/host.h"
#include "cpu/launch.h"
#include "cpu/own_workspace.h"
#include "cpu/row_device.h"
#include "cpu/thread_pool.h"

namespace fa {
namespace cpu {
namespace {

constexpr int32_t kMaxThreads = 4096;

// Whether no sequence of one side has a row, however many sequences there are: 2^40 empty ones are a legal problem, not worth a loop.
bool no_rows(const Lengths &lengths) { return lengths.max_len == 0; }

bool nothing_to_write(const MaskedProblem &problem) { return no_rows(problem.q_lengths); }

bool nothing_to_write(const ScoredBackward &problem) {
  const bool rows_q = problem.dq.data != nullptr && !no_rows(problem.forward.q_lengths);
  const bool rows_k = (problem.dk.data != nullptr || problem.dv.data != nullptr) && !no_rows(problem.forward.k_lengths);
  return !rows_q && !rows_k && problem.dbias.data == nullptr && problem.dsink == nullptr;
}

// Kernels raise max_logit from here.
void start_max_logit(const ScoredForward &problem) {
  if (problem.max_logit == nullptr) return;
  for (int64_t h = 0; h < problem.heads_q; ++h) {
    problem.max_logit[h * problem.max_logit_stride] = -std::numeric_limits<float>::infinity();
  }
}

fa_status check_derivative(const ScoreCall *score, ErrorText &error) {
  if (score == nullptr || !score->changes_scores()) return FA_OK;
  if (score->source.derivative != nullptr || score->source.run_backward != nullptr) return FA_OK;
  return fail(error, FA_ERROR_INVALID_ARGUMENT,
              "score was created with source.derivative and source.run_backward NULL; backward on the CPU needs one of them");
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(const Machine &machine, std::unique_ptr<Parallel> parallel) : machine_(machine), parallel_(std::move(parallel)) {}

  void describe(fa_device_properties &properties) const override {
    properties.device_type = FA_DEVICE_CPU;
    properties.num_threads = machine_.threads;
    properties.cpu_isa = machine_.isa;
    properties.memory_bytes = memory_bytes();
    std::snprintf(properties.name, sizeof properties.name, "%s", processor_name().c_str());
  }

  fa_status accept(const fa_score_source &source, ErrorText &error) const override {
    if (source.score != nullptr || source.run != nullptr || source.visible != nullptr || source.run_visible != nullptr ||
        source.tile != nullptr) {
      return FA_OK;
    }
    return fail(
        error, FA_ERROR_INVALID_ARGUMENT,
        "source.score, run, visible, run_visible and tile are NULL; a CPU context needs functions and does not run text");
  }

  fa_status plan(const ScoredForward &problem, PlanSummary &summary, ErrorText &) const override {
    summary = summarise(plan_forward(problem, machine_), problem);
    return FA_OK;
  }
  fa_status plan(const ScoredBackward &problem, PlanSummary &summary, ErrorText &error) const override {
    FA_RETURN_IF_ERROR(check_derivative(problem.score, error));
    summary = summarise(plan_backward(problem, machine_), problem.forward);
    return FA_OK;
  }
  fa_status plan(const JvpProblem &problem, PlanSummary &summary, ErrorText &) const override {
    summary = summarise(plan_jvp(problem, machine_));
    return FA_OK;
  }
  fa_status plan(const MergeProblem &problem, PlanSummary &summary, ErrorText &) const override {
    summary = summarise(plan_merge(problem, machine_));
    return FA_OK;
  }
  fa_status plan(const AppendProblem &problem, PlanSummary &summary, ErrorText &) const override {
    summary = summarise(plan_append(problem, machine_));
    return FA_OK;
  }

  fa_status prepare(const ScoredForward &, const Pointers &, ErrorText &) override { return FA_OK; }
  fa_status prepare(const ScoredBackward &problem, const Pointers &, ErrorText &error) override {
    return check_derivative(problem.score, error);
  }
  fa_status prepare(const JvpProblem &, const Pointers &, ErrorText &) override { return FA_OK; }
  fa_status prepare(const MergeProblem &, const Pointers &, ErrorText &) override { return FA_OK; }
  fa_status prepare(const AppendProblem &, const Pointers &, ErrorText &) override { return FA_OK; }

  fa_status run(const ScoredForward &problem, const Call &call, ErrorText &error) override {
    const Plan plan = plan_forward(problem, machine_);
    Workspace workspace = call.workspace;
    FA_RETURN_IF_ERROR(take_workspace(workspace, plan.workspace_bytes, error));
    FA_RETURN_IF_ERROR(check_host_contents(problem, error));
    start_max_logit(problem);
    if (nothing_to_write(problem)) return FA_OK;
    return finished(forward(problem, machine_, plan, workspace.data, *parallel_), error);
  }

  fa_status run(const ScoredBackward &problem, const Call &call, ErrorText &error) override {
    FA_RETURN_IF_ERROR(check_derivative(problem.score, error));
    const Plan plan = plan_backward(problem, machine_);
    Workspace workspace = call.workspace;
    FA_RETURN_IF_ERROR(take_workspace(workspace, plan.workspace_bytes, error));
    FA_RETURN_IF_ERROR(check_host_contents(problem.forward, error));
    if (nothing_to_write(problem)) return FA_OK;
    if (call.steps != nullptr) FA_RETURN_IF_ERROR(call.steps->before_keys());
    return finished(backward(problem, machine_, plan, workspace.data, *parallel_), error);
  }

  fa_status run(const JvpProblem &problem, const Call &call, ErrorText &error) override {
    const Plan plan = plan_jvp(problem, machine_);
    Workspace workspace = call.workspace;
    FA_RETURN_IF_ERROR(take_workspace(workspace, plan.workspace_bytes, error));
    FA_RETURN_IF_ERROR(check_host_contents(problem.forward, error));
    if (nothing_to_write(problem.forward)) return FA_OK;
    return finished(jvp(problem, machine_, plan, workspace.data, *parallel_), error);
  }

  fa_status run(const MergeProblem &problem, const Call &call, ErrorText &error) override {
    const Plan plan = plan_merge(problem, machine_);
    FA_RETURN_IF_ERROR(check_workspace(call.workspace, plan.workspace_bytes, error));
    return finished(merge(problem, machine_, plan, *parallel_), error);
  }

  fa_status run(const AppendProblem &problem, const Call &call, ErrorText &error) override {
    const Plan plan = plan_append(problem, machine_);
    FA_RETURN_IF_ERROR(check_workspace(call.workspace, plan.workspace_bytes, error));
    FA_RETURN_IF_ERROR(check_host_contents(problem, error));
    return finished(append(problem, machine_, plan, *parallel_), error);
  }

  fa_status make_row_device(std::unique_ptr<RowDevice> &device, ErrorText &) override {
    device = cpu::make_row_device(*this);
    return FA_OK;
  }

 private:
  static PlanSummary summarise(const Plan &plan, const Problem &problem) {
    PlanSummary summary = summarise(plan);
    summary.same_bits_contract = problem.same_bits ? kSameBitsContract : 0;
    return summary;
  }
  static PlanSummary summarise(const Plan &plan) {
    return {plan.kernel, plan.reason, plan.workspace_bytes, plan.num_splits, 0};
  }

  fa_status finished(bool all_tasks_ran, ErrorText &error) const {
    if (all_tasks_ran) return FA_OK;
    return fail(error, FA_ERROR_CALLBACK, "config.parallel_for returned before every task had run; the outputs are incomplete");
  }

  // Checks the caller's workspace, or lends the context's own.
  fa_status take_workspace(Workspace &workspace, size_t needed_bytes, ErrorText &error) {
    FA_RETURN_IF_ERROR(check_workspace(workspace, needed_bytes, error));
    if (workspace.data != nullptr || needed_bytes == 0) return FA_OK;
    FA_RETURN_IF_ERROR(own_.reserve(needed_bytes, error));
    workspace = {own_.data(), own_.bytes()};
    return FA_OK;
  }

  const Machine machine_;
  const std::unique_ptr<Parallel> parallel_;
  OwnWorkspace own_;
};

}  // namespace
}  // namespace cpu

fa_status create_cpu_backend(const fa_config &config, std::unique_ptr<Backend> &backend, ErrorText &error) {
  if (config.device_index != 0) {
    return fail(error, FA_ERROR_NO_DEVICE, "device_index is %d; the CPU has only device 0", int{config.device_index});
  }
  if (config.num_threads < 0 || config.num_threads > cpu::kMaxThreads) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "num_threads is %d; it must be 0 (automatic) to %d", int{config.num_threads},
                int{cpu::kMaxThreads});
  }
  cpu::Machine machine;
  if (config.cuda_arch != 0) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "cuda_arch is %d; it is a setting of CUDA contexts and must be 0 here",
                int{config.cuda_arch});
  }
  switch (config.cpu_isa) {
    case FA_CPU_ISA_AUTO:
      machine.isa = cpu::best_isa();
      break;
    case FA_CPU_ISA_PORTABLE:
    case FA_CPU_ISA_AVX2:
    case FA_CPU_ISA_AVX512:
    case FA_CPU_ISA_AVX512_BF16:
    case FA_CPU_ISA_AMX:
    case FA_CPU_ISA_NEON:
    case FA_CPU_ISA_NEON_FHM:
    case FA_CPU_ISA_NEON_BF16:
    case FA_CPU_ISA_SVE256:
      if (!cpu::has_isa(config.cpu_isa)) {
        return fail(error, FA_ERROR_ARCH,
                    "cpu_isa is %d, which this processor, its operating system or this build does not have",
                    int{config.cpu_isa});
      }
      machine.isa = config.cpu_isa;
      break;
    default:
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "cpu_isa is %d, which is no fa_cpu_isa", int{config.cpu_isa});
  }
  machine.threads = config.num_threads > 0 ? config.num_threads : cpu::available_processors();

  if (config.kernel_cache != nullptr) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT,
                "kernel_cache is \"%s\"; it is a setting of CUDA contexts and must be NULL here", config.kernel_cache);
  }

  std::unique_ptr<Parallel> parallel;
  if (config.parallel_for != nullptr) {
    parallel = std::make_unique<cpu::HostParallel>(config.parallel_for, config.parallel_for_user, machine.threads);
  } else {
    if (config.parallel_for_user != nullptr) {
      return fail(error, FA_ERROR_INVALID_ARGUMENT, "parallel_for_user is %p but parallel_for is NULL",
                  config.parallel_for_user);
    }
    parallel = std::make_unique<cpu::ThreadPool>(machine.threads);
  }
  backend = std::make_unique<cpu::CpuBackend>(machine, std::move(parallel));
  return FA_OK;
}

}  // namespace fa
