// SPDX-License-Identifier: Apache-2.0
// One CTA of the extend kernel: its sizes and its shared-memory map.
//
//   shared memory   16-bit pipeline [kStages] of K or V [kAtoms][kKvTile][64] |
//                   8-bit pipeline [kStages8Bit] of K or V [kKvTile][kD] | mbarriers | NaN flags |
//                   2 work descriptors | row scales [kRows] (8-bit KV)
#pragma once

#include <type_traits>

#include "cuda/kernels/decode/kv_8bit.cuh"
#include "cuda/kernels/decode/scheduler.cuh"
#include "cuda/kernels/extend/extend.h"

namespace fa::cuda::extend {

using decode::Keys;

// The work unit's result is a partial for `partial_slot`. Or the unit ends its work tile: then kernels without a combine kernel
// add `num_partials` partials, from slot `first_partial` on, which are complete when the counter says so.
struct WorkUnitDescriptor : decode::WorkDescriptor {
  int partial_slot;  // -1: no partial is stored
  int first_partial, num_partials, counter;
};
constexpr int kDescriptorBytes = 96;
static_assert(sizeof(WorkUnitDescriptor) <= kDescriptorBytes);

template <typename Element_, int kD_, int kConsumerWarpgroups_, int kKvTile_, int kStages_, decode::Format kFormat_,
          int kStages8Bit_, bool kUsesCombineKernel_>
struct Config {
  static constexpr decode::Format kFormat = kFormat_;  // of K and V
  static constexpr bool k8BitKv = kFormat != decode::Format::same;
  using Element = Element_;  // of the MMA operands; also of Q and out, except with 8-bit KV
  using KvElement = std::conditional_t<k8BitKv, uint8_t, Element>;
  static constexpr int kD = kD_, kConsumerWarpgroups = kConsumerWarpgroups_, kKvTile = kKvTile_, kStages = kStages_;
  static constexpr int kRows = kConsumerWarpgroups * kWarpgroupRows, kThreads = (kConsumerWarpgroups + 1) * 128;
  static constexpr int kKvStep = kKvTile;  // the KV step of the scheduler
  static constexpr bool kInterleaveRowBlocks = true;
  // For the combine kernel (decode/combine.cuh), which treats the CTA's rows as those of one warp.
  static constexpr bool kUsesCombineKernel = kUsesCombineKernel_, kHasRowBlocks = true;
  static constexpr int kWarpRows = kRows, kRowWarps = 1, kMinCtas = 1, kCapability = 90;
  // A run of 16 keys is the height of a TMA box and the K dimension of one P V wgmma.
  static constexpr int kRun = 16, kRuns = kKvTile / kRun;
  static constexpr int kAtoms = kD / 64, kAtomBytes = kKvTile * 128, kTileBytes = kAtoms * kAtomBytes;  // of K or of V
  static constexpr int kPitch = kD * static_cast<int>(sizeof(KvElement));                               // bytes of a key
  static constexpr int kProducerWarps = 4,
                       kWarpKeys = kKvTile / kProducerWarps;  // each producer warp loads a quarter of the keys of every tile
  // 8-bit KV: the pipeline of tiles that are still to be widened.
  static constexpr int kStages8Bit = kStages8Bit_, kStage8BitBytes = kKvTile * kD, kStage8BitOffset = kStages * kTileBytes;
  // per thread; in total what three warpgroups of 168 registers have
  static constexpr int kProducerRegisters = k8BitKv && kD == 64 ? 56 : 40,
                       kConsumerRegisters = (3 * 168 - kProducerRegisters) / 2;
  static constexpr int kBarrierOffset = kStage8BitOffset + kStages8Bit * kStage8BitBytes;
  static constexpr int kFlagOffset =
      kBarrierOffset + (2 * kStages + 4 + 2 * kConsumerWarpgroups + kStages8Bit * kProducerWarps) * 8;
  static constexpr int kDescriptorOffset = kFlagOffset + kConsumerWarpgroups * 8;
  static constexpr int kScaleOffset = kDescriptorOffset + 2 * kDescriptorBytes;  // 8-bit KV
  static constexpr int kSharedBytes = kScaleOffset + (k8BitKv ? kRows * 4 : 0);
  static_assert(kKvTile == 128 && kWarpKeys % kRun == 0 && kWarpKeys <= 32 && kDescriptorOffset % 8 == 0 &&
                k8BitKv == (kStages8Bit > 0));
};

// Where a key lies, in units of the tensors' strides; row -1 reads as zeros.
struct KvLocation {
  int batch, row;
};

template <class C>
class Cta {
 public:
  using Config = C;
  using Element = typename C::Element;

  __device__ __forceinline__ Cta(const Params &params, char *shared)
      : a_(params), p_(params.problem), smem_base_(shared), smem_(smem_address(shared)), lane_(threadIdx.x & 31) {}

 protected:
  __device__ __forceinline__ uint32_t tile(int stage) const { return smem_ + stage * C::kTileBytes; }
  // Barriers: a stage is full / empty; a work descriptor is full / empty; the warps of a warpgroup have voted on NaN; it is a
  // warpgroup's turn to issue its wgmmas; a producer warp's part of an 8-bit stage has arrived.
  __device__ __forceinline__ uint32_t full(int stage) const { return smem_ + C::kBarrierOffset + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(C::kStages + stage); }
  __device__ __forceinline__ uint32_t work_full(int n) const { return full(2 * C::kStages + n); }
  __device__ __forceinline__ uint32_t work_empty(int n) const { return work_full(2 + n); }
  __device__ __forceinline__ uint32_t nan_vote(int wg) const { return work_full(4 + wg); }
  __device__ __forceinline__ uint32_t wg_turn(int wg) const { return nan_vote(C::kConsumerWarpgroups + wg); }
  __device__ __forceinline__ uint32_t full_8bit(int n, int warp) const {
    return wg_turn(C::kConsumerWarpgroups + n * C::kProducerWarps + warp);
  }
  // The result of a warpgroup's NaN vote; two of them, for this vote and the previous one.
  __device__ __forceinline__ uint32_t nan_flag(int wg, int n) const { return smem_ + C::kFlagOffset + (2 * wg + n) * 4; }
  // What a row of S is multiplied by.
  __device__ __forceinline__ uint32_t row_scale(int row) const { return smem_ + C::kScaleOffset + row * 4; }
  __device__ __forceinline__ WorkUnitDescriptor &descriptor(int n) const {
    return reinterpret_cast<WorkUnitDescriptor *>(smem_base_ + C::kDescriptorOffset)[n];
  }

  // The page of a key that exists (0 without pages), and the key's location, in a sequence whose keys begin at `start`.
  __device__ __forceinline__ int page_of(int batch, int key) const {
    if (p_.page_table == nullptr) return 0;
    return p_.page_table[batch * p_.page_table_batch_stride + a_.page_size.quotient(key) * p_.page_table_page_stride];
  }
  __device__ __forceinline__ KvLocation locate_in_page(int page, int batch, int64_t start, int key) const {
    if (p_.page_table != nullptr) return {page, a_.page_size.remainder(key)};
    return {p_.k_lengths.cu != nullptr ? 0 : batch, static_cast<int>(start) + key};
  }

  const Params &a_;
  const Problem &p_;
  char *const smem_base_;
  const uint32_t smem_;  // the shared-memory address of smem_base_
  const int lane_;
};

}  // namespace fa::cuda::extend
