// SPDX-License-Identifier: Apache-2.0
#include "reference/jvp.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace reference {
namespace {

// A number and its derivative.
struct Dual {
  double x = 0;
  double t = 0;
};

Dual operator+(Dual a, Dual b) { return {a.x + b.x, a.t + b.t}; }
Dual operator-(Dual a, Dual b) { return {a.x - b.x, a.t - b.t}; }
Dual operator*(Dual a, Dual b) { return {a.x * b.x, a.t * b.x + a.x * b.t}; }
Dual operator/(Dual a, Dual b) { return {a.x / b.x, (a.t - a.x / b.x * b.t) / b.x}; }
Dual exp(Dual a) { return {std::exp(a.x), std::exp(a.x) * a.t}; }
Dual log(Dual a) { return {std::log(a.x), a.t / a.x}; }
Dual tanh(Dual a) { return {std::tanh(a.x), (1 - std::tanh(a.x) * std::tanh(a.x)) * a.t}; }

class Row {
 public:
  Row(const Sequence &s, const Tangents &tangents, int64_t h, int64_t i)
      : s_(s), t_(tangents), h_(h), hk_(h / (s.heads_q / s.heads_k)), i_(i) {}

  void compute(Jvp &result) const {
    std::vector<Dual> logits;
    std::vector<int64_t> keys;
    std::vector<double> moved;  // sum of the magnitudes of the terms of each logit's tangent
    double maximum = -std::numeric_limits<double>::infinity();
    for (int64_t j = 0; j < s_.seqlen_k; ++j) {
      if (!visible(s_, h_, i_, j)) continue;
      keys.push_back(j);
      moved.push_back(0);
      logits.push_back(logit(j, moved.back(), result.largest_logit));
      maximum = std::max(maximum, logits.back().x);
    }
    if (keys.empty()) return;

    Dual sum;
    std::vector<Dual> exponentials;
    for (const Dual &x : logits) exponentials.push_back(exp(x - Dual{maximum}));
    for (const Dual &w : exponentials) sum = sum + w;
    const auto row = static_cast<size_t>(h_ * s_.seqlen_q + i_);
    const Dual lse = Dual{maximum} + log(sum);
    result.lse[row] = lse.t;
    for (size_t n = 0; n < keys.size(); ++n) result.lse_magnitude[row] += exponentials[n].x / sum.x * moved[n];
    for (int64_t d = 0; d < s_.head_dim_v; ++d) {
      Dual out;
      double terms = 0, size = 0, weighted = 0, values = 0;
      for (size_t n = 0; n < keys.size(); ++n) {
        const Dual p = exponentials[n] / sum, v = element(s_.v, t_.v, (hk_ * s_.seqlen_k + keys[n]) * s_.head_dim_v + d);
        out = out + p * v;
        terms += p.x * (moved[n] * std::abs(v.x) + std::abs(v.t));
        size += p.x * std::abs(v.x);
        weighted += p.x * (std::abs(logits[n].t * v.x) + std::abs(v.t));
        values += std::abs(v.x) + std::abs(v.t);
      }
      const size_t at = row * static_cast<size_t>(s_.head_dim_v) + static_cast<size_t>(d);
      result.out[at] = out.t;
      result.out_magnitude[at] = terms + result.lse_magnitude[row] * size;
      result.through_out[at] = std::abs(lse.t) * size;
      result.weighted[at] = weighted;
      result.values[at] = values;
    }
  }

 private:
  static Dual element(const std::vector<double> &values, const std::vector<double> &tangents, int64_t n) {
    const auto at = static_cast<size_t>(n);
    return {values[at], tangents.empty() ? 0 : tangents[at]};
  }

  Dual logit(int64_t j, double &moved, double &largest) const {
    Dual dot;
    double terms = 0;
    for (int64_t d = 0; d < s_.head_dim; ++d) {
      const Dual q = element(s_.q, t_.q, (h_ * s_.seqlen_q + i_) * s_.head_dim + d);
      const Dual k = element(s_.k, t_.k, (hk_ * s_.seqlen_k + j) * s_.head_dim + d);
      dot = dot + q * k;
      terms += s_.scale * std::abs(q.x * k.x);
      moved += s_.scale * (std::abs(q.t * k.x) + std::abs(q.x * k.t));
    }
    Dual x = Dual{s_.scale} * dot;
    if (s_.softcap > 0) {
      x = Dual{s_.softcap} * tanh(x / Dual{s_.softcap});
      terms += s_.softcap;
    }
    if (!s_.slopes.empty()) {
      double distance = static_cast<double>(std::abs(i_ + s_.seqlen_k - s_.seqlen_q - j));
      if (s_.alibi_log_scale > 0) distance = std::log1p(s_.alibi_log_scale * distance);
      const double alibi = s_.slopes[static_cast<size_t>(h_)] * distance;
      x = x - Dual{alibi};
      terms += std::abs(alibi);
    }
    largest = std::max(largest, terms);
    return x;
  }

  const Sequence &s_;
  const Tangents &t_;
  const int64_t h_, hk_, i_;
};

}  // namespace

Jvp jvp(const Sequence &s, const Tangents &tangents) {
  Jvp result;
  const auto rows = static_cast<size_t>(s.heads_q * s.seqlen_q), elements = rows * static_cast<size_t>(s.head_dim_v);
  result.lse.assign(rows, 0);
  result.lse_magnitude.assign(rows, 0);
  for (auto *array : {&result.out, &result.out_magnitude, &result.through_out, &result.weighted, &result.values})
    array->assign(elements, 0);
  for (int64_t h = 0; h < s.heads_q; ++h) {
    for (int64_t i = 0; i < s.seqlen_q; ++i) Row(s, tangents, h, i).compute(result);
  }
  return result;
}

}  // namespace reference
