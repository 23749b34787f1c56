// SPDX-License-Identifier: Apache-2.0
// The row-wise kernels of the backward pass: backward_rows computes lse and delta of every query before the backward kernel,
// backward_padding and backward_sink run after it.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

#include "cuda/common/operand.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/scores.h"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"
#include "cuda/kernels/bwd_pre_post/second_pass.cuh"

namespace fa::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSinkThreads = 512;
constexpr int64_t kPaddingRows = 128;  // of a CTA
// Rows whose loads a lane has in flight. On chips before sm_90 four rows do not fit in the registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kRowsAtOnce = 2;
#else
constexpr int kRowsAtOnce = 4;
#endif

// Eight consecutive elements of a row, in the bits of memory.
template <int kElementBytes>
struct Eight {
  static constexpr int kWords = kElementBytes * 2;
  uint32_t words[kWords] = {};

  __device__ __forceinline__ void load(const Operand &t, int64_t at) {
    const uint4 *from = reinterpret_cast<const uint4 *>(static_cast<const char *>(t.data) + at * kElementBytes);
#pragma unroll
    for (int n = 0; n < kWords; n += 4) {
      const uint4 x = __ldg(from + n / 4);
      words[n] = x.x, words[n + 1] = x.y, words[n + 2] = x.z, words[n + 3] = x.w;
    }
  }
  // From any address; elements from `valid` on are zero.
  __device__ __forceinline__ void load_single(const Operand &t, int64_t at, int valid) {
    const char *from = static_cast<const char *>(t.data) + at * kElementBytes;
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

  // The dot product with y.
  template <typename Element>
  __device__ __forceinline__ float dot(const Eight &y) const {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kWords; ++n) {
      if constexpr (kElementBytes == 4) {
        sum += __uint_as_float(words[n]) * __uint_as_float(y.words[n]);
      } else {
        sum += to_float<Element>(words[n] & 0xFFFFu) * to_float<Element>(y.words[n] & 0xFFFFu);
        sum += to_float<Element>(words[n] >> 16) * to_float<Element>(y.words[n] >> 16);
      }
    }
    return sum;
  }
};

// lse and delta of Q tile number `index`. A row has kLanes lanes, each of eight columns at a time. kVectors: out and dout are
// read by 16 bytes.
template <typename Element, int kLanes, bool kVectors>
__device__ __forceinline__ void q_tile_statistics(const BackwardRows &a, int index, const QTilePlace &place) {
  constexpr int kRowsPerPass = kThreads / kLanes;  // rows per pass of the CTA
  constexpr int kBatch = kVectors && sizeof(Element) == 2 ? kRowsAtOnce : 1;
  const BackwardProblem &g = a.problem;
  const Problem &p = g.forward;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes, columns = static_cast<int>(p.head_dim_v);
  const int head = place.head, batch = place.batch, rows = min(place.len - place.q_tile * a.q_tile_rows, a.q_tile_rows);
  const int64_t first = place.start + place.q_tile * a.q_tile_rows;
  const int64_t out = batch * p.out.batch_stride + head * p.out.head_stride;
  const int64_t dout = batch * g.dout.batch_stride + head * g.dout.head_stride;
  const float p_exponent = a.p_exponent, delta_unit = __int_as_float((127 - a.p_exponent) << 23);  // 2^-p_exponent
  const float *all_lse = p.lse.data + batch * p.lse.batch_stride + head * p.lse.head_stride;
  for (int n0 = thread / kLanes; n0 < a.q_tile_rows; n0 += kRowsPerPass * kBatch) {
    float delta[kBatch] = {}, lse[kBatch] = {};
    if (rows > 0) {
      // All loads are issued before anything waits for one of them. Rows past the last one read the last one.
#pragma unroll 1
      for (int column = lane * 8; column < columns; column += kLanes * 8) {
        Eight<sizeof(Element)> x[kBatch], y[kBatch];
#pragma unroll
        for (int m = 0; m < kBatch; ++m) {
          const int64_t row = first + min(n0 + m * kRowsPerPass, rows - 1);
          const int64_t x_at = out + row * p.out.seq_stride + column, y_at = dout + row * g.dout.seq_stride + column;
          if constexpr (kVectors) {
            x[m].load(p.out, x_at);
            y[m].load(g.dout, y_at);
          } else {
            x[m].load_single(p.out, x_at, columns - column);
            y[m].load_single(g.dout, y_at, columns - column);
          }
        }
        if (column == 0) {
#pragma unroll
          for (int m = 0; m < kBatch; ++m) lse[m] = all_lse[(first + min(n0 + m * kRowsPerPass, rows - 1)) * p.lse.seq_stride];
        }
#pragma unroll
        for (int m = 0; m < kBatch; ++m) delta[m] += x[m].template dot<Element>(y[m]);
      }
    }
#pragma unroll
    for (int m = 0; m < kBatch; ++m) {
      const int n = n0 + m * kRowsPerPass;
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) delta[m] += __shfl_xor_sync(~0u, delta[m], mask);
      if (lane != 0 || n >= a.q_tile_rows) continue;
      if (n >= rows || lse[m] == -CUDART_INF_F) {
        lse[m] = CUDART_INF_F;
        // P of such a row is 0, and kernels multiply its dout by it: delta tells them if dout is not finite.
        delta[m] = n < rows && !(fabsf(delta[m]) < CUDART_INF_F) ? CUDART_NAN_F : 0;
      } else {
        lse[m] = fmaf(lse[m], a.lse_unit, -p_exponent);
        if (g.dlse.data != nullptr)
          delta[m] -= g.dlse.data[batch * g.dlse.batch_stride + head * g.dlse.head_stride + (first + n) * g.dlse.seq_stride];
      }
      a.row_lse[int64_t{index} * a.q_tile_rows + n] = lse[m];
      a.row_delta[int64_t{index} * a.q_tile_rows + n] = delta[m] * delta_unit;
    }
  }
}

// What backward_rows does for Q tile number `index`.
template <typename Element, int kLanes>
__device__ __forceinline__ void prepare_q_tile(const BackwardRows &a, int index) {
  const int thread = static_cast<int>(threadIdx.x);
  if (index == 0 && thread == 0 && a.nonfinite != nullptr) *a.nonfinite = 0;
  // Stores come first: those of padded sequences wait for no load.
  if (index == 0 && a.dq_semaphore != nullptr) {
    for (int n = thread; n <= a.more_counters; n += kThreads)
      a.dq_semaphore[int64_t{q_tiles_of_all_heads(a)} * a.dq_semaphores + n] = 0;
  }
  const QTilePlace place = place_of_q_tile(a, index);
  if (place.head < 0) return;
  if (thread < a.dq_semaphores) a.dq_semaphore[int64_t{index} * a.dq_semaphores + thread] = 0;
  if (a.dq_sum != nullptr && a.zero_dq_sum) {
    const int vectors = a.q_tile_rows * a.head_dim_bucket / 4;
    float4 *sum = reinterpret_cast<float4 *>(a.dq_sum) + int64_t{index} * vectors;
    for (int n = thread; n < vectors; n += kThreads) sum[n] = float4{0, 0, 0, 0};
  }
  const int columns = static_cast<int>(a.problem.forward.head_dim_v);
  if (columns % 8 == 0 && has_16_byte_rows(a.problem.forward.out, columns) && has_16_byte_rows(a.problem.dout, columns)) {
    q_tile_statistics<Element, kLanes, true>(a, index, place);
  } else {
    q_tile_statistics<Element, kLanes, false>(a, index, place);
  }
}

// The first Q tiles come last: the next kernel begins with them, and finds their dout in the L2 cache. The loop of a second pass takes registers that
// the first one has not.
template <typename Element, int kLanes, bool kSecondPass>
__global__ void __launch_bounds__(kThreads, kSecondPass ? 2 : 4) backward_rows(const __grid_constant__ BackwardRows a) {
  if constexpr (kSecondPass) {
    if (!is_pass_needed(a)) return;
    for_each_q_tile(a, [&](int index) { prepare_q_tile<Element, kLanes>(a, index); });
  } else {
    pdl_launch_dependents();
    prepare_q_tile<Element, kLanes>(a, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  }
}

template <typename Element, bool kSecondPass>
const void *rows_kernel(int64_t columns) {
  void (*kernel)(BackwardRows) = columns <= 64    ? &backward_rows<Element, 8, kSecondPass>
                                 : columns <= 128 ? &backward_rows<Element, 16, kSecondPass>
                                                  : &backward_rows<Element, 32, kSecondPass>;
  return reinterpret_cast<const void *>(kernel);
}
template <bool kSecondPass>
const void *rows_kernel_of_16_bits(const Problem &p) {
  return p.q.dtype == Dtype::f16 ? rows_kernel<__half, kSecondPass>(p.head_dim_v)
                                 : rows_kernel<__nv_bfloat16, kSecondPass>(p.head_dim_v);
}

// delta of a query of (batch, head), number `at` in the workspace, if its row_delta is NaN. A row that sees only a sink has out = 0. Its dout must not count, NaN
// included.
__device__ __noinline__ float delta_of_nonfinite_row(const BackwardRows &a, int batch, int head, int at) {
  const BackwardProblem &g = a.problem;
  const Problem &p = g.forward;
  const int64_t row =
      sequence_of(p.q_lengths, batch).start + at - int64_t{first_q_tile_of(a, batch, head, a.q_tile_rows)} * a.q_tile_rows;
  const char *out = static_cast<const char *>(p.out.data) +
                    (batch * p.out.batch_stride + head * p.out.head_stride + row * p.out.seq_stride) * dtype_bytes(p.out.dtype);
  for (int64_t column = 0; column < p.head_dim_v; ++column) {
    const bool zero = p.out.dtype == Dtype::f32 ? reinterpret_cast<const float *>(out)[column] == 0
                                                : (reinterpret_cast<const uint16_t *>(out)[column] & 0x7FFFu) == 0;
    if (!zero) return CUDART_NAN_F;
  }
  if (g.dlse.data == nullptr) return 0;
  return -g.dlse.data[batch * g.dlse.batch_stride + head * g.dlse.head_stride + row * g.dlse.seq_stride] *
         __int_as_float((127 - a.p_exponent) << 23);
}

// One CTA per head, which adds the rows in a fixed order: dsink = sum of P_sink * (dlse - sum of dout * out). The powers of two
// in row_lse and row_delta cancel.
__global__ void __launch_bounds__(kSinkThreads) backward_sink(const __grid_constant__ BackwardRows a) {
  __shared__ float sums[kSinkThreads];
  const Problem &p = a.problem.forward;
  const int head = blockIdx.x;
  const float sink = p.sink[head * p.sink_stride] * a.lse_unit, to_log2 = kLog2e / a.lse_unit;
  float sum = 0;
  // Rows are numbered sequence after sequence: those of sequence `batch` end before `end`, and row n is row n + shift of the workspace.
  int batch = -1, end = 0, shift = 0;
  for (int n = static_cast<int>(threadIdx.x);; n += kSinkThreads) {
    while (n >= end && ++batch < static_cast<int>(p.batch)) {
      shift = first_q_tile_of(a, batch, head, a.q_tile_rows) * a.q_tile_rows - end;
      end += static_cast<int>(sequence_of(p.q_lengths, batch).len);
    }
    if (n >= end) break;
    const int at = n + shift;
    if (a.row_lse[at] == CUDART_INF_F) continue;
    float delta = a.row_delta[at];
    if (isnan(delta)) delta = delta_of_nonfinite_row(a, batch, head, at);
    sum -= exp2f((sink - a.row_lse[at]) * to_log2) * delta;
  }
  sums[threadIdx.x] = sum;
  for (int half = kSinkThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) a.problem.dsink[head * a.problem.dsink_stride] = sums[0];
}

// Zeroes a row of dk or dv. Called by a warp.
__device__ __forceinline__ void zero_gradient(const Operand &t, int64_t batch, int64_t row, int64_t head, int64_t columns) {
  const int64_t bytes = dtype_bytes(t.dtype);
  char *at = static_cast<char *>(t.data) + (batch * t.batch_stride + row * t.seq_stride + head * t.head_stride) * bytes;
  if ((reinterpret_cast<uintptr_t>(at) | (columns * bytes)) % sizeof(uint4) != 0) {
    zero_row(at, t.dtype, columns);
    return;
  }
  for (int64_t n = threadIdx.x & 31; n < columns * bytes / int64_t{sizeof(uint4)}; n += 32)
    reinterpret_cast<uint4 *>(at)[n] = uint4{0, 0, 0, 0};
}

// CTAs for the keys of a head.
FA_HD int64_t padding_blocks(const Problem &p) { return (p.k_lengths.max_len + kPaddingRows - 1) / kPaddingRows; }

// Of kPaddingRows keys of one head, those before the first visible one.
__global__ void __launch_bounds__(kThreads) backward_padding(const __grid_constant__ BackwardRows a) {
  const Problem &p = a.problem.forward;
  const int64_t blocks = padding_blocks(p), block = blockIdx.x % blocks, head = blockIdx.x / blocks % p.heads_k,
                sequence = blockIdx.x / blocks / p.heads_k, batch = p.k_lengths.cu != nullptr ? 0 : sequence,
                start = sequence_of(p.k_lengths, sequence).start, end = unpadded_keys(p.k_lengths, sequence).start;
  for (int64_t n = threadIdx.x / 32; n < kPaddingRows; n += kThreads / 32) {
    const int64_t row = start + block * kPaddingRows + n;
    if (row >= end) return;
    if (a.problem.dk.data != nullptr) zero_gradient(a.problem.dk, batch, row, head, p.head_dim);
    if (a.problem.dv.data != nullptr) zero_gradient(a.problem.dv, batch, row, head, p.head_dim_v);
  }
}

}  // namespace

Launch backward_rows_launch(const BackwardRows &a) {
  const Problem &p = a.problem.forward;
  const void *kernel = p.q.dtype == Dtype::f32 ? rows_kernel<float, false>(p.head_dim_v)
                       : a.only_if != nullptr  ? rows_kernel_of_16_bits<true>(p)
                                               : rows_kernel_of_16_bits<false>(p);
  return {kernel, kThreads, 0, ctas_for_q_tiles(a)};
}

Launch backward_sink_launch(const BackwardRows &a) {
  return {reinterpret_cast<const void *>(&backward_sink), kSinkThreads, 0, a.problem.forward.heads_q};
}

Launch backward_padding_launch(const BackwardRows &a) {
  const Problem &p = a.problem.forward;
  return {reinterpret_cast<const void *>(&backward_padding), kThreads, 0, p.batch * p.heads_k * padding_blocks(p)};
}

}  // namespace fa::cuda
