// SPDX-License-Identifier: Apache-2.0
// FA_FLAG_SAME_BITS: the segments into which the keys of a sequence are cut, counted from its first key. A segment has a softmax of its own.
// docs/numerics.md, arithmetic 2, has the contract.
#pragma once

#include <cstdint>

namespace fa::cuda {

constexpr int32_t kSegmentKeys = 1024;
// Of latent caches: a segment's out, which has to be folded, is larger beside its keys, and CTAs hand it over one after the other.
constexpr int32_t kLatentSegmentKeys = 2048;
// Of a tile, in which a row's maximum is raised and its sum is added. `head_dim`: the kernel's columns.
constexpr int32_t segment_tile_keys(int32_t head_dim) { return head_dim <= 128 ? 128 : 64; }

}  // namespace fa::cuda
