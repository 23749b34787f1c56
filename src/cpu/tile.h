// SPDX-License-Identifier: Apache-2.0
// The tile unit (AMX): eight registers of 16 rows x 64 bytes. A tile of bf16 holds 16 x 32 elements as the left operand of a product
// and 16 pairs of rows x 16 columns as the right one, whose row i has elements (2i, n) and (2i + 1, n) next to each other. A tile of
// fp32 holds 16 x 16 sums.
//
// Two classes have the same verbs: AmxTiles runs the instructions, TileModel computes in C++ what Intel documents of them. Kernels use
// `Tiles`, which is AmxTiles except in tests that are compiled with FA_TILE_MODEL. An object configures the unit of the calling thread
// when it is created and releases it when it dies: a unit in use adds 8 KiB to every context switch.
#pragma once

#include <cstdint>
#include <cstring>

namespace fa::cpu::FA_ISA {

constexpr int64_t kTileRows = 16;     // rows of a tile, and columns of a tile of fp32
constexpr int64_t kTileDepth = 32;    // bf16 elements that a product sums up
constexpr int64_t kTileBytes = 1024;  // of a whole tile
constexpr int64_t kTileBf16 = kTileBytes / 2;
constexpr int64_t kTileFloats = kTileBytes / 4;

#if defined(__x86_64__)
class AmxTiles {
 public:
  AmxTiles() {
    // Palette 1; every tile has 16 rows of 64 bytes.
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    static_assert(sizeof config == 64);
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~AmxTiles() { asm volatile("tilerelease"); }
  AmxTiles(const AmxTiles &) = delete;
  AmxTiles &operator=(const AmxTiles &) = delete;

  template <int T>
  FA_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
  }
  // Rows are `stride` bytes apart.
  template <int T>
  FA_INLINE void load(const void *from, int64_t stride = 64) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  FA_INLINE void store(void *to, int64_t stride = 64) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
  }
  // C += A B: C is fp32, A and B are bf16.
  template <int C, int A, int B>
  FA_INLINE void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
  // The same of signed bytes, whose sums are int32: A has 64 columns, and B four of its rows next to each other.
  template <int C, int A, int B>
  FA_INLINE void dot_i8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
  }
};
#endif

class TileModel {
 public:
  TileModel() : tiles_() {}
  TileModel(const TileModel &) = delete;
  TileModel &operator=(const TileModel &) = delete;

  template <int T>
  void zero() {
    tiles_[T] = Tile{};
  }
  template <int T>
  void load(const void *from, int64_t stride = 64) {
    for (int64_t r = 0; r < kTileRows; ++r) std::memcpy(tiles_[T].rows[r], static_cast<const char *>(from) + r * stride, 64);
  }
  template <int T>
  void store(void *to, int64_t stride = 64) {
    for (int64_t r = 0; r < kTileRows; ++r) std::memcpy(static_cast<char *>(to) + r * stride, tiles_[T].rows[r], 64);
  }
  template <int C, int A, int B>
  void dot() {
    dot(tiles_[C], tiles_[A], tiles_[B]);
  }
  template <int C, int A, int B>
  void dot_i8() {
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 16; ++n) {
        uint32_t sum = tiles_[C].rows[m][n];
        for (int k = 0; k < 64; ++k)
          sum += static_cast<uint32_t>(byte(tiles_[A].rows[m][k / 4], k) * byte(tiles_[B].rows[k / 4][n], k));
        tiles_[C].rows[m][n] = sum;
      }
    }
  }

 private:
  struct alignas(64) Tile {
    uint32_t rows[16][16];
  };

  static int32_t byte(uint32_t four, int n) { return static_cast<int8_t>(four >> n % 4 * 8); }
  // Subnormal numbers count as zero, as operands and as results.
  static float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
  static float widened(uint32_t bits) { return flushed(__builtin_bit_cast(float, bits)); }
  // a b + c, rounded once, where a and b are bf16. Where every number is moderate, their product is exact in float and no sum is subnormal.
  // Otherwise the product is exact in double, and the sum either is or has more digits than rounding to float looks at.
  template <bool kModerate>
  static float fused(float a, float b, float c) {
    if constexpr (kModerate) return a * b + c;
    return flushed(static_cast<float>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c)));
  }
  // Whether every number of the tile is zero or between 2^-55 and 2^60.
  static bool moderate(const Tile &tile) {
    constexpr uint32_t kLeast = (127 - 55) << 7, kMost = (127 + 60) << 7;
    int immoderate = 0;
    for (const auto &row : tile.rows) {
      for (const uint32_t pair : row) {
        const uint32_t high = pair << 1 >> 17, low = pair << 17 >> 17;
        immoderate |= (high != 0) & ((high < kLeast) | (high > kMost));
        immoderate |= (low != 0) & ((low < kLeast) | (low > kMost));
      }
    }
    return immoderate == 0;
  }

  static void dot(Tile &c, const Tile &a, const Tile &b) {
    (moderate(a) && moderate(b) ? dot_of<true> : dot_of<false>)(c, a, b);
  }

  // The even and the odd products of a row and a column are summed in order, each from zero. Then the two sums are added, and last C.
  template <bool kModerate>
  static void dot_of(Tile &c, const Tile &a, const Tile &b) {
    float even_b[16][16], odd_b[16][16];
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 16; ++n) {
        even_b[k][n] = widened(b.rows[k][n] << 16);
        odd_b[k][n] = widened(b.rows[k][n] & 0xFFFF0000u);
      }
    }
    for (int m = 0; m < 16; ++m) {
      float even[16] = {}, odd[16] = {};
      for (int k = 0; k < 16; ++k) {
        const float x = widened(a.rows[m][k] << 16), y = widened(a.rows[m][k] & 0xFFFF0000u);
        for (int n = 0; n < 16; ++n) even[n] = fused<kModerate>(x, even_b[k][n], even[n]);
        for (int n = 0; n < 16; ++n) odd[n] = fused<kModerate>(y, odd_b[k][n], odd[n]);
      }
      for (int n = 0; n < 16; ++n) {
        const float sum = flushed(even[n] + odd[n]);
        c.rows[m][n] = __builtin_bit_cast(uint32_t, flushed(widened(c.rows[m][n]) + sum));
      }
    }
  }

  Tile tiles_[8];
};

#if defined(FA_TILE_MODEL)
using Tiles = TileModel;
#elif defined(FA_TARGET_AMX)
using Tiles = AmxTiles;
#endif

}  // namespace fa::cpu::FA_ISA
