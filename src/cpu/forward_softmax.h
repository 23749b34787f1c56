// SPDX-License-Identifier: Apache-2.0
// The online softmax of a block of query rows, whatever computes its products. A block consists of strips of some rows each, the
// height of which the kernel chooses; the logits of a strip are row-major floats with leading dimension kBlockKeys.
#pragma once

#include "cpu/forward_state.h"

namespace fa::cpu::FA_ISA {

constexpr int64_t kMaxStripRows = 32;
constexpr int64_t kMaxStrips = 16;  // of a block

struct SoftmaxState {
  QueryBlock block;
  int64_t rows = 0;
  float *dropout = nullptr;     // a strip x kBlockKeys: dropout scales
  float *max = nullptr;         // (rows) base-2 logits
  float *correction = nullptr;  // (rows) factor of what was summed before this key block
  float *sum = nullptr;         // rows x kWidth
  float *block_max = nullptr;   // rows x kWidth: maxima of raw products in this key block
  int64_t *begin = nullptr;     // (rows) keys that the row sees through the band: begin[r] .. end[r] - 1
  int64_t *end = nullptr;
  Range seen[kMaxStrips];      // by some row of the strip
  Range interior[kMaxStrips];  // by every row of the strip

  const ScoreCall *user = nullptr;
  bool by_data = false;  // data or a function masks pairs
  PreparedMasks masks;
  RowBits *bits = nullptr;  // rows: visible keys of this block by masks as data, where partial is true
  Range all_seen;           // by some row of the block

  // Of the current block of keys, see begin_keys.
  Range keys[kMaxStrips];
  bool partial[kMaxStrips];
};

// Where a worker keeps what it knows of masks as data, and the user's score function.
struct MaskMemory {
  const ScoreCall *user = nullptr;
  const uint64_t *list_bits = nullptr;
  RowBits *bits = nullptr;
  int32_t *slices = nullptr;
};
inline MaskMemory mask_memory(const ForwardLayout &layout, const ScoreCall *user, char *workspace, char *scratch) {
  char *bits = scratch + layout.worker_bytes - layout.worker_slices - layout.worker_bits;
  return {user, reinterpret_cast<const uint64_t *>(workspace + layout.list_bits_at), reinterpret_cast<RowBits *>(bits),
          reinterpret_cast<int32_t *>(bits + layout.worker_bits)};
}

// Prepares the softmax of a block whose strips have `strip_rows` rows, up to begin_segment; `area` is layout.worker_rows of scratch.
inline void begin_softmax(const MaskedProblem &p, const Head &head, const QueryBlock &block, int64_t strip_rows,
                          const MaskMemory &memory, float *area, SoftmaxState &st) {
  st.block = block;
  st.rows = block.rows();
  st.sum = area;
  st.block_max = st.sum + st.rows * kWidth;
  st.begin = reinterpret_cast<int64_t *>(st.block_max + st.rows * kWidth);
  st.end = st.begin + st.rows;
  st.max = reinterpret_cast<float *>(st.end + st.rows);
  st.correction = st.max + st.rows;
  for (int64_t r0 = 0, strip = 0; r0 < st.rows; r0 += strip_rows, ++strip) {
    Range seen{INT64_MAX, 0}, interior{0, INT64_MAX};
    for (int64_t r = r0; r < min64(st.rows, r0 + strip_rows); ++r) {
      const Range keys = visible_keys(p.band, head.queries, head.keys, Range{block.query(r), block.query(r) + 1});
      st.begin[r] = keys.begin;
      st.end[r] = keys.end;
      if (keys.begin < keys.end) {
        seen.begin = min64(seen.begin, keys.begin);
        seen.end = max64(seen.end, keys.end);
      }
      interior.begin = max64(interior.begin, keys.begin);
      interior.end = min64(interior.end, keys.end);
    }
    st.seen[strip] = seen;
    st.interior[strip] = interior;
    st.partial[strip] = false;
  }
  const Range rows{block.first_query, block.first_query + block.queries};
  st.all_seen = visible_keys(p.band, head.queries, head.keys, rows);
  st.user = memory.user;
  st.by_data = masks_pairs(p, st.user);
  if (!st.by_data) return;
  st.masks.user = st.user;
  st.masks.list_bits = memory.list_bits;
  st.bits = memory.bits;
  if (p.slices.given && !st.all_seen.empty()) {
    Range shown;
    st.masks.active = memory.slices;
    st.masks.num_active = gather_slices(p.slices, rows, head.queries.start, st.all_seen, head.keys.start, memory.slices, shown);
    st.all_seen = shown;
  }
}

// Starts a segment of keys; the state of the one before is lost.
inline void begin_segment(SoftmaxState &st) {
  for (int64_t r = 0; r < st.rows; ++r) {
    st.max[r] = -kInfinity;
    Simd::store(st.sum + r * kWidth, Simd::zero());
  }
}

// Row maxima of m rows of logits; NaN never enters a maximum and reaches its row through the sum.
inline void row_maxima(const SoftmaxState &st, int64_t r0, int64_t m, int64_t cols, const float *s) {
  for (int64_t r = 0; r < m; ++r) {
    F top0 = Simd::set(-kInfinity), top1 = top0;
    for (int64_t c = 0; c < cols; c += kNr) {
      top0 = Simd::max(Simd::load(s + r * kBlockKeys + c), top0);
      top1 = Simd::max(Simd::load(s + r * kBlockKeys + c + kWidth), top1);
    }
    Simd::store(st.block_max + (r0 + r) * kWidth, Simd::max(top0, top1));
  }
}

// Raw products of a strip, of leading dimension ld -> base-2 logits, masked by band and lengths, for problems with a general score.
inline void general_scores(const MaskedProblem &p, const Head &head, const SoftmaxState &st, int64_t r0, int64_t m, int64_t col,
                           int64_t cols, float *s, int64_t ld = kBlockKeys) {
  for_heads(st.block, r0, r0 + m, [&](int64_t h, int64_t r, int64_t n) {
    const Score score = make_score(p, st.user, head.b, head.head_k * p.group + h, head.queries, head.keys);
    const Tile tile{st.block.query(r), col, n, cols};
    float *x = s + (r - r0) * ld;
    score_logits(score, tile, x, ld, nullptr);
    mask_by_band(score, tile, x, ld);
  });
}

// Masks of a strip by band and lengths alone, for problems without a general score.
inline void mask_strip(const MaskedProblem &p, const Head &head, const SoftmaxState &st, int64_t r0, int64_t m, int64_t col,
                       int64_t cols, float *s, int64_t ld = kBlockKeys) {
  for_heads(st.block, r0, r0 + m, [&](int64_t h, int64_t r, int64_t n) {
    const Score score = make_score(p, st.user, head.b, head.head_k * p.group + h, head.queries, head.keys);
    mask_by_band(score, Tile{st.block.query(r), col, n, cols}, s + (r - r0) * ld, ld);
  });
}

// Bits of the masks as data for the m rows from r0 on and the keys [keys.begin, keys.end) of the block that begins at key `first`.
inline Masking strip_bits(const MaskedProblem &p, const Head &head, const SoftmaxState &st, int64_t r0, int64_t m, Range keys,
                          int64_t first) {
  Masking masking = Masking::kNone;
  bool begun = false;
  for_heads(st.block, r0, r0 + m, [&](int64_t h, int64_t r, int64_t n) {
    const DataMask mask = make_data_mask(p, st.masks, head.b, head.head_k * p.group + h, head.queries, head.keys);
    const Range rows{st.block.query(r), st.block.query(r) + n};
    const Masking of_head = visible_bits(mask, rows, {first + keys.begin, first + keys.end}, first, st.bits + r);
    masking = begun ? both(masking, of_head) : of_head;
    begun = true;
  });
  return masking;
}

// Decides what the strips have to do with the block of keys that begins at key `first`: st.keys, relative to `first`, is where a strip has
// work, and st.partial whether masks as data hide some of it. Returns whether any strip has work.
inline bool begin_keys(const MaskedProblem &p, const Head &head, SoftmaxState &st, int64_t strip_rows, int64_t first) {
  bool any = false;
  for (int64_t r0 = 0, strip = 0; r0 < st.rows; r0 += strip_rows, ++strip) {
    Range keys{max64(st.seen[strip].begin - first, 0), min64(st.seen[strip].end - first, kBlockKeys)};
    if (!keys.empty() && st.by_data) {
      const Masking masking = strip_bits(p, head, st, r0, min64(st.rows - r0, strip_rows), keys, first);
      st.partial[strip] = masking == Masking::kSome;
      if (masking == Masking::kAll) keys.end = keys.begin;
    }
    st.keys[strip] = keys;
    any = any || !keys.empty();
  }
  return any;
}

// Masks as data of a partial strip; `col` is relative to the block of keys. Row maxima have to be taken afresh.
inline void mask_by_data(const SoftmaxState &st, int64_t r0, int64_t m, int64_t col, int64_t cols, float *s,
                         int64_t ld = kBlockKeys) {
  mask_by_bits(st.bits + r0, m, col, cols, s, ld);
}

// Where softmax_strip puts P: into the place of the logits.
struct InPlace {
  float *s;
  FA_INLINE void operator()(int64_t r, int64_t c, F w0, F w1) const {
    Simd::store(s + r * kBlockKeys + c, w0);
    Simd::store(s + r * kBlockKeys + c + kWidth, w1);
  }
};

// Updates maxima, corrections and sums of the m rows from r0 on and turns their logits s (m x cols) into P. put(r, c, w0, w1) takes
// 2 kWidth of P, from column c of row r0 + r on.
template <bool kMarkMasked, class Put>
__attribute__((noinline)) void softmax_strip(const SoftmaxState &st, int64_t r0, int64_t m, int64_t cols, float multiplier,
                                             const float *s, Put put) {
  const float *block_max = st.block_max + r0 * kWidth;
  float *max = st.max + r0, *correction = st.correction + r0, *sum = st.sum + r0 * kWidth;
  float base[kMaxStripRows];
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
    const float *row = s + r * kBlockKeys;
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
      put(r, c, w0, w1);
    }
    float *to = sum + r * kWidth;
    Simd::store(to, Simd::fma(Simd::load(to), Simd::set(correction[r]), Simd::add(total0, total1)));
  }
}

// Multiplies P of a strip by its dropout scales.
inline void apply_dropout(const MaskedProblem &p, const Head &head, const SoftmaxState &st, int64_t r0, int64_t m, int64_t col,
                          int64_t cols, float *s) {
  for_heads(st.block, r0, r0 + m, [&](int64_t h, int64_t r, int64_t n) {
    const Score score = make_score(p, st.user, head.b, head.head_k * p.group + h, head.queries, head.keys);
    dropout_scales(score, Tile{st.block.query(r), col, n, cols}, st.dropout, kBlockKeys);
    for (int64_t i = 0; i < n; ++i) {
      float *x = s + (r - r0 + i) * kBlockKeys;
      const float *factor = st.dropout + i * kBlockKeys;
      for (int64_t c = 0; c < cols; c += kWidth) Simd::store(x + c, Simd::mul(Simd::load(x + c), Simd::load(factor + c)));
    }
  });
}

// O = diag(correction) O + P V of m rows where masked P must not touch their values. `keys` are relative to the block; output(r, c)
// is where kWidth columns of O lie, and value(j, c) loads kWidth columns of V.
template <class OutputAt, class ValueAt>
inline void accumulate_visible(int64_t m, Range keys, const float *s, const float *correction, int64_t dim_v, OutputAt output,
                               ValueAt value) {
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t c = 0; c < dim_v; c += kWidth) {
      F acc = Simd::mul(Simd::load(output(r, c)), Simd::set(correction[r]));
      for (int64_t j = keys.begin; j < keys.end; ++j) {
        const float w = s[r * kBlockKeys + j];
        if (!is_masked_p(w)) acc = Simd::fma(Simd::set(w), value(j, c), acc);
      }
      Simd::store(output(r, c), acc);
    }
  }
}

}  // namespace fa::cpu::FA_ISA
