// SPDX-License-Identifier: Apache-2.0
// Stands in for <algorithm> where kernels are compiled at run time, which must not need a toolkit.
#pragma once
namespace std {
template <class T>
constexpr const T &min(const T &a, const T &b) {
  return b < a ? b : a;
}
template <class T>
constexpr const T &max(const T &a, const T &b) {
  return a < b ? b : a;
}
}  // namespace std
