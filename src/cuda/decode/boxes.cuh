// SPDX-License-Identifier: Apache-2.0
// Rows of keys by the copy engine: boxes of a few rows and all their columns, or a slab of them (describe_rows in launches.h).
#pragma once

#include "cuda/common/hopper.cuh"

namespace fa::cuda::decode {

constexpr uint64_t kEvictNormal = 0x1000000000000000;

// Box at (slab, row, head, batch) of a 5-d map whose columns are slabs of 64.
__device__ __forceinline__ void load_rows_box(uint32_t dst, const CUtensorMap *map, uint32_t barrier, int slab, int row,
                                              int head, int batch, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(slab), "r"(head), "r"(batch), "l"(policy)
      : "memory");
}

}  // namespace fa::cuda::decode
