// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/common/operand.h"
#include "cuda/driver.h"
#include "cuda/launches.h"
#include "cuda/sm90/forward.h"

namespace fa::cuda::sm90 {
namespace {

// Describes (batch, rows, heads, columns) of 16-bit elements to the copy engine: boxes of 64 columns and `box_rows` rows of one head, what
// lies outside reads as zero.
fa_status describe(const Driver &driver, const char *name, const Operand &t, const Lengths &lengths, int64_t batch,
                   int64_t heads, int64_t columns, int box_rows, CUtensorMap &map, ErrorText &error) {
  const bool packed = lengths.cu != nullptr;
  // No dimension may be 0; where there are no rows, none is fetched.
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(columns),
                               static_cast<cuuint64_t>(std::max<int64_t>(packed ? lengths.total : lengths.max_len, 1)),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(packed ? 1 : batch)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(t.seq_stride) * 2, static_cast<cuuint64_t>(t.head_stride) * 2,
                                 static_cast<cuuint64_t>(t.batch_stride) * 2};  // bytes
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(box_rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = t.dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result = driver.cuTensorMapEncodeTiled(&map, type, 4, t.data, sizes, strides, box, steps,
                                                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return FA_OK;
  return fail(error, FA_ERROR_CUDA, "%s at %p: the driver cannot describe it to the copy engine (%s)", name, t.data,
              cudaGetErrorName(to_runtime(result)));
}

}  // namespace

fa_status add_launches(const Problem &p, const ForwardPlan &plan, const Driver &driver, int32_t *counters, Launches &launches,
                       ErrorText &error) {
  const ForwardShape &shape = kForwardShapes[plan.shape];
  auto &params = launches.make_params<ForwardParams>();
  params.problem = p;
  FA_RETURN_IF_ERROR(describe(driver, "q", p.q, p.q_lengths, p.batch, p.heads_q, p.head_dim, 64, params.q_map, error));
  FA_RETURN_IF_ERROR(describe(driver, "k", p.k, p.k_lengths, p.batch, p.heads_k, p.head_dim, shape.chunk, params.k_map, error));
  FA_RETURN_IF_ERROR(
      describe(driver, "v", p.v, p.k_lengths, p.batch, p.heads_k, p.head_dim_v, shape.chunk, params.v_map, error));
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.order = BlockOrder(plan.row_blocks, p.heads_q, p.batch, plan.heads_per_section, !params.limits.unlimited_right());
  params.group = Divisor(p.group);
  params.tiles = plan.tiles;
  params.counters = plan.tiles > plan.blocks ? counters : nullptr;
  params.vector_out = takes_vectors(p.out, p.head_dim_v);
  launches.add("forward kernel", {forward_kernel(plan.shape, p.q.dtype), shape.threads(), shape.shared_bytes(), plan.blocks},
               &params);
  return FA_OK;
}

}  // namespace fa::cuda::sm90
