// SPDX-License-Identifier: Apache-2.0
// A split of the vector forward kernel (cpu/forward_vector.h): which heads and keys it has, and where a worker keeps its numbers.
#pragma once

#include "cpu/forward_blocks.h"
#include "cpu/forward_softmax.h"

namespace fa::cpu::FA_ISA {

// A split of the heads [first, first + count) of one sequence, whose keys are adjacent in memory and are read together. Row
// h * rows + r is row r of head first + h.
struct VectorSplit {
  int64_t first = 0;
  int64_t count = 0;
  int64_t rows = 0;  // of a head
  Range keys;
};

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

// for_pieces for each run; `first` is the first key of the split.
template <class Body>
FA_INLINE void for_visited_pieces(const Rows &source, int64_t first, const VisitedKeys &visited, Body body) {
  for (int n = 0; n < visited.count; ++n) for_pieces(source, first + visited.runs[n].begin, first + visited.runs[n].end, body);
}

// O += P V of heads of `rows` rows each and `count` values, which lie at values[n] + offset for the first head and `head_bytes` further for the
// next. masked[r] says whether a P of row r may be marked as masked.
template <class Element>
__attribute__((noinline)) void add_values(const char *const *values, int count, int64_t offset, int64_t head_bytes,
                                          int64_t heads, int64_t dim, int64_t rows, const float *p, int64_t ldp, float *o,
                                          int64_t ldo, const bool *masked, Ahead &ahead) {
  for (int64_t h = 0; h < heads; ++h, offset += head_bytes, p += rows * ldp, o += rows * ldo, masked += rows) {
    for_row_groups<kMostBlockRows>(
        rows, [&]<int ROWS>(int64_t r) __attribute__((always_inline)) {
          const float *w = p + r * ldp;
          float *to = o + r * ldo;
          bool some_masked = false;
          for (int i = 0; i < ROWS; ++i) some_masked |= masked[r + i];
          if (__builtin_expect(!some_masked, 1)) {
            add_weighted_rows<Element, ROWS>(values, count, offset, dim, w, ldp, to, ldo, ahead);
            return;
          }
          for (int i = 0; i < ROWS; ++i) {
            for (int n = 0; n < count; ++n) {
              if (is_masked_p(w[i * ldp + n])) continue;
              add_weighted_row<Element>(values[n] + offset, dim, w + i * ldp + n, to + i * ldo);
            }
          }
        });
  }
}

// A split in a worker's scratch memory. Row h * rows + r of each array is row r of head first + h.
struct VectorArea {
  float *q = nullptr;  // widened, rows of ldq, padded with zeros to whole vectors
  float *s = nullptr;  // rows of kLds: products, logits, P
  float *o = nullptr;  // rows of ldo
  int64_t ldq = 0;
  int64_t ldo = 0;
  static constexpr int64_t kLds = kVectorSplitKeys;
};

// The queries of the split, widened.
inline void widen_queries(const ForwardProblem &p, const Head &head, const QueryBlock &block, const VectorSplit &split,
                          const VectorArea &area) {
  for (int64_t row = 0; row < split.count * split.rows; ++row) {
    const int64_t r = row % split.rows, h = (split.first + row / split.rows) * p.group + block.head(r);
    const char *from_row = rows_of(p.q, head.b, h, head.queries.start).row(block.query(r));
    for_query_dtype(p.q.dtype, [&]<class Element>() {
      const auto *from = reinterpret_cast<const typename Element::Type *>(from_row);
      float factor = 1.0f;
      if constexpr (Element::kQuantised) factor = factors_of(p, p.q_descale, head.b, h / p.group, 0).at(0);
      for (int64_t c = 0; c < p.head_dim; c += kWidth) {
        const int n = static_cast<int>(min64(p.head_dim - c, kWidth));
        F x = n == kWidth ? Element::load(from + c) : Element::load(from + c, n);
        if constexpr (Element::kQuantised) x = Simd::mul(x, Simd::set(factor));
        Simd::store(area.q + row * area.ldq + c, x);
      }
    });
  }
}

// Keys, or values, of the split's heads.
inline HeadRows head_rows(const ForwardProblem &p, const Operand &x, const Head &head, const VectorSplit &split, Range keys) {
  const int64_t bytes = dtype_bytes(x.dtype);
  return {key_rows_of(p, x, head.b, split.first, head.keys.start), keys, split.count, x.head_stride * bytes,
          (&x == &p.k ? p.head_dim : p.head_dim_v) * bytes};
}

// Rows of a piece in one head, at rows[n] + offset.
struct PieceRows {
  const char *const *rows;
  int64_t offset;
};
// Where they lie in the tensor: `offset` is from the first head to that one.
struct RowsInPlace {
  FA_INLINE PieceRows operator()(const KeyPiece &piece, int64_t offset) const { return {piece.rows, offset}; }
};

// Raw S of heads [heads.begin, heads.end) of the split, whose queries are rows of ldq from q on. rows_of_head(piece, offset) gives the keys of a piece.
template <class Product, class RowsOfHead = RowsInPlace>
inline void vector_scores(const ForwardProblem &p, const Head &head, const VectorSplit &split, const VisitedKeys &visited,
                          const VectorArea &area, Range heads, const typename Product::Query *q, int64_t ldq,
                          RowsOfHead &&rows_of_head = {}) {
  const HeadRows keys = head_rows(p, p.k, head, split, split.keys), values = head_rows(p, p.v, head, split, split.keys);
  Ahead ahead(keys, values, blocks_of(split.rows, kPieceKeys, kOneRowKeys));
  for_visited_pieces(keys.rows, split.keys.begin, visited, [&](const KeyPiece &piece) {
    ahead.begin(piece);
    for (int64_t h = heads.begin; h < heads.end; ++h) {
      const int64_t row = h * split.rows;
      const PieceRows at = rows_of_head(piece, h * keys.head_bytes);
      dot_rows<Product>(at.rows, piece.count, at.offset, p.head_dim, q + row * ldq, ldq, split.rows,
                        area.s + row * VectorArea::kLds + piece.first - split.keys.begin, VectorArea::kLds, ahead);
    }
  });
  ahead.finish();
}

// Keys after the split, which its worker may compute next.
inline Range after(const Head &head, const VectorSplit &split) { return {split.keys.end, head.visible.end}; }

inline void clear_outputs(const VectorSplit &split, const VectorArea &area, Range heads) {
  for (int64_t i = heads.begin * split.rows * area.ldo; i < heads.end * split.rows * area.ldo; i += kWidth)
    Simd::store(area.o + i, Simd::zero());
}

// n numbers, in whole vectors, times `factor`.
inline void multiply(float *x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += kWidth) Simd::store(x + i, Simd::mul(Simd::load(x + i), Simd::set(factor)));
}

// Calls body(heads) for the maximal runs of heads for which `chosen` is kValue.
template <bool kValue = true, class Body>
FA_INLINE void for_runs_of(const bool *chosen, int64_t count, Body body) {
  for (int64_t h = 0; h < count; ++h) {
    if (chosen[h] != kValue) continue;
    const int64_t first = h;
    while (h < count && chosen[h] == kValue) ++h;
    body(Range{first, h});
  }
}

// What the queries of a head are like.
struct QueryNumbers {
  F least = Simd::set(1.0f), most = least, probe = Simd::zero();

  FA_INLINE void see(F x) {
    const F magnitude = Simd::abs(x);
    most = Simd::max(magnitude, most);
    least = Simd::select(Simd::eq(x, Simd::zero()), least, Simd::min(magnitude, least));
    probe = Simd::fma(x, Simd::zero(), probe);  // NaN as soon as one x is not finite
  }
  // Whether none is subnormal, or 2^64 and more.
  bool normal() const { return between(0x1p-126f); }
  // Whether products of bf16 have S right, although the unit takes small numbers for zero.
  bool moderate() const { return between(0x1p-100f); }

 private:
  bool between(float lowest) const {
    return -Simd::reduce_max(Simd::sub(Simd::zero(), least)) >= lowest && Simd::reduce_max(most) < 0x1p64f &&
           Simd::reduce_add(probe) == 0;
  }
};

}  // namespace fa::cpu::FA_ISA
