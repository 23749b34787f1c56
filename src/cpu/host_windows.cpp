// SPDX-License-Identifier: Apache-2.0
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>

#include <algorithm>

#include "cpu/host.h"

namespace fa::cpu {

// Of the processor group of this process: its threads run in that group unless the host moves them.
int32_t available_processors() {
  DWORD_PTR process = 0, system = 0;
  int32_t count = 0;
  if (GetProcessAffinityMask(GetCurrentProcess(), &process, &system) != 0) count = __builtin_popcountll(process);
  if (count == 0) {  // the mask is zero for a process whose threads are in several groups
    count = static_cast<int32_t>(GetActiveProcessorCount(ALL_PROCESSOR_GROUPS));
  }
  return std::max(count, int32_t{1});
}

uint64_t memory_bytes() {
  MEMORYSTATUSEX status = {};
  status.dwLength = sizeof status;
  return GlobalMemoryStatusEx(&status) != 0 ? status.ullTotalPhys : 0;
}

std::string processor_name() {
  char name[128] = {};
  DWORD bytes = sizeof name - 1;
  const LSTATUS status = RegGetValueA(HKEY_LOCAL_MACHINE, "HARDWARE\\DESCRIPTION\\System\\CentralProcessor\\0",
                                      "ProcessorNameString", RRF_RT_REG_SZ, nullptr, name, &bytes);
  return status == ERROR_SUCCESS && name[0] != 0 ? name : "CPU";
}

int64_t process_id() { return static_cast<int64_t>(GetCurrentProcessId()); }

SignalsBlocked::SignalsBlocked() = default;
SignalsBlocked::~SignalsBlocked() = default;

}  // namespace fa::cpu
