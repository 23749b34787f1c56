// SPDX-License-Identifier: Apache-2.0
// fa_append_kv: rotates new rows of q and k, and writes new rows of k and v to the cache.
//
// Plain caches: a thread moves one work unit, which is one or two 16-byte vectors of the row of one head: the two vectors that hold the
// two halves of its rotary pairs, one vector of interleaved pairs, or one vector that is only copied. Rows whose strides or addresses do
// not allow 16-byte accesses are moved two elements at a time.
//
// 8-bit caches: a warp moves the row of one head, because the descale may depend on the largest magnitude of all columns. So it does from fp32 to a cache of 16
// bits.
//
// The kernel itself reads lengths, offsets, the page table and positions.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <math_constants.h>

#include <algorithm>
#include <type_traits>

#include "cuda/common/operand.h"
#include "cuda/kernels/append/append.h"

namespace fa::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kCtasPerSm = 6;  // without it ptxas limits a kernel to 64 registers and spills on sm_80

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T>
__device__ T from_float(float x);
template <>
__device__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// n <= N consecutive elements. If N elements are 16 bytes, then n is N, the address is aligned and one access moves all of them.
// Otherwise the elements are moved one by one.
template <typename T, int N>
struct Vector {
  static constexpr bool kWhole = N * sizeof(T) == 16;
  static_assert(kWhole || N == 2);
  alignas(kWhole ? 16 : alignof(T)) T x[N];

  __device__ void load(const T *from, int n) {
    if constexpr (kWhole) {
      *reinterpret_cast<uint4 *>(x) = *reinterpret_cast<const uint4 *>(from);
    } else {
      x[0] = from[0];
      if (n > 1) x[1] = from[1];
    }
  }
  __device__ void store(T *to, int n) const {
    if constexpr (kWhole) {
      *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(x);
    } else {
      to[0] = x[0];
      if (n > 1) to[1] = x[1];
    }
  }
};

template <typename T>
__device__ void rotate(T &x, T &y, float cos, float sin) {
  const float a = to_float(x), b = to_float(y);
  x = from_float<T>(a * cos - b * sin);
  y = from_float<T>(a * sin + b * cos);
}

// Loads n <= N consecutive numbers of type U. If `aligned`, the address is aligned to N numbers (16 bytes at most), else to one.
template <int N, typename U>
__device__ void load_numbers(const U *from, bool aligned, int n, float (&to)[N]) {
  U x[N];
  if (aligned) {
    using Word = std::conditional_t<N * sizeof(U) % 16 == 0, uint4, std::conditional_t<N * sizeof(U) == 8, uint2, U>>;
    alignas(16) Word words[N * sizeof(U) / sizeof(Word)];
#pragma unroll
    for (int w = 0; w < static_cast<int>(N * sizeof(U) / sizeof(Word)); ++w) words[w] = reinterpret_cast<const Word *>(from)[w];
    memcpy(x, words, sizeof x);
  } else {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      if (e < n) x[e] = from[e];
    }
  }
#pragma unroll
  for (int e = 0; e < N; ++e) to[e] = e < n ? to_float(x[e]) : 0.f;
}

// One row of the cosine and sine tables; NaN for a position that they do not have (`known` is false).
struct Table {
  const void *cos, *sin;
  bool fp32, aligned, known;

  // Columns c .. c + n - 1, n <= N.
  template <typename T, int N>
  __device__ void read(int c, int n, float (&co)[N], float (&si)[N]) const {
    if (!known) {
#pragma unroll
      for (int e = 0; e < N; ++e) co[e] = si[e] = CUDART_NAN_F;
    } else if (fp32) {
      load_numbers(static_cast<const float *>(cos) + c, aligned, n, co);
      load_numbers(static_cast<const float *>(sin) + c, aligned, n, si);
    } else {
      load_numbers(static_cast<const T *>(cos) + c, aligned, n, co);
      load_numbers(static_cast<const T *>(sin) + c, aligned, n, si);
    }
  }
};

// Moves work unit u of the row of one head, and rotates it if it belongs to the first `rotary_dim` columns. `to` may be `from`.
template <typename T, int N>
__device__ void move_unit(const T *from, T *to, int u, int columns, int rotary_dim, bool interleaved, const Table &table) {
  const int half = rotary_dim / 2, rotated = interleaved ? (rotary_dim + N - 1) / N : (half + N - 1) / N;
  if (u >= rotated) {
    const int c = rotary_dim + (u - rotated) * N;
    if (to == from) return;
    Vector<T, N> copied;
    copied.load(from + c, columns - c);
    copied.store(to + c, columns - c);
    return;
  }
  const int c = u * N;
  if (interleaved) {
    Vector<T, N> pairs;
    float cos[N / 2], sin[N / 2];
    table.read<T>(c / 2, N / 2, cos, sin);
    pairs.load(from + c, N);
#pragma unroll
    for (int e = 0; e < N; e += 2) rotate(pairs.x[e], pairs.x[e + 1], cos[e / 2], sin[e / 2]);
    pairs.store(to + c, N);
    return;
  }
  const int n = min(half - c, N);
  Vector<T, N> x, y;
  float cos[N], sin[N];
  table.read<T>(c, n, cos, sin);
  x.load(from + c, n);
  y.load(from + half + c, n);
#pragma unroll
  for (int e = 0; e < N; ++e) {
    if (e < n) rotate(x.x[e], y.x[e], cos[e], sin[e]);
  }
  x.store(to + c, n);
  y.store(to + half + c, n);
}

// The last sequence whose first row is at most `row`: -1 before the first sequence, p.batch after the last one. All lanes of the warp
// search together.
__device__ int64_t sequence_at(const AppendProblem &p, int64_t row) {
  const int lane = threadIdx.x & 31;
  int64_t first = -1, count = p.batch + 1;  // it is one of first .. first + count
  while (count > 0) {
    const int64_t step = (count + 31) / 32, candidate = first + (lane + 1) * step;
    const bool begun = candidate <= first + count && offset_of(p.lengths, candidate) <= row;
    const int n = __popc(__ballot_sync(~0u, begun));
    first += n * step;
    count = min(step - 1, count - n * step);
  }
  return first;
}

template <typename T>
__device__ T *row_of(const Operand &t, int64_t outer, int64_t row, int64_t head) {
  return static_cast<T *>(t.data) + outer * t.batch_stride + row * t.seq_stride + head * t.head_stride;
}

__device__ Table table_of(const AppendParams &a, int64_t b, const AppendSequence &s, int64_t i) {
  const AppendProblem &p = a.problem;
  if (p.rotary_dim == 0) return {};
  const int64_t position = append_position(p, b, s, i), bytes = dtype_bytes(p.table_dtype);
  return {static_cast<const char *>(p.cos) + position * p.cos_stride * bytes,
          static_cast<const char *>(p.sin) + position * p.sin_stride * bytes, p.table_dtype == Dtype::f32, a.vector_tables,
          position >= 0 && position < p.num_positions};
}

template <typename T, int N>
__device__ void append_unit(const AppendParams &a, int64_t b, const AppendSequence &s, int64_t i, int unit) {
  const AppendProblem &p = a.problem;
  const Table table = table_of(a, b, s, i);
  const int rotary_dim = static_cast<int>(p.rotary_dim);
  const int units_of_q = a.units_q * static_cast<int>(p.heads_q);
  if (unit < units_of_q) {
    const int h = unit / a.units_q;
    return move_unit<T, N>(row_of<T>(p.q, b, s.start + i, h), row_of<T>(p.q_out, b, s.start + i, h), unit - h * a.units_q,
                           static_cast<int>(p.head_dim), rotary_dim, p.interleaved, table);
  }
  CacheRow target;
  if (!find_cache_row(p, b, s.offset + i, target)) return;
  unit -= units_of_q;
  const int units_of_k = a.units_k * static_cast<int>(p.heads_k);
  if (unit < units_of_k) {
    const int h = unit / a.units_k;
    return move_unit<T, N>(row_of<T>(p.k, b, s.start + i, h), row_of<T>(p.k_cache, target.outer, target.row, h),
                           unit - h * a.units_k, static_cast<int>(p.head_dim), rotary_dim, p.interleaved, table);
  }
  unit -= units_of_k;
  const int h = unit / a.units_v;
  move_unit<T, N>(row_of<T>(p.v, b, s.start + i, h), row_of<T>(p.v_cache, target.outer, target.row, h), unit - h * a.units_v,
                  static_cast<int>(p.head_dim_v), /*rotary_dim=*/0, false, table);
}

// Converts to e4m3 or int8: rounds to nearest, ties to even, and saturates.
__device__ uint8_t quantise(float x, Dtype dtype) {
  if (dtype == Dtype::e4m3) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  return x == x ? static_cast<uint8_t>(__float2int_rn(fminf(fmaxf(x, -127.f), 127.f))) : 0;
}

// Writes a row of fp32, which lies in shared memory, to a cache of 16 bits.
template <typename U>
__device__ void round_row(const float *row, U *to, int columns) {
  const int lane = threadIdx.x & 31;
  if (reinterpret_cast<uintptr_t>(to) % 4 == 0 && columns % 2 == 0) {
    for (int c = 2 * lane; c < columns; c += 64) {
      alignas(4) const U pair[2] = {from_float<U>(row[c]), from_float<U>(row[c + 1])};
      *reinterpret_cast<uint32_t *>(to + c) = *reinterpret_cast<const uint32_t *>(pair);
    }
  } else {
    for (int c = lane; c < columns; c += 32) to[c] = from_float<U>(row[c]);
  }
}

// One warp writes the row of one head to a cache of fewer bits. `row`: shared memory of the warp, for the rotated row in fp32.
template <typename T>
__device__ void narrow_row(const T *from, const Operand &cache, const CacheRow &target, int64_t head, int64_t b,
                           const Descale &descale, int columns, int rotary_dim, bool interleaved, const Table &table,
                           float *row) {
  const int lane = threadIdx.x & 31, half = rotary_dim / 2;
  __syncwarp();  // the previous row has been read
  for (int c = lane; c < half; c += 32) {
    const int first = interleaved ? 2 * c : c, second = interleaved ? 2 * c + 1 : c + half;
    float cos[1], sin[1];
    table.read<T>(c, 1, cos, sin);
    const float x = to_float(from[first]), y = to_float(from[second]);
    row[first] = x * cos[0] - y * sin[0];
    row[second] = x * sin[0] + y * cos[0];
  }
  for (int c = rotary_dim + lane; c < columns; c += 32) row[c] = to_float(from[c]);
  __syncwarp();
  if (cache.dtype == Dtype::f16) return round_row(row, row_of<__half>(cache, target.outer, target.row, head), columns);
  if (cache.dtype == Dtype::bf16) return round_row(row, row_of<__nv_bfloat16>(cache, target.outer, target.row, head), columns);
  const Operand &descales = descale.factors;
  float row_descale = 1.f, divisor = 1.f;
  if (descale.per_row) {
    float largest = 0.f, probe = 0.f;  // probe is NaN if a column is not finite
    for (int c = lane; c < columns; c += 32) {
      largest = fmaxf(largest, fabsf(row[c]));
      probe += row[c] * 0.f;
    }
    for (int mask = 16; mask > 0; mask /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, mask));
      probe += __shfl_xor_sync(~0u, probe, mask);
    }
    row_descale = largest / (cache.dtype == Dtype::e4m3 ? 448.f : 127.f) + probe;
    divisor = row_descale == 0.f ? 1.f : row_descale;
    if (lane == 0) *row_of<float>(descales, target.outer, target.row, head) = row_descale;
  } else if (descales.data != nullptr) {
    divisor = *row_of<const float>(descales, b, 0, head);
  }
  uint8_t *to = row_of<uint8_t>(cache, target.outer, target.row, head);
  if (reinterpret_cast<uintptr_t>(to) % 4 == 0 && columns % 4 == 0) {
    for (int c = 4 * lane; c < columns; c += 128) {
      const uchar4 bytes{quantise(row[c] / divisor, cache.dtype), quantise(row[c + 1] / divisor, cache.dtype),
                         quantise(row[c + 2] / divisor, cache.dtype), quantise(row[c + 3] / divisor, cache.dtype)};
      *reinterpret_cast<uchar4 *>(to + c) = bytes;
    }
  } else {
    for (int c = lane; c < columns; c += 32) to[c] = quantise(row[c] / divisor, cache.dtype);
  }
}

// One warp moves the row of head `unit`; heads of q, k and v are counted together.
template <typename T, int N>
__device__ void append_head(const AppendParams &a, int64_t b, const AppendSequence &s, int64_t i, int unit, float *shared) {
  const AppendProblem &p = a.problem;
  const Table table = table_of(a, b, s, i);
  const int rotary_dim = static_cast<int>(p.rotary_dim), columns = static_cast<int>(p.head_dim);
  if (unit < p.heads_q) {
    for (int u = threadIdx.x & 31; u < a.units_q; u += 32) {
      move_unit<T, N>(row_of<T>(p.q, b, s.start + i, unit), row_of<T>(p.q_out, b, s.start + i, unit), u, columns, rotary_dim,
                      p.interleaved, table);
    }
    return;
  }
  CacheRow target;
  if (!find_cache_row(p, b, s.offset + i, target)) return;
  const int64_t head = unit - p.heads_q;
  if (head < p.heads_k) {
    narrow_row(row_of<T>(p.k, b, s.start + i, head), p.k_cache, target, head, b, p.k_descale, columns, rotary_dim,
               p.interleaved, table, shared);
  } else {
    narrow_row(row_of<T>(p.v, b, s.start + i, head - p.heads_k), p.v_cache, target, head - p.heads_k, b, p.v_descale,
               static_cast<int>(p.head_dim_v), 0, false, table, shared);
  }
}

// A CTA loops over work tiles. A work tile is as many consecutive work units of one row as a CTA has threads (caches of fewer bits: warps).
template <typename T, int N, bool kNarrows>
__global__ void __launch_bounds__(kThreads, kCtasPerSm) append_rows(const __grid_constant__ AppendParams a) {
  __shared__ float shared[kNarrows ? kThreads / 32 * kMaxHeadDim : 1];
  const AppendProblem &p = a.problem;
  if (p.seqused_k != nullptr) {
    for (int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x; b < p.batch; b += int64_t{gridDim.x} * kThreads) {
      p.seqused_k[b * p.seqused_k_stride] = static_cast<int32_t>(appended_length(p, append_sequence(p, b)));
    }
  }
  for (int64_t tile = blockIdx.x; tile < a.work_tiles; tile += gridDim.x) {
    const int64_t row = tile / a.tiles_per_row;
    const int worker = static_cast<int>(threadIdx.x) / (kNarrows ? 32 : 1);
    const int unit = static_cast<int>(tile - row * a.tiles_per_row) * (kNarrows ? kThreads / 32 : kThreads) + worker;
    int64_t b, i;
    if (p.lengths.cu != nullptr) {
      b = sequence_at(p, row);
      if (b < 0 || b == p.batch) continue;  // before the first or after the last sequence
      i = row - offset_of(p.lengths, b);
    } else {
      b = row / p.lengths.max_len;
      i = row - b * p.lengths.max_len;
    }
    const AppendSequence s = append_sequence(p, b);
    if (i >= s.len || s.offset < 0 || unit >= a.units) continue;
    if constexpr (kNarrows) {
      append_head<T, N>(a, b, s, i, unit, shared + worker * kMaxHeadDim);
    } else {
      append_unit<T, N>(a, b, s, i, unit);
    }
  }
}

template <typename T>
const void *kernel_of(bool vectors, bool narrows) {
  if (narrows) {
    return vectors ? reinterpret_cast<const void *>(&append_rows<T, 16 / sizeof(T), true>)
                   : reinterpret_cast<const void *>(&append_rows<T, 2, true>);
  }
  return vectors ? reinterpret_cast<const void *>(&append_rows<T, 16 / sizeof(T), false>)
                 : reinterpret_cast<const void *>(&append_rows<T, 2, false>);
}

bool narrows(const AppendProblem &p) { return p.k_cache.dtype != p.k.dtype; }

// Whether 16-byte vectors can move all rows: rows are aligned, and each half of the rotary columns is a whole number of vectors. Into a
// cache of fewer bits only q is moved by vectors.
bool moves_vectors(const AppendProblem &p) {
  const int64_t elements = 16 / dtype_bytes(p.k.dtype);
  const bool rotates = p.rotary_dim % (p.interleaved ? elements : 2 * elements) == 0;
  if (!rotates || !has_16_byte_rows(p.q, p.head_dim) || !has_16_byte_rows(p.q_out, p.head_dim)) return false;
  if (narrows(p)) return true;
  return has_16_byte_rows(p.k, p.head_dim) && has_16_byte_rows(p.k_cache, p.head_dim) && has_16_byte_rows(p.v, p.head_dim_v) &&
         has_16_byte_rows(p.v_cache, p.head_dim_v);
}

}  // namespace

Launch append_launch(AppendParams &a) {
  const AppendProblem &p = a.problem;
  const bool vectors = moves_vectors(p);
  const int64_t elements = vectors ? 16 / dtype_bytes(p.k.dtype) : 2;
  const auto vectors_of = [&](int64_t columns) { return (columns + elements - 1) / elements; };
  const int64_t units_of_row =
      vectors_of(p.interleaved ? p.rotary_dim : p.rotary_dim / 2) + vectors_of(p.head_dim - p.rotary_dim);
  a.units_q = static_cast<int32_t>(units_of_row);
  a.units_k = static_cast<int32_t>(units_of_row);
  a.units_v = static_cast<int32_t>(vectors_of(p.head_dim_v));
  const bool by_warps = narrows(p);
  const int64_t units = by_warps ? p.heads_q + p.heads_k * (p.head_dim_v > 0 ? 2 : 1)
                                 : p.heads_q * a.units_q + p.heads_k * (a.units_k + a.units_v);
  const int64_t units_per_tile = by_warps ? kThreads / 32 : kThreads;
  a.units = static_cast<int32_t>(units);
  a.tiles_per_row = static_cast<int32_t>((units + units_per_tile - 1) / units_per_tile);
  a.work_tiles = p.rows * a.tiles_per_row;
  const int64_t table_bytes = dtype_bytes(p.table_dtype);
  a.vector_tables = vectors && reinterpret_cast<uintptr_t>(p.cos) % 16 == 0 && reinterpret_cast<uintptr_t>(p.sin) % 16 == 0 &&
                    (p.cos_stride | p.sin_stride) * table_bytes % 16 == 0;
  const int64_t lengths = p.seqused_k != nullptr ? (p.batch + kThreads - 1) / kThreads : 0;
  constexpr int64_t kMostCtas = int64_t{1} << 30;
  const void *kernel = p.k.dtype == Dtype::f16    ? kernel_of<__half>(vectors, by_warps)
                       : p.k.dtype == Dtype::bf16 ? kernel_of<__nv_bfloat16>(vectors, by_warps)
                                                  : kernel_of<float>(vectors, by_warps);
  return {kernel, kThreads, 0, std::min(std::max(a.work_tiles, lengths), kMostCtas)};
}

}  // namespace fa::cuda
