// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/common/operand.h"
#include "cuda/host/driver.h"
#include "cuda/host/launches.h"
#include "cuda/kernels/bwd_sm90/backward.h"
#include "cuda/kernels/fwd_sm90/forward.h"
#include "cuda/kernels/fwd_sm90/transposed_v.h"

namespace fa::cuda::sm90 {
namespace {

fa_status refused(const char *name, const void *data, CUresult result, ErrorText &error) {
  return fail(error, FA_ERROR_CUDA, "%s at %p: the driver cannot describe it to the copy engine (%s)", name, data,
              cudaGetErrorName(to_runtime(result)));
}

CUtensorMapDataType map_type(Dtype dtype) {
  return dtype == Dtype::e4m3   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : dtype == Dtype::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}

// Describes (batch, rows, heads, columns) to the copy engine: boxes of 128 bytes of columns and `box_rows` rows of one head, what lies
// outside reads as zero.
fa_status describe(const Driver &driver, const char *name, const Operand &t, const Lengths &lengths, int64_t batch,
                   int64_t heads, int64_t columns, int box_rows, CUtensorMap &map, ErrorText &error) {
  const bool packed = lengths.cu != nullptr;
  // No dimension may be 0; where there are no rows, none is fetched.
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(columns),
                               static_cast<cuuint64_t>(std::max<int64_t>(packed ? lengths.total : lengths.max_len, 1)),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(packed ? 1 : batch)};
  const auto bytes = static_cast<cuuint64_t>(dtype_bytes(t.dtype));
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(t.seq_stride) * bytes, static_cast<cuuint64_t>(t.head_stride) * bytes,
                                 static_cast<cuuint64_t>(t.batch_stride) * bytes};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(128 / bytes), static_cast<cuuint32_t>(box_rows), 1, 1},
                   steps[4] = {1, 1, 1, 1};
  const CUresult result = driver.cuTensorMapEncodeTiled(&map, map_type(t.dtype), 4, t.data, sizes, strides, box, steps,
                                                        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? FA_OK : refused(name, t.data, result, error);
}

// Launches the kernel that copies values to the workspace, and describes the copy to the copy engine: boxes of a chunk of keys and all
// columns of one head.
fa_status add_copied_values(const ForwardProblem &p, const ForwardPlan &plan, const ForwardShape &shape, const Driver &driver,
                            void *workspace, CUtensorMap &map, Launches &launches, ErrorText &error) {
  const bool packed = p.k_lengths.cu != nullptr;
  auto &params = launches.make_params<TransposeVParams>();
  params.v = p.v;
  params.lengths = p.k_lengths;
  params.copy = static_cast<char *>(workspace);
  params.pitch = plan.transposed_v_keys;
  params.heads = static_cast<int32_t>(p.heads_k);
  params.columns = static_cast<int32_t>(p.head_dim_v);
  params.key_blocks = static_cast<int32_t>((p.k_lengths.max_len + (packed ? kLongestChunk - 1 : 0) + 127) / 128);
  params.column_blocks = static_cast<int32_t>((p.head_dim_v + 127) / 128);
  launches.add("transposing kernel",
               {transpose_kernel(), kTransposeThreads, 0, p.batch * p.heads_k * params.key_blocks * params.column_blocks},
               &params);

  const auto pitch = static_cast<cuuint64_t>(params.pitch), columns = static_cast<cuuint64_t>(p.head_dim_v),
             heads = static_cast<cuuint64_t>(p.heads_k);
  const cuuint64_t sizes[4] = {pitch, columns, heads, static_cast<cuuint64_t>(packed ? 1 : p.batch)};
  const cuuint64_t strides[3] = {pitch, pitch * columns, pitch * columns * heads};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(shape.chunk), static_cast<cuuint32_t>(shape.head_dim_v), 1, 1},
                   steps[4] = {1, 1, 1, 1};
  const CUresult result = driver.cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, workspace, sizes, strides, box,
                                                        steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? FA_OK : refused("copy of v", workspace, result, error);
}

// Describes one number a row, (chunks, chunk_rows), in boxes of a chunk.
fa_status describe_statistics(const Driver &driver, const char *name, float *data, int64_t chunks, int32_t chunk_rows,
                              CUtensorMap &map, ErrorText &error) {
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(chunk_rows), static_cast<cuuint64_t>(chunks), 1, 1};
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(chunk_rows) * sizeof(float),
                   strides[3] = {row_bytes, row_bytes, row_bytes};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(chunk_rows), 1, 1, 1}, steps[4] = {1, 1, 1, 1};
  const CUresult result = driver.cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, data, sizes, strides, box,
                                                        steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? FA_OK : refused(name, data, result, error);
}

}  // namespace

fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, const Driver &driver, void *workspace,
                       int32_t *counters, Launches &launches, ErrorText &error) {
  const ForwardShape &shape = kForwardShapes[plan.shape];
  auto &params = launches.make_params<ForwardParams>();
  params.problem = p;
  FA_RETURN_IF_ERROR(describe(driver, "q", p.q, p.q_lengths, p.batch, p.heads_q, p.head_dim, 64, params.q_map, error));
  FA_RETURN_IF_ERROR(describe(driver, "k", p.k, p.k_lengths, p.batch, p.heads_k, p.head_dim, shape.chunk, params.k_map, error));
  if (shape.fp8) {
    FA_RETURN_IF_ERROR(add_copied_values(p, plan, shape, driver, workspace, params.v_map, launches, error));
    params.q_descale = p.q_descale;
    params.k_descale = p.k_descale;
    params.v_descale = p.v_descale;
  } else {
    FA_RETURN_IF_ERROR(
        describe(driver, "v", p.v, p.k_lengths, p.batch, p.heads_k, p.head_dim_v, shape.chunk, params.v_map, error));
  }
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.raw = raw_unit(p);
  params.order = TileOrder(plan.row_blocks, p.heads_q, p.batch, plan.heads_per_l2_group, plan.last_batch,
                           !params.limits.unlimited_right());
  params.group = Divisor(p.group);
  params.tiles = plan.tiles;
  params.counters = counters;
  params.vector_out = has_16_byte_rows(p.out, p.head_dim_v);
  params.tma_out = shape.out_slabs > 0 && is_tma_compatible(p.out, p.q_lengths, p.head_dim_v);
  if (params.tma_out) {
    FA_RETURN_IF_ERROR(
        describe(driver, "out", p.out, p.q_lengths, p.batch, p.heads_q, p.head_dim_v, 16, params.out_map, error));
  }
  launches.add("forward kernel",
               {forward_kernel(plan.shape, p.out.dtype), shape.threads(), shape.shared_bytes(), plan.blocks, /*pdl=*/shape.fp8},
               &params);
  return FA_OK;
}

fa_status add_launches(const BackwardProblem &b, const BackwardPlan &plan, const Driver &driver, void *workspace,
                       Launches &launches, ErrorText &error) {
  const BackwardShape &shape = kBackwardShapes[plan.shape];
  const Problem &p = b.forward;
  auto &params = launches.make_params<BackwardParams>();
  set_rows(b, plan, kLseUnit, /*p_exponent=*/0, workspace, params);
  FA_RETURN_IF_ERROR(describe(driver, "q", p.q, p.q_lengths, p.batch, p.heads_q, p.head_dim, shape.rows, params.q_map, error));
  FA_RETURN_IF_ERROR(
      describe(driver, "k", p.k, p.k_lengths, p.batch, p.heads_k, p.head_dim, shape.block_keys(), params.k_map, error));
  FA_RETURN_IF_ERROR(
      describe(driver, "v", p.v, p.k_lengths, p.batch, p.heads_k, p.head_dim_v, shape.block_keys(), params.v_map, error));
  FA_RETURN_IF_ERROR(
      describe(driver, "dout", b.dout, p.q_lengths, p.batch, p.heads_q, p.head_dim_v, shape.rows, params.dout_map, error));
  const int64_t chunks = p.batch * p.heads_q * plan.row_chunks;
  FA_RETURN_IF_ERROR(
      describe_statistics(driver, "workspace for lse", params.row_lse, chunks, shape.rows, params.lse_map, error));
  FA_RETURN_IF_ERROR(
      describe_statistics(driver, "workspace for delta", params.row_delta, chunks, shape.rows, params.delta_map, error));
  params.order = L2HeadOrder(plan.key_blocks, p.heads_k, p.batch, plan.heads_per_l2_group, false);
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.blocks = static_cast<int32_t>(p.batch * p.heads_k * plan.key_blocks);
  params.taken = plan.chunk_turns > 0 ? params.turn + chunks * plan.chunk_turns : nullptr;
  params.ordered = p.deterministic;
  params.vector_dk = has_16_byte_rows(b.dk, p.head_dim);
  params.vector_dv = has_16_byte_rows(b.dv, p.head_dim_v);
  params.cap_exponent = p.softcap > 0 ? 2 * kLseUnit * p.softmax_scale / p.softcap : 0;
  params.logit_factor = (p.softcap > 0 ? p.softcap : p.softmax_scale) * kLseUnit;

  const BackwardKernels kernels = backward_kernels(plan.shape, p.q.dtype);
  launches.add("backward row kernel", backward_rows_launch(params), &params);
  if (b.dq.data != nullptr || b.dk.data != nullptr || b.dv.data != nullptr) {
    launches.add("backward kernel", {kernels.main, shape.threads(), shape.shared_bytes(), plan.blocks, /*pdl=*/true}, &params);
  }
  if (b.dq.data != nullptr) launches.add("dq kernel", {kernels.dq, kDqThreads, 0, chunks}, &params);
  if (b.dsink != nullptr) launches.add("dsink kernel", backward_sink_launch(params), &params);
  return FA_OK;
}

}  // namespace fa::cuda::sm90
