// SPDX-License-Identifier: Apache-2.0
// How the kernels for clusters fold segments through distributed shared memory. Each CTA owns some columns of out. It gets those of all segments, folds them in
// order and stores the result.
#pragma once

#include "cuda/common/combine.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/kernels/decode/cta.cuh"
#include "cuda/kernels/extend/cluster_cta.cuh"

namespace fa::cuda::extend {

template <class C>
class ClusterFold {
 public:
  using Cta = ClusterCta<C>;
  using Element = typename C::Element;

  __device__ __forceinline__ explicit ClusterFold(const Cta &cta) : cta_(cta) {}

  // Sends this CTA's columns of out, and what belongs to their rows, to the CTAs that own the columns.
  __device__ __forceinline__ void send_segment(int buffer, const float (&out)[2][4]) const {
    const int vectors_log2 = C::kRowVectorsLog2 - cta_.team_log2, tiles = C::kD == 128 && cta_.team_log2 == 0 ? 2 : 1,
              first = cta_.warp * tiles, own = cta_.own_columns_log2();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= tiles || first + i >= 1 << vectors_log2) break;
      const int column = (((cta_.member << vectors_log2) + first + i) << 3) + 2 * (cta_.lane & 3), owner = column >> own,
                in_block = column & ((1 << own) - 1);
      const uint32_t barrier = map_to_cta(cta_.fold_full(buffer), owner);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (r > 0 && !cta_.has_many_rows()) break;
        st_async(map_to_cta(cta_.dsmem_out(buffer, cta_.team, cta_.row_of(r), in_block), owner),
                 float2{out[i][2 * r], out[i][2 * r + 1]}, barrier);
      }
    }
    // As many CTAs as there are teams own columns of this CTA.
    const int block = static_cast<int>(threadIdx.x) / kClusterRows, row = static_cast<int>(threadIdx.x) % kClusterRows;
    if (block < 1 << cta_.teams_log2 && (row < 8 || cta_.has_many_rows())) {
      const int owner = (cta_.member << cta_.teams_log2) + block;
      st_async(map_to_cta(cta_.dsmem_stats(buffer, cta_.team, row), owner), ld_shared_float2(cta_.row_stats(row)),
               map_to_cta(cta_.fold_full(buffer), owner));
    }
  }

  // Folds the segments of a round into the total, for this CTA's columns.
  __device__ __forceinline__ void fold(int round) {
    if (cta_.warp >= cta_.fold_warps()) return;
    const int buffer = round & 1, count = min(cta_.segments - (round << cta_.teams_log2), 1 << cta_.teams_log2);
    mbarrier_wait(cta_.fold_full(buffer), round >> 1 & 1);
    if (own_row() < cta_.rows) {
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const float2 stats = ld_shared_float2(cta_.dsmem_stats(buffer, n, own_row()));
        const float4 x = decode::ld_shared_float4(cta_.dsmem_out(buffer, n, own_row(), 4 * own_vector()));
        if (stats.x == kNoMax) continue;
        const FoldScales scales = fold_row(total_stats_.x, total_stats_.y, stats.x, stats.y);
        total_ = {fold_out(scales, total_.x, x.x), fold_out(scales, total_.y, x.y), fold_out(scales, total_.z, x.z),
                  fold_out(scales, total_.w, x.w)};
      }
    }
    if (round + 2 < cta_.rounds) {
      __syncwarp();
      const int cluster = 1 << cta_.cluster_log2;
      mbarrier_arrive_remote_if(cta_.lane < cluster, map_to_cta(cta_.fold_empty(buffer), cta_.lane & (cluster - 1)));
    }
  }

  __device__ __forceinline__ void store_result() const {
    if (cta_.rank == 0)
      store_zero_rows(Rows{*this}, cta_.problem, cta_.rows + cta_.warp, cta_.end_row, C::kConsumerWarps, cta_.lane);
    if (own_row() >= cta_.rows) return;
    const RowResult result = finalize_row(total_stats_.x, total_stats_.y, sink_of(cta_.problem, head_of(own_row())));
    const int column = (cta_.rank << cta_.own_columns_log2()) + 4 * own_vector();
    if (column == 0 && cta_.problem.lse.data != nullptr) *lse_at(own_row()) = result.lse;
    const auto scaled = [&](float x) { return scaled_out<true>(x, result.factor); };
    const uint32_t words[2] = {pack2<Element>(scaled(total_.x), scaled(total_.y)),
                               pack2<Element>(scaled(total_.z), scaled(total_.w))};
    if (column >= cta_.problem.head_dim_v) return;
    Element *to = out_at(own_row()) + column;
    if (cta_.params.vector_out) {
      *reinterpret_cast<uint2 *>(to) = uint2{words[0], words[1]};
    } else {
      auto *bits = reinterpret_cast<unsigned short *>(to);
#pragma unroll
      for (int n = 0; n < 4; ++n) bits[n] = static_cast<unsigned short>(words[n / 2] >> (16 * (n & 1)));
    }
  }

 private:
  __device__ __forceinline__ int own_row() const { return static_cast<int>(threadIdx.x) >> cta_.own_vectors_log2(); }
  __device__ __forceinline__ int own_vector() const {
    return static_cast<int>(threadIdx.x) & ((1 << cta_.own_vectors_log2()) - 1);
  }
  // A row is a head of the only token.
  __device__ __forceinline__ int head_of(int row) const { return cta_.head * static_cast<int>(cta_.params.group.value) + row; }
  __device__ __forceinline__ Element *out_at(int row) const {
    return row_of_tensor<Element>(cta_.problem.out, cta_.batch, cta_.q_start, head_of(row));
  }
  __device__ __forceinline__ float *lse_at(int row) const {  // null if it is not asked for
    if (cta_.problem.lse.data == nullptr) return nullptr;
    return row_of_tensor(cta_.problem.lse, cta_.batch, cta_.q_start, head_of(row));
  }
  struct Rows {
    const ClusterFold &fold;
    __device__ __forceinline__ Element *out_at(int row) const { return fold.out_at(row); }
    __device__ __forceinline__ float *lse_at(int row) const { return fold.lse_at(row); }
  };

  const Cta &cta_;
  // Of this thread's row and four columns.
  float4 total_{0.f, 0.f, 0.f, 0.f};
  float2 total_stats_{kNoMax, 0.f};
};

}  // namespace fa::cuda::extend
