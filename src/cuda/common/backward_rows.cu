// SPDX-License-Identifier: Apache-2.0
// The parts of the backward pass that go row by row: its statistics, and the gradient of the sink.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "cuda/common/backward_rows.h"
#include "cuda/common/operand.h"
#include "cuda/common/score.cuh"

namespace fa::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kSinkThreads = 512;

__device__ float load(const Operand &t, int64_t at) {
  if (t.dtype == Dtype::f32) return static_cast<const float *>(t.data)[at];
  return t.dtype == Dtype::bf16 ? __bfloat162float(static_cast<const __nv_bfloat16 *>(t.data)[at])
                                : __half2float(static_cast<const __half *>(t.data)[at]);
}

// Eight elements of a row, zero from `valid` on.
__device__ __forceinline__ uint4 load_8(const Operand &t, int64_t at, int valid, bool vectors) {
  const auto *elements = static_cast<const unsigned short *>(t.data) + at;
  if (vectors) return valid > 0 ? __ldg(reinterpret_cast<const uint4 *>(elements)) : uint4{0, 0, 0, 0};
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (e < valid) words[e / 2] |= static_cast<uint32_t>(elements[e]) << (16 * (e & 1));
  return {words[0], words[1], words[2], words[3]};
}

// Sum of the products of eight elements; whether one of x is not zero.
template <typename Element>
__device__ __forceinline__ float dot_8(const uint4 &x, const uint4 &y, bool &any) {
  const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
  float sum = 0;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    any |= (xs[n] & 0x7FFF7FFFu) != 0;
    sum += to_float<Element>(xs[n] & 0xFFFFu) * to_float<Element>(ys[n] & 0xFFFFu);
    sum += to_float<Element>(xs[n] >> 16) * to_float<Element>(ys[n] >> 16);
  }
  return sum;
}

// 16-bit tensors: one block a chunk, kLanes lanes a row, eight columns a lane.
template <int kLanes>
__global__ void __launch_bounds__(kThreads) backward_chunks(const __grid_constant__ BackwardRows a) {
  constexpr int kPass = kThreads / kLanes, kBatch = 2;  // rows at a time, and loads in flight a lane
  const BackwardProblem &g = a.problem;
  const Problem &p = g.forward;
  const int thread = static_cast<int>(threadIdx.x), column = thread % kLanes * 8;
  const int chunk = static_cast<int>(blockIdx.x) % a.row_chunks, slice = static_cast<int>(blockIdx.x) / a.row_chunks;
  const int head = slice % static_cast<int>(p.heads_q), batch = slice / static_cast<int>(p.heads_q);
  const Sequence q = sequence_of(p.q_lengths, batch);
  const int valid = static_cast<int>(p.head_dim_v) - column, rows = static_cast<int>(q.len) - chunk * a.chunk_rows;
  const bool vector_out = takes_vectors(p.out, p.head_dim_v), vector_dout = takes_vectors(g.dout, p.head_dim_v);
  const int64_t first = q.start + chunk * a.chunk_rows;
  const int64_t out = batch * p.out.batch_stride + head * p.out.head_stride + column;
  const int64_t dout = batch * g.dout.batch_stride + head * g.dout.head_stride + column;

  for (int n0 = thread / kLanes; n0 < a.chunk_rows; n0 += kPass * kBatch) {
    uint4 x[kBatch], y[kBatch];
#pragma unroll
    for (int m = 0; m < kBatch; ++m) {
      const int n = n0 + m * kPass;
      x[m] = y[m] = uint4{0, 0, 0, 0};
      if (n >= rows || n >= a.chunk_rows) continue;
      x[m] = load_8(p.out, out + (first + n) * p.out.seq_stride, valid, vector_out);
      y[m] = load_8(g.dout, dout + (first + n) * g.dout.seq_stride, valid, vector_dout);
    }
#pragma unroll
    for (int m = 0; m < kBatch; ++m) {
      const int n = n0 + m * kPass;
      bool any = false;
      float delta = p.q.dtype == Dtype::bf16 ? dot_8<__nv_bfloat16>(x[m], y[m], any) : dot_8<__half>(x[m], y[m], any);
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) delta += __shfl_xor_sync(~0u, delta, mask);
      const uint32_t row_lanes = (~0u >> (32 - kLanes)) << (thread & 31 & ~(kLanes - 1));
      // A row that sees only a sink has out = 0: whatever its dout is, NaN included, does not count.
      if ((__ballot_sync(~0u, any) & row_lanes) == 0) delta = 0;
      if (column != 0 || n >= a.chunk_rows) continue;
      float lse = CUDART_INF_F;
      if (n < rows) {
        lse = p.lse.data[batch * p.lse.batch_stride + head * p.lse.head_stride + (first + n) * p.lse.seq_stride] * a.lse_unit;
        if (lse == -CUDART_INF_F) {
          lse = CUDART_INF_F;
          delta = 0;
        } else if (g.dlse.data != nullptr) {
          delta -= g.dlse.data[batch * g.dlse.batch_stride + head * g.dlse.head_stride + (first + n) * g.dlse.seq_stride];
        }
      }
      a.row_lse[int64_t{blockIdx.x} * a.chunk_rows + n] = lse;
      a.row_delta[int64_t{blockIdx.x} * a.chunk_rows + n] = delta;
    }
  }
  if (thread < a.chunk_turns) a.turn[int64_t{blockIdx.x} * a.chunk_turns + thread] = 0;
  if (a.dq_sum != nullptr) {
    const int vectors = a.chunk_rows * a.head_dim_bucket / 4;
    float4 *sum = reinterpret_cast<float4 *>(a.dq_sum) + int64_t{blockIdx.x} * vectors;
    for (int n = thread; n < vectors; n += kThreads) sum[n] = float4{0, 0, 0, 0};
  }
}

// Tensors of any kind: one warp a row.
__global__ void __launch_bounds__(kThreads) backward_rows(const __grid_constant__ BackwardRows a) {
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
    if (row % a.chunk_rows == 0)
      for (int n = 0; n < a.chunk_turns; ++n) a.turn[index / a.chunk_rows * a.chunk_turns + n] = 0;
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
  const Problem &p = a.problem.forward;
  if (p.q.dtype == Dtype::f32 || p.head_dim_v > 256) {
    const int64_t rows = p.batch * p.heads_q * a.row_chunks * a.chunk_rows;
    return {reinterpret_cast<const void *>(&backward_rows), kThreads, 0, (rows + kWarps - 1) / kWarps};
  }
  void (*kernel)(BackwardRows) =
      p.head_dim_v <= 64 ? &backward_chunks<8> : (p.head_dim_v <= 128 ? &backward_chunks<16> : &backward_chunks<32>);
  return {reinterpret_cast<const void *>(kernel), kThreads, 0, p.batch * p.heads_q * a.row_chunks};
}

Launch backward_sink_launch(const BackwardRows &a) {
  return {reinterpret_cast<const void *>(&backward_sink), kSinkThreads, 0, a.problem.forward.heads_q};
}

}  // namespace fa::cuda
