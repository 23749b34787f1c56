// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launches.h"
#include "cuda/kernels/mla/mla.h"

namespace fa::cuda::mla {
fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, const Driver &driver, void *workspace,
                       int32_t *counters, Launches &launches, ErrorText &) {
  const Shape &shape = kShapes[plan.shape];
  auto &params = launches.make_params<Params>();
  decode::set_params(p, plan, workspace, params);
  params.counters = counters;
  params.row_blocks_divisor = Divisor(plan.row_blocks);
  constexpr int32_t kBoxRows = 8;
  params.tma_kv = decode::describe_rows(driver, p, p.k, p.head_dim, shape.head_dim, kBoxRows,
                                        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, params.k_map);
  launches.add("MLA kernel",
               {kernel(plan.shape, p.q.dtype), shape.threads(), shape.shared_bytes(), plan.blocks, /*pdl=*/true, plan.cluster},
               &params);
  return FA_OK;
}

}  // namespace fa::cuda::mla
