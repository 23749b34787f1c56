// SPDX-License-Identifier: Apache-2.0
// The forward kernels for sm_90a, as plan and launcher see them.
#pragma once

#include <cuda.h>

#include "core/forward_problem.h"
#include "cuda/common/data_mask.h"
#include "cuda/common/rng.cuh"
#include "cuda/common/scores.h"
#include "cuda/kernels/fwd_sm90/forward_table.h"
#include "cuda/kernels/fwd_sm90/tile_order.h"

namespace fa::cuda::sm90 {

// K or V in pages: boxes of 2^box_log2 keys of one page. The last dimension of the tensor map counts pages and heads: page n of head h is at
// n page_step + h head_step.
struct PageBoxes {
  int32_t page_step, head_step, box_log2;
};

// Kernels for K and V in pages. A work tile of a CTA has tile_tokens queries of each of tile_heads.value query heads that share a KV head; a
// row is a query times tile_heads plus a head.
struct PagedParams {
  Divisor page_size, tile_heads, num_splits;
  int32_t tile_tokens;
  PageBoxes k, v;
  // Split-KV partials as merge/merge.h describes them; null without splits.
  float *split_out, *split_lse;
};

// The kernel's only parameter: the problem, and how it is divided into work tiles.
struct ForwardParams {
  // Tensor maps over (head_dim, seqlen, heads, batch). A box is 64 rows (q), one KV tile of rows (k, v), or the 16 rows of a warp (out), by 128
  // bytes of columns. Where all columns of q, k or v are several swizzle atoms the map is one for tma_load_tile(). fp8: v_map is of the transposed
  // copy of V (transposed_v.h), (keys, head_dim_v, heads, batch), in boxes of the keys of one KV tile by all columns.
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
  bool k_whole_atoms, v_whole_atoms;        // rows of q and k, or of v, end with a swizzle atom
  Descale q_descale, k_descale, v_descale;  // 8-bit operands: one per sequence and head
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
  PagedParams pages;
  KeptHalves kept_halves;  // of dropout's threshold
  // FA_FLAG_SAME_BITS: what finds no room in shared memory of the rows' total, [CTA][warp][vector][lane].
  float4 *totals;
};

// The kernel's address, null if this build does not contain it. `shape` indexes kForwardShapes, `dtype` is that of out.
const void *forward_kernel(int shape, Dtype dtype);

}  // namespace fa::cuda::sm90
