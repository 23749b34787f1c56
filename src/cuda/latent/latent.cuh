// SPDX-License-Identifier: Apache-2.0
// Exact attention forward over latent caches: one row a key, 576 wide, whose first 512 columns are the value too, shared by many query
// heads. A row is read once and serves both products.
//
// A block of threads owns 64 rows (tokens x heads) of a sequence and walks over tiles of 64 keys. Four warps fetch, two for each place of a
// ring of two tiles; two warpgroups own half of out's columns each.
//
//   shared memory:  Q [64][576] | ring of 2 tiles [64][576] | P [64][64] | factors, maxima and sums, barriers, plans
//
//   first warpgroup:    S = Q K^T, P = exp2(S - m), P and the factors to shared memory, out[:, :256] = factor out + P V[:, :256]
//   second warpgroup:   when they are there,                                            out[:, 256:] = factor out + P V[:, 256:]
//   producers:          a tile each time its place is free, across the ends of pieces; one of them plans the pieces
//
// Work is cut as for the decode kernels (decode/work.cuh). The block that has the last part of an item keeps it in registers and adds the
// others to it. A row's maximum is its own and exact at every tile: a row's bits depend on its keys and on where they are cut alone.
#pragma once

#include <math_constants.h>

#include "cuda/common/multiply.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/score.cuh"
#include "cuda/latent/fetch.cuh"

namespace fa::cuda::latent {

__device__ __forceinline__ void st_shared_float2(uint32_t dst, float2 x) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};\n" ::"r"(dst), "f"(x.x), "f"(x.y) : "memory");
}

// Named barriers.
constexpr int kConsumersBarrier = 1, kWeightsBarrier = 2, kReadBarrier = 3, kGroupBarrier = 4;  // and one more group

template <class C>
class Consumer : private Block<C> {
 public:
  using Base = Block<C>;
  using typename Base::Element;

  using Base::Base;

  template <int kGroup>
  __device__ __forceinline__ void run() {
    warp_ = uniform(threadIdx.x >> 5) & 3;
    uint32_t count = 0;  // tiles of the block so far
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      barrier_wait(this->planned(n & 1), n >> 1 & 1);
      plan_ = &this->plan(n & 1);
      if (plan_->batch < 0) return;
      walk<kGroup>(count);
      __syncwarp();
      barrier_arrive_if(lane_ == 0, this->done(n & 1));
    }
  }

 private:
  using Base::a_;
  using Base::group_heads;
  using Base::lane_;
  using Base::p_;
  using Base::shared_sums;
  using Base::shared_tile;

  __device__ __forceinline__ int token_of(int row) const { return a_.group.quotient(plan_->row0 + row); }
  __device__ __forceinline__ int head_of(int row) const {
    return plan_->head * group_heads() + a_.group.remainder(plan_->row0 + row);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over the keys of a piece
  // ------------------------------------------------------------------------------------------------------------------

  template <int kGroup>
  __device__ __forceinline__ void walk(uint32_t &count) {
    store_unused_rows();
    const int first_tile = plan_->tile, end_tile = plan_->end_tile;
    if (first_tile < end_tile) {
      fetch_q();
      named_barrier(kConsumersBarrier, C::kConsumers);
    }
#pragma unroll
    for (int j = 0; j < C::kColumns / 2; ++j) out_[j] = 0.f;
    max_[0] = max_[1] = -1e30f;  // finite, so that -inf minus it is -inf
    sum_[0] = sum_[1] = 0.f;
#pragma unroll 1
    for (int tile = first_tile; tile < end_tile; ++tile, ++count) {
      const int place = static_cast<int>(count & 1), key0 = tile * C::kKeys;
      const bool masked = key0 < plan_->interior.begin || key0 + C::kKeys > plan_->interior.end, last = tile + 1 == end_tile;
      barrier_wait(this->full(place), count >> 1 & 1);
      if constexpr (kGroup == 0) {
        float s[C::kKeys / 2];
        multiply_q(s, place);
        if (masked) mask(s, key0);
        raise_max(s);
        if (tile > first_tile) named_barrier(kReadBarrier, C::kConsumers);  // the other group has read the last weights
        leave_weights(s, masked);
        shared_fence_for_copies();
        named_barrier_arrive(kWeightsBarrier, C::kConsumers);
        named_barrier(kGroupBarrier, 128);
      } else {
        named_barrier(kWeightsBarrier, C::kConsumers);
#pragma unroll
        for (int r = 0; r < 2; ++r) factor_[r] = ld_shared_float(this->shared_factor(row_of(r)));
      }
      if (__any_sync(~0u, factor_[0] != 1.f || factor_[1] != 1.f)) {
#pragma unroll
        for (int j = 0; j < C::kColumns / 2; ++j) out_[j] *= factor_[j >> 1 & 1];
      }
      // What no token sees reads as zero; what only some see may be NaN or Inf, and zero times that is not zero.
      if (masked && plan_->several && named_barrier_or(kGroupBarrier + kGroup, 128, values_have_nonfinite<kGroup>(place))) {
        multiply_exactly<kGroup>(place);
        release(place, 0);
      } else {
        multiply_values<kGroup>(place);
      }
      release(place, 1);
      if (kGroup == 1 && !last) named_barrier_arrive(kReadBarrier, C::kConsumers);
    }
    if (plan_->rows > 0) finish<kGroup>();
  }

  // Row of elements 2 r and 2 r + 1 of accumulators.
  __device__ __forceinline__ int row_of(int r) const { return warp_ * 16 + (opaque(lane_) >> 2) + 8 * r; }

  // Rows of q, by all consumers; rows and columns that do not exist are zero.
  __device__ __forceinline__ void fetch_q() const {
    const Element *q =
        static_cast<const Element *>(p_.q.data) + plan_->batch * p_.q.batch_stride + plan_->q_start * p_.q.seq_stride;
    const int chunk = lane_ & 7, first = static_cast<int>(threadIdx.x >> 5) * 4 + (lane_ >> 3);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + 32 * i, valid = row < plan_->rows ? static_cast<int>(p_.head_dim) - chunk * 8 : 0;
      const Element *from =
          row < plan_->rows ? q + token_of(row) * p_.q.seq_stride + head_of(row) * p_.q.head_stride + chunk * 8 : q;
      const uint32_t to = this->shared_q() + row / 8 * C::kGroupBytes + row % 8 * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
      for (int slab = 0; slab < C::kSlabs; ++slab) {
        cp_async_16(to + slab * C::kSlabBytes, slab * 64 < valid ? from + slab * 64 : from, slab * 64 < valid ? 16 : 0);
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    shared_fence_for_copies();
  }

  // Half of a tile is read by this warp.
  __device__ __forceinline__ void release(int place, int half) const { barrier_arrive_if(lane_ == 0, this->free(place, half)); }

  __device__ __forceinline__ void multiply_q(float (&s)[C::kKeys / 2], int place) const {
    const uint64_t q = grouped_operand<C>(this->shared_q()), k = grouped_operand<C>(shared_tile(place));
    hold(s);
    products_begin();
#pragma unroll
    for (int n = 0; n < C::kD / 16; ++n) {
      const int at = n / 4 * C::kSlabBytes + n % 4 * 32;
      Product<Element, C::kKeys>::rows_rows(s, advance_operand(q, at), advance_operand(k, at), n > 0);
    }
    products_commit();
    products_wait<0>();
    hold(s);
  }

  // The values of this group's columns.
  template <int kGroup>
  __device__ __forceinline__ uint32_t shared_values(int place) const {
    return shared_tile(place) + kGroup * (C::kColumns / 64) * C::kSlabBytes;
  }
  // out += P V; the first half of the tile is released.
  template <int kGroup>
  __device__ __forceinline__ void multiply_values(int place) {
    const uint64_t v = grouped_operand<C>(shared_values<kGroup>(place)), p = rows_operand(this->shared_p());
    hold(out_);
    products_begin();
#pragma unroll
    for (int n = 0; n < C::kKeys / 16; ++n) {
      Product<Element, C::kColumns>::rows_columns(out_, advance_operand(p, n * 32), advance_operand(v, n * 2 * C::kGroupBytes),
                                                  1);
      if (n == C::kKeys / 32 - 1) products_commit();
    }
    products_commit();
    products_wait<1>();
    release(place, 0);
    products_wait<0>();
    hold(out_);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ float exponent_scale() const { return p_.softmax_scale * kLog2e; }

  __device__ __forceinline__ void mask(float (&s)[C::kKeys / 2], int key0) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = token_of(row_of(r)), first = key0 + 2 * (opaque(lane_) & 3);
      const Keys keys = Diagonal<int32_t>(a_.limits, plan_->tokens, plan_->seqlen_k).visible_keys({token, token + 1});
#pragma unroll
      for (int j = 0; j < C::kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (first + 8 * j + e < keys.begin || first + 8 * j + e >= keys.end) s[4 * j + 2 * r + e] = -CUDART_INF_F;
    }
  }

  __device__ __forceinline__ void raise_max(const float (&s)[C::kKeys / 2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < C::kKeys / 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float raised = fmaxf(max_[r], top * exponent_scale());
      factor_[r] = exp2_approx(max_[r] - raised);
      max_[r] = raised;
      sum_[r] *= factor_[r];
    }
  }

  // P = 2^(S - m), rounded to the operand of the next product, to shared memory, and the factors of out; adds to the sums. What is masked
  // becomes kMaskedWeight.
  __device__ __forceinline__ void leave_weights(float (&s)[C::kKeys / 2], bool masked) {
    const float c = exponent_scale();
    const uint32_t line = this->shared_p() + (warp_ * 16 + (lane_ & 15)) * 128;
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < C::kKeys / 16; ++n) {
      uint32_t weights[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float e[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float x = s[8 * n + 2 * r + m];
          e[m] = exp2_approx(fmaf(x, c, -max_[r & 1]));
          sum[r & 1] += e[m];
          if (masked && x == -CUDART_INF_F) e[m] = kMaskedWeight;
        }
        weights[r] = pack2<Element>(e[0], e[1]);
      }
      stmatrix_x4(line + (((2 * n + (lane_ >> 4)) ^ (lane_ & 7)) << 4), weights[0], weights[1], weights[2], weights[3]);
    }
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    if ((lane_ & 3) == 0) {
      st_shared_float(this->shared_factor(row_of(0)), factor_[0]);
      st_shared_float(this->shared_factor(row_of(1)), factor_[1]);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // NaN and Inf in values that masked pairs would let through
  // ------------------------------------------------------------------------------------------------------------------

  // In this thread's share of the group's columns.
  template <int kGroup>
  __device__ __forceinline__ bool values_have_nonfinite(int place) const {
    constexpr int kBytes = C::kColumns / 64 * C::kSlabBytes;  // of eight rows
    const uint32_t values = shared_values<kGroup>(place) + (opaque(threadIdx.x) & 127) * 16;
    uint32_t found = 0;
#pragma unroll 4
    for (int n = 0; n < C::kKeys / 8 * kBytes; n += 128 * 16) {
      const uint4 x = ld_shared_16(values + n / kBytes * C::kGroupBytes + n % kBytes);
      found = nan_where_nonfinite<Element>(x.x, found);
      found = nan_where_nonfinite<Element>(x.y, found);
      found = nan_where_nonfinite<Element>(x.z, found);
      found = nan_where_nonfinite<Element>(x.w, found);
    }
    return (found & 0x7FFF7FFFu) != 0;
  }

  // out += P V over the pairs that are not masked, one key at a time, with P from shared memory.
  template <int kGroup>
  __device__ __forceinline__ void multiply_exactly(int place) {
    const uint32_t values = shared_values<kGroup>(place) + (opaque(lane_) & 3) * 4;
#pragma unroll 1
    for (int key = 0; key < C::kKeys; ++key) {
      float w[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_of(r);
        const uint32_t pair = ld_shared_4(this->shared_p() + row * 128 + (((key >> 3) ^ (row & 7)) << 4) + (key & 6) * 2);
        w[r] = to_float<Element>(key & 1 ? pair >> 16 : pair & 0xFFFFu);
      }
#pragma unroll
      for (int j = 0; j < C::kColumns / 8; ++j) {
        const uint32_t x =
            ld_shared_4(values + key / 8 * C::kGroupBytes + j / 8 * C::kSlabBytes + key % 8 * 128 + ((j % 8 ^ (key & 7)) << 4));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (is_masked_weight(w[r])) continue;
          out_[4 * j + 2 * r] = fmaf(w[r], to_float<Element>(x & 0xFFFFu), out_[4 * j + 2 * r]);
          out_[4 * j + 2 * r + 1] = fmaf(w[r], to_float<Element>(x >> 16), out_[4 * j + 2 * r + 1]);
        }
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Results
  // ------------------------------------------------------------------------------------------------------------------

  template <int kGroup>
  __device__ __forceinline__ void finish() {
    if constexpr (kGroup == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum_[r] += __shfl_xor_sync(~0u, sum_[r], 1);
        sum_[r] += __shfl_xor_sync(~0u, sum_[r], 2);
        if ((lane_ & 3) == 0) st_shared_float2(shared_sums(row_of(r)), {max_[r], sum_[r]});
      }
    }
    if (plan_->part) {
      store_part<kGroup>(plan_->slot);
      sync();  // all threads have stored theirs
      if (threadIdx.x == 0) count_released(a_.counters + plan_->counter);
      return;
    }
    sync();
    float2 sums[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) sums[r] = ld_shared_float2(shared_sums(row_of(r)));
    if (plan_->parts > 0) merge<kGroup>(plan_->first_part, plan_->parts, sums);
    store_whole<kGroup>(sums);
    sync();  // the sums are read, and what lies where Q was
  }

  static __device__ __forceinline__ void sync() { named_barrier(kConsumersBarrier, C::kConsumers); }

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
    return {__fdividef(factor, sums.y), (sums.x + __log2f(sums.y)) * kLn2};
  }

  template <int kGroup>
  __device__ __forceinline__ void store_whole(const float2 (&sums)[2]) const {
    const int quad = opaque(lane_) & 3, columns = static_cast<int>(p_.head_dim_v) - kGroup * C::kColumns - quad * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r), real = min(row, plan_->rows - 1);
      const Closing closing = close(real, sums[r]);
      Element *dst = out_at(real) + kGroup * C::kColumns + quad * 8;
      const int valid = row < plan_->rows ? columns : 0;
#pragma unroll
      for (int j = 0; j < C::kColumns / 8; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x[n] = pack2<Element>(out_[4 * (j + n) + 2 * r] * closing.factor, out_[4 * (j + n) + 2 * r + 1] * closing.factor);
        transpose_quad(x, quad);
        store_elements(dst + j * 8, x, valid - j * 8, a_.vector_out);
      }
      if (kGroup == 0 && quad == 0 && row < plan_->rows) store_lse(row, closing.lse);
    }
  }

  __device__ __forceinline__ void store_lse(int row, float lse) const {
    if (p_.lse.data != nullptr) *lse_at(row) = lse;
  }
  __device__ __forceinline__ float *lse_at(int row) const {
    return p_.lse.data + plan_->batch * p_.lse.batch_stride + head_of(row) * p_.lse.head_stride +
           (plan_->q_start + token_of(row)) * p_.lse.seq_stride;
  }
  __device__ __forceinline__ Element *out_at(int row) const {
    return static_cast<Element *>(p_.out.data) + plan_->batch * p_.out.batch_stride +
           (plan_->q_start + token_of(row)) * p_.out.seq_stride + head_of(row) * p_.out.head_stride;
  }

  // Rows of the sequence that are not used: out = 0, lse = -inf.
  __device__ __forceinline__ void store_unused_rows() const {
    for (int row = max(plan_->rows, 0) + (opaque(threadIdx.x) >> 5); row < plan_->end_row; row += C::kConsumers / 32) {
      if (lane_ == 0) store_lse(row, -CUDART_INF_F);
      auto *dst = reinterpret_cast<unsigned short *>(out_at(row));
      for (int column = lane_; column < p_.head_dim_v; column += 32) dst[column] = 0;
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Items in parts
  // ------------------------------------------------------------------------------------------------------------------

  // Every thread's accumulators, four at a time, side by side with those of the others.
  __device__ __forceinline__ float4 *part_out(int slot) const {
    return reinterpret_cast<float4 *>(a_.part_out) + int64_t{slot} * (C::kRows * C::kDv / 4) + opaque(threadIdx.x);
  }
  __device__ __forceinline__ float2 *part_sums(int slot) const { return a_.part_sums + int64_t{slot} * C::kRows; }
  __device__ __forceinline__ bool has_rows() const { return warp_ * 16 < plan_->rows; }

  template <int kGroup>
  __device__ __forceinline__ void store_part(int slot) const {
    if (!has_rows()) return;
    float4 *dst = part_out(slot);
#pragma unroll
    for (int j = 0; j < C::kColumns / 8; ++j)
      dst[j * C::kConsumers] = {out_[4 * j], out_[4 * j + 1], out_[4 * j + 2], out_[4 * j + 3]};
    if (kGroup == 0 && (lane_ & 3) == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) part_sums(slot)[row_of(r)] = {max_[r], sum_[r]};
    }
  }

  static __device__ __forceinline__ int load_acquired(const int32_t *counter) {
    int now;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];\n" : "=r"(now) : "l"(counter) : "memory");
    return now;
  }

  // Adds the parts of the ranges before, in the order of their keys, to the last one, which is in registers. Those ranges are of blocks of
  // threads that have started before this one and come to these parts first. Maxima and sums of the parts pass through where Q was.
  template <int kGroup>
  __device__ __forceinline__ void merge(int first_part, int parts, float2 (&sums)[2]) {
    if (threadIdx.x == 0) {
      int32_t *counter = a_.counters + plan_->counter;
      while (load_acquired(counter) != parts) __nanosleep(100);
      *counter = 0;
    }
    sync();
    const auto sums_at = [&](int part, int row) { return this->shared_q() + (part * C::kRows + row) * 8; };
    for (int n = opaque(threadIdx.x); n < parts * C::kRows; n += C::kConsumers) {
      const int part = n / C::kRows, row = n % C::kRows;
      if (row < plan_->rows) st_shared_float2(sums_at(part, row), __ldcg(part_sums(first_part + part) + row));
    }
    sync();
    if (!has_rows()) return;
    float top[2];
    int row[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row[r] = min(row_of(r), plan_->rows - 1);
      top[r] = sums[r].x;
#pragma unroll 1
      for (int part = 0; part < parts; ++part) top[r] = fmaxf(top[r], ld_shared_float2(sums_at(part, row[r])).x);
      const float weight = exp2_approx(sums[r].x - top[r]);
      sums[r] = {top[r], sums[r].y * weight};
#pragma unroll
      for (int j = 0; j < C::kColumns / 8; ++j) {
        out_[4 * j + 2 * r] *= weight;
        out_[4 * j + 2 * r + 1] *= weight;
      }
    }
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      float weight[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 its = ld_shared_float2(sums_at(part, row[r]));
        weight[r] = exp2_approx(its.x - top[r]);
        sums[r].y = fmaf(weight[r], its.y, sums[r].y);
      }
      const float4 *from = part_out(first_part + part);
      constexpr int kAtOnce = 16;
#pragma unroll
      for (int first = 0; first < C::kColumns / 8; first += kAtOnce) {
        float4 x[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) x[n] = __ldcg(from + (first + n) * C::kConsumers);
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const int j = 4 * (first + n);
          out_[j] = fmaf(weight[0], x[n].x, out_[j]);
          out_[j + 1] = fmaf(weight[0], x[n].y, out_[j + 1]);
          out_[j + 2] = fmaf(weight[1], x[n].z, out_[j + 2]);
          out_[j + 3] = fmaf(weight[1], x[n].w, out_[j + 3]);
        }
      }
    }
  }

  const Plan *plan_;
  int warp_;  // of the group
  float out_[C::kColumns / 2];
  float max_[2], sum_[2], factor_[2];
};

// Who is what in a block of threads.
template <class C>
class Roles : private Block<C> {
 public:
  using Block<C>::Block;

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) {
      for (int n = 0; n < 2; ++n) {
        barrier_init(this->full(n), 64);
        for (int half = 0; half < 2; ++half) barrier_init(this->free(n, half), C::kConsumers / 32);
        barrier_init(this->planned(n), 1);
        barrier_init(this->done(n), C::kConsumers / 32);
      }
      barrier_init_fence();
    }
    __syncthreads();
    const int group = uniform(threadIdx.x >> 7);
    if (group == 2) {
      give_registers<40>();
      Producer<C>(this->a_, this->memory_).run();
    } else {
      take_registers<232>();
      if (group == 0) {
        Consumer<C>(this->a_, this->memory_).template run<0>();
      } else {
        Consumer<C>(this->a_, this->memory_).template run<1>();
      }
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) latent(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  Roles<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::latent
