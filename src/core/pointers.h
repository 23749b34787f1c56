// SPDX-License-Identifier: Apache-2.0
// The addresses a call will read and write on its device, with the names messages use: validation collects them, a backend whose memory
// is not the host's checks them.
#pragma once

#include <cstdint>
#include <vector>

namespace fa {

struct NamedPointer {
  const char *name;    // static string
  int32_t index;       // in an array argument; -1 = no array
  const char *member;  // ".data", or "" where the argument is the pointer itself
  const void *data;    // never null
};

using Pointers = std::vector<NamedPointer>;

}  // namespace fa
