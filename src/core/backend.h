// SPDX-License-Identifier: Apache-2.0
// The interface between the API and a device. A context has one backend. Query, prepare and run use the same plan.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "core/append.h"
#include "core/pointers.h"
#include "core/row_device.h"
#include "core/score.h"
#include "core/status.h"
#include "flashattn/flashattn.h"

namespace fa {

// The part of a backend's plan that users see.
struct PlanSummary {
  std::string kernel;
  std::string reason;  // why this kernel
  size_t workspace_bytes = 0;
  int32_t num_splits = 1;
  int32_t same_bits_contract = 0;  // see fa_plan_info
};

// Scratch memory of the caller. {nullptr, 0}: the backend allocates it.
struct Workspace {
  void *data = nullptr;
  size_t bytes = 0;
};

// What the caller of a backward pass does in the middle of it, on the same stream: so it waits for keys, or sends their gradients, while the
// launches that need neither run. The backend calls each function at most once, in this order.
struct BackwardSteps {
  std::function<fa_status()> before_keys;          // before anything that reads k or v
  std::function<fa_status()> after_key_gradients;  // behind everything that writes dk or dv
};

// The arguments of a call besides the problem.
struct Call {
  const Pointers &pointers;  // every address in the problem, and the workspace
  Workspace workspace;
  fa_stream stream;
  const BackwardSteps *steps = nullptr;  // of a backward pass
};

constexpr size_t kWorkspaceAlignment = 256;

class Backend {
 public:
  virtual ~Backend() = default;

  virtual void describe(fa_device_properties &properties) const = 0;
  virtual int32_t last_cuda_error() const { return 0; }

  // Refuses a source without what this device runs.
  virtual fa_status accept(const fa_score_source &source, ErrorText &error) const = 0;

  // Says whether and how the problem would run, without side effects.
  virtual fa_status plan(const ScoredForward &problem, PlanSummary &summary, ErrorText &error) const = 0;
  virtual fa_status plan(const ScoredBackward &problem, PlanSummary &summary, ErrorText &error) const = 0;
  virtual fa_status plan(const JvpProblem &problem, PlanSummary &summary, ErrorText &error) const = 0;
  virtual fa_status plan(const MergeProblem &problem, PlanSummary &summary, ErrorText &error) const = 0;
  virtual fa_status plan(const AppendProblem &problem, PlanSummary &summary, ErrorText &error) const = 0;

  // Loads the kernels that the run needs.
  virtual fa_status prepare(const ScoredForward &problem, const Pointers &pointers, ErrorText &error) = 0;
  virtual fa_status prepare(const ScoredBackward &problem, const Pointers &pointers, ErrorText &error) = 0;
  virtual fa_status prepare(const JvpProblem &problem, const Pointers &pointers, ErrorText &error) = 0;
  virtual fa_status prepare(const MergeProblem &problem, const Pointers &pointers, ErrorText &error) = 0;
  virtual fa_status prepare(const AppendProblem &problem, const Pointers &pointers, ErrorText &error) = 0;

  virtual fa_status run(const ScoredForward &problem, const Call &call, ErrorText &error) = 0;
  virtual fa_status run(const ScoredBackward &problem, const Call &call, ErrorText &error) = 0;
  virtual fa_status run(const JvpProblem &problem, const Call &call, ErrorText &error) = 0;
  virtual fa_status run(const MergeProblem &problem, const Call &call, ErrorText &error) = 0;
  virtual fa_status run(const AppendProblem &problem, const Call &call, ErrorText &error) = 0;

  // For context parallelism. The backend must outlive it.
  virtual fa_status make_row_device(std::unique_ptr<RowDevice> &device, ErrorText &error) = 0;

 protected:
  Backend() = default;
};

// Creates the backend of a configuration. There is one function per kind of device. The API refuses kinds that are not built.
fa_status create_cpu_backend(const fa_config &config, std::unique_ptr<Backend> &backend, ErrorText &error);
fa_status create_cuda_backend(const fa_config &config, std::unique_ptr<Backend> &backend,
                              ErrorText &error);  // with FA_HAVE_CUDA

// Refuses a workspace that is too small or not aligned; {nullptr, 0} is accepted.
fa_status check_workspace(const Workspace &workspace, size_t needed_bytes, ErrorText &error);

}  // namespace fa
