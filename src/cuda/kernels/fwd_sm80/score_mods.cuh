// SPDX-License-Identifier: Apache-2.0
// What a forward does to S between Q K^T and the softmax (score text, softcap, ALiBi, bias, mask), and to P after it
// (dropout). A kernel has the code of the terms it is built for (C::kScores). Each is a loop of its own over the fragment,
// behind one branch that is uniform over the grid.
//
// Scores stay in the unit of q k^T (score_mod.cuh). With a score text they are natural logits, behind the text.
#pragma once

#include "cuda/common/mask.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/rng.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/score_text.cuh"
#include "cuda/kernels/fwd_sm80/row_block.cuh"

namespace fa::cuda::sm80 {

template <class C>
class TileScoreMods {
 public:
  using Element = typename C::Element;
  using Rows = RowBlock<C>;
  static constexpr int kMt = C::kRowTiles, kNt = C::kKeys / 8, kBiasPitch = C::kKeys * 2;
  using Fragment = QkFragment<kMt, kNt>;
  using Scores = Accumulator<kMt, kNt>;  // queries x keys of this warp

  // What does not change during the main loop.
  __device__ __forceinline__ void init(const Rows &rows) {
    const Problem &p = rows.p;
    if constexpr (C::has(kAlibi)) {
      if (has_offset(p)) {
#pragma unroll
        for (int r = 0; r < Fragment::kRows; ++r)
          head_[r] = load_head_terms(p, rows.a.raw.logit, rows.b, rows.head_of(used_row(rows, r)));
      }
    }
    if constexpr (C::has(kDropout)) {
      if (!C::has(kAnyBias) || p.dropout.threshold > 0) {
        const DropoutKey key = load_dropout_key(p.dropout);
        const uint32_t bh = dropout_head(p, rows.b, rows.head_q);
#pragma unroll
        for (int i = 0; i < kMt; ++i) dropout_[i] = DropoutTile(key, bh, (rows.warp_row + p.dropout.first_query) / 16 + i);
      }
    }
  }

  // Finds the keys, of those that this lane holds of a tile of this warp, that masks given as data show. The keys begin at key0.
  __device__ __forceinline__ void find_shown(const Rows &rows, int key0) {
    if constexpr (C::has(kDataMask)) {
      constexpr int kBits = Fragment::kKeysOfLane;
      static_assert(Fragment::kRows * kBits <= 32);
      shown_ = ~0u;
      if (!rows.partial_cell) return;
      shown_ = 0;
      const int b = opaque(rows.b), h = opaque(rows.head_q);  // or addresses of the masks would be held through the main loop
#pragma unroll 1
      for (int r = 0; r < Fragment::kRows; ++r) {
        const uint64_t keys =
            visible_key_bits(rows.a.mask, rows.p, b, h, row_of(rows, r), key0 / kCell * kCell) >> key0 % kCell;
        const uint32_t of_row = qk_fragment_bits(keys, rows.lane) & ((1u << kBits) - 1);
        shown_ = shown_ >> kBits | of_row << (Fragment::kRows - 1) * kBits;
      }
    }
  }

  // Begins to load the bias of this warp's rows and keys of a tile. Only this warp reads it, so that no CTA barrier is needed. Always commits
  // one cp.async group.
  __device__ __forceinline__ void load_bias(const Rows &rows, int tile) const {
    if constexpr (C::kStagesBias) {
      cp_async_wait<1>();  // if this warp skipped a tile, the bias of that tile may still be arriving
      if (tile >= rows.tile_begin) {
        __syncwarp();  // the bias of the tile before has been read
        constexpr int kVectors = C::kKeys / 8, kStep = 32 / kVectors;
        const ScoreTensor &t = rows.p.bias;
        const int lane = opaque(rows.lane), local = lane / kVectors, vector = lane % kVectors,
                  key = tile * C::kTile + rows.column_warp * C::kKeys + vector * 8;
        const int bytes = max(0, min(rows.seqlen_k - key, 8)) * 2;
        const Element *base = static_cast<const Element *>(t.data) + opaque(rows.b) * t.batch_stride + key;
        const auto to = [&](int i) { return rows.smem_bias() + swizzled<kBiasPitch>(local + i, vector); };
        if (!rows.packed() && rows.warp_row + C::kWarpRows <= rows.rows) {
          base += opaque(rows.head_q) * t.head_stride + (rows.warp_row + local) * t.row_stride;
#pragma unroll
          for (int i = 0; i < C::kWarpRows; i += kStep) cp_async_16(to(i), base + i * t.row_stride, bytes);
        } else {
#pragma unroll 1
          for (int i = 0; i < C::kWarpRows; i += kStep) {
            const int row = min(rows.warp_row + local + i, rows.rows - 1);
            cp_async_16(to(i), base + rows.head_of(row) * t.head_stride + rows.token_of(row) * t.row_stride,
                        row == rows.warp_row + local + i ? bytes : 0);
          }
        }
      }
      cp_async_commit();
    }
  }

  // Applies all terms to S, of keys key0 .. key0 + C::kKeys - 1, and begins to load the bias of tile `next`. With kMasked, pairs that the band,
  // the end of the sequence, find_shown() or a bias of -inf masks become -inf whatever they were, NaN included; without, a bias of -inf is only added.
  template <bool kMasked>
  __device__ __forceinline__ void apply(Scores &s, const Rows &rows, int key0, int next) const {
    constexpr bool kMayUnmask =
        C::has(kScoreText) && C::has(kSoftcap | kTileBias | kAnyBias);  // what a text masks stays masked
    uint32_t shown[Fragment::kRows];
    if constexpr (C::has(kScoreText)) apply_text<kMasked>(s, rows, key0, shown);
    if constexpr (C::has(kSoftcap | kAlibi)) {
      const int diagonal = rows.seqlen_k - rows.seqlen_q() - key0 - Fragment::first_key(rows.lane);
      apply_score_mods<Fragment, C::kScores>(
          s, rows.p, rows.a.raw, [&](int r) { return head_[r]; },
          [&](int r) { return rows.token_of(used_row(rows, r)) + diagonal; });
    }
    if constexpr (C::kStagesBias) {
      cp_async_wait<1>();  // the bias of this tile has arrived; K and V of the next one may still be arriving
      __syncwarp();
      add_staged_bias<kMasked>(s, rows);
      load_bias(rows, next);
    } else if constexpr (C::has(kAnyBias)) {
      if (rows.p.bias.data != nullptr) add_global_bias<kMasked>(s, rows, key0);
    }
    if constexpr (kMayUnmask && !kMasked) {
#pragma unroll
      for (int r = 0; r < Fragment::kRows; ++r) mask_row<Fragment>(s, r, shown[r]);
    }
    if constexpr (kMasked) {
#pragma unroll
      for (int r = 0; r < Fragment::kRows; ++r) {
        uint32_t bits = visible(rows, r, key0);
        if constexpr (kMayUnmask) bits &= shown[r];
        if constexpr (C::has(kDataMask)) bits &= shown_ >> r * Fragment::kKeysOfLane;
        mask_row<Fragment>(s, r, bits);
      }
    }
  }

  // Zeroes the dropped elements of P of the warp's rows and 16 keys, which is converted already: a[i] is row tile i. A masked P keeps its sign.
  __device__ __forceinline__ void drop(uint32_t (&a)[kMt][4], const Rows &rows, int key0) const {
    if constexpr (C::has(kDropout)) {
      if (C::has(kAnyBias) && rows.p.dropout.threshold == 0) return;  // kernels for dropout alone have no branch here
      Philox4 random[kMt];
      const uint32_t c0 = lane_dropout_counter0(key0 + rows.p.dropout.first_key, rows.lane);
      DropoutTile::bits(
          random, [&](int i) -> const DropoutTile & { return dropout_[i]; }, [&](int) { return c0; });
      const KeptHalves halves(rows.p.dropout.threshold);
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const uint32_t word = random[i].word[2 * (r & 1) + (r >> 1)];
          a[i][r] &= halves.of(owns_odd_rows(rows.lane) ? dropout_word_of_odd_row(word) : word) | 0x80008000u;
        }
    }
  }

  // The factor that turns scores behind apply() into exponents of two.
  static __device__ __forceinline__ float scale(const Problem &p) { return C::has(kScoreText) ? kLog2e : exponent_scale(p); }

 private:
  // The score text. A pair that it hides becomes -inf; the cell map says in which tiles there are any. `shown`: the keys of
  // a row that the text does not mask, as bits.
  template <bool kMasked>
  static __device__ __forceinline__ void apply_text(Scores &s, const Rows &rows, int key0, uint32_t (&shown)[Fragment::kRows]) {
    const Problem &p = rows.p;
    const int first = key0 + Fragment::first_key(rows.lane);
    const auto first_number = static_cast<float>(first);
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const int row = used_row(rows, r), token = rows.token_of(row);
      const auto number = static_cast<float>(token);
      const ScorePlace place{rows.b,
                             rows.head_of(row),
                             rows.seqlen_q(),
                             rows.seqlen_k,
                             p.q_lengths.cu != nullptr ? rows.queries().start : 0,
                             p.k_lengths.cu != nullptr ? rows.k_start : 0};
      const ScoreText text{place, score_text_args(rows.a)};
      shown[r] = 0;
#pragma unroll
      for (int m = 0; m < Fragment::kKeysOfLane; ++m) {
        const int n = Fragment::at(r, m), key = first + Fragment::key(n);
        float &x = element(s, n);
        const float key_number = first_number + static_cast<float>(Fragment::key(n));
        x = kMasked ? text.score(x * p.softmax_scale, token, key, number, key_number)
                    : text.score_inside(x * p.softmax_scale, token, first / 2 + Fragment::key(n) / 2, Fragment::key(n) % 2 != 0,
                                        number, key_number);
        if (kMasked && C::has(kDataMask) && ScoreText::kVisible && !text.visible(token, key)) x = -CUDART_INF_F;
        shown[r] |= x != -CUDART_INF_F ? 1u << m : 0u;
      }
    }
  }

  static __device__ __forceinline__ int row_of(const Rows &rows, int r) {
    return rows.warp_row + Fragment::query(rows.lane, r);
  }
  // Rows beyond the last are not stored: any other row's terms will do.
  static __device__ __forceinline__ int used_row(const Rows &rows, int r) { return min(row_of(rows, r), rows.rows - 1); }

  // Of the keys that this lane holds of row r, those inside band and sequence, as bits.
  static __device__ __forceinline__ uint32_t visible(const Rows &rows, int r, int key0) {
    return visible_bits<Fragment>(keys_of_query(rows.diagonal(), rows.token_of(row_of(rows, r))), key0, opaque(rows.lane));
  }

  template <bool kMasked>
  static __device__ __forceinline__ void add_pair(float *x, uint32_t bias, const RawUnit &raw) {
    x[0] = add_bias<kMasked>(x[0], to_float<Element>(bias & 0xFFFFu), raw.logit);
    x[1] = add_bias<kMasked>(x[1], to_float<Element>(bias >> 16), raw.logit);
  }

  template <bool kMasked>
  static __device__ __forceinline__ void add_staged_bias(Scores &s, const Rows &rows) {
    const int lane = opaque(rows.lane);
    const uint32_t at = rows.smem_bias() + swizzled<kBiasPitch>(lane & 15, lane >> 4);
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int k = 0; k < kNt / 2; ++k) {
        uint32_t bias[4];
        ldmatrix_x4(bias, advance<kBiasPitch>(at, k) + i * 16 * kBiasPitch);
#pragma unroll
        for (int n = 0; n < 4; ++n) add_pair<kMasked>(&s[i][2 * k + n / 2][n % 2 * 2], bias[n], rows.a.raw);
      }
  }

  // The bias from global memory, two neighbours at a time where that is legal. Only visible keys have one.
  template <bool kMasked>
  static __device__ __forceinline__ void add_global_bias(Scores &s, const Rows &rows, int key0) {
    const ScoreTensor &t = rows.p.bias;
    const RawUnit &raw = rows.a.raw;
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      const int row = used_row(rows, r);
      const int64_t at = rows.b * t.batch_stride + rows.head_of(row) * t.head_stride + rows.token_of(row) * t.row_stride +
                         (key0 + Fragment::first_key(rows.lane)) * t.col_stride;
      if (kMasked || !rows.a.pair_bias) {
        const uint32_t bits = kMasked ? visible(rows, r, key0) : ~0u;
        add_row_bias<Fragment, kMasked>(s, r, t, at, bits, raw);
      } else {
        add_row_bias_pairs<Fragment, Element>(s, r, t, at, raw);
      }
    }
  }

  HeadTerms head_[Fragment::kRows];
  DropoutTile dropout_[kMt];
  uint32_t shown_;  // find_shown(): kKeysOfLane bits for every row
};

}  // namespace fa::cuda::sm80
