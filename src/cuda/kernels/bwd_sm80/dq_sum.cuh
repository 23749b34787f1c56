// SPDX-License-Identifier: Apache-2.0
// dq of a query tile is a sum over all CTAs whose keys it sees. CTAs add to it in global memory, in fp32; backward_dq converts it.
#pragma once

#include "cuda/kernels/bwd_pre_post/dq_sum_tile.cuh"
#include "cuda/kernels/bwd_sm80/key_block.cuh"

namespace fa::cuda::sm80 {

// In deterministic mode CTAs add to a tile in the order of their keys. Each warp waits for its own semaphore: the same warp of every CTA adds to the same
// part of the sum. A warp releases its semaphore some mma after its additions, when they have arrived and the release costs little. It does not
// wait a whole iteration, because under a causal mask every CTA is that far behind the one before.
template <class C>
class DqSum {
 public:
  // Adds this warp's part of dS K. `ds`: dS^T in shared memory. Without `any` all pairs are masked, and only the semaphore is released.
  __device__ __forceinline__ void add(const KeyBlock<C> &block, int tile, uint32_t ds, bool any, bool nan_safe) {
    if (block.g.dq.data == nullptr) return;
    Accumulator<C::kDqTiles, C::kDqNt> dq;
    const bool ordered = block.a.deterministic;
    int count = 0;
    if (ordered) count = load_relaxed(counter(block, tile));
    if (any) {
      clear<C::kDqTiles, C::kDqNt>(dq);
      const int warp = C::kRoles == 1 ? opaque(block.warp) : block.warp;
      mma_scores<C, Major::mn, C::kD * 2, C::kKeys / 16>(dq, ds, warp % C::kDqRowWarps * (16 * C::kDqTiles), block.smem_k(),
                                                         warp / C::kDqRowWarps * C::kDqNt * 8, nan_safe);
    }
    if (ordered) {
      release(block);
      // No acquire: what follows are additions at the L2 cache, sent after the counter has come back from there.
      while (count != order(block, tile)) count = load_relaxed(counter(block, tile));
      __syncwarp();
    }
    if (any) store(block, tile, dq);
    held_tile_ = tile;
  }

  // Releases the semaphore that this warp holds, if any.
  __device__ __forceinline__ void release(const KeyBlock<C> &block) {
    if (!block.a.deterministic || held_tile_ < 0) return;
    __syncwarp();
    if (block.lane == 0) count_released(counter(block, held_tile_));
    held_tile_ = -1;
  }

 private:
  // The position of the CTA among those that add to the tile.
  static __device__ __forceinline__ int order(const KeyBlock<C> &block, int tile) {
    return block.key0 / C::kKeys - max(0, tile * C::kRows + block.mask.first) / C::kKeys;
  }
  static __device__ __forceinline__ int32_t *counter(const KeyBlock<C> &block, int tile) {
    return block.a.dq_semaphore + block.index_of(tile) * kDqSemaphoresPerTile + block.warp;
  }

  // The sum of a query tile is a sequence of 16 x 8 tiles, [warp][i][j].
  static __device__ __forceinline__ void store(const KeyBlock<C> &block, int tile,
                                               const Accumulator<C::kDqTiles, C::kDqNt> &dq) {
    float *sum = block.a.dq_sum + block.index_of(tile) * (C::kRows * C::kD) + block.warp * (C::kDqTiles * C::kDqNt * 128);
#pragma unroll
    for (int i = 0; i < C::kDqTiles; ++i)
#pragma unroll
      for (int j = 0; j < C::kDqNt; ++j)
        add_to_dq_sum_tile(sum + (i * C::kDqNt + j) * 128, block.lane, block.a.dq_sum_by_lane, dq[i][j]);
  }

  int held_tile_ = -1;  // a query tile that this warp has added to, and whose semaphore it has not released
};

}  // namespace fa::cuda::sm80
