// SPDX-License-Identifier: Apache-2.0
// Products of the vector forward kernel on the tile unit (AMX), for splits of bf16 with kTileVectorRows rows per key head or more. Vectors
// work for every row and key; a tile has 16 rows whatever their number.
//
//   S^T = K Q^T   keys are the left operand, whose rows they are, so that nothing is transposed; queries are columns of the right one
//   O += P V      P is the left operand: a row of numbers cut to bf16, and 8 rows below what that cuts off. Together they have an error of
//                 2^-16. Pairs of keys are interleaved on the way from memory
//
// The unit gets some numbers wrong, which are left to vectors:
//   queries with numbers so small that the unit takes products of them for zero, or with numbers from 2^64 on
//   S, or O, with values that are not finite: zero times such a value is NaN, be it a masked P or a part of one
#pragma once

#include "cpu/bf16_unit.h"
#include "cpu/forward_split.h"
#include "cpu/pack_tiles.h"

namespace fa::cpu::FA_ISA {

// 2 * kWidth elements rounded to bf16, a first.
FA_INLINE void store_rounded(uint16_t *to, F a, F b) { Simd::istore(reinterpret_cast<uint32_t *>(to), Simd::to_bf16(a, b)); }

static_assert(2 * kVectorRows == kTileRows);

class VectorTiles {
 public:
  VectorTiles(const ForwardProblem &problem, const ForwardLayout &layout)
      : p_(problem),
        layout_(layout),
        steps_(round_up(problem.head_dim, kTileDepth) / kTileDepth),
        output_(round_up(problem.head_dim_v, kTilePanel) / kTileRows * kTileFloats) {}

  // Takes a split whose queries lie in the area, or returns false.
  bool begin(char *scratch, const VectorSplit &split, const VectorArea &area) {
    if (split.rows < kTileVectorRows || p_.q.dtype != Dtype::bf16) return false;
    const VectorTilesLayout &l = layout_.vector_tiles;
    char *at = scratch + layout_.vector_tiles_at;
    const auto take = [&](size_t bytes) {
      char *first = at;
      at += bytes;
      return first;
    };
    q_ = reinterpret_cast<uint16_t *>(take(l.queries));
    keys_ = reinterpret_cast<uint16_t *>(take(l.keys));
    products_ = reinterpret_cast<float *>(take(l.products));
    values_ = reinterpret_cast<uint16_t *>(take(l.values));
    p_tiles_ = reinterpret_cast<uint16_t *>(take(l.p));
    outputs_ = reinterpret_cast<float *>(take(l.outputs));
    for (int64_t i = 0; i < kVectorTileKeys * kTileRows; i += 2 * kWidth)
      Simd::istore(reinterpret_cast<uint32_t *>(p_tiles_ + i), Simd::iset(0));
    for (int64_t h = 0; h < split.count; ++h) moderate_[h] = pack_queries(split, area, h);
    return true;
  }

  // Raw S; done[h] says for which heads.
  void scores(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area, bool *done) {
    const Rows rows = key_rows_of(p_, p_.k, head.b, split.first, head.keys.start);
    for_blocks(split, visited, kScoreKeys, [&](Range block, Range next) {
      for (int64_t h = 0; h < split.count; ++h) {
        prefetch(rows, split, h, next, p_.k.head_stride, p_.head_dim);
        if (moderate_[h]) score_block(rows, split, area, h, block);
      }
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
    for (int64_t i = 0; i < split.count * output_; i += kWidth) Simd::store(outputs_ + i, Simd::zero());
    const Rows values = key_rows_of(p_, p_.v, head.b, split.first, head.keys.start);
    for_blocks(split, visited, kVectorTileKeys, [&](Range block, Range next) {
      for (int64_t h = 0; h < split.count; ++h) {
        prefetch(values, split, h, next, p_.v.head_stride, p_.head_dim_v);
        Rows of_head = values;
        of_head.data += h * p_.v.head_stride * int64_t{sizeof(uint16_t)};
        pack_value_tiles<NoMagnitudes, 0>(of_head, block.begin, block.end, p_.head_dim_v, kValuePanelElements, values_);
        pack_p(split, area, h, block);
        const int64_t steps = round_up(block.size(), kTileDepth) / kTileDepth;
        const uint16_t *panel = values_;
        for (int64_t at = 0; at < output_; at += 2 * kTileFloats, panel += kValuePanelElements) {
          unit_.template multiply<true>(kTileRows, steps, {p_tiles_, 0, kTileBf16}, panel,
                                        {outputs_ + h * output_ + at, kTileRows, kTileFloats, 0});
        }
      }
    });
    for (int64_t h = 0; h < split.count; ++h) {
      F probe = Simd::zero();
      for (int64_t r = 0; r < split.rows; ++r) {
        for (int64_t c = 0; c < area.ldo; c += kWidth) {
          const float *cut = outputs_ + h * output_ + c / kTileRows * kTileFloats + r * kTileRows + c % kTileRows;
          const F sum = Simd::add(Simd::load(cut), Simd::load(cut + kVectorRows * kTileRows));
          probe = Simd::fma(sum, Simd::zero(), probe);
          Simd::store(area.o + (h * split.rows + r) * area.ldo + c, sum);
        }
      }
      done[h] = Simd::reduce_add(probe) == 0;
    }
  }

 private:
  static constexpr int64_t kScoreKeys = 2 * kTileRows;
  static constexpr int64_t kValuePanelElements = kVectorTileKeys / kTileDepth * kRightStep;

  // Calls body(keys, those of the next call) for blocks of up to `size` visited keys, counted within the sequence.
  template <class Body>
  static void for_blocks(const VectorSplit &split, const VisitedKeys &visited, int64_t size, Body body) {
    for (int n = 0; n < visited.count; ++n) {
      const int64_t end = split.keys.begin + visited.runs[n].end;
      for (int64_t j = split.keys.begin + visited.runs[n].begin; j < end; j += size)
        body(Range{j, min64(j + size, end)}, Range{min64(j + size, end), min64(j + 2 * size, end)});
    }
  }

  // Prefetches the share of head h in rows of all heads: whole runs of memory, at the rate at which heads are computed.
  static void prefetch(const Rows &rows, const VectorSplit &split, int64_t h, Range next, int64_t head_stride, int64_t dim) {
    constexpr int64_t kBytes = sizeof(uint16_t);
    const int64_t end = next.begin + (h + 1) * next.size() / split.count;
    for (int64_t j = next.begin + h * next.size() / split.count; j < end; ++j) {
      const char *row = rows.row(j);
      for (int64_t i = 0; i < split.count; ++i) prefetch_row(row + i * head_stride * kBytes, dim * kBytes);
    }
  }

  uint16_t *queries_of(int64_t h) const { return q_ + h * steps_ * kRightStep; }

  // Queries of head h as the right operand, whose columns they are. Whether the unit gets them right.
  bool pack_queries(const VectorSplit &split, const VectorArea &area, int64_t h) {
    const int64_t ld = steps_ * kTileDepth;
    QueryNumbers numbers;
    for (int64_t r = 0; r < split.rows; ++r) {
      const float *q = area.q + (h * split.rows + r) * area.ldq;
      for (int64_t c = 0; c < ld; c += 2 * kWidth) {
        const F x = c < area.ldq ? Simd::load(q + c) : Simd::zero();
        const F y = c + kWidth < area.ldq ? Simd::load(q + c + kWidth) : Simd::zero();
        numbers.see(x);
        numbers.see(y);
        store_rounded(keys_ + r * ld + c, x, y);
      }
    }
    Rows rows;
    rows.data = reinterpret_cast<const char *>(keys_);
    rows.stride = ld * int64_t{sizeof(uint16_t)};
    pack_key_tiles(rows, 0, split.rows, ld, queries_of(h));
    return numbers.moderate();
  }

  // S of head h and up to kScoreKeys keys.
  void score_block(const Rows &rows, const VectorSplit &split, const VectorArea &area, int64_t h, Range block) {
    const int64_t offset = h * p_.k.head_stride * int64_t{sizeof(uint16_t)};
    pack_left<NoMagnitudes, 0>(
        block.size(), p_.head_dim, [&](int64_t r) { return rows.row(block.begin + r) + offset; }, keys_);
    unit_.template multiply<false, 1>(block.size(), steps_, {keys_, kTileBf16, kRightStep}, queries_of(h),
                                      {products_, kTileRows, 0, kTileFloats});
    float *s = area.s + h * split.rows * VectorArea::kLds + block.begin - split.keys.begin;
    for (int64_t key = 0; key < block.size(); key += kWidth) {
      for (int64_t c = 0; c < split.rows; c += kWidth) {
        F x[kWidth];
#pragma GCC unroll 16
        for (int i = 0; i < kWidth; ++i) x[i] = Simd::load(products_ + (key + i) * kTileRows + c);
        Simd::transpose(x);
        const int64_t columns = min64(split.rows - c, kWidth);
        if (key + kWidth <= block.size()) {
#pragma GCC unroll 8
          for (int i = 0; i < (kWidth < kVectorRows ? kWidth : kVectorRows); ++i) {
            if (i < columns) Simd::store(s + (c + i) * VectorArea::kLds + key, x[i]);
          }
        } else {
          const int keys = static_cast<int>(block.size() - key);
          for (int64_t i = 0; i < columns; ++i) Simd::store(s + (c + i) * VectorArea::kLds + key, x[i], keys);
        }
      }
    }
  }

  // P of head h in a block of keys as the left operand: row r is what bf16 holds of it when it is cut off, row kVectorRows + r the rest.
  // Keys past the block are zero.
  void pack_p(const VectorSplit &split, const VectorArea &area, int64_t h, Range block) {
    const auto cut = [](F x) __attribute__((always_inline)) {
      return Simd::from_bits(Simd::iand(Simd::bits(x), Simd::iset(0xFFFF0000u)));
    };
    for (int64_t r = 0; r < split.rows; ++r) {
      const float *p = area.s + (h * split.rows + r) * VectorArea::kLds + block.begin - split.keys.begin;
      for (int64_t c = 0; c < round_up(block.size(), kTileDepth); c += 2 * kWidth) {
        const int64_t left = block.size() - c;
        const bool whole = left >= 2 * kWidth;
        const F x = whole ? Simd::load(p + c) : Simd::load(p + c, static_cast<int>(max64(min64(left, kWidth), 0)));
        const F y = whole ? Simd::load(p + c + kWidth)
                          : Simd::load(p + c + kWidth, static_cast<int>(max64(min64(left - kWidth, kWidth), 0)));
        uint16_t *to = p_tiles_ + c / kTileDepth * kTileBf16 + r * kTileDepth + c % kTileDepth;
        store_rounded(to, cut(x), cut(y));
        store_rounded(to + kVectorRows * kTileDepth, Simd::sub(x, cut(x)), Simd::sub(y, cut(y)));
      }
    }
  }

  const ForwardProblem &p_;
  const ForwardLayout &layout_;
  const int64_t steps_;          // of K Q^T
  const int64_t output_;         // floats of a head's tiles of O
  uint16_t *q_ = nullptr;        // (head, step, half): queries
  uint16_t *keys_ = nullptr;     // pack_left of keys; before that the queries of a head as rows
  float *products_ = nullptr;    // kScoreKeys x 16: S^T
  uint16_t *values_ = nullptr;   // pack_value_tiles
  uint16_t *p_tiles_ = nullptr;  // (step): P
  float *outputs_ = nullptr;     // (head, 16 columns): tiles of O
  bool moderate_[kVectorScratchRows] = {};
  Bf16Unit unit_;
};

}  // namespace fa::cpu::FA_ISA
