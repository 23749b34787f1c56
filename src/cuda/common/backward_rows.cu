// SPDX-License-Identifier: Apache-2.0
// The parts of the backward pass that go row by row: its statistics, and the gradient of the sink.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "cuda/common/backward_rows.h"
#include "cuda/common/score.cuh"

namespace fa::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kSinkThreads = 512;

__device__ float load(const Operand &t, int64_t at) {
  if (t.dtype == Dtype::f32) return static_cast<const float *>(t.data)[at];
  return t.dtype == Dtype::bf16 ? __bfloat162float(static_cast<const __nv_bfloat16 *>(t.data)[at])
                                : __half2float(static_cast<const __half *>(t.data)[at]);
}

// One warp a row of a chunk.
__global__ void __launch_bounds__(kWarps * 32) backward_rows(const __grid_constant__ BackwardRows a) {
  const BackwardProblem &g = a.problem;
  const Problem &p = g.forward;
  const int lane = threadIdx.x & 31;
  const int64_t index = int64_t{blockIdx.x} * kWarps + (threadIdx.x >> 5);  // (batch, head, row)
  const int64_t padded = int64_t{a.row_chunks} * a.chunk_rows;
  if (index >= p.batch * p.heads_q * padded) return;
  const int64_t row = index % padded, head = index / padded % p.heads_q, batch = index / padded / p.heads_q;
  const Sequence q = sequence_of(p.q_lengths, batch);
  float lse = CUDART_INF_F, delta = 0;
  if (row < q.len) {
    const int64_t at = q.start + row;
    const float natural = p.lse.data[batch * p.lse.batch_stride + head * p.lse.head_stride + at * p.lse.seq_stride];
    if (natural != -CUDART_INF_F) {
      const int64_t out = batch * p.out.batch_stride + at * p.out.seq_stride + head * p.out.head_stride;
      const int64_t dout = batch * g.dout.batch_stride + at * g.dout.seq_stride + head * g.dout.head_stride;
      bool any = false;
      for (int64_t column = lane; column < p.head_dim_v; column += 32) {
        const float x = load(p.out, out + column);
        any |= x != 0;
        delta += x * load(g.dout, dout + column);
      }
      for (int mask = 16; mask > 0; mask /= 2) delta += __shfl_xor_sync(~0u, delta, mask);
      // A row that sees only a sink has out = 0: whatever its dout is, NaN included, does not count.
      if (!__any_sync(~0u, any)) delta = 0;
      if (g.dlse.data != nullptr)
        delta -= g.dlse.data[batch * g.dlse.batch_stride + head * g.dlse.head_stride + at * g.dlse.seq_stride];
      lse = natural * a.lse_unit;
    }
  }
  if (lane == 0) {
    a.row_lse[index] = lse;
    a.row_delta[index] = delta;
    if (a.turn != nullptr && row % a.chunk_rows == 0) a.turn[index / a.chunk_rows] = 0;
  }
  if (a.dq_sum != nullptr) {
    float4 *sum = reinterpret_cast<float4 *>(a.dq_sum + index * a.head_dim_bucket);
    for (int n = lane; n < a.head_dim_bucket / 4; n += 32) sum[n] = float4{0, 0, 0, 0};
  }
}

// One block a head, rows in a fixed order: d sink = sum of P_sink * (dlse - sum of dout * out).
__global__ void __launch_bounds__(kSinkThreads) backward_sink(const __grid_constant__ BackwardRows a) {
  __shared__ float sums[kSinkThreads];
  const Problem &p = a.problem.forward;
  const int head = blockIdx.x;
  const float sink = p.sink[head * p.sink_stride] * a.lse_unit, to_log2 = kLog2e / a.lse_unit;
  const int64_t padded = int64_t{a.row_chunks} * a.chunk_rows;
  float sum = 0;
  for (int64_t n = threadIdx.x; n < p.batch * padded; n += kSinkThreads) {
    const int64_t at = (n / padded * p.heads_q + head) * padded + n % padded;
    if (a.row_lse[at] != CUDART_INF_F) sum -= exp2f((sink - a.row_lse[at]) * to_log2) * a.row_delta[at];
  }
  sums[threadIdx.x] = sum;
  for (int half = kSinkThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) a.problem.dsink[head * a.problem.dsink_stride] = sums[0];
}

}  // namespace

Launch backward_rows_launch(const BackwardRows &a) {
  const int64_t rows = a.problem.forward.batch * a.problem.forward.heads_q * a.row_chunks * a.chunk_rows;
  return {reinterpret_cast<const void *>(&backward_rows), kWarps * 32, 0, (rows + kWarps - 1) / kWarps};
}

Launch backward_sink_launch(const BackwardRows &a) {
  return {reinterpret_cast<const void *>(&backward_sink), kSinkThreads, 0, a.problem.forward.heads_q};
}

}  // namespace fa::cuda
