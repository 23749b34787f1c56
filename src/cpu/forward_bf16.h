// SPDX-License-Identifier: Apache-2.0
// The products of forward on a unit that multiplies bf16 (cpu/bf16_unit.h): blocks of kTileBlockRows query rows against blocks of kBlockKeys
// keys, in passes of kTilePassStrips strips of kTileStripRows rows.
//
//   S = Q K^T   32 rows x 32 keys at a time. S is fp32
//   P           the softmax of all kernels (forward_softmax.h); P is rounded to bf16 into the tiles that the next product reads, and
//               the row sum takes it unrounded
//   O += P V    32 rows x 32 columns of sums stay in the unit over all keys of the block. O is kept as tiles of fp32; rows whose maximum
//               has grown are rescaled before
//
// On the tile unit plain bf16 goes through KV tiles of 64 keys instead (attend_overlapped), so that vectors work on one of them while the unit works
// on the next.
//
// Operands are bf16 queries, keys and values, or on the tile unit fp16 ones, which are sums of two parts (multiply_parts), as P is then. Keys and values of
// bytes are widened to bf16 beside bf16 queries, exactly. Descales multiply S; those of values multiply O, or where rows have them P.
//
// Some cases leave the unit, because it would get them wrong:
//   values that are not finite next to a masked P, where 0 * Inf would leak: accumulate_visible
//   subnormal bf16 numbers, which the unit takes for zero, next to numbers so large that the product matters: exact_scores. Subnormal
//   values or P need no such care, because their part of O is below what fp32 results promise
//   fp16 numbers that are not finite, which have no parts: accumulate_visible and exact_scores
#pragma once

#include "cpu/bf16_unit.h"
#include "cpu/forward_softmax.h"
#include "cpu/pack_tiles.h"

namespace fa::cpu::FA_ISA {

static_assert(kTileStripRows == 2 * kTileRows && kTileStripRows <= kMaxStripRows &&
              kTileBlockRows / kTileStripRows <= kMaxStrips);
static_assert(kTileBlockRows % (kTilePassStrips * kTileStripRows) == 0 && kBlockKeys % kTilePanel == 0 &&
              kTilePanel % kNr == 0);

constexpr int64_t kBlockSteps = kBlockKeys / kTileDepth;      // steps of P V
constexpr int64_t kValuePanel = kBlockSteps * 2 * kTileBf16;  // elements of a packed panel of values
constexpr int64_t kStripP = kTileStripRows * kBlockKeys;      // elements of a strip of P
constexpr int64_t kStripHalfP = kTileRows * kBlockKeys;       // of its upper half

// Keys of a KV tile, whose softmax vectors compute beside products on the tile unit, and the leading dimension of its S: rows lie in different
// sets of the cache.
constexpr int64_t kKvTileKeys = 64;
constexpr int64_t kKvTileStride = kKvTileKeys + 16;
constexpr int64_t kBlockKvTiles = kBlockKeys / kKvTileKeys;
static_assert(2 * kTileStripRows * kKvTileStride <= kTileStripRows * kBlockKeys);

// 2^x, for P that is rounded to bf16 and for its sums.
FA_INLINE F exp2_to_bf16(F x) {
#if defined(__AVX512F__)
  return Simd::rough_exp2(x);
#else
  return Simd::exp2(x);
#endif
}

// P V of a strip and a block of keys that is still to be added to O.
struct PendingOutput {
  int64_t r0 = 0, rows = 0;  // of the strip; no rows: nothing is pending
  Range steps;               // of 32 keys
  const uint16_t *p = nullptr, *values = nullptr;
};

// What `pack` finds in a key block.
enum KeyFlags : uint8_t { kInfiniteValues = 1, kSubnormalKeys = 2, kHugeKeys = 4, kInfiniteKeys = 8 };

// A block of queries, in a worker's scratch memory.
struct TileState : SoftmaxState {
  uint16_t *q = nullptr;   // (part): pack_left
  float *s = nullptr;      // rows of a pass x kBlockKeys: raw products, logits, P where it stays fp32
  uint16_t *p = nullptr;   // (strip of the pass, part, half, step): tiles of P
  float *o = nullptr;      // (half, 16 columns): tiles of O
  float *row = nullptr;    // dim_v
  int64_t dim_v = 0;       // multiple of kTilePanel
  uint8_t exact_with = 0;  // KeyFlags of blocks with pairs whose S the unit gets wrong
  bool exact = false;      // all blocks have such pairs
  PendingOutput pending;
  int64_t p_turn = 0;                                         // which of two strips of `p` comes next
  float k_descale = 1, v_descale = 1;                         // descales of the key head
  float k_descales[kBlockKeys], v_descales[kBlockKeys] = {};  // of the keys of the block, where rows have them

  // Where O of column c of row r lies; the columns of its tile follow.
  FA_INLINE float *output(int64_t r, int64_t c) const {
    return o + (r / kTileRows * (dim_v / kTileRows) + c / kTileRows) * kTileFloats + r % kTileRows * kTileRows + c % kTileRows;
  }
};

// Where softmax_strip puts P: into the tiles of a strip, rounded to bf16 or in two parts.
template <int kParts>
struct IntoTiles {
  uint16_t *p;
  int64_t first = 0;               // column 0 is this key of the block
  const float *factors = nullptr;  // of the keys of the block, which multiply P
  FA_INLINE void operator()(int64_t r, int64_t c, F w0, F w1) const {
    if (factors != nullptr) {
      w0 = Simd::mul(w0, Simd::load(factors + first + c));
      w1 = Simd::mul(w1, Simd::load(factors + first + c + kWidth));
    }
    const auto row = static_cast<uint64_t>(r), key = static_cast<uint64_t>(first + c);  // unsigned: quotients are shifts
    I parts[kParts];
    parts_of(w0, w1, parts);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      store_left(p + part * kStripP + row / kTileRows * kStripHalfP + key / kTileDepth * kTileBf16, row % kTileRows,
                 key % kTileDepth, parts[part]);
    }
  }
};

// Element is ElementBf16, or with the tile unit ElementF16.
template <class Element, class Unit = Bf16Unit>
class TileProducts {
 public:
  using State = TileState;
  static constexpr int64_t kStripRows = kTileStripRows;

  TileProducts(const ForwardProblem &problem, const ForwardLayout &layout)
      : p_(problem),
        layout_(layout),
        steps_(round_up(problem.head_dim, kTileDepth) / kTileDepth),
        overlaps_(!problem.same_bits && problem.dropout.threshold == 0 && problem.max_logit == nullptr &&
                  !problem.v_descale.per_row) {}

  // Packs key block n; returns its KeyFlags.
  uint8_t pack(const Head &head, int64_t n, char *keys, char *values) const {
    const int64_t begin = n * kBlockKeys, end = min64(begin + kBlockKeys, head.keys.len);
    const Rows k_rows = key_rows(head), v_rows = value_rows(head);
    if (is_quantised(p_.k.dtype)) {
      auto *const key_tiles = reinterpret_cast<uint16_t *>(keys), *const value_tiles = reinterpret_cast<uint16_t *>(values);
      const Magnitudes k =
          pack_widened(p_.k.dtype, k_rows, begin, end, p_.head_dim, [&](const Rows &rows, int64_t count, int64_t at) {
            return pack_key_tiles<Magnitudes>(rows, 0, count, p_.head_dim, key_tiles + at * steps_ * kTileDepth);
          });
      const Magnitudes v =
          pack_widened(p_.v.dtype, v_rows, begin, end, p_.head_dim_v, [&](const Rows &rows, int64_t count, int64_t at) {
            return pack_value_tiles<Magnitudes>(rows, 0, count, p_.head_dim_v, kValuePanel,
                                                value_tiles + at / kTileDepth * kRightStep);
          });
      return static_cast<uint8_t>(number_flags(k) | (v.finite() ? 0 : kInfiniteValues));
    }
    const Magnitudes k = pack_parts<Element>(
        reinterpret_cast<uint16_t *>(keys), key_elements(),
        [&]<class Seen, class What>(uint16_t *to) { return pack_key_tiles<Seen, What>(k_rows, begin, end, p_.head_dim, to); });
    const Magnitudes v =
        pack_parts<Element>(reinterpret_cast<uint16_t *>(values), value_elements(), [&]<class Seen, class What>(uint16_t *to) {
          return pack_value_tiles<Seen, kRowsAhead, What>(v_rows, begin, end, p_.head_dim_v, kValuePanel, to);
        });
    const bool finite = kParts == 1 ? v.finite() : v.finite_f16();
    return static_cast<uint8_t>(number_flags(k) | (finite ? 0 : kInfiniteValues));
  }

  State begin(char *scratch, const MaskMemory &masks, const Head &head, const QueryBlock &block) const {
    State st;
    const auto take = [&](size_t bytes) {
      char *area = scratch;
      scratch += bytes;
      return reinterpret_cast<float *>(area);
    };
    st.q = reinterpret_cast<uint16_t *>(take(layout_.worker_queries));
    st.s = take(layout_.worker_scores);
    st.o = take(layout_.worker_output);
    st.dropout = take(layout_.worker_dropout);
    begin_softmax(p_, head, block, kTileStripRows, masks, take(layout_.worker_rows), st);
    st.row = take(layout_.worker_p);
    st.dim_v = layout_.dim_v;
    st.p = reinterpret_cast<uint16_t *>(st.row + st.dim_v);
    const Magnitudes seen = pack_parts<Element>(st.q, query_elements(st), [&]<class Seen, class What>(uint16_t *to) {
      return pack_left<Seen, kRowsAhead, What>(
          st.rows, p_.head_dim, [&](int64_t r) { return query_row(head, st, r); }, to);
    });
    const uint8_t flags = number_flags(seen);
    st.exact = (flags & kInfiniteKeys) != 0;
    st.exact_with = wrong_with(flags);
    st.k_descale = head_descale(head, p_.k_descale);
    st.v_descale = head_descale(head, p_.v_descale);
    return st;
  }

  void begin_segment(State &st) const {
    FA_ISA::begin_segment(st);
    const int64_t floats = round_up(st.rows, kTileStripRows) * st.dim_v;
    for (int64_t i = 0; i < floats; i += kWidth) Simd::store(st.o + i, Simd::zero());
  }

  // Key block n, as `pack` left it, after begin_keys. The first block of every segment comes after begin_segment.
  void attend(const Head &head, State &st, int64_t n, const char *keys, const char *values, uint8_t flags) {
    find_descales(head, n, p_.k_descale, st.k_descales);
    if (!find_descales(head, n, p_.v_descale, st.v_descales)) flags |= kInfiniteValues;
    if constexpr (kOverlaps) {
      if (overlaps_ && (flags & kInfiniteValues) == 0) {
        attend_overlapped(head, st, n * kBlockKeys, reinterpret_cast<const uint16_t *>(keys),
                          reinterpret_cast<const uint16_t *>(values), flags);
        return;
      }
      finish(st);
    }
    constexpr int64_t kPassRows = kTilePassStrips * kTileStripRows;
    for (int64_t r0 = 0; r0 < st.rows; r0 += kPassRows) {
      pass(head, st, r0, n * kBlockKeys, reinterpret_cast<const uint16_t *>(keys), reinterpret_cast<const uint16_t *>(values),
           flags);
    }
  }

  // Key block n, for a block of queries that shares it with no other. `keys` and `values` are scratch of a packed block.
  void attend_alone(const Head &head, State &st, int64_t n, char *keys, char *values) {
    attend(head, st, n, keys, values, pack(head, n, keys, values));
    finish(st);
  }

  // Comes before row_result.
  void finish(State &st) {
    if constexpr (kOverlaps) {
      add_pending(st, {0, st.dim_v / kTilePanel}, [] {});
      st.pending.rows = 0;
    }
  }

  // The state of row r as a result, until the next one is asked for.
  RowResult row_result(const State &st, int64_t r) const {
    const F factor = Simd::set(st.v_descale);
    for (int64_t c = 0; c < st.dim_v; c += kWidth) Simd::store(st.row + c, Simd::mul(factor, Simd::load(st.output(r, c))));
    return {st.max[r], Simd::reduce_add(Simd::load(st.sum + r * kWidth)), st.row};
  }

 private:
  static constexpr int kParts = kPartsOf<Element>;
#if defined(FA_TARGET_AMX)
  static constexpr bool kOverlaps = kParts == 1;
#else
  static constexpr bool kOverlaps = false;
#endif

  // One strip of the pass in one key block.
  struct Strip {
    int64_t index = 0;  // in the block of queries
    int64_t r0 = 0;     // its first row
    int64_t rows = 0;
    Range keys, cols;  // what it works on, relative to the block; `cols` is rounded outwards to panels
    float *s = nullptr;
    uint16_t *p = nullptr;
    bool visible_only = false;
  };

  // Elements of one part of what is packed.
  int64_t query_elements(const State &st) const { return round_up(st.rows, kTileStripRows) * steps_ * kTileDepth; }
  int64_t key_elements() const { return kBlockKeys * steps_ * kTileDepth; }
  int64_t value_elements() const { return kBlockKeys * layout_.dim_v; }

  Rows key_rows(const Head &head) const { return key_rows_of(p_, p_.k, head.b, head.head_k, head.keys.start); }
  Rows value_rows(const Head &head) const { return key_rows_of(p_, p_.v, head.b, head.head_k, head.keys.start); }
  // Descales of the rows of block n, if rows have them, and zero behind the last one. Returns whether they are finite.
  bool find_descales(const Head &head, int64_t n, const Descale &descale, float (&to)[kBlockKeys]) const {
    if (!is_quantised(p_.k.dtype) || !descale.per_row) return true;
    const Factors factors = factors_of(p_, descale, head.b, head.head_k, head.keys.start);
    const int64_t first = n * kBlockKeys, count = min64(head.keys.len - first, kBlockKeys);
    float zero = 0.0f;  // or NaN
    for (int64_t j = 0; j < kBlockKeys; ++j) {
      to[j] = j < count ? factors.at(first + j) : 0.0f;
      zero += to[j] * 0.0f;
    }
    return zero == 0.0f;
  }
  bool scales_p() const { return is_quantised(p_.v.dtype) && p_.v_descale.per_row; }
  // The descale of a head, which multiplies S or O: 1 if there is none, or rows have them.
  float head_descale(const Head &head, const Descale &descale) const {
    const bool given = is_quantised(p_.k.dtype) && !descale.per_row;
    return given ? factors_of(p_, descale, head.b, head.head_k, 0).at(0) : 1.0f;
  }
  // Whether the descale of keys is a factor of the exponent: one that keeps the order of scores, and is far from what fp32 holds.
  static bool is_factor(const State &st, bool general) { return !general && st.k_descale > 0x1p-64f && st.k_descale < 0x1p64f; }
  // Base-2 logit per unit of S.
  float multiplier(const State &st, bool general) const {
    if (general) return 1.0f;
    return p_.softmax_scale * kLog2e * (is_factor(st, general) ? st.k_descale : 1.0f);
  }
  // S of a strip and the keys `cols` of the block, times the descales of keys that are no factor of the exponent.
  FA_INLINE void scale_scores(const State &st, bool general, int64_t rows, Range cols, float *s, int64_t ld) const {
    const bool by_key = is_quantised(p_.k.dtype) && p_.k_descale.per_row;
    if (!by_key && (st.k_descale == 1.0f || is_factor(st, general))) return;
    for (int64_t c = 0; c < cols.size(); c += kWidth) {
      const F factor = by_key ? Simd::load(st.k_descales + cols.begin + c) : Simd::set(st.k_descale);
      for (float *x = s + c; x < s + c + rows * ld; x += ld) Simd::store(x, Simd::mul(factor, Simd::load(x)));
    }
  }
  const char *query_row(const Head &head, const State &st, int64_t r) const {
    return rows_of(p_.q, head.b, head.head_k * p_.group + st.block.head(r), head.queries.start).row(st.block.query(r));
  }

  void pass(const Head &head, State &st, int64_t pass_row, int64_t first, const uint16_t *keys, const uint16_t *values,
            uint8_t flags) {
    Strip strips[kTilePassStrips];
    int64_t count = 0;
    Range all{kBlockKeys, 0};
    for (int64_t r0 = pass_row; r0 < min64(st.rows, pass_row + kTilePassStrips * kTileStripRows); r0 += kTileStripRows) {
      Strip x;
      x.index = r0 / kTileStripRows;
      x.r0 = r0;
      x.rows = min64(st.rows - r0, kTileStripRows);
      x.keys = st.keys[x.index];
      if (x.keys.empty()) continue;
      x.cols = {x.keys.begin / kTilePanel * kTilePanel, round_up(x.keys.end, kTilePanel)};
      x.s = st.s + (r0 - pass_row) * kBlockKeys;
      x.p = st.p + (r0 - pass_row) / kTileStripRows * kParts * kStripP;
      all = {min64(all.begin, x.cols.begin), max64(all.end, x.cols.end)};
      strips[count++] = x;
    }

    for (int64_t col = all.begin; col < all.end; col += kTilePanel) {
      const uint16_t *panel = keys + col * steps_ * kTileDepth;
      for (int64_t i = 0; i < count; ++i) {
        const Strip &x = strips[i];
        if (col < x.cols.begin || col >= x.cols.end) continue;
        const uint16_t *q = st.q + x.index * steps_ * 2 * kTileBf16;
        multiply_parts<false, kParts>(unit_, x.rows, steps_, {{q, kTileBf16, kRightStep}, query_elements(st)},
                                      {panel, key_elements()}, {x.s + col, kBlockKeys, kTileRows, kTileRows * kBlockKeys});
      }
    }
    if (st.exact || (flags & st.exact_with) != 0) {
      for (int64_t i = 0; i < count; ++i) {
        const Strip &x = strips[i];
        exact_scores(head, st, x, first, x.cols, x.s + x.cols.begin, kBlockKeys);
      }
    }
    for (int64_t i = 0; i < count; ++i) softmax(head, st, strips[i], first, flags);
    for (int64_t i = 0; i < count; ++i) accumulate(head, st, strips[i], first, values);
  }

  // KeyFlags of some keys, or of queries.
  static uint8_t number_flags(const Magnitudes &x) {
    if constexpr (kParts == 2) return x.finite_f16() ? 0 : kInfiniteKeys;
    return static_cast<uint8_t>((x.subnormal() ? kSubnormalKeys : 0) | (x.huge() ? kHugeKeys : 0));
  }
  // KeyFlags of the keys with which the unit gets S of such queries wrong.
  static uint8_t wrong_with(uint8_t queries) {
    if constexpr (kParts == 2) return kInfiniteKeys;
    return static_cast<uint8_t>((queries & kSubnormalKeys ? kHugeKeys : 0) | (queries & kHugeKeys ? kSubnormalKeys : 0));
  }

  // S in fp32 of those pairs of a strip that the unit got wrong. A pair is chosen by its own numbers alone, so that a row has the same bits whatever
  // the other rows and the keys that it does not see are.
  // s: columns `cols`, of leading dimension ld.
  __attribute__((noinline)) void exact_scores(const Head &head, const State &st, const Strip &x, int64_t first, Range cols,
                                              float *s, int64_t ld) const {
    const Rows rows = key_rows(head);
    uint16_t wide[kMaxHeadDim];
    // Key j as packed, where exact_products finds it under any number.
    const auto key = [&](int64_t j) {
      Rows one;
      one.data = rows.row(j);
      if (!is_quantised(p_.k.dtype)) return one;
      widen_row(p_.k.dtype, one.data, p_.head_dim, wide);
      one.data = reinterpret_cast<const char *>(wide);
      return one;
    };
    uint8_t of_keys[kBlockKeys] = {};
    for (int64_t j = cols.begin; j < min64(cols.end, head.keys.len - first); ++j)
      of_keys[j] = number_flags(magnitudes_of(key(first + j).data, p_.head_dim));
    for (int64_t r = 0; r < x.rows; ++r) {
      const char *query = query_row(head, st, x.r0 + r);
      const uint8_t of_query = number_flags(magnitudes_of(query, p_.head_dim)), with = wrong_with(of_query);
      const bool always = (of_query & kInfiniteKeys) != 0;
      const auto numbers = numbers_of<Element>(p_.head_dim, [&](int64_t) { return query; });
      for (int64_t j = cols.begin; j < cols.end; ++j) {
        if (!always && (of_keys[j] & with) == 0) continue;
        const bool exists = first + j < head.keys.len;
        exact_products<Element>(numbers, 1, exists ? key(first + j) : Rows{}, 0, exists ? 1 : 0, {0, 1}, p_.head_dim,
                                s + r * ld + j - cols.begin, ld);
      }
    }
  }

  // Logits, masks and P of a strip.
  void softmax(const Head &head, State &st, Strip &x, int64_t block_first, uint8_t flags) const {
    const bool general = changes_scores(p_, st.user), partial = st.partial[x.index];
    const int64_t first = block_first + x.cols.begin, n = x.cols.size();
    float *s = x.s + x.cols.begin;
    scale_scores(st, general, x.rows, x.cols, s, kBlockKeys);
    const bool by_band = st.interior[x.index].begin > first || st.interior[x.index].end < first + n;
    const bool masked = general || partial || by_band;
    if (general) {
      general_scores(p_, head, st, x.r0, x.rows, first, n, s);
    } else if (by_band) {
      mask_borders(head, st, x, block_first);
    }
    if (partial) mask_by_data(st, x.r0, x.rows, x.cols.begin, n, s);
    row_maxima(st, x.r0, x.rows, n, s);
    const float multiplier = this->multiplier(st, general);
    const IntoTiles<kParts> into_tiles{x.p, x.cols.begin, scales_p() ? st.v_descales : nullptr};
    x.visible_only = (masked || kParts == 2) && (flags & kInfiniteValues) != 0;
    if (x.visible_only) {
      softmax_strip<true>(st, x.r0, x.rows, n, multiplier, s, InPlace{s});
      if (p_.dropout.threshold > 0) apply_dropout(p_, head, st, x.r0, x.rows, first, n, s);
    } else if (p_.dropout.threshold > 0) {
      softmax_strip<false>(st, x.r0, x.rows, n, multiplier, s, InPlace{s});
      apply_dropout(p_, head, st, x.r0, x.rows, first, n, s);
      for (int64_t r = 0; r < x.rows; ++r) {
        const float *row = s + r * kBlockKeys;
        for (int64_t c = 0; c < n; c += kNr) into_tiles(r, c, Simd::load(row + c), Simd::load(row + c + kWidth));
      }
    } else {
      softmax_strip<false>(st, x.r0, x.rows, n, multiplier, s, into_tiles);
    }
  }

  // Masks the keys of a strip that only some of its rows see: those before and after its interior, in whole panels.
  void mask_borders(const Head &head, const State &st, const Strip &x, int64_t block_first) const {
    const Range interior{st.interior[x.index].begin - block_first, st.interior[x.index].end - block_first};
    const auto mask = [&](int64_t begin, int64_t end) {
      if (begin < end) mask_strip(p_, head, st, x.r0, x.rows, block_first + begin, end - begin, x.s + begin);
    };
    const int64_t before = min64(round_up(max64(interior.begin, x.cols.begin), kTilePanel), x.cols.end);
    mask(x.cols.begin, before);
    mask(max64(before, min64(interior.end, x.cols.end) / kTilePanel * kTilePanel), x.cols.end);
  }

  // O = diag(correction) O + P V of a strip.
  void accumulate(const Head &head, State &st, const Strip &x, int64_t first, const uint16_t *values) {
    if (x.visible_only) {
      const Rows rows = value_rows(head);
      accumulate_visible(
          x.rows, x.keys, x.s, st.correction + x.r0, round_up(p_.head_dim_v, kWidth),
          [&](int64_t r, int64_t c) { return st.output(x.r0 + r, c); },
          [&](int64_t j, int64_t c) {
            const char *row = rows.row(first + j);
            const int n = static_cast<int>(min64(p_.head_dim_v - c, kWidth));
            const auto load = [&]<class Number>() {
              const auto *numbers = reinterpret_cast<const typename Number::Type *>(row) + c;
              return n == kWidth ? Number::load(numbers) : Number::load(numbers, n);
            };
            if (!is_quantised(p_.v.dtype)) return load.template operator()<Element>();
            const F x =
                p_.v.dtype == Dtype::e4m3 ? load.template operator()<ElementE4m3>() : load.template operator()<ElementI8>();
            return scales_p() ? Simd::mul(x, Simd::set(st.v_descales[j])) : x;
          });
      return;
    }
    correct(st, x);
    const Range steps{x.cols.begin / kTileDepth, x.cols.end / kTileDepth};
    const uint16_t *p = x.p + steps.begin * kTileBf16;
    const int64_t lower = st.output(x.r0 + kTileRows, 0) - st.output(x.r0, 0);
    values += steps.begin * kRightStep;
    for (int64_t c = 0; c < st.dim_v; c += kTilePanel, values += kValuePanel) {
      multiply_parts<true, kParts>(unit_, x.rows, steps.size(), {{p, kStripHalfP, kTileBf16}, kStripP},
                                   {values, value_elements()}, {st.output(x.r0, c), kTileRows, kTileFloats, lower});
    }
  }

  // O = diag(correction) O of a strip.
  static void correct(const State &st, const Strip &x) {
    for (int64_t r = x.r0; r < x.r0 + x.rows; ++r) {
      if (st.correction[r] == 1.0f) continue;
      const F factor = Simd::set(st.correction[r]);
      for (int64_t c = 0; c < st.dim_v; c += kWidth) {
        Simd::store(st.output(r, c), Simd::mul(factor, Simd::load(st.output(r, c))));
      }
    }
  }

  // The part of a strip in one KV tile.
  struct KvTile {
    int64_t strip;
    Range cols;  // relative to the block
    bool first, last;
  };
  // What its softmax reads and writes.
  struct KvTileRows {
    const float *s;
    int64_t rows;
    const float *max;  // (rows)
    float *sum;        // (rows x kWidth) before the KV tile
    float *new_sum;    // and after it: a row may be computed twice
    uint16_t *p;       // of the strip
    int64_t panel;     // the first one, relative to the block
    float multiplier;
  };

  // The largest P of a row in a KV tile, as a number of bf16: where one is larger, the maximum of the row grows.
  static constexpr uint32_t kLargestP = 0x4380;  // 2^8
  static bool any_above(I p) {
    const I largest = Simd::iset(kLargestP);
    return Simd::any(
        Simd::mask_or(Simd::ilt(largest, Simd::iand(p, Simd::iset(0xFFFF))), Simd::ilt(largest, Simd::shr<16>(p))));
  }

  template <int kPanels>
  static FA_INLINE void kv_tile_row(const KvTileRows &x, int64_t r, I &worst) {
    const float *s = x.s + r * kKvTileStride;
    const F minus = Simd::set(x.max[r]), scale = Simd::set(x.multiplier);
    uint16_t *const tile = x.p + r / kTileRows * kStripHalfP + x.panel * kTileBf16;
    F total = Simd::load(x.sum + r * kWidth);
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel) {
      F of_panel = Simd::zero();
#pragma GCC unroll 4
      for (int64_t i = 0; i < kTilePanel; i += 2 * kWidth) {
        const float *from = s + panel * kTilePanel + i;
        const F w0 = exp2_to_bf16(Simd::fms(Simd::load(from), scale, minus));
        const F w1 = exp2_to_bf16(Simd::fms(Simd::load(from + kWidth), scale, minus));
        const I p = Simd::to_bf16(w0, w1);
        worst = Simd::max_u16(worst, p);
        store_left(tile + panel * kTileBf16, r % kTileRows, i, p);
        of_panel = i == 0 ? Simd::add(w0, w1) : Simd::add(of_panel, Simd::add(w0, w1));
      }
      total = Simd::add(total, of_panel);
    }
    Simd::store(x.new_sum + r * kWidth, total);
  }

  // The largest base-2 logit of a row in a KV tile; NaN does not count.
  template <int kPanels>
  static FA_INLINE float largest(const KvTileRows &rows, int64_t r) {
    F top0 = Simd::set(-kInfinity), top1 = top0;
#pragma GCC unroll 16
    for (int64_t c = 0; c < kPanels * kTilePanel; c += 2 * kWidth) {
      top0 = Simd::max(Simd::load(rows.s + r * kKvTileStride + c), top0);
      top1 = Simd::max(Simd::load(rows.s + r * kKvTileStride + c + kWidth), top1);
    }
    return Simd::reduce_max(Simd::max(top0, top1)) * rows.multiplier;
  }

  // The first maxima of the rows of a strip.
  template <int kPanels>
  static __attribute__((noinline)) void first_maxima(State &st, const Strip &x, const KvTileRows &rows) {
    for (int64_t r = 0; r < rows.rows; ++r) {
      if (st.max[x.r0 + r] == -kInfinity) st.max[x.r0 + r] = largest<kPanels>(rows, r);
    }
  }

  // The rows of a KV tile once more, after the maxima of those have grown whose P are too large.
  template <int kPanels>
  static __attribute__((noinline)) void raise(State &st, const Strip &x, const KvTileRows &rows, int64_t first_panel) {
    for (int64_t r = 0; r < rows.rows; ++r) {
      I worst = Simd::iset(0);
      kv_tile_row<kPanels>(rows, r, worst);
      if (!any_above(worst)) continue;
      const float top = largest<kPanels>(rows, r);
      float &max = st.max[x.r0 + r];
      if (max == -kInfinity) {
        max = top;
        if (top == -kInfinity) {  // the row sees nothing, or NaN alone
          max = 0;
          kv_tile_row<kPanels>(rows, r, worst);
          max = top;
          continue;
        }
      } else {
        const float growth = top - max;
        if (!(growth > 0)) continue;  // NaN
        // Of the key with the largest logit P is 1 then, to the bit.
        float factors[kWidth];
        Simd::store(factors, Simd::exp2(Simd::set(-growth)));
        const F factor = Simd::set(factors[0]);
        max = top;
        st.correction[x.r0 + r] *= factors[0];
        float *const before = rows.sum + r * kWidth;
        Simd::store(before, Simd::mul(Simd::load(before), factor));
        for (int64_t panel = first_panel; panel < rows.panel; ++panel) {
          uint16_t *const tile = rows.p + r / kTileRows * kStripHalfP + panel * kTileBf16;
          for (int64_t i = 0; i < kTilePanel; i += 2 * kWidth) {
            uint16_t *const p = tile + left_at(r % kTileRows, i);
            store_left(tile, r % kTileRows, i,
                       Simd::to_bf16(Simd::mul(Simd::load_bf16(p), factor), Simd::mul(Simd::load_bf16(p + kWidth), factor)));
          }
        }
      }
      kv_tile_row<kPanels>(rows, r, worst);
    }
  }

  template <class Between>
  FA_INLINE void add_pending(State &st, Range panels, Between between) {
    const PendingOutput &o = st.pending;
    if (o.rows == 0) return;
    const int64_t lower = st.output(o.r0 + kTileRows, 0) - st.output(o.r0, 0);
    const uint16_t *p = o.p + o.steps.begin * kTileBf16;
    for (int64_t n = panels.begin; n < panels.end; ++n) {
      unit_.template multiply_beside<true>(o.rows, o.steps.size(), {p, kStripHalfP, kTileBf16},
                                           o.values + n * kValuePanel + o.steps.begin * kRightStep,
                                           {st.output(o.r0, n * kTilePanel), kTileRows, kTileFloats, lower}, between);
    }
  }

  // The same as passes of two strips, but for the maxima of rows: these grow only where a P of the 64 keys of a KV tile would exceed 2^8, which
  // is rare. So a KV tile has its P as soon as it has its S, which never leaves L1. While vectors compute P of a KV tile, the unit computes S of the
  // next one and P V of the strip before.
  void attend_overlapped(const Head &head, State &st, int64_t first, const uint16_t *keys, const uint16_t *values,
                         uint8_t flags) {
    Strip strips[kMaxStrips];
    KvTile kv_tiles[kMaxStrips * kBlockKvTiles];
    int64_t count = 0;
    for (int64_t r0 = 0, i = 0; r0 < st.rows; r0 += kTileStripRows, ++i) {
      Strip &x = strips[i];
      x.index = i;
      x.r0 = r0;
      x.rows = min64(st.rows - r0, kTileStripRows);
      x.keys = st.keys[i];
      if (x.keys.empty()) continue;
      x.cols = {x.keys.begin / kTilePanel * kTilePanel, round_up(x.keys.end, kTilePanel)};
      for (int64_t c = x.cols.begin / kKvTileKeys * kKvTileKeys; c < x.cols.end; c += kKvTileKeys) {
        const Range cols{max64(c, x.cols.begin), min64(c + kKvTileKeys, x.cols.end)};
        kv_tiles[count++] = {i, cols, cols.begin == x.cols.begin, cols.end == x.cols.end};
      }
    }
    if (count == 0) return;
    const bool general = changes_scores(p_, st.user), exact = st.exact || (flags & st.exact_with) != 0;
    const auto buffer = [&](int64_t n) { return st.s + n % 2 * (kTileStripRows * kKvTileStride); };
    const auto scores = [&](int64_t n, auto between) __attribute__((always_inline)) {
      const KvTile &c = kv_tiles[n];
      const uint16_t *q = st.q + c.strip * steps_ * 2 * kTileBf16;
      for (int64_t col = c.cols.begin; col < c.cols.end; col += kTilePanel) {
        unit_.template multiply_beside<false>(
            strips[c.strip].rows, steps_, {q, kTileBf16, kRightStep}, keys + col * steps_ * kTileDepth,
            {buffer(n) + col - c.cols.begin, kKvTileStride, kTileRows, kTileRows * kKvTileStride}, between);
      }
    };
    scores(0, [] {});
    KvTileRows rows{};
    rows.multiplier = multiplier(st, general);
    Range output{0, 0};  // panels of the pending output beside this KV tile
    const int64_t output_panels = st.dim_v / kTilePanel;
    int64_t tile_of_strip = 0, tiles_of_strip = 0;
    for (int64_t n = 0; n < count; ++n) {
      const KvTile &c = kv_tiles[n];
      Strip &x = strips[c.strip];
      float *s = buffer(n);
      if (c.first) {
        for (int64_t r = x.r0; r < x.r0 + x.rows; ++r) st.correction[r] = 1.0f;
        rows.rows = x.rows;
        rows.max = st.max + x.r0;
        rows.sum = st.sum + x.r0 * kWidth;
        rows.new_sum = st.block_max + x.r0 * kWidth;
        rows.p = x.p = st.p + st.p_turn * kStripP;
        tile_of_strip = 0;
        tiles_of_strip = (x.cols.end - 1) / kKvTileKeys - x.cols.begin / kKvTileKeys + 1;
        output.end = 0;
      }
      rows.s = s;
      rows.panel = c.cols.begin / kTilePanel;
      if (exact) exact_scores(head, st, x, first, c.cols, s, kKvTileStride);
      scale_scores(st, general, x.rows, c.cols, s, kKvTileStride);
      if (general) {
        general_scores(p_, head, st, x.r0, x.rows, first + c.cols.begin, c.cols.size(), s, kKvTileStride);
      } else if (st.interior[x.index].begin > first + c.cols.begin || st.interior[x.index].end < first + c.cols.end) {
        mask_strip(p_, head, st, x.r0, x.rows, first + c.cols.begin, c.cols.size(), s, kKvTileStride);
      }
      if (st.partial[x.index]) mask_by_data(st, x.r0, x.rows, c.cols.begin, c.cols.size(), s, kKvTileStride);

      ++tile_of_strip;
      output = {output.end, output_panels * tile_of_strip / tiles_of_strip};
      const int64_t steps = (n + 1 < count ? kv_tiles[n + 1].cols.size() / kTilePanel * steps_ : 0) +
                            (st.pending.rows > 0 ? output.size() * st.pending.steps.size() : 0);
      const auto softmax = [&]<int kPanels>() __attribute__((always_inline)) {
        I worst = Simd::iset(0);
        int64_t r = 0, turn = 0;
        // Spreads the rows over the steps.
        const auto between = [&]() __attribute__((always_inline)) {
          for (turn += rows.rows; turn >= steps; turn -= steps) kv_tile_row<kPanels>(rows, r++, worst);
        };
        if (c.first && st.max[x.r0] == -kInfinity) first_maxima<kPanels>(st, x, rows);
        if (n + 1 < count) scores(n + 1, between);
        add_pending(st, output, between);
        for (; r < rows.rows; ++r) kv_tile_row<kPanels>(rows, r, worst);
        if (__builtin_expect(any_above(worst), 0)) raise<kPanels>(st, x, rows, x.cols.begin / kTilePanel);
      };
      c.cols.size() == kKvTileKeys ? softmax.template operator()<2>() : softmax.template operator()<1>();

      float *const before = rows.sum;
      rows.sum = rows.new_sum;
      rows.new_sum = before;
      if (!c.last) continue;
      if (rows.sum != st.sum + x.r0 * kWidth) {
        for (int64_t i = 0; i < x.rows * kWidth; i += kWidth) Simd::store(rows.new_sum + i, Simd::load(rows.sum + i));
      }
      correct(st, x);
      st.pending = {x.r0, x.rows, {x.cols.begin / kTileDepth, x.cols.end / kTileDepth}, x.p, values};
      st.p_turn ^= 1;
    }
  }

  const ForwardProblem &p_;
  const ForwardLayout &layout_;
  const int64_t steps_;  // of Q K^T
  const bool overlaps_;
  Unit unit_;
};

}  // namespace fa::cpu::FA_ISA
