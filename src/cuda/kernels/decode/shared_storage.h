// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of the decode kernels. Host and device take its size from here.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/swizzle_atom.h"

namespace fa::cuda::decode {

constexpr int32_t kMaxClusterSize = 16;  // CTAs

// The bucket for latent caches: V is the first columns of K, in the same memory.
constexpr bool is_latent(int32_t head_dim) { return head_dim > 512; }
// Warps of a KV group that share rows (wide_8bit.cuh).
constexpr int32_t column_warps(int32_t head_dim, int32_t warp_rows) { return head_dim > 256 && warp_rows == 16 ? 2 : 1; }
constexpr int32_t value_columns(int32_t head_dim) { return is_latent(head_dim) ? 512 : head_dim; }

// K and V of one KV step of a KV group; rows are swizzled.
template <int kKvTile, int kPitch>
struct KvStage {
  char k[kKvTile][kPitch], v[kKvTile][kPitch];
};
template <int kKvTile, int kPitch>
struct KvStage8Bit {
  char k[kKvTile][kPitch], v[kKvTile][kPitch];
  float k_descale[kKvTile], v_descale[kKvTile];
};

// For wide_8bit.cuh: the keys of each of two warps are a box of kWideBoxRows rows in swizzle atoms of 64 columns, [atom][row][64], with the 64-byte
// swizzle of TMA. In latent caches V is in k.
constexpr int32_t kWideBoxRows = 16;
template <int kHeadDim>
struct WideBox {
  char x[kHeadDim / kWideAtom][kWideBoxRows][kWideAtom];
};
template <int kHeadDim, bool kLatent = is_latent(kHeadDim)>
struct alignas(512) WideStage8Bit {
  WideBox<kHeadDim> k[2];
  float k_descale[2 * kWideBoxRows], v_descale[2 * kWideBoxRows];
};
template <int kHeadDim>
struct alignas(512) WideStage8Bit<kHeadDim, false> {
  WideBox<kHeadDim> k[2], v[2];
  float k_descale[2 * kWideBoxRows], v_descale[2 * kWideBoxRows];
};

struct RowStats {
  float max, sum;
};

// In the epilogue each KV group's fp32 out [kRows][value_columns(kHeadDim)] reuses its pipeline.
template <class Stage, int kHeadDim, int kRows, int kKvGroups, int kStages>
struct SharedStorage16Bit {
  uint16_t q[kRows][kHeadDim];  // swizzled
  Stage pipeline[kKvGroups][kStages];
  RowStats row_stats[kKvGroups][kRows];
};
template <class Stage, int kHeadDim, int kRows, int kKvGroups, int kStages>
struct SharedStorage8Bit {
  uint16_t q[kRows][kHeadDim];
  Stage pipeline[kKvGroups][kStages];
  RowStats row_stats[kKvGroups][kRows];
  float row_scale[kRows];  // what a row of Q K^T is multiplied by
};

// What the two warps of a KV group that share rows exchange, and the mbarriers of the group's pipeline.
struct alignas(16) WideExchange {
  uint32_t p[2][2][32][4];                 // P of each warp's keys, of two tiles in turn
  float top[2][16][2];                     // the largest exponents of each warp's keys by row
  uint32_t exceeds[2][2];                  // whether a maximum has to be raised for a warp's keys, of two tiles in turn
  uint64_t full[2], empty[2], meeting[2];  // one `meeting`, and padding
};
template <class Stage, int kHeadDim, int kRows, int kKvGroups, int kStages>
struct WideStorage8Bit {
  uint16_t q[kRows][kHeadDim];
  Stage pipeline[kKvGroups][kStages];
  RowStats row_stats[kKvGroups][kRows];
  float row_scale[kRows];
  WideExchange exchange[kKvGroups];
};

// With clusters there is a DSMEM buffer as well, to which all CTAs send the partials that this one combines. A vector is four
// columns of fp32 out with its row's maximum and row sum. The vectors of all rows are divided evenly among the CTAs, rounded up.
template <class Storage, int kHeadDim, int kRows>
struct ClusteredStorage {
  static constexpr int kVectors = kRows * kHeadDim / 4 + kMaxClusterSize;

  Storage cta;
  float out[kVectors][4];
  RowStats stats[kVectors];
  uint64_t barrier[2];  // one mbarrier, and padding
};

template <int kHeadDim, int kRows, int kColumnWarps, int kKvGroups, int kKvTile, int kStages, int kKvBytes, bool kClustered>
struct SharedStorageOf {
  static constexpr bool k8Bit = kKvBytes == 1, kWide8Bit = k8Bit && kColumnWarps > 1;
  using Stage8Bit = std::conditional_t<kWide8Bit, WideStage8Bit<kHeadDim>, KvStage8Bit<kKvTile, kHeadDim>>;
  using Stage = std::conditional_t<k8Bit, Stage8Bit, KvStage<kKvTile, kHeadDim * 2>>;
  using Cta8Bit = std::conditional_t<kWide8Bit, WideStorage8Bit<Stage, kHeadDim, kRows, kKvGroups, kStages>,
                                     SharedStorage8Bit<Stage, kHeadDim, kRows, kKvGroups, kStages>>;
  using Cta = std::conditional_t<k8Bit, Cta8Bit, SharedStorage16Bit<Stage, kHeadDim, kRows, kKvGroups, kStages>>;
  using Type = std::conditional_t<kClustered, ClusteredStorage<Cta, kHeadDim, kRows>, Cta>;
};

}  // namespace fa::cuda::decode
