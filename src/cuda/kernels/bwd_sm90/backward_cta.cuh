// SPDX-License-Identifier: Apache-2.0
// The parts that all backward kernels for sm_90a share: work tiles (backward_work.cuh), P from S and lse, masks, sums over
// visible pairs, the reduction of dq, and the epilogue of dk and dv.
//
// Scores are held transposed, S^T = K Q^T (64, kTileQ): a consumer warpgroup owns 64 keys, which are the rows of its
// accumulators; queries are the columns.
//
// NaN-safe path. The ordinary path multiplies masked pairs by P = 0, and 0 * NaN is NaN. In a tile with masked pairs the
// threads therefore test S, dP and delta for non-finite values; these are non-finite wherever a row of q, k, v, dout or out is.
// Only if one is found does the CTA compute the tile's gradients again as sums over the visible pairs alone, one query (or key)
// at a time.
#pragma once

#include <cstddef>

#include <math_constants.h>

#include "cuda/common/data_mask.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/score_text.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90/backward.h"
#include "cuda/kernels/bwd_sm90/backward_work.cuh"
#include "cuda/kernels/bwd_sm90/bias.cuh"
#include "cuda/kernels/bwd_sm90/dropout.cuh"
#include "cuda/kernels/bwd_sm90/shown_pairs.cuh"

namespace fa::cuda::sm90 {

// Column block j of an accumulator: elements 4 j to 4 j + 3.
template <int kCount>
__device__ __forceinline__ float4 float4_of(const float (&x)[kCount], int j) {
  return {x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]};
}

// C is a kernel's configuration. C::kTileKv keys make a work tile, C::kTileQ queries a Q tile. dq of a Q tile is reduced as
// C::kDqPartials partials of C::kDqPartialBytes each, which have order counters of their own.
template <class C>
struct BackwardCta : BackwardWork<C> {
  using Base = BackwardWork<C>;
  using Base::at;
  using Base::dq_order_position;
  using Base::is_cyclic;
  using Base::lane;
  using Base::masked_tiles;
  using Base::params;
  using Base::problem;
  using Base::rotated_q_tiles;
  using Base::warp;
  using Base::work;
  using Base::work_stage;
  using Base::workspace_q_tile;
  using typename Base::RotatedQTiles;
  using Element = typename C::Element;

  __device__ __forceinline__ BackwardCta(const BackwardParams &params, char *shared) : Base(params, shared) {}

  // Dropout bits of a query head, for queries from row0 on and this warp's 16 of the 64 keys from first_key on. `smem_key`: DropoutStorage::key.
  __device__ __forceinline__ void draw(DroppedPairs<C::kTileQ> &dropped, uint32_t smem_key, int head_q, int row0,
                                       int first_key) const {
    dropped.draw(smem_key, problem, dropout_head(problem, work().batch, head_q), row0, first_key + warp * 16, lane);
  }

  // Loads a tile of kTileRows rows by TMA, as kAtoms swizzle atoms. kColumns: used columns of an atom.
  template <int kTileRows, int kAtoms = C::kAtoms, int kColumns = 64>
  __device__ __forceinline__ void load_tile(uint32_t tile, const CUtensorMap &map, uint32_t barrier, int row, int head,
                                            int batch, uint64_t policy) const {
#pragma unroll
    for (int s = 0; s < kAtoms; ++s)
      tma_load_4d(tile + s * kTileRows * 128, &map, barrier, s * kColumns, row, head, batch, policy);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // S^T and dP^T in registers: 64 keys x queries
  // ------------------------------------------------------------------------------------------------------------------

  // Calls f(n) for every masked element n of an S^T tile: 64 keys from `first_key` on, kCount queries from `first_row` on.
  template <int kCount, typename F>
  __device__ __forceinline__ void for_masked(int first_key, int first_row, F f) const {
    using Fragment = QkFragment<1, kCount / 8>;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = first_key + warp * 16 + Fragment::query(lane, r), begin = key - work().band_last;
      const int end = key < work().seqlen_k ? min(key - work().band_first + 1, work().seqlen_q) : begin;
      for_masked_in_row<Fragment>(r, {begin, end}, first_row, lane, f);
    }
  }

  // lse or delta of the two queries that this lane holds in column block j: 8 j + 2 (lane % 4) and the one after it.
  __device__ __forceinline__ float2 row_stat(uint32_t row, int j) const {
    return ld_shared_float2(row + 8 * (lane & 3) + j * 32);
  }

  // All of them for a Q tile. Kernels load them before they start a wgmma that takes all of shared memory's bandwidth: behind
  // one, the loads wait for hundreds of cycles.
  using RowStats = float2[C::kTileQ / 8];
  __device__ __forceinline__ void load_stats(RowStats &x, uint32_t row) const {
#pragma unroll
    for (int j = 0; j < C::kTileQ / 8; ++j) x[j] = row_stat(row, j);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // P
  // ------------------------------------------------------------------------------------------------------------------

  // The score terms of a query head, for logits in base 2.
  __device__ __forceinline__ HeadTerms head_terms(int head) const {
    if constexpr (!C::kScored) return {};
    return cuda::head_terms(problem, Base2Math::kLogit, work().batch, head);
  }

  // S to P, in place, for 64 keys from `first_key` on and kSteps * 16 queries from `first_row` on: P = exp2(logit - lse).
  //
  // With softcap or ALiBi (kScored) P is converted to 16 bits here, into p16, and s becomes P times the derivative of the
  // softcap, which is what dP - delta is multiplied by. Plain kernels convert P later.
  template <int kSteps>
  __device__ __forceinline__ void exponentiate(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8], uint32_t smem_lse,
                                               int first_key, int first_row, const HeadTerms &head) const {
    if constexpr (!C::kScored) {
      exponentiate_plain(s, problem.softmax_scale * kLog2e, [&](int j) { return row_stat(smem_lse, j); });
    } else {
      with_score_mods<C::kScores>(problem, FastTanhMath{params.raw}, [&](const auto &mods) {
        exponentiate_scored(mods, p16, s, smem_lse, first_key, first_row, head);
      });
    }
  }
  template <class Mods, int kSteps>
  __device__ __forceinline__ void exponentiate_scored(const Mods &mods, uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8],
                                                      uint32_t smem_lse, int first_key, int first_row,
                                                      const HeadTerms &head) const {
    const auto distance = static_cast<float>(first_row + 2 * (lane & 3) + work().seqlen_k - work().seqlen_q -
                                             (first_key + warp * 16 + (lane >> 2)));
#pragma unroll
    for (int j = 0; j < kSteps * 2; ++j) {
      const float2 lse = row_stat(smem_lse, j);
      float p[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const auto steps = static_cast<float>(8 * j + (r & 1) - 8 * (r >> 1));
        float derivative;
        p[r] = exp2_approx(mods.logit(s[4 * j + r], -((r & 1) ? lse.y : lse.x), head, distance + steps, derivative));
        s[4 * j + r] = p[r] * derivative;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) p16[j / 2][j % 2 * 2 + r] = pack2<Element>(p[2 * r], p[2 * r + 1]);
    }
  }
  __device__ __forceinline__ ScorePlace score_place(int head_q) const {
    const WorkTile &t = work();
    return {t.batch,
            head_q,
            t.seqlen_q,
            t.seqlen_k,
            problem.q_lengths.cu != nullptr ? t.q_start : 0,
            problem.k_lengths.cu != nullptr ? t.k_start : 0};
  }
  // The pairs that a score text shows of queries from row0 on and the keys from key0 on; codes as for ShownPairs::find().
  __device__ __forceinline__ void find_shown_by_text(ShownPairs<C::kTileQ> &shown, int head_q, int row0, int key0,
                                                     uint32_t codes) const {
    const ScorePlace place = score_place(head_q);
    shown.find(ScoreText{place, score_text_args(params)}, row0, key0, codes);
  }
  // With a score text, the same. P of a pair whose score is -infinity is -0. `staged`: the warpgroup's tile of the tensor that the kernel stages, if it
  // stages one. Returns whether there is such a pair.
  template <int kSteps>
  __device__ __forceinline__ bool exponentiate_text(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8], uint32_t smem_lse,
                                                    int head_q, int first_key, int first_row,
                                                    [[maybe_unused]] uint32_t staged = 0) const {
    const ScorePlace place = score_place(head_q);
    const ScoreText text{place, score_text_args(params)};
    const int key0 = first_key + warp * 16 + (lane >> 2), row0 = first_row + 2 * (lane & 3);
    const float scale = ScoreText::kScores ? kLog2e : problem.softmax_scale * kLog2e, softmax_scale = problem.softmax_scale;
    const auto key_number = static_cast<float>(key0), row_number = static_cast<float>(row0);
    if constexpr (!ScoreText::kScores) {
      exponentiate_plain(s, scale, [&](int j) { return row_stat(smem_lse, j); });
#pragma unroll
      for (int n = 0; n < kSteps * 8; n += 2) p16[n / 8][n % 8 / 2] = pack2<Element>(s[n], s[n + 1]);
      return false;
    }
    bool hidden = false;
    [[maybe_unused]] BiasPairs<Element, 16> pairs;  // of the staged tensor
#pragma unroll
    for (int j = 0; j < kSteps * 2; ++j) {
      const float2 lse = row_stat(smem_lse, j);
      float p[4];
      if constexpr (stages_bias(C::kScores)) {
        if (j % 2 == 0) pairs.load(staged + j / 2 * 16 * 128, warp, lane);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = row0 + 8 * j + (r & 1), key = key0 + 8 * (r >> 1);
        float x = s[4 * j + r], derivative = 1.f;
        StagedElement element;
        if constexpr (stages_bias(C::kScores)) element = {true, pairs.at(j % 2 * 4 + r)};
        if constexpr (ScoreText::kScores)
          x = text.score_and_derivative(x * softmax_scale, row, key, row_number + static_cast<float>(8 * j + (r & 1)),
                                        key_number + static_cast<float>(8 * (r >> 1)), derivative, element);
        const bool masked = ScoreText::kMasksByScore && x == -CUDART_INF_F;
        hidden |= masked;
        p[r] = masked ? kMaskedP : exp2_approx(fmaf(x, scale, -((r & 1) ? lse.y : lse.x)));
        s[4 * j + r] = masked ? kMaskedP : p[r] * derivative;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) p16[j / 2][j % 2 * 2 + r] = pack2<Element>(p[2 * r], p[2 * r + 1]);
    }
    return hidden;
  }
  // For mixtures of score terms, in three steps. What is added to the logits of an S tile: bias and ALiBi minus lse. `bias`: BiasColumns, if the problem
  // has one. Adds NaN to `finite` where a bias is not finite.
  template <int kCount, class Bias>
  __device__ __forceinline__ void make_offsets(float (&offset)[kCount], uint32_t smem_lse, const Bias &bias, int first_key,
                                               int first_row, int head_q, float &finite) const {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 lse = row_stat(smem_lse, j);
#pragma unroll
      for (int r = 0; r < 4; ++r) offset[4 * j + r] = -((r & 1) ? lse.y : lse.x);
    }
    if (problem.bias.data != nullptr) bias.add(offset, kLog2e, finite);
    if (has_offset(problem)) {
      const HeadTerms head = head_terms(head_q);
      const auto distance = static_cast<float>(first_row + 2 * (lane & 3) + work().seqlen_k - work().seqlen_q -
                                               (first_key + warp * 16 + (lane >> 2)));
      with_offset<kAlibi | kLogAlibi>(problem, Base2Math{params.raw}, [&](const auto &mods) {
#pragma unroll
        for (int n = 0; n < kCount; ++n)
          offset[n] = mods.add_offset(offset[n], head, distance + static_cast<float>(8 * (n / 4) + (n & 1) - 8 * (n >> 1 & 1)));
      });
    }
  }
  // P, as exponentiate() makes it.
  template <int kSteps>
  __device__ __forceinline__ void exponentiate_mixture(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8],
                                                       const float (&offset)[kSteps * 8]) const {
    const FastTanhMath math{params.raw};
    const auto exponentiate = [&](const auto &mods) {
#pragma unroll
      for (int n = 0; n < kSteps * 8; n += 2) {
        float p[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float derivative;
          p[e] = exp2_approx(mods.logit(s[n + e], offset[n + e], HeadTerms{}, 0.f, derivative));
          s[n + e] = p[e] * derivative;
        }
        p16[n / 8][n % 8 / 2] = pack2<Element>(p[0], p[1]);
      }
    };
    if (has_transform(problem)) {
      exponentiate(ScoreMods<kSoftcap, FastTanhMath>{math, 0.f});
    } else {
      exponentiate(ScoreMods<kPlain, FastTanhMath>{math, 0.f});
    }
  }
  // Where P is dropped it becomes 0 in p16, and negative in s.
  template <int kSteps, class Dropped>
  static __device__ __forceinline__ void drop(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8], const Dropped &dropped) {
#pragma unroll
    for (int n = 0; n < kSteps * 8; ++n) {
      uint32_t &pair = p16[n / 8][n % 8 / 2];
      s[n] = dropped.negate_dropped(s[n], n);
      if (dropped.dropped(n)) pair &= n & 1 ? 0x0000FFFFu : 0xFFFF0000u;
    }
  }
  // With dropout: P is converted to 16 bits here, into p16, where dropped elements are 0. In s they are negative.
  template <int kSteps, class Dropped>
  __device__ __forceinline__ void exponentiate_dropped(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8], uint32_t smem_lse,
                                                       const Dropped &dropped) const {
    exponentiate_plain(s, params.raw.factor, [&](int j) { return row_stat(smem_lse, j); });
#pragma unroll
    for (int n = 0; n < kSteps * 8; ++n) s[n] = dropped.negate_dropped(s[n], n);
#pragma unroll
    for (int n = 0; n < kSteps * 8; n += 2) p16[n / 8][n % 8 / 2] = pack2<Element, /*kRelu=*/true>(s[n], s[n + 1]);
  }
  // The same for plain scores, with lse in registers.
  __device__ __forceinline__ void exponentiate(float (&s)[C::kTileQ / 2], const RowStats &lse) const {
    exponentiate_plain(s, params.raw.factor, [&](int j) { return lse[j]; });
  }
  // lse(j): of the queries of column block j.
  template <int kCount, typename Lse>
  static __device__ __forceinline__ void exponentiate_plain(float (&s)[kCount], float factor, Lse lse) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 x = lse(j);
#pragma unroll
      for (int r = 0; r < 4; ++r) s[4 * j + r] = exp2_approx(fmaf(s[4 * j + r], factor, -((r & 1) ? x.y : x.x)));
    }
  }
  // With a bias: P = exp2(S factor + bias log2(e) - lse).
  template <int kCount, class Bias>
  __device__ __forceinline__ void exponentiate_biased(float (&s)[kCount], uint32_t smem_lse, const Bias &bias) const {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 x = row_stat(smem_lse, j);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float offset = fmaf(bias.at(4 * j + r), kLog2e, -((r & 1) ? x.y : x.x));
        s[4 * j + r] = exp2_approx(fmaf(s[4 * j + r], params.raw.factor, offset));
      }
    }
  }
  // P of pairs that a bias of -inf masks becomes -0, whatever it was. From global memory: for the NaN-safe path.
  template <int kCount>
  __device__ __forceinline__ void mask_biased(float (&p)[kCount], int head_q, int first_key, int first_row) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int key = first_key + warp * 16 + (lane >> 2) + 8 * (n >> 1 & 1),
                row = first_row + n / 4 * 8 + 2 * (lane & 3) + (n & 1);
      if (key < work().seqlen_k && row < work().seqlen_q &&
          load_bias(problem.bias, work().batch, head_q, row, key) == -CUDART_INF_F)
        p[n] = kMaskedP;
    }
  }
  // Masks the results of exponentiate(): P of a masked pair becomes -0.
  template <int kSteps>
  __device__ __forceinline__ void mask_p(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8], int first_key,
                                         int first_row) const {
    for_masked<kSteps * 16>(first_key, first_row, [&](int at) { mask_element(p16, s, at); });
  }
  template <int kSteps>
  static __device__ __forceinline__ void mask_element(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8], int at) {
    s[at] = kMaskedP;
    if constexpr (C::kConvertsEarly) {
      uint32_t &pair = p16[at / 8][at % 8 / 2];
      pair = at & 1 ? (pair & 0xFFFFu) | kMaskedPBits << 16 : (pair & 0xFFFF0000u) | kMaskedPBits;
    }
  }
  // 0, or NaN if delta of any query of the Q tile is NaN or Inf, as it is where a row of out is.
  __device__ __forceinline__ float delta_nan_if_nonfinite(uint32_t smem_delta) const {
    float zero = 0.f;
#pragma unroll
    for (int n = 0; n < C::kTileQ / 32; ++n) zero = fmaf(ld_shared_float(smem_delta + (n * 32 + lane) * 4), 0.f, zero);
    return zero;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dS, dk and dv
  // ------------------------------------------------------------------------------------------------------------------

  // dS^T = ds(P^T, dP^T, delta) of every element, in place of dP^T. p(j) and delta(j) are those of column block j: four elements, and two queries.
  template <int kCount, typename P, typename Delta, typename Ds>
  static __device__ __forceinline__ void for_each_ds(float (&dp)[kCount], P p, Delta delta, Ds ds) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 d = delta(j);
      const float4 x = p(j);
      const float p4[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) dp[4 * j + r] = ds(p4[r], dp[4 * j + r], (r & 1) ? d.y : d.x);
    }
  }
  // P (dP - delta). With kLate the subtraction is fmaf(dP, one, -delta), see late_one() in backward_p_registers.cuh.
  template <bool kLate = false, int kCount, typename P, typename Delta>
  static __device__ __forceinline__ void compute_ds(float (&dp)[kCount], P p, Delta delta, float one = 1.f) {
    for_each_ds(dp, p, delta, [&](float p, float dp, float delta) { return p * (kLate ? fmaf(dp, one, -delta) : dp - delta); });
  }
  // With dropout: P is negative where it is dropped. Such a P passes no gradient through P V, but still through the row sum.
  template <int kCount, typename P, typename Delta>
  static __device__ __forceinline__ void compute_ds_dropped(float (&dp)[kCount], P p, Delta delta, float keep_scale) {
    for_each_ds(dp, p, delta,
                [&](float p, float dp, float delta) { return fmaf(fmaxf(p, 0.f) * dp, keep_scale, -fabsf(p) * delta); });
  }
  // For scores in which any pair may be hidden: dS where P tells that the pair is visible, -0 where it is masked.
  template <int kCount, typename P, typename Delta>
  static __device__ __forceinline__ void compute_visible_ds(float (&dp)[kCount], P p, Delta delta) {
    for_each_ds(dp, p, delta,
                [&](float p, float dp, float delta) { return is_masked_p(p) ? kMaskedP : fmaf(p, dp - delta, 0.f); });
  }
  // Masks dS: -0 for masked pairs, +0 for visible zeros.
  template <int kCount>
  __device__ __forceinline__ void mask_ds(float (&ds)[kCount], int first_key, int first_row) const {
#pragma unroll
    for (float &x : ds) x += 0.f;
    for_masked<2 * kCount>(first_key, first_row, [&](int n) { ds[n] = kMaskedP; });
  }
  // The same for the elements n for which is_masked(n).
  template <int kCount, typename IsMasked>
  static __device__ __forceinline__ void mask_ds(float (&ds)[kCount], IsMasked is_masked) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) ds[n] = is_masked(n) ? kMaskedP : ds[n] + 0.f;
  }
  // Stores this warp's 16 keys of dS^T (keys, queries) from `first_key` of the tile on: a swizzle atom of C::kTileKv keys for 64 queries each.
  template <int kSteps>
  __device__ __forceinline__ void store_ds_fragment(const uint32_t (&ds16)[kSteps][4], uint32_t tile, int first_key) const {
    const int key = first_key + warp * 16 + (lane & 15);
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
      stmatrix_x4(tile + (n / 4 * C::kTileKv + key) * 128 + (((2 * (n % 4) + (lane >> 4)) ^ (key & 7)) << 4), ds16[n]);
  }

  // The same 16 keys of dS^T, stored as dS (queries, keys): a swizzle atom of 64 keys for each consumer warpgroup, `tile` its own.
  template <int kSteps>
  __device__ __forceinline__ void store_ds_transposed(const uint32_t (&ds16)[kSteps][4], uint32_t tile) const {
    // Matrices 0 and 1 of a step are keys 0 to 7 and 8 to 15 of queries 0 to 7, 2 and 3 the same keys of queries 8 to 15. A lane has the address of
    // one query of one of them.
    const int query = (lane >> 4) * 8 + (lane & 7), keys = warp * 2 + (lane >> 3 & 1);
    const uint32_t at = tile + query * 128 + ((keys ^ (lane & 7)) << 4);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) stmatrix_x4_trans(at + n * 16 * 128, ds16[n]);
  }

  // Starts (commits) dv += P^T dO or dk += dS^T Q: kCount steps of 16 queries, A fragments from a[kFirstStep] on, rows of the Q or dO tile
  // from step `from` on.
  template <int kFirstStep, int kCount, int kRegisters, int kSteps>
  static __device__ __forceinline__ void start_gradient(float (&gradient)[kRegisters], const uint32_t (&a)[kSteps][4],
                                                        uint32_t rows, int from) {
    const uint64_t b = descriptor_mn_major_uniform<C::kTileQ>(rows);
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      Wgmma<Element, 2 * kRegisters>::rs_mn(gradient, a[kFirstStep + n], advance_descriptor(b, (from + n) * 2048), 1);
    wgmma_commit();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Reduction of dq over work tiles
  // ------------------------------------------------------------------------------------------------------------------

  // Stores this warp's 16 rows of a dq partial to shared memory. A partial is a sequence of 16 x 8 tiles, [warp][j], each with
  // four numbers per lane as the accumulators hold them.
  template <int kCount>
  __device__ __forceinline__ void store_dq_partial(const float (&dq)[kCount], uint32_t tile) const {
    const uint32_t mine = tile + warp * (kCount * 128) + (C::kLaneFromShuffle ? opaque(lane) : lane) * 16;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      st_shared_16(mine + j * 512, __float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]), __float_as_uint(dq[4 * j + 2]),
                   __float_as_uint(dq[4 * j + 3]));
    }
  }

  // The loop of a warp that reduces dq: for every Q tile of the work tile, TMA adds dq partial number `partial` from `tile` in
  // shared memory to dq_sum. The consumers complete `full` when the partial has been stored; this warp arrives at `empty` when
  // TMA has read it.
  //
  // params.dq_semaphore holds one order counter per Q tile and partial:
  //
  // | mode | first work tile to come | counter |
  // |---|---|---|
  // | zero_dq_sum: dq_sum was zeroed | adds, like all others | not used |
  // | neither | stores its partial; the others wait until it has arrived | 1 when the store is claimed, 2 when it has arrived |
  // | ordered (deterministic) | stores; the others add in ascending order of keys | work tiles whose partial has arrived |
  //
  // A work tile only waits for work tiles that started before it. Main loops run downwards from the last Q tile, so that under
  // a causal mask, too, all work tiles of a head begin with the same Q tile and keep their distance.
  //
  // `visited`: with masks as data, Q tiles that this CTA has visited.
  // With kWarps > 1, warp number `warp` takes every kWarps-th partial, and has a `full` of its own. One warp waits for its
  // addition to arrive while the other has the next partial read.
  template <int kWarps = 1>
  __device__ __forceinline__ void reduce_dq(int partial, uint32_t tile, uint32_t full, uint32_t empty, uint32_t &parity,
                                            int warp = 0, int *visited = nullptr) const {
    if constexpr (C::kHasDataMask) {
      for (int left = masked_tiles().visible[work_stage]; left > 0; --left) {
        if constexpr (C::kMixtures) {  // two registers less
          *visited = work().q_tiles_end - left;
          parity = *visited & 1;
        }
        mbarrier_wait(full, parity);
        // One lane reads, the one that frees dq.
        const VisitedQTile &x = masked_tiles().visited[(*visited)++ % BackwardMaskedTiles::kVisited];
        const int head_q = __shfl_sync(~0u, lane == 0 ? x.head_q : 0, 0),
                  q_tile = __shfl_sync(~0u, lane == 0 ? x.q_tile : 0, 0);
        reduce_dq_of_q_tile(head_q, q_tile, partial, tile, full, empty, parity);
        parity ^= 1;
      }
    } else {
      int n = 0;
      for (int g = 0; g < static_cast<int>(problem.group); ++g) {
        const RotatedQTiles q_tile_at = rotated_q_tiles();
        for (int i = work().q_tile_end - 1; i >= work().q_tile_begin; --i) {
          if (kWarps > 1 && n++ % kWarps != warp) continue;
          reduce_dq_of_q_tile(work().head_k * static_cast<int>(problem.group) + g, q_tile_at(i), partial, tile, full, empty,
                              parity);
          parity ^= 1;
        }
      }
    }
  }
  // The same in cyclic order (cyclic_order.h).
  __device__ __forceinline__ void reduce_dq_cyclic(int partial, uint32_t tile, uint32_t full, uint32_t empty,
                                                   uint32_t &parity) const {
#pragma unroll 1
    for (int g = 0; g < static_cast<int>(problem.group); ++g) {
#pragma unroll 1
      for (int i = work().q_tile_end - 1; i >= 0; --i) {
        const auto [q_tile, position, second] = params.cyclic.at(work().key0 / C::kTileKv, i);
        const int at = workspace_q_tile(work().head_k * static_cast<int>(problem.group) + g) + q_tile;
        const int counter = (2 * at + second) * C::kDqPartials + partial;
        if (params.dq_sum != nullptr) {
          while (load_relaxed(params.dq_semaphore + counter) != position) {
          }
        }
        mbarrier_wait(full, parity);
        if (elect_one()) {
          fence_proxy_async();
          if (params.dq_sum != nullptr) {
            // The second sums lie behind the first ones of all Q tiles.
            float *sum =
                params.dq_sum + int64_t{(at + (second ? q_tiles_of_all_heads(params) : 0)) * C::kDqPartials + partial} *
                                    (C::kDqPartialBytes / 4);
            if (position == 0) {
              bulk_store_commit(sum, tile, C::kDqPartialBytes);
            } else {
              bulk_reduce_add_commit(sum, tile, C::kDqPartialBytes);
            }
          }
          bulk_wait_group_read();
          mbarrier_arrive(empty);
          if (params.dq_sum != nullptr) {
            bulk_wait_group();
            count_released(params.dq_semaphore + counter);
          }
        }
        __syncwarp();
        parity ^= 1;
      }
    }
  }
  __device__ __forceinline__ void reduce_dq_of_q_tile(int head_q, int q_tile, int partial, uint32_t tile, uint32_t full,
                                                      uint32_t empty, uint32_t parity) const {
    const bool wanted = params.dq_sum != nullptr;
    const int index = (workspace_q_tile(head_q) + q_tile) * C::kDqPartials + partial;
    int32_t *counter = params.dq_semaphore + index;
    // The counter's value when this work tile may add. No acquire is needed: everything happens at the L2 cache, where
    // additions come after what has already arrived.
    const int position = params.ordered ? dq_order_position(q_tile, head_q) : 2;
    int now = 2;
    if (wanted && !params.zero_dq_sum) {
      do {
        now = load_relaxed(counter);
      } while (params.ordered && now != position);
    }
    mbarrier_wait(full, parity);
    if (elect_one()) {
      fence_proxy_async();
      if (wanted) {
        if (now != position) now = claim_relaxed(counter);
        while (now == 1 && position == 2) now = load_relaxed(counter);
        float *sum = params.dq_sum + int64_t{index} * (C::kDqPartialBytes / 4);
        if (now == 0) {
          bulk_store_commit(sum, tile, C::kDqPartialBytes);
        } else {
          bulk_reduce_add_commit(sum, tile, C::kDqPartialBytes);
        }
      }
      bulk_wait_group_read();
      mbarrier_arrive(empty);
      if (wanted && (params.ordered || now == 0)) {
        bulk_wait_group();
        count_released(counter);
      }
    }
    __syncwarp();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Epilogue
  // ------------------------------------------------------------------------------------------------------------------

  // Stores dk or dv of 64 keys from `first_key` on, 16 bytes a lane: the four lanes that hold a row exchange four column
  // blocks. Keys of the sequence's slot that are not used get zero. The last work tile also zeroes the keys of the sequence's slot beyond
  // the grid; `thread` of `threads` threads take part in that. `stored`: store_staged() has stored the 64 keys.
  template <int kCount>
  __device__ __forceinline__ void store_dkv(const Operand &t, const float (&acc)[kCount], float scale, int columns,
                                            bool vectors_at_run_time, int first_key, int thread, int threads,
                                            bool stored = false) const {
    if (t.data == nullptr) return;
    const bool vectors = known_vectors(vectors_at_run_time);
    const int seq_slot = static_cast<int>(unpadded_keys(problem.k_lengths, work().batch).slot);
    if (known_fp32(t.dtype == Dtype::f32)) {
      // `opaque`: else the compiler keeps addresses of this path in registers during the main loop, and spills others.
      float *base = row_of_tensor<float>(t, work().batch, work().k_start, work().head_k);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = first_key + warp * 16 + (opaque(lane) >> 2) + 8 * r;
        if (key >= work().seqlen_k) continue;
        store_fragment_row_fp32<kCount / 4>(
            acc, r, [&] { return base + key * t.seq_stride; }, columns, vectors, opaque(lane) & 3, scale);
      }
      // Keys that are not used, whoever owns them.
      const int first = max(work().key0, work().seqlen_k);
      const int end =
          work().key0 / C::kTileKv == params.order.row_blocks - 1 ? seq_slot : min(work().key0 + C::kTileKv, seq_slot);
      for (int key = first; key < end; ++key) {
        for (int column = thread; column < columns; column += threads) base[key * t.seq_stride + column] = 0;
      }
      return;
    }
    Element *base = row_of_tensor<Element>(t, work().batch, work().k_start, work().head_k);
    if (!stored) store_rows(t, base, acc, scale, columns, vectors, first_key, work().seqlen_k, seq_slot);
    if (work().key0 / C::kTileKv != params.order.row_blocks - 1) return;
    zero_rows<2 * kCount>(t, base, columns, vectors, work().key0 + C::kTileKv, seq_slot, thread, threads);
  }
  // Stages this warp's 16 of 64 keys of dk or dv in shared memory at `rows`, in swizzle atoms kAtomPitch bytes apart, and stores them by TMA.
  template <int kAtomPitch, int kCount>
  __device__ __forceinline__ void store_staged(const CUtensorMap &map, const float (&acc)[kCount], float scale, uint32_t rows,
                                               int first_key) const {
    // stmatrix: lane l gives the address of row l % 8 of matrix l / 8. Matrices 0 and 1 are rows 0 to 7 and 8 to 15 of eight columns, 2 and 3 the same
    // rows of the next eight columns.
    const int lane = opaque(this->lane);
    const uint32_t row_address = rows + (lane & 15) * 128, vector = lane >> 4;
#pragma unroll
    for (int column = 0; column < 2 * kCount; column += 16) {
      uint32_t x[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) x[n] = pack2<Element>(acc[column / 2 + 2 * n] * scale, acc[column / 2 + 2 * n + 1] * scale);
      stmatrix_x4(row_address + column / 64 * kAtomPitch + (((column % 64 / 8 + vector) ^ (lane & 7)) << 4), x[0], x[1], x[2],
                  x[3]);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int s = 0; s < 2 * kCount / 64; ++s)
        tma_store_4d(&map, rows + s * kAtomPitch, s * 64, work().k_start + first_key + opaque(warp) * 16, work().head_k,
                     problem.k_lengths.cu != nullptr ? 0 : work().batch);
      bulk_commit_group();
    }
    __syncwarp();
  }
  // Stores 64 rows of a gradient from `first` on to the rows of a sequence that begin at `base`: the first `used` of them are used, the others, up to
  // `seq_slot`, get zero.
  template <int kCount>
  __device__ __forceinline__ void store_rows(const Operand &t, Element *base, const float (&acc)[kCount], float scale,
                                             int columns, bool vectors, int first, int used, int seq_slot) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + warp * 16 + (lane >> 2) + 8 * r;
      const uint32_t keep = row < used ? ~0u : 0u;
      store_fragment_row_at<Element, kCount / 4>(
          acc, r, [&] { return base + row * t.seq_stride; }, columns, vectors, lane & 3,
          [&](float x, float y) { return pack2<Element>(x * scale, y * scale); }, keep, row < seq_slot);
    }
  }
  // Zeroes kColumns columns, as far as they exist, of rows [first, seq_slot).
  template <int kColumns>
  __device__ __forceinline__ void zero_rows(const Operand &t, Element *base, int columns, bool vectors, int first, int seq_slot,
                                            int thread, int threads) const {
    constexpr int kVectors = kColumns / 8;
    for (int n = thread; n < (seq_slot - first) * kVectors; n += threads) {
      const int column = n % kVectors * 8;
      store_elements(base + (first + n / kVectors) * t.seq_stride + column, {0, 0, 0, 0}, columns - column, vectors);
    }
  }
};

}  // namespace fa::cuda::sm90
