// SPDX-License-Identifier: Apache-2.0
// The extend kernels as the planner and the launcher see them: many rows (queries times the heads of a group) over many keys
// that are mostly cached.
#pragma once

#include <cuda.h>

#include "cuda/common/data_mask.h"
#include "cuda/kernels/decode/decode.h"
#include "cuda/kernels/extend/table.h"

namespace fa::cuda::extend {

// The work is split as for the decode kernels (decode/stream_k.cuh). The kernel's only parameter.
struct Params : decode::Params {
  Divisor row_blocks_divisor;  // divides by row_blocks
  // Whether TMA loads what it can: runs of keys that all exist, as boxes.
  bool tma_kv;
  // Kernels for FA_FLAG_SAME_BITS: in the workspace, segments that a work unit may store before it has the total of the segments
  // before, and the warps that have rows, each of which stores a part of a total or segment.
  int32_t stored_segments, partial_warps;
  float4 *totals;  // in the workspace: O of every CTA's total (segments.cuh), where it is not in shared memory
  CUtensorMap k_map, v_map;
  DataMask mask;  // of kernels for masks as data
};

// The kernels' addresses for cudaLaunchKernel, null if this build leaves them out. `shape` indexes kShapes. The combine kernel
// takes decode::Params.
decode::Kernels kernels(int shape, Dtype queries, Dtype keys);

}  // namespace fa::cuda::extend
