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

#include "cpu/forward_blocks.h"
#include "cpu/forward_softmax.h"

namespace fa::cpu::FA_ISA {

static_assert(kBlockRows % kMr == 0 && kBlockRows / kMr <= kMaxStrips && kMr <= kMaxStripRows && kBlockKeys % kNr == 0);

// Packed keys and values of one key block.
struct KeyBlock {
  int64_t first = 0;              // its first key
  const float *keys = nullptr;    // K^T panels, (head_dim x kNr) each
  const float *values = nullptr;  // value panels, (kBlockKeys x kNr) each
  bool finite = true;             // every value is
};

// A block of queries, in a worker's scratch memory.
struct BlockState : SoftmaxState {
  int64_t dim_v = 0;
  float *q = nullptr;  // strips: (head_dim x kMr) each, k-major
  float *s = nullptr;  // rows x kBlockKeys: raw products, logits, P
  float *o = nullptr;  // rows x dim_v
};

// Points the state into a worker's scratch and loads the queries.
inline BlockState begin_block(const ForwardProblem &p, const ForwardLayout &layout, const MaskMemory &masks, char *scratch,
                              const Head &head, const QueryBlock &block) {
  BlockState st;
  const auto take = [&](size_t bytes) {
    auto *area = reinterpret_cast<float *>(scratch);
    scratch += bytes;
    return area;
  };
  st.q = take(layout.worker_queries);
  st.s = take(layout.worker_scores);
  st.o = take(layout.worker_output);
  st.dropout = take(layout.worker_dropout);
  begin_softmax(p, head, block, kMr, masks, take(layout.worker_rows), st);
  st.dim_v = round_up(p.head_dim_v, kWidth);
  for (int64_t r0 = 0, strip = 0; r0 < st.rows; r0 += kMr, ++strip) {
    const int64_t n = min64(st.rows - r0, kMr);
    const char *rows[kMr];
    for (int64_t r = r0; r < r0 + n; ++r) {
      rows[r - r0] = rows_of(p.q, head.b, head.head_k * p.group + block.head(r), head.queries.start).row(block.query(r));
    }
    float *to = st.q + strip * kMr * p.head_dim;
    float factors[kMr];
    if (is_quantised(p.q.dtype)) std::fill_n(factors, kMr, factors_of(p, p.q_descale, head.b, head.head_k, 0).at(0));
    for_query_dtype(p.q.dtype, [&]<class Element>() {
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

// P of one block of queries and one block of keys, after begin_keys: P replaces st.s, and row sums and corrections are up to date. With `mark` the P of
// masked pairs are marked as such, in the strips that marked[] then names.
inline void block_p(const MaskedProblem &p, const Head &head, BlockState &st, const KeyBlock &key, bool mark,
                    bool (&marked)[kMaxStrips]) {
  // Per strip: keys it works on, relative to the block; `cols` are these rounded outwards to panels.
  const Range *keys = st.keys;
  Range cols[kMaxStrips];
  const bool general = changes_scores(p, st.user);
  const int64_t strips = (st.rows + kMr - 1) / kMr;
  Range all_cols{kBlockKeys, 0};
  for (int64_t strip = 0; strip < strips; ++strip) {
    const int64_t r0 = strip * kMr, m = min64(st.rows - r0, kMr);
    cols[strip] = {keys[strip].begin / kNr * kNr, round_up(keys[strip].end, kNr)};
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
  for (int64_t strip = 0; strip < strips; ++strip) {
    if (keys[strip].empty()) continue;
    const int64_t r0 = strip * kMr, m = min64(st.rows - r0, kMr), first = key.first + cols[strip].begin;
    const int64_t n = cols[strip].size();
    float *s = st.s + r0 * kBlockKeys + cols[strip].begin;
    if (general) general_scores(p, head, st, r0, m, first, n, s);
    if (st.partial[strip]) mask_by_data(st, r0, m, cols[strip].begin, n, s);
    if (general || st.partial[strip]) row_maxima(st, r0, m, n, s);
    const bool masked = general || st.partial[strip] || st.interior[strip].begin > first || st.interior[strip].end < first + n;
    marked[strip] = masked && mark;
    (marked[strip] ? softmax_strip<true, InPlace> : softmax_strip<false, InPlace>)(st, r0, m, n, multiplier, s, InPlace{s});
    if (p.dropout.threshold > 0) apply_dropout(p, head, st, r0, m, first, n, s);
  }
}

// One block of queries against one packed block of keys, after begin_keys.
inline void attend(const ForwardProblem &p, const Head &head, BlockState &st, const KeyBlock &key) {
  bool visible_only[kMaxStrips] = {};
  block_p(p, head, st, key, !key.finite, visible_only);
  const Range *keys = st.keys;
  const int64_t strips = (st.rows + kMr - 1) / kMr;
  for (int64_t strip = 0; strip < strips; ++strip) {
    if (keys[strip].empty() || !visible_only[strip]) continue;
    const int64_t r0 = strip * kMr, m = min64(st.rows - r0, kMr);
    accumulate_visible(
        m, keys[strip], st.s + r0 * kBlockKeys, st.correction + r0, st.dim_v,
        [&](int64_t r, int64_t c) { return st.o + (r0 + r) * st.dim_v + c; },
        [&](int64_t j, int64_t c) {
          const int64_t panel = c / kNr;
          const int64_t width = st.dim_v - panel * kNr > kWidth ? kNr : kWidth;
          return Simd::load(key.values + panel * kBlockKeys * kNr + c % kNr + j * width);
        });
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

// The products of forward by fp32 multiply-adds, for ForwardWork.
class FmaProducts {
 public:
  using State = BlockState;

  static constexpr int64_t kStripRows = kMr;

  FmaProducts(const ForwardProblem &problem, const ForwardLayout &layout) : p_(problem), layout_(layout) {}

  // Packs key block n; returns its flag, whether its values are finite.
  uint8_t pack(const Head &head, int64_t n, char *keys, char *values) const {
    const int64_t begin = n * kBlockKeys, end = min64(begin + kBlockKeys, head.keys.len);
    const Rows k = key_rows_of(p_, p_.k, head.b, head.head_k, head.keys.start);
    const Rows v = key_rows_of(p_, p_.v, head.b, head.head_k, head.keys.start);
    bool finite = true;
    const Factors of_k = factors_of(p_, p_.k_descale, head.b, head.head_k, head.keys.start),
                  of_v = factors_of(p_, p_.v_descale, head.b, head.head_k, head.keys.start);
    for_key_dtype(p_.k.dtype, [&]<class Element>() {
      pack_transposed<Element>(k, begin, end, p_.head_dim, reinterpret_cast<float *>(keys), of_k);
      finite = pack_rows<Element>(v, begin, end, p_.head_dim_v, reinterpret_cast<float *>(values), kBlockKeys * kNr, of_v);
    });
    return finite ? 1 : 0;
  }

  State begin(char *scratch, const MaskMemory &masks, const Head &head, const QueryBlock &block) const {
    return begin_block(p_, layout_, masks, scratch, head, block);
  }

  void begin_segment(State &st) const {
    FA_ISA::begin_segment(st);
    for (int64_t i = 0; i < st.rows * st.dim_v; i += kWidth) Simd::store(st.o + i, Simd::zero());
  }

  // Key block n, as `pack` left it, after begin_keys. The first block of every segment comes after begin_segment.
  void attend(const Head &head, State &st, int64_t n, const char *keys, const char *values, uint8_t flags) const {
    FA_ISA::attend(
        p_, head, st,
        {n * kBlockKeys, reinterpret_cast<const float *>(keys), reinterpret_cast<const float *>(values), flags != 0});
  }

  // Key block n, for a block of queries that shares it with no other. `keys` and `values` are scratch of a packed block.
  void attend_alone(const Head &head, State &st, int64_t n, char *keys, char *values) const {
    attend(head, st, n, keys, values, pack(head, n, keys, values));
  }

  void finish(State &) const {}

  // The state of row r as a result.
  RowResult row_result(const State &st, int64_t r) const {
    return {st.max[r], Simd::reduce_add(Simd::load(st.sum + r * kWidth)), st.o + r * st.dim_v};
  }

 private:
  const ForwardProblem &p_;
  const ForwardLayout &layout_;
};

}  // namespace fa::cpu::FA_ISA
