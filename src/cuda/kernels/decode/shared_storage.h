// SPDX-License-Identifier: Apache-2.0
// Shared memory of a CTA of the decode kernels. Host and device take its size from here.
#pragma once

#include <cstdint>
#include <type_traits>

namespace fa::cuda::decode {

constexpr int32_t kMaxClusterSize = 16;  // CTAs

// The bucket for latent caches: V is the first columns of K, in the same memory.
constexpr bool is_latent(int32_t head_dim) { return head_dim > 512; }
// Warps of a KV group that share rows (latent_8bit.cuh).
constexpr int32_t column_warps(int32_t head_dim) { return is_latent(head_dim) ? 2 : 1; }
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

// V is in k, which lies as boxes of kLatentBoxRows keys, each in swizzle atoms of 64 columns: [atom][key][64], with the 64-byte swizzle of TMA.
constexpr int32_t kLatentBoxRows = 16, kLatentAtom = 64;
template <int kKvTile, int kPitch>
struct alignas(512) LatentStage8Bit {
  char k[kKvTile / kLatentBoxRows][kPitch / kLatentAtom][kLatentBoxRows][kLatentAtom];
  float k_descale[kKvTile], v_descale[kKvTile];
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

// What the two warps of a KV group for latent caches exchange, and the mbarriers of the group's pipeline.
struct alignas(16) LatentExchange {
  uint32_t p[2][2][32][4];                 // P of each warp's keys, of two tiles in turn
  float top[2][16][2];                     // the largest exponents of each warp's keys by row
  uint32_t exceeds[2][2];                  // whether a maximum has to be raised for a warp's keys, of two tiles in turn
  uint64_t full[2], empty[2], meeting[2];  // one `meeting`, and padding
};
template <class Stage, int kHeadDim, int kRows, int kKvGroups, int kStages>
struct LatentStorage8Bit {
  uint16_t q[kRows][kHeadDim];
  Stage pipeline[kKvGroups][kStages];
  RowStats row_stats[kKvGroups][kRows];
  float row_scale[kRows];
  LatentExchange exchange[kKvGroups];
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

template <int kHeadDim, int kRows, int kKvGroups, int kKvTile, int kStages, int kKvBytes, bool kClustered>
struct SharedStorageOf {
  using Stage8Bit = std::conditional_t<is_latent(kHeadDim), LatentStage8Bit<kKvTile, kHeadDim>, KvStage8Bit<kKvTile, kHeadDim>>;
  using Stage = std::conditional_t<kKvBytes == 1, Stage8Bit, KvStage<kKvTile, kHeadDim * 2>>;
  using Cta8Bit = std::conditional_t<is_latent(kHeadDim), LatentStorage8Bit<Stage, kHeadDim, kRows, kKvGroups, kStages>,
                                     SharedStorage8Bit<Stage, kHeadDim, kRows, kKvGroups, kStages>>;
  using Cta = std::conditional_t<kKvBytes == 1, Cta8Bit, SharedStorage16Bit<Stage, kHeadDim, kRows, kKvGroups, kStages>>;
  using Type = std::conditional_t<kClustered, ClusteredStorage<Cta, kHeadDim, kRows>, Cta>;
};

}  // namespace fa::cuda::decode
