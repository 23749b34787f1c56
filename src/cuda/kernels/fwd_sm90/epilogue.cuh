// SPDX-License-Identifier: Apache-2.0
// The epilogue of a work tile: lse, and rows of out by TMA or from registers.
#pragma once

#include "cuda/common/epilogue.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

template <class C>
class Epilogue {
 public:
  using Out = typename C::Out;
  using WorkTile = typename SharedMemory<C>::WorkTile;

  __device__ __forceinline__ Epilogue(const ForwardParams &params, const SharedMemory<C> &smem, const ConsumerThread &at)
      : a_(params), p_(params.problem), smem_(smem), at_(at) {}

  // From the maxima and complete row sums: writes lse, and sets the factors by which out is still to be multiplied.
  __device__ __forceinline__ void finalize_rows(const WorkTile &t, const float (&max)[2], const float (&sum)[2]) {
    const int row = at_.row(t, 0);
    float *dst = lse_at(t, row);
    RowResult result[2];
    cuda::finalize_rows(max, sum, sink_of(p_, t.head_q), result);
    float lse[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      out_scale_[r] = C::kHasDropout ? result[r].factor * p_.dropout.keep_scale : result[r].factor;
      lse[r] = result[r].lse;
    }
    if constexpr (C::kHasDescales) {
      // 0, or NaN where the product of the descales is negative, infinite or NaN.
      const float nan_or_zero = t.qk_descale < 0.f ? CUDART_NAN_F : t.qk_descale * 0.f;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (lse[r] == -CUDART_INF_F) continue;
        out_scale_[r] = fmaf(out_scale_[r], t.v_descale, nan_or_zero);
        lse[r] += nan_or_zero;
      }
    }
    if (p_.lse.data != nullptr && (at_.lane & 3) == 0) {
      if (row < t.seqlen_q) *dst = lse[0];
      if (row + 8 < t.seqlen_q) dst[8 * p_.lse.seq_stride] = lse[1];
    }
  }

  // Stores the warp's rows of out.
  __device__ __forceinline__ void store_rows(const WorkTile &t, const float (&out)[C::kDv / 2]) const {
    if (C::kOutAtoms > 0 && a_.tma_out && t.row0 + at_.wg * 64 + 64 <= t.seqlen_q) {
      store_rows_tma(t, out);
    } else if (known_vectors(a_.vector_out)) {
      store_rows_direct<true>(t, out);
    } else {
      store_rows_direct<false>(t, out);
    }
  }
  // Rows of this warpgroup that exist but see no key: out = 0, lse = -inf, or the sink.
  __device__ __forceinline__ void store_empty_rows(const WorkTile &t) const {
    const float *sink = sink_of(p_, t.head_q);
    const float lse = sink != nullptr ? *sink : -CUDART_INF_F;
    const int row0 = t.row0 + at_.wg * 64;
#pragma unroll 1
    for (int row = max(row0, 0) + at_.warp; row < min(row0 + 64, t.seqlen_q); row += 4) store_row(t, row, lse);
  }
  // The rows of store_unused_rows(), and with `empty` those of store_empty_rows(), by the same code.
  __device__ __forceinline__ void store_rows_without_keys(const WorkTile &t, bool empty) const {
    const float *sink = sink_of(p_, t.head_q);
#pragma unroll 1
    for (bool unused = !empty;; unused = true) {
      const int first = unused ? max(t.row0, t.seqlen_q) + at_.wg * 4 : max(t.row0 + at_.wg * 64, 0),
                end = unused ? t.unused_end : min(t.row0 + at_.wg * 64 + 64, t.seqlen_q);
      const float lse = !unused && sink != nullptr ? *sink : -CUDART_INF_F;
#pragma unroll 1
      for (int row = first + at_.warp; row < end; row += unused ? C::kConsumerWarpgroups * 4 : 4) store_row(t, row, lse);
      if (unused) break;
    }
  }
  // Rows beyond the sequence's used length: out = 0, lse = -inf.
  __device__ __forceinline__ void store_unused_rows(const WorkTile &t) const {
#pragma unroll 1
    for (int row = max(t.row0, t.seqlen_q) + at_.wg * 4 + at_.warp; row < t.unused_end; row += C::kConsumerWarpgroups * 4)
      store_row(t, row, -CUDART_INF_F);
  }

 private:
  // An element of row r of out, finished.
  __device__ __forceinline__ float scaled(float x, int r) const { return scaled_out<C::kSameBits>(x, out_scale_[r]); }

  // Each warp stages its 16 rows in shared memory of its own and stores them by TMA. It waits neither for global memory nor for another warp.
  __device__ __forceinline__ void store_rows_tma(const WorkTile &t, const float (&out)[C::kDv / 2]) const {
    const uint32_t rows = smem_.out(at_.wg) + at_.warp * 16 * 128;
    // stmatrix: lane l gives the address of row l % 8 of matrix l / 8. Matrices 0 and 1 are rows 0 to 7 and 8 to 15 of eight columns, 2 and 3
    // the same rows of the next eight columns.
    const uint32_t row_address = rows + (at_.lane & 15) * 128, vector = at_.lane >> 4;
    constexpr int kColumns = C::kOutAtoms * 64;
#pragma unroll
    for (int first = 0; first < C::kDv; first += kColumns) {
      if (at_.lane == 0) bulk_wait_group_read();  // until TMA has read the previous contents
      __syncwarp();
#pragma unroll
      for (int column = 0; column < min(kColumns, C::kDv - first); column += 16) {
        const int j = (first + column) / 2;
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) x[n] = pack2<Out>(scaled(out[j + 2 * n], n & 1), scaled(out[j + 2 * n + 1], n & 1));
        stmatrix_x4(row_address + column / 64 * 64 * 128 + (((column % 64 / 8 + vector) ^ (at_.lane & 7)) << 4), x[0], x[1],
                    x[2], x[3]);
      }
      fence_proxy_async();
      __syncwarp();
      if (at_.lane == 0) {
#pragma unroll
        for (int s = 0; s < C::kOutAtoms; ++s)
          tma_store_4d(&a_.out_map, rows + s * 64 * 128, first + s * 64, t.q_row + at_.wg * 64 + at_.warp * 16, t.head_q,
                       t.q_batch);
        bulk_commit_group();
      }
    }
  }
  template <bool kVectors>
  __device__ __forceinline__ void store_rows_direct(const WorkTile &t, const float (&out)[C::kDv / 2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = at_.row(t, r), columns = row < t.seqlen_q ? static_cast<int>(p_.head_dim_v) : 0;
      store_fragment_row<Out, C::kDv / 8>(out, r, out_at(t, row), columns, kVectors, at_.lane & 3,
                                          [&](float a, float b) { return pack2<Out>(scaled(a, r), scaled(b, r)); });
    }
  }

  __device__ __forceinline__ float *lse_at(const WorkTile &t, int row) const {
    return p_.lse.data + t.lse + (row - t.row0) * p_.lse.seq_stride;
  }
  __device__ __forceinline__ Out *out_at(const WorkTile &t, int row) const {
    return static_cast<Out *>(p_.out.data) + t.out + (row - t.row0) * p_.out.seq_stride;
  }

  __device__ __forceinline__ void store_row(const WorkTile &t, int row, float lse) const {
    store_zero_row(out_at(t, row), p_.head_dim_v, p_.lse.data != nullptr ? lse_at(t, row) : nullptr, lse, at_.lane);
  }

  const ForwardParams &a_;
  const Problem &p_;
  const SharedMemory<C> smem_;
  const ConsumerThread at_;
  float out_scale_[2];
};

}  // namespace fa::cuda::sm90
