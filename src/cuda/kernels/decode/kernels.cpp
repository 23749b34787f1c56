// SPDX-License-Identifier: Apache-2.0
// Returns the kernel instances of the tables. The references are weak, because a build with FA_ONLY leaves out most instances.
#include "cuda/kernels/decode/decode.h"

namespace fa::cuda::decode {

#define FA_DECLARE(name, ...)                          \
  __attribute__((weak)) Kernels decode_##name##_f16(); \
  __attribute__((weak)) Kernels decode_##name##_bf16();
FA_DECODE_TABLE(FA_DECLARE)
#undef FA_DECLARE

#define FA_DECLARE(name, ...) __attribute__((weak)) Kernels decode_8bit_##name(bool i8);
FA_DECODE_8BIT_TABLE(FA_DECLARE)
#undef FA_DECLARE

Kernels kernels(int shape, Dtype queries, Dtype keys) {
  if (shape >= kFirst8Bit) {
    using Getter = Kernels (*)(bool);
#define FA_ENTRY(name, ...) decode_8bit_##name,
    static constexpr Getter kGetters[] = {FA_DECODE_8BIT_TABLE(FA_ENTRY)};
#undef FA_ENTRY
    const Getter getter = kGetters[shape - kFirst8Bit];
    return getter != nullptr ? getter(keys == Dtype::i8) : Kernels{};
  }
  using Getter = Kernels (*)();
#define FA_ENTRY(name, ...) {decode_##name##_f16, decode_##name##_bf16},
  static constexpr Getter kGetters[][2] = {FA_DECODE_TABLE(FA_ENTRY)};
#undef FA_ENTRY
  const Getter getter = kGetters[shape][queries == Dtype::bf16];
  return getter != nullptr ? getter() : Kernels{};
}

}  // namespace fa::cuda::decode
