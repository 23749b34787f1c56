// SPDX-License-Identifier: Apache-2.0
// The vector forward kernel, for decoding and other very short queries: dot products with the unpacked keys, then P-weighted sums of
// the unpacked values. Its speed is that of reading keys and values once from memory, which it prefetches.
#pragma once

#include "cpu/forward_softmax.h"

namespace fa::cpu::FA_ISA {

// Keys that are handled together: enough independent sums to keep the multipliers busy, few enough memory streams.
constexpr int kKeysTogether = 4;
// Keys ahead of the current ones that are prefetched: the latency of memory over the time of a key.
constexpr int64_t kPrefetchKeys = 8;

// Calls body.operator()<KEYS>(j, rows, ahead) for the keys [begin, end), four or one at a time: rows are the KEYS rows from j on, ahead
// those to prefetch.
template <class Body>
FA_INLINE void for_keys(const Rows &source, int64_t begin, int64_t end, Body body) {
  const auto some = [&]<int KEYS>(int64_t j) __attribute__((always_inline)) {
    const char *rows[KEYS], *ahead[KEYS];
#pragma GCC unroll 4
    for (int n = 0; n < KEYS; ++n) {
      rows[n] = source.row(j + n);
      ahead[n] = source.row(min64(j + n + kPrefetchKeys, end - 1));
    }
    body.template operator()<KEYS>(j, rows, ahead);
  };
  int64_t j = begin;
  for (; j + kKeysTogether <= end; j += kKeysTogether) some.template operator()<kKeysTogether>(j);
  for (; j < end; ++j) some.template operator()<1>(j);
}

// Calls body.operator()<ROWS>(r) for rows 0 .. rows - 1, four, two or one at a time.
template <class Body>
FA_INLINE void for_row_groups(int64_t rows, Body body) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) body.template operator()<4>(r);
  if (r + 2 <= rows) body.template operator()<2>(r), r += 2;
  if (r < rows) body.template operator()<1>(r);
}

// s[r * lds + j] = q_r k_j for ROWS queries (zero-padded to whole vectors) and KEYS keys.
template <class Element, int KEYS, int ROWS>
FA_INLINE void dot_block(const char *const (&keys)[KEYS], int64_t offset, int64_t dim, const float *q, int64_t ldq, float *s,
                         int64_t lds) {
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
      const F y = load(reinterpret_cast<const typename Element::Type *>(keys[j] + offset) + c);
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

// s[r * lds + j - begin] = q_r k_j for keys [begin, end) of one head.
template <class Element>
inline void dot_products(const Rows &keys, int64_t begin, int64_t end, int64_t dim, const float *q, int64_t ldq, int64_t rows,
                         float *s, int64_t lds) {
  for_keys(keys, begin, end, [&]<int KEYS>(int64_t j, const char *const(&k)[KEYS], const char *const(&)[KEYS]) {
    for_row_groups(
        rows, [&]<int ROWS>(int64_t r) __attribute__((always_inline)) {
          dot_block<Element, KEYS, ROWS>(k, 0, dim, q + r * ldq, ldq, s + r * lds + j - begin, lds);
        });
  });
}

// o_r += sum over KEYS keys of s[r * lds + j] v_j, for ROWS rows and NV vectors from column c on, of which the last has `tail` columns.
template <class Element, int KEYS, int ROWS, int NV>
FA_INLINE void add_weighted(const char *const (&values)[KEYS], int64_t offset, int64_t c, int tail, const float *s, int64_t lds,
                            float *o, int64_t ldo) {
  F acc[ROWS][NV];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = Simd::load(o + r * ldo + c + v * kWidth);
  }
#pragma GCC unroll 4
  for (int j = 0; j < KEYS; ++j) {
    const auto *value = reinterpret_cast<const typename Element::Type *>(values[j] + offset) + c;
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const F x = v + 1 < NV || tail == kWidth ? Element::load(value + v * kWidth) : Element::load(value + v * kWidth, tail);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) acc[r][v] = Simd::fma(Simd::set(s[r * lds + j]), x, acc[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) Simd::store(o + r * ldo + c + v * kWidth, acc[r][v]);
  }
}

// The same for all `dim` columns.
template <class Element, int KEYS, int ROWS>
FA_INLINE void add_weighted_rows(const char *const (&values)[KEYS], int64_t offset, int64_t dim, const float *s, int64_t lds,
                                 float *o, int64_t ldo) {
  constexpr int kMost = (Simd::kRegisters == 32 ? 16 : 8) / ROWS < 8 ? (Simd::kRegisters == 32 ? 16 : 8) / ROWS : 8;
  int64_t c = 0;
  while (c < dim) {
    const auto some = [&]<int NV>() __attribute__((always_inline)) {
      const int tail = static_cast<int>(min64(dim - c - (NV - 1) * kWidth, kWidth));
      add_weighted<Element, KEYS, ROWS, NV>(values, offset, c, tail, s, lds, o, ldo);
      c += NV * kWidth;
    };
    const int64_t vectors = (dim - c + kWidth - 1) / kWidth;
    if (vectors >= kMost) {
      some.template operator()<kMost>();
    } else if (kMost > 2 && vectors >= 2) {
      some.template operator()<2>();
    } else {
      some.template operator()<1>();
    }
  }
}

// Logits of one row -> P in place, masked ones marked. Returns {maximum, sum}.
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
    Simd::store(s + c, Simd::select(Simd::eq(x, Simd::set(-kInfinity)), Simd::set(kMaskedP), w), n);
  }
  result.sum = Simd::reduce_add(total);
  return result;
}

// A split of the heads [first, first + count) of one sequence, whose keys are adjacent in memory and are read together. Row
// h * rows + r is row r of head first + h.
struct VectorSplit {
  int64_t first = 0;
  int64_t count = 0;
  int64_t rows = 0;  // of a head
  Range keys;
};

// P of quantised values is multiplied by their descales. A masked P stays masked.
inline void scale_p_by_descale(const Factors &factors, int64_t head_stride, const VectorSplit &split, float *s, int64_t lds) {
  for (int64_t h = 0; h < split.count; ++h) {
    for (int64_t c = 0; c < split.keys.size(); ++c) {
      const float factor = factors.at(split.keys.begin + c, h * head_stride);
      for (int64_t r = 0; r < split.rows; ++r) {
        float &w = s[(h * split.rows + r) * lds + c];
        if (!is_masked_p(w)) w *= factor;
      }
    }
  }
}

// Runs of keys that the kernel visits, relative to the first key of the split. Masks as data leave out whole granules of kGranule keys that no
// row sees.
struct VisitedKeys {
  static constexpr int64_t kGranule = 16;
  Range runs[kVectorSplitKeys / kGranule / 2 + 1];
  int count = 0;

  // All of them.
  explicit VisitedKeys(int64_t keys) {
    runs[0] = {0, keys};
    count = 1;
  }
  VisitedKeys(const RowBits *bits, int64_t rows, int64_t keys) {
    RowBits seen = {};
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t w = 0; w < kMaskWords; ++w) seen[w] |= bits[r][w];
    }
    for (int64_t c = 0; c < keys; c += kGranule) {
      if ((seen[c / 64] >> (c % 64) & 0xFFFF) == 0) continue;
      const int64_t end = min64(c + kGranule, keys);
      if (count > 0 && runs[count - 1].end == c) {
        runs[count - 1].end = end;
      } else {
        runs[count++] = {c, end};
      }
    }
  }
};

// for_keys for each run; `first` is the first key of the split.
template <class Body>
FA_INLINE void for_visited_keys(const Rows &source, int64_t first, const VisitedKeys &visited, Body body) {
  for (int n = 0; n < visited.count; ++n) for_keys(source, first + visited.runs[n].begin, first + visited.runs[n].end, body);
}

// Bits of the masks as data for all rows of the split.
inline VisitedKeys split_bits(const ForwardProblem &p, const MaskMemory &memory, const Head &head, const QueryBlock &block,
                              const VectorSplit &split) {
  PreparedMasks masks;
  masks.user = memory.user;
  masks.list_bits = memory.list_bits;
  if (p.slices.given) {
    Range shown;
    masks.active = memory.slices;
    masks.num_active =
        gather_slices(p.slices, {0, head.queries.len}, head.queries.start, split.keys, head.keys.start, memory.slices, shown);
  }
  for (int64_t h = 0; h < split.count; ++h) {
    for_heads(block, 0, split.rows, [&](int64_t g, int64_t r0, int64_t n) {
      const DataMask mask = make_data_mask(p, masks, head.b, (split.first + h) * p.group + g, head.queries, head.keys);
      const Range rows{block.query(r0), block.query(r0) + n};
      visible_bits(mask, rows, split.keys, split.keys.begin, memory.bits + h * split.rows + r0);
    });
  }
  return VisitedKeys(memory.bits, split.count * split.rows, split.keys.size());
}

// All rows of the split's heads against its keys; put(row, result) takes their results.
template <class Put>
inline void attend_vector(const ForwardProblem &p, const ForwardLayout &layout, const MaskMemory &memory, char *scratch,
                          const Head &head, const VectorSplit &split, Put put) {
  const QueryBlock block{0, p.group, 0, head.queries.len};
  const bool by_data = masks_pairs(p, memory.user);
  const VisitedKeys visited = by_data ? split_bits(p, memory, head, block, split) : VisitedKeys(split.keys.size());
  const Range keys = split.keys;
  const int64_t ldq = round_up(p.head_dim, kWidth), ldo = round_up(p.head_dim_v, kWidth), lds = kVectorSplitKeys;
  float *q = reinterpret_cast<float *>(scratch);
  float *s = reinterpret_cast<float *>(scratch + layout.worker_queries);
  float *o = reinterpret_cast<float *>(scratch + layout.worker_queries + layout.worker_scores);
  float *scales = reinterpret_cast<float *>(scratch + layout.worker_queries + layout.worker_scores + layout.worker_output);

  for (int64_t row = 0; row < split.count * split.rows; ++row) {
    for (int64_t c = 0; c < ldo; c += kWidth) Simd::store(o + row * ldo + c, Simd::zero());
    if (visited.count == 0) {
      put(row, {-kInfinity, 0, o + row * ldo});
      continue;
    }
    const int64_t r = row % split.rows, h = (split.first + row / split.rows) * p.group + block.head(r);
    const char *from_row = rows_of(p.q, head.b, h, head.queries.start).row(block.query(r));
    for_key_dtype(p.q.dtype, [&]<class Element>() {
      const auto *from = reinterpret_cast<const typename Element::Type *>(from_row);
      float factor = 1.0f;
      if constexpr (Element::kQuantised) factor = factors_of(p, p.q_descale, head.b, h / p.group, 0).at(0);
      for (int64_t c = 0; c < p.head_dim; c += kWidth) {
        const int n = static_cast<int>(min64(p.head_dim - c, kWidth));
        F x = n == kWidth ? Element::load(from + c) : Element::load(from + c, n);
        if constexpr (Element::kQuantised) x = Simd::mul(x, Simd::set(factor));
        Simd::store(q + row * ldq + c, x);
      }
    });
  }

  if (visited.count == 0) return;  // masks as data hide every pair

  for_key_dtype(p.k.dtype, [&]<class Element>() {
    constexpr int64_t kBytes = sizeof(typename Element::Type);
    const Rows rows = key_rows_of(p, p.k, head.b, split.first, head.keys.start);
    const Factors factors = factors_of(p, p.k_descale, head.b, split.first, head.keys.start);
    for_visited_keys(
        rows, keys.begin, visited, [&]<int KEYS>(int64_t j, const char *const(&k)[KEYS], const char *const(&ahead)[KEYS]) {
          for (int64_t h = 0; h < split.count; ++h) {
            const int64_t offset = h * p.k.head_stride * kBytes;
            for (int n = 0; n < KEYS; ++n) prefetch_row(ahead[n] + offset, p.head_dim * kBytes);
            for_row_groups(
                split.rows, [&]<int ROWS>(int64_t r) __attribute__((always_inline)) {
                  const int64_t row = h * split.rows + r;
                  dot_block<Element, KEYS, ROWS>(k, offset, p.head_dim, q + row * ldq, ldq, s + row * lds + j - keys.begin,
                                                 lds);
                });
            if constexpr (Element::kQuantised) {
              for (int n = 0; n < KEYS; ++n) {
                const float factor = factors.at(j + n, h * p.k_descale.factors.head_stride * int64_t{sizeof(float)});
                for (int64_t r = 0; r < split.rows; ++r) s[(h * split.rows + r) * lds + j + n - keys.begin] *= factor;
              }
            }
          }
        });
  });

  RowResult results[kVectorScratchRows];
  for (int64_t h = 0; h < split.count; ++h) {
    for_heads(block, 0, split.rows, [&](int64_t g, int64_t r0, int64_t n) {
      const Score score = make_score(p, memory.user, head.b, (split.first + h) * p.group + g, head.queries, head.keys);
      const Tile tile{block.query(r0), keys.begin, n, keys.size()};
      const int64_t row0 = h * split.rows + r0;
      float *x = s + row0 * lds;
      if (score.general) score_logits(score, tile, x, lds, nullptr);
      mask_by_band(score, tile, x, lds);
      if (by_data) mask_by_bits(memory.bits + row0, n, 0, keys.size(), x, lds);
      for (int64_t r = 0; r < n; ++r) {
        results[row0 + r] = softmax_row(x + r * lds, keys.size(), score.multiplier);
        results[row0 + r].output = o + (row0 + r) * ldo;
      }
      if (!score.dropout) return;
      dropout_scales(score, tile, scales, lds);
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t c = 0; c < keys.size(); ++c) x[r * lds + c] *= scales[r * lds + c];
      }
    });
  }

  for_key_dtype(p.v.dtype, [&]<class Element>() {
    constexpr int64_t kBytes = sizeof(typename Element::Type);
    const Rows rows = key_rows_of(p, p.v, head.b, split.first, head.keys.start);
    if constexpr (Element::kQuantised) {
      scale_p_by_descale(factors_of(p, p.v_descale, head.b, split.first, head.keys.start),
                         p.v_descale.factors.head_stride * int64_t{sizeof(float)}, split, s, lds);
    }
    for_visited_keys(rows, keys.begin, visited,
                     [&]<int KEYS>(int64_t j, const char *const(&v)[KEYS], const char *const(&ahead)[KEYS]) {
                       for (int64_t h = 0; h < split.count; ++h) {
                         const int64_t offset = h * p.v.head_stride * kBytes;
                         for (int n = 0; n < KEYS; ++n) prefetch_row(ahead[n] + offset, p.head_dim_v * kBytes);
                         for_row_groups(
                             split.rows, [&]<int ROWS>(int64_t r) __attribute__((always_inline)) {
                               const int64_t row = h * split.rows + r;
                               const float *w = s + row * lds + j - keys.begin;
                               bool masked = false;
                               for (int i = 0; i < ROWS; ++i) {
                                 for (int n = 0; n < KEYS; ++n) masked |= is_masked_p(w[i * lds + n]);
                               }
                               if (__builtin_expect(!masked, 1)) {
                                 add_weighted_rows<Element, KEYS, ROWS>(v, offset, p.head_dim_v, w, lds, o + row * ldo, ldo);
                                 return;
                               }
                               for (int i = 0; i < ROWS; ++i) {
                                 for (int n = 0; n < KEYS; ++n) {
                                   if (is_masked_p(w[i * lds + n])) continue;
                                   const char *const one[1] = {v[n]};
                                   add_weighted_rows<Element, 1, 1>(one, offset, p.head_dim_v, w + i * lds + n, lds,
                                                                    o + (row + i) * ldo, ldo);
                                 }
                               }
                             });
                       }
                     });
  });
  for (int64_t row = 0; row < split.count * split.rows; ++row) put(row, results[row]);
}

}  // namespace fa::cpu::FA_ISA
