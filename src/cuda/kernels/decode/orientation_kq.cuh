// SPDX-License-Identifier: Apache-2.0
// Keys and rows of one warp of the decode kernels for up to eight rows, heads of a group that share one query each: S^T = K Q^T and
// out^T += V^T P^T, keys and columns of out in tiles of 16, rows in one of eight. Half of the products, of the registers for out and of the
// loads of rows_by_keys.cuh, whose tiles of 16 rows would be half empty. Q stays in registers.
//
//   tile of S^T, lane 4 g + c:   keys g and g + 8, rows 2 c and 2 c + 1;   of out^T: columns g and g + 8, the same rows
//   keys and values of bytes:    the same, but columns 2 g and 2 g + 1 of out^T (bytes.cuh has why, rows_by_keys.cuh what becomes of factors)
#pragma once

#include <math_constants.h>

#include "cuda/kernels/decode/epilogue.cuh"

namespace fa::cuda::decode {

// An 8 x 8 matrix of 16-bit elements, as a warp holds one, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
  return y;
}

template <class C>
class KeysByRows : protected Results<C> {
 public:
  using Base = Results<C>;
  using typename Base::Element;
  static constexpr int kKeyTiles = C::kKeys / 16, kColumnTiles = C::kD / 16;
  static constexpr int kLoadTiles = C::k8BitKv ? 2 : 1;  // tiles of 16 columns that one ldmatrix brings
  static_assert(C::kRows == 8 && C::kRowWarps == 1);

  using Base::Base;

 protected:
  using Base::a_;
  using Base::exponent_scale;
  using Base::key_warp_;
  using Base::lane_;
  using Base::only_factor;
  using Base::p_;
  using Base::piece_;
  using Base::rows_;
  using Base::shared_;
  using Base::shared_k;
  using Base::shared_k_factors;
  using Base::shared_out;
  using Base::shared_scales;
  using Base::shared_sums;
  using Base::shared_v;
  using Base::shared_v_factors;
  using Base::warp_interior_;
  using Base::warp_visible_;
  using Scores = float[kKeyTiles][4];

  // Ahead of the first keys, and when Q is there.
  __device__ __forceinline__ void start() {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) out_[j][r] = 0.f;
    max_[0] = max_[1] = -1e30f;  // finite, so that -inf minus it is -inf
    sum_[0] = sum_[1] = 0.f;
    unit_[0] = unit_[1] = -1e30f;
  }
  __device__ __forceinline__ void take_queries() {
    if constexpr (C::k8BitKv) {
      prepare_queries<C::kRows, C::kD, C::kThreads>(shared_, shared_scales(), p_.q.dtype == Dtype::bf16,
                                                    only_factor(a_.k_descale));
      __syncthreads();
#pragma unroll
      for (int e = 0; e < 2; ++e) scale_[e] = ld_shared_float(shared_scales() + (2 * (lane_ & 3) + e) * 4);
    }
    constexpr int kQPitch = C::kD * 2;
    const uint32_t q = shared_ + swizzled<kQPitch>(lane_ & 7, lane_ >> 3);
#pragma unroll
    for (int k = 0; k < kColumnTiles; k += 2) {
      uint32_t f[4];
      ldmatrix_x4(f, advance<kQPitch>(q, k));
#pragma unroll
      for (int n = 0; n < 4; ++n) q_[k + n / 2][n % 2] = f[n];
    }
  }

  __device__ __forceinline__ void attend(int slot, int key0) {
    Scores s;
    multiply_keys(s, slot);
    if constexpr (C::k8BitKv) scale(s, slot);
    apply_terms(s, key0);
    if (key0 < warp_interior_.begin || key0 + C::kKeys > warp_interior_.end) mask(s, key0);
    raise_max(s);
    add_values(s, slot);
  }

  // This warp's out, maxima and sums to shared memory.
  __device__ __forceinline__ void leave_out() {
    const int lane = opaque(lane_), row = 2 * (lane & 3);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum_[e] += __shfl_xor_sync(~0u, sum_[e], distance);
      if (lane < 4) st_shared_float2(shared_sums(key_warp_, row + e), {max_[e], sum_[e]});
    }
    if constexpr (C::k8BitKv) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        multiply_row(e, a_.v_descale.per_row ? exp2_approx(unit_[e] - max_[e]) : only_factor(a_.v_descale));
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j)
          st_shared_float2(shared_out(key_warp_, row + e, 2 * j + (lane >> 4)) + (lane >> 2 & 3) * 8,
                           {out_[j][e], out_[j][e + 2]});
      }
    } else {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          st_shared_float(shared_out(key_warp_, row + r % 2, 2 * j + r / 2) + (lane >> 2) * 4, out_[j][r]);
    }
  }

 private:
  // Fragments are loaded so many tiles ahead of their products.
  static constexpr int kAhead = 3;

  // The left operand of a product, 16 keys and the kHalf-th 16 of the columns that ldmatrix has brought ...
  template <int kHalf>
  static __device__ __forceinline__ void keys_operand(const uint32_t (&f)[4], uint32_t (&a)[4]) {
    if constexpr (C::k8BitKv) {
      const Pairs low = widen_neighbours<C::kFormat>(f[2 * kHalf]), high = widen_neighbours<C::kFormat>(f[2 * kHalf + 1]);
      a[0] = low.first, a[1] = high.first, a[2] = low.second, a[3] = high.second;
    } else {
      a[0] = f[0], a[1] = f[1], a[2] = f[2], a[3] = f[3];
    }
  }
  // ... or those columns of 16 values.
  template <int kHalf>
  static __device__ __forceinline__ void values_operand(const uint32_t (&f)[4], uint32_t (&a)[4]) {
    if constexpr (C::k8BitKv) {
      const Pairs low = widen_alternate<C::kFormat>(f[kHalf]), high = widen_alternate<C::kFormat>(f[kHalf + 2]);
      a[0] = low.first, a[1] = low.second, a[2] = high.first, a[3] = high.second;
    } else {
      a[0] = f[0], a[1] = f[1], a[2] = f[2], a[3] = f[3];
    }
  }

  // Sums of even and of odd steps of 16 columns: two chains of products wait less than one.
  __device__ __forceinline__ void multiply_keys(Scores &s, int slot) const {
    constexpr int kLoads = kColumnTiles * kKeyTiles / kLoadTiles;
    float part[2][kKeyTiles][4] = {};
    const uint32_t keys = shared_k(slot) + swizzled<C::kPitch>(lane_ & 15, lane_ >> 4);
    uint32_t f[kAhead + 1][4];
    const auto load = [&](int n) {
      ldmatrix_x4(f[n % (kAhead + 1)], advance<C::kPitch>(keys, n / kKeyTiles) + n % kKeyTiles * 16 * C::kPitch);
    };
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int k = n / kKeyTiles * kLoadTiles;
      if (n + kAhead < kLoads) load(n + kAhead);
      uint32_t a[4];
      keys_operand<0>(f[n % (kAhead + 1)], a);
      mma_16816<Element>(part[k % 2][n % kKeyTiles], a, q_[k][0], q_[k][1]);
      if constexpr (kLoadTiles == 2) {
        keys_operand<1>(f[n % (kAhead + 1)], a);
        mma_16816<Element>(part[1][n % kKeyTiles], a, q_[k + 1][0], q_[k + 1][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) s[i][r] = part[0][i][r] + part[1][i][r];
  }

  // Of bytes: S of the queries and keys that they stand for.
  __device__ __forceinline__ void scale(Scores &s, int slot) const {
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = a_.k_descale.per_row ? factor_of(shared_k_factors(slot), i, half) : 1.f;
#pragma unroll
        for (int e = 0; e < 2; ++e) s[i][2 * half + e] *= scale_[e] * factor;
      }
  }
  // Of this lane's first or second key of a tile.
  __device__ __forceinline__ float factor_of(uint32_t factors, int tile, int half) const {
    return ld_shared_float(factors + (16 * tile + 8 * half + (opaque(lane_) >> 2)) * 4);
  }

  __device__ __forceinline__ void apply_terms(Scores &s, int key0) const {
    if (p_.softcap > 0) {
#pragma unroll
      for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) s[i][r] = capped(s[i][r], a_.raw);
    }
    if (p_.alibi_slopes != nullptr) {
      const int first =
          this->seqlen_k_ - this->tokens_ - key0 - (opaque(lane_) >> 2);  // how far it is to this lane's first key
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = min(2 * (opaque(lane_) & 3) + e, rows_ - 1);  // what lies beyond the last row is not stored
        const float slope =
            a_.raw.logit * p_.alibi_slopes[piece_.batch * p_.alibi_batch_stride + this->head_of(row) * p_.alibi_head_stride];
#pragma unroll
        for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
          for (int r = e; r < 4; r += 2)
            s[i][r] = fmaf(-slope, fabsf(static_cast<float>(first - 16 * i - 8 * (r / 2))), s[i][r]);
      }
    }
  }

  // All rows are of one token and see the same keys; what they do not see reads as zero.
  __device__ __forceinline__ void mask(Scores &s, int key0) const {
    const int first = key0 + (opaque(lane_) >> 2);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int key = first + 16 * i + 8 * (r / 2);
        if (key < warp_visible_.begin || key >= warp_visible_.end) s[i][r] = -CUDART_INF_F;
      }
  }

  __device__ __forceinline__ void raise_max(const Scores &s) {
    float top[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      top[e] = fmaxf(s[0][e], s[0][e + 2]);
#pragma unroll
      for (int i = 1; i < kKeyTiles; ++i) top[e] = fmaxf(top[e], fmaxf(s[i][e], s[i][e + 2]));
      top[e] *= exponent_scale();
    }
    if (!__any_sync(~0u, top[0] > max_[0] || top[1] > max_[1])) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], distance));
      const float raised = fmaxf(max_[e], top[e]);
      const float factor = exp2_approx(max_[e] - raised);  // 1 for rows that do not grow: their bits stay
      max_[e] = raised;
      sum_[e] *= factor;
      if (!C::k8BitKv || !a_.v_descale.per_row) multiply_row(e, factor);
    }
  }
  __device__ __forceinline__ void multiply_row(int e, float factor) {
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j) {
      out_[j][e] *= factor;
      out_[j][e + 2] *= factor;
    }
  }

  // Of bytes whose values have factors of their own: the unit of out (rows_by_keys.cuh), at least 2^power times that of the maximum ...
  __device__ __forceinline__ void raise_unit_to(float power) {
    if (!__any_sync(~0u, !(max_[0] + power <= unit_[0]) || !(max_[1] + power <= unit_[1]))) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) raise_row_to(e, max_[e] + power);
  }
  // ... or as high as the largest weight of the tile.
  __device__ __forceinline__ void raise_unit(const Scores &s, int slot) {
    float top[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float more = __log2f(fabsf(factor_of(shared_v_factors(slot), i, half)));
#pragma unroll
        for (int e = 0; e < 2; ++e) top[e] = fmaxf(top[e], fmaf(s[i][2 * half + e], exponent_scale(), more));
      }
    if (!__any_sync(~0u, top[0] > unit_[0] || top[1] > unit_[1])) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], distance));
      raise_row_to(e, top[e]);
    }
  }
  __device__ __forceinline__ void raise_row_to(int e, float to) {
    const float raised = fmaxf(unit_[e], to);
    multiply_row(e, exp2_approx(unit_[e] - raised));
    unit_[e] = raised;
  }

  // P = 2^(S - m), rounded to the operand of the next product, times the factors of values in the unit of out.
  template <Factors kFactors>
  __device__ __forceinline__ void weigh(const Scores &s, int slot, uint32_t (&w)[kKeyTiles][2]) {
    const float c = exponent_scale();
    float in_unit[2];
    if constexpr (kFactors == Factors::near) {
#pragma unroll
      for (int e = 0; e < 2; ++e) in_unit[e] = exp2_approx(max_[e] - unit_[e]);
    }
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float factor = 1.f, more = 0.f, p[2];
        if constexpr (kFactors != Factors::none) factor = factor_of(shared_v_factors(slot), i, half);
        if constexpr (kFactors == Factors::any) more = __log2f(fabsf(factor));
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float x = s[i][2 * half + e];
          p[e] = exp2_approx(fmaf(x, c, -max_[e]));
          sum_[e] += p[e];
          if constexpr (kFactors == Factors::near) p[e] *= in_unit[e] * factor;
          if constexpr (kFactors == Factors::any) p[e] = copysignf(exp2_approx(fmaf(x, c, more) - unit_[e]), factor);
        }
        w[i][half] = transposed(pack2<Element>(p[0], p[1]));
      }
  }
  __device__ __forceinline__ void weigh(const Scores &s, int slot, uint32_t (&w)[kKeyTiles][2]) {
    if (!C::k8BitKv || !a_.v_descale.per_row) {
      weigh<Factors::none>(s, slot, w);
    } else if (const uint32_t top = top_factor<C::kKeys>(shared_v_factors(slot), opaque(lane_)); top != 0) {
      raise_unit_to(power_above(top));
      weigh<Factors::near>(s, slot, w);
    } else {
      raise_unit(s, slot);
      weigh<Factors::any>(s, slot, w);
    }
  }

  __device__ __forceinline__ void add_values(const Scores &s, int slot) {
    constexpr int kColumnLoads = kColumnTiles / kLoadTiles, kLoads = kColumnLoads * kKeyTiles;
    const uint32_t values = shared_v(slot) + swizzled<C::kPitch>((lane_ & 7) + ((lane_ >> 4) << 3), (lane_ >> 3) & 1);
    uint32_t f[kAhead + 1][4], w[kKeyTiles][2];
    const auto load = [&](int n) {
      ldmatrix_x4_trans(f[n % (kAhead + 1)], advance<C::kPitch>(values, n % kColumnLoads) + n / kColumnLoads * 16 * C::kPitch);
    };
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n);
    weigh(s, slot, w);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int j = n % kColumnLoads * kLoadTiles, i = n / kColumnLoads;
      if (n + kAhead < kLoads) load(n + kAhead);
      uint32_t a[4];
      values_operand<0>(f[n % (kAhead + 1)], a);
      mma_16816<Element>(out_[j], a, w[i][0], w[i][1]);
      if constexpr (kLoadTiles == 2) {
        values_operand<1>(f[n % (kAhead + 1)], a);
        mma_16816<Element>(out_[j + 1], a, w[i][0], w[i][1]);
      }
    }
  }

  uint32_t q_[kColumnTiles][2];
  float out_[kColumnTiles][4], max_[2], sum_[2];  // of this lane's two rows; the sum of its own keys
  float scale_[2], unit_[2];                      // of bytes
};

}  // namespace fa::cuda::decode
