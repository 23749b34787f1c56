// SPDX-License-Identifier: Apache-2.0
// Exact attention backward with mma.sync, for sm_80 and newer: all warps alike, every score term.
//
// A CTA owns kKeys keys of one key head, with their dk and dv in registers. Its main loop goes over the query tiles (kRows queries) that see
// them, head after head of the GQA group. Scores are computed transposed, keys as rows. Every mma of a warp covers 32 rows if it can, so that
// a fragment from shared memory feeds two of them.
//
//   score_tiles:  S^T = K Q^T,  dP^T = V dO^T          kKeyTiles * 16 keys and a part of the queries per warp
//                 P^T = 2^(S^T - lse),  dS^T = P^T (dP^T - delta), converted, to shared memory
//                 (with dropout see BackwardParams::keep_scale)
//   barrier
//                 dv += P^T dO,  dk += dS^T Q          keys x a part of the columns per warp
//                 dq  = dS K, added to the sum of all CTAs in global memory
//   barrier
//
// With two stages the next query tile arrives meanwhile. With one (head_dim above 128 where shared memory is short) it is loaded when dv and dk
// have read this one, behind a third barrier, and arrives under dq = dS K.
//
// With fewer tiles of scores than warps (kPassesDp) a second warp computes dP^T of a tile, and passes it on through the tile's place in P and dS.
//
// With kQueryWarps = 1 (d64) a warp has all queries of its keys: P and dS go from its registers into dv and dk, and two CTAs per SM overlap.
//
// Shared memory: BackwardStorage (backward_table.h). dk and dv leave through the memory of K and V.
#pragma once

#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/score_text.cuh"
#include "cuda/kernels/bwd_sm80/dq_sum.cuh"
#include "cuda/kernels/bwd_sm80/key_block.cuh"
#include "cuda/kernels/bwd_sm80/score_tile.cuh"

namespace fa::cuda::sm80 {

template <class C>
class Backward {
  using Element = typename C::Element;
  using Tile = ScoreTile<C::kKeyTiles, C::kNt>;
  using Scores = typename Tile::Scores;
  using POperand = PFragment<C::kKeyTiles, C::kNt / 2>;
  static constexpr bool kHasBias = C::has(kTileBias | kAnyBias), kHasText = C::has(kScoreText);

 public:
  __device__ __forceinline__ Backward(const BackwardParams &params, char *shared) : block_(params, shared) {
    if constexpr (C::has(kDropout)) dropout_ = load_dropout_key(block_.p.dropout);
  }

  __device__ __forceinline__ void run() {
    const Problem &p = block_.p;
    if constexpr (C::kPassesDp && kHasMbarrierWait) {
      if (threadIdx.x < C::kScoreWarps) mbarrier_init(block_.smem_role_barrier(threadIdx.x), 32);
    }
    clear<C::kGradTiles, C::kDt>(dk_);
    clear<C::kGradTiles, C::kDvt>(dv_);
    if (block_.key0 < block_.mask.seqlen_k) {
      block_.load_k();
      block_.load_v();
      for (int h = block_.first_head(); h < block_.end_head(); ++h) mainloop(h, h == block_.first_head());
      // If no query sees K and V, no main loop has waited for them. They must not arrive on top of dk and dv.
      cp_async_commit();
      cp_async_wait<0>();
    }
    __syncthreads();  // all warps have read K and V
    block_.template stage_gradient<C::kD>(block_.g.dk, p.head_dim, block_.smem_k(), dk_, block_.warp, p.softmax_scale);
    block_.template stage_gradient<C::kDv>(block_.g.dv, p.head_dim_v, block_.smem_v(), dv_, block_.warp,
                                           C::has(kDropout) ? block_.a.keep_scale : p.dropout.keep_scale);
    __syncthreads();
    block_.template store_gradient<C::kD, C::kThreads>(block_.g.dk, block_.smem_k(), p.head_dim, threadIdx.x);
    block_.template store_gradient<C::kDv, C::kThreads>(block_.g.dv, block_.smem_v(), p.head_dim_v, threadIdx.x);
  }

 private:
  // ------------------------------------------------------------------------------------------------------------------
  // Main loop, over the queries of one head
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void mainloop(int head_q, bool first) {
    if (!block_.find_tiles(head_q)) return;
    if constexpr (C::has(kAlibi)) {
      head_ = head_terms(block_.p, Base2Math::kLogit, block_.batch, head_q);
    }
    const int begin = block_.begin, last = block_.end - 1;
    __syncthreads();  // all warps have read the tiles of the previous head
    load_bias(last);
    load(last);
    wait_for(last, first);
    if (C::kStages == 2 && last > begin) load(last - 1);
#pragma unroll 1
    for (int tile = last; tile >= begin; --tile) {
      score_tiles(tile);
      if (tile > begin) load_bias(tile - 1);
      dq_.release(block_);
      __syncthreads();  // dS (and P) of every warp is in shared memory
      add_to_dv_and_dk(tile);
      if constexpr (C::kStages == 1) {
        __syncthreads();  // all warps have read Q and dO
        if (tile > begin) load(tile - 1);
      }
      dq_.add(block_, tile, block_.smem_ds(), visible_blocks_ != 0, nan_safe_);
      if (tile > begin) wait_for(tile - 1, false);
      if (C::kStages == 2 && tile > begin + 1) load(tile - 2);
    }
    dq_.release(block_);
  }

  __device__ __forceinline__ void load(int tile) const {
    block_.template load_q<C::kThreads>(tile, tile % C::kStages, threadIdx.x);
    block_.template load_dout<C::kThreads>(tile, tile % C::kStages, threadIdx.x);
    cp_async_commit();
  }

  // Begins to load the bias of this warp's keys and queries of a tile. Only this warp reads it.
  __device__ __forceinline__ void load_bias(int tile) const {
    if constexpr (C::kStagesBias) {
      __syncwarp();  // the bias of the previous tile has been read
      constexpr int kVectors = C::kKeyTiles * 2, kStep = 32 / kVectors;
      const ScoreTensor &t = block_.p.bias;
      const PairMask &mask = block_.mask;
      const int lane = opaque(block_.lane), vector = first_key() / 8 + lane % kVectors, key = block_.key0 + vector * 8;
      const int local = block_.warp % C::kQueryWarps * C::kWarpRows + lane / kVectors, row0 = tile * C::kRows + local;
      const int bytes = max(0, min(mask.seqlen_k - key, 8)) * 2;
      const Element *base =
          static_cast<const Element *>(t.data) + opaque(block_.batch) * t.batch_stride + block_.head_q * t.head_stride + key;
#pragma unroll
      for (int i = 0; i < C::kWarpRows; i += kStep) {
        const int row = row0 + i;
        cp_async_16(block_.smem_bias() + swizzled<C::kBiasPitch>(local + i, vector),
                    base + min(row, mask.seqlen_q - 1) * t.row_stride, row < mask.seqlen_q ? bytes : 0);
      }
      cp_async_commit();
    }
  }

  // Waits for a query tile. Finds out which of its pairs masks given as data hide, and whether NaN or Inf at masked pairs requires the NaN-safe
  // path: every thread looks at what it has loaded itself. A bias or a score of -inf makes P exactly 0 by itself, unless
  // there are any.
  __device__ __forceinline__ void wait_for(int tile, bool with_keys) {
    cp_async_wait<0>();
    if (with_keys) {
      bool nonfinite = block_.k_has_nonfinite();
      if constexpr (kHasBias || kHasText) {
        nonfinite |= loaded_part_has_nonfinite<Element, C::kKeys, C::kDv, C::kThreads>(block_.smem_v(), threadIdx.x);
      }
      block_.nonfinite_keys = __syncthreads_or(nonfinite);
    }
    find_visible_blocks(tile);
    const bool biased = kHasText || (kHasBias && block_.p.bias.data != nullptr);
    bool nan_safe = false;
    if (block_.masks(tile) || biased || visible_blocks_ != kAllBlocks || has_partial_blocks()) {
      const int stage = tile % C::kStages, thread = opaque(static_cast<int>(threadIdx.x));
      nan_safe = block_.nonfinite_keys |
                 loaded_part_has_nonfinite<Element, C::kRows, C::kD, C::kThreads>(block_.smem_q(stage), threadIdx.x) |
                 loaded_part_has_nonfinite<Element, C::kRows, C::kDv, C::kThreads>(block_.smem_dout(stage), threadIdx.x);
      if (biased && thread < C::kRows / 4) {
        const uint4 delta = ld_shared_16(block_.smem_delta(stage) + thread * 16);  // by the thread that loaded it
        const auto nonfinite = [](uint32_t bits) { return (bits & 0x7F800000u) == 0x7F800000u; };
        nan_safe |= nonfinite(delta.x) || nonfinite(delta.y) || nonfinite(delta.z) || nonfinite(delta.w);
      }
    }
    nan_safe_ = __syncthreads_or(nan_safe);
  }

  // Which of the CTA's keys, 64 at a time, masks given as data show to a query tile. Blocks of a block mask that is read as it is have sizes of
  // multiples of 64.
  __device__ __forceinline__ void find_visible_blocks(int tile) {
    if constexpr (C::has(kDataMask)) {
      static_assert(kCell == 64 && kCell % C::kRows == 0 && 32 % kBlocks == 0);
      const DataMask &m = block_.a.mask;
      if (!m.given()) return;
      const int cell = block_.key0 / kCell;
      const int64_t word = row_of_cells(m, opaque(block_.batch), opaque(block_.head_q), tile * C::kRows) + cell / 32;
      visible_blocks_ = m.by_query.visible[word] >> cell % 32 & kAllBlocks;
      partial_blocks_ = m.by_query.partial[word] >> cell % 32 & kAllBlocks;
    } else if constexpr (C::has(kBlockMask)) {
      const BlockMask &m = block_.p.block_mask;
      if (m.data == nullptr) return;
      const uint8_t *row = m.data + block_.batch * m.batch_stride + block_.head_q * m.head_stride +
                           block_.a.mask_size_q.quotient(tile * C::kRows) * m.row_stride;
      visible_blocks_ = 0;
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
        const int key = min(block_.key0 + n * 64, block_.mask.seqlen_k - 1);
        if (row[block_.a.mask_size_k.quotient(key) * m.col_stride] != 0) visible_blocks_ |= 1u << n;
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // P and dS
  // ------------------------------------------------------------------------------------------------------------------

  // Number of this warp's tile of scores. With kPassesDp two warps have the same.
  __device__ __forceinline__ int score_warp() const {
    return C::kPassesDp ? opaque(block_.warp) % C::kScoreWarps : block_.warp;
  }
  __device__ __forceinline__ int first_key() const { return opaque(score_warp()) / C::kQueryWarps * (C::kKeyTiles * 16); }

  __device__ __forceinline__ bool has_partial_blocks() const { return C::has(kDataMask) && partial_blocks_ != 0; }

  __device__ __forceinline__ void score_tiles(int tile) {
    if (visible_blocks_ == 0) return;
    if (C::kPassesDp && block_.warp >= 2 * C::kScoreWarps) return;
    // A bias in global memory has no rows beyond the sequence.
    const bool masked = block_.masks(tile) || (C::kGeneral && nan_safe_) ||
                        (C::has(kAnyBias) && (tile + 1) * C::kRows > block_.mask.seqlen_q) || has_partial_blocks();
#pragma unroll 1
    for (int step = 0; step < C::kTileSteps; ++step) {
      const int first_row = score_warp() % C::kQueryWarps * C::kWarpRows + step * C::kTileRows;
      if (C::kPassesDp && block_.warp >= C::kScoreWarps) {
        if (!is_hidden(masked, tile, first_key(), first_row)) pass_dp(tile, first_row);
      } else if (masked) {
        score_tile<true>(tile, first_row);
      } else {
        score_tile<false>(tile, first_row);
      }
    }
  }

  // Whether all pairs of this warp's tile of scores are masked.
  __device__ __forceinline__ bool is_hidden(bool masked, int tile, int first_key, int first_row) const {
    return (masked &&
            !block_.mask.any(tile * C::kRows + first_row, C::kTileRows, block_.key0 + first_key, C::kKeyTiles * 16)) ||
           (C::has(kBlockMask) && (visible_blocks_ >> first_key / 64 & 1) == 0);
  }
  __device__ __forceinline__ void compute_dp(Scores &dp, int first_key, uint32_t dout, int first_row) const {
    clear<C::kKeyTiles, C::kNt>(dp);
    mma_ss<Element, Major::k, C::kDv * 2, Major::k, C::kDv * 2, C::kDv / 16>(dp, block_.smem_v(), first_key, dout, first_row);
  }

  // This warp's keys x kTileRows queries of a query tile, from first_row on. kMasked: some pairs may be masked, other than with all of 64 x 64
  // (visible_blocks_) or by a bias of -inf that does no harm.
  template <bool kMasked>
  __device__ __forceinline__ void score_tile(int tile, int first_row) {
    const Problem &p = block_.p;
    const int stage = tile % C::kStages, first_key = this->first_key();
    const int row0 = tile * C::kRows + first_row, key0 = block_.key0 + first_key;
    const uint32_t q = block_.smem_q(stage), dout = block_.smem_dout(stage);
    // Of this lane's first query.
    const uint32_t lse_at = block_.smem_lse(stage) + (first_row + 2 * (block_.lane & 3)) * 4,
                   delta_at = lse_at + (C::Storage::kDelta - C::Storage::kLse);
    POperand operand;
    if (is_hidden(kMasked, tile, first_key, first_row)) {
      // Nothing to add to dv and dk. dq, and the other warps of these keys, read masked P and dS.
      Scores s;
      Tile::for_each([&](int i, int j, int r) { s[i][j][r] = kMaskedP; });
      convert(operand, s);
      store_scores(block_.smem_ds(), first_row, operand);
      if constexpr (C::kSharesP) store_scores(block_.smem_p(), first_row, operand);
      return;
    }

    PairBits visible = ~0u;
    if constexpr (kMasked) visible = Tile::visible(block_.mask, row0, key0);
    if constexpr (kMasked && C::has(kDataMask)) {
      if ((partial_blocks_ >> first_key / 64 & 1) != 0)
        visible &= Tile::shown(block_.a.mask, p, opaque(block_.batch), opaque(block_.head_q), row0, key0);
    }
    hold_bits<kMasked>(visible);
    Scores s, bias;
    if constexpr (C::has(kAnyBias)) {
      // Arrives during S = Q K^T.
      if (p.bias.data != nullptr) {
        const int64_t slice = block_.batch * p.bias.batch_stride + block_.head_q * p.bias.head_stride;
        Tile::load_bias(bias, visible, p.bias, slice, row0, key0);
      } else {
        clear<C::kKeyTiles, C::kNt>(bias);
      }
    }
    clear<C::kKeyTiles, C::kNt>(s);
    mma_ss<Element, Major::k, C::kD * 2, Major::k, C::kD * 2, C::kD / 16>(s, block_.smem_k(), first_key, q, first_row);
    if constexpr (!C::kGeneral) {
      exponentiate_plain<kMasked>(s, visible, lse_at);
      convert(operand, s);
    } else {
      with_score_mods<C::kScores>(p, Base2Math{block_.a.raw}, [&](const auto &mods) {
        exponentiate_general<kMasked>(mods, operand, s, bias, visible, row0, key0, first_row, lse_at);
      });
    }
    Scores dp;
    if constexpr (C::kPassesDp) take_dp(dp, first_row);
    if constexpr (C::kSharesP) {
      store_scores(block_.smem_p(), first_row, operand);
    } else {
      accumulate<C::kDv * 2>(dv_, operand, dout + first_row * C::kDv * 2);
    }
    if constexpr (!C::kPassesDp) compute_dp(dp, first_key, dout, first_row);
#pragma unroll
    for (int j = 0; j < C::kNt; ++j) {
      const float2 deltas = ld_shared_float2(delta_at + j * 32);
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float delta = (r & 1) ? deltas.y : deltas.x;
          float &x = dp[i][j][r];
          if constexpr (!C::kGeneral && C::kSharesP) {
            // P as converted for dv: neither P itself nor which pairs are visible must be kept. Where a warp has the registers, P itself is better.
            x = ds_of<kMasked>(half_of<Element>(operand[i][j / 2][j % 2 * 2 + r / 2], r & 1), x, delta);
          } else {
            const float prob = s[i][j][r];
            float d = x - delta;
            // A dropped P passes no gradient through P V, but still through the row sum: -prob * -delta.
            if constexpr (C::has(kDropout)) d = prob < 0.f ? delta : fmaf(x, block_.a.keep_scale, -delta);
            d *= prob;
            if constexpr (kMasked) d = visible >> Tile::bit_of(i, j, r) & 1 ? d + 0.f : kMaskedP;
            x = d;
          }
        }
    }
    convert(operand, dp);
    store_scores(block_.smem_ds(), first_row, operand);
    if constexpr (!C::kSharesP) accumulate<C::kD * 2>(dk_, operand, q + first_row * C::kD * 2);
  }

  // Keeps the bits in one register instead of up to 32 predicates, in the kernels that have the fewest registers to spare.
  template <bool kMasked>
  static __device__ __forceinline__ void hold_bits(PairBits &visible) {
    if constexpr (kMasked && C::has(kAnyBias)) visible = static_cast<PairBits>(opaque(static_cast<int>(visible)));
  }

  // P = 2^(S - lse). `lse_at`: address of lse of this lane's first query.
  template <bool kMasked>
  __device__ __forceinline__ void exponentiate_plain(Scores &s, PairBits visible, uint32_t lse_at) const {
    const float c = exponent_scale(block_.p);
#pragma unroll
    for (int j = 0; j < C::kNt; ++j) {
      const float2 lse = ld_shared_float2(lse_at + j * 32);
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float p = exp2_approx(fmaf(s[i][j][r], c, -((r & 1) ? lse.y : lse.x)));
          s[i][j][r] = kMasked && (visible >> Tile::bit_of(i, j, r) & 1) == 0 ? kMaskedP : p;
        }
    }
  }

  // From S = Q K^T: `operand` is P, converted, zero where dropped. s becomes what dP - delta is multiplied by: P times the derivative of
  // the softcap, negative where dropped. Both are 2^p_exponent times as large with dropout, by lse. Pairs that the bias masks leave `visible`.
  template <bool kMasked, class Mods>
  __device__ __forceinline__ void exponentiate_general(const Mods &mods, POperand &operand, Scores &s, const Scores &bias,
                                                       PairBits &visible, int row0, int key0, int first_row,
                                                       uint32_t lse_at) const {
    const Problem &p = block_.p;
    const ScorePlace place{block_.batch,
                           block_.head_q,
                           block_.mask.seqlen_q,
                           block_.mask.seqlen_k,
                           p.q_lengths.cu != nullptr ? block_.q_start : 0,
                           p.k_lengths.cu != nullptr ? block_.keys().start : 0};
    const ScoreText text{place, score_text_args(block_.a)};
    const int text_row = row0 + Tile::query_of(0, 0), text_key = key0 + Tile::key_of(0, 0);
    const auto text_row_number = static_cast<float>(text_row), text_key_number = static_cast<float>(text_key);
    float distance = 0.f;
    if constexpr (C::has(kAlibi)) {
      distance = static_cast<float>(row0 + block_.mask.seqlen_k - block_.mask.seqlen_q - key0 + Tile::query_of(0, 0) -
                                    Tile::key_of(0, 0));
    }
#pragma unroll
    for (int k = 0; k < C::kNt / 2; ++k) {
      float2 lse[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) lse[half] = ld_shared_float2(lse_at + (2 * k + half) * 32);
      uint32_t dropout_numbers[C::kKeyTiles][4];
      if constexpr (C::has(kDropout)) {
        if (!C::has(kAnyBias) || p.dropout.threshold > 0) {
          const uint32_t bh = dropout_head(p, block_.batch, block_.head_q);
          Tile::dropout_numbers(dropout_numbers, DropoutTile(dropout_, bh, (row0 + p.dropout.first_query) / 16 + k),
                                key0 + p.dropout.first_key);
        }
      }
#pragma unroll
      for (int i = 0; i < C::kKeyTiles; ++i) {
        uint32_t staged[4];
        if constexpr (C::kStagesBias) {
          const int lane = opaque(block_.lane), row = first_row + 16 * k + (lane & 7) + ((lane >> 4) << 3);
          ldmatrix_x4_trans(
              staged, block_.smem_bias() + swizzled<C::kBiasPitch>(row, (key0 - block_.key0) / 8 + 2 * i + ((lane >> 3) & 1)));
        }
        float probs[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const int half = e / 4, r = e % 4, j = 2 * k + half;
          float offset = -((r & 1) ? lse[half].y : lse[half].x), derivative;
          if constexpr (kHasBias) {
            const float b = C::kStagesBias ? half_of<Element>(staged[e / 2], r & 1) : bias[i][j][r];
            offset = add_bias<false>(offset, b, Base2Math::kLogit);
            if (kMasked && b == -CUDART_INF_F) visible &= ~(1u << Tile::bit_of(i, j, r));
          }
          const int query = 8 * j + (r & 1), key = 16 * i + 8 * (r >> 1);
          const auto steps = static_cast<float>(query - key);
          float x = s[i][j][r], of_text = 1.f;
          bool hidden = false;
          if constexpr (kHasText) {
            x = text.score_and_derivative(x * p.softmax_scale, text_row + query, text_key + key,
                                          text_row_number + static_cast<float>(query),
                                          text_key_number + static_cast<float>(key), of_text);
            if (kMasked && C::has(kDataMask) && ScoreText::kVisible && !text.visible(text_row + query, text_key + key))
              x = -CUDART_INF_F;
            hidden = x == -CUDART_INF_F;
            if (kMasked && hidden) visible &= ~(1u << Tile::bit_of(i, j, r));
          }
          const float prob = exp2_approx(mods.logit(x, offset, head_, distance + steps, derivative));
          probs[e] = (kMasked && (visible >> Tile::bit_of(i, j, r) & 1) == 0) || hidden ? kMaskedP : prob;
          s[i][j][r] = probs[e] * derivative;
          if constexpr (kHasText) s[i][j][r] = hidden ? kMaskedP : s[i][j][r] * of_text;
        }
        hold_bits<kMasked>(visible);
        convert_p<Element>(probs, 0, operand[i][k]);
        if constexpr (C::has(kDropout)) {
          if (!C::has(kAnyBias) || p.dropout.threshold > 0) {
            const KeptHalves halves(p.dropout.threshold);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              float *x = &s[i][2 * k + n / 2][2 * (n & 1)];
              const uint32_t kept = halves.of(dropout_numbers[i][n]);
              operand[i][k][n] &= kept | 0x80008000u;
              x[0] = __uint_as_float(__float_as_uint(x[0]) ^ (~kept << 16 & 0x80000000u));
              x[1] = __uint_as_float(__float_as_uint(x[1]) ^ (~kept & 0x80000000u));
            }
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void convert(POperand &operand, const Scores &x) {
#pragma unroll
    for (int i = 0; i < C::kKeyTiles; ++i) convert_p<Element>(x[i], operand[i]);
  }

  // Computes dP^T of a tile of 16 x 16 and passes it on to the warp that computes P^T. Half of a lane's numbers take its 16 bytes of the tile in P,
  // the others those in dS, which that warp writes later.
  __device__ __forceinline__ void pass_dp(int tile, int first_row) const {
    static_assert(!C::kPassesDp || (C::kKeyTiles == 1 && C::kNt == 2));
    Scores dp;
    compute_dp(dp, first_key(), block_.smem_dout(tile % C::kStages), first_row);
    const uint32_t at = score_fragment(0, first_row);
#pragma unroll
    for (int j = 0; j < 2; ++j)
      st_shared_16((j == 0 ? block_.smem_p() : block_.smem_ds()) + at, __float_as_uint(dp[0][j][0]),
                   __float_as_uint(dp[0][j][1]), __float_as_uint(dp[0][j][2]), __float_as_uint(dp[0][j][3]));
    if constexpr (kHasMbarrierWait) {
      mbarrier_arrive(block_.smem_role_barrier(score_warp()));
    } else {
      named_barrier(1 + score_warp(), 64);
    }
  }
  __device__ __forceinline__ void take_dp(Scores &dp, int first_row) {
    if constexpr (kHasMbarrierWait) {
      mbarrier_wait(block_.smem_role_barrier(score_warp()), dp_parity_);
      dp_parity_ ^= 1;
    } else {
      named_barrier(1 + score_warp(), 64);
    }
    const uint32_t at = score_fragment(0, first_row);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4 x = ld_shared_16((j == 0 ? block_.smem_p() : block_.smem_ds()) + at);
      const uint32_t bits[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) dp[0][j][r] = __uint_as_float(bits[r]);
    }
    __syncwarp();  // before P and dS come in the place of it
  }

  // Address of this lane's 16 bytes of the first fragment of this warp's tile in P or dS.
  __device__ __forceinline__ uint32_t score_fragment(uint32_t scores, int first_row) const {
    const int first_key = (C::kGeneral ? opaque(score_warp()) : score_warp()) / C::kQueryWarps * C::kKeyTiles * 16;
    return scores + swizzled<C::kScorePitch>(first_key + (block_.lane & 15), first_row / 8 + (block_.lane >> 4));
  }

  // Stores this warp's tile into the (keys x queries) tile that all warps share.
  __device__ __forceinline__ void store_scores(uint32_t scores, int first_row, const POperand &operand) const {
    const uint32_t at = score_fragment(scores, first_row);
#pragma unroll
    for (int i = 0; i < C::kKeyTiles; ++i)
#pragma unroll
      for (int k = 0; k < C::kNt / 2; ++k) stmatrix_x4(advance<C::kScorePitch>(at, k) + i * 16 * C::kScorePitch, operand[i][k]);
  }

  // acc += P T with this warp's own P (or dS).
  template <int kPitch, int kTiles>
  __device__ __forceinline__ void accumulate(Accumulator<C::kGradTiles, kTiles> &acc, const POperand &operand,
                                             uint32_t tile) const {
    if (nan_safe_) {
      mma_rs_nan_safe<Element, kPitch, C::kGradTiles, C::kNt / 2, kTiles>(acc, operand, tile);
    } else {
      mma_rs<Element, kPitch, C::kGradTiles, C::kNt / 2, kTiles>(acc, operand, tile);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dv, dk and dq
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void add_to_dv_and_dk(int tile) {
    if constexpr (C::kSharesP) {
      if (visible_blocks_ == 0) return;
      const int stage = tile % C::kStages, warp = opaque(block_.warp);
      const int first_key = warp / C::kColumnWarps * C::kGradTiles * 16, part = warp % C::kColumnWarps;
      mma_scores<C, Major::k, C::kDv * 2, C::kRows / 16>(dv_, block_.smem_p(), first_key, block_.smem_dout(stage),
                                                         part * C::kDvt * 8, nan_safe_);
      mma_scores<C, Major::k, C::kD * 2, C::kRows / 16>(dk_, block_.smem_ds(), first_key, block_.smem_q(stage),
                                                        part * C::kDt * 8, nan_safe_);
    }
  }

  static constexpr int kBlocks = C::kKeys > 64 ? C::kKeys / 64 : 1;
  static constexpr uint32_t kAllBlocks = (1u << kBlocks) - 1;

  KeyBlock<C> block_;
  DqSum<C> dq_;
  HeadTerms head_;  // for logits in base 2
  DropoutKey dropout_;
  uint32_t visible_blocks_ = kAllBlocks;  // of 64 keys each, those that masks given as data show to this query tile
  uint32_t partial_blocks_ = 0;           // with kDataMask: those of which such masks hide some pairs
  bool nan_safe_ = false;                 // this query tile takes the NaN-safe path
  uint32_t dp_parity_ = 0;                // kPassesDp: of the phase of the barrier that dP^T of a tile arrives at
  Accumulator<C::kGradTiles, C::kDt> dk_;
  Accumulator<C::kGradTiles, C::kDvt> dv_;
};

}  // namespace fa::cuda::sm80
