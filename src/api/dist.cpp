// SPDX-License-Identifier: Apache-2.0
// The exported functions of flashattn_dist.h.
#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "api/copy_in.h"
#include "api/guard.h"
#include "dist/attention.h"
#include "dist/layout.h"
#include "dist/local_problem.h"
#include "dist/reorder.h"
#include "dist/session.h"

struct fa_dist_layout_s {
  static constexpr uint64_t kMagic = 0x74756F79616C6466;  // "fdlayout"

  uint64_t magic = kMagic;
  fa::dist::Layout layout;

  ~fa_dist_layout_s() { magic = 0; }
};

struct fa_dist_s {
  static constexpr uint64_t kMagic = 0x6B6E617274736964;  // "distrank"
  enum State : int32_t { kWorks, kFailed, kAborted };

  fa_dist_s(fa_context context, const fa_dist_transport &transport, int64_t timeout_ms)
      : ctx(context), link(transport, timeout_ms) {}
  ~fa_dist_s() { magic = 0; }

  // The first failure or abort ends the connections of this rank.
  void end(State why) {
    int32_t works = kWorks;
    if (state.compare_exchange_strong(works, why)) link.abort();
  }

  bool is_prepared(const fa::dist::Terms &terms) const {
    return std::any_of(prepared.begin(), prepared.end(), [&](const fa::dist::Terms &t) { return same(t, terms); });
  }
  void add_prepared(const fa::dist::Terms &terms) {
    if (!is_prepared(terms)) prepared.push_back(terms);
  }

  uint64_t magic = kMagic;
  const fa_context ctx;
  const fa::dist::Link link;
  std::atomic<int32_t> state{kWorks};
  std::vector<fa::dist::Terms> prepared;

  fa::WorkspaceMemory workspace;  // for calls without one; grows
  size_t workspace_bytes = 0;
};

namespace fa::api {
namespace {

using dist::Schedule;

fa_status check_layout(fa_dist_layout layout, ErrorText &error) {
  if (layout == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "layout is NULL");
  if (layout->magic != fa_dist_layout_s::kMagic) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "layout is %p, which is no layout (destroyed already?)",
                static_cast<void *>(layout));
  }
  return FA_OK;
}

fa_status check_dist(fa_dist dist, ErrorText &error) {
  if (dist == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "dist is NULL");
  if (dist->magic != fa_dist_s::kMagic) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "dist is %p, which is no fa_dist (destroyed already?)",
                static_cast<void *>(dist));
  }
  return FA_OK;
}

// Runs `body` as the only user of the handle's context.
template <typename Body>
fa_status with_dist(fa_dist dist, Body body) noexcept {
  const fa_status status = without_context([&](ErrorText &error) { return check_dist(dist, error); });
  if (status != FA_OK) return status;
  return with_context(dist->ctx, body);
}

// Finds the layout behind a handle, if it is one for this number of ranks.
fa_status read_layout(const fa_dist_s &dist, fa_dist_layout handle, const dist::Layout *&layout, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_layout(handle, error));
  if (handle->layout.num_ranks != dist.link.num_ranks()) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "layout has %d ranks; transport.num_ranks is %d",
                int{handle->layout.num_ranks}, int{dist.link.num_ranks()});
  }
  layout = &handle->layout;
  return FA_OK;
}

fa_status check_state(const fa_dist_s &dist, ErrorText &error) {
  switch (dist.state.load()) {
    case fa_dist_s::kWorks:
      return FA_OK;
    case fa_dist_s::kAborted:
      return fail(error, FA_ERROR_TRANSPORT, "fa_dist_abort() was called on rank %d; the handle can only be destroyed",
                  int{dist.link.rank()});
    default:
      return fail(error, FA_ERROR_TRANSPORT, "an earlier call failed on rank %d; the handle can only be destroyed",
                  int{dist.link.rank()});
  }
}

// After a failure that other ranks may be waiting for: ends the connections, so that they fail too.
fa_status broken(fa_dist_s &dist, fa_status status, ErrorText &error) {
  dist.end(fa_dist_s::kFailed);
  return dist.state.load() == fa_dist_s::kAborted ? check_state(dist, error) : status;
}

// A call of forward or of backward: its structs, and from them its problem.
struct Arguments {
  fa_attention attention;
  fa_gradients gradients;
  bool backward = false;
  ForwardProblem forward_problem;
  BackwardProblem backward_problem;

  fa_status copy(const fa_attention *a, const fa_gradients *g, ErrorText &error) {
    FA_RETURN_IF_ERROR(copy_in(a, "attention", attention, error));
    backward = g != nullptr;
    return backward ? copy_in(g, "gradients", gradients, error) : FA_OK;
  }
  fa_status read(const dist::Layout &layout, const Schedule &schedule, int32_t rank, Pointers &pointers, ErrorText &error) {
    if (backward) return read_local(layout, schedule, rank, attention, gradients, backward_problem, pointers, error);
    return read_local(layout, schedule, rank, attention, forward_problem, pointers, error);
  }
  dist::Terms terms(const dist::Layout &layout, fa_status status) const {
    return terms_of(layout, attention, backward ? &gradients : nullptr, status);
  }
  fa_status step_through(dist::Session &session, const Schedule &schedule) const {
    return backward ? dist::backward(session, schedule, backward_problem) : dist::forward(session, schedule, forward_problem);
  }
};

fa_status measure(const fa_dist_s &dist, fa_context_s &context, const dist::Layout &layout, const Schedule &schedule,
                  Arguments &arguments, dist::Usage &usage, ErrorText &error) {
  FA_RETURN_IF_ERROR(arguments.read(layout, schedule, dist.link.rank(), context.pointers, error));
  dist::Session session(*context.backend, dist.link, error);
  FA_RETURN_IF_ERROR(arguments.step_through(session, schedule));
  usage = session.usage();
  return FA_OK;
}

fa_status take_workspace(fa_dist_s &dist, Workspace &workspace, size_t needed, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_workspace(workspace, needed, error));
  if (workspace.data != nullptr || needed == 0) return FA_OK;
  if (dist.workspace_bytes < needed) {
    dist.workspace.reset();
    dist.workspace_bytes = 0;
    const size_t bytes = (needed + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    dist.workspace.reset(allocate_workspace(bytes));
    if (!dist.workspace) {
      return fail(error, FA_ERROR_OUT_OF_MEMORY, "the workspace of %zu bytes this problem needs could not be allocated",
                  needed);
    }
    dist.workspace_bytes = bytes;
  }
  workspace = {dist.workspace.get(), dist.workspace_bytes};
  return FA_OK;
}

fa_status run_collective(fa_dist dist, fa_dist_layout handle, const fa_attention *attention, const fa_gradients *gradients,
                         Workspace workspace, fa_stream stream) noexcept {
  return with_dist(dist, [&](fa_context_s &context, ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_state(*dist, error));
    bool started = false;
    const fa_status status = guarded(error, [&]() -> fa_status {
      const dist::Layout *layout = nullptr;
      FA_RETURN_IF_ERROR(read_layout(*dist, handle, layout, error));
      Arguments arguments;
      FA_RETURN_IF_ERROR(arguments.copy(attention, gradients, error));
      const Schedule schedule = make_schedule(*layout, dist->link.rank());
      dist::Usage usage;
      FA_RETURN_IF_ERROR(measure(*dist, context, *layout, schedule, arguments, usage, error));
      if (!dist->is_prepared(arguments.terms(*layout, FA_OK))) {
        return fail(error, FA_ERROR_INVALID_ARGUMENT,
                    "fa_dist_prepare() has not been called for this layout with these options and gradients");
      }
      FA_RETURN_IF_ERROR(take_workspace(*dist, workspace, usage.workspace_bytes(), error));
      started = true;
      dist::Session session(*context.backend, dist->link, error, usage, workspace.data, context.pointers, stream);
      return arguments.step_through(session, schedule);
    });
    // After a refusal before the first message the handle stays usable. Anything else would leave the other ranks waiting.
    const bool refused = !started && status < 300;
    return status == FA_OK || refused ? status : broken(*dist, status, error);
  });
}

// Compares the terms of all ranks.
fa_status agree(fa_dist_s &dist, const dist::Terms &terms, fa_status own, ErrorText &error) {
  constexpr size_t kSlots = 64;  // room for later versions: messages of all versions have one size
  const int32_t ranks = dist.link.num_ranks(), rank = dist.link.rank();
  std::vector<int64_t> all(ranks * kSlots, 0);
  for (size_t n = 0; n < terms.size(); ++n) all[rank * kSlots + n] = terms[n].value;
  std::vector<fa_dist_message> messages;
  for (int32_t peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    messages.push_back({&all[rank * kSlots], kSlots * sizeof(int64_t), peer, 0});
    messages.push_back({&all[peer * kSlots], kSlots * sizeof(int64_t), peer, 1});
  }
  if (!messages.empty()) {
    fa_status status = dist.link.exchange(messages, nullptr, error);
    if (status == FA_OK) status = dist.link.wait(error);
    if (status != FA_OK) return broken(dist, status, error);
  }
  if (own != FA_OK) return own;  // its text is there already
  std::vector<int64_t> values;
  for (int32_t r = 0; r < ranks; ++r) {
    values.insert(values.end(), all.begin() + r * kSlots, all.begin() + r * kSlots + terms.size());
  }
  return compare(terms, values, ranks, error);
}

fa_status prepare_collective(fa_dist dist, fa_dist_layout handle, const fa_attention *attention,
                             const fa_gradients *gradients) {
  return with_dist(dist, [&](fa_context_s &context, ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_state(*dist, error));
    // Whatever is wrong with this rank's arguments, the other ranks are waiting to hear of it.
    const dist::Layout none;
    const dist::Layout *layout = &none;
    Arguments arguments{};
    const fa_status own = guarded(error, [&]() -> fa_status {
      FA_RETURN_IF_ERROR(read_layout(*dist, handle, layout, error));
      FA_RETURN_IF_ERROR(arguments.copy(attention, gradients, error));
      dist::Usage usage;
      return measure(*dist, context, *layout, make_schedule(*layout, dist->link.rank()), arguments, usage, error);
    });
    const dist::Terms terms = arguments.terms(*layout, own);
    FA_RETURN_IF_ERROR(agree(*dist, terms, own, error));
    dist->add_prepared(terms);
    if (gradients != nullptr) dist->add_prepared(terms_of(*layout, arguments.attention, nullptr, FA_OK));
    return FA_OK;
  });
}

fa_status create_dist(fa_dist *out, fa_context ctx, void *nccl_comm, const fa_dist_config *config, ErrorText &error) {
  fa_dist_config settings{};
  if (config != nullptr) FA_RETURN_IF_ERROR(copy_in(config, "config", settings, error));
  if (nccl_comm != nullptr || settings.transport == nullptr) {
    return fail(error, FA_ERROR_NOT_BUILT,
                "nccl_comm is %p and config.transport is %p; this version has no NCCL transport and needs a transport of the "
                "caller's",
                nccl_comm, static_cast<const void *>(settings.transport));
  }
  fa_dist_transport transport{};
  FA_RETURN_IF_ERROR(copy_in(settings.transport, "config.transport", transport, error));
  if (settings.reserved != 0 || transport.reserved != 0) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "config.reserved is %u and transport.reserved is %u; they must be 0",
                settings.reserved, transport.reserved);
  }
  if (settings.timeout_ms < 0) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "config.timeout_ms is %" PRId64 "; it cannot be negative",
                settings.timeout_ms);
  }
  if (transport.num_ranks < 1 || transport.num_ranks > dist::kMaxRanks || transport.rank < 0 ||
      transport.rank >= transport.num_ranks) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT,
                "transport.rank is %d and transport.num_ranks %d; there are 1 to %d ranks, and rank is one of them",
                int{transport.rank}, int{transport.num_ranks}, int{dist::kMaxRanks});
  }
  if (transport.exchange == nullptr || transport.wait == nullptr || transport.abort == nullptr) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "transport.%s is NULL",
                transport.exchange == nullptr ? "exchange"
                : transport.wait == nullptr   ? "wait"
                                              : "abort");
  }
  constexpr int64_t kDefaultTimeout = 600000;
  *out = new fa_dist_s(ctx, transport, settings.timeout_ms > 0 ? settings.timeout_ms : kDefaultTimeout);
  return FA_OK;
}

// The answer to a query: what the call would need, or the failure.
fa_status query_dist(fa_dist dist, fa_dist_layout handle, const fa_attention *attention, const fa_gradients *gradients,
                     fa_dist_info *info) {
  return with_dist(dist, [&](fa_context_s &context, ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_out(info, "info", error));
    fa_dist_info answer{};
    const dist::Layout *layout = nullptr;
    dist::Usage usage;
    answer.status = guarded(error, [&]() -> fa_status {
      FA_RETURN_IF_ERROR(read_layout(*dist, handle, layout, error));
      Arguments arguments;
      FA_RETURN_IF_ERROR(arguments.copy(attention, gradients, error));
      return measure(*dist, context, *layout, make_schedule(*layout, dist->link.rank()), arguments, usage, error);
    });
    if (answer.status == FA_OK) {
      answer.workspace_bytes = usage.workspace_bytes();
      answer.received_bytes = usage.received_bytes;
      answer.sent_bytes = usage.sent_bytes;
      answer.num_stages = layout->num_stages;
      answer.num_launches = usage.launches;
      std::snprintf(answer.reason, sizeof answer.reason, "%s", layout->reason.c_str());
    } else {
      std::memcpy(answer.reason, error.text, sizeof answer.reason);
    }
    copy_out(answer, info);
    return answer.status;
  });
}

fa_status describe(fa_dist_layout handle, fa_dist_layout_info *info, ErrorText &error) {
  FA_RETURN_IF_ERROR(check_layout(handle, error));
  FA_RETURN_IF_ERROR(check_out(info, "info", error));
  const dist::Layout &l = handle->layout;
  fa_dist_layout_info answer{};
  answer.num_ranks = l.num_ranks;
  answer.way = l.way;
  answer.num_stages = l.num_stages;
  answer.total_rows = static_cast<int64_t>(l.permutation.size());
  answer.num_pieces = static_cast<int64_t>(l.pieces.size());
  answer.rank_offsets = l.rank_offsets.data();
  answer.permutation = l.permutation.data();
  answer.inverse = l.inverse.data();
  answer.pieces = l.pieces.data();
  answer.work = l.work.data();
  answer.forward_bytes = l.forward_bytes.data();
  answer.backward_bytes = l.backward_bytes.data();
  answer.imbalance = l.imbalance;
  std::snprintf(answer.reason, sizeof answer.reason, "%s", l.reason.c_str());
  copy_out(answer, info);
  return FA_OK;
}

fa_status copy_rows(fa_dist_layout handle, int32_t rank, int32_t dimension, const fa_tensor *whole, const fa_tensor *local,
                    dist::Direction direction) {
  return without_context([&](ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_layout(handle, error));
    if (whole == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "whole is NULL");
    if (local == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "local is NULL");
    return dist::reorder(handle->layout, rank, dimension, *whole, *local, direction, error);
  });
}

}  // namespace
}  // namespace fa::api

using namespace fa;       // NOLINT: this file only exports
using namespace fa::api;  // NOLINT

extern "C" {

fa_status fa_dist_problem_init(fa_dist_problem *problem, size_t size) {
  return without_context([&](ErrorText &error) { return init(problem, "problem", size, error); });
}

fa_status fa_dist_layout_info_init(fa_dist_layout_info *info, size_t size) {
  return without_context([&](ErrorText &error) { return init(info, "info", size, error); });
}

fa_status fa_dist_transport_init(fa_dist_transport *transport, size_t size) {
  return without_context([&](ErrorText &error) { return init(transport, "transport", size, error); });
}

fa_status fa_dist_config_init(fa_dist_config *config, size_t size) {
  return without_context([&](ErrorText &error) { return init(config, "config", size, error); });
}

fa_status fa_dist_info_init(fa_dist_info *info, size_t size) {
  return without_context([&](ErrorText &error) { return init(info, "info", size, error); });
}

fa_status fa_dist_plan(const fa_dist_problem *problem, fa_dist_layout *out) {
  return without_context([&](ErrorText &error) -> fa_status {
    if (out == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "out is NULL");
    *out = nullptr;
    fa_dist_problem copy;
    FA_RETURN_IF_ERROR(copy_in(problem, "problem", copy, error));
    auto layout = std::make_unique<fa_dist_layout_s>();
    FA_RETURN_IF_ERROR(dist::make_layout(copy, layout->layout, error));
    *out = layout.release();
    return FA_OK;
  });
}

void fa_dist_layout_destroy(fa_dist_layout layout) {
  if (layout != nullptr && layout->magic == fa_dist_layout_s::kMagic) delete layout;
}

fa_status fa_dist_layout_describe(fa_dist_layout layout, fa_dist_layout_info *info) {
  return without_context([&](ErrorText &error) { return describe(layout, info, error); });
}

fa_status fa_dist_scatter_rows(fa_dist_layout layout, int32_t rank, int32_t dimension, const fa_tensor *whole,
                               const fa_tensor *local) {
  return copy_rows(layout, rank, dimension, whole, local, dist::Direction::scatter);
}

fa_status fa_dist_gather_rows(fa_dist_layout layout, int32_t rank, int32_t dimension, const fa_tensor *local,
                              const fa_tensor *whole) {
  return copy_rows(layout, rank, dimension, whole, local, dist::Direction::gather);
}

fa_status fa_dist_create(fa_dist *out, fa_context ctx, void *nccl_comm, const fa_dist_config *config) {
  if (out != nullptr) *out = nullptr;
  return with_context(ctx, [&](fa_context_s &context, ErrorText &error) -> fa_status {
    if (out == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "out is NULL");
    fa_device_properties device{};
    context.backend->describe(device);
    if (device.device_type != FA_DEVICE_CPU) {
      return fail(error, FA_ERROR_NOT_BUILT,
                  "ctx is a CUDA context; this version has context parallelism for CPU contexts only");
    }
    return create_dist(out, ctx, nccl_comm, config, error);
  });
}

void fa_dist_destroy(fa_dist dist) {
  if (dist != nullptr && dist->magic == fa_dist_s::kMagic) delete dist;
}

fa_status fa_dist_query(fa_dist dist, fa_dist_layout layout, const fa_attention *attention, const fa_gradients *gradients,
                        fa_dist_info *info) {
  return query_dist(dist, layout, attention, gradients, info);
}

fa_status fa_dist_prepare(fa_dist dist, fa_dist_layout layout, const fa_attention *attention, const fa_gradients *gradients) {
  return prepare_collective(dist, layout, attention, gradients);
}

fa_status fa_dist_forward(fa_dist dist, fa_dist_layout layout, const fa_attention *attention, void *workspace,
                          size_t workspace_bytes, fa_stream stream) {
  return run_collective(dist, layout, attention, nullptr, {workspace, workspace_bytes}, stream);
}

fa_status fa_dist_backward(fa_dist dist, fa_dist_layout layout, const fa_attention *attention, const fa_gradients *gradients,
                           void *workspace, size_t workspace_bytes, fa_stream stream) {
  if (gradients == nullptr) {  // which run_collective takes for forward
    return with_dist(
        dist, [&](fa_context_s &, ErrorText &error) { return fail(error, FA_ERROR_INVALID_ARGUMENT, "gradients is NULL"); });
  }
  return run_collective(dist, layout, attention, gradients, {workspace, workspace_bytes}, stream);
}

fa_status fa_dist_status(fa_dist dist) {
  return without_context([&](ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_dist(dist, error));
    FA_RETURN_IF_ERROR(check_state(*dist, error));
    const fa_status status = dist->link.status();
    if (status == FA_OK) return FA_OK;
    return fail(error, FA_ERROR_TRANSPORT, "transport.status reports status %d on rank %d", int{status},
                int{dist->link.rank()});
  });
}

fa_status fa_dist_abort(fa_dist dist) {
  return without_context([&](ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_dist(dist, error));
    dist->end(fa_dist_s::kAborted);
    return FA_OK;
  });
}

}  // extern "C"
