// SPDX-License-Identifier: Apache-2.0
// The two groups of warps that multiply weights by values, half of out's columns each, and how parts become results.
#pragma once

#include <math_constants.h>

#include "cuda/common/cluster.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/mla/cta.cuh"

namespace fa::cuda::mla {

template <class C>
class Values : private Block<C> {
 public:
  using Base = Block<C>;
  using typename Base::Element;

  using Base::Base;

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      mbarrier_wait(this->work_full(n & 1), n >> 1 & 1);
      plan_ = &this->descriptor(n & 1);
      if (plan_->batch < 0) return;
      walk();
      if (C::kPairs && plan_->pair && has_rows()) {
        if (cluster_cta_rank() == 0) {
          send<1>();
        } else {
          send<0>();
        }
      }
      mbarrier_wait(this->closed(), n & 1);
      finish(n & 1);
      mbarrier_arrive(this->work_empty(n & 1));
    }
  }

 private:
  using Base::a_;
  using Base::lane_;
  using Base::p_;
  using Base::shared_tile;

  __device__ __forceinline__ float &out(int i) { return out_[i / (C::kColumns / 4)][i % (C::kColumns / 4)]; }
  __device__ __forceinline__ float out(int i) const { return out_[i / (C::kColumns / 4)][i % (C::kColumns / 4)]; }
  // Worked out where it is needed: registers are for out.
  static __device__ __forceinline__ int group() { return opaque(threadIdx.x) >> 7; }
  static __device__ __forceinline__ int warp() { return opaque(threadIdx.x) >> 5 & 3; }
  __device__ __forceinline__ int place() const { return static_cast<int>(count_ & 1); }
  __device__ __forceinline__ int row_of(int r) const { return Base::row_of(warp(), r); }

  __device__ __forceinline__ void walk() {
    store_unused_rows();
#pragma unroll
    for (int j = 0; j < C::kColumns / 2; ++j) out(j) = 0.f;
    int tiles = plan_->kv_tile_end - plan_->kv_tile;
#pragma unroll 1
    for (; tiles > 0; --tiles, ++count_) {
      const Operands operands = find_operands();
      mbarrier_wait(this->full(place()), count_ >> 1 & 1);
      await_weights(0);
      const uint32_t notes = multiply_out();
      // What no token sees reads as zero; what only some see may be NaN or Inf, and zero times that is not zero.
      if ((notes & Base::kCare) != 0) {
#pragma unroll
        for (int part = 1; part < C::kParts; ++part) await_weights(part);
        multiply_exactly();
#pragma unroll
        for (int part = 0; part < C::kParts - 1; ++part) hand_back(part);
      } else {
        multiply_values(operands);
      }
      hand_back(C::kParts - 1);
    }
  }

  __device__ __forceinline__ void await_weights(int part) const {
    mbarrier_wait(this->weights(place(), part), count_ >> 1 & 1);
  }
  __device__ __forceinline__ void hand_back(int part) const { mbarrier_arrive(this->free(place(), part)); }

  // By what its weights have shrunk. Returns the notes of all warps.
  __device__ __forceinline__ uint32_t multiply_out() {
    const uint4 its = ld_shared_16(this->shared_notes(place()));
    const uint32_t notes = uniform(its.x | its.y | its.z | its.w);
    if ((notes & Base::kRaised) != 0) {
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) factor[r] = ld_shared_float(this->shared_factor(place(), row_of(r)));
#pragma unroll
      for (int j = 0; j < C::kColumns / 2; ++j) out(j) *= factor[j >> 1 & 1];
    }
    return notes;
  }

  // The values of this group's columns.
  __device__ __forceinline__ uint32_t shared_values() const {
    return shared_tile(place()) + group() * (C::kColumns / 64 * C::kSlabBytes);
  }
  struct Operands {
    uint64_t v, p;
  };
  __device__ __forceinline__ Operands find_operands() const {
    return {grouped_operand<C>(shared_values()), descriptor_k_major(this->shared_p(place()))};
  }
  // out += P V in parts: the tile's rows of one are handed back while the next is multiplied.
  __device__ __forceinline__ void multiply_values(const Operands &operands) {
    const auto [v, p] = operands;
    fence_operand(out_[0]);
    fence_operand(out_[1]);
#pragma unroll
    for (int n = 0; n < C::kParts; ++n) {
      if (n > 0) await_weights(n);
      wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half)
        Wgmma<Element, C::kColumns / 2>::ss_k_mn(
            out_[half], advance_descriptor(p, n * 32),
            advance_descriptor(v, n * 2 * C::kGroupBytes + half * (C::kColumns / 128 * C::kSlabBytes)), 1);
      wgmma_commit();
      if (n == 0) continue;
      wgmma_wait<1>();
      hand_back(n - 1);
    }
    wgmma_wait<0>();
    fence_operand(out_[0]);
    fence_operand(out_[1]);
  }

  // ... over the pairs that are not masked, one key at a time, with P from shared memory.
  __device__ __forceinline__ void multiply_exactly() {
    const uint32_t values = shared_values() + (opaque(lane_) & 3) * 4;
#pragma unroll 1
    for (int key = 0; key < C::kKeys; ++key) {
      float w[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_of(r);
        const uint32_t pair =
            ld_shared_4(this->shared_p(place()) + row * 128 + (((key >> 3) ^ (row & 7)) << 4) + (key & 6) * 2);
        w[r] = to_float<Element>(key & 1 ? pair >> 16 : pair & 0xFFFFu);
      }
#pragma unroll
      for (int j = 0; j < C::kColumns / 8; ++j) {
        const uint32_t x =
            ld_shared_4(values + key / 8 * C::kGroupBytes + j / 8 * C::kSlabBytes + key % 8 * 128 + ((j % 8 ^ (key & 7)) << 4));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (is_masked_p(w[r])) continue;
          out(4 * j + 2 * r) = fmaf(w[r], to_float<Element>(x & 0xFFFFu), out(4 * j + 2 * r));
          out(4 * j + 2 * r + 1) = fmaf(w[r], to_float<Element>(x >> 16), out(4 * j + 2 * r + 1));
        }
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Results
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool has_rows() const { return warp() * 16 < plan_->rows; }

  // `parity` of `taken`: the factors are read, a part is stored.
  __device__ __forceinline__ void finish(uint32_t parity) {
    if (plan_->parts > 0) {
      if (threadIdx.x == 0) a_.counters[plan_->awaited] = 0;
      if (has_rows()) merge(plan_->parts);
    }
    if (has_rows()) {
      if (plan_->tile_continues) {
        store_part(plan_->slot);
      } else {
        const int other_has = C::kPairs && plan_->pair ? cluster_cta_rank() ^ 1 : -1;
        if (other_has != 0) finish_half<0>();
        if (other_has != 1) finish_half<1>();
      }
    }
    mbarrier_arrive(this->taken());
    if (plan_->tile_continues && threadIdx.x == 0) {
      mbarrier_wait(this->taken(), parity);
      count_released(a_.counters + plan_->counter);
    }
    __syncwarp();
  }

  // To the caller's memory, half of the columns; of a pair with what the other block has of them.
  template <int kHalf>
  __device__ __forceinline__ void finish_half() {
    constexpr int kFirst = kHalf * (C::kColumns / 16), kEnd = kFirst + C::kColumns / 16;
    if (C::kPairs && plan_->pair) add_other<kHalf>();
    const int quad = opaque(lane_) & 3, columns = static_cast<int>(p_.head_dim_v) - group() * C::kColumns - quad * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r);
      const uint4 closing = ld_shared_16(this->shared_closing(min(row, plan_->rows - 1)));
      const float factor = __uint_as_float(closing.y);
      Element *dst = reinterpret_cast<Element *>(uint64_t{closing.w} << 32 | closing.z) + (group() * C::kColumns + quad * 8);
      const int valid = row < plan_->rows ? columns : 0;
#pragma unroll
      for (int j = kFirst; j < kEnd; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x[n] = pack2<Element>(out(4 * (j + n) + 2 * r) * factor, out(4 * (j + n) + 2 * r + 1) * factor);
        transpose_quad(x, quad);
        store_elements(dst + j * 8, x, valid - j * 8, a_.vector_out);
      }
    }
  }

  // Rows of the sequence that are not used: out = 0, lse = -inf.
  __device__ __forceinline__ void store_unused_rows() const {
    for (int row = max(plan_->rows, 0) + (opaque(threadIdx.x) >> 5); row < plan_->end_row; row += C::kValueThreads / 32) {
      if (lane_ == 0) this->store_lse(*plan_, row, -CUDART_INF_F);
      auto *dst = reinterpret_cast<unsigned short *>(this->out_at(*plan_, row));
      for (int column = lane_; column < p_.head_dim_v; column += 32) dst[column] = 0;
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Pairs
  // ------------------------------------------------------------------------------------------------------------------

  // Half kHalf of the columns is the other block's to finish. Its tiles are read when it says so.
  template <int kHalf>
  __device__ __forceinline__ void send() const {
    const int other = cluster_cta_rank() ^ 1;
    const uint32_t landed = map_to_cta(this->landed_out(), other), to = map_to_cta(this->shared_landing(0), other);
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(this->landed_out(), (plan_->rows + 15) / 16 * (2 * 32 * kHalfBytes));
    mbarrier_wait_cluster(this->other_read(), 0);
#pragma unroll
    for (int n = 0; n < C::kColumns / 16; ++n) {
      const int i = kHalf * (C::kColumns / 4) + 4 * n;
      st_async(to + n * (C::kValueThreads * 16), float4{out(i), out(i + 1), out(i + 2), out(i + 3)}, landed);
    }
  }
  // The other half is this block's. What both have is added in the order of the keys.
  template <int kHalf>
  __device__ __forceinline__ void add_other() {
    float own[2], weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(row_of(r), plan_->rows - 1);
      own[r] = ld_shared_float(this->shared_closing(row));
      weight[r] = ld_shared_float(this->shared_other_sums(row));
    }
    mbarrier_wait(this->landed_out(), 0);
#pragma unroll
    for (int n = 0; n < C::kColumns / 16; ++n) {
      const uint4 its = ld_shared_16(this->shared_landing(n));
      const float x[4] = {__uint_as_float(its.x), __uint_as_float(its.y), __uint_as_float(its.z), __uint_as_float(its.w)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float &mine = out(kHalf * (C::kColumns / 4) + 4 * n + e);
        const int r = e >> 1;
        mine = kHalf == 0 ? fmaf(mine, own[r], x[e] * weight[r]) : fmaf(x[e], weight[r], mine * own[r]);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Items in parts
  // ------------------------------------------------------------------------------------------------------------------

  // Every thread's accumulators, four at a time, side by side with those of the others.
  __device__ __forceinline__ float4 *partial_out(int slot) const {
    return reinterpret_cast<float4 *>(a_.partial_out) + int64_t{slot} * (C::kRows * C::kDv / 4) +
           static_cast<uint32_t>(opaque(threadIdx.x));
  }

  __device__ __forceinline__ void store_part(int slot) const {
    float4 *dst = partial_out(slot);
#pragma unroll
    for (int j = 0; j < C::kColumns / 8; ++j)
      dst[j * C::kValueThreads] = {out(4 * j), out(4 * j + 1), out(4 * j + 2), out(4 * j + 3)};
  }

  // Adds the parts of the ranges before, in the order of their keys, to the last one, which is in registers. They come through the places of
  // tiles, every thread's own pieces; where few warps have rows several parts at a time.
  __device__ __forceinline__ void merge(int parts) {
    constexpr int kPieces = C::kColumns / 8, kBatch = 8, kStride = C::kValueThreads * 16;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float weight = ld_shared_float2(this->shared_closing(min(row_of(r), plan_->rows - 1))).x;
#pragma unroll
      for (int j = 0; j < C::kColumns / 8; ++j) {
        out(4 * j + 2 * r) *= weight;
        out(4 * j + 2 * r + 1) *= weight;
      }
    }
    // Bytes of a piece of one part: a quarter of the places of all threads where one warp of a group has rows.
    const int step = kStride / 4 * (plan_->rows <= 16 ? 1 : plan_->rows <= 32 ? 2 : 4), ahead = kStride / step;
    const uint32_t staged = shared_tile(0) + (group() * (step / 2) + warp() * 512) + opaque(lane_) * 16;
    uint32_t sums = this->shared_part_sums(-ahead, row_of(0));
    int place = 0;
#pragma unroll 1
    for (int left = parts; left > -ahead; --left) {  // to be fetched
      if (step == kStride / 4) {
        cp_async_wait<3>();
      } else if (step == kStride / 2) {
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      const bool fetched = left <= parts - ahead;
      const float4 *next = partial_out(this->part_slot(*plan_, parts - left));
      float weight[2] = {0.f, 0.f};
      if (fetched) {
        weight[0] = ld_shared_float(sums);
        weight[1] = ld_shared_float(sums + 8 * 8);
      }
#pragma unroll
      for (int first = 0; first < kPieces; first += kBatch) {
        if (fetched) {
#pragma unroll
          for (int n = first; n < first + kBatch; ++n) {
            const uint4 x = ld_shared_16(staged + place + n * kStride);
            out(4 * n) = fmaf(weight[0], __uint_as_float(x.x), out(4 * n));
            out(4 * n + 1) = fmaf(weight[0], __uint_as_float(x.y), out(4 * n + 1));
            out(4 * n + 2) = fmaf(weight[1], __uint_as_float(x.z), out(4 * n + 2));
            out(4 * n + 3) = fmaf(weight[1], __uint_as_float(x.w), out(4 * n + 3));
            asm volatile("" : "+f"(out(4 * n + 3)));  // few at a time
          }
        }
        if (left > 0) {
#pragma unroll
          for (int n = first; n < first + kBatch; ++n) cp_async_16(staged + place + n * kStride, next + n * C::kValueThreads);
        }
      }
      cp_async_commit();
      sums += C::kRows * 8;
      place = (place + step) & (kStride - 1);
    }
  }

  static constexpr int kHalfBytes = C::kColumns / 4 * 4;  // a thread's accumulators of half its columns

  const Plan *plan_;
  uint32_t count_ = 0;             // tiles of the block so far
  float out_[2][C::kColumns / 4];  // of half the columns each: the kernel starts with too few registers for wider products
};

}  // namespace fa::cuda::mla
