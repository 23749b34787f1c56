// SPDX-License-Identifier: Apache-2.0
// What the API asks of a device: one object per context. The same plan stands behind the query, prepare and the launch.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "core/append.h"
#include "core/forward_problem.h"
#include "core/pointers.h"
#include "core/problem.h"
#include "core/status.h"
#include "flashattn/flashattn.h"

namespace fa {

// The part of a backend's plan that users see.
struct PlanSummary {
  std::string kernel;
  std::string reason;  // why this kernel
  size_t workspace_bytes = 0;
  int32_t num_splits = 1;
};

// Scratch memory of the caller, or {nullptr, 0}: the backend takes its own.
struct Workspace {
  void *data = nullptr;
  size_t bytes = 0;
};

// What a call brings besides the problem.
struct Call {
  const Pointers &pointers;  // every address in the problem, and the workspace
  Workspace workspace;
  fa_stream stream;
};

constexpr size_t kWorkspaceAlignment = 256;

class Backend {
 public:
  virtual ~Backend() = default;

  virtual void describe(fa_device_properties &properties) const = 0;
  virtual int32_t last_cuda_error() const { return 0; }

  // Pure: whether and how the problem would run.
  virtual fa_status plan(const ForwardProblem &problem, PlanSummary &summary, ErrorText &error) const = 0;
  virtual fa_status plan(const BackwardProblem &problem, PlanSummary &summary, ErrorText &error) const = 0;
  virtual fa_status plan(const MergeProblem &problem, PlanSummary &summary, ErrorText &error) const = 0;
  virtual fa_status plan(const AppendProblem &problem, PlanSummary &summary, ErrorText &error) const = 0;

  // Loads what the following run needs.
  virtual fa_status prepare(const ForwardProblem &problem, const Pointers &pointers, ErrorText &error) = 0;
  virtual fa_status prepare(const BackwardProblem &problem, const Pointers &pointers, ErrorText &error) = 0;
  virtual fa_status prepare(const MergeProblem &problem, const Pointers &pointers, ErrorText &error) = 0;
  virtual fa_status prepare(const AppendProblem &problem, const Pointers &pointers, ErrorText &error) = 0;

  virtual fa_status run(const ForwardProblem &problem, const Call &call, ErrorText &error) = 0;
  virtual fa_status run(const BackwardProblem &problem, const Call &call, ErrorText &error) = 0;
  virtual fa_status run(const MergeProblem &problem, const Call &call, ErrorText &error) = 0;
  virtual fa_status run(const AppendProblem &problem, const Call &call, ErrorText &error) = 0;

 protected:
  Backend() = default;
};

// Creates the backend a configuration asks for. One function per device kind; a kind that is not built is refused by core.
fa_status create_cpu_backend(const fa_config &config, std::unique_ptr<Backend> &backend, ErrorText &error);
fa_status create_cuda_backend(const fa_config &config, std::unique_ptr<Backend> &backend,
                              ErrorText &error);  // with FA_HAVE_CUDA

// Refuses a workspace that a plan cannot use; {nullptr, 0} is fine.
fa_status check_workspace(const Workspace &workspace, size_t needed_bytes, ErrorText &error);

}  // namespace fa
