// SPDX-License-Identifier: Apache-2.0
// The tiled forward kernel: one block of queries against one block of keys.
//
//   S = Q K^T            by panels of kNr keys; a panel stays in L1 while the strips of the block pass over it. The band mask and
//                        the row maxima are taken from the accumulators, before S is stored
//   P = exp2(S - max)    in place, strip by strip; row sums are kept as vectors
//   O = diag(c) O + P V  by panels of values; the correction of the old output for a new maximum rides on loading the accumulators
//
// A strip (kMr rows) works only on the keys that at least one of its rows sees, so a causal diagonal costs half a strip, not half a
// block.
#pragma once

#include <algorithm>

#include "cpu/forward_state.h"

namespace fa::cpu::FA_ISA {

constexpr int64_t kMaxStrips = (kBlockRows + kMr - 1) / kMr;
static_assert(kBlockRows % kMr == 0 && kBlockKeys % kNr == 0);

// Packed keys and values of one key block.
struct KeyBlock {
  int64_t first = 0;              // its first key
  const float *keys = nullptr;    // K^T panels, (head_dim x kNr) each
  const float *values = nullptr;  // value panels, (kBlockKeys x kNr) each
  bool finite = true;             // every value is
};

// The online softmax of one block of queries, in a worker's scratch memory.
struct BlockState {
  QueryBlock block;
  int64_t rows = 0;
  int64_t dim_v = 0;
  float *q = nullptr;           // strips: (head_dim x kMr) each, k-major
  float *s = nullptr;           // rows x kBlockKeys: raw products, logits, P
  float *o = nullptr;           // rows x dim_v
  float *dropout = nullptr;     // kMr x kBlockKeys: dropout factors of a strip
  float *max = nullptr;         // (rows) base-2 logits
  float *correction = nullptr;  // (rows) factor of what was summed before this key block
  float *sum = nullptr;         // rows x kWidth
  float *block_max = nullptr;   // rows x kWidth: maxima of raw products in this key block
  int64_t *begin = nullptr;     // (rows) keys that the row sees through the band: begin[r] .. end[r] - 1
  int64_t *end = nullptr;
  Range seen[kMaxStrips];      // by some row of the strip
  Range interior[kMaxStrips];  // by every row of the strip
};

// Points the state into a worker's scratch, loads the queries and starts the softmax.
inline BlockState begin_block(const ForwardProblem &p, const ForwardLayout &layout, char *scratch, const Head &head,
                              const QueryBlock &block) {
  BlockState st;
  st.block = block;
  st.rows = block.rows();
  st.dim_v = round_up(p.head_dim_v, kWidth);
  const auto take = [&](size_t bytes) {
    auto *area = reinterpret_cast<float *>(scratch);
    scratch += bytes;
    return area;
  };
  st.q = take(layout.worker_queries);
  st.s = take(layout.worker_scores);
  st.o = take(layout.worker_output);
  st.dropout = take(layout.worker_dropout);
  st.sum = take(layout.worker_rows);
  st.block_max = st.sum + st.rows * kWidth;
  st.begin = reinterpret_cast<int64_t *>(st.block_max + st.rows * kWidth);
  st.end = st.begin + st.rows;
  st.max = reinterpret_cast<float *>(st.end + st.rows);
  st.correction = st.max + st.rows;

  for (int64_t r = 0; r < st.rows; ++r) {
    const Range seen = visible_keys(p.band, head.queries.len, head.keys.len, block.query(r));
    st.begin[r] = seen.begin;
    st.end[r] = seen.end;
    st.max[r] = -kInfinity;
    Simd::store(st.sum + r * kWidth, Simd::zero());
    for (int64_t c = 0; c < st.dim_v; c += kWidth) Simd::store(st.o + r * st.dim_v + c, Simd::zero());
  }
  for (int64_t r0 = 0, strip = 0; r0 < st.rows; r0 += kMr, ++strip) {
    const int64_t n = min64(st.rows - r0, kMr);
    Range seen{INT64_MAX, 0}, interior{0, INT64_MAX};
    const char *rows[kMr];
    for (int64_t r = r0; r < r0 + n; ++r) {
      if (st.begin[r] < st.end[r]) {
        seen.begin = min64(seen.begin, st.begin[r]);
        seen.end = max64(seen.end, st.end[r]);
      }
      interior.begin = max64(interior.begin, st.begin[r]);
      interior.end = min64(interior.end, st.end[r]);
      rows[r - r0] = rows_of(p.q, head.b, head.head_k * p.group + block.head(r), head.queries.start).row(block.query(r));
    }
    st.seen[strip] = seen;
    st.interior[strip] = interior;
    float *to = st.q + strip * kMr * p.head_dim;
    float factors[kMr];
    if (is_quantised(p.q.dtype)) std::fill_n(factors, kMr, factors_of(p, p.q_descale, head.b, head.head_k, 0).at(0));
    for_key_dtype(p.q.dtype, [&]<class Element>() {
      for (int v = 0; v < kMr; v += kWidth) {
        const int lanes = kMr - v < kWidth ? kMr - v : kWidth;
        const int some = static_cast<int>(max64(min64(n - v, lanes), 0));
        transpose_rows<Element>(rows + v, some, p.head_dim, to + v, kMr, lanes, factors);
      }
    });
  }
  return st;
}

// S of one strip and one panel, with the row maxima. kMasked: keys a row does not see become -inf; `begin` and `end` are the rows'
// limits and `col` is the panel's first key.
template <int MR, bool kMasked>
FA_INLINE void score_strip(int64_t dim, const float *q, const float *panel, float *s, float *block_max, const int64_t *begin,
                           const int64_t *end, int64_t col) {
  F acc[MR][2];
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r) acc[r][0] = acc[r][1] = Simd::zero();
  multiply<MR, 2, true>(dim, q, kMr, panel, kNr, acc);
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r) {
    if constexpr (kMasked) {
      const I first = Simd::iset(static_cast<uint32_t>(max64(min64(begin[r] - col, kNr), 0) - 1));
      const I last = Simd::iset(static_cast<uint32_t>(max64(min64(end[r] - col, kNr), 0)));
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const I lane = Simd::iadd(Simd::iota(), Simd::iset(static_cast<uint32_t>(v * kWidth)));
        acc[r][v] =
            Simd::select(Simd::mask_and(Simd::ilt(first, lane), Simd::ilt(lane, last)), acc[r][v], Simd::set(-kInfinity));
      }
    }
    Simd::store(s + r * kBlockKeys, acc[r][0]);
    Simd::store(s + r * kBlockKeys + kWidth, acc[r][1]);
    // In this order a NaN product never enters the maximum; it reaches the sum, and with it the row, through its P.
    F top = Simd::max(acc[r][0], Simd::load(block_max + r * kWidth));
    Simd::store(block_max + r * kWidth, Simd::max(acc[r][1], top));
  }
}

// One panel against the m rows of consecutive strips.
template <bool kMasked>
__attribute__((noinline)) void score_panel(int64_t m, int64_t dim, const float *q, const float *panel, float *s,
                                           float *block_max, const int64_t *begin, const int64_t *end, int64_t col) {
  for_strips(
      m, [&]<int MR>(int64_t r) __attribute__((always_inline)) {
        const float *strip = q + r / kMr * kMr * dim + r % kMr;
        score_strip<MR, kMasked>(dim, strip, panel, s + r * kBlockKeys, block_max + r * kWidth, begin + r, end + r, col);
      });
}

// Raw products of a strip -> masked base-2 logits, for problems with a general score; row maxima afresh.
inline void general_scores(const Problem &p, const Head &head, const BlockState &st, int64_t r0, int64_t m, int64_t col,
                           int64_t cols, float *s) {
  for_heads(st.block, r0, r0 + m, [&](int64_t h, int64_t r, int64_t n) {
    const Score score = make_score(p, head.b, head.head_k * p.group + h, head.queries.len, head.keys.len);
    const Tile tile{st.block.query(r), col, n, cols};
    float *x = s + (r - r0) * kBlockKeys;
    score_logits(score, tile, x, kBlockKeys, nullptr);
    mask_tile(score, tile, x, kBlockKeys);
    for (int64_t i = 0; i < n; ++i) {
      F top = Simd::set(-kInfinity);
      for (int64_t c = 0; c < cols; c += kWidth) top = Simd::max(Simd::load(x + i * kBlockKeys + c), top);
      Simd::store(st.block_max + (r + i) * kWidth, top);
    }
  });
}

// Whether the block mask hides the whole tile from every row of the strip.
inline bool strip_hidden(const Problem &p, const Head &head, const BlockState &st, int64_t r0, int64_t m, int64_t col,
                         int64_t cols) {
  bool hidden = true;
  for_heads(st.block, r0, r0 + m, [&](int64_t h, int64_t r, int64_t n) {
    const Score score = make_score(p, head.b, head.head_k * p.group + h, head.queries.len, head.keys.len);
    hidden = hidden && tile_masking(score, Tile{st.block.query(r), col, n, cols}) == Masking::kAll;
  });
  return hidden;
}

// Updates maxima, corrections and sums of m rows and turns their logits s (m x cols) into P.
template <bool kMarkMasked>
__attribute__((noinline)) void softmax_strip(int64_t m, int64_t cols, float multiplier, float *s, const float *block_max,
                                             float *max, float *correction, float *sum) {
  float base[kMr];
  for (int64_t r = 0; r < m; ++r) {
    const float top = Simd::reduce_max(Simd::load(block_max + r * kWidth)) * multiplier;
    const float before = max[r];
    const float after = top > before ? top : before;
    base[r] = after == -kInfinity ? 0.0f : after;
    correction[r] = before - base[r];
    max[r] = after;
  }
  for (int64_t r = 0; r < m; r += kWidth) {
    const int n = static_cast<int>(min64(m - r, kWidth));
    Simd::store(correction + r, Simd::exp2(Simd::load(correction + r, n)), n);
  }
  const F scale = Simd::set(multiplier);
  for (int64_t r = 0; r < m; ++r) {
    float *row = s + r * kBlockKeys;
    const F minus = Simd::set(base[r]);
    F total0 = Simd::zero(), total1 = Simd::zero();
    for (int64_t c = 0; c < cols; c += kNr) {
      const F x0 = Simd::load(row + c), x1 = Simd::load(row + c + kWidth);
      F w0 = Simd::exp2(Simd::fms(x0, scale, minus)), w1 = Simd::exp2(Simd::fms(x1, scale, minus));
      total0 = Simd::add(total0, w0);
      total1 = Simd::add(total1, w1);
      if constexpr (kMarkMasked) {
        w0 = Simd::select(Simd::eq(x0, Simd::set(-kInfinity)), Simd::set(kMaskedP), w0);
        w1 = Simd::select(Simd::eq(x1, Simd::set(-kInfinity)), Simd::set(kMaskedP), w1);
      }
      Simd::store(row + c, w0);
      Simd::store(row + c + kWidth, w1);
    }
    float *to = sum + r * kWidth;
    Simd::store(to, Simd::fma(Simd::load(to), Simd::set(correction[r]), Simd::add(total0, total1)));
  }
}

// Multiplies P of a strip by its dropout scales.
inline void apply_dropout(const Problem &p, const Head &head, const BlockState &st, int64_t r0, int64_t m, int64_t col,
                          int64_t cols, float *s) {
  for_heads(st.block, r0, r0 + m, [&](int64_t h, int64_t r, int64_t n) {
    const Score score = make_score(p, head.b, head.head_k * p.group + h, head.queries.len, head.keys.len);
    dropout_scales(score, Tile{st.block.query(r), col, n, cols}, st.dropout, kBlockKeys);
    for (int64_t i = 0; i < n; ++i) {
      float *x = s + (r - r0 + i) * kBlockKeys;
      const float *factor = st.dropout + i * kBlockKeys;
      for (int64_t c = 0; c < cols; c += kWidth) Simd::store(x + c, Simd::mul(Simd::load(x + c), Simd::load(factor + c)));
    }
  });
}

// O = diag(correction) O + P V of m rows where masked P must not touch their values: keys [begin, end) of the block.
inline void accumulate_visible(int64_t m, const KeyBlock &key, int64_t begin, int64_t end, const float *s,
                               const float *correction, int64_t dim_v, float *o) {
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t c = 0; c < dim_v; c += kWidth) {
      const int64_t panel = c / kNr;
      const int64_t width = dim_v - panel * kNr > kWidth ? kNr : kWidth;
      const float *v = key.values + panel * kBlockKeys * kNr + c % kNr;
      F acc = Simd::mul(Simd::load(o + r * dim_v + c), Simd::set(correction[r]));
      for (int64_t j = begin; j < end; ++j) {
        const float w = s[r * kBlockKeys + j];
        if (!is_masked_p(w)) acc = Simd::fma(Simd::set(w), Simd::load(v + j * width), acc);
      }
      Simd::store(o + r * dim_v + c, acc);
    }
  }
}

FA_INLINE bool operator==(const Range &a, const Range &b) { return a.begin == b.begin && a.end == b.end; }

// Calls body(kind, begin, end) for the maximal runs of equal kind(i) in 0 .. n - 1.
template <class Kind, class Body>
FA_INLINE void for_runs(int64_t n, Kind kind, Body body) {
  for (int64_t begin = 0; begin < n;) {
    const auto k = kind(begin);
    int64_t end = begin + 1;
    while (end < n && kind(end) == k) ++end;
    body(k, begin, end);
    begin = end;
  }
}

// One block of queries against one block of keys.
inline void attend(const Problem &p, const Head &head, BlockState &st, const KeyBlock &key) {
  // Per strip: keys it works on, relative to the block; `cols` are these rounded outwards to panels.
  Range keys[kMaxStrips], cols[kMaxStrips];
  const bool general = p.general_score();
  const int64_t strips = (st.rows + kMr - 1) / kMr;
  Range all_cols{kBlockKeys, 0};
  for (int64_t strip = 0; strip < strips; ++strip) {
    const int64_t r0 = strip * kMr, m = min64(st.rows - r0, kMr);
    keys[strip] = {max64(st.seen[strip].begin - key.first, 0), min64(st.seen[strip].end - key.first, kBlockKeys)};
    cols[strip] = {keys[strip].begin / kNr * kNr, round_up(keys[strip].end, kNr)};
    if (!keys[strip].empty() && p.block_mask.data != nullptr &&
        strip_hidden(p, head, st, r0, m, key.first + keys[strip].begin, keys[strip].size())) {
      keys[strip].end = keys[strip].begin;
    }
    if (keys[strip].empty()) continue;
    all_cols = {min64(all_cols.begin, cols[strip].begin), max64(all_cols.end, cols[strip].end)};
    for (int64_t r = r0; r < r0 + m; ++r) Simd::store(st.block_max + r * kWidth, Simd::set(-kInfinity));
  }

  for (int64_t col = all_cols.begin; col < all_cols.end; col += kNr) {
    const float *panel = key.keys + col * p.head_dim;
    const int64_t first = key.first + col;
    const auto kind = [&](int64_t strip) {
      if (keys[strip].empty() || col < cols[strip].begin || col >= cols[strip].end) return Masking::kAll;
      if (general) return Masking::kNone;  // masks come later
      return st.interior[strip].begin <= first && first + kNr <= st.interior[strip].end ? Masking::kNone : Masking::kSome;
    };
    for_runs(strips, kind, [&](Masking masking, int64_t begin, int64_t end) {
      if (masking == Masking::kAll) return;
      const int64_t r0 = begin * kMr, m = min64(st.rows, end * kMr) - r0;
      (masking == Masking::kNone ? score_panel<false> : score_panel<true>)(m, p.head_dim, st.q + r0 * p.head_dim, panel,
                                                                           st.s + r0 * kBlockKeys + col,
                                                                           st.block_max + r0 * kWidth, st.begin + r0,
                                                                           st.end + r0, first);
    });
  }

  const float multiplier = general ? 1.0f : p.softmax_scale * kLog2e;
  bool visible_only[kMaxStrips] = {};
  for (int64_t strip = 0; strip < strips; ++strip) {
    if (keys[strip].empty()) continue;
    const int64_t r0 = strip * kMr, m = min64(st.rows - r0, kMr), first = key.first + cols[strip].begin;
    const int64_t n = cols[strip].size();
    float *s = st.s + r0 * kBlockKeys + cols[strip].begin;
    if (general) general_scores(p, head, st, r0, m, first, n, s);
    const bool masked = general || st.interior[strip].begin > first || st.interior[strip].end < first + n;
    visible_only[strip] = masked && !key.finite;
    (visible_only[strip] ? softmax_strip<true> : softmax_strip<false>)(m, n, multiplier, s, st.block_max + r0 * kWidth,
                                                                       st.max + r0, st.correction + r0, st.sum + r0 * kWidth);
    if (p.dropout.threshold > 0) apply_dropout(p, head, st, r0, m, first, n, s);
  }

  for (int64_t strip = 0; strip < strips; ++strip) {
    if (keys[strip].empty() || !visible_only[strip]) continue;
    const int64_t r0 = strip * kMr, m = min64(st.rows - r0, kMr);
    accumulate_visible(m, key, keys[strip].begin, keys[strip].end, st.s + r0 * kBlockKeys, st.correction + r0, st.dim_v,
                       st.o + r0 * st.dim_v);
  }
  for (int64_t c = 0; c < st.dim_v; c += kNr) {
    const bool wide = st.dim_v - c > kWidth;
    const int64_t width = wide ? kNr : kWidth;
    const float *values = key.values + c / kNr * (kBlockKeys * kNr);
    for_runs(
        strips,
        [&](int64_t strip) {
          return visible_only[strip] ? Range{0, 0} : keys[strip];
        },
        [&](Range run_keys, int64_t begin, int64_t end) {
          if (run_keys.empty()) return;
          const int64_t r0 = begin * kMr, m = min64(st.rows, end * kMr) - r0;
          (wide ? gemm_panel<2, false, Output::scale_add>
                : gemm_panel<1, false, Output::scale_add>)(m, run_keys.size(), st.s + r0 * kBlockKeys + run_keys.begin,
                                                           kBlockKeys, values + run_keys.begin * width,
                                                           st.o + r0 * st.dim_v + c, st.dim_v, st.correction + r0);
        });
  }
}

// The state of row r as a result.
FA_INLINE RowResult row_result(const BlockState &st, int64_t r) {
  return {st.max[r], Simd::reduce_add(Simd::load(st.sum + r * kWidth)), st.o + r * st.dim_v};
}

}  // namespace fa::cpu::FA_ISA
