// SPDX-License-Identifier: Apache-2.0
// What becomes of a piece: out of the groups of warps, summed, is the caller's if the piece is a whole item, else a part of one in the
// workspace. The block that finds itself the last of an item sums the item's parts, in the order of their keys; where parts are large, the
// last blocks do so together.
#pragma once

#include <math_constants.h>

#include "cuda/decode/block.cuh"

namespace fa::cuda::decode {

template <class C>
class Results : protected Block<C> {
 public:
  using Base = Block<C>;
  using typename Base::Element;
  static constexpr int kVectors = C::kD / 4;  // of four columns, in a row
  // So many blocks of threads at most, the last ones that leave a part of an item, share the sum of the parts. Where these are small, waiting for
  // each other costs more than it gains.
  static constexpr int kMergers = C::kRows * C::kD >= 4096 ? 8 : 1;
  // The counter of an item counts blocks that have only their part to leave; in units of this the parts that are there; has a bit for each of
  // those that share the sum, except the last, if it has left; and counts those that have left or need the counter no more.
  static constexpr uint32_t kThere = 1u << 11, kLeft = 1u << 21, kDone = 1u << 29;
  static_assert(kMergers <= 8);
  // How often a block asks for others that may not even run: some 700 clocks each. (A limit in clocks is none: ptxas moves the reading of the
  // first one behind that of the second.)
  static constexpr int kPatience = 64;
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
  using Base::shared_;
  using Base::shared_out;
  using Base::shared_rings;
  using Base::shared_sums;
  using Base::token_of;

  // The piece's out, maxima and sums are in shared memory. `leaves`: this block of threads has nothing else to do.
  __device__ __forceinline__ void hand_over(const TheWork &work, int range, bool leaves) {
    if (piece_.whole()) {
      store_whole();
      store_unused_rows();
      return;
    }
    const int first_range = work.range_of(piece_.begin), parts = work.range_of(piece_.end - 1) - first_range + 1;
    int32_t *counter = a_.counters + work.counter(piece_, first_range);
    uint32_t before = 0;
    if (threadIdx.x == 0) before = atomicAdd(reinterpret_cast<uint32_t *>(counter), 1u);
    store_part(work.slot(range, piece_.first == piece_.begin));
    if (threadIdx.x == 0) st_shared_4(shared_, before);
    __syncthreads();                                                                // all threads have stored theirs
    const int after = parts - 1 - static_cast<int>(ld_shared_4(shared_) % kThere);  // parts that come later
    if (after >= min(kMergers, parts)) {
      if (threadIdx.x == 0) add_released(counter, kThere);
      return;
    }
    if constexpr (kMergers > 1) {
      merge_together(work, counter, first_range, parts, after, leaves);
    } else {
      if (threadIdx.x == 0) {
        while (static_cast<uint32_t>(load_acquired(counter)) / kThere != static_cast<uint32_t>(parts - 1)) {
        }
      }
      __syncthreads();
      merge(work, first_range, parts, 0, rows_ * kVectors);
      if (threadIdx.x == 0) *counter = 0;
    }
    if (after == 0) store_unused_rows();
  }

  // The part of this block is stored, and those of `after` blocks come later. Each of the last kMergers blocks sums a slice of the rows' vectors. But who
  // has other things to do, or has waited for too long, leaves, and the last block has its slice as well: so that nobody depends on blocks
  // that may be waiting for a multiprocessor themselves.
  __device__ __forceinline__ void merge_together(const TheWork &work, int32_t *counter, int first_range, int parts, int after,
                                                 bool leaves) const {
    const int mergers = min(kMergers, parts);
    const auto all_there = [&](uint32_t now) { return static_cast<int>(now % (kLeft << 1) / kThere) == parts; };
    bool counts = false;
    if (threadIdx.x == 0) {
      const uint32_t leaving = (kLeft << after) + kDone;
      counts = after == 0 || leaves;
      uint32_t now = add_acquired_released(counter, counts ? kThere : kThere + leaving) + kThere;
      if (!counts) now = 0;
      for (int asked = 0; counts && !all_there(now); ++asked) {
        now = static_cast<uint32_t>(load_acquired(counter));
        if (after > 0 && asked == kPatience) {
          counts = false;
          now = add_acquired_released(counter, leaving);
          // If all are there, it is too late: the last block may not know that this one has left.
          if (all_there(now) && now / kDone == static_cast<uint32_t>(mergers - 1)) *counter = 0;
        }
      }
      st_shared_4(shared_ + 4, now);
    }
    __syncthreads();
    const uint32_t now = ld_shared_4(shared_ + 4);
    if (!all_there(now)) return;
    const int vectors = rows_ * kVectors, each = (vectors + mergers - 1) / mergers;
    // A bit for each slice; neighbours at once.
    uint32_t mine = after > 0 ? 1u << after : 1u | (now / kLeft & 0xFE);
#pragma unroll 1
    while (mine != 0) {
      const int first = __ffs(mine) - 1, count = __ffs(~(mine >> first)) - 1;
      merge(work, first_range, parts, first * each, min(count * each, vectors - first * each));
      mine &= ~0u << (first + count);
      if (mine != 0) __syncthreads();  // these are read
    }
    if (counts && atomicAdd(reinterpret_cast<uint32_t *>(counter), kDone) / kDone == static_cast<uint32_t>(mergers - 1))
      *counter = 0;
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
    const int column = 4 * vector;
    if (column >= p_.head_dim_v) return;
    Element *dst = out_at(token_of(row), head_of(row)) + column;
    const auto pack = [&](float a, float b) {
      if (C::kOfBytes && p_.q.dtype == Dtype::bf16) return pack2<__nv_bfloat16>(a, b);
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
    if constexpr (C::kOfBytes) end = min(end - this->first_row(), C::kRows);
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

  __device__ __forceinline__ float4 *part_out(int slot, int row) const {
    return reinterpret_cast<float4 *>(a_.part_out) + (int64_t{slot} * C::kRows + row) * kVectors;
  }
  __device__ __forceinline__ float2 *part_sums(int slot, int row) const {
    return a_.part_sums + int64_t{slot} * C::kRows + row;
  }

  __device__ __forceinline__ void store_part(int slot) const {
    each_vector([&](int row, int vector, const float4 &x, float2 sums) {
      if (vector == 0) *part_sums(slot, row) = sums;
      part_out(slot, row)[vector] = x;
    });
  }

  // Sums the parts in the order of their keys, whichever came last: `vectors` of each from `begin` on, counted through all rows. They pass through
  // the rings: maxima and sums of all, then out of as many at a time as fit.
  __device__ __forceinline__ void merge(const TheWork &work, int first_range, int parts, int begin, int vectors) const {
    constexpr int kMine = (C::kRows * kVectors + C::kThreads - 1) / C::kThreads;  // vectors of a thread
    if (vectors <= 0) return;  // fewer vectors than slices, or a block of rows that this sequence does not have
    const int first_row = begin / kVectors, rows = kMergers > 1 ? (begin + vectors - 1) / kVectors + 1 - first_row : rows_,
              thread = opaque(threadIdx.x), out_bytes = vectors * 16;
    const uint32_t shared_parts = shared_rings() + (parts * rows * 8 + 127) / 128 * 128;
    const int at_once = static_cast<int>(shared_rings() + C::kRingsBytes - shared_parts) / out_bytes;
    const auto slot_of = [&](int part) { return work.slot(first_range + part, part == 0); };
    // A part a warp.
    const auto fetch_out = [&](int first, int count) {
      const int lane = thread & 31;
      for (int part = thread >> 5; part < count; part += C::kThreads / 32) {
        const float4 *from = part_out(slot_of(first + part), 0) + begin + lane;
        const uint32_t to = shared_parts + part * out_bytes + lane * 16;
#pragma unroll 4
        for (int n = 0; n < out_bytes / 512; ++n) cp_async_16(to + n * 512, from + n * 32);
        if (out_bytes % 512 != 0 && lane * 16 < out_bytes % 512)
          cp_async_16(to + out_bytes / 512 * 512, from + out_bytes / 512 * 32);
      }
      cp_async_commit();
    };
    for (int n = thread; n < parts * C::kRows; n += C::kThreads) {
      const int part = n / C::kRows, row = n % C::kRows;
      if (row < rows) cp_async_8(shared_rings() + (part * rows + row) * 8, part_sums(slot_of(part), first_row + row));
    }
    fetch_out(0, min(at_once, parts));

    float4 x[kMine];
    float2 sums[kMine];
#pragma unroll 1
    for (int first = 0; first < parts; first += at_once) {
      cp_async_wait<0>();
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kMine; ++n) {
        const int at = thread + n * C::kThreads;
        if (at >= vectors) break;
        const uint32_t its = shared_rings() + ((begin + at) / kVectors - first_row) * 8;
        if (first == 0) {
          x[n] = {0.f, 0.f, 0.f, 0.f};
          sums[n] = {-1e30f, 0.f};
#pragma unroll 4
          for (int part = 0; part < parts; ++part) sums[n].x = fmaxf(sums[n].x, ld_shared_float(its + part * rows * 8));
        }
#pragma unroll 4
        for (int part = first; part < min(first + at_once, parts); ++part) {
          const float2 part_sum = ld_shared_float2(its + part * rows * 8);
          const float weight = exp2_approx(part_sum.x - sums[n].x);
          sums[n].y = fmaf(weight, part_sum.y, sums[n].y);
          add(x[n], weight, ld_shared_float4(shared_parts + (part - first) * out_bytes + at * 16));
        }
      }
      if (first + at_once < parts) {
        __syncthreads();  // these are read
        fetch_out(first + at_once, min(at_once, parts - first - at_once));
      }
    }
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      const int at = thread + n * C::kThreads;
      if (at >= vectors) break;
      const int row = (begin + at) / kVectors, vector = (begin + at) % kVectors;
      const Closing closing = close(row, sums[n]);
      if (vector == 0) store_lse(row, closing.lse);
      store_out(row, vector, x[n], closing.factor);
    }
  }
};

}  // namespace fa::cuda::decode
