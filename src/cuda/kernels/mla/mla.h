// SPDX-License-Identifier: Apache-2.0
// The MLA kernels, as plan and launcher see them.
#pragma once

#include <cuda.h>

#include "cuda/common/listed_keys.h"
#include "cuda/kernels/decode/decode.h"
#include "cuda/kernels/mla/table.h"

namespace fa::cuda::mla {

// The kernel's only parameter. Work is partitioned as for the decode kernels (decode/stream_k.cuh).
struct Params : decode::Params {
  Divisor row_blocks_divisor;  // row_blocks
  ListedKeys listed;           // where its lists are given, pages are the keys that each query lists
  // Tensor map of K in boxes of eight rows, where TMA can load it.
  bool tma_kv;
  CUtensorMap k_map;
  // Kernels for FA_FLAG_SAME_BITS (segments.cuh): the segments that a work unit may store before it has the total of those before it, the
  // softmax warps with rows, each of which has a part of every total and segment, and the totals of the CTAs, in the workspace.
  int32_t stored_segments, partial_warps;
  float4 *totals;
};

// As for the decode kernels. `shape` indexes kShapes.
decode::Kernels kernels(int shape, Dtype queries, Dtype keys);

}  // namespace fa::cuda::mla
