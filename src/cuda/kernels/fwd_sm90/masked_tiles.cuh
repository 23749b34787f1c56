// SPDX-License-Identifier: Apache-2.0
// The KV tiles that masks as data show to a work tile, by the cell map (common/data_mask.h).
//
// A KV tile is partial where a pair may be masked, by the map, the band or the end of the sequence; else it is full. The main loop goes over the
// partial KV tiles first, last key first, then over the full ones in the same order. The scheduler warp counts them, the producer warp loads
// them: both look at 32 KV tiles at once, one per lane. Consumer warpgroups need the keys of partial KV tiles; the producer warp writes the first
// key of every KV tile beside it.
#pragma once

#include "cuda/common/data_mask.cuh"
#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

struct TileBits {
  uint32_t visible, partial;  // bit l is KV tile from + l
};

// Of KV tiles [from, from + 32). All lanes take part.
template <class C>
__device__ __forceinline__ TileBits tiles_from(const DataMask &mask, const MaskedTiles &range, int from, int lane) {
  constexpr int kCells = C::kKeys / kCell;
  static_assert(C::kKeys % kCell == 0 && 32 % kCells == 0);
  constexpr uint32_t kAllCells = (1u << kCells) - 1;
  const int tile = from + lane;
  const bool exists = tile >= range.begin && tile < range.end;
  uint32_t any = 0, all = kAllCells, partial = 0;
  if (exists) {
    const int64_t word = range.row + tile * kCells / 32;
    const int shift = tile * kCells % 32;
    for (int n = 0; n < range.cell_rows; ++n) {
      const uint32_t visible = mask.by_query.visible[word + n * mask.by_query.words] >> shift & kAllCells;
      any |= visible;
      all &= visible;
      partial |= mask.by_query.partial[word + n * mask.by_query.words] >> shift & kAllCells;
    }
  }
  // Cells past the end of the keys are not visible; their KV tile is not in the interior.
  const bool full = all == kAllCells && partial == 0 && tile >= range.interior_begin && tile < range.interior_end;
  return {__ballot_sync(~0u, any != 0), __ballot_sync(~0u, any != 0 && !full)};
}

// The first of the 32 KV tiles, counted from a multiple of 32, that hold the last one.
__device__ __forceinline__ int last_chunk(const MaskedTiles &range) { return (range.end - 1) & ~31; }

// The KV tiles of a work tile, one after the other in the order of the main loop. All lanes of a warp take part.
template <class C>
class MaskedTileWalk {
 public:
  __device__ __forceinline__ MaskedTileWalk(const DataMask &mask, const MaskedTiles &range, int lane)
      : mask_(mask), range_(range), lane_(lane), from_(last_chunk(range)) {
    load();
  }

  // There must be a further one.
  __device__ __forceinline__ int next() {
    while (bits_ == 0) {
      from_ -= 32;
      if (from_ + 32 <= range_.begin) {  // partial tiles are done
        full_ = true;
        from_ = last_chunk(range_);
      }
      load();
    }
    const int bit = 31 - __clz(static_cast<int>(bits_));
    bits_ ^= 1u << bit;
    return from_ + bit;
  }

 private:
  __device__ __forceinline__ void load() {
    const TileBits tiles = tiles_from<C>(mask_, range_, from_, lane_);
    bits_ = full_ ? tiles.visible & ~tiles.partial : tiles.partial;
  }

  const DataMask &mask_;
  const MaskedTiles &range_;  // in shared memory
  const int lane_;
  int from_;
  bool full_ = false;
  uint32_t bits_;
};

// Describes the KV tiles of a work tile, of which the band and the lengths show [keys.begin, keys.end), whole where `interior` says so. All lanes of
// the scheduler warp take part.
template <class C, class WorkTile>
__device__ __forceinline__ void describe_masked_tiles(const ForwardParams &a, int batch, int head, int row0, int seqlen_q,
                                                      const KeyRange &tiles, const KeyRange &interior, int lane, WorkTile &t,
                                                      MaskedTiles &range) {
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
  int visible = 0, partial = 0, first_partial = -1, first_full = -1;
#pragma unroll 1
  for (int from = last_chunk(range); from + 32 > range.begin && from < range.end; from -= 32) {
    const TileBits bits = tiles_from<C>(mask, range, from, lane);
    const uint32_t full = bits.visible & ~bits.partial;
    visible += __popc(bits.visible);
    partial += __popc(bits.partial);
    if (first_partial < 0 && bits.partial != 0) first_partial = from + 31 - __clz(static_cast<int>(bits.partial));
    if (first_full < 0 && full != 0) first_full = from + 31 - __clz(static_cast<int>(full));
  }
  if (lane == 0) {
    range.first_key = (first_partial >= 0 ? first_partial : max(first_full, 0)) * C::kKeys;
    t.kv_tiles = visible;
  }
  if (lane < C::kConsumerWarpgroups) {
    // A warpgroup without rows has no KV tiles.
    t.begin[lane] = row0 + lane * 64 < seqlen_q ? 0 : visible;
    t.masked_end[lane] = partial;
  }
}

}  // namespace fa::cuda::sm90
