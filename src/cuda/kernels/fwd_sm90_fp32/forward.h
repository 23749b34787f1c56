// SPDX-License-Identifier: Apache-2.0
// The forward kernels of fp32 operands on Hopper's tensor cores, as plan and launcher see them.
#pragma once

#include <cuda.h>

#include "core/forward_problem.h"
#include "cuda/common/data_mask.h"
#include "cuda/common/divisor.h"
#include "cuda/common/l2_head_order.h"
#include "cuda/kernels/fwd_sm90_fp32/table.h"

namespace fa::cuda::sm90_fp32 {

// The kernel's only parameter: the problem, and how it is divided into CTAs.
struct ForwardParams {
  // Of the planes, (head_dim, rows, heads, planes * batch), in boxes of 64 columns by kRows rows (q) or one KV tile (k, v).
  CUtensorMap q_map, k_map, v_map;
  Problem problem;
  Diagonal<int32_t>::Limits limits;  // of problem.band
  L2HeadOrder order;
  Divisor group;             // query heads for one KV head
  int32_t q_batch, k_batch;  // sequences of a plane: 1 where packed
  bool vector_out;           // out allows 16-byte stores
  DataMask mask;             // this and what follows: of kernels for any mixture of terms
  float tanh_scale;          // natural_tanh_scale()
};

// The kernel's address, null if this build does not contain it. `shape` indexes kForwardShapes.
const void *forward_kernel(int shape);

}  // namespace fa::cuda::sm90_fp32
