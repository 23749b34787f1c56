// SPDX-License-Identifier: Apache-2.0
// Exact attention forward for head_dim 257 to 512 on Hopper. A CTA owns 64 queries of a head: out of 64 rows and 512 columns is half of the
// registers of an SM.
//
//   softmax warpgroup:   S = Q K^T, masks, P = exp2(S - m); P in 16 bits and the factors of out's rows to shared memory
//   PV warpgroups (2):   half of the columns of out each: out = factor * out + P V
//   producer warps:      warp 0 loads Q and K, atom by atom; warp 1 loads V
//
// S of the next KV tile overlaps P V of this one. V is released in halves of a warpgroup's columns.
#pragma once

#include "cuda/common/epilogue.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90/forward.h"
#include "cuda/kernels/fwd_sm90_wide/shared_storage.h"

namespace fa::cuda::sm90 {

template <typename Element_, int kD_, int kStages_, ScoreSet kScores_>
struct WideConfig {
  using Element = Element_;
  using Storage = WideStorage<kD_, kStages_>;
  static constexpr int kD = kD_, kStages = kStages_, kAtoms = Storage::kAtoms, kAtomBytes = Storage::kAtomBytes;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool kScored = kScores != kPlain;
  // Warpgroups: producers, softmax, and two for out. Together they have all registers of an SM.
  static constexpr int kThreads = 512, kProducerRegisters = 32, kSoftmaxRegisters = 144, kPvRegisters = 168;
  static_assert(kProducerRegisters + kSoftmaxRegisters + 2 * kPvRegisters == 512);
  static constexpr int kFirstAtoms = (kAtoms + 1) / 2, kSecondAtoms = kAtoms / 2;  // of out, by warpgroup
  static_assert(kD % 64 == 0 && kFirstAtoms <= 4);
};

template <class C>
class ForwardWide {
 public:
  __device__ __forceinline__ ForwardWide(const ForwardParams &params, char *shared)
      : a_(params),
        p_(params.problem),
        smem_(smem_address(shared)),
        lane_(static_cast<int>(threadIdx.x & 31)),
        warp_(static_cast<int>(uniform(threadIdx.x >> 5) & 3)) {
    const L2HeadOrder::Place place = a_.order.at(static_cast<int>(blockIdx.x));
    batch_ = place.batch;
    head_q_ = place.head;
    head_k_ = a_.group.quotient(place.head);
    row0_ = place.row_block * 64;
    last_block_ = place.row_block == a_.order.row_blocks() - 1;
    const Sequence q = sequence_of(p_.q_lengths, batch_), k = unpadded_keys(p_.k_lengths, batch_);
    q_ = {static_cast<int>(q.start), static_cast<int>(q.slot), static_cast<int>(q.len)};
    k_ = {static_cast<int>(k.start), static_cast<int>(k.slot), static_cast<int>(k.len)};
    const Diagonal<int32_t> diagonal = this->diagonal();
    const RangeOf<int32_t> rows{row0_, min(row0_ + 64, diagonal.seqlen_q)};
    const KeyRange keys = diagonal.visible_keys(rows);
    tiles_ = keys.empty() ? KeyRange{0, 0} : tiles_touching<64>(keys);
    full_ = row0_ + 64 > diagonal.seqlen_q ? KeyRange{0, 0} : tiles_inside<64>(diagonal.interior_keys(rows));
  }

  __device__ __forceinline__ void run() const {
    if (row0_ >= max(q_.len, q_.seq_slot)) return;  // past the end of a packed sequence
    if (threadIdx.x == 0) {
      init_barriers();
    } else if (threadIdx.x == 32) {
      for (const CUtensorMap *map : {&a_.q_map, &a_.k_map, &a_.v_map}) tma_prefetch_descriptor(map);
    }
    __syncthreads();
    const auto wg = uniform(threadIdx.x / 128);
    if (wg == 0) {
      setmaxnreg_dealloc<C::kProducerRegisters>();
      if (warp_ == 0) load_q_and_k();
      if (warp_ == 1) load_v();
    } else if (wg == 1) {
      setmaxnreg_alloc<C::kSoftmaxRegisters>();
      softmax_warpgroup();
    } else {
      setmaxnreg_alloc<C::kPvRegisters>();
      if constexpr (C::kFirstAtoms == C::kSecondAtoms) {
        pv_warpgroup<C::kFirstAtoms>((wg - 2) * C::kFirstAtoms);
      } else if (wg == 2) {
        pv_warpgroup<C::kFirstAtoms>(0);
      } else {
        pv_warpgroup<C::kSecondAtoms>(C::kFirstAtoms);
      }
    }
  }

 private:
  using Element = typename C::Element;
  using Storage = typename C::Storage;
  using Fragment = QkFragment<1, 8>;  // of S, of one warp
  using KPipeline = PipelineState<Storage::kKAtomStages>;
  using VPipeline = PipelineState<C::kStages>;

  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {a_.limits, q_.len, k_.len}; }
  __device__ __forceinline__ bool is_partial(int tile) const { return tile < full_.begin || tile >= full_.end; }
  // Of the tile: row r of this lane's two.
  __device__ __forceinline__ int row_of(int r) const { return warp_ * 16 + (lane_ >> 2) + 8 * r; }

  __device__ __forceinline__ uint32_t q(int atom) const { return smem_ + offsetof(Storage, q) + atom * C::kAtomBytes; }
  __device__ __forceinline__ uint32_t k(int stage) const { return smem_ + offsetof(Storage, k) + stage * C::kAtomBytes; }
  __device__ __forceinline__ uint32_t v(int stage, int atom) const {
    return smem_ + offsetof(Storage, v) + (stage * C::kAtoms + atom) * C::kAtomBytes;
  }
  __device__ __forceinline__ uint32_t p() const { return smem_ + offsetof(Storage, p); }
  __device__ __forceinline__ uint32_t rescale(int row) const { return smem_ + offsetof(Storage, rescale) + row * 4; }
  __device__ __forceinline__ uint32_t rescales() const { return smem_ + offsetof(Storage, rescales) + warp_ * 4; }
  __device__ __forceinline__ uint32_t q_full() const { return smem_ + offsetof(Storage, q_full); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return smem_ + offsetof(Storage, k_full) + stage * 8; }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return smem_ + offsetof(Storage, k_empty) + stage * 8; }
  __device__ __forceinline__ uint32_t v_full(int stage, int atom) const {
    return smem_ + offsetof(Storage, v_full) + (stage * C::kAtoms + atom) * 8;
  }
  __device__ __forceinline__ uint32_t v_empty(int stage, int atom) const {
    return smem_ + offsetof(Storage, v_empty) + (stage * C::kAtoms + atom) * 8;
  }
  __device__ __forceinline__ uint32_t p_full() const { return smem_ + offsetof(Storage, p_full); }
  __device__ __forceinline__ uint32_t p_empty() const { return smem_ + offsetof(Storage, p_empty); }

  __device__ __forceinline__ void init_barriers() const {
    constexpr int kWarps = 4;  // of the warpgroup that arrives
    mbarrier_init(q_full(), 1);
    for (int n = 0; n < Storage::kKAtomStages; ++n) {
      mbarrier_init(k_full(n), 1);
      mbarrier_init(k_empty(n), kWarps);
    }
    for (int n = 0; n < C::kStages * C::kAtoms; ++n) {
      mbarrier_init(v_full(0, n), 1);
      mbarrier_init(v_empty(0, n), kWarps);
    }
    mbarrier_init(p_full(), 128);
    mbarrier_init(p_empty(), 2 * kWarps);
    mbarrier_init_fence();
  }
  __device__ __forceinline__ void release_warp(uint32_t barrier) const {
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, barrier);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Producer warps
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void load_key_atom(uint32_t dst, const CUtensorMap &map, uint32_t barrier, int atom,
                                                int tile) const {
    mbarrier_arrive_expect_tx(barrier, C::kAtomBytes);
    tma_load_4d(dst, &map, barrier, atom * 64, k_.start + tile * 64, head_k_, p_.k_lengths.cu != nullptr ? 0 : batch_,
                kEvictLast);
  }
  __device__ __forceinline__ void load_q_and_k() const {
    if (tiles_.empty()) return;
    if (elect_one()) {
      mbarrier_arrive_expect_tx(q_full(), Storage::kTileBytes);
#pragma unroll 1
      for (int atom = 0; atom < C::kAtoms; ++atom)
        tma_load_4d(q(atom), &a_.q_map, q_full(), atom * 64, q_.start + row0_, head_q_, p_.q_lengths.cu != nullptr ? 0 : batch_,
                    kEvictFirst);
    }
    KPipeline pipe;
#pragma unroll 1
    for (int tile = tiles_.begin; tile < tiles_.end; ++tile)
#pragma unroll 1
      for (int atom = 0; atom < C::kAtoms; ++atom) {
        mbarrier_wait(k_empty(pipe.stage()), pipe.phase() ^ 1);
        if (elect_one()) load_key_atom(k(pipe.stage()), a_.k_map, k_full(pipe.stage()), atom, tile);
        pipe.advance();
      }
  }
  // In the order in which the PV warpgroups release atoms.
  __device__ __forceinline__ void load_v() const {
    VPipeline pipe;
#pragma unroll 1
    for (int tile = tiles_.begin; tile < tiles_.end; ++tile) {
#pragma unroll 1
      for (int n = 0; n < C::kAtoms; ++n) {
        const int atom = C::kAtoms == 8 ? n / 2 % 2 * 4 + n / 4 * 2 + n % 2 : n, stage = pipe.stage();
        mbarrier_wait(v_empty(stage, atom), pipe.phase() ^ 1);
        if (elect_one()) load_key_atom(v(stage, atom), a_.v_map, v_full(stage, atom), atom, tile);
      }
      pipe.advance();
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax warpgroup
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void softmax_warpgroup() const {
    OnlineSoftmax<Fragment> softmax;
    softmax.reset();
    KPipeline pipe;
    uint32_t p_phase = 1;
    const float scale = exponent_scale(p_);
    if (!tiles_.empty()) mbarrier_wait(q_full(), 0);
#pragma unroll 1
    for (int tile = tiles_.begin; tile < tiles_.end; ++tile) {
      float s[32];
      start_and_wait_s(s, pipe);
      const int key0 = tile * 64;
      if constexpr (C::kScored) {
        apply_score_mods<Fragment, C::kScores>(
            s, p_, a_.raw, [&](int) { return head_terms(p_, a_.raw.logit, batch_, head_q_); },
            [&](int r) { return row0_ + row_of(r) + k_.len - q_.len - key0 - Fragment::first_key(lane_); });
      }
      const bool partial = is_partial(tile);
      if (partial) mask_rows<Fragment>(s, key0, lane_, [&](int r) { return keys_of_query(diagonal(), row0_ + row_of(r)); });
      const bool rescaled = softmax.update_max(s, scale, kRescaleThreshold);
      float tile_sum[2];
      uint32_t p16[4][4];
      if (partial) {
        softmax.template exponentiate</*kMasked=*/true>(s, scale, tile_sum);
      } else {
        softmax.template exponentiate</*kMasked=*/false>(s, scale, tile_sum);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) softmax.sum[r] += tile_sum[r];
      cuda::convert_p<Element>(s, p16);
      mbarrier_wait(p_empty(), p_phase);
      p_phase ^= 1;
      if (lane_ == 0) st_shared_4(rescales(), rescaled);
      if (rescaled && Fragment::leads(lane_)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) st_shared_float(rescale(row_of(r)), softmax.rescale[r]);
      }
      const uint32_t row = p() + (warp_ * 16 + (lane_ & 15)) * 128;
#pragma unroll
      for (int n = 0; n < 4; ++n) stmatrix_x4(row + (((2 * n + (lane_ >> 4)) ^ (lane_ & 7)) << 4), p16[n]);
      fence_proxy_async();
      mbarrier_arrive(p_full());
    }
    softmax.reduce_sums();
    RowResult result[2];
    finalize_rows(softmax.max, softmax.sum, sink_of(p_, head_q_), result);
    mbarrier_wait(p_empty(), p_phase);
    if (Fragment::leads(lane_)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row0_ + row_of(r);
        const bool used = row < q_.len;
        st_shared_float(rescale(row_of(r)), used ? result[r].factor : 0.f);
        if (p_.lse.data != nullptr && row < q_.seq_slot)
          *row_of_tensor(p_.lse, batch_, q_.start + row, head_q_) = used ? result[r].lse : -CUDART_INF_F;
      }
    }
    mbarrier_arrive(p_full());
  }

  // S of a KV tile. An atom of K is released when the product with the next one has been started.
  __device__ __forceinline__ void start_and_wait_s(float (&s)[32], KPipeline &pipe) const {
    int last = 0;
    fence_operand(s);
#pragma unroll
    for (int atom = 0; atom < C::kAtoms; ++atom) {
      mbarrier_wait(k_full(pipe.stage()), pipe.phase());
      const uint64_t a = descriptor_k_major(q(atom)), b = descriptor_k_major(k(pipe.stage()));
      wgmma_fence();
#pragma unroll
      for (int n = 0; n < 4; ++n)
        Wgmma<Element, 64>::ss_k_k(s, advance_descriptor(a, n * 32), advance_descriptor(b, n * 32), atom != 0 || n != 0);
      wgmma_commit();
      if (atom > 0) {
        wgmma_wait<1>();
        release_warp(k_empty(last));
      }
      last = pipe.stage();
      pipe.advance();
    }
    wgmma_wait<0>();
    fence_operand(s);
    release_warp(k_empty(last));
  }

  // ------------------------------------------------------------------------------------------------------------------
  // PV warpgroups
  // ------------------------------------------------------------------------------------------------------------------

  // Columns from swizzle atom `first_atom` on, in one accumulator, or in two where that lets half of V be released early.
  template <int kAtoms>
  __device__ __forceinline__ void pv_warpgroup(int first_atom) const {
    constexpr int kParts = kAtoms == 4 ? 2 : 1, kPartAtoms = kAtoms / kParts, kColumns = kPartAtoms * 64;
    float out[kParts][kColumns / 2];
#pragma unroll
    for (auto &part : out)
#pragma unroll
      for (float &x : part) x = 0.f;
    VPipeline pipe;
    uint32_t p_phase = 0;
#pragma unroll 1
    for (int tile = tiles_.begin; tile < tiles_.end; ++tile) {
      const int stage = pipe.stage();
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) mbarrier_wait(v_full(stage, first_atom + atom), pipe.phase());
      // A masked pair has P = -0, which times NaN or Inf in V is NaN.
      const bool nan_safe = is_partial(tile) && named_barrier_or(1 + static_cast<int>(threadIdx.x / 128), 128,
                                                                 tile_has_nonfinite<Element, kAtoms * C::kAtomBytes, 128>(
                                                                     v(stage, first_atom), threadIdx.x % 128));
      mbarrier_wait(p_full(), p_phase);
      p_phase ^= 1;
      if (ld_shared_4(rescales()) != 0) scale_out(out);
      if (nan_safe) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          wgmma_ss_nan_safe<Element, Major::k, 64, kColumns, 64>(out[part], p(), warp_ * 16,
                                                                 v(stage, first_atom + part * kPartAtoms), lane_);
        release_v<kAtoms>(stage, first_atom);
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) fence_operand(out[part]);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const uint64_t a = descriptor_k_major(p()), b = descriptor_mn_major<64>(v(stage, first_atom + part * kPartAtoms));
#pragma unroll
          for (int n = 0; n < 4; ++n)
            Wgmma<Element, kColumns>::ss_k_mn(out[part], advance_descriptor(a, n * 32), advance_descriptor(b, n * 2048), 1);
          wgmma_commit();
        }
        if constexpr (kParts == 2) {
          wgmma_wait<1>();
          release_v<kPartAtoms>(stage, first_atom);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int part = 0; part < kParts; ++part) fence_operand(out[part]);
        release_v<kPartAtoms>(stage, first_atom + (kParts - 1) * kPartAtoms);
      }
      release_warp(p_empty());
      pipe.advance();
    }
    mbarrier_wait(p_full(), p_phase);
    scale_out(out);
    store(out, first_atom * 64);
  }

  template <int kCount>
  __device__ __forceinline__ void release_v(int stage, int first_atom) const {
    __syncwarp();
#pragma unroll
    for (int atom = 0; atom < kCount; ++atom) mbarrier_arrive_if(lane_ == 0, v_empty(stage, first_atom + atom));
  }
  template <int kParts, int kCount>
  __device__ __forceinline__ void scale_out(float (&out)[kParts][kCount]) const {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = ld_shared_float(rescale(row_of(r)));
#pragma unroll
    for (auto &part : out) scale_rows<QkFragment<1, kCount / 4>>(part, factor);
  }
  // Rows that are not used become zero, by the last row block of a sequence those beyond the grid, too.
  template <int kParts, int kCount>
  __device__ __forceinline__ void store(const float (&out)[kParts][kCount], int first_column) const {
    const int columns = static_cast<int>(p_.head_dim_v);
    Element *base = row_of_tensor<Element>(p_.out, batch_, q_.start, head_q_);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row0_ + row_of(r), column = first_column + part * 2 * kCount;
        store_fragment_row_at<Element, kCount / 4>(
            out[part], r, [&] { return base + row * p_.out.seq_stride + column; }, columns - column, a_.vector_out, lane_ & 3,
            [](float x, float y) { return pack2<Element>(x, y); }, row < q_.len ? ~0u : 0u, row < q_.seq_slot);
      }
    if (!last_block_ || first_column != 0) return;
    for (int row = row0_ + 64 + warp_; row < q_.seq_slot; row += 4)
      store_zero_row(base + row * p_.out.seq_stride, columns,
                     p_.lse.data != nullptr ? row_of_tensor(p_.lse, batch_, q_.start + row, head_q_) : nullptr, -CUDART_INF_F,
                     lane_);
  }

  const ForwardParams &a_;
  const Problem &p_;
  const uint32_t smem_;
  const int lane_, warp_;  // warp_ within the warpgroup
  int batch_, head_q_, head_k_, row0_;
  bool last_block_;
  struct Rows {
    int start, seq_slot, len;  // as in Sequence
  };
  Rows q_, k_;
  KeyRange tiles_, full_;  // KV tiles with visible pairs, and of these those without masked pairs
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) forward_wide(const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  ForwardWide<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::sm90
