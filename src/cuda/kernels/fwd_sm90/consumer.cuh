// SPDX-License-Identifier: Apache-2.0
// The registers of one consumer warpgroup and its arithmetic between the wgmmas: softmax with lazy rescaling, score_mod, masks, the NaN-safe
// path, and the epilogue. The main loop is in forward.cuh.
//
// A warpgroup owns 64 rows. Per thread, in the layout of a wgmma accumulator (rows lane / 4 and lane / 4 + 8 of the warp's 16):
//   s_         S, then P in fp32   64 x kKeys
//   p_operand_ P as A operand      64 x kKeys, Element
//   out_       accumulator of out  64 x kDv, fp32
#pragma once

#include "cuda/common/epilogue.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

// Where the sum of a lane's P in one KV tile exceeds this, the maximum is raised: 2^kRescaleThreshold.
constexpr float kMaxRowSum = 256.0f;
constexpr float kLargestE4m3 = 448.0f;

template <class C>
class ForwardConsumer : public ForwardCta<C> {
 public:
  using Base = ForwardCta<C>;
  using typename Base::Element;
  using typename Base::WorkTile;
  using Out = typename C::Out;
  static constexpr int kKeys = C::kKeys;
  using Fragment = QkFragment<1, kKeys / 8>;         // of S, of one warp
  static constexpr int kPvSteps = kKeys / C::kMmaK;  // wgmmas of one out += P V
  // fp8: e4m3 has few small numbers. P is made 2^kPExponent larger, by a maximum that much smaller. kPExponent is the largest for which a
  // lane's sum of one row, kKeys / 4 numbers of at most 2^kPExponent, stays within e4m3.
  static constexpr int kPExponent = C::kFp8 ? (kKeys > 96 ? 3 : 4) : 0;
  static constexpr float kMaxLaneSum = C::kFp8 ? kLargestE4m3 : kMaxRowSum;
  static_assert(!C::kFp8 || (kKeys / 4 << kPExponent) <= kLargestE4m3);

  using Base::Base;

 protected:
  using Base::a_, Base::lane_, Base::p_, Base::warp_;

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int row_of(const WorkTile &t, int r) const {
    return t.row0 + wg_ * 64 + warp_ * 16 + (lane_ >> 2) + 8 * r;
  }
  // The factor from S (in the unit of q k^T) to exponents of two.
  __device__ __forceinline__ float scale() const {
    if constexpr (C::kFp8) return scale_;
    return p_.softmax_scale * kLog2e;
  }
  // The same for a given work tile. fp8: with the descales of q and k. A masked score is -inf, which must not be multiplied by 0 or NaN: for
  // such descales the factor is tiny, and finalize_rows puts NaN where it belongs.
  __device__ __forceinline__ float scale_of(const WorkTile &t) const {
    if constexpr (!C::kFp8) return scale();
    const float x = t.qk_descale * p_.softmax_scale * kLog2e;
    return x > 0.f ? x : 1e-30f;
  }
  __device__ __forceinline__ void set_scale(const WorkTile &t) { scale_ = scale_of(t); }

  // Softcap and ALiBi. The tile's first key is key0.
  __device__ __forceinline__ void apply_score_mod(const WorkTile &t, int key0) {
    const int diagonal = t.seqlen_k - t.seqlen_q - key0 - Fragment::first_key(lane_);
    apply_score_mods<Fragment>(
        s_, p_, a_.raw, [&](int) { return t.alibi; }, [&](int r) { return row_of(t, r) + diagonal; });
  }
  // The exponent of two of one pair, for the NaN-safe path.
  __device__ __forceinline__ float logit(const WorkTile &t, float score, int row, int key) const {
    if constexpr (C::kHasScoreMod) {
      if (p_.softcap > 0) score = Softcap(a_.raw).forward(score);
      score = Alibi::forward(score, t.alibi, static_cast<float>(row + t.seqlen_k - t.seqlen_q - key));
    }
    return score * scale_of(t);
  }

  // Raises the maximum if necessary, and turns S into P in place. Returns whether out must be multiplied by softmax_.rescale.
  __device__ __forceinline__ bool update_max_and_exponentiate() {
    const bool rescaled = softmax_.update_max(
        s_, [&](int) { return scale(); }, kRescaleThreshold, kPExponent);
    float sum[2];
    exponentiate(sum);
    softmax_.sum[0] += sum[0];
    softmax_.sum[1] += sum[1];
    return rescaled;
  }

  // Turns S into P in place with the maximum as it is. `sum`: the sums of P over this lane's columns of its two rows.
  __device__ __forceinline__ void exponentiate(float (&sum)[2]) {
    softmax_.template exponentiate</*kMasked=*/false>(
        s_, [&](int) { return scale(); }, sum);
  }

  // Called when exponentiate() has found sums that are too large or NaN: the maximum was too small by more than kRescaleThreshold. Raises the
  // maximum, and rescales P, `sum` and the row sum; the caller rescales out. Where P does not fit fp32 it is computed again from S.
  __device__ __forceinline__ void rescale_p(const WorkTile &t, int key0, float (&sum)[2]) {
    float new_max[2];
    bool overflowed = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = 0.f;  // the largest P that is not NaN
#pragma unroll
      for (int j = 0; j < kKeys / 4; ++j) top = fmaxf(top, s_[4 * (j / 2) + 2 * r + (j & 1)]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      // The maximum is raised by the exponent of the largest P, but by at most 120: exp2_approx of -120 is still a normal number.
      new_max[r] =
          softmax_.max[r] + static_cast<float>(min(max((__float_as_int(top) >> 23) - (127 + max(kPExponent - 1, 0)), 0), 120));
      softmax_.rescale[r] = exp2_approx(softmax_.max[r] - new_max[r]);
      // P is infinite, or max_ is so large that adding to it moves it in coarse steps.
      overflowed |= !(fmaxf(top, sum[r]) * softmax_.rescale[r] <= kMaxLaneSum);
    }
    if (__any_sync(~0u, overflowed)) {
      softmax_.rescale[0] = softmax_.rescale[1] = 1.f;
      sum[0] = sum[1] = 0.f;
      recompute_scores(t, key0);
      update_max_and_exponentiate();
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        softmax_.max[r] = new_max[r];
        softmax_.sum[r] *= softmax_.rescale[r];
        sum[r] *= softmax_.rescale[r];
      }
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j) s_[j] *= softmax_.rescale[(j >> 1) & 1];
    }
  }

  // Recomputes S of an unmasked KV tile from global memory, with the lanes' work divided as in nan_safe_recompute.
  __device__ __forceinline__ void recompute_scores(const WorkTile &t, int key0) {
    const Element *q = q_row_of_lane(t);
#pragma unroll 1
    for (int n = 0; n < kKeys; ++n) {
      const float x = dot(q, row_of_tensor<Element>(p_.k, t.k_batch, t.k_row + key0 + n, t.head_k));
      const int at = n - 2 * (lane_ & 3);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float score = __shfl_sync(~0u, x, ((lane_ >> 2) + 8 * r) * 2);
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (at == 8 * j + e) s_[4 * j + 2 * r + e] = score;
      }
    }
  }

  __device__ __forceinline__ KeyRange keys_of_row(const WorkTile &t, int row) const {
    return keys_of_query({a_.limits, t.seqlen_q, t.seqlen_k}, row);
  }
  // Which of the KV tile's keys, from key0 on, this lane's two rows see: one bit for each column that the lane holds.
  __device__ __forceinline__ void find_visible(const WorkTile &t, int key0, uint32_t (&visible)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) visible[r] = visible_bits<Fragment>(keys_of_row(t, row_of(t, r)), key0, lane_);
  }
  __device__ __forceinline__ void apply_mask(const uint32_t (&visible)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) mask_row<Fragment>(s_, r, visible[r]);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // NaN-safe path: NaN and Inf in rows of V that a mask hides
  // ------------------------------------------------------------------------------------------------------------------

  // P of a masked pair is 0, and 0 times NaN or Inf is NaN. Called when out holds the masked KV tiles of the work tile and nothing else.
  __device__ __forceinline__ void make_nan_safe(const WorkTile &t) {
    if (__any_sync(~0u, nan_if_nonfinite(out_) != 0.f)) nan_safe_recompute(t);
  }

  // Recomputes out of the masked KV tiles from global memory, over the visible pairs only. Lane l computes the dot products of row l / 2 of
  // this warp with K, over half of the columns; then every lane multiplies V by the P of its own two rows.
  __device__ __forceinline__ void nan_safe_recompute(const WorkTile &t) {
    const int row = row_of(t, 0) - (lane_ >> 2) + (lane_ >> 1);
    const KeyRange keys = keys_of_row(t, row);
    const int max_lane = ((lane_ >> 1) & 7) * 4;  // a lane that holds the maximum of row l / 2
    const float low = __shfl_sync(~0u, out_max_[0], max_lane), high = __shfl_sync(~0u, out_max_[1], max_lane);
    const float max = (lane_ >> 4) ? high : low;
    const Element *q = q_row_of_lane(t);
#pragma unroll
    for (int j = 0; j < C::kDv / 2; ++j) out_[j] = 0.f;
#pragma unroll 1
    for (int i = t.begin[wg_]; i < t.masked_end[wg_]; ++i) {
      const int key0 = t.kv_tile(i) * kKeys;
#pragma unroll 1
      for (int key = key0; key < min(key0 + kKeys, t.seqlen_k); ++key) {
        const Element *v = row_of_tensor<Element>(p_.v, t.k_batch, t.k_row + key, t.head_k);
        const float x = dot(q, row_of_tensor<Element>(p_.k, t.k_batch, t.k_row + key, t.head_k));
        const bool lane_visible = row < t.seqlen_q && key >= keys.begin && key < keys.end;
        const float p = rounded<Element>(exp2_approx(logit(t, x, row, key) - max));
        float p_row[2];
        bool visible[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int source_lane = ((lane_ >> 2) + 8 * r) * 2;
          p_row[r] = __shfl_sync(~0u, p, source_lane);
          visible[r] = __shfl_sync(~0u, static_cast<int>(lane_visible), source_lane) != 0;
        }
        v += 2 * (lane_ & 3);
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
              if (visible[r]) out_[4 * j + 2 * r + e] = fmaf(p_row[r], x, out_[4 * j + 2 * r + e]);
            }
          }
        }
      }
    }
  }

  // Row lane_ / 2 of this warp's rows of Q.
  __device__ __forceinline__ const Element *q_row_of_lane(const WorkTile &t) const {
    const int row = t.row0 + wg_ * 64 + warp_ * 16 + (lane_ >> 1);
    return row_of_tensor<Element>(p_.q, t.q_batch, t.q_row - t.row0 + min(row, t.seqlen_q - 1), t.head_q);
  }
  __device__ __forceinline__ float dot(const Element *q, const Element *k) const {
    float x = 0.f;
#pragma unroll 1
    for (int column = lane_ & 1; column < p_.head_dim; column += 2) x = fmaf(element(q, column), element(k, column), x);
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

  // ------------------------------------------------------------------------------------------------------------------
  // Epilogue
  // ------------------------------------------------------------------------------------------------------------------

  // Completes the row sums, writes lse, and sets out_scale_, by which out is still to be multiplied.
  __device__ __forceinline__ void finalize_rows(const WorkTile &t) {
    softmax_.reduce_sums();
    if constexpr (C::kFp8) {
#pragma unroll
      for (int r = 0; r < 2; ++r) promoted_max_[r] = exp2_approx(promoted_max_[r] - softmax_.max[r]);
    }
    float lse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowResult result = finalize_row(softmax_.max[r], softmax_.sum[r], sink_of(p_, t.head_q));
      out_scale_[r] = result.factor;
      lse[r] = result.lse;
    }
    if constexpr (C::kFp8) {
      // 0, or NaN where the product of the descales is negative, infinite or NaN.
      const float nan_or_zero = t.qk_descale < 0.f ? CUDART_NAN_F : t.qk_descale * 0.f;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (lse[r] == -CUDART_INF_F) continue;
        out_scale_[r] = fmaf(out_scale_[r], t.v_descale, nan_or_zero);
        lse[r] += nan_or_zero;
      }
    }
    if (p_.lse.data != nullptr && Fragment::leads(lane_)) {
      const int row = row_of(t, 0);
      float *dst = lse_at(t, row);
      if (row < t.seqlen_q) *dst = lse[0];
      if (row + 8 < t.seqlen_q) dst[8 * p_.lse.seq_stride] = lse[1];
    }
  }

  __device__ __forceinline__ void store_rows(const WorkTile &t) const {
    if (C::kOutAtoms > 0 && a_.tma_out && t.row0 + wg_ * 64 + 64 <= t.seqlen_q) {
      store_rows_tma(t);
    } else if (a_.vector_out) {
      store_rows_direct<true>(t);
    } else {
      store_rows_direct<false>(t);
    }
  }
  // Each warp stages its 16 rows in shared memory of its own and stores them by TMA. It waits neither for global memory nor for another warp.
  __device__ __forceinline__ void store_rows_tma(const WorkTile &t) const {
    const uint32_t rows = this->out_tile(wg_) + warp_ * 16 * 128;
    // stmatrix: lane l gives the address of row l % 8 of matrix l / 8. Matrices 0 and 1 are rows 0 to 7 and 8 to 15 of eight columns, 2 and 3
    // the same rows of the next eight columns.
    const uint32_t row_address = rows + (lane_ & 15) * 128, vector = lane_ >> 4;
    constexpr int kColumns = C::kOutAtoms * 64;
#pragma unroll
    for (int first = 0; first < C::kDv; first += kColumns) {
      if (lane_ == 0) bulk_wait_group_read();  // until TMA has read the previous contents
      __syncwarp();
#pragma unroll
      for (int column = 0; column < min(kColumns, C::kDv - first); column += 16) {
        const int j = (first + column) / 2;
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x[n] = pack2<Out>(out_[j + 2 * n] * out_scale_[n & 1], out_[j + 2 * n + 1] * out_scale_[n & 1]);
        stmatrix_x4(row_address + column / 64 * 64 * 128 + (((column % 64 / 8 + vector) ^ (lane_ & 7)) << 4), x[0], x[1], x[2],
                    x[3]);
      }
      fence_proxy_async();
      __syncwarp();
      if (lane_ == 0) {
#pragma unroll
        for (int s = 0; s < C::kOutAtoms; ++s)
          tma_store_4d(&a_.out_map, rows + s * 64 * 128, first + s * 64, t.q_row + wg_ * 64 + warp_ * 16, t.head_q, t.q_batch);
        bulk_commit_group();
      }
    }
  }
  // ------------------------------------------------------------------------------------------------------------------
  // fp8: promotion of out
  // ------------------------------------------------------------------------------------------------------------------

  // The tensor cores keep 14 bits of a sum of fp8 products and truncate the rest, so a long sum of one sign loses precision. Every
  // kPromotionInterval KV tiles the accumulator is added to a promoted sum and starts again from zero. The promoted sum is bf16 and added
  // with bf16x2 instructions. It lies in the staging memory of out, eight numbers a lane in each 16-byte vector; every warp has its own part.
  static constexpr int kPromotionInterval = 1536 / kKeys;
  __device__ __forceinline__ uint32_t promoted_vector(int vector) const {
    static_assert(!C::kFp8 || C::kOutAtoms * 64 >= C::kDv);
    return this->out_tile(wg_) + vector / 4 * 64 * 128 + warp_ * 16 * 128 + vector % 4 * 512 + lane_ * 16;
  }
  // The iteration with which the unmasked KV tiles begin. Without masked tiles that is the second one: the first finds the maximum.
  static __device__ __forceinline__ int unmasked_begin(const WorkTile &t, int begin, int masked_end) {
    return masked_end > begin ? min(t.kv_tiles, max(masked_end + 1, begin + 2)) : begin + 1;
  }
  // How many times a work tile promotes out.
  __device__ __forceinline__ int promotions(const WorkTile &t) const {
    return (t.kv_tiles - 1) / kPromotionInterval - unmasked_begin(t, t.begin[wg_], t.masked_end[wg_]) / kPromotionInterval;
  }
  // `promoted_before`: there is a promoted sum to add to.
  __device__ __forceinline__ void promote_out(bool promoted_before) {
    if (lane_ == 0) bulk_wait_group_read();  // until TMA has read the previous tile's out
    __syncwarp();
    const auto both = [](float x) { return pack2<__nv_bfloat16>(x, x); };
    const uint32_t rescale[2] = {both(exp2_approx(promoted_max_[0] - softmax_.max[0])),
                                 both(exp2_approx(promoted_max_[1] - softmax_.max[1]))};
#pragma unroll
    for (int vector = 0; vector < C::kDv / 16; ++vector) {
      const float *out = out_ + 8 * vector;
      uint32_t x[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) x[n] = pack2<__nv_bfloat16>(out[2 * n], out[2 * n + 1]);
      if (promoted_before) {
        const uint4 before = ld_shared_16(promoted_vector(vector));
        const uint32_t words[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) asm("fma.rn.bf16x2 %0, %1, %2, %0;\n" : "+r"(x[n]) : "r"(words[n]), "r"(rescale[n & 1]));
      }
      st_shared_16(promoted_vector(vector), x[0], x[1], x[2], x[3]);
    }
    promoted_max_[0] = softmax_.max[0];
    promoted_max_[1] = softmax_.max[1];
  }
  // Adds the promoted sum to out, at the end of a work tile.
  __device__ __forceinline__ void add_promoted_out(const WorkTile &t) {
    if (promotions(t) <= 0) return;
#pragma unroll
    for (int vector = 0; vector < C::kDv / 16; ++vector) {
      const uint4 x = ld_shared_16(promoted_vector(vector));
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float *out = out_ + 8 * vector + 2 * n;
        out[0] = fmaf(__uint_as_float(words[n] << 16), promoted_max_[n & 1],
                      out[0]);  // finalize_rows turned promoted_max_ into a factor
        out[1] = fmaf(__uint_as_float(words[n] & 0xFFFF0000u), promoted_max_[n & 1], out[1]);
      }
    }
  }

  template <bool kVectors>
  __device__ __forceinline__ void store_rows_direct(const WorkTile &t) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(t, r), columns = row < t.seqlen_q ? static_cast<int>(p_.head_dim_v) : 0;
      store_fragment_row<Out, C::kDv / 8>(out_, r, out_at(t, row), columns, kVectors, lane_ & 3,
                                          [&](float a, float b) { return pack2<Out>(a * out_scale_[r], b * out_scale_[r]); });
    }
  }

  __device__ __forceinline__ float *lse_at(const WorkTile &t, int row) const {
    return p_.lse.data + t.lse + (row - t.row0) * p_.lse.seq_stride;
  }
  __device__ __forceinline__ Out *out_at(const WorkTile &t, int row) const {
    return static_cast<Out *>(p_.out.data) + t.out + (row - t.row0) * p_.out.seq_stride;
  }

  __device__ __forceinline__ void store_row(const WorkTile &t, int row, float lse) const {
    store_zero_row(out_at(t, row), p_.head_dim_v, p_.lse.data != nullptr ? lse_at(t, row) : nullptr, lse, lane_);
  }
  // Rows of this warpgroup that exist but see no key: out = 0, lse = -inf, or the sink.
  __device__ __forceinline__ void store_empty_rows(const WorkTile &t) const {
    const float *sink = sink_of(p_, t.head_q);
    const float lse = sink != nullptr ? *sink : -CUDART_INF_F;
    const int row0 = t.row0 + wg_ * 64;
    for (int row = max(row0, 0) + warp_; row < min(row0 + 64, t.seqlen_q); row += 4) store_row(t, row, lse);
  }
  // Rows beyond the sequence's used length: out = 0, lse = -inf.
  __device__ __forceinline__ void store_unused_rows(const WorkTile &t) const {
    for (int row = max(t.row0, t.seqlen_q) + wg_ * 4 + warp_; row < t.unused_end; row += C::kConsumerWarpgroups * 4)
      store_row(t, row, -CUDART_INF_F);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Between softmax and wgmma
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void rescale_out() { scale_rows<QkFragment<1, C::kDv / 8>>(out_, softmax_.rescale); }
  __device__ __forceinline__ void convert_p() {
#pragma unroll
    for (int n = 0; n < kPvSteps; ++n) {
      if constexpr (C::kFp8) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          // Two pairs of adjacent 8-column blocks side by side: the transposed copy of V has its keys in this order.
          const int j = 16 * n + 8 * (r / 2) + 2 * (r % 2);
          p_operand_[n][r] = pack4_e4m3(s_[j], s_[j + 1], s_[j + 4], s_[j + 5]);
        }
      } else {
        fa::cuda::convert_p<Element>(s_, n, p_operand_[n]);
      }
    }
  }

  int wg_;
  float s_[kKeys / 2];
  uint32_t p_operand_[kPvSteps][4];
  float out_[C::kDv / 2];
  OnlineSoftmax<Fragment> softmax_;
  float out_scale_[2];
  // fp8: the work tile's factor from S to logits; the maximum that the promoted sum is relative to.
  float scale_;
  float promoted_max_[2] = {0.f, 0.f};
  float out_max_[2];  // the maximum that out is relative to; kept while the NaN-safe path may still need it
};

}  // namespace fa::cuda::sm90
