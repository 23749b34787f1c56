// SPDX-License-Identifier: Apache-2.0
// The producer warps of forward_wide.cuh. The two CTAs of a cluster load K and V for both; each loads Q for itself.
#pragma once

#include "cuda/common/pipeline.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/fwd_sm90_wide/cta.cuh"
#include "cuda/kernels/fwd_sm90_wide/page_window.cuh"

namespace fa::cuda::sm90 {

template <class C>
class WideProducer {
 public:
  static __device__ __forceinline__ void load_q_and_k(const WideCta<C> &cta) {
    if (cta.loaded_.empty()) return;
    if (elect_one()) load_q(cta);
    KPipeline pipe;
    auto pages = page_window(cta, cta.a_.pages.k);
    Tiles tiles(cta.loaded_);
#pragma unroll 1
    for (int tile = cta.loaded_.begin; is_loaded(cta, tile, tiles); ++tile) {
      const PageBox box = pages.box_at(tile * 64);
#pragma unroll 1
      for (int part = 0; part < Storage::kKParts; ++part) {
        mbarrier_wait(cta.k_empty(pipe.stage()), pipe.phase() ^ 1);
        load_part<64, Storage::kKStageAtoms>(cta, cta.k(pipe.stage()), cta.a_.k_map, cta.a_.k_whole_atoms,
                                             cta.k_full(pipe.stage()), part * Storage::kKStageAtoms, tile, tile + part, box,
                                             cta.a_.pages.k.box_log2);
        pipe.advance();
      }
    }
  }
  static __device__ __forceinline__ void load_v(const WideCta<C> &cta) {
    VPipeline pipe;
    auto pages = page_window(cta, cta.a_.pages.v);
    Tiles tiles(cta.loaded_);
#pragma unroll 1
    for (int tile = cta.loaded_.begin; is_loaded(cta, tile, tiles); ++tile) {
#pragma unroll 1
      for (int part = 0; part < Storage::kParts; ++part) {
        const PageBox box = pages.box_at(tile * 64 + part * C::kVPartKeys);
#pragma unroll 1
        for (int half = 0; half < 2; ++half) {
          const int stage = pipe.stage(), first = half * Storage::kFirstAtoms + (C::kVByKeys ? 0 : part * C::kVPartAtoms);
          mbarrier_wait(cta.v_empty(stage, half), pipe.phase());  // the first time by take_q
          load_part<C::kVPartKeys, C::kVPartAtoms>(cta, cta.v(stage, half), cta.a_.v_map, cta.a_.v_whole_atoms,
                                                   cta.v_full(stage, half), first, tile, tile + half, box,
                                                   cta.a_.pages.v.box_log2);
        }
        pipe.advance();
      }
    }
  }

 private:
  using Storage = typename C::Storage;
  using KPipeline = typename WideCta<C>::KPipeline;
  using VPipeline = typename WideCta<C>::VPipeline;
  using Tiles = typename WideCta<C>::Tiles;

  // Fills a stage with kAtoms swizzle atoms of columns of kKeys keys, in both CTAs. These load every other stage, or box of pages: CTA 0 the
  // first one if `first` is even. A box has all columns, or one swizzle atom where rows do not end with an atom.
  template <int kKeys, int kAtoms>
  static __device__ __forceinline__ void load_part(const WideCta<C> &cta, uint32_t dst, const CUtensorMap &map,
                                                   bool whole_atoms, uint32_t barrier, int atom, int tile, int first,
                                                   const PageBox &box, int box_log2) {
    if (elect_one()) {
      mbarrier_arrive_expect_tx(barrier, kKeys * kAtoms * 128);
      if (!C::kPaged && (first & 1) == cta.rank_) load_keys<kAtoms>(cta, dst, map, whole_atoms, barrier, atom, tile);
    }
    if constexpr (C::kPaged) {
      const int row = cta.lane_ << box_log2;
      if (row < kKeys && ((cta.lane_ + first) & 1) == cta.rank_)
        tma_load_5d_multicast(dst + row * kAtoms * 128, &map, barrier, 0, 0, atom, box.row_group, box.page, kBothCtas,
                              cta.a_.order.row_blocks() == 1 ? kEvictFirst : kEvictLast);
      __syncwarp();
    }
  }
  template <int kAtoms>
  static __device__ __forceinline__ void load_keys(const WideCta<C> &cta, uint32_t dst, const CUtensorMap &map,
                                                   bool whole_atoms, uint32_t barrier, int atom, int tile) {
    const int batch = cta.p_.k_lengths.cu != nullptr ? 0 : cta.batch_, row = cta.k_.start + tile * 64;
    if (whole_atoms) {
      tma_load_5d_multicast(dst, &map, barrier, 0, row, atom, cta.head_k_, batch, kBothCtas, kEvictLast);
    } else {
#pragma unroll 1
      for (int n = 0; n < kAtoms; ++n)
        tma_load_5d_multicast(dst + n * C::kAtomBytes, &map, barrier, (atom + n) * 64, row, 0, cta.head_k_, batch, kBothCtas,
                              kEvictLast);
    }
  }
  // This lane's boxes of K or V, or nothing where these are not in pages.
  static __device__ __forceinline__ auto page_window(const WideCta<C> &cta, const PageBoxes &boxes) {
    if constexpr (C::kPaged) {
      return PageWindow(cta.p_, cta.a_.pages.page_size, boxes, cta.batch_, cta.head_k_, cta.paged_keys_, cta.loaded_.begin * 64,
                        cta.lane_);
    } else {
      return NoPages{};
    }
  }
  static __device__ __forceinline__ void load_q(const WideCta<C> &cta) {
    mbarrier_arrive_expect_tx(
        cta.q_full(),
        C::kPaged ? C::kAtoms * cta.tokens() * static_cast<int>(cta.a_.pages.tile_heads.value) * 128 : Storage::kTileBytes);
#pragma unroll 1
    for (int atom = 0; atom < C::kAtoms; ++atom)
      tma_load_4d(cta.q(atom), &cta.a_.q_map, cta.q_full(), atom * 64, C::kPaged ? cta.head_q_ : cta.q_.start + cta.row0_,
                  C::kPaged ? cta.q_.start + cta.row0_ : cta.head_q_, cta.p_.q_lengths.cu != nullptr ? 0 : cta.batch_,
                  kEvictFirst);
  }
  // Whether the cluster loads a KV tile from `tile` on. Kernels for mixtures move on to that one.
  static __device__ __forceinline__ bool is_loaded(const WideCta<C> &cta, int &tile, Tiles &tiles) {
    if constexpr (C::kMixtures) {
      if (!cta.next_tile(tiles)) return false;
      tile = tiles.cell();
      return true;
    } else {
      return tile < cta.loaded_.end;
    }
  }
};

}  // namespace fa::cuda::sm90
