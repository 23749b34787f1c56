// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launches.h"
#include "cuda/kernels/extend/extend.h"

namespace fa::cuda::extend {
fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, const Driver &driver, void *workspace,
                       int32_t *counters, Launches &launches, ErrorText &) {
  const Shape &shape = kShapes[plan.shape];
  auto &params = launches.make_params<Params>();
  decode::set_params(p, plan, workspace, params);
  params.counters = counters;
  params.row_blocks_divisor = Divisor(plan.row_blocks);
  // Few rows wait for memory alone, which gathering in whole rows reads faster. With more the products want what that takes of a
  // multiprocessor; and bytes those who fetch, for widening.
  constexpr int32_t kBoxRows = 16;
  const auto describe = [&](const Operand &t, int64_t columns, CUtensorMap &map) {
    return decode::describe_rows(driver, p, t, columns, shape.box_columns(), kBoxRows, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, map);
  };
  params.tma_kv = (shape.stages_8bit > 0 || p.q_lengths.max_len * p.group > kWarpgroupRows) &&
                  describe(p.k, p.head_dim, params.k_map) && describe(p.v, p.head_dim_v, params.v_map);
  const decode::Kernels its = kernels(plan.shape, p.q.dtype, p.k.dtype);
  launches.add("extend kernel", {its.attention, shape.threads(), shape.shared_bytes(), plan.blocks, /*pdl=*/true}, &params);
  launches.add("kernel that sums parts", {its.combine, decode::kCombineThreads, 0, plan.combine_ctas, /*pdl=*/true},
               static_cast<decode::Params *>(&params));
  return FA_OK;
}

}  // namespace fa::cuda::extend
