// SPDX-License-Identifier: Apache-2.0
// fmlal and fmlal2 against a loop over fp32 multiply-adds.
#define FA_TARGET_NEON_FHM
#include "cpu/simd.h"
#include "unit/simd_isa.h"

namespace fa::cpu::FA_ISA {
namespace {

constexpr int kNumbers = 2 * kWidth;

int differing(const float (&x)[kWidth], F y) {
  int count = 0;
  float lanes[kWidth];
  Simd::store(lanes, y);
  for (int n = 0; n < kWidth; ++n) count += __builtin_bit_cast(uint32_t, x[n]) != __builtin_bit_cast(uint32_t, lanes[n]);
  return count;
}

// low + a_n b, high + a_n b for each lane n of a.
template <int n>
int differing_lanes(I a, I b, const float (&x)[kNumbers], const float (&y)[kNumbers], const float (&sums)[kWidth]) {
  if constexpr (n < kNumbers) {
    F low = Simd::load(sums), high = low;
    Simd::fma_f16_lane<n>(a, b, low, high);
    float of_low[kWidth], of_high[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      of_low[i] = __builtin_fmaf(x[n], y[i], sums[i]);
      of_high[i] = __builtin_fmaf(x[n], y[kWidth + i], sums[i]);
    }
    return differing(of_low, low) + differing(of_high, high) + differing_lanes<n + 1>(a, b, x, y, sums);
  }
  return 0;
}

}  // namespace

int differing_products(uint32_t seed) {
  int count = 0;
  for (int repeat = 0; repeat < 1000; ++repeat) {
    uint16_t a[kNumbers], b[kNumbers];
    float x[kNumbers], y[kNumbers], sums[kWidth], expected[kWidth];
    const auto next = [&] { return seed = seed * 1664525u + 1013904223u; };
    // Numbers below 2, one in eight of them subnormal.
    const auto number = [&] { return static_cast<uint16_t>((next() >> 16) & (next() >> 29 == 0 ? 0x83FFu : 0xBFFFu)); };
    for (uint16_t &x16 : a) x16 = number();
    for (uint16_t &y16 : b) y16 = number();
    for (int n = 0; n < kNumbers; n += kWidth)
      Simd::store(x + n, Simd::load_f16(a + n)), Simd::store(y + n, Simd::load_f16(b + n));
    for (float &s : sums) s = static_cast<float>(static_cast<int32_t>(next())) * 0x1p-30f;
    for (int n = 0; n < kWidth; ++n)
      expected[n] = __builtin_fmaf(x[kWidth + n], y[kWidth + n], __builtin_fmaf(x[n], y[n], sums[n]));
    const I left = Simd::iload(reinterpret_cast<const uint32_t *>(a)),
            right = Simd::iload(reinterpret_cast<const uint32_t *>(b));
    count += differing(expected, Simd::fma_f16(left, right, Simd::load(sums)));
    count += differing_lanes<0>(left, right, x, y, sums);
  }
  return count;
}

}  // namespace fa::cpu::FA_ISA
