// SPDX-License-Identifier: Apache-2.0
// The KV tiles that a block mask shows to a work tile. All rows of a work tile have the same blocks of keys (ForwardShape::fits_block_mask).
//
// The scheduler warp counts these KV tiles, the producer warp loads them: both look at 32 numbers of the range at once, one per lane. Consumer
// warpgroups need the keys of a KV tile only where it has masked pairs; the producer warp writes its first key beside it.
#pragma once

#include "cuda/kernels/fwd_sm90/cta.cuh"

namespace fa::cuda::sm90 {

// Whether a KV tile is visible. `row`: offset of the work tile's row of the mask.
__device__ __forceinline__ bool is_visible(const ForwardParams &a, int64_t row, int kv_tile) {
  const BlockMask &mask = a.problem.block_mask;
  return mask.data[row + a.mask_block.quotient(kv_tile) * mask.col_stride] != 0;
}

// Numbers [from, from + 32) of a range of `tiles` KV tiles: bit l is number from + l. All lanes take part.
template <class WorkTile>
__device__ __forceinline__ uint32_t visible_in_range(const ForwardParams &a, const WorkTile &t, int64_t row, int tiles,
                                                     int from, int lane) {
  const int i = from + lane;
  return __ballot_sync(~0u, i < tiles && is_visible(a, row, t.kv_tile(i, tiles)));
}

// Fills the range of a work tile, of which `t` and the range describe all KV tiles, and leaves in `t` the numbers of those that are visible.
// All lanes of the scheduler warp take part; lane n < kConsumerWarpgroups has begin and masked_end of warpgroup n.
template <class C, class WorkTile>
__device__ __forceinline__ void apply_block_mask(const ForwardParams &a, int batch, int head, int row0, int lane, int tiles,
                                                 int begin, int masked_end, WorkTile &t,
                                                 BlockMaskRange<C::kConsumerWarpgroups> &range) {
  const BlockMask &mask = a.problem.block_mask;
  const int64_t row =
      batch * mask.batch_stride + head * mask.head_stride + row0 / static_cast<int>(mask.size_q) * mask.row_stride;
  __syncwarp();  // t.first, t.left_masked and t.right_masked have been written
  int visible = 0, before_begin = 0, before_masked_end = 0, first = -1;
  const auto below = [](int n) { return n >= 32 ? ~0u : n <= 0 ? 0u : (1u << n) - 1; };
#pragma unroll 1
  for (int from = 0; from < tiles; from += 32) {
    const uint32_t bits = visible_in_range(a, t, row, tiles, from, lane), mine = bits & ~below(begin - from);
    visible += __popc(bits);
    before_begin += __popc(bits & below(begin - from));
    before_masked_end += __popc(bits & below(masked_end - from));
    if (first < 0 && mine != 0) first = from + __ffs(static_cast<int>(mine)) - 1;
  }
  const int first_key = first < 0 ? 0 : t.kv_tile(first, tiles) * C::kKeys;
  __syncwarp();  // all lanes have read the description
  if (lane == 0) {
    range.row = row;
    range.kv_tiles = tiles;
    t.kv_tiles = visible;
  }
  if (lane < C::kConsumerWarpgroups) {
    range.begin[lane] = begin;
    range.masked_end[lane] = masked_end;
    range.first_key[lane] = first_key;
    t.begin[lane] = before_begin;
    t.masked_end[lane] = before_masked_end;
  }
}

// The visible KV tiles of a work tile, one after the other, in the order of the range. All lanes take part.
template <class WorkTile>
class VisibleTiles {
 public:
  __device__ __forceinline__ VisibleTiles(const ForwardParams &a, int64_t row, int tiles, int lane)
      : a_(a), row_(row), tiles_(tiles), lane_(lane) {}

  // There must be a further one.
  __device__ __forceinline__ int next(const WorkTile &t) {
    while (bits_ == 0) {
      from_ += 32;
      bits_ = visible_in_range(a_, t, row_, tiles_, from_, lane_);
    }
    const int i = from_ + __ffs(static_cast<int>(bits_)) - 1;
    bits_ &= bits_ - 1;
    return t.kv_tile(i, tiles_);
  }

 private:
  const ForwardParams &a_;
  const int64_t row_;
  const int tiles_, lane_;
  int from_ = -32;
  uint32_t bits_ = 0;
};

}  // namespace fa::cuda::sm90
