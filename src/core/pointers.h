// SPDX-License-Identifier: Apache-2.0
// The addresses that a call reads and writes on its device, with their names for messages. Validation collects them. The CUDA backend
// checks that its device can access them.
#pragma once

#include <cstdint>
#include <vector>

namespace fa {

struct NamedPointer {
  const char *name;    // static string
  int32_t index;       // index in an array argument; -1 = not in an array
  const char *member;  // ".data", or "" if the argument itself is the pointer
  const void *data;    // never null
};

using Pointers = std::vector<NamedPointer>;

}  // namespace fa
