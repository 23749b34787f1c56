// SPDX-License-Identifier: Apache-2.0
#include "cpu/host.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <vector>

namespace fa::cpu {
namespace {

// Processors of the affinity mask, whatever their number.
int32_t affinity_count() {
  for (int processors = 1024; processors <= 1 << 20; processors *= 4) {
    cpu_set_t *set = CPU_ALLOC(processors);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(processors);
    const bool fits = sched_getaffinity(0, bytes, set) == 0;
    const int count = fits ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (fits) return count;
  }
  return static_cast<int32_t>(sysconf(_SC_NPROCESSORS_ONLN));
}

// Processors the cgroup pays for, rounded up; 0 = no limit. Inside a container the own group is mounted at the root.
int32_t cgroup_limit() {
  double quota = 0, period = 0;
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  if (!(v2 >> quota >> period)) {
    std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    if (!(quota_file >> quota) || !(period_file >> period)) return 0;
  }
  if (quota <= 0 || period <= 0) return 0;
  return static_cast<int32_t>((quota + period - 1) / period);
}

}  // namespace

int32_t available_processors() {
  int32_t count = std::max(affinity_count(), 1);
  if (const int32_t limit = cgroup_limit(); limit > 0) count = std::min(count, limit);
  return std::max(count, 1);
}

uint64_t memory_bytes() {
  const long pages = sysconf(_SC_PHYS_PAGES), page_size = sysconf(_SC_PAGE_SIZE);
  return pages > 0 && page_size > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(page_size) : 0;
}

std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) {
      const size_t colon = line.find(": ");
      if (colon != std::string::npos) return line.substr(colon + 2);
    }
  }
  return "CPU";
}

int64_t process_id() { return getpid(); }

SignalsBlocked::SignalsBlocked() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before_);
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

}  // namespace fa::cpu
