// SPDX-License-Identifier: Apache-2.0
#include "reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/dropout.h"
#include "reference/number_formats.h"

namespace reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

size_t at(int64_t i, int64_t columns, int64_t j) { return static_cast<size_t>(i * columns + j); }

Result zeros(const Sequence &s) {
  Result r;
  r.out.assign(static_cast<size_t>(s.heads_q * s.seqlen_q * s.head_dim_v), 0.0);
  r.lse.assign(static_cast<size_t>(s.heads_q * s.seqlen_q), 0.0);
  r.max_logit.assign(static_cast<size_t>(s.heads_q), -kInfinity);
  r.dq.assign(s.q.size(), 0.0);
  r.dk.assign(s.k.size(), 0.0);
  r.dv.assign(s.v.size(), 0.0);
  r.dbias.assign(s.bias.size(), 0.0);
  r.dsink.assign(s.sink.size(), 0.0);
  return r;
}

// How often query i counts key j that it sees.
int64_t times_listed(const Sequence &s, int64_t i, int64_t j) {
  if (!s.has_key_lists) return 1;
  const std::vector<int64_t> &list = s.key_lists[static_cast<size_t>(i)];
  return std::count(list.begin(), list.end(), j);
}

// One head, in arithmetic `Real`; `stored` is how a matrix product rounds when it is written to memory. Every array below is
// (seqlen_q, seqlen_k) of one head.
template <typename Real, typename Stored>
class Head {
 public:
  // `exact` is where bounds are recorded, or null.
  Head(const Sequence &s, int64_t h, Stored stored, Exact *exact)
      : s_(s), h_(h), hk_(h / (s.heads_q / s.heads_k)), stored_(stored), exact_(exact) {
    const auto size = static_cast<size_t>(s.seqlen_q * s.seqlen_k);
    seen_.assign(size, false);
    logit_.assign(size, 0);
    slope_.assign(size, 1);
    p_.assign(size, 0);
    keep_.assign(size, 1);
  }

  void forward(Result &r) {
    logits();
    r.max_logit[static_cast<size_t>(h_)] = static_cast<double>(largest_);
    for (int64_t i = 0; i < s_.seqlen_q; ++i) softmax_row(i, r);
    const auto columns = static_cast<size_t>(s_.head_dim_v);
    for (int64_t i = 0; i < s_.seqlen_q; ++i) {
      std::vector<Real> sum(columns, 0), terms(columns, 0);
      for (int64_t j = 0; j < s_.seqlen_k; ++j) {
        const size_t ij = at(i, s_.seqlen_k, j);
        if (!seen_[ij] || keep_[ij] == 0) continue;
        const Real p = static_cast<Real>(stored_(p_[ij] * keep_[ij]));
        const int64_t times = times_listed(s_, i, j);
        for (size_t d = 0; d < columns; ++d) {
          const Real term = p * v(j, static_cast<int64_t>(d));
          for (int64_t n = 0; n < times; ++n) sum[d] += term;
          terms[d] += static_cast<Real>(times) * std::abs(term);
        }
      }
      for (size_t d = 0; d < columns; ++d) {
        const size_t id = out_at(i, static_cast<int64_t>(d));
        r.out[id] = stored_(sum[d]);
        if (exact_) exact_->magnitude.out[id] = terms[d];
      }
    }
  }

  void backward(Result &r) {
    const bool has_dlse = !s_.dlse.empty();
    for (int64_t i = 0; i < s_.seqlen_q; ++i) {
      const Real dlse = has_dlse ? static_cast<Real>(s_.dlse[at(h_, s_.seqlen_q, i)]) : Real(0);
      Real delta = 0,
           delta_terms = 0;  // D = rowsum(dO * O); a row that sees nothing has the constant output 0, whatever its dO
      const auto row = seen_.begin() + static_cast<std::ptrdiff_t>(at(i, s_.seqlen_k, 0));
      const bool sees = std::find(row, row + static_cast<std::ptrdiff_t>(s_.seqlen_k), true) !=
                        row + static_cast<std::ptrdiff_t>(s_.seqlen_k);
      for (int64_t d = 0; sees && d < s_.head_dim_v; ++d) {
        const Real term = dout(i, d) * static_cast<Real>(r.out[out_at(i, d)]);
        delta += term;
        delta_terms += std::abs(term);
      }
      if (!s_.sink.empty() && r.lse[at(h_, s_.seqlen_q, i)] != -kInfinity) {
        const Real p_sink =
            std::exp(static_cast<Real>(s_.sink[static_cast<size_t>(h_)]) - static_cast<Real>(r.lse[at(h_, s_.seqlen_q, i)]));
        add(r.dsink[static_cast<size_t>(h_)], p_sink * (dlse - delta));
        if (exact_) {
          exact_->magnitude.dsink[static_cast<size_t>(h_)] += p_sink * (std::abs(dlse) + delta_terms);
          exact_->through_out.dsink[static_cast<size_t>(h_)] += p_sink * delta_terms;
        }
      }
      for (int64_t j = 0; j < s_.seqlen_k; ++j) {
        const size_t ij = at(i, s_.seqlen_k, j);
        if (seen_[ij]) backward_pair(i, j, delta, delta_terms, dlse, r);
      }
    }
  }

 private:
  void logits() {
    for (int64_t i = 0; i < s_.seqlen_q; ++i) {
      for (int64_t j = 0; j < s_.seqlen_k; ++j) {
        if (!visible(s_, h_, i, j)) continue;
        const size_t ij = at(i, s_.seqlen_k, j);
        Real dot = 0, terms = 0;
        for (int64_t d = 0; d < s_.head_dim; ++d) {
          const Real term = q(i, d) * k(j, d);
          dot += term;
          terms += std::abs(term);
        }
        Real x = static_cast<Real>(stored_(dot)) * static_cast<Real>(s_.scale);
        terms *= static_cast<Real>(s_.scale);
        if (s_.score) {
          const Real slope = static_cast<Real>(s_.derivative(static_cast<double>(x), h_, i, j));
          x = static_cast<Real>(s_.score(static_cast<double>(x), h_, i, j));
          slope_[ij] = slope;
          terms = std::max(Real(1), std::abs(slope)) * terms + std::abs(x);
        }
        if (s_.softcap > 0) {
          const Real cap = static_cast<Real>(s_.softcap);
          const Real t = std::tanh(x / cap);
          slope_[ij] *= 1 - t * t;
          x = cap * t;
          terms += cap;
        }
        if (!s_.bias.empty()) {
          const Real bias = static_cast<Real>(s_.bias[bias_at(i, j)]);
          x += bias;
          terms += std::abs(bias);
        }
        if (!s_.slopes.empty()) {
          Real distance = static_cast<Real>(std::abs(i + s_.seqlen_k - s_.seqlen_q - j));
          if (s_.alibi_log_scale > 0) distance = std::log1p(static_cast<Real>(s_.alibi_log_scale) * distance);
          const Real alibi = static_cast<Real>(s_.slopes[static_cast<size_t>(h_)]) * distance;
          x -= alibi;
          terms += std::abs(alibi);
        }
        seen_[ij] = true;
        logit_[ij] = x;
        largest_ = x > largest_ ? x : largest_;  // NaN does not count
        if (s_.dropout_threshold > 0) {
          const bool kept =
              dropout_keeps(dropout_number(s_.dropout_seed, s_.dropout_offset, s_.batch_index, s_.heads_q, h_, i, j),
                            static_cast<uint32_t>(s_.dropout_threshold));
          keep_[ij] = kept ? Real(1) / (Real(1) - static_cast<Real>(s_.dropout_threshold) / Real(32768)) : Real(0);
        }
        if (exact_) exact_->largest_logit = std::max(exact_->largest_logit, static_cast<double>(terms));
      }
    }
  }

  void softmax_row(int64_t i, Result &r) {
    const Real sink =
        s_.sink.empty() ? -std::numeric_limits<Real>::infinity() : static_cast<Real>(s_.sink[static_cast<size_t>(h_)]);
    Real maximum = sink;
    const bool has_sink = sink != -kInfinity;
    bool any = has_sink;
    for (int64_t j = 0; j < s_.seqlen_k; ++j) {
      const size_t ij = at(i, s_.seqlen_k, j);
      if (!seen_[ij]) continue;
      any = true;
      // A NaN sink or logit must win, whatever it is compared with.
      if (std::isnan(maximum)) break;
      if (!(logit_[ij] <= maximum)) maximum = logit_[ij];
    }
    double &lse = r.lse[at(h_, s_.seqlen_q, i)];
    lse = -kInfinity;
    if (!any) return;
    Real sum = has_sink ? std::exp(sink - maximum) : Real(0);
    for (int64_t j = 0; j < s_.seqlen_k; ++j) {
      const size_t ij = at(i, s_.seqlen_k, j);
      if (!seen_[ij]) continue;
      p_[ij] = std::exp(logit_[ij] - maximum);
      // Equal terms one by one, as kernels add them: their rounding errors do not cancel.
      for (int64_t n = times_listed(s_, i, j); n > 0; --n) sum += p_[ij];
    }
    for (int64_t j = 0; j < s_.seqlen_k; ++j) p_[at(i, s_.seqlen_k, j)] /= sum;
    lse = static_cast<double>(maximum + std::log(sum));
  }

  void backward_pair(int64_t i, int64_t j, Real delta, Real delta_terms, Real dlse, Result &r) {
    const size_t ij = at(i, s_.seqlen_k, j);
    const Real dropped = p_[ij] * keep_[ij];
    const Real p = static_cast<Real>(stored_(dropped));
    Real dp = 0, dp_terms = 0;
    for (int64_t d = 0; d < s_.head_dim_v; ++d) {
      if (keep_[ij] == 0) break;  // a dropped value is not part of the result
      const Real term = dout(i, d) * v(j, d);
      dp += term;
      dp_terms += std::abs(term);
      add(r.dv[v_at(j, d)], p * dout(i, d));
      if (exact_) exact_->magnitude.dv[v_at(j, d)] += std::abs(dropped * dout(i, d));
    }
    const Real ds = stored_(p_[ij] * (keep_[ij] * static_cast<Real>(stored_(dp)) - delta + dlse));
    const Real ds_terms = p_[ij] * (keep_[ij] * dp_terms + delta_terms + std::abs(dlse));
    if (!s_.bias.empty()) {
      r.dbias[bias_at(i, j)] = ds;
      if (exact_) {
        exact_->magnitude.dbias[bias_at(i, j)] = ds_terms;
        exact_->through_out.dbias[bias_at(i, j)] = p_[ij] * delta_terms;
      }
    }
    const Real scale = static_cast<Real>(s_.scale);
    const Real raw = stored_(ds * slope_[ij]);
    const Real steep = std::max(Real(1), std::abs(slope_[ij]));
    for (int64_t d = 0; d < s_.head_dim; ++d) {
      add(r.dq[q_at(i, d)], raw * scale * k(j, d));
      add(r.dk[k_at(j, d)], raw * scale * q(i, d));
      if (!exact_) continue;
      const Real q_size = steep * scale * std::abs(q(i, d)), k_size = steep * scale * std::abs(k(j, d));
      exact_->magnitude.dq[q_at(i, d)] += ds_terms * k_size;
      exact_->magnitude.dk[k_at(j, d)] += ds_terms * q_size;
      exact_->through_out.dq[q_at(i, d)] += p_[ij] * delta_terms * k_size;
      exact_->through_out.dk[k_at(j, d)] += p_[ij] * delta_terms * q_size;
    }
  }

  // Sums are as wide as the arithmetic.
  static void add(double &sum, Real term) { sum = static_cast<double>(static_cast<Real>(sum) + term); }

  size_t q_at(int64_t i, int64_t d) const { return at(h_ * s_.seqlen_q + i, s_.head_dim, d); }
  size_t k_at(int64_t j, int64_t d) const { return at(hk_ * s_.seqlen_k + j, s_.head_dim, d); }
  size_t v_at(int64_t j, int64_t d) const { return at(hk_ * s_.seqlen_k + j, s_.head_dim_v, d); }
  size_t out_at(int64_t i, int64_t d) const { return at(h_ * s_.seqlen_q + i, s_.head_dim_v, d); }
  size_t bias_at(int64_t i, int64_t j) const { return at(h_ * s_.seqlen_q + i, s_.seqlen_k, j); }
  Real q(int64_t i, int64_t d) const { return static_cast<Real>(s_.q[q_at(i, d)]); }
  Real k(int64_t j, int64_t d) const { return static_cast<Real>(s_.k[k_at(j, d)]); }
  Real v(int64_t j, int64_t d) const { return static_cast<Real>(s_.v[v_at(j, d)]); }
  Real dout(int64_t i, int64_t d) const { return static_cast<Real>(s_.dout[out_at(i, d)]); }

  const Sequence &s_;
  const int64_t h_, hk_;
  const Stored stored_;
  Exact *const exact_;
  std::vector<bool> seen_;
  std::vector<Real> logit_;
  Real largest_ = -std::numeric_limits<Real>::infinity();  // visible logit
  std::vector<Real> slope_;                                // derivative of the logit with respect to scale q k
  std::vector<Real> p_;                                    // softmax(S), before dropout
  std::vector<Real> keep_;                                 // 0 for a dropped element, else 1 / (1 - p)
};

template <typename Real, typename Stored>
void run(const Sequence &s, Stored stored, Result &r, Exact *exact) {
  for (int64_t h = 0; h < s.heads_q; ++h) {
    Head<Real, Stored> head(s, h, stored, exact);
    head.forward(r);
    if (!s.dout.empty()) head.backward(r);
  }
}

}  // namespace

bool visible(const Sequence &s, int64_t h, int64_t i, int64_t j) {
  // The mask's diagonal: the key that query i is aligned with.
  const int64_t diagonal = s.mask == FA_MASK_CAUSAL_TOP_LEFT ? i : i + s.seqlen_k - s.seqlen_q;
  if (s.mask != FA_MASK_NONE && j > diagonal) return false;
  if (s.window_left >= 0 && diagonal - j > s.window_left) return false;
  if (s.window_right >= 0 && j - diagonal > s.window_right) return false;
  if (!s.blocks.empty()) {
    const int64_t block_rows = (s.seqlen_q + s.block_q - 1) / s.block_q;
    const int64_t block_columns = (s.seqlen_k + s.block_k - 1) / s.block_k;
    if (!s.blocks[at(h * block_rows + i / s.block_q, block_columns, j / s.block_k)]) return false;
  }
  if (s.has_lists) {
    const int64_t block_rows = (s.seqlen_q + s.block_q - 1) / s.block_q;
    const std::vector<int64_t> &list = s.lists[static_cast<size_t>(h * block_rows + i / s.block_q)];
    if (std::find(list.begin(), list.end(), j / s.block_k) == list.end()) return false;
  }
  if (!s.elements.empty() && !s.elements[at(h * s.seqlen_q + i, s.seqlen_k, j)]) return false;
  if (j < s.first_key) return false;
  if (s.has_key_lists && times_listed(s, i, j) == 0) return false;
  if (s.shown && !s.shown(h, i, j)) return false;
  if (s.has_slices) {
    bool shown = false;
    for (const auto &[q_begin, q_end, k_begin, k_end, kind] : s.slices) {
      if (i < q_begin || i >= q_end || j < k_begin || j >= k_end) continue;
      const bool before_end = q_end - 1 - i <= k_end - 1 - j, after_begin = i - q_begin <= j - k_begin;
      if (kind == 0 || (kind == 1 && before_end) || (kind == 2 && after_begin) || (kind == 3 && before_end && after_begin)) {
        shown = true;
      }
    }
    if (!shown) return false;
  }
  if (!s.bias.empty() && s.bias[at(h * s.seqlen_q + i, s.seqlen_k, j)] == -kInfinity) return false;
  return true;
}

Exact attention(const Sequence &s) {
  Exact exact{zeros(s), zeros(s), zeros(s), 0};
  run<double>(
      s, [](double x) { return x; }, exact.value, &exact);
  return exact;
}

Result unfused(const Sequence &s, fa_dtype dtype) {
  Result r = zeros(s);
  if (dtype == FA_FLOAT32) {
    run<float>(
        s, [](float x) { return x; }, r, nullptr);
  } else {
    run<float>(
        s, [dtype](float x) { return static_cast<float>(round_to(dtype, x)); }, r, nullptr);
  }
  // Sums over rows and heads were kept wide; they are rounded once, when stored.
  for (auto *gradient : {&r.dq, &r.dk, &r.dv}) {
    for (double &x : *gradient) x = round_to(dtype, x);
  }
  return r;
}

}  // namespace reference
