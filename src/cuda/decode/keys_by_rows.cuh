// SPDX-License-Identifier: Apache-2.0
// Keys and rows of one warp of the decode kernels for up to eight rows, heads of a group that share one query each: S^T = K Q^T and
// out^T += V^T P^T, keys and columns of out in tiles of 16, rows in one of eight. Half of the products, of the registers for out and of the
// loads of rows_by_keys.cuh, whose tiles of 16 rows would be half empty. Q stays in registers.
//
//   tile of S^T, lane 4 g + c:   keys g and g + 8, rows 2 c and 2 c + 1;   of out^T: columns g and g + 8, the same rows
#pragma once

#include <math_constants.h>

#include "cuda/decode/results.cuh"

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
  static_assert(C::kRows == 8 && C::kRowWarps == 1 && !C::kOfBytes);

  using Base::Base;

 protected:
  using Base::a_;
  using Base::exponent_scale;
  using Base::key_warp_;
  using Base::lane_;
  using Base::p_;
  using Base::piece_;
  using Base::rows_;
  using Base::shared_;
  using Base::shared_k;
  using Base::shared_out;
  using Base::shared_sums;
  using Base::shared_v;
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
  }
  __device__ __forceinline__ void take_queries() {
    const uint32_t q = shared_ + swizzled<C::kPitch>(lane_ & 7, lane_ >> 3);
#pragma unroll
    for (int k = 0; k < kColumnTiles; k += 2) {
      uint32_t f[4];
      ldmatrix_x4(f, advance<C::kPitch>(q, k));
#pragma unroll
      for (int n = 0; n < 4; ++n) q_[k + n / 2][n % 2] = f[n];
    }
  }

  __device__ __forceinline__ void attend(int slot, int key0) {
    Scores s;
    multiply_keys(s, slot);
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
#pragma unroll
    for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        st_shared_float(shared_out(key_warp_, row + r % 2, 2 * j + r / 2) + (lane >> 2) * 4, out_[j][r]);
  }

 private:
  // Fragments are loaded so many tiles ahead of their products.
  static constexpr int kAhead = 3;

  // Sums of even and of odd steps of 16 columns: two chains of products wait less than one.
  __device__ __forceinline__ void multiply_keys(Scores &s, int slot) const {
    float part[2][kKeyTiles][4] = {};
    const uint32_t keys = shared_k(slot) + swizzled<C::kPitch>(lane_ & 15, lane_ >> 4);
    uint32_t f[kAhead + 1][4];
    const auto load = [&](int n) {
      ldmatrix_x4(f[n % (kAhead + 1)], advance<C::kPitch>(keys, n / kKeyTiles) + n % kKeyTiles * 16 * C::kPitch);
    };
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n);
#pragma unroll
    for (int n = 0; n < kColumnTiles * kKeyTiles; ++n) {
      const int k = n / kKeyTiles;
      if (n + kAhead < kColumnTiles * kKeyTiles) load(n + kAhead);
      mma_16816<Element>(part[k % 2][n % kKeyTiles], f[n % (kAhead + 1)], q_[k][0], q_[k][1]);
    }
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) s[i][r] = part[0][i][r] + part[1][i][r];
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
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        out_[j][e] *= factor;
        out_[j][e + 2] *= factor;
      }
    }
  }

  // P = 2^(S - m), rounded to the operand of the next product, and that product.
  __device__ __forceinline__ void add_values(const Scores &s, int slot) {
    const uint32_t values = shared_v(slot) + swizzled<C::kPitch>((lane_ & 7) + ((lane_ >> 4) << 3), (lane_ >> 3) & 1);
    uint32_t f[kAhead + 1][4], w[kKeyTiles][2];
    const auto load = [&](int n) {
      ldmatrix_x4_trans(f[n % (kAhead + 1)], advance<C::kPitch>(values, n % kColumnTiles) + n / kColumnTiles * 16 * C::kPitch);
    };
#pragma unroll
    for (int n = 0; n < kAhead; ++n) load(n);
    const float c = exponent_scale();
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i) {
      float e[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        e[r] = exp2_approx(fmaf(s[i][r], c, -max_[r % 2]));
        sum_[r % 2] += e[r];
      }
      w[i][0] = transposed(pack2<Element>(e[0], e[1]));
      w[i][1] = transposed(pack2<Element>(e[2], e[3]));
    }
#pragma unroll
    for (int n = 0; n < kColumnTiles * kKeyTiles; ++n) {
      if (n + kAhead < kColumnTiles * kKeyTiles) load(n + kAhead);
      mma_16816<Element>(out_[n % kColumnTiles], f[n % (kAhead + 1)], w[n / kColumnTiles][0], w[n / kColumnTiles][1]);
    }
  }

  uint32_t q_[kColumnTiles][2];
  float out_[kColumnTiles][4], max_[2], sum_[2];  // of this lane's two rows; the sum of its own keys
};

}  // namespace fa::cuda::decode
