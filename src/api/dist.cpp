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
#include "dist/decode.h"
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

  explicit fa_dist_s(fa_context context) : ctx(context) {}
  ~fa_dist_s() { magic = 0; }

  void fail() {
    int32_t works = kWorks;
    if (state.compare_exchange_strong(works, kFailed)) link->give_up();
  }
  void abort() {
    state = kAborted;
    link->abort();
  }

  bool is_prepared(const fa::dist::Terms &terms) const {
    return std::any_of(prepared.begin(), prepared.end(), [&](const fa::dist::Terms &t) { return same(t, terms); });
  }
  void add_prepared(const fa::dist::Terms &terms) {
    if (!is_prepared(terms)) prepared.push_back(terms);
  }

  uint64_t magic = kMagic;
  const fa_context ctx;
  std::unique_ptr<fa::RowDevice> device;
  std::unique_ptr<fa::dist::Link> link;
  std::atomic<int32_t> state{kWorks};
  std::vector<fa::dist::Terms> prepared;
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
  if (handle->layout.num_ranks != dist.link->num_ranks()) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "layout has %d ranks; dist has %d", int{handle->layout.num_ranks},
                int{dist.link->num_ranks()});
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
                  int{dist.link->rank()});
    default:
      return fail(error, FA_ERROR_TRANSPORT, "an earlier call failed on rank %d; the handle can only be destroyed",
                  int{dist.link->rank()});
  }
}

// After a failure that other ranks may be waiting for: ends the connections, so that they fail too.
fa_status broken(fa_dist_s &dist, fa_status status, ErrorText &error) {
  dist.fail();
  return dist.state.load() == fa_dist_s::kAborted ? check_state(dist, error) : status;
}

enum class Kind { forward, backward, decode };

// A call: what the caller gives, and from that its problem.
class Arguments {
 public:
  explicit Arguments(Kind kind) : kind_(kind) {}

  // The structs, the layout unless the call decodes, and the schedule. Whatever fails, terms() can be asked.
  fa_status copy(const fa_dist_s &dist, fa_dist_layout handle, const fa_attention *a, const fa_gradients *g, ErrorText &error) {
    if (kind_ != Kind::decode) FA_RETURN_IF_ERROR(read_layout(dist, handle, layout_, error));
    FA_RETURN_IF_ERROR(copy_in(a, "attention", attention_, error));
    if (kind_ == Kind::backward) FA_RETURN_IF_ERROR(copy_in(g, "gradients", gradients_, error));
    rank_ = dist.link->rank();
    if (kind_ != Kind::decode) schedule_ = make_schedule(*layout_, dist.link->rank(), kind_ == Kind::forward);
    return FA_OK;
  }
  fa_status read(int32_t rank, Pointers &pointers, ErrorText &error) {
    switch (kind_) {
      case Kind::forward:
        return read_local(*layout_, schedule_, rank, attention_, forward_, pointers, error);
      case Kind::backward:
        return read_local(*layout_, schedule_, rank, attention_, gradients_, backward_, pointers, error);
      default:
        return dist::read_decode(attention_, forward_, pointers, error);
    }
  }
  dist::Terms terms(fa_status status) const {
    if (kind_ == Kind::decode) return dist::decode_terms(attention_, status);
    return terms_of(*layout_, attention_, kind_ == Kind::backward ? &gradients_ : nullptr, status);
  }
  fa_status step_through(dist::Session &session) const {
    switch (kind_) {
      case Kind::forward:
        return dist::forward(session, schedule_, forward_);
      case Kind::backward:
        return dist::backward(session, schedule_, backward_);
      default:
        return dist::decode(session, forward_);
    }
  }
  // The forward that precedes a backward.
  Arguments forward_of() const {
    Arguments forward(*this);
    forward.kind_ = Kind::forward;
    forward.schedule_ = make_schedule(*layout_, rank_, /*forward=*/true);
    return forward;
  }
  const dist::Layout &layout() const { return *layout_; }
  const char *reason() const {
    return kind_ == Kind::decode ? "each rank attends to its rows of the cache; one merge of all ranks' results"
                                 : layout_->reason.c_str();
  }

 private:
  static inline const dist::Layout kNone{};

  Kind kind_;
  int32_t rank_ = 0;
  const dist::Layout *layout_ = &kNone;
  Schedule schedule_;
  fa_attention attention_{};
  fa_gradients gradients_{};
  ForwardProblem forward_;
  BackwardProblem backward_;
};

// Reads the arguments, and steps through the call without running it. `prepare`: loads its kernels.
fa_status measure(const fa_dist_s &dist, fa_context_s &context, Arguments &arguments, dist::Usage &usage, ErrorText &error,
                  bool prepare = false) {
  FA_RETURN_IF_ERROR(arguments.read(dist.link->rank(), context.pointers, error));
  if (prepare) FA_RETURN_IF_ERROR(dist.device->prepare(error));
  dist::Session session(*context.backend, *dist.device, *dist.link, error, prepare ? &context.pointers : nullptr);
  FA_RETURN_IF_ERROR(arguments.step_through(session));
  usage = session.usage();
  return FA_OK;
}

// Scratch memory of a call: the caller's, or the device's until the end of the call.
class CallMemory {
 public:
  CallMemory(RowDevice &device, fa_stream stream) : device_(device), stream_(stream) {}
  ~CallMemory() {
    if (own_ != nullptr) device_.release(own_, stream_);
  }
  CallMemory(const CallMemory &) = delete;
  CallMemory &operator=(const CallMemory &) = delete;

  fa_status take(const Workspace &workspace, size_t needed, ErrorText &error) {
    FA_RETURN_IF_ERROR(check_workspace(workspace, needed, error));
    data_ = workspace.data;
    if (data_ != nullptr || needed == 0) return FA_OK;
    FA_RETURN_IF_ERROR(device_.allocate(needed, stream_, own_, error));
    data_ = own_;
    return FA_OK;
  }
  void *data() const { return data_; }

 private:
  RowDevice &device_;
  fa_stream stream_;
  void *data_ = nullptr, *own_ = nullptr;
};

fa_status run_collective(Kind kind, fa_dist dist, fa_dist_layout handle, const fa_attention *attention,
                         const fa_gradients *gradients, Workspace workspace, fa_stream stream) noexcept {
  return with_dist(dist, [&](fa_context_s &context, ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_state(*dist, error));
    bool started = false;
    const fa_status status = guarded(error, [&]() -> fa_status {
      Arguments arguments(kind);
      FA_RETURN_IF_ERROR(arguments.copy(*dist, handle, attention, gradients, error));
      dist::Usage usage;
      FA_RETURN_IF_ERROR(measure(*dist, context, arguments, usage, error));
      if (!dist->is_prepared(arguments.terms(FA_OK))) {
        return fail(error, FA_ERROR_INVALID_ARGUMENT, "%s has not been called for %s",
                    kind == Kind::decode ? "fa_dist_decode_prepare()" : "fa_dist_prepare()",
                    kind == Kind::decode ? "these shapes and options" : "this layout with these options and gradients");
      }
      CallMemory memory(*dist->device, stream);
      FA_RETURN_IF_ERROR(memory.take(workspace, usage.workspace_bytes(), error));
      started = true;
      dist::Session session(*context.backend, *dist->device, *dist->link, error, usage, memory.data(), context.pointers,
                            stream);
      return arguments.step_through(session);
    });
    // After a refusal before the first message the handle stays usable. Anything else would leave the other ranks waiting.
    const bool refused = !started && status < 300;
    return status == FA_OK || refused ? status : broken(*dist, status, error);
  });
}

// Every rank's `mine`, (ranks, numbers), by messages in memory of the device. Opens the connections between all ranks.
fa_status gather_numbers(fa_dist_s &dist, const std::vector<int64_t> &mine, std::vector<int64_t> &all, ErrorText &error) {
  const int32_t ranks = dist.link->num_ranks(), rank = dist.link->rank();
  const size_t bytes = mine.size() * sizeof(int64_t);
  const fa_stream stream = dist.device->own_stream();
  CallMemory memory(*dist.device, stream);
  FA_RETURN_IF_ERROR(memory.take({}, ranks * bytes, error));
  auto *numbers = static_cast<int64_t *>(memory.data());
  const auto of = [&](int32_t r) { return numbers + r * mine.size(); };
  FA_RETURN_IF_ERROR(dist.device->write(mine, of(rank), stream, error));
  std::vector<fa_dist_message> messages;
  for (int32_t peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    messages.push_back({of(rank), bytes, peer, 0});
    messages.push_back({of(peer), bytes, peer, 1});
  }
  if (!messages.empty()) {
    FA_RETURN_IF_ERROR(dist.link->exchange(messages, stream, error));
    FA_RETURN_IF_ERROR(dist.link->wait(dist.link->exchanges(), stream, error));
  }
  all.resize(ranks * mine.size());
  return dist.device->read(all.data(), numbers, ranks * bytes, dist.link->timeout_ms(), stream, error);
}

// Compares the terms of all ranks.
fa_status agree(fa_dist_s &dist, const dist::Terms &terms, fa_status own, ErrorText &error) {
  constexpr size_t kSlots = 64;  // room for later versions: messages of all versions have one size
  std::vector<int64_t> mine(kSlots, 0), all;
  for (size_t n = 0; n < terms.size(); ++n) mine[n] = terms[n].value;
  ErrorText of_exchange;
  const fa_status status = gather_numbers(dist, mine, all, of_exchange);
  if (status != FA_OK) {
    error = of_exchange;
    return broken(dist, status, error);
  }
  if (own != FA_OK) return own;  // its text is there already
  std::vector<int64_t> values;
  for (int32_t r = 0; r < dist.link->num_ranks(); ++r) {
    values.insert(values.end(), all.begin() + r * kSlots, all.begin() + r * kSlots + terms.size());
  }
  return compare(terms, values, dist.link->num_ranks(), error);
}

fa_status prepare_collective(Kind kind, fa_dist dist, fa_dist_layout handle, const fa_attention *attention,
                             const fa_gradients *gradients) {
  return with_dist(dist, [&](fa_context_s &context, ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_state(*dist, error));
    // Whatever is wrong with this rank's arguments, the other ranks are waiting to hear of it.
    Arguments arguments(kind);
    dist::Usage usage;
    const fa_status own = guarded(error, [&]() -> fa_status {
      FA_RETURN_IF_ERROR(arguments.copy(*dist, handle, attention, gradients, error));
      FA_RETURN_IF_ERROR(measure(*dist, context, arguments, usage, error, /*prepare=*/true));
      if (kind != Kind::backward) return FA_OK;
      Arguments forward = arguments.forward_of();
      return measure(*dist, context, forward, usage, error, /*prepare=*/true);
    });
    const dist::Terms terms = arguments.terms(own);
    FA_RETURN_IF_ERROR(agree(*dist, terms, own, error));
    dist->add_prepared(terms);
    if (kind == Kind::backward) dist->add_prepared(arguments.forward_of().terms(FA_OK));
    return FA_OK;
  });
}

fa_status check_transport(const fa_dist_transport &transport, ErrorText &error) {
  if (transport.reserved != 0) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "transport.reserved is %u; it must be 0", transport.reserved);
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
  return FA_OK;
}

fa_status create_dist(fa_dist *out, fa_context ctx, void *nccl_comm, const fa_dist_config *config, ErrorText &error) {
  fa_dist_config settings{};
  if (config != nullptr) FA_RETURN_IF_ERROR(copy_in(config, "config", settings, error));
  if ((nccl_comm != nullptr) == (settings.transport != nullptr)) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT,
                "nccl_comm is %p and config.transport is %p; exactly one of them must be given", nccl_comm,
                static_cast<const void *>(settings.transport));
  }
  if (settings.nccl_library != nullptr && nccl_comm == nullptr) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "config.nccl_library is %p, and nccl_comm is NULL", settings.nccl_library);
  }
  if (settings.reserved != 0) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "config.reserved is %u; it must be 0", settings.reserved);
  }
  if (settings.timeout_ms < 0) {
    return fail(error, FA_ERROR_INVALID_ARGUMENT, "config.timeout_ms is %" PRId64 "; it cannot be negative",
                settings.timeout_ms);
  }
  constexpr int64_t kDefaultTimeout = 600000;
  const int64_t timeout_ms = settings.timeout_ms > 0 ? settings.timeout_ms : kDefaultTimeout;
  fa_dist_transport transport{};
  if (settings.transport != nullptr) {
    FA_RETURN_IF_ERROR(copy_in(settings.transport, "config.transport", transport, error));
    FA_RETURN_IF_ERROR(check_transport(transport, error));
  }
  auto dist = std::make_unique<fa_dist_s>(ctx);
  FA_RETURN_IF_ERROR(ctx->backend->make_row_device(dist->device, error));
  if (nccl_comm != nullptr) {
    fa_device_properties device{};
    ctx->backend->describe(device);
    const int32_t index = device.device_type == FA_DEVICE_CUDA ? device.device_index : -1;
    FA_RETURN_IF_ERROR(
        dist::link_by_nccl(nccl_comm, settings.nccl_library, index, *dist->device, timeout_ms, dist->link, error));
  } else {
    dist->link = dist::link_by_transport(transport, timeout_ms);
  }
  *out = dist.release();
  return FA_OK;
}

// The answer to a query: what the call would need, or the failure.
fa_status query_dist(Kind kind, fa_dist dist, fa_dist_layout handle, const fa_attention *attention,
                     const fa_gradients *gradients, fa_dist_info *info) {
  return with_dist(dist, [&](fa_context_s &context, ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_out(info, "info", error));
    fa_dist_info answer{};
    Arguments arguments(kind);
    dist::Usage usage;
    answer.status = guarded(error, [&]() -> fa_status {
      FA_RETURN_IF_ERROR(arguments.copy(*dist, handle, attention, gradients, error));
      return measure(*dist, context, arguments, usage, error);
    });
    if (answer.status == FA_OK) {
      answer.workspace_bytes = usage.workspace_bytes();
      answer.received_bytes = usage.received_bytes;
      answer.sent_bytes = usage.sent_bytes;
      answer.num_stages = arguments.layout().num_stages;
      answer.num_launches = usage.launches;
      std::snprintf(answer.reason, sizeof answer.reason, "%s", arguments.reason());
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
  return with_context(ctx, [&](fa_context_s &, ErrorText &error) -> fa_status {
    if (out == nullptr) return fail(error, FA_ERROR_INVALID_ARGUMENT, "out is NULL");
    return create_dist(out, ctx, nccl_comm, config, error);
  });
}

void fa_dist_destroy(fa_dist dist) {
  if (dist != nullptr && dist->magic == fa_dist_s::kMagic) delete dist;
}

fa_status fa_dist_query(fa_dist dist, fa_dist_layout layout, const fa_attention *attention, const fa_gradients *gradients,
                        fa_dist_info *info) {
  return query_dist(gradients != nullptr ? Kind::backward : Kind::forward, dist, layout, attention, gradients, info);
}

fa_status fa_dist_prepare(fa_dist dist, fa_dist_layout layout, const fa_attention *attention, const fa_gradients *gradients) {
  return prepare_collective(gradients != nullptr ? Kind::backward : Kind::forward, dist, layout, attention, gradients);
}

fa_status fa_dist_forward(fa_dist dist, fa_dist_layout layout, const fa_attention *attention, void *workspace,
                          size_t workspace_bytes, fa_stream stream) {
  return run_collective(Kind::forward, dist, layout, attention, nullptr, {workspace, workspace_bytes}, stream);
}

fa_status fa_dist_backward(fa_dist dist, fa_dist_layout layout, const fa_attention *attention, const fa_gradients *gradients,
                           void *workspace, size_t workspace_bytes, fa_stream stream) {
  return run_collective(Kind::backward, dist, layout, attention, gradients, {workspace, workspace_bytes}, stream);
}

fa_status fa_dist_decode_query(fa_dist dist, const fa_attention *attention, fa_dist_info *info) {
  return query_dist(Kind::decode, dist, nullptr, attention, nullptr, info);
}

fa_status fa_dist_decode_prepare(fa_dist dist, const fa_attention *attention) {
  return prepare_collective(Kind::decode, dist, nullptr, attention, nullptr);
}

fa_status fa_dist_decode(fa_dist dist, const fa_attention *attention, void *workspace, size_t workspace_bytes,
                         fa_stream stream) {
  return run_collective(Kind::decode, dist, nullptr, attention, nullptr, {workspace, workspace_bytes}, stream);
}

fa_status fa_dist_status(fa_dist dist) {
  return without_context([&](ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_dist(dist, error));
    FA_RETURN_IF_ERROR(check_state(*dist, error));
    return dist->link->status(error);
  });
}

fa_status fa_dist_abort(fa_dist dist) {
  return without_context([&](ErrorText &error) -> fa_status {
    FA_RETURN_IF_ERROR(check_dist(dist, error));
    dist->abort();
    return FA_OK;
  });
}

}  // extern "C"
