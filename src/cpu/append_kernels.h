// SPDX-License-Identifier: Apache-2.0
// Rotates new rows and writes them to a cache, for one instruction set. Included by append_<isa>.cpp.
#pragma once

#include "cpu/append_job.h"
#include "cpu/pack.h"

namespace fa::cpu::FA_ISA {

// One row of the cosine and sine tables.
struct RotaryRow {
  const char *cos = nullptr;
  const char *sin = nullptr;
};

// The n pairs from column c on, n <= kWidth, as two vectors: first and second of each pair.
struct Pairs {
  F x, y;
};
template <class Element>
FA_INLINE Pairs load_pairs(const typename Element::Type *row, int64_t c, int n, int64_t half, bool interleaved) {
  if (!interleaved) return {Element::load(row + c, n), Element::load(row + half + c, n)};
  float pairs[2 * kWidth], x[kWidth], y[kWidth];
  const int first = 2 * n < kWidth ? 2 * n : kWidth;
  Simd::store(pairs, Element::load(row + 2 * c, first));
  Simd::store(pairs + kWidth, Element::load(row + 2 * c + first, 2 * n - first));
  for (int i = 0; i < kWidth; ++i) {
    x[i] = pairs[2 * i];
    y[i] = pairs[2 * i + 1];
  }
  return {Simd::load(x), Simd::load(y)};
}
template <class Element>
FA_INLINE void store_pairs(typename Element::Type *row, int64_t c, int n, int64_t half, bool interleaved, Pairs p) {
  if (!interleaved) {
    Element::store(row + c, p.x, n);
    Element::store(row + half + c, p.y, n);
    return;
  }
  float pairs[2 * kWidth], x[kWidth], y[kWidth];
  const int first = 2 * n < kWidth ? 2 * n : kWidth;
  Simd::store(x, p.x);
  Simd::store(y, p.y);
  for (int i = 0; i < kWidth; ++i) {
    pairs[2 * i] = x[i];
    pairs[2 * i + 1] = y[i];
  }
  Element::store(row + 2 * c, Simd::load(pairs), first);
  Element::store(row + 2 * c + first, Simd::load(pairs + kWidth), 2 * n - first);
}

// Rotates the rotary columns of a row. `target` may be `source`.
template <class Element, class Table, class Target>
inline void rotate_columns(const AppendProblem &p, const typename Element::Type *source, typename Target::Type *target,
                           const RotaryRow &table) {
  const auto *cos = reinterpret_cast<const typename Table::Type *>(table.cos);
  const auto *sin = reinterpret_cast<const typename Table::Type *>(table.sin);
  const int64_t half = p.rotary_dim / 2;
  for (int64_t c = 0; c < half; c += kWidth) {
    const int n = static_cast<int>(min64(half - c, kWidth));
    const F co = Table::load(cos + c, n), si = Table::load(sin + c, n);
    const Pairs in = load_pairs<Element>(source, c, n, half, p.interleaved);
    const Pairs out = {Simd::fms(in.x, co, Simd::mul(in.y, si)), Simd::fma(in.x, si, Simd::mul(in.y, co))};
    store_pairs<Target>(target, c, n, half, p.interleaved, out);
  }
}
// Tables are fp32 or have the dtype of the rows.
template <class Element, class Target>
FA_INLINE void rotate(const AppendProblem &p, const typename Element::Type *source, typename Target::Type *target,
                      const RotaryRow &table) {
  if (p.table_dtype == Dtype::f32) {
    rotate_columns<Element, ElementF32, Target>(p, source, target, table);
  } else {
    rotate_columns<Element, Element, Target>(p, source, target, table);
  }
}

// Converts a row of `columns` columns to fp32. With a table, its rotary columns are rotated.
template <class Element>
inline void widen_row(const AppendProblem &p, const typename Element::Type *source, int64_t columns, const RotaryRow *table,
                      float *row) {
  for (int64_t c = table != nullptr ? p.rotary_dim : 0; c < columns; c += kWidth) {
    const int n = static_cast<int>(min64(columns - c, kWidth));
    Simd::store(row + c, Element::load(source + c, n), n);
  }
  if (table != nullptr) rotate<Element, ElementF32>(p, source, row, *table);
}

// Writes row / *scale to an 8-bit target. With `own`, *scale is first computed from the row; it is NaN if the row is not finite.
template <class Target>
inline void quantise_row(const float *row, int64_t columns, typename Target::Type *target, float *scale, bool own) {
  if (own) {
    F largest = Simd::zero(), probe = Simd::zero();
    for (int64_t c = 0; c < columns; c += kWidth) {
      const F x = Simd::load(row + c, static_cast<int>(min64(columns - c, kWidth)));
      largest = Simd::max(Simd::abs(x), largest);
      probe = Simd::fma(x, Simd::zero(), probe);
    }
    *scale = Simd::reduce_max(largest) / Target::kLargest + Simd::reduce_add(probe);
  }
  const float by = scale != nullptr ? *scale : 1.0f;
  const F divisor = Simd::set(own && by == 0 ? 1.0f : by);  // a row of zeros
  for (int64_t c = 0; c < columns; c += kWidth) {
    const int n = static_cast<int>(min64(columns - c, kWidth));
    Target::store(target + c, Simd::div(Simd::load(row + c, n), divisor), n);
  }
}

// Copies row `source` of every head of `from` to row `target` of `to`, and rotates it if there is a table.
struct RowAt {
  int64_t outer, row;
};
inline void append_heads(const AppendProblem &p, const Operand &from, RowAt source, const Operand &to, RowAt target,
                         int64_t heads, int64_t columns, const RotaryRow *table) {
  const int64_t bytes = dtype_bytes(from.dtype), rotated = table != nullptr ? p.rotary_dim : 0;
  for (int64_t h = 0; h < heads; ++h) {
    const char *read = rows_of(from, source.outer, h, source.row).data;
    char *write = const_cast<char *>(rows_of(to, target.outer, h, target.row).data);
    if (table != nullptr) {
      for_dtype(from.dtype, [&]<class Element>() {
        using Type = typename Element::Type;
        rotate<Element, Element>(p, reinterpret_cast<const Type *>(read), reinterpret_cast<Type *>(write), *table);
      });
    }
    if (write == read) continue;
    __builtin_memcpy(write + rotated * bytes, read + rotated * bytes, static_cast<size_t>((columns - rotated) * bytes));
  }
}

// The same for an 8-bit cache; b is the sequence.
inline void quantise_heads(const AppendProblem &p, int64_t b, const Operand &from, RowAt source, const Operand &to,
                           RowAt target, const Descale &descale, int64_t columns, const RotaryRow *table) {
  float row[kMaxHeadDim + kWidth];
  for (int64_t h = 0; h < p.heads_k; ++h) {
    const char *read = rows_of(from, source.outer, h, source.row).data;
    char *write = const_cast<char *>(rows_of(to, target.outer, h, target.row).data);
    float *value = nullptr;
    if (descale.factors.data != nullptr) {
      const Rows at =
          descale.per_row ? rows_of(descale.factors, target.outer, h, target.row) : rows_of(descale.factors, b, h, 0);
      value = reinterpret_cast<float *>(const_cast<char *>(at.data));
    }
    for_dtype(from.dtype, [&]<class Element>() {
      widen_row<Element>(p, reinterpret_cast<const typename Element::Type *>(read), columns, table, row);
    });
    if (to.dtype == Dtype::i8) {
      quantise_row<ElementI8>(row, columns, reinterpret_cast<int8_t *>(write), value, descale.per_row);
    } else {
      quantise_row<ElementE4m3>(row, columns, reinterpret_cast<uint8_t *>(write), value, descale.per_row);
    }
  }
}

// The same for a 16-bit cache of fp32 rows.
inline void narrow_heads(const AppendProblem &p, const Operand &from, RowAt source, const Operand &to, RowAt target,
                         int64_t columns, const RotaryRow *table) {
  float row[kMaxHeadDim + kWidth];
  for (int64_t h = 0; h < p.heads_k; ++h) {
    const char *read = rows_of(from, source.outer, h, source.row).data;
    char *write = const_cast<char *>(rows_of(to, target.outer, h, target.row).data);
    widen_row<ElementF32>(p, reinterpret_cast<const float *>(read), columns, table, row);
    for_dtype(to.dtype, [&]<class Element>() {
      for (int64_t c = 0; c < columns; c += kWidth) {
        const int n = static_cast<int>(min64(columns - c, kWidth));
        Element::store(reinterpret_cast<typename Element::Type *>(write) + c, Simd::load(row + c, n), n);
      }
    });
  }
}

// Writes one new row of k or v to its cache.
inline void append_cache(const AppendProblem &p, int64_t b, const Operand &from, RowAt source, const Operand &to,
                         const CacheRow &found, const Descale &descale, int64_t columns, const RotaryRow *table) {
  const RowAt target{found.outer, found.row};
  if (is_quantised(to.dtype)) {
    quantise_heads(p, b, from, source, to, target, descale, columns, table);
  } else if (to.dtype != from.dtype) {
    narrow_heads(p, from, source, to, target, columns, table);
  } else {
    append_heads(p, from, source, to, target, p.heads_k, columns, table);
  }
}

inline void append_row(const AppendProblem &p, int64_t b, const AppendSequence &s, int64_t i) {
  const RowAt source{b, s.start + i};
  RotaryRow table;
  if (p.rotary_dim > 0) {
    const int64_t position = append_position(p, b, s, i), bytes = p.table_dtype == Dtype::f32 ? 4 : 2;
    table.cos = static_cast<const char *>(p.cos) + position * p.cos_stride * bytes;
    table.sin = static_cast<const char *>(p.sin) + position * p.sin_stride * bytes;
  }
  const RotaryRow *rotation = p.rotary_dim > 0 ? &table : nullptr;
  append_heads(p, p.q, source, p.q_out, source, p.heads_q, p.head_dim, rotation);
  CacheRow target;
  if (!find_cache_row(p, b, s.offset + i, target)) return;
  append_cache(p, b, p.k, source, p.k_cache, target, p.k_descale, p.head_dim, rotation);
  if (p.head_dim_v > 0) append_cache(p, b, p.v, source, p.v_cache, target, p.v_descale, p.head_dim_v, nullptr);
}

void append_rows(const AppendJob &job) {
  const AppendProblem &p = *job.problem;
  const bool packed = p.lengths.cu != nullptr;
  // The sequence that row_begin is in, or the first one after it.
  int64_t b = 0;
  if (packed) {
    for (int64_t after = p.batch; b < after;) {
      const int64_t middle = b + (after - b) / 2;
      offset_of(p.lengths, middle + 1) > job.row_begin ? after = middle : b = middle + 1;
    }
  } else if (p.lengths.max_len > 0) {
    b = job.row_begin / p.lengths.max_len;
  }
  for (; b < p.batch; ++b) {
    const AppendSequence s = append_sequence(p, b);
    const int64_t first = packed ? s.start : b * p.lengths.max_len;  // number of its row 0
    if (first >= job.row_end) return;
    if (s.offset < 0) continue;
    for (int64_t i = max64(job.row_begin - first, 0); i < min64(job.row_end - first, s.len); ++i) append_row(p, b, s, i);
  }
}

}  // namespace fa::cpu::FA_ISA
