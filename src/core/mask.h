// SPDX-License-Identifier: Apache-2.0
// The mask rule of causal masks and sliding windows: which keys a query row sees. Every backend derives tile ranges from it: tiles
// outside `visible_keys` are skipped, tiles inside `interior_keys` need no mask code.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fa {

// Half-open range of rows or columns; empty when end <= begin.
template <typename Int>
struct RangeOf {
  Int begin = 0;
  Int end = 0;
  FA_HD bool empty() const { return end <= begin; }
  FA_HD Int size() const { return end > begin ? end - begin : 0; }
};
using Range = RangeOf<int64_t>;

// Query i sees keys i + shift - left <= j <= i + shift + right, where shift = seqlen_k - seqlen_q, or 0 when aligned to the
// top left. Absent limits are kUnlimited, which is small enough that sums of a few of them do not overflow.
struct Band {
  static constexpr int64_t kUnlimited = int64_t{1} << 60;
  int64_t left = kUnlimited;
  int64_t right = kUnlimited;
  bool top_left = false;

  FA_HD bool unlimited() const { return left >= kUnlimited && right >= kUnlimited; }
  FA_HD int64_t shift(int64_t seqlen_q, int64_t seqlen_k) const { return top_left ? 0 : seqlen_k - seqlen_q; }
};

// The band of one pair of sequences, with its shift. Kernels that count rows and keys in 32 bits use Int = int32_t. Their sequences are
// shorter than kLongest: a limit that is clamped to kLongest excludes no key, and sums do not overflow.
template <typename Int>
struct Diagonal {
  static constexpr int64_t kLongest = sizeof(Int) == 8 ? Band::kUnlimited : (int64_t{1} << 30) - 1024;
  // The limits of a band, clamped on the host for kernels.
  struct Limits {
    Int left = static_cast<Int>(kLongest);
    Int right = static_cast<Int>(kLongest);
    bool top_left = false;

    Limits() = default;
    FA_HD explicit Limits(const Band &band)
        : left(static_cast<Int>(band.left < kLongest ? band.left : kLongest)),
          right(static_cast<Int>(band.right < kLongest ? band.right : kLongest)),
          top_left(band.top_left) {}
    FA_HD bool unlimited_left() const { return left >= kLongest; }
    FA_HD bool unlimited_right() const { return right >= kLongest; }
  };

  Int left, right, shift, seqlen_q, seqlen_k;

  FA_HD Diagonal(const Limits &limits, Int queries, Int keys)
      : left(limits.left),
        right(limits.right),
        shift(limits.top_left ? 0 : keys - queries),
        seqlen_q(queries),
        seqlen_k(keys) {}

  static FA_HD Int clamp(Int x, Int high) { return x < 0 ? 0 : (x > high ? high : x); }

  // Keys seen by at least one of the query rows. Every row's keys are one contiguous range and the ranges move right by one per
  // row, so the union is contiguous too.
  FA_HD RangeOf<Int> visible_keys(RangeOf<Int> rows) const {
    if (rows.empty()) return {0, 0};
    const Int begin = clamp(rows.begin + shift - left, seqlen_k), end = clamp(rows.end - 1 + shift + right + 1, seqlen_k);
    return {begin, end > begin ? end : begin};
  }

  // Keys seen by all of the query rows. They need no mask code.
  FA_HD RangeOf<Int> interior_keys(RangeOf<Int> rows) const {
    if (rows.empty()) return {0, 0};
    const Int begin = clamp(rows.end - 1 + shift - left, seqlen_k), end = clamp(rows.begin + shift + right + 1, seqlen_k);
    return {begin, end > begin ? end : begin};
  }

  // Query rows that see at least one of the keys.
  FA_HD RangeOf<Int> visible_queries(RangeOf<Int> keys) const {
    if (keys.empty()) return {0, 0};
    const Int begin = clamp(keys.begin - shift - right, seqlen_q), end = clamp(keys.end - 1 - shift + left + 1, seqlen_q);
    return {begin, end > begin ? end : begin};
  }
};

// Keys before `first_key` are masked, whatever the band says.
FA_HD Range from_key(Range keys, int64_t first_key) {
  const int64_t begin = keys.begin > first_key ? keys.begin : first_key;
  return {begin, keys.end > begin ? keys.end : begin};
}

FA_HD Range visible_keys(const Band &band, int64_t seqlen_q, int64_t seqlen_k, Range rows) {
  return Diagonal<int64_t>(Diagonal<int64_t>::Limits(band), seqlen_q, seqlen_k).visible_keys(rows);
}
FA_HD Range interior_keys(const Band &band, int64_t seqlen_q, int64_t seqlen_k, Range rows) {
  return Diagonal<int64_t>(Diagonal<int64_t>::Limits(band), seqlen_q, seqlen_k).interior_keys(rows);
}
FA_HD Range visible_queries(const Band &band, int64_t seqlen_q, int64_t seqlen_k, Range keys) {
  return Diagonal<int64_t>(Diagonal<int64_t>::Limits(band), seqlen_q, seqlen_k).visible_queries(keys);
}

// Keys seen by the single query row i.
FA_HD Range visible_keys(const Band &band, int64_t seqlen_q, int64_t seqlen_k, int64_t i) {
  return visible_keys(band, seqlen_q, seqlen_k, Range{i, i + 1});
}

}  // namespace fa
