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
constexpr int64_t kSegment = 1024, kLatentSegment = 2048, kStep = 16;

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

// A row and what both arithmetics have in common.
class Row {
 public:
  Row(const SameBitsProblem &p, const SameBitsSequence &s, int64_t row, int64_t head)
      : p_(p), s_(s), row_(row), head_(head), scale_(1.0f / std::sqrt(static_cast<float>(p.head_dim))) {
    query_ = numbers(s_.q, p_.dtype, row_, p_.heads_q, head_, p_.head_dim);
    if (bytes()) {
      if (p_.dtype == FA_BFLOAT16) row_scale_ = to_fp16(query_);
      row_scale_ *= descale(s_.k_descale);
    }
  }

 protected:
  // Whether scores get their factor as that of the exponent.
  bool plain() const { return p_.softcap <= 0 && !p_.alibi && !p_.latent; }
  // The keys that the row sees.
  int64_t begin() const { return p_.window_left < 0 ? 0 : std::max<int64_t>(row_ - p_.window_left, 0); }
  int64_t end() const { return p_.causal ? row_ + 1 : p_.rows; }
  // Keys and values of 8 bits are fp16 for the tensor core, and so are queries and P beside them.
  bool bytes() const { return is_8_bit(p_.key_dtype); }
  fa_dtype operands() const { return bytes() ? FA_FLOAT16 : p_.dtype; }
  int smallest() const { return operands() == FA_FLOAT16 ? -14 : -126; }
  float descale(const std::vector<float> &of) const { return of.empty() ? 1.0f : of[static_cast<size_t>(head_ / p_.group())]; }
  // What turns scores into exponents of two.
  float exponent_scale() const { return plain() ? scale_ * kLog2e * row_scale_ : scale_ * kLog2e; }
  // A row of bf16 as fp16, times a power of two that takes its largest exponent to 2^14 (exponents below 2^-112 count as that). Returns what
  // undoes it.
  static float to_fp16(std::vector<float> &row) {
    int largest = -112;
    for (const float x : row)
      if (x != 0) largest = std::max(largest, std::ilogb(x));
    for (float &x : row) x = static_cast<float>(reference::round_to(FA_FLOAT16, double{std::ldexp(x, 14 - largest)}));
    return std::ldexp(1.0f, largest - 14);
  }
  static float exp2(float x) { return device_math(DeviceFunction::kExp2, {x})[0]; }
  static std::vector<float> numbers(const std::vector<unsigned char> &from, fa_dtype dtype, int64_t row, int64_t heads,
                                    int64_t head, int64_t dim) {
    const size_t size = reference::element_bytes(dtype);
    std::vector<float> x(static_cast<size_t>((dim + kStep - 1) / kStep * kStep), 0.0f);
    for (int64_t c = 0; c < dim; ++c)
      x[c] =
          static_cast<float>(reference::load(from.data() + static_cast<size_t>((row * heads + head) * dim + c) * size, dtype));
    return x;
  }
  float rounded(float x) const { return static_cast<float>(reference::round_to(operands(), double{x})); }

  // Scores of the keys [begin, end), in the unit of q k^T.
  std::vector<float> scores(int64_t begin, int64_t end) const {
    std::vector<float> x;
    for (int64_t j = begin; j < end; ++j) {
      const std::vector<float> key = numbers(s_.k, p_.key_dtype, j, p_.heads_k, head_ / p_.group(), p_.head_dim);
      float sum = 0;
      for (size_t c = 0; c < key.size(); c += kStep) sum = step(&query_[c], &key[c], smallest(), sum);
      x.push_back(plain() ? sum : sum * row_scale_);
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

  // P of a tile of `keys` keys from `tile` on, of which the row sees those from `from` on that have a score; 0 of the others.
  static std::vector<float> exponentials(const std::vector<float> &scores, float scale, float max, int64_t tile, int64_t keys,
                                         int64_t from) {
    std::vector<float> e, p(static_cast<size_t>(keys), 0.0f);
    for (const float score : scores) e.push_back(std::fma(score, scale, -max));
    e = device_math(DeviceFunction::kExp2, e);
    std::copy(e.begin(), e.end(), p.begin() + (from - tile));
    return p;
  }
  // Values of the keys [tile, tile + keys), 0 of those that the row does not see.
  std::vector<std::vector<float>> values(int64_t tile, int64_t keys, int64_t from, int64_t to) const {
    std::vector<std::vector<float>> v;
    for (int64_t j = tile; j < tile + keys; ++j)
      v.push_back(j >= from && j < to ? numbers(s_.v, p_.key_dtype, j, p_.heads_k, head_ / p_.group(), p_.head_dim_v)
                                      : std::vector<float>(static_cast<size_t>(p_.head_dim_v)));
    return v;
  }
  // Column c of out plus that of P V of the 16 keys from number `n` of a tile on.
  float add_keys(const std::vector<float> &p, const std::vector<std::vector<float>> &v, int64_t n, size_t c, float out) const {
    float column[kStep];
    for (int64_t k = 0; k < kStep; ++k) column[k] = v[static_cast<size_t>(n + k)][c];
    return step(&p[static_cast<size_t>(n)], column, smallest(), out);
  }

  // The result of the row, of its maximum, its sum and out.
  ModelRow finish(float max, float sum, const std::vector<float> &out) const {
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
    if (p_.latent) factor *= descale(s_.v_descale);
    for (size_t c = 0; c < out.size(); ++c)
      reference::store(result.out.data() + c * size, p_.dtype, double{std::fma(out[c], factor, 0.0f)});
    return result;
  }

  const SameBitsProblem &p_;
  const SameBitsSequence &s_;
  const int64_t row_, head_;
  const float scale_;
  float row_scale_ = 1;  // of scores: the descale of K, and what undoes the power of two of the query
  std::vector<float> query_;
};

// Arithmetics 2 and, of latent caches, 4.
class SegmentsRow : private Row {
 public:
  using Row::Row;

  ModelRow compute() {
    float max = kNoMax, sum = 0;
    std::vector<float> out;
    const int64_t keys = p_.latent ? kLatentSegment : kSegment;
    for (int64_t first = begin() / keys * keys; first < end(); first += keys) {
      segment(first, std::max(begin(), first), std::min(end(), first + keys));
      if (out.empty()) {
        max = max_, sum = sum_, out = out_;
        continue;
      }
      const float both = std::max(max, max_), before = exp2(max - both), added = exp2(max_ - both);
      sum = std::fma(sum_, added, sum * before);
      for (size_t c = 0; c < out.size(); ++c) out[c] = std::fma(out_[c], added, out[c] * before);
      max = both;
    }
    return finish(max, sum, out);
  }

 private:
  // m, l and out of the keys [begin, end) of the segment that begins at `first`.
  void segment(int64_t first, int64_t begin, int64_t end) {
    if (p_.latent) return latent_segment(first, begin, end);
    const int64_t keys = std::max(p_.head_dim, p_.head_dim_v) > 128 ? 64 : 128;  // of a tile
    max_ = kNoMax;
    float lanes[4] = {};
    out_.assign(static_cast<size_t>(p_.head_dim_v), 0.0f);
    const float scale = exponent_scale();
    const auto rescale = [&](float factor) {
      for (float &lane : lanes) lane *= factor;
      for (float &o : out_) o *= factor;
    };
    for (int64_t tile = first; tile < end; tile += keys) {
      const int64_t from = std::max(begin, tile), to = std::min(end, tile + keys);
      if (from >= to) continue;
      const std::vector<float> x = scores(from, to);
      const auto raise = [&] {
        const float raised = std::max(max_, *std::max_element(x.begin(), x.end()) * scale), factor = exp2(max_ - raised);
        max_ = raised;
        rescale(factor);
      };
      const auto lane_sum = [&](const std::vector<float> &p, int64_t lane) {
        float chains[2] = {};
        for (int64_t n = 0; n < keys / 8; ++n) {
          chains[n % 2] += p[8 * n + 2 * lane];
          chains[n % 2] += p[8 * n + 2 * lane + 1];
        }
        return chains[0] + chains[1];
      };
      if (max_ == kNoMax || !plain()) raise();
      std::vector<float> p = exponentials(x, scale, max_, tile, keys, from);
      if (plain() && *std::max_element(p.begin(), p.end()) >= kLargestP) {
        raise();
        p = exponentials(x, scale, max_, tile, keys, from);
      }
      float sums[4], most = 0;
      for (int64_t lane = 0; lane < 4; ++lane) most = std::max(most, sums[lane] = lane_sum(p, lane));
      if (plain() && most > kLargestSum) {
        const int exponent = std::min(std::ilogb(most), 126);
        const float factor = std::ldexp(1.0f, -exponent);
        max_ += static_cast<float>(exponent);
        rescale(factor);
        for (float &sum : sums) sum *= factor;
        for (float &one : p) one *= factor;
      }
      for (int64_t lane = 0; lane < 4; ++lane) lanes[lane] += sums[lane];
      for (float &one : p) one = rounded(one);
      const std::vector<std::vector<float>> v = values(tile, keys, from, to);
      for (size_t c = 0; c < out_.size(); ++c)
        for (int64_t n = 0; n < keys; n += kStep) out_[c] = add_keys(p, v, n, c, out_[c]);
    }
    sum_ = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    for (float &o : out_) o *= descale(s_.v_descale);
  }

  // The same of a latent cache.
  void latent_segment(int64_t first, int64_t begin, int64_t end) {
    constexpr int64_t kKeys = 64;
    constexpr float kThreshold = 8;
    max_ = kNoMax;
    float lanes[4] = {};
    out_.assign(static_cast<size_t>(p_.head_dim_v), 0.0f);
    const float scale = exponent_scale();
    for (int64_t tile = first; tile < end; tile += kKeys) {
      const int64_t from = std::max(begin, tile), to = std::min(end, tile + kKeys);
      if (from >= to) continue;
      const std::vector<float> x = scores(from, to);
      const float largest = *std::max_element(x.begin(), x.end()) * scale;
      if (largest - kThreshold > max_) {
        const float factor = exp2(max_ - largest);
        max_ = largest;
        for (float &lane : lanes) lane *= factor;
        for (float &o : out_) o *= factor;
      }
      std::vector<float> p = exponentials(x, scale, max_, tile, kKeys, from);
      for (int64_t lane = 0; lane < 4; ++lane) {
        float sum = 0;
        for (int64_t n = 2 * lane; n < kKeys; n += 8) {
          sum += p[static_cast<size_t>(n)];
          sum += p[static_cast<size_t>(n + 1)];
        }
        lanes[lane] += sum;
      }
      for (float &one : p) one = rounded(one);
      const std::vector<std::vector<float>> v = values(tile, kKeys, from, to);
      for (size_t c = 0; c < out_.size(); ++c)
        for (int64_t n = 0; n < kKeys; n += kStep) out_[c] = add_keys(p, v, n, c, out_[c]);
    }
    sum_ = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  }

  float max_ = 0, sum_ = 0;  // of a segment
  std::vector<float> out_;
};

// Arithmetic 3.
class NoSplitsRow : private Row {
 public:
  using Row::Row;

  // `small`: with the shared memory of small devices.
  ModelRow compute(bool small) {
    const bool wide = std::max(p_.head_dim, p_.head_dim_v) > 128;
    const int64_t keys = wide && small ? 32 : 64,  // of a tile
        parts = wide && !small ? 2 : 1,            // two warps have half of a tile's keys each
        part_keys = keys / parts;
    const float scale = exponent_scale();
    float max = kNoMax, lanes[2][4] = {};
    std::vector<float> out(static_cast<size_t>(p_.head_dim_v), 0.0f);
    for (int64_t tile = (end() - 1) / keys * keys; tile + keys > begin(); tile -= keys) {
      const int64_t from = std::max(begin(), tile), to = std::min(end(), tile + keys);
      if (from >= to) continue;
      const std::vector<float> x = scores(from, to);
      const float raised = std::max(max, *std::max_element(x.begin(), x.end()) * scale), factor = exp2(max - raised);
      max = raised;
      for (auto &part : lanes)
        for (float &lane : part) lane *= factor;
      for (float &o : out) o *= factor;
      std::vector<float> p = exponentials(x, scale, max, tile, keys, from);
      for (int64_t n = 0; n < keys; ++n) lanes[n / part_keys][n % 8 / 2] += p[static_cast<size_t>(n)];
      for (float &one : p) one = rounded(one);
      const std::vector<std::vector<float>> v = values(tile, keys, from, to);
      for (size_t c = 0; c < out.size(); ++c) {
        // The warp that has the column begins with the keys that it has.
        const int64_t first = static_cast<int64_t>(c) / 32 % parts * part_keys;
        for (int64_t n = 0; n < keys; n += kStep) out[c] = add_keys(p, v, (first + n) % keys, c, out[c]);
      }
    }
    float sum = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const float *l = lanes[part], of_part = (l[0] + l[1]) + (l[2] + l[3]);
      sum = part == 0 ? of_part : sum + of_part;
    }
    return finish(max, sum, out);
  }
};

}  // namespace

ModelRow cuda_segments_row(const SameBitsProblem &p, const SameBitsSequence &s, int64_t row, int64_t head) {
  return SegmentsRow(p, s, row, head).compute();
}
ModelRow cuda_no_splits_row(const SameBitsProblem &p, const SameBitsSequence &s, int64_t row, int64_t head) {
  return NoSplitsRow(p, s, row, head).compute(/*small=*/false);
}
ModelRow cuda_small_no_splits_row(const SameBitsProblem &p, const SameBitsSequence &s, int64_t row, int64_t head) {
  return NoSplitsRow(p, s, row, head).compute(/*small=*/true);
}

}  // namespace parity
