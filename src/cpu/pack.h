// SPDX-License-Identifier: Apache-2.0
// Packing: tensor rows of any dtype, stride and page layout become the float panels that the micro-kernels read. What lies past the
// end of a sequence is never read; panels hold zeros there.
#pragma once

#include "core/forward_problem.h"
#include "cpu/gemm.h"
#include "cpu/simd.h"

namespace fa::cpu::FA_ISA {

// Calls body.operator()<Element>() for a dtype of queries, results and biases.
template <class Body>
FA_INLINE void for_dtype(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::f32:
      return body.template operator()<ElementF32>();
    case Dtype::f16:
      return body.template operator()<ElementF16>();
    case Dtype::bf16:
      return body.template operator()<ElementBf16>();
    case Dtype::e4m3:
    case Dtype::i8:
      return;
  }
}
// ... for a dtype of keys and values of forward.
template <class Body>
FA_INLINE void for_key_dtype(Dtype dtype, Body body) {
#if defined(FA_TARGET_AMX)
  if (dtype == Dtype::e4m3) return body.template operator()<ElementE4m3>();
  if (dtype == Dtype::i8) return body.template operator()<ElementI8>();
  dtype == Dtype::f16 ? body.template operator()<ElementF16>()
                      : body.template operator()<ElementBf16>();  // nothing else gets here
#elif defined(FA_TARGET_NEON_BF16) || defined(FA_TARGET_AVX512_BF16)
  if (dtype == Dtype::e4m3) return body.template operator()<ElementE4m3>();
  dtype == Dtype::i8 ? body.template operator()<ElementI8>()
                     : body.template operator()<ElementBf16>();  // nothing else gets here
#elif defined(FA_TARGET_NEON_FHM)
  (void)dtype;
  body.template operator()<ElementF16>();  // this instruction set computes nothing else
#else
  if (dtype == Dtype::e4m3) return body.template operator()<ElementE4m3>();
  if (dtype == Dtype::i8) return body.template operator()<ElementI8>();
  for_dtype(dtype, body);
#endif
}

// ... for a dtype of queries of forward.
template <class Body>
FA_INLINE void for_query_dtype(Dtype dtype, Body body) {
#if defined(FA_TARGET_AMX)
  if (dtype == Dtype::e4m3) return body.template operator()<ElementE4m3>();
  for_dtype(dtype, body);  // over keys of bytes
#elif defined(FA_TARGET_AVX512_BF16)
  (void)dtype;
  body.template operator()<ElementBf16>();  // this instruction set computes nothing else
#else
  for_key_dtype(dtype, body);
#endif
}

FA_INLINE void prefetch_row(const char *row, int64_t bytes) {
  for (int64_t c = 0; c < bytes; c += 64) Simd::prefetch(row + c);
}

// Where the rows of one head of one sequence lie; rows are counted within the sequence.
struct Rows {
  const char *data = nullptr;
  int64_t stride = 0;              // bytes from row to row (of a page)
  const int32_t *pages = nullptr;  // page of rows n * page_size .., or null: not paged
  int64_t pages_stride = 0;
  int64_t page_size = 0;
  int64_t page_bytes = 0;     // bytes from page to page
  int64_t rows_per_page = 0;  // ForwardProblem::rows_per_page

  FA_INLINE const char *row(int64_t j) const {
    if (pages == nullptr) return data + j * stride;
    if (rows_per_page > 0) {
      const int64_t n = pages[j * pages_stride];
      return data + n / rows_per_page * page_bytes + n % rows_per_page * stride;
    }
    return data + pages[(j / page_size) * pages_stride] * page_bytes + (j % page_size) * stride;
  }
  // Rows j .. j + n - 1 are `stride` bytes apart; n >= 1.
  FA_INLINE int64_t run(int64_t j, int64_t end) const {
    return pages == nullptr ? end - j : min64(end - j, page_size - j % page_size);
  }
};

// Rows of head h of sequence b, which starts at row `start` of the tensor.
inline Rows rows_of(const Operand &x, int64_t b, int64_t h, int64_t start) {
  const int64_t bytes = dtype_bytes(x.dtype);
  Rows r;
  r.data = static_cast<const char *>(x.data) + (b * x.batch_stride + h * x.head_stride + start * x.seq_stride) * bytes;
  r.stride = x.seq_stride * bytes;
  return r;
}

// Rows of key or value head h of sequence b, through the page table if there is one.
inline Rows key_rows_of(const ForwardProblem &p, const Operand &x, int64_t b, int64_t h, int64_t start) {
  if (p.page_table == nullptr) return rows_of(x, b, h, start);
  Rows r = rows_of(x, 0, h, 0);
  r.pages = p.page_table + b * p.page_table_batch_stride;
  r.pages_stride = p.page_table_page_stride;
  r.page_size = p.page_size;
  r.rows_per_page = p.rows_per_page;
  r.page_bytes = x.batch_stride * dtype_bytes(x.dtype);
  return r;
}

// What quantised rows of a head are to be multiplied by.
struct Factors {
  Rows rows;
  bool given = false;

  // Of row j, of the head that begins `offset` bytes further.
  FA_INLINE float at(int64_t j, int64_t offset = 0) const {
    if (!given) return 1.0f;
    float factor;
    __builtin_memcpy(&factor, rows.row(j) + offset, sizeof factor);
    return factor;
  }
};
// `h` is a key head.
inline Factors factors_of(const ForwardProblem &p, const Descale &descale, int64_t b, int64_t h, int64_t start) {
  Factors f;
  f.given = descale.factors.data != nullptr;
  if (f.given) f.rows = descale.per_row ? key_rows_of(p, descale.factors, b, h, start) : rows_of(descale.factors, b, h, 0);
  return f;
}

// Transposes n <= kWidth rows of `dim` elements: to[i * ld + r] = element i of row r for r < n, 0 for n <= r < store_lanes. Rows of a
// quantised dtype have a factor each.
template <class Element>
inline void transpose_rows(const char *const *rows, int n, int64_t dim, float *to, int64_t ld, int store_lanes,
                           const float *factors = nullptr) {
  for (int64_t i = 0; i < dim; i += kWidth) {
    const int cols = static_cast<int>(min64(dim - i, kWidth));
    F tile[kWidth];
#pragma GCC unroll 16
    for (int r = 0; r < kWidth; ++r) {
      tile[r] = Simd::zero();
      if (r < n) {
        const auto *row = reinterpret_cast<const typename Element::Type *>(rows[r]) + i;
        tile[r] = cols == kWidth ? Element::load(row) : Element::load(row, cols);
        if constexpr (Element::kQuantised) tile[r] = Simd::mul(tile[r], Simd::set(factors[r]));
      }
    }
    Simd::transpose(tile);
    if (cols == kWidth && store_lanes == kWidth) {
#pragma GCC unroll 16
      for (int c = 0; c < kWidth; ++c) Simd::store(to + (i + c) * ld, tile[c]);
    } else {
      for (int c = 0; c < cols; ++c) Simd::store(to + (i + c) * ld, tile[c], store_lanes);
    }
  }
}

// Keys [begin, end) as K^T panels: panel n, `dim` x kNr floats at to + n * kNr * dim, holds keys begin + n * kNr ..; its columns
// past `end` are zero.
template <class Element>
__attribute__((noinline)) void pack_transposed(const Rows &keys, int64_t begin, int64_t end, int64_t dim, float *to,
                                               const Factors &factors = {}) {
  for (int64_t j = begin; j < end; j += kNr, to += kNr * dim) {
    for (int v = 0; v < 2; ++v) {
      const int64_t first = j + v * kWidth;
      const int n = static_cast<int>(max64(min64(end - first, kWidth), 0));
      const char *rows[kWidth];
      float of_rows[kWidth];
      for (int r = 0; r < n; ++r) {
        rows[r] = keys.row(first + r);
        if constexpr (Element::kQuantised) of_rows[r] = factors.at(first + r);
      }
      transpose_rows<Element>(rows, n, dim, to + v * kWidth, kNr, kWidth, of_rows);
    }
  }
}

// Rows [begin, end) as row panels for `gemm`: columns n * kNr .. of row j are at to + n * panel_stride + (j - begin) * kNr; the last
// panel is kWidth wide if `dim` needs an odd number of vectors. Columns past `dim` are zero. Returns whether every value is finite.
template <class Element>
inline bool pack_rows(const Rows &source, int64_t begin, int64_t end, int64_t dim, float *to, int64_t panel_stride,
                      const Factors &factors = {}) {
  F probe = Simd::zero();  // x * 0 summed: NaN as soon as one x is not finite
  for (int64_t j = begin; j < end; ++j) {
    const auto *row = reinterpret_cast<const typename Element::Type *>(source.row(j));
    for (int64_t i = 0; i < dim; i += kWidth) {
      const int cols = static_cast<int>(min64(dim - i, kWidth));
      F x = cols == kWidth ? Element::load(row + i) : Element::load(row + i, cols);
      if constexpr (Element::kQuantised) x = Simd::mul(x, Simd::set(factors.at(j)));
      probe = Simd::fma(x, Simd::zero(), probe);
      const int64_t panel = i / kNr;
      const int64_t width = dim - panel * kNr > kWidth ? kNr : kWidth;
      Simd::store(to + panel * panel_stride + (j - begin) * width + i % kNr, x);
    }
  }
  return Simd::reduce_add(probe) == 0;
}

}  // namespace fa::cpu::FA_ISA
