// SPDX-License-Identifier: Apache-2.0
// Where everything of a backward call lies in its workspace: block sizes and offsets, decided once by plan_backward from shapes and
// the number of workers. Block sizes depend on the problem alone, so results do not depend on the number of workers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/parallel.h"
#include "core/score.h"

namespace fa::cpu {

// Rows of a tile of S, and columns of it.
constexpr int64_t kBackwardTileRows = 128;  // with bf16_unit

// What a call has to compute.
struct BackwardWants {
  bool dq = false;
  bool dk = false;
  bool dv = false;
  bool dsink = false;
  bool dbias = false;
  bool heads() const { return dq || dk || dv || dsink; }  // anything that the pass over heads computes
  bool ds() const { return dq || dk; }                    // gradients that go through dS
};

// Workspace: | schedule slots | dsink parts | block lists as bits | slot 0 | slot 1 | ... | worker 0 | worker 1 | ...
// A slot holds one head in progress, shared by the workers that help with it; the arrays of a slot and of a worker are listed with
// their shapes. All offsets are bytes and multiples of 64; rows of ld or ld_v floats are multiples of 64 bytes as well.
struct BackwardLayout {
  BackwardWants wants;

  // Products of bf16 on a unit for them (backward_bf16.h), otherwise fp32 multiply-adds (backward_fma.h).
  bool bf16_unit = false;
  int64_t parts = 1;  // with bf16_unit: numbers of bf16 that one of an input, of P or dS is packed into

  int64_t block_q = 0;  // rows of a tile of S
  int64_t block_k = 0;  // columns of a tile of S
  int64_t tile_q = 0;   // query rows packed by one item
  int64_t wave = 0;     // query heads of a group that are packed and in work at the same time

  int64_t ld = 0;       // floats from row to row of q, k, dq, dk
  int64_t ld_v = 0;     // floats from row to row of dout, dv
  int64_t ld_tile = 0;  // floats from row to row of a tile of S

  int64_t max_q = 0;       // query rows of the longest sequence, rounded up to block_q
  int64_t max_k = 0;       // key rows of the longest sequence, rounded up to block_k
  int64_t blocks_q = 0;    // max_q / block_q
  int64_t blocks_k = 0;    // max_k / block_k
  bool sum_group = false;  // dk, dv of a block are sums over several query heads, gathered in the slot

  int32_t slots = 1;
  int32_t workers = 1;
  size_t dsink_offset = 0;      // double (batch, heads_q, blocks_q)
  size_t list_bits_offset = 0;  // make_block_list_bits
  size_t slots_offset = 0, slot_bytes = 0;
  size_t workers_offset = 0, worker_bytes = 0;
  size_t total_bytes = 0;

  // In a slot. With bf16_unit, head dims are rounded up to 32 and inputs are tiles of bf16 (pack_tiles.h), each array once for each part.
  size_t k_transposed = 0;  // float (max_k / panel, head_dim, panel): K^T panels; pack_key_tiles
  size_t v_transposed = 0;  // float (max_k / panel, head_dim_v, panel): V^T panels; pack_key_tiles
  size_t k_rows = 0;        // float (max_k, ld); pack_value_tiles
  size_t q_rows = 0;        // float (wave, max_q, ld); pack_left
  size_t dout_rows = 0;     // float (wave, max_q, ld_v); pack_left
  size_t q_columns = 0;     // bf16_unit: pack_left_transposed
  size_t dout_columns = 0;  // bf16_unit: pack_left_transposed
  size_t dq_sum = 0;        // float (wave, max_q, ld)
  size_t dk_sum = 0;        // float (max_k, ld), only with sum_group; bf16_unit: (blocks_k, head_dim, ld_tile)
  size_t dv_sum = 0;        // float (max_k, ld_v), only with sum_group; bf16_unit: (blocks_k, head_dim_v, ld_tile)
  size_t lse2 = 0;          // float (wave, max_q): lse * log2(e); +inf for rows that see nothing
  size_t delta = 0;         // float (wave, max_q): rowsum(dout * out) - dlse
  size_t q_flags = 0;   // uint8 (wave, blocks_q): 1 if q or dout of the block has values that are not finite; bf16_unit: Flags
  size_t k_flags = 0;   // uint8 (blocks_k): the same of k, with bf16_unit also of v
  size_t dq_turn = 0;   // atomic int64 (wave, blocks_k): how far the block of keys has got in adding to dq
  size_t dkv_turn = 0;  // atomic int64 (blocks_k): query heads of the group that have added to dk, dv

  // In a worker. With bf16_unit, float tiles have 32 rows, and there are arrays of bf16 for each part.
  size_t p_tile = 0;           // float (block_q, ld_tile): S, then P
  size_t ds_tile = 0;          // float (block_q, ld_tile): dP, then dS
  size_t derivative_tile = 0;  // float (block_q, ld_tile), only with a softcap or a score function
  size_t dropout_tile = 0;     // float (block_q, ld_tile), only with dropout
  size_t visible_tile = 0;     // uint8 (block_q, block_k): pairs that are not masked, for tiles with wild values
  size_t dk_block = 0;         // float (block_k, ld); bf16_unit: (head_dim, ld_tile)
  size_t dv_block = 0;         // float (block_k, ld_v); bf16_unit: (head_dim_v, ld_tile)
  size_t p_pairs = 0;          // bf16_unit: (block_q, block_k) of P in bf16, tiles of pairs of rows
  size_t ds_pairs = 0;         // bf16_unit: the same of dS
  size_t ds_left = 0;          // bf16_unit: (32, block_k) of dS in bf16, tiles of rows
  size_t row_scratch = 0;      // bf16_unit: float (16, ld or ld_v)

  size_t active_slices = 0;  // int32 (slices.count): those that touch the block of keys

  // In a worker in the pass for dbias, which runs before the rest and shares the tiles with it.
  int64_t bias_rows = 0;  // rows of a block of dbias
  int64_t bias_cols = 0;  // its columns, at most block_k
  size_t bias_k = 0;      // float (block_k / panel, head_dim, panel): K^T panels
  size_t bias_v = 0;      // float (block_k / panel, head_dim_v, panel): V^T panels
  size_t bias_q = 0;      // float (block_q, ld)
  size_t bias_dout = 0;   // float (block_q, ld_v)
  size_t bias_lse2 = 0;   // float (block_q)
  size_t bias_delta = 0;  // float (block_q)
  size_t bias_sum = 0;    // float (bias_rows, ld_tile)
};

// The kernels, one per instruction set; see backward.h.
namespace portable {
bool backward(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel);
}
namespace avx2 {
bool backward(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel);
}
namespace avx512 {
bool backward(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel);
}
namespace avx512_bf16 {
bool backward(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel);
}
namespace amx {
bool backward(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel);
}
namespace neon {
bool backward(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel);
}
namespace neon_bf16 {
bool backward(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel);
}
namespace sve256 {
bool backward(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel);
}

}  // namespace fa::cpu
