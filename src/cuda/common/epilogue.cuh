// SPDX-License-Identifier: Apache-2.0
// The epilogue of a forward: from the softmax state of a row to the factor of its output and its lse, and rows to global memory.
#pragma once

#include <math_constants.h>

#include "core/problem.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/score.cuh"

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

// What out of a row is multiplied by, and its lse (natural logarithm).
struct RowResult {
  float factor, lse;
};

// From m (base 2) and l of a row. `sink`: its head's attention sink, one more logit in the denominator (natural units), or null. A sink far
// above every logit would overflow against m: then m is raised, out is negligible and only lse matters. l is 0 for a row without visible keys:
// out = 0, lse = -inf. l is NaN where a visible score is, and so is out then.
__device__ __forceinline__ RowResult finalize_row(float max, float sum, const float *sink) {
  float factor = 1.f;
  if (sink != nullptr) {
    const float s = *sink * kLog2e, raised = fmaxf(max, s);
    factor = exp2_approx(max - raised);
    sum = sum * factor + exp2_approx(s - raised);
    max = raised;
  }
  if (sum == 0.f) return {0.f, -CUDART_INF_F};
  return {__fdividef(factor, sum), (max + __log2f(sum)) * kLn2};
}
__device__ __forceinline__ const float *sink_of(const Problem &p, int head) {
  return p.sink != nullptr ? p.sink + head * p.sink_stride : nullptr;
}

// A row that is not used, or sees no key: out = 0 by a whole warp, and its lse.
template <typename Element>
__device__ __forceinline__ void store_zero_row(Element *out, int64_t columns, float *lse, float lse_value, int lane) {
  if (lse != nullptr && lane == 0) *lse = lse_value;
  auto *bits = reinterpret_cast<unsigned short *>(out);
  for (int column = lane; column < columns; column += 32) bits[column] = 0;
}

// Row r (0: g, 1: g + 8) of a 16-row accumulator to global memory, 16 bytes a lane: the four lanes that share the row exchange the vectors of
// four column tiles. `dst` is column 0 of the row for this lane's quad; columns from `columns` on are not written. pack(a, b) converts a pair;
// `keep` is ~0, or 0 to write zeros.
template <typename Element, int kTiles, typename Pack>
__device__ __forceinline__ void store_fragment_row(const float *acc, int r, Element *row, int columns, bool vectors, int quad,
                                                   Pack pack, uint32_t keep = ~0u) {
#pragma unroll
  for (int j = 0; j < kTiles; j += 4) {
    uint32_t x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = pack(acc[4 * (j + n) + 2 * r], acc[4 * (j + n) + 2 * r + 1]) & keep;
    transpose_quad(x, quad);
    const int column = (j + quad) * 8;
    store_elements(row + column, x, columns - column, vectors);
  }
}

}  // namespace fa::cuda
