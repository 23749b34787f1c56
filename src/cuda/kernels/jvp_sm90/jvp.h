// SPDX-License-Identifier: Apache-2.0
// The kernels of the forward-mode derivative for sm_90a, as plan and launcher see them.
#pragma once

#include <cuda.h>

#include "core/problem.h"
#include "cuda/common/l2_head_order.h"
#include "cuda/kernels/jvp_sm90/table.h"

namespace fa::cuda::sm90 {

// The kernel's only parameter.
struct JvpParams {
  // Tensor maps over (head_dim, seqlen, heads, batch), in boxes of 64 columns by 64 rows. An absent tangent has the map of its input.
  CUtensorMap q_map, k_map, v_map, tq_map, tk_map, tv_map;
  Problem problem;
  Operand tout;
  RowScalar tlse;                    // data may be null
  Diagonal<int32_t>::Limits limits;  // of problem.band
  L2HeadOrder order;
  Divisor group;      // query heads for one KV head
  int32_t tiles;      // row blocks * heads_q * batch
  int32_t *counters;  // two, zero before and after the launch: the next work tile, and the number of CTAs that have finished
  bool has_tq, has_tk, has_tv;
  bool vector_out, vector_tout;  // rows of out, and of tout, are whole 16-byte vectors
};

// The kernel's address, null if this build does not contain it. `shape` indexes kJvpShapes.
const void *jvp_kernel(int shape, Dtype dtype);

}  // namespace fa::cuda::sm90
