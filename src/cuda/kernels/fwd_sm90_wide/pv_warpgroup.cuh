// SPDX-License-Identifier: Apache-2.0
// The PV warpgroups of forward_wide.cuh: half of the columns of out each, out = factor * out + P V.
#pragma once

#include "cuda/common/epilogue.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90_wide/cta.cuh"
#include "cuda/kernels/fwd_sm90_wide/paged_rows.cuh"

namespace fa::cuda::sm90 {

template <class C>
class WidePvWarpgroup {
 public:
  // kAtoms swizzle atoms of columns, of the first or the second half, in kParts accumulators.
  template <int kAtoms>
  static __device__ __forceinline__ void run(const WideCta<C> &cta, int half) {
    constexpr int kParts = Storage::kParts, kPartAtoms = kAtoms / kParts, kColumns = kPartAtoms * 64;
    float out[kParts][kColumns / 2];
#pragma unroll
    for (auto &part : out)
#pragma unroll
      for (float &x : part) x = 0.f;
    VPipeline pipe;
    PPipeline p_pipe;
    if constexpr (!C::kMixtures) skip_v(cta, cta.loaded_.begin, cta.tiles_.begin, half, pipe);
    int tile = cta.tiles_.begin;
    Tiles tiles(cta.loaded_);
    // Whether there is a tile left that this CTA sees. In kernels for mixtures it moves on to that one.
    const auto more = [&] {
      if constexpr (C::kMixtures) {
        while (cta.next_tile(tiles)) {
          tile = tiles.cell();
          if (tiles.seen()) return true;
          skip_v(cta, 0, 1, half, pipe);
        }
        return false;
      } else {
        return tile < cta.tiles_.end;
      }
    };
#pragma unroll 1
    for (; more(); ++tile) {
      int stages[kParts];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        stages[part] = pipe.stage();
        mbarrier_wait(cta.v_full(stages[part], half), pipe.phase());
        pipe.advance();
      }
      // A masked pair has P = -0, which times NaN or Inf in V is NaN.
      bool nan_safe = false;
      if (C::kMixtures ? cta.hides_pairs(tile, tiles.partial()) : cta.is_partial(tile)) {
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          nan_safe |=
              tile_has_nonfinite<Element, kPartAtoms * C::kAtomBytes, 128>(cta.v(stages[part], half), threadIdx.x % 128);
        nan_safe = named_barrier_or(1 + static_cast<int>(threadIdx.x / 128), 128, nan_safe);
      }
      const int p_stage = p_pipe.stage();
      mbarrier_wait(cta.p_full(p_stage), p_pipe.phase());
      if (ld_shared_4(cta.rescales(p_stage)) != 0) scale_out(cta, out, p_stage);
      if (nan_safe) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          for_accumulators_of(cta, part, [&](int n, int columns) {
            wgmma_ss_nan_safe<Element, Major::k, C::kAtomRows, kColumns, C::kVPartKeys, C::kVGroupBytes>(
                out[n], cta.p(p_stage), cta.warp_ * 16, cta.v(stages[part], half) + columns, cta.lane_,
                C::kVByKeys ? part * C::kVPartKeys : 0);
          });
          __threadfence_block();  // ordinary loads have read the stage
          cta.release_to_cluster(cta.v_empty(stages[part], half));
        }
      } else {
#pragma unroll
        for (int part = 0; part < kParts; ++part) fence_operand(out[part]);
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const uint64_t a = descriptor_k_major(cta.p(p_stage)),
                         b = descriptor_mn_major<C::kAtomRows, C::kVGroupBytes>(cta.v(stages[part], half));
          constexpr int kSteps = C::kVPartKeys / 16;
          for_accumulators_of(cta, part, [&](int m, int columns) {
#pragma unroll
            for (int n = 0; n < kSteps; ++n)
              Wgmma<Element, kColumns>::ss_k_mn(out[m], advance_descriptor(a, ((C::kVByKeys ? part * kSteps : 0) + n) * 32),
                                                advance_descriptor(b, columns + n * 2 * C::kVGroupBytes), 1);
          });
          wgmma_commit();
        }
        if constexpr (kParts == 2) {
          wgmma_wait<1>();
          cta.release_to_cluster(cta.v_empty(stages[0], half));
        }
        wgmma_wait<0>();
#pragma unroll
        for (int part = 0; part < kParts; ++part) fence_operand(out[part]);
        cta.release_to_cluster(cta.v_empty(stages[kParts - 1], half));
      }
      mbarrier_arrive(cta.p_empty(p_stage));
      p_pipe.advance();
    }
    if constexpr (!C::kMixtures) skip_v(cta, cta.tiles_.end, cta.loaded_.end, half, pipe);
    const int p_stage = p_pipe.stage();
    mbarrier_wait(cta.p_full(p_stage), p_pipe.phase());
    scale_out(cta, out, p_stage);
    store(cta, out, half * Storage::kFirstAtoms * 64);
  }

 private:
  using Element = typename C::Element;
  using Storage = typename C::Storage;
  using VPipeline = typename WideCta<C>::VPipeline;
  using PPipeline = typename WideCta<C>::PPipeline;
  using Tiles = typename WideCta<C>::Tiles;

  // Calls f(n, where its columns begin) for the accumulators n that take part `part` of V: the one with its columns, or all.
  template <typename F>
  static __device__ __forceinline__ void for_accumulators_of(const WideCta<C> &cta, int part, F f) {
    if constexpr (C::kVByKeys) {
#pragma unroll
      for (int n = 0; n < Storage::kParts; ++n) f(n, n * Storage::kPartAtoms * C::kAtomStep);
    } else {
      f(part, 0);
    }
  }
  static __device__ __forceinline__ void skip_v(const WideCta<C> &cta, int tile, int end, int half, VPipeline &pipe) {
#pragma unroll 1
    for (int n = tile * Storage::kParts; n < end * Storage::kParts; ++n) {
      mbarrier_wait(cta.v_full(pipe.stage(), half), pipe.phase());
      cta.release_to_cluster(cta.v_empty(pipe.stage(), half));
      pipe.advance();
    }
  }
  template <int kParts, int kCount>
  static __device__ __forceinline__ void scale_out(const WideCta<C> &cta, float (&out)[kParts][kCount], int p_stage) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = ld_shared_float(cta.rescale(p_stage, cta.row_of(r)));
#pragma unroll
    for (auto &part : out) scale_rows<QkFragment<1, kCount / 4>>(part, factor);
  }
  // Rows that are not used become zero, by the last row block of a sequence those beyond the grid, too.
  template <int kParts, int kCount>
  static __device__ __forceinline__ void store(const WideCta<C> &cta, const float (&out)[kParts][kCount], int first_column) {
    if constexpr (C::kPaged) {
      PagedRows<C>::store_out(cta, out, first_column);
      return;
    }
    const int columns = static_cast<int>(cta.p_.head_dim_v);
    Element *base = row_of_tensor<Element>(cta.p_.out, cta.batch_, cta.q_.start, cta.head_q_);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = cta.row0_ + cta.row_of(r), column = first_column + part * 2 * kCount;
        store_fragment_row_at<Element, kCount / 4>(
            out[part], r, [&] { return base + row * cta.p_.out.seq_stride + column; }, columns - column, cta.a_.vector_out,
            cta.lane_ & 3, [](float x, float y) { return pack2<Element>(x, y); }, row < cta.q_.len ? ~0u : 0u,
            row < cta.q_.seq_slot);
      }
    if (!cta.last_block_ || first_column != 0) return;
    for (int row = cta.row0_ + 64 + cta.warp_; row < cta.q_.seq_slot; row += 4)
      store_zero_row(
          base + row * cta.p_.out.seq_stride, columns,
          cta.p_.lse.data != nullptr ? row_of_tensor(cta.p_.lse, cta.batch_, cta.q_.start + row, cta.head_q_) : nullptr,
          -CUDART_INF_F, cta.lane_);
  }
};

}  // namespace fa::cuda::sm90
