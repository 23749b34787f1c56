// SPDX-License-Identifier: Apache-2.0
#include "parity/runner.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "parity/expectation.h"
#include "reference/score_gallery.h"

namespace parity {
namespace {

constexpr size_t kWorkspaceGuard = 256;

bool is_output(Role role) { return is_forward_output(role) || is_backward_output(role); }

// All tensors of one problem in device memory, and the structs that describe them.
class Upload {
 public:
  Upload(Backend &backend, const Data &data) : backend_(backend), data_(data), attention(data.options()) {
    fa_gradients_init(&gradients, sizeof gradients);
    for (int role = 0; role < kNumRoles; ++role) {
      const HostTensor &tensor = data.tensors[static_cast<size_t>(role)];
      if (!tensor.present()) continue;
      auto &buffer = buffers_[static_cast<size_t>(role)];
      buffer = std::make_unique<Buffer>(backend, tensor.bytes().size());
      backend.upload(buffer->get(), tensor.bytes().data(), tensor.bytes().size());
      field(attention, gradients, static_cast<Role>(role)) = tensor.at(buffer->get());
    }
    if (data.problem.v_in_k) {
      attention.v = attention.k;
      attention.v.shape[attention.v.ndim - 1] = data.problem.head_dim_v;
    }
    dropout();
    score_tensors();
  }
  ~Upload() { fa_score_destroy(attention.score); }
  Upload(const Upload &) = delete;
  Upload &operator=(const Upload &) = delete;

  // Makes the score function of the case one of this context.
  fa_status make_score(fa_context context) {
    if (data_.problem.score == 0) return FA_OK;
    const fa_score_source source = reference::gallery_source(data_.problem.score, data_.problem.score_runs != 0);
    return fa_score_create(context, &source, &attention.score);
  }

  // The tensors of the score function that a call changed.
  std::string changed_score_tensors() const {
    for (size_t n = 0; n < data_.score_tensors.size(); ++n) {
      std::vector<unsigned char> now(data_.score_tensors[n].bytes().size());
      backend_.download(now.data(), score_buffers_[n]->get(), now.size());
      if (now != data_.score_tensors[n].bytes()) return "score_tensors is an input and was changed; ";
    }
    return "";
  }

  // Runs forward on the CPU and puts its outputs where this device's would be.
  fa_status forward_on_cpu() {
    const std::shared_ptr<Backend> cpu = cpu_backends().front();
    Upload host(*cpu, data_);
    fa_status status = host.make_score(cpu->context());
    if (status == FA_OK) status = fa_forward(cpu->context(), &host.attention, nullptr, 0, nullptr);
    for (int n = 0; status == FA_OK && n < kNumRoles; ++n) {
      const Role role = static_cast<Role>(n);
      if (!is_forward_output(role) || !data_.tensors[role].present()) continue;
      const HostTensor tensor = host.download(role);
      backend_.upload(buffers_[role]->get(), tensor.bytes().data(), tensor.bytes().size());
    }
    return status;
  }

  HostTensor download(Role role) const {
    HostTensor tensor = data_.tensors[role];
    if (tensor.present()) backend_.download(tensor.bytes().data(), buffers_[role]->get(), tensor.bytes().size());
    return tensor;
  }

 private:
  // By pointer, half of the offset is given by value: the two add up.
  void dropout() {
    const auto seed = static_cast<uint64_t>(data_.problem.dropout_seed),
               offset = static_cast<uint64_t>(data_.problem.dropout_offset);
    if (data_.problem.dropout == 0) return;
    attention.dropout_seed = seed;
    attention.dropout_offset = offset;
    if (!data_.problem.dropout_by_pointer) return;
    const uint64_t values[2] = {seed, offset - offset / 2};
    dropout_values_ = std::make_unique<Buffer>(backend_, sizeof values);
    backend_.upload(dropout_values_->get(), values, sizeof values);
    attention.dropout_seed = 0;
    attention.dropout_offset = offset / 2;
    attention.dropout_seed_ptr = reinterpret_cast<const uint64_t *>(dropout_values_->get());
    attention.dropout_offset_ptr = attention.dropout_seed_ptr + 1;
  }

  void score_tensors() {
    if (data_.problem.score == 0) return;
    const reference::GalleryFunction &function = reference::gallery(data_.problem.score);
    for (size_t n = 0; n < data_.score_tensors.size(); ++n) {
      const HostTensor &tensor = data_.score_tensors[n];
      score_buffers_.push_back(std::make_unique<Buffer>(backend_, tensor.bytes().size()));
      backend_.upload(score_buffers_[n]->get(), tensor.bytes().data(), tensor.bytes().size());
      score_tensors_.push_back({tensor.at(score_buffers_[n]->get()), function.tensors[n].access, 0});
    }
    attention.num_score_tensors = static_cast<int32_t>(score_tensors_.size());
    if (!score_tensors_.empty()) attention.score_tensors = score_tensors_.data();
    std::copy(function.scalars.begin(), function.scalars.end(), attention.score_scalars);
  }

  Backend &backend_;
  const Data &data_;
  std::array<std::unique_ptr<Buffer>, kNumRoles> buffers_;
  std::vector<std::unique_ptr<Buffer>> score_buffers_;
  std::vector<fa_score_tensor> score_tensors_;
  std::unique_ptr<Buffer> dropout_values_;

 public:
  fa_attention attention;
  fa_gradients gradients;
};

// The caller's workspace of exactly the size asked for, poisoned, with a guard on either side.
class Workspace {
 public:
  Workspace(Backend &backend, size_t bytes)
      : backend_(backend), poison_(bytes + 2 * kWorkspaceGuard, kPoison), buffer_(backend, poison_.size()) {
    backend.upload(buffer_.get(), poison_.data(), poison_.size());
  }
  unsigned char *get() const { return buffer_.get() + kWorkspaceGuard; }
  bool guards_intact() {
    backend_.download(poison_.data(), buffer_.get(), poison_.size());
    const auto intact = [](unsigned char byte) { return byte == kPoison; };
    return std::all_of(poison_.begin(), poison_.begin() + kWorkspaceGuard, intact) &&
           std::all_of(poison_.end() - kWorkspaceGuard, poison_.end(), intact);
  }

 private:
  Backend &backend_;
  std::vector<unsigned char> poison_;
  Buffer buffer_;
};

// A busy context's own text belongs to the call that keeps it busy.
std::string error_text(fa_context context, fa_status status) {
  return fa_last_error(status == FA_ERROR_BUSY ? nullptr : context);
}

std::string repro(const Backend &backend, const Data &data) {
  return "\n  on " + backend.name() + ": FA_TEST_CASE='" + describe(data.problem) + "' parity_test --gtest_filter='*Replay*'";
}

}  // namespace

fa_status query_and_call(Backend &backend, const Data &data, Execution &e, const char *name, std::string &kernel,
                         const std::function<fa_status(fa_plan_info *)> &query,
                         const std::function<fa_status(void *, size_t)> &call) {
  fa_plan_info info;
  fa_plan_info_init(&info, sizeof info);
  const fa_status status = query(&info);
  if (status != FA_OK) return status;
  kernel = info.kernel;
  if (kernel.empty()) e.damage += std::string(name) + "_query: no kernel name; ";
  if (data.problem.own_workspace) return call(nullptr, size_t{0});
  Workspace workspace(backend, info.workspace_bytes);
  const fa_status result = call(workspace.get(), static_cast<size_t>(info.workspace_bytes));
  if (!workspace.guards_intact()) e.damage += std::string(name) + ": written outside its workspace; ";
  return result;
}

Execution execute(Backend &backend, const Data &data) { return execute(backend, backend.context(), data); }

Execution execute(Backend &backend, fa_context context, const Data &data) {
  Execution e;
  Upload device(backend, data);
  const fa_attention *attention = &device.attention;
  const fa_gradients *gradients = &device.gradients;
  e.forward = device.make_score(context);
  if (e.forward != FA_OK) {
    e.error = error_text(context, e.forward);
    return e;
  }
  e.forward = query_and_call(
      backend, data, e, "fa_forward", e.kernels[0],
      [&](fa_plan_info *info) { return fa_forward_query(context, attention, info); },
      [&](void *workspace, size_t bytes) { return fa_forward(context, attention, workspace, bytes, backend.stream()); });
  if (e.forward != FA_OK) e.error = error_text(context, e.forward);
  if (e.forward == FA_ERROR_NOT_BUILT && kMayLeaveOut) {
    e.left_out[0] = true;
    e.forward = device.forward_on_cpu();
  }
  if (e.forward == FA_OK && data.problem.backward) {
    e.backward = query_and_call(
        backend, data, e, "fa_backward", e.kernels[1],
        [&](fa_plan_info *info) { return fa_backward_query(context, attention, gradients, info); },
        [&](void *workspace, size_t bytes) {
          return fa_backward(context, attention, gradients, workspace, bytes, backend.stream());
        });
    if (e.backward != FA_OK) e.error = error_text(context, e.backward);
    if (e.backward == FA_ERROR_NOT_BUILT && kMayLeaveOut) {
      e.left_out[1] = true;
      e.backward = FA_OK;
    }
  }
  e.damage += device.changed_score_tensors();
  for (int n = 0; n < kNumRoles; ++n) {
    const Role role = static_cast<Role>(n);
    HostTensor now = device.download(role);
    if (is_output(role)) {
      e.outputs[role] = std::move(now);
    } else if (now.present() && now.bytes() != data.tensors[role].bytes()) {
      e.damage += std::string(role_name(role)) + " is an input and was changed; ";
    }
  }
  return e;
}

void with_structs(Backend &backend, const Data &data,
                  const std::function<void(const fa_attention &, const fa_gradients &)> &body) {
  Upload device(backend, data);
  const fa_status status = device.make_score(backend.context());
  ASSERT_EQ(status, FA_OK) << error_text(backend.context(), status);
  body(device.attention, device.gradients);
}

std::array<std::string, 2> kernels_of(Backend &backend, fa_context context, const Data &data) {
  std::array<std::string, 2> names;
  with_structs(backend, data, [&](const fa_attention &attention, const fa_gradients &gradients) {
    fa_plan_info info;
    fa_plan_info_init(&info, sizeof info);
    if (fa_forward_query(context, &attention, &info) == FA_OK) names[0] = info.kernel;
    if (data.problem.backward && fa_backward_query(context, &attention, &gradients, &info) == FA_OK) names[1] = info.kernel;
  });
  return names;
}

::testing::AssertionResult verify(const Backend &backend, const Data &data, const Execution &e) {
  if (!e.ok()) {
    return ::testing::AssertionFailure() << (e.forward != FA_OK ? "fa_forward: " : "fa_backward: ")
                                         << fa_status_name(e.forward != FA_OK ? e.forward : e.backward) << ", " << e.error
                                         << repro(backend, data);
  }
  std::string faults = e.damage;
  for (int n = 0; n < kNumRoles; ++n) {
    const Role role = static_cast<Role>(n);
    if (!is_output(role) || !e.outputs[role].present() || (e.left_out[1] && is_backward_output(role))) continue;
    const std::string fault = mismatch(data, role, e.outputs[role]);
    if (!fault.empty()) faults += "\n  " + fault;
  }
  if (faults.empty()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << faults << repro(backend, data);
}

::testing::AssertionResult check(Backend &backend, const Data &data) { return verify(backend, data, execute(backend, data)); }

::testing::AssertionResult check(Backend &backend, const Case &c) { return check(backend, *cached_data(c)); }

::testing::AssertionResult same_bits(const Data &data, const Execution &a, const Execution &b) {
  for (int n = 0; n < kNumRoles; ++n) {
    if (a.outputs[static_cast<size_t>(n)].bytes() != b.outputs[static_cast<size_t>(n)].bytes()) {
      return ::testing::AssertionFailure() << role_name(static_cast<Role>(n)) << " differs bitwise: " << describe(data.problem);
    }
  }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult same_alone(Backend &backend, const Case &c, int64_t seqlen_q, int64_t seqlen_k, bool infinite,
                                      bool padded) {
  Data batch = make_data(c, nullptr, /*with_expected=*/false);
  for (const Role role : {kV, kDout}) {
    if (infinite) batch.tensors[role].set(batch.element(role, 0, 0, 0, 0), INFINITY);
  }
  Case alone = c;
  alone.batch = 1;
  alone.q.seqlen = seqlen_q;
  alone.k.seqlen = seqlen_k;
  alone.q.slots = {seqlen_q};
  alone.k.slots = {seqlen_k};
  if (padded) {
    alone.q.packed = alone.k.packed = 0;
    alone.q.slots = alone.k.slots = {};
  }
  const auto copy = [&](HostTensor &to, int64_t at, Role role, int64_t from) { to.set(at, batch.tensors[role].get(from)); };
  const Data single = make_data(
      alone,
      [&](Data &d) {
        for (const auto &[role, rows] : {std::pair{kQ, seqlen_q}, {kDout, seqlen_q}, {kK, seqlen_k}, {kV, seqlen_k}}) {
          for (int64_t i = 0; i < rows; ++i) copy_row(batch, 1, i, d, 0, i, role);
        }
        for (int64_t h = 0; h < c.heads_q; ++h) {
          if (c.sink) copy(d.tensors[kSink], d.tensors[kSink].element(h), kSink, batch.tensors[kSink].element(h));
          for (int64_t i = 0; i < seqlen_q && c.dlse; ++i)
            copy(d.tensors[kDlse], d.row_element(kDlse, 0, h, i), kDlse, batch.row_element(kDlse, 1, h, i));
        }
      },
      /*with_expected=*/false);
  const Execution among = execute(backend, batch), apart = execute(backend, single);
  if (!among.ok() || !apart.ok()) return ::testing::AssertionFailure() << among.error << apart.error << " in " << describe(c);
  const auto differ = [&](Role role, int64_t of_batch, int64_t of_single) {
    return among.outputs[role].get(of_batch) != apart.outputs[role].get(of_single);
  };
  const auto failure = [&](Role role, int64_t row, int64_t head) {
    return ::testing::AssertionFailure() << role_name(role) << " of row " << row << " and head " << head << " in "
                                         << describe(c);
  };
  for (const auto &[role, rows, heads, columns] : {std::tuple{kOut, seqlen_q, c.heads_q, c.head_dim_v},
                                                   {kDq, seqlen_q, c.heads_q, c.head_dim},
                                                   {kDk, seqlen_k, c.heads_k, c.head_dim},
                                                   {kDv, seqlen_k, c.heads_k, c.head_dim_v}}) {
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t n = 0; n < columns; ++n)
          if (differ(role, batch.element(role, 1, i, h, n), single.element(role, 0, i, h, n))) return failure(role, i, h);
      }
    }
  }
  for (int64_t h = 0; h < c.heads_q; ++h) {
    for (int64_t i = 0; i < seqlen_q; ++i)
      if (differ(kLse, batch.row_element(kLse, 1, h, i), single.row_element(kLse, 0, h, i))) return failure(kLse, i, h);
  }
  return ::testing::AssertionSuccess();
}

void PrintTo(const std::shared_ptr<Backend> &backend, std::ostream *stream) { *stream << backend->name(); }

std::string backend_name(const ::testing::TestParamInfo<std::shared_ptr<Backend>> &info) { return info.param->name(); }

}  // namespace parity
