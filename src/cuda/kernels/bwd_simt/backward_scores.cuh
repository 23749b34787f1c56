// SPDX-License-Identifier: Apache-2.0
// P and dS of a tile of own rows x other rows, recomputed from q, k, v, dout, lse and delta: the part that all gradients share.
#pragma once

#include <math_constants.h>

#include "cuda/common/mask.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pair.cuh"
#include "cuda/kernels/bwd_simt/backward.h"
#include "cuda/kernels/fwd_simt/tile.cuh"

namespace fa::cuda::simt {

// Where the operands of a head begin.
struct HeadOperands {
  const char *q, *dout, *k, *v;
};

template <class T>
struct BackwardStorage {
  static constexpr int kRows = T::kOwnRows > T::kOtherRows ? T::kOwnRows : T::kOtherRows;
  struct RowNumbers {
    float lse[kRows], delta[kRows];
  };

  typename T::Storage tiles;
  RowNumbers row_numbers[2];  // of the queries of a tile
  HeadOperands operands[kWarps];
};

// One tile: its head and batch entry, and where its own and its other rows begin.
struct BackwardTile {
  int b, head_q, own0, other0;
};

template <class T>
struct BackwardScores {
  using Storage = BackwardStorage<T>;
  using RowNumbers = typename Storage::RowNumbers;

  const BackwardParams &a;
  const BackwardProblem &g;
  const Problem &p;
  const ThreadTile<T> at;
  Pipeline<T> pipeline;
  float *shared_p;          // of this warp
  HeadOperands *operands;   // of this warp, of the head that is being loaded
  RowNumbers *row_numbers;  // two buffers

  bool own_queries, with_derivative = false;
  int s_slices, slices;  // of S, and of S and dP
  int seqlen_q, seqlen_k;
  float s[T::kOwn][T::kOther], dp[T::kOwn][T::kOther];

  __device__ __forceinline__ BackwardScores(const BackwardParams &params, Storage &shared)
      : a(params),
        g(params.problem),
        p(params.problem.forward),
        pipeline(shared.tiles),
        shared_p(shared.tiles.p[at.warp]),
        operands(&shared.operands[at.warp]),
        row_numbers(shared.row_numbers) {}

  // own_is_q: own rows are queries and other rows keys; otherwise the reverse. with_dp: dP is needed.
  __device__ __forceinline__ void init(bool own_is_q, bool with_dp) {
    own_queries = own_is_q;
    s_slices = static_cast<int>(p.head_dim + kDepth - 1) / kDepth;
    slices = s_slices + (with_dp ? static_cast<int>(p.head_dim_v + kDepth - 1) / kDepth : 0);
  }

  __device__ __forceinline__ void set_batch(int b) {
    seqlen_q = static_cast<int>(sequence_of(p.q_lengths, b).len);
    seqlen_k = static_cast<int>(sequence_of(p.k_lengths, b).len);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Operands
  // ------------------------------------------------------------------------------------------------------------------

  // Every warp keeps its own copy in shared memory, because registers are full.
  __device__ __forceinline__ void find_operands(const BackwardTile &t) const {
    if (at.lane == 0) {
      const int head_k = t.head_q / static_cast<int>(p.group);
      const int64_t queries = sequence_of(p.q_lengths, t.b).start, keys = sequence_of(p.k_lengths, t.b).start;
      *operands = {base_of(p.q, t.b, queries, t.head_q), base_of(g.dout, t.b, queries, t.head_q),
                   base_of(p.k, t.b, keys, head_k), base_of(p.v, t.b, keys, head_k)};
    }
    __syncwarp();
  }

  // Rows of q and k, or with `second` of dout and v, of the head that find_operands found.
  __device__ __forceinline__ Rows rows(bool queries, bool second) const {
    const Operand &operand = queries ? (second ? g.dout : p.q) : (second ? p.v : p.k);
    const bool vectors = queries ? (second ? a.vector_dout : a.vector_q) : (second ? a.vector_v : a.vector_k);
    const char *base = queries ? (second ? operands->dout : operands->q) : (second ? operands->v : operands->k);
    return row_source(operand, base, queries ? seqlen_q : seqlen_k, second ? p.head_dim_v : p.head_dim, vectors);
  }

  // Loads a slice of the operands of S, then of dP. With the first comes lse and delta of the tile's queries, into row_numbers[buffer]. The
  // caller commits.
  __device__ __forceinline__ void load_operands(const BackwardTile &t, int slice, int buffer) const {
    float *stage = pipeline.empty_stage();
    const bool second = slice >= s_slices;
    const int column = (second ? slice - s_slices : slice) * kDepth;
    load_slice<T::kOwnRows, kDepth, kPitch>(stage, rows(own_queries, second), t.own0, column);
    load_slice<T::kOtherRows, kDepth, kPitch>(stage + T::kOwnRows * kPitch, rows(!own_queries, second), t.other0, column);
    if (slice > 0) return;
    const int count = own_queries ? T::kOwnRows : T::kOtherRows;
    const int64_t first =
        int64_t{first_q_tile_of(a, t.b, t.head_q, kRowPadding)} * kRowPadding + (own_queries ? t.own0 : t.other0);
    const uint32_t lse = smem_address(row_numbers[buffer].lse), delta = smem_address(row_numbers[buffer].delta);
    for (int n = threadIdx.x; n < count; n += kThreads) {
      cp_async_4(lse + n * 4, a.row_lse + first + n, 4);
      cp_async_4(delta + n * 4, a.row_delta + first + n, 4);
    }
  }

  // Adds the product of a slice to S or dP.
  __device__ __forceinline__ void compute_slice(int slice, const float *stage) {
    const float *own = stage + at.own * kPitch, *other = stage + (T::kOwnRows + at.other) * kPitch;
    if (slice == 0) clear(s);
    if (slice == s_slices) clear(dp);
    if (slice < s_slices) {
      fma_nt<T>(s, own, other);
    } else {
      fma_nt<T>(dp, own, other);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // P and dS
  // ------------------------------------------------------------------------------------------------------------------

  // Whether masks given as data leave anything of a tile visible.
  __device__ __forceinline__ bool shows(const BackwardTile &t) const {
    if (!a.mask.given()) return true;
    const int own_end = min(t.own0 + T::kOwnRows, own_queries ? seqlen_q : seqlen_k),
              other_end = min(t.other0 + T::kOtherRows, own_queries ? seqlen_k : seqlen_q);
    return own_queries ? any_visible(a.mask, t.b, t.head_q, t.own0, own_end, t.other0, other_end)
                       : any_visible(a.mask, t.b, t.head_q, t.other0, other_end, t.own0, own_end);
  }

  // Whether scores are natural logits and no tile is full, as in forward.
  __device__ __forceinline__ bool general() const { return ScoreText::kGiven || p.general_score() || a.mask.given(); }

  // How a tile lies to this warp's rows.
  __device__ __forceinline__ TileMask mask_of(const BackwardTile &t) const {
    const int own0 = t.own0 + at.warp * 2 * T::kOwn, own1 = own0 + 2 * T::kOwn, other1 = t.other0 + T::kOtherRows;
    const int row0 = own_queries ? own0 : t.other0, row1 = own_queries ? own1 : other1;
    const int key0 = own_queries ? t.other0 : own0, key1 = own_queries ? other1 : own1;
    const Diagonal<int32_t> diagonal(Diagonal<int32_t>::Limits(p.band), seqlen_q, seqlen_k);
    const KeyRange used{row0, min(row1, seqlen_q)}, visible = diagonal.visible_keys(used);
    if (key0 >= visible.end || key1 <= visible.begin) return TileMask::empty;
    const KeyRange interior = diagonal.interior_keys(used);
    const bool partial = general() || row1 > seqlen_q || key0 < interior.begin || key1 > interior.end;
    return partial ? TileMask::partial : TileMask::full;
  }

  // Turns S (and dP) into the left operand of the next product, in S's place: P, zero where dropped, for dv; dS / softmax_scale for dq and
  // dk. A masked element becomes kMaskedP.
  __device__ __forceinline__ void compute_operand(const BackwardTile &t, bool masked, bool want_p, int buffer) {
    if (masked) {
      general_operand(t, want_p, row_numbers[buffer]);
    } else if (own_queries) {
      plain_operand<true>(want_p, row_numbers[buffer]);
    } else {
      plain_operand<false>(want_p, row_numbers[buffer]);
    }
  }

 private:
  template <bool kOwnQueries>
  __device__ __forceinline__ void plain_operand(bool want_p, const RowNumbers &of_rows) {
    const float scale = p.softmax_scale;
    const int first = kOwnQueries ? at.own : at.other;
#pragma unroll
    for (int i = 0; i < T::kOwn; ++i)
#pragma unroll
      for (int j = 0; j < T::kOther; ++j) {
        const int n = first + (kOwnQueries ? i : 16 * j);
        const float x = exponential(fmaf(s[i][j], scale, -of_rows.lse[n]));
        s[i][j] = want_p ? x : x * (dp[i][j] - of_rows.delta[n]);
      }
  }

  // The pairs of this thread that masks given as data show: own row i and other row j as bit i * kOther + j.
  __device__ __forceinline__ uint32_t shown_pairs(const Pairs &pairs, const BackwardTile &t) const {
    constexpr int kOthersOfCell = kCell / 16;
    static_assert(T::kOwn * T::kOther <= 32 && kCell % T::kOwn == 0 && T::kOther % kOthersOfCell == 0);
    if (!a.mask.given()) return ~0u;
    const int own = t.own0 + at.own;
    uint32_t shown = 0;
    if (own_queries) {
#pragma unroll 1
      for (int n = 0; n < T::kOwn * T::kOther; n += kOthersOfCell) {
        const int i = n / T::kOther, j = n % T::kOther;
        const uint64_t keys = pairs.shown_keys(t.head_q, own + i, t.other0 + 16 * j) >> at.other;
#pragma unroll
        for (int m = 0; m < kOthersOfCell; ++m) shown |= static_cast<uint32_t>(keys >> 16 * m & 1) << (n + m);
      }
    } else {
#pragma unroll 1
      for (int j = 0; j < T::kOther; ++j) {
        const uint64_t keys = pairs.shown_keys(t.head_q, t.other0 + at.other + 16 * j, own / kCell * kCell) >> own % kCell;
#pragma unroll
        for (int i = 0; i < T::kOwn; ++i) shown |= static_cast<uint32_t>(keys >> i & 1) << (i * T::kOther + j);
      }
    }
    return shown;
  }

  __device__ __forceinline__ void general_operand(const BackwardTile &t, bool want_p, const RowNumbers &of_rows) {
    const Pairs pairs(p, a.mask, score_text_args(a), t.b, seqlen_q, seqlen_k);
    const HeadTerms terms = pairs.head_terms(t.head_q);
    const bool general = this->general();
    const float scale = general ? 1.f : p.softmax_scale;
    uint32_t shown = shown_pairs(pairs, t);
#pragma unroll 1
    for (int i = 0; i < T::kOwn; ++i) {
      const int own = t.own0 + at.own + i;
#pragma unroll 1
      for (int j = 0; j < T::kOther; ++j, shown >>= 1) {
        const int other = t.other0 + at.other + 16 * j, row = own_queries ? own : other, key = own_queries ? other : own;
        const int n = own_queries ? at.own + i : at.other + 16 * j;
        float x = kMaskedP;
        if ((shown & 1) != 0 && pairs.in_band(row, key)) {
          const float raw = s[0][0];
          const float logit = general ? pairs.logit(raw, t.head_q, terms, row, key) : raw;
          if (logit != -CUDART_INF_F) {
            const float prob = exponential(fmaf(logit, scale, -of_rows.lse[n]));
            const bool kept = pairs.kept(t.head_q, row, key);
            if (want_p) {
              x = kept ? prob : 0.f;
            } else {
              // A dropped P passes no gradient through P V, but still through the row sum.
              const float kept_dp = kept ? dp[0][0] * p.dropout.keep_scale : 0.f;
              x = prob * (kept_dp - of_rows.delta[n]) + 0.f;  // + 0: a visible -0 must not look masked
            }
          }
        }
        if (with_derivative && x != 0.f) x = x * pairs.derivative(s[0][0], t.head_q, terms, row, key) + 0.f;
        s[0][0] = x;
        rotate(s[0]);
        rotate(dp[0]);
      }
      rotate(s);
      rotate(dp);
    }
  }
};

}  // namespace fa::cuda::simt
