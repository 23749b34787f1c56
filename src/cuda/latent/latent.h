// SPDX-License-Identifier: Apache-2.0
// The kernels for latent caches, as plan and launcher see them.
#pragma once

#include <cuda.h>

#include "cuda/decode/decode.h"
#include "cuda/latent/table.h"

namespace fa::cuda::latent {

// Work is cut as for the decode kernels (decode/work.cuh). The kernel's only parameter.
struct Params : decode::Params {
  Divisor blocks_of_head;  // row_blocks
  // Keys in boxes of eight rows for the copy engine, where it can fetch them.
  bool copied;
  CUtensorMap k_map;
};

// The kernel's address for cudaLaunchKernel, null if this build leaves it out. `shape` indexes kShapes.
const void *kernel(int shape, Dtype dtype);

}  // namespace fa::cuda::latent
