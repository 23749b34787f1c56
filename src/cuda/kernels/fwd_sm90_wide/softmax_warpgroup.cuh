// SPDX-License-Identifier: Apache-2.0
// The softmax warpgroup of forward_wide.cuh: S [64][64] = Q K^T, then P, then lse and the last factors of out's rows.
#pragma once

#include "cuda/common/epilogue.cuh"
#include "cuda/common/kv_8bit.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90/bias.cuh"
#include "cuda/kernels/fwd_sm90/dropout.cuh"
#include "cuda/kernels/fwd_sm90/head_max.cuh"
#include "cuda/kernels/fwd_sm90_wide/cta.cuh"
#include "cuda/kernels/fwd_sm90_wide/paged_rows.cuh"

namespace fa::cuda::sm90 {

template <class C>
class WideSoftmaxWarpgroup {
 public:
  static __device__ __forceinline__ void run(const WideCta<C> &cta) {
    OnlineSoftmax<Fragment> softmax;
    softmax.reset();
    KPipeline pipe;
    PPipeline p_pipe;
    float scale = C::kScored ? cta.a_.raw.factor : exponent_scale(cta.p_);
    if constexpr (C::kPaged && !C::kScored) {
      const float descale = fabsf(head_descale(cta.a_.k_descale, cta.batch_, cta.head_k_));  // the copy of K has the sign
      scale *= descale == 0.f ? 1e-30f : descale;  // times 0 a masked score would be NaN
    }
    uint32_t q_fragments[Storage::kQRegisterAtoms][4][4];
    if (!cta.loaded_.empty()) {
      mbarrier_wait(cta.q_full(), 0);
      take_q(cta, q_fragments);
    }
    if constexpr (!C::kMixtures) skip_k(cta, cta.loaded_.begin, cta.tiles_.begin, pipe);
    KPipeline released = pipe;
    HeadMax<C> head_max;
    if constexpr (C::kMixtures) head_max.begin();

    const auto exponentiate = [&](float(&s)[32], int tile, [[maybe_unused]] bool partial_cell) {
      const int key0 = tile * 64;
      if constexpr (C::kScored) {
        apply_score_mods<Fragment, C::kScores, FastTanhMath>(
            s, cta.p_, cta.a_.raw,
            [&](int r) { return head_terms(cta.p_, cta.a_.raw.logit, cta.batch_, cta.head_of(cta.row_of(r))); },
            [&](int r) {
              return cta.token_of(cta.row_of(r)) + cta.k_.len - cta.q_.len - key0 - Fragment::first_key(cta.lane_);
            });
      }
      bool partial = cta.is_partial(tile);
      bool rescaled;
      if constexpr (C::kMixtures) {
        if (cta.has_bias()) add_bias(cta, s, key0);
        if (partial || partial_cell) mask_scores(cta, s, key0, partial_cell);
        partial = cta.hides_pairs(tile, partial_cell);
        if (cta.a_.max_logit != nullptr) head_max.add_scores(softmax, s, scale);
        rescaled = softmax.update_max_rounded_up(
            s, [&] { return scale; }, [&] { return cta.a_.dropout_threshold; }, [&] { return cta.a_.p_exponent; });
      } else {
        if (partial)
          mask_rows<Fragment>(s, key0, cta.lane_,
                              [&](int r) { return keys_of_query(cta.diagonal(), cta.token_of(cta.row_of(r))); });
        rescaled = softmax.update_max(s, scale, kRescaleThreshold);
      }
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
      if constexpr (C::kMixtures) {
        if (cta.drops()) drop(cta, p16, key0);
      }
      const int stage = p_pipe.stage();
      mbarrier_wait(cta.p_empty(stage), p_pipe.phase() ^ 1);
      if (cta.lane_ == 0) st_shared_4(cta.rescales(stage), rescaled);
      if (rescaled && Fragment::leads(cta.lane_)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) st_shared_float(cta.rescale(stage, cta.row_of(r)), softmax.rescale[r]);
      }
      const uint32_t row = cta.p(stage) + (cta.warp_ * 16 + (cta.lane_ & 15)) * 128;
#pragma unroll
      for (int n = 0; n < 4; ++n) stmatrix_x4(row + (((2 * n + (cta.lane_ >> 4)) ^ (cta.lane_ & 7)) << 4), p16[n]);
      fence_proxy_async();
      if (!hands_over_late(cta)) mbarrier_arrive(cta.p_full(stage));
      p_pipe.advance();
    };
    const auto hand_over_last_p = [&] {
      if (hands_over_late(cta)) mbarrier_arrive(cta.p_full(p_pipe.stage() ^ 1));
    };
    if constexpr (C::kMixtures) {
      float s[32], next[32];
      Tiles tiles(cta.loaded_);
      // Passes over KV tiles that this CTA does not see. Before it waits for one it has handed over every P before that tile: the other CTA may need
      // them to get as far.
      const auto pass_over = [&](bool more) {
#pragma unroll 1
        for (; more && !tiles.seen(); more = cta.next_tile(tiles)) skip_k(cta, 0, 1, pipe);
        released = pipe;
        return more;
      };
#pragma unroll 1
      for (bool more = pass_over(cta.next_tile(tiles)); more; more = pass_over(more)) {
        start_s(cta, s, q_fragments, pipe);
        wait_s(cta, s, released);
        int tile = tiles.cell();
        bool partial_cell = tiles.partial();
        more = cta.next_tile(tiles);
        // As below, as long as the CTA sees each next tile.
#pragma unroll 1
        while (more && tiles.seen()) {
          start_s(cta, next, q_fragments, pipe);
          exponentiate(s, tile, partial_cell);
          wait_s(cta, next, released);
#pragma unroll
          for (int i = 0; i < 32; ++i) s[i] = next[i];
          tile = tiles.cell();
          partial_cell = tiles.partial();
          more = cta.next_tile(tiles);
        }
        exponentiate(s, tile, partial_cell);
      }
    } else if (!cta.tiles_.empty()) {
      float s[32], next[32];
      start_s(cta, s, q_fragments, pipe);
      wait_s(cta, s, released);
      // S of the next tile is computed while P of this one is.
#pragma unroll 1
      for (int tile = cta.tiles_.begin; tile < cta.tiles_.end - 1; ++tile) {
        start_s(cta, next, q_fragments, pipe);
        if (tile > cta.tiles_.begin) hand_over_last_p();
        exponentiate(s, tile, false);
        wait_s(cta, next, released);
#pragma unroll
        for (int i = 0; i < 32; ++i) s[i] = next[i];
      }
      if (cta.tiles_.size() > 1) hand_over_last_p();
      exponentiate(s, cta.tiles_.end - 1, false);
      hand_over_last_p();
    }
    if constexpr (!C::kMixtures) skip_k(cta, cta.tiles_.end, cta.loaded_.end, pipe);
    softmax.reduce_sums();
    if constexpr (C::kMixtures) {
      if (cta.a_.max_logit != nullptr)
        head_max.store(cta.a_, cta.head_q_, cta.lane_, load_relaxed(cta.a_.max_logit + cta.head_q_ * cta.a_.max_logit_stride));
    }
    if constexpr (C::kPaged) {
      PagedRows<C>::finish(cta, softmax, p_pipe);
      return;
    }
    RowResult result[2];
    finalize_rows(softmax.max, softmax.sum, sink_of(cta.p_, cta.head_q_), result);
    const int stage = p_pipe.stage();
    mbarrier_wait(cta.p_empty(stage), p_pipe.phase() ^ 1);
    if (Fragment::leads(cta.lane_)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = cta.row0_ + cta.row_of(r);
        const bool used = row < cta.q_.len;
        const float factor = C::kMixtures ? result[r].factor * cta.p_.dropout.keep_scale : result[r].factor;
        st_shared_float(cta.rescale(stage, cta.row_of(r)), used ? factor : 0.f);
        if (cta.p_.lse.data != nullptr && row < cta.q_.seq_slot)
          *row_of_tensor(cta.p_.lse, cta.batch_, cta.q_.start + row, cta.head_q_) = used ? result[r].lse : -CUDART_INF_F;
      }
    }
    mbarrier_arrive(cta.p_full(stage));
  }

 private:
  using Element = typename C::Element;
  using Storage = typename C::Storage;
  using Fragment = QkFragment<1, 8>;  // of S, of one warp
  using KPipeline = typename WideCta<C>::KPipeline;
  using PPipeline = typename WideCta<C>::PPipeline;
  using Tiles = typename WideCta<C>::Tiles;

  // Whether P of a KV tile is handed over only when S of the tile after the next one has been issued. With all of Q in registers that issue
  // holds the softmax warpgroup until S is nearly done. P V beside it would make it last twice as long, and leave the tensor cores idle
  // during the exponentials that follow. Where K and V are loaded atom by atom, V would be released too late.
  static constexpr bool kMayHandOverLate = Storage::kAtoms == 6;
  static_assert(Storage::kPStages == 2);
  static __device__ __forceinline__ bool hands_over_late(const WideCta<C> &cta) {
    return kMayHandOverLate && (C::kPaged || (cta.a_.k_whole_atoms && cta.a_.v_whole_atoms));
  }

  // Adds the bias of a KV tile.
  static __device__ __forceinline__ void add_bias(const WideCta<C> &cta, float (&s)[32], int key0) {
    add_bias_in_place<Fragment, Element, /*kMasked=*/true>(s, cta.a_, cta.batch_, cta.head_q_, key0, cta.q_.len, cta.k_.len,
                                                           cta.lane_, [&](int r) { return cta.row0_ + cta.row_of(r); });
  }
  // Masks what band, lengths and masks as data hide. Rows that are not used see nothing: they have no part in max_logit.
  static __device__ __forceinline__ void mask_scores(const WideCta<C> &cta, float (&s)[32], int key0, bool partial_cell) {
    uint32_t visible[2] = {0, 0};
#pragma unroll 1
    for (int r = 0; r < 2; ++r) {
      const int row = cta.row0_ + cta.row_of(r);
      uint32_t keys = 0;
      if (row < cta.q_.len) {
        keys = visible_bits<Fragment>(keys_of_query(cta.diagonal(), row), key0, cta.lane_);
        if (partial_cell)
          keys &= qk_fragment_bits(visible_key_bits(cta.a_.mask, cta.p_, cta.batch_, cta.head_q_, row, key0), cta.lane_);
      }
      if (r == 0) {
        visible[0] = keys;
      } else {
        visible[1] = keys;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) mask_row<Fragment>(s, r, visible[r]);
  }
  // Zeroes the dropped elements of P.
  static __device__ __forceinline__ void drop(const WideCta<C> &cta, uint32_t (&p16)[4][4], int key0) {
    const uint4 x = ld_shared_16(cta.dropout());
    DropoutWords<64> words;
    words.draw(DropoutTile{{x.x, x.y, x.z}, x.w, (cta.row0_ + cta.warp_ * 16 + cta.p_.dropout.first_query) >> 4},
               key0 + cta.p_.dropout.first_key, cta.lane_);
#pragma unroll
    for (int n = 0; n < 2; ++n)
      words.template drop</*kKeepsMasked=*/true>(p16[2 * n], p16[2 * n + 1], n, cta.a_.kept_halves, cta.lane_);
  }

  // Loads the A operands of S that stay in registers, and releases the stages of V where they were.
  static __device__ __forceinline__ void take_q(const WideCta<C> &cta,
                                                uint32_t (&q_fragments)[Storage::kQRegisterAtoms][4][4]) {
#pragma unroll
    for (int atom = 0; atom < Storage::kQRegisterAtoms; ++atom)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        ldmatrix_x4(q_fragments[atom][n], cta.q(atom) + (cta.warp_ * 16 + (cta.lane_ & 15)) * 128 +
                                              (((2 * n + (cta.lane_ >> 4)) ^ (cta.lane_ & 7)) << 4));
    __syncwarp();
    for (int n = 0; n < 2 * Storage::kVStages; ++n)
      mbarrier_arrive_remote_if(cta.lane_ < 2, map_to_cta(cta.v_empty(0, n), cta.lane_ & 1));
  }

  // Starts S of a KV tile.
  static __device__ __forceinline__ void start_s(const WideCta<C> &cta, float (&s)[32],
                                                 const uint32_t (&q_fragments)[Storage::kQRegisterAtoms][4][4],
                                                 KPipeline &pipe) {
    fence_operand(s);
#pragma unroll
    for (int part = 0; part < Storage::kKParts; ++part) {
      mbarrier_wait(cta.k_full(pipe.stage()), pipe.phase());
      const uint64_t b = descriptor_k_major<C::kKGroupBytes>(cta.k(pipe.stage()));
      wgmma_fence();
#pragma unroll
      for (int n = 0; n < 4 * Storage::kKStageAtoms; ++n) {
        const int atom = part * Storage::kKStageAtoms + n / 4;
        const uint64_t key_columns = advance_descriptor(b, n / 4 * C::kAtomStep + n % 4 * 32);
        if (atom < Storage::kQRegisterAtoms) {
          wgmma_rs_k<Element>(s, q_fragments[atom][n % 4], key_columns, part + n != 0);
        } else {
          Wgmma<Element, 64>::ss_k_k(s, advance_descriptor(descriptor_k_major(cta.q(atom)), n % 4 * 32), key_columns,
                                     part + n != 0);
        }
      }
      wgmma_commit();
      pipe.advance();
    }
  }
  // Waits for S, and releases K from `pipe` on.
  static __device__ __forceinline__ void wait_s(const WideCta<C> &cta, float (&s)[32], KPipeline &pipe) {
    wgmma_wait<0>();
    fence_operand(s);
#pragma unroll
    for (int part = 0; part < Storage::kKParts; ++part) {
      cta.release_to_cluster(cta.k_empty(pipe.stage()));
      pipe.advance();
    }
  }
  // Releases tiles of K that no row of this CTA sees.
  static __device__ __forceinline__ void skip_k(const WideCta<C> &cta, int tile, int end, KPipeline &pipe) {
#pragma unroll 1
    for (int n = tile * Storage::kKParts; n < end * Storage::kKParts; ++n) {
      mbarrier_wait(cta.k_full(pipe.stage()), pipe.phase());
      cta.release_to_cluster(cta.k_empty(pipe.stage()));
      pipe.advance();
    }
  }
};

}  // namespace fa::cuda::sm90
