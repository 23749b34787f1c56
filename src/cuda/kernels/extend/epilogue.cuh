// SPDX-License-Identifier: Apache-2.0
// Epilogue of a consumer warp of the extend kernel, for its 16 rows. A work unit that is a whole work tile stores the final out
// and lse; any other stores a split-KV partial. With few partials per tile, the CTA that has the last partial keeps it in
// registers and adds the others. With many, all partials are stored, and the combine kernel (decode/combine.cuh) sums them.
#pragma once

#include <math_constants.h>

#include "cuda/common/combine.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/kv_8bit.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/kernels/extend/cta.cuh"

namespace fa::cuda::extend {

// The 16 rows of one consumer warp.
template <class C>
struct WarpRows {
  const Cta<C> &cta;
  const WorkUnitDescriptor *work;
  int wg, warp;  // warp: within the warpgroup

  // Rows count from the CTA's first row.
  __device__ __forceinline__ int first_row() const { return wg * kWarpgroupRows + warp * 16; }
  __device__ __forceinline__ int row_of(int r) const { return first_row() + (opaque(cta.lane()) >> 2) + 8 * r; }
  __device__ __forceinline__ int token_of(int row) const { return cta.params().group.quotient(work->row0 + row); }
  __device__ __forceinline__ int head_of(int row) const {
    return work->head * static_cast<int>(cta.params().group.value) + cta.params().group.remainder(work->row0 + row);
  }

  __device__ __forceinline__ typename C::Element *out_at(int row) const {
    return row_of_tensor<typename C::Element>(cta.problem().out, work->batch, work->q_start + token_of(row), head_of(row));
  }
  __device__ __forceinline__ float *lse_at(int row) const {  // null if it is not asked for
    if (cta.problem().lse.data == nullptr) return nullptr;
    return row_of_tensor(cta.problem().lse, work->batch, work->q_start + token_of(row), head_of(row));
  }

  // 8-bit KV: the descale of all keys or all values of this head.
  __device__ __forceinline__ float head_descale(const Descale &d) const {
    return cuda::head_descale(d, work->batch, work->head);
  }
};

template <class C>
class Epilogue {
 public:
  using Element = typename C::Element;
  using Fragment = QkFragment<1, C::kKvTile / 8>;  // of S
  using OutFragment = QkFragment<1, C::kD / 8>;

  __device__ __forceinline__ Epilogue(const Cta<C> &cta, const WarpRows<C> &rows, float (&out)[C::kD / 2],
                                      OnlineSoftmax<Fragment> &softmax)
      : cta_(cta), rows_(rows), out_(out), softmax_(softmax) {}

  // Each warp does this on its own. Not for kernels for FA_FLAG_SAME_BITS, which end a segment by segments.cuh.
  __device__ __forceinline__ void store() {
    softmax_.reduce_sums();
    descale_v();
    if constexpr (C::kUsesCombineKernel) {
      if (rows_.work->partial >= 0) {
        store_partials_by_row(rows_.work->partial);
        return;
      }
    } else {
      if (rows_.work->partial >= 0) {
        store_partials_by_lane(rows_.work->partial);
        __syncwarp();  // all lanes have stored their part
        if (cta_.lane() == 0) count_released(cta_.params().counters + rows_.work->counter);
        return;
      }
      if (rows_.work->num_partials > 0) merge_partials(rows_.work->first_partial, rows_.work->num_partials);
    }
    store_final();
  }

  // Multiplies out by the descale of 8-bit V.
  __device__ __forceinline__ void descale_v() {
    if constexpr (C::k8BitKv) {
      const float factor = rows_.head_descale(cta_.params().v_descale);
#pragma unroll
      for (int j = 0; j < C::kD / 2; ++j) out_[j] *= factor;
    }
  }

  __device__ __forceinline__ void store_final() const {
    const int quad = opaque(cta_.lane()) & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = rows_.row_of(r), stored_row = min(row, rows_.work->rows - 1);
      const RowResult result =
          finalize_row(softmax_.max[r], softmax_.sum[r], sink_of(cta_.problem(), rows_.head_of(stored_row)));
      store_fragment_row_at<Element, C::kD / 8>(
          out_, r, [&] { return rows_.out_at(stored_row); }, static_cast<int>(cta_.problem().head_dim_v),
          cta_.params().vector_out, quad,
          [&](float a, float b) {
            return pack(scaled_out<C::kSameBits>(a, result.factor), scaled_out<C::kSameBits>(b, result.factor));
          },
          ~0u, row < rows_.work->rows);
      if (quad == 0 && row < rows_.work->rows && cta_.problem().lse.data != nullptr) *rows_.lse_at(row) = result.lse;
    }
  }

  __device__ __forceinline__ uint32_t pack(float a, float b) const {
    return C::k8BitKv && cta_.problem().q.dtype == Dtype::bf16 ? pack2<__nv_bfloat16>(a, b) : pack2<Element>(a, b);
  }
  // ------------------------------------------------------------------------------------------------------------------
  // Split-KV partials
  // ------------------------------------------------------------------------------------------------------------------

  // For the combine kernel: row-major. This lane has two of each eight columns.
  __device__ __forceinline__ void store_partials_by_row(int partial) const {
    const int64_t row0 = int64_t{partial} * C::kRows;
    const int quad = opaque(cta_.lane()) & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      auto *dst = reinterpret_cast<float2 *>(cta_.params().partial_out + (row0 + rows_.row_of(r)) * C::kD) + quad;
#pragma unroll
      for (int j = 0; j < C::kD / 8; ++j) dst[j * 4] = {out_[4 * j + 2 * r], out_[4 * j + 2 * r + 1]};
      if (quad == 0) cta_.params().partial_stats[row0 + rows_.row_of(r)] = {softmax_.max[r], softmax_.sum[r]};
    }
  }

  // For merge_partials(), which reads this layout faster: four accumulators of a lane, beside those of the other lanes.
  __device__ __forceinline__ float4 *partial_out(int partial) const {
    return reinterpret_cast<float4 *>(cta_.params().partial_out) +
           (int64_t{partial} * C::kRows + rows_.first_row()) * (C::kD / 4) + opaque(cta_.lane());
  }
  __device__ __forceinline__ float2 *partial_stats(int partial) const {
    return cta_.params().partial_stats + int64_t{partial} * C::kRows;
  }

  __device__ __forceinline__ void store_partials_by_lane(int partial) const {
    float4 *dst = partial_out(partial);
#pragma unroll
    for (int j = 0; j < C::kD / 8; ++j) dst[j * 32] = {out_[4 * j], out_[4 * j + 1], out_[4 * j + 2], out_[4 * j + 3]};
    if ((cta_.lane() & 3) == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) partial_stats(partial)[rows_.row_of(r)] = {softmax_.max[r], softmax_.sum[r]};
    }
  }

  // Every warp counts each partial once. The warps that add the partials count once more, and the last of them resets the
  // counter.
  __device__ __forceinline__ void wait_partials(int num_partials) const {
    if (cta_.lane() == 0) {
      int32_t *counter = cta_.params().counters + rows_.work->counter;
      const int warps = (min(rows_.work->rows, C::kRows) + 15) / 16;
      while (load_acquire(counter) < num_partials * warps) __nanosleep(100);
      if (atomicAdd(counter, 1) == (num_partials + 1) * warps - 1) *counter = 0;
    }
    __syncwarp();
  }

  // Adds the partials of the earlier partitions, in the order of their keys, to the last partial, which is in registers. The CTAs
  // of those partitions have started before this one and process these units first, so this wait cannot deadlock.
  __device__ __forceinline__ void merge_partials(int first_partial, int num_partials) {
    wait_partials(num_partials);
    float row_max[2] = {softmax_.max[0], softmax_.max[1]};
#pragma unroll 4
    for (int i = 0; i < num_partials; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) row_max[r] = fmaxf(row_max[r], __ldcg(partial_stats(first_partial + i) + rows_.row_of(r)).x);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = exp2_approx(softmax_.max[r] - row_max[r]);
      softmax_.max[r] = row_max[r];
      softmax_.sum[r] *= scale;
      scale_row<OutFragment>(out_, r, scale);
    }
    // Two at a time: each waits for L2.
#pragma unroll(C::kHoldsQ ? 2 : 1)
    for (int i = 0; i < num_partials; ++i) {
      const float4 *from = partial_out(first_partial + i);
      float4 x[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) x[j] = __ldcg(from + j * 32);
      float scale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 stats = __ldcg(partial_stats(first_partial + i) + rows_.row_of(r));
        scale[r] = exp2_approx(stats.x - softmax_.max[r]);
        softmax_.sum[r] = fmaf(scale[r], stats.y, softmax_.sum[r]);
      }
#pragma unroll
      for (int j = 0; j < C::kD / 8; ++j) {
        add_scaled(out_, j, scale, x[j % kLoads]);
        if (j + kLoads < C::kD / 8) x[j % kLoads] = __ldcg(from + (j + kLoads) * 32);
      }
    }
  }

 private:
  // Loads in flight of merge_partials(): wide heads have no registers for all at once.
  static constexpr int kLoads = C::kHoldsQ ? C::kD / 8 : 8;

  const Cta<C> &cta_;
  const WarpRows<C> &rows_;
  float (&out_)[C::kD / 2];
  OnlineSoftmax<Fragment> &softmax_;
};

}  // namespace fa::cuda::extend
