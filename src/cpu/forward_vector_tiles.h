// SPDX-License-Identifier: Apache-2.0
// Products of the vector forward kernel on the tile unit (AMX). Keys are the left operand of S^T = K Q^T: a tile of 16 keys is loaded from where they lie.
// Values are the right operand of O = P V and are interleaved on the way.
//
//   bf16   queries, keys and P in bf16; the row sum takes P unrounded
//   int8   queries and P become integers of 31 bits, in units that each row has for itself, and these four digits of a byte. All products are of bytes and
//          exact, and the integers keep more digits of a row's largest numbers than fp32
//
// The queries of several heads share the columns of a tile: 16 rows of bf16, or 8 rows with four digits, which take two tiles.
//
// Left to floats are heads of fewer rows than kLeastRows, which are not worth tiles that have 16, and
//   bf16: key heads whose queries have numbers so small or so large that the unit would get S wrong, and O of key heads with a masked P in the
//         split, whose values may not be finite
//   int8: key heads whose queries, or P, are not finite or have no units
#pragma once

#include "cpu/forward_split.h"
#include "cpu/pack_tiles.h"

namespace fa::cpu::FA_ISA {

// Numbers of bf16: two columns of keys, or two values, in four bytes.
struct TileBf16 {
  static constexpr int64_t kBytes = 2;
  static constexpr int kTiles = 1;         // of queries for one of keys, and of P for one of values
  static constexpr int64_t kColumns = 16;  // rows of queries in them
  static constexpr int64_t kLeastRows = kTileVectorRows;
  static constexpr int kTogether = 2;  // values in four bytes
  template <int C, int A, int B>
  static FA_INLINE void dot(Tiles &tiles) {
    tiles.dot<C, A, B>();
  }
};
// Bytes: four in four bytes. The two tiles have digits 3 and 2, and 1 and 0, where digit 0 is the lowest.
struct TileI8 {
  static constexpr int64_t kBytes = 1;
  static constexpr int kTiles = 2;
  static constexpr int64_t kColumns = 8;
  static constexpr int64_t kLeastRows = 3;
  static constexpr int kTogether = 4;
  template <int C, int A, int B>
  static FA_INLINE void dot(Tiles &tiles) {
    tiles.dot_i8<C, A, B>();
  }
};

constexpr int64_t kStepBytes = 64;  // of a row of a tile

// Sixteen keys of a head as the rows of a tile.
struct KeyRows {
  const char *at;
  int64_t stride;
};
// Whether the keys of a piece can be that where they lie: they are equally far apart, and their `bytes` bytes are whole steps.
inline bool are_tile_rows(const KeyPiece &piece, int64_t bytes) {
  if (piece.count != kTileRows || bytes % kStepBytes != 0) return false;
  const int64_t stride = piece.rows[1] - piece.rows[0];
  bool even = true;
  for (int n = 2; n < kTileRows; ++n) even = even && piece.rows[n] - piece.rows[n - 1] == stride;
  return even;
}
// Rows of `bytes` bytes, `offset` behind piece.rows: where they lie, if they can be rows of a tile (`even`), else a copy of `stride` bytes a row.
inline KeyRows key_rows(const KeyPiece &piece, bool even, int64_t offset, int64_t bytes, char *copy, int64_t stride) {
  if (even) return {piece.rows[0] + offset, piece.rows[1] - piece.rows[0]};
  for (int64_t n = 0; n < kTileRows; ++n) {
    char *to = copy + n * stride;
    if (n < piece.count) __builtin_memcpy(to, piece.rows[n] + offset, static_cast<size_t>(bytes));
    const int64_t filled = n < piece.count ? bytes : 0;
    __builtin_memset(to + filled, 0, static_cast<size_t>(stride - filled));
  }
  return {copy, stride};
}

// Sixteen columns of the right operand of one step: column n is 64 bytes at columns[n], or zero.
inline void pack_columns(const uint32_t *const *columns, uint32_t *to) {
  for (int64_t first = 0; first < kTileRows; first += kWidth) {
    for (int64_t i = 0; i < kTileRows; i += kWidth) {
      F block[kWidth];
#pragma GCC unroll 16
      for (int n = 0; n < kWidth; ++n)
        block[n] = columns[first + n] != nullptr ? Simd::from_bits(Simd::iload(columns[first + n] + i)) : Simd::zero();
      Simd::transpose(block);
#pragma GCC unroll 16
      for (int n = 0; n < kWidth; ++n) Simd::istore(to + (i + n) * kTileRows + first, Simd::bits(block[n]));
    }
  }
}
// Queries as right operands, a tile for each step: column n is row n of `count` <= kTileRows rows, padded to ldq floats. numbers(a, b): what of them is packed,
// in pairs.
template <class Numbers>
inline void pack_query_columns(const float *q, int64_t ldq, int64_t count, int64_t steps, char *to, Numbers numbers) {
  for (int64_t step = 0; step < steps; ++step, to += kTileBytes) {
    uint16_t rows[kTileRows][kTileDepth] = {};
    const uint32_t *columns[kTileRows] = {};
    for (int64_t n = 0; n < count; ++n) {
      const float *from = q + n * ldq + step * kTileDepth;
      for (int64_t c = 0; c < kTileDepth; c += 2 * kWidth) {
        const auto part = [&](int64_t at) { return step * kTileDepth + at < ldq ? Simd::load(from + at) : Simd::zero(); };
        Simd::istore(reinterpret_cast<uint32_t *>(rows[n] + c), numbers(part(c), part(c + kWidth)));
      }
      columns[n] = reinterpret_cast<const uint32_t *>(rows[n]);
    }
    pack_columns(columns, reinterpret_cast<uint32_t *>(to));
  }
}

inline void pack_query_columns(const float *q, int64_t ldq, int64_t count, int64_t steps, char *to) {
  pack_query_columns(
      q, ldq, count, steps, to, [](F a, F b) __attribute__((always_inline)) { return Simd::to_bf16(a, b); });
}

class VectorProducts {
 public:
  VectorProducts(const ForwardProblem &problem, const ForwardLayout &layout)
      : p_(problem), layout_(layout), steps_((problem.head_dim * dtype_bytes(problem.k.dtype) + kStepBytes - 1) / kStepBytes) {}

  // Takes a split whose queries lie in the area, or returns false.
  bool begin(char *scratch, const Head &head, const VectorSplit &split, const VectorArea &area) {
    const bool bytes = p_.k.dtype == Dtype::i8;
    if (layout_.vector_tiles.bytes() == 0 || split.rows < (bytes ? TileI8::kLeastRows : TileBf16::kLeastRows)) return false;
    if (packed_batch_ == head.b && packed_head_ == split.first) return true;  // a split of the same heads
    packed_batch_ = head.b;
    packed_head_ = split.first;
    const VectorTilesLayout &l = layout_.vector_tiles;
    char *at = scratch + layout_.vector_at;
    const auto take = [&](size_t size) {
      char *first = at;
      at += size;
      return first;
    };
    q_ = take(l.queries);
    sums_ = reinterpret_cast<float *>(take(l.sums));
    keys_ = take(l.keys);
    values_ = take(l.values);
    tails_ = take(l.tails);
    p_rows_ = take(l.p);
    __builtin_memset(p_rows_, 0, l.p);
    per_set_ = (bytes ? TileI8::kColumns : TileBf16::kColumns) / split.rows;
    for (int64_t h = 0; h < split.count; h += per_set_) {
      const int64_t heads = min64(per_set_, split.count - h);
      bytes ? pack_digits(split, area, h, heads) : pack_pairs(split, area, h, heads);
    }
    return true;
  }

  // Raw S; done[h] says for which heads.
  void scores(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area, bool *done) {
    p_.k.dtype == Dtype::i8 ? scores_of<TileI8>(head, split, visited, area) : scores_of<TileBf16>(head, split, visited, area);
    for (int64_t h = 0; h < split.count; ++h) done[h] = moderate_[h];
  }

  // O = P V; done[h] says for which heads. masked[row] says whether some P of the row are masked.
  void outputs(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area,
               const bool *masked, bool *done) {
    const bool bytes = p_.v.dtype == Dtype::i8;
    for (int64_t h = 0; h < split.count; ++h) {
      done[h] = true;
      for (int64_t r = h * split.rows; r < (h + 1) * split.rows; ++r)
        done[h] = done[h] && (bytes ? finite(area.s + r * VectorArea::kLds, visited) : !masked[r]);
    }
    for_runs_of(done, split.count, [&](Range heads) { clear_outputs(split, area, heads); });
    bytes ? outputs_of<TileI8>(head, split, visited, area, done) : outputs_of<TileBf16>(head, split, visited, area, done);
  }

 private:
  static constexpr int64_t kValueColumns = 64;  // that are computed together
  static constexpr int64_t kDigits = 4;

  // Sums of sixteen keys of some heads and the queries of their set.
  struct Sums {
    float *at = nullptr;
    int64_t first = 0, heads = 0;
    int64_t key = 0;  // of the split
    int64_t keys = 0;
  };
  static constexpr int64_t kSetFloats = 4 * kTileFloats;  // at most: three heads of bf16, or two tiles of two heads each

  // Queries of heads [h, h + heads): column n is row n of them.
  void pack_pairs(const VectorSplit &split, const VectorArea &area, int64_t h, int64_t heads) {
    for (int64_t n = h; n < h + heads; ++n) {
      QueryNumbers numbers;
      for (int64_t i = 0; i < split.rows * area.ldq; i += kWidth)
        numbers.see(Simd::load(area.q + n * split.rows * area.ldq + i));
      moderate_[n] = numbers.moderate();
    }
    pack_query_columns(area.q + h * split.rows * area.ldq, area.ldq, heads * split.rows, steps_,
                       q_ + h / per_set_ * steps_ * kTileBytes);
  }

  // The unit in which numbers up to `most`, which is finite, are integers below 2^30: a power of two, or 0 where there is none.
  static float unit_of(float most) {
    if (most == 0) return 1.0f;
    if (most < 0x1p-60f) return 0;
    const uint32_t exponent = __builtin_bit_cast(uint32_t, most) >> 23;  // most < 2^(exponent - 126)
    return __builtin_bit_cast(float, (exponent + 1 - 30) << 23);
  }
  // The integers of numbers times 1 / unit, as digits of [-128, 127].
  static FA_INLINE I digits_of(F x, F scale) {
    const I half = Simd::iset(0x808080);
    return Simd::ixor(Simd::iadd(Simd::to_int(Simd::mul(x, scale)), half), half);
  }
  static FA_INLINE void store_digits(I digits, uint8_t *to, int64_t stride) {
    Simd::istore_u8(to, Simd::shr<24>(digits));
    Simd::istore_u8(to + stride, Simd::shr<16>(digits));
    Simd::istore_u8(to + 2 * stride, Simd::shr<8>(digits));
    Simd::istore_u8(to + 3 * stride, digits);
  }

  // Queries of heads [h, h + heads): column n of the first tile is digit 3 of row n, column 8 + n digit 2; the second tile has digits 1 and 0.
  void pack_digits(const VectorSplit &split, const VectorArea &area, int64_t h, int64_t heads) {
    const int64_t rows = heads * split.rows, first = h * split.rows;
    for (int64_t n = 0; n < heads; ++n) moderate_[h + n] = true;
    for (int64_t n = 0; n < rows; ++n) {
      F most = Simd::zero(), probe = Simd::zero();
      for (int64_t c = 0; c < area.ldq; c += kWidth) {
        const F x = Simd::load(area.q + (first + n) * area.ldq + c);
        most = Simd::max(Simd::abs(x), most);
        probe = Simd::fma(x, Simd::zero(), probe);
      }
      const float unit = Simd::reduce_add(probe) == 0 ? unit_of(Simd::reduce_max(most)) : 0;
      if (unit == 0) moderate_[h + n / split.rows] = false;
      units_[first + n] = unit;
    }
    char *to = q_ + h / per_set_ * steps_ * 2 * kTileBytes;
    for (int64_t step = 0; step < steps_; ++step, to += 2 * kTileBytes) {
      alignas(64) uint8_t rows_digits[TileI8::kColumns][kDigits][kStepBytes] = {};
      const uint32_t *columns[kDigits * TileI8::kColumns] = {};
      for (int64_t n = 0; n < rows; ++n) {
        if (units_[first + n] == 0) continue;
        const F scale = Simd::set(1.0f / units_[first + n]);
        for (int64_t c = 0; c < min64(kStepBytes, area.ldq - step * kStepBytes); c += kWidth) {
          const F x = Simd::load(area.q + (first + n) * area.ldq + step * kStepBytes + c);
          store_digits(digits_of(x, scale), rows_digits[n][0] + c, kStepBytes);
        }
        for (int64_t digit = 0; digit < kDigits; ++digit)
          columns[digit * TileI8::kColumns + n] = reinterpret_cast<const uint32_t *>(rows_digits[n][digit]);
      }
      pack_columns(columns, reinterpret_cast<uint32_t *>(to));
      pack_columns(columns + kTileRows, reinterpret_cast<uint32_t *>(to + kTileBytes));
    }
  }

  // Sums of a tile of keys of each of kHeads heads and the queries of their set.
  template <class Numbers, int kHeads>
  FA_INLINE void multiply_keys(const KeyRows (&keys)[kHeads], const char *q, float *sums, Ahead &ahead) {
    constexpr bool kTwo = kHeads * Numbers::kTiles == 2;
    tiles_.zero<0>();
    if constexpr (kTwo) tiles_.zero<1>();
    for (int64_t step = 0; step < steps_; ++step, q += Numbers::kTiles * kTileBytes) {
      tiles_.load<4>(keys[0].at + step * kStepBytes, keys[0].stride);
      if constexpr (kHeads == 2) tiles_.load<5>(keys[1].at + step * kStepBytes, keys[1].stride);
      tiles_.load<6>(q);
      if constexpr (Numbers::kTiles == 2) tiles_.load<7>(q + kTileBytes);
      Numbers::template dot<0, 4, 6>(tiles_);
      if constexpr (kHeads == 2) Numbers::template dot<1, 5, 6>(tiles_);
      if constexpr (Numbers::kTiles == 2) Numbers::template dot<1, 4, 7>(tiles_);
      ahead.step();
    }
    tiles_.store<0>(sums);
    if constexpr (kTwo) tiles_.store<1>(sums + kTileFloats);
  }

  template <class Numbers>
  void scores_of(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area) {
    const HeadRows keys = head_rows(p_, p_.k, head, split, split.keys), values = head_rows(p_, p_.v, head, split, split.keys);
    Ahead ahead(keys, values, steps_ / (per_set_ > 1 ? 3 - Numbers::kTiles : 1) + split.rows * kTileRows / kWidth,
                kVectorTileKeys);
    Sums pending;
    int64_t turn = 0;
    for_visited_pieces(keys.rows, split.keys.begin, visited, [&](const KeyPiece &piece) {
      ahead.begin(piece);
      const bool even = are_tile_rows(piece, keys.row_bytes);
      for (int64_t first = 0; first < split.count; first += per_set_) {
        const Sums now{sums_ + turn * kSetFloats, first, min64(per_set_, split.count - first), piece.first - split.keys.begin,
                       piece.count};
        const char *q = q_ + first / per_set_ * steps_ * Numbers::kTiles * kTileBytes;
        const auto rows = [&](int64_t h, int64_t copy) {
          const int64_t stride = steps_ * kStepBytes;
          return key_rows(piece, even, (first + h) * keys.head_bytes, keys.row_bytes, keys_ + copy * kTileRows * stride,
                          stride);
        };
        int64_t h = 0;
        if constexpr (Numbers::kTiles == 1) {
          for (; h + 2 <= now.heads; h += 2) {
            multiply_keys<Numbers, 2>({rows(h, 0), rows(h + 1, 1)}, q, now.at + h * kTileFloats, ahead);
          }
        }
        for (; h < now.heads; ++h) {
          multiply_keys<Numbers, 1>({rows(h, 0)}, q, now.at + h * Numbers::kTiles * kTileFloats, ahead);
        }
        put_scores<Numbers>(split, area, pending, ahead);  // while the unit computes
        pending = now;
        turn ^= 1;
      }
    });
    put_scores<Numbers>(split, area, pending, ahead);
    ahead.finish();
  }

  // S of the heads of a set from the sums of each.
  template <class Numbers>
  void put_scores(const VectorSplit &split, const VectorArea &area, const Sums &x, Ahead &ahead) const {
    float *const to = area.s + x.first * split.rows * VectorArea::kLds + x.key;
    const int64_t rows = x.heads * split.rows;
    constexpr int64_t kTileFloatsOfHead = Numbers::kTiles * kTileFloats;
    for (int64_t key = 0; key < x.keys; key += kWidth) {
      F of_row[kTileRows];  // lane n of of_row[r]: row r, key n
      for (int64_t column = 0; column < kTileRows; column += kWidth) {
        F block[kWidth];
#pragma GCC unroll 16
        for (int j = 0; j < kWidth; ++j) {
          const int64_t at = (key + j) * kTileRows + column;
          // The head that column n belongs to: its own sums are right there.
          F sum = sum_of<Numbers>(x.at + at);
          for (int64_t n = 1; n < x.heads; ++n) {
            const int64_t begin = n * split.rows;
            sum = Simd::select(column_lanes<Numbers>(column, begin, begin + split.rows),
                               sum_of<Numbers>(x.at + n * kTileFloatsOfHead + at), sum);
          }
          block[j] = sum;
        }
        Simd::transpose(block);
#pragma GCC unroll 16
        for (int j = 0; j < kWidth; ++j) of_row[column + j] = block[j];
      }
      const int n = static_cast<int>(min64(x.keys - key, kWidth));
      for (int64_t r = 0; r < rows; ++r) {
        ahead.step();
        F s = of_row[r];
        if constexpr (Numbers::kTiles == 2) {
          s = Simd::mul(Simd::fma(s, Simd::set(256.0f), of_row[TileI8::kColumns + r]),
                        Simd::set(units_[x.first * split.rows + r]));
        }
        n == kWidth ? Simd::store(to + r * VectorArea::kLds + key, s) : Simd::store(to + r * VectorArea::kLds + key, s, n);
      }
    }
  }
  // bf16: the sum. int8: digits 3 and 1 together, or 2 and 0.
  template <class Numbers>
  static FA_INLINE F sum_of(const float *at) {
    if constexpr (Numbers::kTiles == 1) return Simd::load(at);
    const auto digits = [](const float *x) { return Simd::to_float(Simd::bits(Simd::load(x))); };
    return Simd::fma(digits(at), Simd::set(65536.0f), digits(at + kTileFloats));
  }
  // Lanes of the columns `column` + lane that are rows [begin, end).
  template <class Numbers>
  static FA_INLINE M column_lanes(int64_t column, int64_t begin, int64_t end) {
    const uint32_t rows = ((1u << (end - begin)) - 1) << begin;
    return Simd::lanes((rows | (Numbers::kTiles == 2 ? rows << TileI8::kColumns : 0)) >> column & ((1u << kWidth) - 1));
  }

  static bool finite(const float *p, const VisitedKeys &visited) {
    F probe = Simd::zero();  // NaN as soon as one P is not finite
    for (int run = 0; run < visited.count; ++run) {
      const Range keys = visited.runs[run];
      for (int64_t c = keys.begin; c < keys.end; c += kWidth)
        probe = Simd::fma(Simd::load(p + c, static_cast<int>(min64(keys.end - c, kWidth))), Simd::zero(), probe);
    }
    return Simd::reduce_add(probe) == 0;
  }

  // P of a row and `keys` keys as the left operand.
  void pack_p(TileBf16, const float *p, int64_t r, int64_t keys) {
    uint16_t *to = reinterpret_cast<uint16_t *>(p_rows_) + r * kVectorTileKeys;
    for (int64_t c = 0; c < round_up(keys, kTileDepth); c += 2 * kWidth) {
      const auto part = [&](int64_t at) { return Simd::load(p + at, static_cast<int>(max64(min64(keys - at, kWidth), 0))); };
      Simd::istore(reinterpret_cast<uint32_t *>(to + c), Simd::to_bf16(part(c), part(c + kWidth)));
    }
  }
  void pack_p(TileI8, const float *p, int64_t r, int64_t keys) {
    F most = Simd::zero();
    for (int64_t c = 0; c < keys; c += kWidth)
      most = Simd::max(Simd::abs(Simd::load(p + c, static_cast<int>(min64(keys - c, kWidth)))), most);
    const float own_unit = unit_of(Simd::reduce_max(most));
    const float unit = own_unit != 0 ? own_unit : 1.0f;  // P that have none are zero in it, as beside a P of 1 in fp32
    p_units_[r] = unit;
    const F scale = Simd::set(1.0f / unit);
    auto *to = reinterpret_cast<uint8_t *>(p_rows_) + r * kVectorTileKeys;
    for (int64_t c = 0; c < round_up(keys, kStepBytes); c += kWidth) {
      const F x = Simd::load(p + c, static_cast<int>(max64(min64(keys - c, kWidth), 0)));
      store_digits(digits_of(x, scale), to + c, TileI8::kColumns * kVectorTileKeys);
    }
  }
  // Values of a step of keys and kValueColumns columns, as the right operands of four tiles of columns, whose order is that of interleave_lanes.
  template <class Numbers>
  static FA_INLINE void interleave_values(const char *const *rows, int64_t column, uint32_t *to, Ahead &ahead) {
    constexpr int kTogether = Numbers::kTogether;
    for (int64_t i = 0; i < kTileRows; ++i, rows += kTogether, to += kTileRows) {
      ahead.step();
#pragma GCC unroll 8
      for (int64_t c = 0; c < kValueColumns; c += kTogether * kWidth) {
        I of_columns[kTogether];
        Simd::interleave_lanes(rows, (column + c) * Numbers::kBytes, of_columns);
#pragma GCC unroll 4
        for (int n = 0; n < kTogether; ++n) Simd::istore(to + interleaved_at<Numbers>(c, n), of_columns[n]);
      }
    }
  }
  // Where in a row of four tiles vector n of the columns from c on lies.
  template <class Numbers>
  static FA_INLINE int64_t interleaved_at(int64_t c, int64_t n) {
    constexpr int64_t kOfTiles = Numbers::kTogether * kTileRows;  // columns whose tiles are interleaved
    return (c / kOfTiles * Numbers::kTogether + n) * kTileFloats + c % kOfTiles / Numbers::kTogether;
  }

  template <class Numbers>
  void outputs_of(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area,
                  const bool *done) {
    const HeadRows values = head_rows(p_, p_.v, head, split, split.keys),
                   next = head_rows(p_, p_.k, head, split, after(head, split));
    const int64_t column_groups = (p_.head_dim_v + kValueColumns - 1) / kValueColumns;
    Ahead ahead(values, next, column_groups * kPieceKeys / Numbers::kTogether, kVectorTileKeys);
    for (int run = 0; run < visited.count; ++run) {
      for (int64_t key = visited.runs[run].begin; key < visited.runs[run].end; key += kVectorTileKeys) {
        const int64_t keys = min64(visited.runs[run].end - key, kVectorTileKeys);
        const char *rows[kVectorTileKeys];
        for (int64_t n = 0; n < keys; ++n) rows[n] = values.rows.row(split.keys.begin + key + n);
        ahead.begin(split.keys.begin + key, keys);
        for (int64_t h = 0; h < split.count; ++h) {
          if (done[h]) head_output<Numbers>(rows, h * values.head_bytes, keys, split, area, h, key, ahead);
        }
      }
    }
    ahead.finish();
  }

  // O of head h += P V of `keys` <= kVectorTileKeys values at rows[n] + offset, of which `key` is the first of the split.
  template <class Numbers>
  void head_output(const char *const *rows, int64_t offset, int64_t keys, const VectorSplit &split, const VectorArea &area,
                   int64_t h, int64_t key, Ahead &ahead) {
    constexpr int64_t kStepKeys = kStepBytes / Numbers::kBytes;
    const int64_t steps = (keys + kStepKeys - 1) / kStepKeys;
    for (int64_t r = 0; r < split.rows; ++r) pack_p(Numbers{}, area.s + (h * split.rows + r) * VectorArea::kLds + key, r, keys);
    const char *of_head[kVectorTileKeys];
    for (int64_t n = 0; n < steps * kStepKeys; ++n) of_head[n] = n < keys ? rows[n] + offset : zeros_;
    for (int64_t c = 0; c < p_.head_dim_v; c += kValueColumns) {
      const char *const *from = of_head;
      int64_t column = c;
      if (c + kValueColumns > p_.head_dim_v) from = copy_tail<Numbers>(of_head, keys, c), column = 0;
      const auto values = [&](int64_t step) { return values_ + step * 4 * kTileBytes; };
      const auto interleave = [&](int64_t step) {
        interleave_values<Numbers>(from + step * kStepKeys, column, reinterpret_cast<uint32_t *>(values(step)), ahead);
      };
      const char *const p = p_rows_;
      clear_sums();
      interleave(0);
      for (int64_t step = 0; step < steps; ++step) {
        if (step + 1 < steps) interleave(step + 1);  // while the unit computes
        multiply_values(Numbers{}, p + step * kStepBytes, values(step));
      }
      store_sums(sums_);
      if constexpr (Numbers::kTiles == 2) {
        clear_sums();
        for (int64_t step = 0; step < steps; ++step)
          multiply_values(Numbers{}, p + step * kStepBytes, values(step) + 2 * kTileBytes);
        store_sums(sums_ + 4 * kTileFloats);
      }
      add_outputs<Numbers>(split.rows, min64(kValueColumns, area.ldo - c), area.o + h * split.rows * area.ldo + c, area.ldo);
    }
  }
  // The last columns of values, fewer than kValueColumns, with zeros behind them.
  template <class Numbers>
  const char *const *copy_tail(const char *const *rows, int64_t keys, int64_t c) {
    constexpr int64_t kBytes = kValueColumns * Numbers::kBytes;
    const auto bytes = static_cast<size_t>((p_.head_dim_v - c) * Numbers::kBytes);
    for (int64_t n = 0; n < kVectorTileKeys; ++n) {
      char *to = tails_ + n * kBytes;
      __builtin_memset(to, 0, static_cast<size_t>(kBytes));
      if (n < keys) __builtin_memcpy(to, rows[n] + c * Numbers::kBytes, bytes);
      tail_rows_[n] = to;
    }
    return tail_rows_;
  }

  FA_INLINE void clear_sums() {
    tiles_.zero<0>();
    tiles_.zero<1>();
    tiles_.zero<2>();
    tiles_.zero<3>();
  }
  FA_INLINE void store_sums(float *to) {
    tiles_.store<0>(to);
    tiles_.store<1>(to + kTileFloats);
    tiles_.store<2>(to + 2 * kTileFloats);
    tiles_.store<3>(to + 3 * kTileFloats);
  }
  // bf16: the sums of four tiles of columns.
  FA_INLINE void multiply_values(TileBf16, const char *p, const char *v) {
    tiles_.load<4>(p, kVectorTileKeys * 2);
    tiles_.load<5>(v);
    tiles_.load<6>(v + kTileBytes);
    tiles_.load<7>(v + 2 * kTileBytes);
    tiles_.dot<0, 4, 5>();
    tiles_.load<5>(v + 3 * kTileBytes);
    tiles_.dot<1, 4, 6>();
    tiles_.dot<2, 4, 7>();
    tiles_.dot<3, 4, 5>();
  }
  // int8: those of two, of digits 3 and 2 and of digits 1 and 0.
  FA_INLINE void multiply_values(TileI8, const char *p, const char *v) {
    tiles_.load<4>(p, kVectorTileKeys);
    tiles_.load<5>(p + kTileRows * kVectorTileKeys, kVectorTileKeys);
    tiles_.load<6>(v);
    tiles_.load<7>(v + kTileBytes);
    tiles_.dot_i8<0, 4, 6>();
    tiles_.dot_i8<1, 4, 7>();
    tiles_.dot_i8<2, 5, 6>();
    tiles_.dot_i8<3, 5, 7>();
  }
  // O of `columns` <= kValueColumns columns += the sums.
  template <class Numbers>
  void add_outputs(int64_t rows, int64_t columns, float *o, int64_t ldo) const {
    constexpr int kTogether = Numbers::kTogether;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; c += kTogether * kWidth) {
        F x[kTogether];
        for (int n = 0; n < kTogether; ++n) x[n] = sum_of_values(Numbers{}, interleaved_at<Numbers>(c, n), r);
        Simd::order_lanes(x);
        for (int64_t n = 0; n < kTogether && c + n * kWidth < columns; ++n) {
          float *to = o + r * ldo + c + n * kWidth;
          Simd::store(to, Simd::add(Simd::load(to), x[n]));
        }
      }
    }
  }
  F sum_of_values(TileBf16, int64_t at, int64_t r) const { return Simd::load(sums_ + at + r * kTileRows); }
  // The first two tiles of columns have digits 3 and 2, then 1 and 0; after these the other two have theirs.
  F sum_of_values(TileI8, int64_t at, int64_t r) const {
    const float *from = sums_ + at / (2 * kTileFloats) * 4 * kTileFloats + at % (2 * kTileFloats) + r * kTileRows;
    const auto digit = [&](int64_t n) {  // 3 - n
      return Simd::to_float(Simd::bits(Simd::load(from + n / 2 * 2 * kTileFloats + n % 2 * TileI8::kColumns * kTileRows)));
    };
    const F base = Simd::set(256.0f);
    const F sum = Simd::fma(Simd::fma(Simd::fma(digit(0), base, digit(1)), base, digit(2)), base, digit(3));
    return Simd::mul(sum, Simd::set(p_units_[r]));
  }

  static constexpr char zeros_[kMaxHeadDimV * 2] = {};  // a row of values

  const ForwardProblem &p_;
  const ForwardLayout &layout_;
  const int64_t steps_;                           // of Q K^T
  int64_t packed_batch_ = -1, packed_head_ = -1;  // whose queries are packed
  int64_t per_set_ = 0;                           // heads whose queries share tiles
  char *q_ = nullptr;                             // (set, step, tile): queries
  float *sums_ = nullptr;                         // (kSumTiles) tiles
  char *keys_ = nullptr;                          // 16 keys that are copied
  char *values_ = nullptr;                        // (step, 4 tiles): interleaved values
  char *p_rows_ = nullptr;                        // (digit, row, kVectorTileKeys): P
  char *tails_ = nullptr;                         // (kVectorTileKeys, 64 columns): values that are copied
  const char *tail_rows_[kVectorTileKeys];
  float units_[kVectorScratchRows], p_units_[kVectorRows];
  bool moderate_[kVectorScratchRows] = {};
  Tiles tiles_;
};

}  // namespace fa::cpu::FA_ISA
