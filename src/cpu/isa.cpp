// SPDX-License-Identifier: Apache-2.0
// Which instruction sets this processor and its operating system have.
#include "cpu/launch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fa::cpu {

#if defined(__x86_64__)
namespace {

// Clang 14 does not know "f16c" as a name for __builtin_cpu_supports.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

[[maybe_unused]] bool has_avx512_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return has_isa(FA_CPU_ISA_AVX512) && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & (1u << 5)) != 0;
}

#if defined(FA_TILE_MODEL)
// Tests alone: the model of the tile unit runs wherever the vectors that its kernels were compiled for do.
bool has_amx() { return FA_TILE_MODEL_AVX512 == 0 || has_avx512_bf16(); }
#elif defined(FA_HAVE_AMX)
// Whether the operating system lets this process use the tile registers. Linux wants to be asked, once a process, because they make
// its signal frames 8 KiB larger; it refuses where an alternate signal stack is too small for that.
bool tiles_permitted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return false;
#endif
}

bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!has_avx512_bf16() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  unsigned enabled = 0, high = 0;
  asm volatile("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;  // configuration and data
  return (enabled & kTileState) == kTileState && tiles_permitted();
}
#else
bool has_amx() { return false; }
#endif

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
    case FA_CPU_ISA_AMX:
      return has_amx();
#endif
    default:
      return false;
  }
}

fa_cpu_isa best_isa() { return has_isa(FA_CPU_ISA_AMX) ? FA_CPU_ISA_AMX : vector_isa(FA_CPU_ISA_AMX); }

fa_cpu_isa vector_isa(fa_cpu_isa isa) {
  if (isa != FA_CPU_ISA_AMX) return isa;
  if (has_isa(FA_CPU_ISA_AVX512)) return FA_CPU_ISA_AVX512;
  if (has_isa(FA_CPU_ISA_AVX2)) return FA_CPU_ISA_AVX2;
  return FA_CPU_ISA_PORTABLE;
}

}  // namespace fa::cpu
