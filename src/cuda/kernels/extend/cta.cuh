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
struct Plan : decode::RowsAndKeys {
  int slot;  // -1: no part is left
  int first_part, parts, counter;
};
constexpr int kPlanBytes = 96;
static_assert(sizeof(Plan) <= kPlanBytes);

template <typename Element_, int kD_, int kGroups_, int kKeys_, int kSlots_, decode::Format kFormat_, int kStaged_,
          bool kAllParts_>
struct Config {
  static constexpr decode::Format kFormat = kFormat_;  // of K and V
  static constexpr bool k8BitKv = kFormat != decode::Format::same;
  using Element = Element_;  // of the products' operands, and of Q and out unless K and V are bytes
  using KeyElement = std::conditional_t<k8BitKv, uint8_t, Element>;
  static constexpr int kD = kD_, kGroups = kGroups_, kKeys = kKeys_, kSlots = kSlots_;
  static constexpr int kRows = kGroups * kGroupRows, kThreads = (kGroups + 1) * 128;
  static constexpr int kStep = kKeys;  // of the cut
  static constexpr bool kTurns = true;
  // For the kernel that sums parts (decode/sums.cuh), to which a block's rows are all one warp's.
  static constexpr bool kUsesCombineKernel = kAllParts_, kRowBlocks = true;
  static constexpr int kWarpRows = kRows, kRowWarps = 1, kMinBlocks = 1, kCapability = 90;
  // Runs of sixteen keys are what the copy engine fetches at a time, a slab of each, and a step of P V.
  static constexpr int kRun = 16, kRuns = kKeys / kRun;
  static constexpr int kSlabs = kD / 64, kSlabBytes = kKeys * 128, kTileBytes = kSlabs * kSlabBytes;  // of K or V
  static constexpr int kPitch = kD * static_cast<int>(sizeof(KeyElement));                            // bytes of a key
  static constexpr int kFetchers = 4, kFetched = kKeys / kFetchers;  // warps, and keys of a tile that each fetches
  // Bytes on their way: tiles of those that are still to be widened.
  static constexpr int kStaged = kStaged_, kStagedBytes = kKeys * kD, kStagedOffset = kSlots * kTileBytes;
  // Of a thread; together what three groups of 168 have.
  static constexpr int kFetcherRegisters = k8BitKv && kD == 64 ? 56 : 40, kGroupRegisters = (3 * 168 - kFetcherRegisters) / 2;
  static constexpr int kBarrierOffset = kStagedOffset + kStaged * kStagedBytes;
  static constexpr int kFlagOffset = kBarrierOffset + (2 * kSlots + 4 + 2 * kGroups + kStaged * kFetchers) * 8;
  static constexpr int kPlanOffset = kFlagOffset + kGroups * 8;
  static constexpr int kScaleOffset = kPlanOffset + 2 * kPlanBytes;  // of bytes
  static constexpr int kSharedBytes = kScaleOffset + (k8BitKv ? kRows * 4 : 0);
  static_assert(kKeys == 128 && kFetched % kRun == 0 && kFetched <= 32 && kPlanOffset % 8 == 0 && k8BitKv == (kStaged > 0));
};

// Where a key lies, as the tensors' strides count; row -1 is read as zero.
struct Place {
  int batch, row;
};

template <class C>
class Block {
 public:
  using Config = C;
  using Element = typename C::Element;

  __device__ __forceinline__ Block(const Params &params, char *shared)
      : a_(params), p_(params.problem), memory_(shared), shared_(smem_address(shared)), lane_(threadIdx.x & 31) {}

 protected:
  __device__ __forceinline__ uint32_t tile(int slot) const { return shared_ + slot * C::kTileBytes; }
  // Barriers: a slot of the ring is full, is free; a plan is there, is done; warps of a group have voted; it is a group's turn; a warp's bytes
  // are there.
  __device__ __forceinline__ uint32_t full(int slot) const { return shared_ + C::kBarrierOffset + slot * 8; }
  __device__ __forceinline__ uint32_t free(int slot) const { return full(C::kSlots + slot); }
  __device__ __forceinline__ uint32_t planned(int n) const { return full(2 * C::kSlots + n); }
  __device__ __forceinline__ uint32_t done(int n) const { return planned(2 + n); }
  __device__ __forceinline__ uint32_t voted(int group) const { return planned(4 + group); }
  __device__ __forceinline__ uint32_t turn(int group) const { return voted(C::kGroups + group); }
  __device__ __forceinline__ uint32_t staged(int n, int warp) const { return turn(C::kGroups + n * C::kFetchers + warp); }
  // What a group has found, in this vote and in the one before.
  __device__ __forceinline__ uint32_t found(int group, int n) const { return shared_ + C::kFlagOffset + (2 * group + n) * 4; }
  // What a row of S is to be multiplied by.
  __device__ __forceinline__ uint32_t row_scale(int row) const { return shared_ + C::kScaleOffset + row * 4; }
  __device__ __forceinline__ Plan &plan(int n) const { return reinterpret_cast<Plan *>(memory_ + C::kPlanOffset)[n]; }

  // Of a key that exists: its page, 0 where there are none, and then where it lies, in a sequence whose keys begin at `start`.
  __device__ __forceinline__ int page_of(int batch, int key) const {
    if (p_.page_table == nullptr) return 0;
    return p_.page_table[batch * p_.page_table_batch_stride + a_.page_size.quotient(key) * p_.page_table_page_stride];
  }
  __device__ __forceinline__ Place place_of(int page, int batch, int64_t start, int key) const {
    if (p_.page_table != nullptr) return {page, a_.page_size.remainder(key)};
    return {p_.k_lengths.cu != nullptr ? 0 : batch, static_cast<int>(start) + key};
  }

  const Params &a_;
  const Problem &p_;
  char *const memory_;
  const uint32_t shared_;  // its address
  const int lane_;
};

}  // namespace fa::cuda::extend
