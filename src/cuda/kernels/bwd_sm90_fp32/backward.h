// SPDX-License-Identifier: Apache-2.0
// The backward kernels of fp32 operands on Hopper's tensor cores, as plan and launcher see them.
#pragma once

#include <cuda.h>

#include "cuda/common/data_mask.h"
#include "cuda/common/divisor.h"
#include "cuda/common/l2_head_order.h"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"
#include "cuda/kernels/bwd_sm90_fp32/table.h"

namespace fa::cuda::sm90_fp32 {

// The kernel's only parameter: the problem, and how it is divided into CTAs. Q tiles have kTileRows rows; lse is natural.
struct BackwardParams : BackwardRows {
  CUtensorMap q_map, k_map, v_map,
      dout_map;                    // of the planes, (head_dim, rows, heads, planes * batch), in boxes of 64 columns by 64 rows
  CUtensorMap lse_map, delta_map;  // (Q tiles, rows)
  Diagonal<int32_t>::Limits limits;  // of problem.forward.band
  L2HeadOrder query_order, key_order;
  Divisor group;                         // query heads for one KV head
  int32_t key_blocks;                    // CTAs of dk and dv, which come first, in wide kernels of each; 0 if neither is wanted
  int32_t q_batch, k_batch;              // sequences of a plane: 1 where packed
  bool vector_dq, vector_dk, vector_dv;  // 16-byte stores are legal
  DataMask mask;                         // this and what follows: of kernels for any mixture of terms
  float tanh_scale;                      // natural_tanh_scale()
};

// The kernel's address, null if this build does not contain it. `shape` indexes kBackwardShapes.
const void *backward_kernel(int shape);

}  // namespace fa::cuda::sm90_fp32
