// SPDX-License-Identifier: Apache-2.0
// Stands in for <type_traits> where kernels are compiled at run time, which must not need a toolkit.
#pragma once
namespace std {
template <bool kValue>
struct bool_constant {
  static constexpr bool value = kValue;
};
template <bool kFirst, class A, class B>
struct conditional {
  using type = A;
};
template <class A, class B>
struct conditional<false, A, B> {
  using type = B;
};
template <bool kFirst, class A, class B>
using conditional_t = typename conditional<kFirst, A, B>::type;
template <class A, class B>
inline constexpr bool is_same_v = false;
template <class A>
inline constexpr bool is_same_v<A, A> = true;
template <class A>
inline constexpr bool is_trivially_destructible_v = __is_trivially_destructible(A);
}  // namespace std
