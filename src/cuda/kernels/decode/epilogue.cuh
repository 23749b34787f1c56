// SPDX-License-Identifier: Apache-2.0
// What becomes of a piece: out of the groups of warps, summed, is the caller's if the piece is a whole item, else a part of one in the
// workspace, which sums.cuh adds to the others.
#pragma once

#include <math_constants.h>

#include "cuda/kernels/decode/cta.cuh"

namespace fa::cuda::decode {

template <class C>
class Results : protected Block<C> {
 public:
  using Base = Block<C>;
  using typename Base::Element;
  static constexpr int kVectors = C::kD / 4;  // of four columns, in a row
  using TheWork = Work<C, true>;

  using Base::Base;

 protected:
  using Base::a_;
  using Base::head_of;
  using Base::lane_;
  using Base::p_;
  using Base::piece_;
  using Base::q_start_;
  using Base::rows_;
  using Base::shared_out;
  using Base::shared_sums;
  using Base::token_of;

  // The piece's out, maxima and sums are in shared memory.
  __device__ __forceinline__ void hand_over(const TheWork &work, int range) const {
    if (piece_.whole()) {
      store_whole();
    } else {
      store_part(TheWork::slot(a_, range, piece_.first == piece_.begin));
    }
    if (piece_.first == piece_.begin) store_unused_rows();
  }

  __device__ __forceinline__ void note_cut(const TheWork &work, int range, bool ends) const {
    if (threadIdx.x > 0 || !work.is_noted(piece_, ends)) return;
    Cut cut{};
    cut.q_start = sequence_of(p_.q_lengths, opaque(piece_.batch)).start;
    cut.head = this->head();
    cut.first_row = this->first_row();
    cut.rows = rows_;
    work.note(cut, piece_, range);
  }

  // f(row, vector, x, sums): four columns of a row, over all groups of warps, and the row's maximum and sum.
  template <typename F>
  __device__ __forceinline__ void each_vector(F f) const {
    const int count = rows_ * kVectors;
#pragma unroll(C::kD > 128 ? 1 : 2)
    for (int n = opaque(threadIdx.x); n < count; n += C::kThreads) {
      const int row = n / kVectors, vector = n % kVectors;
      float2 sums[C::kKeyWarps];
      float top = -1e30f;
#pragma unroll
      for (int w = 0; w < C::kKeyWarps; ++w) {
        sums[w] = ld_shared_float2(shared_sums(w, row));
        top = fmaxf(top, sums[w].x);
      }
      float sum = 0.f;
      float4 x{0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int w = 0; w < C::kKeyWarps; ++w) {
        const float factor = exp2_approx(sums[w].x - top);
        sum = fmaf(sums[w].y, factor, sum);
        add(x, factor, ld_shared_float4(shared_out(w, row, vector / 2) + vector % 2 * 16));
      }
      f(row, vector, x, float2{top, sum});
    }
  }

  static __device__ __forceinline__ void add(float4 &x, float factor, const float4 &y) {
    x.x = fmaf(factor, y.x, x.x);
    x.y = fmaf(factor, y.y, x.y);
    x.z = fmaf(factor, y.z, x.z);
    x.w = fmaf(factor, y.w, x.w);
  }

  // Adds kCount of them to x, whose maximum and sum are `sums`, in their order.
  template <int kCount>
  static __device__ __forceinline__ void add_all(float4 &x, float2 &sums, const float4 (&its)[kCount],
                                                 const float2 (&its_sums)[kCount]) {
    float top = sums.x;
#pragma unroll
    for (int n = 0; n < kCount; ++n) top = fmaxf(top, its_sums[n].x);
    const float before = exp2_approx(sums.x - top);
    x = {x.x * before, x.y * before, x.z * before, x.w * before};
    sums = {top, sums.y * before};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const float weight = exp2_approx(its_sums[n].x - top);
      sums.y = fmaf(weight, its_sums[n].y, sums.y);
      add(x, weight, its[n]);
    }
  }

  // What a row's out is multiplied by, and its lse, from its maximum and sum. The sink is one more logit in the denominator.
  struct Closing {
    float factor, lse;
  };
  __device__ __forceinline__ Closing close(int row, float2 sums) const {
    float factor = 1.f;
    if (p_.sink != nullptr) {
      const float sink = p_.sink[head_of(row) * p_.sink_stride] * kLog2e, raised = fmaxf(sums.x, sink);
      factor = exp2_approx(sums.x - raised);
      sums = {raised, sums.y * factor + exp2_approx(sink - raised)};
    }
    // The sum is NaN when a visible score is; then out is NaN too.
    if (sums.y == 0.f) return {0.f, -CUDART_INF_F};
    return {factor / sums.y, (sums.x + log2f(sums.y)) * kLn2};
  }

  __device__ __forceinline__ void store_whole() const {
    each_vector([&](int row, int vector, const float4 &x, float2 sums) {
      const Closing closing = close(row, sums);
      if (vector == 0) store_lse(row, closing.lse);
      store_out(row, vector, x, closing.factor);
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
    return p_.lse.data + piece_.batch * p_.lse.batch_stride + head * p_.lse.head_stride +
           (q_start_ + token) * p_.lse.seq_stride;
  }
  __device__ __forceinline__ Element *out_at(int token, int head) const {
    return static_cast<Element *>(p_.out.data) + piece_.batch * p_.out.batch_stride + (q_start_ + token) * p_.out.seq_stride +
           head * p_.out.head_stride;
  }

  // Rows of the sequence that are not used: out = 0, lse = -inf.
  __device__ __forceinline__ void store_unused_rows() const {
    int end = static_cast<int>(sequence_of(p_.q_lengths, opaque(piece_.batch)).slot) * this->group_heads();
    if constexpr (C::kRowBlocks) end = min(end - this->first_row(), C::kRows);
    for (int row = rows_ + (opaque(threadIdx.x) >> 5); row < end; row += C::kThreads / 32) {
      const int token = token_of(row), head = head_of(row);
      const int lane = opaque(lane_);
      if (p_.lse.data != nullptr && lane == 0) *lse_at(token, head) = -CUDART_INF_F;
      auto *dst = reinterpret_cast<unsigned short *>(out_at(token, head));
      for (int column = lane; column < p_.head_dim_v; column += 32) dst[column] = 0;
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Items in parts
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ float4 *partial_out(int slot, int row) const {
    return reinterpret_cast<float4 *>(a_.partial_out) + (int64_t{slot} * C::kRows + row) * kVectors;
  }
  __device__ __forceinline__ float2 *partial_stats(int slot, int row) const {
    return a_.partial_stats + int64_t{slot} * C::kRows + row;
  }

  __device__ __forceinline__ void store_part(int slot) const {
    each_vector([&](int row, int vector, const float4 &x, float2 sums) {
      if (vector == 0) *partial_stats(slot, row) = sums;
      partial_out(slot, row)[vector] = x;
    });
  }
};

}  // namespace fa::cuda::decode
