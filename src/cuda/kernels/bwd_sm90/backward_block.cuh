// SPDX-License-Identifier: Apache-2.0
// What the backward kernels for sm_90a have in common: which keys and queries a block works on, tiles of scores in the registers of a
// warpgroup, sums over visible pairs alone, and how dk and dv leave.
//
// Scores are transposed: a warpgroup holds 64 keys as rows, queries as columns.
//
// Zero times NaN is NaN. In chunks with masked pairs the block asks whether S or dP, which are non-finite where an operand is, hold
// anything that is not finite: only then the products go one query (or key) at a time over the visible pairs.
#pragma once

#include <math_constants.h>

#include "core/mask.h"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/score.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/kernels/bwd_sm90/backward.h"

namespace fa::cuda::sm90 {

// What a masked weight is rounded to: the bits of no visible one.
constexpr float kMasked = -0.f;
constexpr uint32_t kMaskedHalf = 0x8000u;

// What a block of threads works on. Lies in shared memory: the registers belong to the accumulators.
struct Block {
  int batch, head_k, key0;
  int q_start, k_start, seqlen_q, seqlen_k;
  int first, last;             // query i sees keys j with first <= j - i <= last
  int begin, end;              // chunks of queries with visible pairs
  int inner_begin, inner_end;  // of these, the ones without masked pairs
  int item;                    // number among those of this block of threads
  int chunks;                  // of pairs that stay: of all items up to the end of this one
  bool half;                   // of blocks alone: the second warpgroup passes over the last chunk
};
static_assert(sizeof(Block) <= 64);

// C::kKeys: of a block of the order. C::kRows: queries of a chunk. C::kD: columns. C::kShares: of a chunk's dq, each with a place of its
// own in the sum and C::kShareBytes of shared memory, where the copy engine adds them.
template <class C>
class BackwardBlock {
 protected:
  using Element = typename C::Element;

  // The lane by a shuffle, or ptxas reads the thread's number anew wherever it is short of registers.
  __device__ __forceinline__ BackwardBlock(const BackwardParams &params, char *shared)
      : a_(params),
        p_(params.problem.forward),
        blocks_(reinterpret_cast<Block *>(shared + C::kBlockOffset)),
        shared_(smem_address(shared)),
        lane_(C::kShuffledNumbers ? __shfl_sync(~0u, threadIdx.x & 31, threadIdx.x & 31) : threadIdx.x & 31),
        warp_((C::kShuffledNumbers ? uniform(threadIdx.x >> 5) : threadIdx.x >> 5) & 3) {}

  __device__ __forceinline__ Block &b() const { return blocks_[place_]; }

  // Number `index` of the order, described piece by piece: warps that do this have few registers.
  __device__ __forceinline__ void find_block(int index, Block &b) const {
    const L2HeadOrder::Place place = a_.order.at(index);
    const int key0 = place.row_block * C::kKeys;
    b.key0 = key0;
    b.batch = place.batch;
    b.head_k = place.head;
    b.begin = b.end = b.inner_begin = b.inner_end = 0;
    const Sequence k = sequence_of(p_.k_lengths, place.batch);
    b.k_start = static_cast<int>(k.start);
    const int seqlen_k = static_cast<int>(k.len);
    const Sequence q = sequence_of(p_.q_lengths, place.batch);
    b.q_start = static_cast<int>(q.start);
    const Diagonal<int32_t> diagonal(a_.limits, static_cast<int>(q.len), seqlen_k);
    b.seqlen_q = diagonal.seqlen_q;
    b.seqlen_k = diagonal.seqlen_k;
    const int first = diagonal.shift - diagonal.left, last = diagonal.shift + diagonal.right;
    b.first = first;
    b.last = last;
    if (key0 >= diagonal.seqlen_k) return;
    const RangeOf<int32_t> queries = diagonal.visible_queries({key0, min(key0 + C::kKeys, diagonal.seqlen_k)});
    if (queries.empty()) return;
    b.begin = queries.begin / C::kRows;
    b.end = (queries.end + C::kRows - 1) / C::kRows;
    if (key0 + C::kKeys > diagonal.seqlen_k) return;
    // Rows that see every key of the block.
    b.inner_begin = (max(key0 + C::kKeys - 1 - last, 0) + C::kRows - 1) / C::kRows;
    b.inner_end = max(min(key0 - first + 1, diagonal.seqlen_q), 0) / C::kRows;
  }

  // Index of the first chunk of a head in the workspace.
  __device__ __forceinline__ int chunks_at(int head_q) const {
    return (b().batch * static_cast<int>(p_.heads_q) + head_q) * a_.row_chunks;
  }

  template <int kTileRows, int kSlabs = C::kSlabs, int kColumns = 64>
  __device__ __forceinline__ void fetch_tile(uint32_t tile, const CUtensorMap &map, uint32_t barrier, int row, int head,
                                             int batch, uint64_t policy) const {
#pragma unroll
    for (int s = 0; s < kSlabs; ++s)
      tma_load_4d(tile + s * kTileRows * 128, &map, barrier, s * kColumns, row, head, batch, policy);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Tiles of scores
  // ------------------------------------------------------------------------------------------------------------------

  // NaN if any of x is NaN or Inf.
  template <int kCount>
  static __device__ __forceinline__ float zero_if_finite(const float (&x)[kCount]) {
    float zero[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int n = 0; n < kCount; ++n) zero[n % 4] = fmaf(x[n], 0.f, zero[n % 4]);
    return (zero[0] + zero[1]) + (zero[2] + zero[3]);
  }

  // Calls f(n) for every element of a tile of scores whose pair is masked: 64 keys from `first_key` on, kCount queries from `first_row` on.
  template <int kCount, typename F>
  __device__ __forceinline__ void for_masked(int first_key, int first_row, F f) const {
    const int row0 = first_row + 2 * (lane_ & 3);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = first_key + warp_ * 16 + (lane_ >> 2) + 8 * r;
      const int begin = key - b().last - row0;
      const int end = key < b().seqlen_k ? min(key - b().first + 1, b().seqlen_q) - row0 : begin;
#pragma unroll
      for (int j = 0; j < kCount / 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e < begin || 8 * j + e >= end) f(4 * j + 2 * r + e);
    }
  }

  // The statistics of this lane's queries 8 j and 8 j + 1.
  __device__ __forceinline__ float2 stat(uint32_t row, int j) const { return ld_shared_float2(row + 8 * (lane_ & 3) + j * 32); }

  // Those of a chunk, asked for before a product that takes all of shared memory's bandwidth starts: behind it they wait for hundreds of
  // cycles.
  using Stats = float2[C::kRows / 8];
  __device__ __forceinline__ void load_stats(Stats &x, uint32_t row) const {
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j) x[j] = stat(row, j);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // P
  // ------------------------------------------------------------------------------------------------------------------

  // Slope of a query head * log2(e), or 0.
  __device__ __forceinline__ float alibi_slope(int head) const {
    if (!C::kScored || p_.alibi_slopes == nullptr) return 0.f;
    return p_.alibi_slopes[b().batch * p_.alibi_batch_stride + head * p_.alibi_head_stride] * kLog2e;
  }

  // From S of 64 keys and kSteps * 16 queries, from `first_key` and `first_row` on, to P, and with softcap to what dP - delta is to be
  // multiplied with, P times its derivative. P itself is rounded here then; plain scores leave that to round_weights().
  template <int kSteps>
  __device__ __forceinline__ void weigh(uint32_t (&w)[kSteps][4], float (&s)[kSteps * 8], uint32_t lse_row, int first_key,
                                        int first_row, float slope) const {
    if constexpr (!C::kScored) {
      const float c = p_.softmax_scale * kLog2e;
#pragma unroll
      for (int j = 0; j < kSteps * 2; ++j) {
        const float2 lse = stat(lse_row, j);
#pragma unroll
        for (int r = 0; r < 4; ++r) s[4 * j + r] = exp2_approx(fmaf(s[4 * j + r], c, -((r & 1) ? lse.y : lse.x)));
      }
    } else if (a_.cap_exponent > 0) {
      weigh_scored<true>(w, s, lse_row, first_key, first_row, slope);
    } else {
      weigh_scored<false>(w, s, lse_row, first_key, first_row, slope);
    }
  }
  template <bool kCapped, int kSteps>
  __device__ __forceinline__ void weigh_scored(uint32_t (&w)[kSteps][4], float (&s)[kSteps * 8], uint32_t lse_row,
                                               int first_key, int first_row, float slope) const {
    const auto distance =
        static_cast<float>(first_row + 2 * (lane_ & 3) + b().seqlen_k - b().seqlen_q - (first_key + warp_ * 16 + (lane_ >> 2)));
#pragma unroll
    for (int j = 0; j < kSteps * 2; ++j) {
      const float2 lse = stat(lse_row, j);
      float p[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float x = s[4 * j + r], derivative = 1.f;
        if constexpr (kCapped) {
          x = fmaf(-2.f, reciprocal_approx(1.f + exp2_approx(x * a_.cap_exponent)), 1.f);  // tanh(x) = 1 - 2 / (1 + e^2x)
          derivative = fmaf(-x, x, 1.f);
        }
        const auto steps = static_cast<float>(8 * j + (r & 1) - 8 * (r >> 1));
        p[r] = exp2_approx(fmaf(x, a_.logit_factor, fmaf(-slope, fabsf(distance + steps), -((r & 1) ? lse.y : lse.x))));
        s[4 * j + r] = p[r] * derivative;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) w[j / 2][j % 2 * 2 + r] = pack2<Element>(p[2 * r], p[2 * r + 1]);
    }
  }
  // The same of plain scores, with lse in registers.
  __device__ __forceinline__ void weigh(float (&s)[C::kRows / 2], const Stats &lse) const {
#pragma unroll
    for (int j = 0; j < C::kRows / 8; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        s[4 * j + r] = exp2_approx(fmaf(s[4 * j + r], a_.logit_factor, -((r & 1) ? lse[j].y : lse[j].x)));
  }
  // Masks what weigh() made.
  template <int kSteps>
  __device__ __forceinline__ void mask_weights(uint32_t (&w)[kSteps][4], float (&s)[kSteps * 8], int first_key,
                                               int first_row) const {
    for_masked<kSteps * 16>(first_key, first_row, [&](int at) {
      s[at] = kMasked;
      if constexpr (C::kScored) {
        uint32_t &pair = w[at / 8][at % 8 / 2];
        pair = at & 1 ? (pair & 0xFFFFu) | kMaskedHalf << 16 : (pair & 0xFFFF0000u) | kMaskedHalf;
      }
    });
  }
  template <int kSteps>
  static __device__ __forceinline__ void round_weights(uint32_t (&w)[kSteps][4], const float (&s)[kSteps * 8]) {
    if constexpr (!C::kScored) round(w, s);
  }

  // NaN if the delta of any query of the chunk is NaN or Inf, as where the query's out is.
  __device__ __forceinline__ float zero_if_finite(uint32_t delta_row) const {
    float zero = 0.f;
#pragma unroll
    for (int n = 0; n < C::kRows / 32; ++n) zero = fmaf(ld_shared_float(delta_row + (n * 32 + lane_) * 4), 0.f, zero);
    return zero;
  }

  template <int kSteps>
  static __device__ __forceinline__ void round(uint32_t (&w)[kSteps][4], const float (&x)[kSteps * 8]) {
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) w[n][r] = pack2<Element>(x[8 * n + 2 * r], x[8 * n + 2 * r + 1]);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // The sum for dq
  // ------------------------------------------------------------------------------------------------------------------

  // This warp's 16 rows of a share to its place in shared memory. A share is a sequence of 16 x 8 tiles, [warp][j], each four numbers a
  // lane as the accumulators hold them.
  template <int kCount>
  __device__ __forceinline__ void put_share(const float (&dq)[kCount], uint32_t tile) const {
    const uint32_t mine = tile + warp_ * (kCount * 128) + (C::kShuffledNumbers ? opaque(lane_) : lane_) * 16;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      st_shared_16(mine + j * 512, __float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]), __float_as_uint(dq[4 * j + 2]),
                   __float_as_uint(dq[4 * j + 3]));
    }
  }

  // How many blocks of keys before this one see the chunk: they are consecutive.
  __device__ __forceinline__ int place_in_order(int chunk) const {
    return b().key0 / C::kKeys - max(0, chunk * C::kRows + b().first) / C::kKeys;
  }

  // Adds a share, chunk after chunk, to the sum over blocks of keys, as `full` and `empty` hand it over. If nobody has cleared the sum, the
  // first block to come puts its share there, `turn` is 1 from then on and 2 when it has arrived, and the others wait for that.
  // In deterministic mode blocks come in ascending order, and `turn` counts those whose share has arrived. One only waits for blocks that
  // started before it. Walks go down from the last chunk, so that under a causal mask, too, all blocks of a head begin with the same chunk
  // and keep their distance.
  // kWarps warps take turns, each with a `full` of its own: one has the next share read while another waits for its own to arrive.
  template <int kWarps = 1>
  __device__ __forceinline__ void add_shares(int share, uint32_t tile, uint32_t full, uint32_t empty, uint32_t &parity,
                                             int warp = 0) const {
    const bool wanted = a_.dq_sum != nullptr;
    int n = 0;
    for (int g = 0; g < static_cast<int>(p_.group); ++g) {
      const int first = chunks_at(b().head_k * static_cast<int>(p_.group) + g);
      for (int chunk = b().end - 1; chunk >= b().begin; --chunk) {
        if (kWarps > 1 && n++ % kWarps != warp) continue;
        const int index = (first + chunk) * C::kShares + share;
        int32_t *turn = a_.turn + index;
        // What `turn` is when this block may add. No acquire: all of this happens at the L2 cache, additions after what has arrived.
        const int place = a_.ordered ? place_in_order(chunk) : 2;
        int now = 2;
        if (wanted && !a_.zero_dq_sum) {
          do {
            now = load_relaxed(turn);
          } while (a_.ordered && now != place);
        }
        mbarrier_wait(full, parity);
        if (elect_one()) {
          if constexpr (C::kAdderFences) fence_proxy_async();
          if (wanted) {
            if (now != place) now = claim_relaxed(turn);
            while (now == 1 && place == 2) now = load_relaxed(turn);
            float *sum = a_.dq_sum + int64_t{index} * (C::kShareBytes / 4);
            if (now == 0) {
              bulk_store_commit(sum, tile, C::kShareBytes);
            } else {
              bulk_reduce_add_commit(sum, tile, C::kShareBytes);
            }
          }
          bulk_wait_group_read();
          mbarrier_arrive(empty);
          if (wanted && (a_.ordered || now == 0)) {
            bulk_wait_group();
            count_released(turn);
          }
        }
        __syncwarp();
        parity ^= 1;
      }
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Sums over visible pairs
  // ------------------------------------------------------------------------------------------------------------------

  // acc[8 j ..] += weight * tile element for the rows g (r = 0) and g + 8 of this warp, `bits` their weights, from one row of a tile.
  template <int kTileRows, int kColumns>
  __device__ __forceinline__ void add_row(float (&acc)[kColumns / 2], const uint32_t (&bits)[2], uint32_t tile, int row) const {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const uint32_t pair =
          ld_shared_4(tile + j / 8 * kTileRows * 128 + row * 128 + (((j % 8) ^ (row & 7)) << 4) + (lane_ & 3) * 4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (bits[r] == kMaskedHalf) continue;
        acc[4 * j + 2 * r] += to_float<Element>(bits[r]) * to_float<Element>(pair & 0xFFFFu);
        acc[4 * j + 2 * r + 1] += to_float<Element>(bits[r]) * to_float<Element>(pair >> 16);
      }
    }
  }

  template <int kCount, int kSteps>
  __device__ __forceinline__ void add_exactly(float (&gradient)[kCount], const uint32_t (&weights)[kSteps][4],
                                              uint32_t rows) const {
#pragma unroll 1
    for (int row = 0; row < kSteps * 16; ++row) {
      const int source = (lane_ & ~3) | ((row & 7) >> 1);  // the lane of the quad that holds this query's weights
      uint32_t bits[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        uint32_t pair = 0;
#pragma unroll
        for (int n = 0; n < kSteps; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            if (row >> 3 == 2 * n + half) pair = weights[n][2 * half + r];
        pair = __shfl_sync(~0u, pair, source);
        bits[r] = (row & 1) ? pair >> 16 : pair & 0xFFFFu;
      }
      add_row<C::kRows, 2 * kCount>(gradient, bits, rows, row);
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Results
  // ------------------------------------------------------------------------------------------------------------------

  // dk or dv of 64 keys from `first_key` on to the rows of the tensor, sixteen bytes a lane: the four lanes that share a row exchange the
  // pieces of four column blocks. Keys of the slot that are not used get zero; the last block also owns those beyond the grid, and its
  // `threads` threads of which this is one clear them.
  template <int kCount>
  __device__ __forceinline__ void store_gradient(const Operand &t, const float (&acc)[kCount], float scale, int columns,
                                                 bool vectors, int first_key, int thread, int threads) const {
    if (t.data == nullptr) return;
    const int slot = static_cast<int>(sequence_of(p_.k_lengths, b().batch).slot);
    Element *base = static_cast<Element *>(t.data) + b().batch * t.batch_stride + int64_t{b().k_start} * t.seq_stride +
                    b().head_k * t.head_stride;
    const int quad = lane_ & 3;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = first_key + warp_ * 16 + (lane_ >> 2) + 8 * r;
      const uint32_t keep = key < b().seqlen_k ? ~0u : 0u;
#pragma unroll
      for (int j = 0; j < kCount / 4; j += 4) {
        uint32_t x[4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          x[n] = pack2<Element>(acc[4 * (j + n) + 2 * r] * scale, acc[4 * (j + n) + 2 * r + 1] * scale) & keep;
        transpose_quad(x, quad);
        const int column = (j + quad) * 8;
        if (key < slot) store_elements(base + key * t.seq_stride + column, x, columns - column, vectors);
      }
    }
    if (b().key0 / C::kKeys != a_.order.row_blocks - 1) return;
    constexpr int kPieces = kCount / 4;
    const int beyond = b().key0 + C::kKeys;
    for (int n = thread; n < (slot - beyond) * kPieces; n += threads) {
      const int column = n % kPieces * 8;
      store_elements(base + (beyond + n / kPieces) * t.seq_stride + column, {0, 0, 0, 0}, columns - column, vectors);
    }
  }

  const BackwardParams &a_;
  const Problem &p_;
  Block *const blocks_;
  int place_ = 0;  // of the description at hand
  const uint32_t shared_;
  const int lane_, warp_;  // warp_ within the group
};

}  // namespace fa::cuda::sm90
