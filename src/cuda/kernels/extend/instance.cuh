// SPDX-License-Identifier: Apache-2.0
// The kernels of a row of the table, for one type of queries and of K and V.
#pragma once

#include "cuda/kernels/decode/combine.cuh"
#include "cuda/kernels/extend/cluster.cuh"
#include "cuda/kernels/extend/extend.cuh"
#include "cuda/kernels/extend/token_8bit.cuh"

namespace fa::cuda::extend {

template <typename Element, int kShapeIndex, Format kFormat = Format::same>
decode::Kernels instance() {
  constexpr Shape kShape = kShapes[kShapeIndex];
  if constexpr (kShape.clustered) {
    using ThisConfig = ClusterConfig<Element, kShape.head_dim, kShape.stages>;
    static_assert(ThisConfig::kKvTile == kShape.keys && ThisConfig::kThreads == kShape.threads() && kFormat == Format::same);
    return {reinterpret_cast<const void *>(&extend_clustered<ThisConfig>), nullptr};
  } else {
    using ThisConfig = Config<Element, kShape.head_dim, kShape.consumer_warpgroups, kShape.keys, kShape.stages, kFormat,
                              kShape.stages_8bit, kShape.uses_combine_kernel, kShape.same_bits, kShape.masks>;
    static_assert(ThisConfig::kSharedBytes == kShape.shared_bytes() && ThisConfig::kThreads == kShape.threads());
    const void *attention;
    if constexpr (kShape.one_token()) {
      attention = reinterpret_cast<const void *>(&extend_token<ThisConfig>);
    } else {
      attention = reinterpret_cast<const void *>(&extend<ThisConfig>);
    }
    if constexpr (kFormat == Format::i8) {  // the combine kernel reads neither K nor V: that for e4m3 is the same
      return {attention, instance<Element, kShapeIndex, Format::e4m3>().combine};
    } else {
      return {attention, decode::combine_kernel<ThisConfig>()};
    }
  }
}

}  // namespace fa::cuda::extend
