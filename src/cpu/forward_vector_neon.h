// SPDX-License-Identifier: Apache-2.0
// Products of the vector forward kernel on Arm's instructions for numbers of 16 bits: bfmmla for bf16 queries (FEAT_BF16), fmlal and fmlal2 for fp16
// (FEAT_FHM). Keys and values are read where they lie; those of bytes become bf16 on the way, which is exact.
//
//   S = Q K^T   bfmmla: pairs of keys and pairs of queries, four columns at a time, which is the order of the tiled kernel, so that both give the
//               same bits. fmlal: a product of fp16 numbers is exact and added in fp32, so that bits are those of widened numbers
//   O += P V    P is rounded to 16 bits; the row sum takes it unrounded. bfmmla: four keys and pairs of columns at a time
//
// What 16 bits get wrong is left to fp32:
//   bf16 queries with numbers so small that bfmmla takes products of them for zero, or with numbers from 2^64 on
//   S, or O, with values that are not finite: zero times such a value is NaN, be it a masked P or one that was rounded to zero
#pragma once

#include "cpu/forward_split.h"

namespace fa::cpu::FA_ISA {

class VectorProducts {
 public:
  VectorProducts(const ForwardProblem &problem, const ForwardLayout &layout)
      : p_(problem), layout_(layout), columns_(round_up(problem.head_dim, kGroup)) {}

  // Takes a split whose queries lie in the area, or returns false.
  bool begin(char *scratch, const Head &, const VectorSplit &split, const VectorArea &area) {
    if (p_.q.dtype != kQueries || (dtype_bytes(p_.k.dtype) == 1 && split.rows < kByteRows)) return false;
    const VectorNeonLayout &l = layout_.vector_neon;
    char *at = scratch + layout_.vector_at;
    const auto take = [&](size_t bytes) {
      auto *first = reinterpret_cast<uint16_t *>(at);
      at += bytes;
      return first;
    };
    q_ = take(l.queries);
    wide_ = take(l.values);
    p_rows_ = take(l.p);
    rows_ = round_up(split.rows, kRowsOfQ);
    for (int64_t h = 0; h < split.count; ++h) moderate_[h] = pack_queries(split, area, h);
    return true;
  }

  // Raw S; done[h] says for which heads.
  void scores(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area, bool *done) {
    const Rows rows = key_rows_of(p_, p_.k, head.b, split.first, head.keys.start);
    for_blocks(rows, p_.k, p_.head_dim, split, visited, [&](int64_t h, const Block &block) {
      if (!moderate_[h]) return;
      const int64_t row = h * split.rows;
      float *s = area.s + row * VectorArea::kLds + block.first;
      for_pieces(
          rows_, [&]<int ROWS>(int64_t r) __attribute__((always_inline)) {
            constexpr int kKeys = kRowsOfQ == 1 && ROWS > 2 ? 4 : 8;
            for (int64_t j = 0; j < block.keys; j += kKeys) {
              score_block<ROWS, kKeys>(block.rows + j, q_ + (h * rows_ + r) * columns_, s + r * VectorArea::kLds + j,
                                       min64(block.keys - j, kKeys), min64(split.rows - r, ROWS));
            }
          });
    });
    for (int64_t h = 0; h < split.count; ++h) {
      F probe = Simd::zero();  // x * 0 summed: NaN as soon as one x is not finite
      for (int64_t r = h * split.rows; r < (h + 1) * split.rows; ++r) {
        for (int n = 0; n < visited.count; ++n) {
          const Range run = visited.runs[n];
          for (int64_t c = run.begin; c < run.end; c += kWidth) {
            const F x = Simd::load(area.s + r * VectorArea::kLds + c, static_cast<int>(min64(run.end - c, kWidth)));
            probe = Simd::fma(x, Simd::zero(), probe);
          }
        }
      }
      done[h] = moderate_[h] && Simd::reduce_add(probe) == 0;
    }
  }

  // O = P V; done[h] says for which heads.
  void outputs(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area, const bool *,
               bool *done) {
    for (int64_t i = 0; i < split.count * split.rows * area.ldo; i += kWidth) Simd::store(area.o + i, Simd::zero());
    const Rows rows = key_rows_of(p_, p_.v, head.b, split.first, head.keys.start);
    for_blocks(rows, p_.v, p_.head_dim_v, split, visited, [&](int64_t h, const Block &block) {
      pack_p(area.s + h * split.rows * VectorArea::kLds + block.first, split.rows, block.keys);
      float *o = area.o + h * split.rows * area.ldo;
      for_pieces(
          rows_, [&]<int ROWS>(int64_t r) __attribute__((always_inline)) {
            const int64_t count = min64(split.rows - r, ROWS);
            constexpr int kColumns = kRowsOfQ == 1 ? (ROWS > 2 ? 2 * kGroup : 4 * kGroup) : (ROWS > 4 ? kGroup : 2 * kGroup);
            int64_t c = 0;
            const auto add = [&]<int COLUMNS>() __attribute__((always_inline)) {
              for (; c + COLUMNS <= p_.head_dim_v; c += COLUMNS)
                add_block<ROWS, COLUMNS>(block.rows, c, block.keys, p_rows_ + r * kBlock, o + r * area.ldo + c, area.ldo,
                                         count);
            };
            add.template operator()<kColumns>();
            if constexpr (kColumns > kGroup) add.template operator()<kGroup>();
            if (c < p_.head_dim_v) add_tail<ROWS>(block, c, p_rows_ + r * kBlock, o + r * area.ldo + c, area.ldo, count);
          });
    });
    for (int64_t h = 0; h < split.count; ++h) {
      F probe = Simd::zero();
      for (int64_t i = h * split.rows * area.ldo; i < (h + 1) * split.rows * area.ldo; i += kWidth)
        probe = Simd::fma(Simd::load(area.o + i), Simd::zero(), probe);
      done[h] = Simd::reduce_add(probe) == 0;
    }
  }

 private:
  static constexpr int kGroup = 8;                    // numbers of 16 bits in a vector
  static constexpr int64_t kBlock = kVectorNeonKeys;  // keys whose rows a block has, the last ones repeated
  static constexpr int64_t kByteRows = 4;             // fewer rows are not worth making 16 bits of bytes
#if defined(FA_TARGET_NEON_BF16)
  static constexpr Dtype kQueries = Dtype::bf16;
  static constexpr int kRowsOfQ = 2;  // that are multiplied together
#else
  static constexpr Dtype kQueries = Dtype::f16;
  static constexpr int kRowsOfQ = 1;
#endif

  // Keys, or values, of a head as rows of 16-bit numbers.
  struct Block {
    const uint16_t *rows[kBlock];
    int64_t first = 0;  // key, relative to the split
    int64_t keys = 0;
  };

  // Calls body.operator()<ROWS>(r) for pieces that cover rows 0 .. rows - 1, a multiple of kRowsOfQ.
  template <class Body>
  static FA_INLINE void for_pieces(int64_t rows, Body body) {
    int64_t r = 0;
    for (; r + 4 * kRowsOfQ <= rows; r += 4 * kRowsOfQ) body.template operator()<4 * kRowsOfQ>(r);
    if (r + 2 * kRowsOfQ <= rows) body.template operator()<2 * kRowsOfQ>(r), r += 2 * kRowsOfQ;
    if (r < rows) body.template operator()<kRowsOfQ>(r);
  }

  // Calls body(h, block) for blocks of visited keys of every head, prefetching the rows of the next block.
  template <class Body>
  void for_blocks(const Rows &rows, const Operand &x, int64_t dim, const VectorSplit &split, const VisitedKeys &visited,
                  Body body) {
    const int64_t bytes = dtype_bytes(x.dtype);
    for (int n = 0; n < visited.count; ++n) {
      const Range run = visited.runs[n];
      for (int64_t first = run.begin; first < run.end; first += kBlock) {
        Block block;
        block.first = first;
        block.keys = min64(run.end - first, kBlock);
        const int64_t next = min64(run.end, first + block.keys + kBlock);
        for (int64_t h = 0; h < split.count; ++h) {
          const int64_t offset = h * x.head_stride * bytes;
          prefetch(rows, split, h, {split.keys.begin + first + block.keys, split.keys.begin + next}, x.head_stride * bytes,
                   dim * bytes);
          for (int64_t j = 0; j < kBlock; ++j) {
            block.rows[j] =
                reinterpret_cast<const uint16_t *>(rows.row(split.keys.begin + first + min64(j, block.keys - 1)) + offset);
          }
#if defined(FA_TARGET_NEON_BF16)
          if (bytes == 1) widen(x.dtype, dim, block);
#endif
          body(h, block);
        }
      }
    }
  }

  // The share of head h in rows of all heads: whole runs of memory, at the rate at which heads are computed.
  static void prefetch(const Rows &rows, const VectorSplit &split, int64_t h, Range next, int64_t head_bytes, int64_t bytes) {
    if (next.empty()) return;
    const int64_t end = next.begin + (h + 1) * next.size() / split.count;
    for (int64_t j = next.begin + h * next.size() / split.count; j < end; ++j) {
      const char *row = rows.row(j);
      for (int64_t i = 0; i < split.count; ++i) prefetch_row(row + i * head_bytes, bytes);
    }
  }

  // Elements [c, c + kGroup) of a row of `dim`; zeros past its end.
  static FA_INLINE I load_group(const uint16_t *row, int64_t c, int64_t dim) {
    if (__builtin_expect(c + kGroup <= dim, 1)) return Simd::iload(reinterpret_cast<const uint32_t *>(row + c));
    uint32_t some[kWidth] = {};
    __builtin_memcpy(some, row + c, static_cast<size_t>(dim - c) * sizeof(uint16_t));
    return Simd::iload(some);
  }

#if defined(FA_TARGET_NEON_BF16)
  // Rows of bytes as bf16.
  void widen(Dtype dtype, int64_t dim, Block &block) const {
    const int64_t ld = round_up(dim, kGroup);
    const auto rows_as = [&]<class Element>(auto whole_group) {
      using Type = typename Element::Type;
      for (int64_t j = 0; j < kBlock; ++j) {
        if (j >= block.keys) {
          block.rows[j] = block.rows[block.keys - 1];
          continue;
        }
        const auto *from = reinterpret_cast<const Type *>(block.rows[j]);
        uint16_t *to = wide_ + j * ld;
        block.rows[j] = to;
        int64_t c = 0;
        for (; c + kGroup <= dim; c += kGroup) Simd::istore(reinterpret_cast<uint32_t *>(to + c), whole_group(from + c));
        if (c >= dim) continue;
        Type some[kGroup] = {};
        __builtin_memcpy(some, from + c, static_cast<size_t>(dim - c));
        Simd::istore(reinterpret_cast<uint32_t *>(to + c), whole_group(some));
      }
    };
    dtype == Dtype::i8 ? rows_as.template operator()<ElementI8>([](const int8_t *p) { return Simd::i8_to_bf16(p); })
                       : rows_as.template operator()<ElementE4m3>([](const uint8_t *p) { return Simd::e4m3_to_bf16(p); });
  }

  // Queries of head h: of each pair of rows, four columns of the first and the same four of the second. Whether bfmmla gets them right.
  bool pack_queries(const VectorSplit &split, const VectorArea &area, int64_t h) {
    F least = Simd::set(1.0f), most = least, probe = Simd::zero();
    for (int64_t r = 0; r < rows_; ++r) {
      const float *q = area.q + (h * split.rows + r) * area.ldq;
      uint16_t *to = q_ + (h * rows_ + r / 2 * 2) * columns_ + r % 2 * kWidth;
      for (int64_t c = 0; c < columns_; c += kWidth, to += kGroup) {
        const F x = r < split.rows && c < area.ldq ? Simd::load(q + c) : Simd::zero();
        const F magnitude = Simd::abs(x);
        most = Simd::max(magnitude, most);
        least = Simd::select(Simd::eq(x, Simd::zero()), least, Simd::min(magnitude, least));
        probe = Simd::fma(x, Simd::zero(), probe);
        Simd::store_bf16(to, x);
      }
    }
    return -Simd::reduce_max(Simd::sub(Simd::zero(), least)) >= 0x1p-100f && Simd::reduce_max(most) < 0x1p64f &&
           Simd::reduce_add(probe) == 0;
  }

  // S of KEYS keys, of which `keys` count, and ROWS packed queries, of which `rows` count.
  template <int ROWS, int KEYS>
  __attribute__((noinline)) void score_block(const uint16_t *const *k, const uint16_t *q, float *s, int64_t keys,
                                             int64_t rows) const {
    constexpr int kPairs = ROWS / 2;
    F acc[KEYS / 2][kPairs];
#pragma GCC unroll 4
    for (int j = 0; j < KEYS / 2; ++j) {
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) acc[j][i] = Simd::zero();
    }
    const auto step = [&](int64_t c, auto load) __attribute__((always_inline)) {
      I x[kPairs][2];
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) {
        const auto *at = reinterpret_cast<const uint32_t *>(q + 2 * i * columns_ + 2 * c);
        x[i][0] = Simd::iload(at);
        x[i][1] = Simd::iload(at + kWidth);
      }
#pragma GCC unroll 4
      for (int j = 0; j < KEYS / 2; ++j) {
        const F even = Simd::from_bits(load(k[2 * j])), odd = Simd::from_bits(load(k[2 * j + 1]));
        const I y[2] = {Simd::bits(Simd::first_halves(even, odd)), Simd::bits(Simd::second_halves(even, odd))};
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
          for (int i = 0; i < kPairs; ++i) acc[j][i] = Simd::multiply_bf16(y[half], x[i][half], acc[j][i]);
        }
      }
    };
    const int64_t whole = p_.head_dim / kGroup * kGroup;
    for (int64_t c = 0; c < whole; c += kGroup)
      step(
          c, [c](const uint16_t *row)
                 __attribute__((always_inline)) { return Simd::iload(reinterpret_cast<const uint32_t *>(row + c)); });
    if (whole < p_.head_dim) step(whole, [&](const uint16_t *row) { return load_group(row, whole, p_.head_dim); });
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < KEYS; j += 4) {
        F even, odd;
        Simd::separate(acc[j / 2][i], acc[j / 2 + 1][i], even, odd);
        const int n = static_cast<int>(min64(keys - j, 4));
        if (n <= 0) continue;
        float *to = s + 2 * i * VectorArea::kLds + j;
        Simd::store(to, even, n);
        if (2 * i + 1 < rows) Simd::store(to + VectorArea::kLds, odd, n);
      }
    }
  }

  // P of a head in a block: of each pair of rows, four keys of the first and the same four of the second; zeros past the last key and row.
  void pack_p(const float *p, int64_t rows, int64_t keys) const {
    for (int64_t r = 0; r < rows_; ++r) {
      uint16_t *to = p_rows_ + r / 2 * 2 * kBlock + r % 2 * kWidth;
      for (int64_t c = 0; c < round_up(keys, 4); c += kWidth, to += kGroup) {
        const int n = r < rows ? static_cast<int>(min64(keys - c, kWidth)) : 0;
        Simd::store_bf16(to, Simd::load(p + r * VectorArea::kLds + c, n));
      }
    }
  }

  // O of `rows` <= ROWS rows and COLUMNS columns += P V. load(row, n) is the n-th kGroup of them.
  template <int ROWS, int COLUMNS, class Load>
  FA_INLINE void add_products(int64_t keys, const uint16_t *const *v, const uint16_t *p, float *o, int64_t ldo, int64_t rows,
                              Load load) const {
    constexpr int kPairs = ROWS / 2, kColumnPairs = COLUMNS / 2;
    F acc[kPairs][kColumnPairs];
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
      const bool second = 2 * i + 1 < rows;
#pragma GCC unroll 8
      for (int n = 0; n < kColumnPairs; n += 2) {
        const float *at = o + 2 * i * ldo + 2 * n;
        const F even = Simd::load(at), odd = second ? Simd::load(at + ldo) : Simd::zero();
        acc[i][n] = Simd::first_halves(even, odd);
        acc[i][n + 1] = Simd::second_halves(even, odd);
      }
    }
    for (int64_t j = 0; j < keys; j += 4, v += 4, p += kGroup) {
      I x[kPairs];
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) x[i] = Simd::iload(reinterpret_cast<const uint32_t *>(p + 2 * i * kBlock));
#pragma GCC unroll 2
      for (int n = 0; n < COLUMNS / kGroup; ++n) {
        I upper[2], lower[2];
        Simd::interleave_u16(load(v[0], n), load(v[1], n), upper[0], upper[1]);
        Simd::interleave_u16(load(v[2], n), load(v[3], n), lower[0], lower[1]);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          I y[2];
          Simd::interleave_u32(upper[half], lower[half], y[0], y[1]);
#pragma GCC unroll 4
          for (int i = 0; i < kPairs; ++i) {
            F *to = acc[i] + 4 * n + 2 * half;
            to[0] = Simd::multiply_bf16(x[i], y[0], to[0]);
            to[1] = Simd::multiply_bf16(x[i], y[1], to[1]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
      const bool second = 2 * i + 1 < rows;
#pragma GCC unroll 8
      for (int n = 0; n < kColumnPairs; n += 2) {
        float *at = o + 2 * i * ldo + 2 * n;
        Simd::store(at, Simd::first_halves(acc[i][n], acc[i][n + 1]));
        if (second) Simd::store(at + ldo, Simd::second_halves(acc[i][n], acc[i][n + 1]));
      }
    }
  }
#else
  bool pack_queries(const VectorSplit &split, const VectorArea &area, int64_t h) {
    for (int64_t r = 0; r < split.rows; ++r) {
      for (int64_t c = 0; c < columns_; c += kWidth) {
        const F x = c < area.ldq ? Simd::load(area.q + (h * split.rows + r) * area.ldq + c) : Simd::zero();
        Simd::store_f16(q_ + (h * rows_ + r) * columns_ + c, x);
      }
    }
    return true;
  }

  // S of KEYS keys, of which `keys` count, and ROWS queries: lanes and their sum in the order of dot_block.
  template <int ROWS, int KEYS>
  __attribute__((noinline)) void score_block(const uint16_t *const *k, const uint16_t *q, float *s, int64_t keys,
                                             int64_t) const {
    F acc[ROWS][KEYS];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 8
      for (int j = 0; j < KEYS; ++j) acc[i][j] = Simd::zero();
    }
    const auto step = [&](int64_t c, auto load) __attribute__((always_inline)) {
      I y[KEYS];
#pragma GCC unroll 8
      for (int j = 0; j < KEYS; ++j) y[j] = load(k[j]);
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; ++i) {
        const I x = Simd::iload(reinterpret_cast<const uint32_t *>(q + i * columns_ + c));
#pragma GCC unroll 8
        for (int j = 0; j < KEYS; ++j) acc[i][j] = Simd::fma_f16(x, y[j], acc[i][j]);
      }
    };
    const int64_t whole = p_.head_dim / kGroup * kGroup;
    for (int64_t c = 0; c < whole; c += kGroup)
      step(
          c, [c](const uint16_t *row)
                 __attribute__((always_inline)) { return Simd::iload(reinterpret_cast<const uint32_t *>(row + c)); });
    if (whole < p_.head_dim) step(whole, [&](const uint16_t *row) { return load_group(row, whole, p_.head_dim); });
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i) {
      float sums[KEYS];
      Simd::reduce_add(acc[i], sums);
      __builtin_memcpy(s + i * VectorArea::kLds, sums, static_cast<size_t>(min64(keys, KEYS)) * sizeof(float));
    }
  }

  // P of a head in a block, zeros past the last key.
  void pack_p(const float *p, int64_t rows, int64_t keys) const {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < round_up(keys, kGroup); c += kWidth) {
        const int n = static_cast<int>(max64(min64(keys - c, kWidth), 0));
        Simd::store_f16(p_rows_ + r * kBlock + c, Simd::load(p + r * VectorArea::kLds + c, n));
      }
    }
  }

  // O of ROWS rows and COLUMNS columns += P V: an element is one chain of multiply-adds over ascending keys.
  template <int ROWS, int COLUMNS, class Load>
  FA_INLINE void add_products(int64_t keys, const uint16_t *const *v, const uint16_t *p, float *o, int64_t ldo, int64_t,
                              Load load) const {
    constexpr int kVectors = COLUMNS / kWidth;
    F acc[ROWS][kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) acc[i][n] = Simd::load(o + i * ldo + n * kWidth);
    }
    for (int64_t j = 0; j < keys; j += kGroup, v += kGroup, p += kGroup) {
      I x[ROWS];
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; ++i) x[i] = Simd::iload(reinterpret_cast<const uint32_t *>(p + i * kBlock));
      const auto key = [&]<int lane>() __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int n = 0; n < COLUMNS / kGroup; ++n) {
          const I y = load(v[lane], n);
#pragma GCC unroll 4
          for (int i = 0; i < ROWS; ++i) Simd::fma_f16_lane<lane>(x[i], y, acc[i][2 * n], acc[i][2 * n + 1]);
        }
      };
      key.template operator()<0>(), key.template operator()<1>(), key.template operator()<2>(), key.template operator()<3>();
      key.template operator()<4>(), key.template operator()<5>(), key.template operator()<6>(), key.template operator()<7>();
    }
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 8
      for (int n = 0; n < kVectors; ++n) Simd::store(o + i * ldo + n * kWidth, acc[i][n]);
    }
  }
#endif

  template <int ROWS, int COLUMNS>
  __attribute__((noinline)) void add_block(const uint16_t *const *v, int64_t c, int64_t keys, const uint16_t *p, float *o,
                                           int64_t ldo, int64_t rows) const {
    add_products<ROWS, COLUMNS>(
        keys, v, p, o, ldo, rows, [c](const uint16_t *row, int n) __attribute__((always_inline)) {
          return Simd::iload(reinterpret_cast<const uint32_t *>(row + c + n * kGroup));
        });
  }

  // The same for the last columns, fewer than kGroup.
  template <int ROWS>
  __attribute__((noinline)) void add_tail(const Block &block, int64_t c, const uint16_t *p, float *o, int64_t ldo,
                                          int64_t rows) const {
    float some[ROWS * kGroup] = {};
    const auto bytes = static_cast<size_t>(p_.head_dim_v - c) * sizeof(float);
    for (int64_t r = 0; r < rows; ++r) __builtin_memcpy(some + r * kGroup, o + r * ldo, bytes);
    add_products<ROWS, kGroup>(block.keys, block.rows, p, some, kGroup, rows,
                               [&](const uint16_t *row, int) { return load_group(row, c, p_.head_dim_v); });
    for (int64_t r = 0; r < rows; ++r) __builtin_memcpy(o + r * ldo, some + r * kGroup, bytes);
  }

  const ForwardProblem &p_;
  const ForwardLayout &layout_;
  const int64_t columns_;       // of packed queries
  int64_t rows_ = 0;            // of a head, padded to kRowsOfQ
  uint16_t *q_ = nullptr;       // (head, row, columns_): queries
  uint16_t *wide_ = nullptr;    // (kBlock, columns): keys or values that were bytes
  uint16_t *p_rows_ = nullptr;  // (row, kBlock): P
  bool moderate_[kVectorScratchRows] = {};
};

}  // namespace fa::cpu::FA_ISA
