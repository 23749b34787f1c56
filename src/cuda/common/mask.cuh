// SPDX-License-Identifier: Apache-2.0
// Masks of a tile of scores. core/mask.h has the rule of the band (which keys a query sees); here it becomes, on the device:
//
//   tile rule      which KV tiles a block of rows sees at all (touching), and which need no mask code (inside)
//   element rule   which elements of a fragment are visible, as bits, and -inf for the others
//   pair rule      whether one pair (query, key) is visible, for kernels that visit pairs in any order
//
// Masks given as data come on top (data_mask.cuh).
#pragma once

#include <math_constants.h>

#include "core/mask.h"
#include "core/problem.h"
#include "cuda/common/fragment.cuh"
#include "cuda/common/ptx.cuh"

namespace fa::cuda {

using KeyRange = RangeOf<int32_t>;

// KV tiles of kTile keys with a key in the range, and those with all keys in it.
template <int kTile>
__device__ __forceinline__ KeyRange tiles_touching(const KeyRange &keys) {
  return {keys.begin / kTile, (keys.end + kTile - 1) / kTile};
}
template <int kTile>
__device__ __forceinline__ KeyRange tiles_inside(const KeyRange &keys) {
  return {(keys.begin + kTile - 1) / kTile, keys.end / kTile};
}

// Whether the range holds all keys of the tile that begins at key0.
template <int kTile>
__device__ __forceinline__ bool holds_tile(const KeyRange &keys, int key0) {
  return key0 >= keys.begin && key0 + kTile <= keys.end;
}

// Whether the rows of a warp or a CTA see no key of a KV tile, some pairs of it or all.
enum class TileMask { empty, partial, full };
template <int kTile>
__device__ __forceinline__ TileMask tile_mask(const KeyRange &visible, const KeyRange &interior, int key0) {
  if (key0 >= visible.end || key0 + kTile <= visible.begin) return TileMask::empty;
  return holds_tile<kTile>(interior, key0) ? TileMask::full : TileMask::partial;
}

// The visible keys of one query.
__device__ __forceinline__ KeyRange keys_of_query(const Diagonal<int32_t> &diagonal, int query) {
  return diagonal.visible_keys({query, query + 1});
}

// Of the keys that a lane holds of one query, in order, those below `end`, as bits. `end` counts from the lane's first key.
template <class Fragment>
__device__ __forceinline__ uint32_t keys_below(int end);

namespace detail {
// Columns 0, 1, 8, 9, 16, 17, ... of a row in QkFragment. The clamp takes fewer registers than selections.
template <int kNTiles>
__device__ __forceinline__ uint32_t qk_keys_below(int end) {
  static_assert(2 * kNTiles <= 32);
  end = min(max(end, 0), 8 * kNTiles);
  const int count = end / 8 * 2 + min(end % 8, 2);
  if constexpr (2 * kNTiles == 32) return count == 32 ? ~0u : (1u << count) - 1u;
  return (1u << count) - 1u;
}
// Rows 0, 8, 16, ... in KqFragment.
__device__ __forceinline__ uint32_t kq_keys_below(int end) {
  const int count = (end + 7) >> 3;
  return end <= 0 ? 0u : count >= 32 ? ~0u : (1u << count) - 1u;
}
template <class Fragment>
struct KeysBelow;
template <int kM, int kN>
struct KeysBelow<QkFragment<kM, kN>> {
  static __device__ __forceinline__ uint32_t bits(int end) { return qk_keys_below<kN>(end); }
};
template <int kM, int kN>
struct KeysBelow<KqFragment<kM, kN>> {
  static __device__ __forceinline__ uint32_t bits(int end) { return kq_keys_below(end); }
};
}  // namespace detail

template <class Fragment>
__device__ __forceinline__ uint32_t keys_below(int end) {
  return detail::KeysBelow<Fragment>::bits(end);
}

// The keys of a range that this lane holds of one query, as bits; the tile begins at key0.
template <class Fragment>
__device__ __forceinline__ uint32_t visible_bits(const KeyRange &keys, int key0, int lane) {
  const int first = key0 + Fragment::first_key(lane);
  return keys_below<Fragment>(keys.end - first) & ~keys_below<Fragment>(keys.begin - first);
}

// Scores of row r whose bit is 0 become -inf, whatever they were, NaN included.
template <class Fragment, typename Scores>
__device__ __forceinline__ void mask_row(Scores &s, int r, uint32_t visible) {
#pragma unroll
  for (int m = 0; m < Fragment::kKeysOfLane; ++m)
    if ((visible >> m & 1) == 0) element(s, Fragment::at(r, m)) = -CUDART_INF_F;
}

// Calls f(n) for the elements of row r that are outside the range. It is for kernels that would hold visible_bits in registers for long. In
// S^T of the backward a row is a key and the range is of queries: QkFragment with the roles exchanged.
template <class Fragment, typename F>
__device__ __forceinline__ void for_masked_in_row(int r, const KeyRange &keys, int key0, int lane, F f) {
  const int first = key0 + Fragment::first_key(lane), begin = keys.begin - first, end = keys.end - first;
#pragma unroll
  for (int m = 0; m < Fragment::kKeysOfLane; ++m) {
    const int n = Fragment::at(r, m);
    if (Fragment::key(n) < begin || Fragment::key(n) >= end) f(n);
  }
}

// mask_row with the range itself.
template <class Fragment, typename Scores>
__device__ __forceinline__ void mask_row(Scores &s, int r, const KeyRange &keys, int key0, int lane) {
  for_masked_in_row<Fragment>(r, keys, key0, lane, [&](int n) { element(s, n) = -CUDART_INF_F; });
}

// The same for all rows of a lane; row r sees keys(r).
template <class Fragment, typename Scores, typename Keys>
__device__ __forceinline__ void mask_rows(Scores &s, int key0, int lane, Keys keys) {
#pragma unroll
  for (int r = 0; r < Fragment::kRows; ++r) mask_row<Fragment>(s, r, keys(r), key0, opaque(lane));
}

// Scores of keys that do not exist become -inf. `first` and `second` have a bit for each key of a tile of at most 64 keys, the lowest bit first.
template <class Fragment, typename Scores>
__device__ __forceinline__ void mask_keys(Scores &s, uint32_t first, uint32_t second, int lane) {
  const uint32_t exists[2] = {first >> Fragment::first_key(lane), second >> Fragment::first_key(lane)};
#pragma unroll
  for (int n = 0; n < Fragment::kElements; ++n)
    if ((exists[Fragment::key(n) / 32] >> Fragment::key(n) % 32 & 1) == 0) element(s, n) = -CUDART_INF_F;
}

// The pair rule: query i sees key j if first <= j - i <= last, i < seqlen_q and j < seqlen_k.
struct PairMask {
  int first, last, seqlen_q, seqlen_k;

  __device__ __forceinline__ PairMask() {}
  __device__ __forceinline__ PairMask(const Band &band, int seqlen_q, int seqlen_k) : seqlen_q(seqlen_q), seqlen_k(seqlen_k) {
    const Diagonal<int32_t> diagonal(Diagonal<int32_t>::Limits(band), seqlen_q, seqlen_k);
    first = diagonal.shift - diagonal.left;
    last = diagonal.shift + diagonal.right;
  }

  // Of a key, once for all its queries: key - first, or, where the key does not exist, a number that no query reaches.
  __device__ __forceinline__ uint32_t offset(int key) const {
    return key < seqlen_k ? static_cast<uint32_t>(key) - static_cast<uint32_t>(first) : 0xC0000000u;
  }
  __device__ __forceinline__ bool visible(uint32_t offset, int query) const {
    const uint32_t width = static_cast<uint32_t>(last) - static_cast<uint32_t>(first);  // less than 2^31
    return offset - static_cast<uint32_t>(query) <= width && query < seqlen_q;
  }

  // Whether any pair, or every pair, of a tile is visible.
  __device__ __forceinline__ bool any(int query0, int queries, int key0, int keys) const {
    return query0 < seqlen_q && key0 < seqlen_k && key0 + keys - 1 - query0 >= first && key0 - (query0 + queries - 1) <= last;
  }
  __device__ __forceinline__ bool all(int query0, int queries, int key0, int keys) const {
    return key0 + keys <= seqlen_k && key0 - (query0 + queries - 1) >= first && key0 + keys - 1 - query0 <= last;
  }
};

}  // namespace fa::cuda
