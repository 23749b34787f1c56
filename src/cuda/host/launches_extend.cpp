// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launches.h"
#include "cuda/host/tensor_maps.h"
#include "cuda/kernels/extend/extend.h"

namespace fa::cuda::extend {

fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &error) {
  const Shape &shape = kShapes[plan.shape];
  auto &params = launches.make_params<Params>();
  decode::set_params(p, plan, memory.workspace, params);
  params.counters = memory.counters;
  params.row_blocks_divisor = Divisor(plan.row_blocks);
  params.stored_segments = plan.stored_segments;
  params.partial_warps = plan.partial_warps;
  params.totals = reinterpret_cast<float4 *>(static_cast<char *>(memory.workspace) + plan.totals_offset);
  params.mask = memory.mask;
  params.tma_kv = plan.tma_kv;
  if (plan.tma_kv) {
    const auto describe = [&](const char *name, const Operand &tensor, int64_t columns, CUtensorMap &map) {
      return describe_kv(memory.driver, name, p, tensor, columns, shape.box_columns(), kBoxRows, map, error,
                         /*swizzles_bytes=*/shape.one_token());
    };
    FA_RETURN_IF_ERROR(describe("k", p.k, p.head_dim, params.k_map));
    FA_RETURN_IF_ERROR(describe("v", p.v, p.head_dim_v, params.v_map));
  }
  const decode::Kernels instance = kernels(plan.shape, p.q.dtype, p.k.dtype);
  launches.add("extend kernel",
               {instance.attention, shape.threads(), shape.shared_bytes(), plan.blocks, /*pdl=*/true, plan.cluster}, &params);
  launches.add("combine kernel", {instance.combine, decode::kCombineThreads, 0, plan.combine_ctas, /*pdl=*/true},
               static_cast<decode::Params *>(&params));
  return FA_OK;
}

}  // namespace fa::cuda::extend
