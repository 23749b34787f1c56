// SPDX-License-Identifier: Apache-2.0
// The parts of the backward pass that go row by row: its statistics, and the gradient of the sink.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "cuda/common/backward_rows.h"
#include "cuda/common/operand.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/score.cuh"

namespace fa::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSinkThreads = 512;

// Eight elements of a row as they lie in memory.
template <int kElementBytes>
struct Eight {
  static constexpr int kWords = kElementBytes * 2;
  uint32_t words[kWords] = {};

  // Zero from `valid` on.
  __device__ __forceinline__ void load(const Operand &t, int64_t at, int valid, bool vectors) {
    const char *from = static_cast<const char *>(t.data) + at * kElementBytes;
    if (vectors && valid >= 8) {
#pragma unroll
      for (int n = 0; n < kWords; n += 4) {
        const uint4 x = __ldg(reinterpret_cast<const uint4 *>(from) + n / 4);
        words[n] = x.x, words[n + 1] = x.y, words[n + 2] = x.z, words[n + 3] = x.w;
      }
      return;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (e >= valid) continue;
      if constexpr (kElementBytes == 4) {
        words[e] = reinterpret_cast<const uint32_t *>(from)[e];
      } else {
        words[e / 2] |= static_cast<uint32_t>(reinterpret_cast<const unsigned short *>(from)[e]) << (16 * (e & 1));
      }
    }
  }

  // Sum of the products with y; whether one of these elements is not zero.
  template <typename Element>
  __device__ __forceinline__ float dot(const Eight &y, bool &any) const {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      if constexpr (kElementBytes == 4) {
        any |= (words[n] & 0x7FFFFFFFu) != 0;
        sum += __uint_as_float(words[n]) * __uint_as_float(y.words[n]);
      } else {
        any |= (words[n] & 0x7FFF7FFFu) != 0;
        sum += to_float<Element>(words[n] & 0xFFFFu) * to_float<Element>(y.words[n] & 0xFFFFu);
        sum += to_float<Element>(words[n] >> 16) * to_float<Element>(y.words[n] >> 16);
      }
    }
    return sum;
  }
};

// One block a chunk, kLanes lanes a row, eight columns a lane at a time.
template <int kElementBytes, int kLanes>
__global__ void __launch_bounds__(kThreads) backward_rows(const __grid_constant__ BackwardRows a) {
  constexpr int kPass = kThreads / kLanes, kBatch = 2;  // rows at a time, and loads in flight a lane
  const BackwardProblem &g = a.problem;
  const Problem &p = g.forward;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, columns = static_cast<int>(p.head_dim_v);
  const int chunk = static_cast<int>(blockIdx.x) % a.row_chunks, slice = static_cast<int>(blockIdx.x) / a.row_chunks;
  const int head = slice % static_cast<int>(p.heads_q), batch = slice / static_cast<int>(p.heads_q);

  // The stores first: they need nothing that has to be loaded.
  if (thread < a.chunk_turns) a.turn[int64_t{blockIdx.x} * a.chunk_turns + thread] = 0;
  if (a.dq_sum != nullptr) {
    const int vectors = a.chunk_rows * a.head_dim_bucket / 4;
    float4 *sum = reinterpret_cast<float4 *>(a.dq_sum) + int64_t{blockIdx.x} * vectors;
    for (int n = thread; n < vectors; n += kThreads) sum[n] = float4{0, 0, 0, 0};
  }

  const Sequence q = sequence_of(p.q_lengths, batch);
  const int rows = static_cast<int>(q.len) - chunk * a.chunk_rows;
  const bool vector_out = takes_vectors(p.out, columns), vector_dout = takes_vectors(g.dout, columns);
  const int64_t first = q.start + chunk * a.chunk_rows;
  const int64_t out = batch * p.out.batch_stride + head * p.out.head_stride;
  const int64_t dout = batch * g.dout.batch_stride + head * g.dout.head_stride;
  for (int n0 = thread / kLanes; n0 < a.chunk_rows; n0 += kPass * kBatch) {
    float delta[kBatch] = {};
    bool any[kBatch] = {};
    for (int column = lane * 8; column < columns; column += kLanes * 8) {
      Eight<kElementBytes> x[kBatch], y[kBatch];
#pragma unroll
      for (int m = 0; m < kBatch; ++m) {
        const int n = n0 + m * kPass;
        if (n >= rows || n >= a.chunk_rows) continue;
        x[m].load(p.out, out + (first + n) * p.out.seq_stride + column, columns - column, vector_out);
        y[m].load(g.dout, dout + (first + n) * g.dout.seq_stride + column, columns - column, vector_dout);
      }
#pragma unroll
      for (int m = 0; m < kBatch; ++m) {
        delta[m] +=
            p.q.dtype == Dtype::bf16 ? x[m].template dot<__nv_bfloat16>(y[m], any[m]) : x[m].template dot<__half>(y[m], any[m]);
      }
    }
#pragma unroll
    for (int m = 0; m < kBatch; ++m) {
      const int n = n0 + m * kPass;
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) delta[m] += __shfl_xor_sync(~0u, delta[m], mask);
      const uint32_t row_lanes = (~0u >> (32 - kLanes)) << (thread & 31 & ~(kLanes - 1));
      // A row that sees only a sink has out = 0: whatever its dout is, NaN included, does not count.
      if ((__ballot_sync(~0u, any[m]) & row_lanes) == 0) delta[m] = 0;
      if (lane != 0 || n >= a.chunk_rows) continue;
      float lse = CUDART_INF_F;
      if (n < rows) {
        lse = p.lse.data[batch * p.lse.batch_stride + head * p.lse.head_stride + (first + n) * p.lse.seq_stride] * a.lse_unit;
        if (lse == -CUDART_INF_F) {
          lse = CUDART_INF_F;
          delta[m] = 0;
        } else if (g.dlse.data != nullptr) {
          delta[m] -= g.dlse.data[batch * g.dlse.batch_stride + head * g.dlse.head_stride + (first + n) * g.dlse.seq_stride];
        }
      }
      a.row_lse[int64_t{blockIdx.x} * a.chunk_rows + n] = lse;
      a.row_delta[int64_t{blockIdx.x} * a.chunk_rows + n] = delta[m];
    }
  }
}

template <int kElementBytes>
const void *rows_kernel(int64_t columns) {
  void (*kernel)(BackwardRows) = columns <= 64    ? &backward_rows<kElementBytes, 8>
                                 : columns <= 128 ? &backward_rows<kElementBytes, 16>
                                                  : &backward_rows<kElementBytes, 32>;
  return reinterpret_cast<const void *>(kernel);
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
  return {p.q.dtype == Dtype::f32 ? rows_kernel<4>(p.head_dim_v) : rows_kernel<2>(p.head_dim_v), kThreads, 0,
          p.batch * p.heads_q * a.row_chunks};
}

Launch backward_sink_launch(const BackwardRows &a) {
  return {reinterpret_cast<const void *>(&backward_sink), kSinkThreads, 0, a.problem.forward.heads_q};
}

}  // namespace fa::cuda
