// SPDX-License-Identifier: Apache-2.0
// The parts that all backward kernels for sm_90a share: the description of a work tile, P from S and lse, masks, sums over
// visible pairs, the reduction of dq, and the epilogue of dk and dv.
//
// Scores are held transposed, S^T = K Q^T (64, kTileQ): a consumer warpgroup owns 64 keys, which are the rows of its
// accumulators; queries are the columns.
//
// NaN-safe path. The ordinary path multiplies masked pairs by P = 0, and 0 * NaN is NaN. In a tile with masked pairs the
// threads therefore test S, dP and delta for non-finite values; these are non-finite wherever a row of q, k, v, dout or out is.
// Only if one is found does the CTA compute the tile's gradients again as sums over the visible pairs alone, one query (or key)
// at a time.
#pragma once

#include <cstddef>

#include <math_constants.h>

#include "cuda/common/data_mask.cuh"
#include "cuda/common/epilogue.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/nan_safe.cuh"
#include "cuda/common/pipeline.cuh"
#include "cuda/common/score_mod.cuh"
#include "cuda/common/score_text.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernels/bwd_sm90/backward.h"
#include "cuda/kernels/bwd_sm90/bias.cuh"
#include "cuda/kernels/bwd_sm90/dropout.cuh"
#include "cuda/kernels/bwd_sm90/shared_storage.h"

namespace fa::cuda::sm90 {

// Column block j of an accumulator: elements 4 j to 4 j + 3.
template <int kCount>
__device__ __forceinline__ float4 float4_of(const float (&x)[kCount], int j) {
  return {x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]};
}

// C is a kernel's configuration. C::kTileKv keys make a work tile, C::kTileQ queries a Q tile. dq of a Q tile is reduced as
// C::kDqPartials partials of C::kDqPartialBytes each, which have order counters of their own.
template <class C>
struct BackwardCta {
  using Element = typename C::Element;

  // With kLaneFromShuffle the lane comes from a shuffle. Otherwise ptxas reads threadIdx again wherever it is short of
  // registers.
  __device__ __forceinline__ BackwardCta(const BackwardParams &params, char *shared)
      : params(params),
        problem(params.problem.forward),
        work_tiles(reinterpret_cast<WorkTile *>(shared + offsetof(typename C::Storage, work_tiles))),
        smem(smem_address(shared)),
        lane(C::kLaneFromShuffle ? __shfl_sync(~0u, threadIdx.x & 31, threadIdx.x & 31) : threadIdx.x & 31),
        warp((C::kLaneFromShuffle ? uniform(threadIdx.x >> 5) : threadIdx.x >> 5) & 3) {}

  // Address in shared memory: a member of the storage by its offset, or element n of an array of elements of `bytes` bytes.
  __device__ __forceinline__ uint32_t at(uint32_t offset, int n = 0, uint32_t bytes = 0) const {
    return smem + offset + n * bytes;
  }
  __device__ __forceinline__ WorkTile &work() const { return work_tiles[work_stage]; }
  __device__ __forceinline__ BackwardMaskedTiles &masked_tiles() const {
    using Storage = typename C::Storage;
    return *reinterpret_cast<BackwardMaskedTiles *>(reinterpret_cast<char *>(work_tiles) - offsetof(Storage, work_tiles) +
                                                    offsetof(Storage, masked_tiles));
  }

  // Kernels for mixtures: which terms the problem has.
  __device__ __forceinline__ bool has_bias() const { return problem.bias.data != nullptr; }
  __device__ __forceinline__ bool drops() const { return problem.dropout.threshold > 0; }
  // Dropout bits of a query head, for queries from row0 on and this warp's 16 of the 64 keys from first_key on. `smem_key`: DropoutStorage::key.
  __device__ __forceinline__ void draw(DroppedPairs<C::kTileQ> &dropped, uint32_t smem_key, int head_q, int row0,
                                       int first_key) const {
    dropped.draw(smem_key, problem.dropout.threshold,
                 static_cast<uint32_t>(work().batch * static_cast<int>(problem.heads_q) + head_q), row0, first_key + warp * 16,
                 lane);
  }

  // A member of what is visited in iteration n of all work tiles, when its Q, or its dO, has arrived. One lane reads, the one that frees Q.
  template <typename T>
  __device__ __forceinline__ T visited(int n, T VisitedQTile::*member) const {
    return __shfl_sync(~0u, lane == 0 ? masked_tiles().visited[n % BackwardMaskedTiles::kVisited].*member : T{}, 0);
  }

  // Describes number `index` of the order of work tiles. It writes field after field: the warps that call it have few
  // registers.
  __device__ __forceinline__ void describe_work_tile(int index, WorkTile &b) const {
    const L2HeadOrder::Place place = params.order.at_long_end(index);
    const int key0 = place.row_block * C::kTileKv;
    b.key0 = key0;
    b.batch = place.batch;
    b.head_k = place.head;
    b.q_tile_begin = b.q_tile_end = b.full_begin = b.full_end = 0;
    const Sequence k = unpadded_keys(problem.k_lengths, place.batch);
    b.k_start = static_cast<int>(k.start);
    const int seqlen_k = static_cast<int>(k.len);
    const Sequence q = sequence_of(problem.q_lengths, place.batch);
    b.q_start = static_cast<int>(q.start);
    describe_workspace(place.batch, q, b);
    const Diagonal<int32_t> diagonal(params.limits, static_cast<int>(q.len), seqlen_k);
    b.seqlen_q = diagonal.seqlen_q;
    b.seqlen_k = diagonal.seqlen_k;
    const int first = diagonal.shift - diagonal.left, last = diagonal.shift + diagonal.right;
    b.band_first = first;
    b.band_last = last;
    if (key0 >= diagonal.seqlen_k) return;
    const RangeOf<int32_t> queries = diagonal.visible_queries({key0, min(key0 + C::kTileKv, diagonal.seqlen_k)});
    if (queries.empty()) return;
    b.q_tile_begin = queries.begin / C::kTileQ;
    b.q_tile_end = (queries.end + C::kTileQ - 1) / C::kTileQ;
    if (key0 + C::kTileKv > diagonal.seqlen_k) return;
    // Queries that see every key of the work tile.
    b.full_begin = (max(key0 + C::kTileKv - 1 - last, 0) + C::kTileQ - 1) / C::kTileQ;
    b.full_end = max(min(key0 - first + 1, diagonal.seqlen_q), 0) / C::kTileQ;
  }
  // The same for `keys` keys from key0 on, a part of the work tile.
  __device__ __forceinline__ void describe_full_q_tiles(int key0, int keys, WorkTile &b) const {
    b.full_begin = b.full_end = 0;
    if (key0 + keys > b.seqlen_k) return;
    b.full_begin = (max(key0 + keys - 1 - b.band_last, 0) + C::kTileQ - 1) / C::kTileQ;
    b.full_end = max(min(key0 - b.band_first + 1, b.seqlen_q), 0) / C::kTileQ;
  }

  __device__ __forceinline__ void describe_workspace(int batch, const Sequence &q, WorkTile &b) const {
    const SequenceQTiles tiles = q_tiles_of_sequence(problem, q, batch, C::kTileQ, params.q_tiles);
    b.workspace_begin = tiles.begin;
    b.workspace_q_tiles = tiles.count;
  }

  // Where the Q tiles with masked pairs of a work tile are its last ones at most, the others begin with one of the work tile's own: CTAs at work on one
  // head then add to different rows of dq. The loop has the same Q tiles, `shift` tiles further up; those that would lie past the last one without masked
  // pairs are the first ones. Which Q tile it is matters only to the warps that load Q and that add dq.
  struct RotatedQTiles {
    int shift, begin, end;
    // The Q tile at a place of the main loop.
    __device__ __forceinline__ int operator()(int place) const {
      if (place >= end) return place;
      return place + shift < end ? place + shift : place + shift - (end - begin);
    }
  };
  __device__ __forceinline__ RotatedQTiles rotated_q_tiles() const {
    if constexpr (C::kRotates) {
      const WorkTile &t = work(), &upper = work_tiles[work_stage + C::kTilesPerWorkStage - 1];  // upper: of the upper keys
      if (is_cyclic()) return {params.cyclic.begin(t.key0 / C::kTileKv), 0, t.q_tile_end};
      const int begin = t.q_tile_begin, end = min(min(t.full_end, upper.full_end), t.q_tile_end);
      if (params.ordered || upper.full_begin > begin || end <= begin) return {0, 0, 0};
      return {static_cast<int>(int64_t{t.key0} * (end - begin) / max(t.seqlen_k, 1)), begin, end};
    } else {
      return {0, 0, 0};
    }
  }

  // Deterministic mode in cyclic order (cyclic_order.h).
  __device__ __forceinline__ bool is_cyclic() const { return C::kDqTransposed && params.cyclic.q_tiles > 0; }

  // Index in the workspace of the first Q tile of a query head.
  __device__ __forceinline__ int workspace_q_tile(int head_q) const {
    return work().workspace_begin + head_q * work().workspace_q_tiles;
  }

  // With masks as data: of 32 Q tiles of a query head, from `q_tile` down to `first`, those that the work tile sees, and of these the ones in which the cell
  // map says that a pair may be masked; bit l is q_tile - l. All lanes take part.
  struct QTileBits {
    uint32_t visible;
    uint32_t cell_codes;  // of this lane's Q tile (VisitedQTile)
  };
  __device__ __forceinline__ QTileBits q_tiles_from(const WorkTile &t, int head_q, int q_tile, int first) const {
    constexpr int kCells = C::kTileQ / kCell;
    constexpr uint32_t kAllCells = (1u << kCells) - 1;
    const DataMask &mask = params.mask;
    q_tile -= lane;
    uint32_t any = 0, codes = 0;
    bool full = true;
    if (C::kMixtures && !mask.given()) {
      any = q_tile >= first;
    } else if (q_tile >= first) {
      int64_t word =
          (mask.plane(t.batch, head_q) * mask.by_key.rows + t.key0 / kCell) * mask.by_key.words + q_tile * kCells / 32;
      const int shift = q_tile * kCells % 32;
#pragma unroll 1
      for (int n = 0; n < C::kTileKv / kCell && t.key0 + n * kCell < t.seqlen_k; ++n) {
        if (C::kMixtures && n > 0) word += mask.by_key.words;
        const int64_t at = C::kMixtures ? word : word + n * mask.by_key.words;
        const uint32_t visible = mask.by_key.visible[at] >> shift & kAllCells,
                       partial = mask.by_key.partial[at] >> shift & kAllCells;
        any |= visible;
        full = full && visible == kAllCells && partial == 0;
#pragma unroll
        for (int cell = 0; cell < kCells; ++cell)
          codes |= ((visible >> cell & 1) | (partial >> cell & 1) << 1) << 2 * (n * kCells + cell);
      }
    }
    return {__ballot_sync(~0u, any != 0), full ? VisitedQTile::kAllCellsFull : codes};
  }
  __device__ __forceinline__ int count_visible_q_tiles(const WorkTile &t) const {
    // Lane 0 may write them next, so it alone reads them.
    const int first = __shfl_sync(~0u, lane == 0 ? t.q_tile_begin : 0, 0),
              last = __shfl_sync(~0u, lane == 0 ? t.q_tile_end : 0, 0) - 1;
    const int group = static_cast<int>(problem.group);
    int count = 0;
    for (int g = 0; g < group; ++g) {
      for (int q_tile = last; q_tile >= first; q_tile -= 32)
        count += __popc(q_tiles_from(t, t.head_k * group + g, q_tile, first).visible);
    }
    return count;
  }

  // Calls f(query head, Q tile, cell codes) for the Q tiles of the work tile, in the order of the main loop. With masks as data for the visible ones.
  template <typename F>
  __device__ __forceinline__ void for_each_q_tile(F f) const {
    const WorkTile &t = work();
    const auto for_each_visible = [&](int head_q) {
      for (int q_tile = t.q_tile_end - 1; q_tile >= t.q_tile_begin; q_tile -= 32) {
        QTileBits tiles = q_tiles_from(t, head_q, q_tile, t.q_tile_begin);
        for (; tiles.visible != 0; tiles.visible &= tiles.visible - 1) {
          const int n = __ffs(static_cast<int>(tiles.visible)) - 1;
          f(head_q, q_tile - n, __shfl_sync(~0u, tiles.cell_codes, n));
        }
      }
    };
    if constexpr (C::kMixtures) {  // one register less
      for (int head_q = t.head_k * static_cast<int>(problem.group); head_q < (t.head_k + 1) * static_cast<int>(problem.group);
           ++head_q)
        for_each_visible(head_q);
    } else {
      for (int g = 0; g < static_cast<int>(problem.group); ++g) {
        const int head_q = t.head_k * static_cast<int>(problem.group) + g;
        if constexpr (C::kHasDataMask) {
          for_each_visible(head_q);
        } else {
          const auto q_tile_at = rotated_q_tiles();
          for (int i = t.q_tile_end - 1; i >= t.q_tile_begin; --i) f(head_q, q_tile_at(i), VisitedQTile::kAllCellsFull);
        }
      }
    }
  }

  // Loads a tile of kTileRows rows by TMA, as kAtoms swizzle atoms. kColumns: used columns of an atom.
  template <int kTileRows, int kAtoms = C::kAtoms, int kColumns = 64>
  __device__ __forceinline__ void load_tile(uint32_t tile, const CUtensorMap &map, uint32_t barrier, int row, int head,
                                            int batch, uint64_t policy) const {
#pragma unroll
    for (int s = 0; s < kAtoms; ++s)
      tma_load_4d(tile + s * kTileRows * 128, &map, barrier, s * kColumns, row, head, batch, policy);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // S^T and dP^T in registers: 64 keys x queries
  // ------------------------------------------------------------------------------------------------------------------

  // Calls f(n) for every masked element n of an S^T tile: 64 keys from `first_key` on, kCount queries from `first_row` on.
  template <int kCount, typename F>
  __device__ __forceinline__ void for_masked(int first_key, int first_row, F f) const {
    using Fragment = QkFragment<1, kCount / 8>;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = first_key + warp * 16 + Fragment::query(lane, r), begin = key - work().band_last;
      const int end = key < work().seqlen_k ? min(key - work().band_first + 1, work().seqlen_q) : begin;
      for_masked_in_row<Fragment>(r, {begin, end}, first_row, lane, f);
    }
  }

  // lse or delta of the two queries that this lane holds in column block j: 8 j + 2 (lane % 4) and the one after it.
  __device__ __forceinline__ float2 row_stat(uint32_t row, int j) const {
    return ld_shared_float2(row + 8 * (lane & 3) + j * 32);
  }

  // All of them for a Q tile. Kernels load them before they start a wgmma that takes all of shared memory's bandwidth: behind
  // one, the loads wait for hundreds of cycles.
  using RowStats = float2[C::kTileQ / 8];
  __device__ __forceinline__ void load_stats(RowStats &x, uint32_t row) const {
#pragma unroll
    for (int j = 0; j < C::kTileQ / 8; ++j) x[j] = row_stat(row, j);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // P
  // ------------------------------------------------------------------------------------------------------------------

  // The score terms of a query head, for logits in base 2.
  __device__ __forceinline__ HeadTerms head_terms(int head) const {
    if constexpr (!C::kScored) return {};
    return cuda::head_terms(problem, Base2Math::kLogit, work().batch, head);
  }

  // S to P, in place, for 64 keys from `first_key` on and kSteps * 16 queries from `first_row` on: P = exp2(logit - lse).
  //
  // With softcap or ALiBi (kScored) P is converted to 16 bits here, into p16, and s becomes P times the derivative of the
  // softcap, which is what dP - delta is multiplied by. Plain kernels convert P later.
  template <int kSteps>
  __device__ __forceinline__ void exponentiate(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8], uint32_t smem_lse,
                                               int first_key, int first_row, const HeadTerms &head) const {
    if constexpr (!C::kScored) {
      exponentiate_plain(s, problem.softmax_scale * kLog2e, [&](int j) { return row_stat(smem_lse, j); });
    } else {
      with_score_mods<C::kScores>(problem, FastTanhMath{params.raw}, [&](const auto &mods) {
        exponentiate_scored(mods, p16, s, smem_lse, first_key, first_row, head);
      });
    }
  }
  template <class Mods, int kSteps>
  __device__ __forceinline__ void exponentiate_scored(const Mods &mods, uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8],
                                                      uint32_t smem_lse, int first_key, int first_row,
                                                      const HeadTerms &head) const {
    const auto distance = static_cast<float>(first_row + 2 * (lane & 3) + work().seqlen_k - work().seqlen_q -
                                             (first_key + warp * 16 + (lane >> 2)));
#pragma unroll
    for (int j = 0; j < kSteps * 2; ++j) {
      const float2 lse = row_stat(smem_lse, j);
      float p[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const auto steps = static_cast<float>(8 * j + (r & 1) - 8 * (r >> 1));
        float derivative;
        p[r] = exp2_approx(mods.logit(s[4 * j + r], -((r & 1) ? lse.y : lse.x), head, distance + steps, derivative));
        s[4 * j + r] = p[r] * derivative;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) p16[j / 2][j % 2 * 2 + r] = pack2<Element>(p[2 * r], p[2 * r + 1]);
    }
  }
  // With a score text, the same. P of a pair that the text masks is -0. `partial`: pairs of the tile may be masked. Returns whether the text masks
  // any.
  template <int kSteps>
  __device__ __forceinline__ bool exponentiate_text(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8], uint32_t smem_lse,
                                                    int head_q, int first_key, int first_row, bool partial) const {
    const WorkTile &t = work();
    const ScorePlace place{t.batch,
                           head_q,
                           t.seqlen_q,
                           t.seqlen_k,
                           problem.q_lengths.cu != nullptr ? t.q_start : 0,
                           problem.k_lengths.cu != nullptr ? t.k_start : 0};
    const ScoreText text{place, score_text_args(params)};
    const int key0 = first_key + warp * 16 + (lane >> 2), row0 = first_row + 2 * (lane & 3);
    const float scale = ScoreText::kScores ? kLog2e : problem.softmax_scale * kLog2e, softmax_scale = problem.softmax_scale;
    const auto key_number = static_cast<float>(key0), row_number = static_cast<float>(row0);
    bool hidden = false;
#pragma unroll
    for (int j = 0; j < kSteps * 2; ++j) {
      const float2 lse = row_stat(smem_lse, j);
      float p[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int row = row0 + 8 * j + (r & 1), key = key0 + 8 * (r >> 1);
        float x = s[4 * j + r], derivative = 1.f;
        if constexpr (ScoreText::kScores)
          x = text.score_and_derivative(x * softmax_scale, row, key, row_number + static_cast<float>(8 * j + (r & 1)),
                                        key_number + static_cast<float>(8 * (r >> 1)), derivative);
        if (ScoreText::kVisible && partial && !text.visible(row, key)) x = -CUDART_INF_F;
        const bool masked = (ScoreText::kScores || ScoreText::kVisible) && x == -CUDART_INF_F;
        hidden |= masked;
        p[r] = masked ? kMaskedP : exp2_approx(fmaf(x, scale, -((r & 1) ? lse.y : lse.x)));
        s[4 * j + r] = masked ? kMaskedP : p[r] * derivative;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) p16[j / 2][j % 2 * 2 + r] = pack2<Element>(p[2 * r], p[2 * r + 1]);
    }
    return hidden;
  }
  // For mixtures of score terms, in three steps. What is added to the logits of an S tile: bias and ALiBi minus lse. `bias`: BiasColumns, if the problem
  // has one. Adds NaN to `finite` where a bias is not finite.
  template <int kCount, class Bias>
  __device__ __forceinline__ void make_offsets(float (&offset)[kCount], uint32_t smem_lse, const Bias &bias, int first_key,
                                               int first_row, int head_q, float &finite) const {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 lse = row_stat(smem_lse, j);
#pragma unroll
      for (int r = 0; r < 4; ++r) offset[4 * j + r] = -((r & 1) ? lse.y : lse.x);
    }
    if (problem.bias.data != nullptr) bias.add(offset, kLog2e, finite);
    if (has_offset(problem)) {
      const HeadTerms head = head_terms(head_q);
      const auto distance = static_cast<float>(first_row + 2 * (lane & 3) + work().seqlen_k - work().seqlen_q -
                                               (first_key + warp * 16 + (lane >> 2)));
      with_offset<kAlibi | kLogAlibi>(problem, Base2Math{params.raw}, [&](const auto &mods) {
#pragma unroll
        for (int n = 0; n < kCount; ++n)
          offset[n] = mods.add_offset(offset[n], head, distance + static_cast<float>(8 * (n / 4) + (n & 1) - 8 * (n >> 1 & 1)));
      });
    }
  }
  // P, as exponentiate() makes it.
  template <int kSteps>
  __device__ __forceinline__ void exponentiate_mixture(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8],
                                                       const float (&offset)[kSteps * 8]) const {
    const FastTanhMath math{params.raw};
    const auto exponentiate = [&](const auto &mods) {
#pragma unroll
      for (int n = 0; n < kSteps * 8; n += 2) {
        float p[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float derivative;
          p[e] = exp2_approx(mods.logit(s[n + e], offset[n + e], HeadTerms{}, 0.f, derivative));
          s[n + e] = p[e] * derivative;
        }
        p16[n / 8][n % 8 / 2] = pack2<Element>(p[0], p[1]);
      }
    };
    if (has_transform(problem)) {
      exponentiate(ScoreMods<kSoftcap, FastTanhMath>{math, 0.f});
    } else {
      exponentiate(ScoreMods<kPlain, FastTanhMath>{math, 0.f});
    }
  }
  // Where P is dropped it becomes 0 in p16, and negative in s.
  template <int kSteps, class Dropped>
  static __device__ __forceinline__ void drop(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8], const Dropped &dropped) {
#pragma unroll
    for (int n = 0; n < kSteps * 8; ++n) {
      uint32_t &pair = p16[n / 8][n % 8 / 2];
      if (dropped.dropped(n)) s[n] = -s[n], pair &= n & 1 ? 0x0000FFFFu : 0xFFFF0000u;
    }
  }
  // With dropout: P is converted to 16 bits here, into p16, where dropped elements are 0. In s they are negative.
  template <int kSteps, class Dropped>
  __device__ __forceinline__ void exponentiate_dropped(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8], uint32_t smem_lse,
                                                       const Dropped &dropped) const {
    exponentiate_plain(s, params.raw.factor, [&](int j) { return row_stat(smem_lse, j); });
#pragma unroll
    for (int n = 0; n < kSteps * 8; ++n) s[n] = dropped.dropped(n) ? -s[n] : s[n];
#pragma unroll
    for (int n = 0; n < kSteps * 8; n += 2) p16[n / 8][n % 8 / 2] = pack2<Element, /*kRelu=*/true>(s[n], s[n + 1]);
  }
  // The same for plain scores, with lse in registers.
  __device__ __forceinline__ void exponentiate(float (&s)[C::kTileQ / 2], const RowStats &lse) const {
    exponentiate_plain(s, params.raw.factor, [&](int j) { return lse[j]; });
  }
  // lse(j): of the queries of column block j.
  template <int kCount, typename Lse>
  static __device__ __forceinline__ void exponentiate_plain(float (&s)[kCount], float factor, Lse lse) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 x = lse(j);
#pragma unroll
      for (int r = 0; r < 4; ++r) s[4 * j + r] = exp2_approx(fmaf(s[4 * j + r], factor, -((r & 1) ? x.y : x.x)));
    }
  }
  // With a bias: P = exp2(S factor + bias log2(e) - lse).
  template <int kCount, class Bias>
  __device__ __forceinline__ void exponentiate_biased(float (&s)[kCount], uint32_t smem_lse, const Bias &bias) const {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 x = row_stat(smem_lse, j);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float offset = fmaf(bias.at(4 * j + r), kLog2e, -((r & 1) ? x.y : x.x));
        s[4 * j + r] = exp2_approx(fmaf(s[4 * j + r], params.raw.factor, offset));
      }
    }
  }
  // P of pairs that a bias of -inf masks becomes -0, whatever it was. From global memory: for the NaN-safe path.
  template <int kCount>
  __device__ __forceinline__ void mask_biased(float (&p)[kCount], int head_q, int first_key, int first_row) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int key = first_key + warp * 16 + (lane >> 2) + 8 * (n >> 1 & 1),
                row = first_row + n / 4 * 8 + 2 * (lane & 3) + (n & 1);
      if (key < work().seqlen_k && row < work().seqlen_q &&
          load_bias(problem.bias, work().batch, head_q, row, key) == -CUDART_INF_F)
        p[n] = kMaskedP;
    }
  }
  // Masks the results of exponentiate(): P of a masked pair becomes -0.
  template <int kSteps>
  __device__ __forceinline__ void mask_p(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8], int first_key,
                                         int first_row) const {
    for_masked<kSteps * 16>(first_key, first_row, [&](int at) { mask_element(p16, s, at); });
  }
  template <int kSteps>
  static __device__ __forceinline__ void mask_element(uint32_t (&p16)[kSteps][4], float (&s)[kSteps * 8], int at) {
    s[at] = kMaskedP;
    if constexpr (C::kConvertsEarly) {
      uint32_t &pair = p16[at / 8][at % 8 / 2];
      pair = at & 1 ? (pair & 0xFFFFu) | kMaskedPBits << 16 : (pair & 0xFFFF0000u) | kMaskedPBits;
    }
  }
  // 0, or NaN if delta of any query of the Q tile is NaN or Inf, as it is where a row of out is.
  __device__ __forceinline__ float delta_nan_if_nonfinite(uint32_t smem_delta) const {
    float zero = 0.f;
#pragma unroll
    for (int n = 0; n < C::kTileQ / 32; ++n) zero = fmaf(ld_shared_float(smem_delta + (n * 32 + lane) * 4), 0.f, zero);
    return zero;
  }

  // ------------------------------------------------------------------------------------------------------------------
  // dS, dk and dv
  // ------------------------------------------------------------------------------------------------------------------

  // dS^T = ds(P^T, dP^T, delta) of every element, in place of dP^T. p(j) and delta(j) are those of column block j: four elements, and two queries.
  template <int kCount, typename P, typename Delta, typename Ds>
  static __device__ __forceinline__ void for_each_ds(float (&dp)[kCount], P p, Delta delta, Ds ds) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const float2 d = delta(j);
      const float4 x = p(j);
      const float p4[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int r = 0; r < 4; ++r) dp[4 * j + r] = ds(p4[r], dp[4 * j + r], (r & 1) ? d.y : d.x);
    }
  }
  // P (dP - delta). With kLate the subtraction is fmaf(dP, one, -delta), see late_one() in backward_p_registers.cuh.
  template <bool kLate = false, int kCount, typename P, typename Delta>
  static __device__ __forceinline__ void compute_ds(float (&dp)[kCount], P p, Delta delta, float one = 1.f) {
    for_each_ds(dp, p, delta, [&](float p, float dp, float delta) { return p * (kLate ? fmaf(dp, one, -delta) : dp - delta); });
  }
  // With dropout: P is negative where it is dropped. Such a P passes no gradient through P V, but still through the row sum.
  template <int kCount, typename P, typename Delta>
  static __device__ __forceinline__ void compute_ds_dropped(float (&dp)[kCount], P p, Delta delta, float keep_scale) {
    for_each_ds(dp, p, delta,
                [&](float p, float dp, float delta) { return fabsf(p) * fmaf(dp, p < 0.f ? 0.f : keep_scale, -delta); });
  }
  // For scores in which any pair may be hidden: dS where P tells that the pair is visible, -0 where it is masked.
  template <int kCount, typename P, typename Delta>
  static __device__ __forceinline__ void compute_visible_ds(float (&dp)[kCount], P p, Delta delta) {
    for_each_ds(dp, p, delta,
                [&](float p, float dp, float delta) { return is_masked_p(p) ? kMaskedP : fmaf(p, dp - delta, 0.f); });
  }
  // Masks dS: -0 for masked pairs, +0 for visible zeros.
  template <int kCount>
  __device__ __forceinline__ void mask_ds(float (&ds)[kCount], int first_key, int first_row) const {
#pragma unroll
    for (float &x : ds) x += 0.f;
    for_masked<2 * kCount>(first_key, first_row, [&](int n) { ds[n] = kMaskedP; });
  }
  // The same for the elements n for which is_masked(n).
  template <int kCount, typename IsMasked>
  static __device__ __forceinline__ void mask_ds(float (&ds)[kCount], IsMasked is_masked) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) ds[n] = is_masked(n) ? kMaskedP : ds[n] + 0.f;
  }
  // Stores this warp's 16 keys of dS^T (keys, queries) from `first_key` of the tile on: a swizzle atom of C::kTileKv keys for 64 queries each.
  template <int kSteps>
  __device__ __forceinline__ void store_ds_fragment(const uint32_t (&ds16)[kSteps][4], uint32_t tile, int first_key) const {
    const int key = first_key + warp * 16 + (lane & 15);
#pragma unroll
    for (int n = 0; n < kSteps; ++n)
      stmatrix_x4(tile + (n / 4 * C::kTileKv + key) * 128 + (((2 * (n % 4) + (lane >> 4)) ^ (key & 7)) << 4), ds16[n]);
  }

  // The same 16 keys of dS^T, stored as dS (queries, keys): a swizzle atom of 64 keys for each consumer warpgroup, `tile` its own.
  template <int kSteps>
  __device__ __forceinline__ void store_ds_transposed(const uint32_t (&ds16)[kSteps][4], uint32_t tile) const {
    // Matrices 0 and 1 of a step are keys 0 to 7 and 8 to 15 of queries 0 to 7, 2 and 3 the same keys of queries 8 to 15. A lane has the address of
    // one query of one of them.
    const int query = (lane >> 4) * 8 + (lane & 7), keys = warp * 2 + (lane >> 3 & 1);
    const uint32_t at = tile + query * 128 + ((keys ^ (lane & 7)) << 4);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) stmatrix_x4_trans(at + n * 16 * 128, ds16[n]);
  }

  // Starts (commits) dv += P^T dO or dk += dS^T Q: kCount steps of 16 queries, A fragments from a[kFirstStep] on, rows of the Q or dO tile
  // from step `from` on.
  template <int kFirstStep, int kCount, int kRegisters, int kSteps>
  static __device__ __forceinline__ void start_gradient(float (&gradient)[kRegisters], const uint32_t (&a)[kSteps][4],
                                                        uint32_t rows, int from) {
    const uint64_t b = descriptor_mn_major_uniform<C::kTileQ>(rows);
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      Wgmma<Element, 2 * kRegisters>::rs_mn(gradient, a[kFirstStep + n], advance_descriptor(b, (from + n) * 2048), 1);
    wgmma_commit();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Reduction of dq over work tiles
  // ------------------------------------------------------------------------------------------------------------------

  // Stores this warp's 16 rows of a dq partial to shared memory. A partial is a sequence of 16 x 8 tiles, [warp][j], each with
  // four numbers per lane as the accumulators hold them.
  template <int kCount>
  __device__ __forceinline__ void store_dq_partial(const float (&dq)[kCount], uint32_t tile) const {
    const uint32_t mine = tile + warp * (kCount * 128) + (C::kLaneFromShuffle ? opaque(lane) : lane) * 16;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      st_shared_16(mine + j * 512, __float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]), __float_as_uint(dq[4 * j + 2]),
                   __float_as_uint(dq[4 * j + 3]));
    }
  }

  // How many work tiles before this one see the Q tile: this one's position in the order in which they add to dq. The work tiles that bands and
  // lengths show to a Q tile are consecutive.
  __device__ __forceinline__ int dq_order_position(int q_tile, [[maybe_unused]] int head_q = 0) const {
    const int first = max(0, q_tile * C::kTileQ + work().band_first) / C::kTileKv, mine = work().key0 / C::kTileKv;
    if constexpr (!C::kHasDataMask) {
      return mine - first;
    } else {
      if (C::kMixtures && !params.mask.given()) return mine - first;
      // With masks as data, those of them that the cell map shows. A lane has the 16 work tiles of a word.
      constexpr int kTilesOfWord = 32 * kCell / C::kTileKv;
      const DataMask &mask = params.mask;
      const uint32_t *row =
          mask.by_query.visible +
          (mask.plane(work().batch, head_q) * mask.by_query.rows + q_tile * (C::kTileQ / kCell)) * mask.by_query.words;
      int position = 0;
#pragma unroll 1
      for (int word = first / kTilesOfWord + lane; word * kTilesOfWord < mine; word += 32) {
        uint32_t cells = row[word];
        if (C::kTileQ > kCell && q_tile * (C::kTileQ / kCell) + 1 < mask.by_query.rows)
          cells |= row[word + mask.by_query.words];
        // Bit 2 n is work tile n of the word.
        const uint32_t tiles = (cells | cells >> 1) & 0x55555555u;
        const int begin = max(first - word * kTilesOfWord, 0), end = min(mine - word * kTilesOfWord, kTilesOfWord);
        position += __popc(tiles & static_cast<uint32_t>(bits_below(2 * end) & ~bits_below(2 * begin)));
      }
      return __reduce_add_sync(~0u, position);
    }
  }

  // The loop of a warp that reduces dq: for every Q tile of the work tile, TMA adds dq partial number `partial` from `tile` in
  // shared memory to dq_sum. The consumers complete `full` when the partial has been stored; this warp arrives at `empty` when
  // TMA has read it.
  //
  // params.dq_semaphore holds one order counter per Q tile and partial:
  //
  // | mode | first work tile to come | counter |
  // |---|---|---|
  // | zero_dq_sum: dq_sum was zeroed | adds, like all others | not used |
  // | neither | stores its partial; the others wait until it has arrived | 1 when the store is claimed, 2 when it has arrived |
  // | ordered (deterministic) | stores; the others add in ascending order of keys | work tiles whose partial has arrived |
  //
  // A work tile only waits for work tiles that started before it. Main loops run downwards from the last Q tile, so that under
  // a causal mask, too, all work tiles of a head begin with the same Q tile and keep their distance.
  //
  // `visited`: with masks as data, Q tiles that this CTA has visited.
  // With kWarps > 1, warp number `warp` takes every kWarps-th partial, and has a `full` of its own. One warp waits for its
  // addition to arrive while the other has the next partial read.
  template <int kWarps = 1>
  __device__ __forceinline__ void reduce_dq(int partial, uint32_t tile, uint32_t full, uint32_t empty, uint32_t &parity,
                                            int warp = 0, int *visited = nullptr) const {
    if constexpr (C::kHasDataMask) {
      for (int left = masked_tiles().visible[work_stage]; left > 0; --left) {
        if constexpr (C::kMixtures) {  // two registers less
          *visited = work().q_tiles_end - left;
          parity = *visited & 1;
        }
        mbarrier_wait(full, parity);
        // One lane reads, the one that frees dq.
        const VisitedQTile &x = masked_tiles().visited[(*visited)++ % BackwardMaskedTiles::kVisited];
        const int head_q = __shfl_sync(~0u, lane == 0 ? x.head_q : 0, 0),
                  q_tile = __shfl_sync(~0u, lane == 0 ? x.q_tile : 0, 0);
        reduce_dq_of_q_tile(head_q, q_tile, partial, tile, full, empty, parity);
        parity ^= 1;
      }
    } else {
      int n = 0;
      for (int g = 0; g < static_cast<int>(problem.group); ++g) {
        const RotatedQTiles q_tile_at = rotated_q_tiles();
        for (int i = work().q_tile_end - 1; i >= work().q_tile_begin; --i) {
          if (kWarps > 1 && n++ % kWarps != warp) continue;
          reduce_dq_of_q_tile(work().head_k * static_cast<int>(problem.group) + g, q_tile_at(i), partial, tile, full, empty,
                              parity);
          parity ^= 1;
        }
      }
    }
  }
  // The same in cyclic order (cyclic_order.h).
  __device__ __forceinline__ void reduce_dq_cyclic(int partial, uint32_t tile, uint32_t full, uint32_t empty,
                                                   uint32_t &parity) const {
#pragma unroll 1
    for (int g = 0; g < static_cast<int>(problem.group); ++g) {
#pragma unroll 1
      for (int i = work().q_tile_end - 1; i >= 0; --i) {
        const auto [q_tile, position, second] = params.cyclic.at(work().key0 / C::kTileKv, i);
        const int at = workspace_q_tile(work().head_k * static_cast<int>(problem.group) + g) + q_tile;
        const int counter = (2 * at + second) * C::kDqPartials + partial;
        if (params.dq_sum != nullptr) {
          while (load_relaxed(params.dq_semaphore + counter) != position) {
          }
        }
        mbarrier_wait(full, parity);
        if (elect_one()) {
          fence_proxy_async();
          if (params.dq_sum != nullptr) {
            // The second sums lie behind the first ones of all Q tiles.
            float *sum =
                params.dq_sum + int64_t{(at + (second ? q_tiles_of_all_heads(params) : 0)) * C::kDqPartials + partial} *
                                    (C::kDqPartialBytes / 4);
            if (position == 0) {
              bulk_store_commit(sum, tile, C::kDqPartialBytes);
            } else {
              bulk_reduce_add_commit(sum, tile, C::kDqPartialBytes);
            }
          }
          bulk_wait_group_read();
          mbarrier_arrive(empty);
          if (params.dq_sum != nullptr) {
            bulk_wait_group();
            count_released(params.dq_semaphore + counter);
          }
        }
        __syncwarp();
        parity ^= 1;
      }
    }
  }
  __device__ __forceinline__ void reduce_dq_of_q_tile(int head_q, int q_tile, int partial, uint32_t tile, uint32_t full,
                                                      uint32_t empty, uint32_t parity) const {
    const bool wanted = params.dq_sum != nullptr;
    const int index = (workspace_q_tile(head_q) + q_tile) * C::kDqPartials + partial;
    int32_t *counter = params.dq_semaphore + index;
    // The counter's value when this work tile may add. No acquire is needed: everything happens at the L2 cache, where
    // additions come after what has already arrived.
    const int position = params.ordered ? dq_order_position(q_tile, head_q) : 2;
    int now = 2;
    if (wanted && !params.zero_dq_sum) {
      do {
        now = load_relaxed(counter);
      } while (params.ordered && now != position);
    }
    mbarrier_wait(full, parity);
    if (elect_one()) {
      fence_proxy_async();
      if (wanted) {
        if (now != position) now = claim_relaxed(counter);
        while (now == 1 && position == 2) now = load_relaxed(counter);
        float *sum = params.dq_sum + int64_t{index} * (C::kDqPartialBytes / 4);
        if (now == 0) {
          bulk_store_commit(sum, tile, C::kDqPartialBytes);
        } else {
          bulk_reduce_add_commit(sum, tile, C::kDqPartialBytes);
        }
      }
      bulk_wait_group_read();
      mbarrier_arrive(empty);
      if (wanted && (params.ordered || now == 0)) {
        bulk_wait_group();
        count_released(counter);
      }
    }
    __syncwarp();
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Epilogue
  // ------------------------------------------------------------------------------------------------------------------

  // Stores dk or dv of 64 keys from `first_key` on, 16 bytes a lane: the four lanes that hold a row exchange four column
  // blocks. Keys of the sequence's slot that are not used get zero. The last work tile also zeroes the keys of the sequence's slot beyond
  // the grid; `thread` of `threads` threads take part in that. `stored`: store_staged() has stored the 64 keys.
  template <int kCount>
  __device__ __forceinline__ void store_dkv(const Operand &t, const float (&acc)[kCount], float scale, int columns,
                                            bool vectors_at_run_time, int first_key, int thread, int threads,
                                            bool stored = false) const {
    if (t.data == nullptr) return;
    const bool vectors = known_vectors(vectors_at_run_time);
    const int seq_slot = static_cast<int>(unpadded_keys(problem.k_lengths, work().batch).slot);
    if (known_fp32(t.dtype == Dtype::f32)) {
      // `opaque`: else the compiler keeps addresses of this path in registers during the main loop, and spills others.
      float *base = row_of_tensor<float>(t, work().batch, work().k_start, work().head_k);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int key = first_key + warp * 16 + (opaque(lane) >> 2) + 8 * r;
        if (key >= work().seqlen_k) continue;
        store_fragment_row_fp32<kCount / 4>(
            acc, r, [&] { return base + key * t.seq_stride; }, columns, vectors, opaque(lane) & 3, scale);
      }
      // Keys that are not used, whoever owns them.
      const int first = max(work().key0, work().seqlen_k);
      const int end =
          work().key0 / C::kTileKv == params.order.row_blocks - 1 ? seq_slot : min(work().key0 + C::kTileKv, seq_slot);
      for (int key = first; key < end; ++key) {
        for (int column = thread; column < columns; column += threads) base[key * t.seq_stride + column] = 0;
      }
      return;
    }
    Element *base = row_of_tensor<Element>(t, work().batch, work().k_start, work().head_k);
    if (!stored) store_rows(t, base, acc, scale, columns, vectors, first_key, work().seqlen_k, seq_slot);
    if (work().key0 / C::kTileKv != params.order.row_blocks - 1) return;
    zero_rows<2 * kCount>(t, base, columns, vectors, work().key0 + C::kTileKv, seq_slot, thread, threads);
  }
  // Stages this warp's 16 of 64 keys of dk or dv in shared memory at `rows`, in swizzle atoms kAtomPitch bytes apart, and stores them by TMA.
  template <int kAtomPitch, int kCount>
  __device__ __forceinline__ void store_staged(const CUtensorMap &map, const float (&acc)[kCount], float scale, uint32_t rows,
                                               int first_key) const {
    // stmatrix: lane l gives the address of row l % 8 of matrix l / 8. Matrices 0 and 1 are rows 0 to 7 and 8 to 15 of eight columns, 2 and 3 the same
    // rows of the next eight columns.
    const int lane = opaque(this->lane);
    const uint32_t row_address = rows + (lane & 15) * 128, vector = lane >> 4;
#pragma unroll
    for (int column = 0; column < 2 * kCount; column += 16) {
      uint32_t x[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) x[n] = pack2<Element>(acc[column / 2 + 2 * n] * scale, acc[column / 2 + 2 * n + 1] * scale);
      stmatrix_x4(row_address + column / 64 * kAtomPitch + (((column % 64 / 8 + vector) ^ (lane & 7)) << 4), x[0], x[1], x[2],
                  x[3]);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int s = 0; s < 2 * kCount / 64; ++s)
        tma_store_4d(&map, rows + s * kAtomPitch, s * 64, work().k_start + first_key + opaque(warp) * 16, work().head_k,
                     problem.k_lengths.cu != nullptr ? 0 : work().batch);
      bulk_commit_group();
    }
    __syncwarp();
  }
  // Stores 64 rows of a gradient from `first` on to the rows of a sequence that begin at `base`: the first `used` of them are used, the others, up to
  // `seq_slot`, get zero.
  template <int kCount>
  __device__ __forceinline__ void store_rows(const Operand &t, Element *base, const float (&acc)[kCount], float scale,
                                             int columns, bool vectors, int first, int used, int seq_slot) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first + warp * 16 + (lane >> 2) + 8 * r;
      const uint32_t keep = row < used ? ~0u : 0u;
      store_fragment_row_at<Element, kCount / 4>(
          acc, r, [&] { return base + row * t.seq_stride; }, columns, vectors, lane & 3,
          [&](float x, float y) { return pack2<Element>(x * scale, y * scale); }, keep, row < seq_slot);
    }
  }
  // Zeroes kColumns columns, as far as they exist, of rows [first, seq_slot).
  template <int kColumns>
  __device__ __forceinline__ void zero_rows(const Operand &t, Element *base, int columns, bool vectors, int first, int seq_slot,
                                            int thread, int threads) const {
    constexpr int kVectors = kColumns / 8;
    for (int n = thread; n < (seq_slot - first) * kVectors; n += threads) {
      const int column = n % kVectors * 8;
      store_elements(base + (first + n / kVectors) * t.seq_stride + column, {0, 0, 0, 0}, columns - column, vectors);
    }
  }

  const BackwardParams &params;
  const Problem &problem;
  WorkTile *const work_tiles;
  int work_stage = 0;  // of the current work tile
  const uint32_t smem;
  const int lane, warp;  // warp_ within the warpgroup
};

}  // namespace fa::cuda::sm90
