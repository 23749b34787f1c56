// SPDX-License-Identifier: Apache-2.0
// One block of threads of the kernel for latent caches: its sizes, its shared memory, and what its warps tell each other about the piece
// of work at hand.
#pragma once

#include "cuda/kernels/decode/scheduler.cuh"
#include "cuda/kernels/mla/mla.h"

namespace fa::cuda::mla {

using decode::Keys;

// A part is left in `slot`, which is counted at `counter`. Before that, or at the item's end, `parts` parts are added to it, which are there
// when the counter `awaited` says so: the last of every `part_step` slots from `first_part` on, and the one before this piece's.
struct Plan : decode::WorkDescriptor {
  int slot, counter;
  int parts, first_part, part_step, awaited;
  // The item is this block's and the other one's of its cluster, and neither has another piece: they exchange halves of what they have.
  bool pair;
};

template <typename Element_, int kD_, int kDv_, int kKeys_, int kStages_, int kHeld_, bool kPairs_>
struct Config {
  using Element = Element_;
  static constexpr int kD = kD_, kDv = kDv_, kKeys = kKeys_, kStages = kStages_, kHeld = kHeld_;
  static constexpr bool kPairs = kPairs_;
  static constexpr bool kInterleaveRowBlocks = false;  // of blocks of rows, which all see as many keys, or nearly so
  static constexpr int kParts = kKeys / 16;  // in which P of a tile is handed over, and the tile's rows are handed back
  // Two groups of four warps for values, one for scores, and the warps that fetch.
  static constexpr int kRows = 64, kThreads = 512, kValueThreads = 256, kScoreThreads = 128, kFetchWarps = 4;
  static constexpr int kKvStep = kKeys;     // of the cut
  static constexpr int kColumns = kDv / 2;  // of out, of a group
  // Tiles lie in groups of eight rows, [row / 8][slab of 64 columns][8][64]: whatever eight rows in a row are a page's, one copy fetches.
  static constexpr int kSlabs = kD / 64, kSlabBytes = 8 * 128, kGroupBytes = kSlabs * kSlabBytes;
  static constexpr int kTileBytes = kKeys / 8 * kGroupBytes, kHalfBytes = kTileBytes / 2;
  static constexpr int kQSlabBytes = kRows * 128, kQBytes = (kSlabs - kHeld) * kQSlabBytes;
  static constexpr int kPBytes = kRows * kKeys * 2;
  static constexpr int kPartBytes = kRows * kDv * 4;
  static_assert(kPartBytes / 2 <= kTileBytes, "half of out lands in one place of the ring");
  static constexpr int kBarriers = (1 + 2 * kParts) * kStages + 11, kPlanBytes = 96;
  static constexpr int kSharedBytes =
      kStages * (kTileBytes + kPBytes) + kQBytes + kRows * (4 * kStages + 24) + kStages * 16 + kBarriers * 8 + 2 * kPlanBytes;
  static_assert(kKeys == 64 && kStages == 2 && kFetchWarps == 2 * kStages, "a warp that fetches for every half of a place");
};

// A tile in groups of eight rows as an operand: its rows are the product's, or its columns are and rows are summed over.
template <class C>
__device__ __forceinline__ uint64_t grouped_operand(uint32_t address) {
  return uint64_t{(uniform(address) & 0x3FFFF) >> 4} | uint64_t{C::kSlabBytes >> 4} << 16 |
         uint64_t{C::kGroupBytes >> 4} << 32 | uint64_t{1} << 62;
}

template <class C>
class Block {
 public:
  using Config = C;
  using Element = typename C::Element;

  __device__ __forceinline__ Block(const Params &params, char *shared)
      : a_(params), p_(params.problem), memory_(shared), shared_(smem_address(shared)), lane_(threadIdx.x & 31) {}

 protected:
  __device__ __forceinline__ int group_heads() const { return static_cast<int>(a_.group.value); }

  __device__ __forceinline__ uint32_t shared_tile(int place) const { return shared_ + place * C::kTileBytes; }
  // Those columns of Q that are not in registers.
  __device__ __forceinline__ uint32_t shared_q() const { return shared_tile(C::kStages); }
  // P of the tile in that place.
  __device__ __forceinline__ uint32_t shared_p(int place) const { return shared_q() + C::kQBytes + place * C::kPBytes; }
  // What a row's out is multiplied by before its weights come, where a warp has noted that it is not 1.
  __device__ __forceinline__ uint32_t shared_factor(int place, int row) const {
    return shared_p(C::kStages) + (place * C::kRows + row) * 4;
  }
  // What it is multiplied by before parts are added and at last, and where it goes.
  __device__ __forceinline__ uint32_t shared_closing(int row) const { return shared_factor(C::kStages, 0) + row * 16; }
  // Of a pair's other block: maximum and sum of a row, then what its out is multiplied by. Its out lands where tiles were, every thread's
  // pieces of 16 bytes side by side with those of the others.
  __device__ __forceinline__ uint32_t shared_other_sums(int row) const { return shared_closing(C::kRows) + row * 8; }
  __device__ __forceinline__ uint32_t shared_landing(int n) const {
    return shared_ + (n * C::kValueThreads + threadIdx.x) * 16;
  }
  // A word of notes a warp of the scores: P V is to be done key by key; a row's factor is not 1.
  static constexpr uint32_t kCare = 1, kRaised = 2;
  __device__ __forceinline__ uint32_t shared_notes(int place) const { return shared_other_sums(C::kRows) + place * 16; }
  // When all tiles are done with: maximum and sum of a part's row, behind room for a part of all rows.
  __device__ __forceinline__ uint32_t shared_part_sums(int part, int row) const {
    return shared_ + C::kPartBytes + (part * C::kRows + row) * 8;
  }

  // Barriers: a place of the ring is full, a part of its rows is free; a part of its weights is there; a piece's factors are there, are read;
  // a plan is there, is done; warps of the scores meet; the first Q is asked for. Of a
  // pair: the other block's tiles are read; its sums, its out have come.
  __device__ __forceinline__ uint32_t full(int place) const { return shared_notes(C::kStages) + place * 8; }
  __device__ __forceinline__ uint32_t free(int place, int part) const { return full(C::kStages + C::kParts * place + part); }
  __device__ __forceinline__ uint32_t weights(int place, int part = 0) const {
    return free(C::kStages, C::kParts * place + part);
  }
  __device__ __forceinline__ uint32_t closed() const { return weights(C::kStages); }
  __device__ __forceinline__ uint32_t taken() const { return closed() + 8; }
  __device__ __forceinline__ uint32_t work_full(int n) const { return closed() + 16 + n * 8; }
  __device__ __forceinline__ uint32_t work_empty(int n) const { return work_full(2 + n); }
  __device__ __forceinline__ uint32_t met() const { return work_empty(2); }
  __device__ __forceinline__ uint32_t asked() const { return met() + 8; }
  __device__ __forceinline__ uint32_t other_read() const { return asked() + 8; }
  __device__ __forceinline__ uint32_t landed_sums() const { return other_read() + 8; }
  __device__ __forceinline__ uint32_t landed_out() const { return landed_sums() + 8; }
  __device__ __forceinline__ Plan &descriptor(int n) const {
    static_assert(sizeof(Plan) <= C::kPlanBytes);
    return reinterpret_cast<Plan *>(memory_ + (landed_out() + 8 - shared_))[n];
  }

  // Of the rows of `plan`, for warp `warp` of a group whose accumulators hold all of them: row of elements 2 r and 2 r + 1.
  __device__ __forceinline__ int row_of(int warp, int r) const { return warp * 16 + (opaque(lane_) >> 2) + 8 * r; }
  __device__ __forceinline__ int token_of(const Plan &plan, int row) const { return a_.group.quotient(plan.row0 + row); }
  __device__ __forceinline__ int head_of(const Plan &plan, int row) const {
    return plan.head * group_heads() + a_.group.remainder(plan.row0 + row);
  }
  __device__ __forceinline__ void store_lse(const Plan &plan, int row, float lse) const {
    if (p_.lse.data == nullptr) return;
    p_.lse.data[plan.batch * p_.lse.batch_stride + head_of(plan, row) * p_.lse.head_stride +
                (plan.q_start + token_of(plan, row)) * p_.lse.seq_stride] = lse;
  }
  __device__ __forceinline__ Element *out_at(const Plan &plan, int row) const {
    return static_cast<Element *>(p_.out.data) + plan.batch * p_.out.batch_stride +
           (plan.q_start + token_of(plan, row)) * p_.out.seq_stride + head_of(plan, row) * p_.out.head_stride;
  }
  // Where the part lies that is to be added as number `part`.
  static __device__ __forceinline__ int part_slot(const Plan &plan, int part) {
    return min(plan.first_part + (part + 1) * plan.part_step, plan.slot) - 1;
  }
  __device__ __forceinline__ float2 *partial_stats(int slot) const { return a_.partial_stats + int64_t{slot} * C::kRows; }

  const Params &a_;
  const Problem &p_;
  char *const memory_;
  const uint32_t shared_;  // its address
  const int lane_;
};

}  // namespace fa::cuda::mla
