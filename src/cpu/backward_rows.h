// SPDX-License-Identifier: Apache-2.0
// What backward does with whole rows: widening inputs to floats, the scalars of query rows, writing gradients.
#pragma once

#include <cmath>

#include "cpu/pack.h"

namespace fa::cpu::FA_ISA {

// Keeps all rows.
struct EveryRow {
  FA_INLINE bool operator()(int64_t) const { return true; }
};

// Rows [begin, end) of `dim` elements as floats, `ld` apart, zeros up to whole vectors; rows for which keep(row) is false are zero.
// Returns whether every value kept is finite.
template <class Element, class Keep>
__attribute__((noinline)) bool widen_rows(const Rows &source, int64_t begin, int64_t end, int64_t dim, Keep keep, float *to,
                                          int64_t ld) {
  F probe = Simd::zero();  // sum of x * 0: NaN as soon as one x is not finite
  for (int64_t j = begin; j < end; ++j, to += ld) {
    const bool kept = keep(j);
    const auto *row = reinterpret_cast<const typename Element::Type *>(source.row(j));
    for (int64_t i = 0; i < dim; i += kWidth) {
      F x = Simd::zero();
      if (kept) x = dim - i >= kWidth ? Element::load(row + i) : Element::load(row + i, static_cast<int>(dim - i));
      probe = Simd::fma(x, Simd::zero(), probe);
      Simd::store(to + i, x);
    }
  }
  return Simd::reduce_add(probe) == 0;
}

// Rows [begin, end) of the tensor <- factor * from, rounded once.
template <class Element>
inline void narrow_rows(const float *from, int64_t ld, float factor, const Rows &to, int64_t begin, int64_t end, int64_t dim) {
  const F scale = Simd::set(factor);
  for (int64_t j = begin; j < end; ++j, from += ld) {
    auto *row = reinterpret_cast<typename Element::Type *>(const_cast<char *>(to.row(j)));
    for (int64_t i = 0; i < dim; i += kWidth) {
      const F x = Simd::mul(Simd::load(from + i), scale);
      if (dim - i >= kWidth) {
        Element::store(row + i, x);
      } else {
        Element::store(row + i, x, static_cast<int>(dim - i));
      }
    }
  }
}

inline void zero_rows(Dtype dtype, const Rows &to, int64_t begin, int64_t end, int64_t dim) {
  const size_t bytes = static_cast<size_t>(dim * (dtype == Dtype::f32 ? 4 : 2));
  for (int64_t j = begin; j < end; ++j) __builtin_memset(const_cast<char *>(to.row(j)), 0, bytes);
}

template <class Element>
inline float dot_rows(const char *a, const char *b, int64_t dim) {
  const auto *x = reinterpret_cast<const typename Element::Type *>(a), *y = reinterpret_cast<const typename Element::Type *>(b);
  F sum = Simd::zero();
  int64_t i = 0;
  for (; i + kWidth <= dim; i += kWidth) sum = Simd::fma(Element::load(x + i), Element::load(y + i), sum);
  if (i < dim) {
    const int n = static_cast<int>(dim - i);
    sum = Simd::fma(Element::load(x + i, n), Element::load(y + i, n), sum);
  }
  return Simd::reduce_add(sum);
}

// to (rows x dim, ld) += from.
inline void add_rows(float *to, const float *from, int64_t rows, int64_t dim, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < dim; i += kWidth) {
      Simd::store(to + r * ld + i, Simd::add(Simd::load(to + r * ld + i), Simd::load(from + r * ld + i)));
    }
  }
}

// Where packed query rows go; each pointer is at the first row.
struct PackedQueries {
  float *q = nullptr;  // (rows, ld)
  int64_t ld = 0;
  float *dout = nullptr;  // (rows, ld_v)
  int64_t ld_v = 0;
  float *lse2 = nullptr;   // (rows): lse * log2(e), +inf for rows that see nothing
  float *delta = nullptr;  // (rows): rowsum(dout * out) - dlse
};

// lse2 and delta of the rows. Returns their part of dsink.
template <class Element>
inline double row_scalars(const BackwardProblem &problem, int64_t b, int64_t h, const Sequence &queries, const Sequence &keys,
                          Range rows, float *lse2, float *deltas) {
  const MaskedProblem &p = problem.forward;
  const Rows out = rows_of(p.out, b, h, queries.start), dout = rows_of(problem.dout, b, h, queries.start);
  const auto scalars = [&](const RowScalar &x) {
    return x.data + b * x.batch_stride + h * x.head_stride + queries.start * x.seq_stride;
  };
  const float *lse = scalars(p.lse), *dlse = problem.dlse.data != nullptr ? scalars(problem.dlse) : nullptr;
  const float sink = p.sink != nullptr ? p.sink[h * p.sink_stride] : -kInfinity;
  double dsink = 0;
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const bool sees_no_key = visible_keys(p.band, queries, keys, Range{i, i + 1}).empty();
    const float row_lse = sees_no_key ? sink : lse[i * p.lse.seq_stride];
    const float row_dlse = dlse != nullptr ? dlse[i * problem.dlse.seq_stride] : 0.0f;
    // A row whose P is all on the sink sees no key: its lse is the sink up to rounding, forward wrote zeros, and its dout, which
    // may be NaN, has no say.
    const bool near_sink = row_lse <= sink + 1e-5f * (1.0f + std::fabs(sink));
    const bool only_sink = sees_no_key || (near_sink && dot_rows<Element>(out.row(i), out.row(i), p.head_dim_v) == 0);
    const float delta = only_sink ? -row_dlse : dot_rows<Element>(dout.row(i), out.row(i), p.head_dim_v) - row_dlse;
    const bool sees_nothing = sees_no_key || row_lse == -kInfinity;
    lse2[i - rows.begin] = sees_nothing ? kInfinity : row_lse * kLog2e;
    deltas[i - rows.begin] = sees_nothing ? 0.0f : delta;
    if (sink != -kInfinity)
      dsink -= std::exp(static_cast<double>(sink) - static_cast<double>(row_lse)) * static_cast<double>(delta);
  }
  return dsink;
}

// q and dout of the rows; rows that see nothing (known from lse2) become zero, so that they do not reach the products even if they
// hold NaN. Returns whether every other value is finite.
template <class Element>
inline bool pack_query_rows(const BackwardProblem &problem, int64_t b, int64_t h, const Sequence &queries, Range rows,
                            const PackedQueries &to) {
  const MaskedProblem &p = problem.forward;
  const auto keep = [&](int64_t i) { return to.lse2[i - rows.begin] != kInfinity; };
  const bool q_finite =
      widen_rows<Element>(rows_of(p.q, b, h, queries.start), rows.begin, rows.end, p.head_dim, keep, to.q, to.ld);
  const bool dout_finite = widen_rows<Element>(rows_of(problem.dout, b, h, queries.start), rows.begin, rows.end, p.head_dim_v,
                                               keep, to.dout, to.ld_v);
  return q_finite && dout_finite;
}

}  // namespace fa::cpu::FA_ISA
