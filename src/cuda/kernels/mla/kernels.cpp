// SPDX-License-Identifier: Apache-2.0
// Finds the kernels of the table. The references are weak: a build with FA_ONLY or without sm_90 leaves them out.
#include "cuda/kernels/mla/mla.h"

namespace fa::cuda::mla {

#define FA_DECLARE(name, ...)                           \
  __attribute__((weak)) const void *mla_##name##_f16(); \
  __attribute__((weak)) const void *mla_##name##_bf16();
FA_MLA_TABLE(FA_DECLARE)
#undef FA_DECLARE

const void *kernel(int shape, Dtype dtype) {
  using Getter = const void *(*)();
#define FA_ENTRY(name, ...) {mla_##name##_f16, mla_##name##_bf16},
  static constexpr Getter kGetters[][2] = {FA_MLA_TABLE(FA_ENTRY)};
#undef FA_ENTRY
  const Getter getter = kGetters[shape][dtype == Dtype::bf16];
  return getter != nullptr ? getter() : nullptr;
}

}  // namespace fa::cuda::mla
