// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/latent/latent.h"
#include "cuda/launches.h"

namespace fa::cuda::latent {
namespace {

// Whether the copy engine can fetch eight rows of keys at a time, and how they are described to it: (batch or pages, heads, slabs of 64
// columns, rows, 64).
bool describe(const Driver &driver, const Problem &p, CUtensorMap &map) {
  constexpr int64_t kSlab = 64;
  constexpr cuuint32_t kBoxRows = 8;
  const Shape &shape = kShapes[0];
  const bool paged = p.page_table != nullptr, packed = p.k_lengths.cu != nullptr;
  if (!takes_copies(p.k, p.k_lengths, p.head_dim) || p.head_dim % kSlab != 0 || (paged && p.page_size % kBoxRows != 0))
    return false;
  const int64_t rows = paged    ? p.page_size
                       : packed ? p.k_lengths.total
                                : p.k_lengths.max_len,
                batches = paged    ? p.num_pages
                          : packed ? 1
                                   : p.batch;
  if (rows > INT32_MAX || batches > INT32_MAX) return false;
  const cuuint64_t sizes[5] = {kSlab, static_cast<cuuint64_t>(std::max<int64_t>(rows, 1)),
                               static_cast<cuuint64_t>(p.head_dim / kSlab), static_cast<cuuint64_t>(p.heads_k),
                               static_cast<cuuint64_t>(std::max<int64_t>(batches, 1))};
  const cuuint64_t strides[4] = {static_cast<cuuint64_t>(p.k.seq_stride) * 2, kSlab * 2,
                                 static_cast<cuuint64_t>(p.k.head_stride) * 2,
                                 static_cast<cuuint64_t>(p.k.batch_stride) * 2};  // bytes
  const cuuint32_t box[5] = {kSlab, kBoxRows, static_cast<cuuint32_t>(shape.head_dim / kSlab), 1, 1},
                   steps[5] = {1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      p.k.dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  return driver.cuTensorMapEncodeTiled(&map, type, 5, p.k.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                       CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, const Driver &driver, void *workspace,
                       int32_t *counters, Launches &launches, ErrorText &) {
  const Shape &shape = kShapes[plan.shape];
  auto &params = launches.make_params<Params>();
  decode::set_params(p, plan, workspace, counters, params);
  params.blocks_of_head = Divisor(plan.row_blocks);
  params.copied = describe(driver, p, params.k_map);
  launches.add("latent kernel", {kernel(plan.shape, p.q.dtype), shape.threads(), shape.shared_bytes(), plan.blocks}, &params);
  return FA_OK;
}

}  // namespace fa::cuda::latent
