// SPDX-License-Identifier: Apache-2.0
// Accumulator fragments: which query and which key of a tile of scores a register of a lane holds, and reductions over the keys of a query.
//
// mma.sync m16n8k16 and wgmma lay accumulators out alike. A warp holds tiles of 16 x 8, four elements per lane:
//
//   element r of tile (i, j):   row 16 i + lane / 4 + 8 (r / 2),   column 8 j + 2 (lane % 4) + r % 2
//
// A fragment is a type without data. It describes an array of such elements, numbered n = (i kNTiles + j) 4 + r, in one of two orientations:
//
//   QkFragment   S = Q K^T, queries are rows:       a lane holds kRows = 2 kMTiles queries; their keys lie in the 4 lanes of a quad
//   KqFragment   S^T = K Q^T, queries are columns:  a lane holds kRows = 2 kNTiles queries; their keys lie in the 8 lanes with equal lane % 4
//
// What is written with row(n), key(n) and reduce() works in both orientations. All of it is resolved at compile time once loops are unrolled.
#pragma once

#include <cstdint>

namespace fa::cuda {

// Element n of an array of accumulators of any shape.
template <int kCount>
__device__ __forceinline__ float &element(float (&x)[kCount], int n) {
  return x[n];
}
template <int kCount>
__device__ __forceinline__ const float &element(const float (&x)[kCount], int n) {
  return x[n];
}
template <int kTiles>
__device__ __forceinline__ float &element(float (&x)[kTiles][4], int n) {
  return x[n / 4][n % 4];
}
template <int kTiles>
__device__ __forceinline__ const float &element(const float (&x)[kTiles][4], int n) {
  return x[n / 4][n % 4];
}
template <int kMTiles, int kNTiles>
__device__ __forceinline__ float &element(float (&x)[kMTiles][kNTiles][4], int n) {
  return x[n / (4 * kNTiles)][n / 4 % kNTiles][n % 4];
}
template <int kMTiles, int kNTiles>
__device__ __forceinline__ const float &element(const float (&x)[kMTiles][kNTiles][4], int n) {
  return x[n / (4 * kNTiles)][n / 4 % kNTiles][n % 4];
}

// S = Q K^T: queries are rows.
template <int kMTiles, int kNTiles>
struct QkFragment {
  static constexpr int kElements = 4 * kMTiles * kNTiles;
  static constexpr int kRows = 2 * kMTiles;  // queries of a lane
  static constexpr int kKeys = 8 * kNTiles;  // of the tile
  static constexpr int kKeysOfLane = 2 * kNTiles;

  // Which of the lane's queries element n belongs to, and its key counted from first_key().
  static __host__ __device__ constexpr int row(int n) { return n / (4 * kNTiles) * 2 + n / 2 % 2; }
  static __host__ __device__ constexpr int key(int n) { return 8 * (n / 4 % kNTiles) + n % 2; }
  // The element of row r that holds the m-th key of the lane.
  static __host__ __device__ constexpr int at(int r, int m) { return (r / 2 * kNTiles + m / 2) * 4 + r % 2 * 2 + m % 2; }
  // Of the lane, in the tile: its first key, and its r-th query.
  static __device__ __forceinline__ int first_key(int lane) { return 2 * (lane & 3); }
  static __device__ __forceinline__ int query(int lane, int r) { return 16 * (r / 2) + 8 * (r % 2) + (lane >> 2); }
  // One lane of those that share queries.
  static __device__ __forceinline__ bool leads(int lane) { return (lane & 3) == 0; }

  // Combines each x[r] over the lanes that share query r. The shuffles of all rows are interleaved, which hides their latency.
  template <int kCount, typename Op>
  static __device__ __forceinline__ void reduce(float (&x)[kCount], Op op) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
      for (int r = 0; r < kCount; ++r) x[r] = op(x[r], __shfl_xor_sync(~0u, x[r], distance));
  }
};

// S^T = K Q^T: queries are columns.
template <int kMTiles, int kNTiles = 1>
struct KqFragment {
  static constexpr int kElements = 4 * kMTiles * kNTiles;
  static constexpr int kRows = 2 * kNTiles;
  static constexpr int kKeys = 16 * kMTiles;
  static constexpr int kKeysOfLane = 2 * kMTiles;

  static __host__ __device__ constexpr int row(int n) { return n / 4 % kNTiles * 2 + n % 2; }
  static __host__ __device__ constexpr int key(int n) { return 16 * (n / (4 * kNTiles)) + 8 * (n / 2 % 2); }
  static __host__ __device__ constexpr int at(int r, int m) { return (m / 2 * kNTiles + r / 2) * 4 + m % 2 * 2 + r % 2; }
  static __device__ __forceinline__ int first_key(int lane) { return lane >> 2; }
  static __device__ __forceinline__ int query(int lane, int r) { return 8 * (r / 2) + 2 * (lane & 3) + r % 2; }
  static __device__ __forceinline__ bool leads(int lane) { return lane < 4; }

  template <int kCount, typename Op>
  static __device__ __forceinline__ void reduce(float (&x)[kCount], Op op) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2)
#pragma unroll
      for (int r = 0; r < kCount; ++r) x[r] = op(x[r], __shfl_xor_sync(~0u, x[r], distance));
  }
};

struct MaxOp {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct SumOp {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// Sets all elements of a wgmma accumulator to 0.
template <int kCount>
__device__ __forceinline__ void clear(float (&x)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[n] = 0.f;
}

// Multiplies row r of an output fragment.
template <class Out, typename Array>
__device__ __forceinline__ void scale_row(Array &x, int r, float factor) {
#pragma unroll
  for (int m = 0; m < Out::kKeysOfLane; ++m) element(x, Out::at(r, m)) *= factor;
}
// Multiplies every row of an output fragment by its factor. `Out` describes the array, queries as rows or as columns like the scores.
template <class Out, typename Array>
__device__ __forceinline__ void scale_rows(Array &x, const float (&factor)[Out::kRows]) {
#pragma unroll
  for (int n = 0; n < Out::kElements; ++n) element(x, n) *= factor[Out::row(n)];
}

}  // namespace fa::cuda
