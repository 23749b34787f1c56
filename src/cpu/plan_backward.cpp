// SPDX-License-Identifier: Apache-2.0
// Plans backward calls: block sizes, workspace, and which kernel runs.
#include <algorithm>

#include "cpu/arena.h"
#include "cpu/backward_layout.h"
#include "cpu/block_lists.h"
#include "cpu/forward_layout.h"
#include "cpu/launch.h"
#include "cpu/schedule.h"

namespace fa::cpu {
namespace {

// A tile of S is 96 x 256: P and dS (2 x 102 KB), the block's K, K^T, V^T (3 x 128 KB at head_dim 128) and its gradients
// (2 x 128 KB) stay in an L2 cache of 1-2 MB, and 96 rows are enough to read them back only every 96 x 256 products.
constexpr int64_t kBlockQ = 96;
constexpr int64_t kBlockK = 256;
constexpr int64_t kBlockKWide = 128;  // for head dims whose sum is above 512
// Blocks of query rows packed by one item: short enough to share a head of 1k rows, long enough to make claiming free.
constexpr int64_t kTileBlocks = 4;
// Rows of a block of dbias: the block's keys are packed once for these.
constexpr int64_t kBiasRows = 4 * kBlockQ;
// What a block of dbias takes besides its products, in columns: it packs its rows of q and dout anew, which takes about as long as the
// products of 16 columns.
constexpr int64_t kBiasPacking = 16;
constexpr int64_t kBiasLeastCols = 64;  // whole panels of every instruction set
// Memory for the query heads of a group that are in work at the same time. More heads at a time keep more workers busy when there
// are few heads and few blocks of keys; long sequences have enough of these.
constexpr size_t kWaveBytes = size_t{32} << 20;
// Memory for heads in progress. Workers beyond the slots help with the heads of others.
constexpr size_t kSlotsBytes = size_t{512} << 20;

// What computes a problem.
struct Choice {
  bool (*run)(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel);
  bool bf16_unit;
  const char *kernel;
  const char *reason;
};

// Depends on dtypes and on what is asked for, not on lengths: a sequence has the same gradients alone and in any batch.
Choice choose(const ScoredBackward &problem, const Machine &machine) {
  const MaskedProblem &p = problem.forward;
  const char *reason = changes_scores(p, problem.score) || masks_pairs(p, problem.score) ? "blocks of keys outer, general score"
                                                                                         : "blocks of keys outer";
  if (multiplies_bf16(machine.isa)) {
    const auto all_are = [&](Dtype dtype) {
      return p.q.dtype == dtype && p.k.dtype == dtype && p.v.dtype == dtype && problem.dout.dtype == dtype;
    };
    const bool amx = machine.isa == FA_CPU_ISA_AMX, on_unit = all_are(Dtype::bf16) || (amx && all_are(Dtype::f16));
    if (on_unit && problem.dbias.data == nullptr) {
#if defined(FA_HAVE_AMX)
      if (machine.isa == FA_CPU_ISA_AMX) return {amx::backward, true, "cpu_backward_amx", reason};
#endif
#if defined(FA_HAVE_AVX512_BF16)
      if (machine.isa == FA_CPU_ISA_AVX512_BF16) return {avx512_bf16::backward, true, "cpu_backward_avx512_bf16", reason};
#endif
#if defined(FA_HAVE_NEON_BF16)
      if (machine.isa == FA_CPU_ISA_NEON_BF16) return {neon_bf16::backward, true, "cpu_backward_neon_bf16", reason};
#endif
    }
    reason = on_unit ? "blocks of keys outer, in fp32 because dbias is asked for"
             : amx   ? "blocks of keys outer, in fp32 because not all of q, k, v and dout are bf16, nor all fp16"
                     : "blocks of keys outer, in fp32 because not all of q, k, v and dout are bf16";
  }
  const fa_cpu_isa isa = vector_isa(machine.isa);
#if defined(__x86_64__)
  if (isa == FA_CPU_ISA_AVX512) return {avx512::backward, false, "cpu_backward_avx512", reason};
  if (isa == FA_CPU_ISA_AVX2) return {avx2::backward, false, "cpu_backward_avx2", reason};
#elif defined(FA_HAVE_NEON)
#if defined(FA_HAVE_SVE256)
  if (isa == FA_CPU_ISA_SVE256) return {sve256::backward, false, "cpu_backward_sve256", reason};
#endif
  if (isa == FA_CPU_ISA_NEON) return {neon::backward, false, "cpu_backward_neon", reason};
#endif
  (void)isa;
  return {portable::backward, false, "cpu_backward_portable", reason};
}

// Columns of a block of dbias: narrower where dbias is summed over so many dimensions that blocks of block_k columns would leave workers
// idle. A column has the same sum in any block.
int64_t bias_cols(const ScoredBackward &problem, const BackwardLayout &l) {
  const MaskedProblem &p = problem.forward;
  const int64_t row_blocks = problem.dbias_sum_rows ? 1 : (problem.dbias_rows + l.bias_rows - 1) / l.bias_rows;
  const int64_t blocks =
      (problem.dbias_sum_batch ? 1 : p.batch) * (problem.dbias_sum_heads ? 1 : p.heads_q) * std::max<int64_t>(row_blocks, 1);
  // Time of the pass, in columns of one worker.
  const auto time = [&](int64_t cols) {
    const int64_t items = blocks * ((problem.dbias_cols + cols - 1) / cols);
    return (items + l.workers - 1) / l.workers * (cols + kBiasPacking);
  };
  int64_t best = l.block_k;
  for (int64_t cols = l.block_k / 2; cols >= kBiasLeastCols; cols /= 2) {
    if (time(cols) < time(best)) best = cols;
  }
  return best;
}

BackwardLayout make_layout(const ScoredBackward &problem, const Choice &choice, const Machine &machine) {
  const MaskedProblem &p = problem.forward;
  BackwardLayout l;
  l.wants.dq = problem.dq.data != nullptr;
  l.wants.dk = problem.dk.data != nullptr;
  l.wants.dv = problem.dv.data != nullptr;
  l.wants.dsink = problem.dsink != nullptr;
  l.wants.dbias = problem.dbias.data != nullptr;
  const bool ds = l.wants.ds();

  l.bf16_unit = choice.bf16_unit;
  l.parts = p.q.dtype == Dtype::f16 ? 2 : 1;
  const size_t packed = l.bf16_unit ? static_cast<size_t>(l.parts) * 2 : sizeof(float);  // bytes of a packed number
  l.block_q = l.bf16_unit ? kBackwardTileRows : kBlockQ;
  l.block_k = p.head_dim + p.head_dim_v > 512 ? kBlockKWide : kBlockK;
  l.tile_q = kTileBlocks * l.block_q;
  // What a row takes when it is packed.
  const int64_t dim = l.bf16_unit ? round_up(p.head_dim, 32) : p.head_dim;
  const int64_t dim_v = l.bf16_unit ? round_up(p.head_dim_v, 32) : p.head_dim_v;
  l.ld = leading_dimension(dim);
  l.ld_v = leading_dimension(dim_v);
  l.ld_tile = leading_dimension(l.block_k);
  l.max_q = round_up(p.q_lengths.max_len, l.block_q);
  l.max_k = round_up(p.k_lengths.max_len, l.block_k);
  l.blocks_q = l.max_q / l.block_q;
  l.blocks_k = l.max_k / l.block_k;

  // Bytes of a packed row of k and q, of v and dout.
  const size_t row = static_cast<size_t>(l.bf16_unit ? dim : l.ld) * packed;
  const size_t row_v = static_cast<size_t>(l.bf16_unit ? dim_v : l.ld_v) * packed;
  const size_t head_bytes =
      static_cast<size_t>(l.max_q) * ((l.bf16_unit ? 2 : 1) * (row + row_v) + static_cast<size_t>(l.ld) * sizeof(float));
  l.wave = std::clamp<int64_t>(static_cast<int64_t>(kWaveBytes / std::max<size_t>(head_bytes, 1)), 1, p.group);
  l.sum_group = p.group > 1;

  Arena slot;
  const int64_t q_rows = l.wave * l.max_q;
  l.k_transposed = slot.take(l.max_k * dim, packed);
  l.v_transposed = slot.take(ds ? l.max_k * dim_v : 0, packed);
  l.k_rows = slot.take(l.wants.dq ? l.max_k : 0, row);
  l.q_rows = slot.take(q_rows, row);
  l.dout_rows = slot.take(q_rows, row_v);
  l.q_columns = slot.take(l.bf16_unit && l.wants.dk ? q_rows : 0, row);
  l.dout_columns = slot.take(l.bf16_unit && l.wants.dv ? q_rows : 0, row_v);
  l.dq_sum = slot.take(l.wants.dq ? q_rows * l.ld : 0, sizeof(float));
  // Sums of dk and dv of a block of keys.
  const int64_t dk_floats = l.bf16_unit ? dim * l.ld_tile : l.block_k * l.ld;
  const int64_t dv_floats = l.bf16_unit ? dim_v * l.ld_tile : l.block_k * l.ld_v;
  l.dk_sum = slot.take(l.wants.dk && l.sum_group ? l.blocks_k * dk_floats : 0, sizeof(float));
  l.dv_sum = slot.take(l.wants.dv && l.sum_group ? l.blocks_k * dv_floats : 0, sizeof(float));
  l.lse2 = slot.take(q_rows, sizeof(float));
  l.delta = slot.take(q_rows, sizeof(float));
  l.q_flags = slot.take(l.wave * l.blocks_q, 1);
  l.k_flags = slot.take(l.blocks_k, 1);
  l.dq_turn = slot.take(l.wave * l.blocks_k, sizeof(int64_t));
  l.dkv_turn = slot.take(l.blocks_k, sizeof(int64_t));
  l.slot_bytes = slot.bytes();

  Arena worker;
  const int64_t tile_rows = l.bf16_unit ? kTileStripRows : l.block_q, tile = tile_rows * l.ld_tile;
  l.p_tile = worker.take(tile, sizeof(float));
  l.ds_tile = worker.take(tile, sizeof(float));
  l.derivative_tile = worker.take(needs_derivative(p, problem.score) ? tile : 0, sizeof(float));
  l.dropout_tile = worker.take(p.dropout.threshold > 0 ? tile : 0, sizeof(float));
  l.visible_tile = worker.take(tile_rows * l.block_k, 1);
  l.dk_block = worker.take(dk_floats, sizeof(float));
  l.dv_block = worker.take(dv_floats, sizeof(float));
  l.active_slices = worker.take(p.slices.count, sizeof(int32_t));
  if (l.bf16_unit) {
    l.p_pairs = worker.take(l.block_q * l.block_k, packed);
    l.ds_pairs = worker.take(l.block_q * l.block_k, packed);
    l.ds_left = worker.take(kTileStripRows * l.block_k, packed);
    l.row_scratch = worker.take(16 * std::max(l.ld, l.ld_v), sizeof(float));
  }
  if (l.wants.dbias) {
    l.bias_rows = problem.dbias_sum_rows ? 1 : kBiasRows;
    l.bias_k = worker.take(l.block_k * p.head_dim, sizeof(float));
    l.bias_v = worker.take(l.block_k * p.head_dim_v, sizeof(float));
    l.bias_q = worker.take(l.block_q * l.ld, sizeof(float));
    l.bias_dout = worker.take(l.block_q * l.ld_v, sizeof(float));
    l.bias_lse2 = worker.take(l.block_q, sizeof(float));
    l.bias_delta = worker.take(l.block_q, sizeof(float));
    l.bias_sum = worker.take(l.bias_rows * l.ld_tile, sizeof(float));
  }
  l.worker_bytes = worker.bytes();

  // No more workers than there are blocks to share.
  const int64_t heads = p.batch * p.heads_k;
  const int64_t items = std::max<int64_t>(heads, 1) * std::max<int64_t>(l.wave * l.blocks_k, 1);
  l.workers = static_cast<int32_t>(std::min<int64_t>(machine.threads, items));
  if (l.wants.dbias) l.bias_cols = bias_cols(problem, l);
  l.slots = static_cast<int32_t>(
      std::clamp<int64_t>(static_cast<int64_t>(kSlotsBytes / l.slot_bytes), 1, std::clamp<int64_t>(heads, 1, l.workers)));

  Arena all;
  all.take(static_cast<int64_t>(Schedule::bytes(l.slots)), 1);
  l.dsink_offset = all.take(l.wants.dsink ? p.batch * p.heads_q * l.blocks_q : 0, sizeof(double));
  l.list_bits_offset = all.take(static_cast<int64_t>(block_list_bytes(p)), 1);
  l.slots_offset = all.take(l.slots * static_cast<int64_t>(l.slot_bytes), 1);
  l.workers_offset = all.take(l.workers * static_cast<int64_t>(l.worker_bytes), 1);
  l.total_bytes = all.bytes();
  return l;
}

}  // namespace

Plan plan_backward(const ScoredBackward &problem, const Machine &machine) {
  Plan plan;
  if (problem.empty()) {
    plan.kernel = "none";
    plan.reason = "no gradient is asked for";
    return plan;
  }
  const Choice choice = choose(problem, machine);
  const BackwardLayout layout = make_layout(problem, choice, machine);
  plan.workspace_bytes = layout.total_bytes;
  plan.tasks = layout.workers;
  plan.kernel = choice.kernel;
  plan.reason = choice.reason;
  return plan;
}

bool backward(const ScoredBackward &problem, const Machine &machine, const Plan &, void *workspace, Parallel &parallel) {
  const Choice choice = choose(problem, machine);
  const BackwardLayout layout = make_layout(problem, choice, machine);
  make_block_list_bits(problem.forward, reinterpret_cast<uint64_t *>(static_cast<char *>(workspace) + layout.list_bits_offset));
  return choice.run(problem, layout, workspace, parallel);
}

}  // namespace fa::cpu
