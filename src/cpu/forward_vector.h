// SPDX-License-Identifier: Apache-2.0
// The vector forward kernel, for decoding and other very short queries: dot products with the unpacked keys, then P-weighted sums of
// the unpacked values. Its speed is that of reading keys and values once from memory, which it prefetches.
#pragma once

#include "cpu/forward_split.h"
#if defined(FA_TARGET_AMX)
#include "cpu/forward_vector_tiles.h"
#elif defined(FA_TARGET_AVX512_BF16)
#include "cpu/forward_vector_pairs.h"
#elif defined(FA_VECTOR_NEON)
#include "cpu/forward_vector_neon.h"
#endif

namespace fa::cpu::FA_ISA {

#if !defined(FA_BF16_UNIT) && !defined(FA_VECTOR_NEON)
// Where no vectors of 16 bits are multiplied, those of fp32 do all products.
class VectorProducts {
 public:
  VectorProducts(const ForwardProblem &, const ForwardLayout &) {}
  bool begin(char *, const Head &, const VectorSplit &, const VectorArea &) const { return false; }
  void scores(const Head &, const VectorSplit &, const VisitedKeys &, const VectorArea &, bool *) const {}
  void outputs(const Head &, const VectorSplit &, const VisitedKeys &, const VectorArea &, const bool *, bool *) const {}
};
#endif

// Logits of one row -> P in place, masked ones marked. Returns {maximum, sum}; `masked` says whether some are.
inline RowResult softmax_row(float *s, int64_t cols, float multiplier, bool &masked) {
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
  M hidden = Simd::first(0);
  for (int64_t c = 0; c < cols; c += kWidth) {
    const int n = static_cast<int>(min64(cols - c, kWidth));
    const F x = n == kWidth ? Simd::load(s + c) : Simd::select(Simd::first(n), Simd::load(s + c, n), Simd::set(-kInfinity));
    const F w = Simd::exp2(Simd::fms(x, scale, minus));
    total = Simd::add(total, w);
    const M none = Simd::eq(x, Simd::set(-kInfinity));
    hidden = Simd::mask_or(hidden, Simd::mask_and(none, Simd::first(n)));
    Simd::store(s + c, Simd::select(none, Simd::set(kMaskedP), w), n);
  }
  masked = Simd::any(hidden);
  result.sum = Simd::reduce_add(total);
  return result;
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

// Multiplies `columns` columns of the rows of a split, S or O, by the descale of each head's keys or values.
inline void scale_by_head(const Factors &factors, int64_t head_stride, const VectorSplit &split, float *x, int64_t columns,
                          int64_t ld) {
  for (int64_t row = 0; row < split.count * split.rows; ++row)
    multiply(x + row * ld, columns, factors.at(0, row / split.rows * head_stride * int64_t{sizeof(float)}));
}

// Multiplies S, or P, by the descales of the rows of quantised keys, or values. With kKeepMasked a masked P stays masked.
template <bool kKeepMasked>
inline void scale_by_row(const Factors &factors, int64_t head_stride, const VectorSplit &split, const VisitedKeys &visited,
                         const VectorArea &area) {
  float of_keys[kVectorSplitKeys];
  for (int64_t h = 0; h < split.count; ++h) {
    for (int run = 0; run < visited.count; ++run) {
      const Range keys = visited.runs[run];
      for (int64_t c = keys.begin; c < keys.end; ++c)
        of_keys[c] = factors.at(split.keys.begin + c, h * head_stride * int64_t{sizeof(float)});
      for (int64_t r = h * split.rows; r < (h + 1) * split.rows; ++r) {
        float *row = area.s + r * VectorArea::kLds;
        for (int64_t c = keys.begin; c < keys.end; c += kWidth) {
          const int n = static_cast<int>(min64(keys.end - c, kWidth));
          const F x = Simd::load(row + c, n);
          F scaled = Simd::mul(x, Simd::load(of_keys + c, n));
          if constexpr (kKeepMasked)
            scaled = Simd::select(Simd::ieq(Simd::bits(x), Simd::bits(Simd::set(kMaskedP))), x, scaled);
          Simd::store(row + c, scaled, n);
        }
      }
    }
  }
}

// O = P V of heads [heads.begin, heads.end) of the split; masked[row] says whether a P of that row is marked as masked.
template <class Element>
inline void vector_outputs(const ForwardProblem &p, const Head &head, const VectorSplit &split, const VisitedKeys &visited,
                           const VectorArea &area, const bool *masked, Range heads) {
  constexpr int64_t kLds = VectorArea::kLds;
  const HeadRows values = head_rows(p, p.v, head, split, split.keys), next = head_rows(p, p.k, head, split, after(head, split));
  const int64_t row = heads.begin * split.rows;
  Ahead ahead(values, next, blocks_of(split.rows, kPieceKeys * p.head_dim_v / kWidth / kKeysUnrolled, kMostBlockVectors));
  clear_outputs(split, area, heads);
  for_visited_pieces(values.rows, split.keys.begin, visited, [&](const KeyPiece &piece) {
    ahead.begin(piece);
    add_values<Element>(piece.rows, piece.count, heads.begin * values.head_bytes, values.head_bytes, heads.size(), p.head_dim_v,
                        split.rows, area.s + row * kLds + piece.first - split.keys.begin, kLds, area.o + row * area.ldo,
                        area.ldo, masked + row, ahead);
  });
  ahead.finish();
}

// All rows of the split's heads against its keys; put(row, result) takes their results. `products` does those of what it takes.
template <class Put>
inline void attend_vector(const ForwardProblem &p, const ForwardLayout &layout, const MaskMemory &memory, char *scratch,
                          const Head &head, const VectorSplit &split, VectorProducts &products, Put put) {
  const QueryBlock block{0, p.group, 0, head.queries.len};
  const bool by_data = masks_pairs(p, memory.user);
  const VisitedKeys visited = by_data ? split_bits(p, memory, head, block, split) : VisitedKeys(split.keys.size());
  const Range keys = split.keys;
  const int64_t rows = split.count * split.rows, lds = VectorArea::kLds;
  VectorArea area;
  area.ldq = round_up(p.head_dim, kWidth);
  area.ldo = layout.dim_v;
  area.q = reinterpret_cast<float *>(scratch);
  area.s = reinterpret_cast<float *>(scratch + layout.worker_queries);
  area.o = reinterpret_cast<float *>(scratch + layout.worker_queries + layout.worker_scores);
  float *scales = reinterpret_cast<float *>(scratch + layout.worker_queries + layout.worker_scores + layout.worker_output);

  if (visited.count == 0) {  // masks as data hide every pair
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = 0; c < area.ldo; c += kWidth) Simd::store(area.o + row * area.ldo + c, Simd::zero());
      put(row, {-kInfinity, 0, area.o + row * area.ldo});
    }
    return;
  }

  widen_queries(p, head, block, split, area);
  const bool takes = products.begin(scratch, head, split, area);
  for_key_dtype(p.k.dtype, [&]<class Element>() {
    bool done[kVectorScratchRows] = {};
    if (takes) products.scores(head, split, visited, area, done);
    for_runs_of<false>(done, split.count, [&](Range heads) {
      vector_scores<WidenedProduct<typename InUnits<Element>::Type>>(p, head, split, visited, area, heads, area.q, area.ldq);
      if constexpr (InUnits<Element>::kUnit != 1.0f) {
        for (int64_t row = heads.begin * split.rows; row < heads.end * split.rows; ++row)
          multiply(area.s + row * lds, keys.size(), InUnits<Element>::kUnit);
      }
    });
    if constexpr (Element::kQuantised) {
      const Factors factors = factors_of(p, p.k_descale, head.b, split.first, head.keys.start);
      const int64_t stride = p.k_descale.factors.head_stride;
      if (factors.given && p.k_descale.per_row) scale_by_row<false>(factors, stride, split, visited, area);
      if (factors.given && !p.k_descale.per_row) scale_by_head(factors, stride, split, area.s, keys.size(), lds);
    }
  });

  RowResult results[kVectorScratchRows];
  bool masked[kVectorScratchRows];
  for (int64_t h = 0; h < split.count; ++h) {
    for_heads(block, 0, split.rows, [&](int64_t g, int64_t r0, int64_t n) {
      const Score score = make_score(p, memory.user, head.b, (split.first + h) * p.group + g, head.queries, head.keys);
      const Tile tile{block.query(r0), keys.begin, n, keys.size()};
      const int64_t row0 = h * split.rows + r0;
      float *x = area.s + row0 * lds;
      if (score.general) score_logits(score, tile, x, lds, nullptr);
      mask_by_band(score, tile, x, lds);
      if (by_data) mask_by_bits(memory.bits + row0, n, 0, keys.size(), x, lds);
      for (int64_t r = 0; r < n; ++r) {
        results[row0 + r] = softmax_row(x + r * lds, keys.size(), score.multiplier, masked[row0 + r]);
        results[row0 + r].output = area.o + (row0 + r) * area.ldo;
      }
      if (!score.dropout) return;
      dropout_scales(score, tile, scales, lds);
      for (int64_t r = 0; r < n; ++r) {
        for (int64_t c = 0; c < keys.size(); ++c) x[r * lds + c] *= scales[r * lds + c];
      }
    });
  }

  for_key_dtype(p.v.dtype, [&]<class Element>() {
    bool done[kVectorScratchRows] = {};
    const Factors factors = Element::kQuantised ? factors_of(p, p.v_descale, head.b, split.first, head.keys.start) : Factors{};
    const int64_t stride = p.v_descale.factors.head_stride;
    if (factors.given && p.v_descale.per_row) scale_by_row<true>(factors, stride, split, visited, area);
    if (takes) products.outputs(head, split, visited, area, masked, done);
    for_runs_of<false>(done, split.count, [&](Range heads) {
      vector_outputs<typename InUnits<Element>::Type>(p, head, split, visited, area, masked, heads);
      if constexpr (InUnits<Element>::kUnit != 1.0f) {
        multiply(area.o + heads.begin * split.rows * area.ldo, heads.size() * split.rows * area.ldo, InUnits<Element>::kUnit);
      }
    });
    if (factors.given && !p.v_descale.per_row) scale_by_head(factors, stride, split, area.o, area.ldo, area.ldo);
  });
  for (int64_t row = 0; row < rows; ++row) put(row, results[row]);
}

}  // namespace fa::cpu::FA_ISA
