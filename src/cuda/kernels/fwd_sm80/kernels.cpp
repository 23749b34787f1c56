// SPDX-License-Identifier: Apache-2.0
// Finds the instances of the tables. The references are weak: a build with FA_ONLY leaves most instances out.
#include "cuda/kernels/bwd_sm80/backward.h"
#include "cuda/kernels/fwd_sm80/forward.h"

namespace fa::cuda::sm80 {

#define FA_DECLARE(name, ...)                               \
  __attribute__((weak)) const void *forward_##name##_f16(); \
  __attribute__((weak)) const void *forward_##name##_bf16();
FA_SM80_FORWARD_TABLE(FA_DECLARE)
#undef FA_DECLARE

#define FA_DECLARE(name, ...)                                                           \
  __attribute__((weak)) BackwardLaunches backward_##name##_f16(const BackwardParams &); \
  __attribute__((weak)) BackwardLaunches backward_##name##_bf16(const BackwardParams &);
FA_SM80_BACKWARD_TABLE(FA_DECLARE)
#undef FA_DECLARE

const void *forward_kernel(int shape, Dtype dtype) {
  using Getter = const void *(*)();
#define FA_ENTRY(name, ...) {forward_##name##_f16, forward_##name##_bf16},
  static constexpr Getter kGetters[][2] = {FA_SM80_FORWARD_TABLE(FA_ENTRY)};
#undef FA_ENTRY
  const Getter getter = kGetters[shape][dtype == Dtype::bf16];
  return getter != nullptr ? getter() : nullptr;
}

BackwardLaunches backward_launches(int shape, Dtype dtype, const BackwardParams &params) {
  using Getter = BackwardLaunches (*)(const BackwardParams &);
#define FA_ENTRY(name, ...) {backward_##name##_f16, backward_##name##_bf16},
  static constexpr Getter kGetters[][2] = {FA_SM80_BACKWARD_TABLE(FA_ENTRY)};
#undef FA_ENTRY
  const Getter getter = kGetters[shape][dtype == Dtype::bf16];
  return getter != nullptr ? getter(params) : BackwardLaunches{};
}

}  // namespace fa::cuda::sm80
