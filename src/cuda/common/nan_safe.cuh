// SPDX-License-Identifier: Apache-2.0
// The NaN-safe path. A masked pair has P = 0, and 0 times NaN or Inf in V (or in K, Q, dO in the backward) is NaN: such a value would reach
// rows that do not see it. Kernels search for non-finite values in tiles with masked pairs. Where they find any, they compute the product over
// the visible pairs alone, one key at a time.
//
// A masked P is -0. No visible P has these bits, so that after the conversion to 16 bits masked pairs can be told from P = 0.
#pragma once

#include "cuda/common/mma.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/smem_tile.cuh"

namespace fa::cuda {

constexpr float kMaskedP = -0.f;
constexpr uint32_t kMaskedPBits = 0x8000u;  // in 16 bits, of either type
// Whether a converted P, made a float again, is a masked one.
__device__ __forceinline__ bool is_masked_p(float p) { return __float_as_uint(p) == 0x80000000u; }

// ----------------------------------------------------------------------------------------------------------------------
// Searching
// ----------------------------------------------------------------------------------------------------------------------

// 0, or NaN if any of x is NaN or Inf. Four chains of fma hide its latency.
template <int kCount>
__device__ __forceinline__ float nan_if_nonfinite(const float (&x)[kCount]) {
  float zero[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int n = 0; n < kCount; ++n) zero[n % 4] = fmaf(x[n], 0.f, zero[n % 4]);
  return (zero[0] + zero[1]) + (zero[2] + zero[3]);
}

template <int kMt, int kNt>
__device__ __forceinline__ float nan_if_nonfinite(const Accumulator<kMt, kNt> &x) {
  float zero[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int i = 0; i < kMt; ++i)
#pragma unroll
    for (int j = 0; j < kNt; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) zero[r] = fmaf(x[i][j][r], 0.f, zero[r]);
  return (zero[0] + zero[1]) + (zero[2] + zero[3]);
}

// Collects non-finite 16-bit elements of shared memory.
template <typename Element>
struct NonfiniteSearch {
  uint32_t found = 0;

  __device__ __forceinline__ void add(const uint4 &x) {
    found = nan_where_nonfinite<Element>(x.x, found);
    found = nan_where_nonfinite<Element>(x.y, found);
    found = nan_where_nonfinite<Element>(x.z, found);
    found = nan_where_nonfinite<Element>(x.w, found);
  }
  __device__ __forceinline__ bool any() const { return (found & 0x7FFF7FFFu) != 0; }
};

// Whether the bytes of a tile (kBytes in all) that thread `thread` of kThreads searches hold a non-finite value. A vote of the threads gives
// the result for the whole tile.
template <typename Element, int kBytes, int kThreads>
__device__ __forceinline__ bool tile_has_nonfinite(uint32_t tile, int thread = static_cast<int>(threadIdx.x)) {
  NonfiniteSearch<Element> search;
#pragma unroll 4
  for (int at = thread * 16; at < kBytes; at += kThreads * 16) search.add(ld_shared_16(tile + at));
  return search.any();
}

// Whether the 16-byte vectors that this thread of kThreads has loaded itself (load_tile, and the wait) hold a non-finite value.
template <typename Element, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ bool loaded_part_has_nonfinite(uint32_t tile, int thread) {
  constexpr int kVectors = kColumns / 8;
  NonfiniteSearch<Element> search;
#pragma unroll 4
  for (int n = opaque(thread); n < kRows * kVectors; n += kThreads)
    search.add(ld_shared_16(tile + swizzled<kColumns * 2>(n / kVectors, n % kVectors)));
  return search.any();
}

// ----------------------------------------------------------------------------------------------------------------------
// Products over visible pairs
// ----------------------------------------------------------------------------------------------------------------------

// P of one key (column `key` of 16 kKSteps) for this lane's rows g and g + 8 of row tile i, from the A operand fragment: 16 bits each.
template <int kKSteps>
__device__ __forceinline__ void p_of_key(const uint32_t (&a)[kKSteps][4], int key, uint32_t (&bits)[2],
                                         int lane = static_cast<int>(threadIdx.x & 31)) {
  const int source = (lane & ~3) | ((key & 7) >> 1);  // the lane of the quad that holds the key
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // A selection, not an index, which would move the fragment to local memory.
    uint32_t pair = 0;
#pragma unroll
    for (int k = 0; k < kKSteps; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (key >> 3 == 2 * k + half) pair = a[k][2 * half + r];
    pair = __shfl_sync(~0u, pair, source);
    bits[r] = (key & 1) ? pair >> 16 : pair & 0xFFFFu;
  }
}

// The same for one step of 16 keys.
__device__ __forceinline__ void p_of_key(const uint32_t (&a)[4], int key, uint32_t (&bits)[2], int lane) {
  const int source = (lane & ~3) | ((key & 7) >> 1);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t pair = __shfl_sync(~0u, key & 8 ? a[2 + r] : a[r], source);
    bits[r] = (key & 1) ? pair >> 16 : pair & 0xFFFFu;
  }
}

// Adds P times a row of a tile to rows g and g + 8 of an accumulator tile of eight columns, unless P is masked. `pair`: this lane's two
// columns of the row.
template <typename Element>
__device__ __forceinline__ void add_pair_nan_safe(float *acc, const uint32_t (&bits)[2], uint32_t pair) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (bits[r] == kMaskedPBits) continue;
    acc[2 * r] += to_float<Element>(bits[r]) * to_float<Element>(pair & 0xFFFFu);
    acc[2 * r + 1] += to_float<Element>(bits[r]) * to_float<Element>(pair >> 16);
  }
}

// Adds P of one key times row `row` of a swizzled tile to an accumulator; bits[i] is P of rows 16 i + g and 16 i + g + 8.
template <typename Element, int kPitch, int kMt, int kNt, int kParts = 1>
__device__ __forceinline__ void add_row_nan_safe(Accumulator<kMt, kNt> &acc, const uint32_t (&bits)[kMt][2], uint32_t tile,
                                                 int row, int first_column_step) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int j = 0; j < kNt; ++j) {
    const uint32_t pair = ld_shared_4(
        tile + swizzled<kPitch>(row, (first_column_step + column_step<kParts>(j / 2)) * 2 + j % 2) + (lane & 3) * 4);
#pragma unroll
    for (int i = 0; i < kMt; ++i) add_pair_nan_safe<Element>(acc[i][j], bits[i], pair);
  }
}
// The same for a wgmma accumulator of kColumns columns and a tile of swizzle atoms, kTileRows rows each. kGroupBytes: from eight rows to the
// next eight.
template <typename Element, int kTileRows, int kColumns, int kGroupBytes = 1024>
__device__ __forceinline__ void add_row_nan_safe(float (&acc)[kColumns / 2], const uint32_t (&bits)[2], uint32_t tile, int row,
                                                 int lane = static_cast<int>(threadIdx.x & 31)) {
  if constexpr (kGroupBytes != 1024) tile += row / 8 * (kGroupBytes - 1024);
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const uint32_t pair =
        ld_shared_4(tile + j / 8 * kTileRows * 128 + row * 128 + (((j % 8) ^ (row & 7)) << 4) + (lane & 3) * 4);
    add_pair_nan_safe<Element>(acc + 4 * j, bits, pair);
  }
}

// mma_rs (acc += P T) over the visible pairs, one row of T at a time.
template <typename Element, int kPitch, int kMt, int kKSteps, int kNt, int kParts = 1>
__device__ __forceinline__ void mma_rs_nan_safe(Accumulator<kMt, kNt> &acc, const PFragment<kMt, kKSteps> &p, uint32_t tile,
                                                int first_column_step = 0) {
#pragma unroll 1
  for (int row = 0; row < kKSteps * 16; ++row) {
    uint32_t bits[kMt][2];
#pragma unroll
    for (int i = 0; i < kMt; ++i) p_of_key(p[i], row, bits[i]);
    add_row_nan_safe<Element, kPitch, kMt, kNt, kParts>(acc, bits, tile, row, first_column_step);
  }
}

// The same for wgmma: acc (64 x kColumns of a warpgroup) += P T, T of kTileRows rows in swizzle atoms.
template <typename Element, int kTileRows, int kColumns, int kKSteps>
__device__ __forceinline__ void wgmma_rs_nan_safe(float (&acc)[kColumns / 2], const uint32_t (&p)[kKSteps][4], uint32_t tile,
                                                  int lane = static_cast<int>(threadIdx.x & 31)) {
#pragma unroll 1
  for (int row = 0; row < kKSteps * 16; ++row) {
    uint32_t bits[2];
    p_of_key(p, row, bits, lane);
    add_row_nan_safe<Element, kTileRows, kColumns>(acc, bits, tile, row, lane);
  }
}

// P of rows `row` + lane / 4 and that + 8 in column k, from an A operand in shared memory that is stored k by k (MN-major) or row by row
// (K-major), 64 rows or columns to a swizzle atom. `row`: of the warp in the tile.
template <Major kA>
__device__ __forceinline__ void p_of_key(uint32_t tile, int row, int k, uint32_t (&bits)[2], int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int m = row + (lane >> 2) + 8 * r;
    const int major = kA == Major::k ? m : k, minor = kA == Major::k ? k : m;
    const uint32_t pair = ld_shared_4(tile + major * 128 + (((minor / 8) ^ (major & 7)) << 4) + minor % 8 / 2 * 4);
    bits[r] = (minor & 1) ? pair >> 16 : pair & 0xFFFFu;
  }
}

// The same for wgmma with A in shared memory: acc (64 x kColumns of a warpgroup, `row` the first of this warp) += A B over k < kK. Tiles of
// one swizzle atom in A, and kTileRows rows an atom in B, with kBGroupBytes from eight rows to the next eight. The columns of A begin with
// `first`.
template <typename Element, Major kA, int kTileRows, int kColumns, int kK, int kBGroupBytes = 1024>
__device__ __forceinline__ void wgmma_ss_nan_safe(float (&acc)[kColumns / 2], uint32_t a_tile, int row, uint32_t b_tile,
                                                  int lane = static_cast<int>(threadIdx.x & 31), int first = 0) {
#pragma unroll 1
  for (int k = 0; k < kK; ++k) {
    uint32_t bits[2];
    p_of_key<kA>(a_tile, row, first + k, bits, lane);
    add_row_nan_safe<Element, kTileRows, kColumns, kBGroupBytes>(acc, bits, b_tile, k, lane);
  }
}

// mma_ss (acc += A B) over the pairs of A that are not masked, one k at a time. B is MN-major.
template <typename Element, Major kA, int kAPitch, int kBPitch, int kKSteps, int kMt, int kNt>
__device__ __forceinline__ void mma_ss_nan_safe(Accumulator<kMt, kNt> &acc, uint32_t a_tile, int first_row, uint32_t b_tile,
                                                int first_column) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int k = 0; k < kKSteps * 16; ++k) {
    uint32_t bits[kMt][2];
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + 16 * i + (lane >> 2) + 8 * r;
        const int major = kA == Major::k ? row : k, minor = kA == Major::k ? k : row;
        const uint32_t pair = ld_shared_4(a_tile + swizzled<kAPitch>(major, minor / 8) + (minor % 8 / 2) * 4);
        bits[i][r] = (minor & 1) ? pair >> 16 : pair & 0xFFFFu;
      }
    add_row_nan_safe<Element, kBPitch, kMt, kNt>(acc, bits, b_tile, k, first_column / 16);
  }
}

}  // namespace fa::cuda
