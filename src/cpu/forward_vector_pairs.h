// SPDX-License-Identifier: Apache-2.0
// Products of the vector forward kernel by vdpbf16ps, for bf16: keys and values are not widened, and a product takes half as many
// instructions.
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

class VectorProducts {
 public:
  VectorProducts(const ForwardProblem &problem, const ForwardLayout &) : p_(problem) {}

  // Takes a split whose queries lie in the area, or returns false. Those of heads that it computes are rounded in place.
  bool begin(char *, const Head &, const VectorSplit &split, const VectorArea &area) {
    if (is_quantised(p_.k.dtype)) return false;
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
      vector_scores<PairProduct>(p_, head, split, visited, area, heads, reinterpret_cast<const uint16_t *>(area.q),
                                 2 * area.ldq);
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
    for_runs_of(done, split.count, [&](Range heads) { add_values(head, split, visited, area, heads); });
  }

 private:
  void add_values(const Head &head, const VectorSplit &split, const VisitedKeys &visited, const VectorArea &area,
                  Range heads) const {
    const HeadRows rows = head_rows(p_, p_.v, head, split, split.keys),
                   next = head_rows(p_, p_.k, head, split, after(head, split));
    Ahead ahead(rows, next, blocks_of(split.rows, kPieceKeys * p_.head_dim_v / (2 * kWidth), kMostBlockVectors));
    clear_outputs(split, area, heads);
    for_visited_pieces(rows.rows, split.keys.begin, visited, [&](const KeyPiece &piece) {
      ahead.begin(piece);
      const auto add = [&](const char *const *values, int64_t offset, Range some) {
        const int64_t row = some.begin * split.rows;
        add_pair_rows(
            values, (piece.count + 1) / 2, offset, rows.head_bytes, some.size(), p_.head_dim_v, split.rows,
            reinterpret_cast<const uint32_t *>(area.s + row * VectorArea::kLds) + (piece.first - split.keys.begin) / 2,
            VectorArea::kLds, area.o + row * area.ldo, area.ldo, ahead);
      };
      if (piece.count % 2 == 0) return add(piece.rows, heads.begin * rows.head_bytes, heads);
      for (int64_t h = heads.begin; h < heads.end; ++h)
        add(PieceValues(piece, 0, piece.count, h * rows.head_bytes).rows, 0, {h, h + 1});
    });
    ahead.finish();
  }

  const ForwardProblem &p_;
  bool moderate_[kVectorScratchRows] = {};
};

}  // namespace fa::cpu::FA_ISA
