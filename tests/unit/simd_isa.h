// SPDX-License-Identifier: Apache-2.0
// Verbs of cpu/simd.h of one instruction set, which only a source compiled for it can reach. Call them on processors that have it.
#pragma once

#include <cstdint>

#define FA_DECLARE_SIMD_CHECKS(isa)                                                  \
  namespace fa::cpu::isa {                                                           \
  /* The numbers of all bytes: as e4m3, and as int8. */                              \
  void widen_bytes(float (&e4m3)[256], float (&int8)[256]);                          \
  /* Sums of vectors, 16, 8 and 4 at a time and one by one, that differ in a bit. */ \
  int differing_sums(uint32_t seed);                                                 \
  }
FA_DECLARE_SIMD_CHECKS(portable)
FA_DECLARE_SIMD_CHECKS(avx2)
FA_DECLARE_SIMD_CHECKS(avx512)
FA_DECLARE_SIMD_CHECKS(neon)
FA_DECLARE_SIMD_CHECKS(sve256)
#undef FA_DECLARE_SIMD_CHECKS

// The largest relative error of Simd::rough_exp2, infinite if it errs at a whole number, at an infinity or for NaN.
namespace fa::cpu::avx512 {
double rough_exp2_error();
}

namespace fa::cpu::neon_bf16 {
// Bytes, as int8 and as e4m3, that are another number in bf16 than in fp32.
int differing_bytes();
}  // namespace fa::cpu::neon_bf16
namespace fa::cpu::neon_fhm {
// Sums of products of fp16 numbers, of vectors and of a lane and a vector, that differ in a bit from those of the same numbers in fp32.
int differing_products(uint32_t seed);
}  // namespace fa::cpu::neon_fhm
