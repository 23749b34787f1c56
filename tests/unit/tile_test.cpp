// SPDX-License-Identifier: Apache-2.0
// The tile unit: its model against the arithmetic that Intel documents, the unit of this processor, if it has one, against the model
// bit for bit, and the tiles that rows are packed into.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#define FA_TARGET_PORTABLE
#include "cpu/launch.h"
#include "cpu/pack_tiles.h"

namespace fa::cpu::portable {
namespace {

using Bits = std::mt19937_64;

float to_float(uint16_t x) { return __builtin_bit_cast(float, uint32_t{x} << 16); }
uint16_t to_bf16(float x) { return static_cast<uint16_t>(__builtin_bit_cast(uint32_t, x) >> 16); }
uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }

// What a tile may hold: ordinary numbers, everything finite (overflow, underflow and subnormals included), or any bits at all.
enum class Kind { kOrdinary, kFinite, kAny };

uint16_t draw(Bits &rng, Kind kind) {
  if (kind == Kind::kOrdinary) return to_bf16(std::normal_distribution<float>()(rng));
  auto x = static_cast<uint16_t>(rng());
  if (kind == Kind::kFinite && (x & 0x7F80) == 0x7F80) x &= 0xBFFF;
  return x;
}

struct Operands {
  alignas(64) uint16_t a[16][32], b[16][32];
  alignas(64) float c[16][16];

  Operands(Bits &rng, Kind kind) {
    for (auto *tile : {&a, &b}) {
      for (auto &row : *tile) {
        for (uint16_t &x : row) x = draw(rng, kind);
      }
    }
    for (auto &row : c) {
      for (float &x : row) {
        // All the digits of a float, not those of bf16 alone.
        x = __builtin_bit_cast(float, uint32_t{draw(rng, kind)} << 16 | (static_cast<uint32_t>(rng()) & 0xFFFF));
      }
    }
  }
};

template <class Unit>
void dot(const Operands &x, float (&result)[16][16]) {
  Unit unit;
  unit.template load<0>(x.c);
  unit.template load<3>(x.a);
  unit.template load<5>(x.b);
  unit.template dot<0, 3, 5>();
  unit.template store<0>(result);
}

// Intel's description, one number at a time.
float documented(const Operands &x, int m, int n) {
  const auto zeroed = [](float y) { return std::fpclassify(y) == FP_SUBNORMAL ? std::copysign(0.0f, y) : y; };
  float sums[2] = {0, 0};
  for (int k = 0; k < 16; ++k) {
    for (int half = 0; half < 2; ++half) {
      const float a = zeroed(to_float(x.a[m][2 * k + half])), b = zeroed(to_float(x.b[k][2 * n + half]));
      sums[half] = zeroed(std::fma(a, b, sums[half]));
    }
  }
  return zeroed(zeroed(x.c[m][n]) + zeroed(sums[0] + sums[1]));
}

// Which NaN a sum becomes is not documented.
bool same(float a, float b) { return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)); }

TEST(TileModel, ComputesWhatIntelDocuments) {
  Bits rng(20261123);
  for (const Kind kind : {Kind::kOrdinary, Kind::kFinite, Kind::kAny}) {
    for (int repeat = 0; repeat < 50; ++repeat) {
      const Operands x(rng, kind);
      alignas(64) float model[16][16];
      dot<TileModel>(x, model);
      for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 16; ++n) {
          const float expected = documented(x, m, n);
          ASSERT_TRUE(same(model[m][n], expected)) << model[m][n] << " instead of " << expected;
        }
      }
    }
  }
}

#if defined(__x86_64__)
TEST(TileModel, AgreesWithThisProcessorBitForBit) {
  if (!has_isa(FA_CPU_ISA_AMX)) GTEST_SKIP() << "this processor has no tile unit, or its operating system does not permit it";
  Bits rng(20261123);
  for (const Kind kind : {Kind::kOrdinary, Kind::kFinite, Kind::kAny}) {
    for (int repeat = 0; repeat < 2000; ++repeat) {
      const Operands x(rng, kind);
      alignas(64) float model[16][16], real[16][16];
      dot<TileModel>(x, model);
      dot<AmxTiles>(x, real);
      for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 16; ++n) {
          ASSERT_TRUE(same(model[m][n], real[m][n])) << std::hexfloat << model[m][n] << " instead of " << real[m][n];
        }
      }
    }
  }
}
#endif

// Signed bytes: sums of int32, one number at a time and on the unit of this processor.
struct ByteOperands {
  alignas(64) int8_t a[16][64], b[16][64];
  alignas(64) int32_t c[16][16];

  explicit ByteOperands(Bits &rng) {
    for (auto *tile : {&a, &b}) {
      for (auto &row : *tile) {
        for (int8_t &x : row) x = static_cast<int8_t>(rng() % 8 == 0 ? -128 : static_cast<int>(rng() % 256) - 128);
      }
    }
    for (auto &row : c) {
      for (int32_t &x : row) x = static_cast<int32_t>(rng());
    }
  }
};

template <class Unit>
void dot_i8(const ByteOperands &x, int32_t (&result)[16][16]) {
  Unit unit;
  unit.template load<0>(x.c);
  unit.template load<3>(x.a);
  unit.template load<5>(x.b);
  unit.template dot_i8<0, 3, 5>();
  unit.template store<0>(result);
}

TEST(TileModel, MultipliesBytes) {
  Bits rng(20261129);
  for (int repeat = 0; repeat < 50; ++repeat) {
    const ByteOperands x(rng);
    alignas(64) int32_t model[16][16];
    dot_i8<TileModel>(x, model);
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        int64_t sum = x.c[m][n];
        for (int k = 0; k < 64; ++k) sum += x.a[m][k] * x.b[k / 4][4 * n + k % 4];
        ASSERT_EQ(model[m][n], static_cast<int32_t>(sum));
      }
    }
#if defined(__x86_64__)
    if (!has_isa(FA_CPU_ISA_AMX)) continue;
    alignas(64) int32_t real[16][16];
    dot_i8<AmxTiles>(x, real);
    ASSERT_EQ(std::memcmp(model, real, sizeof real), 0);
#endif
  }
}

TEST(TileModel, LoadsAndStoresRowsThatLieApart) {
  std::vector<uint8_t> from(16 * 100), to(16 * 72, 7);
  Bits rng(1);
  for (uint8_t &x : from) x = static_cast<uint8_t>(rng());
  TileModel unit;
  unit.load<2>(from.data(), 100);
  unit.store<2>(to.data(), 72);
  for (size_t r = 0; r < 16; ++r) {
    EXPECT_EQ(std::memcmp(&from[r * 100], &to[r * 72], 64), 0);
    for (size_t c = 64; c < 72; ++c) EXPECT_EQ(to[r * 72 + c], 7) << "written past the tile";
  }
}

// Rows of `dim` elements, `stride` apart, with the number of the element as its bits; what lies between them must not be read.
struct Source {
  int64_t dim, stride;
  std::vector<uint16_t> data;

  Source(int64_t rows, int64_t dim_, int64_t stride_)
      : dim(dim_), stride(stride_), data(static_cast<size_t>(rows * stride_), 0xDEAD) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < dim; ++c) data[static_cast<size_t>(r * stride + c)] = at(r, c);
    }
  }
  static uint16_t at(int64_t r, int64_t c) { return static_cast<uint16_t>(0x3000 + r * 37 + c); }
  Rows rows() const {
    Rows rows;
    rows.data = reinterpret_cast<const char *>(data.data());
    rows.stride = stride * 2;
    return rows;
  }
};

constexpr int64_t kDims[] = {1, 8, 16, 31, 32, 33, 64, 80, 100, 128};

TEST(PackTiles, LeftRows) {
  for (const int64_t dim : kDims) {
    for (const int64_t rows : {1, 16, 17, 32, 45}) {
      const Source source(rows, dim, dim + 3);
      const int64_t steps = (dim + 31) / 32, strips = (rows + 31) / 32;
      std::vector<uint16_t> tiles(static_cast<size_t>(strips * steps * 2 * 512), 0xBEEF);
      pack_left(
          rows, dim, [&](int64_t r) { return source.rows().row(r); }, tiles.data());
      for (int64_t r = 0; r < strips * 32; ++r) {
        for (int64_t c = 0; c < steps * 32; ++c) {
          const int64_t tile = (r / 32 * steps + c / 32) * 2 + r / 16 % 2;
          const uint16_t expected = r < rows && c < dim ? Source::at(r, c) : 0;
          ASSERT_EQ(tiles[static_cast<size_t>(tile * 512 + r % 16 * 32 + c % 32)], expected) << dim << " " << r << " " << c;
        }
      }
    }
  }
}

TEST(PackTiles, KeysInPairsOfElements) {
  for (const int64_t dim : kDims) {
    for (const int64_t keys : {1, 16, 31, 32, 50, 256}) {
      const int64_t begin = 5;
      const Source source(begin + keys, dim, dim + 1);
      const int64_t steps = (dim + 31) / 32, panels = (keys + 31) / 32;
      std::vector<uint16_t> tiles(static_cast<size_t>(panels * steps * 2 * 512), 0xBEEF);
      pack_key_tiles(source.rows(), begin, begin + keys, dim, tiles.data());
      for (int64_t j = 0; j < panels * 32; ++j) {
        for (int64_t c = 0; c < steps * 32; ++c) {
          const int64_t tile = (j / 32 * steps + c / 32) * 2 + j / 16 % 2;
          const uint16_t expected = j < keys && c < dim ? Source::at(begin + j, c) : 0;
          ASSERT_EQ(tiles[static_cast<size_t>(tile * 512 + c % 32 / 2 * 32 + j % 16 * 2 + c % 2)], expected)
              << dim << " " << j << " " << c;
        }
      }
    }
  }
}

TEST(PackTiles, ValuesInPairsOfKeys) {
  for (const int64_t dim : kDims) {
    for (const int64_t keys : {1, 2, 31, 32, 33, 256}) {
      const int64_t begin = 3, panels = (dim + 31) / 32, panel = (keys + 31) / 32 * 2 * 512 + 64;
      const Source source(begin + keys, dim, dim + 1);
      std::vector<uint16_t> tiles(static_cast<size_t>(panels * panel), 0xBEEF);
      pack_value_tiles(source.rows(), begin, begin + keys, dim, panel, tiles.data());
      for (int64_t j = 0; j < (keys + 31) / 32 * 32; ++j) {
        for (int64_t c = 0; c < panels * 32; ++c) {
          const int64_t at = c / 32 * panel + (j / 32 * 2 + c / 16 % 2) * 512 + j % 32 / 2 * 32 + c % 16 * 2 + j % 2;
          const uint16_t expected = j < keys && c < dim ? Source::at(begin + j, c) : 0;
          ASSERT_EQ(tiles[static_cast<size_t>(at)], expected) << dim << " " << j << " " << c;
        }
      }
    }
  }
}

// One product of packed tiles is the product of the rows.
TEST(PackTiles, TilesOfAProductFitTogether) {
  constexpr int64_t kDim = 32;
  Bits rng(7);
  std::vector<uint16_t> q(16 * kDim), k(16 * kDim);
  for (auto *x : {&q, &k}) {
    for (uint16_t &y : *x) y = to_bf16(static_cast<float>(static_cast<int>(rng() % 9) - 4));
  }
  alignas(64) uint16_t left[2 * 512], right[2 * 512];
  pack_left(
      16, kDim, [&](int64_t r) { return reinterpret_cast<const char *>(q.data() + r * kDim); }, left);
  Rows keys;
  keys.data = reinterpret_cast<const char *>(k.data());
  keys.stride = kDim * 2;
  pack_key_tiles(keys, 0, 16, kDim, right);
  alignas(64) float sums[16][16];
  TileModel unit;
  unit.zero<0>();
  unit.load<1>(left);
  unit.load<2>(right);
  unit.dot<0, 1, 2>();
  unit.store<0>(sums);
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t j = 0; j < 16; ++j) {
      float expected = 0;
      for (int64_t c = 0; c < kDim; ++c) {
        expected += to_float(q[static_cast<size_t>(i * kDim + c)]) * to_float(k[static_cast<size_t>(j * kDim + c)]);
      }
      EXPECT_EQ(sums[i][j], expected);
    }
  }
}

// All finite fp16 numbers are the sum of their parts, which the tile unit takes for what they are.
TEST(PackTiles, Fp16IsTheSumOfItsParts) {
  std::vector<uint16_t> numbers;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7C00) != 0x7C00) numbers.push_back(static_cast<uint16_t>(bits));
  }
  const auto dim = static_cast<int64_t>(numbers.size());
  ASSERT_EQ(dim, 63488);
  NoMagnitudes nobody;
  for (int64_t i = 0; i < dim; i += 2 * kWidth) {
    uint16_t high[2 * kWidth], low[2 * kWidth];
    Simd::istore(reinterpret_cast<uint32_t *>(high), PartOfF16<Part::kHigh>::load(numbers.data(), i, dim, nobody));
    Simd::istore(reinterpret_cast<uint32_t *>(low), PartOfF16<Part::kLow>::load(numbers.data(), i, dim, nobody));
    for (int64_t n = 0; n < std::min<int64_t>(2 * kWidth, dim - i); ++n) {
      const float x = ElementF16::load(&numbers[static_cast<size_t>(i + n)], 1)[0], h = to_float(high[n]), l = to_float(low[n]);
      ASSERT_EQ(h + l, x) << std::hexfloat << x << " is not " << h << " + " << l;
      ASSERT_LE(std::abs(l), std::abs(x) / 256);
      ASSERT_FALSE(std::fpclassify(h) == FP_SUBNORMAL || std::fpclassify(l) == FP_SUBNORMAL);
    }
  }
  // Columns past the end of a row are zero.
  EXPECT_EQ(PartOfF16<Part::kHigh>::load(numbers.data() + 0x3C00, 0, 1, nobody)[0], 0x3F80u);
}

TEST(PackTiles, SeeMagnitudes) {
  const auto seen = [](uint16_t odd_one) {
    std::vector<uint16_t> row(40, 0x3F80);
    row[3] = 0;
    row[4] = 0x8000;
    row[35] = odd_one;
    alignas(64) uint16_t tiles[4 * 512];
    return pack_left(
        1, 40, [&](int64_t) { return reinterpret_cast<const char *>(row.data()); }, tiles);
  };
  const struct {
    uint16_t bits;
    bool finite, huge, subnormal;
  } cases[] = {{0x4000, true, false, false}, {0x0080, true, false, false}, {0x007F, true, false, true},
               {0x8001, true, false, true},  {0x5F7F, true, false, false}, {0x5F80, true, true, false},
               {0xDF80, true, true, false},  {0x7F7F, true, true, false},  {0x7F80, false, true, false},
               {0xFF80, false, true, false}, {0x7FC1, false, true, false}};
  for (const auto &c : cases) {
    const Magnitudes m = seen(c.bits);
    EXPECT_EQ(m.finite(), c.finite) << std::hex << c.bits;
    EXPECT_EQ(m.huge(), c.huge) << std::hex << c.bits;
    EXPECT_EQ(m.subnormal(), c.subnormal) << std::hex << c.bits;
  }
}

}  // namespace
}  // namespace fa::cpu::portable
