// SPDX-License-Identifier: Apache-2.0
// One call of one rank: its scratch memory, its kernels and its messages. A session either runs, or only measures: then it takes the same
// steps without memory, kernels and messages, and says what they need. So a query cannot disagree with its call.
#pragma once

#include <cstdint>
#include <vector>

#include "core/backend.h"
#include "dist/layout.h"
#include "flashattn/flashattn_dist.h"

namespace fa::dist {

// The caller's transport, with failures turned into a status and a text.
class Link {
 public:
  Link(const fa_dist_transport &transport, int64_t timeout_ms) : transport_(transport), timeout_ms_(timeout_ms) {}

  int32_t rank() const { return transport_.rank; }
  int32_t num_ranks() const { return transport_.num_ranks; }
  fa_status exchange(const std::vector<fa_dist_message> &messages, fa_stream stream, ErrorText &error) const;
  fa_status wait(ErrorText &error) const;
  void abort() const { transport_.abort(transport_.user); }
  fa_status status() const { return transport_.status == nullptr ? FA_OK : transport_.status(transport_.user); }

 private:
  fa_dist_transport transport_;
  int64_t timeout_ms_;
};

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
  // Measures.
  Session(Backend &backend, const Link &link, ErrorText &error) : backend_(backend), link_(link), error_(error) {}
  // Runs, in a workspace of usage.workspace_bytes(). `pointers` are those of the caller's tensors.
  Session(Backend &backend, const Link &link, ErrorText &error, const Usage &usage, void *workspace, const Pointers &pointers,
          fa_stream stream)
      : backend_(backend),
        link_(link),
        error_(error),
        pointers_(&pointers),
        stream_(stream),
        base_(static_cast<char *>(workspace)),
        kernel_workspace_{base_ + usage.buffer_bytes, usage.kernel_bytes} {}

  bool running() const { return pointers_ != nullptr; }
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
  fa_status run(const MergeProblem &problem) { return run_any(problem); }

  // Starts the messages as one group.
  fa_status exchange(const std::vector<fa_dist_message> &messages);
  // Waits for every exchange so far.
  fa_status wait();

 private:
  template <typename AnyProblem>
  fa_status run_any(const AnyProblem &problem) {
    ++usage_.launches;
    if (running()) return backend_.run(problem, Call{*pointers_, kernel_workspace_, stream_}, error_);
    PlanSummary plan;
    FA_RETURN_IF_ERROR(backend_.plan(problem, plan, error_));
    if (plan.workspace_bytes > usage_.kernel_bytes) usage_.kernel_bytes = plan.workspace_bytes;
    return FA_OK;
  }

  Backend &backend_;
  const Link &link_;
  ErrorText &error_;
  const Pointers *pointers_ = nullptr;
  fa_stream stream_ = nullptr;
  // A session that measures hands out addresses that nobody reads: aligned ones, since plans look at alignment.
  char *base_ = reinterpret_cast<char *>(kWorkspaceAlignment);
  Workspace kernel_workspace_;
  Usage usage_;
  bool pending_ = false;
};

}  // namespace fa::dist
