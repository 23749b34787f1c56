// SPDX-License-Identifier: Apache-2.0
// What unit/simd_isa.h declares, for the instruction set of the source that includes this.
#pragma once

#include "cpu/simd.h"
#include "unit/simd_isa.h"

namespace fa::cpu::FA_ISA {

void widen_bytes(float (&e4m3)[256], float (&int8)[256]) {
  uint8_t bytes[256];
  for (int i = 0; i < 256; ++i) bytes[i] = static_cast<uint8_t>(i);
  for (int i = 0; i < 256; i += kWidth) {
    Simd::store(e4m3 + i, ElementE4m3::load(bytes + i));
    Simd::store(int8 + i, ElementI8::load(reinterpret_cast<const int8_t *>(bytes) + i));
  }
}

template <int N>
int differing(const float *numbers) {
  F x[N];
  for (int n = 0; n < N; ++n) x[n] = Simd::load(numbers + n * kWidth);
  float sums[N];
  Simd::reduce_add(x, sums);
  int count = 0;
  for (int n = 0; n < N; ++n)
    count += __builtin_bit_cast(uint32_t, sums[n]) != __builtin_bit_cast(uint32_t, Simd::reduce_add(x[n]));
  return count;
}

int differing_sums(uint32_t seed) {
  float numbers[16 * kWidth];
  int count = 0;
  for (int repeat = 0; repeat < 100; ++repeat) {
    for (float &x : numbers) {
      seed = seed * 1664525u + 1013904223u;
      x = static_cast<float>(static_cast<int32_t>(seed)) * 0x1p-31f;
    }
    count +=
        differing<16>(numbers) + differing<8>(numbers) + differing<4>(numbers) + differing<2>(numbers) + differing<1>(numbers);
  }
  return count;
}

#if defined(FA_TARGET_AVX512)
double rough_exp2_error() {
  double largest = 0;
  const auto result = [](float x) {
    float lanes[kWidth];
    Simd::store(lanes, Simd::rough_exp2(Simd::set(x)));
    return static_cast<double>(lanes[kWidth - 1]);
  };
  const auto see = [&](float x) {
    const double exact = __builtin_exp2(static_cast<double>(x)), error = __builtin_fabs(result(x) / exact - 1);
    if (!(error <= largest)) largest = error;
  };
  for (int i = -125 * 256; i <= 9 * 256; ++i) {
    see(static_cast<float>(i) / 256);
    see(static_cast<float>(i) / 256 - 0.0013f);
  }
  for (int i = -126; i <= 9; ++i) {
    if (result(static_cast<float>(i)) != __builtin_exp2(i)) return kInfinity;
  }
  const float nan = __builtin_nanf("");
  if (result(-kInfinity) != 0 || result(kInfinity) != static_cast<double>(kInfinity) || result(nan) == result(nan))
    return kInfinity;
  return largest;
}
#endif

}  // namespace fa::cpu::FA_ISA
