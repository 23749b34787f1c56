// SPDX-License-Identifier: Apache-2.0
#include "parity/expectation.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "reference/elsewhere.h"
#include "reference/number_formats.h"

namespace parity {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Rounding errors of fp32 arithmetic that the comparison allows in addition to the error of the unfused computation, in units of fp32
// roundoff of the summed magnitudes. Polynomial exponentials and divisions are good to a few units each. A dot product of
// equal terms drifts by up to a unit a few terms, and forward and backward may sum it in different orders.
double fp32_units(const Case &c) { return 8 + static_cast<double>(c.head_dim) / 4; }

using Array = std::vector<double> reference::Result::*;

// Copies one array of the reference's result, (heads, rows, columns) of sequence b, to where the library must put it. Rows
// of the slot past those in use get `unused`.
class Placer {
 public:
  Placer(Data &data, const reference::Exact &exact, const reference::Result &unfused, int64_t b)
      : data_(data), exact_(exact), unfused_(unfused), b_(b) {}

  void operand(Role role, Array array, const Side &side, int64_t heads, int64_t columns) {
    if (!data_.tensors[role].present()) return;
    const int64_t used = used_rows(data_.problem, side, b_);
    for (int64_t i = 0; i < slot_rows(data_.problem, side, b_); ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t d = 0; d < columns; ++d) {
          const int64_t element = data_.element(role, b_, i, h, d);
          data_.expected[role].push_back(i < used ? value(element, array, (h * used + i) * columns + d) : Expected{element});
        }
      }
    }
  }

  void lse() {
    if (!data_.tensors[kLse].present()) return;
    const int64_t used = used_rows(data_.problem, data_.problem.q, b_);
    for (int64_t i = 0; i < slot_rows(data_.problem, data_.problem.q, b_); ++i) {
      for (int64_t h = 0; h < data_.problem.heads_q; ++h) {
        const int64_t element = data_.row_element(kLse, b_, h, i);
        Expected e{element, -kInfinity, -kInfinity};
        if (i < used) e = value(element, &reference::Result::lse, h * used + i);
        e.magnitude = 1;
        data_.expected[kLse].push_back(e);
      }
    }
  }

  // dbias and dsink are sums over sequences, so this adds to existing elements.
  void add_dbias() {
    const HostTensor &dbias = data_.tensors[kDbias];
    if (!dbias.present()) return;
    const Case &c = data_.problem;
    const int64_t rows = used_rows(c, c.q, b_), columns = used_rows(c, c.k, b_);
    for (int64_t h = 0; h < c.heads_q; ++h) {
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j < columns; ++j) {
          const int64_t index =
              (((b_ % dbias.size(0)) * dbias.size(1) + h % dbias.size(1)) * dbias.size(2) + i % dbias.size(2)) * dbias.size(3) +
              j;
          add(data_.expected[kDbias][static_cast<size_t>(index)], &reference::Result::dbias, (h * rows + i) * columns + j);
        }
      }
    }
  }
  // The largest of all sequences.
  void raise_max_logit() {
    for (int64_t h = 0; data_.tensors[kMaxLogit].present() && h < data_.problem.heads_q; ++h) {
      const Expected here = value(0, &reference::Result::max_logit, h);
      Expected &e = data_.expected[kMaxLogit][static_cast<size_t>(h)];
      e.value = std::max(e.value, here.value);
      e.unfused = std::max(e.unfused, here.unfused);
    }
  }
  void add_dsink() {
    for (int64_t h = 0; data_.tensors[kDsink].present() && h < data_.problem.heads_q; ++h) {
      add(data_.expected[kDsink][static_cast<size_t>(h)], &reference::Result::dsink, h);
    }
  }

 private:
  Expected value(int64_t element, Array array, int64_t index) const {
    const auto i = static_cast<size_t>(index);
    return {element, (exact_.value.*array)[i], (unfused_.*array)[i], (exact_.magnitude.*array)[i],
            (exact_.through_out.*array)[i]};
  }
  void add(Expected &sum, Array array, int64_t index) const {
    const Expected term = value(0, array, index);
    sum.value += term.value;
    sum.unfused += term.unfused;
    sum.magnitude += term.magnitude;
    sum.through_out += term.through_out;
  }

  Data &data_;
  const reference::Exact &exact_;
  const reference::Result &unfused_;
  const int64_t b_;
};

// All elements of dbias and dsink are written, with zero if nothing contributes, and those of max_logit, with -inf if nothing is visible.
void start_sums(Data &data) {
  const HostTensor &dbias = data.tensors[kDbias];
  if (dbias.present()) {
    for (int64_t b = 0; b < dbias.size(0); ++b) {
      for (int64_t h = 0; h < dbias.size(1); ++h) {
        for (int64_t i = 0; i < dbias.size(2); ++i) {
          for (int64_t j = 0; j < dbias.size(3); ++j) data.expected[kDbias].push_back({dbias.element(b, h, i, j)});
        }
      }
    }
  }
  const HostTensor &max_logit = data.tensors[kMaxLogit];
  for (int64_t h = 0; max_logit.present() && h < max_logit.size(0); ++h) {
    data.expected[kMaxLogit].push_back({max_logit.element(h), -kInfinity, -kInfinity, 1});
  }
  const HostTensor &dsink = data.tensors[kDsink];
  for (int64_t h = 0; dsink.present() && h < dsink.size(0); ++h) data.expected[kDsink].push_back({dsink.element(h)});
}

std::string message(const char *what, Role role, int64_t element, double actual, const Expected *e, double tolerance) {
  char text[240];
  if (e == nullptr) {
    std::snprintf(text, sizeof text, "%s: %s at element %lld (now %.9g)", role_name(role), what,
                  static_cast<long long>(element), actual);
  } else {
    std::snprintf(text, sizeof text, "%s: %s at element %lld: %.9g, exact %.9g, error %.3g, tolerance %.3g", role_name(role),
                  what, static_cast<long long>(element), actual, e->value, std::abs(actual - e->value), tolerance);
  }
  return text;
}

}  // namespace

void fill_expected(Data &data) {
  const Case &c = data.problem;
  start_sums(data);
  for (int64_t b = 0; b < c.batch; ++b) {
    const reference::Sequence s = data.sequence(b);
    const auto [exact, unfused] = reference::answers(s, static_cast<fa_dtype>(c.dtype));
    data.largest_logit = std::max(data.largest_logit, exact.largest_logit);
    Placer place(data, exact, unfused, b);
    place.operand(kOut, &reference::Result::out, c.q, c.heads_q, c.head_dim_v);
    place.lse();
    place.raise_max_logit();
    place.operand(kDq, &reference::Result::dq, c.q, c.heads_q, c.head_dim);
    place.operand(kDk, &reference::Result::dk, c.k, c.heads_k, c.head_dim);
    place.operand(kDv, &reference::Result::dv, c.k, c.heads_k, c.head_dim_v);
    place.add_dbias();
    place.add_dsink();
  }
  for (Expected &e : data.expected[kDbias]) e.unfused = reference::round_to(data.tensors[kDbias].dtype(), e.unfused);
}

Errors errors(const Data &data, Role role, const HostTensor &actual) {
  Errors result;
  double count = 0;
  for (const Expected &e : data.expected[role]) {
    if (!std::isfinite(e.value)) continue;
    const double library = std::abs(actual.get(e.element) - e.value);
    const double unfused = std::isfinite(e.unfused) ? std::abs(e.unfused - e.value) : 0;
    result.library = std::max(result.library, library);
    result.unfused = std::max(result.unfused, unfused);
    result.largest_value = std::max(result.largest_value, std::abs(e.value));
    result.library_rms += library * library;
    result.unfused_rms += unfused * unfused;
    result.value_rms += e.value * e.value;
    ++count;
  }
  for (double *sum : {&result.library_rms, &result.unfused_rms, &result.value_rms})
    *sum = std::sqrt(*sum / std::max(count, 1.0));
  return result;
}

std::string mismatch(const Data &data, Role role, const HostTensor &actual) {
  const Errors largest = errors(data, role, actual);
  const double rounding = reference::unit_roundoff(actual.dtype());
  const double smallest = actual.dtype() == FA_FLOAT16 ? std::ldexp(1.0, -25) : 0;  // fp16 underflows gradually
  // A logit of magnitude x carries an error of about x units into its P.
  const double fp32 = fp32_units(data.problem) * reference::unit_roundoff(FA_FLOAT32) * (1 + data.largest_logit);
  const double out_rounding = reference::unit_roundoff(static_cast<fa_dtype>(data.problem.dtype));
  // With fp8 queries P may be rounded to fp8 before P V.
  const double p_rounding = role == kOut && data.problem.query_dtype != 0 ? reference::unit_roundoff(FA_FLOAT8_E4M3) : 0;
  // Tensor cores may sum products of fp8 in 14 bits, 32 columns at a time: each step may cut a unit of a logit off.
  const double sums = (role == kLse || role == kMaxLogit) && data.problem.query_dtype != 0
                          ? std::ldexp(static_cast<double>(data.problem.head_dim) / 32, -13) * data.largest_logit
                          : 0;
  std::vector<bool> written(static_cast<size_t>(actual.num_elements_stored()), false);
  for (const Expected &e : data.expected[role]) {
    written[static_cast<size_t>(e.element)] = true;
    const double now = actual.get(e.element);
    if (actual.poisoned(e.element)) return message("not written", role, e.element, now, nullptr, 0);
    // P below the smallest normal fp32 may be flushed to zero.
    constexpr double kFlushed = 1e-34;
    const double tolerance = 2 * largest.unfused + rounding * std::abs(e.value) + smallest + (fp32 + p_rounding) * e.magnitude +
                             out_rounding * e.through_out + sums + kFlushed;
    const bool close = std::isnan(e.value)   ? std::isnan(now)
                       : std::isinf(e.value) ? now == e.value
                                             : std::abs(now - e.value) <= tolerance;
    if (!close) return message("wrong", role, e.element, now, &e, tolerance);
  }
  for (int64_t element = 0; element < actual.num_elements_stored(); ++element) {
    if (!written[static_cast<size_t>(element)] && !actual.poisoned(element)) {
      return message("written outside the sequences", role, element, actual.get(element), nullptr, 0);
    }
  }
  return "";
}

}  // namespace parity
