// SPDX-License-Identifier: Apache-2.0
// One block of threads of the kernel for latent caches: its sizes, its shared memory, and what its warps tell each other about the piece
// of work at hand.
#pragma once

#include "cuda/common/hopper.cuh"
#include "cuda/decode/work.cuh"
#include "cuda/latent/latent.h"

namespace fa::cuda::latent {

using decode::Keys;

// A named barrier (ptx.cuh) that others wait at.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(barrier), "r"(threads) : "memory");
}

// A piece of work: a block of rows and some of the keys it sees. Worked out by one warp, for all others in shared memory.
struct Plan {
  int64_t q_start;  // as Sequence
  int batch;        // < 0: no more pieces
  int head, row0;   // rows count from row0 on, the block's first in the sequence
  int rows;         // that are used; further ones up to end_row, if any, are the block's to clear
  int end_row;
  int tokens, seqlen_k;
  int tile, end_tile;  // of keys
  Keys interior;       // that all tokens of the block see
  bool several;        // tokens
  // The block's other pieces: this one is left as a part, or the last one, to which `parts` parts from `first_part` on are added.
  bool part;
  int first_part, parts;
  int counter, slot;  // of the block of rows; of the part
};

template <typename Element_, int kD_, int kDv_, int kKeys_, int kStages_>
struct Config {
  using Element = Element_;
  static constexpr int kD = kD_, kDv = kDv_, kKeys = kKeys_, kStages = kStages_;
  static constexpr int kRows = 64, kThreads = 384, kConsumers = 256;
  static constexpr int kStep = kKeys;       // of the cut
  static constexpr int kColumns = kDv / 2;  // of out, of a warpgroup
  // Tiles lie in groups of eight rows, [row / 8][slab of 64 columns][8][64]: whatever eight rows in a row are a page's, one copy fetches.
  static constexpr int kSlabs = kD / 64, kSlabBytes = 8 * 128, kGroupBytes = kSlabs * kSlabBytes;
  static constexpr int kTileBytes = kRows / 8 * kGroupBytes;
  static constexpr int kPlanBytes = 2 * (96 + 16);  // two plans with two barriers each
  static constexpr int kSharedBytes = (1 + kStages) * kTileBytes + kRows * kKeys * 2 + kRows * 12 + kStages * 24 + kPlanBytes;
  static_assert(kKeys == 64 && kStages == 2, "a pair of producer warps serves one place of the ring");
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
  using Element = typename C::Element;

  __device__ __forceinline__ Block(const Params &params, char *shared)
      : a_(params), p_(params.problem), memory_(shared), shared_(smem_address(shared)), lane_(threadIdx.x & 31) {}

 protected:
  static __device__ __forceinline__ int uniform_int(int x) { return static_cast<int>(uniform(x)); }
  __device__ __forceinline__ int group_heads() const { return static_cast<int>(a_.group.value); }

  __device__ __forceinline__ uint32_t shared_q() const { return shared_; }
  __device__ __forceinline__ uint32_t shared_tile(int place) const { return shared_ + (1 + place) * C::kTileBytes; }
  __device__ __forceinline__ uint32_t shared_p() const { return shared_tile(C::kStages); }
  __device__ __forceinline__ uint32_t shared_factor(int row) const { return shared_p() + C::kRows * C::kKeys * 2 + row * 4; }
  // Maximum and sum of a row.
  __device__ __forceinline__ uint32_t shared_sums(int row) const { return shared_factor(C::kRows) + row * 8; }
  // Barriers: a place of the ring is full, half of its rows are free; a plan is there, is done.
  __device__ __forceinline__ uint32_t full(int place) const { return shared_sums(C::kRows) + place * 8; }
  __device__ __forceinline__ uint32_t free(int place, int half) const { return full(C::kStages + 2 * place + half); }
  __device__ __forceinline__ uint32_t planned(int n) const { return free(C::kStages, n); }
  __device__ __forceinline__ uint32_t done(int n) const { return planned(2 + n); }
  __device__ __forceinline__ Plan &plan(int n) const {
    static_assert(sizeof(Plan) <= 96);
    return reinterpret_cast<Plan *>(memory_ + (done(2) - shared_))[n];
  }

  const Params &a_;
  const Problem &p_;
  char *const memory_;
  const uint32_t shared_;  // its address
  const int lane_;
};

}  // namespace fa::cuda::latent
