// SPDX-License-Identifier: Apache-2.0
// The CUDA-core backward kernels, as plan and launcher see them.
#pragma once

#include "core/problem.h"
#include "cuda/common/data_mask.h"
#include "cuda/kernels/bwd_pre_post/backward_rows.h"
#include "cuda/kernels/bwd_simt/backward_table.h"

namespace fa::cuda::simt {

// What a CTA computes: the gradient of its own rows of q, k or v.
enum class Gradient : int32_t { dq, dk, dv };

// The only parameter of both kernels: a problem, and how it is divided among CTAs.
struct BackwardParams : BackwardRows {
  int32_t query_blocks, key_blocks;         // blocks of own rows, of the longest sequence
  int64_t blocks_dq, blocks_dk, blocks_dv;  // CTAs, in this order; 0 for a gradient that is not wanted
  bool vector_q, vector_k, vector_v, vector_dout, vector_dq, vector_dk, vector_dv;  // 16-byte accesses are legal
  DataMask mask;
};

// dq, dk and dv of shape kBackwardShapes[shape].
Launch backward_launch(int shape, const BackwardParams &params);
// dbias, in a fixed order and without workspace.
Launch bias_launch(const BackwardParams &params);

}  // namespace fa::cuda::simt
