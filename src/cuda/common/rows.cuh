// SPDX-License-Identifier: Apache-2.0
// Rows of the caller's tensors, read and written eight elements at a time where alignment allows.
#pragma once

#include "core/problem.h"
#include "cuda/common/operand.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/smem_tile.cuh"

namespace fa::cuda {

// Whether rows are whole 16-byte vectors, and whether those of a result are fp32 beside operands of 16 bits. Programs that
// are compiled at run time know it (score_program.cpp), and have no code for what does not occur.
__device__ __forceinline__ constexpr bool known_vectors(bool at_run_time) {
#if defined(FA_VECTOR_ROWS) && FA_VECTOR_ROWS
  return true;
#else
  return at_run_time;
#endif
}
__device__ __forceinline__ constexpr bool known_fp32(bool at_run_time) {
#ifdef FA_FP32_ROWS
  return FA_FP32_ROWS && at_run_time;
#else
  return at_run_time;
#endif
}

// Rows of one head of one sequence that starts at row `start` of its batch.
template <typename Element>
__device__ __forceinline__ RowSource<Element> row_source(const Operand &t, int64_t batch, int64_t start, int rows, int64_t head,
                                                         int64_t columns, bool vectors) {
  RowSource<Element> s{};
  s.base = static_cast<const Element *>(t.data) + batch * t.batch_stride + start * t.seq_stride + head * t.head_stride;
  s.row_stride = t.seq_stride;
  s.rows = rows;
  s.columns = static_cast<int>(columns);
  s.vectors = known_vectors(vectors);
  return s;
}

// Stores eight elements, to memory of any alignment or, with `vectors`, as one 16-byte vector. Elements from `valid` on are not written.
template <typename Element>
__device__ __forceinline__ void store_elements(Element *dst, const uint32_t (&words)[4], int valid, bool vectors) {
  if (vectors) {
    if (valid > 0) *reinterpret_cast<uint4 *>(dst) = uint4{words[0], words[1], words[2], words[3]};
    return;
  }
  auto *bits = reinterpret_cast<unsigned short *>(dst);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < valid) bits[e] = static_cast<unsigned short>(words[e / 2] >> (16 * (e & 1)));
  }
}

// Stores four columns of a row, as many of them as exist, converted to the dtype of the row.
__device__ __forceinline__ void store_4(char *row, Dtype dtype, int column, int columns, bool vectors, float4 x) {
  const float e[4] = {x.x, x.y, x.z, x.w};
  if (dtype == Dtype::f32) {
    float *dst = reinterpret_cast<float *>(row) + column;
    if (vectors && column + 4 <= columns) {
      *reinterpret_cast<float4 *>(dst) = x;
      return;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (column + n < columns) dst[n] = e[n];
    }
    return;
  }
  const bool bf16 = dtype == Dtype::bf16;
  const uint2 bits{bf16 ? pack2<__nv_bfloat16>(e[0], e[1]) : pack2<__half>(e[0], e[1]),
                   bf16 ? pack2<__nv_bfloat16>(e[2], e[3]) : pack2<__half>(e[2], e[3])};
  auto *dst = reinterpret_cast<unsigned short *>(row) + column;
  if (vectors && column + 4 <= columns) {
    *reinterpret_cast<uint2 *>(dst) = bits;
    return;
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (column + n < columns) dst[n] = static_cast<unsigned short>((n < 2 ? bits.x : bits.y) >> (16 * (n & 1)));
  }
}

// Zeroes the columns of a row. Called by a warp.
__device__ __forceinline__ void zero_row(char *row, Dtype dtype, int64_t columns) {
  for (int column = threadIdx.x & 31; column < columns; column += 32) {
    if (dtype == Dtype::f32) {
      reinterpret_cast<float *>(row)[column] = 0.f;
    } else {
      reinterpret_cast<unsigned short *>(row)[column] = 0;
    }
  }
}

// Transposes 4 x 4 words among the four lanes (a quad) that share a row of accumulators: word n of lane q and word q of lane n are
// exchanged. Then a lane holds the four words of one tile of eight columns.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int quad) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool high = (quad & bit) != 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & bit) continue;
      const uint32_t sent = high ? x[n] : x[n | bit];
      const uint32_t got = __shfl_xor_sync(~0u, sent, bit);
      if (high) {
        x[n] = got;
      } else {
        x[n | bit] = got;
      }
    }
  }
}

}  // namespace fa::cuda
