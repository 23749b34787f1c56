// SPDX-License-Identifier: Apache-2.0
// The units of cpu/bf16_unit.h that are instructions on vectors (vdpbf16ps, bfmmla) against a loop over their products, bit for bit, and what
// FA_CPU_ISA_AUTO makes of them.
#include "unit/bf16_unit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "cpu/launch.h"

namespace {

#if defined(FA_HAVE_AVX512_BF16) || defined(FA_HAVE_NEON_BF16)
using fa::test::Bf16Product;

// What operands may hold: ordinary numbers, everything finite (overflow, underflow and subnormals included), or any bits at all.
enum class Kind { kOrdinary, kFinite, kAny };

uint16_t draw(std::mt19937_64 &rng, Kind kind) {
  if (kind == Kind::kOrdinary) {
    return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, std::normal_distribution<float>()(rng)) >> 16);
  }
  auto x = static_cast<uint16_t>(rng());
  if (kind == Kind::kFinite && (x & 0x7F80) == 0x7F80) x &= 0xBFFF;
  return x;
}

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }
float widened(uint16_t x) { return flushed(__builtin_bit_cast(float, uint32_t{x} << 16)); }
bool same(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b)); }

// Where row r, column c of 32 x 32 sums lie.
int64_t sum_at(const Bf16Product &x, int64_t r, int64_t c) {
  return r / 16 * x.sums_half + r % 16 * x.sums_row + c / 16 * x.sums_column + c % 16;
}

#if defined(FA_HAVE_NEON_BF16)
constexpr fa_cpu_isa kIsa = FA_CPU_ISA_NEON_BF16;

// Element k of row r of a tile of the left operand, and of column r of one of the right operand.
int64_t in_tile(int64_t r, int64_t k) { return r / 2 * 64 + k / 4 * 8 + r % 2 * 4 + k % 4; }
uint16_t left_of(const Bf16Product &x, int64_t r, int64_t k) {
  return x.left[r / 16 * x.left_half + k / 32 * x.left_step + in_tile(r % 16, k % 32)];
}
uint16_t right_of(const Bf16Product &x, int64_t k, int64_t c) {
  return x.right[k / 32 * 1024 + c / 16 * 512 + in_tile(c % 16, k % 32)];
}

// a + b rounded to odd: if it has more than the 24 bits of a float, it is cut off and its last bit is set.
float add_to_odd(double a, double b) {
  const double sum = a + b;
  if (!std::isfinite(sum)) return static_cast<float>(sum);
  const double b_part = sum - a, rest = (a - (sum - b_part)) + (b - b_part);  // exact: a + b = sum + rest
  double cut = sum;
  if (rest != 0 && (rest < 0) == (sum > 0)) cut = std::nextafter(sum, 0.0);
  uint64_t bits = __builtin_bit_cast(uint64_t, cut);
  if (rest != 0) bits |= 1;  // rounded to odd in double, which does not change what follows
  constexpr uint64_t kLost = (uint64_t{1} << 29) - 1;
  if ((bits & kLost) != 0) bits = (bits & ~kLost) | (kLost + 1);
  const double rounded = __builtin_bit_cast(double, bits);
  if (std::abs(rounded) >= 0x1p128) return static_cast<float>(std::copysign(HUGE_VAL, rounded));
  return std::abs(rounded) < 0x1p-126 ? std::copysign(0.0f, static_cast<float>(rounded)) : static_cast<float>(rounded);
}

// One sum, as Arm documents the instruction.
float expected(const Bf16Product &x, int64_t r, int64_t c, float before) {
  float sum = x.add ? before : 0.0f;
  const auto product = [&](int64_t k) {
    return add_to_odd(static_cast<double>(widened(left_of(x, r, k))) * static_cast<double>(widened(right_of(x, k, c))), 0.0);
  };
  for (int64_t k = 0; k < x.steps * 32; k += 2) {
    const float pair = add_to_odd(product(k), product(k + 1));
    sum = add_to_odd(flushed(sum), pair);
  }
  return sum;
}
#elif defined(FA_HAVE_AVX512_BF16)
constexpr fa_cpu_isa kIsa = FA_CPU_ISA_AVX512_BF16;

// One sum, as Intel documents the instruction: the odd product of a pair is added first.
float expected(const Bf16Product &x, int64_t r, int64_t c, float before) {
  float sum = x.add ? before : 0.0f;
  for (int64_t k = 0; k < x.steps * 32; k += 2) {
    const uint16_t *a = x.left + r / 16 * x.left_half + k / 32 * x.left_step + r % 16 * 32 + k % 32;
    const uint16_t *b = x.right + k / 32 * 1024 + c / 16 * 512 + k % 32 / 2 * 32 + c % 16 * 2;
    for (const int odd : {1, 0}) sum = flushed(std::fma(widened(a[odd]), widened(b[odd]), flushed(sum)));
  }
  return sum;
}
#endif

TEST(Bf16Unit, VectorsAgreeWithALoopBitForBit) {
  if (!fa::cpu::has_isa(kIsa)) GTEST_SKIP() << "this processor lacks cpu_isa " << kIsa;
  const unsigned seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 rng(seed);
  constexpr uint32_t kPoison = 0xFFC0BEEF;
  for (const Kind kind : {Kind::kOrdinary, Kind::kFinite, Kind::kAny}) {
    for (const int64_t rows : {1, 7, 8, 9, 15, 16, 17, 24, 25, 31, 32}) {
      for (const int64_t steps : {0, 1, 2, 3, 8}) {
        for (const bool add : {false, true}) {
          for (const bool scores : {false, true}) {  // the layouts of S = Q K^T and of O += P V
            std::vector<uint16_t> left(static_cast<size_t>(2 * 512 * 9)), right(static_cast<size_t>(1024 * 8));
            for (uint16_t &y : left) y = draw(rng, kind);
            for (uint16_t &y : right) y = draw(rng, kind);
            std::vector<float> sums(static_cast<size_t>(scores ? 32 * 256 : 8 * 256), __builtin_bit_cast(float, kPoison));
            Bf16Product x{add, rows, steps, left.data(), scores ? 512 : 512 * 9, scores ? 1024 : 512, right.data(), sums.data(),
                          16,  256,  0};
            x.sums_half = scores ? 16 * 256 : 4 * 256;
            if (scores) x.sums_row = 256, x.sums_column = 16;
            const int64_t written = (rows + 7) / 8 * 8;
            if (add) {
              for (int64_t r = 0; r < rows; ++r) {
                for (int64_t c = 0; c < 32; ++c) {
                  sums[static_cast<size_t>(sum_at(x, r, c))] =
                      __builtin_bit_cast(float, uint32_t{draw(rng, kind)} << 16 | (static_cast<uint32_t>(rng()) & 0xFFFF));
                }
              }
            }
            const std::vector<float> before = sums;
            fa::test::multiply_by_vectors(x);
            std::vector<bool> may_change(sums.size());
            for (int64_t r = 0; r < written; ++r) {
              for (int64_t c = 0; c < 32; ++c) {
                const auto at = static_cast<size_t>(sum_at(x, r, c));
                may_change[at] = true;
                if (r >= rows) continue;
                const float e = expected(x, r, c, before[at]);
                ASSERT_TRUE(same(sums[at], e)) << std::hexfloat << sums[at] << " instead of " << e << "; row " << r << " of "
                                               << rows << ", column " << c << ", " << steps << " steps";
              }
            }
            for (size_t i = 0; i < sums.size(); ++i) {
              ASSERT_TRUE(may_change[i] || std::memcmp(&sums[i], &before[i], sizeof(float)) == 0)
                  << "written outside of the sums";
            }
          }
        }
      }
    }
  }
}
#endif

#if defined(__x86_64__) && defined(__linux__)
// The table of processors, by what Linux says of this one.
TEST(Isa, AutoChoosesBf16VectorsWhereTheyAreFast) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string vendor, family;
  for (std::string line; std::getline(cpuinfo, line) && (vendor.empty() || family.empty());) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) continue;
    if (line.rfind("vendor_id", 0) == 0) vendor = line.substr(colon + 2);
    if (line.rfind("cpu family", 0) == 0) family = line.substr(colon + 2);
  }
  const bool fast = vendor == "AuthenticAMD" && (family == "25" || family == "26");
  const fa_cpu_isa best = fa::cpu::best_isa();
  EXPECT_EQ(best == FA_CPU_ISA_AVX512_BF16, fast && fa::cpu::has_isa(FA_CPU_ISA_AVX512_BF16)) << vendor << " " << family;
  EXPECT_TRUE(fa::cpu::has_isa(best));
  EXPECT_FALSE(fa::cpu::multiplies_bf16(fa::cpu::vector_isa(best)));
}
#elif defined(__aarch64__) && !defined(__AARCH64EB__) && defined(__linux__)
// What Linux says of this processor in words, which the library does not read.
TEST(Isa, AutoChoosesBf16ProductsWhereLinuxNamesThem) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string features;
  for (std::string line; std::getline(cpuinfo, line) && features.empty();) {
    if (line.rfind("Features", 0) == 0) features = line + " ";
  }
  if (features.empty()) GTEST_SKIP() << "/proc/cpuinfo says nothing of features";
  const auto has = [&](const char *name) { return features.find(name) != std::string::npos; };
#if defined(FA_HAVE_NEON_BF16)
  const bool bf16 = has(" bf16 ");
#else
  const bool bf16 = false;
#endif
#if defined(FA_HAVE_NEON_FHM)
  const bool fhm = has(" asimdfhm ");
#else
  const bool fhm = false;
#endif
  EXPECT_EQ(fa::cpu::has_isa(FA_CPU_ISA_NEON_BF16), bf16);
  EXPECT_EQ(fa::cpu::has_isa(FA_CPU_ISA_NEON_FHM), fhm);
  const fa_cpu_isa fp32 = fa::cpu::has_isa(FA_CPU_ISA_SVE256) ? FA_CPU_ISA_SVE256 : FA_CPU_ISA_NEON;
  EXPECT_TRUE(fp32 == FA_CPU_ISA_NEON || has(" sve "));
  EXPECT_EQ(fa::cpu::best_isa(), bf16 ? FA_CPU_ISA_NEON_BF16 : fhm && fp32 == FA_CPU_ISA_NEON ? FA_CPU_ISA_NEON_FHM : fp32);
  EXPECT_EQ(fa::cpu::vector_isa(FA_CPU_ISA_NEON_BF16), fp32);
  EXPECT_EQ(fa::cpu::vector_isa(FA_CPU_ISA_NEON_FHM), fp32);
  EXPECT_EQ(fa::cpu::multiplies_f16(FA_CPU_ISA_NEON_BF16), fhm && fp32 == FA_CPU_ISA_NEON);
  EXPECT_FALSE(fa::cpu::multiplies_f16(FA_CPU_ISA_NEON));
  EXPECT_TRUE(fa::cpu::has_isa(FA_CPU_ISA_NEON));
  EXPECT_FALSE(fa::cpu::has_isa(FA_CPU_ISA_AVX2));
}
#endif

}  // namespace
