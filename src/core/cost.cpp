// SPDX-License-Identifier: Apache-2.0
#include "core/cost.h"

#include <algorithm>

namespace fa {
namespace {

// Sum over 0 <= i < n of clamp(i + offset, 0, limit).
double sum_clamped(int64_t n, int64_t offset, int64_t limit) {
  const int64_t rising = std::clamp<int64_t>(-offset, 0, n);            // rows before this one are clamped to 0
  const int64_t flat = std::clamp<int64_t>(limit - offset, rising, n);  // rows from this one on are clamped to limit
  const double count = static_cast<double>(flat - rising);
  const double ramp = count * (static_cast<double>(rising + offset) + static_cast<double>(flat - 1 + offset)) / 2;
  return ramp + static_cast<double>(n - flat) * static_cast<double>(limit);
}

double rows_of(const Lengths &lengths, int64_t batch) {
  return lengths.cu != nullptr ? static_cast<double>(lengths.total)
                               : static_cast<double>(batch) * static_cast<double>(lengths.max_len);
}

struct Traffic {
  double q_side;    // bytes of one q-shaped tensor
  double out_side;  // bytes of one out-shaped tensor
  double k_side;
  double v_side;
  double lse;
};

Traffic traffic_of(const Problem &p) {
  const double query = dtype_bytes(p.q.dtype), key = dtype_bytes(p.k.dtype), result = dtype_bytes(p.out.dtype);
  const double rows_q = rows_of(p.q_lengths, p.batch) * static_cast<double>(p.heads_q);
  const double rows_k = rows_of(p.k_lengths, p.batch) * static_cast<double>(p.heads_k);
  return {rows_q * static_cast<double>(p.head_dim) * query, rows_q * static_cast<double>(p.head_dim_v) * result,
          rows_k * static_cast<double>(p.head_dim) * key, rows_k * static_cast<double>(p.head_dim_v) * key, rows_q * 4};
}

double pairs_of(const Problem &p) {
  return static_cast<double>(p.batch) * static_cast<double>(p.heads_q) *
         visible_pairs(p.band, p.q_lengths.max_len, p.k_lengths.max_len);
}

}  // namespace

double visible_pairs(const Band &band, int64_t seqlen_q, int64_t seqlen_k) {
  // Keys of row i end at clamp(i + shift + right + 1) and begin at clamp(i + shift - left).
  const int64_t shift = band.shift(seqlen_q, seqlen_k);
  return sum_clamped(seqlen_q, shift + band.right + 1, seqlen_k) - sum_clamped(seqlen_q, shift - band.left, seqlen_k);
}

Cost cost_of(const Problem &p) {
  const Traffic t = traffic_of(p);
  Cost cost;
  cost.flops = 2.0 * pairs_of(p) * static_cast<double>(p.head_dim + p.head_dim_v);
  cost.bytes = t.q_side + t.k_side + t.v_side + t.out_side + (p.lse.data != nullptr ? t.lse : 0);
  return cost;
}

Cost cost_of(const BackwardProblem &b) {
  if (b.empty()) return {};
  const Problem &p = b.forward;
  const Traffic t = traffic_of(p);
  Cost cost;
  // S = q k^T, dq and dk take head_dim; dP = dout v^T and dv take head_dim_v.
  cost.flops = 2.0 * pairs_of(p) * static_cast<double>(3 * p.head_dim + 2 * p.head_dim_v);
  cost.bytes = t.q_side + t.k_side + t.v_side + 2 * t.out_side + t.lse + (b.dlse.data != nullptr ? t.lse : 0) +
               (b.dq.data != nullptr ? t.q_side : 0) + (b.dk.data != nullptr ? t.k_side : 0) +
               (b.dv.data != nullptr ? t.v_side : 0);
  return cost;
}

Cost cost_of(const JvpProblem &j) {
  const Problem &p = j.forward;
  const Traffic t = traffic_of(p);
  const int64_t tq = j.tq.data != nullptr, tk = j.tk.data != nullptr, tv = j.tv.data != nullptr;
  if (tq + tk + tv == 0) return {0, t.out_side + (j.tlse.data != nullptr ? t.lse : 0)};
  // S = q k^T, tq k^T and q tk^T take head_dim; (P tS) v and P tv take head_dim_v.
  Cost cost;
  cost.flops = 2.0 * pairs_of(p) * static_cast<double>((1 + tq + tk) * p.head_dim + (std::max(tq, tk) + tv) * p.head_dim_v);
  cost.bytes = static_cast<double>(1 + tq) * t.q_side + static_cast<double>(1 + tk) * t.k_side +
               static_cast<double>(std::max(tq, tk) + tv) * t.v_side + 2 * t.out_side + t.lse +
               (j.tlse.data != nullptr ? t.lse : 0);
  return cost;
}

Cost cost_of(const MergeProblem &p) {
  const double rows = static_cast<double>(p.batch) * static_cast<double>(p.seqlen_q) * static_cast<double>(p.heads_q);
  const double columns = static_cast<double>(p.head_dim_v), parts = p.num_parts;
  Cost cost;
  cost.flops = 2 * parts * rows * columns;
  cost.bytes = parts * rows * (columns * dtype_bytes(p.parts[0].out.dtype) + 4) + rows * columns * dtype_bytes(p.out.dtype) +
               (p.lse.data != nullptr ? 4 * rows : 0);
  return cost;
}

Cost cost_of(const AppendProblem &p) {
  const double rows = static_cast<double>(p.rows), rotated = static_cast<double>(p.rotary_dim);
  const double heads_q = static_cast<double>(p.heads_q), heads_k = static_cast<double>(p.heads_k);
  const double from = dtype_bytes(p.k.dtype), to = dtype_bytes(p.k_cache.dtype);
  // If queries are rotated in place, their other columns are neither read nor written.
  const double columns_q = p.q_out.data == p.q.data ? rotated : static_cast<double>(p.head_dim);
  Cost cost;
  cost.flops = 6 * rows * (heads_q + heads_k) * rotated / 2;
  cost.bytes = rows * heads_k * static_cast<double>(p.head_dim + p.head_dim_v) * (from + to) +
               rows * heads_q * columns_q * 2 * from + rows * rotated * dtype_bytes(p.table_dtype) +
               4 * rows * heads_k * (p.k_descale.per_row + p.v_descale.per_row);
  return cost;
}

}  // namespace fa
