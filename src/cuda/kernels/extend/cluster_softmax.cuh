// SPDX-License-Identifier: Apache-2.0
// The softmax of a segment in the kernels for clusters: each consumer warp has a tile. Every CTA of a team has the scores of all keys, and computes the same.
#pragma once

#include <math_constants.h>

#include "cuda/common/lazy_max.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/kernels/decode/cta.cuh"
#include "cuda/kernels/extend/cluster_cta.cuh"

namespace fa::cuda::extend {

template <class C>
class ClusterSoftmax {
 public:
  using Cta = ClusterCta<C>;
  using Element = typename C::Element;
  using Fragment = typename Cta::Fragment;
  using Softmax = OnlineSoftmax<Fragment>;
  static constexpr int kScores = Fragment::kElements, kPSteps = Cta::kPSteps;

  __device__ __forceinline__ explicit ClusterSoftmax(const Cta &cta) : cta_(cta) {}

  // Computes P, and maximum and row sum of each row. Returns whether out has to be multiplied by Cta::rescale() before some tile.
  //
  // Plain scores: the maximum of a row is that of its first tile, unless a later tile asks for a raise (lazy_max.cuh). So all warps compute P with
  // that maximum. If none asks, that is the result; else, and with score modifiers, tiles are computed one after the other.
  __device__ __forceinline__ bool compute_p(int segment_key) const {
    return cta_.has_many_rows() ? compute_p<2>(segment_key) : compute_p<1>(segment_key);
  }

 private:
  __device__ __forceinline__ float scale() const { return exponent_scale(cta_.problem); }
  template <int kRows>
  __device__ __forceinline__ void load_scores(int tile, float (&s)[kScores]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < kPSteps; ++n) {
        float4 x{0.f, 0.f, 0.f, 0.f};
        if (r < kRows) x = decode::ld_shared_float4(cta_.scores(tile, r, n));
        s[8 * n + 2 * r] = x.x;
        s[8 * n + 2 * r + 1] = x.y;
        s[8 * n + 4 + 2 * r] = x.z;
        s[8 * n + 4 + 2 * r + 1] = x.w;
      }
  }
  __device__ __forceinline__ bool is_visible(int key0) const {
    return key0 < cta_.keys.end && key0 + C::kKvTile > cta_.keys.begin;
  }
  __device__ __forceinline__ bool is_masked(int key0) const { return !holds_tile<C::kKvTile>(cta_.keys, key0); }
  __device__ __forceinline__ void mask_tile(int key0, float (&s)[kScores]) const {
    mask_rows<Fragment>(s, key0, cta_.lane, [&](int) { return cta_.keys; });
  }
  __device__ __forceinline__ void apply_mods(int key0, float (&s)[kScores]) const {
    apply_score_mods<Fragment, kSoftcapAlibi>(
        s, cta_.problem, cta_.params.raw,
        [&](int r) {
          const int head = cta_.head * static_cast<int>(cta_.params.group.value) + min(cta_.row_of(r), cta_.rows - 1);
          return load_head_terms(cta_.problem, cta_.params.raw.logit, cta_.batch, head);
        },
        [&](int) { return cta_.seqlen_k - cta_.tokens - key0 - Fragment::first_key(cta_.lane); });
  }
  template <int kRows>
  __device__ __forceinline__ void store_p(int tile, const float (&s)[kScores]) const {
#pragma unroll
    for (int n = 0; n < kPSteps; ++n) {
      uint32_t a[4];
      convert_p<Element>(s, n, a);
      if (kRows == 1) a[1] = a[3] = 0;
      st_shared_16(cta_.p_operand(tile, n), a[0], a[1], a[2], a[3]);
    }
  }

  // Of two rows of a lane, or of the first one. The rows of the second do not exist then, and their P are 0.
  template <int kRows>
  __device__ __forceinline__ bool compute_p(int segment_key) const {
    const bool plain = has_plain_scores(cta_.problem);
    const int own_key = segment_key + cta_.warp * C::kKvTile;
    float s[kScores], tile_sum[kRows], max[kRows];
    bool asks = !plain;
    if (plain) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float top = -CUDART_INF_F;
#pragma unroll
        for (int n = 0; n < C::kConsumerWarps; n += 4) {
          const float4 x = decode::ld_shared_float4(cta_.first_max(cta_.row_of(r)) + n * 4);
          top = fmaxf(top, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
        }
        max[r] = fmaxf(kNoMax, __fmul_rn(top, scale()));
        asks |= max[r] == kNoMax;
        tile_sum[r] = 0.f;
      }
      if (is_visible(own_key)) {
        const bool masked = is_masked(own_key);
        load_scores<kRows>(cta_.warp, s);
        if (masked) mask_tile(own_key, s);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          // P from kLargestP on are not finite numbers of 16 bits, or make the sum so large that it asks for a raise, too.
          float chain[2] = {0.f, 0.f};
#pragma unroll
          for (int m = 0; m < Fragment::kKeysOfLane; ++m) {
            float &x = s[Fragment::at(r, m)];
            x = exp2_approx(fmaf(x, scale(), -max[r]));
            chain[m / 2 % 2] += x;
          }
          tile_sum[r] = chain[0] + chain[1];
          asks |= !(tile_sum[r] <= kMaxLaneSumOfRow);
        }
      } else {
        clear(s);
      }
    }
    const bool sequential = named_barrier_or(1, C::kConsumerThreads, asks);
    if (sequential) {
      compute_p_sequentially(segment_key, plain, s);
    } else {
      store_p<kRows>(cta_.warp, s);
#pragma unroll
      for (int r = 0; r < kRows; ++r) st_shared_float(cta_.lane_sum(cta_.warp, cta_.row_of(r)), tile_sum[r]);
    }
    cta_.sync_consumers();
    // The last warps have the rows of the first and of the second half. Few columns leave them idle.
    if (const int r = cta_.warp - (C::kConsumerWarps - kRows); r >= 0) {
      float row_max, sum[1] = {0.f};
      if (sequential) {
        row_max = ld_shared_float(cta_.running_max(cta_.row_of(r)));
        sum[0] = ld_shared_float(cta_.running_sum(cta_.row_of(r)));
      } else {
        row_max = r == 0 ? max[0] : max[kRows - 1];
#pragma unroll
        for (int tile = 0; tile < C::kSegmentTiles; ++tile) sum[0] += ld_shared_float(cta_.lane_sum(tile, cta_.row_of(r)));
      }
      Fragment::reduce(sum, SumOp{});
      if ((cta_.lane & 3) == 0) st_shared_float2(cta_.row_stats(cta_.row_of(r)), {row_max, sum[0]});
    }
    return sequential;
  }

  __device__ __forceinline__ void compute_p_sequentially(int segment_key, bool plain, float (&s)[kScores]) const {
    const auto scale_of = [&](int) { return scale(); };
#pragma unroll 1
    for (int tile = 0; tile < C::kSegmentTiles; ++tile) {
      if (tile == cta_.warp) {
        const int key0 = segment_key + tile * C::kKvTile;
        Softmax softmax;
        softmax.reset();
        if (tile > 0) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            softmax.max[r] = ld_shared_float(cta_.running_max(cta_.row_of(r)));
            softmax.sum[r] = ld_shared_float(cta_.running_sum(cta_.row_of(r)));
          }
        }
        float factor[2] = {1.f, 1.f};
        if (is_visible(key0)) {
          // Every tile is treated as a partial one, in which P that would overflow are found before they are computed: the scores are not needed again.
          constexpr bool kPartial = true;
          float tile_sum[2];
          if (cta_.has_many_rows()) {
            load_scores<2>(tile, s);
          } else {
            load_scores<1>(tile, s);
          }
          apply_mods(key0, s);
          if (is_masked(key0)) mask_tile(key0, s);
          raise_max_before<Fragment>(softmax, s, kPartial, plain, scale_of,
                                     [&] { factor[0] = softmax.rescale[0], factor[1] = softmax.rescale[1]; });
          softmax.template exponentiate<true>(s, scale_of, tile_sum);
          if (plain && raise_max_after<Fragment, true>(softmax, s, tile_sum, asks_for_raise(tile_sum), kPartial, scale_of,
                                                       [](const bool(&)[2]) {})) {
            factor[0] *= softmax.rescale[0];
            factor[1] *= softmax.rescale[1];
          }
          softmax.sum[0] += tile_sum[0];
          softmax.sum[1] += tile_sum[1];
        } else {
          clear(s);
        }
        store_p<2>(tile, s);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          st_shared_float(cta_.running_sum(cta_.row_of(r)), softmax.sum[r]);
          if ((cta_.lane & 3) == 0) {
            st_shared_float(cta_.running_max(cta_.row_of(r)), softmax.max[r]);
            st_shared_float(cta_.rescale(tile, cta_.row_of(r)), factor[r]);
          }
        }
      }
      cta_.sync_consumers();
    }
  }

  const Cta &cta_;
};

}  // namespace fa::cuda::extend
