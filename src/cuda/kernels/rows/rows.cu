// SPDX-License-Identifier: Apache-2.0
// Work on rows for context parallelism. Memory bounds all of it: a thread moves 16 bytes at a time where strides and addresses
// allow, and every grid is a few CTAs per SM, whose threads step through the rows.
#include <algorithm>

#include "cuda/common/operand.h"
#include "cuda/common/rows.cuh"
#include "cuda/kernels/rows/rows.h"

namespace fa::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostCtas = 132 * 8;  // enough loads in flight on any of today's devices

__device__ __forceinline__ int64_t first_of_thread() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ __forceinline__ int64_t all_threads() { return int64_t{gridDim.x} * kThreads; }

// Calls body(row, head, unit) for the units of all rows and heads, `units` of each head.
template <typename Body>
__device__ __forceinline__ void for_units(const RowShape &shape, int64_t units, Body body) {
  const int64_t all = shape.rows * shape.heads * units;
  for (int64_t n = first_of_thread(); n < all; n += all_threads())
    body(n / units / shape.heads, n / units % shape.heads, n % units);
}

template <typename Unit>
__global__ void __launch_bounds__(kThreads) copy_rows(const __grid_constant__ CopyRowsParams a) {
  const int64_t element = dtype_bytes(a.from.dtype), units = a.shape.dim * element / int64_t{sizeof(Unit)};
  const auto *from = static_cast<const char *>(a.from.data);
  auto *to = static_cast<char *>(a.to.data);
  for_units(a.shape, units, [&](int64_t row, int64_t head, int64_t unit) {
    const int64_t source = (row * a.from.seq_stride + head * a.from.head_stride) * element,
                  target = (row * a.to.seq_stride + head * a.to.head_stride) * element;
    reinterpret_cast<Unit *>(to + target)[unit] = reinterpret_cast<const Unit *>(from + source)[unit];
  });
}

// kVectors: the columns of parts and of `to` are whole vectors of four.
template <bool kVectors>
__global__ void __launch_bounds__(kThreads) sum_rows(const __grid_constant__ SumRowsParams a) {
  const int64_t units = (a.shape.dim + 3) / 4;
  const int columns = static_cast<int>(a.shape.dim);
  for_units(a.shape, units, [&](int64_t row, int64_t head, int64_t unit) {
    const int column = static_cast<int>(unit) * 4;
    const int64_t at = (row * a.shape.heads + head) * columns + column;
    float4 sum{0, 0, 0, 0};
    for (int n = 0; n < a.num_parts; ++n) {
      float4 x{0, 0, 0, 0};
      if constexpr (kVectors) {
        x = *reinterpret_cast<const float4 *>(a.parts[n] + at);
      } else {
        float *const e[4] = {&x.x, &x.y, &x.z, &x.w};
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (column + c < columns) *e[c] = a.parts[n][at + c];
        }
      }
      if (n == 0) {
        sum = x;
      } else {
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      }
    }
    char *to = static_cast<char *>(a.to.data) + (row * a.to.seq_stride + head * a.to.head_stride) * dtype_bytes(a.to.dtype);
    store_4(to, a.to.dtype, column, columns, kVectors, sum);
  });
}

__global__ void __launch_bounds__(kThreads) add_numbers(const __grid_constant__ AddNumbersParams a) {
  for (int64_t n = first_of_thread(); n < a.count; n += all_threads()) a.to[n] += static_cast<double>(a.from[n]);
}

__global__ void __launch_bounds__(kThreads) sum_numbers(const __grid_constant__ SumNumbersParams a) {
  for (int64_t n = first_of_thread(); n < a.count; n += all_threads()) {
    double sum = 0;
    for (int64_t p = 0; p < a.num_parts; ++p) sum += a.parts[p * a.count + n];
    a.to[n * a.stride] = static_cast<float>(sum);
  }
}

__global__ void __launch_bounds__(kThreads) write_numbers(const __grid_constant__ WriteNumbersParams a) {
  for (int64_t n = first_of_thread(); n < a.count; n += all_threads()) a.to[n] = a.numbers[n];
}

Launch launch_of(const void *kernel, int64_t units) {
  return {kernel, kThreads, 0, std::min((units + kThreads - 1) / kThreads, kMostCtas)};
}

// The largest power of two, up to 16, that divides the addresses of all rows and their size.
int64_t unit_bytes(const CopyRowsParams &a) {
  const int64_t element = dtype_bytes(a.from.dtype);
  int64_t bits = a.shape.dim * element | reinterpret_cast<intptr_t>(a.from.data) | reinterpret_cast<intptr_t>(a.to.data) | 16;
  for (const Operand *t : {&a.from, &a.to}) {
    if (a.shape.rows > 1) bits |= t->seq_stride * element;
    if (a.shape.heads > 1) bits |= t->head_stride * element;
  }
  return bits & -bits;
}

}  // namespace

Launch copy_rows_launch(const CopyRowsParams &a) {
  const int64_t bytes = unit_bytes(a);
  void (*kernel)(CopyRowsParams) = bytes >= 16  ? &copy_rows<uint4>
                                   : bytes >= 8 ? &copy_rows<uint2>
                                   : bytes >= 4 ? &copy_rows<uint32_t>
                                                : &copy_rows<uint16_t>;
  const int64_t unit = std::min<int64_t>(bytes, 16);
  return launch_of(reinterpret_cast<const void *>(kernel),
                   a.shape.rows * a.shape.heads * a.shape.dim * dtype_bytes(a.from.dtype) / unit);
}

Launch sum_rows_launch(const SumRowsParams &a) {
  bool vectors = a.shape.dim % 4 == 0 && has_16_byte_rows(a.to, 0);
  for (int n = 0; n < a.num_parts; ++n) vectors = vectors && reinterpret_cast<uintptr_t>(a.parts[n]) % 16 == 0;
  void (*kernel)(SumRowsParams) = vectors ? &sum_rows<true> : &sum_rows<false>;
  return launch_of(reinterpret_cast<const void *>(kernel), a.shape.rows * a.shape.heads * ((a.shape.dim + 3) / 4));
}

Launch add_numbers_launch(const AddNumbersParams &a) {
  return launch_of(reinterpret_cast<const void *>(&add_numbers), a.count);
}
Launch sum_numbers_launch(const SumNumbersParams &a) {
  return launch_of(reinterpret_cast<const void *>(&sum_numbers), a.count);
}
Launch write_numbers_launch(const WriteNumbersParams &a) {
  return launch_of(reinterpret_cast<const void *>(&write_numbers), a.count);
}

}  // namespace fa::cuda
