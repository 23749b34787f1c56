// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launches.h"
#include "cuda/host/tensor_maps.h"
#include "cuda/kernels/mla/mla.h"

namespace fa::cuda::mla {

fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &error) {
  const Shape &shape = kShapes[plan.shape];
  auto &params = launches.make_params<Params>();
  decode::set_params(p, plan, memory.workspace, params);
  params.counters = memory.counters;
  params.row_blocks_divisor = Divisor(plan.row_blocks);
  params.listed = memory.listed_keys != nullptr ? *memory.listed_keys : ListedKeys{};
  params.stored_segments = plan.stored_segments;
  params.partial_warps = plan.partial_warps;
  params.totals = reinterpret_cast<float4 *>(static_cast<char *>(memory.workspace) + plan.totals_offset);
  params.tma_kv = plan.tma_kv;
  if (plan.tma_kv) {
    FA_RETURN_IF_ERROR(
        is_quantised(p.k.dtype)
            ? describe_wide_8bit(memory.driver, "k", p, p.k, p.head_dim, shape.head_dim, kBoxRows,
                                 /*swizzled=*/false, params.k_map, error)
            : describe_kv(memory.driver, "k", p, p.k, p.head_dim, shape.head_dim, kBoxRows, params.k_map, error));
  }
  const decode::Kernels instance = kernels(plan.shape, p.q.dtype, p.k.dtype);
  launches.add("MLA kernel",
               {instance.attention, shape.threads(), shape.shared_bytes(), plan.blocks, /*pdl=*/true, plan.cluster}, &params);
  launches.add("combine kernel", {instance.combine, decode::kCombineThreads, 0, plan.combine_ctas, /*pdl=*/true},
               static_cast<decode::Params *>(&params));
  return FA_OK;
}

}  // namespace fa::cuda::mla
