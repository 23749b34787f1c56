// SPDX-License-Identifier: Apache-2.0
// The general score, for forward and backward: turns a tile of raw products q k into logits, knows which pairs band and lengths mask
// (data_mask.h knows the others), and draws the dropout scales. A tile is `rows` x `cols` floats of one (batch entry, query head),
// row-major with leading dimension `ld`, whose element (r, c) belongs to query tile.row + r and key tile.col + c.
//
// Logits are kept in base 2 (multiplied by log2(e)), so that P is one exp2 away. Problems without a general score never call
// score_logits: their logit is score.multiplier * (q k), which kernels fold into the argument of exp2. After score_logits the
// multiplier to use is 1.
#pragma once

#include "core/mask.h"
#include "core/philox.h"
#include "core/score.h"
#include "cpu/data_mask.h"
#include "cpu/pack.h"
#include "cpu/simd.h"

namespace fa::cpu::FA_ISA {

struct Tile {
  int64_t row = 0;
  int64_t col = 0;
  int64_t rows = 0;
  int64_t cols = 0;
};

// The score of one (batch entry, query head).
struct Score {
  float multiplier = 1;  // base-2 logit per unit of q k, when the score is not general
  bool general = false;

  Band band;
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  int64_t first_key = 0;  // keys before it are masked

  const ScoreCall *user = nullptr;  // a function that changes scores
  fa_score_position position{};     // of its first pair

  float softmax_scale = 1;
  float softcap = 0;          // 0 = none
  float alibi_slope = 0;      //
  float alibi_log_scale = 0;  // 0 = linear
  bool has_alibi = false;     //
  // (seqlen_q, seqlen_k) of this batch entry and head.
  const char *bias = nullptr;
  Dtype bias_dtype = Dtype::f32;
  int64_t bias_row_stride = 0;
  int64_t bias_col_stride = 0;

  bool dropout = false;
  DropoutKey dropout_key;
  uint32_t dropout_head = 0;                                // fa::dropout_head()
  int64_t dropout_block_row = 0, dropout_block_column = 0;  // of the problem's first query and key
  KeptNumbers dropout_kept;
  float dropout_scale = 1;

  // Masked pairs can come from something that only the tile's values tell: -inf in the bias, or from a function.
  FA_INLINE bool masks_by_value() const { return bias != nullptr || user != nullptr; }
};

// `user` is null without a score function.
inline Score make_score(const MaskedProblem &p, const ScoreCall *user, int64_t b, int64_t h, const Sequence &queries,
                        const Sequence &keys) {
  Score s;
  s.general = changes_scores(p, user);
  if (user != nullptr && user->changes_scores()) {
    s.user = user;
    s.position = {b, h, 0, 0, queries.len, keys.len, queries.start, keys.start};
  }
  s.multiplier = s.general ? 1.0f : p.softmax_scale * kLog2e;
  s.band = p.band;
  s.seqlen_q = queries.len;
  s.seqlen_k = keys.len;
  s.first_key = keys.first;
  s.softmax_scale = p.softmax_scale;
  s.softcap = p.softcap;
  if (p.alibi_slopes != nullptr) {
    s.has_alibi = true;
    s.alibi_log_scale = p.alibi_log_scale;
    s.alibi_slope = p.alibi_slopes[b * p.alibi_batch_stride + h * p.alibi_head_stride];
  }
  if (p.bias.data != nullptr) {
    s.bias =
        static_cast<const char *>(p.bias.data) + (b * p.bias.batch_stride + h * p.bias.head_stride) * dtype_bytes(p.bias.dtype);
    s.bias_dtype = p.bias.dtype;
    s.bias_row_stride = p.bias.row_stride;
    s.bias_col_stride = p.bias.col_stride;
  }
  if (p.dropout.threshold > 0) {
    s.dropout = true;
    const uint64_t seed = p.dropout.seed_ptr != nullptr ? *p.dropout.seed_ptr : p.dropout.seed;
    const uint64_t offset = p.dropout.offset + (p.dropout.offset_ptr != nullptr ? *p.dropout.offset_ptr : 0);
    s.dropout_key = dropout_key(seed, offset);
    s.dropout_head = fa::dropout_head(p, b, h);
    s.dropout_block_row = p.dropout.first_query / 16, s.dropout_block_column = p.dropout.first_key / 16;
    s.dropout_kept = KeptNumbers(p.dropout.threshold);
    s.dropout_scale = p.dropout.keep_scale;
  }
  return s;
}

// --- Masks ---------------------------------------------------------------------------------------------------------------------

// Keys that some of the rows see, and that all of them see, through band and lengths.
inline Range seen_keys(const Score &s, Range rows) {
  return from_key(visible_keys(s.band, s.seqlen_q, s.seqlen_k, rows), s.first_key);
}
inline Range inner_keys(const Score &s, Range rows) {
  return from_key(interior_keys(s.band, s.seqlen_q, s.seqlen_k, rows), s.first_key);
}

// Masking of a tile by band and lengths.
inline Masking band_masking(const Score &s, const Tile &t) {
  const Range rows{t.row, t.row + t.rows};
  const int64_t col_end = t.col + t.cols;
  const Range seen = seen_keys(s, rows);
  if (seen.empty() || seen.end <= t.col || seen.begin >= col_end) return Masking::kAll;
  const Range interior = inner_keys(s, rows);
  return interior.begin > t.col || interior.end < col_end ? Masking::kSome : Masking::kNone;
}

// Writes -inf to x[begin, end).
FA_INLINE void mask_columns(float *x, int64_t begin, int64_t end) {
  for (int64_t c = begin; c < end; ++c) x[c] = -kInfinity;
}

// Writes -inf where band or lengths mask the key. Columns past seqlen_k count as masked.
inline void mask_by_band(const Score &s, const Tile &t, float *x, int64_t ld) {
  const Range interior = inner_keys(s, {t.row, t.row + t.rows});
  if (interior.begin <= t.col && interior.end >= t.col + t.cols) return;
  for (int64_t r = 0; r < t.rows; ++r) {
    const Range seen = seen_keys(s, {t.row + r, t.row + r + 1});
    const int64_t begin = min64(max64(seen.begin - t.col, 0), t.cols);
    const int64_t end = max64(min64(seen.end - t.col, t.cols), begin);
    mask_columns(x + r * ld, 0, begin);
    mask_columns(x + r * ld, end, t.cols);
  }
}

// --- Logits --------------------------------------------------------------------------------------------------------------------

// x[c] += bias[c] * log2(e), -inf where the bias is -inf whatever x is (NaN included), for one row of `cols` keys. Where x is `masked`, it
// stays so; NaN stands for no number. The row of the bias starts at `bias`; its elements are `stride` apart.
template <class Element>
inline void add_bias_row(float *x, const char *bias, int64_t stride, int64_t cols, float masked) {
  const auto *row = reinterpret_cast<const typename Element::Type *>(bias);
  const F log2e = Simd::set(kLog2e), minus_infinity = Simd::set(-kInfinity), stays = Simd::set(masked);
  for (int64_t c = 0; c < cols; c += kWidth) {
    const int n = static_cast<int>(min64(cols - c, kWidth));
    F value;
    if (stride == 1) {
      value = n == kWidth ? Element::load(row + c) : Element::load(row + c, n);
    } else {
      typename Element::Type gathered[kWidth] = {};
      for (int l = 0; l < n; ++l) gathered[l] = row[(c + l) * stride];
      value = Element::load(gathered);
    }
    const F before = Simd::load(x + c, n);
    const F sum = Simd::select(Simd::eq(before, stays), before, Simd::fma(value, log2e, before));
    Simd::store(x + c, Simd::select(Simd::eq(value, minus_infinity), minus_infinity, sum), n);
  }
}

// One row of raw products -> base-2 logits where a bias with adjacent columns is the only score term, to the bits of the general way: x[c] *
// scale, then add_bias_row. The bias ends before the row does where the sequence of keys does.
template <class Element>
FA_INLINE void scale_and_add_bias_row(float *x, F scale, const char *bias, int64_t bias_cols, int64_t cols) {
  const auto *row = reinterpret_cast<const typename Element::Type *>(bias);
  const F log2e = Simd::set(kLog2e), minus_infinity = Simd::set(-kInfinity);
  const auto add = [&](F y, F value) __attribute__((always_inline)) {
    return Simd::select(Simd::eq(value, minus_infinity), minus_infinity, Simd::fma(value, log2e, Simd::mul(y, scale)));
  };
  int64_t c = 0;
  for (; c + kWidth <= bias_cols; c += kWidth) Simd::store(x + c, add(Simd::load(x + c), Element::load(row + c)));
  for (; c < cols; c += kWidth) {
    const int n = static_cast<int>(min64(cols - c, kWidth));
    const F value = c < bias_cols ? Element::load(row + c, static_cast<int>(bias_cols - c)) : Simd::zero();
    Simd::store(x + c, add(Simd::load(x + c, n), value), n);
  }
}

// One row of raw products -> what the user's function makes of the scaled products, for the keys that the row sees through band and lengths.
// The others may be anything. With `derivative`, also writes that of the function.
__attribute__((noinline)) inline void user_scores(const Score &s, const Tile &t, int64_t row, float *x, float *derivative) {
  const Range seen = seen_keys(s, {row, row + 1});
  const int64_t begin = max64(seen.begin - t.col, 0), end = min64(seen.end - t.col, t.cols);
  if (row >= s.seqlen_q || begin >= end) return;
  const F scale = Simd::set(s.softmax_scale);
  for (int64_t c = begin; c < end; c += kWidth) {
    const int n = static_cast<int>(min64(end - c, kWidth));
    Simd::store(x + c, Simd::mul(Simd::load(x + c, n), scale), n);
  }
  const fa_score_source &f = s.user->source;
  const fa_score_aux *aux = &s.user->aux;
  fa_score_position position = s.position;
  position.i = row;
  position.j = t.col + begin;
  if (derivative != nullptr && f.run_backward != nullptr) {
    return f.run_backward(x + begin, derivative + begin, &position, end - begin, aux);
  }
  for (int64_t c = begin; derivative != nullptr && c < end; ++c) {
    position.j = t.col + c;
    derivative[c] = f.derivative(x[c], &position, aux);
  }
  position.j = t.col + begin;
  if (f.run != nullptr) return f.run(x + begin, nullptr, &position, end - begin, aux);
  for (int64_t c = begin; c < end; ++c) {
    position.j = t.col + c;
    x[c] = f.score(x[c], &position, aux);
  }
}

// Raw products -> base-2 logits before masks, in place. With `derivative` (same shape), also writes d logit / d (softmax_scale q k)
// in natural units: 1 - tanh^2 under a softcap, times the derivative of the user's function; it is needed only with one of these. Rows past
// seqlen_q and columns past seqlen_k are computed without function and bias, which are not defined there.
__attribute__((noinline)) inline void score_logits(const Score &s, const Tile &t, float *x, int64_t ld, float *derivative) {
  const float softmax_scale = s.user != nullptr ? 1.0f : s.softmax_scale;  // user_scores applies it
  const F log2e_scale = Simd::set(softmax_scale * kLog2e);
  const F to_cap = Simd::set(s.softcap > 0 ? softmax_scale / s.softcap : 0), cap = Simd::set(s.softcap * kLog2e);
  // log2(1 + ...) is in base 2 already.
  const F slope = Simd::set(-s.alibi_slope * (s.alibi_log_scale > 0 ? 1 : kLog2e)), one = Simd::set(1.0f);
  const F log_scale = Simd::set(s.alibi_log_scale), minus_infinity = Simd::set(-kInfinity);
  const float masked = s.user != nullptr ? -kInfinity : __builtin_nanf("");  // a function can mask, products cannot
  const int64_t bias_rows = s.bias != nullptr ? min64(t.rows, s.seqlen_q - t.row) : 0;
  const int64_t bias_cols = min64(t.cols, s.seqlen_k - t.col);
  if (bias_rows == t.rows && bias_cols > 0 && s.bias_col_stride == 1 && s.softcap == 0 && !s.has_alibi && s.user == nullptr) {
    return for_dtype(s.bias_dtype, [&]<class Element>() {
      const auto bytes = static_cast<int64_t>(sizeof(typename Element::Type));
      const char *first = s.bias + (t.row * s.bias_row_stride + t.col) * bytes;
      for (int64_t r = 0; r < t.rows; ++r)
        scale_and_add_bias_row<Element>(x + r * ld, log2e_scale, first + r * s.bias_row_stride * bytes, bias_cols, t.cols);
    });
  }
  for (int64_t r = 0; r < t.rows; ++r) {
    float *row = x + r * ld;
    float *slope_of_row = derivative != nullptr ? derivative + r * ld : nullptr;
    if (s.user != nullptr) user_scores(s, t, t.row + r, row, slope_of_row);
    // |i + seqlen_k - seqlen_q - j| with j = col + c.
    const float distance0 = static_cast<float>(t.row + r + s.seqlen_k - s.seqlen_q - t.col);
    for (int64_t c = 0; c < t.cols; c += kWidth) {
      const int n = static_cast<int>(min64(t.cols - c, kWidth));
      F y = Simd::load(row + c, n);
      const F of_user = y;
      if (s.softcap > 0) {
        const F th = tanh(Simd::mul(y, to_cap));
        y = Simd::mul(th, cap);
        if (derivative != nullptr) {
          F slope_of_cap = Simd::sub(one, Simd::mul(th, th));
          if (s.user != nullptr) slope_of_cap = Simd::mul(slope_of_cap, Simd::load(slope_of_row + c, n));
          Simd::store(slope_of_row + c, slope_of_cap, n);
        }
      } else {
        y = Simd::mul(y, log2e_scale);
      }
      if (s.has_alibi) {
        F distance = Simd::abs(Simd::sub(Simd::set(distance0 - static_cast<float>(c)), Simd::to_float(Simd::iota())));
        if (s.alibi_log_scale > 0) distance = log2(Simd::fma(log_scale, distance, one));
        y = Simd::fma(slope, distance, y);
      }
      // A pair that the function masks stays masked.
      if (s.user != nullptr) y = Simd::select(Simd::eq(of_user, minus_infinity), minus_infinity, y);
      Simd::store(row + c, y, n);
    }
    if (r < bias_rows && bias_cols > 0) {
      const int64_t offset = (t.row + r) * s.bias_row_stride + t.col * s.bias_col_stride;
      for_dtype(s.bias_dtype, [&]<class Element>() {
        add_bias_row<Element>(row, s.bias + offset * static_cast<int64_t>(sizeof(typename Element::Type)), s.bias_col_stride,
                              bias_cols, masked);
      });
    }
  }
}

// --- Dropout -------------------------------------------------------------------------------------------------------------------

// Random bits of one 16 x 16 block: call n = 4 * ((i % 8) / 2) + (j % 8) / 2 of the block puts its word w at words[0][w][n], for even i, and for odd i at
// words[1][w][n]. As the counters of the 16 calls are consecutive, lanes are calls; see core/philox.h for the rule.
inline void dropout_block(const Score &s, int64_t block_row, int64_t block_col, uint32_t (&words)[2][4][16]) {
  for (int lane = 0; lane < 16; lane += kWidth) {
    I c0 = Simd::iadd(Simd::iset(static_cast<uint32_t>(16 * block_col + lane)), Simd::iota());
    I c1 = Simd::iset(static_cast<uint32_t>(block_row)), c2 = Simd::iset(s.dropout_head), c3 = Simd::iset(s.dropout_key.c3);
    uint32_t k0 = s.dropout_key.k0, k1 = s.dropout_key.k1;
    for (int round = 0; round < kPhiloxRounds; ++round) {
      I high0, low0, high1, low1;
      Simd::mul_wide(c0, 0xD2511F53u, high0, low0);
      Simd::mul_wide(c2, 0xCD9E8D57u, high1, low1);
      c0 = Simd::ixor(Simd::ixor(high1, c1), Simd::iset(k0));
      c1 = low1;
      c2 = Simd::ixor(Simd::ixor(high0, c3), Simd::iset(k1));
      c3 = low0;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const I of_call[4] = {c0, c1, c2, c3};
    for (int w = 0; w < 4; ++w) {
      Simd::istore(words[0][w] + lane, of_call[w]);
      Simd::istore(words[1][w] + lane, Simd::ior(Simd::template shl<8>(of_call[w]), Simd::template shr<24>(of_call[w])));
    }
  }
}

// 16 bits of each of kWidth columns from column c of a block on, of which `eight` has eight and eight.
FA_INLINE I drawn_bits(const uint32_t *const (&eight)[2], int c) {
#if defined(__AVX512F__)
  (void)c;
  const auto load = [](const uint32_t *x) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(x)); };
  return _mm512_cvtepu16_epi32(_mm256_inserti128_si256(_mm256_castsi128_si256(load(eight[0])), load(eight[1]), 1));
#else
  const auto *from = reinterpret_cast<const uint16_t *>(eight[c / 8]) + c % 8;
  return Simd::template shr<16>(Simd::bits(Simd::load_bf16(from)));
#endif
}

// Scale of every P of the tile: 0 where it is dropped, 1 / (1 - p) where it is kept.
inline void dropout_scales(const Score &s, const Tile &t, float *scales, int64_t ld) {
  const I limit = Simd::iset(s.dropout_kept.limit), number = Simd::iset(kDropoutSteps - 1);
  const F kept = Simd::set(s.dropout_scale), below = s.dropout_kept.below ? kept : Simd::zero(),
          above = s.dropout_kept.below ? Simd::zero() : kept;
  const int64_t row_end = t.row + t.rows, col_end = t.col + t.cols;
  for (int64_t bi = t.row / 16; 16 * bi < row_end; ++bi) {
    for (int64_t bj = t.col / 16; 16 * bj < col_end; ++bj) {
      uint32_t words[2][4][16];
      dropout_block(s, s.dropout_block_row + bi, s.dropout_block_column + bj, words);
      const int64_t c_begin = max64(16 * bj, t.col), c_end = min64(16 * bj + 16, col_end);
      for (int64_t i = max64(16 * bi, t.row); i < min64(16 * bi + 16, row_end); ++i) {
        // Words hold the 16 bits of columns j and j + 1 in their low and high halves: in memory, 8 columns in order.
        const int64_t half = 2 * ((i >> 3) & 1), call = 4 * ((i & 7) >> 1);
        const uint32_t *const eight[2] = {&words[i & 1][half][call], &words[i & 1][half + 1][call]};
        const auto scale = [&](int c) __attribute__((always_inline)) {
          return Simd::select(Simd::ilt(Simd::iand(drawn_bits(eight, c), number), limit), below, above);
        };
        float *const to = scales + (i - t.row) * ld + (c_begin - t.col);
        if (c_end - c_begin == 16) {
          for (int c = 0; c < 16; c += kWidth) Simd::store(to + c, scale(c));
        } else {
          float row[16];
          for (int c = 0; c < 16; c += kWidth) Simd::store(row + c, scale(c));
          __builtin_memcpy(to, row + (c_begin - 16 * bj), static_cast<size_t>(c_end - c_begin) * sizeof(float));
        }
      }
    }
  }
}

}  // namespace fa::cpu::FA_ISA
