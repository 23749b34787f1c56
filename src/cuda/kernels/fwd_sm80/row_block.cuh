// SPDX-License-Identifier: Apache-2.0
// The rows of a CTA of the forward, the KV tiles they see, and where both lie in global memory.
#pragma once

#include <cstddef>

#include "cuda/common/data_mask.cuh"
#include "cuda/common/mask.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/score_text.h"
#include "cuda/common/smem_tile.cuh"
#include "cuda/kernels/fwd_sm80/forward.h"

namespace fa::cuda::sm80 {

template <typename Element_, int kShapeIndex>
struct ForwardConfig {
  using Element = Element_;
  static constexpr ForwardShape kShape = kForwardShapes[kShapeIndex];
  static constexpr int kD = kShape.head_dim, kDv = kShape.head_dim_v, kTile = kShape.kv_tile;
  static constexpr int kWarps = kShape.warps, kThreads = kShape.threads(), kMinCtas = kShape.min_blocks;
  static constexpr int kRows = kShape.rows(), kRowTiles = kShape.row_tiles, kWarpRows = kRowTiles * 16;
  // Warps that share rows. Each has kKeys keys of a tile in S, and kColumns columns of out.
  static constexpr int kColumnWarps = kShape.column_warps, kKeys = kTile / kColumnWarps, kColumns = kDv / kColumnWarps;
  static constexpr ScoreSet kScores = scores_of_program(kShape.scores);
  static constexpr bool has(ScoreSet terms) { return (kScores & terms) != 0; }
  static constexpr bool kStagesBias = stages_bias(kScores);
  using Storage = ForwardStorage<kD, kDv, kWarps, kRowTiles, kColumnWarps, kTile, kMinCtas, kShape.capability, kScores>;
  static_assert(Storage::kP == sizeof(Storage) && Storage::kBytes <= kShape.shared_bytes());
  // The rows of a CTA and the keys of a tile lie in one cell of a mask's map.
  static_assert(!has(kDataMask) || (kCell % kRows == 0 && kCell % kTile == 0));
};

template <class C>
struct RowBlock {
  using Element = typename C::Element;
  using Storage = typename C::Storage;

  const ForwardParams &a;
  const Problem &p;
  const uint32_t smem;  // address of Storage
  const int lane, warp;
  const int column_warp, row_warp;  // among the warps that share rows, and which rows these are

  int b, head_q, head_k;  // head_q is the CTA's first query head
  int64_t k_start;
  int seqlen_k;
  int rows;  // of the sequence that are used; with packed GQA tokens x heads of the group
  int warp_row;
  int tile_begin, tile_end;  // KV tiles that some row of the CTA sees, within this split
  KeyRange interior;         // keys that all rows of the CTA see
  KeyRange warp_visible, warp_interior;
  bool partial_cell;  // kernels with kDataMask: in_partial_cell() of the tile being computed

  __device__ __forceinline__ RowBlock(const ForwardParams &params, char *shared)
      : a(params),
        p(params.problem),
        smem(smem_address(shared)),
        lane(threadIdx.x & 31),
        warp(C::kColumnWarps == 1 ? uniform(threadIdx.x >> 5) : threadIdx.x >> 5),
        column_warp(warp % C::kColumnWarps),
        row_warp(warp / C::kColumnWarps) {
    const L2HeadOrder::Place place = a.order.at(a.num_splits.quotient(static_cast<int>(blockIdx.x)));
    warp_row = place.row_block * C::kRows + row_warp * C::kWarpRows;
    b = uniform(place.batch);
    const int h = uniform(place.head);
    head_q = packed() ? h * static_cast<int>(a.group.value) : h;
    head_k = packed() ? h : a.group.quotient(h);
    const Sequence k = sequence_of(p.k_lengths, b);
    k_start = k.start;
    seqlen_k = static_cast<int>(k.len);
    rows = static_cast<int>(queries().len) * static_cast<int>(a.rows_per_token.value);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Rows
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ bool packed() const { return a.rows_per_token.value != 1; }
  __device__ __forceinline__ int token_of(int row) const { return packed() ? a.rows_per_token.quotient(row) : row; }
  __device__ __forceinline__ int head_of(int row) const { return packed() ? head_q + a.rows_per_token.remainder(row) : head_q; }
  // Loaded again where it is needed: cheaper than registers held through the main loop.
  __device__ __forceinline__ Sequence queries() const { return sequence_of(p.q_lengths, b); }
  __device__ __forceinline__ int row0() const { return warp_row - row_warp * C::kWarpRows; }
  __device__ __forceinline__ int split() const { return a.num_splits.remainder(static_cast<int>(blockIdx.x)); }
  __device__ __forceinline__ int seqlen_q() const { return token_of(rows); }
  __device__ __forceinline__ Diagonal<int32_t> diagonal() const { return {a.limits, seqlen_q(), seqlen_k}; }
  __device__ __forceinline__ KeyRange tokens(int row, int count) const {
    return {token_of(row), token_of(min(row + count, rows) - 1) + 1};
  }

  __device__ __forceinline__ float *lse_at(int row) const {
    if (p.lse.data == nullptr) return nullptr;
    return row_of_tensor(p.lse, b, queries().start + token_of(row), head_of(row));
  }
  __device__ __forceinline__ Element *out_at(int row) const {
    return row_of_tensor<Element>(p.out, b, queries().start + token_of(row), head_of(row));
  }

  // ------------------------------------------------------------------------------------------------------------------
  // KV tiles
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ void find_tiles() {
    const Diagonal<int32_t> d = diagonal();
    const KeyRange mine = tokens(row0(), C::kRows), keys = d.visible_keys(mine);
    tile_begin = keys.begin / C::kTile;
    tile_end = keys.empty() ? tile_begin : (keys.end + C::kTile - 1) / C::kTile;
    if (a.num_splits.value > 1) {
      // Equal parts of the tiles of the longest sequence, so that the host needs no lengths. Short sequences leave splits empty.
      const int count = a.num_splits.quotient(tile_end - tile_begin + static_cast<int>(a.num_splits.value) - 1);
      tile_begin += split() * count;
      tile_end = min(tile_begin + count, tile_end);
    }
    interior = d.interior_keys(mine);
    const KeyRange of_warp = tokens(warp_row, C::kWarpRows);
    warp_visible = warp_row < rows ? d.visible_keys(of_warp) : KeyRange{0, 0};
    warp_interior = d.interior_keys(of_warp);
  }

  __device__ __forceinline__ bool block_mask_visible(int row, int key) const {
    const BlockMask &m = p.block_mask;
    return m.data[b * m.batch_stride + head_q * m.head_stride + a.mask_size_q.quotient(row) * m.row_stride +
                  a.mask_size_k.quotient(key) * m.col_stride] != 0;
  }

  // The next tile at or below `tile` in which masks given as data leave a key visible to a row of the CTA.
  __device__ __forceinline__ int next_tile(int tile) const {
    if constexpr (C::has(kDataMask)) {
      if (a.mask.given() && tile >= tile_begin) {
        constexpr int kTiles = kCell / C::kTile;  // of a cell
        const uint32_t *cells = a.mask.by_query.visible + row_of_cells(a.mask, opaque(b), head_q, row0());
        tile = min(tile, last_visible_cell(cells, tile / kTiles, tile_begin / kTiles) * kTiles + kTiles - 1);
      }
    } else if constexpr (C::has(kBlockMask)) {
      if (p.block_mask.data != nullptr) {
        const int last_row = min(row0() + C::kRows, rows) - 1;
        for (; tile >= tile_begin; --tile) {
          bool visible = block_mask_visible(last_row, tile * C::kTile);
          for (int row = row0(); row < last_row; row += static_cast<int>(a.mask_size_q.value)) {
            visible |= block_mask_visible(row, tile * C::kTile);
          }
          if (visible) break;
        }
      }
    }
    return tile;
  }

  // Whether masks given as data may hide some pair of the CTA's rows and a tile that next_tile() has returned.
  __device__ __forceinline__ bool in_partial_cell(int key0) const {
    if (!a.mask.given()) return false;
    const int cell = key0 / kCell;
    return (a.mask.by_query.partial[row_of_cells(a.mask, opaque(b), head_q, row0()) + cell / 32] >> cell % 32 & 1) != 0;
  }

  // Whether some row of this warp sees a key of a tile that next_tile() has returned. Blocks of a block mask that is read as it is begin at multiples
  // of 64 rows and keys: the rows of a warp and the keys of a tile lie in one of them.
  __device__ __forceinline__ bool warp_sees(int key0) const {
    if (tile_mask<C::kTile>(warp_visible, warp_interior, key0) == TileMask::empty) return false;
    return !C::has(kBlockMask) || C::has(kDataMask) || p.block_mask.data == nullptr || block_mask_visible(warp_row, key0);
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Loads
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ RowSource<Element> kv_source(const Operand &t, int64_t columns, bool vectors) const {
    // Not row_source() and zeros for what only pages have: that would hold strides in registers through the main loop.
    RowSource<Element> s;
    s.base = static_cast<const Element *>(t.data) + head_k * t.head_stride;
    s.row_stride = t.seq_stride;
    s.rows = seqlen_k;
    s.columns = static_cast<int>(columns);
    s.vectors = known_vectors(vectors);
    s.page_table = p.page_table;
    if (p.page_table != nullptr) {
      s.page_table += b * p.page_table_batch_stride;
      s.page_entry_stride = p.page_table_page_stride;
      s.page_stride = t.batch_stride;
      s.page_size = a.page_size;
    } else {
      s.base += b * t.batch_stride + k_start * t.seq_stride;
    }
    return s;
  }

  __device__ __forceinline__ void load_q() const {
    const RowSource<Element> q = row_source<Element>(p.q, b, queries().start, rows, head_q, p.head_dim, a.vector_q);
    if (!packed() && q.whole(row0(), C::kRows)) {
      load_full_tile<C::kRows, C::kD, C::kThreads>(smem_q(), q, row0());
    } else {
      load_rows<Element, C::kRows, C::kD, C::kThreads>(smem_q(), q.vectors, q.columns, [&](int r) -> const Element * {
        const int row = row0() + r;
        return row < rows ? q.base + token_of(row) * q.row_stride + (head_of(row) - head_q) * p.q.head_stride : nullptr;
      });
    }
  }

  // ------------------------------------------------------------------------------------------------------------------
  // Addresses in shared memory
  // ------------------------------------------------------------------------------------------------------------------

  __device__ __forceinline__ uint32_t smem_q() const { return smem; }
  __device__ __forceinline__ uint32_t smem_k(int stage) const {
    return smem + offsetof(Storage, k) + stage * sizeof(Storage::k[0]);
  }
  __device__ __forceinline__ uint32_t smem_v(int stage) const {
    return smem + offsetof(Storage, v) + stage * sizeof(Storage::v[0]);
  }
  // P of the rows of this warp.
  __device__ __forceinline__ uint32_t smem_p() const {
    return smem + Storage::kP + row_warp * C::kWarpRows * Storage::kPRowBytes;
  }
  // The bias of the rows and keys of this warp.
  __device__ __forceinline__ uint32_t smem_bias() const { return smem + Storage::kBias + warp * Storage::kWarpBiasBytes; }
};

}  // namespace fa::cuda::sm80
