// SPDX-License-Identifier: Apache-2.0
// Facts about the host processor.
#pragma once

#include <cstdint>
#include <string>

namespace fa::cpu {

// Processors this process may use: its affinity mask, limited by the cgroup's quota; at least 1.
int32_t available_processors();
// Physical memory in bytes, 0 if unknown.
uint64_t memory_bytes();
// The processor's own name, or "CPU".
std::string processor_name();

}  // namespace fa::cpu
