// SPDX-License-Identifier: Apache-2.0
#include "tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "reference/number_formats.h"

namespace cli {
namespace {

// xorshift; the sum of three uniform numbers is about normal, with variance 1.
class Random {
 public:
  explicit Random(uint32_t seed) : state_(seed * 2654435761u | 1) {}
  uint32_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 17;
    state_ ^= state_ << 5;
    return state_;
  }
  double normal() {
    double sum = 0;
    for (int n = 0; n < 3; ++n) sum += (bits() >> 8) * 0x1p-23 - 1.0;
    return sum;
  }

 private:
  uint32_t state_;
};

void write_integers(std::vector<char> &data, int64_t count, const std::function<int32_t(int64_t)> &value) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t x = value(i);
    std::memcpy(data.data() + 4 * i, &x, 4);
  }
}

}  // namespace

std::vector<char> host_data(const Spec &spec, const std::string &name, const fa_tensor &tensor, uint32_t seed) {
  std::vector<char> data(static_cast<size_t>(bytes(tensor)));
  const int64_t count = elements(tensor);
  Random random(seed);
  if (name == "cu_seqlens_q" || name == "cu_seqlens_k") {
    const int64_t rows = name == "cu_seqlens_q" ? spec.rows_q : spec.rows_k;
    write_integers(data, count, [&](int64_t i) { return static_cast<int32_t>(i * rows); });
  } else if (name == "seqused_k") {
    write_integers(data, count, [&](int64_t) { return static_cast<int32_t>(spec.rows_k); });
  } else if (name == "page_table") {  // last page first
    write_integers(data, count, [&](int64_t i) { return static_cast<int32_t>(count - 1 - i); });
  } else if (name == "block_mask") {  // three of four blocks are visible, always including the first of each row
    for (int64_t i = 0; i < count; ++i) data[static_cast<size_t>(i)] = i % tensor.shape[3] == 0 || random.bits() % 4 != 0;
  } else if (name == "alibi_slopes") {
    for (int64_t h = 0; h < count; ++h) {
      reference::store(data.data() + 4 * h, FA_FLOAT32,
                       std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(count)));
    }
  } else {
    // A million numbers are enough; longer tensors repeat them.
    const int64_t size = dtype_bytes(tensor.dtype), fresh = std::min(count, (int64_t{1} << 20) - 3);
    for (int64_t i = 0; i < fresh; ++i) reference::store(data.data() + i * size, tensor.dtype, random.normal());
    for (int64_t i = fresh; i < count; i += fresh) {
      std::memcpy(data.data() + i * size, data.data(), static_cast<size_t>(std::min(fresh, count - i) * size));
    }
  }
  return data;
}

Tensors::Tensors(Device &device, Problem &problem, uint32_t seed) : spec_(problem.spec) {
  for (const Problem::Member &member : problem.members()) {
    const auto found = buffers_.emplace(member.name, Buffer(device, static_cast<size_t>(bytes(*member.tensor))));
    Buffer &buffer = found.first->second;
    member.tensor->data = buffer.data();
    const bool saved = member.name == "out" || member.name == "lse";  // inputs of a backward pass, which a forward pass writes
    if (member.output || saved) continue;
    seeds_[member.name] = ++seed;
    buffer.upload(host_data(spec_, member.name, *member.tensor, seed).data());
  }
  if (problem.spec.pass == Pass::backward) {
    Spec forward_spec = problem.spec;
    forward_spec.pass = Pass::forward;
    Problem forward(forward_spec);
    for (const Problem::Member &member : forward.members()) member.tensor->data = address(member.name);
    device.check(device.run(forward, nullptr, 0), "the forward pass before the backward pass");
  }
}

std::vector<char> Tensors::input(const Problem::Member &member) const {
  return host_data(spec_, member.name, *member.tensor, seeds_.at(member.name));
}

std::vector<char> Tensors::output(const std::string &name) const {
  const Buffer &buffer = buffers_.at(name);
  std::vector<char> data(buffer.bytes());
  buffer.download(data.data());
  return data;
}

}  // namespace cli
