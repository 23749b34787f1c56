// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/launches.h"
#include "cuda/host/tensor_maps.h"
#include "cuda/kernels/bf16_planes/planes.h"
#include "cuda/kernels/bwd_sm90_fp32/backward.h"
#include "cuda/kernels/fwd_sm90_fp32/forward.h"

namespace fa::cuda::sm90_fp32 {
namespace {

// The launch that writes planes of a problem's tensors.
class Split {
 public:
  Split(const Problem &p, const LaunchMemory &memory, Launches &launches)
      : p_(p), memory_(memory), params_(launches.make_params<SplitParams>()) {
    params_.count = 0;
  }

  // Adds a tensor of queries or keys, and describes its planes: all sequences of the first plane, then those of the next
  // one.
  fa_status add(const char *name, const Operand &tensor, bool of_queries, int64_t columns, size_t offset, int32_t box_rows,
                CUtensorMap &map, ErrorText &error) {
    const Lengths &lengths = of_queries ? p_.q_lengths : p_.k_lengths;
    const PlaneShape shape(lengths, p_.batch, of_queries ? p_.heads_q : p_.heads_k, columns);
    char *planes = static_cast<char *>(memory_.workspace) + offset;
    params_.tensors[params_.count] = {tensor, lengths, shape, planes};
    params_.first_block[params_.count++] = static_cast<int32_t>(blocks_);
    blocks_ += shape.blocks();
    Operand rows;
    rows.data = planes;
    rows.dtype = Dtype::bf16;
    rows.seq_stride = shape.pitch;
    rows.head_stride = shape.rows * shape.pitch;
    rows.batch_stride = shape.heads * rows.head_stride;
    Lengths padded;
    padded.max_len = shape.rows;
    return describe_rows(memory_.driver, name, rows, padded, kPlanes * shape.batch, shape.heads, columns, 1, box_rows, map,
                         error);
  }
  void launch(Launches &launches) const { launches.add("split kernel", {split_kernel(), kSplitThreads, 0, blocks_}, &params_); }
  // Sequences of a plane.
  static int32_t batches(const Lengths &lengths, int64_t batch) {
    return static_cast<int32_t>(PlaneShape(lengths, batch, 1, 1).batch);
  }

 private:
  const Problem &p_;
  const LaunchMemory &memory_;
  SplitParams &params_;
  int64_t blocks_ = 0;
};

}  // namespace

fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &error) {
  const ForwardShape &shape = kForwardShapes[plan.shape];
  Split split(p, memory, launches);
  auto &params = launches.make_params<ForwardParams>();
  FA_RETURN_IF_ERROR(split.add("workspace for q", p.q, true, p.head_dim, plan.planes_offset[0], kRows, params.q_map, error));
  FA_RETURN_IF_ERROR(
      split.add("workspace for k", p.k, false, p.head_dim, plan.planes_offset[1], shape.kv_tile, params.k_map, error));
  FA_RETURN_IF_ERROR(
      split.add("workspace for v", p.v, false, p.head_dim_v, plan.planes_offset[2], shape.kv_tile, params.v_map, error));
  split.launch(launches);
  params.problem = p;
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.order = L2HeadOrder(plan.row_blocks, p.heads_q, p.batch, plan.heads_per_l2_group, !params.limits.unlimited_right());
  params.group = Divisor(p.group);
  params.q_batch = Split::batches(p.q_lengths, p.batch);
  params.k_batch = Split::batches(p.k_lengths, p.batch);
  params.vector_out = plan.vector.out;
  params.mask = memory.mask;
  params.tanh_scale = natural_tanh_scale(p);
  launches.add("forward kernel", {forward_kernel(plan.shape), shape.threads(), shape.shared_bytes(), plan.blocks, /*pdl=*/true},
               &params);
  return FA_OK;
}

fa_status add_launches(const BackwardProblem &b, const BackwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &error) {
  const BackwardShape &shape = kBackwardShapes[plan.shape];
  const Problem &p = b.forward;
  Split split(p, memory, launches);
  auto &params = launches.make_params<BackwardParams>();
  set_rows(b, plan, /*lse_unit=*/1.f, /*p_exponent=*/0, memory.workspace, params);
  FA_RETURN_IF_ERROR(
      split.add("workspace for q", p.q, true, p.head_dim, plan.planes_offset[0], kTileRows, params.q_map, error));
  FA_RETURN_IF_ERROR(
      split.add("workspace for k", p.k, false, p.head_dim, plan.planes_offset[1], kTileRows, params.k_map, error));
  FA_RETURN_IF_ERROR(
      split.add("workspace for v", p.v, false, p.head_dim_v, plan.planes_offset[2], kTileRows, params.v_map, error));
  FA_RETURN_IF_ERROR(
      split.add("workspace for dout", b.dout, true, p.head_dim_v, plan.planes_offset[3], kTileRows, params.dout_map, error));
  const int64_t tiles = int64_t{q_tiles_of_all_heads(params)} * plan.q_tile_rows / kTileRows;
  FA_RETURN_IF_ERROR(
      describe_row_statistics(memory.driver, "workspace for lse", params.row_lse, tiles, kTileRows, params.lse_map, error));
  FA_RETURN_IF_ERROR(describe_row_statistics(memory.driver, "workspace for delta", params.row_delta, tiles, kTileRows,
                                             params.delta_map, error));
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.query_order =
      L2HeadOrder(plan.query_blocks, p.heads_q, p.batch, plan.heads_per_l2_group * p.group, !params.limits.unlimited_right());
  params.key_order = L2HeadOrder(plan.key_blocks, p.heads_k, p.batch, plan.heads_per_l2_group, false);
  params.group = Divisor(p.group);
  const bool of_keys = b.dk.data != nullptr || b.dv.data != nullptr;
  params.key_blocks = of_keys ? static_cast<int32_t>(p.batch * p.heads_k * plan.key_blocks) : 0;
  params.q_batch = Split::batches(p.q_lengths, p.batch);
  params.k_batch = Split::batches(p.k_lengths, p.batch);
  params.vector_dq = plan.vector.dq;
  params.vector_dk = plan.vector.dk;
  params.vector_dv = plan.vector.dv;
  params.mask = memory.mask;
  params.tanh_scale = natural_tanh_scale(p);
  launches.add("backward row kernel", backward_rows_launch(params), &params);
  if (plan.blocks > 0) {
    split.launch(launches);
    launches.add("backward kernel",
                 {backward_kernel(plan.shape), shape.threads(), shape.shared_bytes(), plan.blocks, /*pdl=*/true}, &params);
  }
  if (p.k_lengths.left_padding != nullptr) launches.add("left padding kernel", backward_padding_launch(params), &params);
  if (b.dbias.data != nullptr) simt::add_dbias_launch(b, plan, memory, launches);
  if (b.dsink != nullptr) launches.add("dsink kernel", backward_sink_launch(params), &params);
  return FA_OK;
}

}  // namespace fa::cuda::sm90_fp32
