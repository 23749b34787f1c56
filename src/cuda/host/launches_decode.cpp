// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/common/operand.h"
#include "cuda/host/launches.h"
#include "cuda/kernels/decode/decode.h"

namespace fa::cuda::decode {

void set_params(const ForwardProblem &p, const ForwardPlan &plan, void *workspace, Params &params) {
  char *memory = static_cast<char *>(workspace);
  params.problem = p;
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.group = Divisor(p.group);
  params.page_size = Divisor(std::clamp<int64_t>(p.page_size, 1, int64_t{1} << 30));
  params.vector_out = has_16_byte_rows(p.out, p.head_dim_v);
  params.raw = raw_unit(p);
  params.k_descale = p.k_descale;
  params.v_descale = p.v_descale;
  params.row_blocks = plan.row_blocks;
  params.max_partitions = plan.ranges;
  params.coscheduled_log2 = plan.coscheduled_log2;
  params.fixed_splits = plan.pieces;
  params.min_iterations_log2 = plan.least_log2;
  params.partial_out = reinterpret_cast<float *>(memory);
  params.partial_stats = reinterpret_cast<float2 *>(memory + plan.split_lse_offset);
  params.split_tile_infos = reinterpret_cast<SplitTile *>(memory + plan.split_tiles_offset);
  params.split_tiles = plan.split_tiles;
  params.split_tiles_by_partition = plan.split_tiles_by_partition;
  params.allow_early_dependents = plan.allow_early_dependents;
  params.counters = nullptr;
  params.dsmem_vectors = Divisor(1);  // of clusters alone
}

bool describe_rows(const Driver &driver, const Problem &p, const Operand &t, int64_t columns, int32_t box_columns,
                   int32_t box_rows, CUtensorMapL2promotion promotion, CUtensorMap &map) {
  const bool bytes = is_quantised(t.dtype);
  const int64_t slab = bytes ? columns : 64, size = bytes ? 1 : 2;
  const bool paged = p.page_table != nullptr, packed = p.k_lengths.cu != nullptr;
  if (!is_tma_compatible(t, p.k_lengths, columns) || columns % slab != 0 || (paged && p.page_size % box_rows != 0))
    return false;
  const int64_t rows = paged    ? p.page_size
                       : packed ? p.k_lengths.total
                                : p.k_lengths.max_len,
                batches = paged    ? p.num_pages
                          : packed ? 1
                                   : p.batch;
  if (rows > INT32_MAX || batches > INT32_MAX) return false;
  const cuuint64_t sizes[5] = {static_cast<cuuint64_t>(slab), static_cast<cuuint64_t>(std::max<int64_t>(rows, 1)),
                               static_cast<cuuint64_t>(columns / slab), static_cast<cuuint64_t>(p.heads_k),
                               static_cast<cuuint64_t>(std::max<int64_t>(batches, 1))};
  const cuuint64_t strides[4] = {static_cast<cuuint64_t>(t.seq_stride * size),
                                 static_cast<cuuint64_t>(bytes ? box_columns : slab * size),
                                 static_cast<cuuint64_t>(t.head_stride * size), static_cast<cuuint64_t>(t.batch_stride * size)};
  // What a box has beyond the columns is zero.
  const cuuint32_t box[5] = {static_cast<cuuint32_t>(bytes ? box_columns : slab), static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(bytes ? 1 : box_columns / slab), 1, 1},
                   steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type = bytes                    ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : t.dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return driver.cuTensorMapEncodeTiled(&map, type, 5, t.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                       bytes ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B, promotion,
                                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, void *workspace, Launches &launches, ErrorText &) {
  const Shape &shape = kShapes[plan.shape];
  const Kernels its = kernels(plan.shape, p.q.dtype, p.k.dtype);
  auto &params = launches.make_params<Params>();
  set_params(p, plan, workspace, params);
  if (plan.cluster > 0) {
    const int64_t vectors = p.q_lengths.max_len * p.group * (shape.head_dim / 4);
    params.dsmem_vectors = Divisor((vectors + plan.cluster - 1) / plan.cluster);
  }
  launches.add("decode kernel", {its.attention, shape.threads(), shape.shared_bytes(), plan.blocks, /*pdl=*/true, plan.cluster},
               &params);
  launches.add("kernel that sums parts", {its.combine, kCombineThreads, 0, plan.combine_ctas, /*pdl=*/true}, &params);
  return FA_OK;
}

}  // namespace fa::cuda::decode
