// SPDX-License-Identifier: Apache-2.0
// One CTA of the extend kernel: its sizes, and addresses in its shared memory (shared_storage.h).
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/common/kv_8bit.cuh"
#include "cuda/common/kv_loader.cuh"
#include "cuda/common/segments.h"
#include "cuda/kernels/decode/scheduler.cuh"
#include "cuda/kernels/extend/extend.h"

namespace fa::cuda::extend {

using decode::Keys;

// The work unit's result is a partial for `partial`. Or the unit ends its work tile: then kernels without a combine kernel
// add `num_partials` partials, from number `first_partial` on, which are complete when the counter says so.
// Kernels for FA_FLAG_SAME_BITS hand the total of the work tile over to `partial`. Where num_partials is 1, the unit continues
// the total of `first_partial`. `counter` is the partition's own number, for the segments that it stores. With a combine kernel the unit has
// num_partials segments, from number first_partial of the sequence on, whose partials are `partial` and every `counter` more.
struct WorkUnitDescriptor : decode::WorkDescriptor {
  int partial;  // -1: no partial is stored
  int first_partial, num_partials, counter;
};
static_assert(sizeof(WorkUnitDescriptor) <= kDescriptorBytes);

template <typename Element_, int kD_, int kConsumerWarpgroups_, int kKvTile_, int kStages_, Format kFormat_, int kStages8Bit_,
          bool kUsesCombineKernel_, bool kSameBits_, bool kMasks_>
struct Config {
  static constexpr Format kFormat = kFormat_;  // of K and V
  static constexpr bool k8BitKv = kFormat != Format::same;
  using Element = Element_;  // of the MMA operands; also of Q and out, except with 8-bit KV
  using KvElement = std::conditional_t<k8BitKv, uint8_t, Element>;
  // For one token: consumer warps widen 8-bit KV in registers (token_8bit.cuh). In other kernels producer warps widen it in shared memory.
  static constexpr bool kOneToken = kStages_ == 0, kWidens = k8BitKv && !kOneToken;
  static constexpr int kD = kD_, kDv = kD, kConsumerWarpgroups = kConsumerWarpgroups_, kKvTile = kKvTile_,
                       kStages = kOneToken ? kStages8Bit_ : kStages_;
  static constexpr int kConsumerWarps = kConsumerWarpgroups * 4;
  static constexpr int kRows = kOneToken ? extend::kWarpRows : kConsumerWarpgroups * kWarpgroupRows,
                       kThreads = (kConsumerWarpgroups + 1) * 128;
  // Segments of keys (segments.cuh).
  static constexpr bool kSameBits = kSameBits_;
  static constexpr int kSegmentTiles = kSegmentKeys / kKvTile;
  static constexpr bool kMasks = kMasks_;  // masks as data (masks.cuh)
  // The KV step of the scheduler. Partitions begin and end with segments.
  static constexpr int kKvStep = kSameBits ? kSegmentKeys : kKvTile;
  static constexpr bool kInterleaveRowBlocks = true;
  // For the combine kernel (decode/combine.cuh), which treats the CTA's rows as those of one warp.
  static constexpr bool kUsesCombineKernel = kUsesCombineKernel_, kHasRowBlocks = true;
  static constexpr int kWarpRows = kRows, kRowWarps = 1, kColumnWarps = 1, kMinCtas = 1, kCapability = 90,
                       kPartialsInFlight = kSameBits ? 8 : 6;
  // A run of 16 keys is the height of a TMA box and the K dimension of one P V wgmma.
  static constexpr int kRun = 16, kRuns = kKvTile / kRun;
  static constexpr int kAtoms = kOneToken ? kD / 128 : kD / 64, kAtomBytes = kKvTile * 128,
                       kTileBytes = kAtoms * kAtomBytes;                   // of K or of V
  static constexpr int kPitch = kD * static_cast<int>(sizeof(KvElement));  // bytes of a key
  static constexpr int kProducerWarps = extend::kProducerWarps;
  static constexpr int kWarpKeys = kKvTile / kProducerWarps;  // each producer warp loads a quarter of the keys of every tile
  static constexpr int kStages8Bit = kStages8Bit_;
  // per thread; in total what three warpgroups of 168 registers have
  static constexpr int kProducerRegisters = kD == 64 && (k8BitKv || kMasks) ? 56 : 40,
                       kConsumerRegisters = (3 * 168 - kProducerRegisters) / 2;
  using Storage = SharedStorage<kD, kConsumerWarpgroups, kKvTile, kStages_, kStages8Bit>;
  using Totals = SegmentTotals<kD, kConsumerWarpgroups, kStages8Bit>;
  static constexpr bool kTotalIsShared = total_is_shared(kD, kStages8Bit);
  static constexpr int kTotalsOffset = segment_totals_offset<kD, kConsumerWarpgroups, kKvTile, kStages_, kStages8Bit>();
  static constexpr int kSharedBytes =
      storage_bytes_of<kD, kConsumerWarpgroups, kKvTile, kStages_, kStages8Bit>(kSameBits, kMasks);
  static_assert(!kSameBits || kKvTile == segment_tile_keys(kD));
  static constexpr bool kHoldsQ = holds_q_in_registers(kD);  // in registers
  static_assert(kWarpKeys % kRun == 0 && kWarpKeys <= 32 && k8BitKv == (kStages8Bit > 0));
  static_assert(!kOneToken || (kSameBits && kUsesCombineKernel && kD == 128));
};

template <class C>
class Cta {
 public:
  using Config = C;
  using Element = typename C::Element;

  __device__ __forceinline__ Cta(const Params &params, char *shared)
      : a_(params), p_(params.problem), smem_base_(shared), smem_(smem_address(shared)), lane_(threadIdx.x & 31) {}

  __device__ __forceinline__ const Params &params() const { return a_; }
  __device__ __forceinline__ const Problem &problem() const { return p_; }
  __device__ __forceinline__ int lane() const { return lane_; }

  __device__ __forceinline__ uint32_t tile(int stage) const { return smem_ + stage * C::kTileBytes; }
  // Q of a warpgroup, where it is not in registers.
  __device__ __forceinline__ uint32_t q(int wg) const {
    if constexpr (C::kHoldsQ)
      return 0;
    else
      return smem_ + offsetof(typename C::Storage, q) + wg * static_cast<int>(sizeof(C::Storage::q.rows[0]));
  }
  // mbarriers.
  __device__ __forceinline__ uint32_t full(int stage) const { return smem_ + offsetof(typename C::Storage, full) + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return smem_ + offsetof(typename C::Storage, empty) + stage * 8;
  }
  __device__ __forceinline__ uint32_t work_full(int n) const {
    return smem_ + offsetof(typename C::Storage, work_full) + n * 8;
  }
  __device__ __forceinline__ uint32_t work_empty(int n) const {
    return smem_ + offsetof(typename C::Storage, work_empty) + n * 8;
  }
  __device__ __forceinline__ uint32_t nan_vote(int wg) const {
    return smem_ + offsetof(typename C::Storage, nan_vote) + wg * 8;
  }
  __device__ __forceinline__ uint32_t wg_order(int wg) const {
    return smem_ + offsetof(typename C::Storage, wg_order) + wg * 8;
  }
  __device__ __forceinline__ uint32_t nan_flag(int wg, int n) const {
    return smem_ + offsetof(typename C::Storage, nan_flag) + (2 * wg + n) * 4;
  }
  __device__ __forceinline__ WorkUnitDescriptor &descriptor(int n) const {
    return reinterpret_cast<WorkUnitDescriptor *>(smem_base_ + offsetof(typename C::Storage, descriptor))[n];
  }

  // Kernels that widen 8-bit KV only.
  __device__ __forceinline__ uint32_t kv_8bit(int stage) const {
    if constexpr (!C::kWidens)
      return 0;
    else
      return smem_ + offsetof(typename C::Storage, kv_8bit) + stage * C::kKvTile * C::kD;
  }
  __device__ __forceinline__ uint32_t full_8bit(int stage, int warp) const {
    if constexpr (!C::kWidens)
      return 0;
    else
      return smem_ + offsetof(typename C::Storage, full_8bit) + (stage * C::kProducerWarps + warp) * 8;
  }
  __device__ __forceinline__ uint32_t row_scale(int row) const {
    if constexpr (!C::kWidens)
      return 0;
    else
      return smem_ + offsetof(typename C::Storage, row_scale) + row * 4;
  }

  // Kernels for one token only. Of this lane, 16 bytes beside those of the other lanes: a warp's Q of 16 columns, and the scores of its row r and 16 keys,
  // run `run` of a tile.
  __device__ __forceinline__ uint32_t q_operand(int warp, int step) const {
    return smem_ + offsetof(typename C::Storage, q) + ((warp * (C::kD / 16) + step) * 32 + lane_) * 16;
  }
  __device__ __forceinline__ uint32_t scores(int buffer, int r, int run) const {
    return smem_ + offsetof(typename C::Storage, scores) + (((buffer * C::kRuns + run) * 2 + r) * 32 + lane_) * 16;
  }

  // For FA_FLAG_SAME_BITS only: SegmentTotals. O of a warp: 16 bytes of this lane for each four accumulators, kTotalStep apart.
  static constexpr int kTotalStep = C::kTotalIsShared ? 32 * 16 : 32;
  __device__ __forceinline__ auto total(int warp) const {
    constexpr int kVectors = C::kD / 8;
    if constexpr (C::kTotalIsShared) {
      return smem_ + C::kTotalsOffset + (warp * kVectors * 32 + lane_) * 16;
    } else {
      const int at = (static_cast<int>(blockIdx.x) * (C::kRows / 16) + warp) * kVectors * 32;
      return a_.totals + at + opaque(lane_);  // opaque: registers are scarce, and this is needed once for a segment
    }
  }
  __device__ __forceinline__ uint32_t total_stats() const {
    return smem_ + C::kTotalsOffset + offsetof(typename C::Totals, stats);
  }
  __device__ __forceinline__ uint32_t segment_state() const {
    return smem_ + C::kTotalsOffset + offsetof(typename C::Totals, state);
  }

  // Kernels for masks as data only: TileNotes. `n` counts the tiles that the CTA visits.
  __device__ __forceinline__ uint32_t tile_note(uint32_t n) const { return smem_ + C::kTotalsOffset + n % kTileNotes * 4; }

  __device__ __forceinline__ KvLocator kv_locator() const { return {p_, a_.page_size}; }

  const Params &a_;
  const Problem &p_;
  char *const smem_base_;
  const uint32_t smem_;  // the shared-memory address of smem_base_
  const int lane_;
};

}  // namespace fa::cuda::extend
