// SPDX-License-Identifier: Apache-2.0
// MMA of one warp whose right operand is a tile of 8-bit KV, e4m3 or int8. The tile is widened to fp16 between shared memory
// and the tensor cores. fp16 represents every number of both formats exactly.
//
// ldmatrix moves pairs of bytes as if they were one 16-bit element, so the columns arrive in another order (g = lane / 4, q =
// lane % 4):
//
//   S = Q K^T   A lane gets columns 4 q .. 4 q + 3 of a key where 16-bit elements would give it 2 q, 2 q + 1, 2 q + 8 and
//               2 q + 9. prepare_q puts the columns of Q into the same order; a dot product does not depend on it.
//   out += P V  Loaded transposed, a lane gets columns 2 g and 2 g + 1 of two keys. MMA tile 2 c of out therefore has the
//               even columns of 16 c .. 16 c + 15 and tile 2 c + 1 the odd ones. Over both tiles a lane has four
//               neighbours, 16 c + 4 q .. 16 c + 4 q + 3.
#pragma once

#include "core/forward_problem.h"
#include "cuda/common/mma.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/operand.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/smem_tile.cuh"

namespace fa::cuda {

// Whether all keys or all values of a head share a descale, and where it lies.
__device__ __forceinline__ bool has_head_descale(const Descale &d) { return d.factors.data != nullptr && !d.per_row; }
__device__ __forceinline__ const float *head_descale_address(const Descale &d, int batch, int head) {
  const Operand &f = d.factors;
  return &static_cast<const float *>(f.data)[batch * f.batch_stride + head * f.head_stride];
}
// The descale itself; 1 if there is none or each row has its own.
__device__ __forceinline__ float head_descale(const Descale &d, int batch, int head) {
  if (!has_head_descale(d)) return 1.f;
  return *head_descale_address(d, batch, head);
}

// Four bytes, widened to two pairs of fp16.
struct HalfPairs {
  uint32_t first, second;
};

// Widens bytes kA and kB of x.
template <Format kFormat, int kA, int kB>
__device__ __forceinline__ uint32_t widen_byte_pair(uint32_t x) {
  if constexpr (kFormat == Format::i8) {
    // The byte, with its sign bit flipped, becomes the low mantissa bits of 1024: the number is 1024 + 128 + x.
    const uint32_t bits = __byte_perm(x, 0x64646464u, kA | 0x40 | kB << 8 | 0x4000);
    uint32_t y;
    asm("sub.f16x2 %0, %1, %2;\n" : "=r"(y) : "r"(bits), "r"(0x64806480u));
    return y;
  } else {
    // The sign stays; exponent and mantissa move one bit down from the upper byte. That is 2^-8 times the number, except that
    // what would be 480 is NaN.
    const uint32_t bits = __byte_perm(x, 0, 0x0404 | kA << 4 | kB << 12), magnitude = bits >> 1 & 0x3F803F80u;
    uint32_t y, nan;
    asm("mul.f16x2 %0, %1, %2;\n" : "=r"(y) : "r"(magnitude | (bits & 0x80008000u)), "r"(0x5C005C00u));
    asm("set.gt.u32.f16x2 %0, %1, %2;\n" : "=r"(nan) : "r"(magnitude), "r"(0x3F003F00u));
    return y | nan;
  }
}

#if __CUDA_ARCH__ >= 890
// The two e4m3 numbers of each half of x.
__device__ __forceinline__ HalfPairs widen_e4m3(uint32_t x) {
  HalfPairs y;
  asm("{\n.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n}\n"
      : "=r"(y.first), "=r"(y.second)
      : "r"(x));
  return y;
}
#endif

template <Format kFormat>
__device__ __forceinline__ uint32_t flip_i8_sign(uint32_t x) {
  return kFormat == Format::i8 ? x ^ 0x80808080u : x;
}

// Widens bytes 0, 1 and bytes 2, 3.
template <Format kFormat>
__device__ __forceinline__ HalfPairs widen_adjacent(uint32_t x) {
#if __CUDA_ARCH__ >= 890
  if constexpr (kFormat == Format::e4m3) return widen_e4m3(x);
#endif
  const uint32_t y = flip_i8_sign<kFormat>(x);
  return {widen_byte_pair<kFormat, 0, 1>(y), widen_byte_pair<kFormat, 2, 3>(y)};
}

// Widens bytes 0, 2 and bytes 1, 3.
template <Format kFormat>
__device__ __forceinline__ HalfPairs widen_even_odd(uint32_t x) {
#if __CUDA_ARCH__ >= 890
  if constexpr (kFormat == Format::e4m3) return widen_e4m3(__byte_perm(x, 0, 0x3120));
#endif
  const uint32_t y = flip_i8_sign<kFormat>(x);
  return {widen_byte_pair<kFormat, 0, 2>(y), widen_byte_pair<kFormat, 1, 3>(y)};
}

// Queries in bf16 become fp16: a row is multiplied by a power of two of its own, so that its largest finite number is near the
// top of the fp16 range. max_exponent finds the largest exponent bits of a row, without Inf and NaN, two elements at a time and
// in place.
__device__ __forceinline__ uint32_t max_exponent(uint32_t top, uint32_t pair) {
  constexpr uint32_t kInf = 0x7F80;
  const uint32_t low = pair & kInf, high = pair >> 16 & kInf;
  if (low != kInf) top = max(top, low);
  if (high != kInf) top = max(top, high);
  return top;
}
struct Bf16ToFp16 {
  float factor, inverse;

  __device__ __forceinline__ explicit Bf16ToFp16(uint32_t top) {
    const uint32_t exponent = max(top >> 7, 15u);
    factor = __uint_as_float((268 - exponent) << 23);  // to 2^14
    inverse = __uint_as_float((exponent - 14) << 23);
  }
  __device__ __forceinline__ uint32_t convert(uint32_t pair) const {
    return pack2<__half>(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xFFFF0000u) * factor);
  }
};

// Converts a tile of 16-bit queries, in place, to the left operand of mma_nt_8bit: fp16, with the pairs of each 16 columns in
// the order 0 2 4 6 1 3 5 7. Multiplies scales[row] by the inverse of the row's power of two.
template <int kRows, int kD, int kThreads>
__device__ __forceinline__ void prepare_q(uint32_t tile, uint32_t scales, bool bf16) {
  constexpr int kBlocks = kD / 16;
  // The lanes of a row are neighbours: one for each block, or all of a warp, which have up to two blocks each.
  constexpr int kLanes = kBlocks > 32 ? 32 : kBlocks, kBlocksOfLane = (kBlocks + 31) / 32;
  static_assert(kRows * kLanes % 32 == 0 && 32 % kLanes == 0);
#pragma unroll 1
  for (int n = static_cast<int>(threadIdx.x); n < kRows * kLanes; n += kThreads) {
    const int row = n / kLanes, block = n % kLanes;
    const uint32_t first = tile + swizzled<kD * 2>(row, 2 * block), second = tile + swizzled<kD * 2>(row, 2 * block + 1);
    const uint4 a = ld_shared_16(first), b = ld_shared_16(second);
    uint32_t x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    uint32_t rest[8] = {};  // the lane's second block
    const bool has_rest = kBlocksOfLane > 1 && block + 32 < kBlocks;
    const auto rest_address = [&](int n) { return tile + swizzled<kD * 2>(row, 2 * block + 64 + n); };
    if (has_rest) {
      const uint4 c = ld_shared_16(rest_address(0)), d = ld_shared_16(rest_address(1));
      rest[0] = c.x, rest[1] = c.y, rest[2] = c.z, rest[3] = c.w, rest[4] = d.x, rest[5] = d.y, rest[6] = d.z, rest[7] = d.w;
    }
    float scale = 1.f;
    if (bf16) {
      uint32_t top = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        top = max_exponent(top, x[i]);
        if (kBlocksOfLane > 1) top = max_exponent(top, rest[i]);
      }
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2) top = max(top, __shfl_xor_sync(~0u, top, distance));
      const Bf16ToFp16 conversion(top);
      scale = conversion.inverse;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[i] = conversion.convert(x[i]);
        if (kBlocksOfLane > 1) rest[i] = conversion.convert(rest[i]);
      }
    }
    st_shared_16(first, x[0], x[2], x[4], x[6]);
    st_shared_16(second, x[1], x[3], x[5], x[7]);
    if (has_rest) {
      st_shared_16(rest_address(0), rest[0], rest[2], rest[4], rest[6]);
      st_shared_16(rest_address(1), rest[1], rest[3], rest[5], rest[7]);
    }
    if (block == 0) st_shared_float(scales + row * 4, scale * ld_shared_float(scales + row * 4));
  }
}

// acc = A B^T. A: kMt * 16 rows of `a_tile` from `first_row` on, as prepare_q leaves them. B: kNt * 8 rows of kD bytes.
template <Format kFormat, int kD, int kMt, int kNt>
__device__ __forceinline__ void mma_nt_8bit(Accumulator<kMt, kNt> &acc, uint32_t a_tile, int first_row, uint32_t b_tile) {
  constexpr int kVectorsPerStep = kNt / 2, kSteps = kD / 32, kAPitch = kD * 2, kPitch = kD;
  static_assert(kNt % 2 == 0);
  const int lane = opaque(threadIdx.x) & 31;
  const uint32_t a = a_tile + swizzled<kAPitch>(first_row + (lane & 15), lane >> 4);
  const uint32_t b = b_tile + swizzled<kPitch>((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  uint32_t af[2][kMt][4], bf[2][kVectorsPerStep][4];
  const auto load_a = [&](int n) {
#pragma unroll
    for (int i = 0; i < kMt; ++i) ldmatrix_x4(af[n & 1][i], advance<kAPitch>(a, n) + i * 16 * kAPitch);
  };
  const auto load_b = [&](int step) {
#pragma unroll
    for (int j = 0; j < kVectorsPerStep; ++j) ldmatrix_x4(bf[step & 1][j], advance<kPitch>(b, step) + j * 16 * kPitch);
  };
  load_a(0);
  load_b(0);
  clear<kMt, kNt>(acc);
#pragma unroll
  for (int n = 0; n < 2 * kSteps; ++n) {
    const int step = n / 2, half = n % 2;
    if (n + 1 < 2 * kSteps) load_a(n + 1);
    if (half == 0 && step + 1 < kSteps) load_b(step + 1);
#pragma unroll
    for (int j = 0; j < kNt; ++j) {
      const HalfPairs k = widen_adjacent<kFormat>(bf[step & 1][j / 2][j % 2 * 2 + half]);
#pragma unroll
      for (int i = 0; i < kMt; ++i) mma_16816<__half>(acc[i][j], af[n & 1][i], k.first, k.second);
    }
  }
}

// acc += P T. T has kKSteps * 16 rows of kNt * 8 bytes.
template <Format kFormat, int kMt, int kKSteps, int kNt>
__device__ __forceinline__ void mma_rs_8bit(Accumulator<kMt, kNt> &acc, const PFragment<kMt, kKSteps> &w, uint32_t tile) {
  constexpr int kPitch = kNt * 8, kColumnSteps = kNt / 4, kSteps = kKSteps * kColumnSteps;
  const int lane = opaque(threadIdx.x) & 31;
  const uint32_t t = tile + swizzled<kPitch>(lane & 15, lane >> 4);
  uint32_t tf[2][4];
  const auto load = [&](int n) {
    ldmatrix_x4_trans(tf[n & 1], advance<kPitch>(t, n % kColumnSteps) + n / kColumnSteps * 16 * kPitch);
  };
  load(0);
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    if (n + 1 < kSteps) load(n + 1);
    const int k = n / kColumnSteps, d = n % kColumnSteps * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const HalfPairs low = widen_even_odd<kFormat>(tf[n & 1][2 * half]),
                      high = widen_even_odd<kFormat>(tf[n & 1][2 * half + 1]);
#pragma unroll
      for (int i = 0; i < kMt; ++i) {
        mma_16816<__half>(acc[i][d + 2 * half], w[i][k], low.first, high.first);
        mma_16816<__half>(acc[i][d + 2 * half + 1], w[i][k], low.second, high.second);
      }
    }
  }
}

// NaN-safe acc += P T: skips masked elements of P, one row of T at a time.
template <Format kFormat, int kMt, int kKSteps, int kNt>
__device__ __forceinline__ void mma_rs_8bit_nan_safe(Accumulator<kMt, kNt> &acc, const PFragment<kMt, kKSteps> &w,
                                                     uint32_t tile) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int row = 0; row < kKSteps * 16; ++row) {
    uint32_t bits[kMt][2];
#pragma unroll
    for (int i = 0; i < kMt; ++i) {
      // Of one step the selection would become an index into local memory.
      if constexpr (kKSteps == 1) {
        p_of_key(w[i][0], row, bits[i], lane);
      } else {
        p_of_key(w[i], row, bits[i], lane);
      }
    }
#pragma unroll
    for (int c = 0; c < kNt / 2; ++c) {
      const HalfPairs v = widen_even_odd<kFormat>(ld_shared_4(tile + swizzled<kNt * 8>(row, c) + (lane & 3) * 4));
#pragma unroll
      for (int i = 0; i < kMt; ++i) {
        add_pair_nan_safe<__half>(acc[i][2 * c], bits[i], v.first);
        add_pair_nan_safe<__half>(acc[i][2 * c + 1], bits[i], v.second);
      }
    }
  }
}

// How the descales of values enter P. none: there is one per head, applied to out at the end. similar: the descales of the tile
// are close to each other (similar_descale_max), so P is the exponential times the descale. per_key: any descales, so P is an
// exponential of S + log2(descale).
enum class DescaleMode { none, similar, per_key };

// The bits of the tile's largest descale, by magnitude, if all others but zeros are at least about a sixteenth of it; else 0. A
// power of two above all of them then serves as the reference of P. It depends on the tile's keys alone, not on rows.
template <int kKvTile>
__device__ __forceinline__ uint32_t similar_descale_max(uint32_t descales, int lane) {
  constexpr uint32_t kInf = 0x7F800000u, kSixteenth = 4u << 23;
  const uint32_t bits = ld_shared_4(descales + lane % kKvTile * 4) & 0x7FFFFFFFu;
  const uint32_t top = __reduce_max_sync(~0u, bits), bottom = __reduce_min_sync(~0u, bits == 0 ? kInf : bits);
  return top < kInf && top <= bottom + kSixteenth ? max(top, 1u) : 0;
}
// The exponent of a power of two above it.
__device__ __forceinline__ float exponent_above(uint32_t top) { return static_cast<float>(static_cast<int>(top >> 23) - 126); }

// Whether this lane's part of a tile holds NaN. Int8 has no NaN.
template <Format kFormat, int kBytes>
__device__ __forceinline__ bool tile_has_nan(uint32_t tile, int lane) {
  if constexpr (kFormat == Format::i8) return false;
  constexpr uint32_t kMagnitude = 0x7F7F7F7Fu;
  uint32_t found = 0;  // the top bit of a byte is set where all magnitude bits of the element are
#pragma unroll 4
  for (int at = lane * 16; at < kBytes; at += 32 * 16) {
    const uint4 x = ld_shared_16(tile + at);
    found |= (x.x & kMagnitude) + 0x01010101u;
    found |= (x.y & kMagnitude) + 0x01010101u;
    found |= (x.z & kMagnitude) + 0x01010101u;
    found |= (x.w & kMagnitude) + 0x01010101u;
  }
  return (found & 0x80808080u) != 0;
}

}  // namespace fa::cuda
