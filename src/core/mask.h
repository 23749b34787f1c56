// SPDX-License-Identifier: Apache-2.0
// The one mask rule: which keys a query row sees through causal masks and sliding windows. Every backend turns it into
// tile ranges: tiles outside `visible` are skipped, tiles inside `interior` run no mask code.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace fa {

// Half-open range of rows or columns; empty when end <= begin.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  FA_HD bool empty() const { return end <= begin; }
  FA_HD int64_t size() const { return end > begin ? end - begin : 0; }
};

// Query i sees keys i + shift - left <= j <= i + shift + right, where shift = seqlen_k - seqlen_q, or 0 when aligned to the
// top left. Absent limits hold kUnlimited, small enough that sums of a few of them cannot overflow.
struct Band {
  static constexpr int64_t kUnlimited = int64_t{1} << 60;
  int64_t left = kUnlimited;
  int64_t right = kUnlimited;
  bool top_left = false;

  FA_HD bool unlimited() const { return left >= kUnlimited && right >= kUnlimited; }
  FA_HD int64_t shift(int64_t seqlen_q, int64_t seqlen_k) const { return top_left ? 0 : seqlen_k - seqlen_q; }
};

namespace detail {
FA_HD int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : (x > high ? high : x); }
}  // namespace detail

// Keys seen by at least one of the query rows [rows.begin, rows.end). Every row's keys are one contiguous range and the ranges
// move right by one per row, so the union is contiguous too.
FA_HD Range visible_keys(const Band &band, int64_t seqlen_q, int64_t seqlen_k, Range rows) {
  if (rows.empty()) return {0, 0};
  const int64_t shift = band.shift(seqlen_q, seqlen_k);
  const int64_t begin = detail::clamp(rows.begin + shift - band.left, 0, seqlen_k);
  const int64_t end = detail::clamp(rows.end - 1 + shift + band.right + 1, 0, seqlen_k);
  return {begin, end > begin ? end : begin};
}

// Keys seen by every one of the query rows: no mask code is needed for them.
FA_HD Range interior_keys(const Band &band, int64_t seqlen_q, int64_t seqlen_k, Range rows) {
  if (rows.empty()) return {0, 0};
  const int64_t shift = band.shift(seqlen_q, seqlen_k);
  const int64_t begin = detail::clamp(rows.end - 1 + shift - band.left, 0, seqlen_k);
  const int64_t end = detail::clamp(rows.begin + shift + band.right + 1, 0, seqlen_k);
  return {begin, end > begin ? end : begin};
}

// Query rows that see at least one of the keys [keys.begin, keys.end).
FA_HD Range visible_queries(const Band &band, int64_t seqlen_q, int64_t seqlen_k, Range keys) {
  if (keys.empty()) return {0, 0};
  const int64_t shift = band.shift(seqlen_q, seqlen_k);
  const int64_t begin = detail::clamp(keys.begin - shift - band.right, 0, seqlen_q);
  const int64_t end = detail::clamp(keys.end - 1 - shift + band.left + 1, 0, seqlen_q);
  return {begin, end > begin ? end : begin};
}

// Keys seen by the single query row i.
FA_HD Range visible_keys(const Band &band, int64_t seqlen_q, int64_t seqlen_k, int64_t i) {
  return visible_keys(band, seqlen_q, seqlen_k, Range{i, i + 1});
}

}  // namespace fa
