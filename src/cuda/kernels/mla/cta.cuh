// SPDX-License-Identifier: Apache-2.0
// One CTA of the MLA kernel: its configuration, addresses in its shared memory, and the work unit by which its warps agree on what they do.
#pragma once

#include <cstddef>
#include <type_traits>

#include "cuda/common/epilogue.cuh"
#include "cuda/common/kv_8bit.cuh"
#include "cuda/common/segments.h"
#include "cuda/kernels/decode/scheduler.cuh"
#include "cuda/kernels/mla/mla.h"

namespace fa::cuda::mla {

using decode::Keys;

// Describes a work unit to the consumers: a part of a work tile (64 rows of one KV head, and all keys that they see) that lies in one stream-K partition.
//
// Kernels with a combine kernel: a unit that is not the whole work tile, for which `tile_continues` is set, stores partial number `partial`. With
// FA_FLAG_SAME_BITS it stores `counter` partials, `partial_step` apart: of segment `first_partial` of the sequence and those behind it.
// Else the CTA with the work tile's last keys combines the partials of the others and stores the result. A unit that does not hold the last keys
// stores partial number `partial` and counts it at `counter`. Before that, or before the result, `partials` partials are added to the unit's own
// accumulators, once the counter `awaited_counter` has reached that number: the last of every `partial_step` of them from
// `first_partial` on, and the one before this unit's.
struct WorkUnitDescriptor : decode::WorkDescriptor {
  int partial, counter;
  int partials, first_partial, partial_step, awaited_counter;
  // The work tile has exactly two units, and both CTAs of the cluster have no other. They exchange halves of out through DSMEM.
  bool pair;
};

template <typename Element_, Format kFormat_, int kD_, int kDv_, int kKeys_, int kStages_, int kQRegisterAtoms_, bool kPairs_,
          bool kLists_, bool kSameBits_, bool kUsesCombineKernel_>
struct Config {
  static constexpr Format kFormat = kFormat_;  // of K
  static constexpr bool k8BitKv = kFormat != Format::same;
  using Element = Element_;  // of the MMA operands; also of Q and out, except with 8-bit K
  using KvElement = std::conditional_t<k8BitKv, uint8_t, Element>;
  static constexpr int kD = kD_, kDv = kDv_, kKeys = kKeys_, kStages = kStages_, kQRegisterAtoms = kQRegisterAtoms_;
  static constexpr bool kSameBits = kSameBits_;  // for FA_FLAG_SAME_BITS (segments.cuh)
  static constexpr bool kPairs = kPairs_;
  static constexpr bool kUsesCombineKernel = kUsesCombineKernel_;  // partials are added by a kernel of its own
  static constexpr bool kLists = kLists_;  // keys are those that each query lists; else contiguous, or in pages
  // Row blocks are not interleaved first with last: all see about the same number of keys.
  static constexpr bool kInterleaveRowBlocks = false;
  using Storage = SharedStorage<kD, kDv, kKeys, kStages, kQRegisterAtoms>;
  static constexpr int kSlices = kKeys / 16;  // P of a KV tile is passed on, and the tile is released, in slices of 16 keys
  // Two PV warpgroups, one softmax warpgroup, and a warpgroup of producer warps.
  static constexpr int kRows = 64, kThreads = 512, kPvThreads = 256, kSoftmaxThreads = 128, kProducerWarps = 4;
  static constexpr int kKvTile = kKeys,
                       kKvStep = kSameBits ? kLatentSegmentKeys : kKeys;  // the scheduler's: keys of a tile and per iteration
  static constexpr int kColumns = kDv / 2;                                // columns of out in one PV warpgroup
  // A K tile consists of groups of eight rows, [row / 8][atom of 64 columns][8][64], so that a single TMA load brings any eight consecutive
  // rows of a page.
  static constexpr int kAtoms = kD / 64, kAtomBytes = 8 * 128, kRowGroupBytes = kAtoms * kAtomBytes;
  // Lists of 8-bit keys: atoms that the softmax warpgroup multiplies while the others are widened.
  static constexpr int kEarlyAtoms = kLists && k8BitKv ? 5 : kAtoms;
  static constexpr int kTileBytes = kKeys / 8 * kRowGroupBytes, kHalfBytes = kTileBytes / 2;
  static constexpr int kQAtomBytes = kRows * 128, kQBytes = (kAtoms - kQRegisterAtoms) * kQAtomBytes;
  static constexpr int kPBytes = kRows * kKeys * 2;
  static constexpr int kPartialBytes = kRows * kDv * 4;
  static constexpr int kSharedBytes =
      sizeof(Storage) + (kSameBits ? sizeof(SegmentStorage) : 0) + (k8BitKv ? sizeof(ByteStorage) : 0);
  static_assert(kPartialBytes / 2 <= kTileBytes, "the DSMEM buffer is one stage of K");
  static_assert(!kSameBits || (!kPairs && !kLists && alignof(Storage) >= alignof(SegmentStorage)));
  // 8-bit V is descaled before the combine kernel adds partials, but after segments are folded.
  static_assert(!kUsesCombineKernel || (!kPairs && !kLists && !(kSameBits && k8BitKv)));
  static_assert(kKeys == 64 && kStages == 2 && kProducerWarps == 2 * kStages,
                "one producer warp for each half of a stage, or for 16 keys");
};

// The same for the combine kernel (decode/combine.cuh), which knows partials alone and treats a CTA's rows as those of one warp.
template <class C>
struct CombineConfig : C {
  static constexpr bool kHasRowBlocks = true;
  static constexpr int kWarpRows = C::kRows, kRowWarps = 1, kColumnWarps = 1, kMinCtas = 1, kCapability = 90,
                       kPartialsInFlight = C::kSameBits ? 8 : 12;
};

// The wgmma descriptor of a K tile in row groups, with either its columns summed over (K-major, for S) or its rows (MN-major, for P V).
template <class C>
__device__ __forceinline__ uint64_t row_group_descriptor(uint32_t address) {
  return uint64_t{(uniform(address) & 0x3FFFF) >> 4} | uint64_t{C::kAtomBytes >> 4} << 16 |
         uint64_t{C::kRowGroupBytes >> 4} << 32 | uint64_t{1} << 62;
}

template <class C>
class Cta {
 public:
  using Config = C;
  using Storage = typename C::Storage;
  using Element = typename C::Element;

  __device__ __forceinline__ Cta(const Params &params, char *shared)
      : a_(params), p_(params.problem), memory_(shared), shared_(smem_address(shared)), lane_(threadIdx.x & 31) {}

  __device__ __forceinline__ int group_heads() const { return static_cast<int>(a_.group.value); }

  __device__ __forceinline__ uint32_t shared_tile(int stage) const {
    return shared_ + offsetof(Storage, k) + stage * C::kTileBytes;
  }
  __device__ __forceinline__ uint32_t shared_q() const { return shared_ + offsetof(Storage, q); }
  __device__ __forceinline__ uint32_t shared_p(int stage) const { return shared_ + offsetof(Storage, p) + stage * C::kPBytes; }
  // Valid only where a warp has set kRescaled.
  __device__ __forceinline__ uint32_t shared_rescale(int stage, int row) const {
    return shared_ + offsetof(Storage, rescale) + (stage * C::kRows + row) * 4;
  }
  __device__ __forceinline__ uint32_t shared_epilogue(int row) const {
    return shared_ + offsetof(Storage, epilogue) + row * 16;
  }
  __device__ __forceinline__ uint32_t shared_peer_stats(int row) const {
    return shared_ + offsetof(Storage, peer_stats) + row * 8;
  }
  // 8-bit K: what S of a row is multiplied by. It lies where clusters, which such kernels do not have, exchange statistics.
  __device__ __forceinline__ uint32_t shared_row_scale(int row) const {
    static_assert(!C::kPairs || !C::k8BitKv);
    return shared_peer_stats(row);
  }
  // Vector n of this thread in the DSMEM buffer: those of all threads lie side by side.
  __device__ __forceinline__ uint32_t dsmem_buffer(int n) const {
    return shared_ + offsetof(Storage, k) + (n * C::kPvThreads + threadIdx.x) * 16;
  }
  // Flags: P V must take the NaN-safe path; the rescale factor of some row is not 1.
  static constexpr uint32_t kNanSafe = 1, kRescaled = 2;
  __device__ __forceinline__ uint32_t shared_flags(int stage) const { return shared_ + offsetof(Storage, flags) + stage * 16; }
  // Which keys of half a K tile exist. Lists of keys alone have others.
  __device__ __forceinline__ uint32_t shared_listed(int stage, int half) const {
    return shared_ + offsetof(Storage, listed) + stage * 8 + half * 4;
  }
  // The sequence that the descales of a work unit belong to.
  __device__ __forceinline__ int descale_batch(const WorkUnitDescriptor &work) const {
    return C::kLists ? static_cast<int>(work.q_start) : work.batch;
  }
  // SegmentStorage. `segment`: a stored one, or SegmentStorage::kMostStored, the one in registers.
  __device__ __forceinline__ uint32_t shared_total_stats(int row) const {
    return shared_ + sizeof(Storage) + offsetof(SegmentStorage, total) + row * 8;
  }
  __device__ __forceinline__ uint32_t shared_segment(int segment, int row) const {
    return shared_ + sizeof(Storage) + offsetof(SegmentStorage, segments) + (segment * C::kRows + row) * 8;
  }
  __device__ __forceinline__ uint32_t shared_action(int warp) const {
    return shared_ + sizeof(Storage) + offsetof(SegmentStorage, actions) + warp * 4;
  }
  // ByteStorage.
  __device__ __forceinline__ uint32_t byte_storage() const { return shared_ + C::kSharedBytes - sizeof(ByteStorage); }
  __device__ __forceinline__ uint32_t bytes_full(int warp, int group) const {
    return byte_storage() + offsetof(ByteStorage, bytes_full) + (warp * 2 + group) * 8;
  }
  __device__ __forceinline__ uint32_t early_full(int stage) const {
    return byte_storage() + offsetof(ByteStorage, early_full) + stage * 8;
  }
  // Where the segment of a K tile ends in a work unit, and its number in the sequence.
  static constexpr int kSegmentTiles = kLatentSegmentKeys / C::kKeys;
  static __device__ __forceinline__ int segment_end(const WorkUnitDescriptor &work, int tile) {
    return min((tile / kSegmentTiles + 1) * kSegmentTiles, work.kv_tile_end);
  }
  static __device__ __forceinline__ int segment_of(int tile) { return tile / kSegmentTiles; }
  // When all K tiles have been read: maximum and sum of each row of a partial, after room for the out of one partial.
  __device__ __forceinline__ uint32_t shared_partial_stats(int partial, int row) const {
    return shared_ + offsetof(Storage, k) + C::kPartialBytes + (partial * C::kRows + row) * 8;
  }

  __device__ __forceinline__ uint32_t full(int stage) const { return shared_ + offsetof(Storage, full) + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage, int slice) const {
    return shared_ + offsetof(Storage, empty) + (stage * C::kSlices + slice) * 8;
  }
  __device__ __forceinline__ uint32_t p_full(int stage, int slice) const {
    return shared_ + offsetof(Storage, p_full) + (stage * C::kSlices + slice) * 8;
  }
  __device__ __forceinline__ uint32_t epilogue_full() const { return shared_ + offsetof(Storage, epilogue_full); }
  __device__ __forceinline__ uint32_t epilogue_empty() const { return shared_ + offsetof(Storage, epilogue_empty); }
  __device__ __forceinline__ uint32_t work_full(int n) const { return shared_ + offsetof(Storage, work_full) + n * 8; }
  __device__ __forceinline__ uint32_t work_empty(int n) const { return shared_ + offsetof(Storage, work_empty) + n * 8; }
  __device__ __forceinline__ uint32_t softmax_sync() const { return shared_ + offsetof(Storage, softmax_sync); }
  __device__ __forceinline__ uint32_t q_requested() const { return shared_ + offsetof(Storage, q_requested); }
  __device__ __forceinline__ uint32_t dsmem_empty() const { return shared_ + offsetof(Storage, dsmem_empty); }
  __device__ __forceinline__ uint32_t dsmem_stats_full() const { return shared_ + offsetof(Storage, dsmem_stats_full); }
  __device__ __forceinline__ uint32_t dsmem_out_full() const { return shared_ + offsetof(Storage, dsmem_out_full); }
  __device__ __forceinline__ WorkUnitDescriptor &descriptor(int n) const {
    static_assert(sizeof(WorkUnitDescriptor) <= Storage::kWorkUnitBytes);
    return *reinterpret_cast<WorkUnitDescriptor *>(reinterpret_cast<Storage *>(memory_)->work_units[n]);
  }

  // The row of accumulator elements 2 r and 2 r + 1 (modulo 4) in the given warp of a warpgroup, counted within the work unit.
  __device__ __forceinline__ int row_of(int warp, int r) const { return warp * 16 + (opaque(lane_) >> 2) + 8 * r; }
  __device__ __forceinline__ int token_of(const WorkUnitDescriptor &work, int row) const {
    return a_.group.quotient(work.row0 + row);
  }
  __device__ __forceinline__ int head_of(const WorkUnitDescriptor &work, int row) const {
    return work.head * group_heads() + a_.group.remainder(work.row0 + row);
  }
  // Where the rows of a work unit lie in out and lse.
  struct Rows {
    const Cta &cta;
    const WorkUnitDescriptor &work;

    __device__ __forceinline__ Element *out_at(int row) const {
      return row_of_tensor<Element>(cta.p_.out, work.batch, work.q_start + cta.token_of(work, row), cta.head_of(work, row));
    }
    __device__ __forceinline__ float *lse_at(int row) const {  // null if it is not asked for
      if (cta.p_.lse.data == nullptr) return nullptr;
      return row_of_tensor(cta.p_.lse, work.batch, work.q_start + cta.token_of(work, row), cta.head_of(work, row));
    }
  };
  __device__ __forceinline__ Rows rows_of(const WorkUnitDescriptor &work) const { return {*this, work}; }
  // Maximum and sum of each row of the total that the CTA with a partial hands over.
  __device__ __forceinline__ float2 *handed_stats(int partial) const {
    return a_.partial_stats + int64_t{partial} * (a_.partial_warps * 16);
  }
  // The index of the n-th partial that this work unit adds.
  static __device__ __forceinline__ int partial(const WorkUnitDescriptor &work, int partial) {
    return min(work.first_partial + (partial + 1) * work.partial_step, work.partial) - 1;
  }
  __device__ __forceinline__ float2 *partial_stats(int partial) const { return a_.partial_stats + int64_t{partial} * C::kRows; }

  const Params &a_;
  const Problem &p_;
  char *const memory_;
  const uint32_t shared_;  // shared-memory address of memory_
  const int lane_;
};

}  // namespace fa::cuda::mla
