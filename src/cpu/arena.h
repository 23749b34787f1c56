// SPDX-License-Identifier: Apache-2.0
// How plans lay out arrays in a workspace. Kernels, which are compiled once per instruction set, do not include it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fa::cpu {

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Floats from row to row: whole vectors, and an odd number of cache lines, so that rows spread over all sets of the caches.
inline int64_t leading_dimension(int64_t dim) {
  const int64_t lines = round_up(dim, 16) / 16;
  return 16 * (lines % 2 == 0 ? lines + 1 : lines);
}

// Lays arrays out one after another, each on its own cache lines.
class Arena {
 public:
  size_t take(int64_t count, size_t element_bytes) {
    const size_t offset = bytes_;
    bytes_ += (static_cast<size_t>(count) * element_bytes + 63) / 64 * 64;
    return offset;
  }
  // 4 KB granularity keeps slots and workers from sharing pages, and a further odd line from sharing cache sets.
  size_t bytes() const { return (bytes_ + 4095) / 4096 * 4096 + 64 * 5; }

 private:
  size_t bytes_ = 0;
};

}  // namespace fa::cpu
