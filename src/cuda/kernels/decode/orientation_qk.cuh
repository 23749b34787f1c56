// SPDX-License-Identifier: Apache-2.0
// S = Q K^T orientation of the decode kernels: one warp computes S = Q K^T and out += P V, rows of queries in MMA tiles of 16.
// Sequences with one token and at most eight rows have orientation_kq.cuh.
//
// 8-bit KV is widened to fp16 (kv_8bit.cuh); softmax_8bit.cuh explains its descales.
#pragma once

#include <math_constants.h>

#include "cuda/common/nan_safe.cuh"
#include "cuda/common/softmax_8bit.cuh"
#include "cuda/kernels/decode/cta.cuh"

namespace fa::cuda::decode {

template <class C>
class OrientationQk {
 public:
  using Element = typename C::Element;
  static constexpr int kMt = C::kWarpRows / 16, kNt = C::kKvTile / 8, kDt = C::kD / 8, kPSteps = C::kKvTile / 16;
  // Whether DescaleMode::similar exists: with more rows per warp there are no registers for it.
  static constexpr bool kHasSimilarMode = kMt == 1;

  using Scores = Accumulator<kMt, kNt>;
  using Fragment = QkFragment<kMt, kNt>;  // of S
  using OutFragment = QkFragment<kMt, kDt>;

  // The r-th query row of this lane, counted from the CTA's first row.
  __device__ __forceinline__ int row_of(int r) const { return cta_.warp_row0 + Fragment::query(opaque(cta_.lane_id), r); }

  __device__ __forceinline__ explicit OrientationQk(const Cta<C> &cta) : cta_(cta) {}

  // Before the first KV step. load_q_fragments() follows when Q has arrived.
  __device__ __forceinline__ void init_accumulators() {
    clear<kMt, kDt>(out_);
    softmax_.reset();
  }
  __device__ __forceinline__ void load_q_fragments() {
    if constexpr (C::k8BitKv) {
      prepare_q<C::kRows, C::kD, C::kThreads>(cta_.smem, cta_.smem_row_scale(), cta_.problem.q.dtype == Dtype::bf16);
#pragma unroll
      for (int r = 0; r < Fragment::kRows; ++r)
        if (Fragment::leads(opaque(cta_.lane_id))) st_shared_float(smem_reference(r), kNoMax);
      __syncthreads();
    }
  }

  __device__ __forceinline__ void process_kv_tile(int stage, int key0) {
    Scores s;
    if constexpr (C::k8BitKv) {
      mma_nt_8bit<C::kFormat, C::kD, kMt, kNt>(s, cta_.smem, cta_.row_warp * C::kWarpRows, cta_.smem_k(stage));
      apply_descales(s, stage);
    } else {
      mma_nt<Element, C::kD, kMt, kNt>(s, cta_.smem, cta_.row_warp * C::kWarpRows, cta_.smem_k(stage), 0);
    }
    cta_.template apply_row_score_mods<Fragment>(s, key0);
    const bool masked = key0 < cta_.warp_interior.begin || key0 + C::kKvTile > cta_.warp_interior.end;
    if (masked) {
      mask_rows<Fragment>(s, key0, cta_.lane_id,
                          [&](int r) { return keys_of_query(cta_.diagonal(), cta_.token_of(row_of(r))); });
    }
    const bool raised = softmax_.update_max(s, exponent_scale(cta_.problem), /*threshold=*/0.f);
    if (raised && !has_reference()) scale_rows<OutFragment>(out_, softmax_.rescale);
    // NaN-safe path. Keys that no token sees are zeros in shared memory. A key that only some tokens see may hold NaN or Inf in
    // V, and 0 times that is not 0.
    const bool partly_seen = masked && cta_.tokens > 1;
    PFragment<kMt, kPSteps> p;
    if constexpr (C::k8BitKv) {
      exponentiate_8bit(s, stage);
#pragma unroll
      for (int i = 0; i < kMt; ++i) convert_p<Element>(s[i], p[i]);
      if (partly_seen && __any_sync(~0u, tile_has_nan<C::kFormat, C::kTileBytes>(cta_.smem_v(stage), cta_.lane_id))) {
        mma_rs_8bit_nan_safe<C::kFormat, kMt, kPSteps, kDt>(out_, p, cta_.smem_v(stage));
      } else {
        mma_rs_8bit<C::kFormat, kMt, kPSteps, kDt>(out_, p, cta_.smem_v(stage));
      }
    } else if (partly_seen &&
               __any_sync(~0u, loaded_part_has_nonfinite<Element, C::kKvTile, C::kD, 32>(cta_.smem_v(stage), cta_.lane_id))) {
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int k = 0; k < kPSteps; ++k)
          softmax_.template exponentiate_step<Element, true>(s[i], i, k, exponent_scale(cta_.problem), softmax_.sum, p[i][k]);
      mma_rs_nan_safe<Element, C::kPitch, kMt, kPSteps, kDt>(out_, p, cta_.smem_v(stage));
    } else {
      mma_rs_with<Element, C::kPitch, kPSteps, 1, kMt, kDt>(out_, cta_.smem_v(stage), 0, [&](int k, uint32_t(&a)[kMt][4]) {
#pragma unroll
        for (int i = 0; i < kMt; ++i)
          softmax_.template exponentiate_step<Element, true>(s[i], i, k, exponent_scale(cta_.problem), softmax_.sum, a[i]);
      });
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Scores and softmax
  // ------------------------------------------------------------------------------------------------------------------

  // 8-bit KV.
  __device__ __forceinline__ void apply_descales(Scores &s, int stage) const {
    const int lane = opaque(cta_.lane_id);
    float row_scale[Fragment::kRows];
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r)
      row_scale[r] = ld_shared_float(cta_.smem_row_scale() + (cta_.warp_row0 + Fragment::query(lane, r)) * 4);
    apply_k_descales<Fragment>(s, row_scale, cta_.params.k_descale.per_row, cta_.smem_k_descale(stage), lane);
  }
  __device__ __forceinline__ void exponentiate_8bit(Scores &s, int stage) {
    PvReference<Fragment> reference;
    if (!has_reference()) {
      exponentiate_descaled<DescaleMode::none, true>(softmax_, s, exponent_scale(cta_.problem), reference.u, 0, cta_.lane_id);
      return;
    }
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) reference.u[r] = ld_shared_float(smem_reference(r));
    exponentiate_per_row<C::kKvTile, kHasSimilarMode, true>(softmax_, s, exponent_scale(cta_.problem), reference,
                                                            cta_.smem_v_descale(stage), opaque(cta_.lane_id), [&] {
                                                              __syncwarp();  // all lanes have read the reference
#pragma unroll
                                                              for (int r = 0; r < Fragment::kRows; ++r)
                                                                if (Fragment::leads(opaque(cta_.lane_id)))
                                                                  st_shared_float(smem_reference(r), reference.u[r]);
                                                              scale_rows<OutFragment>(out_, reference.rescale);
                                                              __syncwarp();
                                                            });
  }
  // Whether P and out are relative to a reference of their own. It is kept in shared memory, in the place that receives the
  // row's maximum and sum in the epilogue.
  __device__ __forceinline__ bool has_reference() const { return C::k8BitKv && cta_.params.v_descale.per_row; }
  __device__ __forceinline__ uint32_t smem_reference(int r) const { return cta_.smem_row_stats(cta_.kv_group, row_of(r)); }

  // Writes this warp's out, maxima and row sums to shared memory.
  __device__ __forceinline__ void store_partial_out() {
    const int lane = opaque(cta_.lane_id);
    softmax_.reduce_sums();
    if constexpr (C::k8BitKv) {
      float scale[Fragment::kRows];
#pragma unroll
      for (int r = 0; r < Fragment::kRows; ++r)
        scale[r] = has_reference() ? exp2_approx(ld_shared_float(smem_reference(r)) - softmax_.max[r])
                                   : cta_.head_descale(cta_.params.v_descale);
      scale_rows<OutFragment>(out_, scale);
      __syncwarp();  // all lanes have read the reference
    }
#pragma unroll
    for (int r = 0; r < Fragment::kRows; ++r) {
      if (cta_.warp_row0 + 8 * r >= cta_.rows) continue;
      const int i = r / 2, row = cta_.warp_row0 + Fragment::query(lane, r);
      if (Fragment::leads(lane)) st_shared_float2(cta_.smem_row_stats(cta_.kv_group, row), {softmax_.max[r], softmax_.sum[r]});
      if constexpr (C::k8BitKv) {
        // A lane has four neighbours of each 16 columns: the even ones are in one MMA tile, the odd ones in the next.
#pragma unroll
        for (int j = 0; j < kDt; j += 2) {
          const auto bits = [&](int n, int e) { return __float_as_uint(out_[i][j + n][2 * (r % 2) + e]); };
          st_shared_16(cta_.smem_out(cta_.kv_group, row, j + (lane >> 1 & 1)) + (lane & 1) * 16, bits(0, 0), bits(1, 0),
                       bits(0, 1), bits(1, 1));
        }
      } else {
#pragma unroll
        for (int j = 0; j < kDt; ++j)
          st_shared_float2(cta_.smem_out(cta_.kv_group, row, j) + (lane & 3) * 8,
                           {out_[i][j][2 * (r % 2)], out_[i][j][2 * (r % 2) + 1]});
      }
    }
  }

 private:
  const Cta<C> &cta_;
  Accumulator<kMt, kDt> out_;
  OnlineSoftmax<Fragment> softmax_;
};

}  // namespace fa::cuda::decode
