// SPDX-License-Identifier: Apache-2.0
// Backward: dq, dk, dv and dsink of every head; dbias is a pass of its own, in backward_bias.h.
//
// For each key head, the query heads of its group one after another; for each of these, blocks of keys (outer) times blocks of query
// rows (inner), five products a tile:
//
//     S = Q K^T    dP = dO V^T    P = exp(S - lse)    dS = P (dP - delta)    delta = rowsum(dO O) - dlse
//     dV += P^T dO    dK += dS^T Q    dQ += dS K
//
// dK and dV of a block of keys stay in the worker's cache; dQ gathers in the slot of the head. Workers may share a head: each takes
// blocks of keys in ascending order, and a block adds to rows of dQ only after the block before it has passed them (dq_turn), so
// every sum has one order, whoever runs what. The worker that waits is always behind one that runs. Likewise query heads of a
// group add to dK and dV in order (dkv_turn).
//
// Items of a head: | rows past the sequences' ends, blocks of keys to pack | query tiles to pack | blocks of keys | tiles | ...,
// the last two once per wave of query heads.
#pragma once

#include <new>

#include "cpu/simd.h"
#if defined(FA_BF16_UNIT)
#include "cpu/backward_bf16.h"
#else
#include "cpu/backward_bias.h"
#include "cpu/backward_fma.h"
#endif

namespace fa::cpu::FA_ISA {

// `Gradients` computes the products of a tile; each worker has one of its own.
template <class Gradients>
class BackwardWork final : public HeadWork, BackwardMemory {
 public:
  BackwardWork(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace)
      : BackwardMemory(problem, layout, workspace), gradients_(problem, layout, workspace) {}

  int64_t items(int64_t head) const override {
    const Head x = head_of(head);
    return x.first_tile_item + waves() * x.wave_items;
  }

  int64_t barrier(int64_t head, int64_t item) const override {
    const Head x = head_of(head);
    const int64_t in_waves = item - x.first_tile_item;
    if (in_waves < x.wave_tiles) return 0;  // all packing of the first wave is one phase
    const int64_t wave_start = item - in_waves % x.wave_items;
    return in_waves % x.wave_items < x.wave_tiles ? wave_start : wave_start + x.wave_tiles;
  }

  void begin(int64_t head, int32_t slot) override {
    const Head x = head_of(head);
    for (int64_t n = 0; n < x.blocks_k; ++n) new (slot_array<Turn>(slot, l_.dkv_turn) + n) Turn(0);
  }

  void run(int64_t head, int64_t item, int32_t slot, int32_t worker) override {
    const Head x = head_of(head);
    if (item == 0) return clear_tails(x);
    if (item < x.first_tile_item) return gradients_.pack_keys(x, slot, item - 1);
    const int64_t wave = (item - x.first_tile_item) / x.wave_items, rest = (item - x.first_tile_item) % x.wave_items;
    if (rest < x.wave_tiles) {
      const int64_t g = wave * l_.wave + rest / x.tiles_q;
      if (g < p_.group) pack_queries(x, slot, g, rest % x.tiles_q);
    } else {
      const int64_t g = wave * l_.wave + (rest - x.wave_tiles) / x.blocks_k;
      if (g < p_.group) key_block(x, slot, worker, g, (rest - x.wave_tiles) % x.blocks_k);
    }
  }

 private:
  int64_t waves() const { return blocks_of(p_.group, l_.wave); }

  Head head_of(int64_t head) const {
    Head x;
    x.b = head / p_.heads_k;
    x.h_k = head % p_.heads_k;
    x.q = sequence_of(p_.q_lengths, x.b);
    x.k = keys_of(p_, x.b);
    x.blocks_q = blocks_of(x.q.len, l_.block_q);
    x.blocks_k = blocks_of(x.k.len, l_.block_k);
    x.tiles_q = blocks_of(x.q.len, l_.tile_q);
    x.first_tile_item = 1 + x.blocks_k;
    x.wave_tiles = l_.wave * x.tiles_q;
    x.wave_items = x.wave_tiles + l_.wave * x.blocks_k;
    return x;
  }

  // (blocks_k) of query head g of its wave.
  Turn *dq_turns(int32_t slot, int64_t g) const { return slot_array<Turn>(slot, l_.dq_turn) + (g % l_.wave) * l_.blocks_k; }

  // Gradients of rows that belong to the sequences but are not used are zero.
  void clear_tails(const Head &x) const {
    for (int64_t h = x.h_k * p_.group; l_.wants.dq && h < (x.h_k + 1) * p_.group; ++h) {
      zero_rows(b_.dq.dtype, rows_of(b_.dq, x.b, h, x.q.start), x.q.len, x.q.slot, p_.head_dim);
    }
    if (l_.wants.dk) zero_rows(b_.dk.dtype, rows_of(b_.dk, x.b, x.h_k, x.k.start), x.k.len, x.k.slot, p_.head_dim);
    if (l_.wants.dv) zero_rows(b_.dv.dtype, rows_of(b_.dv, x.b, x.h_k, x.k.start), x.k.len, x.k.slot, p_.head_dim_v);
  }

  // Packs the rows of one tile of query head g, block by block: q, dout, lse2, delta, the start of dq, and the parts of dsink.
  void pack_queries(const Head &x, int32_t slot, int64_t g, int64_t tile) const {
    const int64_t end = min64((tile + 1) * l_.tile_q, x.q.len);
    if (tile == 0) {
      for (int64_t n = 0; n < x.blocks_k; ++n) new (dq_turns(slot, g) + n) Turn(0);
    }
    for (int64_t begin = tile * l_.tile_q; begin < end; begin += l_.block_q) {
      const Range rows{begin, min64(begin + l_.block_q, end)};
      pack_query_block(x, slot, g, rows);
    }
  }

  void pack_query_block(const Head &x, int32_t slot, int64_t g, Range rows) const {
    const int64_t h = x.h_k * p_.group + g, at = packed_row(g, rows.begin);
    float *lse2 = slot_array<float>(slot, l_.lse2) + at, *delta = slot_array<float>(slot, l_.delta) + at;
    for_dtype(p_.q.dtype, [&]<class Element>() {
      const double dsink = row_scalars<Element>(b_, x.b, h, x.q, x.k, rows, lse2, delta);
      if (l_.wants.dsink) dsink_parts(x.b, h)[rows.begin / l_.block_q] = dsink;
    });
    gradients_.pack_queries(x, slot, g, rows);
    if (!l_.wants.dq) return;
    __builtin_memset(slot_array<float>(slot, l_.dq_sum) + at * l_.ld, 0,
                     static_cast<size_t>(l_.block_q * l_.ld) * sizeof(float));
    if (visible_keys(p_.band, x.q, x.k, rows).empty()) {  // no block of keys will come by to write these
      zero_rows(b_.dq.dtype, rows_of(b_.dq, x.b, h, x.q.start), rows.begin, rows.end, p_.head_dim);
    }
  }

  // dK and dV of block n of the keys from query head g, and the block's part of dQ.
  void key_block(const Head &x, int32_t slot, int32_t worker, int64_t g, int64_t n) {
    const int64_t h = x.h_k * p_.group + g;
    const Range keys{n * l_.block_k, min64((n + 1) * l_.block_k, x.k.len)};
    const Score score = make_score(p_, b_.score, x.b, h, x.q, x.k);
    gradients_.begin_keys(worker, keys.size());

    const Range rows = visible_queries(p_.band, x.q, x.k, keys);
    const bool by_data = masks_pairs(p_, b_.score);
    DataMask data;
    if (by_data) {
      data = make_data_mask(p_, prepared_masks(base_, l_, p_, b_.score, worker, x.q, rows, x.k, keys), x.b, h, x.q, x.k);
    }
    Turn *turns = dq_turns(slot, g);
    for (int64_t m = rows.begin / l_.block_q; m * l_.block_q < rows.end; ++m) {
      const Tile pairs{m * l_.block_q, keys.begin, min64(l_.block_q, x.q.len - m * l_.block_q), keys.size()};
      gradients_.add_tile(x, slot, worker, {g, n, m, pairs}, score, by_data ? &data : nullptr, [&] {
        if (n > 0) wait_for(turns[n - 1], m + 1);
      });
      if (l_.wants.dq) finish_queries(x, slot, g, n, {pairs.row, pairs.row + pairs.rows});
      turns[n].store(m + 1, std::memory_order_release);
    }
    turns[n].store(INT64_MAX, std::memory_order_release);

    finish_keys(x, slot, worker, g, n, keys);
  }

  static void wait_for(const Turn &turn, int64_t value) {
    Backoff backoff;
    while (turn.load(std::memory_order_acquire) < value) backoff.wait();
  }

  // Writes dq of a block of rows if no later block of keys adds to it.
  void finish_queries(const Head &x, int32_t slot, int64_t g, int64_t n, Range rows) const {
    const Range seen = visible_keys(p_.band, x.q, x.k, rows);
    if ((seen.end - 1) / l_.block_k != n) return;
    const float *dq = slot_array<float>(slot, l_.dq_sum) + packed_row(g, rows.begin) * l_.ld;
    for_dtype(b_.dq.dtype, [&]<class Element>() {
      narrow_rows<Element>(dq, l_.ld, p_.softmax_scale, rows_of(b_.dq, x.b, x.h_k * p_.group + g, x.q.start), rows.begin,
                           rows.end, p_.head_dim);
    });
  }

  // Adds the block's dk and dv from query head g to those of the heads before it, and writes them after the last.
  void finish_keys(const Head &x, int32_t slot, int32_t worker, int64_t g, int64_t n, Range keys) {
    if (l_.sum_group) {
      Turn &turn = slot_array<Turn>(slot, l_.dkv_turn)[n];
      wait_for(turn, g);
      gradients_.gather_keys(slot, worker, n, keys.size(), g);
      turn.store(g + 1, std::memory_order_release);
      if (g + 1 < p_.group) return;
    }
    gradients_.write_keys(x, slot, worker, n, keys);
  }

  Gradients gradients_;
};

template <class Gradients>
bool run_heads(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel) {
  struct Region {
    const ScoredBackward &problem;
    const BackwardLayout &layout;
    void *workspace;
    Schedule schedule;
  };
  Region region{problem, layout, workspace, Schedule(workspace, layout.slots, problem.forward.batch * problem.forward.heads_k)};
  const bool ran = parallel.run(
      layout.workers,
      [](void *context, int32_t worker) {
        Region &r = *static_cast<Region *>(context);
        BackwardWork<Gradients> work(r.problem, r.layout, r.workspace);
        r.schedule.work(work, worker);
      },
      &region);
  if (ran && layout.wants.dsink) BackwardMemory(problem, layout, workspace).reduce_dsink();
  return ran;
}

bool backward(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel) {
#if !defined(FA_BF16_UNIT)  // the plan sends problems with dbias elsewhere
  if (layout.wants.dbias && !backward_bias(problem, layout, workspace, parallel)) return false;
#endif
  if (!layout.wants.heads()) return true;
#if defined(FA_TARGET_AMX)
  if (problem.forward.q.dtype == Dtype::f16) return run_heads<TileGradients<ElementF16>>(problem, layout, workspace, parallel);
#endif
#if defined(FA_BF16_UNIT)
  return run_heads<TileGradients<ElementBf16>>(problem, layout, workspace, parallel);
#else
  return run_heads<FmaGradients>(problem, layout, workspace, parallel);
#endif
}

}  // namespace fa::cpu::FA_ISA
