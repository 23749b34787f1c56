// SPDX-License-Identifier: Apache-2.0
// The epilogue of a forward: computes lse of a row and the factor of its out from the softmax state, and stores rows to global memory.
#pragma once

#include <math_constants.h>

#include "core/problem.h"
#include "cuda/common/exponential.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/scores.h"

namespace fa::cuda {

// ----------------------------------------------------------------------------------------------------------------------
// Rows
// ----------------------------------------------------------------------------------------------------------------------

// Row `row` (counted in the batch entry: with packed tensors over the whole batch) of one head.
template <typename Element>
__device__ __forceinline__ Element *row_of_tensor(const Operand &t, int64_t batch, int64_t row, int64_t head) {
  return static_cast<Element *>(t.data) + batch * t.batch_stride + row * t.seq_stride + head * t.head_stride;
}
__device__ __forceinline__ float *row_of_tensor(const RowScalar &t, int64_t batch, int64_t row, int64_t head) {
  return t.data + batch * t.batch_stride + head * t.head_stride + row * t.seq_stride;
}

// The factor by which out of a row is multiplied, and its lse (natural logarithm).
struct RowResult {
  float factor, lse;
};

// Computes the results of rows from m (of the base) and l. `sink`: the attention sink of the head (natural logarithm), or null. A sink far above
// every logit would overflow relative to m, so m is raised to it; out is then negligible. A row without visible keys has l = 0: out = 0,
// lse = -inf. If a visible score is NaN, l and out are NaN.
template <class Base = Base2, int kRows>
__device__ __forceinline__ void finalize_rows(const float (&max)[kRows], const float (&sum)[kRows], const float *sink,
                                              RowResult (&result)[kRows]) {
  // Every step handles all rows, without branches. The dependency chains of the rows then hide each other's latency.
  float m[kRows], l[kRows], factor[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) m[r] = max[r], l[r] = sum[r], factor[r] = 1.f;
  if (sink != nullptr) {
    const float s = __fmul_rn(*sink, Base::kLogit);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float raised = fmaxf(m[r], s);
      factor[r] = Base::exp(m[r] - raised);
      l[r] = fmaf(l[r], factor[r], Base::exp(s - raised));
      m[r] = raised;
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    result[r].factor = l[r] == 0.f ? 0.f : Base::divide(factor[r], l[r]);
    result[r].lse = l[r] == 0.f ? -CUDART_INF_F : Base::lse(m[r], l[r]);
  }
}
__device__ __forceinline__ RowResult finalize_row(float max, float sum, const float *sink) {
  const float maxima[1] = {max}, sums[1] = {sum};
  RowResult result[1];
  finalize_rows(maxima, sums, sink, result);
  return result[0];
}
__device__ __forceinline__ const float *sink_of(const Problem &p, int head) {
  return p.sink != nullptr ? p.sink + head * p.sink_stride : nullptr;
}

// An element of out times the row's factor. Under FA_FLAG_SAME_BITS zeros are positive: what is added up where a row sees no key
// may have either sign.
template <bool kSameBits>
__device__ __forceinline__ float scaled_out(float x, float factor) {
  return kSameBits ? __fmaf_rn(x, factor, 0.f) : x * factor;
}

// One warp stores out = 0 and lse for a row that is not used or sees no key. `lse` is null if it is not asked for.
template <typename Element>
__device__ __forceinline__ void store_zero_row(Element *out, int64_t columns, float *lse, float lse_value, int lane) {
  if (lse != nullptr && lane == 0) *lse = lse_value;
  auto *bits = reinterpret_cast<unsigned short *>(out);
  for (int column = lane; column < columns; column += 32) bits[column] = 0;
}
// The same, with lse = -inf, for rows first, first + step, ... below `end`. rows.out_at(row) and rows.lse_at(row) are where out and lse of a row
// lie. `lane` is a reference so that the compiler keeps its test behind that of lse.
template <class Rows>
__device__ __forceinline__ void store_zero_rows(const Rows &rows, const Problem &p, int first, int end, int step,
                                                const int &lane) {
  for (int row = first; row < end; row += step)
    store_zero_row(rows.out_at(row), p.head_dim_v, rows.lse_at(row), -CUDART_INF_F, lane);
}

// Row r (0: g, 1: g + 8) of a 16-row accumulator to global memory, 16 bytes per lane: the four lanes that share the row exchange the vectors of
// four column tiles. `row()` is column 0 of the row for this lane's quad; columns from `columns` on are not written. pack(a, b) converts a pair;
// `keep` is ~0, or 0 to write zeros. All lanes of the warp take part in the exchange; quads without
// `store` write nothing. The address is a function so that kernels short of registers compute it where it is used.
template <typename Element, int kTiles, typename Row, typename Pack>
__device__ __forceinline__ void store_fragment_row_at(const float *acc, int r, Row row, int columns, bool vectors, int quad,
                                                      Pack pack, uint32_t keep, bool store) {
#pragma unroll
  for (int j = 0; j < kTiles; j += 4) {
    uint32_t x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = pack(acc[4 * (j + n) + 2 * r], acc[4 * (j + n) + 2 * r + 1]) & keep;
    transpose_quad(x, quad);
    const int column = (j + quad) * 8;
    if (store) store_elements(row() + column, x, columns - column, vectors);
  }
}
// The same with the address in `row`.
template <typename Element, int kTiles, typename Pack>
__device__ __forceinline__ void store_fragment_row(const float *acc, int r, Element *row, int columns, bool vectors, int quad,
                                                   Pack pack, uint32_t keep = ~0u) {
  store_fragment_row_at<Element, kTiles>(
      acc, r, [&] { return row; }, columns, vectors, quad, pack, keep, true);
}

// The same in fp32, times `scale`, each lane two columns of a tile. `row` is a function, as above.
template <int kTiles, typename Row>
__device__ __forceinline__ void store_fragment_row_fp32(const float *acc, int r, Row row, int columns, bool vectors, int quad,
                                                        float scale) {
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const int column = j * 8 + quad * 2;
    float *to = row() + column;
    const float2 x{acc[4 * j + 2 * r] * scale, acc[4 * j + 2 * r + 1] * scale};
    if (vectors) {
      if (column < columns) *reinterpret_cast<float2 *>(to) = x;
    } else {
      if (column < columns) to[0] = x.x;
      if (column + 1 < columns) to[1] = x.y;
    }
  }
}

}  // namespace fa::cuda
