// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with keys and values where they lie, without packing: blocks of some keys x some rows whose sums fill the
// registers, so that a number that was loaded and widened serves every row of the block. A sum is one chain over ascending columns, or
// keys, and its lanes are added in one order (Simd::reduce_add), so that results do not depend on how keys and rows are grouped.
#pragma once

#include <type_traits>

#include "cpu/pack.h"

namespace fa::cpu::FA_ISA {

// Keys that go through the products of a head together: enough that reading and writing sums of the output costs little, few enough that
// the heads of a key are read soon after one another.
constexpr int64_t kPieceKeys = 16;
// Bytes of rows, all heads together, that are prefetched ahead of a piece: the latency of memory over the time of a byte.
constexpr int64_t kPrefetchBytes = 32768;
// Sums of a block, which leave registers for its operands, and the most rows of one.
constexpr int kBlockSums = Simd::kRegisters == 32 ? 16 : 8;
constexpr int kMostBlockRows = kBlockSums / 2;

// Rows of up to kPieceKeys keys from `first` on.
struct KeyPiece {
  int64_t first = 0;
  int count = 0;
  const char *rows[kPieceKeys];
};

// Calls body(piece) for the keys [begin, end) in pieces.
template <class Body>
FA_INLINE void for_pieces(const Rows &source, int64_t begin, int64_t end, Body body) {
  KeyPiece piece;
  for (int64_t j = begin; j < end; j += kPieceKeys) {
    piece.first = j;
    piece.count = static_cast<int>(min64(end - j, kPieceKeys));
    for (int n = 0; n < piece.count; ++n) piece.rows[n] = source.row(j + n);
    body(piece);
  }
}

// Rows of some keys in all heads that are read together.
struct HeadRows {
  Rows rows;  // of the first head
  Range keys;
  int64_t heads = 0;
  int64_t head_bytes = 0;  // from head to head
  int64_t row_bytes = 0;   // of a head
};

// Prefetches rows ahead of the pieces that are computed, and at the end of these the first ones of `then`. It does so
//   into L2: into L1 few lines can be under way, fewer than memory needs
//   in the order of memory, which the processor's own prefetching follows: all heads of a key, then those of the next
//   a few lines for every block of sums, since a processor that waits to issue a line does not multiply
class Ahead {
 public:
  // Every head of a piece calls step() about `steps` times: more lines at a time, and lines left over, slow it down. `together` keys are computed
  // one head after another, so that all of them have to be there.
  Ahead(const HeadRows &now, const HeadRows &then, int64_t steps, int64_t together = kPieceKeys)
      : now_(now),
        then_(then),
        distance_(max64(round_up(kPrefetchBytes / max64(now.heads * now.row_bytes, 1), kPieceKeys), together)),
        lines_(static_cast<int>((kPieceKeys * (round_up(now.row_bytes, kLine) / kLine) - 1) / max64(steps, 1) + 1)) {}

  // Begins what the calls of step() during a piece share.
  void begin(const KeyPiece &piece) { begin(piece.first, piece.count); }
  void begin(int64_t key, int64_t count) {
    finish();
    const int64_t first = key + distance_;
    key_ = max64(key_, first);
    last_ = first + count;
    next_key();
  }
  FA_INLINE void step() {
    const char *at = at_;
    for (int n = lines_; n > 0 && at < end_; --n, at += kLine) Simd::prefetch_l2(at);
    at_ = at;
    if (at >= end_ && at != nullptr) next_row();
  }
  // What is left.
  void finish() {
    while (at_ < end_) step();
  }

 private:
  static constexpr int64_t kLine = 64;

  __attribute__((noinline)) void next_row() {
    if (++head_ < heads_) {
      at_ = first_ += head_bytes_;
      end_ = first_ + row_bytes_;
    } else {
      next_key();
    }
  }
  void next_key() {
    at_ = end_ = nullptr;
    if (key_ >= last_) return;
    const HeadRows *of = &now_;
    int64_t key = key_++;
    if (key >= now_.keys.end) {
      key += then_.keys.begin - now_.keys.end;
      of = &then_;
    }
    if (key >= of->keys.end) return;
    head_ = 0;
    heads_ = of->heads;
    head_bytes_ = of->head_bytes;
    row_bytes_ = of->row_bytes;
    at_ = first_ = of->rows.row(key);
    if (head_bytes_ != row_bytes_) {
      end_ = first_ + row_bytes_;
      return;
    }
    // One run of all heads, and of the keys that follow without a gap.
    const int64_t key_bytes = heads_ * row_bytes_;
    heads_ = 1;
    end_ = first_ + key_bytes;
    while (key_ < last_ && ++key < of->keys.end && of->rows.row(key) == end_) end_ += key_bytes, ++key_;
  }

  const HeadRows &now_, &then_;
  const int64_t distance_;
  const int lines_;  // of a step
  int64_t key_ = 0, last_ = 0, head_ = 0, heads_ = 0, head_bytes_ = 0, row_bytes_ = 0;
  const char *first_ = nullptr, *at_ = nullptr, *end_ = nullptr;
};

// Keys of add_weighted between two steps of Ahead.
constexpr int kKeysUnrolled = 4;

// In place of Ahead where nothing is prefetched.
struct NoAhead {
  FA_INLINE void step() const {}
};

// The most vectors of O, and keys of S, of a block of one row. Blocks that follow each other keep the multipliers busy together. With few keys
// every line is still in L1 when the next of its numbers are loaded: rows that lie 4 KB apart share a set there, which has 8 to 12 ways.
// Vectors of 128 bits make long chains of sums, which the next block comes too late for.
constexpr int kMostBlockVectors = kBlockSums < 8 ? kBlockSums : 8, kOneRowKeys = kWidth < 8 ? kBlockSums : 4;

// Blocks of sums that `rows` rows and `vectors` keys, or vectors of values, have, if those of the last of an odd number of rows have `most`.
FA_INLINE int64_t blocks_of(int64_t rows, int64_t vectors, int64_t most) {
  return rows / 2 * 2 * vectors / kBlockSums + rows % 2 * vectors / most;
}

// Calls body.operator()<ROWS>(r) for rows 0 .. rows - 1, kMost or a smaller power of two at a time.
template <int kMost, class Body>
FA_INLINE void for_row_groups(int64_t rows, Body body) {
  int64_t r = 0;
  for (; r + kMost <= rows; r += kMost) body.template operator()<kMost>(r);
  if constexpr (kMost > 4) {
    if (r + 4 <= rows) body.template operator()<4>(r), r += 4;
  }
  if constexpr (kMost > 2) {
    if (r + 2 <= rows) body.template operator()<2>(r), r += 2;
  }
  if constexpr (kMost > 1) {
    if (r < rows) body.template operator()<1>(r);
  }
}

// What dot_block multiplies: keys of an Element widened to floats, and queries that are floats.
template <class Element>
struct WidenedProduct {
  using Query = float;
  using Key = typename Element::Type;
  using V = F;
  static constexpr int kColumns = kWidth;
  static constexpr int kRows = sizeof(Key) == 1 ? kMostBlockRows : 4;  // of a block, see dot_rows
  static FA_INLINE V query(const Query *q) { return Simd::load(q); }
  static FA_INLINE V key(const Key *k) { return Element::load(k); }
  static FA_INLINE V key(const Key *k, int n) { return Element::load(k, n); }
  static FA_INLINE F add(V x, V y, F sum) { return Simd::fma(x, y, sum); }
};
#if defined(FA_TARGET_AVX512_BF16)
// Keys and queries of bf16, two columns in a lane.
struct PairProduct {
  using Query = uint16_t;
  using Key = uint16_t;
  using V = I;
  static constexpr int kColumns = 2 * kWidth, kRows = 4;
  static FA_INLINE V query(const Query *q) { return Simd::iload(reinterpret_cast<const uint32_t *>(q)); }
  static FA_INLINE V key(const Key *k) { return Simd::iload(reinterpret_cast<const uint32_t *>(k)); }
  static FA_INLINE V key(const Key *k, int n) {
    uint32_t pairs[kWidth] = {};
    __builtin_memcpy(pairs, k, static_cast<size_t>(n) * sizeof(Key));
    return Simd::iload(pairs);
  }
  static FA_INLINE F add(V x, V y, F sum) { return Simd::dot_bf16(x, y, sum); }
};
#endif

// s[r * lds + j] = q_r k_j for one block of ROWS queries (zero-padded to whole vectors) and KEYS keys.
template <class Product, int KEYS, int ROWS, class Prefetch>
FA_INLINE void dot_block(const char *const *keys, int64_t offset, int64_t dim, const typename Product::Query *q, int64_t ldq,
                         float *s, int64_t lds, Prefetch &ahead) {
  static_assert(KEYS * ROWS <= kBlockSums);
  using V = typename Product::V;
  F acc[ROWS * KEYS];
#pragma GCC unroll 16
  for (int n = 0; n < ROWS * KEYS; ++n) acc[n] = Simd::zero();
  const auto step = [&](int64_t c, auto load) __attribute__((always_inline)) {
    const auto key = [&](int j) __attribute__((always_inline)) {
      return load(reinterpret_cast<const typename Product::Key *>(keys[j] + offset) + c);
    };
    // The side with fewer vectors stays in registers.
    if constexpr (ROWS < KEYS) {
      V x[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) x[r] = Product::query(q + r * ldq + c);
#pragma GCC unroll 16
      for (int j = 0; j < KEYS; ++j) {
        const V y = key(j);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) acc[r * KEYS + j] = Product::add(x[r], y, acc[r * KEYS + j]);
      }
    } else {
      V y[KEYS];
#pragma GCC unroll 8
      for (int j = 0; j < KEYS; ++j) y[j] = key(j);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const V x = Product::query(q + r * ldq + c);
#pragma GCC unroll 8
        for (int j = 0; j < KEYS; ++j) acc[r * KEYS + j] = Product::add(x, y[j], acc[r * KEYS + j]);
      }
    }
  };
  ahead.step();
  int64_t c = 0;
  for (; c + Product::kColumns <= dim; c += Product::kColumns)
    step(
        c, [](const auto *y) __attribute__((always_inline)) { return Product::key(y); });
  if (c < dim) {
    const int n = static_cast<int>(dim - c);
    step(
        c, [n](const auto *y) __attribute__((always_inline)) { return Product::key(y, n); });
  }
  float sums[ROWS * KEYS];
  Simd::reduce_add(acc, sums);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) __builtin_memcpy(s + r * lds, sums + r * KEYS, sizeof(float) * KEYS);
}

// The same for `count` keys and any number of rows. Square blocks load least; more rows widen a key less often, which is worth it where
// that takes many instructions.
template <class Product, class Prefetch>
FA_INLINE void dot_rows(const char *const *keys, int count, int64_t offset, int64_t dim, const typename Product::Query *q,
                        int64_t ldq, int64_t rows, float *s, int64_t lds, Prefetch &ahead) {
  for_row_groups<Product::kRows>(
      rows, [&]<int ROWS>(int64_t r) __attribute__((always_inline)) {
        constexpr int kKeys = ROWS == 1 ? kOneRowKeys : kBlockSums / ROWS;
        const auto *x = q + r * ldq;
        float *to = s + r * lds;
        int n = 0;
        for (; n + kKeys <= count; n += kKeys)
          dot_block<Product, kKeys, ROWS>(keys + n, offset, dim, x, ldq, to + n, lds, ahead);
        if constexpr (kKeys > 4) {
          for (; n + 4 <= count; n += 4) dot_block<Product, 4, ROWS>(keys + n, offset, dim, x, ldq, to + n, lds, ahead);
        }
        for (; n < count; ++n) {  // not worth the code for several rows
          for (int i = 0; i < ROWS; ++i)
            dot_block<Product, 1, 1>(keys + n, offset, dim, x + i * ldq, ldq, to + i * lds + n, lds, ahead);
        }
      });
}

// s[r * lds + j - begin] = q_r k_j for keys [begin, end) of one head.
template <class Product>
inline void dot_products(const Rows &keys, int64_t begin, int64_t end, int64_t dim, const typename Product::Query *q,
                         int64_t ldq, int64_t rows, float *s, int64_t lds) {
  NoAhead ahead;
  for_pieces(keys, begin, end, [&](const KeyPiece &piece) {
    dot_rows<Product>(piece.rows, piece.count, 0, dim, q, ldq, rows, s + piece.first - begin, lds, ahead);
  });
}

// o_r += sum over `keys` keys of s[r * lds + j] v_j, for ROWS rows and NV vectors from column c on.
template <class Element, int ROWS, int NV, class Prefetch>
FA_INLINE void add_weighted(const char *const *values, int keys, int64_t offset, int64_t c, const float *s, int64_t lds,
                            float *o, int64_t ldo, Prefetch &ahead) {
  F acc[ROWS][NV];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[r][v] = Simd::load(o + r * ldo + c + v * kWidth);
  }
  const auto add = [&](int j) __attribute__((always_inline)) {
    const auto *value = reinterpret_cast<const typename Element::Type *>(values[j] + offset) + c;
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) {
      const F x = Element::load(value + v * kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) acc[r][v] = Simd::fma(Simd::set(s[r * lds + j]), x, acc[r][v]);
    }
  };
  int j = 0;
  for (; j + kKeysUnrolled <= keys; j += kKeysUnrolled) {
    ahead.step();
#pragma GCC unroll 4
    for (int n = 0; n < kKeysUnrolled; ++n) add(j + n);
  }
#pragma GCC unroll 1
  for (; j < keys; ++j) add(j);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) Simd::store(o + r * ldo + c + v * kWidth, acc[r][v]);
  }
}

// The same for the last n columns, fewer than a vector has. Few head dims have such columns: small code is worth more than fast code.
template <class Element>
__attribute__((noinline)) void add_weighted_tail(const char *const *values, int keys, int64_t offset, int64_t c, int n,
                                                 const float *s, int64_t lds, int rows, float *o, int64_t ldo) {
#pragma GCC unroll 1
  for (int j = 0; j < keys; ++j) {
    const F x = Element::load(reinterpret_cast<const typename Element::Type *>(values[j] + offset) + c, n);
#pragma GCC unroll 1
    for (int r = 0; r < rows; ++r)
      Simd::store(o + r * ldo + c, Simd::fma(Simd::set(s[r * lds + j]), x, Simd::load(o + r * ldo + c)));
  }
}

// The same for all `dim` columns.
template <class Element, int ROWS, class Prefetch>
FA_INLINE void add_weighted_rows(const char *const *values, int keys, int64_t offset, int64_t dim, const float *s, int64_t lds,
                                 float *o, int64_t ldo, Prefetch &ahead) {
  constexpr int kMost = kBlockSums / ROWS < kMostBlockVectors ? kBlockSums / ROWS : kMostBlockVectors;
  const int64_t vectors = dim / kWidth;
  int64_t v = 0;
  for (; v + kMost <= vectors; v += kMost)
    add_weighted<Element, ROWS, kMost>(values, keys, offset, v * kWidth, s, lds, o, ldo, ahead);
  if constexpr (kMost > 2) {
    for (; v + 2 <= vectors; v += 2) add_weighted<Element, ROWS, 2>(values, keys, offset, v * kWidth, s, lds, o, ldo, ahead);
  }
  for (; v < vectors; ++v) add_weighted<Element, ROWS, 1>(values, keys, offset, v * kWidth, s, lds, o, ldo, ahead);
  const int n = static_cast<int>(dim - vectors * kWidth);
  if (n > 0) add_weighted_tail<Element>(values, keys, offset, vectors * kWidth, n, s, lds, ROWS, o, ldo);
}

// The same for one key and one row, where a masked P is found among others.
template <class Element>
__attribute__((noinline)) void add_weighted_row(const char *value, int64_t dim, const float *s, float *o) {
  const char *const values[1] = {value};
  NoAhead ahead;
  add_weighted_rows<Element, 1>(values, 1, 0, dim, s, 0, o, 0, ahead);
}

}  // namespace fa::cpu::FA_ISA
