// SPDX-License-Identifier: Apache-2.0
// The host's image of a tensor in device memory: its elements at their strides, everything between and around them poisoned.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "flashattn/flashattn.h"

namespace parity {

// Poison: all bits set, which is NaN in every floating-point type and -1 in every integer. A NaN that arithmetic makes has
// other bits.
constexpr unsigned char kPoison = 0xFF;

class HostTensor {
 public:
  HostTensor() = default;
  // Strides in elements, any sign; for FA_BIT in bits. The whole buffer is poisoned. `shift` moves the data off its 256-byte alignment by
  // some elements, for FA_BIT by some bytes.
  HostTensor(fa_dtype dtype, std::initializer_list<int64_t> shape, std::vector<int64_t> stride, int64_t shift = 0);

  bool present() const { return view_.ndim > 0; }
  fa_dtype dtype() const { return view_.dtype; }
  int64_t size(int dimension) const { return view_.shape[dimension]; }
  int64_t stride(int dimension) const { return view_.stride[dimension]; }
  bool empty() const;

  // Number of the element at these indices, for get() and set(); a tensor of fewer dimensions ignores the others.
  int64_t element(int64_t i0, int64_t i1 = 0, int64_t i2 = 0, int64_t i3 = 0) const {
    return origin_ + i0 * view_.stride[0] + i1 * view_.stride[1] + i2 * view_.stride[2] + i3 * view_.stride[3];
  }
  double get(int64_t element) const;
  void set(int64_t element, double value);
  bool poisoned(int64_t element) const;

  // The view for memory that holds a copy of bytes().
  fa_tensor at(unsigned char *memory) const;
  const std::vector<unsigned char> &bytes() const { return bytes_; }
  std::vector<unsigned char> &bytes() { return bytes_; }
  int64_t num_elements_stored() const;

 private:
  bool bits() const { return view_.dtype == FA_BIT; }
  size_t bytes_of(int64_t elements) const;

  fa_tensor view_{};  // data stays null, unused strides are 0
  int64_t origin_ = 0;
  std::vector<unsigned char> bytes_;
};

}  // namespace parity
