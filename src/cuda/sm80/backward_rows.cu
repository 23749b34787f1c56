// SPDX-License-Identifier: Apache-2.0
// The statistics of the rows as common/backward_rows.cu has them, for 16-bit tensors: whole chunks by 16-byte loads.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "cuda/common/operand.h"
#include "cuda/common/ptx.cuh"
#include "cuda/sm80/backward.h"

namespace fa::cuda::sm80 {
namespace {

constexpr int kThreads = 256;

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

// One block a chunk, kLanes lanes a row, eight columns a lane.
template <int kLanes>
__global__ void __launch_bounds__(kThreads) backward_rows(const __grid_constant__ BackwardParams a) {
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
  if (thread < kTurnsPerChunk) a.turn[int64_t{blockIdx.x} * kTurnsPerChunk + thread] = 0;
  if (a.dq_sum != nullptr) {
    const int vectors = a.chunk_rows * a.head_dim_bucket / 4;
    float4 *sum = reinterpret_cast<float4 *>(a.dq_sum) + int64_t{blockIdx.x} * vectors;
    for (int n = thread; n < vectors; n += kThreads) sum[n] = float4{0, 0, 0, 0};
  }
}

}  // namespace

Launch row_statistics_launch(const BackwardParams &a) {
  const Problem &p = a.problem.forward;
  void (*kernel)(BackwardParams) =
      p.head_dim_v <= 64 ? &backward_rows<8> : (p.head_dim_v <= 128 ? &backward_rows<16> : &backward_rows<32>);
  return {reinterpret_cast<const void *>(kernel), kThreads, 0, p.batch * p.heads_q * a.row_chunks};
}

}  // namespace fa::cuda::sm80
