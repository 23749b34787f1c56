// SPDX-License-Identifier: Apache-2.0
// Exact attention forward with mma.sync, for sm_80 and newer.
//
// A block of threads owns kRows rows of q of one key head: rows of one query head, or, for short queries, tokens x the heads of a GQA
// group (packed). kParts warps share kTilesPerWarp x 16 of these rows; each of them computes its part of the keys of S and its part
// of the columns of out, in registers. The block walks over chunks of kChunk keys, from the last visible one to the first. With one
// part two chunks are in shared memory, one being read and one on its way; the wide heads that need parts have room for one: V arrives
// under S, K of the next chunk under the softmax and P V.
//
//   shared memory:  Q [kRows][kD] | K [kStages][kChunk][kD] | V [kStages][kChunk][kDv]     (out passes through Q's place)
//                   and with kParts > 1 | P [kRows][kChunk] | row maxima, later row sums [kParts][kRows] |
//                   barrier and votes [kWarps / kParts]
//
//   for every chunk:  wait for it; fetch the next one
//                     S = Q K^T            (kTilesPerWarp*16 x kChunk/kParts a warp, fp32)
//                     mask S if the chunk touches an edge of the band or of the sequence
//                     P = exp2(S - m)      (m is raised, and out rescaled, only when S exceeds it by more than 2^8)
//                     out += P V           (kTilesPerWarp*16 x kDv/kParts a warp; the parts of P meet in shared memory)
//
// The row maximum m may lag behind the true one: any m gives the same result after the final division, and one that lags by at most
// 8 in base 2 loses no precision, so the usual chunk neither reduces across lanes nor touches out. Kernels with dropout set m lower than
// the maximum on purpose, so that kept elements of P do not underflow when they are rounded (ForwardParams::p_exponent).
#pragma once

#include <math_constants.h>

#include <type_traits>

#include "cuda/common/mma.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/smem_tile.cuh"
#include "cuda/kernels/fwd_sm80/forward_scores.cuh"

namespace fa::cuda::sm80 {

template <class C>
class Forward : private ForwardScores<C> {
 public:
  using Block = ForwardScores<C>;
  using typename Block::Element;
  using typename Block::Scores;
  static constexpr int kMt = C::kTilesPerWarp, kNt = C::kKeys / 8, kDt = C::kColumns / 8, kPSteps = C::kKeys / 16;
  static constexpr int kFirstStep = 4 / C::kParts;            // of out's columns, 16 at a time, times the part
  static constexpr int kBiasGroups = C::kStagesBias ? 1 : 0;  // of copies, begun after those of keys and needed later

  using Block::Block;

  __device__ __forceinline__ void run() {
    find_block();
    if (row0() < rows_) {
      find_keys();
      if constexpr (C::kParts > 1 && kHasMbarrierWait) {
        if (lane_ == 0 && part_ == 0) mbarrier_init(shared_barrier(), C::kParts * 32);
      }
#pragma unroll 1
      do {
        walk();
      } while (C::has(kTileBias | kAnyBias) && needs_careful_bias());
      finish();
    }
    store_unused_rows();
  }

 private:
  using Block::a_;
  using Block::apply_terms;
  using Block::b_;
  using Block::block_interior_;
  using Block::careful_bias_;
  using Block::chunk_begin_;
  using Block::chunk_end_;
  using Block::drop;
  using Block::fetch_bias;
  using Block::fetch_q;
  using Block::find_block;
  using Block::find_keys;
  using Block::head_of;
  using Block::head_q_;
  using Block::key_source;
  using Block::lane_;
  using Block::load_terms;
  using Block::may_mask;
  using Block::next_chunk;
  using Block::p_;
  using Block::packed;
  using Block::part_;
  using Block::queries;
  using Block::row0;
  using Block::row_of;
  using Block::rows_;
  using Block::shared_barrier;
  using Block::shared_k;
  using Block::shared_p;
  using Block::shared_q_;
  using Block::shared_row;
  using Block::shared_v;
  using Block::shared_vote;
  using Block::split_index;
  using Block::token_of;
  using Block::warp_;
  using Block::warp_group_;
  using Block::warp_interior_;
  using Block::warp_row_;
  using Block::warp_sees;

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over the keys
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void walk() {
    const RowSource<Element> k = key_source(p_.k, p_.head_dim, a_.vector_k);
    const RowSource<Element> v = key_source(p_.v, p_.head_dim_v, a_.vector_v);
    fetch_q();
    load_terms();
    clear<kMt, kDt>(out_);
#pragma unroll
    for (int i = 0; i < kMt; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max_[i][r] = -1e30f;  // finite, so that -inf minus it is -inf
        sum_[i][r] = 0.f;
      }
    }
    // The first turn only fetches: there is no chunk chunk_end_. Without a block mask one register counts all three.
    int chunk = chunk_end_, next = next_chunk(chunk_end_ - 1), slot = chunk;
#pragma unroll 1
    while (true) {
      if constexpr (!C::has(kBlockMask)) slot = chunk = next + 1;
      if constexpr (C::kParts == 1) {
        turn(k, v, chunk, next, slot & 1);
      } else {
        turn_of_parts(k, v, chunk, next);
      }
      if (next < chunk_begin_) break;
      chunk = next;
      next = next_chunk(chunk - 1);
      --slot;
    }
    if (!exists(chunk)) {  // nothing is visible: Q may still be on its way to where out goes
      cp_async_wait<0>();
      __syncthreads();
    }
  }

  __device__ __forceinline__ bool exists(int chunk) const { return chunk < chunk_end_; }

  // Chunk `chunk` is read, the next one fetched.
  __device__ __forceinline__ void turn(const RowSource<Element> &k, const RowSource<Element> &v, int chunk, int next,
                                       int slot) {
    const int key0 = chunk * C::kChunk;
    cp_async_wait<kBiasGroups>();
    __syncthreads();  // the chunk is here, and nobody reads the other slot any more
    const bool careful = exists(chunk) && needs_care(key0, slot);
    if (next >= chunk_begin_) {
      const int thread = opaque(threadIdx.x);
      load_tile<C::kChunk, C::kD, C::kThreads>(shared_k(slot ^ 1), k, next * C::kChunk, thread);
      load_tile<C::kChunk, C::kDv, C::kThreads>(shared_v(slot ^ 1), v, next * C::kChunk, thread);
    }
    cp_async_commit();
    if (!exists(chunk) || !warp_sees(key0)) return fetch_bias(next);
    // Two copies of the step: the usual one has no mask code at all.
    if (may_mask(warp_interior_, key0)) {
      step<true>(key0, slot, next, careful);
    } else {
      step<false>(key0, slot, next, false);
    }
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(int key0, int slot, int next, bool careful) {
    Scores s;
    mma_nt<Element, C::kD, kMt, kNt>(s, shared_q_, warp_group_ * C::kWarpRows, shared_k(slot), 0);
    finish_scores<kMasked>(s, key0, next);
    const auto weights_of = [&](auto exact) {
      return [&](int k, uint32_t(&w)[kMt][4]) {
#pragma unroll
        for (int i = 0; i < kMt; ++i) exponentials<decltype(exact)::value>(s, key0, i, 2 * k, w[i]);
      };
    };
    if (kMasked && careful) {
      multiply_exactly(shared_v(slot), weights_of(std::true_type{}));
    } else {
      mma_rs_with<Element, C::kDv * 2, kPSteps, 1, kMt, kDt>(out_, shared_v(slot), 0, weights_of(std::false_type{}));
    }
  }

  // The same with one slot, for warps that share rows.
  __device__ __forceinline__ void turn_of_parts(const RowSource<Element> &k, const RowSource<Element> &v, int chunk, int next) {
    const int key0 = chunk * C::kChunk;
    const bool mine = exists(chunk) && warp_sees(key0);
    cp_async_wait<kBiasGroups>();
    __syncthreads();  // K is here, and nobody reads V of the chunk before any more
    if (exists(chunk)) load_tile<C::kChunk, C::kDv, C::kThreads>(shared_v(0), v, key0, opaque(threadIdx.x));
    cp_async_commit();
    Scores s;
    if (mine) {
      mma_nt<Element, C::kD, kMt, kNt>(s, shared_q_, warp_group_ * C::kWarpRows, shared_k(0), part_ * C::kKeys);
    }
    cp_async_wait<0>();
    __syncthreads();  // V is here, and nobody reads K any more
    const bool careful = exists(chunk) && needs_care(key0, 0);
    if (next >= chunk_begin_) load_tile<C::kChunk, C::kD, C::kThreads>(shared_k(0), k, next * C::kChunk, opaque(threadIdx.x));
    cp_async_commit();
    if (!mine) return fetch_bias(next);
    if (may_mask(warp_interior_, key0)) {
      step_of_part<true>(s, key0, next, careful);
    } else {
      step_of_part<false>(s, key0, next, false);
    }
    sync_parts();
#pragma unroll 1
    for (int n = 1; n < C::kParts; ++n) {
      const int part = (part_ + n) % C::kParts;
      const uint32_t at = shared_p() + swizzled<C::kPPitch>(lane_ & 15, lane_ >> 4);
      multiply_keys<true>(part, careful, [&](int k, uint32_t(&w)[kMt][4]) {
#pragma unroll
        for (int i = 0; i < kMt; ++i) {
          ldmatrix_x4(w[i], advance<C::kPPitch>(at, part * kPSteps + k) + i * 16 * C::kPPitch);
        }
      });
    }
  }

  // S of this warp's keys to P, for the other warps too, and P V over these keys.
  template <bool kMasked>
  __device__ __forceinline__ void step_of_part(Scores &s, int key0, int next, bool careful) {
    const int my_key0 = key0 + part_ * C::kKeys;
    finish_scores<kMasked>(s, my_key0, next);
    const auto weights_of = [&](auto exact) {
      return [&](int k, uint32_t(&w)[kMt][4]) {
#pragma unroll
        for (int i = 0; i < kMt; ++i) {
          exponentials<decltype(exact)::value>(s, my_key0, i, 2 * k, w[i]);
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const int row = i * 16 + (lane_ >> 2) + r % 2 * 8, chunk = part_ * kNt + 2 * k + r / 2;
            st_shared_4(shared_p() + swizzled<C::kPPitch>(row, chunk) + (lane_ & 3) * 4, w[i][r]);
          }
        }
      };
    };
    if (kMasked && careful) {
      multiply_keys<true>(part_, true, weights_of(std::true_type{}));
    } else {
      multiply_keys<false>(part_, false, weights_of(std::false_type{}));
    }
  }

  // out += P V over the keys of one part, those that are not masked.
  template <bool kMasked, typename WeightsOf>
  __device__ __forceinline__ void multiply_keys(int part, bool careful, WeightsOf weights_of) {
    const uint32_t v = shared_v(0) + part * C::kKeys * C::kDv * 2;
    if (kMasked && careful) {
      multiply_exactly(v, weights_of);
    } else {
      mma_rs_with<Element, C::kDv * 2, kPSteps, C::kParts, kMt, kDt>(out_, v, kFirstStep * part_, weights_of);
    }
  }

  // From raw products to what exponentials() takes, with m raised where that is needed.
  template <bool kMasked>
  __device__ __forceinline__ void finish_scores(Scores &s, int key0, int next) {
    apply_terms<kMasked>(s, key0, next);
    raise_max(s, exponent_scale());
  }

  // out += P V over the pairs that are not masked.
  template <typename WeightsOf>
  __device__ __forceinline__ void multiply_exactly(uint32_t v, WeightsOf weights_of) {
    PFragment<kMt, kPSteps> p;
#pragma unroll
    for (int k = 0; k < kPSteps; ++k) {
      uint32_t w[kMt][4];
      weights_of(k, w);
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) p[i][k][r] = w[i][r];
    }
    mma_rs_nan_safe<Element, C::kDv * 2, kMt, kPSteps, kDt, C::kParts>(out_, p, v, kFirstStep * part_);
  }

  // Where some pair may be masked, NaN and Inf in V need care (multiply.cuh).
  __device__ __forceinline__ bool needs_care(int key0, int slot) const {
    return may_mask(block_interior_, key0) &&
           __syncthreads_or(tile_has_nonfinite<Element, C::kVBytes, C::kThreads>(shared_v(slot)));
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax
  // ------------------------------------------------------------------------------------------------------------------

  // The factor that turns scores into exponents of two.
  __device__ __forceinline__ float exponent_scale() const { return p_.softmax_scale * kLog2e; }

  // P = 2^(S - m) of tiles (i, j) and (i, j + 1), rounded to the operand of the next product; adds to the row sums. What is masked
  // becomes kMaskedWeight.
  template <bool kMasked>
  __device__ __forceinline__ void exponentials(const Scores &s, int key0, int i, int j, uint32_t (&w)[4]) {
    const float c = exponent_scale();
    float e[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float x = s[i][j + half][r];
        e[half][r] = exp2_approx(fmaf(x, c, -max_[i][r >> 1]));
        sum_[i][r >> 1] += e[half][r];
        if (kMasked && x == -CUDART_INF_F) e[half][r] = kMaskedP;
      }
#pragma unroll
    for (int r = 0; r < 4; ++r) w[r] = pack2<Element>(e[r / 2][r % 2 * 2], e[r / 2][r % 2 * 2 + 1]);
    drop(w, i, key0 + 8 * j);
  }

  // The warps that share rows meet. Not at a numbered barrier: racecheck loses track of __syncthreads where some warps pass those and
  // others do not. Chips before sm_90 have them all the same, as waiting for a barrier in memory takes registers there.
  __device__ __forceinline__ void sync_parts() {
    if constexpr (!kHasMbarrierWait) return named_barrier(1 + warp_group_, C::kParts * 32);
    mbarrier_arrive(shared_barrier());
    mbarrier_wait(shared_barrier(), parity_);
    parity_ ^= 1;
  }
  __device__ __forceinline__ bool any_part(bool value) {
    if constexpr (C::kParts == 1) return __any_sync(~0u, value);
    if constexpr (!kHasMbarrierWait) return named_barrier_or(1 + warp_group_, C::kParts * 32, value);
    bool any = __any_sync(~0u, value);
    if (lane_ == 0) st_shared_4(shared_vote(part_), any);
    sync_parts();
#pragma unroll
    for (int n = 1; n < C::kParts; ++n) any |= ld_shared_4(shared_vote((part_ + n) % C::kParts)) != 0;
    return any;
  }

  __device__ __forceinline__ void raise_max(const Scores &s, float c) {
    float top[kMt][2];
    bool grow = false;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = fmaxf(s[i][0][2 * r], s[i][0][2 * r + 1]);
#pragma unroll
        for (int j = 1; j < kNt; ++j) x = fmaxf(x, fmaxf(s[i][j][2 * r], s[i][j][2 * r + 1]));
        top[i][r] = C::has(kDropout) ? fmaf(x, c, -a_.p_exponent) : x * c;
        grow |= top[i][r] - (C::has(kDropout) ? a_.rescale_threshold : kRescaleThreshold) > max_[i][r];
      }
    if (!any_part(grow)) return;  // from here on all warps that share the rows are done with P of the chunk before
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], 1));
        top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], 2));
      }
    over_parts(top, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float raised = fmaxf(max_[i][r], top[i][r]);
        const float factor = exp2_approx(max_[i][r] - raised);
        max_[i][r] = raised;
        sum_[i][r] *= factor;
#pragma unroll
        for (int j = 0; j < kDt; ++j) {
          out_[i][j][2 * r] *= factor;
          out_[i][j][2 * r + 1] *= factor;
        }
      }
  }

  // Combines one number a row, already combined over the lanes of this warp, over the parts of the keys.
  template <typename Combine>
  __device__ __forceinline__ void over_parts(float (&x)[kMt][2], Combine combine) {
    if constexpr (C::kParts > 1) {
      const auto row = [&](int i, int r) { return i * 16 + (lane_ >> 2) + r * 8; };
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if ((lane_ & 3) == 0) st_shared_float(shared_row(part_, row(i, r)), x[i][r]);
        }
      sync_parts();
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          x[i][r] = ld_shared_float(shared_row(0, row(i, r)));
#pragma unroll
          for (int part = 1; part < C::kParts; ++part) x[i][r] = combine(x[i][r], ld_shared_float(shared_row(part, row(i, r))));
        }
    }
  }

  // A bias of -inf makes a weight exactly 0 by itself, unless NaN or Inf is where it masks. That shows in what the walk has made:
  // rather than every chunk asking before, the walk is done again with care after.
  __device__ __forceinline__ bool needs_careful_bias() {
    if (p_.bias.data == nullptr || careful_bias_) return false;
    careful_bias_ = __syncthreads_or(holds_nonfinite());
    return careful_bias_;
  }
  __device__ __forceinline__ bool holds_nonfinite() const {
    float nan = 0.f;  // or NaN
#pragma unroll
    for (int i = 0; i < kMt; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) nan = fmaf(sum_[i][r], 0.f, nan);
#pragma unroll
      for (int j = 0; j < kDt; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) nan = fmaf(out_[i][j][r], 0.f, nan);
    }
    return nan != 0.f;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Results
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum_[i][r] += __shfl_xor_sync(~0u, sum_[i][r], 1);
        sum_[i][r] += __shfl_xor_sync(~0u, sum_[i][r], 2);
      }
    over_parts(sum_, [](float a, float b) { return a + b; });
    if (p_.sink != nullptr && split_index() == 0) add_sink();
    // Q's place becomes out's: at once, where a warp's rows of out lie on its own rows of Q.
    if constexpr (C::kParts > 1 || C::kD != C::kDv) __syncthreads();
    float inverse[kMt][2];
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // sum is NaN when a visible score is; then out is NaN too.
        const float sum = sum_[i][r];
        inverse[i][r] = sum == 0.f ? 0.f : p_.dropout.keep_scale / sum;
        max_[i][r] = sum == 0.f ? -CUDART_INF_F : (max_[i][r] + log2f(sum)) * kLn2;  // now lse
      }
    if (a_.num_splits.value > 1) {
      store_split(inverse);
      return;
    }
    if (p_.lse.data != nullptr && part_ == 0 && (lane_ & 3) == 0) {
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = row_of(i, 2 * r);
          if (row < rows_) *lse_at(token_of(row), head_of(row)) = max_[i][r];
        }
    }
    __syncwarp();  // Q is read
    stage_rows(inverse);
    __syncwarp();
    store_staged_rows();
  }

  // One more logit in the denominator.
  __device__ __forceinline__ void add_sink() {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sink = p_.sink[head_of(min(row_of(i, 2 * r), rows_ - 1)) * p_.sink_stride] * kLog2e;
        // A sink far above every logit would overflow against this m; then out is negligible and only the lse matters.
        const float raised = fmaxf(max_[i][r], sink), factor = exp2_approx(max_[i][r] - raised);
        sum_[i][r] = sum_[i][r] * factor + exp2_approx(sink - raised);
        max_[i][r] = raised;
#pragma unroll
        for (int j = 0; j < kDt; ++j) {
          out_[i][j][2 * r] *= factor;
          out_[i][j][2 * r + 1] *= factor;
        }
      }
  }

  __device__ __forceinline__ float *lse_at(int token, int head) const {
    return p_.lse.data + b_ * p_.lse.batch_stride + head * p_.lse.head_stride + (queries().start + token) * p_.lse.seq_stride;
  }
  __device__ __forceinline__ Element *out_at(int token, int head) const {
    return static_cast<Element *>(p_.out.data) + b_ * p_.out.batch_stride + (queries().start + token) * p_.out.seq_stride +
           head * p_.out.head_stride;
  }

  // The 16 bytes of a row of out that tile j of this warp is.
  __device__ __forceinline__ int out_chunk(int j) const {
    return 2 * (kFirstStep * part_ + column_step<C::kParts>(j / 2)) + j % 2;
  }

  // The result of one split, in fp32.
  __device__ __forceinline__ void store_split(const float (&inverse)[kMt][2]) const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_of(i, 2 * r);
        if (row >= rows_) continue;
        const int64_t at =
            ((int64_t{split_index()} * p_.batch + b_) * p_.heads_q + head_of(row)) * p_.q_lengths.max_len + token_of(row);
        if (part_ == 0 && (lane_ & 3) == 0) a_.split_lse[at] = max_[i][r];
        float *partial = a_.split_out + at * p_.head_dim_v;
#pragma unroll
        for (int j = 0; j < kDt; ++j) {
          const int column = 8 * out_chunk(j) + 2 * (lane_ & 3);
          if (column < p_.head_dim_v) partial[column] = out_[i][j][2 * r] * inverse[i][r];
          if (column + 1 < p_.head_dim_v) partial[column + 1] = out_[i][j][2 * r + 1] * inverse[i][r];
        }
      }
  }

  __device__ __forceinline__ void stage_rows(const float (&inverse)[kMt][2]) const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int local = warp_group_ * C::kWarpRows + i * 16 + (lane_ >> 2) + r * 8;
#pragma unroll
        for (int j = 0; j < kDt; ++j) {
          st_shared_4(shared_q_ + swizzled<C::kOutPitch>(local, out_chunk(j)) + (lane_ & 3) * 4,
                      pack2<Element>(out_[i][j][2 * r] * inverse[i][r], out_[i][j][2 * r + 1] * inverse[i][r]));
        }
      }
  }

  // Every warp writes its own rows and columns, 16 bytes a lane where memory allows it.
  __device__ __forceinline__ void store_staged_rows() const {
    const int columns = static_cast<int>(p_.head_dim_v);
    const auto staged = [&](int r, int c) {
      return ld_shared_16(shared_q_ + swizzled<C::kOutPitch>(warp_group_ * C::kWarpRows + r, c));
    };
    if constexpr (32 % kDt == 0) {
      if (a_.vector_out && !packed() && warp_row_ + C::kWarpRows <= rows_) {
        const int r = lane_ / kDt, c = out_chunk(lane_ % kDt);
        if (c * 8 >= columns) return;
        Element *dst = out_at(warp_row_ + r, head_q_) + c * 8;
#pragma unroll
        for (int i = 0; i < C::kWarpRows; i += 32 / kDt) {
          *reinterpret_cast<uint4 *>(dst + i * p_.out.seq_stride) = staged(r + i, c);
        }
        return;
      }
    }
#pragma unroll 2
    for (int index = lane_; index < C::kWarpRows * kDt; index += 32) {
      const int r = index / kDt, c = out_chunk(index % kDt), row = warp_row_ + r;
      if (row >= rows_ || c * 8 >= columns) continue;
      const uint4 x = staged(r, c);
      Element *dst = out_at(token_of(row), head_of(row)) + c * 8;
      if (a_.vector_out) {
        *reinterpret_cast<uint4 *>(dst) = x;
      } else {
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (c * 8 + e < columns) {
            reinterpret_cast<unsigned short *>(dst)[e] = static_cast<unsigned short>(words[e / 2] >> (16 * (e & 1)));
          }
        }
      }
    }
  }

  // Rows of this block that are not used: out = 0, lse = -inf. The last block also owns what the slot holds beyond the grid.
  __device__ __forceinline__ void store_unused_rows() const {
    if (split_index() != 0) return;
    const int slot_rows = static_cast<int>(queries().slot) * static_cast<int>(a_.rows_per_token.value);
    const int end = row0() + C::kRows >= a_.order.row_blocks * C::kRows ? slot_rows : min(row0() + C::kRows, slot_rows);
    for (int row = max(row0(), rows_) + warp_; row < end; row += C::kWarps) {
      const int token = token_of(row), head = head_of(row);
      if (p_.lse.data != nullptr && lane_ == 0) *lse_at(token, head) = -CUDART_INF_F;
      Element *dst = out_at(token, head);
      for (int column = lane_; column < p_.head_dim_v; column += 32) reinterpret_cast<unsigned short *>(dst)[column] = 0;
    }
  }

  Accumulator<kMt, kDt> out_;
  float max_[kMt][2];    // m: the row maximum, with dropout less p_exponent
  float sum_[kMt][2];    // of 2^(S - m)
  uint32_t parity_ = 0;  // of the phase of shared_barrier()
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) forward(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(1024) char shared[];
  Forward<C>(params, shared).run();
}

}  // namespace fa::cuda::sm80
