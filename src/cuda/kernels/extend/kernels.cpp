// SPDX-License-Identifier: Apache-2.0
// Returns the kernel instances of the tables. The references are weak, because a build with FA_ONLY leaves out most instances.
#include "cuda/kernels/extend/extend.h"

namespace fa::cuda::extend {

#define FA_DECLARE(name, ...)                                  \
  __attribute__((weak)) decode::Kernels extend_##name##_f16(); \
  __attribute__((weak)) decode::Kernels extend_##name##_bf16();
FA_EXTEND_TABLE(FA_DECLARE)
#undef FA_DECLARE

#define FA_DECLARE(name, ...) __attribute__((weak)) decode::Kernels extend_8bit_##name(bool i8);
FA_EXTEND_8BIT_TABLE(FA_DECLARE)
#undef FA_DECLARE

decode::Kernels kernels(int shape, Dtype queries, Dtype keys) {
  if (shape >= kFirst8Bit) {
    using Getter = decode::Kernels (*)(bool);
#define FA_ENTRY(name, ...) extend_8bit_##name,
    static constexpr Getter kGetters[] = {FA_EXTEND_8BIT_TABLE(FA_ENTRY)};
#undef FA_ENTRY
    const Getter getter = kGetters[shape - kFirst8Bit];
    return getter != nullptr ? getter(keys == Dtype::i8) : decode::Kernels{};
  }
  using Getter = decode::Kernels (*)();
#define FA_ENTRY(name, ...) {extend_##name##_f16, extend_##name##_bf16},
  static constexpr Getter kGetters[][2] = {FA_EXTEND_TABLE(FA_ENTRY)};
#undef FA_ENTRY
  const Getter getter = kGetters[shape][queries == Dtype::bf16];
  return getter != nullptr ? getter() : decode::Kernels{};
}

}  // namespace fa::cuda::extend
