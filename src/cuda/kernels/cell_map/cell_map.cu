// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels/cell_map/cell_map.cuh"

namespace fa::cuda {
namespace {

__global__ void __launch_bounds__(kCellMapThreads) cell_map(const __grid_constant__ CellMapParams a) {
  cell_map_kernel::find_cells(a);
}

// A warp transposes 32 x 32 cells.
__global__ void __launch_bounds__(kCellMapThreads) transpose_cell_map(const __grid_constant__ CellMapParams a) {
  const CellBits &from = a.mask.by_query, &to = a.mask.by_key;
  const int64_t index = int64_t{blockIdx.x} * (kCellMapThreads / 32) + (threadIdx.x >> 5),
                tiles = int64_t{to.words} * from.words;
  if (index >= a.planes * tiles) return;
  const int64_t plane = index / tiles;
  const int to_word = static_cast<int>(index % tiles / from.words), from_word = static_cast<int>(index % from.words);
  const auto lane = static_cast<int>(threadIdx.x & 31);
  const int from_row = to_word * 32 + lane, to_row = from_word * 32 + lane;
  const int64_t source = (plane * from.rows + from_row) * from.words + from_word,
                target = (plane * to.rows + to_row) * to.words + to_word;
  const bool exists = from_row < from.rows;
  const uint32_t visible = exists ? from.visible[source] : 0, partial = exists ? from.partial[source] : 0;
  uint32_t visible_t = 0, partial_t = 0;
#pragma unroll
  for (int bit = 0; bit < 32; ++bit) {
    const uint32_t v = __ballot_sync(~0u, (visible >> bit & 1) != 0), p = __ballot_sync(~0u, (partial >> bit & 1) != 0);
    if (lane == bit) {
      visible_t = v;
      partial_t = p;
    }
  }
  if (to_row < to.rows) {
    to.visible[target] = visible_t;
    to.partial[target] = partial_t;
    if (visible_t != 0) {  // the order of the warps does not matter
      CellRange &range = to.range(plane * to.rows + to_row);
      atomicMin(&range.begin, to_word * 32 + __ffs(static_cast<int>(visible_t)) - 1);
      atomicMax(&range.end, to_word * 32 + 32 - __clz(static_cast<int>(visible_t)));
    }
  }
}

int64_t ctas_of(int64_t warps) { return (warps * 32 + kCellMapThreads - 1) / kCellMapThreads; }

}  // namespace

Launch cell_map_launch(const CellMapParams &a) {
  const int64_t words = int64_t{a.planes} * a.mask.by_query.rows * a.mask.by_query.words;
  return {reinterpret_cast<const void *>(&cell_map), kCellMapThreads, 0, has_cta_for_word(a.mask) ? words : ctas_of(words),
          /*pdl=*/true};
}

Launch transposed_cell_map_launch(const CellMapParams &a) {
  const int64_t warps = int64_t{a.planes} * a.mask.by_key.words * a.mask.by_query.words;
  return {reinterpret_cast<const void *>(&transpose_cell_map), kCellMapThreads, 0, ctas_of(warps)};
}

}  // namespace fa::cuda
