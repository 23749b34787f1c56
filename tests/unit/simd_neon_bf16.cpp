// SPDX-License-Identifier: Apache-2.0
// Bytes as bf16 against the same bytes as fp32.
#define FA_TARGET_NEON_BF16
#include "cpu/simd.h"
#include "unit/simd_isa.h"

namespace fa::cpu::FA_ISA {
namespace {

template <class Element>
int differing(const uint8_t *bytes, I numbers) {
  const auto *from = reinterpret_cast<const typename Element::Type *>(bytes);
  uint16_t bf16[2 * kWidth];
  Simd::istore(reinterpret_cast<uint32_t *>(bf16), numbers);
  int count = 0;
  for (int n = 0; n < 2 * kWidth; n += kWidth) {
    float expected[kWidth], found[kWidth];
    Simd::store(expected, Element::load(from + n));
    Simd::store(found, Simd::load_bf16(bf16 + n));
    for (int i = 0; i < kWidth; ++i) count += expected[i] == expected[i] ? found[i] != expected[i] : found[i] == found[i];
  }
  return count;
}

}  // namespace

int differing_bytes() {
  int count = 0;
  for (int first = 0; first < 256; first += 2 * kWidth) {
    uint8_t bytes[2 * kWidth];
    for (int i = 0; i < 2 * kWidth; ++i) bytes[i] = static_cast<uint8_t>(first + i);
    count += differing<ElementI8>(bytes, Simd::i8_to_bf16(reinterpret_cast<const int8_t *>(bytes)));
    count += differing<ElementE4m3>(bytes, Simd::e4m3_to_bf16(bytes));
  }
  return count;
}

}  // namespace fa::cpu::FA_ISA
