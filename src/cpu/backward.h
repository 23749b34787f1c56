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

#include <atomic>
#include <new>

#include "cpu/backward_bias.h"
#include "cpu/backward_layout.h"
#include "cpu/backward_rows.h"
#include "cpu/backward_tile.h"
#include "cpu/schedule.h"

namespace fa::cpu::FA_ISA {

using Turn = std::atomic<int64_t>;

class BackwardWork final : public HeadWork {
 public:
  BackwardWork(const BackwardProblem &problem, const BackwardLayout &layout, void *workspace)
      : b_(problem), p_(problem.forward), l_(layout), base_(static_cast<char *>(workspace)) {}

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
    if (item < x.first_tile_item) return pack_keys(x, slot, item - 1);
    const int64_t wave = (item - x.first_tile_item) / x.wave_items, rest = (item - x.first_tile_item) % x.wave_items;
    if (rest < x.wave_tiles) {
      const int64_t g = wave * l_.wave + rest / x.tiles_q;
      if (g < p_.group) pack_queries(x, slot, g, rest % x.tiles_q);
    } else {
      const int64_t g = wave * l_.wave + (rest - x.wave_tiles) / x.blocks_k;
      if (g < p_.group) key_block(x, slot, worker, g, (rest - x.wave_tiles) % x.blocks_k);
    }
  }

  // dsink (heads_q): sums over batch entries and blocks of rows, in order.
  void reduce_dsink() const {
    for (int64_t h = 0; h < p_.heads_q; ++h) {
      double sum = 0;
      for (int64_t b = 0; b < p_.batch; ++b) {
        const int64_t blocks = blocks_of(sequence_of(p_.q_lengths, b).len, l_.block_q);
        for (int64_t m = 0; m < blocks; ++m) sum += dsink_parts(b, h)[m];
      }
      b_.dsink[h * b_.dsink_stride] = static_cast<float>(sum);
    }
  }

 private:
  // One key head of one batch entry, and the numbers of its items.
  struct Head {
    int64_t b = 0;
    int64_t h_k = 0;
    Sequence q, k;
    int64_t blocks_q = 0, blocks_k = 0;
    int64_t tiles_q = 0;          // tiles of a query head to pack
    int64_t first_tile_item = 0;  // items before the first wave
    int64_t wave_tiles = 0;       // packing items of a wave
    int64_t wave_items = 0;       // all items of a wave
  };

  static int64_t blocks_of(int64_t rows, int64_t block) { return (rows + block - 1) / block; }
  int64_t waves() const { return blocks_of(p_.group, l_.wave); }

  Head head_of(int64_t head) const {
    Head x;
    x.b = head / p_.heads_k;
    x.h_k = head % p_.heads_k;
    x.q = sequence_of(p_.q_lengths, x.b);
    x.k = sequence_of(p_.k_lengths, x.b);
    x.blocks_q = blocks_of(x.q.len, l_.block_q);
    x.blocks_k = blocks_of(x.k.len, l_.block_k);
    x.tiles_q = blocks_of(x.q.len, l_.tile_q);
    x.first_tile_item = 1 + x.blocks_k;
    x.wave_tiles = l_.wave * x.tiles_q;
    x.wave_items = x.wave_tiles + l_.wave * x.blocks_k;
    return x;
  }

  template <class T>
  T *slot_array(int32_t slot, size_t offset) const {
    return reinterpret_cast<T *>(base_ + l_.slots_offset + static_cast<size_t>(slot) * l_.slot_bytes + offset);
  }
  template <class T>
  T *worker_array(int32_t worker, size_t offset) const {
    return reinterpret_cast<T *>(base_ + l_.workers_offset + static_cast<size_t>(worker) * l_.worker_bytes + offset);
  }
  double *dsink_parts(int64_t b, int64_t h) const {
    return reinterpret_cast<double *>(base_ + l_.dsink_offset) + (b * p_.heads_q + h) * l_.blocks_q;
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

  void pack_keys(const Head &x, int32_t slot, int64_t n) const {
    const Range keys{n * l_.block_k, min64((n + 1) * l_.block_k, x.k.len)};
    const Rows k = rows_of(p_.k, x.b, x.h_k, x.k.start), v = rows_of(p_.v, x.b, x.h_k, x.k.start);
    for_dtype(p_.k.dtype, [&]<class Element>() {
      pack_transposed<Element>(k, keys.begin, keys.end, p_.head_dim,
                               slot_array<float>(slot, l_.k_transposed) + keys.begin * p_.head_dim);
      if (l_.wants.ds()) {
        pack_transposed<Element>(v, keys.begin, keys.end, p_.head_dim_v,
                                 slot_array<float>(slot, l_.v_transposed) + keys.begin * p_.head_dim_v);
      }
      if (l_.wants.dq) {
        const bool finite = widen_rows<Element>(
            k, keys.begin, keys.end, p_.head_dim, [](int64_t) { return true; },
            slot_array<float>(slot, l_.k_rows) + keys.begin * l_.ld, l_.ld);
        slot_array<uint8_t>(slot, l_.k_wild)[n] = !finite;
      }
    });
  }

  // Packs the rows of one tile of query head g, block by block: q, dout, lse2, delta, the start of dq, and the parts of dsink.
  void pack_queries(const Head &x, int32_t slot, int64_t g, int64_t tile) const {
    const int64_t end = min64((tile + 1) * l_.tile_q, x.q.len);
    if (tile == 0) {
      for (int64_t n = 0; n < x.blocks_k; ++n) new (dq_turns(slot, g) + n) Turn(0);
    }
    for (int64_t begin = tile * l_.tile_q; begin < end; begin += l_.block_q) {
      const Range rows{begin, min64(begin + l_.block_q, end)};
      for_dtype(p_.q.dtype, [&]<class Element>() { pack_query_block<Element>(x, slot, g, rows); });
    }
  }

  template <class Element>
  void pack_query_block(const Head &x, int32_t slot, int64_t g, Range rows) const {
    const int64_t h = x.h_k * p_.group + g, at = (g % l_.wave) * l_.max_q + rows.begin;
    const PackedQueries to{slot_array<float>(slot, l_.q_rows) + at * l_.ld,
                           l_.ld,
                           slot_array<float>(slot, l_.dout_rows) + at * l_.ld_v,
                           l_.ld_v,
                           slot_array<float>(slot, l_.lse2) + at,
                           slot_array<float>(slot, l_.delta) + at};
    const double dsink = row_scalars<Element>(b_, x.b, h, x.q, x.k, rows, to);
    if (l_.wants.dsink) dsink_parts(x.b, h)[rows.begin / l_.block_q] = dsink;
    const bool finite = pack_query_rows<Element>(b_, x.b, h, x.q, rows, to);
    slot_array<uint8_t>(slot, l_.q_wild)[(g % l_.wave) * l_.blocks_q + rows.begin / l_.block_q] = !finite;
    if (!l_.wants.dq) return;
    __builtin_memset(slot_array<float>(slot, l_.dq_sum) + at * l_.ld, 0,
                     static_cast<size_t>(rows.size() * l_.ld) * sizeof(float));
    if (visible_keys(p_.band, x.q.len, x.k.len, rows).empty()) {  // no block of keys will come by to write these
      zero_rows(b_.dq.dtype, rows_of(b_.dq, x.b, h, x.q.start), rows.begin, rows.end, p_.head_dim);
    }
  }

  // dK and dV of block n of the keys from query head g, and the block's part of dQ.
  void key_block(const Head &x, int32_t slot, int32_t worker, int64_t g, int64_t n) const {
    const int64_t h = x.h_k * p_.group + g;
    const Range keys{n * l_.block_k, min64((n + 1) * l_.block_k, x.k.len)};
    const Score score = make_score(p_, x.b, h, x.q.len, x.k.len);
    float *dk = worker_array<float>(worker, l_.dk_block), *dv = worker_array<float>(worker, l_.dv_block);
    if (l_.wants.dk) __builtin_memset(dk, 0, static_cast<size_t>(keys.size() * l_.ld) * sizeof(float));
    if (l_.wants.dv) __builtin_memset(dv, 0, static_cast<size_t>(keys.size() * l_.ld_v) * sizeof(float));

    const Range rows = visible_queries(p_.band, x.q.len, x.k.len, keys);
    Turn *turns = dq_turns(slot, g);
    for (int64_t m = rows.begin / l_.block_q; m * l_.block_q < rows.end; ++m) {
      tile(x, slot, worker, g, n, m, score, turns);
      turns[n].store(m + 1, std::memory_order_release);
    }
    turns[n].store(INT64_MAX, std::memory_order_release);

    finish_keys(x, slot, g, n, keys, dk, dv);
  }

  static void wait_for(const Turn &turn, int64_t value) {
    Backoff backoff;
    while (turn.load(std::memory_order_acquire) < value) backoff.wait();
  }

  // Tile of block n of the keys and block m of the rows of query head g.
  void tile(const Head &x, int32_t slot, int32_t worker, int64_t g, int64_t n, int64_t m, const Score &score,
            const Turn *turns) const {
    const int64_t at = (g % l_.wave) * l_.max_q + m * l_.block_q;
    const Tile t{m * l_.block_q, n * l_.block_k, min64(l_.block_q, x.q.len - m * l_.block_q),
                 min64(l_.block_k, x.k.len - n * l_.block_k)};
    const Masking masking = tile_masking(score, t);
    const float *k_rows = slot_array<float>(slot, l_.k_rows) + t.col * l_.ld;
    float *ds = worker_array<float>(worker, l_.ds_tile), *dq = slot_array<float>(slot, l_.dq_sum) + at * l_.ld;
    const uint8_t *visible = nullptr;
    Prefetcher prefetch = prefetch_rows(slot, at + l_.block_q, x.q.len - t.row - l_.block_q);
    TileBand band;
    if (masking != Masking::kAll) {
      band = tile_band(score, t, masking);
      visible = tile_gradients(x, slot, worker, g, n, m, score, t, masking, band, prefetch);
    }
    if (!l_.wants.dq) return;
    if (n > 0) wait_for(turns[n - 1], m + 1);
    if (visible != nullptr) {
      add_row_visible(t.rows, t.cols, visible, p_.head_dim, ds, l_.ld_tile, k_rows, l_.ld, dq, l_.ld);
    } else if (masking != Masking::kAll) {
      add_row_product(band, t.rows, p_.head_dim, ds, l_.ld_tile, k_rows, l_.ld, dq, l_.ld, prefetch);
    }
    const Range seen = visible_keys(p_.band, x.q.len, x.k.len, Range{t.row, t.row + t.rows});
    if ((seen.end - 1) / l_.block_k == n) {  // no later block adds to these rows
      const Rows to = rows_of(b_.dq, x.b, x.h_k * p_.group + g, x.q.start);
      for_dtype(b_.dq.dtype, [&]<class Element>() {
        narrow_rows<Element>(dq, l_.ld, p_.softmax_scale, to, t.row, t.row + t.rows, p_.head_dim);
      });
    }
  }

  // The next block of rows, if there are `left` rows after this one.
  Prefetcher prefetch_rows(int32_t slot, int64_t at, int64_t left) const {
    Prefetcher prefetch;
    const int64_t rows = min64(left, l_.block_q), bytes = rows * static_cast<int64_t>(sizeof(float));
    if (rows <= 0) return prefetch;
    if (l_.wants.dq) prefetch.add(slot_array<float>(slot, l_.dq_sum) + at * l_.ld, bytes * l_.ld);
    prefetch.add(slot_array<float>(slot, l_.dout_rows) + at * l_.ld_v, bytes * l_.ld_v);
    prefetch.add(slot_array<float>(slot, l_.q_rows) + at * l_.ld, bytes * l_.ld);
    return prefetch;
  }

  // The band as columns of the tile. The general score masks by value, so its tiles are worked on as a whole.
  static TileBand tile_band(const Score &score, const Tile &t, Masking masking) {
    if (masking == Masking::kNone || score.general) return {-Band::kUnlimited, Band::kUnlimited, 0, t.cols};
    const int64_t diagonal = t.row + score.band.shift(score.seqlen_q, score.seqlen_k) - t.col;
    return {diagonal - score.band.left, diagonal + score.band.right + 1, 0, t.cols};
  }

  // P and dS of a tile that is not wholly masked, and its parts of dK and dV. Returns null, or which pairs are visible if the rest
  // must be handled pair by pair.
  const uint8_t *tile_gradients(const Head &x, int32_t slot, int32_t worker, int64_t g, int64_t n, int64_t m,
                                const Score &score, const Tile &t, Masking masking, TileBand &band,
                                Prefetcher &prefetch) const {
    const int64_t at = (g % l_.wave) * l_.max_q + t.row;
    const float *q = slot_array<float>(slot, l_.q_rows) + at * l_.ld;
    const float *dout = slot_array<float>(slot, l_.dout_rows) + at * l_.ld_v;
    const bool masked = masking == Masking::kSome || score.masks_by_value();
    const bool wild = slot_array<uint8_t>(slot, l_.q_wild)[(g % l_.wave) * l_.blocks_q + m] != 0 ||
                      (l_.wants.dq && slot_array<uint8_t>(slot, l_.k_wild)[n] != 0);
    const bool by_pair = masked && wild;
    if (by_pair) band = {-Band::kUnlimited, Band::kUnlimited, 0, t.cols};

    float *s = worker_array<float>(worker, l_.p_tile), *dp = worker_array<float>(worker, l_.ds_tile);
    if (scores_are_dot_products(p_, x.q)) {
      dot_products_to_tile(p_.k.dtype, rows_of(p_.k, x.b, x.h_k, x.k.start), t, p_.head_dim, q, l_.ld, s, l_.ld_tile);
    } else {
      product_to_tile(band, t.rows, p_.head_dim, q, l_.ld, slot_array<float>(slot, l_.k_transposed) + t.col * p_.head_dim, s,
                      l_.ld_tile, prefetch);
    }
    if (l_.wants.ds()) {
      product_to_tile(band, t.rows, p_.head_dim_v, dout, l_.ld_v,
                      slot_array<float>(slot, l_.v_transposed) + t.col * p_.head_dim_v, dp, l_.ld_tile, prefetch);
    }

    TileStep step;
    step.multiplier = score.multiplier;
    step.lse2 = slot_array<float>(slot, l_.lse2) + at;
    step.delta = slot_array<float>(slot, l_.delta) + at;
    step.ld = l_.ld_tile;
    if (score.softcap > 0) step.derivative = worker_array<float>(worker, l_.derivative_tile);
    if (score.dropout) step.dropout = worker_array<float>(worker, l_.dropout_tile);
    if (score.general) {
      score_logits(score, t, s, l_.ld_tile, const_cast<float *>(step.derivative));
      if (score.dropout) dropout_scales(score, t, const_cast<float *>(step.dropout), l_.ld_tile);
    }
    const bool by_value = masked && (score.general || by_pair);
    if (by_value && masking == Masking::kSome) mask_tile(score, t, s, l_.ld_tile);
    uint8_t *visible = nullptr;
    if (by_pair) {
      visible = worker_array<uint8_t>(worker, l_.visible_tile);
      note_visible(t.rows, t.cols, s, l_.ld_tile, visible);
    }
    tile_step(by_value ? MaskedBy::kValue : (masked ? MaskedBy::kBand : MaskedBy::kNothing), band, t.rows, step, s, dp);

    float *dk = worker_array<float>(worker, l_.dk_block), *dv = worker_array<float>(worker, l_.dv_block);
    if (by_pair) {
      if (l_.wants.dv)
        add_transposed_visible(t.rows, t.cols, visible, p_.head_dim_v, s, l_.ld_tile, dout, l_.ld_v, dv, l_.ld_v);
      if (l_.wants.dk) add_transposed_visible(t.rows, t.cols, visible, p_.head_dim, dp, l_.ld_tile, q, l_.ld, dk, l_.ld);
    } else {
      if (l_.wants.dv) add_transposed_product(band, t.rows, p_.head_dim_v, s, l_.ld_tile, dout, l_.ld_v, dv, l_.ld_v, prefetch);
      if (l_.wants.dk) add_transposed_product(band, t.rows, p_.head_dim, dp, l_.ld_tile, q, l_.ld, dk, l_.ld, prefetch);
    }
    return visible;
  }

  // Adds the block's dk and dv from query head g to those of the heads before it, and writes them after the last.
  void finish_keys(const Head &x, int32_t slot, int64_t g, int64_t n, Range keys, float *dk, float *dv) const {
    if (l_.sum_group) {
      Turn &turn = slot_array<Turn>(slot, l_.dkv_turn)[n];
      wait_for(turn, g);
      if (l_.wants.dk) dk = gather(g, slot_array<float>(slot, l_.dk_sum) + keys.begin * l_.ld, dk, keys.size(), l_.ld);
      if (l_.wants.dv) dv = gather(g, slot_array<float>(slot, l_.dv_sum) + keys.begin * l_.ld_v, dv, keys.size(), l_.ld_v);
      turn.store(g + 1, std::memory_order_release);
      if (g + 1 < p_.group) return;
    }
    for_dtype(p_.k.dtype, [&]<class Element>() {
      if (l_.wants.dk) {
        narrow_rows<Element>(dk, l_.ld, p_.softmax_scale, rows_of(b_.dk, x.b, x.h_k, x.k.start), keys.begin, keys.end,
                             p_.head_dim);
      }
      if (l_.wants.dv) {
        narrow_rows<Element>(dv, l_.ld_v, 1.0f, rows_of(b_.dv, x.b, x.h_k, x.k.start), keys.begin, keys.end, p_.head_dim_v);
      }
    });
  }

  static float *gather(int64_t g, float *sum, const float *part, int64_t rows, int64_t ld) {
    if (g == 0) {
      __builtin_memcpy(sum, part, static_cast<size_t>(rows * ld) * sizeof(float));
    } else {
      add_rows(sum, part, rows, ld, ld);
    }
    return sum;
  }

  const BackwardProblem &b_;
  const Problem &p_;
  const BackwardLayout &l_;
  char *base_;
};

bool backward(const BackwardProblem &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel) {
  if (layout.wants.dbias && !backward_bias(problem, layout, workspace, parallel)) return false;
  if (!layout.wants.heads()) return true;
  struct Region {
    BackwardWork work;
    Schedule schedule;
  };
  Region region{BackwardWork(problem, layout, workspace),
                Schedule(workspace, layout.slots, problem.forward.batch * problem.forward.heads_k)};
  const bool ran = parallel.run(
      layout.workers,
      [](void *context, int32_t worker) {
        Region &r = *static_cast<Region *>(context);
        r.schedule.work(r.work, worker);
      },
      &region);
  if (ran && layout.wants.dsink) region.work.reduce_dsink();
  return ran;
}

}  // namespace fa::cpu::FA_ISA
