// SPDX-License-Identifier: Apache-2.0
// Gradient of the bias: dbias = dS before the softcap, summed over the dimensions where the bias has size 1.
//
// A pass of its own: each block of dbias is one item that visits, in order, the batch entries, heads and rows that add to it,
// and computes S, P, dP and dS anew. That costs two more products, but needs no memory that grows with the problem, no waiting, and
// one order of summation whatever the number of workers.
#pragma once

#include <atomic>

#include "cpu/backward_layout.h"
#include "cpu/backward_rows.h"
#include "cpu/backward_tile.h"

namespace fa::cpu::FA_ISA {

class BiasWork {
 public:
  BiasWork(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace)
      : b_(problem), p_(problem.forward), l_(layout), base_(static_cast<char *>(workspace)) {
    batches_ = b_.dbias_sum_batch ? 1 : p_.batch;
    heads_ = b_.dbias_sum_heads ? 1 : p_.heads_q;
    row_blocks_ = b_.dbias_sum_rows ? 1 : (b_.dbias_rows + l_.bias_rows - 1) / l_.bias_rows;
    col_blocks_ = (b_.dbias_cols + l_.bias_cols - 1) / l_.bias_cols;
  }

  // The loop of one worker.
  void work(int32_t worker) {
    const int64_t items = batches_ * heads_ * row_blocks_ * col_blocks_;
    for (int64_t item = next_.fetch_add(1, std::memory_order_relaxed); item < items;
         item = next_.fetch_add(1, std::memory_order_relaxed)) {
      block(worker, item);
    }
  }

 private:
  template <class T>
  T *array(int32_t worker, size_t offset) const {
    return reinterpret_cast<T *>(base_ + l_.workers_offset + static_cast<size_t>(worker) * l_.worker_bytes + offset);
  }

  // One block of dbias: rows of the bias times bias_cols columns, of one batch entry and head of the bias.
  void block(int32_t worker, int64_t item) const {
    const int64_t col = item % col_blocks_ * l_.bias_cols, row = item / col_blocks_ % row_blocks_ * l_.bias_rows;
    const int64_t h_out = item / col_blocks_ / row_blocks_ % heads_, b_out = item / col_blocks_ / row_blocks_ / heads_;
    const int64_t rows = b_.dbias_sum_rows ? 1 : min64(l_.bias_rows, b_.dbias_rows - row);
    const int64_t cols = min64(l_.bias_cols, b_.dbias_cols - col);
    float *sum = array<float>(worker, l_.bias_sum);
    __builtin_memset(sum, 0, static_cast<size_t>(rows * l_.ld_tile) * sizeof(float));

    const Range batches = b_.dbias_sum_batch ? Range{0, p_.batch} : Range{b_out, b_out + 1};
    const Range heads = b_.dbias_sum_heads ? Range{0, p_.heads_q} : Range{h_out, h_out + 1};
    for (int64_t b = batches.begin; b < batches.end; ++b) {
      const Sequence q = sequence_of(p_.q_lengths, b), k = keys_of(p_, b);
      const Range keys{col, min64(col + cols, k.len)};
      const Range visible = visible_queries(p_.band, q, k, keys);
      const int64_t row_limit = b_.dbias_sum_rows ? q.len : min64(row + rows, q.len);
      const Range queries{max64(row, visible.begin), min64(row_limit, visible.end)};
      if (queries.empty()) continue;
      const PreparedMasks masks = prepared_masks(base_, l_, p_, b_.score, worker, q, queries, k, keys);
      int64_t packed_head = -1;
      for (int64_t h = heads.begin; h < heads.end; ++h) {
        if (h / p_.group != packed_head) {
          packed_head = h / p_.group;
          pack_keys(worker, b, packed_head, k, keys);
        }
        const Score score = make_score(p_, b_.score, b, h, q, k);
        const DataMask data = make_data_mask(p_, masks, b, h, q, k);
        for (int64_t m = queries.begin; m < queries.end; m += l_.block_q) {
          const Tile t{m, col, min64(l_.block_q, queries.end - m), keys.size()};
          add_tile(worker, b, h, q, k, score, data, t, b_.dbias_sum_rows ? sum : sum + (m - row) * l_.ld_tile);
        }
      }
    }
    write(sum, b_out, h_out, row, rows, col, cols);
  }

  void pack_keys(int32_t worker, int64_t b, int64_t h_k, const Sequence &sequence, Range keys) const {
    for_dtype(p_.k.dtype, [&]<class Element>() {
      pack_transposed<Element>(rows_of(p_.k, b, h_k, sequence.start), keys.begin, keys.end, p_.head_dim,
                               array<float>(worker, l_.bias_k));
      pack_transposed<Element>(rows_of(p_.v, b, h_k, sequence.start), keys.begin, keys.end, p_.head_dim_v,
                               array<float>(worker, l_.bias_v));
    });
  }

  // sum (t.rows or, summed over rows, 1; ld_tile) += dS of the tile.
  void add_tile(int32_t worker, int64_t b, int64_t h, const Sequence &q, const Sequence &k, const Score &score,
                const DataMask &data, const Tile &t, float *sum) const {
    TileMask mask;
    find_visible(score, masks_pairs(p_, b_.score) ? &data : nullptr, t, mask);
    if (mask.masking == Masking::kAll) return;
    const PackedQueries queries{array<float>(worker, l_.bias_q),    l_.ld,
                                array<float>(worker, l_.bias_dout), l_.ld_v,
                                array<float>(worker, l_.bias_lse2), array<float>(worker, l_.bias_delta)};
    const Range rows{t.row, t.row + t.rows};
    for_dtype(p_.q.dtype, [&]<class Element>() {
      row_scalars<Element>(b_, b, h, q, k, rows, queries.lse2, queries.delta);
      pack_query_rows<Element>(b_, b, h, q, rows, queries);
    });

    const TileBand whole{-Band::kUnlimited, Band::kUnlimited, 0, t.cols};
    Prefetcher prefetch;  // of nothing: the next rows are not packed yet
    float *s = array<float>(worker, l_.p_tile), *dp = array<float>(worker, l_.ds_tile);
    if (scores_are_dot_products(p_, q)) {
      dot_products_to_tile(p_.k.dtype, rows_of(p_.k, b, h / p_.group, k.start), t, p_.head_dim, queries.q, l_.ld, s,
                           l_.ld_tile);
    } else {
      product_to_tile(whole, t.rows, p_.head_dim, queries.q, l_.ld, array<float>(worker, l_.bias_k), s, l_.ld_tile, prefetch);
    }
    product_to_tile(whole, t.rows, p_.head_dim_v, queries.dout, l_.ld_v, array<float>(worker, l_.bias_v), dp, l_.ld_tile,
                    prefetch);
    TileStep step;
    step.multiplier = score.multiplier;
    step.lse2 = queries.lse2;
    step.delta = queries.delta;
    step.ld = l_.ld_tile;
    score_logits(score, t, s, l_.ld_tile, nullptr);
    if (score.dropout) {
      float *factors = array<float>(worker, l_.dropout_tile);
      dropout_scales(score, t, factors, l_.ld_tile);
      step.dropout = factors;
    }
    mask_tile(score, mask, t, s, l_.ld_tile);
    tile_step(MaskedBy::kValue, whole, t.rows, step, s, dp);
    for (int64_t r = 0; r < t.rows; ++r) {
      float *to = b_.dbias_sum_rows ? sum : sum + r * l_.ld_tile;
      for (int64_t c = 0; c < t.cols; c += kWidth) {  // what lies past t.cols in the tile is not dS
        const F ds = Simd::load(dp + r * l_.ld_tile + c, static_cast<int>(min64(t.cols - c, kWidth)));
        Simd::store(to + c, Simd::add(Simd::load(to + c), ds));
      }
    }
  }

  void write(const float *sum, int64_t b_out, int64_t h_out, int64_t row, int64_t rows, int64_t col, int64_t cols) const {
    const ScoreTensor &to = b_.dbias;
    for_dtype(to.dtype, [&]<class Element>() {
      using Type = typename Element::Type;
      for (int64_t r = 0; r < rows; ++r) {
        Type *out = static_cast<Type *>(to.data) + b_out * to.batch_stride + h_out * to.head_stride +
                    (row + r) * to.row_stride + col * to.col_stride;
        for (int64_t c = 0; c < cols; c += kWidth) {
          const int n = static_cast<int>(min64(cols - c, kWidth));
          Type buffer[kWidth];
          Element::store(buffer, Simd::load(sum + r * l_.ld_tile + c));
          for (int lane = 0; lane < n; ++lane) out[(c + lane) * to.col_stride] = buffer[lane];
        }
      }
    });
  }

  const ScoredBackward &b_;
  const MaskedProblem &p_;
  const BackwardLayout &l_;
  char *base_;
  int64_t batches_ = 1, heads_ = 1, row_blocks_ = 1, col_blocks_ = 1;
  std::atomic<int64_t> next_{0};
};

inline bool backward_bias(const ScoredBackward &problem, const BackwardLayout &layout, void *workspace, Parallel &parallel) {
  BiasWork work(problem, layout, workspace);
  return parallel.run(
      layout.workers, [](void *context, int32_t worker) { static_cast<BiasWork *>(context)->work(worker); }, &work);
}

}  // namespace fa::cpu::FA_ISA
