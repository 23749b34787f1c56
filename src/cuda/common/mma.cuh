// SPDX-License-Identifier: Apache-2.0
// Matrix products of one warp with mma.sync m16n8k16 over 16-bit tiles in swizzled shared memory.
//
//   Accumulator[kMt][kNt][4]   C of kMt x kNt tiles of 16 x 8; fragment.cuh says which row and column an element is
//   PFragment[kMt][k][4]       the same tiles converted to 16 bits: the A operand of the next product, columns 16 k .. 16 k + 15
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/common/smem_tile.cuh"

namespace fa::cuda {

template <int kMt, int kNt>
using Accumulator = float[kMt][kNt][4];
template <int kMt, int kKSteps>
using PFragment = uint32_t[kMt][kKSteps][4];

template <int kMt, int kNt>
__device__ __forceinline__ void clear(Accumulator<kMt, kNt> &acc) {
#pragma unroll
  for (int i = 0; i < kMt; ++i)
#pragma unroll
    for (int j = 0; j < kNt; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) acc[i][j][r] = 0.f;
}

// Address `steps` times 32 bytes further in the same row. The swizzle is an XOR of low address bits, and so is this step.
template <int kPitch>
__device__ __forceinline__ uint32_t advance(uint32_t address, int steps) {
  if constexpr (kPitch % 128 == 0) {
    return (address ^ ((steps & 3) * 32)) + (steps >> 2) * 128;
  } else {
    return (address ^ ((steps & 1) * 32)) + (steps >> 1) * 64;
  }
}

// acc = A B^T, A: kMt * 16 rows from `first_row` of `a_tile`, B: kNt * 8 rows from `first_column` of `b_tile`, both kD wide. Fragments of
// A and B are loaded one step of 16 columns ahead of their products.
template <typename Element, int kD, int kMt, int kNt>
__device__ __forceinline__ void mma_nt(Accumulator<kMt, kNt> &acc, uint32_t a_tile, int first_row, uint32_t b_tile,
                                       int first_column) {
  constexpr int kLoadsPerStep = kNt / 2, kSteps = kD / 16, kPitch = kD * 2, kBuffers = kLoadsPerStep + 1;
  static_assert(kNt % 2 == 0);
  const int lane = threadIdx.x & 31;
  const uint32_t a = a_tile + swizzled<kPitch>(first_row + (lane & 15), lane >> 4);
  const uint32_t b = b_tile + swizzled<kPitch>(first_column + (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  uint32_t af[2][kMt][4], bf[kBuffers][4];
  const auto load_a = [&](int step) {
#pragma unroll
    for (int i = 0; i < kMt; ++i) ldmatrix_x4(af[step & 1][i], advance<kPitch>(a, step) + i * 16 * kPitch);
  };
  const auto load_b = [&](int n) {
    ldmatrix_x4(bf[n % kBuffers], advance<kPitch>(b, n / kLoadsPerStep) + n % kLoadsPerStep * 16 * kPitch);
  };
  load_a(0);
#pragma unroll
  for (int n = 0; n < kLoadsPerStep; ++n) load_b(n);
  clear<kMt, kNt>(acc);
#pragma unroll
  for (int n = 0; n < kSteps * kLoadsPerStep; ++n) {
    const int step = n / kLoadsPerStep, j = n % kLoadsPerStep;
    if (j == 0 && step + 1 < kSteps) load_a(step + 1);
    if (n + kLoadsPerStep < kSteps * kLoadsPerStep) load_b(n + kLoadsPerStep);
#pragma unroll
    for (int i = 0; i < kMt; ++i) {
      mma_16816<Element>(acc[i][2 * j], af[step & 1][i], bf[n % kBuffers][0], bf[n % kBuffers][1]);
      mma_16816<Element>(acc[i][2 * j + 1], af[step & 1][i], bf[n % kBuffers][2], bf[n % kBuffers][3]);
    }
  }
}

// Where kWarps warps share the columns of out: each swizzle atom of 128 bytes is divided into steps of 16 columns, and each warp takes
// 4 / kWarps consecutive ones of every atom. Step d of a warp whose first step is `first` is first + column_step<kWarps>(d).
template <int kParts>
__host__ __device__ constexpr int column_step(int d) {
  static_assert(kParts == 1 || kParts == 2 || kParts == 4);
  return d / (4 / kParts) * 4 + d % (4 / kParts);
}

// acc += P T: T has kKSteps * 16 rows of kPitch bytes, and acc covers its columns from 16 * first_column_step on. p_of(k, a) makes the A operand for
// rows 16 k .. 16 k + 15 of T just before it is needed, so that it is computed while earlier mma run.
template <typename Element, int kPitch, int kKSteps, int kParts, int kMt, int kNt, typename POf>
__device__ __forceinline__ void mma_rs_with(Accumulator<kMt, kNt> &acc, uint32_t tile, int first_column_step, POf p_of) {
  constexpr int kColumnSteps = kNt / 2, kSteps = kKSteps * kColumnSteps;
  // Warps that do not share rows have the widest accumulators: addresses are computed anew rather than kept in registers.
  const int lane = (kParts == 1 ? opaque(threadIdx.x) : threadIdx.x) & 31;
  const uint32_t t = advance<kPitch>(tile + swizzled<kPitch>(lane & 15, lane >> 4), first_column_step);
  uint32_t tf[2][4], w[kMt][4];
  const auto load = [&](int n) {
    ldmatrix_x4_trans(tf[n & 1], advance<kPitch>(t, column_step<kParts>(n % kColumnSteps)) + n / kColumnSteps * 16 * kPitch);
  };
  load(0);
#pragma unroll
  for (int k = 0; k < kKSteps; ++k) {
    p_of(k, w);
#pragma unroll
    for (int d = 0; d < kColumnSteps; ++d) {
      const int n = k * kColumnSteps + d;
      if (n + 1 < kSteps) load(n + 1);
#pragma unroll
      for (int i = 0; i < kMt; ++i) {
        mma_16816<Element>(acc[i][2 * d], w[i], tf[n & 1][0], tf[n & 1][1]);
        mma_16816<Element>(acc[i][2 * d + 1], w[i], tf[n & 1][2], tf[n & 1][3]);
      }
    }
  }
}

// The same with P of all keys at hand.
template <typename Element, int kPitch, int kMt, int kKSteps, int kNt>
__device__ __forceinline__ void mma_rs(Accumulator<kMt, kNt> &acc, const PFragment<kMt, kKSteps> &w, uint32_t tile,
                                       int first_column_step = 0) {
  mma_rs_with<Element, kPitch, kKSteps, 1, kMt, kNt>(acc, tile, first_column_step, [&](int k, uint32_t(&a)[kMt][4]) {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) a[i][r] = w[i][k][r];
  });
}

// The layout of an operand in shared memory.
enum class Major {
  k,
  mn
};  // K contiguous: (rows of A or columns of B, K); or M / N contiguous: (K, rows of A or columns of B)

// acc += A B, both in shared memory, rows of kAPitch and kBPitch bytes. acc covers kMt * 16 rows of A from first_row on and
// kNt * 8 columns of B from first_column on. The fragments of the next 16 k and up to 32 columns are loaded before the products of
// the current ones.
template <typename Element, Major kA, int kAPitch, Major kB, int kBPitch, int kKSteps, int kMt, int kNt>
__device__ __forceinline__ void mma_ss(Accumulator<kMt, kNt> &acc, uint32_t a_tile, int first_row, uint32_t b_tile,
                                       int first_column) {
  constexpr int kBatch = kNt < 4 ? kNt : 4, kBatches = kNt / kBatch, kSteps = kKSteps * kBatches;
  static_assert(kNt % kBatch == 0 && kBatch % 2 == 0);
  const int lane = threadIdx.x & 31;
  // Rows of the four 8 x 8 matrices of a fragment: A takes rows first, B takes k first.
  const int low = lane & 15, high = lane >> 4, mixed = (lane & 7) + (high << 3), middle = (lane >> 3) & 1;
  const uint32_t a =
      a_tile + (kA == Major::k ? swizzled<kAPitch>(first_row + low, high) : swizzled<kAPitch>(mixed, first_row / 8 + middle));
  const uint32_t b = b_tile + (kB == Major::k ? swizzled<kBPitch>(first_column + mixed, middle)
                                              : swizzled<kBPitch>(low, first_column / 8 + high));
  uint32_t af[2][kMt][4], bf[2][kBatch / 2][4];
  const auto load = [&](int n) {
    const int k = n / kBatches, first = n % kBatches * (kBatch / 2);
    if (first == 0) {
#pragma unroll
      for (int i = 0; i < kMt; ++i) {
        if constexpr (kA == Major::k) {
          ldmatrix_x4(af[k & 1][i], advance<kAPitch>(a, k) + i * 16 * kAPitch);
        } else {
          ldmatrix_x4_trans(af[k & 1][i], advance<kAPitch>(a, i) + k * 16 * kAPitch);
        }
      }
    }
#pragma unroll
    for (int d = 0; d < kBatch / 2; ++d) {
      if constexpr (kB == Major::k) {
        ldmatrix_x4(bf[n & 1][d], advance<kBPitch>(b, k) + (first + d) * 16 * kBPitch);
      } else {
        ldmatrix_x4_trans(bf[n & 1][d], advance<kBPitch>(b, first + d) + k * 16 * kBPitch);
      }
    }
  };
  load(0);
#pragma unroll
  for (int n = 0; n < kSteps; ++n) {
    if (n + 1 < kSteps) load(n + 1);
    const int k = n / kBatches, first = n % kBatches * kBatch;
#pragma unroll
    for (int d = 0; d < kBatch / 2; ++d)
#pragma unroll
      for (int i = 0; i < kMt; ++i) {
        mma_16816<Element>(acc[i][first + 2 * d], af[k & 1][i], bf[n & 1][d][0], bf[n & 1][d][1]);
        mma_16816<Element>(acc[i][first + 2 * d + 1], af[k & 1][i], bf[n & 1][d][2], bf[n & 1][d][3]);
      }
  }
}

}  // namespace fa::cuda
