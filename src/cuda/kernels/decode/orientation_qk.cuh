// SPDX-License-Identifier: Apache-2.0
// S = Q K^T orientation of the decode kernels: one warp computes S = Q K^T and out += P V, rows of queries in MMA tiles of 16.
// Sequences with one token and at most eight rows have orientation_kq.cuh.
//
// 8-bit KV is widened to fp16 (kv_8bit.cuh). Where each key has a descale of its own, S is multiplied by the descales of K
// before anything else, and P by the descales f of V. P times f can have any magnitude, so it is kept relative to a reference u
// of its own, the running maximum of S + log2 |f|: 2^(S - m) f = 2^(S + log2 f - u) 2^(u - m). In the code u is pv_max, and out
// is relative to it, too.
#pragma once

#include <math_constants.h>

#include "cuda/common/nan_safe.cuh"
#include "cuda/kernels/decode/epilogue.cuh"

namespace fa::cuda::decode {

template <class C>
class OrientationQk : protected Epilogue<C> {
 public:
  using Base = Epilogue<C>;
  using typename Base::Element;
  static constexpr int kMt = C::kWarpRows / 16, kNt = C::kKvTile / 8, kDt = C::kD / 8, kPSteps = C::kKvTile / 16;
  // Whether DescaleMode::similar exists: with more rows per warp there are no registers for it.
  static constexpr bool kHasSimilarMode = kMt == 1;

  using Base::Base;

 protected:
  using Base::a_;
  using Base::diagonal;
  using Base::exponent_scale;
  using Base::head_descale;
  using Base::head_of;
  using Base::kv_group_;
  using Base::lane_;
  using Base::p_;
  using Base::row_warp_;
  using Base::rows_;
  using Base::seqlen_k_;
  using Base::smem_;
  using Base::smem_k;
  using Base::smem_k_descale;
  using Base::smem_out;
  using Base::smem_row_scale;
  using Base::smem_row_stats;
  using Base::smem_v;
  using Base::smem_v_descale;
  using Base::token_of;
  using Base::tokens_;
  using Base::warp_interior_;
  using Base::warp_row0_;
  using Base::work_unit_;
  using Scores = Accumulator<kMt, kNt>;
  using Fragment = QkFragment<kMt, kNt>;

  // The r-th query row of this lane, counted from the CTA's first row.
  __device__ __forceinline__ int row_of(int r) const { return warp_row0_ + Fragment::query(opaque(lane_), r); }

  // Before the first KV step. load_q_fragments() follows when Q has arrived.
  __device__ __forceinline__ void init_accumulators() {
    clear<kMt, kDt>(out_);
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max_[i][r] = -1e30f;  // finite, so that -inf - max_ is -inf and not NaN
        sum_[i][r] = 0.f;
      }
  }
  __device__ __forceinline__ void load_q_fragments() {
    if constexpr (C::k8BitKv) {
      prepare_q<C::kRows, C::kD, C::kThreads>(smem_, smem_row_scale(), p_.q.dtype == Dtype::bf16, head_descale(a_.k_descale));
      init_pv_max();
      __syncthreads();
    }
  }

  __device__ __forceinline__ void process_kv_tile(int stage, int key0) {
    if constexpr (C::k8BitKv) {
      process_kv_tile_8bit(stage, key0);
      return;
    }
    Scores s;
    mma_nt<Element, C::kD, kMt, kNt>(s, smem_, row_warp_ * C::kWarpRows, smem_k(stage), 0);
    score_mods(s, key0);
    const bool masked = key0 < warp_interior_.begin || key0 + C::kKvTile > warp_interior_.end;
    if (masked) mask(s, key0);
    update_max(s);
    // NaN-safe path. Keys that no token sees are zeros in shared memory. A key that only some tokens see may hold NaN or Inf in
    // V, and 0 times that is not 0.
    if (masked && tokens_ > 1 &&
        __any_sync(~0u, loaded_part_has_nonfinite<Element, C::kKvTile, C::kD, 32>(smem_v(stage), lane_))) {
      PFragment<kMt, kPSteps> p_frag;
#pragma unroll
      for (int k = 0; k < kPSteps; ++k) {
        uint32_t p[kMt][4];
        exponentiate(s, k, p);
#pragma unroll
        for (int i = 0; i < kMt; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r) p_frag[i][k][r] = p[i][r];
      }
      mma_rs_nan_safe<Element, C::kPitch, kMt, kPSteps, kDt>(out_, p_frag, smem_v(stage));
    } else {
      mma_rs_with<Element, C::kPitch, kPSteps, 1, kMt, kDt>(out_, smem_v(stage), 0,
                                                            [&](int k, uint32_t(&p)[kMt][4]) { exponentiate(s, k, p); });
    }
  }

  __device__ __forceinline__ void process_kv_tile_8bit(int stage, int key0) {
    Scores s;
    mma_nt_8bit<C::kFormat, C::kD, kMt, kNt>(s, smem_, row_warp_ * C::kWarpRows, smem_k(stage));
    apply_descales(s, stage);
    score_mods(s, key0);
    const bool masked = key0 < warp_interior_.begin || key0 + C::kKvTile > warp_interior_.end;
    if (masked) mask(s, key0);
    update_max(s);
    PFragment<kMt, kPSteps> p_frag;
    float pv_max[kMt][2];
    if (a_.v_descale.per_row) {
      const uint32_t tile_max = kHasSimilarMode ? similar_descale_max<C::kKvTile>(smem_v_descale(stage), opaque(lane_)) : 0;
      if (kHasSimilarMode && tile_max != 0) {
        raise_pv_max_to(tile_max, pv_max);
        exponentiate_descaled<DescaleMode::similar>(s, stage, pv_max, p_frag);
      } else {
        update_pv_max(s, stage, pv_max);
        exponentiate_descaled<DescaleMode::per_key>(s, stage, pv_max, p_frag);
      }
    } else {
      exponentiate_descaled<DescaleMode::none>(s, stage, pv_max, p_frag);
    }
    if (masked && tokens_ > 1 && __any_sync(~0u, tile_has_nan<C::kFormat, C::kTileBytes>(smem_v(stage), lane_))) {
      mma_rs_8bit_nan_safe<C::kFormat, kMt, kPSteps, kDt>(out_, p_frag, smem_v(stage));
    } else {
      mma_rs_8bit<C::kFormat, kMt, kPSteps, kDt>(out_, p_frag, smem_v(stage));
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Scores and softmax
  // ------------------------------------------------------------------------------------------------------------------

  // Softcap and ALiBi. Slopes are loaded for every tile: cheaper than registers across the main loop. Rows beyond the last one
  // are not stored.
  __device__ __forceinline__ void score_mods(Scores &s, int key0) const {
    const auto stored_row = [&](int r) { return min(row_of(r), rows_ - 1); };
    apply_score_mods<Fragment>(
        s, p_, a_.raw, [&](int r) { return alibi_slope(p_, a_.raw, work_unit_.batch, head_of(stored_row(r))); },
        [&](int r) { return token_of(stored_row(r)) + seqlen_k_ - tokens_ - key0 - Fragment::first_key(opaque(lane_)); });
  }

  __device__ __forceinline__ void mask(Scores &s, int key0) const {
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r)
      mask_row<Fragment>(s, r, keys_of_query(diagonal(), token_of(row_of(r))), key0, opaque(lane_));
  }

  // 8-bit KV: multiplies S by the scale of Q's row and the descale of the key.
  __device__ __forceinline__ void apply_descales(Scores &s, int stage) const {
    const int lane = opaque(lane_);
    float row_scale[kMt][2];
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        row_scale[i][r] = ld_shared_float(smem_row_scale() + (warp_row0_ + i * 16 + (lane >> 2) + 8 * r) * 4);
#pragma unroll
    for (int j = 0; j < kNt; ++j) {
      float2 descales{1.f, 1.f};
      if (a_.k_descale.per_row) descales = ld_shared_float2(smem_k_descale(stage) + (8 * j + 2 * (lane & 3)) * 4);
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) s[i][j][r] *= row_scale[i][r >> 1] * (r & 1 ? descales.y : descales.x);
    }
  }

  // The descales of V of this lane's keys in MMA tile j of S, and log2 of their magnitudes.
  __device__ __forceinline__ float2 v_descales(int stage, int j) const {
    return ld_shared_float2(smem_v_descale(stage) + (8 * j + 2 * (opaque(lane_) & 3)) * 4);
  }
  static __device__ __forceinline__ float2 log2_abs(float2 x) { return {__log2f(fabsf(x.x)), __log2f(fabsf(x.y))}; }

  // 8-bit KV with per-row descales of V: where pv_max of a row is kept, the place that receives the row's maximum and sum in
  // the epilogue.
  __device__ __forceinline__ uint32_t smem_pv_max(int i, int r) const {
    return smem_row_stats(kv_group_, warp_row0_ + i * 16 + (opaque(lane_) >> 2) + 8 * r);
  }
  __device__ __forceinline__ void init_pv_max() const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if ((opaque(lane_) & 3) == 0) st_shared_float(smem_pv_max(i, r), -1e30f);
  }
  __device__ __forceinline__ void raise_pv_max_to(uint32_t tile_max, float (&pv_max)[kMt][2]) {
    const float exponent = exponent_above(tile_max);
    bool rescaled = false;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        pv_max[i][r] = ld_shared_float(smem_pv_max(i, r));
        rescaled |= !(max_[i][r] + exponent <= pv_max[i][r]);
      }
    if (!__any_sync(~0u, rescaled)) return;
    __syncwarp();  // all lanes have read pv_max
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) raise_pv_max_row(i, r, max_[i][r] + exponent, pv_max);
    __syncwarp();
  }
  __device__ __forceinline__ void update_pv_max(const Scores &s, int stage, float (&pv_max)[kMt][2]) {
    float tile_max[kMt][2];
#pragma unroll
    for (int i = 0; i < kMt; ++i) tile_max[i][0] = tile_max[i][1] = -CUDART_INF_F;
#pragma unroll
    for (int j = 0; j < kNt; ++j) {
      const float2 log2_descale = log2_abs(v_descales(stage, j));
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          tile_max[i][r >> 1] =
              fmaxf(tile_max[i][r >> 1], fmaf(s[i][j][r], exponent_scale(), r & 1 ? log2_descale.y : log2_descale.x));
    }
    bool rescaled = false;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        pv_max[i][r] = ld_shared_float(smem_pv_max(i, r));
        rescaled |= tile_max[i][r] > pv_max[i][r];
      }
    if (!__any_sync(~0u, rescaled)) return;
    __syncwarp();  // all lanes have read pv_max
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        tile_max[i][r] = fmaxf(tile_max[i][r], __shfl_xor_sync(~0u, tile_max[i][r], 1));
        tile_max[i][r] = fmaxf(tile_max[i][r], __shfl_xor_sync(~0u, tile_max[i][r], 2));
        raise_pv_max_row(i, r, tile_max[i][r], pv_max);
      }
    __syncwarp();
  }
  // Raises pv_max of a row to at least `to`, and rescales out.
  __device__ __forceinline__ void raise_pv_max_row(int i, int r, float to, float (&pv_max)[kMt][2]) {
    const float new_max = fmaxf(pv_max[i][r], to), factor = exp2_approx(pv_max[i][r] - new_max);
    pv_max[i][r] = new_max;
    if ((opaque(lane_) & 3) == 0) st_shared_float(smem_pv_max(i, r), new_max);
    scale_out_row(i, r, factor);
  }

  __device__ __forceinline__ void scale_out_row(int i, int r, float factor) {
#pragma unroll
    for (int j = 0; j < kDt; ++j) {
      out_[i][j][2 * r] *= factor;
      out_[i][j][2 * r + 1] *= factor;
    }
  }

  __device__ __forceinline__ void update_max(const Scores &s) {
    float tile_max[kMt][2];
    bool rescaled = false;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = fmaxf(s[i][0][2 * r], s[i][0][2 * r + 1]);
#pragma unroll
        for (int j = 1; j < kNt; ++j) x = fmaxf(x, fmaxf(s[i][j][2 * r], s[i][j][2 * r + 1]));
        tile_max[i][r] = x * exponent_scale();
        rescaled |= tile_max[i][r] > max_[i][r];
      }
    if (!__any_sync(~0u, rescaled)) return;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        tile_max[i][r] = fmaxf(tile_max[i][r], __shfl_xor_sync(~0u, tile_max[i][r], 1));
        tile_max[i][r] = fmaxf(tile_max[i][r], __shfl_xor_sync(~0u, tile_max[i][r], 2));
        const float new_max = fmaxf(max_[i][r], tile_max[i][r]);
        const float factor =
            exp2_approx(max_[i][r] - new_max);  // exactly 1 for rows whose maximum stays: their bits do not change
        max_[i][r] = new_max;
        sum_[i][r] *= factor;
        if (!C::k8BitKv || !a_.v_descale.per_row) scale_out_row(i, r, factor);
      }
  }

  // P = 2^(S - max) times the descales of V, relative to 2^pv_max, for all keys of the tile; adds to the row sums.
  template <DescaleMode kDescaleMode>
  __device__ __forceinline__ void exponentiate_descaled(const Scores &s, int stage, const float (&pv_max)[kMt][2],
                                                        PFragment<kMt, kPSteps> &p_frag) {
    const float c = exponent_scale();
    float to_pv_max[kMt][2];
    if constexpr (kDescaleMode == DescaleMode::similar) {
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) to_pv_max[i][r] = exp2_approx(max_[i][r] - pv_max[i][r]);
    }
#pragma unroll
    for (int j = 0; j < kNt; ++j) {
      float2 descales{1.f, 1.f}, log2_descale{0.f, 0.f};
      if constexpr (kDescaleMode != DescaleMode::none) descales = v_descales(stage, j);
      if constexpr (kDescaleMode == DescaleMode::per_key) log2_descale = log2_abs(descales);
#pragma unroll
      for (int i = 0; i < kMt; ++i) {
        float e[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float x = s[i][j][r];
          e[r] = exp2_approx(fmaf(x, c, -max_[i][r >> 1]));
          sum_[i][r >> 1] += e[r];
          if constexpr (kDescaleMode == DescaleMode::similar) {
            e[r] *= to_pv_max[i][r >> 1] * (r & 1 ? descales.y : descales.x);
          } else if constexpr (kDescaleMode == DescaleMode::per_key) {
            e[r] = copysignf(exp2_approx(fmaf(x, c, r & 1 ? log2_descale.y : log2_descale.x) - pv_max[i][r >> 1]),
                             r & 1 ? descales.y : descales.x);
          }
          if (x == -CUDART_INF_F) e[r] = kMaskedP;
        }
        p_frag[i][j / 2][j % 2 * 2] = pack2<Element>(e[0], e[1]);
        p_frag[i][j / 2][j % 2 * 2 + 1] = pack2<Element>(e[2], e[3]);
      }
    }
  }

  // P = 2^(S - max) of the k-th 16 keys, rounded to the MMA operand type; adds to the row sums. Masked elements become
  // kMaskedP.
  __device__ __forceinline__ void exponentiate(const Scores &s, int k, uint32_t (&p)[kMt][4]) {
    const float c = exponent_scale();
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float e[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float x = s[i][2 * k + half][r];
          e[r] = exp2_approx(fmaf(x, c, -max_[i][r >> 1]));
          sum_[i][r >> 1] += e[r];
          if (x == -CUDART_INF_F) e[r] = kMaskedP;
        }
        p[i][2 * half] = pack2<Element>(e[0], e[1]);
        p[i][2 * half + 1] = pack2<Element>(e[2], e[3]);
      }
  }

  // Writes this warp's out, maxima and row sums to shared memory.
  __device__ __forceinline__ void store_partial_out() {
    const int lane = opaque(lane_);
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (warp_row0_ + i * 16 + 8 * r >= rows_) continue;
        sum_[i][r] += __shfl_xor_sync(~0u, sum_[i][r], 1);
        sum_[i][r] += __shfl_xor_sync(~0u, sum_[i][r], 2);
        const int row = warp_row0_ + i * 16 + (lane >> 2) + 8 * r;
        if constexpr (C::k8BitKv) {
          scale_out_row(
              i, r,
              a_.v_descale.per_row ? exp2_approx(ld_shared_float(smem_pv_max(i, r)) - max_[i][r]) : head_descale(a_.v_descale));
          __syncwarp();  // all lanes have read pv_max
        }
        if ((lane & 3) == 0) st_shared_float2(smem_row_stats(kv_group_, row), {max_[i][r], sum_[i][r]});
        if constexpr (C::k8BitKv) {
          // Of each 16 columns a lane has four neighbours: the even ones are in one MMA tile, the odd ones in the next.
#pragma unroll
          for (int j = 0; j < kDt; j += 2) {
            const auto bits = [&](int n, int e) { return __float_as_uint(out_[i][j + n][2 * r + e]); };
            st_shared_16(smem_out(kv_group_, row, j + (lane >> 1 & 1)) + (lane & 1) * 16, bits(0, 0), bits(1, 0), bits(0, 1),
                         bits(1, 1));
          }
        } else {
#pragma unroll
          for (int j = 0; j < kDt; ++j)
            st_shared_float2(smem_out(kv_group_, row, j) + (lane & 3) * 8, {out_[i][j][2 * r], out_[i][j][2 * r + 1]});
        }
      }
  }

 private:
  Accumulator<kMt, kDt> out_;
  float max_[kMt][2], sum_[kMt][2];
};

}  // namespace fa::cuda::decode
