// SPDX-License-Identifier: Apache-2.0
#include "gpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <ostream>
#include <random>

#include "gpu/device.h"

namespace gpu {
namespace {

constexpr int64_t kLead = 3, kTrail = 5;    // rows of packed tensors that belong to no sequence
constexpr int64_t kFar = int64_t{1} << 20;  // elements between rows of Layout::far
constexpr uint64_t kDropoutSeed = 0x5EED0FD209;

Attention::Side side_of(int64_t batch, int64_t seqlen, const std::vector<int64_t> &slots, const std::vector<int64_t> &used) {
  Attention::Side side;
  side.packed = !slots.empty();
  side.slots = side.packed ? slots : std::vector<int64_t>(static_cast<size_t>(batch), seqlen);
  int64_t at = side.packed ? kLead : 0;
  for (const int64_t slot : side.slots) {
    side.starts.push_back(at);
    if (side.packed) at += slot;
  }
  side.rows = side.packed ? at + kTrail : seqlen;
  side.used = used.empty() ? side.slots : used;
  side.longest = *std::max_element(side.slots.begin(), side.slots.end());
  return side;
}

// Strides of (batch, rows, heads, columns).
std::vector<int64_t> strides(Layout layout, int64_t rows, int64_t heads, int64_t columns) {
  switch (layout) {
    case Layout::bshd:
      return {rows * heads * columns, heads * columns, columns, 1};
    case Layout::bhsd:
      return {rows * heads * columns, columns, rows * columns, 1};
    case Layout::far:
      return {rows * kFar, kFar, kFar / heads, 1};
    case Layout::gaps:
    case Layout::odd:
      break;
  }
  const int64_t gap = layout == Layout::gaps ? 8 : 3;
  const int64_t row = heads * (columns + gap) + gap;
  return {rows * row + gap, row, columns + gap, 1};
}

Tensor make(const Shape &shape, const Attention::Side &side, int64_t heads, int64_t columns, cudaStream_t stream) {
  std::vector<int64_t> sizes{static_cast<int64_t>(side.slots.size()), side.rows, heads, columns};
  std::vector<int64_t> steps = strides(shape.layout, side.rows, heads, columns);
  if (side.packed) {
    sizes.erase(sizes.begin());
    steps.erase(steps.begin());
  }
  return Tensor(shape.dtype, sizes, steps, stream);
}

}  // namespace

void PrintTo(const Shape &shape, std::ostream *stream) { *stream << shape.name; }

uint64_t run_seed() {
  static const uint64_t seed = [] {
    const char *given = std::getenv("FA_TEST_SEED");
    const uint64_t value = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::printf("FA_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

Attention::Attention(fa_context context, cudaStream_t stream, const Shape &shape)
    : context_(context),
      stream_(stream),
      shape_(shape),
      q_side_(side_of(shape.batch, shape.seqlen_q, shape.slots_q, shape.used_q)),
      k_side_(side_of(shape.batch, shape.seqlen_k, shape.slots_k, shape.used_k)) {
  uint64_t seed = std::hash<std::string>{}(shape.name) ^ run_seed();
  const auto input = [&](const Side &side, int64_t heads, int64_t columns) {
    Tensor tensor = make(shape_, side, heads, columns, stream_);
    for (size_t b = 0; b < side.slots.size(); ++b) {
      const fa_tensor sequence = side.packed ? tensor.view() : slice(tensor.view(), 0, static_cast<int64_t>(b), 1);
      fill_normal(slice(sequence, side.packed ? 0 : 1, side.starts[b], side.used[b]), ++seed, stream_);
    }
    return tensor;
  };
  q = input(q_side_, shape.heads_q, shape.head_dim);
  k = input(k_side_, shape.heads_k, shape.head_dim);
  v = input(k_side_, shape.heads_k, shape.columns_v());
  out = make(shape, q_side_, shape.heads_q, shape.columns_v(), stream);
  if (q_side_.packed) {
    lse = Tensor(FA_FLOAT32, {shape.heads_q, q_side_.rows}, {q_side_.rows, 1}, stream);
  } else {
    const int64_t batch = static_cast<int64_t>(q_side_.slots.size());
    lse = Tensor(FA_FLOAT32, {batch, shape.heads_q, q_side_.rows}, {shape.heads_q * q_side_.rows, q_side_.rows, 1}, stream);
  }

  fa_attention_init(&attention_, sizeof attention_);
  attention_.q = q.view();
  attention_.k = k.view();
  attention_.v = v.view();
  attention_.out = out.view();
  attention_.lse = lse.view();
  const auto lengths = [&](const Side &side, const std::vector<int64_t> &used, Tensor &cu, Tensor &counts, fa_tensor &cu_field,
                           fa_tensor &used_field, int64_t &max) {
    if (side.packed) {
      cu = cu_seqlens(side);
      cu_field = cu.view();
      max = side.longest;
    }
    if (!used.empty()) {
      counts = seqused(side);
      used_field = counts.view();
    }
  };
  lengths(q_side_, shape.used_q, cu_q_, used_q_, attention_.cu_seqlens_q, attention_.seqused_q, attention_.max_seqlen_q);
  lengths(k_side_, shape.used_k, cu_k_, used_k_, attention_.cu_seqlens_k, attention_.seqused_k, attention_.max_seqlen_k);
  attention_.mask = shape.mask.kind;
  if (shape.mask.window_left >= 0) {
    attention_.window |= FA_WINDOW_LEFT;
    attention_.window_left = shape.mask.window_left;
  }
  if (shape.mask.window_right >= 0) {
    attention_.window |= FA_WINDOW_RIGHT;
    attention_.window_right = shape.mask.window_right;
  }
  attention_.flags = shape.flags;
  attention_.softcap = shape.softcap;
  attention_.dropout_p = shape.dropout;
  attention_.dropout_seed = shape.dropout > 0 ? kDropoutSeed : 0;

  fa_gradients_init(&gradients_, sizeof gradients_);
  if (shape.backward) {
    dout = input(q_side_, shape.heads_q, shape.columns_v());
    dq = make(shape, q_side_, shape.heads_q, shape.head_dim, stream);
    dk = make(shape, k_side_, shape.heads_k, shape.head_dim, stream);
    dv = make(shape, k_side_, shape.heads_k, shape.columns_v(), stream);
    gradients_.dout = dout.view();
    gradients_.dq = dq.view();
    gradients_.dk = dk.view();
    gradients_.dv = dv.view();
  }
  inputs_ = hash_of_inputs();
}

Tensor Attention::cu_seqlens(const Side &side) const {
  std::vector<int32_t> offsets(side.starts.begin(), side.starts.end());
  offsets.push_back(static_cast<int32_t>(side.starts.back() + side.slots.back()));
  Tensor tensor(FA_INT32, {static_cast<int64_t>(offsets.size())}, {1}, stream_);
  check(
      cudaMemcpyAsync(tensor.view().data, offsets.data(), offsets.size() * sizeof offsets[0], cudaMemcpyHostToDevice, stream_),
      "upload");
  check(cudaStreamSynchronize(stream_), "upload");
  return tensor;
}

Tensor Attention::seqused(const Side &side) const {
  const std::vector<int32_t> counts(side.used.begin(), side.used.end());
  Tensor tensor(FA_INT32, {static_cast<int64_t>(counts.size())}, {1}, stream_);
  check(cudaMemcpyAsync(tensor.view().data, counts.data(), counts.size() * sizeof counts[0], cudaMemcpyHostToDevice, stream_),
        "upload");
  check(cudaStreamSynchronize(stream_), "upload");
  return tensor;
}

double Attention::scale() const { return 1 / std::sqrt(static_cast<double>(shape_.head_dim)); }

template <typename Query, typename Call>
std::string Attention::run(const char *name, Query query, Call call) {
  fa_plan_info info;
  fa_plan_info_init(&info, sizeof info);
  fa_status status = query(&info);
  if (status / 100 == 2) {
    refusal_ = info.reason;
    return "";
  }
  if (status != FA_OK) return std::string(name) + "_query: " + fa_last_error(context_);
  kernel_ = info.kernel;
  const Workspace workspace(info.workspace_bytes, stream_);
  status = call(workspace.get(), info.workspace_bytes);
  if (status != FA_OK) return std::string(name) + ": " + fa_last_error(context_);
  check(cudaStreamSynchronize(stream_), name);
  return workspace.guards_intact(stream_) ? "" : std::string(name) + ": written outside its workspace";
}

std::string Attention::forward() {
  return run(
      "fa_forward", [&](fa_plan_info *info) { return fa_forward_query(context_, &attention_, info); },
      [&](void *memory, size_t bytes) { return fa_forward(context_, &attention_, memory, bytes, stream_); });
}

std::string Attention::backward() {
  return run(
      "fa_backward", [&](fa_plan_info *info) { return fa_backward_query(context_, &attention_, &gradients_, info); },
      [&](void *memory, size_t bytes) { return fa_backward(context_, &attention_, &gradients_, memory, bytes, stream_); });
}

void Attention::reset() {
  for (Tensor *tensor : {&out, &lse, &dq, &dk, &dv}) {
    if (tensor->view().data != nullptr) tensor->reset(stream_);
  }
}

std::vector<uint64_t> Attention::hashes() const {
  std::vector<uint64_t> all;
  for (const Tensor *tensor : {&out, &lse, &dq, &dk, &dv}) {
    if (tensor->view().data != nullptr) all.push_back(tensor->hash(stream_));
  }
  return all;
}

uint64_t Attention::hash_of_inputs() const {
  uint64_t sum = 0;
  for (const Tensor *tensor : {&q, &k, &v, &dout, &cu_q_, &cu_k_, &used_q_, &used_k_}) {
    if (tensor->view().data != nullptr) sum = sum * 31 + tensor->hash(stream_);
  }
  return sum;
}

std::vector<fa_tensor> Attention::slots_of(const Tensor &tensor, const Side &side) const {
  std::vector<fa_tensor> parts;
  for (size_t b = 0; b < side.slots.size(); ++b) {
    const fa_tensor &view = tensor.view();
    if (!side.packed) {
      parts.push_back(slice(view, 0, static_cast<int64_t>(b), 1));
    } else {
      parts.push_back(slice(view, view.ndim == 2 ? 1 : 0, side.starts[b], side.slots[b]));  // lse has its rows last
    }
  }
  return parts;
}

std::string Attention::faults() {
  std::string text;
  if (hash_of_inputs() != inputs_) text += "an input was changed; ";
  const auto output = [&](const char *name, Tensor &tensor, const Side &side) {
    if (tensor.view().data == nullptr) return;
    const std::string found = tensor.faults(slots_of(tensor, side), stream_);
    if (!found.empty()) text += std::string(name) + ": " + found;
  };
  output("out", out, q_side_);
  output("lse", lse, q_side_);
  output("dq", dq, q_side_);
  output("dk", dk, k_side_);
  output("dv", dv, k_side_);
  return text;
}

Matrix Attention::matrix(const Tensor &tensor, const Side &side, int64_t b, int64_t h) const {
  const fa_tensor &view = tensor.view();
  const int last = view.ndim - 1;
  const auto n = static_cast<size_t>(b);
  const int64_t offset =
      (side.packed ? 0 : b * view.stride[0]) + side.starts[n] * view.stride[last - 2] + h * view.stride[last - 1];
  return {static_cast<const unsigned char *>(view.data) + offset * dtype_bytes(view.dtype), view.dtype, side.used[n],
          view.shape[last], view.stride[last - 2]};
}

Matrix Attention::lse_of(int64_t b, int64_t h) const {
  const fa_tensor &view = lse.view();
  const auto n = static_cast<size_t>(b);
  const int64_t offset = (q_side_.packed ? 0 : b * view.stride[0]) + h * view.stride[view.ndim - 2] + q_side_.starts[n];
  return {static_cast<const float *>(view.data) + offset, FA_FLOAT32, q_side_.used[n], 1, 1};
}

}  // namespace gpu
