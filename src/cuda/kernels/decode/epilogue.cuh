// SPDX-License-Identifier: Apache-2.0
// Epilogue of the decode kernels. Out of the KV groups is summed. A work unit that is a whole work tile stores the final out
// and lse; any other stores a split-KV partial into the workspace, which the combine kernel (combine.cuh) adds to the others.
#pragma once

#include <math_constants.h>

#include "cuda/common/combine.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/kernels/decode/cta.cuh"

namespace fa::cuda::decode {

template <class C>
class Epilogue {
 public:
  using Element = typename C::Element;
  static constexpr int kVectors = C::kDv / 4;  // vectors of four columns per row
  using Scheduler = StreamKScheduler<C, true>;

  __device__ __forceinline__ explicit Epilogue(const Cta<C> &cta) : cta_(cta) {}

  // Stores the work unit's result. Out, maxima and row sums of all KV groups are in shared memory.
  __device__ __forceinline__ void store_results(const Scheduler &scheduler, int partition) const {
    if (cta_.work_unit.whole()) {
      store_final();
    } else {
      store_partials(Scheduler::partial_of(cta_.params, partition, cta_.work_unit.begin == cta_.work_unit.tile_begin));
    }
    if (cta_.work_unit.begin == cta_.work_unit.tile_begin) store_unused_rows();
  }

  __device__ __forceinline__ void publish_split_tile(const Scheduler &scheduler, int partition, bool ends_partition) const {
    if (threadIdx.x > 0 || !scheduler.publishes_tile(cta_.work_unit, ends_partition)) return;
    SplitTile tile{};
    tile.q_start = sequence_of(cta_.problem.q_lengths, opaque(cta_.work_unit.batch)).start;
    tile.head = cta_.head();
    tile.first_row = cta_.first_row();
    tile.rows = cta_.rows;
    scheduler.publish_tile(tile, cta_.work_unit, partition);
  }

  // Calls f(row, vector, x, stats) for every four columns x of out, summed over the KV groups; stats are the row's maximum and
  // row sum.
  template <typename F>
  __device__ __forceinline__ void for_each_out_vector(F f) const {
    const int num_vectors = cta_.rows * kVectors;
#pragma unroll(C::kDv > 128 ? 1 : 2)
    for (int n = opaque(threadIdx.x); n < num_vectors; n += C::kThreads) {
      const int row = n / kVectors, vector = n % kVectors;
      float2 stats[C::kKvGroups];
      float row_max = -1e30f;
#pragma unroll
      for (int w = 0; w < C::kKvGroups; ++w) {
        stats[w] = ld_shared_float2(cta_.smem_row_stats(w, row));
        row_max = fmaxf(row_max, stats[w].x);
      }
      float sum = 0.f;
      float4 x{0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int w = 0; w < C::kKvGroups; ++w) {
        const float factor = exp2_approx(stats[w].x - row_max);
        sum = fmaf(stats[w].y, factor, sum);
        add_scaled(x, factor, ld_shared_float4(cta_.smem_out(w, row, vector / 2) + vector % 2 * 16));
      }
      f(row, vector, x, float2{row_max, sum});
    }
  }

  __device__ __forceinline__ RowResult finalize(int row, float2 stats) const {
    return finalize_row(stats.x, stats.y, sink_of(cta_.problem, cta_.head_of(row)));
  }

  __device__ __forceinline__ void store_final() const {
    for_each_out_vector([&](int row, int vector, const float4 &x, float2 stats) { store_result(row, vector, x, stats); });
  }

  // Stores four columns of a row's out, and with the first four its lse.
  __device__ __forceinline__ void store_result(int row, int vector, const float4 &x, float2 stats) const {
    const RowResult result = finalize(row, stats);
    if (vector == 0 && cta_.problem.lse.data != nullptr) *lse_at(cta_.token_of(row), cta_.head_of(row)) = result.lse;
    store_out(out_at(cta_.token_of(row), cta_.head_of(row)) + 4 * vector, vector, x, result.factor);
  }
  __device__ __forceinline__ void store_out(Element *dst, int vector, const float4 &x, float factor) const {
    if (4 * vector >= cta_.problem.head_dim_v) return;
    const auto pack = [&](float a, float b) {
      if (C::k8BitKv && cta_.problem.q.dtype == Dtype::bf16) return pack2<__nv_bfloat16>(a, b);
      return pack2<Element>(a, b);
    };
    const auto scaled = [&](float a) { return scaled_out<C::kSameBits>(a, factor); };
    const uint2 words{pack(scaled(x.x), scaled(x.y)), pack(scaled(x.z), scaled(x.w))};
    if (cta_.params.vector_out) {
      *reinterpret_cast<uint2 *>(dst) = words;
    } else {
      auto *bits = reinterpret_cast<unsigned short *>(dst);
      bits[0] = static_cast<unsigned short>(words.x);
      bits[1] = static_cast<unsigned short>(words.x >> 16);
      bits[2] = static_cast<unsigned short>(words.y);
      bits[3] = static_cast<unsigned short>(words.y >> 16);
    }
  }

  __device__ __forceinline__ float *lse_at(int token, int head) const {
    return row_of_tensor(cta_.problem.lse, cta_.work_unit.batch, cta_.q_start + token, head);
  }
  __device__ __forceinline__ Element *out_at(int token, int head) const {
    return row_of_tensor<Element>(cta_.problem.out, cta_.work_unit.batch, cta_.q_start + token, head);
  }

  // Rows of the sequence's slot without queries: out = 0, lse = -inf.
  __device__ __forceinline__ void store_unused_rows() const {
    int end = static_cast<int>(sequence_of(cta_.problem.q_lengths, opaque(cta_.work_unit.batch)).slot) * cta_.group_heads();
    if constexpr (C::kHasRowBlocks) end = min(end - cta_.first_row(), C::kRows);
    for (int row = cta_.rows + (opaque(threadIdx.x) >> 5); row < end; row += C::kThreads / 32) {
      const int token = cta_.token_of(row), head = cta_.head_of(row);
      store_zero_row(out_at(token, head), cta_.problem.head_dim_v,
                     cta_.problem.lse.data != nullptr ? lse_at(token, head) : nullptr, -CUDART_INF_F, opaque(cta_.lane_id));
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Split-KV partials
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ float4 *partial_out(int partial, int row) const {
    return reinterpret_cast<float4 *>(cta_.params.partial_out) + (int64_t{partial} * C::kRows + row) * kVectors;
  }
  __device__ __forceinline__ float2 *partial_stats(int partial, int row) const {
    return cta_.params.partial_stats + int64_t{partial} * C::kRows + row;
  }

  __device__ __forceinline__ void store_partials(int partial) const {
    for_each_out_vector([&](int row, int vector, const float4 &x, float2 stats) {
      if (vector == 0) *partial_stats(partial, row) = stats;
      partial_out(partial, row)[vector] = x;
    });
  }

 private:
  const Cta<C> &cta_;
};

}  // namespace fa::cuda::decode
