// SPDX-License-Identifier: Apache-2.0
// New rows into a cache, rotated on the way, for one instruction set. Included by append_<isa>.cpp.
#pragma once

#include "cpu/append_job.h"
#include "cpu/pack.h"

namespace fa::cpu::FA_ISA {

// One row of the tables.
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

// `to` may be `from`.
template <class Element, class Table>
inline void rotate_row(const AppendProblem &p, const char *from, char *to, const RotaryRow &table) {
  const auto *source = reinterpret_cast<const typename Element::Type *>(from);
  auto *target = reinterpret_cast<typename Element::Type *>(to);
  const auto *cos = reinterpret_cast<const typename Table::Type *>(table.cos);
  const auto *sin = reinterpret_cast<const typename Table::Type *>(table.sin);
  const int64_t half = p.rotary_dim / 2;
  for (int64_t c = 0; c < half; c += kWidth) {
    const int n = static_cast<int>(min64(half - c, kWidth));
    const F co = Table::load(cos + c, n), si = Table::load(sin + c, n);
    const Pairs in = load_pairs<Element>(source, c, n, half, p.interleaved);
    const Pairs out = {Simd::fms(in.x, co, Simd::mul(in.y, si)), Simd::fma(in.x, si, Simd::mul(in.y, co))};
    store_pairs<Element>(target, c, n, half, p.interleaved, out);
  }
  if (to == from) return;
  __builtin_memcpy(target + p.rotary_dim, source + p.rotary_dim,
                   static_cast<size_t>(p.head_dim - p.rotary_dim) * sizeof(typename Element::Type));
}

// Row (outer, row) of every head of `from` to row (to_outer, to_row) of `to`, rotated where there is a table.
struct RowAt {
  int64_t outer, row;
};
inline void append_heads(const AppendProblem &p, const Operand &from, RowAt source, const Operand &to, RowAt target,
                         int64_t heads, int64_t columns, const RotaryRow *table) {
  const int64_t bytes = from.dtype == Dtype::f32 ? 4 : 2;
  for (int64_t h = 0; h < heads; ++h) {
    const char *read = rows_of(from, source.outer, h, source.row).data;
    char *write = const_cast<char *>(rows_of(to, target.outer, h, target.row).data);
    if (table == nullptr) {
      __builtin_memcpy(write, read, static_cast<size_t>(columns * bytes));
      continue;
    }
    for_dtype(from.dtype, [&]<class Element>() {
      // Tables are fp32 or have the dtype of the rows.
      if (p.table_dtype == Dtype::f32) {
        rotate_row<Element, ElementF32>(p, read, write, *table);
      } else {
        rotate_row<Element, Element>(p, read, write, *table);
      }
    });
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
  CachePlace place;
  if (!find_place(p, b, s.offset + i, place)) return;
  append_heads(p, p.k, source, p.k_cache, {place.outer, place.row}, p.heads_k, p.head_dim, rotation);
  if (p.head_dim_v > 0) {
    append_heads(p, p.v, source, p.v_cache, {place.outer, place.row}, p.heads_k, p.head_dim_v, nullptr);
  }
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
