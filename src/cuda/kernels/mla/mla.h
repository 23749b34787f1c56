// SPDX-License-Identifier: Apache-2.0
// The kernels for latent caches, as plan and launcher see them.
#pragma once

#include <cuda.h>

#include "cuda/kernels/decode/decode.h"
#include "cuda/kernels/mla/table.h"

namespace fa::cuda::mla {

// Work is cut as for the decode kernels (decode/work.cuh). The kernel's only parameter.
struct Params : decode::Params {
  Divisor row_blocks_divisor;  // row_blocks
  // Keys in boxes of eight rows for the copy engine, where it can fetch them.
  bool tma_kv;
  CUtensorMap k_map;
};

// The kernel's address for cudaLaunchKernel, null if this build leaves it out. `shape` indexes kShapes.
const void *kernel(int shape, Dtype dtype);

}  // namespace fa::cuda::mla
