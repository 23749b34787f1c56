// SPDX-License-Identifier: Apache-2.0
// Scores and out of a warp's 16 rows computed again from global memory, pair by pair: slow, and rare. Two cases need it:
//
//   NaN-safe path   NaN or Inf in rows of V that a mask hides: out over the visible pairs only
//   overflow        P relative to a maximum that was far too small does not fit fp32: S again
#pragma once

#include "cuda/common/epilogue.cuh"
#include "cuda/common/kv_loader.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/score_text.cuh"
#include "cuda/common/segments.h"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90/alibi.cuh"
#include "cuda/kernels/fwd_sm90/dropout.cuh"
#include "cuda/kernels/fwd_sm90/masked_tiles.cuh"

namespace fa::cuda::sm90 {

// The factor from scores (in RawUnit) to exponents of two, with the descales of q and k, but with softcap or ALiBi without: scores have been multiplied by
// them. A masked score is -inf, which must not be multiplied by 0 or NaN: for such descales the factor is tiny, and the epilogue puts NaN where it
// belongs.
template <class C, class WorkTile>
__device__ __forceinline__ float score_scale(const ForwardParams &a, const WorkTile &t) {
  if constexpr (C::kHasScoreText && ScoreText::kScores) return kLog2e;
  if constexpr (C::kHasScoreMod) return a.raw.factor;
  if constexpr (!C::kHasDescales) return exponent_scale(a.problem);
  return fmaxf(t.qk_descale * exponent_scale(a.problem), 1e-30f);  // of a NaN the other number
}

template <class C>
class Recompute {
 public:
  using Element = typename C::Element;
  using WorkTile = typename SharedMemory<C>::WorkTile;

  __device__ __forceinline__ Recompute(const ForwardParams &params, const SharedMemory<C> &smem, const ConsumerThread &at)
      : a_(params), p_(params.problem), smem_(smem), at_(at) {}

  // Recomputes S of an unmasked KV tile from global memory, with the lanes' work divided as in recompute_out.
  __device__ __forceinline__ void recompute_scores(const WorkTile &t, int key0, float (&s)[C::kKeys / 2]) const {
    const Element *q = q_row_of_lane(t);
#pragma unroll 1
    for (int n = 0; n < C::kKeys; ++n) {
      const float x = dot(q, kv_row(p_.k, t, key0 + n));
      const int at = n - 2 * (at_.lane & 3);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float score = __shfl_sync(~0u, x, ((at_.lane >> 2) + 8 * r) * 2);
#pragma unroll
        for (int j = 0; j < C::kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (at == 8 * j + e) s[4 * j + 2 * r + e] = score;
      }
    }
  }

  // For FA_FLAG_SAME_BITS: the scores of rows r with which[r], bit for bit as wgmma has them: mma.sync adds 16 products at a time, too. From global
  // memory, since the stages of Q and K may have been freed.
  __device__ __forceinline__ void recompute_scores_by_mma(const WorkTile &t, int key0, const bool (&which)[2],
                                                          float (&s)[C::kKeys / 2]) const {
    const int quad = at_.lane & 3, columns = static_cast<int>(p_.head_dim) - 2 * quad;
    const Element *q[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      q[r] =
          row_of_tensor<Element>(p_.q, t.q_batch, t.q_row - t.row0 + min(at_.row(t, r), t.seqlen_q - 1), t.head_q) + 2 * quad;
    }
    const auto pair = [&](const Element *from, int column) {
      return column < columns ? *reinterpret_cast<const uint32_t *>(from + column) : 0;
    };
#pragma unroll 1
    for (int j = 0; j < C::kKeys / 8; ++j) {
      const Element *k = kv_row(p_.k, t, key0 + 8 * j + (at_.lane >> 2)) + 2 * quad;
      float x[4] = {};
#pragma unroll 1
      for (int column = 0; column < C::kD; column += 16) {
        const uint32_t a[4] = {pair(q[0], column), pair(q[1], column), pair(q[0], column + 8), pair(q[1], column + 8)};
        mma_16816<Element>(x, a, pair(k, column), pair(k, column + 8));
      }
#pragma unroll
      for (int n = 0; n < C::kKeys / 2; ++n)
        if (n / 4 == j && which[n / 2 % 2]) s[n] = x[n % 4];
    }
  }

  // Recomputes S of a KV tile that is still in shared memory, with mma.sync. `q`, `k`: the stages.
  __device__ __forceinline__ void recompute_scores_from_shared(uint32_t q, uint32_t k, float (&s)[C::kKeys / 2]) const {
    const int lane = at_.lane;
    q += at_.wg * C::kQWarpgroupBytes + (at_.warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
    k += ((lane & 7) + (lane >> 4) * 8) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4);
    clear(s);
#pragma unroll 1
    for (int step = 0; step < C::kD / 16; ++step) {
      uint32_t a[4];
      ldmatrix_x4(a, (q ^ (step % 4 * 32)) + step / 4 * 64 * 128);
#pragma unroll
      for (int n = 0; n < C::kKeys / 16; ++n) {
        uint32_t b[4];
        ldmatrix_x4(b, (k ^ (step % 4 * 32)) + step / 4 * C::kKeys * 128 + n * 16 * 128);
        mma_16816<Element>(*reinterpret_cast<float(*)[4]>(s + 8 * n), a, b[0], b[1]);
        mma_16816<Element>(*reinterpret_cast<float(*)[4]>(s + 8 * n + 4), a, b[2], b[3]);
      }
    }
  }

  // Recomputes out of the masked KV tiles (with a bias or a score text, of all) from global memory, over the visible pairs only. Lane l computes the dot products of row l / 2 of
  // this warp with K, over half of the columns; then every lane multiplies V by the P of its own two rows. With these
  // `sum` becomes the sums of these rows. For FA_FLAG_SAME_BITS out of a segment, from all its KV tiles.
  __device__ __forceinline__ void recompute_out(int work_stage, const float (&max)[2], float (&out)[C::kDv / 2],
                                                float (&sum)[2], int segment = 0) const {
    const WorkTile &t = smem_.work_tile(work_stage);
    const int row = at_.row(t, 0) - (at_.lane >> 2) + (at_.lane >> 1);
    const KeyRange keys = keys_of_query({a_.limits, t.seqlen_q, t.seqlen_k}, row);
    const int max_lane = ((at_.lane >> 1) & 7) * 4;  // a lane that holds the maximum of row l / 2
    const float low = __shfl_sync(~0u, max[0], max_lane), high = __shfl_sync(~0u, max[1], max_lane);
    const float row_max = (at_.lane >> 4) ? high : low;
    const Element *q = q_row_of_lane(t);
    clear(out);
    KvTiles tiles(*this, work_stage, segment);
    if constexpr (C::kMasksByScore) sum[0] = sum[1] = 0.f;
#pragma unroll 1
    for (int i = tiles.begin(at_.wg); i < tiles.end(at_.wg); ++i) {
      if (!tiles.is_masked(i)) continue;
      const int key0 = tiles.kv_tile(i) * C::kKeys;
#pragma unroll 1
      for (int key = key0; key < min(key0 + C::kKeys, t.seqlen_k); ++key) {
        float bias = 0.f;
        if constexpr (kHasBias) {
          bias = row < t.seqlen_q && key >= keys.begin && key < keys.end
                     ? load_bias(p_.bias, bias_batch(work_stage), t.head_q, row, key)
                     : -CUDART_INF_F;
          if (!__any_sync(~0u, bias != -CUDART_INF_F)) continue;
        }
        // There may be no page of a key that no row of the work tile sees.
        if (C::kPages && !__any_sync(~0u, row < t.seqlen_q && key >= keys.begin && key < keys.end)) continue;
        const Element *v = kv_row(p_.v, t, key);
        const float x = dot(q, kv_row(p_.k, t, key));
        bool lane_visible = kHasBias ? bias != -CUDART_INF_F : row < t.seqlen_q && key >= keys.begin && key < keys.end;
        if constexpr (C::kHasDataMask) {
          lane_visible =
              lane_visible && ((C::kMixtures && !a_.mask.given()) ||
                               is_pair_visible(a_.mask, p_, smem_.masked_tiles(work_stage).batch, t.head_q, row, key));
        }
        float score = x;
        if constexpr (C::kHasScoreText) {
          score = text_score(t, work_stage, x, row, key);
          lane_visible = lane_visible && score != -CUDART_INF_F;
        }
        float p = exp2_approx(logit(t, work_stage, score, row, key, bias) - row_max);
        const float unrounded = p;
        p = rounded<Element>(p);
        if constexpr (C::kHasDropout) {
          if (!KeptNumbers(p_.dropout.threshold)
                   .keeps(dropout_number(load_dropout_key(p_.dropout), smem_.dropout_head(work_stage),
                                         row + p_.dropout.first_query, key + p_.dropout.first_key)))
            p = 0.f;
        }
        float p_row[2];
        bool visible[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int source_lane = ((at_.lane >> 2) + 8 * r) * 2;
          p_row[r] = __shfl_sync(~0u, p, source_lane);
          visible[r] = __shfl_sync(~0u, static_cast<int>(lane_visible), source_lane) != 0;
          if constexpr (C::kMasksByScore) {
            const float term = __shfl_sync(~0u, unrounded, source_lane);
            if (visible[r]) sum[r] += term;
          }
        }
        v += 2 * (at_.lane & 3);
        int columns;  // opaque: else the compiler keeps the comparisons with all columns in registers across the loop
        asm volatile("mov.u32 %0, %1;\n" : "=r"(columns) : "r"(static_cast<int>(p_.head_dim_v)));
#pragma unroll
        for (int j = 0; j < C::kDv / 8; ++j) {
          if (8 * j >= columns) continue;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float x = element(v, 8 * j + e);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              if (visible[r]) out[4 * j + 2 * r + e] = fmaf(p_row[r], x, out[4 * j + 2 * r + e]);
            }
          }
        }
      }
    }
  }

 private:
  static constexpr bool kHasBias = C::kHasBias || C::kMixtures;
  __device__ __forceinline__ int bias_batch(int work_stage) const {
    if constexpr (C::kMixtures) {
      return smem_.masked_tiles(work_stage).batch;
    } else {
      return smem_.bias_batch(work_stage);
    }
  }

  // The KV tiles with masked pairs: by their number in the main loop, or with masks as data those of a range.
  struct TilesByNumber {
    const WorkTile &t;
    const int wg;
    const WindowTiles window;
    __device__ __forceinline__ TilesByNumber(const Recompute &r, int work_stage, int)
        : t(r.smem_.work_tile(work_stage)), wg(r.at_.wg), window(r.smem_.window_tiles(work_stage, wg)) {}
    __device__ __forceinline__ int begin(int wg) const { return t.begin[wg]; }
    __device__ __forceinline__ int end(int wg) const { return C::kMasksByScore ? t.kv_tiles : t.masked_end[wg]; }
    __device__ __forceinline__ bool is_masked(int) const { return true; }
    __device__ __forceinline__ int kv_tile(int i) const { return t.kv_tile(window.loaded(i, t.masked_end[wg])); }
  };
  struct TilesOfRange {
    const DataMask &mask;
    const MaskedTiles &range;
    __device__ __forceinline__ TilesOfRange(const Recompute &r, int work_stage, int)
        : mask(r.a_.mask), range(r.smem_.masked_tiles(work_stage)) {}
    __device__ __forceinline__ int begin(int) const { return range.begin; }
    __device__ __forceinline__ int end(int) const { return range.end; }
    __device__ __forceinline__ bool is_masked(int i) const {
      constexpr int kCells = C::kKeys / kCell;
      const TileWord x = tile_word<C>(mask, range, i * kCells / 32);
      return ((C::kMasksByScore ? x.visible : x.partial) >> i * kCells % 32 & 1) != 0;
    }
    __device__ __forceinline__ int kv_tile(int i) const { return i; }
  };
  // Those of a segment.
  struct TilesOfSegment {
    const Recompute &r;
    const int work_stage, segment;
    static constexpr int kTiles = kSegmentKeys / C::kKeys;
    __device__ __forceinline__ TilesOfSegment(const Recompute &r, int work_stage, int segment)
        : r(r), work_stage(work_stage), segment(segment) {}
    __device__ __forceinline__ int begin(int wg) const {
      return max(r.smem_.segment_tiles(work_stage, wg).begin, segment * kTiles);
    }
    __device__ __forceinline__ int end(int wg) const {
      return min(r.smem_.segment_tiles(work_stage, wg).end, (segment + 1) * kTiles);
    }
    __device__ __forceinline__ bool is_masked(int) const { return true; }
    __device__ __forceinline__ int kv_tile(int i) const { return i; }
  };
  using KvTiles =
      std::conditional_t<C::kSameBits, TilesOfSegment, std::conditional_t<C::kHasDataMask, TilesOfRange, TilesByNumber>>;

  // The score of a pair by the score text; -inf if it masks the pair.
  __device__ __forceinline__ float text_score(const WorkTile &t, int work_stage, float score, int row, int key) const {
    const ScorePlace place = smem_.score_place(p_, t, work_stage);
    const ScoreText text{place, score_text_args(a_)};
    if (!text.visible(row, key)) return -CUDART_INF_F;
    return ScoreText::kScores ? text.score(score * p_.softmax_scale, row, key) : score;
  }

  // The exponent of two of one pair, for the NaN-safe path.
  __device__ __forceinline__ float logit(const WorkTile &t, int work_stage, float score, int row, int key, float bias) const {
    if constexpr (C::kHasScoreMod || C::kAlibiByWgmma) {
      HeadTerms head = t.head;
      if constexpr (C::kHasDescales) score *= t.qk_descale;
      if constexpr (C::kAlibiByWgmma) head = alibi_head(smem_, t, work_stage);
      with_score_mods<kAll>(p_, FastTanhMath{a_.raw}, [&](const auto &mods) {
        score = mods.forward(score, head, static_cast<float>(row + t.seqlen_k - t.seqlen_q - key));
      });
    }
    if constexpr (kHasBias) score = fmaf(bias, a_.raw.logit, score);
    return score * score_scale<C>(a_, t);
  }

  // The row of a key of the work tile's sequence in K or V.
  __device__ __forceinline__ const Element *kv_row(const Operand &tensor, const WorkTile &t, int key) const {
    if constexpr (C::kPages) {
      const KvLocator locator{p_, a_.pages.page_size};
      const KvPlace place = locator.place(locator.page_of(t.k_batch, key), t.k_batch, 0, key);
      return row_of_tensor<Element>(tensor, place.outer, place.row, t.head_k);
    } else {
      return row_of_tensor<Element>(tensor, t.k_batch, t.k_row + key, t.head_k);
    }
  }
  // Row at_.lane / 2 of this warp's rows of Q.
  __device__ __forceinline__ const Element *q_row_of_lane(const WorkTile &t) const {
    const int row = t.row0 + at_.wg * 64 + at_.warp * 16 + (at_.lane >> 1);
    return row_of_tensor<Element>(p_.q, t.q_batch, t.q_row - t.row0 + min(row, t.seqlen_q - 1), t.head_q);
  }
  __device__ __forceinline__ float dot(const Element *q, const Element *k) const {
    float x = 0.f;
    if constexpr (kHasBias) {  // four elements at a time: out of all KV tiles may have to be computed again
#pragma unroll 1
      for (int column = (at_.lane & 1) * 4; column < p_.head_dim; column += 8) {
        uint32_t a[2], b[2];
        asm volatile("ld.global.v2.b32 {%0, %1}, [%2];\n" : "=r"(a[0]), "=r"(a[1]) : "l"(q + column));
        asm volatile("ld.global.v2.b32 {%0, %1}, [%2];\n" : "=r"(b[0]), "=r"(b[1]) : "l"(k + column));
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x = fmaf(to_float<Element>(a[n / 2] >> n % 2 * 16 & 0xFFFFu), to_float<Element>(b[n / 2] >> n % 2 * 16 & 0xFFFFu), x);
      }
    } else {
#pragma unroll 1
      for (int column = at_.lane & 1; column < p_.head_dim; column += 2) x = fmaf(element(q, column), element(k, column), x);
    }
    return x + __shfl_xor_sync(~0u, x, 1);
  }
  // Loads one element at a time: beside the accumulators there are no registers for loads in flight.
  static __device__ __forceinline__ float element(const Element *row, int column) {
    unsigned short bits;
    if constexpr (C::kFp8) {
      asm volatile("ld.global.u8 %0, [%1];\n" : "=h"(bits) : "l"(row + column));
    } else {
      asm volatile("ld.global.u16 %0, [%1];\n" : "=h"(bits) : "l"(row + column));
    }
    return to_float<Element>(bits);
  }

  const ForwardParams &a_;
  const Problem &p_;
  const SharedMemory<C> smem_;
  const ConsumerThread at_;
};

}  // namespace fa::cuda::sm90
