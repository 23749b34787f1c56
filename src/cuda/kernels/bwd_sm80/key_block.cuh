// SPDX-License-Identifier: Apache-2.0
// What the backward kernels share: how a CTA is divided into warps, its keys, the query tiles that see them, where all of it lies in memory,
// and how dk and dv leave.
#pragma once

#include <cstddef>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/score_text.h"
#include "cuda/common/softmax.cuh"
#include "cuda/kernels/bwd_sm80/backward.h"

namespace fa::cuda::sm80 {

template <typename Element_, int kShapeIndex>
struct BackwardConfig {
  using Element = Element_;
  static constexpr BackwardShape kShape = kBackwardShapes[kShapeIndex];
  static constexpr int kD = kShape.head_dim, kDv = kShape.head_dim_v, kKeys = kShape.keys(), kRows = kShape.rows;
  static constexpr int kWarps = kShape.warps, kThreads = kShape.threads(), kMinCtas = kShape.min_blocks,
                       kStages = kShape.stages;
  static constexpr int kRoles = kShape.roles, kRoleWarps = kWarps / kRoles, kRoleThreads = kRoleWarps * 32;
  static constexpr int kScoreWarps = kShape.score_warps;
  static constexpr int kQueryWarps = kShape.query_warps, kKeyTiles = kShape.key_tiles, kColumnWarps = kShape.column_warps;
  static constexpr ScoreSet kScores = scores_of_program(kShape.scores);
  static constexpr bool kGeneral = kScores != kPlain, kStagesBias = stages_bias(kScores);
  static constexpr bool has(ScoreSet terms) { return (kScores & terms) != 0; }
  using Storage = BackwardStorage<kD, kDv, kWarps, kRoles, kScoreWarps, kQueryWarps, kKeyTiles, kColumnWarps, kRows, kStages,
                                  kMinCtas, kShape.capability, kScores>;
  static_assert(Storage::kP == sizeof(Storage) && Storage::kBytes <= kShape.shared_bytes() && kWarps <= kDqSemaphoresPerTile);
  static constexpr bool kSharesP = Storage::kSharesP, kPassesDp = Storage::kPassesDp;
  static_assert(kPassesDp || kScoreWarps == kRoleWarps);

  // S^T and dP^T of a warp: kKeyTiles * 16 keys x kTileRows queries at a time, kTileSteps times per query tile.
  static constexpr int kWarpRows = kRows / kQueryWarps, kTileRows = kRoles == 1 && kWarpRows > 32 ? 32 : kWarpRows;
  static constexpr int kTileSteps = kWarpRows / kTileRows, kNt = kTileRows / 8;
  // dk and dv of a warp: kGradTiles * 16 keys x its columns.
  static constexpr int kGradTiles = kKeys / 16 / (kRoleWarps / kColumnWarps);
  static constexpr int kDt = kD / 8 / kColumnWarps, kDvt = kDv / 8 / kColumnWarps;
  static_assert(kSharesP || (kColumnWarps == 1 && kGradTiles == kKeyTiles));
  // dq of a warp: 32 rows, or 16 where there are no more of them or no more than 8 columns for each warp, x its columns.
  static constexpr int kDqTiles = kRows >= 32 && kD / 8 * (kRows / 32) >= 2 * kWarps ? 2 : 1,
                       kDqRowWarps = kRows / 16 / kDqTiles, kDqNt = kD / 8 / (kWarps / kDqRowWarps);
  static_assert(kRows % (16 * kDqTiles) == 0 && kWarps % kDqRowWarps == 0 && kDqNt % 2 == 0);

  static constexpr int kScorePitch = kRows * 2, kBiasPitch = kKeys * 2;  // bytes of a row of P and dS, and of the bias
};

template <class C>
struct KeyBlock {
  using Element = typename C::Element;
  using Storage = typename C::Storage;

  const BackwardParams &a;
  const BackwardProblem &g;
  const Problem &p;
  const uint32_t smem;  // address of Storage
  const int lane, warp;

  int batch, head_k, head_q;
  int64_t q_start;
  int key0;
  PairMask mask;
  int begin, end;               // query tiles of head_q that see some key of the CTA
  bool nonfinite_keys = false;  // K holds NaN or Inf (with a bias, K or V)

  // The order of CTAs: groups of as many heads as the L2 cache holds; within a group blocks of keys slowest, in ascending order. With a causal mask
  // the longest main loops then start first, and a CTA that waits to add to dq always waits for one that started before it.
  __device__ __forceinline__ KeyBlock(const BackwardParams &params, char *shared)
      : a(params),
        g(params.problem),
        p(params.problem.forward),
        smem(smem_address(shared)),
        lane(threadIdx.x & 31),
        warp(uniform(threadIdx.x >> 5)) {
    const L2HeadOrder::Place place = a.order.at(static_cast<int>(blockIdx.x));
    batch = uniform(place.batch);
    head_k = uniform(place.head);
    const Sequence q = sequence_of(p.q_lengths, batch), k = sequence_of(p.k_lengths, batch);
    q_start = q.start;
    key0 = static_cast<int>(uniform(place.row_block)) * C::kKeys;
    mask = PairMask(p.band, static_cast<int>(q.len), static_cast<int>(k.len));
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Query tiles
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ int first_head() const { return head_k * static_cast<int>(p.group); }  // of the GQA group
  __device__ __forceinline__ int end_head() const { return first_head() + static_cast<int>(p.group); }

  // The main loop goes over them from the last one down: under a causal mask the CTAs of a head then start with the same tile, and in
  // deterministic mode a CTA waits for one addition of another CTA, not for its whole main loop.
  __device__ __forceinline__ bool find_tiles(int head) {
    head_q = head;
    const Range queries =
        visible_queries(p.band, mask.seqlen_q, mask.seqlen_k, Range{key0, min(key0 + C::kKeys, mask.seqlen_k)});
    begin = static_cast<int>(queries.begin) / C::kRows;
    end = (static_cast<int>(queries.end) + C::kRows - 1) / C::kRows;
    return !queries.empty();
  }

  // Index of a query tile in the workspace. Of padded sequences q_tiles_of_sequence() says the same; but here nothing of the sequence takes registers,
  // which belong to the accumulators. Of packed ones the lengths are loaded again.
  __device__ __forceinline__ int64_t index_of(int tile) const {
    if (p.q_lengths.cu == nullptr) return (int64_t{batch} * p.heads_q + head_q) * a.q_tiles + opaque(tile);
    return first_q_tile_of(a, opaque(batch), opaque(head_q), C::kRows) + opaque(tile);
  }

  // Whether band or sequence mask some pair of these queries and the CTA's keys. Then NaN and Inf in dO, Q and K need the NaN-safe path.
  __device__ __forceinline__ bool masks(int tile) const {
    return !mask.all(tile * C::kRows, min(C::kRows, mask.seqlen_q - tile * C::kRows), key0, C::kKeys);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Loads
  // ------------------------------------------------------------------------------------------------------------------

  // Loaded again where it is needed: the registers belong to the accumulators.
  __device__ __forceinline__ Sequence keys() const { return sequence_of(p.k_lengths, batch); }

  __device__ __forceinline__ void load_k() const {
    load_tile<C::kKeys, C::kD, C::kThreads>(
        smem_k(), row_source<Element>(p.k, batch, keys().start, mask.seqlen_k, head_k, p.head_dim, a.vector_k), key0);
  }
  __device__ __forceinline__ void load_v() const {
    load_tile<C::kKeys, C::kDv, C::kThreads>(
        smem_v(), row_source<Element>(p.v, batch, keys().start, mask.seqlen_k, head_k, p.head_dim_v, a.vector_v), key0);
  }
  // Whether the part of K that this thread loaded holds NaN or Inf, if any query tile of the head will need to know.
  __device__ __forceinline__ bool k_has_nonfinite() const {
    const int row0 = begin * C::kRows, rows = min(end * C::kRows, mask.seqlen_q) - row0;
    return (C::kGeneral || !mask.all(row0, rows, key0, C::kKeys)) &&
           loaded_part_has_nonfinite<Element, C::kKeys, C::kD, C::kThreads>(smem_k(), threadIdx.x);
  }

  // A tile of Q and its lse, or of dO and its delta, by kThreads threads of which this is number `thread`.
  template <int kThreads>
  __device__ __forceinline__ void load_q(int tile, int stage, int thread) const {
    thread = opaque(thread);
    load_tile<C::kRows, C::kD, kThreads>(
        smem_q(stage), row_source<Element>(p.q, opaque(batch), q_start, mask.seqlen_q, head_q, p.head_dim, a.vector_q),
        tile * C::kRows, thread);
    load_row_numbers(smem_lse(stage), a.row_lse, tile, thread);
  }
  template <int kThreads>
  __device__ __forceinline__ void load_dout(int tile, int stage, int thread) const {
    thread = opaque(thread);
    load_tile<C::kRows, C::kDv, kThreads>(
        smem_dout(stage),
        row_source<Element>(g.dout, opaque(batch), q_start, mask.seqlen_q, head_q, p.head_dim_v, a.vector_dout),
        tile * C::kRows, thread);
    load_row_numbers(smem_delta(stage), a.row_delta, tile, thread);
  }
  __device__ __forceinline__ void load_row_numbers(uint32_t dst, const float *rows, int tile, int thread) const {
    thread = opaque(thread);
    if (thread < C::kRows / 4) cp_async_16(dst + thread * 16, rows + index_of(tile) * C::kRows + thread * 4);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Addresses in shared memory
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t smem_k() const { return smem; }
  __device__ __forceinline__ uint32_t smem_v() const { return smem + offsetof(Storage, v); }
  __device__ __forceinline__ uint32_t smem_q(int stage) const {
    return smem + offsetof(Storage, q) + stage * sizeof(Storage::q[0]);
  }
  __device__ __forceinline__ uint32_t smem_dout(int stage) const {
    return smem + offsetof(Storage, dout) + stage * sizeof(Storage::dout[0]);
  }
  __device__ __forceinline__ uint32_t smem_ds(int buffer = 0) const {
    return smem + offsetof(Storage, ds) + buffer * Storage::kScoreBytes;
  }
  __device__ __forceinline__ uint32_t smem_p(int buffer = 0) const {
    return smem + Storage::kP + buffer * Storage::kScoreBytes;
  }
  __device__ __forceinline__ uint32_t smem_lse(int stage) const {
    return smem + Storage::kLse + stage * Storage::kStatisticsBytes;
  }
  __device__ __forceinline__ uint32_t smem_delta(int stage) const {
    return smem + Storage::kDelta + stage * Storage::kStatisticsBytes;
  }
  __device__ __forceinline__ uint32_t smem_bias() const { return smem + Storage::kBias; }
  // Of a role, or of the two warps that share a tile of scores.
  __device__ __forceinline__ uint32_t smem_role_barrier(int role) const { return smem + Storage::kRoleBarriers + role * 8; }

  // ------------------------------------------------------------------------------------------------------------------
  // dk and dv
  // ------------------------------------------------------------------------------------------------------------------

  // Converts a warp's part of a gradient and puts it into a tile of shared memory. `role_warp`: its number among the warps of that gradient. An
  // fp32 gradient goes from here to the rows of the tensor.
  template <int kColumns, int kTiles>
  __device__ __forceinline__ void stage_gradient(const Operand &t, int64_t columns, uint32_t tile,
                                                 const Accumulator<C::kGradTiles, kTiles> &acc, int role_warp,
                                                 float scale) const {
    const int first_key = role_warp / C::kColumnWarps * C::kGradTiles * 16, part = role_warp % C::kColumnWarps;
    if (known_fp32(t.dtype == Dtype::f32) && t.data != nullptr) {
      const bool vectors = known_vectors(has_16_byte_rows(t, columns));
      float *base =
          static_cast<float *>(t.data) + batch * t.batch_stride + keys().start * t.seq_stride + head_k * t.head_stride;
#pragma unroll
      for (int i = 0; i < C::kGradTiles; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int key = key0 + first_key + 16 * i + (lane >> 2) + 8 * r;
          if (key >= mask.seqlen_k) continue;  // store_gradient() has the others
          store_fragment_row_fp32<kTiles>(
              &acc[i][0][0], r, [&] { return base + key * t.seq_stride + part * kTiles * 8; },
              static_cast<int>(columns) - part * kTiles * 8, vectors, lane & 3, scale);
        }
    }
    // Also then, for nobody: the compiler needs fewer registers for code that does not branch.
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
        stmatrix_x4(tile + swizzled<kColumns * 2>(first_key + 16 * i + (lane & 15), part * kTiles + 2 * k + (lane >> 4)), w);
      }
  }

  // From there to the rows of the tensor, by kThreads threads of which this is number `thread`. Keys of the sequence's slot that are not used get zero. The
  // last CTA of a sequence also owns the keys beyond the grid.
  template <int kColumns, int kThreads>
  __device__ __forceinline__ void store_gradient(const Operand &t, uint32_t tile, int64_t columns, int thread) const {
    if (t.data == nullptr) return;
    constexpr int kVectors = kColumns / 8;
    const bool vectors = known_vectors(has_16_byte_rows(t, columns));
    const Sequence k = keys();
    const int seq_slot = static_cast<int>(k.slot),
              end = key0 / C::kKeys == a.order.row_blocks - 1 ? seq_slot : min(key0 + C::kKeys, seq_slot);
    if (known_fp32(t.dtype == Dtype::f32)) {
      float *base = static_cast<float *>(t.data) + batch * t.batch_stride + k.start * t.seq_stride + head_k * t.head_stride;
      for (int key = max(key0, mask.seqlen_k); key < end; ++key) {
        for (int column = thread; column < columns; column += kThreads) base[key * t.seq_stride + column] = 0;
      }
      return;
    }
    Element *base = static_cast<Element *>(t.data) + batch * t.batch_stride + k.start * t.seq_stride + head_k * t.head_stride;
    if (vectors && key0 + C::kKeys <= min(end, mask.seqlen_k)) {  // the usual CTA: every key exists
      constexpr int kStep = kThreads / kVectors;
      const int first = thread / kVectors, vector = thread % kVectors;
      if (vector * 8 >= columns) return;
      Element *row = base + (key0 + first) * t.seq_stride + vector * 8;
#pragma unroll 4
      for (int n = 0; n < C::kKeys; n += kStep)
        *reinterpret_cast<uint4 *>(row + n * t.seq_stride) = ld_shared_16(tile + swizzled<kColumns * 2>(first + n, vector));
      if (end == key0 + C::kKeys) return;
    }
#pragma unroll 1
    for (int n = thread; n < (end - key0) * kVectors; n += kThreads) {
      const int key = n / kVectors, vector = n % kVectors;
      uint4 x{0, 0, 0, 0};
      if (key0 + key < mask.seqlen_k) x = ld_shared_16(tile + swizzled<kColumns * 2>(key, vector));
      store_elements<Element>(base + (key0 + key) * t.seq_stride + vector * 8, {x.x, x.y, x.z, x.w},
                              static_cast<int>(columns) - vector * 8, vectors);
    }
  }
};

// acc += A T. A is P^T or dS^T in shared memory, (keys x queries), or its transpose.
template <class C, Major kA, int kPitch, int kKSteps, int kMt, int kNt>
__device__ __forceinline__ void mma_scores(Accumulator<kMt, kNt> &acc, uint32_t scores, int first_row, uint32_t tile,
                                           int first_column, bool nan_safe) {
  using Element = typename C::Element;
  if (nan_safe) {
    mma_ss_nan_safe<Element, kA, C::kScorePitch, kPitch, kKSteps>(acc, scores, first_row, tile, first_column);
  } else {
    mma_ss<Element, kA, C::kScorePitch, Major::mn, kPitch, kKSteps>(acc, scores, first_row, tile, first_column);
  }
}

}  // namespace fa::cuda::sm80
