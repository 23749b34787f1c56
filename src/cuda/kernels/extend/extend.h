// SPDX-License-Identifier: Apache-2.0
// The kernels for queries that extend a cache, as plan and launcher see them: many rows (queries times the heads of a group) over many keys.
#pragma once

#include <cuda.h>

#include "cuda/kernels/decode/decode.h"
#include "cuda/kernels/extend/table.h"

namespace fa::cuda::extend {

// Work is cut as for the decode kernels (decode/work.cuh). The kernel's only parameter.
struct Params : decode::Params {
  Divisor blocks_of_head;  // row_blocks
  // Whether the copy engine fetches what it can: runs of keys that all exist, as boxes.
  bool tma_kv;
  CUtensorMap k_map, v_map;
};

// The kernels' addresses for cudaLaunchKernel, null if this build leaves them out. `shape` indexes kShapes. The sum takes decode::Params.
decode::Kernels kernels(int shape, Dtype queries, Dtype keys);

}  // namespace fa::cuda::extend
