// SPDX-License-Identifier: Apache-2.0
// P and dS of a tile of own rows x other rows, recomputed from q, k, v, dout and two numbers a row: the part that all gradients share.
#pragma once

#include <math_constants.h>

#include "core/mask.h"
#include "cuda/common/nan_safe.cuh"
#include "cuda/kernels/bwd_simt/backward.h"
#include "cuda/kernels/fwd_simt/pair.cuh"
#include "cuda/kernels/fwd_simt/tile.cuh"

namespace fa::cuda::simt {

template <class T>
class BackwardScores {
 protected:
  static constexpr int kStatRows = T::kOwnRows > T::kOtherRows ? T::kOwnRows : T::kOtherRows;

  // Where the operands of a head begin.
  struct Operands {
    const char *q, *dout, *k, *v;
  };

 public:
  static constexpr int kSharedBytes = T::kSharedBytes + 4 * kStatRows * 4 + kWarps * sizeof(Operands);

 protected:
  // One tile: which head of which batch, and where its own and its other rows begin.
  struct Tile {
    int b, head_q, own0, other0;
  };

  __device__ __forceinline__ BackwardScores(const BackwardParams &params, float *shared)
      : a_(params), g_(params.problem), p_(params.problem.forward), ring_(shared) {
    weights_ = shared + 2 * T::kStageFloats + at_.warp * T::kWeightFloats;
    stats_ = shared + 2 * T::kStageFloats + kWarps * T::kWeightFloats;
    operands_ = reinterpret_cast<Operands *>(stats_ + 4 * kStatRows) + at_.warp;
  }

  // Own rows are queries and dP is needed; then keys, with or without.
  __device__ __forceinline__ void choose(bool own_queries, bool with_dp) {
    own_queries_ = own_queries;
    first_ = static_cast<int>(p_.head_dim + kDepth - 1) / kDepth;
    products_ = first_ + (with_dp ? static_cast<int>(p_.head_dim_v + kDepth - 1) / kDepth : 0);
  }

  __device__ __forceinline__ void enter_batch(int b) {
    const Sequence q = sequence_of(p_.q_lengths, b), k = sequence_of(p_.k_lengths, b);
    seqlen_q_ = static_cast<int>(q.len);
    seqlen_k_ = static_cast<int>(k.len);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Operands
  // ------------------------------------------------------------------------------------------------------------------

  // Every warp keeps its own copy in shared memory: registers are full.
  __device__ __forceinline__ void find_operands(const Tile &t) const {
    if (at_.lane == 0) {
      const int head_k = t.head_q / static_cast<int>(p_.group);
      const int64_t queries = sequence_of(p_.q_lengths, t.b).start, keys = sequence_of(p_.k_lengths, t.b).start;
      *operands_ = {base_of(p_.q, t.b, queries, t.head_q), base_of(g_.dout, t.b, queries, t.head_q),
                    base_of(p_.k, t.b, keys, head_k), base_of(p_.v, t.b, keys, head_k)};
    }
    __syncwarp();
  }

  // Rows of q and k, or of dout and v, of the head that find_operands found.
  __device__ __forceinline__ Rows rows(bool queries, bool second) const {
    const Operand &operand = queries ? (second ? g_.dout : p_.q) : (second ? p_.v : p_.k);
    const bool vectors = queries ? (second ? a_.vector_dout : a_.vector_q) : (second ? a_.vector_v : a_.vector_k);
    const char *base = queries ? (second ? operands_->dout : operands_->q) : (second ? operands_->v : operands_->k);
    return row_source(operand, base, queries ? seqlen_q_ : seqlen_k_, second ? p_.head_dim_v : p_.head_dim, vectors);
  }

  // Slice `step` of the operands of S, then of dP; with the first, the numbers of the tile's queries, into place `parity`. The caller
  // commits.
  __device__ __forceinline__ void fetch_products(const Tile &t, int step, int parity) const {
    float *stage = ring_.vacant();
    const bool second = step >= first_;
    const int column = (second ? step - first_ : step) * kDepth;
    load_slice<T::kOwnRows, kDepth, kPitch>(stage, rows(own_queries_, second), t.own0, column);
    load_slice<T::kOtherRows, kDepth, kPitch>(stage + T::kOwnRows * kPitch, rows(!own_queries_, second), t.other0, column);
    if (step > 0) return;
    const int count = own_queries_ ? T::kOwnRows : T::kOtherRows;
    const int64_t at =
        (int64_t{t.b} * p_.heads_q + t.head_q) * a_.row_chunks * kRowPadding + (own_queries_ ? t.own0 : t.other0);
    const uint32_t to = smem_address(stats_ + parity * 2 * kStatRows);
    for (int n = threadIdx.x; n < count; n += kThreads) {
      cp_async_4(to + n * 4, a_.row_lse + at + n, 4);
      cp_async_4(to + (kStatRows + n) * 4, a_.row_delta + at + n, 4);
    }
  }

  __device__ __forceinline__ void multiply_products(int step, const float *stage) {
    const float *own = stage + at_.own * kPitch, *other = stage + (T::kOwnRows + at_.other) * kPitch;
    if (step == 0) clear(s_);
    if (step == first_) clear(dp_);
    if (step < first_) {
      multiply_slice<T>(s_, own, other);
    } else {
      multiply_slice<T>(dp_, own, other);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Weights
  // ------------------------------------------------------------------------------------------------------------------

  // What of the tile this warp's rows see: nothing, or everything.
  __device__ __forceinline__ void look(const Tile &t, bool &active, bool &masked) const {
    const int own0 = t.own0 + at_.warp * 2 * T::kOwn, own1 = own0 + 2 * T::kOwn, other1 = t.other0 + T::kOtherRows;
    const int row0 = own_queries_ ? own0 : t.other0, row1 = own_queries_ ? own1 : other1;
    const int key0 = own_queries_ ? t.other0 : own0, key1 = own_queries_ ? other1 : own1;
    const Range rows{row0, min(row1, seqlen_q_)};
    const Range visible = visible_keys(p_.band, seqlen_q_, seqlen_k_, rows),
                interior = interior_keys(p_.band, seqlen_q_, seqlen_k_, rows);
    active = key0 < visible.end && key1 > visible.begin;
    masked = p_.general_score() || row1 > seqlen_q_ || key0 < interior.begin || key1 > interior.end;
  }

  // Turns S (and dP) into the left operand of the next product, in S's place: P where dropout keeps it for dv, dS / softmax_scale for dq
  // and dk. What is masked becomes kMaskedWeight.
  __device__ __forceinline__ void weights(const Tile &t, bool masked, bool want_p, int parity) {
    const float *lse = stats_ + parity * 2 * kStatRows;
    if (masked) {
      general_weights(t, want_p, lse);
    } else if (own_queries_) {
      plain_weights<true>(want_p, lse);
    } else {
      plain_weights<false>(want_p, lse);
    }
  }

  template <bool kOwnQueries>
  __device__ __forceinline__ void plain_weights(bool want_p, const float *lse) {
    const float scale = p_.softmax_scale;
    lse += kOwnQueries ? at_.own : at_.other;
#pragma unroll
    for (int i = 0; i < T::kOwn; ++i)
#pragma unroll
      for (int j = 0; j < T::kOther; ++j) {
        const int n = kOwnQueries ? i : 16 * j;
        const float weight = exponential(fmaf(s_[i][j], scale, -lse[n]));
        s_[i][j] = want_p ? weight : weight * (dp_[i][j] - lse[kStatRows + n]);
      }
  }

  __device__ __forceinline__ void general_weights(const Tile &t, bool want_p, const float *lse) {
    const Pairs pairs(p_, t.b, seqlen_q_, seqlen_k_);
    const float slope = pairs.slope_of(t.head_q), scale = p_.general_score() ? 1.f : p_.softmax_scale;
#pragma unroll 1
    for (int i = 0; i < T::kOwn; ++i) {
      const int own = t.own0 + at_.own + i;
#pragma unroll 1
      for (int j = 0; j < T::kOther; ++j) {
        const int other = t.other0 + at_.other + 16 * j, row = own_queries_ ? own : other, key = own_queries_ ? other : own;
        const int stat = own_queries_ ? at_.own + i : at_.other + 16 * j;
        float x = kMaskedP;
        if (pairs.visible(t.head_q, row, key)) {
          const float raw = s_[0][0];
          const float logit = p_.general_score() ? pairs.logit(raw, t.head_q, slope, row, key) : raw;
          if (logit != -CUDART_INF_F) {
            const float weight = exponential(fmaf(logit, scale, -lse[stat]));
            const bool kept = pairs.kept(t.head_q, row, key);
            if (want_p) {
              x = kept ? weight : 0.f;
            } else {
              // Dropped weights pass no gradient through P V, but still through the sum.
              const float dp = kept ? dp_[0][0] * p_.dropout.keep_scale : 0.f;
              x = weight * (dp - lse[kStatRows + stat]) + 0.f;  // + 0: a visible -0 is no mask
            }
          }
        }
        // The derivative through softcap; dbias does not pass through it.
        if (through_softcap_ && x != 0.f) {
          const float cap = pairs.cap(s_[0][0]);
          x = x * (1.f - cap * cap) + 0.f;
        }
        s_[0][0] = x;
        rotate(s_[0]);
        rotate(dp_[0]);
      }
      rotate(s_);
      rotate(dp_);
    }
  }

  const BackwardParams &a_;
  const BackwardProblem &g_;
  const Problem &p_;
  const Place<T> at_;
  Ring<T> ring_;
  float *weights_;      // of this warp
  Operands *operands_;  // of this warp, of the head that is being fetched
  float *stats_;        // two places for lse and delta of a tile's queries

  bool own_queries_, through_softcap_ = false;
  int first_, products_;  // steps of S, and of S and dP
  int seqlen_q_, seqlen_k_;

  float s_[T::kOwn][T::kOther], dp_[T::kOwn][T::kOther];
};

}  // namespace fa::cuda::simt
