// SPDX-License-Identifier: Apache-2.0
// Epilogue of the decode kernels. Out of the KV groups is summed. A work unit that is a whole work tile stores the final out
// and lse; any other stores a split-KV partial into the workspace, which the combine kernel (combine.cuh) adds to the others.
#pragma once

#include <math_constants.h>

#include "cuda/kernels/decode/cta.cuh"

namespace fa::cuda::decode {

template <class C>
class Epilogue : protected Cta<C> {
 public:
  using Base = Cta<C>;
  using typename Base::Element;
  static constexpr int kVectors = C::kD / 4;  // vectors of four columns per row
  using Scheduler = StreamKScheduler<C, true>;

  using Base::Base;

 protected:
  using Base::a_;
  using Base::head_of;
  using Base::lane_;
  using Base::p_;
  using Base::q_start_;
  using Base::rows_;
  using Base::smem_out;
  using Base::smem_row_stats;
  using Base::token_of;
  using Base::work_unit_;

  // Stores the work unit's result. Out, maxima and row sums of all KV groups are in shared memory.
  __device__ __forceinline__ void store_results(const Scheduler &scheduler, int partition) const {
    if (work_unit_.whole()) {
      store_final();
    } else {
      store_partials(Scheduler::slot(a_, partition, work_unit_.begin == work_unit_.tile_begin));
    }
    if (work_unit_.begin == work_unit_.tile_begin) store_unused_rows();
  }

  __device__ __forceinline__ void publish_split_tile(const Scheduler &scheduler, int partition, bool ends_partition) const {
    if (threadIdx.x > 0 || !scheduler.publishes_tile(work_unit_, ends_partition)) return;
    SplitTile tile{};
    tile.q_start = sequence_of(p_.q_lengths, opaque(work_unit_.batch)).start;
    tile.head = this->head();
    tile.first_row = this->first_row();
    tile.rows = rows_;
    scheduler.publish_tile(tile, work_unit_, partition);
  }

  // Calls f(row, vector, x, stats) for every four columns x of out, summed over the KV groups; stats are the row's maximum and
  // row sum.
  template <typename F>
  __device__ __forceinline__ void for_each_out_vector(F f) const {
    const int num_vectors = rows_ * kVectors;
#pragma unroll(C::kD > 128 ? 1 : 2)
    for (int n = opaque(threadIdx.x); n < num_vectors; n += C::kThreads) {
      const int row = n / kVectors, vector = n % kVectors;
      float2 stats[C::kKvGroups];
      float row_max = -1e30f;
#pragma unroll
      for (int w = 0; w < C::kKvGroups; ++w) {
        stats[w] = ld_shared_float2(smem_row_stats(w, row));
        row_max = fmaxf(row_max, stats[w].x);
      }
      float sum = 0.f;
      float4 x{0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int w = 0; w < C::kKvGroups; ++w) {
        const float factor = exp2_approx(stats[w].x - row_max);
        sum = fmaf(stats[w].y, factor, sum);
        add_scaled(x, factor, ld_shared_float4(smem_out(w, row, vector / 2) + vector % 2 * 16));
      }
      f(row, vector, x, float2{row_max, sum});
    }
  }

  static __device__ __forceinline__ void add_scaled(float4 &x, float factor, const float4 &y) {
    x.x = fmaf(factor, y.x, x.x);
    x.y = fmaf(factor, y.y, x.y);
    x.z = fmaf(factor, y.z, x.z);
    x.w = fmaf(factor, y.w, x.w);
  }

  // Adds kCount partials, in their order, to x, whose maximum and row sum are `stats`.
  template <int kCount>
  static __device__ __forceinline__ void merge_partials(float4 &x, float2 &stats, const float4 (&partial)[kCount],
                                                        const float2 (&partial_stats_of)[kCount]) {
    float row_max = stats.x;
#pragma unroll
    for (int n = 0; n < kCount; ++n) row_max = fmaxf(row_max, partial_stats_of[n].x);
    const float scale_before = exp2_approx(stats.x - row_max);
    x = {x.x * scale_before, x.y * scale_before, x.z * scale_before, x.w * scale_before};
    stats = {row_max, stats.y * scale_before};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float scale = exp2_approx(partial_stats_of[n].x - row_max);
      stats.y = fmaf(scale, partial_stats_of[n].y, stats.y);
      add_scaled(x, scale, partial[n]);
    }
  }

  // The factor of a row's out and its lse, from its maximum and row sum. An attention sink is one more logit in the
  // denominator.
  struct FinalRow {
    float factor, lse;
  };
  __device__ __forceinline__ FinalRow finalize(int row, float2 stats) const {
    float factor = 1.f;
    if (p_.sink != nullptr) {
      const float sink = p_.sink[head_of(row) * p_.sink_stride] * kLog2e, with_sink = fmaxf(stats.x, sink);
      factor = exp2_approx(stats.x - with_sink);
      stats = {with_sink, stats.y * factor + exp2_approx(sink - with_sink)};
    }
    // The row sum is NaN when a visible score is NaN; out becomes NaN, too.
    if (stats.y == 0.f) return {0.f, -CUDART_INF_F};
    return {factor / stats.y, (stats.x + log2f(stats.y)) * kLn2};
  }

  __device__ __forceinline__ void store_final() const {
    for_each_out_vector([&](int row, int vector, const float4 &x, float2 stats) {
      const FinalRow final_row = finalize(row, stats);
      if (vector == 0) store_lse(row, final_row.lse);
      store_out(row, vector, x, final_row.factor);
    });
  }

  __device__ __forceinline__ void store_lse(int row, float lse) const {
    if (p_.lse.data != nullptr) *lse_at(token_of(row), head_of(row)) = lse;
  }
  __device__ __forceinline__ void store_out(int row, int vector, const float4 &x, float factor) const {
    store_out(out_at(token_of(row), head_of(row)) + 4 * vector, vector, x, factor);
  }
  __device__ __forceinline__ void store_out(Element *dst, int vector, const float4 &x, float factor) const {
    if (4 * vector >= p_.head_dim_v) return;
    const auto pack = [&](float a, float b) {
      if (C::k8BitKv && p_.q.dtype == Dtype::bf16) return pack2<__nv_bfloat16>(a, b);
      return pack2<Element>(a, b);
    };
    const uint2 words{pack(x.x * factor, x.y * factor), pack(x.z * factor, x.w * factor)};
    if (a_.vector_out) {
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
    return p_.lse.data + work_unit_.batch * p_.lse.batch_stride + head * p_.lse.head_stride +
           (q_start_ + token) * p_.lse.seq_stride;
  }
  __device__ __forceinline__ Element *out_at(int token, int head) const {
    return static_cast<Element *>(p_.out.data) + work_unit_.batch * p_.out.batch_stride +
           (q_start_ + token) * p_.out.seq_stride + head * p_.out.head_stride;
  }

  // Rows of the sequence's slot without queries: out = 0, lse = -inf.
  __device__ __forceinline__ void store_unused_rows() const {
    int end = static_cast<int>(sequence_of(p_.q_lengths, opaque(work_unit_.batch)).slot) * this->group_heads();
    if constexpr (C::kHasRowBlocks) end = min(end - this->first_row(), C::kRows);
    for (int row = rows_ + (opaque(threadIdx.x) >> 5); row < end; row += C::kThreads / 32) {
      const int token = token_of(row), head = head_of(row);
      const int lane = opaque(lane_);
      if (p_.lse.data != nullptr && lane == 0) *lse_at(token, head) = -CUDART_INF_F;
      auto *dst = reinterpret_cast<unsigned short *>(out_at(token, head));
      for (int column = lane; column < p_.head_dim_v; column += 32) dst[column] = 0;
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Split-KV partials
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ float4 *partial_out(int slot, int row) const {
    return reinterpret_cast<float4 *>(a_.partial_out) + (int64_t{slot} * C::kRows + row) * kVectors;
  }
  __device__ __forceinline__ float2 *partial_stats(int slot, int row) const {
    return a_.partial_stats + int64_t{slot} * C::kRows + row;
  }

  __device__ __forceinline__ void store_partials(int slot) const {
    for_each_out_vector([&](int row, int vector, const float4 &x, float2 stats) {
      if (vector == 0) *partial_stats(slot, row) = stats;
      partial_out(slot, row)[vector] = x;
    });
  }
};

}  // namespace fa::cuda::decode
