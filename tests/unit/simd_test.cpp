// SPDX-License-Identifier: Apache-2.0
// Functions of cpu/simd.h against those of the standard library in double. The parity suite sees them at every instruction set, but only
// through a softmax.
#define FA_TARGET_PORTABLE
#include "cpu/simd.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace {

namespace cpu = fa::cpu::FA_ISA;

TEST(Simd, Log2IsWithinTwoUnitsInTheLastPlace) {
  constexpr uint32_t kOne = 0x3F800000u, kInfinity = 0x7F800000u;
  for (uint32_t bits = kOne; bits < kInfinity; bits += bits < kOne + (1u << 23) ? 61 : 6007) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    float result[cpu::kWidth];
    cpu::Simd::store(result, cpu::log2(cpu::Simd::set(x)));
    const double expected = std::log2(static_cast<double>(x));
    const auto rounded = static_cast<float>(expected);
    const double unit = static_cast<double>(std::nextafter(rounded, std::numeric_limits<float>::infinity())) - rounded;
    for (const float y : result) {
      ASSERT_LE(std::abs(y - expected), bits == kOne ? 0 : 2 * unit) << "x = " << x;
    }
  }
}

}  // namespace
