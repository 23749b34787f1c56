// SPDX-License-Identifier: Apache-2.0
// Where everything of a call of the forward-mode derivative lies in its workspace: block sizes and offsets, decided once by plan_jvp from
// shapes and the number of workers. Block sizes depend on the problem alone, so results do not depend on the number of workers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/parallel.h"
#include "core/problem.h"

namespace fa::cpu {

// Workspace: | schedule slots | slot 0 | slot 1 | ... | worker 0 | worker 1 | ...
// A slot holds the packed keys and values of one head in progress, shared by the workers that help with it. All offsets are bytes and
// multiples of 64; rows of ld or ld_v floats are multiples of 64 bytes as well.
struct JvpLayout {
  bool tq = false, tk = false, tv = false;  // tangents that are given
  bool logits() const { return tq || tk; }  // the logits move

  int64_t block_q = 0;  // rows of a tile of S
  int64_t block_k = 0;  // columns of a tile of S

  int64_t ld = 0;       // floats from row to row of q, tq
  int64_t ld_v = 0;     // floats from row to row of v, tv, tout
  int64_t ld_tile = 0;  // floats from row to row of a tile of S

  int32_t slots = 1;
  int32_t workers = 1;
  size_t slots_offset = 0, slot_bytes = 0;
  size_t workers_offset = 0, worker_bytes = 0;
  size_t total_bytes = 0;

  // In a slot, with max_k key rows of the longest sequence, rounded up to block_k.
  size_t k_transposed = 0;   // float (max_k / panel, head_dim, panel): K^T panels
  size_t tk_transposed = 0;  // the same of tk
  size_t v_rows = 0;         // float (max_k, ld_v)
  size_t tv_rows = 0;        // float (max_k, ld_v)
  size_t v_flags = 0;        // uint8 (max_k / block_k): 1 if v or tv of the block has values that are not finite

  // In a worker.
  size_t q_rows = 0;           // float (block_q, ld)
  size_t tq_rows = 0;          // float (block_q, ld)
  size_t lse2 = 0;             // float (block_q): lse * log2(e); +inf for rows that see nothing
  size_t tlse = 0;             // float (block_q): sums of P tS
  size_t tout = 0;             // float (block_q, ld_v): sums of (P tS) v + P tv
  size_t p_tile = 0;           // float (block_q, ld_tile): S, then P
  size_t ts_tile = 0;          // float (block_q, ld_tile): tS without the scale, then P tS
  size_t derivative_tile = 0;  // float (block_q, ld_tile), only with a softcap
  size_t visible_tile = 0;     // uint8 (block_q, block_k): pairs that are not masked, for tiles with values that are not finite
};

// The kernels, one per instruction set; see jvp.h.
namespace portable {
bool jvp(const JvpProblem &problem, const JvpLayout &layout, void *workspace, Parallel &parallel);
}
namespace avx2 {
bool jvp(const JvpProblem &problem, const JvpLayout &layout, void *workspace, Parallel &parallel);
}
namespace avx512 {
bool jvp(const JvpProblem &problem, const JvpLayout &layout, void *workspace, Parallel &parallel);
}
namespace neon {
bool jvp(const JvpProblem &problem, const JvpLayout &layout, void *workspace, Parallel &parallel);
}
namespace sve256 {
bool jvp(const JvpProblem &problem, const JvpLayout &layout, void *workspace, Parallel &parallel);
}

}  // namespace fa::cpu
