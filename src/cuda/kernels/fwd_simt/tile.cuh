// SPDX-License-Identifier: Apache-2.0
// Tiles of the CUDA-core kernels: how a CTA divides a matrix product, how operands get into shared memory as fp32, and the two products.
//
// Every kernel of the family is one loop. A CTA owns kOwnRows rows of one side (queries or keys); the loop goes over tiles of kOtherRows rows of
// the other side. A tile takes several slices. Each slice is one stage of a two-stage pipeline, loaded while the one before is used:
//
//   S = A B^T       slices of kDepth columns of A (own rows) and B (other rows): head_dim is a loop, not a limit
//   acc += P T      slices of kSliceRows rows of T (other rows), kColumns wide; P goes from registers through shared memory
//
// A warp owns 2 kOwn rows. lane / 16 selects kOwn of them; lane % 16 selects other rows (n % 16 of them) and columns.
#pragma once

#include <cuda_fp8.h>

#include "core/problem.h"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/rows.cuh"

namespace fa::cuda::simt {

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kDepth = 32;          // columns of a slice of A and B
constexpr int kPitch = kDepth + 4;  // floats; 16 rows of one 16-byte column lie in different banks by eights

template <int kOwn_, int kOther_, int kColumns_>
struct Tiling {
  static constexpr int kOwn = kOwn_, kOther = kOther_;  // rows of either side per thread
  static constexpr int kColumns = kColumns_;            // of T and acc
  static constexpr int kOwnRows = kWarps * 2 * kOwn, kOtherRows = 16 * kOther;
  static constexpr int kSliceRows = kColumns <= 256 ? 32 : 16, kSlices = kOtherRows / kSliceRows;
  static constexpr int kAcc = kColumns / 16;    // columns of acc per thread: groups of 4, 64 apart
  static constexpr int kPPitch = 2 * kOwn + 4;  // P is transposed: kSliceRows x 2 kOwn per warp
  static constexpr int kProductFloats = (kOwnRows + kOtherRows) * kPitch, kSliceFloats = kSliceRows * kColumns;
  static constexpr int kStageFloats = kProductFloats > kSliceFloats ? kProductFloats : kSliceFloats;
  static_assert(kOwn % 4 == 0 && kColumns % 64 == 0);

  // Shared memory.
  struct Storage {
    alignas(16) float stage[2][kStageFloats];
    alignas(16) float p[kWarps][kSliceRows * kPPitch];  // of one slice
  };
  static_assert(sizeof(Storage) <= 98 * 1024, "must fit every device since sm_80");
};

// Where the rows of one operand of one sequence are in global memory. Strides in bytes.
struct Rows {
  const char *base;  // row 0, element 0; paged: page 0, row 0 of the head
  int64_t row_stride;
  int32_t rows;     // rows from here on are read as zero
  int32_t columns;  // columns from here on are read as zero
  Dtype dtype;
  bool vectors;       // 16-byte loads are legal where four columns exist
  int32_t heads = 1;  // rows per token, head_stride apart (packed GQA)
  int64_t head_stride = 0;
  const int32_t *page_table = nullptr;  // null: not paged
  int64_t page_entry_stride = 0;
  int64_t page_stride = 0;
  int32_t page_size = 1;
  int32_t rows_per_page = 0;  // ForwardProblem::rows_per_page

  // How many strides of a page and of a row the r-th row of a paged operand is from the first row of the first page.
  struct Place {
    int page, row;
  };
  __device__ __forceinline__ Place place(int r) const {
    const int n = r / page_size, entry = page_table[n * page_entry_stride];
    if (rows_per_page > 0) return {entry / rows_per_page, entry % rows_per_page};
    return {entry, r - n * page_size};
  }
  __device__ __forceinline__ const char *row(int r) const {
    if (heads > 1) return base + r / heads * row_stride + r % heads * head_stride;
    if (page_table == nullptr) return base + r * row_stride;
    const Place at = place(r);
    return base + at.page * page_stride + at.row * row_stride;
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

// Copies four columns of kLoads fp32 rows. row_at(n) is the address of row n, or null for zeros; `columns` of the four exist.
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

// The same for 16-bit elements. All loads of a batch are issued before the first is used.
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

// Loads kRows rows from `first_row` on, kWidth columns from `first_column` on, as fp32; zero where there are none. fp32 arrives by cp.async (the
// caller commits and waits), other types before the next barrier.
template <int kRows, int kWidth, int kSlicePitch>
__device__ __forceinline__ void load_slice(float *slice, const Rows &source, int first_row, int first_column) {
  // Every thread loads four columns of every kStep-th row.
  constexpr int kVectors = kWidth / 4, kStep = kThreads / kVectors, kLoads = kRows / kStep, kDstStep = kStep * kSlicePitch;
  constexpr int kUnroll = kWidth > 256 ? 1 : 4;  // as registers allow
  static_assert(kThreads % kVectors == 0 && kRows % kStep == 0);
  const int row0 = static_cast<int>(threadIdx.x) / kVectors, column = static_cast<int>(threadIdx.x) % kVectors * 4;
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

// Descales of the quantised rows of a head; without a base, 1. Strides in floats.
struct HeadDescale {
  const float *base;                // of row 0; paged: of page 0, row 0
  int64_t row_stride, page_stride;  // both 0: one descale for all rows. Pages of one row have a row_stride of 0

  __device__ __forceinline__ float of(const Rows &rows, int r) const {
    if (base == nullptr) return 1.f;
    if (rows.page_table == nullptr || (row_stride | page_stride) == 0) return base[r * row_stride];
    const Rows::Place at = rows.place(r);
    return base[at.page * page_stride + at.row * row_stride];
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

// load_slice for fp8 and int8 rows, multiplied by their descale.
template <int kRows, int kWidth, int kSlicePitch>
__device__ __forceinline__ void load_quantised(float *slice, const Rows &source, const HeadDescale &descale, int first_row,
                                               int first_column) {
  constexpr int kVectors = kWidth / 4, kStep = kThreads / kVectors, kLoads = kRows / kStep;
  static_assert(kThreads % kVectors == 0 && kRows % kStep == 0);
  const int row0 = static_cast<int>(threadIdx.x) / kVectors, column = static_cast<int>(threadIdx.x) % kVectors * 4;
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
      const float scale = descale.of(source, row);
      x = widen_bytes(bytes, e4m3);
      x = {x.x * scale, x.y * scale, x.z * scale, x.w * scale};
      // Columns past the last one stay zero whatever the descale is.
      if (columns < 2) x.y = 0.f;
      if (columns < 3) x.z = 0.f;
      if (columns < 4) x.w = 0.f;
    }
    *reinterpret_cast<float4 *>(slice + (row0 + n * kStep) * kSlicePitch + column) = x;
  }
}

// The rows and columns of a thread.
template <class T>
struct ThreadTile {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int own = warp * 2 * T::kOwn + (lane >> 4) * T::kOwn;  // its first own row in the CTA; the others follow
  const int other = lane & 15;                                 // its first other row in the tile; the others are 16 apart
  const int column = (lane & 15) * 4;                          // its first column; groups of 4, 64 apart
};

// A pipeline of two stages: one is read while the other is filled.
template <class T>
class Pipeline {
 public:
  __device__ __forceinline__ explicit Pipeline(typename T::Storage &shared) : stages_(shared.stage[0]) {}
  // Waits until the slice under way has arrived and all threads have read the other stage.
  __device__ __forceinline__ const float *wait() {
    cp_async_wait<0>();
    __syncthreads();
    const float *stage = stages_ + index_ * T::kStageFloats;
    index_ ^= 1;
    return stage;
  }
  __device__ __forceinline__ float *empty_stage() const { return stages_ + index_ * T::kStageFloats; }

 private:
  float *stages_;
  int index_ = 0;
};

// s += A B^T over one slice. `own` and `other` are this thread's first rows of A and B.
template <class T>
__device__ __forceinline__ void fma_nt(float (&s)[T::kOwn][T::kOther], const float *own, const float *other) {
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

// Stores P of slice n of the tile to shared memory, for the warp.
template <class T>
__device__ __forceinline__ void store_p(float *shared_p, const float (&p)[T::kOwn][T::kOther], int n, const ThreadTile<T> &at) {
  constexpr int kPerSlice = T::kSliceRows / 16;
  __syncwarp();  // the previous slice has been read
#pragma unroll
  for (int j = 0; j < T::kOther; ++j) {
    if (j / kPerSlice != n) continue;
    float *row = shared_p + (at.other + j % kPerSlice * 16) * T::kPPitch + (at.lane >> 4) * T::kOwn;
#pragma unroll
    for (int i = 0; i < T::kOwn; i += 4) {
      *reinterpret_cast<float4 *>(row + i) = float4{p[i][j], p[i + 1][j], p[i + 2][j], p[i + 3][j]};
    }
  }
  __syncwarp();
}

// acc += P T over one slice. kMasked: pairs whose P is kMaskedP are skipped, so that NaN and Inf in rows of T that a row does not see do not
// reach it.
template <class T, bool kMasked>
__device__ __forceinline__ void fma_rs(float (&acc)[T::kOwn][T::kAcc], const float *shared_p, const float *slice,
                                       const ThreadTile<T> &at) {
  constexpr int kUnroll = T::kOwn * T::kAcc == 128 ? 1 : 4;  // as registers allow
  const float *p_row = shared_p + (at.lane >> 4) * T::kOwn, *t_row = slice + at.column;
#pragma unroll kUnroll
  for (int k = 0; k < T::kSliceRows; ++k) {
    float p[T::kOwn];
#pragma unroll
    for (int i = 0; i < T::kOwn; i += 4) {
      const float4 x = *reinterpret_cast<const float4 *>(p_row + k * T::kPPitch + i);
      p[i] = x.x, p[i + 1] = x.y, p[i + 2] = x.z, p[i + 3] = x.w;
    }
#pragma unroll
    for (int c = 0; c < T::kAcc; c += 4) {
      const float4 t = *reinterpret_cast<const float4 *>(t_row + k * T::kColumns + c * 16);
#pragma unroll
      for (int i = 0; i < T::kOwn; ++i) {
        if (kMasked && is_masked_p(p[i])) continue;
        acc[i][c] = fmaf(p[i], t.x, acc[i][c]);
        acc[i][c + 1] = fmaf(p[i], t.y, acc[i][c + 1]);
        acc[i][c + 2] = fmaf(p[i], t.z, acc[i][c + 2]);
        acc[i][c + 3] = fmaf(p[i], t.w, acc[i][c + 3]);
      }
    }
  }
}

// Stores this thread's columns of a row of accumulators times `scale`.
template <class T>
__device__ __forceinline__ void store_row(char *row, Dtype dtype, int columns, bool vectors, const float (&acc)[T::kAcc],
                                          float scale, const ThreadTile<T> &at) {
#pragma unroll
  for (int c = 0; c < T::kAcc; c += 4)
    store_4(row, dtype, at.column + c * 16, columns, vectors,
            {acc[c] * scale, acc[c + 1] * scale, acc[c + 2] * scale, acc[c + 3] * scale});
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

}  // namespace fa::cuda::simt
