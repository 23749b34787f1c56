// SPDX-License-Identifier: Apache-2.0
// Masks of a tile of scores. core/mask.h has the rule (which keys a query sees); here it becomes, on the device:
//
//   tile rule      which KV tiles a block of rows sees at all (touching), and which need no mask code (inside)
//   element rule   which elements of a fragment are visible, as bits, and -inf for the others
#pragma once

#include <math_constants.h>

#include "core/mask.h"
#include "cuda/common/fragment.cuh"

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

// Whether the rows of a warp or a CTA see no key of a KV tile, some pairs of it or all.
enum class TileMask { empty, partial, full };
template <int kTile>
__device__ __forceinline__ TileMask tile_mask(const KeyRange &visible, const KeyRange &interior, int key0) {
  if (key0 >= visible.end || key0 + kTile <= visible.begin) return TileMask::empty;
  return key0 < interior.begin || key0 + kTile > interior.end ? TileMask::partial : TileMask::full;
}

// The visible keys of one query.
__device__ __forceinline__ KeyRange keys_of_query(const Diagonal<int32_t> &diagonal, int query) {
  return diagonal.visible_keys({query, query + 1});
}

// Of the keys that a lane holds of one query, in order, those below `end`, as bits. `end` counts from the lane's first key.
template <class Fragment>
__device__ __forceinline__ uint32_t keys_below(int end);

namespace detail {
// Columns 0, 1, 8, 9, 16, 17, ... of a row in QkFragment.
__device__ __forceinline__ uint32_t qk_keys_below(int end) {
  const int count = 2 * (end >> 3) + min(end & 7, 2);
  return end <= 0 ? 0u : count >= 32 ? ~0u : (1u << count) - 1u;
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
  static_assert(2 * kN <= 32);
  static __device__ __forceinline__ uint32_t bits(int end) { return qk_keys_below(end); }
};
template <int kM>
struct KeysBelow<KqFragment<kM>> {
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

}  // namespace fa::cuda
