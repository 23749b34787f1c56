// SPDX-License-Identifier: Apache-2.0
// What the row kernel and the dq kernel go over: Q tiles, of a first pass, or of a second one, which runs where the first has found NaN or Inf
// (BackwardRows::only_if).
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"

namespace fa::cuda {

// Whether a launch has anything to do. Those of a second pass are launched by PDL and each waits for the one before it, so that launches that end at
// once follow each other closely.
__device__ __forceinline__ bool is_pass_needed(const BackwardRows &params) {
  if (params.only_if == nullptr) return true;
  pdl_launch_dependents();
  pdl_wait();
  return *params.only_if != 0;
}

// Q tile number `index` of the workspace, and its sequence. Every lane of a warp calls this. head < 0: no rows lie there.
struct QTilePlace {
  int batch, head, q_tile;
  int start, seq_slot, len;  // Sequence
};
__device__ __forceinline__ QTilePlace place_of_q_tile(const BackwardRows &params, int index) {
  const Problem &p = params.problem.forward;
  const int heads = static_cast<int>(p.heads_q);
  QTilePlace place;
  if (p.q_lengths.cu == nullptr) {
    const int head_of_batch = index / params.q_tiles;
    place.q_tile = index - head_of_batch * params.q_tiles;
    place.batch = head_of_batch / heads;
    place.head = head_of_batch - place.batch * heads;
  } else {
    // The last sequence that begins at or before this tile: each step asks 32 of those that are left.
    const int tile = index / heads, lane = static_cast<int>(threadIdx.x) & 31;
    int left = static_cast<int>(p.batch);
    place.batch = 0;
    do {
      const int step = (left + 31) / 32, b = place.batch + lane * step;
      const bool begins = lane * step < left && static_cast<int>(offset_of(p.q_lengths, b)) / params.q_tile_rows + b <= tile;
      const uint32_t begun = __ballot_sync(~0u, begins);
      if (begun == 0) {  // cu_seqlens may begin above 0: these tiles are for the rows before the first sequence
        place.head = -1;
        return place;
      }
      const int passed = (__popc(begun) - 1) * step;
      place.batch += passed;
      left = min(step, left - passed);
    } while (left > 1);
  }
  const Sequence q = sequence_of(p.q_lengths, place.batch);
  place.start = static_cast<int>(q.start);
  place.seq_slot = static_cast<int>(q.slot);
  place.len = static_cast<int>(q.len);
  if (p.q_lengths.cu != nullptr) {
    const SequenceQTiles tiles = q_tiles_of_sequence(p, q, place.batch, params.q_tile_rows, params.q_tiles);
    place.head = (index - tiles.begin) / tiles.count;
    place.q_tile = index - tiles.begin - place.head * tiles.count;
    if (place.head >= heads || place.q_tile * params.q_tile_rows >= place.seq_slot) place.head = -1;
  }
  return place;
}

// Calls f(number of a Q tile) for those of this CTA, the last ones first: one in a first pass.
template <typename F>
__device__ __forceinline__ void for_each_q_tile(const BackwardRows &params, F f) {
  int index = q_tiles_of_all_heads(params) - 1 - static_cast<int>(blockIdx.x);
  do {
    f(index);
    index -= static_cast<int>(gridDim.x);
  } while (params.only_if != nullptr && index >= 0);
}

}  // namespace fa::cuda
