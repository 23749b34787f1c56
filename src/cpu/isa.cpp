// SPDX-License-Identifier: Apache-2.0
// Which instruction sets this processor and its operating system have.
#include "cpu/launch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fa::cpu {

#if defined(__x86_64__)
namespace {

// Clang 14 does not know "f16c" as a name for __builtin_cpu_supports.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace
#endif

bool has_isa(fa_cpu_isa isa) {
  switch (isa) {
    case FA_CPU_ISA_PORTABLE:
      return true;
#if defined(__x86_64__)
    // __builtin_cpu_supports also asks the operating system (XGETBV) whether it saves the registers.
    case FA_CPU_ISA_AVX2:
      __builtin_cpu_init();
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    case FA_CPU_ISA_AVX512:
      return has_isa(FA_CPU_ISA_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
    default:
      return false;
  }
}

fa_cpu_isa best_isa() {
  if (has_isa(FA_CPU_ISA_AVX512)) return FA_CPU_ISA_AVX512;
  if (has_isa(FA_CPU_ISA_AVX2)) return FA_CPU_ISA_AVX2;
  return FA_CPU_ISA_PORTABLE;
}

}  // namespace fa::cpu
