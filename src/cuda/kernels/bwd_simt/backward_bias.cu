// SPDX-License-Identifier: Apache-2.0
#include "cuda/kernels/bwd_simt/backward_bias.cuh"

namespace fa::cuda::simt {
namespace {

__global__ void __launch_bounds__(kThreads, 1) backward_bias(const __grid_constant__ BackwardParams params) {
  extern __shared__ __align__(16) float simt_shared[];
  BackwardBias(params, *reinterpret_cast<BackwardBias::Storage *>(simt_shared)).run();
}

}  // namespace

Launch bias_launch(const BackwardParams &params) {
  const BackwardProblem &b = params.problem;
  const int64_t slices = (b.dbias_sum_batch ? 1 : b.forward.batch) * (b.dbias_sum_heads ? 1 : b.forward.heads_q);
  return {reinterpret_cast<const void *>(&backward_bias), kThreads, sizeof(BackwardBias::Storage),
          slices * (b.dbias_sum_rows ? 1 : BackwardBias::row_tiles(b.dbias_rows)) * BackwardBias::column_tiles(b.dbias_cols)};
}

}  // namespace fa::cuda::simt
