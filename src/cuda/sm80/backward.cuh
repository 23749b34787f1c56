// SPDX-License-Identifier: Apache-2.0
// Exact attention backward with mma.sync, for sm_80 and newer.
//
// A block of threads owns kKeys keys of one key head, with their dk and dv in registers, and walks over the queries that see them, head
// after head of the GQA group. Scores are computed transposed, keys as rows, so that P and dS leave the accumulators as the left
// operands of the next products:
//
//   shared memory:  K | V | ring of (Q, dO) chunks | [P] dS | ring of (lse, delta)
//
//   for every chunk of kRows queries:
//       S^T  = K Q^T,  dP^T = V dO^T               16 keys a warp
//       P^T  = exp2(S^T - lse),  dS^T = P^T (dP^T - delta)
//       dv  += P^T dO                              dk += dS^T Q
//       dS to shared memory; all warps: dq += dS K, added to the sum over blocks of keys in global memory
//
// With kColumnSplit = 2 (wide heads) two warps share 16 keys: each computes half of the queries of S^T and dP^T, both exchange P and dS
// through shared memory, and each owns half of the columns of dk and dv.
#pragma once

#include <math_constants.h>

#include "core/mask.h"
#include "cuda/common/multiply.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/tile.cuh"
#include "cuda/sm80/backward.h"

namespace fa::cuda::sm80 {

template <typename Element_, int kD_, int kDv_, int kWarps_, int kColumnSplit_, int kRows_, int kStages_, int kMinBlocks_,
          bool kGeneral_>
struct BackwardConfig {
  using Element = Element_;
  static constexpr int kD = kD_, kDv = kDv_, kWarps = kWarps_, kColumnSplit = kColumnSplit_, kRows = kRows_, kStages = kStages_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kKeys = kWarps / kColumnSplit * 16;

  static constexpr int kKBytes = kKeys * kD * 2, kVBytes = kKeys * kDv * 2;
  static constexpr int kQBytes = kRows * kD * 2, kDoBytes = kRows * kDv * 2;
  static constexpr int kScoreBytes = kKeys * kRows * 2;
  static constexpr int kStatBytes = kRows * 4;
  static constexpr int kScorePitch = kRows * 2;
  static constexpr int kSharedBytes =
      kKBytes + kVBytes + kStages * (kQBytes + kDoBytes + 2 * kStatBytes) + kScoreBytes * (kColumnSplit > 1 ? 2 : 1);

  // dq of a chunk: row tiles of 16 x column parts, one piece a warp.
  static constexpr int kDqRowTiles = kRows / 16, kDqColumnParts = kWarps / kDqRowTiles, kDqNt = kD / 8 / kDqColumnParts;
  static_assert(kWarps % kDqRowTiles == 0 && kDqNt % 2 == 0);
};

template <class C>
class Backward {
 public:
  using Element = typename C::Element;
  static constexpr int kSplitRows = C::kRows / C::kColumnSplit;  // queries of S^T and dP^T a warp computes
  static constexpr int kNt = kSplitRows / 8, kDt = C::kD / 8 / C::kColumnSplit, kDvt = C::kDv / 8 / C::kColumnSplit;
  static constexpr int kKSteps = C::kRows / 16;
  using Scores = Accumulator<1, kNt>;  // rows: keys, columns: queries
  using RowWeights = Weights<1, kKSteps>;

  __device__ __forceinline__ Backward(const BackwardParams &params, char *shared)
      : a_(params), b_(params.problem), p_(params.problem.forward), lane_(threadIdx.x & 31), warp_(threadIdx.x >> 5) {
    shared_k_ = smem_address(shared);
    shared_v_ = shared_k_ + C::kKBytes;
    shared_q_ = shared_v_ + C::kVBytes;
    shared_do_ = shared_q_ + C::kStages * C::kQBytes;
    shared_ds_ = shared_do_ + C::kStages * C::kDoBytes;
    shared_p_ = shared_ds_ + C::kScoreBytes;  // only with kColumnSplit > 1
    shared_stats_ = shared_ds_ + C::kScoreBytes * (C::kColumnSplit > 1 ? 2 : 1);
    key_group_ = warp_ / C::kColumnSplit;
    column_part_ = warp_ % C::kColumnSplit;
  }

  __device__ __forceinline__ void run() {
    find_block();
    clear<1, kDt>(dk_);
    clear<1, kDvt>(dv_);
    if (key0_ < seqlen_k_) {
      load_tile<C::kKeys, C::kD, C::kThreads>(shared_k_, source(p_.k, k_start_, seqlen_k_, head_k_, p_.head_dim, a_.vector_k),
                                              key0_);
      load_tile<C::kKeys, C::kDv, C::kThreads>(shared_v_,
                                               source(p_.v, k_start_, seqlen_k_, head_k_, p_.head_dim_v, a_.vector_v), key0_);
      cp_async_commit();
      for (int g = 0; g < static_cast<int>(p_.group); ++g) {
        head_q_ = head_k_ * static_cast<int>(p_.group) + g;
        walk();
      }
    }
    store(b_.dk, dk_, static_cast<int>(p_.head_dim), p_.softmax_scale);
    store(b_.dv, dv_, static_cast<int>(p_.head_dim_v), p_.dropout.keep_scale);
    store_unused_keys();
  }

 private:
  // ------------------------------------------------------------------------------------------------------------------
  // Which keys, which queries
  // ------------------------------------------------------------------------------------------------------------------

  // Blocks of keys in ascending order, slowest: with a causal mask the longest run first, and blocks that wait for their turn to add to dq
  // always wait for one that started before them.
  __device__ __forceinline__ void find_block() {
    const int heads = static_cast<int>(p_.batch * p_.heads_k);
    key_block_ = blockIdx.x / heads;
    const int head = blockIdx.x % heads;
    batch_ = head / static_cast<int>(p_.heads_k);
    head_k_ = head % static_cast<int>(p_.heads_k);
    const Sequence q = sequence_of(p_.q_lengths, batch_), k = sequence_of(p_.k_lengths, batch_);
    q_start_ = q.start;
    k_start_ = k.start;
    seqlen_q_ = static_cast<int>(q.len);
    seqlen_k_ = static_cast<int>(k.len);
    slot_keys_ = static_cast<int>(k.slot);
    key0_ = key_block_ * C::kKeys;
  }

  __device__ __forceinline__ RowSource<Element> source(const Operand &t, int64_t start, int rows, int head, int64_t columns,
                                                       bool vectors) const {
    RowSource<Element> s{};
    s.base = static_cast<const Element *>(t.data) + batch_ * t.batch_stride + start * t.seq_stride + head * t.head_stride;
    s.row_stride = t.seq_stride;
    s.rows = rows;
    s.columns = static_cast<int>(columns);
    s.vectors = vectors;
    return s;
  }

  // Index of a chunk in the workspace.
  __device__ __forceinline__ int64_t chunk_at(int chunk) const {
    return (int64_t{batch_} * p_.heads_q + head_q_) * a_.row_chunks + chunk;
  }

  __device__ __forceinline__ Range block_keys() const { return {key0_, min(key0_ + C::kKeys, seqlen_k_)}; }

  // ------------------------------------------------------------------------------------------------------------------
  // The walk over the queries of one head
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void walk() {
    const Range queries = visible_queries(p_.band, seqlen_q_, seqlen_k_, block_keys());
    if (queries.empty()) return;
    const int begin = static_cast<int>(queries.begin) / C::kRows,
              end = (static_cast<int>(queries.end) + C::kRows - 1) / C::kRows;
    const RowSource<Element> q = source(p_.q, q_start_, seqlen_q_, head_q_, p_.head_dim, a_.vector_q);
    const RowSource<Element> dout = source(b_.dout, q_start_, seqlen_q_, head_q_, p_.head_dim_v, a_.vector_dout);
    __syncthreads();  // the previous head's chunks have been read
    if constexpr (C::kStages == 2) fetch(q, dout, begin, 0);
    int slot = 0;
#pragma unroll 1
    for (int chunk = begin; chunk < end; ++chunk) {
      if constexpr (C::kStages == 1) fetch(q, dout, chunk, 0);
      cp_async_wait<0>();
      __syncthreads();  // the chunk is here; nobody reads the other slot or the previous dS any more
      // Where some pair may be masked, NaN and Inf in dout, q and k need care (multiply.cuh).
      const Range rows{chunk * C::kRows, min((chunk + 1) * C::kRows, seqlen_q_)};
      const Range interior = interior_keys(p_.band, seqlen_q_, seqlen_k_, rows);
      const bool masked = C::kGeneral || key0_ < interior.begin || key0_ + C::kKeys > interior.end;
      bool careful = false;
      if (masked) {
        careful = __syncthreads_or(share_has_nonfinite<Element, C::kQBytes, C::kThreads>(shared_q_ + slot * C::kQBytes) |
                                   share_has_nonfinite<Element, C::kDoBytes, C::kThreads>(shared_do_ + slot * C::kDoBytes) |
                                   share_has_nonfinite<Element, C::kKBytes, C::kThreads>(shared_k_));
      }
      if constexpr (C::kStages == 2) {
        if (chunk + 1 < end) fetch(q, dout, chunk + 1, slot ^ 1);
      }
      step(chunk, slot, masked, careful);
      if constexpr (C::kStages == 2) {
        slot ^= 1;
      } else {
        __syncthreads();
      }
    }
  }

  __device__ __forceinline__ void fetch(const RowSource<Element> &q, const RowSource<Element> &dout, int chunk,
                                        int slot) const {
    load_tile<C::kRows, C::kD, C::kThreads>(shared_q_ + slot * C::kQBytes, q, chunk * C::kRows);
    load_tile<C::kRows, C::kDv, C::kThreads>(shared_do_ + slot * C::kDoBytes, dout, chunk * C::kRows);
    const int64_t at = chunk_at(chunk) * C::kRows;
    constexpr int kVectors = C::kRows / 4;
    if (threadIdx.x < 2 * kVectors) {
      const int which = threadIdx.x / kVectors, vector = threadIdx.x % kVectors;
      const float *src = (which == 0 ? a_.row_lse : a_.row_delta) + at + vector * 4;
      cp_async_16(shared_stats_ + (slot * 2 + which) * C::kStatBytes + vector * 16, src);
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void step(int chunk, int slot, bool masked, bool careful) {
    const int row0 = chunk * C::kRows;
    const uint32_t q = shared_q_ + slot * C::kQBytes, dout = shared_do_ + slot * C::kDoBytes;
    const uint32_t stats = shared_stats_ + slot * 2 * C::kStatBytes;
    Scores s, dp;
    multiply_transposed<Element, C::kD, 1, kNt>(s, shared_k_, key_group_ * 16, q, column_part_ * kSplitRows);
    multiply_transposed<Element, C::kDv, 1, kNt>(dp, shared_v_, key_group_ * 16, dout, column_part_ * kSplitRows);
    Weights<1, kNt / 2> pw, dsw;
    if (masked) {
      weights<true>(s, dp, pw, dsw, row0, stats);
    } else {
      weights<false>(s, dp, pw, dsw, row0, stats);
    }
    exchange(shared_ds_, dsw);
    if constexpr (C::kColumnSplit > 1) {
      exchange(shared_p_, pw);
      __syncthreads();
    }
    accumulate<kDvt, C::kDv * 2>(dv_, pw, shared_p_, dout, careful);
    accumulate<kDt, C::kD * 2>(dk_, dsw, shared_ds_, q, careful);
    if (b_.dq.data != nullptr) {
      if constexpr (C::kColumnSplit == 1) __syncthreads();  // every warp's dS is there
      add_dq(chunk, careful);
    }
  }

  // acc += W T. With one warp to 16 keys the weights are its own, otherwise they come from shared memory.
  template <int kTiles, int kPitch>
  __device__ __forceinline__ void accumulate(Accumulator<1, kTiles> &acc, const Weights<1, kNt / 2> &own, uint32_t shared,
                                             uint32_t tile, bool careful) const {
    const int first = column_part_ * kTiles / 2;
    if constexpr (C::kColumnSplit == 1) {
      multiply<kTiles, kPitch>(acc, own, tile, first, careful);
    } else {
      RowWeights all;
#pragma unroll
      for (int k = 0; k < kKSteps; ++k) {
        ldmatrix_x4(all[0][k],
                    advance<C::kScorePitch>(shared + swizzled<C::kScorePitch>(key_group_ * 16 + (lane_ & 15), lane_ >> 4), k));
      }
      multiply<kTiles, kPitch>(acc, all, tile, first, careful);
    }
  }
  template <int kTiles, int kPitch>
  static __device__ __forceinline__ void multiply(Accumulator<1, kTiles> &acc, const RowWeights &w, uint32_t tile, int first,
                                                  bool careful) {
    if (careful) {
      multiply_add_exactly<Element, kPitch, 1, kKSteps, kTiles>(acc, w, tile, first);
    } else {
      multiply_add<Element, kPitch, 1, kKSteps, kTiles>(acc, w, tile, first);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // P and dS
  // ------------------------------------------------------------------------------------------------------------------

  // Rounds P (for dv) and dS (for dk and dq). Masked pairs become kMaskedWeight in both.
  template <bool kMasked>
  __device__ __forceinline__ void weights(Scores &s, Scores &dp, Weights<1, kNt / 2> &pw, Weights<1, kNt / 2> &dsw, int row0,
                                          uint32_t stats) const {
    const float c = C::kGeneral ? 1.f : p_.softmax_scale * kLog2e;
#pragma unroll
    for (int jj = 0; jj < kNt / 2; ++jj) {
      float p[2][4], ds[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = column_part_ * kSplitRows + 16 * jj + 8 * half + 2 * (lane_ & 3);  // of the chunk; and the next one
        const float2 lse = ld_shared_float2(stats + column * 4);
        const float2 delta = ld_shared_float2(stats + C::kStatBytes + column * 4);
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float raw = s[0][2 * jj + half][r];
          const int row = row0 + column + (r & 1), key = key0_ + key_group_ * 16 + (lane_ >> 2) + 8 * (r >> 1);
          float logit = raw, slope = 1.f, kept = 1.f;
          bool visible = true;
          if constexpr (C::kGeneral) {
            visible = is_visible(row, key) && general_score(raw, row, key, logit, slope, kept);
          } else if constexpr (kMasked) {
            visible = is_visible(row, key);
          }
          const float weight = exp2_approx(fmaf(logit, c, -((r & 1) ? lse.y : lse.x)));
          // (kept dP) - delta: dropped weights pass no gradient through P V, but still through the sum.
          const float d = weight * (dp[0][2 * jj + half][r] * kept - ((r & 1) ? delta.y : delta.x)) * slope;
          p[half][r] = visible ? (kept > 0.f ? weight : 0.f) : kMaskedWeight;
          ds[half][r] = visible ? (kMasked ? d + 0.f : d) : kMaskedWeight;  // + 0: a visible -0 is no mask
        }
      }
      pack(pw, jj, p);
      pack(dsw, jj, ds);
    }
  }

  static __device__ __forceinline__ void pack(Weights<1, kNt / 2> &w, int k, const float (&x)[2][4]) {
    w[0][k][0] = pack2<Element>(x[0][0], x[0][1]);
    w[0][k][1] = pack2<Element>(x[0][2], x[0][3]);
    w[0][k][2] = pack2<Element>(x[1][0], x[1][1]);
    w[0][k][3] = pack2<Element>(x[1][2], x[1][3]);
  }

  __device__ __forceinline__ bool is_visible(int row, int key) const {
    if (row >= seqlen_q_) return false;
    const Range keys = visible_keys(p_.band, seqlen_q_, seqlen_k_, static_cast<int64_t>(row));
    return key >= keys.begin && key < keys.end;
  }

  // Logit in base 2, its derivative with respect to softmax_scale * raw, and the factor dropout puts on the weight. False if masked.
  __device__ __forceinline__ bool general_score(float raw, int row, int key, float &logit, float &slope, float &kept) const {
    if (p_.block_mask.data != nullptr && !p_.block_mask.visible(batch_, head_q_, row, key)) return false;
    const ScoreTerms terms(p_, batch_, head_q_, seqlen_q_, seqlen_k_);
    logit = terms.logit(p_, raw, row, key);
    if (logit == -CUDART_INF_F) return false;
    if (p_.softcap > 0) {
      const float t = tanhf(raw * terms.scale);
      slope = 1.f - t * t;
    }
    if (p_.dropout.threshold > 0) {
      const DropoutKey dropout = load_dropout_key(p_.dropout);
      const uint32_t bh = static_cast<uint32_t>(batch_ * static_cast<int>(p_.heads_q) + head_q_);
      kept = dropout_bits(dropout, bh, row, key) < p_.dropout.threshold ? 0.f : p_.dropout.keep_scale;
    }
    return true;
  }

  static __device__ __forceinline__ float2 ld_shared_float2(uint32_t address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
  }

  // Writes this warp's 16 keys x its queries into the (keys x queries) tile all warps share.
  __device__ __forceinline__ void exchange(uint32_t tile, const Weights<1, kNt / 2> &w) const {
    const int key = key_group_ * 16 + (lane_ >> 2);
#pragma unroll
    for (int k = 0; k < kNt / 2; ++k)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int chunk16 = (column_part_ * kSplitRows) / 8 + 2 * k + (r >> 1);
        st_shared_4(tile + swizzled<C::kScorePitch>(key + 8 * (r & 1), chunk16) + (lane_ & 3) * 4, w[0][k][r]);
      }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dq
  // ------------------------------------------------------------------------------------------------------------------

  // This warp's 16 rows x its columns of dS K, added to the sum of all blocks of keys.
  __device__ __forceinline__ void add_dq(int chunk, bool careful) const {
    constexpr int kTiles = C::kDqNt, kSteps = C::kKeys / 16;
    const int row_tile = warp_ % C::kDqRowTiles, part = warp_ / C::kDqRowTiles, first = part * kTiles / 2;
    Accumulator<1, kTiles> dq;
    clear<1, kTiles>(dq);
    if (careful) {
      add_dq_exactly(dq, row_tile, first);
    } else {
      // dS lies as (keys, queries): transposing loads give the rows of dq.
      Weights<1, kSteps> w;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int key = k * 16 + (lane_ & 7) + ((lane_ >> 4) << 3);
        ldmatrix_x4_trans(w[0][k], shared_ds_ + swizzled<C::kScorePitch>(key, row_tile * 2 + ((lane_ >> 3) & 1)));
      }
      multiply_add<Element, C::kD * 2, 1, kSteps, kTiles>(dq, w, shared_k_, first);
    }

    float *sum = a_.dq_sum + chunk_at(chunk) * (C::kRows * C::kD) + warp_ * (16 * kTiles * 8) + lane_ * 4;
    if (a_.deterministic) await_turn(chunk);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) add_4(sum + j * 128, dq[0][j]);
    if (a_.deterministic) pass_turn(chunk);
  }

  __device__ __forceinline__ void add_dq_exactly(Accumulator<1, C::kDqNt> &dq, int row_tile, int first) const {
#pragma unroll 1
    for (int key = 0; key < C::kKeys; ++key) {
      uint32_t bits[1][2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = row_tile * 16 + (lane_ >> 2) + 8 * r;
        const uint32_t pair = ld_shared_4(shared_ds_ + swizzled<C::kScorePitch>(key, row / 8) + (row % 8 / 2) * 4);
        bits[0][r] = (row & 1) ? pair >> 16 : pair & 0xFFFFu;
      }
      add_row_exactly<Element, C::kD * 2, 1, C::kDqNt>(dq, bits, shared_k_, key, first);
    }
  }

  static __device__ __forceinline__ void add_4(float *address, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
#else
#pragma unroll
    for (int r = 0; r < 4; ++r) atomicAdd(address + r, x[r]);
#endif
  }

  // Blocks of keys that add to the chunk, in ascending order: this one's place among them.
  __device__ __forceinline__ int place(int chunk) const {
    const Range rows{chunk * C::kRows, min((chunk + 1) * C::kRows, seqlen_q_)};
    return key_block_ - static_cast<int>(visible_keys(p_.band, seqlen_q_, seqlen_k_, rows).begin) / C::kKeys;
  }
  __device__ __forceinline__ void await_turn(int chunk) const {
    if (threadIdx.x == 0) {
      const int32_t *turn = a_.turn + chunk_at(chunk);
      const int mine = place(chunk);
      int now;
      do {
        asm volatile("ld.global.acquire.gpu.b32 %0, [%1];\n" : "=r"(now) : "l"(turn) : "memory");
      } while (now != mine);
    }
    __syncthreads();
  }
  __device__ __forceinline__ void pass_turn(int chunk) const {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("red.global.release.gpu.add.s32 [%0], 1;\n" ::"l"(a_.turn + chunk_at(chunk)) : "memory");
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dk and dv
  // ------------------------------------------------------------------------------------------------------------------

  template <int kTiles>
  __device__ __forceinline__ void store(const Operand &t, const Accumulator<1, kTiles> &acc, int columns, float scale) const {
    if (t.data == nullptr) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = key0_ + key_group_ * 16 + (lane_ >> 2) + 8 * r;
      if (key >= seqlen_k_) continue;
      Element *row = key_row(t, key);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const int column = (column_part_ * kTiles + j) * 8 + 2 * (lane_ & 3);
        const uint32_t pair = pack2<Element>(acc[0][j][2 * r] * scale, acc[0][j][2 * r + 1] * scale);
        if (column + 1 < columns && (reinterpret_cast<uintptr_t>(row + column) & 3) == 0) {
          *reinterpret_cast<uint32_t *>(row + column) = pair;
        } else {
          auto *bits = reinterpret_cast<unsigned short *>(row);
          if (column < columns) bits[column] = static_cast<unsigned short>(pair);
          if (column + 1 < columns) bits[column + 1] = static_cast<unsigned short>(pair >> 16);
        }
      }
    }
  }

  __device__ __forceinline__ Element *key_row(const Operand &t, int key) const {
    return static_cast<Element *>(t.data) + batch_ * t.batch_stride + (k_start_ + key) * t.seq_stride + head_k_ * t.head_stride;
  }

  // Keys of the slot that are not used: zero. The last block also owns what lies beyond the grid.
  __device__ __forceinline__ void store_unused_keys() const {
    const int end = key_block_ == a_.key_blocks - 1 ? slot_keys_ : min(key0_ + C::kKeys, slot_keys_);
    for (int key = max(key0_, seqlen_k_) + warp_; key < end; key += C::kWarps) {
      if (b_.dk.data != nullptr) zero_row(key_row(b_.dk, key), static_cast<int>(p_.head_dim));
      if (b_.dv.data != nullptr) zero_row(key_row(b_.dv, key), static_cast<int>(p_.head_dim_v));
    }
  }
  __device__ __forceinline__ void zero_row(Element *row, int columns) const {
    for (int column = lane_; column < columns; column += 32) reinterpret_cast<unsigned short *>(row)[column] = 0;
  }

  const BackwardParams &a_;
  const BackwardProblem &b_;
  const Problem &p_;
  uint32_t shared_k_, shared_v_, shared_q_, shared_do_, shared_ds_, shared_p_, shared_stats_;
  const int lane_, warp_;
  int key_group_, column_part_;  // of this warp: its 16 keys, its share of the columns

  int batch_, head_k_, head_q_;
  int64_t q_start_, k_start_;
  int seqlen_q_, seqlen_k_, slot_keys_;
  int key_block_, key0_;

  Accumulator<1, kDt> dk_;
  Accumulator<1, kDvt> dv_;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kMinBlocks) backward(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(1024) char shared[];
  Backward<C>(params, shared).run();
}

// dq = softmax_scale * dq_sum, from the order of the accumulators to the rows of the tensor; zero for rows that are not used.
template <class C>
__global__ void __launch_bounds__(C::kThreads) backward_dq(const __grid_constant__ BackwardParams a) {
  using Element = typename C::Element;
  const Problem &p = a.problem.forward;
  const Operand &t = a.problem.dq;
  const int chunk = blockIdx.x % a.row_chunks, head = blockIdx.x / a.row_chunks % static_cast<int>(p.heads_q);
  const int batch = blockIdx.x / a.row_chunks / static_cast<int>(p.heads_q), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Sequence q = sequence_of(p.q_lengths, batch);
  const int row_tile = warp % C::kDqRowTiles, part = warp / C::kDqRowTiles;
  const float *sum = a.dq_sum + int64_t{blockIdx.x} * (C::kRows * C::kD) + warp * (16 * C::kDqNt * 8) + lane * 4;
  Element *base = static_cast<Element *>(t.data) + batch * t.batch_stride + q.start * t.seq_stride + head * t.head_stride;
  const auto store = [&](int row, int column, float x) {
    if (column < p.head_dim)
      reinterpret_cast<unsigned short *>(base + row * t.seq_stride)[column] =
          static_cast<unsigned short>(pack2<Element>(x, 0.f));
  };
#pragma unroll
  for (int j = 0; j < C::kDqNt; ++j) {
    const float4 x = *reinterpret_cast<const float4 *>(sum + j * 128);
    const int column = (part * C::kDqNt + j) * 8 + 2 * (lane & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = chunk * C::kRows + row_tile * 16 + (lane >> 2) + 8 * r;
      if (row >= q.slot) continue;
      const bool used = row < q.len;
      store(row, column, used ? (r == 0 ? x.x : x.z) * p.softmax_scale : 0.f);
      store(row, column + 1, used ? (r == 0 ? x.y : x.w) * p.softmax_scale : 0.f);
    }
  }
  // The last chunk also owns the rows of the slot beyond the grid.
  if (chunk == a.row_chunks - 1) {
    for (int row = a.row_chunks * C::kRows + warp; row < q.slot; row += C::kWarps)
      for (int column = lane; column < p.head_dim; column += 32) store(row, column, 0.f);
  }
}

}  // namespace fa::cuda::sm80
