// SPDX-License-Identifier: Apache-2.0
// Tiles of the CUDA-core kernels: how a block of threads cuts a product, and how its operands get into shared memory as fp32.
//
// Every kernel here is one loop. A block owns kOwnRows rows of one side (queries or keys) and walks over tiles of kOtherRows rows of the
// other side. A tile takes several steps; each step brings a slice of some operands, a step ahead of its use:
//
//   S = A B^T       slices of kDepth columns of A (own rows) and B (other rows), so that head_dim is a loop and no limit
//   acc += W T      slices of kSliceRows rows of T (other rows), kColumns wide; W comes from registers through shared memory
//
// A warp owns 2 kOwn rows: lane / 16 says which kOwn of them, lane % 16 which of the other rows (n % 16) and which columns.
#pragma once

#include <cuda_fp8.h>

#include "core/problem.h"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/ptx.cuh"

namespace fa::cuda::simt {

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kDepth = 32;          // columns of a slice of A and B
constexpr int kPitch = kDepth + 4;  // floats; 16 rows of one 16-byte column lie in different banks by eights
constexpr float kMaskedP = -0.f;    // no visible weight has these bits

template <int kOwn_, int kOther_, int kColumns_>
struct Tiling {
  static constexpr int kOwn = kOwn_, kOther = kOther_;  // rows of either side a thread multiplies
  static constexpr int kColumns = kColumns_;            // of T and acc
  static constexpr int kOwnRows = kWarps * 2 * kOwn, kOtherRows = 16 * kOther;
  static constexpr int kSliceRows = kColumns <= 256 ? 32 : 16, kSlices = kOtherRows / kSliceRows;
  static constexpr int kAcc = kColumns / 16;         // columns of acc a thread owns: groups of 4, 64 apart
  static constexpr int kWeightPitch = 2 * kOwn + 4;  // W lies transposed: kSliceRows x 2 kOwn a warp
  static constexpr int kProductFloats = (kOwnRows + kOtherRows) * kPitch, kSliceFloats = kSliceRows * kColumns;
  static constexpr int kStageFloats = kProductFloats > kSliceFloats ? kProductFloats : kSliceFloats;
  static constexpr int kWeightFloats = kSliceRows * kWeightPitch;
  static constexpr int kSharedBytes = 4 * (2 * kStageFloats + kWarps * kWeightFloats);
  static_assert(kOwn % 4 == 0 && kColumns % 64 == 0 && kSharedBytes <= 98 * 1024, "must fit every device since sm_80");
};

// Where the rows of one operand of one sequence lie in global memory. Strides in bytes.
struct Rows {
  const char *base;  // row 0, element 0; paged: page 0, row 0 of the head
  int64_t row_stride;
  int32_t rows;     // rows from here on are read as zero
  int32_t columns;  // columns from here on are read as zero
  Dtype dtype;
  bool vectors;       // 16-byte loads are legal where four columns exist
  int32_t heads = 1;  // rows of one token that lie head_stride apart (queries that share keys)
  int64_t head_stride = 0;
  const int32_t *page_table = nullptr;  // null: not paged
  int64_t page_entry_stride = 0;
  int64_t page_stride = 0;
  int32_t page_size = 1;

  __device__ __forceinline__ const char *row(int r) const {
    if (heads > 1) return base + r / heads * row_stride + r % heads * head_stride;
    if (page_table == nullptr) return base + r * row_stride;
    const int page = r / page_size;
    return base + page_table[page * page_entry_stride] * page_stride + (r - page * page_size) * row_stride;
  }
};

// The first element of head h of a sequence that starts at row `start` of batch b.
__device__ __forceinline__ char *base_of(const Operand &t, int64_t b, int64_t start, int64_t h) {
  return static_cast<char *>(t.data) + (b * t.batch_stride + start * t.seq_stride + h * t.head_stride) * dtype_bytes(t.dtype);
}

// Rows of a head that begins at `base`.
__device__ __forceinline__ Rows row_source(const Operand &t, const char *base, int rows, int64_t columns, bool vectors) {
  Rows r{};
  r.base = base;
  r.row_stride = t.seq_stride * dtype_bytes(t.dtype);
  r.rows = rows;
  r.columns = static_cast<int32_t>(columns);
  r.dtype = t.dtype;
  r.vectors = vectors;
  r.heads = 1;
  return r;
}

// Four 16-bit elements, zero from `valid` on.
__device__ __forceinline__ uint2 load_halves(const char *src, int valid, bool vectors) {
  if (vectors && valid == 4) return *reinterpret_cast<const uint2 *>(src);
  const auto *bits = reinterpret_cast<const unsigned short *>(src);
  uint2 x{0, 0};
  if (valid > 0) x.x = bits[0];
  if (valid > 1) x.x |= static_cast<uint32_t>(bits[1]) << 16;
  if (valid > 2) x.y = bits[2];
  if (valid > 3) x.y |= static_cast<uint32_t>(bits[3]) << 16;
  return x;
}

template <typename Element>
__device__ __forceinline__ float4 widen(uint2 x) {
  return {to_float<Element>(x.x & 0xFFFFu), to_float<Element>(x.x >> 16), to_float<Element>(x.y & 0xFFFFu),
          to_float<Element>(x.y >> 16)};
}

// Four columns of kLoads rows of fp32. row_at(n) is where they lie, or null for zeros; `columns` of them exist.
template <int kLoads, int kUnroll, int kDstStep, typename RowAt>
__device__ __forceinline__ void copy_floats(float *dst, RowAt row_at, int columns, bool vectors) {
#pragma unroll kUnroll
  for (int n = 0; n < kLoads; ++n) {
    const char *src = row_at(n);
    const uint32_t to = smem_address(dst + n * kDstStep);
    if (src == nullptr || columns == 0) {
      *reinterpret_cast<float4 *>(dst + n * kDstStep) = float4{0, 0, 0, 0};
    } else if (vectors) {
      cp_async_16(to, src, columns * 4);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) cp_async_4(to + 4 * e, e < columns ? src + 4 * e : src, e < columns ? 4 : 0);
    }
  }
}

// The same of 16-bit elements. All loads of a batch are on their way before the first is waited for.
template <int kLoads, int kBatch, int kDstStep, typename RowAt>
__device__ __forceinline__ void copy_halves(float *dst, RowAt row_at, int columns, bool vectors, bool bf16) {
#pragma unroll 1
  for (int n = 0; n < kLoads; n += kBatch) {
    uint2 bits[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const char *src = row_at(n + i);
      bits[i] = load_halves(src, src != nullptr ? columns : 0, vectors);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      *reinterpret_cast<float4 *>(dst + (n + i) * kDstStep) = bf16 ? widen<__nv_bfloat16>(bits[i]) : widen<__half>(bits[i]);
  }
}

// Brings kRows rows from `first_row` on, kWidth columns from `first_column` on, as fp32; zero where there are none. fp32 arrives by
// cp.async (the caller commits and waits), the others before the next barrier.
template <int kRows, int kWidth, int kSlicePitch>
__device__ __forceinline__ void load_slice(float *slice, const Rows &source, int first_row, int first_column) {
  // Every thread brings four columns of every kStep-th row.
  constexpr int kChunks = kWidth / 4, kStep = kThreads / kChunks, kLoads = kRows / kStep, kDstStep = kStep * kSlicePitch;
  constexpr int kUnroll = kWidth > 256 ? 1 : 4;  // as registers allow
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0);
  const int row0 = static_cast<int>(threadIdx.x) / kChunks, column = static_cast<int>(threadIdx.x) % kChunks * 4;
  const int columns = max(min(source.columns - first_column - column, 4), 0);
  const int64_t offset = static_cast<int64_t>(columns > 0 ? first_column + column : 0) * dtype_bytes(source.dtype);
  float *dst = slice + row0 * kSlicePitch + column;
  const bool bf16 = source.dtype == Dtype::bf16;
  if (source.page_table == nullptr && source.heads == 1 && first_row + kRows <= source.rows) {
    const char *first = source.base + (first_row + row0) * source.row_stride + offset;
    const int64_t step = kStep * source.row_stride;
    const auto row_at = [&](int n) { return first + n * step; };
    if (source.dtype == Dtype::f32) {
      copy_floats<kLoads, kUnroll, kDstStep>(dst, row_at, columns, source.vectors);
    } else {
      copy_halves < kLoads, kLoads<4 ? kLoads : 4, kDstStep>(dst, row_at, columns, source.vectors, bf16);
    }
  } else {
    const auto row_at = [&](int n) {
      const int row = first_row + row0 + n * kStep;
      return row < source.rows ? source.row(row) + offset : nullptr;
    };
    if (source.dtype == Dtype::f32) {
      copy_floats<kLoads, 1, kDstStep>(dst, row_at, columns, source.vectors);
    } else {
      copy_halves<kLoads, 2, kDstStep>(dst, row_at, columns, source.vectors, bf16);
    }
  }
}

// What quantised rows of a head are to be multiplied by; without a base 1. Strides in floats.
struct Factors {
  const float *base;                // of row 0; paged: of page 0, row 0
  int64_t row_stride, page_stride;  // both 0: one for all rows. Pages of one row have a row_stride of 0

  __device__ __forceinline__ float of(const Rows &rows, int r) const {
    if (base == nullptr) return 1.f;
    if (rows.page_table == nullptr || (row_stride | page_stride) == 0) return base[r * row_stride];
    const int page = r / rows.page_size;
    return base[rows.page_table[page * rows.page_entry_stride] * page_stride + (r - page * rows.page_size) * row_stride];
  }
};

// Four 8-bit numbers as fp32.
__device__ __forceinline__ float4 widen_bytes(uint32_t x, bool e4m3) {
  float y[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const uint32_t byte = x >> (8 * e) & 0xFF;
    y[e] = e4m3 ? __half2float(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(byte), __NV_E4M3))
                : static_cast<float>(static_cast<int8_t>(byte));
  }
  return {y[0], y[1], y[2], y[3]};
}

// load_slice of fp8 and int8 rows, with their factors.
template <int kRows, int kWidth, int kSlicePitch>
__device__ __forceinline__ void load_quantised(float *slice, const Rows &source, const Factors &factors, int first_row,
                                               int first_column) {
  constexpr int kChunks = kWidth / 4, kStep = kThreads / kChunks, kLoads = kRows / kStep;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0);
  const int row0 = static_cast<int>(threadIdx.x) / kChunks, column = static_cast<int>(threadIdx.x) % kChunks * 4;
  const int columns = max(min(source.columns - first_column - column, 4), 0);
  const bool e4m3 = source.dtype == Dtype::e4m3;
#pragma unroll 2
  for (int n = 0; n < kLoads; ++n) {
    const int row = first_row + row0 + n * kStep;
    float4 x{0, 0, 0, 0};
    if (row < source.rows && columns > 0) {
      const char *src = source.row(row) + first_column + column;
      uint32_t bytes = 0;
      if (source.vectors && columns == 4) {
        bytes = *reinterpret_cast<const uint32_t *>(src);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (e < columns) bytes |= static_cast<uint32_t>(static_cast<uint8_t>(src[e])) << (8 * e);
        }
      }
      const float factor = factors.of(source, row);
      x = widen_bytes(bytes, e4m3);
      x = {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
      // Columns past the last one stay zero whatever the factor is.
      if (columns < 2) x.y = 0.f;
      if (columns < 3) x.z = 0.f;
      if (columns < 4) x.w = 0.f;
    }
    *reinterpret_cast<float4 *>(slice + (row0 + n * kStep) * kSlicePitch + column) = x;
  }
}

// Where a thread stands in the block's tiling.
template <class T>
struct Place {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int own = warp * 2 * T::kOwn + (lane >> 4) * T::kOwn;  // its first own row in the block; the others follow
  const int other = lane & 15;                                 // its first other row in the tile; the others are 16 apart
  const int column = (lane & 15) * 4;                          // its first column; groups of 4, 64 apart
};

// The two stages of shared memory: one being read, one being filled.
template <class T>
class Ring {
 public:
  __device__ __forceinline__ explicit Ring(float *shared) : stages_(shared) {}
  // Waits for the slices on their way; nobody reads the other stage any more.
  __device__ __forceinline__ const float *await() {
    cp_async_wait<0>();
    __syncthreads();
    const float *stage = stages_ + which_ * T::kStageFloats;
    which_ ^= 1;
    return stage;
  }
  __device__ __forceinline__ float *vacant() const { return stages_ + which_ * T::kStageFloats; }

 private:
  float *stages_;
  int which_ = 0;
};

// s += A B^T over one slice: A's rows at `own`, B's at `other` (this thread's first ones).
template <class T>
__device__ __forceinline__ void multiply_slice(float (&s)[T::kOwn][T::kOther], const float *own, const float *other) {
  constexpr int kUnroll = T::kOwn * T::kOther <= 32 && T::kColumns <= 256 ? 2 : 1;  // as registers allow
#pragma unroll kUnroll
  for (int d = 0; d < kDepth; d += 4) {
    float4 b[T::kOther];
#pragma unroll
    for (int j = 0; j < T::kOther; ++j) b[j] = *reinterpret_cast<const float4 *>(other + 16 * j * kPitch + d);
#pragma unroll
    for (int i = 0; i < T::kOwn; ++i) {
      const float4 a = *reinterpret_cast<const float4 *>(own + i * kPitch + d);
#pragma unroll
      for (int j = 0; j < T::kOther; ++j) s[i][j] = fmaf(a.x, b[j].x, s[i][j]);
#pragma unroll
      for (int j = 0; j < T::kOther; ++j) s[i][j] = fmaf(a.y, b[j].y, s[i][j]);
#pragma unroll
      for (int j = 0; j < T::kOther; ++j) s[i][j] = fmaf(a.z, b[j].z, s[i][j]);
#pragma unroll
      for (int j = 0; j < T::kOther; ++j) s[i][j] = fmaf(a.w, b[j].w, s[i][j]);
    }
  }
}

// Puts the weights of slice n of the tile where the warp can read them.
template <class T>
__device__ __forceinline__ void share_weights(float *weights, const float (&w)[T::kOwn][T::kOther], int n, const Place<T> &at) {
  constexpr int kPerSlice = T::kSliceRows / 16;
  __syncwarp();  // the previous slice has been read
#pragma unroll
  for (int j = 0; j < T::kOther; ++j) {
    if (j / kPerSlice != n) continue;
    float *row = weights + (at.other + j % kPerSlice * 16) * T::kWeightPitch + (at.lane >> 4) * T::kOwn;
#pragma unroll
    for (int i = 0; i < T::kOwn; i += 4) {
      *reinterpret_cast<float4 *>(row + i) = float4{w[i][j], w[i + 1][j], w[i + 2][j], w[i + 3][j]};
    }
  }
  __syncwarp();
}

// acc += W T over one slice. kMasked: pairs whose weight is kMaskedWeight are left out, so that NaN and Inf in T that a row does not see
// do not reach it.
template <class T, bool kMasked>
__device__ __forceinline__ void multiply_add_slice(float (&acc)[T::kOwn][T::kAcc], const float *weights, const float *slice,
                                                   const Place<T> &at) {
  constexpr int kUnroll = T::kOwn * T::kAcc == 128 ? 1 : 4;  // as registers allow
  const float *w_row = weights + (at.lane >> 4) * T::kOwn, *t_row = slice + at.column;
#pragma unroll kUnroll
  for (int k = 0; k < T::kSliceRows; ++k) {
    float w[T::kOwn];
#pragma unroll
    for (int i = 0; i < T::kOwn; i += 4) {
      const float4 x = *reinterpret_cast<const float4 *>(w_row + k * T::kWeightPitch + i);
      w[i] = x.x, w[i + 1] = x.y, w[i + 2] = x.z, w[i + 3] = x.w;
    }
#pragma unroll
    for (int c = 0; c < T::kAcc; c += 4) {
      const float4 t = *reinterpret_cast<const float4 *>(t_row + k * T::kColumns + c * 16);
#pragma unroll
      for (int i = 0; i < T::kOwn; ++i) {
        if (kMasked && __float_as_uint(w[i]) == __float_as_uint(kMaskedP)) continue;
        acc[i][c] = fmaf(w[i], t.x, acc[i][c]);
        acc[i][c + 1] = fmaf(w[i], t.y, acc[i][c + 1]);
        acc[i][c + 2] = fmaf(w[i], t.z, acc[i][c + 2]);
        acc[i][c + 3] = fmaf(w[i], t.w, acc[i][c + 3]);
      }
    }
  }
}

template <int kRows, int kColumns>
__device__ __forceinline__ void clear(float (&x)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) x[i][j] = 0.f;
}

// The first element becomes the last, all others move up by one: lets loops that are not unrolled visit every element of a register array.
template <int kCount>
__device__ __forceinline__ void rotate(float (&x)[kCount]) {
  const float first = x[0];
#pragma unroll
  for (int n = 0; n + 1 < kCount; ++n) x[n] = x[n + 1];
  x[kCount - 1] = first;
}
template <int kRows, int kColumns>
__device__ __forceinline__ void rotate(float (&x)[kRows][kColumns]) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const float first = x[0][j];
#pragma unroll
    for (int i = 0; i + 1 < kRows; ++i) x[i][j] = x[i + 1][j];
    x[kRows - 1][j] = first;
  }
}

// Writes four columns of a row, as many of them as exist, rounded to the row's dtype.
__device__ __forceinline__ void store_4(char *row, Dtype dtype, int column, int columns, bool vectors, float4 x) {
  const float e[4] = {x.x, x.y, x.z, x.w};
  if (dtype == Dtype::f32) {
    float *dst = reinterpret_cast<float *>(row) + column;
    if (vectors && column + 4 <= columns) {
      *reinterpret_cast<float4 *>(dst) = x;
      return;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (column + n < columns) dst[n] = e[n];
    }
    return;
  }
  const bool bf16 = dtype == Dtype::bf16;
  const uint2 bits{bf16 ? pack2<__nv_bfloat16>(e[0], e[1]) : pack2<__half>(e[0], e[1]),
                   bf16 ? pack2<__nv_bfloat16>(e[2], e[3]) : pack2<__half>(e[2], e[3])};
  auto *dst = reinterpret_cast<unsigned short *>(row) + column;
  if (vectors && column + 4 <= columns) {
    *reinterpret_cast<uint2 *>(dst) = bits;
    return;
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (column + n < columns) dst[n] = static_cast<unsigned short>((n < 2 ? bits.x : bits.y) >> (16 * (n & 1)));
  }
}

// Zeros the columns of a row, a warp together.
__device__ __forceinline__ void zero_row(char *row, Dtype dtype, int64_t columns) {
  for (int column = threadIdx.x & 31; column < columns; column += 32) {
    if (dtype == Dtype::f32) {
      reinterpret_cast<float *>(row)[column] = 0.f;
    } else {
      reinterpret_cast<unsigned short *>(row)[column] = 0;
    }
  }
}

// Whether the block mask lets any of the rows see any of the keys; asked by the whole block of threads.
__device__ __forceinline__ bool any_visible(const BlockMask &mask, int b, int h, int row0, int row_end, int key0, int key_end) {
  const int64_t first_q = row0 / mask.size_q, first_k = key0 / mask.size_k;
  const int cells_q = static_cast<int>((row_end - 1) / mask.size_q - first_q) + 1,
            cells_k = static_cast<int>((key_end - 1) / mask.size_k - first_k) + 1;
  const uint8_t *cells =
      mask.data + b * mask.batch_stride + h * mask.head_stride + first_q * mask.row_stride + first_k * mask.col_stride;
  bool visible = false;
  for (int n = threadIdx.x; n < cells_q * cells_k; n += kThreads) {
    visible |= cells[n / cells_k * mask.row_stride + n % cells_k * mask.col_stride] != 0;
  }
  return __syncthreads_or(visible);
}

}  // namespace fa::cuda::simt
