// SPDX-License-Identifier: Apache-2.0
// Products of the vector forward kernel by vdpbf16ps, for queries of bf16: a product takes half as many instructions. Keys and values of bf16 are not
// widened. Those of bytes are, to bf16, a piece of a head at a time, so that all rows of the head share that.
//
//   S = Q K^T   of pairs of columns
//   O += P V    of pairs of keys (cpu/forward_pairs.h), with P rounded to bf16
//
// Left to floats are key heads whose queries have numbers so small or so large that the unit would get S wrong, and O of key heads with a
// masked P in the split, whose values may not be finite.
#pragma once

#include "cpu/forward_pairs.h"
#include "cpu/forward_split.h"

namespace fa::cpu::FA_ISA {

// Rows of a piece of bytes in one head, widened to bf16: e4m3 in its units, which take fewer instructions. Behind the last row comes one of zeros.
class WidenedRows {
 public:
  WidenedRows(Dtype dtype, int64_t dim) : dtype_(dtype), dim_(dim) {}
  FA_INLINE PieceRows operator()(const KeyPiece &piece, int64_t offset) {
    const int64_t pitch = round_up(dim_, 2 * kWidth);
    for (int n = 0; n < kPieceKeys; ++n) {
      uint16_t *const to = numbers_ + n * pitch;
      rows_[n] = reinterpret_cast<const char *>(to);
      if (n < piece.count) {
        const char *const from = piece.rows[n] + offset;
        dtype_ == Dtype::e4m3 ? widen_row<ElementE4m3Units>(from, dim_, to) : widen_row<ElementI8>(from, dim_, to);
      } else if (n == piece.count) {
        for (int64_t c = 0; c < pitch; c += 2 * kWidth) Simd::istore(reinterpret_cast<uint32_t *>(to + c), Simd::iset(0));
      }
    }
    return {rows_, 0};
  }

 private:
  const Dtype dtype_;
  const int64_t dim_;
  const char *rows_[kPieceKeys];
  alignas(64) uint16_t numbers_[kPieceKeys * kMaxHeadDim];
};

class VectorProducts {
 public:
  VectorProducts(const ForwardProblem &problem, const ForwardLayout &) : p_(problem) {}

  // Takes a split whose queries lie in the area, or returns false. Those of heads that it computes are rounded in place.
  bool begin(char *, const Head &, const VectorSplit &split, const VectorArea &area) {
    if (is_quantised(p_.k.dtype) && split.rows < kLeastRowsOfBytes) return false;
    for (int64_t h = 0; h < split.count; ++h) {
      QueryNumbers numbers;
      float *first = area.q + h * split.rows * area.ldq;
      for (int64_t i = 0; i < split.rows * area.ldq; i += kWidth) numbers.see(Simd::load(first + i));
      moderate_[h] = numbers.moderate();
      for (int64_t r = 0; r < split.rows && moderate_[h]; ++r) round_in_place(first + r * area.ldq, area.ldq);
    }
    return true;
  }

  // Raw S; done[h] says for which heads.
  void scores(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area,
              bool *done) const {
    for_runs_of(moderate_, split.count, [&](Range heads) {
      const auto scores = [&](auto &&rows_of_head) {
        vector_scores<PairProduct>(p_, head, split, visited, area, heads, reinterpret_cast<const uint16_t *>(area.q),
                                   2 * area.ldq, rows_of_head);
      };
      is_quantised(p_.k.dtype) ? scores(WidenedRows(p_.k.dtype, p_.head_dim)) : scores(RowsInPlace{});
      if (p_.k.dtype == Dtype::e4m3) {
        for (int64_t row = heads.begin * split.rows; row < heads.end * split.rows; ++row)
          multiply(area.s + row * VectorArea::kLds, split.keys.size(), Simd::kE4m3Unit);
      }
    });
    for (int64_t h = 0; h < split.count; ++h) done[h] = moderate_[h];
  }

  // O = P V; done[h] says for which heads. masked[row] says whether some P of the row are masked.
  void outputs(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area,
               const bool *masked, bool *done) const {
    for (int64_t h = 0; h < split.count; ++h) {
      done[h] = true;
      for (int64_t r = h * split.rows; r < (h + 1) * split.rows; ++r) done[h] = done[h] && !masked[r];
      for (int64_t r = h * split.rows; r < (h + 1) * split.rows && done[h]; ++r)
        round_in_place(area.s + r * VectorArea::kLds, split.keys.size());
    }
    for_runs_of(done, split.count, [&](Range heads) {
      is_quantised(p_.v.dtype) ? add_bytes(head, split, visited, area, heads) : add_values(head, split, visited, area, heads);
      if (p_.v.dtype == Dtype::e4m3)
        multiply(area.o + heads.begin * split.rows * area.ldo, heads.size() * split.rows * area.ldo, Simd::kE4m3Unit);
    });
  }

 private:
  // Fewer rows are faster in fp32: then widening is most of the work, which is twice as much.
  static constexpr int64_t kLeastRowsOfBytes = 5;

  // O += P V of heads. add_piece(piece, head_bytes, add) calls add(rows, some) for the values of some heads of a piece, of which the last one has
  // zeros behind it where the number of rows is odd.
  template <class AddPiece>
  void add_pieces(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area, Range heads,
                  AddPiece add_piece) const {
    const HeadRows rows = head_rows(p_, p_.v, head, split, split.keys),
                   next = head_rows(p_, p_.k, head, split, after(head, split));
    Ahead ahead(rows, next, blocks_of(split.rows, kPieceKeys * p_.head_dim_v / (2 * kWidth), kMostBlockVectors));
    clear_outputs(split, area, heads);
    for_visited_pieces(rows.rows, split.keys.begin, visited, [&](const KeyPiece &piece) {
      ahead.begin(piece);
      add_piece(piece, rows.head_bytes, [&](PieceRows values, Range some) {
        const int64_t row = some.begin * split.rows;
        add_pair_rows(
            values.rows, (piece.count + 1) / 2, values.offset, rows.head_bytes, some.size(), p_.head_dim_v, split.rows,
            reinterpret_cast<const uint32_t *>(area.s + row * VectorArea::kLds) + (piece.first - split.keys.begin) / 2,
            VectorArea::kLds, area.o + row * area.ldo, area.ldo, ahead);
      });
    });
    ahead.finish();
  }
  void add_values(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area,
                  Range heads) const {
    add_pieces(head, split, visited, area, heads, [&](const KeyPiece &piece, int64_t head_bytes, auto add) {
      if (piece.count % 2 == 0) return add({piece.rows, heads.begin * head_bytes}, heads);
      for (int64_t h = heads.begin; h < heads.end; ++h)
        add({PieceValues(piece, 0, piece.count, h * head_bytes).rows, 0}, {h, h + 1});
    });
  }
  void add_bytes(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area,
                 Range heads) const {
    WidenedRows widened(p_.v.dtype, p_.head_dim_v);
    add_pieces(head, split, visited, area, heads, [&](const KeyPiece &piece, int64_t head_bytes, auto add) {
      for (int64_t h = heads.begin; h < heads.end; ++h) add(widened(piece, h * head_bytes), {h, h + 1});
    });
  }

  const ForwardProblem &p_;
  bool moderate_[kVectorScratchRows] = {};
};

}  // namespace fa::cpu::FA_ISA
