// SPDX-License-Identifier: Apache-2.0
// Compiled without fusing of products and sums: fma() below says where there is one.
#include "parity/same_bits_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "reference/number_formats.h"

namespace parity {
namespace {

using Products = Arithmetic::Products;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.69314718055994531f;
constexpr int64_t kBlock = 256, kSegment = 1024, kStep = 32;

uint32_t bits(float x) {
  uint32_t b;
  std::memcpy(&b, &x, sizeof b);
  return b;
}
float from_bits(uint32_t b) {
  float x;
  std::memcpy(&x, &b, sizeof x);
  return x;
}
// bf16 units take subnormal numbers for zero and give zero for them.
float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
// To bf16, to nearest even.
float rounded(float x) {
  x = flushed(x);
  return from_bits((bits(x) + 0x7FFF + (bits(x) >> 16 & 1)) & 0xFFFF0000u);
}

class Model {
 public:
  Model(const Arithmetic &a, const SameBitsProblem &p, const SameBitsSequence &s, int64_t row, int64_t head)
      : a_(a), p_(p), s_(s), row_(row), head_(head), key_head_(head / p.group()) {}

  ModelRow compute() {
    const int64_t end = p_.causal ? row_ + 1 : p_.rows;
    const int64_t begin = p_.window_left < 0 ? 0 : std::max<int64_t>(row_ - p_.window_left, 0);
    query_ = numbers(s_.q, p_.dtype, row_, p_.heads_q, head_, p_.head_dim, nullptr);
    float max = -kInfinity, sum = 0;  // of all segments so far
    std::vector<float> out(static_cast<size_t>(p_.head_dim_v), 0.0f);
    for (int64_t first = begin / kSegment * kSegment; first < end; first += kSegment) {
      segment(std::max(begin, first), std::min(end, first + kSegment));
      const float both = std::max(max, max_);
      const float before = max == -kInfinity ? 0 : exp2(max - both), added = max_ == -kInfinity ? 0 : exp2(max_ - both);
      sum = fma(sum_, added, sum * before);
      for (size_t c = 0; c < out.size(); ++c) out[c] = fma(out_[c], added, out[c] * before);
      max = both;
    }
    if (p_.sink) {
      const float sink = s_.sinks[static_cast<size_t>(head_)] * kLog2e, both = std::max(sink, max);
      const float before = max == -kInfinity ? 0 : exp2(max - both);
      sum = sum * before + exp2(sink - both);
      for (float &x : out) x *= before;
      max = both;
    }
    ModelRow result;
    const bool empty = sum == 0;
    const float inverse = 1.0f / sum;
    const size_t size = reference::element_bytes(p_.dtype);
    result.out.resize(out.size() * size);
    for (size_t c = 0; c < out.size(); ++c)
      reference::store(result.out.data() + c * size, p_.dtype, empty ? 0.0f : inverse * out[c] + 0.0f);
    result.lse = empty ? -kInfinity : max * kLn2 + std::log(sum);
    return result;
  }

 private:
  float fma(float x, float y, float z) const { return a_.fused ? std::fma(x, y, z) : x * y + z; }

  float exp2(float x) const {
    if (std::isnan(x)) return x;
    if (x >= 128) return kInfinity;
    if (a_.avx512 ? x < -300 : x < -126) return 0;
    const float whole = std::floor(x);
    float f = x - whole;
    if (a_.avx512 && double{f} + double{whole} > double{x}) f = std::nextafter(f, 0.0f);  // vreduceps rounds down
    float y = fma(0.00186713008191f, f, 0.00901703028444f);
    for (const float c : {0.055799913146f, 0.240164450136f, 0.693151311808f, 1.0f}) y = fma(y, f, c);
    return std::ldexp(y, static_cast<int>(whole));
  }

  float tanh(float x) const {
    const float magnitude = std::fabs(x);
    if (magnitude < 0.625f) {
      const float z = x * x;
      float y = fma(-5.70498872745e-3f, z, 2.06390887954e-2f);
      for (const float c : {-5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f}) y = fma(y, z, c);
      y = fma(y * z, x, x);
      return y;
    }
    return std::copysign(1.0f - 2.0f / (exp2(magnitude * (2 * kLog2e)) + 1.0f), x);
  }

  std::vector<float> numbers(const std::vector<unsigned char> &from, fa_dtype dtype, int64_t row, int64_t heads, int64_t head,
                             int64_t dim, const std::vector<float> *factors) const {
    const size_t size = reference::element_bytes(dtype);
    std::vector<float> x(static_cast<size_t>(dim));
    for (int64_t c = 0; c < dim; ++c) {
      x[c] =
          static_cast<float>(reference::load(from.data() + static_cast<size_t>((row * heads + head) * dim + c) * size, dtype));
      if (factors != nullptr && !factors->empty()) x[c] *= (*factors)[static_cast<size_t>(row * heads + head)];
    }
    return x;
  }

  // The first number of bf16 of an fp16 number, or of P: to nearest, ties away from zero.
  static float high_part(float x) { return from_bits((bits(x) + 0x8000) & 0xFFFF0000u); }
  static std::vector<float> part(const std::vector<float> &x, bool high) {
    std::vector<float> y;
    for (const float number : x) y.push_back(high ? high_part(number) : rounded(number - high_part(number)));
    return y;
  }

  // sum + x y on the bf16 unit, in steps of 32.
  float add_products(float sum, const std::vector<float> &x, const std::vector<float> &y) const {
    const auto at = [](const std::vector<float> &numbers, size_t n) { return n < numbers.size() ? flushed(numbers[n]) : 0.0f; };
    for (size_t first = 0; first < x.size(); first += kStep) {
      sum = flushed(sum);
      if (a_.products == Products::kPairs) {
        for (size_t n = first; n < first + kStep; n += 2) {
          sum = flushed(std::fma(at(x, n + 1), at(y, n + 1), sum));
          sum = flushed(std::fma(at(x, n), at(y, n), sum));
        }
        continue;
      }
      float even = 0, odd = 0;
      for (size_t n = first; n < first + kStep; n += 2) {
        even = flushed(std::fma(at(x, n), at(y, n), even));
        odd = flushed(std::fma(at(x, n + 1), at(y, n + 1), odd));
      }
      sum = flushed(sum + flushed(even + odd));
    }
    return sum;
  }
  // The same of numbers in parts. What is left out of an addition is the product of the low ones.
  float add_parts(float sum, const std::vector<float> &x, const std::vector<float> &y, bool all) const {
    const std::vector<float> x_high = part(x, true), x_low = part(x, false), y_high = part(y, true), y_low = part(y, false);
    if (all) sum = add_products(sum, x_low, y_low);
    sum = add_products(sum, x_low, y_high);
    sum = add_products(sum, x_high, y_low);
    return add_products(sum, x_high, y_high);
  }

  float sum_of_lanes(std::vector<float> lanes) const {
    for (size_t n = lanes.size() / 2; n > 0; n /= 2) {
      for (size_t l = 0; l < n; ++l) lanes[l] += lanes[l + n];
    }
    return lanes[0];
  }

  static bool any(const std::vector<float> &x, bool (*is)(float)) { return std::any_of(x.begin(), x.end(), is); }
  // Pairs whose product matters although the unit takes one side of it for zero.
  static bool needs_fp32(const std::vector<float> &x, const std::vector<float> &y) {
    const auto subnormal = [](float a) { return a != 0 && std::fabs(a) < 0x1p-126f; };
    const auto huge = [](float a) { return std::fabs(a) >= 0x1p64f; };
    return (any(x, subnormal) && any(y, huge)) || (any(x, huge) && any(y, subnormal));
  }

  float product(const std::vector<float> &key) const {
    float sum = 0;
    switch (a_.products) {
      case Products::kMultiplyAdds:
        for (size_t c = 0; c < key.size(); ++c) sum = fma(query_[c], key[c], sum);
        return sum;
      case Products::kTilesOfParts:
        return add_parts(0, query_, key, true);
      case Products::kPairs:
      case Products::kTiles:
        break;
    }
    if (!needs_fp32(query_, key)) return add_products(0, query_, key);
    std::vector<float> lanes(static_cast<size_t>(a_.lanes), 0.0f);
    for (size_t c = 0; c < key.size(); ++c) lanes[c % lanes.size()] = fma(query_[c], key[c], lanes[c % lanes.size()]);
    return sum_of_lanes(lanes);
  }

  bool general() const { return p_.softcap > 0 || p_.alibi; }
  // What exp2 takes is multiplier() x - max.
  float multiplier() const { return general() ? 1.0f : scale() * kLog2e; }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(p_.head_dim)); }
  float logit(float x, int64_t key) const {
    if (!general()) return x;
    x = p_.softcap > 0 ? tanh(x * (scale() / p_.softcap)) * (p_.softcap * kLog2e) : x * (scale() * kLog2e);
    if (p_.alibi) x = fma(-s_.slopes[static_cast<size_t>(head_)] * kLog2e, std::fabs(static_cast<float>(row_ - key)), x);
    return x;
  }

  // Leaves maximum, sum and output of the keys [begin, end) of a segment.
  void segment(int64_t begin, int64_t end) {
    max_ = -kInfinity;
    out_.assign(static_cast<size_t>(p_.head_dim_v), 0.0f);
    std::vector<float> sums(static_cast<size_t>(a_.lanes), 0.0f);
    for (int64_t first = begin / kBlock * kBlock; first < end; first += kBlock) block(first, begin, end, sums);
    sum_ = sum_of_lanes(sums);
  }

  void block(int64_t first, int64_t begin, int64_t end, std::vector<float> &sums) {
    std::vector<float> x(kBlock, -kInfinity);
    float top = -kInfinity;
    for (int64_t j = std::max(first, begin); j < std::min(first + kBlock, end); ++j) {
      const auto key = numbers(s_.k, p_.key_dtype, j, p_.heads_k, key_head_, p_.head_dim, &s_.k_descale);
      x[j - first] = logit(product(key), j);
      top = std::max(top, x[j - first]);
    }
    const float before = max_;
    max_ = std::max(before, top * multiplier());
    const float base = max_ == -kInfinity ? 0 : max_, correction = exp2(before - base);
    std::vector<float> p(kBlock);
    for (int64_t n = 0; n < kBlock; ++n) p[n] = x[n] == -kInfinity ? 0 : exp2(fma(x[n], multiplier(), -base));
    for (int l = 0; l < a_.lanes; ++l) {  // two chains for each lane
      float one = 0, other = 0;
      for (int64_t n = l; n < kBlock; n += 2 * a_.lanes) {
        one += p[n];
        other += p[n + a_.lanes];
      }
      sums[l] = fma(sums[l], correction, one + other);
    }

    std::vector<std::vector<float>> values;
    for (int64_t n = 0; n < kBlock; ++n) {
      const bool seen = first + n >= begin && first + n < end;
      values.push_back(seen ? numbers(s_.v, p_.key_dtype, first + n, p_.heads_k, key_head_, p_.head_dim_v, &s_.v_descale)
                            : std::vector<float>(static_cast<size_t>(p_.head_dim_v), 0.0f));
    }
    std::vector<float> column(kBlock), rounded_p;
    for (const float w : p) rounded_p.push_back(rounded(w));
    for (size_t c = 0; c < out_.size(); ++c) {
      for (int64_t n = 0; n < kBlock; ++n) column[n] = values[n][c];
      float &sum = out_[c];
      sum *= correction;
      if (a_.products == Products::kMultiplyAdds) {
        for (int64_t n = 0; n < kBlock; ++n) sum = fma(p[n], column[n], sum);
      } else {
        sum = a_.products == Products::kTilesOfParts ? add_parts(sum, p, column, false) : add_products(sum, rounded_p, column);
      }
    }
  }

  const Arithmetic &a_;
  const SameBitsProblem &p_;
  const SameBitsSequence &s_;
  const int64_t row_, head_, key_head_;
  std::vector<float> query_;
  float max_ = -kInfinity, sum_ = 0;
  std::vector<float> out_;
};

}  // namespace

ModelRow model_row(const Arithmetic &a, const SameBitsProblem &p, const SameBitsSequence &s, int64_t row, int64_t head) {
  return Model(a, p, s, row, head).compute();
}

}  // namespace parity
