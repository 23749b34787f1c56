// SPDX-License-Identifier: Apache-2.0
// What the operating system tells and does: its processors, memory and process, and the threads it starts. host_linux.cpp, host_windows.cpp.
#pragma once

#if !defined(_WIN32)
#include <signal.h>
#endif

#include <cstdint>
#include <string>

namespace fa::cpu {

// Processors this process may use: its affinity mask, limited by the cgroup's quota; at least 1.
int32_t available_processors();
// Physical memory in bytes, 0 if unknown.
uint64_t memory_bytes();
// The processor's own name, or "CPU".
std::string processor_name();
// The number of this process. It differs in a forked child.
int64_t process_id();

// While it lives, threads that this thread starts receive no signals. Nothing to do on Windows, which delivers none to threads.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked &) = delete;
  SignalsBlocked &operator=(const SignalsBlocked &) = delete;

 private:
#if !defined(_WIN32)
  sigset_t before_;
#endif
};

}  // namespace fa::cpu
