// SPDX-License-Identifier: Apache-2.0
// The five products of backward on a unit that multiplies bf16 (cpu/bf16_unit.h): blocks of queries in strips of kStripRows rows against blocks
// of keys in panels of kTilePanel. Operands are bf16 q, k, v and dout, or on the tile unit fp16 ones, which are sums of two parts
// (multiply_parts), as P and dS are then.
//
//     S = Q K^T      dP = dO V^T     32 rows x 32 keys at a time, fp32, one strip
//     P, dS                          the step of all CPU kernels (backward_tile.h), rounded to bf16 into tiles
//     dQ += dS K                     per strip; the sums of 32 rows x 32 columns stay in the unit over all keys of the block
//     dV^T += dO^T P, dK^T += Q^T dS after the last strip of the block; sums stay in the unit over its queries
//
// dK and dV are summed transposed. P and dS are then right operands whose neighbours are rows of the strip, so that rounding interleaves
// rows, and nothing is transposed in the loop: Q, dO, and their transposes are packed once.
//
// Some cases leave the unit, because it would get them wrong:
//   values that are not finite in a strip with masked pairs, where 0 * Inf would leak: every product but S and dP pair by pair
//   subnormal bf16 numbers, which the unit takes for zero, where an operand has numbers from 2^64 on: every product, pair by pair
//   fp16 numbers that are not finite, which have no parts: the same
//   sequences so short that their forward takes dot products: S, for the reason at scores_are_dot_products
#pragma once

#include <utility>

#include "cpu/backward_memory.h"
#include "cpu/bf16_unit.h"
#include "cpu/pack_tiles.h"

namespace fa::cpu::FA_ISA {

// Element is ElementBf16, or with the tile unit ElementF16.
template <class Element, class Unit = Bf16Unit>
class TileGradients : public BackwardMemory {
 public:
  TileGradients(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace)
      : BackwardMemory(problem, layout, workspace),
        steps_(round_up(p_.head_dim, kTileDepth) / kTileDepth),
        steps_v_(round_up(p_.head_dim_v, kTileDepth) / kTileDepth) {}

  void pack_keys(const Head &x, int32_t slot, int64_t n) const {
    const int64_t begin = n * l_.block_k, end = min64(begin + l_.block_k, x.k.len);
    const Rows k = rows_of(p_.k, x.b, x.h_k, x.k.start), v = rows_of(p_.v, x.b, x.h_k, x.k.start);
    const auto as_tiles = [&](const Rows &rows, int64_t dim, uint16_t *to, int64_t part) {
      return flags_of(pack_parts<Element>(to, part, [&]<class Seen, class What>(uint16_t *at) {
        return pack_key_tiles<Seen, What>(rows, begin, end, dim, at);
      }));
    };
    uint8_t flags = as_tiles(k, p_.head_dim, key_tiles(slot, begin), key_part(dk_rows()));
    if (l_.wants.ds()) flags |= as_tiles(v, p_.head_dim_v, value_tiles(slot, begin), key_part(dv_rows()));
    if (l_.wants.dq) {
      pack_parts<Element>(key_pairs(slot, begin), key_part(dk_rows()), [&]<class Seen, class What>(uint16_t *at) {
        return pack_value_tiles<Seen, kRowsAhead, What>(k, begin, end, p_.head_dim, l_.block_k * kTilePanel, at);
      });
    }
    slot_array<uint8_t>(slot, l_.k_flags)[n] = flags;
  }

  // q and dout of a block of rows, whose lse2 is known.
  void pack_queries(const Head &x, int32_t slot, int64_t g, Range rows) const {
    const int64_t h = x.h_k * p_.group + g, at = packed_row(g, rows.begin);
    const Rows q = rows_of(p_.q, x.b, h, x.q.start), dout = rows_of(b_.dout, x.b, h, x.q.start);
    const auto as_rows = [&](const Rows &source, int64_t dim, uint16_t *to, int64_t part) {
      return flags_of(pack_parts<Element>(to, part, [&]<class Seen, class What>(uint16_t *to_part) {
        return pack_left<Seen, kRowsAhead, What>(rows.size(), dim, seeing_rows(slot, at, source, rows.begin), to_part);
      }));
    };
    const auto as_columns = [&](const Rows &source, int64_t dim, uint16_t *to, int64_t part) {
      pack_parts<Element>(to, part, [&]<class Seen, class What>(uint16_t *to_part) {
        return pack_left_transposed<Seen, What>(rows.size(), dim, seeing_rows(slot, at, source, rows.begin),
                                                l_.block_q * kTilePanel, to_part);
      });
    };
    const int64_t q_part = query_part(dk_rows()), dout_part = query_part(dv_rows());
    uint8_t flags = as_rows(q, p_.head_dim, q_left(slot, at), q_part);
    flags |= as_rows(dout, p_.head_dim_v, dout_left(slot, at), dout_part);
    query_flags(slot, g, rows.begin / l_.block_q) = flags;
    if (l_.wants.dk) as_columns(q, p_.head_dim, q_columns(slot, at), q_part);
    if (l_.wants.dv) as_columns(dout, p_.head_dim_v, dout_columns(slot, at), dout_part);
  }

  void begin_keys(int32_t worker, int64_t) const {
    if (l_.wants.dk) __builtin_memset(dk_block(worker), 0, static_cast<size_t>(dk_rows() * l_.ld_tile) * sizeof(float));
    if (l_.wants.dv) __builtin_memset(dv_block(worker), 0, static_cast<size_t>(dv_rows() * l_.ld_tile) * sizeof(float));
  }

  // Adds the tile's parts to dk, dv and dq. Calls `dq_turn` before the first addition to dq.
  // `data`: see find_visible.
  template <class DqTurn>
  void add_tile(const Head &x, int32_t slot, int32_t worker, const BackwardTile &tile, const Score &score, const DataMask *data,
                DqTurn dq_turn) {
    const Tile &t = tile.pairs;
    const uint8_t q_flags = query_flags(slot, tile.g, tile.m), k_flags = slot_array<uint8_t>(slot, l_.k_flags)[tile.n];
    const uint8_t flags = q_flags | k_flags;
    // Panels of keys whose P and dS the unit multiplies with Q^T and dO^T, for each strip.
    Range panels[kMaxStrips];
    int64_t strips = 0;
    bool turn = false;
    TileMask mask;
    for (int64_t row = 0; row < t.rows; row += kStripRows, ++strips) {
      const Tile strip{t.row + row, t.col, min64(kStripRows, t.rows - row), t.cols};
      find_visible(score, data, strip, mask);
      panels[strips] = {0, 0};
      if (mask.masking == Masking::kAll) continue;
      const TileBand band = tile_band(score, strip, mask);
      const Range seen = band.columns(0, strip.rows);
      Strip s{strip,
              strips,
              packed_row(tile.g, strip.row),
              band,
              {seen.begin / kTilePanel, round_up(seen.end, kTilePanel) / kTilePanel}};
      s.masked = mask.masking == Masking::kSome || score.masks_by_value();
      s.exact = kParts == 1 ? (flags & kSubnormal) != 0 && (flags & kHuge) != 0 : (flags & kNotFinite) != 0;
      s.by_pair = s.exact || (s.masked && (flags & kNotFinite) != 0);
      if (s.by_pair) s.panels = {0, round_up(t.cols, kTilePanel) / kTilePanel};
      products(x, slot, worker, tile, s);
      gradients(x, slot, worker, tile, score, mask, s);
      if (!s.by_pair) panels[strips] = s.panels;
      if (!l_.wants.dq) continue;
      if (!turn) dq_turn();
      turn = true;
      add_dq(x, slot, worker, s);
    }
    if (l_.wants.dq && !turn) dq_turn();
    const int64_t at = packed_row(tile.g, t.row);
    if (l_.wants.dv)
      add_columns(panels, strips, left(dout_columns(slot, at), dv_rows()), steps_v_, p_tiles(worker), dv_block(worker));
    if (l_.wants.dk)
      add_columns(panels, strips, left(q_columns(slot, at), dk_rows()), steps_, ds_tiles(worker), dk_block(worker));
  }

  // The sums over query heads 0 .. g - 1 of dk and dv of block n of the keys, with those of head g.
  void gather_keys(int32_t slot, int32_t worker, int64_t n, int64_t, int64_t g) const {
    if (l_.wants.dk) gather(g, dk_sum(slot, n), dk_block(worker), dk_rows(), l_.ld_tile);
    if (l_.wants.dv) gather(g, dv_sum(slot, n), dv_block(worker), dv_rows(), l_.ld_tile);
  }

  // dk and dv of block n of the keys, from the sums over the group, or from the worker if there is one query head.
  void write_keys(const Head &x, int32_t slot, int32_t worker, int64_t n, Range keys) const {
    if (l_.wants.dk) {
      write_transposed(worker, l_.sum_group ? dk_sum(slot, n) : dk_block(worker), p_.softmax_scale, b_.dk,
                       rows_of(b_.dk, x.b, x.h_k, x.k.start), keys, p_.head_dim);
    }
    if (l_.wants.dv) {
      write_transposed(worker, l_.sum_group ? dv_sum(slot, n) : dv_block(worker), 1.0f, b_.dv,
                       rows_of(b_.dv, x.b, x.h_k, x.k.start), keys, p_.head_dim_v);
    }
  }

 private:
  static constexpr int kParts = kPartsOf<Element>;
  static constexpr int64_t kStripRows = kTileStripRows;
  static constexpr int64_t kMaxStrips = kBackwardTileRows / kStripRows;  // of a block of queries
  enum Flags : uint8_t { kNotFinite = 1, kSubnormal = 2, kHuge = 4 };

  // Some rows of a tile.
  struct Strip {
    Tile pairs;
    int64_t index = 0;  // in the block of queries
    int64_t at = 0;     // its first row among the packed ones
    TileBand band;
    Range panels;  // of keys that it works on
    bool masked = false;
    bool exact = false;    // no product by the unit
    bool by_pair = false;  // no product of P and dS by the unit
  };

  static uint8_t flags_of(const Magnitudes &seen) {
    if constexpr (kParts == 2) return seen.finite_f16() ? 0 : kNotFinite;
    return static_cast<uint8_t>((seen.finite() ? 0 : kNotFinite) | (seen.subnormal() ? kSubnormal : 0) |
                                (seen.huge() ? kHuge : 0));
  }

  int64_t dk_rows() const { return steps_ * kTileDepth; }
  int64_t dv_rows() const { return steps_v_ * kTileDepth; }
  uint16_t *key_tiles(int32_t slot, int64_t key) const { return slot_array<uint16_t>(slot, l_.k_transposed) + key * dk_rows(); }
  uint16_t *value_tiles(int32_t slot, int64_t key) const {
    return slot_array<uint16_t>(slot, l_.v_transposed) + key * dv_rows();
  }
  uint16_t *key_pairs(int32_t slot, int64_t key) const { return slot_array<uint16_t>(slot, l_.k_rows) + key * dk_rows(); }
  uint16_t *q_left(int32_t slot, int64_t at) const { return slot_array<uint16_t>(slot, l_.q_rows) + at * dk_rows(); }
  uint16_t *dout_left(int32_t slot, int64_t at) const { return slot_array<uint16_t>(slot, l_.dout_rows) + at * dv_rows(); }
  uint16_t *q_columns(int32_t slot, int64_t at) const { return slot_array<uint16_t>(slot, l_.q_columns) + at * dk_rows(); }
  uint16_t *dout_columns(int32_t slot, int64_t at) const {
    return slot_array<uint16_t>(slot, l_.dout_columns) + at * dv_rows();
  }
  // Operands that begin at one of these; the second parts of all rows lie behind the first ones. `dim` is dk_rows() or dv_rows().
  int64_t query_part(int64_t dim) const { return l_.wave * l_.max_q * dim; }
  int64_t key_part(int64_t dim) const { return l_.max_k * dim; }
  LeftParts left(const uint16_t *at, int64_t dim) const { return {{at, kTileBf16, kRightStep}, query_part(dim)}; }
  RightParts right(const uint16_t *at, int64_t dim) const { return {at, key_part(dim)}; }
  uint16_t *p_tiles(int32_t worker) const { return worker_array<uint16_t>(worker, l_.p_pairs); }
  uint16_t *ds_tiles(int32_t worker) const { return worker_array<uint16_t>(worker, l_.ds_pairs); }
  uint16_t *ds_left(int32_t worker) const { return worker_array<uint16_t>(worker, l_.ds_left); }
  float *s_strip(int32_t worker) const { return worker_array<float>(worker, l_.p_tile); }
  float *dp_strip(int32_t worker) const { return worker_array<float>(worker, l_.ds_tile); }
  float *dk_block(int32_t worker) const { return worker_array<float>(worker, l_.dk_block); }
  float *dv_block(int32_t worker) const { return worker_array<float>(worker, l_.dv_block); }
  float *dk_sum(int32_t slot, int64_t n) const { return slot_array<float>(slot, l_.dk_sum) + n * dk_rows() * l_.ld_tile; }
  float *dv_sum(int32_t slot, int64_t n) const { return slot_array<float>(slot, l_.dv_sum) + n * dv_rows() * l_.ld_tile; }
  // Tiles of P and dS as right operands: (panel of keys, strip, half).
  int64_t right_at(int64_t panel, int64_t strip) const { return (panel * (l_.block_q / kStripRows) + strip) * kRightStep; }

  // Where row r of a block of queries begins whose rows are `at` on among the packed ones. Rows that see nothing do not reach the products even
  // if they hold NaN: null.
  auto seeing_rows(int32_t slot, int64_t at, const Rows &source, int64_t first) const {
    const float *lse2 = slot_array<float>(slot, l_.lse2) + at;
    return [lse2, source, first](int64_t r) { return lse2[r] != kInfinity ? source.row(first + r) : nullptr; };
  }

  // S and dP of a strip.
  void products(const Head &x, int32_t slot, int32_t worker, const BackwardTile &tile, const Strip &strip) {
    const Tile &t = strip.pairs;
    float *s = s_strip(worker), *dp = dp_strip(worker);
    const int64_t h = x.h_k * p_.group + tile.g;
    const Rows keys = rows_of(p_.k, x.b, x.h_k, x.k.start), values = rows_of(p_.v, x.b, x.h_k, x.k.start);
    const Range cols{strip.panels.begin * kTilePanel, strip.panels.end * kTilePanel};
    const auto exact = [&](const Operand &left, const Rows &right, int64_t dim, float *to) {
      const Rows rows = rows_of(left, x.b, h, x.q.start);
      exact_products<Element>(numbers_of<Element>(dim, seeing_rows(slot, strip.at, rows, t.row)), t.rows, right, t.col, x.k.len,
                              cols, dim, to, l_.ld_tile);
    };
    if (scores_are_dot_products(p_, x.q)) {
      short_scores(x, slot, worker, tile, strip, s);
    } else if (strip.exact) {
      exact(p_.q, keys, p_.head_dim, s);
    } else {
      multiply_panels(t.rows, left(q_left(slot, strip.at), dk_rows()), right(key_tiles(slot, t.col), dk_rows()), steps_,
                      strip.panels, s);
    }
    if (!l_.wants.ds()) return;
    if (strip.exact) {
      exact(b_.dout, values, p_.head_dim_v, dp);
    } else {
      multiply_panels(t.rows, left(dout_left(slot, strip.at), dv_rows()), right(value_tiles(slot, t.col), dv_rows()), steps_v_,
                      strip.panels, dp);
    }
  }

  void multiply_panels(int64_t rows, LeftParts left, RightParts right, int64_t steps, Range panels, float *to) {
    for (int64_t n = panels.begin; n < panels.end; ++n) {
      multiply_parts<false, kParts>(unit_, rows, steps, left, {right.at + n * steps * kRightStep, right.part},
                                    {to + n * kTilePanel, l_.ld_tile, kTileRows, kTileRows * l_.ld_tile});
    }
  }

  // S of the whole width of a strip of one of the sequences that scores_are_dot_products names; they have no more than one.
  void short_scores(const Head &x, int32_t slot, int32_t worker, const BackwardTile &tile, const Strip &strip, float *s) const {
    const Rows q = rows_of(p_.q, x.b, x.h_k * p_.group + tile.g, x.q.start);
    const float *lse2 = slot_array<float>(slot, l_.lse2) + strip.at;
    float *rows = worker_array<float>(worker, l_.row_scratch);
    widen_rows<Element>(
        q, strip.pairs.row, strip.pairs.row + strip.pairs.rows, p_.head_dim,
        [&](int64_t i) { return lse2[i - strip.pairs.row] != kInfinity; }, rows, l_.ld);
    dot_products_to_tile(p_.k.dtype, rows_of(p_.k, x.b, x.h_k, x.k.start), strip.pairs, p_.head_dim, rows, l_.ld, s,
                         l_.ld_tile);
  }

  // P and dS of a strip, from S and dP: into tiles, or, pair by pair, in place and on to dk and dv.
  void gradients(const Head &x, int32_t slot, int32_t worker, const BackwardTile &tile, const Score &score,
                 const TileMask &mask, const Strip &strip) const {
    const Tile &t = strip.pairs;
    float *s = s_strip(worker), *dp = dp_strip(worker);
    const Range seen{strip.panels.begin * kTilePanel, min64(strip.panels.end * kTilePanel, t.cols)};
    const TileStep step = tile_step_of(slot, worker, score, t, seen, strip.at, s);
    const bool by_value = score.general || score.dropout || mask.by_data || strip.by_pair;
    if (by_value) mask_tile(score, mask, t, s, l_.ld_tile);
    if (strip.by_pair) {
      add_pairs(x, worker, tile, strip, step);
      return;
    }
    // Keys past the end of the sequence are masked, too: their P is not zero, and dS, K of the panel reach dq.
    const bool ragged = t.cols % kTilePanel != 0;
    if (by_value && ragged) {
      for (int64_t r = 0; r < t.rows; ++r) mask_columns(s + r * l_.ld_tile, t.cols, round_up(t.cols, kTilePanel));
    }
    const MaskedBy masked_by = by_value ? (strip.masked || ragged ? MaskedBy::kValue : MaskedBy::kNothing)
                                        : (strip.masked || ragged ? MaskedBy::kBand : MaskedBy::kNothing);
    for_step(masked_by, step, [&]<MaskedBy kMaskedBy, bool kOptions>() {
      step_into_tiles<kMaskedBy, kOptions>(strip, step, s, dp, {p_tiles(worker), ds_tiles(worker), ds_left(worker)});
    });
  }

  struct StripTiles {
    uint16_t *p;        // (part): right operand
    uint16_t *ds;       // (part): right operand
    uint16_t *ds_left;  // (part): left operand: (half, step of 32 keys)
  };
  int64_t right_part() const { return l_.block_q * l_.block_k; }
  int64_t left_part() const { return kStripRows * l_.block_k; }

  template <MaskedBy kMaskedBy, bool kOptions>
  void step_into_tiles(const Strip &strip, const TileStep &step, const float *s, const float *dp, StripTiles to) const {
    using Row = RowStep<kMaskedBy, kOptions>;
    const Tile &t = strip.pairs;
    const int64_t half = kTileRows * l_.block_k;
    const auto right_rows = [&]<int64_t... kRow>(int64_t r0, std::integer_sequence<int64_t, kRow...>)
        __attribute__((always_inline)) {
      // Rows past the last one are zero, as their packed queries are.
      const auto row_step = [&](int64_t i) __attribute__((always_inline)) {
        return Row(step, r0 + i < t.rows ? r0 + i : 0, strip.band.columns(r0 + i, 1));
      };
      const bool in_strip[] = {(r0 + kRow < t.rows)...};
      // Not an array of rows, which would lie in memory.
      const auto into_tiles = [&](const auto &...rows) __attribute__((always_inline)) {
        for (int64_t panel = strip.panels.begin; panel < strip.panels.end; ++panel) {
          const int64_t right = right_at(panel, strip.index);
          uint16_t *const left = to.ds_left + r0 / kTileRows * half + panel * kTileBf16;
          for (int64_t i = 0; i < kTilePanel; i += 2 * kWidth) {
            const int64_t c = panel * kTilePanel + i;
            I p[kParts][kRightRows], ds[kParts][kRightRows];
            const auto of_row = [&](const Row &row, int64_t n) __attribute__((always_inline)) {
              I p_of_row[kParts], ds_of_row[kParts];
#pragma GCC unroll 2
              for (int part = 0; part < kParts; ++part) p_of_row[part] = ds_of_row[part] = Simd::iset(0);
              if (__builtin_expect(in_strip[n], 1)) {
                const int64_t at = (r0 + n) * step.ld + c;
                F p0, p1, ds0, ds1;
                row.gradients(c, Simd::load(s + at), Simd::load(dp + at), p0, ds0);
                row.gradients(c + kWidth, Simd::load(s + at + kWidth), Simd::load(dp + at + kWidth), p1, ds1);
                parts_of(p0, p1, p_of_row);
                parts_of(ds0, ds1, ds_of_row);
              }
#pragma GCC unroll 2
              for (int part = 0; part < kParts; ++part) {
                store_left(left + part * left_part(), r0 % kTileRows + n, i, ds_of_row[part]);
                p[part][n] = p_of_row[part];
                ds[part][n] = ds_of_row[part];
              }
            };
            (of_row(rows, kRow), ...);
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
              store_right(to.p + part * right_part() + right, r0, i, p[part]);
              store_right(to.ds + part * right_part() + right, r0, i, ds[part]);
            }
          }
        }
      };
      into_tiles(row_step(kRow)...);
    };
    for (int64_t r0 = 0; r0 < kStripRows; r0 += kRightRows) right_rows(r0, std::make_integer_sequence<int64_t, kRightRows>());
  }

  // dQ += dS K of a strip.
  void add_dq(const Head &x, int32_t slot, int32_t worker, const Strip &strip) {
    const Tile &t = strip.pairs;
    float *dq = slot_array<float>(slot, l_.dq_sum) + strip.at * l_.ld;
    if (strip.by_pair) {
      const Rows keys = rows_of(p_.k, x.b, x.h_k, x.k.start);
      for_visible(worker, t, [&](int64_t r, int64_t j) {
        const float ds = dp_strip(worker)[r * l_.ld_tile + j];
        const auto *key = reinterpret_cast<const uint16_t *>(keys.row(t.col + j));
        for (int64_t i = 0; i < p_.head_dim; ++i) dq[r * l_.ld + i] += ds * number(key + i);
      });
      return;
    }
    const uint16_t *ds = ds_left(worker) + strip.panels.begin * kTileBf16;
    RightParts keys = right(key_pairs(slot, t.col) + strip.panels.begin * kRightStep, dk_rows());
    for (int64_t c = 0; c < dk_rows(); c += kTilePanel, keys.at += l_.block_k * kTilePanel) {
      multiply_parts<true, kParts>(unit_, t.rows, strip.panels.size(), {{ds, kTileRows * l_.block_k, kTileBf16}, left_part()},
                                   keys, {dq + c, l_.ld, kTileRows, kTileRows * l_.ld});
    }
  }

  // sum (columns, keys) += C T, where C is the transpose of the block's q or dout and T its dS or P, over the strips that `panels` names.
  void add_columns(const Range *panels, int64_t strips, LeftParts columns, int64_t column_panels, const uint16_t *right,
                   float *sum) {
    for (int64_t n = 0; n < l_.block_k / kTilePanel; ++n) {
      const auto takes = [&](int64_t strip) { return panels[strip].begin <= n && n < panels[strip].end; };
      for (int64_t begin = 0; begin < strips; ++begin) {
        if (!takes(begin)) continue;
        int64_t end = begin + 1;
        while (end < strips && takes(end)) ++end;
        for (int64_t c = 0; c < column_panels; ++c) {
          LeftParts left = columns;
          left.tiles.at += c * l_.block_q * kTilePanel + begin * kRightStep;
          multiply_parts<true, kParts>(
              unit_, kTilePanel, end - begin, left, {right + right_at(n, begin), right_part()},
              {sum + c * kTilePanel * l_.ld_tile + n * kTilePanel, l_.ld_tile, kTileRows, kTileRows * l_.ld_tile});
        }
        begin = end;
      }
    }
  }

  // The same for a strip whose masked pairs meet values that are not finite, and for numbers that the unit takes for zero. Slow, and only
  // reached with such values. Leaves dS in place, and the visible pairs for add_dq.
  void add_pairs(const Head &x, int32_t worker, const BackwardTile &tile, const Strip &strip, const TileStep &step) const {
    const Tile &t = strip.pairs;
    const int64_t h = x.h_k * p_.group + tile.g;
    float *s = s_strip(worker), *dp = dp_strip(worker);
    note_visible(t.rows, t.cols, s, l_.ld_tile, worker_array<uint8_t>(worker, l_.visible_tile));
    tile_step(MaskedBy::kValue, {-Band::kUnlimited, Band::kUnlimited, 0, t.cols}, t.rows, step, s, dp);
    const Rows q = rows_of(p_.q, x.b, h, x.q.start), dout = rows_of(b_.dout, x.b, h, x.q.start);
    for_visible(worker, t, [&](int64_t r, int64_t j) {
      if (step.lse2[r] == kInfinity) return;  // sees nothing
      const auto add = [&](const Rows &rows, int64_t dim, float factor, float *sum) {
        const auto *row = reinterpret_cast<const uint16_t *>(rows.row(t.row + r));
        for (int64_t i = 0; i < dim; ++i) sum[i * l_.ld_tile + j] += factor * number(row + i);
      };
      if (l_.wants.dv) add(dout, p_.head_dim_v, s[r * l_.ld_tile + j], dv_block(worker));
      if (l_.wants.dk) add(q, p_.head_dim, dp[r * l_.ld_tile + j], dk_block(worker));
    });
  }

  template <class Body>
  void for_visible(int32_t worker, const Tile &t, Body body) const {
    const uint8_t *visible = worker_array<uint8_t>(worker, l_.visible_tile);
    for (int64_t r = 0; r < t.rows; ++r) {
      for (int64_t j = 0; j < t.cols; ++j) {
        if (visible[r * t.cols + j]) body(r, j);
      }
    }
  }
  static float number(const uint16_t *x) {
    float lanes[kWidth];
    Simd::store(lanes, Element::load(x, 1));
    return lanes[0];
  }

  // Rows `keys` of the tensor <- factor * the transpose of `from` (dim, ld_tile), rounded once.
  void write_transposed(int32_t worker, const float *from, float factor, const Operand &tensor, const Rows &to, Range keys,
                        int64_t dim) const {
    float *rows = worker_array<float>(worker, l_.row_scratch);
    const int64_t ld = round_up(dim, kWidth);
    for (int64_t j = 0; j < keys.size(); j += kWidth) {
      for (int64_t i = 0; i < ld; i += kWidth) {
        F block[kWidth];
#pragma GCC unroll 16
        for (int r = 0; r < kWidth; ++r) block[r] = Simd::load(from + (i + r) * l_.ld_tile + j);
        Simd::transpose(block);
#pragma GCC unroll 16
        for (int r = 0; r < kWidth; ++r) Simd::store(rows + r * ld + i, block[r]);
      }
      for_dtype(tensor.dtype, [&]<class To>() {
        narrow_rows<To>(rows, ld, factor, to, keys.begin + j, min64(keys.begin + j + kWidth, keys.end), dim);
      });
    }
  }

  const int64_t steps_, steps_v_;  // of 32 columns of q and k, of dout and v
  Unit unit_;
};

}  // namespace fa::cpu::FA_ISA
