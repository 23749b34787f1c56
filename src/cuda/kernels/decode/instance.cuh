// SPDX-License-Identifier: Apache-2.0
// The kernels of a row of the table, for one type of queries and of K and V.
#pragma once

#include "cuda/kernels/decode/cluster.cuh"
#include "cuda/kernels/decode/combine.cuh"

namespace fa::cuda::decode {

template <typename Element, int kShapeIndex, Format kFormat = Format::same>
Kernels instance() {
  constexpr Shape kShape = kShapes[kShapeIndex];
  using ThisConfig = Config<Element, kShape.head_dim, kShape.warp_rows, kShape.row_warps, kShape.kv_groups, kShape.kv_tile,
                            kShape.stages, kShape.max_ctas_per_sm, kShape.capability, kFormat, kShape.clustered>;
  static_assert(ThisConfig::kSharedBytes == kShape.shared_bytes());
  if constexpr (kFormat == Format::i8) {  // the combine kernel reads neither K nor V: that for e4m3 is the same
    return {reinterpret_cast<const void *>(&decode<ThisConfig>), instance<Element, kShapeIndex, Format::e4m3>().combine};
  } else {
    return {reinterpret_cast<const void *>(&decode<ThisConfig>), combine_kernel<ThisConfig>()};
  }
}

}  // namespace fa::cuda::decode
