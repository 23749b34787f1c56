// SPDX-License-Identifier: Apache-2.0
// Functions of cpu/simd.h against those of the standard library in double. The parity suite sees them at every instruction set, but only
// through a softmax.
#define FA_TARGET_PORTABLE
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "cpu/launch.h"
#include "unit/simd_checks.h"

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

#if defined(FA_HAVE_SIMD_AVX)
TEST(Simd, RoughExp2IsAsExactAsItSays) {
  if (!fa::cpu::has_isa(FA_CPU_ISA_AVX512)) GTEST_SKIP() << "this processor has no AVX-512";
  EXPECT_LE(fa::cpu::avx512::rough_exp2_error(), 3.2e-6);
}
#endif

struct Isa {
  const char *name;
  fa_cpu_isa isa;
  void (*widen_bytes)(float (&e4m3)[256], float (&int8)[256]);
  int (*differing_sums)(uint32_t seed);
};
constexpr Isa kIsas[] = {
    {"portable", FA_CPU_ISA_PORTABLE, fa::cpu::portable::widen_bytes, fa::cpu::portable::differing_sums},
#if defined(FA_HAVE_SIMD_AVX)
    {"avx2", FA_CPU_ISA_AVX2, fa::cpu::avx2::widen_bytes, fa::cpu::avx2::differing_sums},
    {"avx512", FA_CPU_ISA_AVX512, fa::cpu::avx512::widen_bytes, fa::cpu::avx512::differing_sums},
#endif
#if defined(FA_HAVE_SIMD_NEON)
    {"neon", FA_CPU_ISA_NEON, fa::cpu::neon::widen_bytes, fa::cpu::neon::differing_sums},
#endif
#if defined(FA_HAVE_SVE256)
    {"sve256", FA_CPU_ISA_SVE256, fa::cpu::sve256::widen_bytes, fa::cpu::sve256::differing_sums},
#endif
};

// Sign, four bits of exponent (bias 7), three of fraction; the largest magnitude is NaN, there is no infinity.
TEST(Simd, WidensEveryByte) {
  for (const Isa &isa : kIsas) {
    if (!fa::cpu::has_isa(isa.isa)) continue;
    float e4m3[256], int8[256];
    isa.widen_bytes(e4m3, int8);
    for (int byte = 0; byte < 256; ++byte) {
      EXPECT_EQ(int8[byte], byte < 128 ? byte : byte - 256) << isa.name;
      const int exponent = byte >> 3 & 15, fraction = byte & 7;
      const double magnitude = exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 7 - 3);
      EXPECT_EQ(std::signbit(e4m3[byte]), byte >= 128) << isa.name << " " << byte;
      if ((byte & 0x7F) == 0x7F) {
        EXPECT_TRUE(std::isnan(e4m3[byte])) << isa.name << " " << byte;
      } else {
        EXPECT_EQ(std::abs(e4m3[byte]), magnitude) << isa.name << " " << byte;
      }
    }
  }
}

// Results of decoding do not depend on how keys and rows are grouped.
TEST(Simd, SumsOfManyVectorsAreThoseOfEach) {
  for (const Isa &isa : kIsas) {
    if (!fa::cpu::has_isa(isa.isa)) continue;
    EXPECT_EQ(isa.differing_sums(std::random_device()()), 0) << isa.name;
  }
}

TEST(Simd, BytesAreTheSameInBf16) {
#if defined(FA_HAVE_NEON_BF16)
  if (!fa::cpu::has_isa(FA_CPU_ISA_NEON_BF16)) GTEST_SKIP() << "the processor lacks FEAT_BF16";
  EXPECT_EQ(fa::cpu::neon_bf16::differing_bytes(), 0);
#else
  GTEST_SKIP() << "built without FEAT_BF16";
#endif
}

TEST(Simd, ProductsOfFp16AreThoseOfFp32) {
#if defined(FA_HAVE_NEON_FHM)
  if (!fa::cpu::has_isa(FA_CPU_ISA_NEON_FHM)) GTEST_SKIP() << "the processor lacks FEAT_FHM";
  const uint32_t seed = std::random_device()();
  EXPECT_EQ(fa::cpu::neon_fhm::differing_products(seed), 0) << "seed " << seed;
#else
  GTEST_SKIP() << "built without FEAT_FHM";
#endif
}

}  // namespace
