// SPDX-License-Identifier: Apache-2.0
// One call of one rank: its scratch memory, its kernels and its messages. A session runs, or prepares, or only measures. Then
// it takes the same steps without memory and messages, and says what they need. So a query cannot disagree with its call.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "core/backend.h"
#include "dist/layout.h"
#include "dist/link.h"

namespace fa::dist {

// What a call needs.
struct Usage {
  size_t buffer_bytes = 0;  // of the session itself
  size_t kernel_bytes = 0;  // largest workspace of a kernel, after the buffers
  uint64_t received_bytes = 0, sent_bytes = 0;
  int32_t launches = 0;

  size_t workspace_bytes() const { return buffer_bytes + kernel_bytes; }
};

class Session {
 public:
  // Measures; with `prepared`, whose addresses are those of the caller's tensors, it also loads every kernel.
  Session(Backend &backend, RowDevice &rows, Link &link, ErrorText &error, const Pointers *prepared = nullptr)
      : backend_(backend), rows_(rows), link_(link), error_(error), prepared_(prepared) {}
  // Runs, in a workspace of usage.workspace_bytes(). `pointers` are those of the caller's tensors.
  Session(Backend &backend, RowDevice &rows, Link &link, ErrorText &error, const Usage &usage, void *workspace,
          const Pointers &pointers, fa_stream stream)
      : backend_(backend),
        rows_(rows),
        link_(link),
        error_(error),
        pointers_(&pointers),
        stream_(stream),
        base_(static_cast<char *>(workspace)),
        kernel_workspace_{base_ + usage.buffer_bytes, usage.kernel_bytes},
        waited_(link.exchanges()) {}

  const Usage &usage() const { return usage_; }
  ErrorText &error() { return error_; }
  int32_t rank() const { return link_.rank(); }
  int32_t num_ranks() const { return link_.num_ranks(); }

  // Scratch memory until the end of the session.
  void *take(int64_t count, int64_t element_bytes);
  template <typename Element>
  Element *take(int64_t count) {
    return static_cast<Element *>(take(count, sizeof(Element)));
  }

  fa_status run(const ForwardProblem &problem) { return run_any(ScoredForward{problem, nullptr}); }
  fa_status run(const BackwardProblem &problem) { return run_any(ScoredBackward{problem, nullptr}); }
  // Each of the steps is taken once, whatever the backend does.
  fa_status run(const BackwardProblem &problem, const BackwardSteps &steps);
  fa_status run(const MergeProblem &problem) { return run_any(problem); }

  // Work on rows; see RowDevice. `sum` takes any number of parts; more than kMostRowParts need `scratch`, fp32 of the same shape.
  fa_status copy(const RowShape &shape, const Operand &from, const Operand &to);
  fa_status sum(const RowShape &shape, std::vector<const float *> parts, const Operand &to, float *scratch = nullptr);
  fa_status zero(void *memory, int64_t bytes);
  fa_status add(double *sum, const float *part, int64_t count);
  fa_status sum(const double *parts, int64_t num_parts, int64_t count, float *to, int64_t stride);
  // These numbers in memory that kernels read.
  fa_status place(const std::vector<int64_t> &numbers, const int64_t *&placed);

  // Starts the messages as one group.
  fa_status exchange(const std::vector<fa_dist_message> &messages);
  // What follows finds every exchange so far done, or those that had been started when exchanges() had this value.
  fa_status wait() { return wait(exchanges()); }
  fa_status wait(int64_t exchanges);
  int64_t exchanges() const { return link_.exchanges(); }
  // Exchanges that may be started before the first of them is waited for.
  int32_t most_ahead() const { return link_.most_ahead(); }

 private:
  bool running() const { return pointers_ != nullptr; }

  template <typename AnyProblem>
  fa_status run_any(const AnyProblem &problem, const BackwardSteps *steps = nullptr) {
    ++usage_.launches;
    if (running()) return backend_.run(problem, Call{*pointers_, kernel_workspace_, stream_, steps}, error_);
    PlanSummary plan;
    FA_RETURN_IF_ERROR(backend_.plan(problem, plan, error_));
    if (plan.workspace_bytes > usage_.kernel_bytes) usage_.kernel_bytes = plan.workspace_bytes;
    return prepared_ != nullptr ? backend_.prepare(problem, *prepared_, error_) : FA_OK;
  }

  Backend &backend_;
  RowDevice &rows_;
  Link &link_;
  ErrorText &error_;
  const Pointers *prepared_ = nullptr;
  const Pointers *pointers_ = nullptr;
  fa_stream stream_ = nullptr;
  // A session that measures hands out addresses that nobody reads: aligned ones, since plans look at alignment.
  char *base_ = reinterpret_cast<char *>(kWorkspaceAlignment);
  Workspace kernel_workspace_;
  Usage usage_;
  int64_t waited_ = 0;  // exchanges of the link that the session has waited for
};

}  // namespace fa::dist
