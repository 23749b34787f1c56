// SPDX-License-Identifier: Apache-2.0
// Whether two tensors share memory.
#pragma once

#include <cstdint>

#include "flashattn/flashattn.h"

namespace fa {

// The address range of a tensor: its first byte and the number of bytes up to its last one. The length of an absent or empty tensor is 0.
struct Extent {
  uintptr_t begin;
  int64_t length;
};
Extent extent_of(const fa_tensor &t);

// Whether two extents have a byte in common. The subtractions may wrap around.
inline bool intersect(const Extent &a, const Extent &b) {
  return b.begin - a.begin < static_cast<uintptr_t>(a.length)
             ? b.length > 0
             : a.begin - b.begin < static_cast<uintptr_t>(b.length) && a.length > 0;
}

// True only if some byte belongs to an element of both tensors. Views that interleave in one allocation (packed QKV, halves of a head)
// share no byte. The result is exact for every layout made by slicing, transposing, reshaping and padding. The search ends after a fixed
// number of steps, so it may miss an overlap of tensors with unrelated strides in several dimensions. Both tensors have passed
// check_memory.
bool share_memory(const fa_tensor &a, const fa_tensor &b);

// Whether both tensors describe the same elements in the same order.
bool same_view(const fa_tensor &a, const fa_tensor &b);

}  // namespace fa
