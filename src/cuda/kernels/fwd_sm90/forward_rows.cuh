// SPDX-License-Identifier: Apache-2.0
// What a warpgroup of the forward holds of its 64 rows, in registers, and what it does with it between products: from S to P with a maximum
// that may lag, sums, masks, what NaN and Inf in V need, and how out and lse leave. The walk is in forward.cuh.
#pragma once

#include <math_constants.h>

#include "core/mask.h"
#include "cuda/common/rows.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/fwd_sm90/forward_block.cuh"

namespace fa::cuda::sm90 {

constexpr float kLargeSum = 256.0f;  // 2^kRescaleThreshold
constexpr float kLargestE4m3 = 448.0f;

template <class C>
class ForwardRows : public ForwardBlock<C> {
 public:
  using Block = ForwardBlock<C>;
  using typename Block::Element;
  using typename Block::Tile;
  using Out = typename C::Out;
  static constexpr int kKeys = C::kChunk;
  static constexpr int kSteps = kKeys / C::kStepColumns;  // of out += P V
  // Weights of e4m3 have few small numbers: where a maximum is found they are made larger by 2^kRaise, short of what one lane's sum of a
  // row may reach before anyone looks.
  static constexpr int kRaise = C::kFp8 ? (kKeys > 96 ? 3 : 4) : 0;
  static constexpr float kMostSum = C::kFp8 ? kLargestE4m3 : kLargeSum;
  static_assert(!C::kFp8 || (kKeys / 4 << kRaise) <= kLargestE4m3);

  using Block::Block;

 protected:
  using Block::a_, Block::lane_, Block::p_, Block::warp_;

  // ------------------------------------------------------------------------------------------------------------------
  // Softmax
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int row_of(const Tile &t, int r) const {
    return t.row0 + group_ * 64 + warp_ * 16 + (lane_ >> 2) + 8 * r;
  }
  // What turns S into logits in base 2.
  __device__ __forceinline__ float scale() const {
    if constexpr (C::kFp8) return scale_;
    return C::kScored ? 1.f : p_.softmax_scale * kLog2e;
  }
  // fp8: with the tile's factors. Masked scores are -inf, which neither 0 nor NaN may meet: what these make of a row comes in when it is
  // finished.
  __device__ __forceinline__ float scale_of(const Tile &t) const {
    if constexpr (!C::kFp8) return scale();
    const float x = t.product_factor * p_.softmax_scale * kLog2e;
    return x > 0.f ? x : 1e-30f;
  }
  __device__ __forceinline__ void set_scale(const Tile &t) { scale_ = scale_of(t); }

  // S with softcap and ALiBi, in base 2, keys from key0 on.
  __device__ __forceinline__ void score(const Tile &t, int key0) {
    const ScoreScale product(p_);
    if (product.cap > 0) {
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j) s_[j] = product.capped(s_[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j) s_[j] = product.scaled(s_[j]);
    }
    if (const float slope = t.alibi; slope != 0.f) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto distance = static_cast<float>(row_of(t, r) + t.seqlen_k - t.seqlen_q - key0 - 2 * (lane_ & 3));
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) s_[4 * j + 2 * r + e] -= slope * fabsf(distance - static_cast<float>(8 * j + e));
      }
    }
  }
  // The same for one pair.
  __device__ __forceinline__ float logit(const Tile &t, float raw, int row, int key) const {
    if constexpr (!C::kScored) return raw * scale_of(t);
    const ScoreScale product(p_);
    const float x = product.cap > 0 ? product.capped(raw) : product.scaled(raw);
    return x - t.alibi * fabsf(static_cast<float>(row + t.seqlen_k - t.seqlen_q - key));
  }

  // S to P, in place. True if m was raised: then out has to be multiplied by factor_.
  __device__ __forceinline__ bool exponentials() {
    const float c = scale();
    float top[4] = {fmaxf(s_[0], s_[1]), fmaxf(s_[2], s_[3]), fmaxf(s_[4], s_[5]), fmaxf(s_[6], s_[7])};
#pragma unroll
    for (int j = 8; j < kKeys / 2; j += 2) top[(j / 2) % 4] = fmaxf(top[(j / 2) % 4], fmaxf(s_[j], s_[j + 1]));
    top[0] = fmaxf(top[0], top[2]) * c;
    top[1] = fmaxf(top[1], top[3]) * c;
    const bool grown = __any_sync(~0u, top[0] - kRescaleThreshold > max_[0] || top[1] - kRescaleThreshold > max_[1]);
    if (grown) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = top[r];
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        const float raised = fmaxf(max_[r], x - kRaise);
        factor_[r] = exp2_approx(max_[r] - raised);
        max_[r] = raised;
        sum_[r] *= factor_[r];
      }
    }
    float sum[2];
    weigh(sum);
    sum_[0] += sum[0];
    sum_[1] += sum[1];
    return grown;
  }

  // S to P in place, with the maximum as it is, and the sums of this lane's two rows.
  __device__ __forceinline__ void weigh(float (&sum)[2]) {
    const float c = scale();
    float parts[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < kKeys / 2; ++j) {
      s_[j] = exp2_approx(fmaf(s_[j], c, -max_[(j >> 1) & 1]));
      parts[(j >> 1) & 3] += s_[j];
    }
    sum[0] = parts[0] + parts[2];
    sum[1] = parts[1] + parts[3];
  }

  // P that was made with a maximum too low by more than kRescaleThreshold, or holds NaN: the maximum is raised, and P and its sums are made relative to
  // it; out has still to be multiplied by factor_. Where fp32 does not hold them, from S again.
  __device__ __forceinline__ void raise_late(const Tile &t, int key0, float (&sum)[2]) {
    float raised[2];
    bool lost = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = 0.f;  // of what is not NaN
#pragma unroll
      for (int j = 0; j < kKeys / 4; ++j) top = fmaxf(top, s_[4 * (j / 2) + 2 * r + (j & 1)]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      // By the exponent of the largest, but by no more than exp2_approx still makes a number of.
      raised[r] = max_[r] + static_cast<float>(min(max((__float_as_int(top) >> 23) - (127 + max(kRaise - 1, 0)), 0), 120));
      factor_[r] = exp2_approx(max_[r] - raised[r]);
      // Infinite, or max_ so large that it moves in coarse steps.
      lost |= !(fmaxf(top, sum[r]) * factor_[r] <= kMostSum);
    }
    if (__any_sync(~0u, lost)) {
      factor_[0] = factor_[1] = 1.f;
      sum[0] = sum[1] = 0.f;
      scores_again(t, key0);
      exponentials();
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        max_[r] = raised[r];
        sum_[r] *= factor_[r];
        sum[r] *= factor_[r];
      }
#pragma unroll
      for (int j = 0; j < kKeys / 2; ++j) s_[j] *= factor_[(j >> 1) & 1];
    }
  }

  // S of a chunk without masked pairs from global memory, shared out among lanes as in `repair`.
  __device__ __forceinline__ void scores_again(const Tile &t, int key0) {
    const Element *q = row_of_lane(t);
#pragma unroll 1
    for (int n = 0; n < kKeys; ++n) {
      const float x = dot(q, row_at(p_.k, t.k_batch, t.k_row + key0 + n, t.head_k));
      const int at = n - 2 * (lane_ & 3);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float mine = __shfl_sync(~0u, x, ((lane_ >> 2) + 8 * r) * 2);
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (at == 8 * j + e) s_[4 * j + 2 * r + e] = mine;
      }
    }
  }

  __device__ __forceinline__ RangeOf<int32_t> keys_of_row(const Tile &t, int row) const {
    return Diagonal<int32_t>(a_.limits, t.seqlen_q, t.seqlen_k).visible_keys({row, row + 1});
  }

  // Of the columns 0, 1, 8, 9, 16, 17, .. that a lane holds, those below `end`, as bits.
  static __device__ __forceinline__ uint32_t columns_below(int end) {
    const int count = 2 * (end >> 3) + min(end & 7, 2);
    return end <= 0 ? 0u : count >= 32 ? ~0u : (1u << count) - 1u;
  }
  // Of the keys from key0 on, those that this lane's two rows see, as bits.
  __device__ __forceinline__ void find_seen(const Tile &t, int key0, uint32_t (&seen)[2]) const {
    static_assert(kKeys <= 128);
    const int first = key0 + 2 * (lane_ & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RangeOf<int32_t> keys = keys_of_row(t, row_of(t, r));
      seen[r] = columns_below(keys.end - first) & ~columns_below(keys.begin - first);
    }
  }
  __device__ __forceinline__ void mask_scores(const uint32_t (&seen)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if ((seen[r] >> (2 * j + e) & 1) == 0) s_[4 * j + 2 * r + e] = -CUDART_INF_F;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // NaN and Inf in V that masked pairs would let through
  // ------------------------------------------------------------------------------------------------------------------

  // Called when out holds the edge chunks and nothing else.
  __device__ __forceinline__ void mend(const Tile &t) {
    float zero[4] = {0.f, 0.f, 0.f, 0.f};  // four chains: one would wait at every step
#pragma unroll
    for (int j = 0; j < C::kDv / 2; ++j) zero[j % 4] = fmaf(out_[j], 0.f, zero[j % 4]);
    if (__any_sync(~0u, (zero[0] + zero[1]) + (zero[2] + zero[3]) != 0.f)) repair(t);
  }

  // out of the edge chunks again, from the visible pairs alone and from global memory. Lane l takes half of the columns of the dot
  // products of row l / 2 of this warp.
  __device__ __forceinline__ void repair(const Tile &t) {
    const int row = row_of(t, 0) - (lane_ >> 2) + (lane_ >> 1);
    const RangeOf<int32_t> keys = keys_of_row(t, row);
    const int source = ((lane_ >> 1) & 7) * 4;  // a lane that holds this row's maximum
    const float low = __shfl_sync(~0u, out_max_[0], source), high = __shfl_sync(~0u, out_max_[1], source);
    const float max = (lane_ >> 4) ? high : low;
    const Element *q = row_of_lane(t);
#pragma unroll
    for (int j = 0; j < C::kDv / 2; ++j) out_[j] = 0.f;
#pragma unroll 1
    for (int i = t.begin[group_]; i < t.edges[group_]; ++i) {
      const int key0 = t.chunk(i) * kKeys;
#pragma unroll 1
      for (int key = key0; key < min(key0 + kKeys, t.seqlen_k); ++key) {
        const Element *v = row_at(p_.v, t.k_batch, t.k_row + key, t.head_k);
        const float x = dot(q, row_at(p_.k, t.k_batch, t.k_row + key, t.head_k));
        const bool visible = row < t.seqlen_q && key >= keys.begin && key < keys.end;
        const float weight = rounded<Element>(exp2_approx(logit(t, x, row, key) - max));
        float w[2];
        bool seen[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int holder = ((lane_ >> 2) + 8 * r) * 2;
          w[r] = __shfl_sync(~0u, weight, holder);
          seen[r] = __shfl_sync(~0u, static_cast<int>(visible), holder) != 0;
        }
        v += 2 * (lane_ & 3);
        int columns;  // opaque, or the compiler keeps a comparison with every column in registers across the loop
        asm volatile("mov.u32 %0, %1;\n" : "=r"(columns) : "r"(static_cast<int>(p_.head_dim_v)));
#pragma unroll
        for (int j = 0; j < C::kDv / 8; ++j) {
          if (8 * j >= columns) continue;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float x = element(v, 8 * j + e);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              if (seen[r]) out_[4 * j + 2 * r + e] = fmaf(w[r], x, out_[4 * j + 2 * r + e]);
            }
          }
        }
      }
    }
  }

  // q of row lane_ / 2 of this warp, and its product with a row of k; the other lane of the row takes half of the columns.
  __device__ __forceinline__ const Element *row_of_lane(const Tile &t) const {
    const int row = t.row0 + group_ * 64 + warp_ * 16 + (lane_ >> 1);
    return row_at(p_.q, t.q_batch, t.q_row - t.row0 + min(row, t.seqlen_q - 1), t.head_q);
  }
  __device__ __forceinline__ float dot(const Element *q, const Element *k) const {
    float x = 0.f;
#pragma unroll 1
    for (int column = lane_ & 1; column < p_.head_dim; column += 2) x = fmaf(element(q, column), element(k, column), x);
    return x + __shfl_xor_sync(~0u, x, 1);
  }
  // One at a time: the accumulators leave no registers for loads ahead.
  static __device__ __forceinline__ float element(const Element *row, int column) {
    unsigned short bits;
    if constexpr (C::kFp8) {
      asm volatile("ld.global.u8 %0, [%1];\n" : "=h"(bits) : "l"(row + column));
    } else {
      asm volatile("ld.global.u16 %0, [%1];\n" : "=h"(bits) : "l"(row + column));
    }
    return to_float<Element>(bits);
  }
  static __device__ __forceinline__ Element *row_at(const Operand &x, int batch, int64_t row, int head) {
    return static_cast<Element *>(x.data) + batch * x.batch_stride + row * x.seq_stride + head * x.head_stride;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Results
  // ------------------------------------------------------------------------------------------------------------------

  // Completes the sums and writes lse. out has still to be multiplied by inverse_. Both rows at a time: a lone chain would wait at every
  // step.
  __device__ __forceinline__ void finish_sums(const Tile &t) {
    const int row = row_of(t, 0), rows = t.seqlen_q;
    float *lse = lse_at(t, row);
#pragma unroll
    for (int r = 0; r < 2; ++r) sum_[r] += __shfl_xor_sync(~0u, sum_[r], 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) sum_[r] += __shfl_xor_sync(~0u, sum_[r], 2);
    if constexpr (C::kFp8) {
#pragma unroll
      for (int r = 0; r < 2; ++r) aside_max_[r] = exp2_approx(aside_max_[r] - max_[r]);
    }
    float factor[2] = {1.f, 1.f};
    if (p_.sink != nullptr) {
      const float sink = p_.sink[t.head_q * p_.sink_stride] * kLog2e;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float raised = fmaxf(max_[r], sink);
        factor[r] = exp2_approx(max_[r] - raised);
        sum_[r] = sum_[r] * factor[r] + exp2_approx(sink - raised);
        max_[r] = raised;
      }
    }
    float log[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      inverse_[r] = sum_[r] == 0.f ? 0.f : __fdividef(factor[r], sum_[r]);
      log[r] = sum_[r] == 0.f ? -CUDART_INF_F : (max_[r] + __log2f(sum_[r])) * kLn2;
    }
    if constexpr (C::kFp8) {
      const float unknown = t.product_factor < 0.f ? CUDART_NAN_F : t.product_factor * 0.f;  // 0, or NaN
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (sum_[r] == 0.f) continue;
        inverse_[r] = fmaf(inverse_[r], t.value_factor, unknown);
        log[r] += unknown;
      }
    }
    if (p_.lse.data != nullptr && (lane_ & 3) == 0) {
      if (row < rows) *lse = log[0];
      if (row + 8 < rows) lse[8 * p_.lse.seq_stride] = log[1];
    }
  }

  __device__ __forceinline__ void store_rows(const Tile &t) const {
    if (C::kOutSlabs > 0 && a_.tma_out && t.row0 + group_ * 64 + 64 <= t.seqlen_q) {
      copy_rows(t);
    } else if (a_.vector_out) {
      store_pieces<true>(t);
    } else {
      store_pieces<false>(t);
    }
  }
  // By the copy engine, a warp's 16 rows at a time: nobody waits for the memory, and no warp for another one.
  __device__ __forceinline__ void copy_rows(const Tile &t) const {
    const uint32_t rows = this->out_tile(group_) + warp_ * 16 * 128;
    // Lane l gives the address of row l % 8 of matrix l / 8: 0 and 1 are rows 0 and 8, 2 and 3 the same of the next eight columns.
    const uint32_t line = rows + (lane_ & 15) * 128, piece = lane_ >> 4;
    constexpr int kColumns = C::kOutSlabs * 64;
#pragma unroll
    for (int first = 0; first < C::kDv; first += kColumns) {
      if (lane_ == 0) bulk_wait_group_read();  // what was here before
      __syncwarp();
#pragma unroll
      for (int column = 0; column < min(kColumns, C::kDv - first); column += 16) {
        const int j = (first + column) / 2;
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) x[n] = pack2<Out>(out_[j + 2 * n] * inverse_[n & 1], out_[j + 2 * n + 1] * inverse_[n & 1]);
        stmatrix_x4(line + column / 64 * 64 * 128 + (((column % 64 / 8 + piece) ^ (lane_ & 7)) << 4), x[0], x[1], x[2], x[3]);
      }
      fence_proxy_async();
      __syncwarp();
      if (lane_ == 0) {
#pragma unroll
        for (int s = 0; s < C::kOutSlabs; ++s)
          tma_store_4d(&a_.out_map, rows + s * 64 * 128, first + s * 64, t.q_row + group_ * 64 + warp_ * 16, t.head_q,
                       t.q_batch);
        bulk_commit_group();
      }
    }
  }
  // ------------------------------------------------------------------------------------------------------------------
  // fp8: parts of out
  // ------------------------------------------------------------------------------------------------------------------

  // The chip keeps 14 bits of a sum of fp8 products and cuts off the rest, so a long sum of one sign loses much. Every kPartChunks chunks
  // out is added to what was put aside before, two numbers an instruction, and begins anew. It lies where its rows will leave from, in
  // bf16, eight numbers a lane and piece; a warp has room of its own.
  static constexpr int kPartChunks = 1536 / kKeys;
  __device__ __forceinline__ uint32_t aside(int piece) const {
    static_assert(!C::kFp8 || C::kOutSlabs * 64 >= C::kDv);
    return this->out_tile(group_) + piece / 4 * 64 * 128 + warp_ * 16 * 128 + piece % 4 * 512 + lane_ * 16;
  }
  // The first chunk of a tile's bulk, in the order of work. Without masks that is its second one.
  static __device__ __forceinline__ int bulk_begin(const Tile &t, int begin, int edges) {
    return edges > begin ? min(t.chunks, max(edges + 1, begin + 2)) : begin + 1;
  }
  // How often out of a tile is put aside.
  __device__ __forceinline__ int parts_of(const Tile &t) const {
    return (t.chunks - 1) / kPartChunks - bulk_begin(t, t.begin[group_], t.edges[group_]) / kPartChunks;
  }
  // `more`: something has been put aside before.
  __device__ __forceinline__ void put_aside(bool more) {
    if (lane_ == 0) bulk_wait_group_read();  // the rows of the tile before
    __syncwarp();
    const auto both = [](float x) { return pack2<__nv_bfloat16>(x, x); };
    const uint32_t factor[2] = {both(exp2_approx(aside_max_[0] - max_[0])), both(exp2_approx(aside_max_[1] - max_[1]))};
#pragma unroll
    for (int piece = 0; piece < C::kDv / 16; ++piece) {
      const float *out = out_ + 8 * piece;
      uint32_t x[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) x[n] = pack2<__nv_bfloat16>(out[2 * n], out[2 * n + 1]);
      if (more) {
        const uint4 before = ld_shared_16(aside(piece));
        const uint32_t words[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
        for (int n = 0; n < 4; ++n) asm("fma.rn.bf16x2 %0, %1, %2, %0;\n" : "+r"(x[n]) : "r"(words[n]), "r"(factor[n & 1]));
      }
      st_shared_16(aside(piece), x[0], x[1], x[2], x[3]);
    }
    aside_max_[0] = max_[0];
    aside_max_[1] = max_[1];
  }
  // The tile has all its out: with the parts of it.
  __device__ __forceinline__ void take_parts(const Tile &t) {
    if (parts_of(t) <= 0) return;
#pragma unroll
    for (int piece = 0; piece < C::kDv / 16; ++piece) {
      const uint4 x = ld_shared_16(aside(piece));
      const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        float *out = out_ + 8 * piece + 2 * n;
        out[0] = fmaf(__uint_as_float(words[n] << 16), aside_max_[n & 1], out[0]);  // made a factor by finish_sums
        out[1] = fmaf(__uint_as_float(words[n] & 0xFFFF0000u), aside_max_[n & 1], out[1]);
      }
    }
  }

  // Sixteen bytes a lane: the four lanes that share a row exchange the pieces of four column blocks.
  template <bool kVectors>
  __device__ __forceinline__ void store_pieces(const Tile &t) const {
    const int quad = lane_ & 3, columns = static_cast<int>(p_.head_dim_v);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row_of(t, r);
      Out *dst = out_at(t, row) + quad * 8;
      const int valid = row < t.seqlen_q ? columns - quad * 8 : 0;
#pragma unroll
      for (int j = 0; j < C::kDv / 8; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x[n] = pack2<Out>(out_[4 * (j + n) + 2 * r] * inverse_[r], out_[4 * (j + n) + 2 * r + 1] * inverse_[r]);
        transpose_quad(x, quad);
        store_elements(dst + j * 8, x, valid - j * 8, kVectors);
      }
    }
  }

  __device__ __forceinline__ float *lse_at(const Tile &t, int row) const {
    return p_.lse.data + t.lse + (row - t.row0) * p_.lse.seq_stride;
  }
  __device__ __forceinline__ Out *out_at(const Tile &t, int row) const {
    return static_cast<Out *>(p_.out.data) + t.out + (row - t.row0) * p_.out.seq_stride;
  }

  __device__ __forceinline__ void store_row(const Tile &t, int row, float lse) const {
    if (p_.lse.data != nullptr && lane_ == 0) *lse_at(t, row) = lse;
    auto *dst = reinterpret_cast<unsigned short *>(out_at(t, row));
    for (int column = lane_; column < p_.head_dim_v; column += 32) dst[column] = 0;
  }
  // Rows of this group that are used but see no key: out = 0, lse = -inf or the sink.
  __device__ __forceinline__ void store_blind_rows(const Tile &t) const {
    const float lse = p_.sink != nullptr ? p_.sink[t.head_q * p_.sink_stride] : -CUDART_INF_F;
    const int row0 = t.row0 + group_ * 64;
    for (int row = max(row0, 0) + warp_; row < min(row0 + 64, t.seqlen_q); row += 4) store_row(t, row, lse);
  }
  // Rows that are not used.
  __device__ __forceinline__ void store_unused_rows(const Tile &t) const {
    for (int row = max(t.row0, t.seqlen_q) + group_ * 4 + warp_; row < t.unused_end; row += C::kGroups * 4)
      store_row(t, row, -CUDART_INF_F);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Between softmax and products
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void scale_out() {
#pragma unroll
    for (int j = 0; j < C::kDv / 2; ++j) out_[j] *= factor_[(j >> 1) & 1];
  }
  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if constexpr (C::kFp8) {
          // Of two 8-column blocks a lane's pairs side by side: the order of keys in the copy of V.
          const int j = 16 * n + 8 * (r / 2) + 2 * (r % 2);
          weights_[n][r] = pack4_e4m3(s_[j], s_[j + 1], s_[j + 4], s_[j + 5]);
        } else {
          weights_[n][r] = pack2<Element>(s_[8 * n + 2 * r], s_[8 * n + 2 * r + 1]);
        }
      }
  }

  int group_;
  float s_[kKeys / 2];
  uint32_t weights_[kSteps][4];
  float out_[C::kDv / 2];
  float max_[2], sum_[2], factor_[2], inverse_[2];
  // fp8: of the tile; and the maximum that what was put aside is relative to.
  float scale_;
  float aside_max_[2] = {0.f, 0.f};
  float out_max_[2];  // the maximum that out is relative to; kept up to date as long as out may have to be mended
};

}  // namespace fa::cuda::sm90
