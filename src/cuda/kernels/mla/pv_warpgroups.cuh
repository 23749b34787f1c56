// SPDX-License-Identifier: Apache-2.0
// The two PV warpgroups: out [64][512] += P [64][64] V [64][512], 256 columns each. They also combine partials and store the results.
#pragma once

#include "cuda/common/cluster.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/fragment.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/segment_total.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/mla/cta.cuh"
#include "cuda/kernels/mla/segments.cuh"

namespace fa::cuda::mla {

template <class C>
class PvWarpgroups {
 public:
  using Element = typename C::Element;

  __device__ __forceinline__ explicit PvWarpgroups(const Cta<C> &cta) : cta_(cta), a_(cta.a_), p_(cta.p_), lane_(cta.lane_) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      mbarrier_wait(cta_.work_full(n & 1), n >> 1 & 1);
      work_ = &cta_.descriptor(n & 1);
      if (work_->batch < 0) return;
      // Rows beyond the sequence's used length.
      store_zero_rows(cta_.rows_of(*work_), p_, max(work_->rows, 0) + (opaque(threadIdx.x) >> 5), work_->end_row,
                      C::kPvThreads / 32, lane_);
      if constexpr (C::kSameBits) {
        segments();
        mbarrier_arrive(cta_.work_empty(n & 1));
        continue;
      }
      mainloop(work_->kv_tile_end - work_->kv_tile);
      if (C::kPairs && work_->pair && has_rows()) {
        if (cluster_cta_rank() == 0) {
          send_half<1>();
        } else {
          send_half<0>();
        }
      }
      mbarrier_wait(cta_.epilogue_full(), n & 1);
      epilogue(n & 1);
      mbarrier_arrive(cta_.work_empty(n & 1));
    }
  }

 private:
  __device__ __forceinline__ float &out(int i) { return out_[i / (C::kColumns / 4)][i % (C::kColumns / 4)]; }
  __device__ __forceinline__ float out(int i) const { return out_[i / (C::kColumns / 4)][i % (C::kColumns / 4)]; }
  // Computed where they are used: registers are for out.
  static __device__ __forceinline__ int wg() { return opaque(threadIdx.x) >> 7; }
  static __device__ __forceinline__ int warp() { return opaque(threadIdx.x) >> 5 & 3; }
  __device__ __forceinline__ int stage() const { return static_cast<int>(tile_count_ & 1); }
  __device__ __forceinline__ int row_of(int r) const { return cta_.row_of(warp(), r); }

  // The next `tiles` K tiles.
  __device__ __forceinline__ void mainloop(int tiles) {
    clear(out_[0]);
    clear(out_[1]);
#pragma unroll 1
    for (; tiles > 0; --tiles, ++tile_count_) {
      const Operands operands = this->operands();
      mbarrier_wait(cta_.full(stage()), tile_count_ >> 1 & 1);
      wait_p(0);
      const uint32_t flags = rescale_out();
      // A key that no token sees was loaded as zero. A key that only some tokens see may hold NaN or Inf, and 0 times that is NaN.
      if ((flags & Cta<C>::kNanSafe) != 0) {
#pragma unroll
        for (int slice = 1; slice < C::kSlices; ++slice) wait_p(slice);
        nan_safe_pv();
#pragma unroll
        for (int slice = 0; slice < C::kSlices - 1; ++slice) release_v(slice);
      } else {
        pv(operands);
      }
      release_v(C::kSlices - 1);
    }
  }

  __device__ __forceinline__ void wait_p(int slice) const { mbarrier_wait(cta_.p_full(stage(), slice), tile_count_ >> 1 & 1); }
  __device__ __forceinline__ void release_v(int slice) const { mbarrier_arrive(cta_.empty(stage(), slice)); }

  // Applies the rows' rescale factors to out. Returns the flags of all softmax warps.
  __device__ __forceinline__ uint32_t rescale_out() {
    const uint4 warp_flags = ld_shared_16(cta_.shared_flags(stage()));
    const uint32_t flags = uniform(warp_flags.x | warp_flags.y | warp_flags.z | warp_flags.w);
    if ((flags & Cta<C>::kRescaled) != 0) {
      float rescale[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) rescale[r] = ld_shared_float(cta_.shared_rescale(stage(), row_of(r)));
#pragma unroll
      for (int half = 0; half < 2; ++half) scale_rows<QkFragment<1, C::kColumns / 16>>(out_[half], rescale);
    }
    return flags;
  }

  // V: this warpgroup's columns of the K tile.
  __device__ __forceinline__ uint32_t shared_v() const {
    return cta_.shared_tile(stage()) + wg() * (C::kColumns / 64 * C::kAtomBytes);
  }
  struct Operands {
    uint64_t v, p;
  };
  __device__ __forceinline__ Operands operands() const {
    return {row_group_descriptor<C>(shared_v()), descriptor_k_major(cta_.shared_p(stage()))};
  }
  // out += P V in slices of 16 keys. A slice of the K tile is released while the next one is multiplied.
  __device__ __forceinline__ void pv(const Operands &operands) {
    const auto [v, p] = operands;
    fence_operand(out_[0]);
    fence_operand(out_[1]);
#pragma unroll
    for (int n = 0; n < C::kSlices; ++n) {
      if (n > 0) wait_p(n);
      wgmma_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half)
        Wgmma<Element, C::kColumns / 2>::ss_k_mn(
            out_[half], advance_descriptor(p, n * 32),
            advance_descriptor(v, n * 2 * C::kRowGroupBytes + half * (C::kColumns / 128 * C::kAtomBytes)), 1);
      wgmma_commit();
      if (n == 0) continue;
      wgmma_wait<1>();
      release_v(n - 1);
    }
    wgmma_wait<0>();
    fence_operand(out_[0]);
    fence_operand(out_[1]);
  }

  // The same over the visible pairs only, one key at a time, with P from shared memory.
  __device__ __forceinline__ void nan_safe_pv() {
    const uint32_t v = shared_v() + (opaque(lane_) & 3) * 4;
#pragma unroll 1
    for (int key = 0; key < C::kKeys; ++key) {
      uint32_t p[2];  // bits of P of this lane's rows
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_of(r);
        const uint32_t two_p =
            ld_shared_4(cta_.shared_p(stage()) + row * 128 + (((key >> 3) ^ (row & 7)) << 4) + (key & 6) * 2);
        p[r] = key & 1 ? two_p >> 16 : two_p & 0xFFFFu;
      }
#pragma unroll
      for (int j = 0; j < C::kColumns / 8; ++j) {
        const uint32_t x =
            ld_shared_4(v + key / 8 * C::kRowGroupBytes + j / 8 * C::kAtomBytes + key % 8 * 128 + ((j % 8 ^ (key & 7)) << 4));
        add_pair_nan_safe<Element>(&out(4 * j), p, x);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Epilogue
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool has_rows() const { return warp() * 16 < work_->rows; }

  // `parity` of the barrier epilogue_empty, which completes when all threads have read their rescale factors and stored their partial.
  __device__ __forceinline__ void epilogue(uint32_t parity) {
    if (work_->partials > 0) {
      if (threadIdx.x == 0) a_.counters[work_->awaited_counter] = 0;
      if (has_rows()) combine(work_->partials);
    }
    if (has_rows()) {
      if (work_->tile_continues) {
        if constexpr (C::kUsesCombineKernel) {
          store_partial_by_row(work_->partial);
        } else {
          store_partial(work_->partial);
        }
      } else {
        const int peer_half = C::kPairs && work_->pair ? cluster_cta_rank() ^ 1 : -1;
        if (peer_half != 0) store_half<0>();
        if (peer_half != 1) store_half<1>();
      }
    }
    mbarrier_arrive(cta_.epilogue_empty());
    if (!C::kUsesCombineKernel && work_->tile_continues && threadIdx.x == 0) {
      mbarrier_wait(cta_.epilogue_empty(), parity);
      count_released(a_.counters + work_->counter);
    }
    __syncwarp();
  }

  // Two columns of out. With 8-bit K it has the type of the queries.
  __device__ __forceinline__ uint32_t pack(float a, float b) const {
    return C::k8BitKv && p_.q.dtype == Dtype::bf16 ? pack2<__nv_bfloat16>(a, b) : pack2<Element>(a, b);
  }
  // Stores half of the columns to out. In a cluster the peer CTA's share of these columns is added first.
  template <int kHalf>
  __device__ __forceinline__ void store_half() {
    if (C::kPairs && work_->pair) add_peer<kHalf>();
    const int first_column = wg() * C::kColumns + kHalf * (C::kColumns / 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r);
      const uint4 row_epilogue = ld_shared_16(cta_.shared_epilogue(min(row, work_->rows - 1)));
      const float scale = __uint_as_float(row_epilogue.y);
      Element *dst = reinterpret_cast<Element *>(uint64_t{row_epilogue.w} << 32 | row_epilogue.z) + first_column;
      const int columns = row < work_->rows ? static_cast<int>(p_.head_dim_v) - first_column : 0;
      store_fragment_row<Element, C::kColumns / 16>(
          out_[kHalf], r, dst, columns, a_.vector_out, opaque(lane_) & 3,
          [&](float a, float b) { return pack(scaled_out<C::kSameBits>(a, scale), scaled_out<C::kSameBits>(b, scale)); });
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Clusters of two CTAs
  // ------------------------------------------------------------------------------------------------------------------

  // Sends half kHalf of the columns to the peer CTA, which stores them, once the peer has announced that its K tiles have been read.
  template <int kHalf>
  __device__ __forceinline__ void send_half() const {
    const int peer = cluster_cta_rank() ^ 1;
    const uint32_t out_full = map_to_cta(cta_.dsmem_out_full(), peer), buffer = map_to_cta(cta_.dsmem_buffer(0), peer);
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(cta_.dsmem_out_full(), (work_->rows + 15) / 16 * (2 * 32 * kHalfBytes));
    mbarrier_wait_cluster(cta_.dsmem_empty(), 0);
#pragma unroll
    for (int n = 0; n < C::kColumns / 16; ++n) {
      const int i = kHalf * (C::kColumns / 4) + 4 * n;
      st_async(buffer + n * (C::kPvThreads * 16), float4{out(i), out(i + 1), out(i + 2), out(i + 3)}, out_full);
    }
  }
  // Adds the peer's accumulators of the half that this CTA stores. Both CTAs add in the order of the keys.
  template <int kHalf>
  __device__ __forceinline__ void add_peer() {
    float own_scale[2], peer_scale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = min(row_of(r), work_->rows - 1);
      own_scale[r] = ld_shared_float(cta_.shared_epilogue(row));
      peer_scale[r] = ld_shared_float(cta_.shared_peer_stats(row));
    }
    mbarrier_wait(cta_.dsmem_out_full(), 0);
#pragma unroll
    for (int n = 0; n < C::kColumns / 16; ++n) {
      const uint4 theirs = ld_shared_16(cta_.dsmem_buffer(n));
      const float x[4] = {__uint_as_float(theirs.x), __uint_as_float(theirs.y), __uint_as_float(theirs.z),
                          __uint_as_float(theirs.w)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float &sum = out(kHalf * (C::kColumns / 4) + 4 * n + e);
        const int r = e >> 1;
        sum = kHalf == 0 ? fmaf(sum, own_scale[r], x[e] * peer_scale[r]) : fmaf(x[e], peer_scale[r], sum * own_scale[r]);
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Split-KV partials
  // ------------------------------------------------------------------------------------------------------------------

  // The accumulators of a thread in vectors of four, those of all threads side by side.
  __device__ __forceinline__ float4 *partial_out(int partial) const {
    return reinterpret_cast<float4 *>(a_.partial_out) + int64_t{partial} * (C::kRows * C::kDv / 4) +
           static_cast<uint32_t>(opaque(threadIdx.x));
  }

  __device__ __forceinline__ void store_partial(int partial) const {
    float4 *dst = partial_out(partial);
#pragma unroll
    for (int j = 0; j < C::kColumns / 8; ++j)
      dst[j * C::kPvThreads] = {out(4 * j), out(4 * j + 1), out(4 * j + 2), out(4 * j + 3)};
  }

  // For the combine kernel: row-major. This lane has two of each eight columns. 8-bit V is descaled here.
  __device__ __forceinline__ void store_partial_by_row(int partial) const {
    const float descale = C::k8BitKv ? head_descale(a_.v_descale, cta_.descale_batch(*work_), work_->head) : 1.f;
    const auto scaled = [&](float x) { return C::k8BitKv ? x * descale : x; };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      auto *dst =
          reinterpret_cast<float2 *>(a_.partial_out + (int64_t{partial} * C::kRows + row_of(r)) * C::kDv + wg() * C::kColumns) +
          (opaque(lane_) & 3);
#pragma unroll
      for (int j = 0; j < C::kColumns / 8; ++j) dst[j * 4] = {scaled(out(4 * j + 2 * r)), scaled(out(4 * j + 2 * r + 1))};
    }
  }

  // Adds the partials of the partitions before, in the order of their keys, to this CTA's accumulators. They come through the memory of the K
  // tiles: every thread loads its own vectors by cp.async. Where few warps have rows, several partials are in flight.
  __device__ __forceinline__ void combine(int partials) {
    constexpr int kVectors = C::kColumns / 8, kVectorsInFlight = 8, kStride = C::kPvThreads * 16;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float scale = ld_shared_float2(cta_.shared_epilogue(min(row_of(r), work_->rows - 1))).x;
#pragma unroll
      for (int j = 0; j < C::kColumns / 8; ++j) {
        out(4 * j + 2 * r) *= scale;
        out(4 * j + 2 * r + 1) *= scale;
      }
    }
    // Bytes of one vector of a partial over all threads. A quarter of the buffer is enough where only one warp of a warpgroup has rows.
    const int batch_bytes = kStride / 4 *
                            (work_->rows <= 16   ? 1
                             : work_->rows <= 32 ? 2
                                                 : 4),
              partials_in_flight = kStride / batch_bytes;
    const uint32_t staging = cta_.shared_tile(0) + (wg() * (batch_bytes / 2) + warp() * 512) + opaque(lane_) * 16;
    uint32_t scales = cta_.shared_partial_stats(-partials_in_flight, row_of(0));
    int buffer = 0;
#pragma unroll 1
    for (int remaining = partials; remaining > -partials_in_flight; --remaining) {  // partials that are still to be requested
      if (batch_bytes == kStride / 4) {
        cp_async_wait<3>();
      } else if (batch_bytes == kStride / 2) {
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      const bool arrived = remaining <= partials - partials_in_flight;
      const float4 *next = partial_out(cta_.partial(*work_, partials - remaining));
      float scale[2] = {0.f, 0.f};
      if (arrived) {
        scale[0] = ld_shared_float(scales);
        scale[1] = ld_shared_float(scales + 8 * 8);
      }
#pragma unroll
      for (int first = 0; first < kVectors; first += kVectorsInFlight) {
        if (arrived) {
#pragma unroll
          for (int n = first; n < first + kVectorsInFlight; ++n) {
            const uint4 x = ld_shared_16(staging + buffer + n * kStride);
            out(4 * n) = fmaf(scale[0], __uint_as_float(x.x), out(4 * n));
            out(4 * n + 1) = fmaf(scale[0], __uint_as_float(x.y), out(4 * n + 1));
            out(4 * n + 2) = fmaf(scale[1], __uint_as_float(x.z), out(4 * n + 2));
            out(4 * n + 3) = fmaf(scale[1], __uint_as_float(x.w), out(4 * n + 3));
            asm volatile("" : "+f"(out(4 * n + 3)));  // keeps the compiler from loading many vectors at once
          }
        }
        if (remaining > 0) {
#pragma unroll
          for (int n = first; n < first + kVectorsInFlight; ++n)
            cp_async_16(staging + buffer + n * kStride, next + n * C::kPvThreads);
        }
      }
      cp_async_commit();
      scales += C::kRows * 8;
      buffer = (buffer + batch_bytes) & (kStride - 1);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Segments (FA_FLAG_SAME_BITS)
  // ------------------------------------------------------------------------------------------------------------------

  // The accumulators of a thread, in vectors of four. In the workspace those of a warp lie side by side.
  static constexpr int kVectors = C::kColumns / 8;
  __device__ __forceinline__ float4 *place(float4 *base, int64_t number) const {
    return base + ((number * a_.partial_warps + warp()) * 2 + wg()) * (kVectors * 32) + opaque(lane_);
  }
  __device__ __forceinline__ float4 *total() const { return place(a_.totals, work_->partial); }
  // The total that the CTA with that partial hands over.
  __device__ __forceinline__ float4 *handed_total(int partial) const {
    return place(reinterpret_cast<float4 *>(a_.partial_out), partial);
  }
  // Stored segment number i of this CTA.
  __device__ __forceinline__ float4 *stored_segment(int i) const {
    return place(reinterpret_cast<float4 *>(a_.partial_out),
                 static_cast<int64_t>(gridDim.x) + work_->partial * a_.stored_segments + i);
  }
  __device__ __forceinline__ int segment_stride() const { return a_.partial_warps * (2 * kVectors * 32); }
  __device__ __forceinline__ float4 vector(int j) const { return {out(4 * j), out(4 * j + 1), out(4 * j + 2), out(4 * j + 3)}; }
  __device__ __forceinline__ void set_vector(int j, const float4 &x) {
    out(4 * j) = x.x, out(4 * j + 1) = x.y, out(4 * j + 2) = x.z, out(4 * j + 3) = x.w;
  }
  // What scales the total and the segment in this lane's rows: of a stored segment or of the one in registers.
  struct RowScales {
    FoldScales rows[2];
  };
  __device__ __forceinline__ RowScales scales_of(int segment) const {
    RowScales scales;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 x = ld_shared_float2(cta_.shared_segment(segment, row_of(r)));
      scales.rows[r] = {x.x, x.y};
    }
    return scales;
  }
  __device__ __forceinline__ RowScales own_scales() const { return scales_of(SegmentStorage::kMostStored); }

  // A work unit, segment by segment. It has one segment at least, which may have no keys.
  __device__ __forceinline__ void segments() {
    int tile = work_->kv_tile;
    bool last;
#pragma unroll 1
    do {
      const int end = cta_.segment_end(*work_, tile);
      mainloop(end - tile);
      tile = end;
      last = end == work_->kv_tile_end;
      end_segment(last);
    } while (!last);
  }
  __device__ __forceinline__ void end_segment(bool last) {
    const uint32_t parity = epilogues_++ & 1;
    mbarrier_wait(cta_.epilogue_full(), parity);
    const bool continues = work_->tile_continues;
    if constexpr (C::kUsesCombineKernel) {
      if (continues) {
        if (has_rows()) store_for_combine();
        mbarrier_arrive(cta_.epilogue_empty());
        __syncwarp();
        return;
      }
    }
    if (last && work_->partials > 0 && threadIdx.x == 0) a_.counters[work_->awaited_counter] = 0;
    if (has_rows()) {
      const uint32_t word = ld_shared_4(cta_.shared_action(warp()));
      const int stored = stored_of(word);
      SegmentAction action = action_of(word);
      if (!C::kUsesCombineKernel && last && action == SegmentAction::receive) {
        fold_staged(handed_total(work_->first_partial), stored);
        action = SegmentAction::first;
      }
      const bool folds = action == SegmentAction::fold || action == SegmentAction::receive;
      if (!last || continues || folds) {
        const float4 *from = total();
        if (!C::kUsesCombineKernel && action == SegmentAction::receive) {
          if (stored == 0) {
            from = handed_total(work_->first_partial);
          } else {
            receive_inner(stored);
          }
        }
        float4 *to = action == SegmentAction::store ? stored_segment(stored)
                     : last && continues            ? handed_total(work_->partial)
                                                    : total();
        if (!folds) {
          store_to(to);
        } else {
          fold_to(from, to);
          // Registers of the segment are not kept beyond this, whatever follows: they are wanted for loads.
          if (last && !continues) {
            load_from(to);
          } else {
            clear(out_[0]);
            clear(out_[1]);
          }
        }
      }
      if (last && !continues) {
        store_half<0>();
        store_half<1>();
      }
    }
    mbarrier_arrive(cta_.epilogue_empty());
    if (!C::kUsesCombineKernel && last && continues && threadIdx.x == 0) {
      mbarrier_wait(cta_.epilogue_empty(), parity);
      count_released(a_.counters + work_->counter);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void store_for_combine() const {
    const uint32_t word = ld_shared_4(cta_.shared_action(warp()));
    if (action_of(word) != SegmentAction::store) return;  // it has no K tiles
    store_partial_by_row(work_->partial + stored_of(word) * work_->partial_step);
  }
  __device__ __forceinline__ void store_to(float4 *to) const {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) __stcg(to + j * 32, vector(j));
  }
  // All loads are in flight at once, which makes up for a total that has to be stored before.
  __device__ __forceinline__ void load_from(const float4 *from) {
#pragma unroll
    for (int j = 0; j < kVectors; ++j) set_vector(j, __ldcg(from + j * 32));
  }
  // Folds the segment in registers into a total and stores that. As registers of the segment are done with, more loads are in flight.
  __device__ __forceinline__ void fold_to(const float4 *from, float4 *to) const {
    const RowScales scales = own_scales();
    fold_vectors<0, 4>(from, to, scales);
    fold_vectors<4, 8>(from, to, scales);
    fold_vectors<12, 12>(from, to, scales);
    fold_vectors<24, 8>(from, to, scales);
  }
  template <int kFirst, int kCount>
  __device__ __forceinline__ void fold_vectors(const float4 *from, float4 *to, const RowScales &scales) const {
    float4 x[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] = __ldcg(from + (kFirst + n) * 32);
#pragma unroll
    for (int n = 0; n < kCount; ++n) __stcg(to + (kFirst + n) * 32, fold_out(scales.rows, x[n], vector(kFirst + n)));
  }
  // Within a work unit: what the CTA before hands over becomes the total, and takes the stored segments. That is rare.
  __device__ __forceinline__ void receive_inner(int stored) const {
    constexpr int kLoads = 2;
    const float4 *from = handed_total(work_->first_partial), *segments = stored_segment(0);
    float4 *to = total();
#pragma unroll 1
    for (int first = 0; first < kVectors; first += kLoads, from += kLoads * 32, segments += kLoads * 32, to += kLoads * 32) {
      float4 x[kLoads];
#pragma unroll
      for (int n = 0; n < kLoads; ++n) x[n] = __ldcg(from + n * 32);
      const float4 *segment = segments;
#pragma unroll 1
      for (int i = 0; i < stored; ++i, segment += segment_stride()) {
        const RowScales scales = scales_of(i);
#pragma unroll
        for (int n = 0; n < kLoads; ++n) x[n] = fold_out(scales.rows, x[n], __ldcg(segment + n * 32));
      }
#pragma unroll
      for (int n = 0; n < kLoads; ++n) __stcg(to + n * 32, x[n]);
    }
  }
  // At the end of a work unit: folds the stored segments and the one in registers into a total. The registers become that total. This work unit is
  // the CTA's last, and its K tiles have been read. Through their memory pass, for two vectors of the registers at a time, those of the total
  // and of all stored segments.
  __device__ __forceinline__ void fold_staged(const float4 *from, int stored) {
    constexpr int kPairs = kVectors / 2, kStagedVectors = 32, kVectorBytes = C::kPvThreads * 16;
    static_assert(kStagedVectors * kVectorBytes <= C::kStages * C::kTileBytes &&
                  kStagedVectors >= 2 * (1 + SegmentStorage::kMostStored));
    const int depth = stored < 2 ? 8 : stored < 4 ? 4 : stored < 8 ? 2 : 1;  // pairs of vectors in flight
    const uint32_t staging = cta_.shared_tile(0) + opaque(threadIdx.x) * 16, pair_bytes = (stored + 1) * (2 * kVectorBytes);
    const float4 *segments = stored_segment(0);
    const auto request = [&](uint32_t to) {  // the next pair
      const float4 *part = from, *next = segments;
#pragma unroll 1
      for (int n = 0; n <= stored; ++n, to += 2 * kVectorBytes, next += segment_stride()) {
        cp_async_16(to, part);
        cp_async_16(to + kVectorBytes, part + 32);
        part = next;
      }
      from += 2 * 32;
      segments += 2 * 32;
    };
#pragma unroll 1
    for (int pair = 0; pair < depth; ++pair) {
      request(staging + pair * pair_bytes);
      cp_async_commit();
    }
    uint32_t at = staging;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      if (depth == 8) {
        cp_async_wait<7>();
      } else if (depth == 4) {
        cp_async_wait<3>();
      } else if (depth == 2) {
        cp_async_wait<1>();
      } else {
        cp_async_wait<0>();
      }
      float4 x[2] = {load_total(at), load_total(at + kVectorBytes)};
#pragma unroll 1
      for (int i = 0; i < stored; ++i) {
        const RowScales scales = scales_of(i);
        const uint32_t segment = at + (i + 1) * (2 * kVectorBytes);
        x[0] = fold_out(scales.rows, x[0], load_total(segment));
        x[1] = fold_out(scales.rows, x[1], load_total(segment + kVectorBytes));
      }
      const RowScales own = own_scales();
#pragma unroll
      for (int n = 0; n < 2; ++n) set_vector(2 * pair + n, fold_out(own.rows, x[n], vector(2 * pair + n)));
      if (pair + depth < kPairs) request(at);
      cp_async_commit();
      at = at + pair_bytes == staging + depth * pair_bytes ? staging : at + pair_bytes;
    }
  }

  static constexpr int kHalfBytes = C::kColumns / 4 * 4;  // bytes of a thread's accumulators for half of its columns

  const Cta<C> cta_;
  const Params &a_;
  const Problem &p_;
  const int lane_;
  const WorkUnitDescriptor *work_;
  uint32_t tile_count_ = 0;  // K tiles of the CTA so far
  uint32_t epilogues_ = 0;   // FA_FLAG_SAME_BITS: of the CTA so far, one for each segment
  float out_[2][C::kColumns /
                4];  // two halves of the columns: the kernel is launched with too few registers for a wgmma of 256 columns
};

}  // namespace fa::cuda::mla
