// SPDX-License-Identifier: Apache-2.0
// The forward-mode derivative: tout and tlse from (q, k, v, out, lse) and tangents of q, k and v.
//
// For each key head, its keys and values are packed once. Then, for each block of rows of each query head of the group, blocks of keys one
// after another, up to five products a tile:
//
//     S = Q K^T    tS = tQ K^T + Q tK^T    P = exp(S - lse)    H = P tS    tlse += rowsum(H)    tO += H V + P tV
//
// and in the end tO -= tlse O. The sums of a block of rows stay in the worker's cache, and only one worker adds to them, in ascending
// order of keys: results do not depend on who runs what.
//
// Items of a head: | rows past the queries' end | blocks of keys to pack | blocks of rows of each query head |.
#pragma once

#include "cpu/backward_rows.h"
#include "cpu/backward_tile.h"
#include "cpu/jvp_layout.h"
#include "cpu/schedule.h"

namespace fa::cpu::FA_ISA {

// In place: S -> P, tS without the scale -> H = P tS, with zeros in what is not visible. Adds the sums of H to tlse (rows). Without
// kLogits there is no tS.
template <MaskedBy kMaskedBy, bool kLogits>
inline void tangent_step(const TileBand &band, int64_t rows, int64_t cols, const TileStep &step, float softmax_scale, float *s,
                         float *ts, float *tlse) {
  const F multiplier = Simd::set(step.multiplier), scale = Simd::set(softmax_scale);
  for_step_rows(
      band, rows, [&](int64_t r, Range columns) __attribute__((always_inline)) {
        const Range seen = band.columns(r, 1);
        const F lse2 = Simd::set(step.lse2[r]);
        float *s_row = s + r * step.ld, *ts_row = ts + r * step.ld;
        F sum = Simd::zero();
        for (int64_t c = columns.begin; c < columns.end; c += kWidth) {
          const F x = Simd::load(s_row + c);
          const F p = Simd::exp2(Simd::fms(x, multiplier, lse2));
          Simd::store(s_row + c, zero_if_masked<kMaskedBy>(x, seen, c, p));
          if constexpr (kLogits) {
            F moved = Simd::mul(Simd::load(ts_row + c), scale);
            if (step.derivative != nullptr) moved = Simd::mul(moved, Simd::load(step.derivative + r * step.ld + c));
            F h = zero_if_masked<kMaskedBy>(x, seen, c, Simd::mul(p, moved));
            // What lies past the end of the tile is not H.
            if (c + kWidth > cols) h = Simd::select(Simd::first(static_cast<int>(cols - c)), h, Simd::zero());
            Simd::store(ts_row + c, h);
            sum = Simd::add(sum, h);
          }
        }
        if constexpr (kLogits) tlse[r] += Simd::reduce_add(sum);
      });
}

class JvpWork final : public HeadWork {
 public:
  JvpWork(const JvpProblem &problem, const JvpLayout &layout, void *workspace)
      : j_(problem), p_(problem.forward), l_(layout), base_(static_cast<char *>(workspace)) {}

  int64_t items(int64_t head) const override {
    const Head x = head_of(head);
    return x.first_row_item + p_.group * x.blocks_q;
  }

  int64_t barrier(int64_t head, int64_t item) const override {
    const int64_t first = head_of(head).first_row_item;
    return item < first ? 0 : first;
  }

  void begin(int64_t, int32_t) override {}

  void run(int64_t head, int64_t item, int32_t slot, int32_t worker) override {
    const Head x = head_of(head);
    if (item == 0) return clear_tails(x);
    if (item < x.first_row_item) return pack_keys(x, slot, item - 1);
    const int64_t n = item - x.first_row_item, first = n % x.blocks_q * l_.block_q;
    row_block(x, slot, worker, x.h_k * p_.group + n / x.blocks_q, {first, min64(first + l_.block_q, x.q.len)});
  }

 private:
  struct Head {
    int64_t b = 0;
    int64_t h_k = 0;
    Sequence q, k;
    int64_t blocks_q = 0;
    int64_t first_row_item = 0;
  };

  static int64_t blocks_of(int64_t rows, int64_t block) { return (rows + block - 1) / block; }

  Head head_of(int64_t head) const {
    Head x;
    x.b = head / p_.heads_k;
    x.h_k = head % p_.heads_k;
    x.q = sequence_of(p_.q_lengths, x.b);
    x.k = keys_of(p_, x.b);
    x.blocks_q = blocks_of(x.q.len, l_.block_q);
    x.first_row_item = 1 + blocks_of(x.k.len, l_.block_k);
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
  // Row 0 of the sequence.
  static float *scalars_of(const RowScalar &x, int64_t b, int64_t h, const Sequence &queries) {
    return x.data + b * x.batch_stride + h * x.head_stride + queries.start * x.seq_stride;
  }

  // Tangents of rows that belong to the sequence but are not used are zero.
  void clear_tails(const Head &x) const {
    for (int64_t h = x.h_k * p_.group; h < (x.h_k + 1) * p_.group; ++h) {
      zero_rows(j_.tout.dtype, rows_of(j_.tout, x.b, h, x.q.start), x.q.len, x.q.slot, p_.head_dim_v);
      if (j_.tlse.data == nullptr) continue;
      float *tlse = scalars_of(j_.tlse, x.b, h, x.q);
      for (int64_t i = x.q.len; i < x.q.slot; ++i) tlse[i * j_.tlse.seq_stride] = 0;
    }
  }

  void pack_keys(const Head &x, int32_t slot, int64_t n) const {
    const Range keys{n * l_.block_k, min64((n + 1) * l_.block_k, x.k.len)};
    const auto rows = [&](const Operand &operand) { return rows_of(operand, x.b, x.h_k, x.k.start); };
    for_dtype(p_.k.dtype, [&]<class Element>() {
      const auto transpose = [&](const Operand &from, size_t to) {
        pack_transposed<Element>(rows(from), keys.begin, keys.end, p_.head_dim,
                                 slot_array<float>(slot, to) + keys.begin * p_.head_dim);
      };
      const auto widen = [&](const Operand &from, size_t to) {
        return widen_rows<Element>(rows(from), keys.begin, keys.end, p_.head_dim_v, EveryRow(),
                                   slot_array<float>(slot, to) + keys.begin * l_.ld_v, l_.ld_v);
      };
      transpose(p_.k, l_.k_transposed);
      if (l_.tk) transpose(j_.tk, l_.tk_transposed);
      const bool v_finite = !l_.logits() || widen(p_.v, l_.v_rows), tv_finite = !l_.tv || widen(j_.tv, l_.tv_rows);
      slot_array<uint8_t>(slot, l_.v_flags)[n] = !v_finite || !tv_finite;
    });
  }

  // lse2 of the rows, and their q and tq as floats. In rows that see nothing everything is masked, whatever they hold.
  void pack_queries(const Head &x, int32_t worker, int64_t h, Range rows) const {
    float *lse2 = worker_array<float>(worker, l_.lse2);
    const float *lse = scalars_of(p_.lse, x.b, h, x.q);
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      const float row_lse = lse[i * p_.lse.seq_stride];
      lse2[i - rows.begin] = row_lse == -kInfinity ? kInfinity : row_lse * kLog2e;
    }
    for_dtype(p_.q.dtype, [&]<class Element>() {
      const auto widen = [&](const Operand &from, size_t to) {
        widen_rows<Element>(rows_of(from, x.b, h, x.q.start), rows.begin, rows.end, p_.head_dim, EveryRow(),
                            worker_array<float>(worker, to), l_.ld);
      };
      widen(p_.q, l_.q_rows);
      if (l_.tq) widen(j_.tq, l_.tq_rows);
    });
  }

  // tout and tlse of some rows of query head h.
  void row_block(const Head &x, int32_t slot, int32_t worker, int64_t h, Range rows) const {
    pack_queries(x, worker, h, rows);
    float *tout = worker_array<float>(worker, l_.tout), *tlse = worker_array<float>(worker, l_.tlse);
    __builtin_memset(tout, 0, static_cast<size_t>(rows.size() * l_.ld_v) * sizeof(float));
    __builtin_memset(tlse, 0, static_cast<size_t>(rows.size()) * sizeof(float));
    if (l_.logits() || l_.tv) {
      const Score score = make_score(p_, nullptr, x.b, h, x.q, x.k);
      const Range keys = visible_keys(p_.band, x.q, x.k, rows);
      for (int64_t n = keys.begin / l_.block_k; n * l_.block_k < keys.end; ++n) {
        const int64_t first = n * l_.block_k;
        add_tile(x, slot, worker, n, score, {rows.begin, first, rows.size(), min64(l_.block_k, x.k.len - first)});
      }
    }
    for_dtype(p_.q.dtype, [&]<class Element>() { write_rows<Element>(x, worker, h, rows); });
  }

  // Adds what block n of the keys contributes to the sums of the tile's rows.
  void add_tile(const Head &x, int32_t slot, int32_t worker, int64_t n, const Score &score, const Tile &t) const {
    TileMask mask;
    find_visible(score, nullptr, t, mask);
    if (mask.masking == Masking::kAll) return;
    TileBand band = tile_band(score, t, mask);
    const bool masked = mask.masking == Masking::kSome;
    const bool by_pair = masked && slot_array<uint8_t>(slot, l_.v_flags)[n] != 0;
    if (by_pair) band = {-Band::kUnlimited, Band::kUnlimited, 0, t.cols};

    float *s = worker_array<float>(worker, l_.p_tile), *ts = worker_array<float>(worker, l_.ts_tile);
    multiply(x, slot, worker, band, t, s, ts);

    TileStep step;
    step.multiplier = score.multiplier;
    step.lse2 = worker_array<float>(worker, l_.lse2);
    step.ld = l_.ld_tile;
    float *derivative = score.softcap > 0 ? worker_array<float>(worker, l_.derivative_tile) : nullptr;
    if (score.general) score_logits(score, t, s, l_.ld_tile, derivative);
    step.derivative = derivative;
    const bool by_value = masked && (score.general || by_pair);
    if (by_value) mask_tile(score, mask, t, s, l_.ld_tile);
    uint8_t *visible = worker_array<uint8_t>(worker, l_.visible_tile);
    if (by_pair) note_visible(t.rows, t.cols, s, l_.ld_tile, visible);
    float *tlse = worker_array<float>(worker, l_.tlse);
    const auto run = [&]<MaskedBy kMaskedBy>() {
      if (l_.logits()) {
        tangent_step<kMaskedBy, true>(band, t.rows, t.cols, step, p_.softmax_scale, s, ts, tlse);
      } else {
        tangent_step<kMaskedBy, false>(band, t.rows, t.cols, step, p_.softmax_scale, s, s, tlse);
      }
    };
    if (by_value) {
      run.template operator()<MaskedBy::kValue>();
    } else if (masked) {
      run.template operator()<MaskedBy::kBand>();
    } else {
      run.template operator()<MaskedBy::kNothing>();
    }

    Prefetcher prefetch;  // of nothing: the next block of keys is one stream
    float *tout = worker_array<float>(worker, l_.tout);
    const auto add = [&](const float *p, size_t values) {
      const float *rows = slot_array<float>(slot, values) + t.col * l_.ld_v;
      if (by_pair) {
        add_row_visible(t.rows, t.cols, visible, p_.head_dim_v, p, l_.ld_tile, rows, l_.ld_v, tout, l_.ld_v);
      } else {
        add_row_product(band, t.rows, p_.head_dim_v, p, l_.ld_tile, rows, l_.ld_v, tout, l_.ld_v, prefetch);
      }
    };
    if (l_.logits()) add(ts, l_.v_rows);
    if (l_.tv) add(s, l_.tv_rows);
  }

  // S and tS of a tile.
  void multiply(const Head &x, int32_t slot, int32_t worker, const TileBand &band, const Tile &t, float *s, float *ts) const {
    Prefetcher prefetch;
    const float *q = worker_array<float>(worker, l_.q_rows), *tq = worker_array<float>(worker, l_.tq_rows);
    const float *k = slot_array<float>(slot, l_.k_transposed) + t.col * p_.head_dim;
    const float *tk = slot_array<float>(slot, l_.tk_transposed) + t.col * p_.head_dim;
    if (scores_are_dot_products(p_, x.q)) {
      dot_products_to_tile(p_.k.dtype, rows_of(p_.k, x.b, x.h_k, x.k.start), t, p_.head_dim, q, l_.ld, s, l_.ld_tile);
    } else {
      product_to_tile(band, t.rows, p_.head_dim, q, l_.ld, k, s, l_.ld_tile, prefetch);
    }
    if (l_.tq) product_to_tile(band, t.rows, p_.head_dim, tq, l_.ld, k, ts, l_.ld_tile, prefetch);
    if (l_.tq && l_.tk) {
      product_to_tile<Output::add>(band, t.rows, p_.head_dim, q, l_.ld, tk, ts, l_.ld_tile, prefetch);
    } else if (l_.tk) {
      product_to_tile(band, t.rows, p_.head_dim, q, l_.ld, tk, ts, l_.ld_tile, prefetch);
    }
  }

  // tout = sum - tlse out, rounded once.
  template <class Element>
  void write_rows(const Head &x, int32_t worker, int64_t h, Range rows) const {
    using Type = typename Element::Type;
    const float *tlse = worker_array<float>(worker, l_.tlse), *sum = worker_array<float>(worker, l_.tout);
    const Rows out = rows_of(p_.out, x.b, h, x.q.start), tout = rows_of(j_.tout, x.b, h, x.q.start);
    for (int64_t i = rows.begin; i < rows.end; ++i, ++tlse, sum += l_.ld_v) {
      if (j_.tlse.data != nullptr) scalars_of(j_.tlse, x.b, h, x.q)[i * j_.tlse.seq_stride] = *tlse;
      const F minus_tlse = Simd::set(-*tlse);
      const auto *from = reinterpret_cast<const Type *>(out.row(i));
      auto *to = reinterpret_cast<Type *>(const_cast<char *>(tout.row(i)));
      for (int64_t c = 0; c < p_.head_dim_v; c += kWidth) {
        const int n = static_cast<int>(min64(p_.head_dim_v - c, kWidth));
        F y = Simd::load(sum + c);
        if (l_.logits()) y = Simd::fma(minus_tlse, n == kWidth ? Element::load(from + c) : Element::load(from + c, n), y);
        if (n == kWidth) {
          Element::store(to + c, y);
        } else {
          Element::store(to + c, y, n);
        }
      }
    }
  }

  const JvpProblem &j_;
  const MaskedProblem &p_;
  const JvpLayout &l_;
  char *base_;
};

bool jvp(const JvpProblem &problem, const JvpLayout &layout, void *workspace, Parallel &parallel) {
  struct Region {
    const JvpProblem &problem;
    const JvpLayout &layout;
    void *workspace;
    Schedule schedule;
  };
  Region region{problem, layout, workspace, Schedule(workspace, layout.slots, problem.forward.batch * problem.forward.heads_k)};
  return parallel.run(
      layout.workers,
      [](void *context, int32_t worker) {
        Region &r = *static_cast<Region *>(context);
        JvpWork work(r.problem, r.layout, r.workspace);
        r.schedule.work(work, worker);
      },
      &region);
}

}  // namespace fa::cpu::FA_ISA
