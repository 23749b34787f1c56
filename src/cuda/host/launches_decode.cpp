// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/host/launches.h"
#include "cuda/host/tensor_maps.h"
#include "cuda/kernels/decode/decode.h"

namespace fa::cuda::decode {
namespace {

fa_status set_wide_params(const ForwardProblem &p, const ForwardPlan &plan, const Driver &driver, WideParams &params,
                          ErrorText &error) {
  params.tma_kv = plan.tma_kv;
  if (!plan.tma_kv) return FA_OK;
  const auto describe = [&](const char *name, const Operand &t, int64_t head_dim, int32_t columns, CUtensorMap &map) {
    return describe_wide_8bit(driver, name, p, t, head_dim, columns, kWideBoxRows, /*swizzled=*/true, map, error);
  };
  const Shape &shape = kShapes[plan.shape];
  FA_RETURN_IF_ERROR(describe("k", p.k, p.head_dim, shape.head_dim, params.k_map));
  return is_latent(shape.head_dim) ? FA_OK : describe("v", p.v, p.head_dim_v, shape.head_dim_v, params.v_map);
}

}  // namespace

void set_params(const ForwardProblem &p, const ForwardPlan &plan, void *workspace, Params &params) {
  char *memory = static_cast<char *>(workspace);
  params.problem = p;
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.group = Divisor(p.group);
  params.page_size = Divisor(std::clamp<int64_t>(p.page_size, 1, int64_t{1} << 30));
  params.vector_out = plan.vector.out;
  params.raw = raw_unit(p);
  params.k_descale = p.k_descale;
  params.v_descale = p.v_descale;
  params.row_blocks = plan.row_blocks;
  params.max_partitions = plan.max_partitions;
  params.coscheduled_log2 = plan.coscheduled_log2;
  params.fixed_splits = plan.fixed_splits;
  params.min_iterations_log2 = plan.min_iterations_log2;
  params.partial_out = reinterpret_cast<float *>(memory);
  params.partial_stats = reinterpret_cast<float2 *>(memory + plan.split_lse_offset);
  params.split_tile_infos = reinterpret_cast<SplitTile *>(memory + plan.split_tiles_offset);
  params.split_tiles = plan.split_tiles;
  params.split_tiles_by_partition = plan.split_tiles_by_partition;
  params.allow_early_dependents = plan.allow_early_dependents;
  params.counters = nullptr;
  params.dsmem_vectors = Divisor(1);  // only clusters have one
}

fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &error) {
  const Shape &shape = kShapes[plan.shape];
  const Kernels instance = kernels(plan.shape, p.q.dtype, p.k.dtype);
  const bool wide = shape.kv_bytes == 1 && shape.column_warps() > 1;
  auto &params = wide ? launches.make_params<WideParams>() : launches.make_params<Params>();
  set_params(p, plan, memory.workspace, params);
  if (wide) FA_RETURN_IF_ERROR(set_wide_params(p, plan, memory.driver, static_cast<WideParams &>(params), error));
  if (plan.cluster > 0) {
    const int64_t vectors = p.q_lengths.max_len * p.group * (shape.head_dim / 4);
    params.dsmem_vectors = Divisor((vectors + plan.cluster - 1) / plan.cluster);
  }
  launches.add("decode kernel",
               {instance.attention, shape.threads(), shape.shared_bytes(), plan.blocks, /*pdl=*/true, plan.cluster}, &params);
  launches.add("combine kernel", {instance.combine, kCombineThreads, 0, plan.combine_ctas, /*pdl=*/true}, &params);
  return FA_OK;
}

}  // namespace fa::cuda::decode
