// SPDX-License-Identifier: Apache-2.0
// One CTA of the MLA kernel: its configuration, its shared memory and mbarriers, and the work unit by which its warps agree on what they do.
//
// Shared memory, in this order:
//
//   K tiles      [kStages][kKeys / 8][kAtoms][8][64]   Element; at the end of a work tile reused for partials and as the DSMEM buffer
//   Q            [kAtoms - kQRegisterAtoms][64][64]    Element; the other columns of Q are in registers of the softmax warpgroup
//   P            [kStages][64][kKeys]                  Element
//   rescale      [kStages][64]                         factor of out of each row before P V is added
//   epilogue     [64]                                  16 bytes a row: scale of this CTA's out before partials are added, final scale, address
//   peer stats   [64]                                  8 bytes a row: maximum and sum of the other CTA of a cluster
//   flags        [kStages][4 warps]
//   mbarriers, two work units
#pragma once

#include "cuda/common/epilogue.cuh"
#include "cuda/kernels/decode/scheduler.cuh"
#include "cuda/kernels/mla/mla.h"

namespace fa::cuda::mla {

using decode::Keys;

// A work unit: a part of a work tile (64 rows of one KV head, and all keys that they see) that lies in one stream-K partition.
//
// The CTA with the work tile's last keys combines the partials of the others and stores the result. A unit that does not hold the last keys
// leaves a partial in `slot` and counts it at `counter`. Before that, or before the result, `partials` partials are added to the unit's own
// accumulators, once the counter `awaited_counter` has reached that number: those in the last of every `partial_step` slots from
// `first_partial` on, and the one in the slot before this unit's.
struct WorkUnit : decode::WorkDescriptor {
  int slot, counter;
  int partials, first_partial, partial_step, awaited_counter;
  // The work tile has exactly two units, and both CTAs of the cluster have no other. They exchange halves of out through DSMEM.
  bool pair;
};

template <typename Element_, int kD_, int kDv_, int kKeys_, int kStages_, int kQRegisterAtoms_, bool kPairs_>
struct Config {
  using Element = Element_;
  static constexpr int kD = kD_, kDv = kDv_, kKeys = kKeys_, kStages = kStages_, kQRegisterAtoms = kQRegisterAtoms_;
  static constexpr bool kPairs = kPairs_;
  static constexpr bool kInterleaveRowBlocks =
      false;  // row blocks are not interleaved first with last: all see about the same number of keys
  static constexpr int kSlices = kKeys / 16;  // P of a KV tile is passed on, and the tile is released, in slices of 16 keys
  // Two PV warpgroups, one softmax warpgroup, and a warpgroup of producer warps.
  static constexpr int kRows = 64, kThreads = 512, kPvThreads = 256, kSoftmaxThreads = 128, kProducerWarps = 4;
  static constexpr int kKvStep = kKeys;     // keys per iteration of the scheduler
  static constexpr int kColumns = kDv / 2;  // columns of out in one PV warpgroup
  // A K tile consists of groups of eight rows, [row / 8][atom of 64 columns][8][64], so that a single TMA load brings any eight consecutive
  // rows of a page.
  static constexpr int kAtoms = kD / 64, kAtomBytes = 8 * 128, kRowGroupBytes = kAtoms * kAtomBytes;
  static constexpr int kTileBytes = kKeys / 8 * kRowGroupBytes, kHalfBytes = kTileBytes / 2;
  static constexpr int kQAtomBytes = kRows * 128, kQBytes = (kAtoms - kQRegisterAtoms) * kQAtomBytes;
  static constexpr int kPBytes = kRows * kKeys * 2;
  static constexpr int kPartialBytes = kRows * kDv * 4;
  static_assert(kPartialBytes / 2 <= kTileBytes, "half of out lands in one stage of the ring");
  static constexpr int kBarriers = (1 + 2 * kSlices) * kStages + 11, kWorkUnitBytes = 96;
  static constexpr int kSharedBytes = kStages * (kTileBytes + kPBytes) + kQBytes + kRows * (4 * kStages + 24) + kStages * 16 +
                                      kBarriers * 8 + 2 * kWorkUnitBytes;
  static_assert(kKeys == 64 && kStages == 2 && kProducerWarps == 2 * kStages, "a warp that fetches for every half of a stage");
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
  using Element = typename C::Element;

  __device__ __forceinline__ Cta(const Params &params, char *shared)
      : a_(params), p_(params.problem), memory_(shared), shared_(smem_address(shared)), lane_(threadIdx.x & 31) {}

 protected:
  __device__ __forceinline__ int group_heads() const { return static_cast<int>(a_.group.value); }

  __device__ __forceinline__ uint32_t shared_tile(int stage) const { return shared_ + stage * C::kTileBytes; }
  // The columns of Q that are not in registers.
  __device__ __forceinline__ uint32_t shared_q() const { return shared_tile(C::kStages); }
  // P of the KV tile in that stage.
  __device__ __forceinline__ uint32_t shared_p(int stage) const { return shared_q() + C::kQBytes + stage * C::kPBytes; }
  // The factor of a row of out before P V of that stage is added. Valid only where a warp has set kRescaled.
  __device__ __forceinline__ uint32_t shared_rescale(int stage, int row) const {
    return shared_p(C::kStages) + (stage * C::kRows + row) * 4;
  }
  // The row's entry for the epilogue: scale of out before partials are added, final scale, address of the row in global memory.
  __device__ __forceinline__ uint32_t shared_epilogue(int row) const { return shared_rescale(C::kStages, 0) + row * 16; }
  // Cluster: maximum and sum of a row in the peer CTA, later the scale of its out. The peer's out arrives where the K tiles were (the DSMEM
  // buffer), in vectors of 16 bytes, those of all threads side by side.
  __device__ __forceinline__ uint32_t shared_peer_stats(int row) const { return shared_epilogue(C::kRows) + row * 8; }
  __device__ __forceinline__ uint32_t dsmem_buffer(int n) const { return shared_ + (n * C::kPvThreads + threadIdx.x) * 16; }
  // One word of flags per softmax warp: P V must take the NaN-safe path; the rescale factor of some row is not 1.
  static constexpr uint32_t kNanSafe = 1, kRescaled = 2;
  __device__ __forceinline__ uint32_t shared_flags(int stage) const { return shared_peer_stats(C::kRows) + stage * 16; }
  // When all K tiles have been read: maximum and sum of each row of a partial, after room for the out of one partial.
  __device__ __forceinline__ uint32_t shared_partial_stats(int partial, int row) const {
    return shared_ + C::kPartialBytes + (partial * C::kRows + row) * 8;
  }

  // mbarriers
  //
  //   full[stage]                  a K tile has been loaded
  //   empty[stage][slice]          both PV warpgroups have read these 16 keys of V
  //   p_full[stage][slice]         P of these 16 keys is in shared memory
  //   epilogue_full, _empty        the epilogue's factors of a work unit are there; have been read, and the partial is stored
  //   work_full[2], work_empty[2]          a work unit is described; all warpgroups have finished it
  //   softmax_sync                 the four softmax warps
  //   q_requested                  the loads of the first Q have been issued
  //   dsmem_empty                  cluster: the peer's K tiles have been read, its DSMEM buffer may be written
  //   dsmem_stats_full, _out_full  cluster: the peer's maxima and sums, its out have arrived
  __device__ __forceinline__ uint32_t full(int stage) const { return shared_flags(C::kStages) + stage * 8; }
  __device__ __forceinline__ uint32_t empty(int stage, int slice) const {
    return full(C::kStages + C::kSlices * stage + slice);
  }
  __device__ __forceinline__ uint32_t p_full(int stage, int slice = 0) const {
    return empty(C::kStages, C::kSlices * stage + slice);
  }
  __device__ __forceinline__ uint32_t epilogue_full() const { return p_full(C::kStages); }
  __device__ __forceinline__ uint32_t epilogue_empty() const { return epilogue_full() + 8; }
  __device__ __forceinline__ uint32_t work_full(int n) const { return epilogue_full() + 16 + n * 8; }
  __device__ __forceinline__ uint32_t work_empty(int n) const { return work_full(2 + n); }
  __device__ __forceinline__ uint32_t softmax_sync() const { return work_empty(2); }
  __device__ __forceinline__ uint32_t q_requested() const { return softmax_sync() + 8; }
  __device__ __forceinline__ uint32_t dsmem_empty() const { return q_requested() + 8; }
  __device__ __forceinline__ uint32_t dsmem_stats_full() const { return dsmem_empty() + 8; }
  __device__ __forceinline__ uint32_t dsmem_out_full() const { return dsmem_stats_full() + 8; }
  __device__ __forceinline__ WorkUnit &descriptor(int n) const {
    static_assert(sizeof(WorkUnit) <= C::kWorkUnitBytes);
    return reinterpret_cast<WorkUnit *>(memory_ + (dsmem_out_full() + 8 - shared_))[n];
  }

  // The row of accumulator elements 2 r and 2 r + 1 (modulo 4) in the given warp of a warpgroup, counted within the work unit.
  __device__ __forceinline__ int row_of(int warp, int r) const { return warp * 16 + (opaque(lane_) >> 2) + 8 * r; }
  __device__ __forceinline__ int token_of(const WorkUnit &work, int row) const { return a_.group.quotient(work.row0 + row); }
  __device__ __forceinline__ int head_of(const WorkUnit &work, int row) const {
    return work.head * group_heads() + a_.group.remainder(work.row0 + row);
  }
  // The row's lse, null if it is not asked for, and its out.
  __device__ __forceinline__ float *lse_at(const WorkUnit &work, int row) const {
    if (p_.lse.data == nullptr) return nullptr;
    return row_of_tensor(p_.lse, work.batch, work.q_start + token_of(work, row), head_of(work, row));
  }
  __device__ __forceinline__ Element *out_at(const WorkUnit &work, int row) const {
    return row_of_tensor<Element>(p_.out, work.batch, work.q_start + token_of(work, row), head_of(work, row));
  }
  // The slot of the n-th partial that this work unit adds.
  static __device__ __forceinline__ int partial_slot(const WorkUnit &work, int partial) {
    return min(work.first_partial + (partial + 1) * work.partial_step, work.slot) - 1;
  }
  __device__ __forceinline__ float2 *partial_stats(int slot) const { return a_.partial_stats + int64_t{slot} * C::kRows; }

  const Params &a_;
  const Problem &p_;
  char *const memory_;
  const uint32_t shared_;  // shared-memory address of memory_
  const int lane_;
};

}  // namespace fa::cuda::mla
