// SPDX-License-Identifier: Apache-2.0
// The five products of backward as fp32 multiply-adds (cpu/gemm.h). Inputs of any dtype are widened when they are packed.
#pragma once

#include "cpu/backward_memory.h"

namespace fa::cpu::FA_ISA {

class FmaGradients : public BackwardMemory {
 public:
  using BackwardMemory::BackwardMemory;

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
        const bool finite = widen_rows<Element>(k, keys.begin, keys.end, p_.head_dim, EveryRow(),
                                                slot_array<float>(slot, l_.k_rows) + keys.begin * l_.ld, l_.ld);
        slot_array<uint8_t>(slot, l_.k_flags)[n] = !finite;
      }
    });
  }

  // q and dout of a block of rows, whose lse2 is known.
  void pack_queries(const Head &x, int32_t slot, int64_t g, Range rows) const {
    const int64_t at = packed_row(g, rows.begin);
    const PackedQueries to{slot_array<float>(slot, l_.q_rows) + at * l_.ld,
                           l_.ld,
                           slot_array<float>(slot, l_.dout_rows) + at * l_.ld_v,
                           l_.ld_v,
                           slot_array<float>(slot, l_.lse2) + at,
                           slot_array<float>(slot, l_.delta) + at};
    for_dtype(p_.q.dtype, [&]<class Element>() {
      const bool finite = pack_query_rows<Element>(b_, x.b, x.h_k * p_.group + g, x.q, rows, to);
      query_flags(slot, g, rows.begin / l_.block_q) = !finite;
    });
  }

  void begin_keys(int32_t worker, int64_t keys) const {
    if (l_.wants.dk) __builtin_memset(dk_block(worker), 0, static_cast<size_t>(keys * l_.ld) * sizeof(float));
    if (l_.wants.dv) __builtin_memset(dv_block(worker), 0, static_cast<size_t>(keys * l_.ld_v) * sizeof(float));
  }

  // Adds the tile's parts to dk, dv and dq. Calls `dq_turn` before the first addition to dq.
  // `data`: see find_visible.
  template <class DqTurn>
  void add_tile(const Head &x, int32_t slot, int32_t worker, const BackwardTile &tile, const Score &score, const DataMask *data,
                DqTurn dq_turn) const {
    const Tile &t = tile.pairs;
    const int64_t at = packed_row(tile.g, t.row);
    TileMask mask;
    find_visible(score, data, t, mask);
    const bool empty = mask.masking == Masking::kAll;
    const float *k_rows = slot_array<float>(slot, l_.k_rows) + t.col * l_.ld;
    float *ds = worker_array<float>(worker, l_.ds_tile), *dq = slot_array<float>(slot, l_.dq_sum) + at * l_.ld;
    const uint8_t *visible = nullptr;
    Prefetcher prefetch = prefetch_rows(slot, at + l_.block_q, x.q.len - t.row - l_.block_q);
    TileBand band;
    if (!empty) {
      band = tile_band(score, t, mask);
      visible = tile_gradients(x, slot, worker, tile, score, mask, band, prefetch);
    }
    if (!l_.wants.dq) return;
    dq_turn();
    if (visible != nullptr) {
      add_row_visible(t.rows, t.cols, visible, p_.head_dim, ds, l_.ld_tile, k_rows, l_.ld, dq, l_.ld);
    } else if (!empty) {
      add_row_product(band, t.rows, p_.head_dim, ds, l_.ld_tile, k_rows, l_.ld, dq, l_.ld, prefetch);
    }
  }

  // The sums over query heads 0 .. g - 1 of dk and dv of block n of the keys, with those of head g.
  void gather_keys(int32_t slot, int32_t worker, int64_t n, int64_t keys, int64_t g) const {
    if (l_.wants.dk) gather(g, dk_sum(slot, n), dk_block(worker), keys, l_.ld);
    if (l_.wants.dv) gather(g, dv_sum(slot, n), dv_block(worker), keys, l_.ld_v);
  }

  // dk and dv of block n of the keys, from the sums over the group, or from the worker if there is one query head.
  void write_keys(const Head &x, int32_t slot, int32_t worker, int64_t n, Range keys) const {
    // Context parallelism asks for fp32 gradients of 16-bit keys.
    const auto write = [&](const Operand &to, const float *sums, int64_t ld, float factor, int64_t dim) {
      for_dtype(to.dtype, [&]<class Element>() {
        narrow_rows<Element>(sums, ld, factor, rows_of(to, x.b, x.h_k, x.k.start), keys.begin, keys.end, dim);
      });
    };
    if (l_.wants.dk) write(b_.dk, l_.sum_group ? dk_sum(slot, n) : dk_block(worker), l_.ld, p_.softmax_scale, p_.head_dim);
    if (l_.wants.dv) write(b_.dv, l_.sum_group ? dv_sum(slot, n) : dv_block(worker), l_.ld_v, 1.0f, p_.head_dim_v);
  }

 private:
  float *dk_block(int32_t worker) const { return worker_array<float>(worker, l_.dk_block); }
  float *dv_block(int32_t worker) const { return worker_array<float>(worker, l_.dv_block); }
  float *dk_sum(int32_t slot, int64_t n) const { return slot_array<float>(slot, l_.dk_sum) + n * l_.block_k * l_.ld; }
  float *dv_sum(int32_t slot, int64_t n) const { return slot_array<float>(slot, l_.dv_sum) + n * l_.block_k * l_.ld_v; }

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

  // P and dS of a tile that is not wholly masked, and its parts of dK and dV. Returns null, or which pairs are visible if the rest
  // must be handled pair by pair.
  const uint8_t *tile_gradients(const Head &x, int32_t slot, int32_t worker, const BackwardTile &tile, const Score &score,
                                const TileMask &mask, TileBand &band, Prefetcher &prefetch) const {
    const Tile &t = tile.pairs;
    const int64_t at = packed_row(tile.g, t.row);
    const float *q = slot_array<float>(slot, l_.q_rows) + at * l_.ld;
    const float *dout = slot_array<float>(slot, l_.dout_rows) + at * l_.ld_v;
    const bool masked = mask.masking == Masking::kSome || score.masks_by_value();
    const bool wild =
        query_flags(slot, tile.g, tile.m) != 0 || (l_.wants.dq && slot_array<uint8_t>(slot, l_.k_flags)[tile.n] != 0);
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

    const TileStep step = tile_step_of(slot, worker, score, t, band.columns(0, t.rows), at, s);
    const bool by_value = masked && (score.general || score.dropout || mask.by_data || by_pair);
    if (by_value) mask_tile(score, mask, t, s, l_.ld_tile);
    uint8_t *visible = nullptr;
    if (by_pair) {
      visible = worker_array<uint8_t>(worker, l_.visible_tile);
      note_visible(t.rows, t.cols, s, l_.ld_tile, visible);
    }
    tile_step(by_value ? MaskedBy::kValue : (masked ? MaskedBy::kBand : MaskedBy::kNothing), band, t.rows, step, s, dp);

    float *dk = dk_block(worker), *dv = dv_block(worker);
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
};

}  // namespace fa::cpu::FA_ISA
