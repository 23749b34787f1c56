// SPDX-License-Identifier: Apache-2.0
// Stands in for <cmath> where kernels are compiled at run time, which must not need a toolkit.
#pragma once
namespace std {
template <class T>
inline T ceil(T x) {
  return ::ceil(x);
}
template <class T>
inline T log2(T x) {
  return ::log2(x);
}
}  // namespace std
