// SPDX-License-Identifier: Apache-2.0
#include "parity/host_tensor.h"

#include <algorithm>
#include <cstdlib>

#include "reference/number_formats.h"

namespace parity {
namespace {

// Elements of poison on either side: more than any vector register holds. FA_TEST_GUARD=0 leaves that to an address sanitizer.
int64_t guard() {
  static const int64_t elements = [] {
    const char *text = std::getenv("FA_TEST_GUARD");
    return text ? std::strtoll(text, nullptr, 10) : 64;
  }();
  return elements;
}

}  // namespace

HostTensor::HostTensor(fa_dtype dtype, std::initializer_list<int64_t> shape, std::vector<int64_t> stride, int64_t shift) {
  view_.dtype = dtype;
  view_.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), view_.shape);
  std::copy(stride.begin(), stride.end(), view_.stride);
  int64_t lowest = 0, highest = -1;  // of the elements relative to the first one
  if (!empty()) {
    highest = 0;
    for (int32_t n = 0; n < view_.ndim; ++n) {
      const int64_t reach = (view_.shape[n] - 1) * view_.stride[n];
      (reach < 0 ? lowest : highest) += reach;
    }
  }
  origin_ = guard() + (bits() ? 8 * shift : shift) - lowest;
  bytes_.assign(bytes_of(origin_ + highest + 1 + guard()), kPoison);
}

bool HostTensor::empty() const {
  return std::any_of(view_.shape, view_.shape + view_.ndim, [](int64_t size) { return size == 0; });
}

// Bytes that hold so many elements.
size_t HostTensor::bytes_of(int64_t elements) const {
  return bits() ? static_cast<size_t>((elements + 7) / 8) : static_cast<size_t>(elements) * reference::element_bytes(dtype());
}

double HostTensor::get(int64_t element) const {
  if (bits()) return bytes_[static_cast<size_t>(element / 8)] >> (element % 8) & 1;
  return reference::load(bytes_.data() + static_cast<size_t>(element) * reference::element_bytes(dtype()), dtype());
}

void HostTensor::set(int64_t element, double value) {
  if (bits()) {
    unsigned char &byte = bytes_[static_cast<size_t>(element / 8)];
    const auto bit = static_cast<unsigned char>(1 << (element % 8));
    byte = static_cast<unsigned char>(value != 0 ? byte | bit : byte & ~bit);
    return;
  }
  reference::store(bytes_.data() + static_cast<size_t>(element) * reference::element_bytes(dtype()), dtype(), value);
}

bool HostTensor::poisoned(int64_t element) const {
  const size_t size = reference::element_bytes(dtype());
  const auto first = bytes_.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(element) * size);
  return std::all_of(first, first + static_cast<std::ptrdiff_t>(size), [](unsigned char byte) { return byte == kPoison; });
}

fa_tensor HostTensor::at(unsigned char *memory) const {
  fa_tensor tensor = view_;
  tensor.data = memory + bytes_of(origin_);
  return tensor;
}

int64_t HostTensor::num_elements_stored() const {
  return static_cast<int64_t>(bytes_.size() / reference::element_bytes(dtype()));
}

}  // namespace parity
