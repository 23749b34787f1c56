// SPDX-License-Identifier: Apache-2.0
// Division by a number that the host knows, by a multiplication and a shift in the kernel.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fa::cuda {

// Exact for dividends below 2^31: with 2^(l - 1) < value <= 2^l, multiplier / 2^(31 + l) exceeds 1 / value by less than 2^-31 / value.
struct Divisor {
  uint32_t value = 1;
  uint32_t multiplier = uint32_t{1} << 31;
  uint32_t shift = 31;

  Divisor() = default;
  explicit Divisor(int64_t divisor) : value(static_cast<uint32_t>(divisor)) {
    while ((uint64_t{1} << (shift - 31)) < value) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << shift) + value - 1) / value);
  }

  FA_HD int quotient(int n) const {
    return static_cast<int>((static_cast<uint64_t>(static_cast<uint32_t>(n)) * multiplier) >> shift);
  }
  FA_HD int remainder(int n) const { return n - quotient(n) * static_cast<int>(value); }
};

}  // namespace fa::cuda
