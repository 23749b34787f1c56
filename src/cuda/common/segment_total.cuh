// SPDX-License-Identifier: Apache-2.0
// FA_FLAG_SAME_BITS: what a warp has folded so far of the segments of its 16 rows (combine.cuh), M, L and O. M and L are in shared memory; so is
// O, or, where it finds no room there, in the workspace.
#pragma once

#include "cuda/common/combine.cuh"
#include "cuda/common/ptx.cuh"

namespace fa::cuda {

// Accumulators 4 n .. 4 n + 3 of a lane: two columns of its first row, then two of its second.
__device__ __forceinline__ float4 fold_out(const FoldScales (&scales)[2], const float4 &total, const float4 &out) {
  return {fold_out(scales[0], total.x, out.x), fold_out(scales[0], total.y, out.y), fold_out(scales[1], total.z, out.z),
          fold_out(scales[1], total.w, out.w)};
}

// Four accumulators of O, which no other lane reads or writes.
__device__ __forceinline__ float4 load_total(uint32_t shared) {
  const uint4 x = ld_shared_16(shared);
  return {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
}
__device__ __forceinline__ void store_total(uint32_t shared, const float4 &x) {
  st_shared_16(shared, __float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w));
}
__device__ __forceinline__ float4 load_total(const float4 *global) { return __ldcg(global); }
__device__ __forceinline__ void store_total(float4 *global, const float4 &x) { __stcg(global, x); }

// `Layout` says where it lies: out(j), of this lane's accumulators 4 j .. 4 j + 3, an address in shared memory or a pointer to global
// memory; stats(r), M and L of the lane's row r; lane().
template <int kVectors, class Layout>
class SegmentTotal {
 public:
  __device__ __forceinline__ explicit SegmentTotal(const Layout &layout) : layout_(layout) {}

  template <int kCount>
  static __device__ __forceinline__ float4 vector_of(const float (&out)[kCount], int j) {
    static_assert(kCount == 4 * kVectors);
    return {out[4 * j], out[4 * j + 1], out[4 * j + 2], out[4 * j + 3]};
  }
  __device__ __forceinline__ float4 get_out(int j) const { return load_total(layout_.out(j)); }
  __device__ __forceinline__ void set_out(int j, const float4 &x) const { store_total(layout_.out(j), x); }
  __device__ __forceinline__ float2 get_stats(int r) const {
    return {ld_shared_float(layout_.stats(r)), ld_shared_float(layout_.stats(r) + 4)};
  }
  __device__ __forceinline__ void set_stats(const float (&max)[2], const float (&sum)[2]) const {
    __syncwarp();  // the lanes of a row have read what was there
    if ((layout_.lane() & 3) == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        st_shared_float(layout_.stats(r), max[r]);
        st_shared_float(layout_.stats(r) + 4, sum[r]);
      }
    }
    __syncwarp();
  }
  // The total becomes that of one segment. Its row sums are those of the whole row.
  template <int kCount>
  __device__ __forceinline__ void set(const float (&out)[kCount], const float (&max)[2], const float (&sum)[2]) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) set_out(j, vector_of(out, j));
    set_stats(max, sum);
  }
  // The total takes the next segment, whose accumulators are segment(j).
  template <int kUnroll = kVectors, typename Segment>
  __device__ __forceinline__ void fold(const Segment &segment, const float (&max)[2], const float (&sum)[2]) const {
    FoldScales scales[2];
    float total_max[2], total_sum[2];
    fold_stats(max, sum, scales, total_max, total_sum);
    set_stats(total_max, total_sum);
#pragma unroll kUnroll
    for (int j = 0; j < kVectors; ++j) set_out(j, fold_out(scales, get_out(j), segment(j)));
  }
  // The total takes the last segment, and replaces it in registers.
  template <int kCount>
  __device__ __forceinline__ void fold_into(float (&out)[kCount], float (&max)[2], float (&sum)[2]) const {
    FoldScales scales[2];
    float total_max[2], total_sum[2];
    fold_stats(max, sum, scales, total_max, total_sum);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      max[r] = total_max[r];
      sum[r] = total_sum[r];
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float4 x = fold_out(scales, get_out(j), vector_of(out, j));
      out[4 * j] = x.x, out[4 * j + 1] = x.y, out[4 * j + 2] = x.z, out[4 * j + 3] = x.w;
    }
  }

 private:
  __device__ __forceinline__ void fold_stats(const float (&max)[2], const float (&sum)[2], FoldScales (&scales)[2],
                                             float (&total_max)[2], float (&total_sum)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 stats = get_stats(r);
      total_max[r] = stats.x;
      total_sum[r] = stats.y;
      scales[r] = fold_row(total_max[r], total_sum[r], max[r], sum[r]);
    }
  }

  const Layout layout_;
};

}  // namespace fa::cuda
