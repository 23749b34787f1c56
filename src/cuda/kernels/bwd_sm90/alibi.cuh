// SPDX-License-Identifier: Apache-2.0
// ALiBi by wgmma in the backward (common/alibi.cuh): the operands of its K step.
//
// The step multiplies keys [64][16] by slopes [16][kTileQ]. Every column of the second operand holds the three parts of the slope. The first one is MN-major:
// a row of K is 16 bytes for each eight keys. Eight keys further is one row further, so the rows of a core matrix are those of the next ones, and all 128 keys
// of a work tile take 24 rows in place of 256. Row c of K then has key j - key0 + 8 c, and S gets
//
//   slope (j - key0) + 8 (middle + 2 low)
//
// The second term is a constant of the head, which write_alibi() takes back with lse.
#pragma once

#include "cuda/common/alibi.cuh"
#include "cuda/kernels/bwd_sm90/shared_storage.h"

namespace fa::cuda::sm90 {

// Writes the operand of keys, and the zeros. All lanes of the warp take part.
template <class C>
__device__ __forceinline__ void write_alibi_keys(uint32_t smem, int lane) {
  using Storage = typename C::Storage;
  constexpr int kKeyRows = decltype(Storage::stats)::kKeyRows;
  static_assert(kKeyRows + 8 == 32 && C::kTileKv / 8 + 8 <= kKeyRows);
  if (lane < kKeyRows) {
    const auto pair = [&](int n) {
      return pack2<typename C::Element>(static_cast<float>(8 * lane + 2 * n), static_cast<float>(8 * lane + 2 * n + 1));
    };
    st_shared_16(smem + offsetof(Storage, stats.keys) + lane * 16, pair(0), pair(1), pair(2), pair(3));
  } else {
    st_shared_16(smem + offsetof(Storage, stats.zeros) + (lane - kKeyRows) * 16, 0, 0, 0, 0);
  }
  fence_proxy_async();
}

// The descriptors: of the keys of a consumer warpgroup, and of the slope in a stage. Of K the second eight rows of the latter are zeros, those of the former any
// keys.
template <class C>
__device__ __forceinline__ uint64_t alibi_keys(uint32_t smem, int warpgroup) {
  using Storage = typename C::Storage;
  constexpr int kKeys = offsetof(Storage, stats.keys);
  static_assert(kKeys + C::kTileKv * 2 - 128 + 64 * 32 <= sizeof(Storage));  // for compute-sanitizer
  return descriptor_mn_major_unswizzled<16, 16>(smem + kKeys + warpgroup * (64 * 2));
}
template <class C>
__device__ __forceinline__ uint64_t alibi_slopes(uint32_t smem, int stage) {
  using Storage = typename C::Storage;
  constexpr int kSlopes = offsetof(Storage, stats.slopes), kZeros = offsetof(Storage, stats.zeros) - kSlopes;
  static_assert(kSlopes + (C::kStages - 1) * 128 + C::kTileQ * 32 <= sizeof(Storage));
  // Stage by stage it is 128 bytes nearer to the zeros.
  return advance_descriptor(descriptor_k_major_unswizzled<kZeros, 0>(smem + kSlopes), stage * (128 - (128 << 16)));
}

}  // namespace fa::cuda::sm90
