// SPDX-License-Identifier: Apache-2.0
// Which instruction sets this processor and its operating system have.
#include "cpu/launch.h"

#include <cstring>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#include <sys/prctl.h>
#endif
#endif

namespace fa::cpu {
namespace {

#if defined(__x86_64__)

// Processors on which vdpbf16ps does twice the work of an fp32 multiply-add, so that FA_CPU_ISA_AUTO chooses AVX512_BF16. On Intel's
// the instruction has half that rate or less. Others keep AVX-512 and run AVX512_BF16 where it is asked for.
struct ProcessorFamily {
  const char *vendor;  // as CPUID spells it
  unsigned family;
};
constexpr ProcessorFamily kFastBf16[] = {
    {"AuthenticAMD", 0x19},  // Zen 4; Zen 3, of the same family, has no AVX-512
    {"AuthenticAMD", 0x1A},  // Zen 5
};

// Clang 14 does not know "f16c" as a name for __builtin_cpu_supports.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

[[maybe_unused]] bool has_avx512_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return has_isa(FA_CPU_ISA_AVX512) && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & (1u << 5)) != 0;
}

bool multiplies_bf16_faster() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0) return false;
  char vendor[13] = {};
  std::memcpy(vendor, &ebx, 4);
  std::memcpy(vendor + 4, &edx, 4);
  std::memcpy(vendor + 8, &ecx, 4);
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
  const unsigned base = eax >> 8 & 0xF, family = base == 0xF ? base + (eax >> 20 & 0xFF) : base;
  for (const ProcessorFamily &fast : kFastBf16) {
    if (family == fast.family && std::strcmp(vendor, fast.vendor) == 0) return true;
  }
  return false;
}

#if defined(FA_TILE_MODEL) || defined(FA_HAVE_AMX)
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

// Whether this process can use a tile unit.
bool has_tile_unit() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!has_avx512_bf16() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kWanted = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  if ((edx & kWanted) != kWanted) return false;
  unsigned enabled = 0, high = 0;
  asm volatile("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;  // configuration and data
  return (enabled & kTileState) == kTileState && tiles_permitted();
}
#endif

#if defined(FA_TILE_MODEL)
// Tests alone: the model of the tile unit runs wherever the vectors that its kernels were compiled for do. With those of AVX-512, and a tile unit, the
// library that users have runs the same kernels.
bool has_amx() { return FA_TILE_MODEL_AVX512 == 0 || (has_avx512_bf16() && !has_tile_unit()); }
#elif defined(FA_HAVE_AMX)
bool has_amx() { return has_tile_unit(); }
#else
bool has_amx() { return false; }
#endif

#elif defined(FA_HAVE_NEON)

// Linux names what every processor of the machine has, also where they differ, and only what it supports: bits of AT_HWCAP and AT_HWCAP2, whose
// names older headers lack.
[[maybe_unused]] bool has_features(unsigned long wanted, unsigned long wanted2 = 0) {
#if defined(__linux__)
  constexpr unsigned long kArmv82 = 1ul << 7 | 1ul << 8 | 1ul << 12;  // CRC32, ATOMICS, ASIMDRDM: what compilers use of Armv8.2
  wanted |= kArmv82;
  return (getauxval(AT_HWCAP) & wanted) == wanted && (getauxval(AT_HWCAP2) & wanted2) == wanted2;
#else
  return (void)wanted, (void)wanted2, false;
#endif
}

#if defined(FA_HAVE_SVE256)
// Whether the vectors of the calling thread have exactly 256 bits. Other threads of the library inherit their length.
bool has_sve256() {
#if defined(__linux__)
  constexpr unsigned long kFp16 = 1ul << 9 | 1ul << 10, kSve = 1ul << 22;  // FPHP and ASIMDHP, without which there is no SVE
  constexpr int kGetLength = 51, kLengthMask = 0xFFFF;                     // PR_SVE_GET_VL, PR_SVE_VL_LEN_MASK
  if (!has_features(kFp16 | kSve)) return false;
  const int length = prctl(kGetLength);
  return length > 0 && (length & kLengthMask) == 256 / 8;
#else
  return false;
#endif
}
#endif

#endif

}  // namespace

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
#if defined(FA_HAVE_AVX512_BF16)
    case FA_CPU_ISA_AVX512_BF16:
      return has_avx512_bf16();
#endif
    case FA_CPU_ISA_AMX:
      return has_amx();
#elif defined(FA_HAVE_NEON)
    case FA_CPU_ISA_NEON:
      return true;  // compilers use it without asking
#if defined(FA_HAVE_NEON_FHM)
    case FA_CPU_ISA_NEON_FHM:
      return has_features(1ul << 9 | 1ul << 10 | 1ul << 23);  // FPHP, ASIMDHP, ASIMDFHM
#endif
#if defined(FA_HAVE_NEON_BF16)
    case FA_CPU_ISA_NEON_BF16:
      return has_features(0, 1ul << 14);  // BF16
#endif
#if defined(FA_HAVE_SVE256)
    case FA_CPU_ISA_SVE256:
      return has_sve256();
#endif
#endif
    default:
      return false;
  }
}

fa_cpu_isa best_isa() {
#if defined(__x86_64__)
  if (has_isa(FA_CPU_ISA_AMX)) return FA_CPU_ISA_AMX;
  if (has_isa(FA_CPU_ISA_AVX512_BF16) && multiplies_bf16_faster()) return FA_CPU_ISA_AVX512_BF16;
  return vector_isa(FA_CPU_ISA_AMX);
#else
  for (const fa_cpu_isa isa : {FA_CPU_ISA_NEON_BF16, FA_CPU_ISA_SVE256, FA_CPU_ISA_NEON_FHM}) {
    if (has_isa(isa)) return isa;
  }
  return vector_isa(FA_CPU_ISA_NEON_BF16);
#endif
}

bool multiplies_bf16(fa_cpu_isa isa) {
  return isa == FA_CPU_ISA_AMX || isa == FA_CPU_ISA_AVX512_BF16 || isa == FA_CPU_ISA_NEON_BF16;
}

bool multiplies_f16(fa_cpu_isa isa) {
  static const bool beside_bf16 = has_isa(FA_CPU_ISA_NEON_FHM) && vector_isa(FA_CPU_ISA_NEON_BF16) == FA_CPU_ISA_NEON;
  return isa == FA_CPU_ISA_NEON_FHM || (isa == FA_CPU_ISA_NEON_BF16 && beside_bf16);
}

fa_cpu_isa vector_isa(fa_cpu_isa isa) {
  if (!multiplies_bf16(isa) && isa != FA_CPU_ISA_NEON_FHM) return isa;
  // Every call asks for this. The processor is asked once: in a virtual machine CPUID traps and takes microseconds.
  static const fa_cpu_isa best = []() -> fa_cpu_isa {
    for (const fa_cpu_isa vectors : {FA_CPU_ISA_AVX512, FA_CPU_ISA_AVX2, FA_CPU_ISA_SVE256, FA_CPU_ISA_NEON}) {
      if (has_isa(vectors)) return vectors;
    }
    return FA_CPU_ISA_PORTABLE;
  }();
  return best;
}

}  // namespace fa::cpu
