// SPDX-License-Identifier: Apache-2.0
// fa_merge: one warp per row. It computes the lse of the result, then adds the rows of all parts, scaled by exp(lse_n - lse). Each lane
// has its own columns.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "cuda/kernels/merge/merge.h"

namespace fa::cuda {
namespace {

constexpr int kWarps = 4;

__device__ float load(const void *row, Dtype dtype, int64_t column) {
  switch (dtype) {
    case Dtype::f16:
      return __half2float(static_cast<const __half *>(row)[column]);
    case Dtype::bf16:
      return __bfloat162float(static_cast<const __nv_bfloat16 *>(row)[column]);
    default:
      return static_cast<const float *>(row)[column];
  }
}

__device__ void store(void *row, Dtype dtype, int64_t column, float x) {
  switch (dtype) {
    case Dtype::f16:
      static_cast<__half *>(row)[column] = __float2half_rn(x);
      break;
    case Dtype::bf16:
      static_cast<__nv_bfloat16 *>(row)[column] = __float2bfloat16_rn(x);
      break;
    default:
      static_cast<float *>(row)[column] = x;
  }
}

__device__ void *row_of(const Operand &t, int64_t b, int64_t i, int64_t h) {
  const int64_t at = b * t.batch_stride + i * t.seq_stride + h * t.head_stride;
  return static_cast<char *>(t.data) + at * dtype_bytes(t.dtype);
}

__device__ float *scalar_of(const RowScalar &t, int64_t b, int64_t i, int64_t h) {
  return t.data + b * t.batch_stride + i * t.seq_stride + h * t.head_stride;
}

__device__ float warp_max(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, mask));
  return x;
}
__device__ float warp_sum(float x) {
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

// The lse of this warp's row over all parts. `lse_of(n)` reads that of part n.
template <typename LseOf>
__device__ float total_lse(int num_parts, LseOf lse_of) {
  const int lane = threadIdx.x & 31;
  float top = -CUDART_INF_F;
  for (int n = lane; n < num_parts; n += 32) top = fmaxf(top, lse_of(n));
  top = warp_max(top);
  const float base = top == -CUDART_INF_F ? 0.f : top;
  float sum = 0;
  for (int n = lane; n < num_parts; n += 32) sum += expf(lse_of(n) - base);
  sum = warp_sum(sum);
  return sum == 0 ? -CUDART_INF_F : base + logf(sum);
}

// `lse_of(n)` and `value_of(n, column)` read part n of this warp's row.
template <typename LseOf, typename ValueOf>
__device__ void merge_row(int num_parts, int64_t columns, LseOf lse_of, ValueOf value_of, void *out, Dtype dtype, float *lse) {
  const int lane = threadIdx.x & 31;
  const float total = total_lse(num_parts, lse_of);
  // Lane 0 overwrites lse only after every lane has read the lse of all parts: the result may be the same view as a part.
  for (int64_t column = lane; column < columns; column += 32) {
    float x = 0;
    for (int n = 0; n < num_parts; ++n) {
      const float part_lse = lse_of(n);
      if (part_lse != -CUDART_INF_F) x += expf(part_lse - total) * value_of(n, column);
    }
    store(out, dtype, column, x);
  }
  __syncwarp();
  if (lse != nullptr && lane == 0) *lse = total;
}

__global__ void __launch_bounds__(kWarps * 32, 8) merge_list(const __grid_constant__ MergeListParams a) {
  const MergeProblem &p = a.problem;
  const int64_t row = int64_t{blockIdx.x} * kWarps + (threadIdx.x >> 5);
  if (row >= p.batch * p.heads_q * p.seqlen_q) return;
  const int64_t i = row % p.seqlen_q, h = row / p.seqlen_q % p.heads_q, b = row / p.seqlen_q / p.heads_q;
  merge_row(
      p.num_parts, p.head_dim_v, [&](int n) { return *scalar_of(a.parts[n].lse, b, i, h); },
      [&](int n, int64_t column) { return load(row_of(a.parts[n].out, b, i, h), a.parts[n].out.dtype, column); },
      row_of(p.out, b, i, h), p.out.dtype, p.lse.data != nullptr ? scalar_of(p.lse, b, i, h) : nullptr);
}

// Columns of a warp, four of each lane, where rows are whole vectors of four.
constexpr int kSliceColumns = 128;

// This lane's columns of the sum of all parts. Several parts are loaded at a time, which hides their latency.
__device__ float4 sum_of_parts(int num_parts, const float *lse, int64_t rows, const float *out, int64_t part_stride,
                               float total, bool exists) {
  constexpr int kLoads = 8;
  const int lane = threadIdx.x & 31;
  float4 sum{0.f, 0.f, 0.f, 0.f};
  for (int first = 0; first < num_parts; first += 32) {
    const float lane_lse = first + lane < num_parts ? lse[(first + lane) * rows] : -CUDART_INF_F;
    const float lane_factor = expf(lane_lse - total);
    const int count = min(32, num_parts - first);
#pragma unroll 1
    for (int n = 0; n < count; n += kLoads) {
      float4 x[kLoads];
      float factor[kLoads];
      bool adds[kLoads];
#pragma unroll
      for (int m = 0; m < kLoads; ++m) {
        const float part_lse = __shfl_sync(~0u, lane_lse, (n + m) % 32);
        adds[m] = exists && part_lse != -CUDART_INF_F && n + m < count;
        factor[m] = __shfl_sync(~0u, lane_factor, (n + m) % 32);
        if (adds[m]) x[m] = *reinterpret_cast<const float4 *>(out + (first + n + m) * part_stride);
      }
#pragma unroll
      for (int m = 0; m < kLoads; ++m) {
        if (!adds[m]) continue;
        sum.x = fmaf(factor[m], x[m].x, sum.x);
        sum.y = fmaf(factor[m], x[m].y, sum.y);
        sum.z = fmaf(factor[m], x[m].z, sum.z);
        sum.w = fmaf(factor[m], x[m].w, sum.w);
      }
    }
  }
  return sum;
}

__host__ __device__ int64_t slices_of(const Problem &p) { return (p.head_dim_v + kSliceColumns - 1) / kSliceColumns; }

__global__ void __launch_bounds__(kWarps * 32, 4) merge_split(const __grid_constant__ MergeSplitParams a) {
  const Problem &p = a.problem;
  const bool vectors = p.head_dim_v % 4 == 0;
  const int64_t unit = int64_t{blockIdx.x} * kWarps + (threadIdx.x >> 5), slices = vectors ? slices_of(p) : 1,
                row = unit / slices;
  const int64_t rows = p.batch * p.heads_q * a.max_tokens;
  if (row >= rows) return;
  const int64_t i = row % a.max_tokens, h = row / a.max_tokens % p.heads_q, b = row / a.max_tokens / p.heads_q;
  const Sequence q = sequence_of(p.q_lengths, b);
  if (i >= q.len) return;
  const auto lse_of = [&](int n) { return a.lse[n * rows + row]; };
  void *const out = row_of(p.out, b, q.start + i, h);
  float *const lse = p.lse.data != nullptr ? scalar_of(p.lse, b, q.start + i, h) : nullptr;
  if (!vectors) {
    merge_row(
        a.num_parts, p.head_dim_v, lse_of,
        [&](int n, int64_t column) { return a.out[(n * rows + row) * p.head_dim_v + column]; }, out, p.out.dtype, lse);
    return;
  }
  const int lane = threadIdx.x & 31;
  const int64_t slice = unit - row * slices, column = slice * kSliceColumns + lane * 4;
  const bool exists = column < p.head_dim_v;
  const float total = total_lse(a.num_parts, lse_of);
  const float4 sum = sum_of_parts(a.num_parts, a.lse + row, rows, a.out + row * p.head_dim_v + (exists ? column : 0),
                                  rows * p.head_dim_v, total, exists);
  if (exists) {
    store(out, p.out.dtype, column, sum.x);
    store(out, p.out.dtype, column + 1, sum.y);
    store(out, p.out.dtype, column + 2, sum.z);
    store(out, p.out.dtype, column + 3, sum.w);
  }
  if (lse != nullptr && lane == 0 && slice == 0) *lse = total;
}

Launch launch_of(const void *kernel, int64_t rows) { return {kernel, kWarps * 32, 0, (rows + kWarps - 1) / kWarps}; }

}  // namespace

Launch merge_launch(const MergeListParams &params) {
  const MergeProblem &p = params.problem;
  return launch_of(reinterpret_cast<const void *>(&merge_list), p.batch * p.heads_q * p.seqlen_q);
}

Launch merge_launch(const MergeSplitParams &params) {
  const Problem &p = params.problem;
  const int64_t slices = p.head_dim_v % 4 == 0 ? slices_of(p) : 1;
  return launch_of(reinterpret_cast<const void *>(&merge_split), p.batch * p.heads_q * params.max_tokens * slices);
}

}  // namespace fa::cuda
