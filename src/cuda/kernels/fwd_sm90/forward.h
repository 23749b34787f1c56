// SPDX-License-Identifier: Apache-2.0
// The forward kernels for sm_90a, as plan and launcher see them.
#pragma once

#include <cuda.h>

#include "core/forward_problem.h"
#include "cuda/common/data_mask.h"
#include "cuda/common/scores.h"
#include "cuda/kernels/fwd_sm90/forward_table.h"
#include "cuda/kernels/fwd_sm90/tile_order.h"

namespace fa::cuda::sm90 {

// The kernel's only parameter: the problem, and how it is divided into work tiles.
struct ForwardParams {
  // Tensor maps over (head_dim, seqlen, heads, batch). A box is 128 bytes of columns by 64 rows (q), one KV tile of rows (k, v), or the 16
  // rows of a warp (out). fp8: v_map is of the transposed copy of V (transposed_v.h), (keys, head_dim_v, heads, batch), in boxes of the keys
  // of one KV tile by all columns.
  CUtensorMap q_map, k_map, v_map, out_map;
  Problem problem;
  Diagonal<int32_t>::Limits limits;  // of problem.band
  RawUnit raw;                       // for softcap and ALiBi
  TileOrder order;
  Divisor group;      // query heads for one KV head
  int32_t tiles;      // row blocks * heads_q * batch
  int32_t *counters;  // two, zero before and after the launch: the next work tile, and the number of CTAs that have finished
  bool vector_out;    // out allows 16-byte stores
  bool tma_out;       // out allows TMA stores
  bool k_whole_atoms, v_whole_atoms;        // above head_dim 256: rows end with a swizzle atom, and boxes have several atoms
  Descale q_descale, k_descale, v_descale;  // fp8: one per sequence and head
  // Dropout (common/scores.h): m lies p_exponent below the row maximum, and is raised when a score exceeds it by more than dropout_threshold.
  float p_exponent, dropout_threshold;
  DataMask mask;
  float *max_logit;  // (heads_q), where the kernel computes it
  int64_t max_logit_stride;
  // Bias: (keys, queries, heads_q, batch) in boxes of 128 bytes of keys by 64 queries. Dimensions in which the bias is broadcast have stride 0.
  CUtensorMap bias_map;
  // Kernels for mixtures: the keys of a box, 0 where TMA cannot read the bias. Then consumers read it from global memory, by pairs of keys where
  // takes_pairs().
  int32_t bias_box_keys;
  bool pair_bias;
};

// The kernel's address, null if this build does not contain it. `shape` indexes kForwardShapes, `dtype` is that of out.
const void *forward_kernel(int shape, Dtype dtype);

}  // namespace fa::cuda::sm90
