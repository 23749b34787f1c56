// SPDX-License-Identifier: Apache-2.0
// What this machine can do right now: the rates that benchmark rows are fractions of. Clocks and neighbours change by the second, so
// probes run just before and just after every measurement.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

namespace bench {

// Seconds on the clock of the benchmark: of the wall, or, after use_processor_time(), of the processor time of this process, which
// other processes on the same machine disturb less but which says nothing about more than one thread.
double seconds();
void use_processor_time();

// Runs task(t) for 0 <= t < threads, each on a thread of its own (the caller's is thread 0).
void on_threads(int threads, const std::function<void(int)> &task);

// Widest vectors of this processor that the probe uses: "avx512", "avx2", "neon" or "portable".
std::string probe_isa();

// Products from registers, all threads together, in GFLOP/s: fp32 multiply-adds, or products of bf16 with fp32 sums by vectors
// (vdpbf16ps, bfmmla) or by the tile unit (AMX). 0 where the processor has none. Takes about a millisecond.
enum class Unit { fp32, bf16_vectors, bf16_tiles };
double peak_gflops(Unit unit, int threads);
const char *unit_name(Unit unit);
// The unit that a CPU kernel of this name multiplies with.
Unit unit_of(const std::string &kernel);

// Processors that this process may run on, and the cores whose hyperthreads they are.
struct Topology {
  int processors = 0;
  int cores = 0;
};
Topology topology();

// Reading `bytes` at `data` once, split over the threads, in GB/s.
double read_gbytes_per_second(const void *data, size_t bytes, int threads);

}  // namespace bench
