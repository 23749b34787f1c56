// SPDX-License-Identifier: Apache-2.0
// Plans calls of the forward-mode derivative: block sizes, workspace, and which kernel runs.
#include <algorithm>

#include "cpu/arena.h"
#include "cpu/jvp_layout.h"
#include "cpu/launch.h"
#include "cpu/schedule.h"

namespace fa::cpu {
namespace {

// As in backward: S and tS (2 x 102 KB), the block's K^T, tK^T, V and tV (4 x 128 KB at head_dim 128) and the rows' queries and sums
// (4 x 48 KB) stay in an L2 cache of 1-2 MB.
constexpr int64_t kBlockQ = 96;
constexpr int64_t kBlockK = 256;
constexpr int64_t kBlockKWide = 128;  // for head dims whose sum is above 256
// Memory for heads in progress. Workers beyond the slots help with the heads of others.
constexpr size_t kSlotsBytes = size_t{512} << 20;

// What computes a problem.
struct Choice {
  bool (*run)(const JvpProblem &problem, const JvpLayout &layout, void *workspace, Parallel &parallel);
  const char *kernel;
};

Choice choose(const Machine &machine) {
  const fa_cpu_isa isa = vector_isa(machine.isa);
#if defined(__x86_64__)
  if (isa == FA_CPU_ISA_AVX512) return {avx512::jvp, "cpu_jvp_avx512"};
  if (isa == FA_CPU_ISA_AVX2) return {avx2::jvp, "cpu_jvp_avx2"};
#elif defined(FA_HAVE_NEON)
#if defined(FA_HAVE_SVE256)
  if (isa == FA_CPU_ISA_SVE256) return {sve256::jvp, "cpu_jvp_sve256"};
#endif
  if (isa == FA_CPU_ISA_NEON) return {neon::jvp, "cpu_jvp_neon"};
#endif
  (void)isa;
  return {portable::jvp, "cpu_jvp_portable"};
}

JvpLayout make_layout(const JvpProblem &problem, const Machine &machine) {
  const MaskedProblem &p = problem.forward;
  JvpLayout l;
  l.tq = problem.tq.data != nullptr;
  l.tk = problem.tk.data != nullptr;
  l.tv = problem.tv.data != nullptr;
  l.block_q = kBlockQ;
  l.block_k = p.head_dim + p.head_dim_v > 256 ? kBlockKWide : kBlockK;
  l.ld = leading_dimension(p.head_dim);
  l.ld_v = leading_dimension(p.head_dim_v);
  l.ld_tile = leading_dimension(l.block_k);
  const int64_t max_k = round_up(p.k_lengths.max_len, l.block_k);

  Arena slot;
  l.k_transposed = slot.take(max_k * p.head_dim, sizeof(float));
  l.tk_transposed = slot.take(l.tk ? max_k * p.head_dim : 0, sizeof(float));
  l.v_rows = slot.take(l.logits() ? max_k * l.ld_v : 0, sizeof(float));
  l.tv_rows = slot.take(l.tv ? max_k * l.ld_v : 0, sizeof(float));
  l.v_flags = slot.take(max_k / l.block_k, 1);
  l.slot_bytes = slot.bytes();

  Arena worker;
  const int64_t tile = l.block_q * l.ld_tile;
  l.q_rows = worker.take(l.block_q * l.ld, sizeof(float));
  l.tq_rows = worker.take(l.tq ? l.block_q * l.ld : 0, sizeof(float));
  l.lse2 = worker.take(l.block_q, sizeof(float));
  l.tlse = worker.take(l.block_q, sizeof(float));
  l.tout = worker.take(l.block_q * l.ld_v, sizeof(float));
  l.p_tile = worker.take(tile, sizeof(float));
  l.ts_tile = worker.take(l.logits() ? tile : 0, sizeof(float));
  l.derivative_tile = worker.take(p.softcap > 0 ? tile : 0, sizeof(float));
  l.visible_tile = worker.take(l.block_q * l.block_k, 1);
  l.worker_bytes = worker.bytes();

  // No more workers than there are blocks to share.
  const int64_t heads = p.batch * p.heads_k;
  const int64_t blocks = p.group * (round_up(p.q_lengths.max_len, l.block_q) / l.block_q);
  l.workers =
      static_cast<int32_t>(std::clamp<int64_t>(std::max<int64_t>(heads, 1) * std::max<int64_t>(blocks, 1), 1, machine.threads));
  l.slots = static_cast<int32_t>(
      std::clamp<int64_t>(static_cast<int64_t>(kSlotsBytes / l.slot_bytes), 1, std::clamp<int64_t>(heads, 1, l.workers)));

  Arena all;
  all.take(static_cast<int64_t>(Schedule::bytes(l.slots)), 1);
  l.slots_offset = all.take(l.slots * static_cast<int64_t>(l.slot_bytes), 1);
  l.workers_offset = all.take(l.workers * static_cast<int64_t>(l.worker_bytes), 1);
  l.total_bytes = all.bytes();
  return l;
}

}  // namespace

Plan plan_jvp(const JvpProblem &problem, const Machine &machine) {
  const JvpLayout layout = make_layout(problem, machine);
  Plan plan;
  plan.workspace_bytes = layout.total_bytes;
  plan.tasks = layout.workers;
  plan.kernel = choose(machine).kernel;
  plan.reason = "blocks of queries outer, P from lse";
  return plan;
}

bool jvp(const JvpProblem &problem, const Machine &machine, const Plan &, void *workspace, Parallel &parallel) {
  return choose(machine).run(problem, make_layout(problem, machine), workspace, parallel);
}

}  // namespace fa::cpu
