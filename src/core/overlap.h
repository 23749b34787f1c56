// SPDX-License-Identifier: Apache-2.0
// Whether two tensors share memory.
#pragma once

#include <cstdint>

#include "flashattn/flashattn.h"

namespace fa {

// The first byte of a tensor with elements, and how many bytes from there to its last one; 0 for a tensor that is absent or has none.
struct Extent {
  uintptr_t begin;
  int64_t length;
};
Extent extent_of(const fa_tensor &t);

// Whether two extents have a byte in common. Differences wrap around where the first one begins behind the second.
inline bool meet(const Extent &a, const Extent &b) {
  return b.begin - a.begin < static_cast<uintptr_t>(a.length)
             ? b.length > 0
             : a.begin - b.begin < static_cast<uintptr_t>(b.length) && a.length > 0;
}

// True only if a byte belongs to an element of both tensors; views that interleave in one allocation (packed QKV, halves of a head) share
// none. The search for such a byte is exact for every layout made by slicing, transposing, reshaping and padding. It ends after a fixed
// number of steps, so unrelated strides in several dimensions may hide an overlap from it. Both tensors have passed check_memory.
bool share_memory(const fa_tensor &a, const fa_tensor &b);

// Both describe the same elements in the same order.
bool same_view(const fa_tensor &a, const fa_tensor &b);

}  // namespace fa
