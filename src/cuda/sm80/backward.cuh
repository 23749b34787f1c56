// SPDX-License-Identifier: Apache-2.0
// Exact attention backward with mma.sync, for sm_80 and newer: all warps alike, every kind of score.
//
// A block of threads owns kKeys keys of one key head, with their dk and dv in registers, and walks over the queries that see
// them, head after head of the GQA group, in chunks of kRows. Every product of a warp covers 32 rows if it can, so that a
// fragment from shared memory serves two products; scores are computed transposed, keys as rows.
//
//   scores(chunk):    S^T = K Q^T,  dP^T = V dO^T          kKeyTiles * 16 keys and a share of the queries a warp
//                     P^T = exp2(S^T - lse),  dS^T = P^T (dP^T - delta), rounded, to shared memory
//   products(chunk):  dv += P^T dO,  dk += dS^T Q          keys x a share of the columns a warp
//                     dq  = dS K, added to the sum over blocks of keys in global memory
//
// with a barrier before and after the products. With kQueryParts = 1 (d64) a warp sees all queries of its keys: P and dS enter
// dv and dk straight from its registers, and two blocks a multiprocessor overlap.
#pragma once

#include "cuda/sm80/backward_block.cuh"

namespace fa::cuda::sm80 {

template <class C>
class Backward : BackwardBlock<C> {
  using Base = BackwardBlock<C>;
  using Base::a_, Base::b_, Base::band_, Base::batch_, Base::begin_, Base::careful_keys_, Base::end_, Base::head_k_,
      Base::head_q_, Base::key0_, Base::lane_, Base::p_, Base::warp_;
  using Base::shared_k_, Base::shared_v_, Base::shared_q_, Base::shared_do_, Base::shared_ds_, Base::shared_p_,
      Base::shared_lse_, Base::shared_delta_;
  using typename Base::Element;
  using Tile = ScoreTile<Element, C::kKeyTiles, C::kNt>;
  using Scores = Accumulator<C::kKeyTiles, C::kNt>;  // rows: keys, columns: queries
  using TileWeights = Weights<C::kKeyTiles, C::kNt / 2>;

 public:
  __device__ __forceinline__ Backward(const BackwardParams &params, char *shared)
      : Base(params, shared), terms_(p_, batch_, first_head(), band_.seqlen_q, band_.seqlen_k) {}

  __device__ __forceinline__ void run() {
    clear<C::kGradTiles, C::kDt>(dk_);
    clear<C::kGradTiles, C::kDvt>(dv_);
    if (key0_ < band_.seqlen_k) {
      this->fetch_k();
      this->fetch_v();
      for (int h = first_head(); h < first_head() + static_cast<int>(p_.group); ++h) walk(h, h == first_head());
      // K and V, if no query sees them: then no walk has committed and awaited their copies, which must not land on dk and dv.
      cp_async_commit();
      cp_async_wait<0>();
    }
    __syncthreads();  // K and V have been read: dk and dv go through their place
    this->template put_gradient<C::kD>(shared_k_, dk_, warp_, p_.softmax_scale);
    this->template put_gradient<C::kDv>(shared_v_, dv_, warp_, p_.dropout.keep_scale);
    __syncthreads();
    this->template store<C::kD, C::kThreads>(b_.dk, shared_k_, p_.head_dim, threadIdx.x);
    this->template store<C::kDv, C::kThreads>(b_.dv, shared_v_, p_.head_dim_v, threadIdx.x);
  }

 private:
  __device__ __forceinline__ int first_head() const { return head_k_ * static_cast<int>(p_.group); }  // of the GQA group

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over the queries of one head
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void walk(int head_q, bool first) {
    if (!this->find_chunks(head_q)) return;
    if constexpr (C::kGeneral) terms_ = ScoreTerms(p_, batch_, head_q_, band_.seqlen_q, band_.seqlen_k);
    __syncthreads();  // the previous head's chunks have been read
    fetch(end_ - 1);
    arrive(end_ - 1, first);
    if (end_ - 1 > begin_) fetch(end_ - 2);
#pragma unroll 1
    for (int chunk = end_ - 1; chunk >= begin_; --chunk) {
      scores(chunk);
      this->pass_turn();
      __syncthreads();  // every warp's dS (and P) is there
      products(chunk);
      if (chunk > begin_) arrive(chunk - 1, false);
      if (chunk > begin_ + 1) fetch(chunk - 2);
    }
    this->pass_turn();
  }

  __device__ __forceinline__ void fetch(int chunk) const {
    this->template fetch_q<C::kThreads>(chunk, chunk % C::kStages, threadIdx.x);
    this->template fetch_dout<C::kThreads>(chunk, chunk % C::kStages, threadIdx.x);
    cp_async_commit();
  }

  // Waits for a chunk and finds out whether its products need care: every thread looks at what it has fetched itself.
  __device__ __forceinline__ void arrive(int chunk, bool with_keys) {
    cp_async_wait<0>();
    if (with_keys) {
      careful_keys_ = __syncthreads_or(this->k_has_nonfinite());
    }
    bool careful = false;
    if (this->masked(chunk)) {
      const int slot = chunk % C::kStages;
      careful = careful_keys_ |
                fetched_has_nonfinite<Element, C::kRows, C::kD, C::kThreads>(shared_q_ + slot * C::kQBytes, threadIdx.x) |
                fetched_has_nonfinite<Element, C::kRows, C::kDv, C::kThreads>(shared_do_ + slot * C::kDoBytes, threadIdx.x);
    }
    careful_ = __syncthreads_or(careful);
  }

  // Whether the block mask lets any (row, key) of the block's keys and the chunk through: its sizes are multiples of 64.
  __device__ __forceinline__ bool unmasked_blocks(int chunk) const {
    if constexpr (C::kGeneral) {
      if (p_.block_mask.data == nullptr) return true;
      for (int key = key0_; key < min(key0_ + C::kKeys, band_.seqlen_k); key += 64) {
        if (p_.block_mask.visible(batch_, head_q_, chunk * C::kRows, key)) return true;
      }
      return false;
    }
    return true;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // P and dS
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void scores(int chunk) {
    if (!unmasked_blocks(chunk)) return;
    const bool some_masked = this->masked(chunk);
#pragma unroll 1
    for (int step = 0; step < C::kTileSteps; ++step) {
      const int first_row = warp_ % C::kQueryParts * C::kPartRows + step * C::kTileRows;
      if (some_masked) {
        score_tile<true>(chunk, first_row);
      } else {
        score_tile<false>(chunk, first_row);
      }
    }
  }

  // This warp's keys x kTileRows queries of the chunk from first_row on.
  template <bool kMasked>
  __device__ __forceinline__ void score_tile(int chunk, int first_row) {
    constexpr int kKeys = C::kKeyTiles * 16;
    const int slot = chunk % C::kStages, first_key = opaque(warp_) / C::kQueryParts * kKeys;
    const int row0 = chunk * C::kRows + first_row, key0 = key0_ + first_key;
    const uint32_t q = shared_q_ + slot * C::kQBytes, dout = shared_do_ + slot * C::kDoBytes;
    const uint32_t stat = slot * C::kStatBytes + (first_row + 2 * (lane_ & 3)) * 4;
    TileWeights w;
    if (kMasked && !tile_visible(row0, key0)) {
      // Nothing to add to dv and dk; dq, and the other warps of these keys, read masked weights.
      Scores s;
      Tile::for_each([&](int i, int j, int r) { s[i][j][r] = kMaskedWeight; });
      Tile::pack(w, s);
      put(shared_ds_, first_row, w);
      if constexpr (C::kExchange) put(shared_p_, first_row, w);
      return;
    }

    PairBits visible = ~0u, kept = ~0u;
    if constexpr (kMasked) visible = Tile::visible(band_, row0, key0);
    Scores s, slope;
    if constexpr (C::kGeneral) {
      // On its way during the products.
      if (p_.bias.data != nullptr) Tile::load_bias(slope, visible, p_.bias, terms_.bias_at, row0, key0);
    }
    clear<C::kKeyTiles, C::kNt>(s);
    multiply_add_shared<Element, Lies::k_last, C::kD * 2, Lies::k_last, C::kD * 2, C::kD / 16>(s, shared_k_, first_key, q,
                                                                                               first_row);
    if constexpr (C::kGeneral) {
      Tile::logits(s, slope, visible, p_, terms_, row0, key0);
      if (p_.dropout.threshold > 0) {
        const uint32_t bh = static_cast<uint32_t>(batch_ * static_cast<int>(p_.heads_q) + head_q_);
        kept = Tile::kept(load_dropout_key(p_.dropout), bh, p_.dropout.threshold, row0, key0);
      }
    }
    const float c = C::kGeneral ? 1.f : p_.softmax_scale * kLog2e;
#pragma unroll
    for (int j = 0; j < C::kNt; ++j) {
      const float2 lse = Base::ld_shared_float2(shared_lse_ + stat + j * 32);
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float weight = exp2_approx(fmaf(s[i][j][r], c, -((r & 1) ? lse.y : lse.x)));
          s[i][j][r] = kMasked && (visible >> Tile::bit_of(i, j, r) & 1) == 0 ? kMaskedWeight : weight;
        }
    }
    if constexpr (C::kGeneral) {
      // A dropped weight is zero in P.
      Scores p;
      Tile::for_each(
          [&](int i, int j, int r) { p[i][j][r] = (kept | ~visible) >> Tile::bit_of(i, j, r) & 1 ? s[i][j][r] : 0.f; });
      Tile::pack(w, p);
    } else {
      Tile::pack(w, s);
    }
    if constexpr (C::kExchange) {
      put(shared_p_, first_row, w);
    } else {
      accumulate<C::kDv * 2>(dv_, w, dout + first_row * C::kDv * 2, careful_);
    }

    Scores dp;
    clear<C::kKeyTiles, C::kNt>(dp);
    multiply_add_shared<Element, Lies::k_last, C::kDv * 2, Lies::k_last, C::kDv * 2, C::kDv / 16>(dp, shared_v_, first_key,
                                                                                                  dout, first_row);
#pragma unroll
    for (int j = 0; j < C::kNt; ++j) {
      const float2 delta = Base::ld_shared_float2(shared_delta_ + stat + j * 32);
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          float d = dp[i][j][r];
          // Dropped weights pass no gradient through P V, but still through the sum.
          if constexpr (C::kGeneral) d = kept >> Tile::bit_of(i, j, r) & 1 ? d * p_.dropout.keep_scale : 0.f;
          d = s[i][j][r] * (d - ((r & 1) ? delta.y : delta.x));
          if constexpr (C::kGeneral) d *= slope[i][j][r];
          if constexpr (kMasked)
            d = visible >> Tile::bit_of(i, j, r) & 1 ? d + 0.f : kMaskedWeight;  // + 0: a visible -0 is no mask
          dp[i][j][r] = d;
        }
    }
    Tile::pack(w, dp);
    put(shared_ds_, first_row, w);
    if constexpr (!C::kExchange) accumulate<C::kD * 2>(dk_, w, q + first_row * C::kD * 2, careful_);
  }

  __device__ __forceinline__ bool tile_visible(int row0, int key0) const {
    if (!band_.any(row0, C::kTileRows, key0, C::kKeyTiles * 16)) return false;
    return !C::kGeneral || p_.block_mask.data == nullptr || p_.block_mask.visible(batch_, head_q_, row0, key0);
  }

  // Writes this warp's tile into the (keys x queries) tile that all warps share.
  __device__ __forceinline__ void put(uint32_t tile, int first_row, const TileWeights &w) const {
    const int first_key = warp_ / C::kQueryParts * C::kKeyTiles * 16;
    const uint32_t at = tile + swizzled<C::kScorePitch>(first_key + (lane_ & 15), first_row / 8 + (lane_ >> 4));
#pragma unroll
    for (int i = 0; i < C::kKeyTiles; ++i)
#pragma unroll
      for (int k = 0; k < C::kNt / 2; ++k) {
        store_matrix_x4(advance<C::kScorePitch>(at, k) + i * 16 * C::kScorePitch, w[i][k]);
      }
  }

  // acc += W T with this warp's own weights.
  template <int kPitch, int kTiles>
  static __device__ __forceinline__ void accumulate(Accumulator<C::kGradTiles, kTiles> &acc, const TileWeights &w,
                                                    uint32_t tile, bool careful) {
    if (careful) {
      multiply_add_exactly<Element, kPitch, C::kGradTiles, C::kNt / 2, kTiles>(acc, w, tile);
    } else {
      multiply_add<Element, kPitch, C::kGradTiles, C::kNt / 2, kTiles>(acc, w, tile);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dv, dk and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void products(int chunk) {
    const bool any = unmasked_blocks(chunk);
    if constexpr (C::kExchange) {
      const int slot = chunk % C::kStages;
      const int first_key = warp_ / C::kColumnParts * C::kGradTiles * 16, part = warp_ % C::kColumnParts;
      if (any) {
        Base::template multiply<Lies::k_last, C::kDv * 2, C::kRows / 16>(
            dv_, shared_p_, first_key, shared_do_ + slot * C::kDoBytes, part * C::kDvt * 8, careful_);
        Base::template multiply<Lies::k_last, C::kD * 2, C::kRows / 16>(
            dk_, shared_ds_, first_key, shared_q_ + slot * C::kQBytes, part * C::kDt * 8, careful_);
      }
    }
    this->add_dq(chunk, shared_ds_, any, careful_);
  }

  ScoreTerms terms_;
  bool careful_ = false;  // the products of this chunk need care
  Accumulator<C::kGradTiles, C::kDt> dk_;
  Accumulator<C::kGradTiles, C::kDvt> dv_;
};

}  // namespace fa::cuda::sm80
