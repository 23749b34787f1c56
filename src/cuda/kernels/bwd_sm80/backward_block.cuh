// SPDX-License-Identifier: Apache-2.0 What the backward kernels have in common: how a block of threads is cut into warps, which
// keys and queries it works on, the sum for dq, and how dk and dv leave.
#pragma once

#include "core/mask.h"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/kernels/bwd_sm80/backward.h"
#include "cuda/kernels/bwd_sm80/backward_scores.cuh"

namespace fa::cuda::sm80 {

template <typename Element_, int kD_, int kDv_, int kWarps_, int kRoles_, int kQueryParts_, int kKeyTiles_, int kColumnParts_,
          int kRows_, int kStages_, int kMinBlocks_, ScoreSet kScores_>
struct BackwardConfig {
  using Element = Element_;
  static constexpr int kD = kD_, kDv = kDv_, kWarps = kWarps_, kRows = kRows_, kStages = kStages_, kMinBlocks = kMinBlocks_;
  static constexpr int kRoles = kRoles_, kQueryParts = kQueryParts_, kKeyTiles = kKeyTiles_, kColumnParts = kColumnParts_;
  static constexpr ScoreSet kScores = kScores_;
  static constexpr bool kGeneral = kScores != kPlain, kStagesBias = stages_bias(kScores);
  static constexpr bool has(ScoreSet terms) { return (kScores & terms) != 0; }
  static constexpr int kThreads = kWarps * 32, kRoleWarps = kWarps / kRoles, kRoleThreads = kRoleWarps * 32;
  static constexpr int kKeys = kRoleWarps / kQueryParts * kKeyTiles * 16;
  static constexpr bool kExchange = kRoles > 1 || kQueryParts > 1;  // P goes through shared memory, like dS

  // A warp's tile of S^T or dP^T: kKeyTiles * 16 keys x kTileRows queries, kTileSteps of them a chunk.
  static constexpr int kPartRows = kRows / kQueryParts, kTileRows = kRoles == 1 && kPartRows > 32 ? 32 : kPartRows;
  static constexpr int kTileSteps = kPartRows / kTileRows, kNt = kTileRows / 8;
  // Of dk and dv: kGradTiles * 16 keys x its columns.
  static constexpr int kGradTiles = kKeys / 16 / (kRoleWarps / kColumnParts);
  static constexpr int kDt = kD / 8 / kColumnParts, kDvt = kDv / 8 / kColumnParts;
  static_assert(kExchange || (kColumnParts == 1 && kGradTiles == kKeyTiles));
  // Of dq: 32 rows x its columns.
  static constexpr int kDqTiles = 2, kDqRowParts = kRows / 32, kDqColumnParts = kWarps / kDqRowParts;
  static constexpr int kDqNt = kD / 8 / kDqColumnParts;
  static_assert(kRows % 32 == 0 && kWarps % kDqRowParts == 0 && kDqNt % 2 == 0);

  static constexpr int kKBytes = kKeys * kD * 2, kVBytes = kKeys * kDv * 2;
  static constexpr int kQBytes = kRows * kD * 2, kDoBytes = kRows * kDv * 2, kStatBytes = kRows * 4;
  static constexpr int kScorePitch = kRows * 2, kScoreBytes = kKeys * kScorePitch, kScoreBuffers = kRoles;
  static constexpr int kBiasPitch = kKeys * 2, kBiasBytes = kStagesBias ? kRows * kBiasPitch : 0;
  static constexpr int kBarrierBytes = kRoles > 1 ? kRoles * 8 : 0;
  static constexpr int kSharedBytes = kKBytes + kVBytes + kStages * (kQBytes + kDoBytes + 2 * kStatBytes) +
                                      kScoreBuffers * kScoreBytes * (kExchange ? 2 : 1) + kBiasBytes + kBarrierBytes;
};

template <class C>
class BackwardBlock {
 protected:
  using Element = typename C::Element;

  //   shared memory:  K | V | ring of Q | ring of dO | dS | [P] | ring of lse | ring of delta | [bias] | [barriers]
  __device__ __forceinline__ BackwardBlock(const BackwardParams &params, char *shared)
      : a_(params), b_(params.problem), p_(params.problem.forward), lane_(threadIdx.x & 31), warp_(uniform(threadIdx.x >> 5)) {
    shared_k_ = smem_address(shared);
    shared_v_ = shared_k_ + C::kKBytes;
    shared_q_ = shared_v_ + C::kVBytes;
    shared_do_ = shared_q_ + C::kStages * C::kQBytes;
    shared_ds_ = shared_do_ + C::kStages * C::kDoBytes;
    shared_p_ = shared_ds_ + C::kScoreBuffers * C::kScoreBytes;  // only with kExchange
    shared_lse_ = shared_ds_ + C::kScoreBuffers * C::kScoreBytes * (C::kExchange ? 2 : 1);
    shared_delta_ = shared_lse_ + C::kStages * C::kStatBytes;
    find_block();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Which keys, which queries
  // ------------------------------------------------------------------------------------------------------------------

  // Sections of as many heads as the L2 cache holds; in a section blocks of keys in ascending order, slowest: with a causal
  // mask the longest walks first, and blocks that wait for their turn to add to dq always wait for one that started before
  // them.
  __device__ __forceinline__ void find_block() {
    const L2HeadOrder::Place place = a_.order.at(static_cast<int>(blockIdx.x));
    batch_ = uniform(place.batch);
    head_k_ = uniform(place.head);
    const Sequence q = sequence_of(p_.q_lengths, batch_), k = sequence_of(p_.k_lengths, batch_);
    q_start_ = q.start;
    key0_ = static_cast<int>(uniform(place.row_block)) * C::kKeys;
    band_ = BandLimits(p_.band, static_cast<int>(q.len), static_cast<int>(k.len));
  }

  // Not kept: the registers belong to the accumulators.
  __device__ __forceinline__ Sequence keys() const { return sequence_of(p_.k_lengths, batch_); }

  // Index of a chunk in the workspace.
  __device__ __forceinline__ int64_t chunk_at(int chunk) const {
    return (int64_t{batch_} * p_.heads_q + head_q_) * a_.row_chunks + opaque(chunk);
  }

  // Whether the band or the sequence masks some pair of a chunk. There NaN and Inf in dout, q and k need care (multiply.cuh).
  __device__ __forceinline__ bool masked(int chunk) const {
    return !band_.all(chunk * C::kRows, min(C::kRows, band_.seqlen_q - chunk * C::kRows), key0_, C::kKeys);
  }

  __device__ __forceinline__ void fetch_k() const {
    load_tile<C::kKeys, C::kD, C::kThreads>(
        shared_k_, row_source<Element>(p_.k, batch_, keys().start, band_.seqlen_k, head_k_, p_.head_dim, a_.vector_k), key0_);
  }
  __device__ __forceinline__ void fetch_v() const {
    load_tile<C::kKeys, C::kDv, C::kThreads>(
        shared_v_, row_source<Element>(p_.v, batch_, keys().start, band_.seqlen_k, head_k_, p_.head_dim_v, a_.vector_v), key0_);
  }
  // This thread's share of the answer whether K holds NaN or Inf, if any chunk will ask (multiply.cuh).
  __device__ __forceinline__ bool k_has_nonfinite() const {
    const int row0 = begin_ * C::kRows;
    return (C::kGeneral || !band_.all(row0, min(end_ * C::kRows, band_.seqlen_q) - row0, key0_, C::kKeys)) &&
           loaded_part_has_nonfinite<Element, C::kKeys, C::kD, C::kThreads>(shared_k_, threadIdx.x);
  }

  // The chunks of the queries of a head that see some key of the block. They are walked from the last one down: under a causal
  // mask the blocks of a head then start together, and in deterministic mode none waits for another's whole walk.
  __device__ __forceinline__ bool find_chunks(int head_q) {
    head_q_ = head_q;
    const Range queries =
        visible_queries(p_.band, band_.seqlen_q, band_.seqlen_k, Range{key0_, min(key0_ + C::kKeys, band_.seqlen_k)});
    begin_ = static_cast<int>(queries.begin) / C::kRows;
    end_ = (static_cast<int>(queries.end) + C::kRows - 1) / C::kRows;
    return !queries.empty();
  }

  // One chunk of q and its lse, or of dout and its delta, by `threads` threads of which this is number `thread`.
  template <int kThreads>
  __device__ __forceinline__ void fetch_q(int chunk, int slot, int thread) const {
    thread = opaque(thread);
    load_tile<C::kRows, C::kD, kThreads>(
        shared_q_ + slot * C::kQBytes,
        row_source<Element>(p_.q, opaque(batch_), q_start_, band_.seqlen_q, head_q_, p_.head_dim, a_.vector_q),
        chunk * C::kRows, thread);
    fetch_stat(shared_lse_ + slot * C::kStatBytes, a_.row_lse, chunk, thread);
  }
  template <int kThreads>
  __device__ __forceinline__ void fetch_dout(int chunk, int slot, int thread) const {
    thread = opaque(thread);
    load_tile<C::kRows, C::kDv, kThreads>(
        shared_do_ + slot * C::kDoBytes,
        row_source<Element>(b_.dout, opaque(batch_), q_start_, band_.seqlen_q, head_q_, p_.head_dim_v, a_.vector_dout),
        chunk * C::kRows, thread);
    fetch_stat(shared_delta_ + slot * C::kStatBytes, a_.row_delta, chunk, thread);
  }
  __device__ __forceinline__ void fetch_stat(uint32_t dst, const float *stat, int chunk, int thread) const {
    thread = opaque(thread);
    if (thread < C::kRows / 4) cp_async_16(dst + thread * 16, stat + chunk_at(chunk) * C::kRows + thread * 4);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dq
  // ------------------------------------------------------------------------------------------------------------------

  // This warp's part of dS K, from dS as (keys x queries), added to the sum of all blocks of keys. Nothing is added if all
  // pairs are masked.
  __device__ __forceinline__ void add_dq(int chunk, uint32_t ds, bool any, bool careful) {
    if (b_.dq.data == nullptr) return;
    Accumulator<C::kDqTiles, C::kDqNt> dq;
    int now = 0;
    if (a_.deterministic) now = turn(chunk);
    if (any) {
      clear<C::kDqTiles, C::kDqNt>(dq);
      const int warp = C::kRoles == 1 ? opaque(warp_) : warp_;
      multiply<Major::mn, C::kD * 2, C::kKeys / 16>(dq, ds, warp % C::kDqRowParts * 32, shared_k_,
                                                    warp / C::kDqRowParts * C::kDqNt * 8, careful);
    }
    if (a_.deterministic) await_turn(chunk, now);
    if (any) add(chunk, dq);
    turn_held_ = chunk;
  }

  // acc += A T, A: weights in shared memory, which lie as (keys x queries).
  template <Major kA, int kPitch, int kSteps, int kMt, int kTiles>
  static __device__ __forceinline__ void multiply(Accumulator<kMt, kTiles> &acc, uint32_t weights, int first_row, uint32_t tile,
                                                  int first_column, bool careful) {
    if (careful) {
      mma_ss_nan_safe<Element, kA, C::kScorePitch, kPitch, kSteps>(acc, weights, first_row, tile, first_column);
    } else {
      mma_ss<Element, kA, C::kScorePitch, Major::mn, kPitch, kSteps>(acc, weights, first_row, tile, first_column);
    }
  }

  // A chunk of the sum is a sequence of 16 x 8 tiles, [warp][i][j], each four numbers a lane as the accumulators hold them.
  __device__ __forceinline__ void add(int chunk, const Accumulator<C::kDqTiles, C::kDqNt> &dq) const {
    float *sum = a_.dq_sum + chunk_at(chunk) * (C::kRows * C::kD) + warp_ * (C::kDqTiles * C::kDqNt * 128) + lane_ * 4;
#pragma unroll
    for (int i = 0; i < C::kDqTiles; ++i)
#pragma unroll
      for (int j = 0; j < C::kDqNt; ++j) add_4(sum + (i * C::kDqNt + j) * 128, dq[i][j]);
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

  // In deterministic mode blocks of keys add to a chunk in ascending order, each warp for itself: the same warp of every block
  // adds to the same part of the sum. The block's place among them:
  __device__ __forceinline__ int place(int chunk) const {
    return key0_ / C::kKeys - max(0, chunk * C::kRows + band_.first) / C::kKeys;
  }
  __device__ __forceinline__ int32_t *turn_of(int chunk) const { return a_.turn + chunk_at(chunk) * kTurnsPerChunk + warp_; }

  // Whose turn it is. No acquire: what follows are additions at the L2 cache, sent after this number has come back from there.
  __device__ __forceinline__ int turn(int chunk) const { return load_relaxed(turn_of(chunk)); }
  // A warp passes on the turn it holds some products after its additions, when they have arrived and the release costs little; not
  // a whole chunk after, because under a causal mask each block of keys is that far behind the one before.
  __device__ __forceinline__ void await_turn(int chunk, int now) {
    pass_turn();
    while (now != place(chunk)) now = turn(chunk);
    __syncwarp();
  }
  __device__ __forceinline__ void pass_turn() {
    if (!a_.deterministic || turn_held_ < 0) return;
    __syncwarp();
    if (lane_ == 0) count_released(turn_of(turn_held_));
    turn_held_ = -1;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dk and dv
  // ------------------------------------------------------------------------------------------------------------------

  // From the accumulators of the `group_warp`-th of the warps that share them to a tile of shared memory, rounded.
  template <int kColumns, int kTiles>
  __device__ __forceinline__ void put_gradient(uint32_t tile, const Accumulator<C::kGradTiles, kTiles> &acc, int group_warp,
                                               float scale) const {
    constexpr int kPitch = kColumns * 2;
    const int first_key = group_warp / C::kColumnParts * C::kGradTiles * 16, part = group_warp % C::kColumnParts;
#pragma unroll
    for (int i = 0; i < C::kGradTiles; ++i)
#pragma unroll
      for (int k = 0; k < kTiles / 2; ++k) {
        uint32_t w[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float(&x)[4] = acc[i][2 * k + n / 2];
          w[n] = pack2<Element>(x[2 * (n & 1)] * scale, x[2 * (n & 1) + 1] * scale);
        }
        stmatrix_x4(tile + swizzled<kPitch>(first_key + 16 * i + (lane_ & 15), part * kTiles + 2 * k + (lane_ >> 4)), w);
      }
  }

  // From there to the rows of the tensor, by kThreads threads of which this is number `thread`. Keys of the slot that are not
  // used get zero; the last block also owns those beyond the grid.
  template <int kColumns, int kThreads>
  __device__ __forceinline__ void store(const Operand &t, uint32_t tile, int64_t columns, int thread) const {
    if (t.data == nullptr) return;
    constexpr int kChunks = kColumns / 8;
    const bool vectors = has_16_byte_rows(t, columns);
    const Sequence k = keys();
    const int slot = static_cast<int>(k.slot),
              end = key0_ / C::kKeys == a_.order.row_blocks - 1 ? slot : min(key0_ + C::kKeys, slot);
    Element *base = static_cast<Element *>(t.data) + batch_ * t.batch_stride + k.start * t.seq_stride + head_k_ * t.head_stride;
    if (vectors && key0_ + C::kKeys <= min(end, band_.seqlen_k)) {  // the usual block: every key is there
      constexpr int kStep = kThreads / kChunks;
      const int first = thread / kChunks, chunk = thread % kChunks;
      if (chunk * 8 >= columns) return;
      Element *row = base + (key0_ + first) * t.seq_stride + chunk * 8;
#pragma unroll 4
      for (int n = 0; n < C::kKeys; n += kStep)
        *reinterpret_cast<uint4 *>(row + n * t.seq_stride) = ld_shared_16(tile + swizzled<kColumns * 2>(first + n, chunk));
      if (end == key0_ + C::kKeys) return;
    }
#pragma unroll 1
    for (int n = thread; n < (end - key0_) * kChunks; n += kThreads) {
      const int key = n / kChunks, chunk = n % kChunks;
      uint4 x{0, 0, 0, 0};
      if (key0_ + key < band_.seqlen_k) x = ld_shared_16(tile + swizzled<kColumns * 2>(key, chunk));
      store_elements<Element>(base + (key0_ + key) * t.seq_stride + chunk * 8, {x.x, x.y, x.z, x.w},
                              static_cast<int>(columns) - chunk * 8, vectors);
    }
  }

  const BackwardParams &a_;
  const BackwardProblem &b_;
  const Problem &p_;
  uint32_t shared_k_, shared_v_, shared_q_, shared_do_, shared_ds_, shared_p_, shared_lse_, shared_delta_;
  const int lane_, warp_;

  int batch_, head_k_, head_q_;
  int64_t q_start_;
  int key0_;
  BandLimits band_;
  int begin_, end_;            // chunks of the head that is walked
  bool careful_keys_ = false;  // K holds NaN or Inf
  int turn_held_ = -1;         // chunk this warp has added to and not passed on
};

}  // namespace fa::cuda::sm80
