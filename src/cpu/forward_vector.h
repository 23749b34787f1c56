// SPDX-License-Identifier: Apache-2.0
// The vector forward kernel, for decoding and other very short queries: dot products with the unpacked keys, then weighted sums of
// the unpacked values. Its speed is that of reading keys and values once from memory, which it prefetches.
#pragma once

#include "cpu/forward_state.h"

namespace fa::cpu::FA_ISA {

// Rows ahead of the current one that are prefetched: the latency of memory over the time of a row.
constexpr int64_t kPrefetchRows = 16;

// Dot products of ROWS queries (q, leading dimension ldq, zero-padded to kWidth) with KEYS keys, `stride` bytes apart.
template <class Element, int KEYS, int ROWS>
FA_INLINE void dot_rows(const char *keys, int64_t stride, int64_t dim, const float *q, int64_t ldq, float *s, int64_t lds) {
  F acc[KEYS][ROWS];
#pragma GCC unroll 4
  for (int j = 0; j < KEYS; ++j) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) acc[j][r] = Simd::zero();
  }
  const auto step = [&](int64_t c, auto load) __attribute__((always_inline)) {
    F x[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) x[r] = Simd::load(q + r * ldq + c);
#pragma GCC unroll 4
    for (int j = 0; j < KEYS; ++j) {
      const F y = load(reinterpret_cast<const typename Element::Type *>(keys + j * stride) + c);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) acc[j][r] = Simd::fma(x[r], y, acc[j][r]);
    }
  };
  int64_t c = 0;
  for (; c + kWidth <= dim; c += kWidth)
    step(
        c, [](const auto *y) __attribute__((always_inline)) { return Element::load(y); });
  if (c < dim) {
    const int n = static_cast<int>(dim - c);
    step(
        c, [n](const auto *y) __attribute__((always_inline)) { return Element::load(y, n); });
  }
#pragma GCC unroll 4
  for (int j = 0; j < KEYS; ++j) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) s[r * lds + j] = Simd::reduce_add(acc[j][r]);
  }
}

FA_INLINE void prefetch_row(const char *row, int64_t bytes) {
  for (int64_t c = 0; c < bytes; c += 64) Simd::prefetch(row + c);
}

// s[r * lds + j - begin] = q_r k_j for keys [begin, end).
template <class Element>
inline void dot_products(const Rows &keys, int64_t begin, int64_t end, int64_t dim, const float *q, int64_t ldq, int64_t rows,
                         float *s, int64_t lds) {
  constexpr int kKeys = 4;
  const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(typename Element::Type));
  for (int64_t j = begin; j < end;) {
    const char *first = keys.row(j);
    const int64_t run = keys.run(j, end);
    const auto block = [&]<int KEYS>(int64_t i) __attribute__((always_inline)) {
      const char *k = first + i * keys.stride;
      for (int n = 0; n < KEYS; ++n) prefetch_row(k + (kPrefetchRows + n) * keys.stride, row_bytes);
      float *to = s + j + i - begin;
      int64_t r = 0;
      for (; r + 4 <= rows; r += 4) dot_rows<Element, KEYS, 4>(k, keys.stride, dim, q + r * ldq, ldq, to + r * lds, lds);
      for (; r + 2 <= rows; r += 2) dot_rows<Element, KEYS, 2>(k, keys.stride, dim, q + r * ldq, ldq, to + r * lds, lds);
      for (; r < rows; ++r) dot_rows<Element, KEYS, 1>(k, keys.stride, dim, q + r * ldq, ldq, to + r * lds, lds);
    };
    int64_t i = 0;
    for (; i + kKeys <= run; i += kKeys) block.template operator()<kKeys>(i);
    for (; i < run; ++i) block.template operator()<1>(i);
    j += run;
  }
}

// Columns [c, c + NV * kWidth) of ROWS outputs: o_r += sum over keys of s_rj v_j. Masked weights do not touch their values. The last
// vector has `tail` columns.
template <class Element, int NV, int ROWS>
inline void weigh_columns(const Rows &values, int64_t begin, int64_t end, int64_t c, int tail, const float *s, int64_t lds,
                          float *o, int64_t ldo, bool prefetch) {
  F acc[ROWS][NV];
#pragma GCC unroll 2
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = Simd::load(o + r * ldo + c + v * kWidth);
  }
  for (int64_t j = begin; j < end;) {
    const char *row = values.row(j);
    const int64_t run = values.run(j, end);
    for (int64_t i = 0; i < run; ++i, row += values.stride) {
      const auto *value = reinterpret_cast<const typename Element::Type *>(row) + c;
      if (prefetch)
        prefetch_row(reinterpret_cast<const char *>(value) + kPrefetchRows * values.stride,
                     NV * kWidth * static_cast<int64_t>(sizeof(typename Element::Type)));
      const float *w = s + j + i - begin;
      bool masked = false;
#pragma GCC unroll 2
      for (int r = 0; r < ROWS; ++r) masked |= is_masked_weight(w[r * lds]);
      if (__builtin_expect(!masked, 1)) {
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v) {
          const F x =
              v + 1 < NV || tail == kWidth ? Element::load(value + v * kWidth) : Element::load(value + v * kWidth, tail);
#pragma GCC unroll 2
          for (int r = 0; r < ROWS; ++r) acc[r][v] = Simd::fma(Simd::set(w[r * lds]), x, acc[r][v]);
        }
      } else if (ROWS > 1) {
#pragma GCC unroll 2
        for (int r = 0; r < ROWS; ++r) {
          if (is_masked_weight(w[r * lds])) continue;
#pragma GCC unroll 8
          for (int v = 0; v < NV; ++v) {
            const F x =
                v + 1 < NV || tail == kWidth ? Element::load(value + v * kWidth) : Element::load(value + v * kWidth, tail);
            acc[r][v] = Simd::fma(Simd::set(w[r * lds]), x, acc[r][v]);
          }
        }
      }
    }
    j += run;
  }
#pragma GCC unroll 2
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) Simd::store(o + r * ldo + c + v * kWidth, acc[r][v]);
  }
}

// o_r += sum over keys [begin, end) of s_r,j-begin v_j, for all rows and columns.
template <class Element>
inline void weighted_sums(const Rows &values, int64_t begin, int64_t end, int64_t dim, const float *s, int64_t lds,
                          int64_t rows, float *o, int64_t ldo) {
  const auto columns = [&]<int ROWS>(int64_t r, bool prefetch) {
    for (int64_t c = 0; c < dim;) {
      const auto some = [&]<int NV>() {
        const int tail = static_cast<int>(min64(dim - c - (NV - 1) * kWidth, kWidth));
        weigh_columns<Element, NV, ROWS>(values, begin, end, c, tail, s + r * lds, lds, o + r * ldo, ldo, prefetch);
        c += NV * kWidth;
      };
      const int64_t vectors = (dim - c + kWidth - 1) / kWidth;
      if (vectors >= 8 && (ROWS == 1 || Simd::kRegisters == 32)) {
        some.template operator()<8>();
      } else if (vectors >= 4) {
        some.template operator()<4>();
      } else if (vectors >= 2) {
        some.template operator()<2>();
      } else {
        some.template operator()<1>();
      }
    }
  };
  int64_t r = 0;
  for (; r + 2 <= rows; r += 2) columns.template operator()<2>(r, r == 0);
  if (r < rows) columns.template operator()<1>(r, r == 0);
}

// Logits of one row -> weights in place, masked ones marked. Returns {maximum, sum}.
inline RowResult softmax_row(float *s, int64_t cols, float multiplier) {
  F top = Simd::set(-kInfinity);
  for (int64_t c = 0; c < cols; c += kWidth) {
    const int n = static_cast<int>(min64(cols - c, kWidth));
    const F x = n == kWidth ? Simd::load(s + c) : Simd::select(Simd::first(n), Simd::load(s + c, n), Simd::set(-kInfinity));
    top = Simd::max(x, top);
  }
  RowResult result;
  result.max = Simd::reduce_max(top) * multiplier;
  const F minus = Simd::set(result.max == -kInfinity ? 0.0f : result.max), scale = Simd::set(multiplier);
  F total = Simd::zero();
  for (int64_t c = 0; c < cols; c += kWidth) {
    const int n = static_cast<int>(min64(cols - c, kWidth));
    const F x = n == kWidth ? Simd::load(s + c) : Simd::select(Simd::first(n), Simd::load(s + c, n), Simd::set(-kInfinity));
    const F w = Simd::exp2(Simd::fms(x, scale, minus));
    total = Simd::add(total, w);
    Simd::store(s + c, Simd::select(Simd::eq(x, Simd::set(-kInfinity)), Simd::set(kMaskedWeight), w), n);
  }
  result.sum = Simd::reduce_add(total);
  return result;
}

// Every row of the head (at most kVectorRows) against keys [begin, end), at most kVectorSplitKeys; put(r, result) takes the rows'
// results.
template <class Put>
inline void attend_vector(const Problem &p, const ForwardLayout &layout, char *scratch, const Head &head, Range keys, Put put) {
  const QueryBlock block{0, p.group, 0, head.queries.len};
  const int64_t rows = block.rows(), ldq = round_up(p.head_dim, kWidth), ldo = round_up(p.head_dim_v, kWidth),
                lds = kVectorSplitKeys;
  float *q = reinterpret_cast<float *>(scratch);
  float *s = reinterpret_cast<float *>(scratch + layout.worker_queries);
  float *o = reinterpret_cast<float *>(scratch + layout.worker_queries + layout.worker_scores);
  float *weights = reinterpret_cast<float *>(scratch + layout.worker_queries + layout.worker_scores + layout.worker_output);

  const Rows k = key_rows_of(p, p.k, head.b, head.head_k, head.keys.start);
  const Rows v = key_rows_of(p, p.v, head.b, head.head_k, head.keys.start);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < ldo; c += kWidth) Simd::store(o + r * ldo + c, Simd::zero());
    const Rows source = rows_of(p.q, head.b, head.head_k * p.group + block.head(r), head.queries.start);
    for_dtype(p.q.dtype, [&]<class Element>() {
      const auto *from = reinterpret_cast<const typename Element::Type *>(source.row(block.query(r)));
      for (int64_t c = 0; c < p.head_dim; c += kWidth) {
        const int n = static_cast<int>(min64(p.head_dim - c, kWidth));
        Simd::store(q + r * ldq + c, n == kWidth ? Element::load(from + c) : Element::load(from + c, n));
      }
    });
  }
  for_dtype(p.k.dtype,
            [&]<class Element>() { dot_products<Element>(k, keys.begin, keys.end, p.head_dim, q, ldq, rows, s, lds); });

  RowResult results[kVectorRows];
  for_heads(block, 0, rows, [&](int64_t h, int64_t r0, int64_t n) {
    const Score score = make_score(p, head.b, head.head_k * p.group + h, head.queries.len, head.keys.len);
    const Tile tile{block.query(r0), keys.begin, n, keys.size()};
    float *x = s + r0 * lds;
    if (score.general) score_logits(score, tile, x, lds, nullptr);
    mask_tile(score, tile, x, lds);
    for (int64_t r = r0; r < r0 + n; ++r) {
      results[r] = softmax_row(s + r * lds, keys.size(), score.multiplier);
      results[r].output = o + r * ldo;
    }
    if (!score.dropout) return;
    dropout_weights(score, tile, weights, lds);
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t c = 0; c < keys.size(); ++c) x[r * lds + c] *= weights[r * lds + c];
    }
  });
  for_dtype(p.v.dtype,
            [&]<class Element>() { weighted_sums<Element>(v, keys.begin, keys.end, p.head_dim_v, s, lds, rows, o, ldo); });
  for (int64_t r = 0; r < rows; ++r) put(r, results[r]);
}

}  // namespace fa::cpu::FA_ISA
