// SPDX-License-Identifier: Apache-2.0
// S^T = K Q^T orientation of the decode kernels, for up to eight rows: the query heads of one KV head, one token per sequence.
// One warp computes S^T = K Q^T and out^T += V^T P^T with keys and out columns in MMA tiles of 16 (M) and the eight rows as N.
// Compared with orientation_qk.cuh, whose tiles of 16 rows would be half empty, this halves the MMAs, the registers for out and
// the fragment loads. Q stays in registers.
//
//   S^T tile, lane 4 g + c     keys g and g + 8, rows 2 c and 2 c + 1
//   out^T tile, lane 4 g + c   columns g and g + 8, the same rows; with 8-bit KV columns 2 g and 2 g + 1 (kv_8bit.cuh)
//
// softmax_8bit.cuh explains how the descales of 8-bit KV enter.
#pragma once

#include <math_constants.h>

#include "cuda/common/softmax_8bit.cuh"
#include "cuda/kernels/decode/cta.cuh"

namespace fa::cuda::decode {

template <class C>
class OrientationKq {
 public:
  using Element = typename C::Element;
  static constexpr int kKeyTiles = C::kKvTile / 16, kColumnTiles = C::kD / 16, kOutTiles = C::kDv / 16;
  static constexpr int kTilesPerLoad = C::k8BitKv ? 2 : 1;  // tiles of 16 columns per ldmatrix
  static_assert(C::kWarpRows == 8);

  using Scores = float[kKeyTiles][4];
  using Fragment = KqFragment<kKeyTiles>;  // of S^T
  using OutFragment = KqFragment<kOutTiles>;

  __device__ __forceinline__ explicit OrientationKq(const Cta<C> &cta) : cta_(cta) {}

  // Before the first KV step. load_q_fragments() follows when Q has arrived.
  __device__ __forceinline__ void init_accumulators() {
#pragma unroll
    for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) out_[j][r] = 0.f;
    softmax_.reset();
    reference_.u[0] = reference_.u[1] = kNoMax;
  }
  __device__ __forceinline__ void load_q_fragments() {
    if constexpr (C::k8BitKv) {
      prepare_q<C::kRows, C::kD, C::kThreads>(cta_.smem, cta_.smem_row_scale(), cta_.problem.q.dtype == Dtype::bf16);
      __syncthreads();
#pragma unroll
      for (int e = 0; e < 2; ++e)
        row_scale_[e] = ld_shared_float(cta_.smem_row_scale() + (cta_.warp_row0 + 2 * (cta_.lane_id & 3) + e) * 4);
    }
    const uint32_t q = smem_q(cta_.lane_id);
#pragma unroll
    for (int k = 0; k < kHeldQTiles; k += 2) {
      uint32_t f[4];
      ldmatrix_x4(f, advance<kQPitch>(q, k));
#pragma unroll
      for (int n = 0; n < 4; ++n) q_[k + n / 2][n % 2] = f[n];
    }
  }

  __device__ __forceinline__ void process_kv_tile(int stage, int key0) {
    Scores s;
    compute_qk(s, stage);
    if constexpr (C::k8BitKv)
      apply_k_descales<Fragment>(s, row_scale_, cta_.params.k_descale.per_row, cta_.smem_k_descale(stage),
                                 opaque(cta_.lane_id));
    score_mods(s, key0);
    // All rows see the same keys. Keys outside are zeros in shared memory, so V needs no NaN-safe path.
    if (key0 < cta_.warp_interior.begin || key0 + C::kKvTile > cta_.warp_interior.end)
      mask_rows<Fragment>(s, key0, cta_.lane_id, [&](int) { return cta_.warp_visible; });
    const bool raised = softmax_.update_max(s, exponent_scale(cta_.problem), /*threshold=*/0.f);
    if (raised && !has_reference()) scale_rows<OutFragment>(out_, softmax_.rescale);
    accumulate_pv(s, stage);
  }

  // Writes this warp's out, maxima and row sums to shared memory.
  __device__ __forceinline__ void store_partial_out() {
    const int lane = opaque(cta_.lane_id), row = cta_.warp_row0 + 2 * (lane & 3);
    softmax_.reduce_sums();
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (Fragment::leads(lane))
        st_shared_float2(cta_.smem_row_stats(cta_.kv_group, row + e), {softmax_.max[e], softmax_.sum[e]});
    if constexpr (C::k8BitKv) {
      float scale[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        scale[e] = has_reference() ? exp2_approx(reference_.u[e] - softmax_.max[e]) : cta_.head_descale(cta_.params.v_descale);
      scale_rows<OutFragment>(out_, scale);
#pragma unroll
      for (int e = 0; e < 2; ++e)
#pragma unroll
        for (int j = 0; j < kOutTiles; ++j)
          st_shared_float2(out_address(row + e, j, lane >> 4) + (lane >> 2 & 3) * 8, {out_[j][e], out_[j][e + 2]});
    } else {
#pragma unroll
      for (int j = 0; j < kOutTiles; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          st_shared_float(cta_.smem_out(cta_.kv_group, row + r % 2, 2 * j + r / 2) + (lane >> 2) * 4, out_[j][r]);
    }
  }

 private:
  // Columns 8 (2 tile + half) of a row of out in shared memory. Wide heads have no registers for an address of each tile: the swizzle
  // exchanges columns within two of them.
  __device__ __forceinline__ uint32_t out_address(int row, int tile, int half) const {
    if constexpr (C::kD <= 256) return cta_.smem_out(cta_.kv_group, row, 2 * tile + half);
    return cta_.smem_out(cta_.kv_group, row, 2 * (tile % 2) + half) + tile / 2 * 128;
  }

  const Cta<C> &cta_;
  // Column tiles of Q in registers. With 8-bit KV, wide heads have room for a quarter of them; the others are loaded for each KV tile.
  static constexpr int kHeldQTiles = C::k8BitKv && C::kD > 256 ? kColumnTiles / 8 * 2 : kColumnTiles;
  static constexpr int kQPitch = C::kD * 2;
  __device__ __forceinline__ uint32_t smem_q(int lane) const {
    return cta_.smem + swizzled<kQPitch>(cta_.warp_row0 + (lane & 7), lane >> 3);
  }
  // Fragments are loaded this many MMA steps ahead.
  static constexpr int kLoadsAhead = 3;

  // Left operand of S^T = K Q^T: 16 keys and the kHalf-th 16 of the columns that ldmatrix has loaded.
  template <int kHalf>
  static __device__ __forceinline__ void k_operand(const uint32_t (&f)[4], uint32_t (&a)[4]) {
    if constexpr (C::k8BitKv) {
      const HalfPairs low = widen_adjacent<C::kFormat>(f[2 * kHalf]), high = widen_adjacent<C::kFormat>(f[2 * kHalf + 1]);
      a[0] = low.first, a[1] = high.first, a[2] = low.second, a[3] = high.second;
    } else {
      a[0] = f[0], a[1] = f[1], a[2] = f[2], a[3] = f[3];
    }
  }
  // Left operand of out^T += V^T P^T: the kHalf-th 16 of those columns, of 16 keys.
  template <int kHalf>
  static __device__ __forceinline__ void v_operand(const uint32_t (&f)[4], uint32_t (&a)[4]) {
    if constexpr (C::k8BitKv) {
      const HalfPairs low = widen_even_odd<C::kFormat>(f[kHalf]), high = widen_even_odd<C::kFormat>(f[kHalf + 2]);
      a[0] = low.first, a[1] = low.second, a[2] = high.first, a[3] = high.second;
    } else {
      a[0] = f[0], a[1] = f[1], a[2] = f[2], a[3] = f[3];
    }
  }

  // S^T = K Q^T. Even and odd steps of 16 columns accumulate separately: two dependent chains of MMAs have less latency than
  // one.
  __device__ __forceinline__ void compute_qk(Scores &s, int stage) const {
    constexpr int kLoads = kColumnTiles * kKeyTiles / kTilesPerLoad;
    float part[2][kKeyTiles][4] = {};
    const uint32_t keys = cta_.smem_k(stage) + swizzled<C::kPitch>(cta_.lane_id & 15, cta_.lane_id >> 4);
    uint32_t f[kLoadsAhead + 1][4];
    const auto load = [&](int n) {
      ldmatrix_x4(f[n % (kLoadsAhead + 1)], advance<C::kPitch>(keys, n / kKeyTiles) + n % kKeyTiles * 16 * C::kPitch);
    };
#pragma unroll
    for (int n = 0; n < kLoadsAhead; ++n) load(n);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int k = n / kKeyTiles * kTilesPerLoad;
      if (n + kLoadsAhead < kLoads) load(n + kLoadsAhead);
      uint32_t a[4], q[4];
      if (k >= kHeldQTiles) {
        ldmatrix_x4(q, advance<kQPitch>(smem_q(opaque(cta_.lane_id)), k));
      } else {
#pragma unroll
        for (int m = 0; m < 2 * kTilesPerLoad; ++m) q[m] = q_[k + m / 2][m % 2];
      }
      k_operand<0>(f[n % (kLoadsAhead + 1)], a);
      mma_16816<Element>(part[k % 2][n % kKeyTiles], a, q[0], q[1]);
      if constexpr (kTilesPerLoad == 2) {
        k_operand<1>(f[n % (kLoadsAhead + 1)], a);
        mma_16816<Element>(part[1][n % kKeyTiles], a, q[2], q[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) s[i][r] = part[0][i][r] + part[1][i][r];
  }

  // Softcap and ALiBi. Rows beyond the last one are not stored. All rows belong to one token.
  __device__ __forceinline__ void score_mods(Scores &s, int key0) const {
    const int distance = cta_.seqlen_k - cta_.tokens - key0 - Fragment::first_key(opaque(cta_.lane_id));
    apply_score_mods<Fragment, kSoftcapAlibi>(
        s, cta_.problem, cta_.params.raw,
        [&](int r) {
          const int row = min(cta_.warp_row0 + Fragment::query(opaque(cta_.lane_id), r), cta_.rows - 1);
          return load_head_terms(cta_.problem, cta_.params.raw.logit, cta_.work_unit.batch, cta_.head_of(row));
        },
        [&](int) { return distance; });
  }

  // Whether P and out are relative to a reference of their own (softmax_8bit.cuh).
  __device__ __forceinline__ bool has_reference() const { return C::k8BitKv && cta_.params.v_descale.per_row; }

  // P, converted and transposed to the right operand of out^T += V^T P^T.
  __device__ __forceinline__ void exponentiate(Scores &s, int stage, uint32_t (&p)[kKeyTiles][2]) {
    bool has_p = false;
    if constexpr (C::k8BitKv) {
      if (has_reference()) {
        exponentiate_per_row<C::kKvTile, true, false>(softmax_, s, exponent_scale(cta_.problem), reference_,
                                                      cta_.smem_v_descale(stage), opaque(cta_.lane_id),
                                                      [&] { scale_rows<OutFragment>(out_, reference_.rescale); });
        has_p = true;
      }
    }
    if (!has_p)
      exponentiate_descaled<DescaleMode::none, false>(softmax_, s, exponent_scale(cta_.problem), reference_.u, 0, cta_.lane_id);
#pragma unroll
    for (int i = 0; i < kKeyTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) p[i][half] = movmatrix_transpose(pack2<Element>(s[i][2 * half], s[i][2 * half + 1]));
  }

  __device__ __forceinline__ void accumulate_pv(Scores &s, int stage) {
    constexpr int kColumnLoads = kOutTiles / kTilesPerLoad, kLoads = kColumnLoads * kKeyTiles;
    const uint32_t values =
        cta_.smem_v(stage) + swizzled<C::kPitch>((cta_.lane_id & 7) + ((cta_.lane_id >> 4) << 3), (cta_.lane_id >> 3) & 1);
    uint32_t f[kLoadsAhead + 1][4], p_frag[kKeyTiles][2];
    const auto load = [&](int n) {
      ldmatrix_x4_trans(f[n % (kLoadsAhead + 1)],
                        advance<C::kPitch>(values, n % kColumnLoads) + n / kColumnLoads * 16 * C::kPitch);
    };
#pragma unroll
    for (int n = 0; n < kLoadsAhead; ++n) load(n);
    exponentiate(s, stage, p_frag);
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int j = n % kColumnLoads * kTilesPerLoad, i = n / kColumnLoads;
      if (n + kLoadsAhead < kLoads) load(n + kLoadsAhead);
      uint32_t a[4];
      v_operand<0>(f[n % (kLoadsAhead + 1)], a);
      mma_16816<Element>(out_[j], a, p_frag[i][0], p_frag[i][1]);
      if constexpr (kTilesPerLoad == 2) {
        v_operand<1>(f[n % (kLoadsAhead + 1)], a);
        mma_16816<Element>(out_[j + 1], a, p_frag[i][0], p_frag[i][1]);
      }
    }
  }

  uint32_t q_[kHeldQTiles][2];
  float out_[kOutTiles][4];
  OnlineSoftmax<Fragment> softmax_;
  float row_scale_[2];               // 8-bit KV
  PvReference<Fragment> reference_;  // 8-bit KV
};

}  // namespace fa::cuda::decode
