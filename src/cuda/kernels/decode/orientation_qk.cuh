// SPDX-License-Identifier: Apache-2.0
// Keys and rows of one warp of the decode kernels: S = Q K^T and out += P V, rows of queries in tiles of 16. For up to eight rows of a
// sequence with one token there is keys_by_rows.cuh.
//
// Keys and values of one byte are multiplied as fp16 (bytes.cuh). Their factors, if each key has its own, come with them: S is multiplied
// by those of keys before anything else is done to it, and P by those of values. Such weights are of any size, so they have a unit of
// their own: 2^(S - m) f = 2^(S + log2 f - u) 2^(u - m), where u is the maximum of S + log2 f so far.
#pragma once

#include <math_constants.h>

#include "cuda/common/nan_safe.cuh"
#include "cuda/kernels/decode/epilogue.cuh"

namespace fa::cuda::decode {

template <class C>
class RowsByKeys : protected Results<C> {
 public:
  using Base = Results<C>;
  using typename Base::Element;
  static constexpr int kMt = C::kWarpRows / 16, kNt = C::kKeys / 8, kDt = C::kD / 8, kPSteps = C::kKeys / 16;
  // Factors near to each other have a way of their own, for which more rows a warp have no registers.
  static constexpr bool kNear = kMt == 1;

  using Base::Base;

 protected:
  using Base::a_;
  using Base::diagonal;
  using Base::exponent_scale;
  using Base::head_of;
  using Base::key_warp_;
  using Base::lane_;
  using Base::only_factor;
  using Base::p_;
  using Base::piece_;
  using Base::row_of;
  using Base::row_warp_;
  using Base::rows_;
  using Base::seqlen_k_;
  using Base::shared_;
  using Base::shared_k;
  using Base::shared_k_factors;
  using Base::shared_out;
  using Base::shared_scales;
  using Base::shared_sums;
  using Base::shared_v;
  using Base::shared_v_factors;
  using Base::token_of;
  using Base::tokens_;
  using Base::warp_interior_;
  using Base::warp_row_;
  using Scores = Accumulator<kMt, kNt>;

  // Ahead of the first keys, and when Q is there.
  __device__ __forceinline__ void start() {
    clear<kMt, kDt>(out_);
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max_[i][r] = -1e30f;  // finite, so that -inf minus it is -inf
        sum_[i][r] = 0.f;
      }
  }
  __device__ __forceinline__ void take_queries() {
    if constexpr (C::k8BitKv) {
      prepare_queries<C::kRows, C::kD, C::kThreads>(shared_, shared_scales(), p_.q.dtype == Dtype::bf16,
                                                    only_factor(a_.k_descale));
      clear_units();
      __syncthreads();
    }
  }

  __device__ __forceinline__ void attend(int slot, int key0) {
    if constexpr (C::k8BitKv) {
      attend_bytes(slot, key0);
      return;
    }
    Scores s;
    mma_nt<Element, C::kD, kMt, kNt>(s, shared_, row_warp_ * C::kWarpRows, shared_k(slot), 0);
    apply_terms(s, key0);
    const bool masked = key0 < warp_interior_.begin || key0 + C::kKeys > warp_interior_.end;
    if (masked) mask(s, key0);
    raise_max(s);
    // What no token sees reads as zero; what only some see may be NaN or Inf, and zero times that is not zero.
    if (masked && tokens_ > 1 &&
        __any_sync(~0u, loaded_part_has_nonfinite<Element, C::kKeys, C::kD, 32>(shared_v(slot), lane_))) {
      PFragment<kMt, kPSteps> weights;
#pragma unroll
      for (int k = 0; k < kPSteps; ++k) {
        uint32_t w[kMt][4];
        exponentials(s, k, w);
#pragma unroll
        for (int i = 0; i < kMt; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r) weights[i][k][r] = w[i][r];
      }
      mma_rs_nan_safe<Element, C::kPitch, kMt, kPSteps, kDt>(out_, weights, shared_v(slot));
    } else {
      mma_rs_with<Element, C::kPitch, kPSteps, 1, kMt, kDt>(out_, shared_v(slot), 0,
                                                            [&](int k, uint32_t(&w)[kMt][4]) { exponentials(s, k, w); });
    }
  }

  __device__ __forceinline__ void attend_bytes(int slot, int key0) {
    Scores s;
    mma_nt_8bit<C::kFormat, C::kD, kMt, kNt>(s, shared_, row_warp_ * C::kWarpRows, shared_k(slot));
    scale(s, slot);
    apply_terms(s, key0);
    const bool masked = key0 < warp_interior_.begin || key0 + C::kKeys > warp_interior_.end;
    if (masked) mask(s, key0);
    raise_max(s);
    PFragment<kMt, kPSteps> weights;
    float unit[kMt][2];
    if (a_.v_descale.per_row) {
      const uint32_t top = kNear ? top_factor<C::kKeys>(shared_v_factors(slot), opaque(lane_)) : 0;
      if (kNear && top != 0) {
        raise_unit_to(top, unit);
        weigh<Factors::near>(s, slot, unit, weights);
      } else {
        raise_unit(s, slot, unit);
        weigh<Factors::any>(s, slot, unit, weights);
      }
    } else {
      weigh<Factors::none>(s, slot, unit, weights);
    }
    if (masked && tokens_ > 1 && __any_sync(~0u, tile_has_nan<C::kFormat, C::kTileBytes>(shared_v(slot), lane_))) {
      mma_rs_8bit_nan_safe<C::kFormat, kMt, kPSteps, kDt>(out_, weights, shared_v(slot));
    } else {
      mma_rs_8bit<C::kFormat, kMt, kPSteps, kDt>(out_, weights, shared_v(slot));
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Scores
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void apply_terms(Scores &s, int key0) const {
    if (p_.softcap > 0) {
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int j = 0; j < kNt; ++j)
#pragma unroll
          for (int r = 0; r < 4; ++r) s[i][j][r] = capped(s[i][j][r], a_.raw);
    }
    if (p_.alibi_slopes != nullptr) {
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
          const int row = min(row_of(i, r), rows_ - 1);  // what lies beyond the last row is not stored
          // Read again for every tile: cheaper than registers held through the walk.
          const float slope =
              a_.raw.logit * p_.alibi_slopes[piece_.batch * p_.alibi_batch_stride + head_of(row) * p_.alibi_head_stride];
          const int first = token_of(row) + seqlen_k_ - tokens_ - key0 - 2 * (opaque(lane_) & 3);
#pragma unroll
          for (int j = 0; j < kNt; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              s[i][j][r + e] = fmaf(-slope, fabsf(static_cast<float>(first - 8 * j - e)), s[i][j][r + e]);
        }
    }
  }

  __device__ __forceinline__ void mask(Scores &s, int key0) const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int token = token_of(row_of(i, r)), first = key0 + 2 * (opaque(lane_) & 3) + r % 2;
        const Keys keys = diagonal().visible_keys({token, token + 1});
#pragma unroll
        for (int j = 0; j < kNt; ++j) {
          if (first + 8 * j < keys.begin || first + 8 * j >= keys.end) s[i][j][r] = -CUDART_INF_F;
        }
      }
  }

  // Of bytes: S of the queries and keys that they stand for.
  __device__ __forceinline__ void scale(Scores &s, int slot) const {
    const int lane = opaque(lane_);
    float row_scale[kMt][2];
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        row_scale[i][r] = ld_shared_float(shared_scales() + (warp_row_ + i * 16 + (lane >> 2) + 8 * r) * 4);
#pragma unroll
    for (int j = 0; j < kNt; ++j) {
      float2 factors{1.f, 1.f};
      if (a_.k_descale.per_row) factors = ld_shared_float2(shared_k_factors(slot) + (8 * j + 2 * (lane & 3)) * 4);
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) s[i][j][r] *= row_scale[i][r >> 1] * (r & 1 ? factors.y : factors.x);
    }
  }

  // The factors of the values of this lane's keys in tile j of S, and the logarithms of their magnitudes.
  __device__ __forceinline__ float2 value_factors(int slot, int j) const {
    return ld_shared_float2(shared_v_factors(slot) + (8 * j + 2 * (opaque(lane_) & 3)) * 4);
  }
  static __device__ __forceinline__ float2 logarithms(float2 x) { return {__log2f(fabsf(x.x)), __log2f(fabsf(x.y))}; }

  // Of bytes whose values have factors of their own: the unit of out. It is kept where the row's maximum and sum will be in the end.
  __device__ __forceinline__ uint32_t shared_unit(int i, int r) const {
    return shared_sums(key_warp_, warp_row_ + i * 16 + (opaque(lane_) >> 2) + 8 * r);
  }
  __device__ __forceinline__ void clear_units() const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if ((opaque(lane_) & 3) == 0) st_shared_float(shared_unit(i, r), -1e30f);
  }
  __device__ __forceinline__ void raise_unit_to(uint32_t top, float (&unit)[kMt][2]) {
    const float power = power_above(top);
    bool grow = false;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unit[i][r] = ld_shared_float(shared_unit(i, r));
        grow |= !(max_[i][r] + power <= unit[i][r]);
      }
    if (!__any_sync(~0u, grow)) return;
    __syncwarp();  // the unit is read
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) raise_row(i, r, max_[i][r] + power, unit);
    __syncwarp();
  }
  __device__ __forceinline__ void raise_unit(const Scores &s, int slot, float (&unit)[kMt][2]) {
    float top[kMt][2];
#pragma unroll
    for (int i = 0; i < kMt; ++i) top[i][0] = top[i][1] = -CUDART_INF_F;
#pragma unroll
    for (int j = 0; j < kNt; ++j) {
      const float2 more = logarithms(value_factors(slot, j));
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          top[i][r >> 1] = fmaxf(top[i][r >> 1], fmaf(s[i][j][r], exponent_scale(), r & 1 ? more.y : more.x));
    }
    bool grow = false;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unit[i][r] = ld_shared_float(shared_unit(i, r));
        grow |= top[i][r] > unit[i][r];
      }
    if (!__any_sync(~0u, grow)) return;
    __syncwarp();  // the unit is read
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], 1));
        top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], 2));
        raise_row(i, r, top[i][r], unit);
      }
    __syncwarp();
  }
  // A row's unit to at least `to`.
  __device__ __forceinline__ void raise_row(int i, int r, float to, float (&unit)[kMt][2]) {
    const float raised = fmaxf(unit[i][r], to), factor = exp2_approx(unit[i][r] - raised);
    unit[i][r] = raised;
    if ((opaque(lane_) & 3) == 0) st_shared_float(shared_unit(i, r), raised);
    multiply_row(i, r, factor);
  }

  __device__ __forceinline__ void multiply_row(int i, int r, float factor) {
#pragma unroll
    for (int j = 0; j < kDt; ++j) {
      out_[i][j][2 * r] *= factor;
      out_[i][j][2 * r + 1] *= factor;
    }
  }

  __device__ __forceinline__ void raise_max(const Scores &s) {
    float top[kMt][2];
    bool grow = false;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = fmaxf(s[i][0][2 * r], s[i][0][2 * r + 1]);
#pragma unroll
        for (int j = 1; j < kNt; ++j) x = fmaxf(x, fmaxf(s[i][j][2 * r], s[i][j][2 * r + 1]));
        top[i][r] = x * exponent_scale();
        grow |= top[i][r] > max_[i][r];
      }
    if (!__any_sync(~0u, grow)) return;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], 1));
        top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], 2));
        const float raised = fmaxf(max_[i][r], top[i][r]);
        const float factor = exp2_approx(max_[i][r] - raised);  // 1 for rows that do not grow: their bits stay
        max_[i][r] = raised;
        sum_[i][r] *= factor;
        if (!C::k8BitKv || !a_.v_descale.per_row) multiply_row(i, r, factor);
      }
  }

  // exponentials() of all keys, times the factors of their values, in the unit of out.
  template <Factors kFactors>
  __device__ __forceinline__ void weigh(const Scores &s, int slot, const float (&unit)[kMt][2],
                                        PFragment<kMt, kPSteps> &weights) {
    const float c = exponent_scale();
    float in_unit[kMt][2];
    if constexpr (kFactors == Factors::near) {
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) in_unit[i][r] = exp2_approx(max_[i][r] - unit[i][r]);
    }
#pragma unroll
    for (int j = 0; j < kNt; ++j) {
      float2 factors{1.f, 1.f}, more{0.f, 0.f};
      if constexpr (kFactors != Factors::none) factors = value_factors(slot, j);
      if constexpr (kFactors == Factors::any) more = logarithms(factors);
#pragma unroll
      for (int i = 0; i < kMt; ++i) {
        float e[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float x = s[i][j][r];
          e[r] = exp2_approx(fmaf(x, c, -max_[i][r >> 1]));
          sum_[i][r >> 1] += e[r];
          if constexpr (kFactors == Factors::near) {
            e[r] *= in_unit[i][r >> 1] * (r & 1 ? factors.y : factors.x);
          } else if constexpr (kFactors == Factors::any) {
            e[r] = copysignf(exp2_approx(fmaf(x, c, r & 1 ? more.y : more.x) - unit[i][r >> 1]), r & 1 ? factors.y : factors.x);
          }
          if (x == -CUDART_INF_F) e[r] = kMaskedP;
        }
        weights[i][j / 2][j % 2 * 2] = pack2<Element>(e[0], e[1]);
        weights[i][j / 2][j % 2 * 2 + 1] = pack2<Element>(e[2], e[3]);
      }
    }
  }

  // P = 2^(S - m) of the k-th 16 keys, rounded to the operand of the next product; adds to the row sums. What is masked becomes
  // kMaskedWeight.
  __device__ __forceinline__ void exponentials(const Scores &s, int k, uint32_t (&w)[kMt][4]) {
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
        w[i][2 * half] = pack2<Element>(e[0], e[1]);
        w[i][2 * half + 1] = pack2<Element>(e[2], e[3]);
      }
  }

  // This warp's out, maxima and sums to shared memory.
  __device__ __forceinline__ void leave_out() {
    const int lane = opaque(lane_);
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (warp_row_ + i * 16 + 8 * r >= rows_) continue;
        sum_[i][r] += __shfl_xor_sync(~0u, sum_[i][r], 1);
        sum_[i][r] += __shfl_xor_sync(~0u, sum_[i][r], 2);
        const int row = warp_row_ + i * 16 + (lane >> 2) + 8 * r;
        if constexpr (C::k8BitKv) {
          multiply_row(
              i, r,
              a_.v_descale.per_row ? exp2_approx(ld_shared_float(shared_unit(i, r)) - max_[i][r]) : only_factor(a_.v_descale));
          __syncwarp();  // the unit is read
        }
        if ((lane & 3) == 0) st_shared_float2(shared_sums(key_warp_, row), {max_[i][r], sum_[i][r]});
        if constexpr (C::k8BitKv) {
          // Four neighbours of each 16 columns: the even ones of them are in one tile, the odd ones in the next.
#pragma unroll
          for (int j = 0; j < kDt; j += 2) {
            const auto bits = [&](int n, int e) { return __float_as_uint(out_[i][j + n][2 * r + e]); };
            st_shared_16(shared_out(key_warp_, row, j + (lane >> 1 & 1)) + (lane & 1) * 16, bits(0, 0), bits(1, 0), bits(0, 1),
                         bits(1, 1));
          }
        } else {
#pragma unroll
          for (int j = 0; j < kDt; ++j)
            st_shared_float2(shared_out(key_warp_, row, j) + (lane & 3) * 8, {out_[i][j][2 * r], out_[i][j][2 * r + 1]});
        }
      }
  }

 private:
  Accumulator<kMt, kDt> out_;
  float max_[kMt][2], sum_[kMt][2];
};

}  // namespace fa::cuda::decode
