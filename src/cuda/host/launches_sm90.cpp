// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "cuda/host/kv_copy.h"
#include "cuda/host/launches.h"
#include "cuda/host/planners.h"
#include "cuda/host/tensor_maps.h"
#include "cuda/kernels/bwd_sm90/backward.h"
#include "cuda/kernels/fwd_sm90/forward.h"
#include "cuda/kernels/fwd_sm90/transposed_v.h"
#include "cuda/kernels/jvp_sm90/jvp.h"

namespace fa::cuda::sm90 {
namespace {

// Launches the kernel that writes the transposed copy of 8-bit V to the workspace, and describes the copy to TMA.
fa_status add_transposed_v(const ForwardProblem &p, const ForwardPlan &plan, const ForwardShape &shape,
                           const LaunchMemory &memory, CUtensorMap &map, Launches &launches, ErrorText &error) {
  const bool packed = p.k_lengths.cu != nullptr;
  auto &params = launches.make_params<TransposeVParams>();
  params.v = p.v;
  params.lengths = p.k_lengths;
  params.copy = static_cast<char *>(memory.workspace);
  params.pitch = plan.transposed_v_keys;
  params.heads = static_cast<int32_t>(p.heads_k);
  params.columns = static_cast<int32_t>(p.head_dim_v);
  params.key_blocks = static_cast<int32_t>((p.k_lengths.max_len + (packed ? kMaxKvTile - 1 : 0) + 127) / 128);
  params.column_blocks = static_cast<int32_t>((p.head_dim_v + 127) / 128);
  launches.add("transpose kernel",
               {transpose_kernel(), kTransposeThreads, 0, p.batch * p.heads_k * params.key_blocks * params.column_blocks},
               &params);
  return describe_transposed_v(memory.driver, memory.workspace, packed ? 1 : p.batch, p.heads_k, p.head_dim_v, params.pitch,
                               shape.kv_tile, shape.head_dim_v, map, error);
}

// K and V in pages: boxes as long as pages and a KV tile allow.
void set_pages(const ForwardProblem &p, const ForwardPlan &plan, const ForwardShape &shape, const LaunchMemory &memory,
               PagedParams &pages) {
  constexpr int64_t kTileRows = 64;
  const auto boxes = [&](const Operand &t, int64_t keys) {
    const PageDimension d = page_dimension(p, t);
    return PageBoxes{static_cast<int32_t>(d.page_step), static_cast<int32_t>(d.head_step),
                     std::countr_zero(static_cast<uint64_t>(p.page_table != nullptr ? std::gcd(p.page_size, keys) : keys))};
  };
  char *workspace = static_cast<char *>(memory.workspace);
  pages.page_size = Divisor(p.page_size);
  pages.tile_heads = Divisor(plan.rows_per_token);
  pages.num_splits = Divisor(plan.num_splits);
  pages.tile_tokens = static_cast<int32_t>(kTileRows / plan.rows_per_token);
  pages.k = boxes(p.k, shape.kv_tile);
  pages.v = boxes(p.v, shape.v_part_keys);
  if (plan.num_splits == 1) return;
  pages.split_out = reinterpret_cast<float *>(workspace);
  pages.split_lse = reinterpret_cast<float *>(workspace + plan.split_lse_offset);
}

// The problem of kernels for pages, and the launches that copy 8-bit K and V.
ForwardProblem add_pages(const ForwardProblem &p, const ForwardPlan &plan, const LaunchMemory &memory, Launches &launches) {
  if (plan.copied_keys == 0) return in_pages(p, 0, nullptr);
  void *const copy = static_cast<char *>(memory.workspace) + plan.copy_offset;
  add_kv_copy(p, plan.copied_keys, /*tile_keys=*/64, copy, launches);
  return in_pages(p, plan.copied_keys, copy);
}

// What a kernel with a score text stages as others stage a bias.
fa_status describe_text_tile(const LaunchMemory &memory, const MaskedProblem &p, CUtensorMap &map, ErrorText &error) {
  const ScoreTextTensor &t = memory.score_text->args.tensors[p.score_text.tile_tensor];
  const ScoreTensor tensor{const_cast<void *>(t.data), p.q.dtype, t.stride[0], t.stride[1], t.stride[2], t.stride[3]};
  return describe_bias(memory.driver, "tensor of the score text", p, tensor, map, error);
}

int32_t count_of(const Launches &launches) { return static_cast<int32_t>(launches.end() - launches.begin()); }

// The launches of one pass without that of dq. `only_if`: of BackwardRows. `pass`: their parameters.
fa_status add_pass(const BackwardProblem &b, const BackwardPlan &plan, const int32_t *only_if, const LaunchMemory &memory,
                   Launches &launches, const BackwardParams *&pass, ErrorText &error) {
  const BackwardShape &shape = kBackwardShapes[plan.shape];
  const Problem &p = b.forward;
  auto &scored = launches.make_params<ScoreTextParams<BackwardParams>>();
  BackwardParams &params = scored.params;
  const int exponent = p_exponent(p.dropout.keep_scale);
  set_rows(b, plan, kLog2e, exponent, memory.workspace, params);
  params.only_if = only_if;
  params.keep_scale = std::ldexp(p.dropout.keep_scale, -exponent);
  FA_RETURN_IF_ERROR(
      describe_rows(memory.driver, "q", p.q, p.q_lengths, p.batch, p.heads_q, p.head_dim, 1, shape.rows, params.q_map, error));
  FA_RETURN_IF_ERROR(describe_rows(memory.driver, "k", p.k, p.k_lengths, p.batch, p.heads_k, p.head_dim, 1, shape.block_keys(),
                                   params.k_map, error));
  FA_RETURN_IF_ERROR(describe_rows(memory.driver, "v", p.v, p.k_lengths, p.batch, p.heads_k, p.head_dim_v, 1,
                                   shape.block_keys(), params.v_map, error));
  FA_RETURN_IF_ERROR(describe_rows(memory.driver, "dout", b.dout, p.q_lengths, p.batch, p.heads_q, p.head_dim_v, 1, shape.rows,
                                   params.dout_map, error));
  const int64_t tiles = q_tiles_of_all_heads(params);
  FA_RETURN_IF_ERROR(
      describe_row_statistics(memory.driver, "workspace for lse", params.row_lse, tiles, shape.rows, params.lse_map, error));
  FA_RETURN_IF_ERROR(describe_row_statistics(memory.driver, "workspace for delta", params.row_delta, tiles, shape.rows,
                                             params.delta_map, error));
  params.order = L2HeadOrder(plan.key_blocks, p.heads_k, p.batch, plan.heads_per_l2_group, false, plan.last_heads);
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.query_order =
      L2HeadOrder(plan.q_tiles, p.heads_q, p.batch, plan.heads_per_l2_group * p.group, !params.limits.unlimited_right());
  params.dq_blocks = b.dq.data != nullptr ? static_cast<int32_t>(p.batch * p.heads_q * plan.q_tiles) : 0;
  params.blocks = static_cast<int32_t>(p.batch * p.heads_k * plan.key_blocks);
  params.taken = plan.dq_semaphores > 0 ? params.dq_semaphore + tiles * plan.dq_semaphores : nullptr;
  if (plan.split_units > 0) {
    sm90::SplitTail &tail = params.split_tail;
    tail.first_tile = params.blocks - plan.split_tiles;
    tail.units = plan.split_units;
    tail.q_tiles = plan.q_tiles;
    tail.total = plan.split_tiles * plan.q_tiles;
    tail.max_splits = plan.splits_per_tile;
    tail.by_units = Divisor(tail.units);
    tail.by_q_tiles = Divisor(tail.q_tiles);
    tail.by_total = Divisor(tail.total);
    tail.partials = reinterpret_cast<float *>(static_cast<char *>(memory.workspace) + plan.split_offset);
    tail.counters = params.taken + 1;
    params.blocks = tail.first_tile + tail.units;
  }
  params.ordered = p.deterministic;
  if (plan.cyclic) params.cyclic = CyclicOrder(plan.q_tiles, plan.key_blocks);
  params.tma_dk = plan.tma_dk;
  params.tma_dv = plan.tma_dv;
  if (plan.tma_dk) {
    FA_RETURN_IF_ERROR(
        describe_rows(memory.driver, "dk", b.dk, p.k_lengths, p.batch, p.heads_k, p.head_dim, 1, 16, params.dk_map, error));
  }
  if (plan.tma_dv) {
    FA_RETURN_IF_ERROR(
        describe_rows(memory.driver, "dv", b.dv, p.k_lengths, p.batch, p.heads_k, p.head_dim_v, 1, 16, params.dv_map, error));
  }
  params.vector_dk = plan.vector.dk;
  params.vector_dv = plan.vector.dv;
  params.raw = raw_unit(b.forward);
  params.mask = memory.mask;
  if (p.bias.data != nullptr && kind_of_bias(p) != kAnyBias)
    FA_RETURN_IF_ERROR(describe_bias(memory.driver, "bias", p, p.bias, params.bias_map, error));
  if (plan.scored && stages_bias(shape.scores))
    FA_RETURN_IF_ERROR(describe_text_tile(memory, b.forward, params.bias_map, error));

  const BackwardKernels kernels = backward_kernels(plan.shape, p.q.dtype);
  const bool second = only_if != nullptr;
  pass = &params;
  Launch rows = backward_rows_launch(params);
  rows.pdl = second;
  launches.add("backward row kernel", rows, &params);
  if (!second && memory.steps != nullptr) memory.steps->first_with_keys = count_of(launches);
  if (b.dq.data != nullptr || b.dk.data != nullptr || b.dv.data != nullptr) {
    Launch launch{kernels.main, shape.threads(), shape.shared_bytes(), plan.blocks, /*pdl=*/true};
    use_score_text(memory.score_text, scored, launch);
    launches.add("backward kernel", launch, &params);
  }
  if (second) return FA_OK;  // the rest is the same, NaN or not
  if (p.k_lengths.left_padding != nullptr) launches.add("left padding kernel", backward_padding_launch(params), &params);
  if (b.dbias.data != nullptr) sm80::add_dbias_launch(b, plan, plan.dbias_shape, memory, launches);
  if (b.dsink != nullptr) launches.add("dsink kernel", backward_sink_launch(params), &params);
  return FA_OK;
}

// Converts the sum of dq, where the main kernel of the pass leaves one.
void add_dq(const BackwardProblem &b, const BackwardPlan &plan, const BackwardParams &params, Launches &launches) {
  const BackwardShape &shape = kBackwardShapes[plan.shape];
  if (b.dq.data == nullptr || !shape.sums_dq()) return;
  const void *kernel = backward_kernels(plan.shape, b.forward.q.dtype).dq;
  launches.add("dq kernel", {kernel, shape.dq_threads(), 0, ctas_for_q_tiles(params), /*pdl=*/params.only_if != nullptr},
               &params);
}

// The main launches of a forward. `p`: of kernels for pages add_pages().
fa_status add_forward(const ForwardProblem &p, const ForwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                      ErrorText &error) {
  const ForwardShape &shape = kForwardShapes[plan.shape];
  auto &scored = launches.make_params<ScoreTextParams<ForwardParams>>();
  ForwardParams &params = scored.params;
  params.problem = p;
  if (shape.pages) set_pages(p, plan, shape, memory, params.pages);
  if (shape.packs_heads()) {
    FA_RETURN_IF_ERROR(describe_head_rows(memory.driver, "q", p.q, p.q_lengths, p.batch, p.heads_q, p.head_dim,
                                          plan.rows_per_token, params.pages.tile_tokens, params.q_map, error));
  } else {
    FA_RETURN_IF_ERROR(describe_rows(memory.driver, "q", p.q, p.q_lengths, p.batch, p.heads_q, p.head_dim, shape.q_box_atoms(),
                                     64, params.q_map, error));
  }
  const auto describe = [&](const char *name, const Operand &tensor, int64_t columns, int32_t box_atoms, CUtensorMap &map) {
    const int32_t box_keys = 1 << (&tensor == &p.k ? params.pages.k : params.pages.v).box_log2;
    if (shape.packs_heads())
      return describe_pages(memory.driver, name, p, tensor, columns, box_atoms * 64, box_keys, map, error);
    if (shape.pages) return describe_kv(memory.driver, name, p, tensor, columns, 64, box_keys, map, error);
    return describe_rows(memory.driver, name, tensor, p.k_lengths, p.batch, p.heads_k, columns, box_atoms,
                         memory.score_text != nullptr ? shape.score_text_kv_tile() : shape.kv_tile, map, error);
  };
  FA_RETURN_IF_ERROR(describe("k", p.k, p.head_dim, shape.k_box_atoms, params.k_map));
  if (shape.fp8) {
    FA_RETURN_IF_ERROR(add_transposed_v(p, plan, shape, memory, params.v_map, launches, error));
    params.q_descale = p.q_descale;
  } else {
    FA_RETURN_IF_ERROR(describe("v", p.v, p.head_dim_v, shape.v_box_atoms, params.v_map));
  }
  params.k_descale = p.k_descale;
  params.v_descale = p.v_descale;
  params.k_whole_atoms = has_whole_atoms(p.k.dtype, p.head_dim);
  params.v_whole_atoms = has_whole_atoms(p.v.dtype, p.head_dim_v);
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.raw = tanh_unit(p);
  params.order = TileOrder(plan.row_blocks, p.heads_q / plan.rows_per_token, p.batch, plan.heads_per_l2_group, plan.last_batch,
                           !params.limits.unlimited_right());
  params.group = Divisor(p.group);
  params.bias_box_keys =
      p.bias.data != nullptr && kind_of_bias(p) != kAnyBias ? static_cast<int32_t>(128 / dtype_bytes(p.bias.dtype)) : 0;
  if (params.bias_box_keys > 0) FA_RETURN_IF_ERROR(describe_bias(memory.driver, "bias", p, p.bias, params.bias_map, error));
  if (plan.scored && stages_bias(shape.scores)) FA_RETURN_IF_ERROR(describe_text_tile(memory, p, params.bias_map, error));
  params.pair_bias = takes_pairs(p.bias);
  const int exponent = p_exponent(p.dropout.keep_scale);
  params.p_exponent = static_cast<float>(exponent);
  params.dropout_threshold = rescale_threshold(exponent) + params.p_exponent;
  params.kept_halves = KeptHalves(p.dropout.threshold);
  params.totals = reinterpret_cast<float4 *>(static_cast<char *>(memory.workspace) + plan.totals_offset);
  params.mask = memory.mask;
  params.max_logit = p.max_logit;
  params.max_logit_stride = p.max_logit_stride;
  params.tiles = plan.tiles;
  params.counters = memory.counters;
  params.vector_out = plan.vector.out;
  params.tma_out = plan.tma_out;
  if (plan.tma_out) {
    FA_RETURN_IF_ERROR(describe_rows(memory.driver, "out", p.out, p.q_lengths, p.batch, p.heads_q, p.head_dim_v, 1, 16,
                                     params.out_map, error));
  }
  Launch launch{forward_kernel(plan.shape, p.out.dtype),  shape.threads(), shape.shared_bytes(), plan.blocks, /*pdl=*/shape.fp8,
                shape.cluster() > 1 ? shape.cluster() : 0};
  use_score_text(memory.score_text, scored, launch);
  if (launch.at_run_time) launch.shared_bytes = shape.score_text_storage_bytes;
  launches.add("forward kernel", launch, &params);
  if (shape.packs_heads()) add_merge(p, plan.num_splits, params.pages.split_out, params.pages.split_lse, launches);
  return FA_OK;
}

}  // namespace

fa_status add_launches(const ForwardProblem &p, const ForwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &error) {
  if (!kForwardShapes[plan.shape].packs_heads() && plan.copied_keys == 0) return add_forward(p, plan, memory, launches, error);
  return add_forward(add_pages(p, plan, memory, launches), plan, memory, launches, error);
}

fa_status add_launches(const BackwardProblem &b, const BackwardPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &error) {
  const BackwardParams *first = nullptr, *second = nullptr;
  FA_RETURN_IF_ERROR(add_pass(b, plan, nullptr, memory, launches, first, error));
  BackwardPlan second_plan;
  if (plan.nan_safe_shape >= 0) {
    const auto *nonfinite = reinterpret_cast<const int32_t *>(static_cast<char *>(memory.workspace) + plan.nonfinite_offset);
    second_plan = nan_safe_pass(b, plan);
    FA_RETURN_IF_ERROR(add_pass(b, second_plan, nonfinite, memory, launches, second, error));
  }
  // dq is last, behind both passes, so that gradients of keys are there early. A second pass that has run has overwritten the sum of the first one, and
  // its dq overwrites what comes of that.
  if (memory.steps != nullptr) memory.steps->first_behind_key_gradients = count_of(launches);
  add_dq(b, plan, *first, launches);
  if (second != nullptr) add_dq(b, second_plan, *second, launches);
  return FA_OK;
}

fa_status add_launches(const JvpProblem &j, const JvpPlan &plan, const LaunchMemory &memory, Launches &launches,
                       ErrorText &error) {
  if (plan.blocks == 0) return FA_OK;
  const JvpShape &shape = kJvpShapes[plan.shape];
  const Problem &p = j.forward;
  auto &params = launches.make_params<JvpParams>();
  params.problem = p;
  params.tout = j.tout;
  params.tlse = j.tlse;
  params.has_tq = j.tq.data != nullptr;
  params.has_tk = j.tk.data != nullptr;
  params.has_tv = j.tv.data != nullptr;
  constexpr int32_t kBoxRows = 64;
  const auto queries = [&](const char *name, const Operand &rows, CUtensorMap &map) {
    return describe_rows(memory.driver, name, rows, p.q_lengths, p.batch, p.heads_q, p.head_dim, 1, kBoxRows, map, error);
  };
  const auto keys = [&](const char *name, const Operand &rows, int64_t columns, CUtensorMap &map) {
    return describe_rows(memory.driver, name, rows, p.k_lengths, p.batch, p.heads_k, columns, 1, kBoxRows, map, error);
  };
  FA_RETURN_IF_ERROR(queries("q", p.q, params.q_map));
  FA_RETURN_IF_ERROR(keys("k", p.k, p.head_dim, params.k_map));
  FA_RETURN_IF_ERROR(keys("v", p.v, p.head_dim_v, params.v_map));
  params.tq_map = params.q_map;
  params.tk_map = params.k_map;
  params.tv_map = params.v_map;
  if (params.has_tq) FA_RETURN_IF_ERROR(queries("tq", j.tq, params.tq_map));
  if (params.has_tk) FA_RETURN_IF_ERROR(keys("tk", j.tk, p.head_dim, params.tk_map));
  if (params.has_tv) FA_RETURN_IF_ERROR(keys("tv", j.tv, p.head_dim_v, params.tv_map));
  params.limits = Diagonal<int32_t>::Limits(p.band);
  params.order = L2HeadOrder(plan.row_blocks, p.heads_q, p.batch, plan.heads_per_l2_group, !params.limits.unlimited_right());
  params.group = Divisor(p.group);
  params.tiles = plan.tiles;
  params.counters = memory.counters;
  params.vector_out = plan.vector.out;
  params.vector_tout = plan.vector.tout;
  launches.add("jvp kernel", {jvp_kernel(plan.shape, p.q.dtype), shape.threads(), shape.shared_bytes(), plan.blocks}, &params);
  return FA_OK;
}

}  // namespace fa::cuda::sm90
