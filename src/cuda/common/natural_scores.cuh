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

  // Elements of Q K^T become natural logits, without the bias. derivative(n, x): x is that of the logit by the scaled score.
  template <typename Derivative>
  __device__ __forceinline__ void add_terms(float *s, Derivative derivative) const {
    const HeadTerms terms = head_terms(p_, NaturalMath::kLogit, at_.batch, at_.head);
    const int shift = at_.seqlen_k - at_.seqlen_q;
    float distance[2];  // of the lane's first pairs
#pragma unroll
    for (int r = 0; r < 2; ++r)
      distance[r] = static_cast<float>(kOwnsQueries ? row_ + 8 * r + shift - column_ : column_ + shift - (row_ + 8 * r));
    with_score_mods<kSoftcapAlibi>(p_, NaturalTileMath(p_), [&](const auto &mods) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const auto column = static_cast<float>(Fragment::key(n));
        float x;
        s[n] = mods.logit(s[n], 0.f, terms, distance[Fragment::row(n)] + (kOwnsQueries ? -column : column), x);
        derivative(n, x);
      }
    });
  }

  // s becomes s scale + bias. A bias of -inf masks a pair, whatever the score is; pairs that do not exist get the bias of another one.
  __device__ __forceinline__ void add_bias(float *s, float scale) const {
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
    const auto add = [&](int n, float bias) { s[n] = bias == -CUDART_INF_F ? bias : fmaf(s[n], scale, bias); };
    if (first_ + kColumns > columns) {
#pragma unroll
      for (int n = 0; n < kCount; ++n)
        add(n, from[Fragment::row(n)][min(column + Fragment::key(n), columns - 1) * column_stride]);
      return;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) from[r] += column * column_stride;
    if (column_stride == 1 && ((reinterpret_cast<uintptr_t>(from[0]) | reinterpret_cast<uintptr_t>(from[1])) & 7) == 0) {
#pragma unroll
      for (int n = 0; n < kCount; n += 2) {
        const float2 pair = *reinterpret_cast<const float2 *>(from[Fragment::row(n)] + Fragment::key(n));
        add(n, pair.x);
        add(n + 1, pair.y);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kCount; ++n) add(n, from[Fragment::row(n)][Fragment::key(n) * column_stride]);
    }
  }

  // Which pairs are dropped, one bit for each element. Own rows are queries.
  __device__ __forceinline__ uint32_t draw_dropped() const {
    static_assert(kOwnsQueries);
    const uint32_t bh = static_cast<uint32_t>(at_.batch * static_cast<int>(p_.heads_q) + at_.head);
    const DropoutTile tile[1] = {{load_dropout_key(p_.dropout), bh, row_ >> 4}};
    const uint32_t threshold = p_.dropout.threshold << 16,
                   c0 = 2 * static_cast<uint32_t>(first_) + static_cast<uint32_t>(lane_);
    uint32_t dropped = 0;
#pragma unroll
    for (int k = 0; k < 4; k += 2) {  // two calls at a time: one hides the latency of the other
      Philox4 random[2];
      DropoutTile::bits(
          random, [&](int) -> const DropoutTile & { return tile[0]; }, [&](int i) { return c0 + 32 * (k + i); });
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const uint32_t bits = random[i].word[2 * (r & 1) + (r >> 1)];
          if (bits << 16 < threshold) dropped |= 1u << (8 * (k + i) + 2 * r);
          if (bits < threshold) dropped |= 2u << (8 * (k + i) + 2 * r);
        }
    }
    return dropped;
  }

 private:
  const Problem &p_;
  const ScoredHead at_;
  const int row_, column_, first_, lane_;
};

// The P of dropped pairs becomes 0, and keeps its sign: a masked P stays masked.
__device__ __forceinline__ void drop(float *p, uint32_t dropped) {
#pragma unroll
  for (int n = 0; n < 32; ++n)
    if ((dropped >> n & 1) != 0) p[n] = copysignf(0.f, p[n]);
}

// What the cell map says of the cell of a query and a key that exist: 0 nothing is visible, 1 everything, 3 some pairs may be hidden.
__device__ __forceinline__ uint32_t cell_code(const DataMask &mask, int batch, int head, int row, int key) {
  const int64_t word = row_of_cells(mask, batch, head, row) + key / kCell / 32;
  const int bit = key / kCell % 32;
  return (mask.by_query.visible[word] >> bit & 1) | (mask.by_query.partial[word] >> bit & 1) << 1;
}

// Calls f(n) for the elements of 64 keys from key0 on that masks as data hide; rows are queries. `row0` is the first of the 64 queries that share a
// row of cells with those of the warp, `row` the lane's first one.
template <typename F>
__device__ __forceinline__ void for_hidden_by_data(const DataMask &mask, const Problem &p, const ScoredHead &at, int row0,
                                                   int row, int key0, int lane, F f) {
  const uint32_t code = key0 < at.seqlen_k ? cell_code(mask, at.batch, at.head, min(row0, at.seqlen_q - 1), key0) : 0;
  if (code == 1) return;
  uint32_t shown = 0;  // 16 bits for each row
  if (code != 0) {
#pragma unroll 1
    for (int r = 0; r < 2; ++r)
      shown = shown >> 16 | qk_fragment_bits(visible_key_bits(mask, p, at.batch, at.head, row + 8 * r, key0), lane) << 16;
  }
#pragma unroll
  for (int n = 0; n < 32; ++n)
    if ((shown >> (16 * (n / 2 % 2) + 2 * (n / 4) + n % 2) & 1) == 0) f(n);
}

}  // namespace fa::cuda
