// SPDX-License-Identifier: Apache-2.0
// The forward kernels for sm_90a, as plan and launcher see them.
#pragma once

#include <cuda.h>

#include "core/forward_problem.h"
#include "cuda/kernels/fwd_sm90/forward_table.h"
#include "cuda/kernels/fwd_sm90/tile_order.h"

namespace fa::cuda::sm90 {

// A problem and how it is cut. The kernel's only parameter.
struct ForwardParams {
  // Boxes of 128 bytes of columns x 64 rows (q), a chunk of rows (k, v) or a warp's 16 rows (out) over (head_dim, seqlen, heads, batch).
  // fp8: of v, boxes of a chunk of keys x all columns over (keys, head_dim_v, heads, batch) of its copy (copied_values.h).
  CUtensorMap q_map, k_map, v_map, out_map;
  Problem problem;
  Diagonal<int32_t>::Limits limits;  // problem.band's
  TileOrder order;                   // tiles of query heads
  Divisor group;                     // heads of q for one head of k
  int32_t tiles;                     // blocks of rows * heads_q * batch
  int32_t *counters;                 // two, zero before and after: the next tile, and how many blocks of threads have finished
  bool vector_out;                   // 16-byte stores are legal
  bool tma_out;                      // the copy engine can write out
  Descale q_descale, k_descale, v_descale;  // fp8: one a sequence and head
};

// The kernel's address, null if this build leaves it out. `shape` indexes kForwardShapes, `dtype` is out's.
const void *forward_kernel(int shape, Dtype dtype);

}  // namespace fa::cuda::sm90
