// SPDX-License-Identifier: Apache-2.0
#include "probe.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <set>
#include <thread>
#include <vector>

namespace bench {
namespace {

bool processor_time = false;

// Enough independent chains to keep two multiply-add units of latency 4 busy, few enough for the registers.
template <class V, int kChains>
__attribute__((always_inline)) inline double fma_flops(long steps) {
  V acc[kChains];
  V x = V{} + 0.5f, y = V{} + 0.25f;
  for (V &a : acc) a = V{};
  // The values are hidden in every step, so that the chains are neither folded nor merged.
  for (long i = 0; i < steps; ++i) {
    asm volatile("" : "+x"(x), "+x"(y));
#pragma GCC unroll 24
    for (int c = 0; c < kChains; ++c) acc[c] = acc[c] + x * y;
#pragma GCC unroll 24
    for (int c = 0; c < kChains; ++c) asm volatile("" : "+x"(acc[c]));
  }
  return 2.0 * kChains * static_cast<double>(steps) * (sizeof(V) / sizeof(float));
}

typedef float V4 __attribute__((vector_size(16)));
double fma_portable(long steps) { return fma_flops<V4, 8>(steps); }

template <class V>
__attribute__((always_inline)) inline void read_vectors(const char *data, size_t bytes) {
  constexpr size_t kStep = 4 * sizeof(V);
  typedef V Unaligned __attribute__((aligned(1)));
  V sum[4] = {};
  for (size_t i = 0; i + kStep <= bytes; i += kStep) {
    const auto *p = reinterpret_cast<const Unaligned *>(data + i);
    __builtin_prefetch(data + i + 4096);
    for (int n = 0; n < 4; ++n) sum[n] += p[n];
  }
  for (V &s : sum) asm volatile("" : "+x"(s));
}
void read_portable(const char *data, size_t bytes) { read_vectors<V4>(data, bytes); }

#if defined(__x86_64__)
typedef float V8 __attribute__((vector_size(32)));
typedef float V16 __attribute__((vector_size(64)));
__attribute__((target("avx2,fma"), flatten)) double fma_avx2(long steps) { return fma_flops<V8, 12>(steps); }
__attribute__((target("avx2,fma"), flatten)) void read_avx2(const char *data, size_t bytes) { read_vectors<V8>(data, bytes); }
// GCC's vector types cannot be hidden in the upper 16 registers through "+x"; the loop is written out. `steps` times 24 independent sums.
#define FA_24_SUMS(instruction, steps)                                                                                      \
  long i = steps;                                                                                                           \
  asm volatile(                                                                                                             \
      "1:\n"                                                                                                                \
      ".irp n,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25\n" instruction                                \
      " %%zmm0, %%zmm1, %%zmm\\n\n"                                                                                         \
      ".endr\n"                                                                                                             \
      "dec %0\n"                                                                                                            \
      "jnz 1b\n"                                                                                                            \
      : "+r"(i)                                                                                                             \
      :                                                                                                                     \
      : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", \
        "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "cc")
__attribute__((target("avx512f"))) double fma_avx512(long steps) {
  FA_24_SUMS("vfmadd231ps", steps);
  return 2.0 * 24 * 16 * static_cast<double>(steps);
}
// Products of bf16 pairs, two flops each: 64 a vector.
__attribute__((target("avx512f"))) double bf16_avx512(long steps) {
  FA_24_SUMS("vdpbf16ps", steps);
  return 2.0 * 24 * 32 * static_cast<double>(steps);
}
#undef FA_24_SUMS
// Products of tiles of bf16, four independent sums.
double bf16_tiles(long steps) {
  alignas(64) uint8_t config[64] = {1};
  for (int t = 0; t < 8; ++t) {
    config[16 + 2 * t] = 64;
    config[48 + t] = 16;
  }
  long i = steps;
  asm volatile(
      "ldtilecfg %1\n"
      ".irp n,0,1,2,3,4,5,6,7\n"
      "tilezero %%tmm\\n\n"
      ".endr\n"
      "1:\n"
      "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n"
      "tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n"
      "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n"
      "tdpbf16ps %%tmm7, %%tmm5, %%tmm3\n"
      "dec %0\n"
      "jnz 1b\n"
      "tilerelease\n"
      : "+r"(i)
      : "m"(config)
      : "cc");
  return 4.0 * 2 * 16 * 16 * 32 * static_cast<double>(steps);
}
bool has_avx512_bf16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __builtin_cpu_supports("avx512f") && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & (1u << 5)) != 0;
}
// CPUID says that there are tiles of bf16, and Linux permits them to this process.
bool has_bf16_tiles() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kBits = 1u << 22 | 1u << 24;
  static const bool has = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kBits) == kBits &&
                          syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return has;
}
__attribute__((target("avx512f"), flatten)) void read_avx512(const char *data, size_t bytes) { read_vectors<V16>(data, bytes); }
#elif defined(__aarch64__)
// GCC's vector types can be hidden in the lower 16 registers alone; the loop is written out. `steps` times 24 independent sums.
#define FA_24_SUMS(instruction, type, steps)                                                                                \
  long i = steps;                                                                                                           \
  asm volatile(                                                                                                             \
      ".arch_extension bf16\n"                                                                                              \
      "1:\n"                                                                                                                \
      ".irp n,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25\n" instruction " v\\n\\().4s, v0." type       \
      ", v1." type                                                                                                          \
      "\n"                                                                                                                  \
      ".endr\n"                                                                                                             \
      "subs %0, %0, #1\n"                                                                                                   \
      "b.ne 1b\n"                                                                                                           \
      : "+r"(i)                                                                                                             \
      :                                                                                                                     \
      : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", \
        "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "cc")
double fma_neon(long steps) {
  FA_24_SUMS("fmla", "4s", steps);
  return 2.0 * 24 * 4 * static_cast<double>(steps);
}
// Products of 2 x 4 and 4 x 2 numbers.
double bf16_neon(long steps) {
  FA_24_SUMS("bfmmla", "8h", steps);
  return 2.0 * 24 * 16 * static_cast<double>(steps);
}
#undef FA_24_SUMS
bool has_neon_bf16() { return (getauxval(AT_HWCAP2) & 1ul << 14) != 0; }
#endif

struct Probe {
  const char *isa;
  double (*fma)(long);
  void (*read)(const char *, size_t);
};

const Probe &probe() {
  static const Probe chosen = [] {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return Probe{"avx512", fma_avx512, read_avx512};
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Probe{"avx2", fma_avx2, read_avx2};
#endif
#if defined(__aarch64__)
    return Probe{"neon", fma_neon, read_portable};
#endif
    return Probe{"portable", fma_portable, read_portable};
  }();
  return chosen;
}

}  // namespace

double seconds() {
  timespec now;
  clock_gettime(processor_time ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void use_processor_time() { processor_time = true; }

void on_threads(int threads, const std::function<void(int)> &task) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(task, t);
  task(0);
  for (std::thread &t : others) t.join();
}

std::string probe_isa() { return probe().isa; }

double peak_gflops(Unit unit, int threads) {
  double (*kernel)(long) = probe().fma;
  long steps = 75000;
#if defined(__x86_64__)
  if (unit == Unit::bf16_vectors) {
    if (!has_avx512_bf16()) return 0;
    kernel = bf16_avx512, steps = 40000;
  } else if (unit == Unit::bf16_tiles) {
    if (!has_bf16_tiles()) return 0;
    kernel = bf16_tiles, steps = 15000;
  }
#elif defined(__aarch64__)
  if (unit == Unit::bf16_vectors) {
    if (!has_neon_bf16()) return 0;
    kernel = bf16_neon, steps = 40000;
  } else if (unit == Unit::bf16_tiles) {
    return 0;
  }
#else
  if (unit != Unit::fp32) return 0;
#endif
  std::vector<double> rates(static_cast<size_t>(threads));
  on_threads(threads, [&](int t) {
    double best = 0;
    for (int repeat = 0; repeat < 4; ++repeat) {  // of about 0.3 ms each; the first wakes the clock
      const double start = seconds();
      const double flops = kernel(steps);
      best = std::max(best, flops / (seconds() - start));
    }
    rates[static_cast<size_t>(t)] = best;
  });
  double sum = 0;
  for (const double rate : rates) sum += rate;
  return sum * 1e-9;
}

const char *unit_name(Unit unit) {
  return unit == Unit::bf16_tiles ? "bf16 tiles" : unit == Unit::bf16_vectors ? "bf16 vectors" : "fp32 multiply-adds";
}

Unit unit_of(const std::string &kernel) {
  const auto ends = [&](const std::string &end) {
    return kernel.size() > end.size() && kernel.substr(kernel.size() - end.size()) == end;
  };
  if (kernel.find("_vector_") != std::string::npos) return Unit::fp32;  // a few queries: dot products in fp32
  return ends("_amx") ? Unit::bf16_tiles : ends("_avx512_bf16") || ends("_neon_bf16") ? Unit::bf16_vectors : Unit::fp32;
}

Topology topology() {
  Topology t;
  cpu_set_t mine;
  if (sched_getaffinity(0, sizeof mine, &mine) != 0) return t;
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &mine)) continue;
    ++t.processors;
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
    std::string siblings;
    if (!std::getline(file, siblings)) siblings = std::to_string(cpu);
    cores.insert(siblings);
  }
  t.cores = static_cast<int>(cores.size());
  return t;
}

double read_gbytes_per_second(const void *data, size_t bytes, int threads) {
  const size_t part = bytes / static_cast<size_t>(threads);
  const double start = seconds();
  on_threads(threads, [&](int t) { probe().read(static_cast<const char *>(data) + static_cast<size_t>(t) * part, part); });
  return static_cast<double>(bytes) / (seconds() - start) * 1e-9;
}

}  // namespace bench
