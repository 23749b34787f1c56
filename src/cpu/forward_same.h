// SPDX-License-Identifier: Apache-2.0
// Segments of FA_FLAG_SAME_BITS for very few rows per key head, with keys and values where they lie: packing would take longer than the
// products. The arithmetic is that of the tiled kernel (docs/numerics.md): a product is one chain over ascending columns, so lanes are keys,
// kWidth of which are transposed in registers. As in the vector kernel, heads that are adjacent in memory are computed together.
#pragma once

#include "cpu/forward_split.h"
#if defined(FA_TARGET_AVX512_BF16)
#include "cpu/forward_pairs.h"
#elif defined(FA_TARGET_AMX)
#include "cpu/forward_same_tiles.h"
#endif

namespace fa::cpu::FA_ISA {

#if !defined(FA_TARGET_AMX)
struct SameBitsTiles {  // there is no tile unit
  static constexpr int64_t most_heads(int64_t) { return kVectorScratchRows; }
};
#endif

// What chain_block multiplies: keys of an Element widened to floats, and queries that are floats.
template <class Element>
struct WidenedChain {
  using Key = typename Element::Type;
  using Query = float;
  static constexpr int kColumns = kWidth, kQueries = 1;  // columns of a vector, and numbers of the query in a lane
  static constexpr bool kDescaled = Element::kQuantised;
  static FA_INLINE F load(const Key *k) { return Element::load(k); }
  static FA_INLINE F add(const Query *q, F key, F sum) { return Simd::fma(Simd::set(*q), key, sum); }
};
#if defined(FA_TARGET_AVX512_BF16)
// Two columns of bf16 in a lane. Columns past head_dim are zeros, which the unit adds as in tiles.
struct PairChain {
  using Key = uint16_t;
  using Query = uint16_t;
  static constexpr int kColumns = 2 * kWidth, kQueries = 2;
  static constexpr bool kDescaled = false;
  static FA_INLINE F load(const Key *k) { return Simd::from_bits(Simd::iload(reinterpret_cast<const uint32_t *>(k))); }
  static FA_INLINE F add(const Query *q, F key, F sum) {
    uint32_t pair;
    __builtin_memcpy(&pair, q, sizeof pair);
    return Simd::dot_bf16(Simd::iset(pair), Simd::bits(key), sum);
  }
};
#endif

// S of `rows` <= ROWS queries (padded with zeros to whole vectors) and `count` <= kWidth keys; kWidth columns of s are written. Keys may have
// factors. Queries past the last one are the last one again.
template <class Chain, int ROWS>
__attribute__((noinline)) void chain_block(const char *const *keys, int count, int64_t offset, int64_t dim,
                                           const float *factors, const typename Chain::Query *q, int64_t ldq, int64_t rows,
                                           float *s, int64_t lds, Ahead &ahead) {
  using Key = typename Chain::Key;
  const Key *at[kWidth];
  const typename Chain::Query *queries[ROWS];
  for (int j = 0; j < kWidth; ++j) at[j] = reinterpret_cast<const Key *>(keys[j < count ? j : count - 1] + offset);
  for (int r = 0; r < ROWS; ++r) queries[r] = q + min64(r, rows - 1) * ldq;
  Key last_columns[kWidth * Chain::kColumns];
  F acc[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) acc[r] = Simd::zero();
  for (int64_t c = 0; c < dim; c += Chain::kColumns) {
    ahead.step();
    int lanes = kWidth;
    int64_t from = c;
    if (__builtin_expect(c + Chain::kColumns > dim, 0)) {
      const int64_t n = dim - c;
      from = 0;
      if (Chain::kQueries == 1) lanes = static_cast<int>(n);
      __builtin_memset(last_columns, 0, sizeof last_columns);
      for (int j = 0; j < kWidth; ++j) {
        Key *copy = last_columns + j * Chain::kColumns;
        __builtin_memcpy(copy, at[j] + c, static_cast<size_t>(n) * sizeof(Key));
        at[j] = copy;
      }
    }
    F tile[kWidth];
#pragma GCC unroll 16
    for (int j = 0; j < kWidth; ++j) {
      tile[j] = Chain::load(at[j] + from);
      if constexpr (Chain::kDescaled) tile[j] = Simd::mul(tile[j], Simd::set(factors[j < count ? j : count - 1]));
    }
    Simd::transpose(tile);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      if (i >= lanes) break;
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) acc[r] = Chain::add(queries[r] + c + i * Chain::kQueries, tile[i], acc[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
    if (r < rows) Simd::store(s + r * lds, acc[r]);
  }
}

// The heads of a split and its keys, which lie in one segment.
class SameBitsSegment {
 public:
  SameBitsSegment(const ForwardProblem &p, const ForwardLayout &layout, const MaskMemory &masks, char *scratch,
                  const Head &head, const VectorSplit &split, const SameBitsTiles &tiles)
      : p_(p), head_(head), split_(split), tiles_(tiles) {
    const auto take = [&](size_t bytes) {
      auto *area = reinterpret_cast<float *>(scratch);
      scratch += bytes;
      return area;
    };
    area_.ldq = round_up(p.head_dim, kWidth);
    area_.ldo = layout.dim_v;
    area_.q = take(layout.worker_queries);
    area_.s = take(layout.worker_scores);
    area_.o = take(layout.worker_output);
    st_.dropout = take(layout.worker_dropout);
    // Strips are whole heads.
    strip_rows_ = split.rows * ((split.count + kMaxStrips - 1) / kMaxStrips);
    begin_softmax(p, head, {0, split.count * p.group, 0, head.queries.len}, strip_rows_, masks, take(layout.worker_rows), st_);
  }

  // Computes the segment, or returns false if the unit for bf16 would get some product wrong.
  bool attend() {
    widen_queries(p_, head_, {0, p_.group, 0, head_.queries.len}, split_, area_);
#if defined(FA_TARGET_AVX512_BF16) || defined(FA_TARGET_AMX)
    QueryNumbers numbers;
    for (int64_t i = 0; i < st_.rows * area_.ldq; i += kWidth) numbers.see(Simd::load(area_.q + i));
    if (!numbers.normal()) return false;
#endif
#if defined(FA_TARGET_AVX512_BF16)
    for (int64_t r = 0; r < st_.rows; ++r) round_in_place(area_.q + r * area_.ldq, area_.ldq);
#elif defined(FA_TARGET_AMX)
    const bool parts = p_.q.dtype == Dtype::f16;
    parts ? tiles_.pack_query_parts(split_, area_) : tiles_.pack_queries(split_, area_);
#endif
    FA_ISA::begin_segment(st_);
    clear_outputs(split_, area_, {0, split_.count});
    for (int64_t n = split_.keys.begin / kBlockKeys; n * kBlockKeys < split_.keys.end; ++n) {
      if (begin_keys(p_, head_, st_, strip_rows_, n * kBlockKeys) && !block(n * kBlockKeys)) return false;
    }
    return true;
  }

  // Row r, after `attend`.
  RowResult row_result(int64_t r) const {
    return {st_.max[r], Simd::reduce_add(Simd::load(st_.sum + r * kWidth)), area_.o + r * area_.ldo};
  }

 private:
  int64_t strips() const { return (st_.rows + strip_rows_ - 1) / strip_rows_; }
  int64_t strip_of_head(int64_t h) const { return h * split_.rows / strip_rows_; }

  // The block of keys that begins at key `first`; false where attend() is.
  bool block(int64_t first) {
#if defined(FA_TARGET_AMX)
    constexpr int64_t kWhole = kTileDepth;  // the unit sums up so many keys of O
#else
    constexpr int64_t kWhole = kNr;
#endif
    static_assert(kWhole % kNr == 0);
    Range cols{kBlockKeys, 0};
    for (int64_t strip = 0; strip < strips(); ++strip) {
      if (st_.keys[strip].empty()) continue;
      cols.begin = min64(cols.begin, st_.keys[strip].begin / kWhole * kWhole);
      cols.end = max64(cols.end, round_up(st_.keys[strip].end, kNr));
    }
    const Range keys{first + cols.begin, min64(first + cols.end, head_.keys.len)};
#if defined(FA_TARGET_AVX512_BF16)
    scores<PairChain>(first, keys);
#elif defined(FA_TARGET_AMX)
    const bool parts = p_.q.dtype == Dtype::f16;
    if (!(parts ? scores_by_tiles<true>(first, keys) : scores_by_tiles<false>(first, keys))) return false;
#else
    for_key_dtype(p_.k.dtype, [&]<class Element>() { scores<WidenedChain<Element> >(first, keys); });
#endif
    bool marked[kMaxStrips];
    for (int64_t strip = 0; strip < strips(); ++strip) {
      marked[strip] = !st_.keys[strip].empty() && softmax(strip, first);
    }
#if defined(FA_TARGET_AVX512_BF16)
    outputs_by_pairs(first, keys, marked);
#elif defined(FA_TARGET_AMX)
    if (parts) return outputs_of_parts(first, keys);
    outputs_like_tiles(first, keys, marked);
#else
    for_key_dtype(p_.v.dtype, [&]<class Element>() { outputs<Element>(first, keys, marked); });
#endif
    return true;
  }

  template <class Chain>
  void scores(int64_t first, Range keys) {
    const HeadRows rows = head_rows(p_, p_.k, head_, split_, keys), next = head_rows(p_, p_.v, head_, split_, keys);
    const Factors factors = factors_of(p_, p_.k_descale, head_.b, split_.first, head_.keys.start);
    const int64_t ldq = area_.ldq * Chain::kQueries, steps = (p_.head_dim + Chain::kColumns - 1) / Chain::kColumns;
    Ahead ahead(rows, next, steps);
    for_pieces(rows.rows, keys.begin, keys.end, [&](const KeyPiece &piece) {
      ahead.begin(piece);
      for (int64_t h = 0; h < split_.count; ++h) {
        float of_keys[kPieceKeys];
        if constexpr (Chain::kDescaled) factors_of_piece(factors, p_.k_descale, piece, h, of_keys);
        const auto *q = reinterpret_cast<const typename Chain::Query *>(area_.q) + h * split_.rows * ldq;
        float *s = area_.s + h * split_.rows * kBlockKeys + piece.first - first;
        for (int n = 0; n < piece.count; n += kWidth) {
          const int count = piece.count - n < kWidth ? piece.count - n : kWidth;
          const auto block = [&]<int ROWS>(int64_t r) __attribute__((always_inline)) {
            chain_block<Chain, ROWS>(piece.rows + n, count, h * rows.head_bytes, p_.head_dim,
                                     Chain::kDescaled ? of_keys + n : nullptr, q + r * ldq, ldq, split_.rows - r,
                                     s + r * kBlockKeys + n, kBlockKeys, ahead);
          };
          // Transposing takes longer than rows that nobody needs.
          int64_t r = 0;
          if constexpr (kMostBlockRows > 4) {
            if (split_.rows > 4) block.template operator()<kMostBlockRows>(0), r = kMostBlockRows;
          }
          for (; split_.rows - r > 1; r += 4) block.template operator()<4>(r);
          if (r < split_.rows) block.template operator()<1>(r);
        }
      }
    });
    ahead.finish();
  }

  // Logits, masks and P of a strip; returns whether masked P are marked.
  bool softmax(int64_t strip, int64_t block_first) {
    const bool general = changes_scores(p_, st_.user);
    const int64_t r0 = strip * strip_rows_, m = min64(st_.rows - r0, strip_rows_);
    const Range cols{st_.keys[strip].begin / kNr * kNr, round_up(st_.keys[strip].end, kNr)};
    const int64_t first = block_first + cols.begin, n = cols.size();
    float *s = area_.s + r0 * kBlockKeys + cols.begin;
    const bool by_band = st_.interior[strip].begin > first || st_.interior[strip].end < first + n;
    if (general) {
      general_scores(p_, head_, st_, r0, m, first, n, s);
    } else if (by_band) {
      mask_strip(p_, head_, st_, r0, m, first, n, s);
    }
    if (st_.partial[strip]) mask_by_data(st_, r0, m, cols.begin, n, s);
    row_maxima(st_, r0, m, n, s);
    const bool masked = general || by_band || st_.partial[strip];
    (masked ? softmax_strip<true, InPlace>
            : softmax_strip<false, InPlace>)(st_, r0, m, n, general ? 1.0f : p_.softmax_scale * kLog2e, s, InPlace{s});
    for (int64_t r = r0; r < r0 + m; ++r) {
      if (st_.correction[r] == 1.0f) continue;
      float *o = area_.o + r * area_.ldo;
      for (int64_t c = 0; c < area_.ldo; c += kWidth)
        Simd::store(o + c, Simd::mul(Simd::set(st_.correction[r]), Simd::load(o + c)));
    }
    return masked;
  }

  void factors_of_piece(const Factors &factors, const Descale &descale, const KeyPiece &piece, int64_t h, float *to) const {
    for (int n = 0; n < piece.count; ++n)
      to[n] = factors.at(piece.first + n, h * descale.factors.head_stride * int64_t{sizeof(float)});
  }

  // O += P V of the heads for which chosen(h).
  template <class Element, class Chosen>
  void outputs(int64_t first, Range keys, const bool *marked, Chosen chosen) {
    const HeadRows rows = head_rows(p_, p_.v, head_, split_, keys), next = head_rows(p_, p_.k, head_, split_, after(keys));
    const Factors factors = factors_of(p_, p_.v_descale, head_.b, split_.first, head_.keys.start);
    Ahead ahead(rows, next, blocks_of(split_.rows, kPieceKeys * p_.head_dim_v / kWidth / kKeysUnrolled, kMostBlockVectors));
    for_pieces(rows.rows, keys.begin, keys.end, [&](const KeyPiece &piece) {
      ahead.begin(piece);
      for (int64_t h = 0; h < split_.count; ++h) {
        const Range seen = seen_of(piece, first, h);
        if (seen.empty() || !chosen(h)) continue;
        bool masked[kVectorRows];
        for (int64_t r = 0; r < split_.rows; ++r) masked[r] = marked[strip_of_head(h)];
        const int count = static_cast<int>(seen.size());
        const float *w = area_.s + h * split_.rows * kBlockKeys + piece.first - first + seen.begin;
        float *o = area_.o + h * split_.rows * area_.ldo;
        if constexpr (Element::kQuantised) {
          // Values times their factors, which every row of the head multiplies.
          alignas(64) float scaled[kPieceKeys * kMaxHeadDimV];
          const char *at[kPieceKeys];
          float of_keys[kPieceKeys];
          factors_of_piece(factors, p_.v_descale, piece, h, of_keys);
          for (int n = 0; n < count; ++n) {
            const int64_t key = seen.begin + n;
            float *to = scaled + n * kMaxHeadDimV;
            const auto *from = reinterpret_cast<const typename Element::Type *>(piece.rows[key] + h * rows.head_bytes);
            for (int64_t c = 0; c < p_.head_dim_v; c += kWidth) {
              const int lanes = static_cast<int>(min64(p_.head_dim_v - c, kWidth));
              const F x = lanes == kWidth ? Element::load(from + c) : Element::load(from + c, lanes);
              Simd::store(to + c, Simd::mul(x, Simd::set(of_keys[key])));
            }
            at[n] = reinterpret_cast<const char *>(to);
          }
          add_values<ElementF32>(at, count, 0, 0, 1, p_.head_dim_v, split_.rows, w, kBlockKeys, o, area_.ldo, masked, ahead);
        } else {
          add_values<Element>(piece.rows + seen.begin, count, h * rows.head_bytes, 0, 1, p_.head_dim_v, split_.rows, w,
                              kBlockKeys, o, area_.ldo, masked, ahead);
        }
      }
    });
    ahead.finish();
  }
  template <class Element>
  void outputs(int64_t first, Range keys, const bool *marked) {
    outputs<Element>(first, keys, marked, [](int64_t) { return true; });
  }

  // Keys of the segment after `keys`.
  Range after(Range keys) const { return {keys.end, split_.keys.end}; }

  // Keys of the piece, relative to its first, that the strip of head h sees in the block that begins at key `first`.
  Range seen_of(const KeyPiece &piece, int64_t first, int64_t h) const {
    const Range &seen = st_.keys[strip_of_head(h)];
    return {max64(first + seen.begin - piece.first, 0), min64(first + seen.end - piece.first, piece.count)};
  }

#if defined(FA_TARGET_AVX512_BF16) || defined(FA_TARGET_AMX)
  // Rounds P of the heads whose products are of bf16, by round(p, keys); tells which the others are: a masked P must not meet a value that is not finite.
  // Returns whether there are such.
  template <class Round>
  bool round_p(int64_t first, const HeadRows &rows, const bool *marked, bool *as_floats, Round round) const {
    bool any = false;
    for (int64_t h = 0; h < split_.count; ++h) {
      const Range &seen = st_.keys[strip_of_head(h)];
      for (int64_t j = seen.begin; j < seen.end && marked[strip_of_head(h)] && !as_floats[h]; ++j)
        as_floats[h] = !magnitudes_of(rows.rows.row(first + j) + h * rows.head_bytes, p_.head_dim_v).finite();
      any = any || as_floats[h];
      for (int64_t r = h * split_.rows; r < (h + 1) * split_.rows && !as_floats[h] && !seen.empty(); ++r) {
        const int64_t begin = seen.begin / kNr * kNr;
        round(area_.s + r * kBlockKeys + begin, round_up(seen.end, kNr) - begin);
      }
    }
    return any;
  }
#endif
#if defined(FA_TARGET_AMX)
  // Returns whether all keys are finite, or are not asked: numbers of fp16 that are not have no parts.
  template <bool kInParts>
  bool scores_by_tiles(int64_t first, Range keys) {
    const HeadRows rows = head_rows(p_, p_.k, head_, split_, keys), next = head_rows(p_, p_.v, head_, split_, keys);
    Ahead ahead(rows, next, (p_.head_dim + kTileDepth - 1) / kTileDepth * (kInParts ? 4 : 1));
    Magnitudes seen;
    for_pieces(rows.rows, keys.begin, keys.end, [&](const KeyPiece &piece) {
      ahead.begin(piece);
      const bool even = !kInParts && are_tile_rows(piece, rows.row_bytes);
      for (int64_t h = 0; h < split_.count; ++h) {
        float *s = area_.s + h * split_.rows * kBlockKeys + piece.first - first;
        if constexpr (kInParts) {
          tiles_.scores_of_parts(piece, rows, p_.head_dim, h, split_.rows, s, kBlockKeys, seen, ahead);
        } else {
          tiles_.scores(piece, even, rows, h, split_.rows, s, kBlockKeys, ahead);
        }
      }
    });
    ahead.finish();
    return !kInParts || seen.finite_f16();
  }
  void outputs_like_tiles(int64_t first, Range keys, const bool *marked) {
    const HeadRows rows = head_rows(p_, p_.v, head_, split_, keys), next = head_rows(p_, p_.k, head_, split_, after(keys));
    bool as_floats[kVectorScratchRows] = {};
    const bool any = round_p(first, rows, marked, as_floats, SameBitsTiles::round);
    Ahead ahead(rows, next, max64(split_.rows * p_.head_dim_v / (8 * kWidth), 1), kTileDepth);
    {
      const SubnormalsAreZero mode;
      for (int64_t step = keys.begin; step < keys.end; step += kTileDepth) {
        const int64_t count = min64(keys.end - step, kTileDepth);
        const char *values[kTileDepth];
        for (int64_t n = 0; n < count; ++n) values[n] = rows.rows.row(step + n);
        ahead.begin(step, count);
        for (int64_t h = 0; h < split_.count; ++h) {
          const SeenOfStep seen = seen_of_step(first, step, count, h);
          if (seen.begin >= seen.end || as_floats[h]) continue;
          for_row_groups<4>(
              split_.rows, [&]<int ROWS>(int64_t r) __attribute__((always_inline)) {
                const int64_t row = h * split_.rows + r;
                add_tile_step<ROWS>(values, seen.begin, seen.end, h * rows.head_bytes, p_.head_dim_v,
                                    area_.s + row * kBlockKeys + step - first, kBlockKeys, area_.o + row * area_.ldo, area_.ldo,
                                    ahead);
              });
        }
      }
    }
    ahead.finish();
    if (any) outputs<ElementBf16>(first, keys, marked, [&](int64_t h) { return as_floats[h]; });
  }
  // The same of fp16; false if some value is not finite.
  bool outputs_of_parts(int64_t first, Range keys) {
    const HeadRows rows = head_rows(p_, p_.v, head_, split_, keys), next = head_rows(p_, p_.k, head_, split_, after(keys));
    Ahead ahead(rows, next, max64(split_.rows * p_.head_dim_v / (4 * kWidth), 1), kTileDepth);
    F probe = Simd::zero();
    for (int64_t h = 0; h < split_.count; ++h) {
      for_row_groups<4>(
          split_.rows, [&]<int ROWS>(int64_t r) __attribute__((always_inline)) {
            add_parts<ROWS>(first, keys, rows, h, h * split_.rows + r, probe, ahead);
          });
    }
    ahead.finish();
    return Simd::reduce_add(probe) == 0;
  }
  // O of ROWS rows of head h.
  template <int ROWS>
  void add_parts(int64_t first, Range keys, const HeadRows &rows, int64_t h, int64_t row, F &probe, Ahead &ahead) {
    alignas(64) float low[ROWS * kBlockKeys], high[ROWS * kBlockKeys];
    const float *p = area_.s + row * kBlockKeys;
    for (int64_t n = keys.begin - first; n < round_up(keys.end - first, 2 * kWidth); n += 2 * kWidth) {
      for (int64_t at = n; at < ROWS * kBlockKeys; at += kBlockKeys) {
        const F a = Simd::load(p + at), b = Simd::load(p + at + kWidth);
        alignas(64) uint32_t pairs[kWidth];
        Simd::istore(pairs, part_of<Part::kLow>(a, b));
        const auto *numbers = reinterpret_cast<const uint16_t *>(pairs);
        Simd::store(low + at, Simd::load_bf16(numbers));
        Simd::store(low + at + kWidth, Simd::load_bf16(numbers + kWidth));
        Simd::store(high + at, high_part(a));
        Simd::store(high + at + kWidth, high_part(b));
      }
    }
    constexpr int64_t kSteps = kBlockKeys / kTileDepth;
    const int64_t ldo = area_.ldo, of_step = ROWS * ldo, of_product = kSteps * of_step;
    float *const later = tiles_.later(2), *const o = area_.o + row * ldo;
    int64_t steps = 0;
    const SubnormalsAreZero mode;
    for (int64_t step = keys.begin; step < keys.end; step += kTileDepth) {
      const int64_t count = min64(keys.end - step, kTileDepth);
      const SeenOfStep seen = seen_of_step(first, step, count, h);
      if (h == 0 && row == 0) ahead.begin(step, count);
      if (seen.begin >= seen.end) continue;
      const char *values[kTileDepth];
      for (int64_t n = 0; n < count; ++n) values[n] = rows.rows.row(step + n);
      add_tile_step_of_parts<ROWS>(values, seen.begin, seen.end, h * rows.head_bytes, p_.head_dim_v, low + step - first,
                                   high + step - first, kBlockKeys, o, ldo, later + steps * of_step, of_product, probe, ahead);
      ++steps;
    }
    for (int64_t product = 0; product < 2; ++product) {
      for (int64_t step = 0; step < steps; ++step) {
        const float *from = later + product * of_product + step * of_step;
        for (int64_t r = 0; r < ROWS; ++r) {
          for (int64_t c = 0; c < p_.head_dim_v; c += kWidth)
            Simd::store(o + r * ldo + c, Simd::add(Simd::load(o + r * ldo + c), Simd::load(from + r * ldo + c)));
        }
      }
    }
  }
  // Of the values of a step of `count` keys, those that head h sees.
  struct SeenOfStep {
    int begin, end;
  };
  SeenOfStep seen_of_step(int64_t first, int64_t step, int64_t count, int64_t h) const {
    const Range &seen = st_.keys[strip_of_head(h)];
    return {static_cast<int>(max64(first + seen.begin - step, 0)), static_cast<int>(min64(first + seen.end - step, count))};
  }
#endif
#if defined(FA_TARGET_AVX512_BF16)
  void outputs_by_pairs(int64_t first, Range keys, const bool *marked) {
    const HeadRows rows = head_rows(p_, p_.v, head_, split_, keys), next = head_rows(p_, p_.k, head_, split_, after(keys));
    bool as_floats[kVectorScratchRows] = {};
    const bool any = round_p(first, rows, marked, as_floats, round_in_place);
    Ahead ahead(rows, next, blocks_of(split_.rows, kPieceKeys * p_.head_dim_v / (2 * kWidth), kMostBlockVectors));
    for_pieces(rows.rows, keys.begin, keys.end, [&](const KeyPiece &piece) {
      ahead.begin(piece);
      const auto begin_of = [&](int64_t h) { return st_.keys[strip_of_head(h)].begin / kNr * kNr; };
      const auto add = [&](const char *const *values, int64_t h, int64_t heads) {
        const int64_t begin = begin_of(h);
        const auto *p = reinterpret_cast<const uint32_t *>(area_.s + h * split_.rows * kBlockKeys + begin) +
                        (piece.first - first - begin) / 2;
        add_pair_rows(values, kPieceKeys / 2, 0, rows.head_bytes, heads, p_.head_dim_v, split_.rows, p, kBlockKeys,
                      area_.o + h * split_.rows * area_.ldo, area_.ldo, ahead);
      };
      bool alike = !any;  // all heads see all of the piece, and have P in the same columns
      for (int64_t h = 0; h < split_.count && alike; ++h)
        alike = seen_of(piece, first, h).size() == kPieceKeys && begin_of(h) == begin_of(0);
      if (alike) return add(piece.rows, 0, split_.count);
      for (int64_t h = 0; h < split_.count; ++h) {
        const Range seen = seen_of(piece, first, h);
        if (seen.empty() || as_floats[h]) continue;
        const PieceValues values(piece, static_cast<int>(seen.begin), static_cast<int>(seen.end), h * rows.head_bytes);
        add(values.rows, h, 1);
      }
    });
    ahead.finish();
    if (any) outputs<ElementBf16>(first, keys, marked, [&](int64_t h) { return as_floats[h]; });
  }
#endif

  const ForwardProblem &p_;
  const Head &head_;
  const VectorSplit &split_;
  int64_t strip_rows_ = 0;
  VectorArea area_;
  SoftmaxState st_;
  [[maybe_unused]] SameBitsTiles tiles_;
};

}  // namespace fa::cpu::FA_ISA
