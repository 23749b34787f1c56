// SPDX-License-Identifier: Apache-2.0
// From raw products to scores in the forward: masks, the terms of general scores, dropout. A kernel has the code of the terms it is
// built for (C::kScores), each a loop of its own over the tile behind one branch that all lanes take alike.
//
// Scores stay in the unit of q k^T: what is added to logits is divided by softmax_scale, so that scale and log2(e) enter with the
// exponential, as in plain kernels.
#pragma once

#include <math_constants.h>

#include "cuda/common/mma.cuh"
#include "cuda/common/rng.cuh"
#include "cuda/common/score.cuh"
#include "cuda/kernels/fwd_sm80/forward_block.cuh"

namespace fa::cuda::sm80 {

template <class C>
class ForwardScores : public ForwardBlock<C> {
 public:
  using Block = ForwardBlock<C>;
  using typename Block::Element;
  using typename Block::Keys;
  static constexpr int kMt = C::kTilesPerWarp, kNt = C::kKeys / 8;
  using Scores = Accumulator<kMt, kNt>;  // rows: queries, columns: keys

  using Block::Block;

 protected:
  using Block::a_;
  using Block::b_;
  using Block::chunk_begin_;
  using Block::head_of;
  using Block::head_q_;
  using Block::inside;
  using Block::keys_of_row;
  using Block::lane_;
  using Block::p_;
  using Block::packed;
  using Block::part_;
  using Block::row_of;
  using Block::rows_;
  using Block::seqlen_k_;
  using Block::seqlen_q;
  using Block::shared_bias;
  using Block::token_of;
  using Block::warp_interior_;
  using Block::warp_row_;

  // What does not change during the walk.
  __device__ __forceinline__ void load_terms() {
    if constexpr (C::has(kAlibi)) {
      if (p_.alibi_slopes != nullptr) {
#pragma unroll
        for (int i = 0; i < kMt; ++i)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int head = head_of(min(row_of(i, 2 * r), rows_ - 1));
            slope_[i][r] = p_.alibi_slopes[b_ * p_.alibi_batch_stride + head * p_.alibi_head_stride] * a_.raw.logit;
          }
      }
    }
    if constexpr (C::has(kDropout)) {
      if (!C::has(kAnyBias) || p_.dropout.threshold > 0) {
        const DropoutKey key = load_dropout_key(p_.dropout);
        const uint32_t bh = static_cast<uint32_t>(b_ * static_cast<int>(p_.heads_q) + head_q_);
#pragma unroll
        for (int i = 0; i < kMt; ++i) dropout_[i] = DropoutTile(key, bh, warp_row_ / 16 + i);
      }
    }
  }

  // The bias of this warp's rows and keys of a chunk, on its way to where this warp alone reads it. Always one group of copies, the
  // second youngest when the next one is begun.
  __device__ __forceinline__ void fetch_bias(int chunk) const {
    if constexpr (C::kStagesBias) {
      cp_async_wait<1>();  // a chunk that this warp passed over has its bias still under way
      if (chunk >= chunk_begin_) {
        __syncwarp();  // that of the chunk before has been read
        constexpr int kPieces = C::kKeys / 8, kStep = 32 / kPieces;
        const ScoreTensor &t = p_.bias;
        const int lane = opaque(lane_), local = lane / kPieces, piece = lane % kPieces,
                  key = chunk * C::kChunk + part_ * C::kKeys + piece * 8;
        const int bytes = max(0, min(seqlen_k_ - key, 8)) * 2;
        const Element *base = static_cast<const Element *>(t.data) + opaque(b_) * t.batch_stride + key;
        if (!packed() && warp_row_ + C::kWarpRows <= rows_) {
          base += opaque(head_q_) * t.head_stride + (warp_row_ + local) * t.row_stride;
#pragma unroll
          for (int i = 0; i < C::kWarpRows; i += kStep) {
            cp_async_16(shared_bias() + swizzled<C::kBiasPitch>(local + i, piece), base + i * t.row_stride, bytes);
          }
        } else {
#pragma unroll 1
          for (int i = 0; i < C::kWarpRows; i += kStep) {
            const int row = min(warp_row_ + local + i, rows_ - 1);
            cp_async_16(shared_bias() + swizzled<C::kBiasPitch>(local + i, piece),
                        base + head_of(row) * t.head_stride + token_of(row) * t.row_stride,
                        row == warp_row_ + local + i ? bytes : 0);
          }
        }
      }
      cp_async_commit();
    }
  }

  // Applies every term to the raw products of a chunk and lets the bias of chunk `next` come. With kMasked, pairs that the band, the
  // sequence or a bias of -inf masks become -inf whatever they were, NaN included; without, a bias of -inf is only added.
  template <bool kMasked>
  __device__ __forceinline__ void apply_terms(Scores &s, int key0, int next) const {
    if constexpr (C::has(kSoftcap)) {
      if (p_.softcap > 0) {
        // tanh(x) = 1 - 2 / (1 + e^2x). Its error is 2^-23 of the cap, far below that of a product of 16-bit numbers.
#pragma unroll
        for (int i = 0; i < kMt; ++i)
#pragma unroll
          for (int j = 0; j < kNt; ++j)
#pragma unroll
            for (int r = 0; r < 4; ++r)
              s[i][j][r] =
                  fmaf(-2.f * a_.raw.cap, reciprocal_approx(1.f + exp2_approx(s[i][j][r] * a_.raw.cap_exponent)), a_.raw.cap);
      }
    }
    if constexpr (C::has(kAlibi)) {
      if (p_.alibi_slopes != nullptr) {
        const int diagonal = seqlen_k_ - seqlen_q() - key0 - 2 * (lane_ & 3);
        each_row(s, [&](int i, int r, int row, auto &&each) {
          const float distance = static_cast<float>(token_of(row) + diagonal), slope = slope_[i][r / 2];
          each([&](float x, int key) { return fmaf(-slope, fabsf(distance - static_cast<float>(key)), x); });
        });
      }
    }
    if constexpr (C::kStagesBias) {
      cp_async_wait<1>();  // that of this chunk; the copies begun since are keys
      __syncwarp();
      add_staged_bias<kMasked>(s);
      fetch_bias(next);
    } else if constexpr (C::has(kAnyBias)) {
      if (p_.bias.data != nullptr) add_bias<kMasked>(s, key0);
    }
    if constexpr (kMasked) mask(s, key0);
  }

  // Zeroes the dropped weights of a 16 x 16 tile, rounded and paired; a masked weight keeps its sign.
  __device__ __forceinline__ void drop(uint32_t (&w)[4], int i, int key0) const {
    if constexpr (C::has(kDropout)) {
      if (C::has(kAnyBias) && p_.dropout.threshold == 0) return;  // kernels for dropout do it unasked, among the products
      const Philox4 random = dropout_[i].bits(2 * static_cast<uint32_t>(key0) + 4 * (lane_ >> 2) + (lane_ & 3));
      const uint32_t threshold = p_.dropout.threshold << 16;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint32_t bits = random.word[2 * (r & 1) + (r >> 1)];
        if (bits << 16 < threshold) w[r] &= 0xFFFF8000u;
        if (bits < threshold) w[r] &= 0x8000FFFFu;
      }
    }
  }

 private:
  // f(i, r, row, each) for every row of this lane; each(g) replaces elements x of the row by g(x, key), with keys counted from the
  // lane's first one.
  template <typename F>
  __device__ __forceinline__ void each_row(Scores &s, F f) const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        f(i, r, min(row_of(i, r), rows_ - 1), [&](auto &&g) {  // what lies beyond the last row is not stored
#pragma unroll
          for (int j = 0; j < kNt; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) s[i][j][r + e] = g(s[i][j][r + e], 8 * j + e);
        });
      }
  }

  __device__ __forceinline__ void mask(Scores &s, int key0) const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        const Keys keys = keys_of_row(i, r, key0);
        const uint32_t visible = elements_below(keys.end) & ~elements_below(keys.begin);
#pragma unroll
        for (int j = 0; j < kNt; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if ((visible >> (2 * j + e) & 1) == 0) s[i][j][r + e] = -CUDART_INF_F;
          }
      }
  }

  // Of a lane's elements of a row, keys 0, 1, 8, 9, 16, .. of the chunk, those below `key`: a bit each.
  static __device__ __forceinline__ uint32_t elements_below(int key) {
    static_assert(kNt < 16);
    key = min(max(key, 0), kNt * 8);
    return (1u << (key / 8 * 2 + min(key % 8, 2))) - 1;
  }

  template <bool kMasked>
  __device__ __forceinline__ float sum(float score, float bias) const {
    return kMasked && bias == -CUDART_INF_F ? bias : fmaf(bias, a_.raw.logit, score);
  }

  template <bool kMasked>
  __device__ __forceinline__ void add_staged_bias(Scores &s) const {
    const int lane = opaque(lane_);
    const uint32_t at = shared_bias() + swizzled<C::kBiasPitch>(lane & 15, lane >> 4);
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int k = 0; k < kNt / 2; ++k) {
        uint32_t bias[4];
        ldmatrix_x4(bias, advance<C::kBiasPitch>(at, k) + i * 16 * C::kBiasPitch);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float(&x)[4] = s[i][2 * k + n / 2];
          x[n % 2 * 2] = sum<kMasked>(x[n % 2 * 2], to_float<Element>(bias[n] & 0xFFFFu));
          x[n % 2 * 2 + 1] = sum<kMasked>(x[n % 2 * 2 + 1], to_float<Element>(bias[n] >> 16));
        }
      }
  }

  // The bias from where it lies; in pairs of neighbours where they can be read at once.
  template <bool kMasked>
  __device__ __forceinline__ void add_bias(Scores &s, int key0) const {
    const ScoreTensor &t = p_.bias;
    each_row(s, [&](int i, int r, int row, auto &&each) {
      const int64_t at = b_ * t.batch_stride + head_of(row) * t.head_stride + token_of(row) * t.row_stride +
                         (key0 + 2 * (lane_ & 3)) * t.col_stride;
      if constexpr (kMasked) {
        const Keys keys = keys_of_row(i, r, key0);
        each([&](float x, int key) {
          return key >= keys.begin && key < keys.end ? sum<true>(x, load_score(t, at + key * t.col_stride)) : x;
        });
      } else if (!a_.pair_bias) {
        each([&](float x, int key) { return sum<false>(x, load_score(t, at + key * t.col_stride)); });
      } else if (t.dtype == Dtype::f32) {
        const auto *pairs = reinterpret_cast<const float2 *>(static_cast<const float *>(t.data) + at);
#pragma unroll
        for (int j = 0; j < kNt; ++j) {
          const float2 bias = pairs[4 * j];
          s[i][j][r] = sum<false>(s[i][j][r], bias.x);
          s[i][j][r + 1] = sum<false>(s[i][j][r + 1], bias.y);
        }
      } else {
        const auto *pairs = reinterpret_cast<const uint32_t *>(static_cast<const Element *>(t.data) + at);
#pragma unroll
        for (int j = 0; j < kNt; ++j) {
          const uint32_t bias = pairs[4 * j];
          s[i][j][r] = sum<false>(s[i][j][r], to_float<Element>(bias & 0xFFFFu));
          s[i][j][r + 1] = sum<false>(s[i][j][r + 1], to_float<Element>(bias >> 16));
        }
      }
    });
  }

  float slope_[kMt][2];  // of ALiBi, in the unit of scores
  DropoutTile dropout_[kMt];
};

}  // namespace fa::cuda::sm80
