// SPDX-License-Identifier: Apache-2.0
// Compiled without fusing of products and sums: std::fma() says where there is one.
#include "parity/same_bits_cuda_model.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "parity/device_math.h"
#include "reference/number_formats.h"

namespace parity {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f, kNoMax = -1e30f, kLargestP = 0x1p64f,
                kLargestSum = 64;
constexpr int64_t kTile = 128, kSegment = 1024, kStep = 16;

// The exponent of a number's leading bit as its format stores it: subnormal numbers have that of the smallest normal one.
int exponent_of(double x, int smallest) { return std::max(std::ilogb(x), smallest); }

// A step of the tensor core: 16 products and the sum before, each cut off below 2^-25 of the largest exponent among them, are added exactly,
// and the result is cut off to fp32. The exponent of a product is the sum of its operands' exponents.
float step(const float *a, const float *b, int smallest, float sum) {
  float plain = sum;
  for (int64_t n = 0; n < kStep; ++n) plain += a[n] * b[n];
  if (!std::isfinite(plain)) return plain;
  constexpr int kFraction = 25, kNone = std::numeric_limits<int>::min();
  int largest = kNone;
  if (sum != 0) largest = exponent_of(sum, -126);
  for (int64_t n = 0; n < kStep; ++n) {
    if (a[n] != 0 && b[n] != 0) largest = std::max(largest, exponent_of(a[n], smallest) + exponent_of(b[n], smallest));
  }
  if (largest == kNone) return 0;
  int64_t total = 0;
  for (int64_t n = 0; n <= kStep; ++n) {
    const double x = n == kStep ? double{sum} : double{a[n]} * b[n];
    total += static_cast<int64_t>(std::trunc(std::ldexp(x, kFraction - largest)));
  }
  if (total == 0) return 0;
  // Cut off to 24 bits, or to the last place of subnormal numbers.
  const double exact = std::ldexp(static_cast<double>(total), largest - kFraction);
  const int last_place = std::max(std::ilogb(exact) - 23, -149);
  return static_cast<float>(std::ldexp(std::trunc(std::ldexp(exact, -last_place)), last_place));
}

class Model {
 public:
  Model(const SameBitsProblem &p, const SameBitsSequence &s, int64_t row, int64_t head)
      : p_(p), s_(s), row_(row), head_(head), scale_(1.0f / std::sqrt(static_cast<float>(p.head_dim))) {}

  ModelRow compute() {
    const int64_t end = p_.causal ? row_ + 1 : p_.rows;
    const int64_t begin = p_.window_left < 0 ? 0 : std::max<int64_t>(row_ - p_.window_left, 0);
    query_ = numbers(s_.q, row_, p_.heads_q, head_, p_.head_dim);
    float max = kNoMax, sum = 0;
    std::vector<float> out;
    for (int64_t first = begin / kSegment * kSegment; first < end; first += kSegment) {
      segment(first, std::max(begin, first), std::min(end, first + kSegment));
      if (out.empty()) {
        max = max_, sum = sum_, out = out_;
        continue;
      }
      const float both = std::max(max, max_), before = exp2(max - both), added = exp2(max_ - both);
      sum = std::fma(sum_, added, sum * before);
      for (size_t c = 0; c < out.size(); ++c) out[c] = std::fma(out_[c], added, out[c] * before);
      max = both;
    }
    float factor = 1;
    if (p_.sink) {
      const float sink = s_.sinks[static_cast<size_t>(head_)] * kLog2e, both = std::max(sink, max);
      factor = exp2(max - both);
      sum = std::fma(sum, factor, exp2(sink - both));
      max = both;
    }
    ModelRow result;
    const size_t size = reference::element_bytes(p_.dtype);
    result.out.assign(out.size() * size, 0);
    result.lse = -kInfinity;
    if (sum == 0) return result;
    result.lse = (max + device_math(DeviceFunction::kLog2, {sum})[0]) * kLn2;
    factor = device_math(DeviceFunction::kQuotient, {factor}, {sum})[0];
    for (size_t c = 0; c < out.size(); ++c)
      reference::store(result.out.data() + c * size, p_.dtype, double{std::fma(out[c], factor, 0.0f)});
    return result;
  }

 private:
  bool plain() const { return p_.softcap <= 0 && !p_.alibi; }
  int smallest() const { return p_.dtype == FA_FLOAT16 ? -14 : -126; }
  static float exp2(float x) { return device_math(DeviceFunction::kExp2, {x})[0]; }
  std::vector<float> numbers(const std::vector<unsigned char> &from, int64_t row, int64_t heads, int64_t head,
                             int64_t dim) const {
    const size_t size = reference::element_bytes(p_.dtype);
    std::vector<float> x(static_cast<size_t>((dim + kStep - 1) / kStep * kStep), 0.0f);
    for (int64_t c = 0; c < dim; ++c)
      x[c] = static_cast<float>(
          reference::load(from.data() + static_cast<size_t>((row * heads + head) * dim + c) * size, p_.dtype));
    return x;
  }
  float rounded(float x) const { return static_cast<float>(reference::round_to(p_.dtype, double{x})); }

  // Scores of the keys [begin, end), in the unit of q k^T.
  std::vector<float> scores(int64_t begin, int64_t end) const {
    std::vector<float> x;
    for (int64_t j = begin; j < end; ++j) {
      const std::vector<float> key = numbers(s_.k, j, p_.heads_k, head_ / p_.group(), p_.head_dim);
      float sum = 0;
      for (size_t c = 0; c < key.size(); c += kStep) sum = step(&query_[c], &key[c], smallest(), sum);
      x.push_back(sum);
    }
    if (p_.softcap > 0) {
      const float cap = p_.softcap / scale_, exponent = 2 * kLog2e * scale_ / p_.softcap;
      std::vector<float> e = x;
      for (float &one : e) one *= exponent;
      e = device_math(DeviceFunction::kExp2, e);
      for (float &one : e) one += 1;
      e = device_math(DeviceFunction::kReciprocal, e);
      for (size_t n = 0; n < x.size(); ++n) x[n] = std::fma(-2 * cap, e[n], cap);
    }
    if (p_.alibi) {
      const float slope = (1 / scale_) * s_.slopes[static_cast<size_t>(head_)];
      for (int64_t j = begin; j < end; ++j)
        x[j - begin] = std::fma(-slope, static_cast<float>(std::abs(row_ - j)), x[j - begin]);
    }
    return x;
  }

  // m, l and out of the keys [begin, end) of the segment that begins at `first`.
  void segment(int64_t first, int64_t begin, int64_t end) {
    max_ = kNoMax;
    float lanes[4] = {};
    out_.assign(static_cast<size_t>(p_.head_dim_v), 0.0f);
    const float scale = scale_ * kLog2e;
    const auto rescale = [&](float factor) {
      for (float &lane : lanes) lane *= factor;
      for (float &o : out_) o *= factor;
    };
    for (int64_t tile = first; tile < end; tile += kTile) {
      const int64_t from = std::max(begin, tile), to = std::min(end, tile + kTile);
      if (from >= to) continue;
      const std::vector<float> x = scores(from, to);
      const auto raise = [&] {
        const float raised = std::max(max_, *std::max_element(x.begin(), x.end()) * scale), factor = exp2(max_ - raised);
        max_ = raised;
        rescale(factor);
      };
      std::vector<float> p(kTile);
      const auto exponentials = [&] {
        std::vector<float> e;
        for (const float score : x) e.push_back(std::fma(score, scale, -max_));
        e = device_math(DeviceFunction::kExp2, e);
        std::fill(p.begin(), p.end(), 0.0f);
        std::copy(e.begin(), e.end(), p.begin() + (from - tile));
      };
      const auto lane_sum = [&](int64_t lane) {
        float chains[2] = {};
        for (int64_t n = 0; n < kTile / 8; ++n) {
          chains[n % 2] += p[8 * n + 2 * lane];
          chains[n % 2] += p[8 * n + 2 * lane + 1];
        }
        return chains[0] + chains[1];
      };
      if (max_ == kNoMax || !plain()) raise();
      exponentials();
      if (plain() && *std::max_element(p.begin(), p.end()) >= kLargestP) {
        raise();
        exponentials();
      }
      float sums[4], most = 0;
      for (int64_t lane = 0; lane < 4; ++lane) most = std::max(most, sums[lane] = lane_sum(lane));
      if (plain() && most > kLargestSum) {
        const int exponent = std::min(std::ilogb(most), 126);
        const float factor = std::ldexp(1.0f, -exponent);
        max_ += static_cast<float>(exponent);
        rescale(factor);
        for (float &sum : sums) sum *= factor;
        for (float &one : p) one *= factor;
      }
      for (int64_t lane = 0; lane < 4; ++lane) lanes[lane] += sums[lane];
      // P V, in steps of 16 keys.
      for (float &one : p) one = rounded(one);
      std::vector<std::vector<float>> values;
      for (int64_t n = 0; n < kTile; ++n) {
        const bool seen = tile + n >= from && tile + n < to;
        values.push_back(seen ? numbers(s_.v, tile + n, p_.heads_k, head_ / p_.group(), p_.head_dim_v)
                              : std::vector<float>(out_.size()));
      }
      for (size_t c = 0; c < out_.size(); ++c) {
        for (int64_t n = 0; n < kTile; n += kStep) {
          float column[kStep];
          for (int64_t k = 0; k < kStep; ++k) column[k] = values[static_cast<size_t>(n + k)][c];
          out_[c] = step(&p[static_cast<size_t>(n)], column, smallest(), out_[c]);
        }
      }
    }
    sum_ = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }

  const SameBitsProblem &p_;
  const SameBitsSequence &s_;
  const int64_t row_, head_;
  const float scale_;
  std::vector<float> query_;
  float max_ = 0, sum_ = 0;  // of a segment
  std::vector<float> out_;
};

}  // namespace

ModelRow cuda_model_row(const SameBitsProblem &p, const SameBitsSequence &s, int64_t row, int64_t head) {
  return Model(p, s, row, head).compute();
}

}  // namespace parity
