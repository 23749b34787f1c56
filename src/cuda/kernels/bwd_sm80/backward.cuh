// SPDX-License-Identifier: Apache-2.0
// Exact attention backward with mma.sync, for sm_80 and newer: all warps alike, every kind of score.
//
// A block of threads owns kKeys keys of one key head, with their dk and dv in registers, and walks over the queries that see
// them, head after head of the GQA group, in chunks of kRows. Every product of a warp covers 32 rows if it can, so that a
// fragment from shared memory serves two products; scores are computed transposed, keys as rows.
//
//   scores(chunk):    S^T = K Q^T,  dP^T = V dO^T          kKeyTiles * 16 keys and a share of the queries a warp
//                     P^T = exp2(S^T - lse),  dS^T = P^T (dP^T - delta), rounded, to shared memory
//                     (with dropout see BackwardParams::keep_scale)
//   products(chunk):  dv += P^T dO,  dk += dS^T Q          keys x a share of the columns a warp
//                     dq  = dS K, added to the sum over blocks of keys in global memory
//
// with a barrier before and after the products. With kQueryParts = 1 (d64) a warp sees all queries of its keys: P and dS enter
// dv and dk straight from its registers, and two blocks a multiprocessor overlap.
#pragma once

#include "cuda/common/nan_safe.cuh"
#include "cuda/kernels/bwd_sm80/backward_block.cuh"

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
  using TileWeights = PFragment<C::kKeyTiles, C::kNt / 2>;

 public:
  __device__ __forceinline__ Backward(const BackwardParams &params, char *shared)
      : Base(params, shared), shared_bias_(smem_address(shared) + C::kSharedBytes - C::kBiasBytes) {
    if constexpr (C::has(kDropout)) dropout_ = load_dropout_key(p_.dropout);
  }

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
    this->template put_gradient<C::kDv>(shared_v_, dv_, warp_, C::has(kDropout) ? a_.keep_scale : p_.dropout.keep_scale);
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
    if constexpr (C::has(kAlibi)) {
      slope_ = p_.alibi_slopes == nullptr
                   ? 0.f
                   : p_.alibi_slopes[batch_ * p_.alibi_batch_stride + head_q_ * p_.alibi_head_stride] * kLog2e;
    }
    __syncthreads();  // the previous head's chunks have been read
    fetch_bias(end_ - 1);
    fetch(end_ - 1);
    arrive(end_ - 1, first);
    if (end_ - 1 > begin_) fetch(end_ - 2);
#pragma unroll 1
    for (int chunk = end_ - 1; chunk >= begin_; --chunk) {
      scores(chunk);
      if (chunk > begin_) fetch_bias(chunk - 1);
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

  // The bias of this warp's keys and queries of a chunk, on its way to where this warp alone reads it.
  __device__ __forceinline__ void fetch_bias(int chunk) const {
    if constexpr (C::kStagesBias) {
      __syncwarp();  // that of the chunk before has been read
      constexpr int kPieces = C::kKeyTiles * 2, kStep = 32 / kPieces;
      const ScoreTensor &t = p_.bias;
      const int lane = opaque(lane_), piece = first_key() / 8 + lane % kPieces, key = key0_ + piece * 8;
      const int local = warp_ % C::kQueryParts * C::kPartRows + lane / kPieces, row0 = chunk * C::kRows + local;
      const int bytes = max(0, min(band_.seqlen_k - key, 8)) * 2;
      const Element *base =
          static_cast<const Element *>(t.data) + opaque(batch_) * t.batch_stride + head_q_ * t.head_stride + key;
#pragma unroll
      for (int i = 0; i < C::kPartRows; i += kStep) {
        const int row = row0 + i;
        cp_async_16(shared_bias_ + swizzled<C::kBiasPitch>(local + i, piece),
                    base + min(row, band_.seqlen_q - 1) * t.row_stride, row < band_.seqlen_q ? bytes : 0);
      }
      cp_async_commit();
    }
  }

  // Waits for a chunk and finds out which of its pairs are hidden, and whether NaN or Inf under masked pairs asks for care: every
  // thread looks at what it has fetched itself. A bias of -inf makes a weight exactly 0 by itself, unless there are any.
  __device__ __forceinline__ void arrive(int chunk, bool with_keys) {
    cp_async_wait<0>();
    if (with_keys) {
      bool nonfinite = this->k_has_nonfinite();
      if constexpr (C::has(kTileBias | kAnyBias)) {
        nonfinite |= loaded_part_has_nonfinite<Element, C::kKeys, C::kDv, C::kThreads>(shared_v_, threadIdx.x);
      }
      careful_keys_ = __syncthreads_or(nonfinite);
    }
    find_blocks(chunk);
    const bool biased = C::has(kTileBias | kAnyBias) && p_.bias.data != nullptr;
    bool careful = false;
    if (this->masked(chunk) || biased || blocks_ != kAllBlocks) {
      const int slot = chunk % C::kStages, thread = opaque(static_cast<int>(threadIdx.x));
      careful = careful_keys_ |
                loaded_part_has_nonfinite<Element, C::kRows, C::kD, C::kThreads>(shared_q_ + slot * C::kQBytes, threadIdx.x) |
                loaded_part_has_nonfinite<Element, C::kRows, C::kDv, C::kThreads>(shared_do_ + slot * C::kDoBytes, threadIdx.x);
      if (biased && thread < C::kRows / 4) {
        const uint4 delta = ld_shared_16(shared_delta_ + slot * C::kStatBytes + thread * 16);  // by the thread that fetched it
        const auto nonfinite = [](uint32_t bits) { return (bits & 0x7F800000u) == 0x7F800000u; };
        careful |= nonfinite(delta.x) || nonfinite(delta.y) || nonfinite(delta.z) || nonfinite(delta.w);
      }
    }
    careful_ = __syncthreads_or(careful);
  }

  // Which of this block's keys, 64 at a time, the block mask lets a chunk see: its sizes are multiples of 64.
  __device__ __forceinline__ void find_blocks(int chunk) {
    if constexpr (C::has(kBlockMask)) {
      const BlockMask &m = p_.block_mask;
      if (m.data == nullptr) return;
      const uint8_t *row =
          m.data + batch_ * m.batch_stride + head_q_ * m.head_stride + a_.mask_size_q.quotient(chunk * C::kRows) * m.row_stride;
      blocks_ = 0;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const int key = min(key0_ + n * 64, band_.seqlen_k - 1);
        if (row[a_.mask_size_k.quotient(key) * m.col_stride] != 0) blocks_ |= 1u << n;
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // P and dS
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void scores(int chunk) {
    if (blocks_ == 0) return;
    // A bias that is read where it lies has no rows beyond the sequence.
    const bool some_masked =
        this->masked(chunk) || (C::kGeneral && careful_) || (C::has(kAnyBias) && (chunk + 1) * C::kRows > band_.seqlen_q);
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

  __device__ __forceinline__ int first_key() const { return opaque(warp_) / C::kQueryParts * (C::kKeyTiles * 16); }

  // This warp's keys x kTileRows queries of the chunk from first_row on. kMasked: some pairs of visible blocks may be masked, other than
  // by a bias of -inf that does no harm.
  template <bool kMasked>
  __device__ __forceinline__ void score_tile(int chunk, int first_row) {
    const int slot = chunk % C::kStages, first_key = this->first_key();
    const int row0 = chunk * C::kRows + first_row, key0 = key0_ + first_key;
    const uint32_t q = shared_q_ + slot * C::kQBytes, dout = shared_do_ + slot * C::kDoBytes;
    const uint32_t stat = slot * C::kStatBytes + (first_row + 2 * (lane_ & 3)) * 4;
    TileWeights w;
    if ((kMasked && !band_.any(row0, C::kTileRows, key0, C::kKeyTiles * 16)) ||
        (C::has(kBlockMask) && (blocks_ >> first_key / 64 & 1) == 0)) {
      // Nothing to add to dv and dk; dq, and the other warps of these keys, read masked weights.
      Scores s;
      Tile::for_each([&](int i, int j, int r) { s[i][j][r] = kMaskedP; });
      Tile::pack(w, s);
      put(shared_ds_, first_row, w);
      if constexpr (C::kExchange) put(shared_p_, first_row, w);
      return;
    }

    PairBits visible = ~0u;
    if constexpr (kMasked) visible = Tile::visible(band_, row0, key0);
    Scores s, bias;
    if constexpr (C::has(kAnyBias)) {
      // On its way during the products.
      if (p_.bias.data != nullptr) {
        const int64_t slice = batch_ * p_.bias.batch_stride + head_q_ * p_.bias.head_stride;
        Tile::load_bias(bias, visible, p_.bias, slice, row0, key0);
      } else {
        clear<C::kKeyTiles, C::kNt>(bias);
      }
    }
    clear<C::kKeyTiles, C::kNt>(s);
    mma_ss<Element, Major::k, C::kD * 2, Major::k, C::kD * 2, C::kD / 16>(s, shared_k_, first_key, q, first_row);
    if constexpr (!C::kGeneral) {
      plain_weights<kMasked>(s, visible, stat);
      Tile::pack(w, s);
    } else if (C::has(kSoftcap) && p_.softcap > 0) {
      general_weights<kMasked, true>(w, s, bias, visible, row0, key0, first_row, stat);
    } else {
      general_weights<kMasked, false>(w, s, bias, visible, row0, key0, first_row, stat);
    }
    if constexpr (C::kExchange) {
      put(shared_p_, first_row, w);
    } else {
      accumulate<C::kDv * 2>(dv_, w, dout + first_row * C::kDv * 2, careful_);
    }

    Scores dp;
    clear<C::kKeyTiles, C::kNt>(dp);
    mma_ss<Element, Major::k, C::kDv * 2, Major::k, C::kDv * 2, C::kDv / 16>(dp, shared_v_, first_key, dout, first_row);
#pragma unroll
    for (int j = 0; j < C::kNt; ++j) {
      const float2 deltas = ld_shared_float2(shared_delta_ + stat + j * 32);
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float delta = (r & 1) ? deltas.y : deltas.x;
          if constexpr (!C::kGeneral && C::kExchange) {
            // From P as rounded for dv: it need not be kept twice, nor which pairs are visible. Where warps have registers for both,
            // P itself is better.
            const uint32_t pair = w[i][j / 2][j % 2 * 2 + r / 2], bits = (r & 1) ? pair >> 16 : pair & 0xFFFFu;
            const float weight = to_float<Element>(bits), d = weight * (dp[i][j][r] - delta);
            dp[i][j][r] = !kMasked ? d : (is_masked_p(weight) ? kMaskedP : d + 0.f);  // + 0: a visible -0 is no mask
          } else {
            const float weight = s[i][j][r];
            float d = dp[i][j][r] - delta;
            if constexpr (C::has(kDropout)) {
              // Dropped weights pass no gradient through P V, but still through the sum: -weight * -delta.
              d = weight < 0.f ? delta : fmaf(dp[i][j][r], a_.keep_scale, -delta);
            }
            d *= weight;
            if constexpr (kMasked) d = visible >> Tile::bit_of(i, j, r) & 1 ? d + 0.f : kMaskedP;
            dp[i][j][r] = d;
          }
        }
    }
    Tile::pack(w, dp);
    put(shared_ds_, first_row, w);
    if constexpr (!C::kExchange) accumulate<C::kD * 2>(dk_, w, q + first_row * C::kD * 2, careful_);
  }

  // From raw products to weights.
  template <bool kMasked>
  __device__ __forceinline__ void plain_weights(Scores &s, PairBits visible, uint32_t stat) const {
    const float c = p_.softmax_scale * kLog2e;
#pragma unroll
    for (int j = 0; j < C::kNt; ++j) {
      const float2 lse = ld_shared_float2(shared_lse_ + stat + j * 32);
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float weight = exp2_approx(fmaf(s[i][j][r], c, -((r & 1) ? lse.y : lse.x)));
          s[i][j][r] = kMasked && (visible >> Tile::bit_of(i, j, r) & 1) == 0 ? kMaskedP : weight;
        }
    }
  }

  // From raw products: in w the weights, rounded, zero where dropout drops them; in s what dP - delta is to be multiplied with, the
  // weights times the derivative of the softcap, negative where dropout drops them. Both are 2^p_exponent times P, by lse. Pairs that the
  // bias masks leave `visible`.
  template <bool kMasked, bool kCapped>
  __device__ __forceinline__ void general_weights(TileWeights &w, Scores &s, const Scores &bias, PairBits &visible, int row0,
                                                  int key0, int first_row, uint32_t stat) const {
    const float c = p_.softmax_scale * kLog2e;
    float distance = 0.f;
    if constexpr (C::has(kAlibi)) {
      distance = static_cast<float>(row0 + band_.seqlen_k - band_.seqlen_q - key0 + Tile::row_of(0, 0) - Tile::key_of(0, 0));
    }
#pragma unroll
    for (int k = 0; k < C::kNt / 2; ++k) {
      float2 lse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) lse[half] = ld_shared_float2(shared_lse_ + stat + (2 * k + half) * 32);
      DropoutTile dropout;
      if constexpr (C::has(kDropout)) {
        const uint32_t bh = static_cast<uint32_t>(batch_ * static_cast<int>(p_.heads_q) + head_q_);
        dropout = DropoutTile(dropout_, bh, row0 / 16 + k);
      }
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i) {
        uint32_t staged[4];
        if constexpr (C::kStagesBias) {
          const int lane = opaque(lane_), row = first_row + 16 * k + (lane & 7) + ((lane >> 4) << 3);
          ldmatrix_x4_trans(staged,
                            shared_bias_ + swizzled<C::kBiasPitch>(row, (key0 - key0_) / 8 + 2 * i + ((lane >> 3) & 1)));
        }
        float p[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int half = e / 4, r = e % 4, j = 2 * k + half;
          float x = s[i][j][r], offset = -((r & 1) ? lse[half].y : lse[half].x);
          if constexpr (C::has(kAlibi)) {
            const float steps = static_cast<float>(8 * j + (r & 1) - 16 * i - 8 * (r >> 1));
            offset = fmaf(-slope_, fabsf(distance + steps), offset);
          }
          if constexpr (C::has(kTileBias | kAnyBias)) {
            const float b =
                C::kStagesBias ? to_float<Element>((r & 1) ? staged[e / 2] >> 16 : staged[e / 2] & 0xFFFFu) : bias[i][j][r];
            offset = fmaf(b, kLog2e, offset);
            if (kMasked && b == -CUDART_INF_F) visible &= ~(1u << Tile::bit_of(i, j, r));
          }
          float slope = 1.f;
          if constexpr (kCapped) {
            const float inverse = reciprocal_approx(1.f + exp2_approx(x * a_.raw.cap_exponent)),
                        tanh = fmaf(-2.f, inverse, 1.f);
            x = a_.raw.cap * tanh;
            slope = fmaf(-tanh, tanh, 1.f);
          }
          const float weight = exp2_approx(fmaf(x, c, offset));
          p[e] = kMasked && (visible >> Tile::bit_of(i, j, r) & 1) == 0 ? kMaskedP : weight;
          s[i][j][r] = kCapped ? p[e] * slope : p[e];
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) w[i][k][n] = pack2<Element>(p[2 * n], p[2 * n + 1]);
        if constexpr (C::has(kDropout)) {
          if (!C::has(kAnyBias) || p_.dropout.threshold > 0) {
            uint32_t bits[4];
            Tile::random_bits(bits, dropout, key0 + 16 * i);
            const uint32_t threshold = p_.dropout.threshold << 16;
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              float(&x)[4] = s[i][2 * k + n / 2];
              if (bits[n] << 16 < threshold) {
                w[i][k][n] &= 0xFFFF8000u;
                x[2 * (n & 1)] = -x[2 * (n & 1)];
              }
              if (bits[n] < threshold) {
                w[i][k][n] &= 0x8000FFFFu;
                x[2 * (n & 1) + 1] = -x[2 * (n & 1) + 1];
              }
            }
          }
        }
      }
    }
  }

  // Writes this warp's tile into the (keys x queries) tile that all warps share.
  __device__ __forceinline__ void put(uint32_t tile, int first_row, const TileWeights &w) const {
    const int first_key = (C::kGeneral ? opaque(warp_) : warp_) / C::kQueryParts * C::kKeyTiles * 16;
    const uint32_t at = tile + swizzled<C::kScorePitch>(first_key + (lane_ & 15), first_row / 8 + (lane_ >> 4));
#pragma unroll
    for (int i = 0; i < C::kKeyTiles; ++i)
#pragma unroll
      for (int k = 0; k < C::kNt / 2; ++k) {
        stmatrix_x4(advance<C::kScorePitch>(at, k) + i * 16 * C::kScorePitch, w[i][k]);
      }
  }

  // acc += W T with this warp's own weights.
  template <int kPitch, int kTiles>
  static __device__ __forceinline__ void accumulate(Accumulator<C::kGradTiles, kTiles> &acc, const TileWeights &w,
                                                    uint32_t tile, bool careful) {
    if (careful) {
      mma_rs_nan_safe<Element, kPitch, C::kGradTiles, C::kNt / 2, kTiles>(acc, w, tile);
    } else {
      mma_rs<Element, kPitch, C::kGradTiles, C::kNt / 2, kTiles>(acc, w, tile);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dv, dk and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void products(int chunk) {
    const bool any = blocks_ != 0;
    if constexpr (C::kExchange) {
      const int slot = chunk % C::kStages;
      const int warp = opaque(warp_), first_key = warp / C::kColumnParts * C::kGradTiles * 16, part = warp % C::kColumnParts;
      if (any) {
        Base::template multiply<Major::k, C::kDv * 2, C::kRows / 16>(dv_, shared_p_, first_key, shared_do_ + slot * C::kDoBytes,
                                                                     part * C::kDvt * 8, careful_);
        Base::template multiply<Major::k, C::kD * 2, C::kRows / 16>(dk_, shared_ds_, first_key, shared_q_ + slot * C::kQBytes,
                                                                    part * C::kDt * 8, careful_);
      }
    }
    this->add_dq(chunk, shared_ds_, any, careful_);
  }

  static constexpr int kBlocks = C::kKeys / 64;
  static constexpr uint32_t kAllBlocks = (1u << kBlocks) - 1;

  const uint32_t shared_bias_;
  float slope_;  // of ALiBi, times log2(e)
  DropoutKey dropout_;
  uint32_t blocks_ = kAllBlocks;  // of 64 keys each, those that the block mask lets this chunk see
  bool careful_ = false;          // the products of this chunk need care
  Accumulator<C::kGradTiles, C::kDt> dk_;
  Accumulator<C::kGradTiles, C::kDvt> dv_;
};

}  // namespace fa::cuda::sm80
