// SPDX-License-Identifier: Apache-2.0
// Finds the kernels of the tables. The references are weak: a build with FA_ONLY or without sm_90 leaves kernels out.
#include "cuda/kernels/bwd_sm90/backward.h"
#include "cuda/kernels/fwd_sm90/forward.h"

namespace fa::cuda::sm90 {

#define FA_DECLARE(name, ...)                               \
  __attribute__((weak)) const void *forward_##name##_f16(); \
  __attribute__((weak)) const void *forward_##name##_bf16();
FA_SM90_FORWARD_TABLE(FA_DECLARE)
#undef FA_DECLARE

#define FA_DECLARE(name, ...)                                    \
  __attribute__((weak)) BackwardKernels backward_##name##_f16(); \
  __attribute__((weak)) BackwardKernels backward_##name##_bf16();
FA_SM90_BACKWARD_TABLE(FA_DECLARE)
#undef FA_DECLARE

const void *forward_kernel(int shape, Dtype dtype) {
  using Getter = const void *(*)();
#define FA_ENTRY(name, ...) {forward_##name##_f16, forward_##name##_bf16},
  static constexpr Getter kGetters[][2] = {FA_SM90_FORWARD_TABLE(FA_ENTRY)};
#undef FA_ENTRY
  const Getter getter = kGetters[shape][dtype == Dtype::bf16];
  return getter != nullptr ? getter() : nullptr;
}

BackwardKernels backward_kernels(int shape, Dtype dtype) {
  using Getter = BackwardKernels (*)();
#define FA_ENTRY(name, ...) {backward_##name##_f16, backward_##name##_bf16},
  static constexpr Getter kGetters[][2] = {FA_SM90_BACKWARD_TABLE(FA_ENTRY)};
#undef FA_ENTRY
  const Getter getter = kGetters[shape][dtype == Dtype::bf16];
  return getter != nullptr ? getter() : BackwardKernels{};
}

}  // namespace fa::cuda::sm90
