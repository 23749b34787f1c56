// SPDX-License-Identifier: Apache-2.0
// Masks given as data: block mask, block lists, element mask and slices; and by a user's function. All of them become one thing, bits of the visible pairs of some
// rows and a block of keys, from which kernels learn whether a tile is empty, full or partial. Empty tiles are skipped, full ones run no
// mask code, and in partial ones the logits of masked pairs become -inf.
#pragma once

#include "core/score.h"
#include "cpu/block_lists.h"
#include "cpu/forward_layout.h"
#include "cpu/simd.h"

namespace fa::cpu::FA_ISA {

// How much of a tile is masked.
enum class Masking { kNone, kSome, kAll };

// One bit per key of a block, the lowest first.
constexpr int64_t kMaskWords = kBlockKeys / 64;
using RowBits = uint64_t[kMaskWords];

// What was made of the masks of a problem before a kernel asks for bits.
struct PreparedMasks {
  const uint64_t *list_bits = nullptr;  // make_block_list_bits
  const int32_t *active = nullptr;      // slices that can show a pair of the tiles in question; null: all of them
  int64_t num_active = 0;
  const ScoreCall *user = nullptr;
};

// Writes the slices that touch the rows and the keys of two sequences to `active`, which has room for all; returns their number, and the
// keys between the first and the last that they show.
inline int64_t gather_slices(const Slices &slices, Range rows, int64_t q_start, Range keys, int64_t k_start, int32_t *active,
                             Range &shown) {
  int64_t count = 0;
  shown = {keys.end, keys.begin};
  for (int64_t n = 0; n < slices.count; ++n) {
    const Slice s = slices[n];
    const int64_t q_begin = max64(s.q_begin - q_start, rows.begin), q_end = min64(s.q_end - q_start, rows.end);
    const int64_t k_begin = max64(s.k_begin - k_start, keys.begin), k_end = min64(s.k_end - k_start, keys.end);
    if (q_begin >= q_end || k_begin >= k_end) continue;
    active[count++] = static_cast<int32_t>(n);
    shown = {min64(shown.begin, k_begin), max64(shown.end, k_end)};
  }
  if (count == 0) shown = {keys.begin, keys.begin};
  return count;
}

// The masks of one (batch entry, query head). Rows and keys are counted within the sequence.
struct DataMask {
  const uint8_t *blocks = nullptr;  // (block rows, block columns)
  int64_t block_row_stride = 0;
  int64_t block_col_stride = 0;
  int64_t block_rows = 1;
  int64_t block_cols = 1;

  const uint64_t *list_bits = nullptr;  // (block rows, list_words)
  int64_t list_words = 0;
  int64_t list_rows = 1;
  int64_t list_cols = 1;

  const uint8_t *elements = nullptr;  // (rows, keys)
  bool element_bits = false;
  int64_t element_row_stride = 0;
  int64_t element_col_stride = 0;

  Slices slices;
  const int32_t *active = nullptr;
  int64_t num_active = 0;
  int64_t q_start = 0, k_start = 0;  // what slices count a sequence's first row and key as

  const ScoreCall *user = nullptr;  // a function that masks pairs
  fa_score_position position{};     // of its first pair
};

inline DataMask make_data_mask(const MaskedProblem &p, const PreparedMasks &prepared, int64_t b, int64_t h,
                               const Sequence &queries, const Sequence &keys) {
  DataMask m;
  if (p.block_mask.data != nullptr) {
    m.blocks = p.block_mask.data + b * p.block_mask.batch_stride + h * p.block_mask.head_stride;
    m.block_row_stride = p.block_mask.row_stride;
    m.block_col_stride = p.block_mask.col_stride;
    m.block_rows = p.block_mask.size_q;
    m.block_cols = p.block_mask.size_k;
  }
  if (p.block_lists.given) {
    const BlockLists &lists = p.block_lists;
    const int64_t plane = (lists.per_batch ? b : 0) * (lists.per_head ? p.heads_q : 1) + (lists.per_head ? h : 0);
    m.list_words = (lists.blocks_k + 63) / 64;
    m.list_bits = prepared.list_bits + plane * lists.blocks_q * m.list_words;
    m.list_rows = lists.size_q;
    m.list_cols = lists.size_k;
  }
  if (p.element_mask.given) {
    const ElementMask &mask = p.element_mask;
    m.elements = mask.data + b * mask.batch_stride + h * mask.head_stride;
    m.element_bits = mask.bits;
    m.element_row_stride = mask.row_stride;
    m.element_col_stride = mask.col_stride;
  }
  if (p.slices.given) {
    m.slices = p.slices;
    m.active = prepared.active;
    m.num_active = prepared.active != nullptr ? prepared.num_active : p.slices.count;
    m.q_start = queries.start;
    m.k_start = keys.start;
  }
  if (prepared.user != nullptr && prepared.user->masks_pairs()) {
    m.user = prepared.user;
    m.position = {b, h, 0, 0, queries.len, keys.len, queries.start, keys.start};
  }
  return m;
}

// Sets bits [begin, end) of words.
FA_INLINE void set_bits(RowBits &words, int64_t begin, int64_t end) {
  for (int64_t w = 0; w < kMaskWords; ++w) {
    const int64_t from = max64(begin - 64 * w, 0), to = min64(end - 64 * w, 64);
    if (from < to) words[w] |= (~uint64_t{0} >> (64 - (to - from))) << from;
  }
}

FA_INLINE void and_bits(RowBits &words, const RowBits &other) {
  for (int64_t w = 0; w < kMaskWords; ++w) words[w] &= other[w];
}

// Sets bits [at, at + 64) where those of `bits` are set, which has none past the last word.
FA_INLINE void place_bits(RowBits &words, int64_t at, uint64_t bits) {
  words[at / 64] |= bits << (at % 64);
  if (at % 64 > 0 && at / 64 + 1 < kMaskWords) words[at / 64 + 1] |= bits >> (64 - at % 64);
}

// Bit n says whether byte n of 64 is not zero.
FA_INLINE uint64_t bits_of_bytes(const uint8_t *bytes) {
#if defined(__AVX512BW__)
  const __m512i x = _mm512_loadu_si512(bytes);
  return _mm512_test_epi8_mask(x, x);
#elif defined(__AVX2__)
  uint64_t zero = 0;
  for (int n = 0; n < 64; n += 32) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes + n));
    zero |= uint64_t{static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256())))} << n;
  }
  return ~zero;
#else
  uint64_t bits = 0;
  for (int n = 0; n < 64; n += 8) {
    // The top bit of each byte that is not zero, then all of them in one byte.
    constexpr uint64_t kLow = 0x7F7F7F7F7F7F7F7Fu;
    uint64_t x;
    __builtin_memcpy(&x, bytes + n, sizeof x);
    const uint64_t top = (((x & kLow) + kLow) | x) & ~kLow;
    bits |= (((top >> 7) * 0x0102040810204080u) >> 56) << n;
  }
  return bits;
#endif
}

// Sets those of the bits [begin, end) whose byte is not zero; that of bit `begin` is bytes[0].
FA_INLINE void set_bits_of_bytes(RowBits &words, const uint8_t *bytes, int64_t begin, int64_t end) {
  int64_t at = begin;
  for (; at + 64 <= end; at += 64) place_bits(words, at, bits_of_bytes(bytes + at - begin));
  if (at == end) return;
  uint8_t last[64] = {};
  __builtin_memcpy(last, bytes + at - begin, static_cast<size_t>(end - at));
  place_bits(words, at, bits_of_bytes(last));
}

// Bits of keys [keys.begin, keys.end) of one row of the element mask, bit 0 being key `origin`.
inline void element_row_bits(const DataMask &m, int64_t row, int64_t origin, Range keys, RowBits &words) {
  for (int64_t w = 0; w < kMaskWords; ++w) words[w] = 0;
  const uint8_t *from = m.elements + row * m.element_row_stride;
  if (m.element_col_stride == 0) {
    if ((m.element_bits ? from[0] & 1 : from[0]) != 0) set_bits(words, keys.begin - origin, keys.end - origin);
    return;
  }
  if (m.element_bits) {
    // Whole bytes from the one that holds the first key, then shifted into place.
    uint8_t bytes[kBlockKeys / 8 + 16] = {};
    const int64_t first = keys.begin / 8, shift = keys.begin % 8, to = keys.begin - origin;
    __builtin_memcpy(bytes, from + first, static_cast<size_t>((keys.end + 7) / 8 - first));
    for (int64_t n = 0; n * 64 < keys.size(); ++n) {
      uint64_t word, next = bytes[8 * n + 8];
      __builtin_memcpy(&word, bytes + 8 * n, sizeof word);
      if (shift > 0) word = word >> shift | next << (64 - shift);
      if (keys.size() - 64 * n < 64) word &= ~uint64_t{0} >> (64 - (keys.size() - 64 * n));
      place_bits(words, to + 64 * n, word);
    }
    return;
  }
  if (m.element_col_stride == 1) return set_bits_of_bytes(words, from + keys.begin, keys.begin - origin, keys.end - origin);
  for (int64_t j = keys.begin; j < keys.end; ++j) {
    words[(j - origin) / 64] |= uint64_t{from[j * m.element_col_stride] != 0} << ((j - origin) % 64);
  }
}

// What the user's function says of a tile. Without a function that judges pairs, all those of a partial tile are visible.
inline fa_score_tile user_tile(const DataMask &m, Range rows, Range keys) {
  const fa_score_source &f = m.user->source;
  if (f.tile != nullptr) {
    fa_score_position first = m.position;
    first.i = rows.begin;
    first.j = keys.begin;
    const fa_score_tile tile = f.tile(&first, rows.size(), keys.size(), &m.user->aux);
    if (tile == FA_SCORE_TILE_EMPTY || tile == FA_SCORE_TILE_FULL) return tile;
  }
  return f.visible != nullptr || f.run_visible != nullptr ? FA_SCORE_TILE_PARTIAL : FA_SCORE_TILE_FULL;
}

// Takes the pairs that the user's function masks out of the bits of a row.
__attribute__((noinline)) inline void and_user_visible(const DataMask &m, int64_t row, int64_t origin, Range keys,
                                                       RowBits &words) {
  uint64_t any = 0;
  for (int64_t w = 0; w < kMaskWords; ++w) any |= words[w];
  if (any == 0) return;
  const fa_score_source &f = m.user->source;
  fa_score_position position = m.position;
  position.i = row;
  position.j = keys.begin;
  RowBits visible = {};
  if (f.run_visible != nullptr) {
    uint8_t shown[kBlockKeys];
    f.run_visible(shown, &position, keys.size(), &m.user->aux);
    set_bits_of_bytes(visible, shown, keys.begin - origin, keys.end - origin);
  } else {
    for (; position.j < keys.end; ++position.j) {
      const int64_t at = position.j - origin;
      if ((words[at / 64] >> (at % 64) & 1) == 0) continue;
      if (f.visible(&position, &m.user->aux) != 0) visible[at / 64] |= uint64_t{1} << (at % 64);
    }
  }
  and_bits(words, visible);
}

// Bits of the pairs of `rows` and `keys` that every mask shows: bit j - origin of bits[i - rows.begin] is that of row i and key j. `keys` lies
// within [origin, origin + kBlockKeys); bits of other keys are zero.
__attribute__((noinline)) inline Masking visible_bits(const DataMask &m, Range rows, Range keys, int64_t origin,
                                                      RowBits *bits) {
  const fa_score_tile by_user = m.user != nullptr ? user_tile(m, rows, keys) : FA_SCORE_TILE_FULL;
  if (by_user == FA_SCORE_TILE_EMPTY) {
    for (int64_t r = 0; r < rows.size(); ++r) __builtin_memset(bits[r], 0, sizeof bits[r]);
    return Masking::kAll;
  }
  RowBits full = {};
  set_bits(full, keys.begin - origin, keys.end - origin);
  for (int64_t r = 0; r < rows.size(); ++r) __builtin_memcpy(bits[r], full, sizeof full);

  // Calls shown(row of blocks, column of blocks) once for each block that the tile touches.
  const auto and_blocks = [&](int64_t block_rows, int64_t block_cols, auto shown) {
    for (int64_t i = rows.begin / block_rows; i * block_rows < rows.end; ++i) {
      RowBits of_blocks = {};
      for (int64_t j = keys.begin / block_cols; j * block_cols < keys.end; ++j) {
        if (!shown(i, j)) continue;
        set_bits(of_blocks, max64(j * block_cols, keys.begin) - origin, min64((j + 1) * block_cols, keys.end) - origin);
      }
      const int64_t end = min64((i + 1) * block_rows, rows.end);
      for (int64_t row = max64(i * block_rows, rows.begin); row < end; ++row) and_bits(bits[row - rows.begin], of_blocks);
    }
  };
  if (m.blocks != nullptr) {
    and_blocks(m.block_rows, m.block_cols,
               [&](int64_t i, int64_t j) { return m.blocks[i * m.block_row_stride + j * m.block_col_stride] != 0; });
  }
  if (m.list_bits != nullptr) {
    and_blocks(m.list_rows, m.list_cols,
               [&](int64_t i, int64_t j) { return (m.list_bits[i * m.list_words + j / 64] >> (j % 64) & 1) != 0; });
  }
  if (m.elements != nullptr) {
    RowBits of_row;
    for (int64_t r = 0; r < rows.size(); ++r) {
      if (r == 0 || m.element_row_stride != 0) element_row_bits(m, rows.begin + r, origin, keys, of_row);
      and_bits(bits[r], of_row);
    }
  }
  if (m.slices.given) {
    for (int64_t r = 0; r < rows.size(); ++r) {
      RowBits of_row = {};
      for (int64_t n = 0; n < m.num_active; ++n) {
        const Range seen = m.slices[m.active != nullptr ? m.active[n] : n].keys(rows.begin + r + m.q_start);
        set_bits(of_row, max64(seen.begin - m.k_start, keys.begin) - origin, min64(seen.end - m.k_start, keys.end) - origin);
      }
      and_bits(bits[r], of_row);
    }
  }

  if (by_user == FA_SCORE_TILE_PARTIAL) {
    for (int64_t r = 0; r < rows.size(); ++r) and_user_visible(m, rows.begin + r, origin, keys, bits[r]);
  }

  uint64_t any = 0, missing = 0;
  for (int64_t r = 0; r < rows.size(); ++r) {
    for (int64_t w = 0; w < kMaskWords; ++w) {
      any |= bits[r][w];
      missing |= full[w] & ~bits[r][w];
    }
  }
  return any == 0 ? Masking::kAll : missing != 0 ? Masking::kSome : Masking::kNone;
}

// Of a tile that two masks apply to, and of two parts of a tile.
FA_INLINE Masking conjunction(Masking a, Masking b) {
  if (a == Masking::kAll || b == Masking::kAll) return Masking::kAll;
  return a == Masking::kNone ? b : a;
}
FA_INLINE Masking both(Masking a, Masking b) { return a == b ? a : Masking::kSome; }

// Writes -inf to x (rows x cols, ld) where the bit is not set; column 0 has bit `first`, a multiple of kWidth. Whole vectors are written.
inline void mask_by_bits(const RowBits *bits, int64_t rows, int64_t first, int64_t cols, float *x, int64_t ld) {
  const F minus_infinity = Simd::set(-kInfinity);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols;) {
      // Up to the end of a word. Where it hides something all its vectors are written: a branch for each is hard to foresee.
      const int64_t at = first + c, n = min64(cols - c, 64 - at % 64);
      const uint64_t shown = bits[r][at / 64] >> (at % 64);
      float *to = x + r * ld + c;
      if ((~shown & ~uint64_t{0} >> (64 - n)) != 0) {
        for (int64_t i = 0; i < n; i += kWidth)
          Simd::store(to + i, Simd::select(Simd::lanes(static_cast<uint32_t>(shown >> i)), Simd::load(to + i), minus_infinity));
      }
      c += n;
    }
  }
}

}  // namespace fa::cpu::FA_ISA
