// SPDX-License-Identifier: Apache-2.0
// The KV tiles that masks as data show to a work tile, by the cell map (common/data_mask.h).
//
// A KV tile is partial where a pair may be masked, by the map, the band or the end of the sequence; else it is full. The main loop goes over the
// partial KV tiles first, last key first, then over the full ones in the same order. The scheduler warp counts them, the producer warp loads
// them: each lane has a word of the map, so that one read tells of 1024 cells. Consumer warpgroups need the keys of partial KV tiles and which
// of their cells are partial; the producer warp writes that beside every KV tile.
#pragma once

#include "cuda/common/data_mask.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

// A lane's word of a work tile's rows of cells: 32 cells of keys.
struct TileWord {
  uint32_t visible, partial;  // bit n is the KV tile that begins with cell n of the word
};

// The rows of cells of a work tile. Kernels for mixtures also run without a map, where every cell is visible and none is partial.
template <class C>
__device__ __forceinline__ int rows_of_map(const DataMask &mask, const MaskedTiles &range) {
  return C::kMixtures && !mask.given() ? 0 : range.cell_rows;
}

template <class C>
__device__ __forceinline__ TileWord tile_word(const DataMask &mask, const MaskedTiles &range, int word) {
  constexpr int kCells = C::kKeys / kCell;
  static_assert(kCells == 1 || kCells == 2);
  constexpr uint32_t kTiles = kCells == 1 ? ~0u : 0x55555555u;
  const auto between = [&](int begin, int end) {  // KV tiles
    const auto below = [](int n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; };
    return below(end * kCells - word * 32) & ~below(begin * kCells - word * 32);
  };
  const uint32_t exists = between(range.begin, range.end) & kTiles;
  if (exists == 0) return {0, 0};
  uint32_t any = 0, all = ~0u, partial = 0;
  if (C::kMixtures && !mask.given()) any = ~0u;
#pragma unroll 1
  for (int n = 0; n < rows_of_map<C>(mask, range); ++n) {
    const int64_t at = range.row + n * mask.by_query.words + word;
    const uint32_t visible = mask.by_query.visible[at];
    any |= visible;
    all &= visible;
    partial |= mask.by_query.partial[at];
  }
  if constexpr (kCells == 2) {
    any |= any >> 1;
    all &= all >> 1;
    partial |= partial >> 1;
  }
  // Cells past the end of the keys are not visible; their KV tile is not in the interior.
  const uint32_t full = all & ~partial & between(range.interior_begin, range.interior_end);
  return {any & exists, any & exists & ~full};
}

// The first of the 32 words that hold the last KV tile.
template <class C>
__device__ __forceinline__ int last_words(const MaskedTiles &range) {
  return (max(range.end, 1) - 1) * (C::kKeys / kCell) / 1024 * 32;
}

// The KV tiles of a work tile, one after the other in the order of the main loop. All lanes of a warp take part.
template <class C>
class MaskedTileOrder {
 public:
  __device__ __forceinline__ MaskedTileOrder(const DataMask &mask, const MaskedTiles &range, int lane)
      : mask_(mask), range_(range), lane_(lane), full_(range.partial == 0) {
    begin_pass();
  }

  // There must be a further one.
  __device__ __forceinline__ int next() {
    constexpr int kCells = C::kKeys / kCell;
    uint32_t words;
    while ((words = __ballot_sync(~0u, mine_ != 0)) == 0) {
      if (word0_ * 32 > range_.begin * kCells) {
        word0_ -= 32;
        load();
      } else {  // partial tiles are done
        full_ = true;
        begin_pass();
      }
    }
    const int word = 31 - __clz(static_cast<int>(words)), bit = 31 - __clz(__shfl_sync(~0u, static_cast<int>(mine_), word));
    if (lane_ == word) mine_ ^= 1u << bit;
    return ((word0_ + word) * 32 + bit) / kCells;
  }

 private:
  __device__ __forceinline__ void begin_pass() {
    word0_ = last_words<C>(range_);
    load();
  }
  __device__ __forceinline__ void load() {
    const TileWord x = tile_word<C>(mask_, range_, word0_ + lane_);
    mine_ = full_ ? x.visible & ~x.partial : x.partial;
  }

  const DataMask &mask_;
  const MaskedTiles &range_;  // in shared memory
  const int lane_;
  bool full_;
  int word0_;      // lane l has word word0_ + l:
  uint32_t mine_;  // its KV tiles of this pass that are still to come
};

// Describes the KV tiles of a work tile, of which the band and the lengths show `tiles`, and those in `interior` whole. All lanes of the
// scheduler warp take part.
template <class C, class WorkTile>
__device__ __forceinline__ void describe_masked_tiles(const ForwardParams &a, int batch, int head, int row0, int seqlen_q,
                                                      const KeyRange &tiles, const KeyRange &interior, int lane, WorkTile &t,
                                                      MaskedTiles &range) {
  constexpr int kCells = C::kKeys / kCell;
  const DataMask &mask = a.mask;
  if (lane == 0) {
    range.row = (mask.plane(batch, head) * mask.by_query.rows + row0 / kCell) * mask.by_query.words;
    range.batch = batch;
    range.begin = tiles.begin;
    range.end = tiles.end;
    range.interior_begin = interior.begin;
    range.interior_end = interior.empty() ? interior.begin : interior.end;
    range.cell_rows = min(C::kConsumerWarpgroups, (seqlen_q - row0 + kCell - 1) / kCell);
  }
  __syncwarp();
  int visible = 0, partial = 0, last_partial = -1, last_full = -1;  // cells of the last tiles
#pragma unroll 1
  for (int word = last_words<C>(range) + lane; word >= 0; word -= 32) {
    const TileWord x = tile_word<C>(mask, range, word);
    const uint32_t full = x.visible & ~x.partial;
    visible += __popc(x.visible);
    partial += __popc(x.partial);
    if (last_partial < 0 && x.partial != 0) last_partial = word * 32 + 31 - __clz(static_cast<int>(x.partial));
    if (last_full < 0 && full != 0) last_full = word * 32 + 31 - __clz(static_cast<int>(full));
  }
  __syncwarp();
  visible = __reduce_add_sync(~0u, visible);
  partial = __reduce_add_sync(~0u, partial);
  last_partial = __reduce_max_sync(~0u, last_partial);
  last_full = __reduce_max_sync(~0u, last_full);
  if (lane == 0) {
    range.partial = partial;
    range.first_key = max(last_partial >= 0 ? last_partial : last_full, 0) / kCells * C::kKeys;
    t.kv_tiles = visible;
  }
  if (lane < C::kConsumerWarpgroups) {
    // A warpgroup without rows has no KV tiles.
    t.begin[lane] = row0 + lane * 64 < seqlen_q ? 0 : visible;
    t.masked_end[lane] = partial;
  }
}

// What the map says of the cells of a KV tile, two bits each: bit 2 n is visible, bit 2 n + 1 partial, for n = row of cells * cells of keys + cell
// of keys.
template <class C>
__device__ __forceinline__ uint32_t cell_codes(const DataMask &mask, const MaskedTiles &range, int tile) {
  constexpr int kCells = C::kKeys / kCell;
  const int shift = tile * kCells % 32;
  uint32_t codes = C::kMixtures && !mask.given() ? 0x55555555u : 0;
#pragma unroll 1
  for (int n = 0; n < rows_of_map<C>(mask, range); ++n) {
    const int64_t at = range.row + n * mask.by_query.words + tile * kCells / 32;
    const uint32_t visible = mask.by_query.visible[at] >> shift, partial = mask.by_query.partial[at] >> shift;
#pragma unroll
    for (int cell = 0; cell < kCells; ++cell)
      codes |= ((visible >> cell & 1) | (partial >> cell & 1) << 1) << 2 * (n * kCells + cell);
  }
  return codes;
}

}  // namespace fa::cuda::sm90
