// SPDX-License-Identifier: Apache-2.0
// Score terms, masks as data and dropout of a tile of scores of fp32 operands, in the layout of a wgmma accumulator. Logits are natural and
// functions exact to fp32.
//
// Products of fp32 on tensor cores take three to six times as long as what happens to their elements. So one kernel takes any mixture of terms,
// by branches that are uniform over the grid, and has a loop for each of them.
//
// A warp has 16 rows of its own, and 64 columns from `first` on:
//
//   kOwnsQueries   S = Q K^T, rows are queries (forward, dq)
//   otherwise      S^T = K Q^T, rows are keys (dk and dv)
#pragma once

#include <math_constants.h>

#include "cuda/common/data_mask.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/rng.cuh"
#include "cuda/common/score_mod.cuh"

namespace fa::cuda {

// One pair of sequences: batch entry, query head, used lengths.
struct ScoredHead {
  int batch, head, seqlen_q, seqlen_k;
};

template <bool kOwnsQueries>
class NaturalScores {
 public:
  using Fragment = QkFragment<1, 8>;
  static constexpr int kCount = Fragment::kElements, kColumns = Fragment::kKeys;

  // `row`: the lane's first own row, the other one is 8 further on.
  __device__ __forceinline__ NaturalScores(const Problem &problem, const ScoredHead &head, int row, int first, int lane)
      : p_(problem), at_(head), row_(row), column_(first + Fragment::first_key(lane)), first_(first), lane_(lane) {}

  // Elements of Q K^T become natural logits, without the bias. With kDerivative derivative[n] is multiplied by that of logit n by the scaled score.
  // Where registers are short, tanh and log1p of kAtOnce scores at a time: a loop rotates the registers past these.
  template <ScoreSet kTerms, int kAtOnce, bool kDerivative>
  __device__ __forceinline__ void add_terms(float *s, float tanh_scale, float *derivative) const {
    const HeadTerms terms = head_terms(p_, NaturalMath::kLogit, at_.batch, at_.head);
    const int shift = at_.seqlen_k - at_.seqlen_q;
    float distance[2];  // of the lane's first pairs
#pragma unroll
    for (int r = 0; r < 2; ++r)
      distance[r] = static_cast<float>(kOwnsQueries ? row_ + 8 * r + shift - column_ : column_ + shift - (row_ + 8 * r));
    constexpr float kStep = kOwnsQueries ? -1.f : 1.f;
    with_score_mods<kTerms>(p_, NaturalTileMath{{p_.softmax_scale, p_.softcap}, tanh_scale}, [&](const auto &mods) {
      const auto logit = [&](int n, float &x) {
        return mods.logit(s[n], 0.f, terms, distance[Fragment::row(n)] + kStep * static_cast<float>(Fragment::key(n)), x);
      };
      if constexpr (mods.has(kSoftcap | kLogAlibi)) {
#pragma unroll 1
        for (int n = 0; n < kCount; n += kAtOnce) {
          float next[kAtOnce], x[kAtOnce];
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) next[i] = logit(i, x[i]);
          rotate(s, next);
          if constexpr (kDerivative) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) x[i] *= derivative[i];
            rotate(derivative, x);
          }
          distance[0] += kStep * Fragment::key(kAtOnce);
          distance[1] += kStep * Fragment::key(kAtOnce);
        }
      } else {
#pragma unroll
        for (int n = 0; n < kCount; ++n) {
          float x;  // 1
          s[n] = logit(n, x);
        }
      }
    });
  }

  // Calls f(n, bias of element n). Pairs that do not exist get that of another one.
  template <typename F>
  __device__ __forceinline__ void for_each_bias(F f) const {
    const ScoreTensor &t = p_.bias;
    const int column = opaque(column_);  // or what follows would be computed ahead of a branch, and held in registers
    const int rows = kOwnsQueries ? at_.seqlen_q : at_.seqlen_k, columns = kOwnsQueries ? at_.seqlen_k : at_.seqlen_q;
    const int64_t row_stride = kOwnsQueries ? t.row_stride : t.col_stride,
                  column_stride = kOwnsQueries ? t.col_stride : t.row_stride;
    const float *from[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      from[r] = static_cast<const float *>(t.data) + at_.batch * t.batch_stride + at_.head * t.head_stride +
                min(row_ + 8 * r, rows - 1) * row_stride;
    if (first_ + kColumns > columns) {
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        f(n, from[Fragment::row(n)][min(column + Fragment::key(n), columns - 1) * column_stride]);
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) from[r] += column * column_stride;
    if (column_stride == 1 && ((reinterpret_cast<uintptr_t>(from[0]) | reinterpret_cast<uintptr_t>(from[1])) & 7) == 0) {
#pragma unroll
      for (int n = 0; n < kCount; n += 2) {
        const float2 pair = *reinterpret_cast<const float2 *>(from[Fragment::row(n)] + Fragment::key(n));
        f(n, pair.x);
        f(n + 1, pair.y);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kCount; ++n) f(n, from[Fragment::row(n)][Fragment::key(n) * column_stride]);
    }
  }
  // score scale + bias. A bias of -inf masks a pair, whatever the score is.
  static __device__ __forceinline__ float with_bias(float score, float scale, float bias) {
    return bias == -CUDART_INF_F ? bias : fmaf(score, scale, bias);
  }

  // Which pairs are dropped, at kept_bit(). Own rows are queries.
  __device__ __forceinline__ uint32_t draw_dropped() const {
    static_assert(kOwnsQueries);
    const DropoutTile tile[1] = {
        {load_dropout_key(p_.dropout), dropout_head(p_, at_.batch, at_.head), (row_ + p_.dropout.first_query) >> 4}};
    const KeptHalves halves(p_.dropout.threshold);
    // Two calls at a time: one hides the latency of the other.
    const uint32_t c0 = lane_dropout_counter0(first_ + p_.dropout.first_key + (owns_odd_rows(lane_) ? 32 : 0), lane_);
    Philox4 random[2];
    DropoutTile::bits(
        random, [&](int) -> const DropoutTile & { return tile[0]; }, [&](int i) { return c0 + 16 * i; });
    KeptOfCalls kept;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) kept.set(4 * i + r, halves, random[i].word[2 * (r & 1) + (r >> 1)]);
    return ~(exchange_kept(kept, lane_) ^ halves.inverted());
  }

 private:
  // The last elements become those of `next`, all others move to the front.
  template <int kAtOnce>
  static __device__ __forceinline__ void rotate(float *x, const float (&next)[kAtOnce]) {
#pragma unroll
    for (int n = 0; n + kAtOnce < kCount; ++n) x[n] = x[n + kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) x[kCount - kAtOnce + n] = next[n];
  }

  const Problem &p_;
  const ScoredHead at_;
  const int row_, column_, first_, lane_;
};

// The P of dropped pairs becomes 0, and keeps its sign: a masked P stays masked.
__device__ __forceinline__ void drop(float *p, uint32_t dropped) {
#pragma unroll
  for (int n = 0; n < 32; ++n)
    if ((dropped & kept_bit(n)) != 0) p[n] = copysignf(0.f, p[n]);
}

// What the cell map says of the cell of a query and a key that exist: 0 nothing is visible, 1 everything, 3 some pairs may be hidden.
__device__ __forceinline__ uint32_t cell_code(const DataMask &mask, int batch, int head, int row, int key) {
  const int64_t word = row_of_cells(mask, batch, head, row) + key / kCell / 32;
  const int bit = key / kCell % 32;
  return (mask.by_query.visible[word] >> bit & 1) | (mask.by_query.partial[word] >> bit & 1) << 1;
}

// The bit of element n in a word of pairs that are shown or hidden: that of qk_fragment_bits(), 16 bits for each row of the lane.
__host__ __device__ constexpr int pair_bit(int n) { return 16 * (n / 2 % 2) + 2 * (n / 4) + n % 2; }

// The pairs of a warp's 16 queries from `row` on and kCells cells of keys from key0 on that masks as data hide. `row0` is the first of the 64
// queries that share a row of cells with them. All lanes take part: each reads one query's keys of a cell.
template <int kCells>
__device__ __forceinline__ void hidden_by_data(const DataMask &mask, const Problem &p, const ScoredHead &at, int row0, int row,
                                               int key0, int lane, uint32_t (&hidden)[kCells]) {
  static_assert(kCells == 1 || kCells == 2);
  uint32_t code[kCells];
  bool partial = false;
#pragma unroll
  for (int cell = 0; cell < kCells; ++cell) {
    const int key = key0 + cell * kCell;
    code[cell] = key < at.seqlen_k ? cell_code(mask, at.batch, at.head, min(row0, at.seqlen_q - 1), key) : 0;
    hidden[cell] = code[cell] == 1 ? 0u : ~0u;
    partial |= code[cell] > 1;
  }
  if (!partial) return;
  const int my_cell = lane / 16;
  uint64_t mine = 0;
  if (my_cell < kCells && (my_cell == 0 ? code[0] : code[kCells - 1]) > 1)
    mine = visible_key_bits</*kTogether=*/true>(mask, p, at.batch, at.head, row + lane % 16, key0 + my_cell * kCell);
#pragma unroll
  for (int cell = 0; cell < kCells; ++cell) {
    if (code[cell] <= 1) continue;
    uint32_t shown = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      shown |= qk_fragment_bits(__shfl_sync(~0u, mine, 16 * cell + (lane >> 2) + 8 * r), lane) << 16 * r;
    hidden[cell] = ~shown;
  }
}

}  // namespace fa::cuda
