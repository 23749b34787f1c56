// SPDX-License-Identifier: Apache-2.0
// One block of threads of the kernel for queries that extend a cache: its sizes and its shared memory.
#pragma once

#include <type_traits>

#include "cuda/kernels/decode/kv_8bit.cuh"
#include "cuda/kernels/decode/scheduler.cuh"
#include "cuda/kernels/extend/extend.h"

namespace fa::cuda::extend {

using decode::Keys;

// A part is left in `slot`. Or the piece is the last one of an item, and kernels that do not leave all parts add `parts` from `first_part` on to
// it, which are there when the counter says so.
struct WorkUnitDescriptor : decode::RowsAndKeys {
  int partial_slot;  // -1: no part is left
  int first_partial, num_partials, counter;
};
constexpr int kDescriptorBytes = 96;
static_assert(sizeof(WorkUnitDescriptor) <= kDescriptorBytes);

template <typename Element_, int kD_, int kConsumerWarpgroups_, int kKvTile_, int kStages_, decode::Format kFormat_, int kStages8Bit_,
          bool kUsesCombineKernel_>
struct Config {
  static constexpr decode::Format kFormat = kFormat_;  // of K and V
  static constexpr bool k8BitKv = kFormat != decode::Format::same;
  using Element = Element_;  // of the products' operands, and of Q and out unless K and V are bytes
  using KvElement = std::conditional_t<k8BitKv, uint8_t, Element>;
  static constexpr int kD = kD_, kConsumerWarpgroups = kConsumerWarpgroups_, kKvTile = kKvTile_, kStages = kStages_;
  static constexpr int kRows = kConsumerWarpgroups * kGroupRows, kThreads = (kConsumerWarpgroups + 1) * 128;
  static constexpr int kStep = kKvTile;  // of the cut
  static constexpr bool kTurns = true;
  // For the kernel that sums parts (decode/sums.cuh), to which a block's rows are all one warp's.
  static constexpr bool kUsesCombineKernel = kUsesCombineKernel_, kHasRowBlocks = true;
  static constexpr int kWarpRows = kRows, kRowWarps = 1, kMinCtas = 1, kCapability = 90;
  // Runs of sixteen keys are what the copy engine fetches at a time, a slab of each, and a step of P V.
  static constexpr int kRun = 16, kRuns = kKvTile / kRun;
  static constexpr int kAtoms = kD / 64, kAtomBytes = kKvTile * 128, kTileBytes = kAtoms * kAtomBytes;  // of K or V
  static constexpr int kPitch = kD * static_cast<int>(sizeof(KvElement));                            // bytes of a key
  static constexpr int kProducerWarps = 4, kWarpKeys = kKvTile / kProducerWarps;  // warps, and keys of a tile that each fetches
  // Bytes on their way: tiles of those that are still to be widened.
  static constexpr int kStages8Bit = kStages8Bit_, kStage8BitBytes = kKvTile * kD, kStage8BitOffset = kStages * kTileBytes;
  // Of a thread; together what three groups of 168 have.
  static constexpr int kProducerRegisters = k8BitKv && kD == 64 ? 56 : 40, kConsumerRegisters = (3 * 168 - kProducerRegisters) / 2;
  static constexpr int kBarrierOffset = kStage8BitOffset + kStages8Bit * kStage8BitBytes;
  static constexpr int kFlagOffset = kBarrierOffset + (2 * kStages + 4 + 2 * kConsumerWarpgroups + kStages8Bit * kProducerWarps) * 8;
  static constexpr int kDescriptorOffset = kFlagOffset + kConsumerWarpgroups * 8;
  static constexpr int kScaleOffset = kDescriptorOffset + 2 * kDescriptorBytes;  // of bytes
  static constexpr int kSharedBytes = kScaleOffset + (k8BitKv ? kRows * 4 : 0);
  static_assert(kKvTile == 128 && kWarpKeys % kRun == 0 && kWarpKeys <= 32 && kDescriptorOffset % 8 == 0 && k8BitKv == (kStages8Bit > 0));
};

// Where a key lies, as the tensors' strides count; row -1 is read as zero.
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
  // Barriers: a slot of the ring is full, is free; a plan is there, is done; warps of a group have voted; it is a group's turn; a warp's bytes
  // are there.
  __device__ __forceinline__ uint32_t full(int stage) const { return smem_ + C::kBarrierOffset + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(C::kStages + stage); }
  __device__ __forceinline__ uint32_t planned(int n) const { return full(2 * C::kStages + n); }
  __device__ __forceinline__ uint32_t done(int n) const { return planned(2 + n); }
  __device__ __forceinline__ uint32_t nan_vote(int group) const { return planned(4 + group); }
  __device__ __forceinline__ uint32_t wg_turn(int group) const { return nan_vote(C::kConsumerWarpgroups + group); }
  __device__ __forceinline__ uint32_t full_8bit(int n, int warp) const { return wg_turn(C::kConsumerWarpgroups + n * C::kProducerWarps + warp); }
  // What a group has found, in this vote and in the one before.
  __device__ __forceinline__ uint32_t nan_flag(int group, int n) const { return smem_ + C::kFlagOffset + (2 * group + n) * 4; }
  // What a row of S is to be multiplied by.
  __device__ __forceinline__ uint32_t row_scale(int row) const { return smem_ + C::kScaleOffset + row * 4; }
  __device__ __forceinline__ WorkUnitDescriptor &plan(int n) const { return reinterpret_cast<WorkUnitDescriptor *>(smem_base_ + C::kDescriptorOffset)[n]; }

  // Of a key that exists: its page, 0 where there are none, and then where it lies, in a sequence whose keys begin at `start`.
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
  const uint32_t smem_;  // its address
  const int lane_;
};

}  // namespace fa::cuda::extend
