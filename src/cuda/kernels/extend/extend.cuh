// SPDX-License-Identifier: Apache-2.0
// Exact attention forward of queries that extend a cache: so many rows (queries times the heads of a group) that products count, over so
// many keys, paged or not, that these are shared out among blocks of threads.
//
// A block of threads owns kRows rows of a head of keys and walks over tiles of kKeys keys. Four warps fetch, kGroups warpgroups multiply,
// each with 64 rows: Q, S, P and out all are in registers, and K and V the only operands in shared memory.
//
//   for every tile:     S = Q K^T starts, out += P V of the tile before starts
//                       S is done: mask it if the keys touch an edge; P = exp2(S - m) while out += P V runs
//   after the last:     out to the caller's memory if the item ends here, with the parts that others have left; else it is such a part
//   those that fetch:   a tile each time its place is free, across the ends of pieces; one of them plans the pieces
//
// Keys and values of one byte are widened to fp16 on their way into shared memory, exactly; queries and out change with them. What makes up
// for it, and the factor of the head's keys, are in the scale of exponents (with softcap or ALiBi, S is multiplied by them); out is
// multiplied by the factor of its values.
//
// A row's maximum is its own. It is exact for tiles at an edge of what rows see and for a piece's first one that all see; after that it stays
// as it is until a row's weights say that it is too low, which saves the comparisons (not with softcap and ALiBi). A row's bits depend
// on its keys, on where they are cut and on where the edges of its block of rows are. Within a group no warp waits for the others but in the
// products; of two groups one starts its products when the other has, so that exponentials of one run beside products of the other.
#pragma once

#include <math_constants.h>

#include "cuda/common/mma.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/decode/softcap.cuh"
#include "cuda/kernels/extend/epilogue.cuh"
#include "cuda/kernels/extend/producer.cuh"

namespace fa::cuda::extend {

template <class C>
class Consumer : private Results<C> {
 public:
  using Base = Results<C>;
  using typename Base::Element;
  using KeyElement = typename C::KeyElement;
  static constexpr int kQSteps = C::kD / 16, kScores = C::kKeys / 2;  // of a thread

  using Base::Base;

  __device__ __forceinline__ void run(int group) {
    group_ = group;
    warp_ = static_cast<int>(uniform(threadIdx.x >> 5)) & 3;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
      mbarrier_wait(this->planned(n & 1), n >> 1 & 1);
      plan_ = &this->plan(n & 1);
      if (plan_->batch < 0) return;
      work();
      mbarrier_arrive(this->done(n & 1));
    }
  }

 private:
  using Base::a_;
  using Base::first_row;
  using Base::group_;
  using Base::head_of;
  using Base::lane_;
  using Base::max_;
  using Base::only_factor;
  using Base::out_;
  using Base::p_;
  using Base::plan_;
  using Base::row_of;
  using Base::sum_;
  using Base::token_of;
  using Base::warp_;

  __device__ __forceinline__ void work() {
    this->store_unused_rows();
    if (group_ * kGroupRows >= plan_->rows) {
      for (int n = plan_->tile; n < plan_->end_tile; ++n) pass();
      return;
    }
    load_q();
    max_[0] = max_[1] = -1e30f;  // finite, so that -inf minus it is -inf
    sum_[0] = sum_[1] = 0.f;
    clear_out();
#pragma unroll
    for (int n = 0; n < C::kRuns; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) weights_[n][r] = 0;
    fresh_ = true;
    pending_ = settled_ = false;
    bool masked = false;
    int stop = plan_->tile;  // from here on tiles may be masked where others were not, or the other way round
#pragma unroll 1
    for (int n = stop;; ++n) {
      if (pending_ && masked && plan_->several) multiply_exactly_if_needed();
      if (n >= stop) {
        const int end = plan_->end_tile, inner = (plan_->interior.begin + C::kKeys - 1) / C::kKeys,
                  end_inner = plan_->interior.end / C::kKeys;
        if (n >= end) break;  // none of the piece's tiles may be one that these rows see
        masked = n < inner || n >= end_inner;
        stop = min(n < inner ? inner : masked ? end : end_inner, end);
      }
      const int key0 = n * C::kKeys;
      if (pending_ || fresh_) {
        attend<true>(key0, masked);
      } else {
        attend<false>(key0, masked);
      }
    }
    if (pending_) multiply_values();
    if (first_row() < plan_->rows) this->finish();
  }

  // Tiles come in turn, K and V: the next K, the next V, and the V of the K before. Their places are those of a ring that is passed twice:
  // once with each parity.
  __device__ __forceinline__ int next_k() const { return place_; }
  __device__ __forceinline__ int next_v() const { return place_ == 2 * C::kSlots - 1 ? 0 : place_ + 1; }
  __device__ __forceinline__ int last_v() const { return place_ == 0 ? 2 * C::kSlots - 1 : place_ - 1; }
  __device__ __forceinline__ void step() {
    place_ += 2;
    if (place_ >= 2 * C::kSlots) place_ -= 2 * C::kSlots;
  }
  static __device__ __forceinline__ int slot_of(int place) { return place >= C::kSlots ? place - C::kSlots : place; }
  __device__ __forceinline__ uint32_t await(int place) const {
    mbarrier_wait(this->full(slot_of(place)), place >= C::kSlots);
    return this->tile(slot_of(place));
  }
  __device__ __forceinline__ void release(int place) const { mbarrier_arrive_if(lane_ == 0, this->free(slot_of(place))); }
  // Tiles that only the other groups need. They have to be there before they can be let go.
  __device__ __forceinline__ void pass() {
    await(next_k());
    release(next_k());
    await(next_v());
    release(next_v());
    step();
  }

  // Weights of a tile, under the product of those before: in front of the first tile it runs on whatever is there, and nobody looks at it, so
  // that one code serves all tiles. Without kProduct those before have met their values.
  template <bool kProduct>
  __device__ __forceinline__ void attend(int key0, bool masked) {
    const uint32_t k = await(next_k());
    const bool in_turn = kTurns && plan_->rows > kGroupRows;
    if (in_turn) mbarrier_wait(this->turn(group_), (counts_ & 1) ^ (group_ == 0));
    fence_operand(s_);
    fence_operand(q_);
    if (kProduct) {
      fence_operand(out_);
      fence_operand(weights_);
    }
    wgmma_fence();
    start_scores(k);
    if (kProduct) {
      const uint32_t v = pending_ ? await(last_v()) : k;
      wgmma_fence();
      start_values(v);
    }
    if (in_turn) {
      mbarrier_arrive_if(lane_ == 0, this->turn(group_ ^ 1));
      counts_ ^= 1;
    }
    wgmma_wait<kProduct ? 1 : 0>();
    fence_operand(s_);
    release(next_k());
    apply_terms(key0);
    bool grown;
    float its[2];
    if (kProduct && settled_ && !masked) {
      exponentials<false>(its);
      grown = raise_if_low(key0, its);
    } else if (masked) {
      mask(key0);
      grown = raise();
      exponentials<true>(its);
    } else {
      grown = raise();
      exponentials<false>(its);
    }
    if (kProduct) {
      compute_before_wait(its[0] + its[1]);
      wgmma_wait<0>();
      fence_operand(out_);
      fence_operand(weights_);
      if (pending_) {
        release(last_v());
        fresh_ = false;
      }
    }
    sum_[0] += its[0];
    sum_[1] += its[1];
    if (grown) scale_out();
    round_weights();
    step();
    pending_ = true;
    if (!masked) settled_ = plain_scores();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Products
  // ------------------------------------------------------------------------------------------------------------------

  // Rows of q as left operand; rows and columns that do not exist are zero.
  __device__ __forceinline__ void load_q() {
    const Element *q =
        static_cast<const Element *>(p_.q.data) + plan_->batch * p_.q.batch_stride + plan_->q_start * p_.q.seq_stride;
    const int quad = lane_ & 3;
    uint4 x[2][C::kD / 32];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(r);
      const bool exists = row < plan_->rows;
      const Element *from = exists ? q + token_of(row) * p_.q.seq_stride + head_of(row) * p_.q.head_stride + quad * 8 : q;
      const int columns = exists ? static_cast<int>(p_.head_dim) - quad * 8 : 0;
#pragma unroll
      for (int n = 0; n < C::kD / 32; ++n)
        x[r][n] = n * 32 < columns ? __ldcg(reinterpret_cast<const uint4 *>(from + n * 32)) : uint4{0, 0, 0, 0};
      if constexpr (C::k8BitKv) {
        float scale = only_factor(a_.k_descale);
        if (p_.q.dtype == Dtype::bf16) scale *= raise_row(x[r]);
        if (quad == 0) st_shared_float(this->row_scale(row), scale);
      }
    }
    if (C::k8BitKv) __syncwarp();  // scales are there
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int n = 0; n < C::kD / 32; ++n) {
        // Of each 32 columns a lane has eight, and wants two of each eight.
        uint32_t words[4] = {x[r][n].x, x[r][n].y, x[r][n].z, x[r][n].w};
        transpose_quad(words, quad);
#pragma unroll
        for (int w = 0; w < 4; ++w) q_[2 * n + w / 2][2 * (w % 2) + r] = words[w];
      }
  }

  // A quad's row of bf16 as fp16. Returns what makes up for it.
  __device__ __forceinline__ float raise_row(uint4 (&x)[C::kD / 32]) const {
    uint32_t top = 0;
#pragma unroll
    for (int n = 0; n < C::kD / 32; ++n) {
      for (const uint32_t pair : {x[n].x, x[n].y, x[n].z, x[n].w}) top = decode::top_exponent(top, pair);
    }
    top = max(top, __shfl_xor_sync(~0u, top, 1));
    top = max(top, __shfl_xor_sync(~0u, top, 2));
    const decode::Raising raising(top);
#pragma unroll
    for (int n = 0; n < C::kD / 32; ++n)
      x[n] = {raising.of(x[n].x), raising.of(x[n].y), raising.of(x[n].z), raising.of(x[n].w)};
    return raising.undone;
  }
  // S = Q K^T.
  __device__ __forceinline__ void start_scores(uint32_t tile) {
    const uint64_t k = descriptor_k_major(tile);
#pragma unroll
    for (int n = 0; n < kQSteps; ++n)
      wgmma_rs_k<Element>(s_, q_[n], advance_descriptor(k, n / 4 * C::kSlabBytes + n % 4 * 32), n > 0);
    wgmma_commit();
  }

  // out += P V; the first one overwrites.
  __device__ __forceinline__ void start_values(uint32_t tile) {
    const uint64_t v = descriptor_mn_major<C::kKeys>(tile);
#pragma unroll
    for (int n = 0; n < C::kRuns; ++n)
      Wgmma<Element, C::kD>::rs_mn(out_, weights_[n], advance_descriptor(v, n * C::kRun * 128), n > 0 || !fresh_);
    wgmma_commit();
  }
  __device__ __forceinline__ void multiply_values() {
    const uint32_t v = await(last_v());
    fence_operand(out_);
    fence_operand(weights_);
    wgmma_fence();
    start_values(v);
    wgmma_wait<0>();
    fence_operand(out_);
    release(last_v());
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Scores, in the unit of q k^T, and softmax
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool plain_scores() const { return p_.softcap <= 0 && p_.alibi_slopes == nullptr; }
  // What S is multiplied by in exponents: of bytes and plain scores also by what makes up for the row's own factors. Those are read each time:
  // registers are short.
  __device__ __forceinline__ float exponent_scale(int r) const {
    const float scale = p_.softmax_scale * kLog2e;
    return C::k8BitKv && plain_scores() ? scale * ld_shared_float(this->row_scale(row_of(r))) : scale;
  }
  __device__ __forceinline__ void apply_terms(int key0) {
    if (C::k8BitKv && !plain_scores()) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = ld_shared_float(this->row_scale(row_of(r)));
#pragma unroll
        for (int n = 2 * r; n < kScores; n += 4) {
          s_[n] *= scale;
          s_[n + 1] *= scale;
        }
      }
    }
    if (p_.softcap > 0) {
#pragma unroll
      for (int n = 0; n < kScores; ++n) s_[n] = decode::capped(s_[n], a_.raw);
    }
    if (p_.alibi_slopes != nullptr) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = min(row_of(r), plan_->rows - 1);  // what lies beyond the last row is not stored
        const float slope =
            a_.raw.logit * p_.alibi_slopes[plan_->batch * p_.alibi_batch_stride + head_of(row) * p_.alibi_head_stride];
        const int first = token_of(row) + plan_->seqlen_k - plan_->tokens - key0 - 2 * (opaque(lane_) & 3);
#pragma unroll
        for (int j = 0; j < C::kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float &x = s_[4 * j + 2 * r + e];
            x = fmaf(-slope, fabsf(static_cast<float>(first - 8 * j - e)), x);
          }
      }
    }
  }

  __device__ __forceinline__ void mask(int key0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int token = token_of(row_of(r)), first = key0 + 2 * (opaque(lane_) & 3);
      const Keys keys = Diagonal<int32_t>(a_.limits, plan_->tokens, plan_->seqlen_k).visible_keys({token, token + 1});
      const int begin = keys.begin - first, end = keys.end - first;
#pragma unroll
      for (int j = 0; j < C::kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e < begin || 8 * j + e >= end) s_[4 * j + 2 * r + e] = -CUDART_INF_F;
    }
  }

  // m at least the largest score of this tile. True if it has grown for a row of the warp: then out has still to be multiplied by factor_.
  __device__ __forceinline__ bool raise() {
    float top[2] = {top_score(0) * exponent_scale(0), top_score(1) * exponent_scale(1)};
    const bool grown = __any_sync(~0u, top[0] > max_[0] || top[1] > max_[1]);
    if (grown) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
        raise_to(r, top[r]);
      }
    }
    return grown;
  }
  // Of this lane's share of a row.
  __device__ __forceinline__ float top_score(int r) const {
    float x[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      x[h] = fmaxf(s_[4 * h + 2 * r], s_[4 * h + 2 * r + 1]);
#pragma unroll
      for (int j = 2 + h; j < C::kKeys / 8; j += 2) x[h] = fmaxf(x[h], fmaxf(s_[4 * j + 2 * r], s_[4 * j + 2 * r + 1]));
    }
    return fmaxf(x[0], x[1]);
  }
  __device__ __forceinline__ void raise_to(int r, float top) {
    const float raised = fmaxf(max_[r], top);
    factor_[r] = exp2_approx(max_[r] - raised);  // 1 for rows that do not grow: their bits stay
    max_[r] = raised;
    sum_[r] *= factor_[r];
  }
  // S to P = 2^(S - m), in place, and a lane's sums. What is masked becomes kMaskedWeight.
  template <bool kMasked>
  __device__ __forceinline__ void exponentials(float (&its)[2]) {
    const float scale[2] = {exponent_scale(0), exponent_scale(1)};
    float sum[2][2] = {};
#pragma unroll
    for (int n = 0; n < kScores; ++n) {
      const float x = s_[n], e = exp2_approx(fmaf(x, scale[n / 2 % 2], -max_[n / 2 % 2]));
      sum[n / 4 % 2][n / 2 % 2] += e;
      s_[n] = kMasked && x == -CUDART_INF_F ? kMaskedP : e;
    }
    its[0] = sum[0][0] + sum[1][0];
    its[1] = sum[0][1] + sum[1][1];
  }
  // Where m is that of tiles before it is good enough as a rule. Rows whose weights it makes too large raise it now, by a power of two, which
  // costs no accuracy; what is beyond fp32 is worked out again. By a row's own weights alone, so bits stay a row's own.
  __device__ __forceinline__ bool raise_if_low(int key0, float (&its)[2]) {
    constexpr float kMost = 64.f;  // of a lane's 32 weights, which then are numbers of either 16-bit type
    if (!__any_sync(~0u, !(its[0] <= kMost) || !(its[1] <= kMost))) return false;
    bool lost[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      lost[r] = !(its[r] < CUDART_INF_F) && sum_[r] == sum_[r];  // NaN stays NaN
      lost[r] |= __shfl_xor_sync(~0u, lost[r], 1) != 0;
      lost[r] |= __shfl_xor_sync(~0u, lost[r], 2) != 0;
    }
    if (__any_sync(~0u, lost[0] || lost[1])) scores_again(key0, lost);
    const float scale[2] = {exponent_scale(0), exponent_scale(1)};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = lost[r] ? top_score(r) : its[r];
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      if (lost[r]) {
        raise_to(r, most * scale[r]);
        its[r] = 0.f;
#pragma unroll
        for (int n = 2 * r; n < kScores; n += 4)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            s_[n + e] = exp2_approx(fmaf(s_[n + e], scale[r], -max_[r]));
            its[r] += s_[n + e];
          }
      } else {
        const int exponent = most > kMost ? min((__float_as_int(most) >> 23) - 127, 126) : 0;
        factor_[r] = __int_as_float((127 - exponent) << 23);
        max_[r] += static_cast<float>(exponent);
        sum_[r] *= factor_[r];
        its[r] *= factor_[r];
#pragma unroll
        for (int n = 2 * r; n < kScores; n += 4) {
          s_[n] *= factor_[r];
          s_[n + 1] *= factor_[r];
        }
      }
    }
    return true;
  }
  // S of those rows, by products of this warp alone and from the keys in memory: their place in the ring has been given back.
  __device__ __forceinline__ void scores_again(int key0, const bool (&lost)[2]) {
    wgmma_wait<0>();
    fence_operand(out_);
    fence_operand(weights_);
    const int lane = opaque(lane_), columns = static_cast<int>(p_.head_dim) - 2 * (lane & 3);
    const auto *keys = static_cast<const KeyElement *>(p_.k.data) + plan_->head * p_.k.head_stride + 2 * (lane & 3);
    const int64_t start = sequence_of(p_.k_lengths, plan_->batch).start;
#pragma unroll 1
    for (int j = 0; j < C::kKeys / 8; ++j) {
      const int n = key0 + 8 * j + (lane >> 2);
      const Place place = this->place_of(this->page_of(plan_->batch, n), plan_->batch, start, n);
      const KeyElement *key = keys + place.batch * p_.k.batch_stride + place.row * p_.k.seq_stride;
      float again[4] = {};
#pragma unroll 1
      for (int step = 0; step < kQSteps; ++step) {
        const KeyElement *from = key + 16 * step;
        const uint32_t x[2] = {16 * step < columns ? two_of(from) : 0, 16 * step + 8 < columns ? two_of(from + 8) : 0};
#pragma unroll
        for (int n = 0; n < kQSteps; ++n)
          if (n == step) mma_16816<Element>(again, q_[n], x[0], x[1]);
      }
#pragma unroll
      for (int n = 0; n < kScores; ++n)
        if (n / 4 == j && lost[n / 2 % 2]) s_[n] = again[n % 4];
    }
  }
  // As operand of products. Not from the first cache, which may hold what the launch before this one has written over.
  static __device__ __forceinline__ uint32_t two_of(const KeyElement *from) {
    if constexpr (C::k8BitKv) {
      return decode::widen_neighbours<C::kFormat>(__ldcg(reinterpret_cast<const unsigned short *>(from))).first;
    } else {
      return __ldcg(reinterpret_cast<const uint32_t *>(from));
    }
  }
  __device__ __forceinline__ void scale_out() {
#pragma unroll
    for (int j = 0; j < C::kD / 2; ++j) out_[j] *= factor_[j / 2 % 2];
  }
  // P, rounded to the operand of the next product.
  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int j = 0; j < C::kRuns; ++j)
#pragma unroll
      for (int n = 0; n < 4; ++n) weights_[j][n] = pack2<Element>(s_[8 * j + 2 * n], s_[8 * j + 2 * n + 1]);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // NaN and Inf in values that masked pairs would let through
  // ------------------------------------------------------------------------------------------------------------------

  // In this thread's share of a tile.
  __device__ __forceinline__ bool has_nonfinite(uint32_t tile) const {
    uint32_t found = 0;
#pragma unroll 4
    for (int at = (opaque(threadIdx.x) & 127) * 16; at < C::kTileBytes; at += 128 * 16) {
      const uint4 x = ld_shared_16(tile + at);
      found = nan_where_nonfinite<Element>(x.x, found);
      found = nan_where_nonfinite<Element>(x.y, found);
      found = nan_where_nonfinite<Element>(x.z, found);
      found = nan_where_nonfinite<Element>(x.w, found);
    }
    return (found & 0x7FFF7FFFu) != 0;
  }

  // Whether some thread of the group has found any. A warp may be in the next vote before others have read this one's result, so there
  // are two places for it.
  __device__ __forceinline__ bool group_finds(bool found) {
    const uint32_t phase = counts_ >> 1 & 1, place = this->found(group_, phase);
    counts_ += 2;
    const uint32_t votes = counts_ >> 1;
    if (__any_sync(~0u, found) && lane_ == 0) st_shared_4(place, votes);
    __syncwarp();
    mbarrier_arrive_if(lane_ == 0, this->voted(group_));
    mbarrier_wait(this->voted(group_), phase);
    return ld_shared_4(place) == votes;
  }

  // What no token sees reads as zero; what only some see may be NaN or Inf, and zero times that is not zero: then out += P V over the pairs
  // that are not masked, one key at a time.
  __device__ __forceinline__ void multiply_exactly_if_needed() {
    const uint32_t tile = await(last_v());
    if (!group_finds(has_nonfinite(tile))) return;
    if (fresh_) clear_out();
#pragma unroll 1
    for (int n = 0; n < C::kRuns; ++n) {
      multiply_run_exactly(weights_[0], tile + n * C::kRun * 128);
      // Weights move up, so that all runs are one code.
#pragma unroll
      for (int m = 0; m + 1 < C::kRuns; ++m)
#pragma unroll
        for (int r = 0; r < 4; ++r) weights_[m][r] = weights_[m + 1][r];
    }
    __syncwarp();
    release(last_v());
    fresh_ = pending_ = false;
  }
  __device__ __forceinline__ void clear_out() {
#pragma unroll
    for (int j = 0; j < C::kD / 2; ++j) out_[j] = 0.f;
  }
  __device__ __forceinline__ void multiply_run_exactly(const uint32_t (&weights)[4], uint32_t run) {
    const int lane = opaque(lane_);
#pragma unroll 1
    for (int key = 0; key < C::kRun; ++key) {
      const int source = (lane & ~3) | ((key & 7) >> 1);  // the lane of the quad that holds this key's weights
      float w[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t pair = __shfl_sync(~0u, key & 8 ? weights[2 + r] : weights[r], source);
        w[r] = to_float<Element>(key & 1 ? pair >> 16 : pair & 0xFFFFu);
      }
#pragma unroll
      for (int j = 0; j < C::kD / 8; ++j) {
        const uint32_t x = ld_shared_4(run + j / 8 * C::kSlabBytes + key * 128 + ((j % 8 ^ (key & 7)) << 4) + (lane & 3) * 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (is_masked_p(w[r])) continue;
          out_[4 * j + 2 * r] = fmaf(w[r], to_float<Element>(x & 0xFFFFu), out_[4 * j + 2 * r]);
          out_[4 * j + 2 * r + 1] = fmaf(w[r], to_float<Element>(x >> 16), out_[4 * j + 2 * r + 1]);
        }
      }
    }
  }

  int place_ = 0;        // of the next K
  uint32_t counts_ = 0;  // of votes, times two, and of turns, in its lowest bit: one register
  // Two groups that multiply take turns: the exponentials of one run beside the products of the other.
  static constexpr bool kTurns = C::kGroups == 2;
  bool pending_, fresh_;  // there are weights that have not met their values; out has nothing in it yet
  bool settled_;          // all rows have seen a tile, whose maximum may do for the next ones
  uint32_t q_[kQSteps][4];
  float s_[kScores];
  uint32_t weights_[C::kRuns][4];
  float factor_[2];
};

// Who is what in a block of threads.
template <class C>
class Roles : private Block<C> {
 public:
  using Block<C>::Block;

  __device__ __forceinline__ void run() {
    pdl_launch_dependents();
    if (threadIdx.x == 0) {
      for (int n = 0; n < C::kSlots; ++n) {
        mbarrier_init(this->full(n), C::kFetchers * 32);
        mbarrier_init(this->free(n), C::kGroups * 4);
      }
      for (int n = 0; n < 2; ++n) {
        mbarrier_init(this->planned(n), 1);
        mbarrier_init(this->done(n), C::kGroups * 128);
      }
      for (int group = 0; group < C::kGroups; ++group) {
        mbarrier_init(this->voted(group), 4);
        mbarrier_init(this->turn(group), 4);
        for (int n = 0; n < 2; ++n) st_shared_4(this->found(group, n), 0);
      }
      for (int n = 0; n < C::kStaged; ++n)
        for (int warp = 0; warp < C::kFetchers; ++warp) mbarrier_init(this->staged(n, warp), 32);
      mbarrier_init_fence();
    }
    __syncthreads();
    const int group = static_cast<int>(uniform(threadIdx.x >> 7));
    if (group == C::kGroups) {
      setmaxnreg_dealloc<C::kFetcherRegisters>();
      Producer<C>(this->a_, this->memory_).run();
    } else {
      setmaxnreg_alloc<C::kGroupRegisters>();
      Consumer<C>(this->a_, this->memory_).run(group);
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) extend(const __grid_constant__ Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  Roles<C>(params, shared).run();
#endif
}

}  // namespace fa::cuda::extend
