// SPDX-License-Identifier: Apache-2.0
// The decode kernels as the planner and the launcher see them: a few queries per sequence over many keys.
#pragma once

#include <cuda.h>
#include <vector_types.h>

#include "core/forward_problem.h"
#include "cuda/common/divisor.h"
#include "cuda/common/operand.h"
#include "cuda/common/scores.h"
#include "cuda/kernels/decode/table.h"

namespace fa::cuda::decode {

// A work tile that may be split over partitions, as the combine kernel needs it.
struct alignas(16) SplitTile {
  int64_t q_start;  // of the sequence, as in Sequence
  int32_t batch, head;
  int32_t first_row, rows;                // first_row counts within the sequence
  int32_t first_partition, num_partials;  // one partial: the tile is not split
};
static_assert(sizeof(SplitTile) == kSplitTileBytes);

// A problem and how its work is split. The kernels' only parameter.
struct Params {
  Problem problem;
  Diagonal<int32_t>::Limits limits;  // of problem.band
  Divisor group;                     // query heads per KV head
  Divisor page_size;
  bool vector_out;  // 16-byte stores to out are legal
  RawUnit raw;
  Descale k_descale, v_descale;  // of 8-bit KV
  int32_t row_blocks;            // row blocks per head; decode kernels have more than one for 8-bit KV only
  // How the work is split (stream_k.cuh). fixed_splits == 0: stream-K, at most `max_partitions` partitions of at least
  // 2^min_iterations_log2 KV steps each. fixed_splits > 0: every work tile into at most `fixed_splits` splits of at least
  // 2^min_iterations_log2 KV steps each.
  int32_t max_partitions, fixed_splits, min_iterations_log2;
  // Stream-K only: 2^coscheduled_log2 neighbouring KV heads, or blocks of rows of a head, form one work tile, and each partition
  // has one CTA for each of them.
  int32_t coscheduled_log2;
  // Split-KV partials: out (partials, rows, head_dim), and maximum and row sum (partials, rows). The maximum is in base 2; out is not
  // divided by the row sum.
  float *partial_out;
  float2 *partial_stats;
  // The work tiles that may be split. Either all tiles, numbered over all sequences, or one for each partition: the tile that
  // continues behind its end. Where lengths are on the device, the main kernel writes here what it computed.
  SplitTile *split_tile_infos;
  int32_t split_tiles;  // how many
  bool split_tiles_by_partition;
  bool allow_early_dependents;  // the next launch may start while this one still runs (PDL)
  // With clusters: how many vectors (four columns of a row, counted through all rows) one CTA combines.
  Divisor dsmem_vectors;
  // For kernels that combine partials themselves (extend, MLA): how many partials of a work tile are stored. Zero before and
  // after the launch.
  int32_t *counters;
};

// Of the kernels for 8-bit KV of more than 256 columns (wide_8bit.cuh).
struct WideParams : Params {
  bool tma_kv;
  CUtensorMap k_map, v_map;  // where TMA loads K and V: boxes of kWideBoxRows keys. Latent caches have no v_map
};

// Addresses for cudaLaunchKernel, null if this build leaves the kernels out. `shape` indexes kShapes.
struct Kernels {
  const void *attention = nullptr;
  const void *combine = nullptr;  // the combine kernel (combine.cuh); null for kernels that leave no partials
};
Kernels kernels(int shape, Dtype queries, Dtype keys);

}  // namespace fa::cuda::decode
