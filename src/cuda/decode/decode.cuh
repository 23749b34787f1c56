// SPDX-License-Identifier: Apache-2.0
// Exact attention forward for a few queries a sequence over many keys: bound by reading K and V once.
//
// A block of threads owns all rows of one key head: tokens x the heads of its group, so that all of them share one read of K and V. Keys
// are dealt to kKeyWarps groups of warps, kKeys at a time, each with a ring of its own that cp.async fills; nothing but the end of a
// piece holds the groups together. Where work is cut is in work.cuh.
//
//   shared memory:  Q [kRows][kD] | a ring for each group of warps [kStages] of K [kKeys][kD], V [kKeys][kD] | maxima and sums
//                   (fp32 out of the groups, and the weights of parts, pass through the rings)
//
//   for every step:   wait for its K and V; fetch those of kStages - 1 steps later; ask for the pages of the step after
//                     S = Q K^T, mask S if the keys touch an edge, P = exp2(S - m), out += P V
//   after the last:   out of the groups is summed; to the caller's memory if the piece is the whole item, else to the workspace
//   and then:         the block that finds itself the last of an item sums the item's parts, in the order of their keys; where parts are
//                     large, the last blocks do so together
//
// A row's maximum is its own and exact at every step: a row's bits depend on its keys and on where they are cut, not on the rows beside
// it.
//
// Keys and values of one byte are multiplied as fp16 (bytes.cuh). Their factors, if each key has its own, come with them: S is multiplied
// by those of keys before anything else is done to it, and P by those of values. Such weights are of any size, so they have a unit of
// their own: 2^(S - m) f = 2^(S + log2 f - u) 2^(u - m), where u is the maximum of S + log2 f so far.
#pragma once

#include <math_constants.h>

#include "cuda/decode/block.cuh"

namespace fa::cuda::decode {

template <class C>
class Decode : protected Block<C> {
 public:
  using Base = Block<C>;
  using typename Base::Element;
  static constexpr int kMt = C::kRowTiles, kNt = C::kKeys / 8, kDt = C::kD / 8, kPSteps = C::kKeys / 16;
  static constexpr int kVectors = C::kD / 4;  // of four columns, in a row
  // So many blocks of threads at most, the last ones that leave a part of an item, share the sum of the parts. Where these are small, waiting for
  // each other costs more than it gains.
  static constexpr int kMergers = C::kRows * C::kD >= 4096 ? 8 : 1;
  // The counter of an item counts blocks that have only their part to leave; in units of this the parts that are there; has a bit for each of
  // those that share the sum, except the last, if it has left; and counts those that have left or need the counter no more.
  static constexpr uint32_t kThere = 1u << 11, kLeft = 1u << 21, kDone = 1u << 29;
  static_assert(kMergers <= 8);
  // How often a block asks for others that may not even run: some 700 clocks each. (A limit in clocks is none: ptxas moves the reading of the
  // first one behind that of the second.)
  static constexpr int kPatience = 64;
  using TheWork = Work<C, true>;
  // Factors near to each other have a way of their own, for which more rows a warp have no registers.
  static constexpr bool kNear = kMt == 1;

  using Base::Base;

  __device__ __forceinline__ void run() {
    if (!lengths_known()) wait_for_previous();
    TheWork work(a_);
    const auto blocks = [&] { return static_cast<int>(gridDim.x >> work.abreast_log2()); };
#pragma unroll 1
    for (int range = static_cast<int>(blockIdx.x >> work.abreast_log2()); range < work.ranges(); range += blocks()) {
      int unit = -1;  // the range's first
#pragma unroll 1
      while (true) {
        const int begin = work.range_begin(range), end = work.range_begin(range + 1);
        const Piece piece = work.at(unit < 0 ? begin : unit, end);
        const bool ends = piece.last == end;
        set_piece(piece);
        wait_for_previous();
        walk();
        const bool leaves = ends && range + blocks() >= work.ranges();
        finish(work, range, leaves);
        if (leaves) return;
        unit = piece_.last;
        __syncthreads();  // shared memory is free again
        work.reload(piece_.batch);
        if (ends) break;
      }
    }
  }

 protected:
  using Base::a_;
  using Base::diagonal;
  using Base::fetch;
  using Base::fetch_q;
  using Base::first_key;
  using Base::head_of;
  using Base::key_warp_;
  using Base::keys_;
  using Base::lane_;
  using Base::lengths_known;
  using Base::only_factor;
  using Base::p_;
  using Base::piece_;
  using Base::place_in;
  using Base::q_start_;
  using Base::row_of;
  using Base::row_warp_;
  using Base::rows_;
  using Base::seqlen_k_;
  using Base::set_piece;
  using Base::shared_;
  using Base::shared_k;
  using Base::shared_k_factors;
  using Base::shared_out;
  using Base::shared_rings;
  using Base::shared_scales;
  using Base::shared_sums;
  using Base::shared_v;
  using Base::shared_v_factors;
  using Base::sync_group;
  using Base::token_of;
  using Base::tokens_;
  using Base::warp_interior_;
  using Base::warp_row_;
  using Base::warp_visible_;
  using Scores = Accumulator<kMt, kNt>;

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over the keys of a piece
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void walk() {
    // Pages are asked for two turns ahead.
    Place place = place_in(0), next = place_in(1);
    fetch_q();
    clear<kMt, kDt>(out_);
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max_[i][r] = -1e30f;  // finite, so that -inf minus it is -inf
        sum_[i][r] = 0.f;
      }
    // The first turns only fetch.
    int free = 0;  // the slot of the ring that a turn fills; the one behind it is read
#pragma unroll 1
    for (int step = 1 - C::kStages; step < piece_.steps; ++step) {
      if (step >= 0) {
        cp_async_wait<C::kStages - 2>();
        if (step == 0) {
          __syncthreads();  // the step is here, and Q
          if constexpr (C::kOfBytes) {
            prepare_queries<C::kRows, C::kD, C::kThreads>(shared_, shared_scales(), p_.q.dtype == Dtype::bf16,
                                                          only_factor(a_.k_descale));
            clear_units();
            __syncthreads();
          }
        } else {
          sync_group();  // the step is here, and nobody reads the slot of the one before any more
        }
      }
      fetch(free, step + C::kStages - 1, place);
      free = free == C::kStages - 1 ? 0 : free + 1;
      place = next;
      next = place_in(step + C::kStages + 1);
      const int key0 = first_key(step);
      if (step >= 0 && key0 < warp_visible_.end && key0 + C::kKeys > warp_visible_.begin) attend(free, key0);
    }
  }

  __device__ __forceinline__ void attend(int slot, int key0) {
    if constexpr (C::kOfBytes) {
      attend_bytes(slot, key0);
      return;
    }
    Scores s;
    multiply_transposed<Element, C::kD, kMt, kNt>(s, shared_, row_warp_ * C::kWarpRows, shared_k(slot), 0);
    apply_terms(s, key0);
    const bool masked = key0 < warp_interior_.begin || key0 + C::kKeys > warp_interior_.end;
    if (masked) mask(s, key0);
    raise_max(s);
    // What no token sees reads as zero; what only some see may be NaN or Inf, and zero times that is not zero.
    if (masked && tokens_ > 1 && __any_sync(~0u, fetched_has_nonfinite<Element, C::kKeys, C::kD, 32>(shared_v(slot), lane_))) {
      Weights<kMt, kPSteps> weights;
#pragma unroll
      for (int k = 0; k < kPSteps; ++k) {
        uint32_t w[kMt][4];
        exponentials(s, k, w);
#pragma unroll
        for (int i = 0; i < kMt; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r) weights[i][k][r] = w[i][r];
      }
      multiply_add_exactly<Element, C::kPitch, kMt, kPSteps, kDt>(out_, weights, shared_v(slot));
    } else {
      multiply_add_with<Element, C::kPitch, kPSteps, 1, kMt, kDt>(out_, shared_v(slot), 0,
                                                                  [&](int k, uint32_t(&w)[kMt][4]) { exponentials(s, k, w); });
    }
  }

  __device__ __forceinline__ void attend_bytes(int slot, int key0) {
    Scores s;
    multiply_transposed_bytes<C::kFormat, C::kD, kMt, kNt>(s, shared_, row_warp_ * C::kWarpRows, shared_k(slot));
    scale(s, slot);
    apply_terms(s, key0);
    const bool masked = key0 < warp_interior_.begin || key0 + C::kKeys > warp_interior_.end;
    if (masked) mask(s, key0);
    raise_max(s);
    Weights<kMt, kPSteps> weights;
    float unit[kMt][2];
    if (a_.v_descale.per_row) {
      const uint32_t top = kNear ? top_factor(slot) : 0;
      if (kNear && top != 0) {
        raise_unit_to(top, unit);
        weigh<Factors::near>(s, slot, unit, weights);
      } else {
        raise_unit(s, slot, unit);
        weigh<Factors::any>(s, slot, unit, weights);
      }
    } else {
      weigh<Factors::none>(s, slot, unit, weights);
    }
    if (masked && tokens_ > 1 && __any_sync(~0u, share_has_nan<C::kFormat, C::kTileBytes>(shared_v(slot), lane_))) {
      multiply_add_bytes_exactly<C::kFormat, kMt, kPSteps, kDt>(out_, weights, shared_v(slot));
    } else {
      multiply_add_bytes<C::kFormat, kMt, kPSteps, kDt>(out_, weights, shared_v(slot));
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Scores, in the unit of q k^T: what is added to logits is divided by softmax_scale, so that the scale enters with the exponential
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ float exponent_scale() const { return p_.softmax_scale * kLog2e; }

  __device__ __forceinline__ void apply_terms(Scores &s, int key0) const {
    if (p_.softcap > 0) {
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int j = 0; j < kNt; ++j)
#pragma unroll
          for (int r = 0; r < 4; ++r) s[i][j][r] = capped(s[i][j][r], a_.raw);
    }
    if (p_.alibi_slopes != nullptr) {
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 4; r += 2) {
          const int row = min(row_of(i, r), rows_ - 1);  // what lies beyond the last row is not stored
          // Read again for every tile: cheaper than registers held through the walk.
          const float slope =
              a_.raw.logit * p_.alibi_slopes[piece_.batch * p_.alibi_batch_stride + head_of(row) * p_.alibi_head_stride];
          const int first = token_of(row) + seqlen_k_ - tokens_ - key0 - 2 * (opaque(lane_) & 3);
#pragma unroll
          for (int j = 0; j < kNt; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              s[i][j][r + e] = fmaf(-slope, fabsf(static_cast<float>(first - 8 * j - e)), s[i][j][r + e]);
        }
    }
  }

  __device__ __forceinline__ void mask(Scores &s, int key0) const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int token = token_of(row_of(i, r)), first = key0 + 2 * (opaque(lane_) & 3) + r % 2;
        const Keys keys = diagonal().visible_keys({token, token + 1});
#pragma unroll
        for (int j = 0; j < kNt; ++j) {
          if (first + 8 * j < keys.begin || first + 8 * j >= keys.end) s[i][j][r] = -CUDART_INF_F;
        }
      }
  }

  // Of bytes: S of the queries and keys that they stand for.
  __device__ __forceinline__ void scale(Scores &s, int slot) const {
    const int lane = opaque(lane_);
    float row_scale[kMt][2];
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        row_scale[i][r] = ld_shared_float(shared_scales() + (warp_row_ + i * 16 + (lane >> 2) + 8 * r) * 4);
#pragma unroll
    for (int j = 0; j < kNt; ++j) {
      float2 factors{1.f, 1.f};
      if (a_.k_descale.per_row) factors = ld_shared_float2(shared_k_factors(slot) + (8 * j + 2 * (lane & 3)) * 4);
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) s[i][j][r] *= row_scale[i][r >> 1] * (r & 1 ? factors.y : factors.x);
    }
  }

  // The factors of the values of this lane's keys in tile j of S, and the logarithms of their magnitudes.
  __device__ __forceinline__ float2 value_factors(int slot, int j) const {
    return ld_shared_float2(shared_v_factors(slot) + (8 * j + 2 * (opaque(lane_) & 3)) * 4);
  }
  static __device__ __forceinline__ float2 logarithms(float2 x) { return {__log2f(fabsf(x.x)), __log2f(fabsf(x.y))}; }

  // Of bytes whose values have factors of their own: the unit of out. It is kept where the row's maximum and sum will be in the end.
  __device__ __forceinline__ uint32_t shared_unit(int i, int r) const {
    return shared_sums(key_warp_, warp_row_ + i * 16 + (opaque(lane_) >> 2) + 8 * r);
  }
  __device__ __forceinline__ void clear_units() const {
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if ((opaque(lane_) & 3) == 0) st_shared_float(shared_unit(i, r), -1e30f);
  }
  // The bits of the largest magnitude of a tile's factors if the others, except zeros, are at least about a sixteenth of it; else 0. A power of
  // two above all of them is then good enough for a unit. Rows have no part in it.
  __device__ __forceinline__ uint32_t top_factor(int slot) const {
    constexpr uint32_t kInf = 0x7F800000u, kSixteenth = 4u << 23;
    const uint32_t bits = ld_shared_4(shared_v_factors(slot) + opaque(lane_) % C::kKeys * 4) & 0x7FFFFFFFu;
    const uint32_t top = __reduce_max_sync(~0u, bits), bottom = __reduce_min_sync(~0u, bits == 0 ? kInf : bits);
    return top < kInf && top <= bottom + kSixteenth ? max(top, 1u) : 0;
  }
  __device__ __forceinline__ void raise_unit_to(uint32_t top, float (&unit)[kMt][2]) {
    const float power = static_cast<float>(static_cast<int>(top >> 23) - 126);
    bool grow = false;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unit[i][r] = ld_shared_float(shared_unit(i, r));
        grow |= !(max_[i][r] + power <= unit[i][r]);
      }
    if (!__any_sync(~0u, grow)) return;
    __syncwarp();  // the unit is read
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float raised = fmaxf(unit[i][r], max_[i][r] + power), factor = exp2_approx(unit[i][r] - raised);
        unit[i][r] = raised;
        if ((opaque(lane_) & 3) == 0) st_shared_float(shared_unit(i, r), raised);
        multiply_row(i, r, factor);
      }
    __syncwarp();
  }
  __device__ __forceinline__ void raise_unit(const Scores &s, int slot, float (&unit)[kMt][2]) {
    float top[kMt][2];
#pragma unroll
    for (int i = 0; i < kMt; ++i) top[i][0] = top[i][1] = -CUDART_INF_F;
#pragma unroll
    for (int j = 0; j < kNt; ++j) {
      const float2 more = logarithms(value_factors(slot, j));
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r)
          top[i][r >> 1] = fmaxf(top[i][r >> 1], fmaf(s[i][j][r], exponent_scale(), r & 1 ? more.y : more.x));
    }
    bool grow = false;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        unit[i][r] = ld_shared_float(shared_unit(i, r));
        grow |= top[i][r] > unit[i][r];
      }
    if (!__any_sync(~0u, grow)) return;
    __syncwarp();  // the unit is read
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], 1));
        top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], 2));
        const float raised = fmaxf(unit[i][r], top[i][r]), factor = exp2_approx(unit[i][r] - raised);
        unit[i][r] = raised;
        if ((opaque(lane_) & 3) == 0) st_shared_float(shared_unit(i, r), raised);
        multiply_row(i, r, factor);
      }
    __syncwarp();
  }

  __device__ __forceinline__ void multiply_row(int i, int r, float factor) {
#pragma unroll
    for (int j = 0; j < kDt; ++j) {
      out_[i][j][2 * r] *= factor;
      out_[i][j][2 * r + 1] *= factor;
    }
  }

  __device__ __forceinline__ void raise_max(const Scores &s) {
    float top[kMt][2];
    bool grow = false;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = fmaxf(s[i][0][2 * r], s[i][0][2 * r + 1]);
#pragma unroll
        for (int j = 1; j < kNt; ++j) x = fmaxf(x, fmaxf(s[i][j][2 * r], s[i][j][2 * r + 1]));
        top[i][r] = x * exponent_scale();
        grow |= top[i][r] > max_[i][r];
      }
    if (!__any_sync(~0u, grow)) return;
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], 1));
        top[i][r] = fmaxf(top[i][r], __shfl_xor_sync(~0u, top[i][r], 2));
        const float raised = fmaxf(max_[i][r], top[i][r]);
        const float factor = exp2_approx(max_[i][r] - raised);  // 1 for rows that do not grow: their bits stay
        max_[i][r] = raised;
        sum_[i][r] *= factor;
        if (!C::kOfBytes || !a_.v_descale.per_row) multiply_row(i, r, factor);
      }
  }

  // Of values, each with one of its own or none. Near: to each other, as top_factor() finds, so that weights are multiples of the exponentials.
  enum class Factors { none, near, any };
  // exponentials() of all keys, times the factors of their values, in the unit of out.
  template <Factors kFactors>
  __device__ __forceinline__ void weigh(const Scores &s, int slot, const float (&unit)[kMt][2],
                                        Weights<kMt, kPSteps> &weights) {
    const float c = exponent_scale();
    float in_unit[kMt][2];
    if constexpr (kFactors == Factors::near) {
#pragma unroll
      for (int i = 0; i < kMt; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) in_unit[i][r] = exp2_approx(max_[i][r] - unit[i][r]);
    }
#pragma unroll
    for (int j = 0; j < kNt; ++j) {
      float2 factors{1.f, 1.f}, more{0.f, 0.f};
      if constexpr (kFactors != Factors::none) factors = value_factors(slot, j);
      if constexpr (kFactors == Factors::any) more = logarithms(factors);
#pragma unroll
      for (int i = 0; i < kMt; ++i) {
        float e[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float x = s[i][j][r];
          e[r] = exp2_approx(fmaf(x, c, -max_[i][r >> 1]));
          sum_[i][r >> 1] += e[r];
          if constexpr (kFactors == Factors::near) {
            e[r] *= in_unit[i][r >> 1] * (r & 1 ? factors.y : factors.x);
          } else if constexpr (kFactors == Factors::any) {
            e[r] = copysignf(exp2_approx(fmaf(x, c, r & 1 ? more.y : more.x) - unit[i][r >> 1]), r & 1 ? factors.y : factors.x);
          }
          if (x == -CUDART_INF_F) e[r] = kMaskedWeight;
        }
        weights[i][j / 2][j % 2 * 2] = pack2<Element>(e[0], e[1]);
        weights[i][j / 2][j % 2 * 2 + 1] = pack2<Element>(e[2], e[3]);
      }
    }
  }

  // P = 2^(S - m) of the k-th 16 keys, rounded to the operand of the next product; adds to the row sums. What is masked becomes
  // kMaskedWeight.
  __device__ __forceinline__ void exponentials(const Scores &s, int k, uint32_t (&w)[kMt][4]) {
    const float c = exponent_scale();
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float e[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float x = s[i][2 * k + half][r];
          e[r] = exp2_approx(fmaf(x, c, -max_[i][r >> 1]));
          sum_[i][r >> 1] += e[r];
          if (x == -CUDART_INF_F) e[r] = kMaskedWeight;
        }
        w[i][2 * half] = pack2<Element>(e[0], e[1]);
        w[i][2 * half + 1] = pack2<Element>(e[2], e[3]);
      }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Results
  // ------------------------------------------------------------------------------------------------------------------

  // `leaves`: this block of threads has nothing else to do.
  __device__ __forceinline__ void finish(const TheWork &work, int range, bool leaves) {
    sync_group();  // the ring is read
    leave_out();
    __syncthreads();
    if (C::kD > 128) q_start_ = sequence_of(p_.q_lengths, opaque(piece_.batch)).start;  // not kept through the walk
    if (piece_.whole()) {
      store_whole();
      store_unused_rows();
      return;
    }
    const int first_range = work.range_of(piece_.begin), parts = work.range_of(piece_.end - 1) - first_range + 1;
    int32_t *counter = a_.counters + work.counter(piece_, first_range);
    uint32_t before = 0;
    if (threadIdx.x == 0) before = atomicAdd(reinterpret_cast<uint32_t *>(counter), 1u);
    store_part(work.slot(range, piece_.first == piece_.begin));
    if (threadIdx.x == 0) st_shared_4(shared_, before);
    __syncthreads();                                                                // all threads have stored theirs
    const int after = parts - 1 - static_cast<int>(ld_shared_4(shared_) % kThere);  // parts that come later
    if (after >= min(kMergers, parts)) {
      if (threadIdx.x == 0) add_released(counter, kThere);
      return;
    }
    if constexpr (kMergers > 1) {
      merge_together(work, counter, first_range, parts, after, leaves);
    } else {
      if (threadIdx.x == 0) {
        while (static_cast<uint32_t>(load_acquired(counter)) / kThere != static_cast<uint32_t>(parts - 1)) {
        }
      }
      __syncthreads();
      merge(work, first_range, parts, 0, rows_ * kVectors);
      if (threadIdx.x == 0) *counter = 0;
    }
    if (after == 0) store_unused_rows();
  }

  // The part of this block is stored, and those of `after` blocks come later. Each of the last kMergers blocks sums a slice of the rows' vectors. But who
  // has other things to do, or has waited for too long, leaves, and the last block has its slice as well: so that nobody depends on blocks
  // that may be waiting for a multiprocessor themselves.
  __device__ __forceinline__ void merge_together(const TheWork &work, int32_t *counter, int first_range, int parts, int after,
                                                 bool leaves) const {
    const int mergers = min(kMergers, parts);
    const auto all_there = [&](uint32_t now) { return static_cast<int>(now % (kLeft << 1) / kThere) == parts; };
    bool counts = false;
    if (threadIdx.x == 0) {
      const uint32_t leaving = (kLeft << after) + kDone;
      counts = after == 0 || leaves;
      uint32_t now = add_acquired_released(counter, counts ? kThere : kThere + leaving) + kThere;
      if (!counts) now = 0;
      for (int asked = 0; counts && !all_there(now); ++asked) {
        now = static_cast<uint32_t>(load_acquired(counter));
        if (after > 0 && asked == kPatience) {
          counts = false;
          now = add_acquired_released(counter, leaving);
          // If all are there, it is too late: the last block may not know that this one has left.
          if (all_there(now) && now / kDone == static_cast<uint32_t>(mergers - 1)) *counter = 0;
        }
      }
      st_shared_4(shared_ + 4, now);
    }
    __syncthreads();
    const uint32_t now = ld_shared_4(shared_ + 4);
    if (!all_there(now)) return;
    const int vectors = rows_ * kVectors, each = (vectors + mergers - 1) / mergers;
    // A bit for each slice; neighbours at once.
    uint32_t mine = after > 0 ? 1u << after : 1u | (now / kLeft & 0xFE);
#pragma unroll 1
    while (mine != 0) {
      const int first = __ffs(mine) - 1, count = __ffs(~(mine >> first)) - 1;
      merge(work, first_range, parts, first * each, min(count * each, vectors - first * each));
      mine &= ~0u << (first + count);
      if (mine != 0) __syncthreads();  // these are read
    }
    if (counts && atomicAdd(reinterpret_cast<uint32_t *>(counter), kDone) / kDone == static_cast<uint32_t>(mergers - 1))
      *counter = 0;
  }

  // This warp's out, maxima and sums to shared memory.
  __device__ __forceinline__ void leave_out() {
    const int lane = opaque(lane_);
#pragma unroll
    for (int i = 0; i < kMt; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum_[i][r] += __shfl_xor_sync(~0u, sum_[i][r], 1);
        sum_[i][r] += __shfl_xor_sync(~0u, sum_[i][r], 2);
        const int row = warp_row_ + i * 16 + (lane >> 2) + 8 * r;
        if constexpr (C::kOfBytes) {
          multiply_row(
              i, r,
              a_.v_descale.per_row ? exp2_approx(ld_shared_float(shared_unit(i, r)) - max_[i][r]) : only_factor(a_.v_descale));
          __syncwarp();  // the unit is read
        }
        if ((lane & 3) == 0) st_shared_float2(shared_sums(key_warp_, row), {max_[i][r], sum_[i][r]});
        if constexpr (C::kOfBytes) {
          // Four neighbours of each 16 columns: the even ones of them are in one tile, the odd ones in the next.
#pragma unroll
          for (int j = 0; j < kDt; j += 2) {
            const auto bits = [&](int n, int e) { return __float_as_uint(out_[i][j + n][2 * r + e]); };
            st_shared_16(shared_out(key_warp_, row, j + (lane >> 1 & 1)) + (lane & 1) * 16, bits(0, 0), bits(1, 0), bits(0, 1),
                         bits(1, 1));
          }
        } else {
#pragma unroll
          for (int j = 0; j < kDt; ++j)
            st_shared_float2(shared_out(key_warp_, row, j) + (lane & 3) * 8, {out_[i][j][2 * r], out_[i][j][2 * r + 1]});
        }
      }
  }

  // f(row, vector, x, sums): four columns of a row, over all groups of warps, and the row's maximum and sum.
  template <typename F>
  __device__ __forceinline__ void each_vector(F f) const {
    const int count = rows_ * kVectors;
#pragma unroll(C::kD > 128 ? 1 : 2)
    for (int n = opaque(threadIdx.x); n < count; n += C::kThreads) {
      const int row = n / kVectors, vector = n % kVectors;
      float2 sums[C::kKeyWarps];
      float top = -1e30f;
#pragma unroll
      for (int w = 0; w < C::kKeyWarps; ++w) {
        sums[w] = ld_shared_float2(shared_sums(w, row));
        top = fmaxf(top, sums[w].x);
      }
      float sum = 0.f;
      float4 x{0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int w = 0; w < C::kKeyWarps; ++w) {
        const float factor = exp2_approx(sums[w].x - top);
        sum = fmaf(sums[w].y, factor, sum);
        add(x, factor, ld_shared_float4(shared_out(w, row, vector / 2) + vector % 2 * 16));
      }
      f(row, vector, x, float2{top, sum});
    }
  }

  static __device__ __forceinline__ void add(float4 &x, float factor, const float4 &y) {
    x.x = fmaf(factor, y.x, x.x);
    x.y = fmaf(factor, y.y, x.y);
    x.z = fmaf(factor, y.z, x.z);
    x.w = fmaf(factor, y.w, x.w);
  }

  // What a row's out is multiplied by, and its lse, from its maximum and sum. The sink is one more logit in the denominator.
  struct Closing {
    float factor, lse;
  };
  __device__ __forceinline__ Closing close(int row, float2 sums) const {
    float factor = 1.f;
    if (p_.sink != nullptr) {
      const float sink = p_.sink[head_of(row) * p_.sink_stride] * kLog2e, raised = fmaxf(sums.x, sink);
      factor = exp2_approx(sums.x - raised);
      sums = {raised, sums.y * factor + exp2_approx(sink - raised)};
    }
    // The sum is NaN when a visible score is; then out is NaN too.
    if (sums.y == 0.f) return {0.f, -CUDART_INF_F};
    return {factor / sums.y, (sums.x + log2f(sums.y)) * kLn2};
  }

  __device__ __forceinline__ void store_whole() const {
    each_vector([&](int row, int vector, const float4 &x, float2 sums) {
      const Closing closing = close(row, sums);
      if (vector == 0) store_lse(row, closing.lse);
      store_out(row, vector, x, closing.factor);
    });
  }

  __device__ __forceinline__ void store_lse(int row, float lse) const {
    if (p_.lse.data != nullptr) *lse_at(token_of(row), head_of(row)) = lse;
  }
  __device__ __forceinline__ void store_out(int row, int vector, const float4 &x, float factor) const {
    const int column = 4 * vector;
    if (column >= p_.head_dim_v) return;
    Element *dst = out_at(token_of(row), head_of(row)) + column;
    const auto pack = [&](float a, float b) {
      if (C::kOfBytes && p_.q.dtype == Dtype::bf16) return pack2<__nv_bfloat16>(a, b);
      return pack2<Element>(a, b);
    };
    const uint2 words{pack(x.x * factor, x.y * factor), pack(x.z * factor, x.w * factor)};
    if (a_.vector_out) {
      *reinterpret_cast<uint2 *>(dst) = words;
    } else {
      auto *bits = reinterpret_cast<unsigned short *>(dst);
      bits[0] = static_cast<unsigned short>(words.x);
      bits[1] = static_cast<unsigned short>(words.x >> 16);
      bits[2] = static_cast<unsigned short>(words.y);
      bits[3] = static_cast<unsigned short>(words.y >> 16);
    }
  }

  __device__ __forceinline__ float *lse_at(int token, int head) const {
    return p_.lse.data + piece_.batch * p_.lse.batch_stride + head * p_.lse.head_stride +
           (q_start_ + token) * p_.lse.seq_stride;
  }
  __device__ __forceinline__ Element *out_at(int token, int head) const {
    return static_cast<Element *>(p_.out.data) + piece_.batch * p_.out.batch_stride + (q_start_ + token) * p_.out.seq_stride +
           head * p_.out.head_stride;
  }

  // Rows of the sequence that are not used: out = 0, lse = -inf.
  __device__ __forceinline__ void store_unused_rows() const {
    int end = static_cast<int>(sequence_of(p_.q_lengths, opaque(piece_.batch)).slot) * this->group_heads();
    if constexpr (C::kOfBytes) end = min(end - this->first_row(), C::kRows);
    for (int row = rows_ + (opaque(threadIdx.x) >> 5); row < end; row += C::kThreads / 32) {
      const int token = token_of(row), head = head_of(row);
      const int lane = opaque(lane_);
      if (p_.lse.data != nullptr && lane == 0) *lse_at(token, head) = -CUDART_INF_F;
      auto *dst = reinterpret_cast<unsigned short *>(out_at(token, head));
      for (int column = lane; column < p_.head_dim_v; column += 32) dst[column] = 0;
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Items in parts
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ float4 *part_out(int slot, int row) const {
    return reinterpret_cast<float4 *>(a_.part_out) + (int64_t{slot} * C::kRows + row) * kVectors;
  }
  __device__ __forceinline__ float2 *part_sums(int slot, int row) const {
    return a_.part_sums + int64_t{slot} * C::kRows + row;
  }

  __device__ __forceinline__ void store_part(int slot) const {
    each_vector([&](int row, int vector, const float4 &x, float2 sums) {
      if (vector == 0) *part_sums(slot, row) = sums;
      part_out(slot, row)[vector] = x;
    });
  }

  // Sums the parts in the order of their keys, whichever came last: `vectors` of each from `begin` on, counted through all rows. They pass through
  // the rings: maxima and sums of all, then out of as many at a time as fit.
  __device__ __forceinline__ void merge(const TheWork &work, int first_range, int parts, int begin, int vectors) const {
    constexpr int kMine = (C::kRows * kVectors + C::kThreads - 1) / C::kThreads;  // vectors of a thread
    if (vectors <= 0) return;  // fewer vectors than slices, or a block of rows that this sequence does not have
    const int first_row = begin / kVectors, rows = kMergers > 1 ? (begin + vectors - 1) / kVectors + 1 - first_row : rows_,
              thread = opaque(threadIdx.x), out_bytes = vectors * 16;
    const uint32_t shared_parts = shared_rings() + (parts * rows * 8 + 127) / 128 * 128;
    const int at_once = static_cast<int>(shared_rings() + C::kRingsBytes - shared_parts) / out_bytes;
    const auto slot_of = [&](int part) { return work.slot(first_range + part, part == 0); };
    // A part a warp.
    const auto fetch_out = [&](int first, int count) {
      const int lane = thread & 31;
      for (int part = thread >> 5; part < count; part += C::kThreads / 32) {
        const float4 *from = part_out(slot_of(first + part), 0) + begin + lane;
        const uint32_t to = shared_parts + part * out_bytes + lane * 16;
#pragma unroll 4
        for (int n = 0; n < out_bytes / 512; ++n) cp_async_16(to + n * 512, from + n * 32);
        if (out_bytes % 512 != 0 && lane * 16 < out_bytes % 512)
          cp_async_16(to + out_bytes / 512 * 512, from + out_bytes / 512 * 32);
      }
      cp_async_commit();
    };
    for (int n = thread; n < parts * C::kRows; n += C::kThreads) {
      const int part = n / C::kRows, row = n % C::kRows;
      if (row < rows) cp_async_8(shared_rings() + (part * rows + row) * 8, part_sums(slot_of(part), first_row + row));
    }
    fetch_out(0, min(at_once, parts));

    float4 x[kMine];
    float2 sums[kMine];
#pragma unroll 1
    for (int first = 0; first < parts; first += at_once) {
      cp_async_wait<0>();
      __syncthreads();
#pragma unroll
      for (int n = 0; n < kMine; ++n) {
        const int at = thread + n * C::kThreads;
        if (at >= vectors) break;
        const uint32_t its = shared_rings() + ((begin + at) / kVectors - first_row) * 8;
        if (first == 0) {
          x[n] = {0.f, 0.f, 0.f, 0.f};
          sums[n] = {-1e30f, 0.f};
#pragma unroll 4
          for (int part = 0; part < parts; ++part) sums[n].x = fmaxf(sums[n].x, ld_shared_float(its + part * rows * 8));
        }
#pragma unroll 4
        for (int part = first; part < min(first + at_once, parts); ++part) {
          const float2 part_sum = ld_shared_float2(its + part * rows * 8);
          const float weight = exp2_approx(part_sum.x - sums[n].x);
          sums[n].y = fmaf(weight, part_sum.y, sums[n].y);
          add(x[n], weight, ld_shared_float4(shared_parts + (part - first) * out_bytes + at * 16));
        }
      }
      if (first + at_once < parts) {
        __syncthreads();  // these are read
        fetch_out(first + at_once, min(at_once, parts - first - at_once));
      }
    }
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      const int at = thread + n * C::kThreads;
      if (at >= vectors) break;
      const int row = (begin + at) / kVectors, vector = (begin + at) % kVectors;
      const Closing closing = close(row, sums[n]);
      if (vector == 0) store_lse(row, closing.lse);
      store_out(row, vector, x[n], closing.factor);
    }
  }

  Accumulator<kMt, kDt> out_;
  float max_[kMt][2], sum_[kMt][2];
};

// Asks for all of the parameters at once: one miss of the constant cache instead of one after another as they are used, which is a good
// part of a short launch. What is read goes where nothing lies yet.
template <class C>
__device__ __forceinline__ void warm_up(const Params &params, char *shared) {
  constexpr int kLine = 64, kLast = (sizeof(Params) - 1) / kLine;
  static_assert(kLast < 32);
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < 32)
    st_shared_4(smem_address(shared) + C::kSharedBytes - 128 + lane * 4,
                reinterpret_cast<const uint32_t *>(&params)[min(lane, kLast) * (kLine / 4)]);
}

}  // namespace fa::cuda::decode
