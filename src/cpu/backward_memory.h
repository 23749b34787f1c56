// SPDX-License-Identifier: Apache-2.0
// What the parts of the backward pass share: the problem, the heads in progress, and their arrays in the workspace.
#pragma once

#include <atomic>

#include "cpu/backward_layout.h"
#include "cpu/backward_rows.h"
#include "cpu/backward_tile.h"
#include "cpu/schedule.h"

namespace fa::cpu::FA_ISA {

using Turn = std::atomic<int64_t>;

// One key head of one batch entry, and the numbers of its items.
struct BackwardHead {
  int64_t b = 0;
  int64_t h_k = 0;
  Sequence q, k;
  int64_t blocks_q = 0, blocks_k = 0;
  int64_t tiles_q = 0;          // tiles of a query head to pack
  int64_t first_tile_item = 0;  // items before the first wave
  int64_t wave_tiles = 0;       // packing items of a wave
  int64_t wave_items = 0;       // all items of a wave
};

// Block n of the keys and block m of the rows of query head g: the pairs of one step of the pass.
struct BackwardTile {
  int64_t g = 0;
  int64_t n = 0;
  int64_t m = 0;
  Tile pairs;
};

class BackwardMemory {
 public:
  BackwardMemory(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace)
      : b_(problem), p_(problem.forward), l_(layout), base_(static_cast<char *>(workspace)) {}

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

 protected:
  using Head = BackwardHead;

  static int64_t blocks_of(int64_t rows, int64_t block) { return (rows + block - 1) / block; }
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
  // Where row `row` of query head g lies among the packed rows of its wave.
  int64_t packed_row(int64_t g, int64_t row) const { return (g % l_.wave) * l_.max_q + row; }
  // What packing found in block m of query head g.
  uint8_t &query_flags(int32_t slot, int64_t g, int64_t m) const {
    return slot_array<uint8_t>(slot, l_.q_flags)[(g % l_.wave) * l_.blocks_q + m];
  }

  // sum = part for the first query head of a group, sum += part for the others.
  static void gather(int64_t g, float *sum, const float *part, int64_t rows, int64_t ld) {
    if (g == 0) {
      __builtin_memcpy(sum, part, static_cast<size_t>(rows * ld) * sizeof(float));
    } else {
      add_rows(sum, part, rows, ld, ld);
    }
  }

  // The step from S to P of a tile whose first row is row `at` of the packed ones. The general score turns S into logits here. No pair outside
  // the columns `seen` is visible.
  TileStep tile_step_of(int32_t slot, int32_t worker, const Score &score, const Tile &t, Range seen, int64_t at,
                        float *s) const {
    TileStep step;
    step.multiplier = score.multiplier;
    step.lse2 = slot_array<float>(slot, l_.lse2) + at;
    step.delta = slot_array<float>(slot, l_.delta) + at;
    step.ld = l_.ld_tile;
    float *derivative = needs_derivative(p_, b_.score) ? worker_array<float>(worker, l_.derivative_tile) : nullptr;
    float *dropout = score.dropout ? worker_array<float>(worker, l_.dropout_tile) : nullptr;
    const Tile some{t.row, t.col + seen.begin, t.rows, seen.size()};
    if (score.general)
      score_logits(score, some, s + seen.begin, l_.ld_tile, derivative != nullptr ? derivative + seen.begin : nullptr);
    if (score.dropout) dropout_scales(score, some, dropout + seen.begin, l_.ld_tile);
    step.derivative = derivative;
    step.dropout = dropout;
    return step;
  }

  const ScoredBackward &b_;
  const MaskedProblem &p_;
  const BackwardLayout &l_;
  char *base_;
};

}  // namespace fa::cpu::FA_ISA
