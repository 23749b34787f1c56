// SPDX-License-Identifier: Apache-2.0
// What fuzzing is made of: memory between unmapped pages, and a source of choices.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>

#include "flashattn/flashattn.h"

namespace fuzz {

// Memory between two unmapped regions.
class Arena {
 public:
  explicit Arena(size_t bytes) : bytes_(bytes) {
    memory_ =
        static_cast<char *>(mmap(nullptr, bytes + 2 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    EXPECT_NE(memory_, MAP_FAILED);
    protect(PROT_READ | PROT_WRITE);
  }
  ~Arena() { munmap(memory_, bytes_ + 2 * kGuard); }
  void protect(int protection) { mprotect(begin(), bytes_, protection); }
  char *begin() const { return memory_ + kGuard; }
  char *end() const { return begin() + bytes_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kGuard = size_t{1} << 24;
  size_t bytes_;
  char *memory_;
};

inline int dtype_bits(fa_dtype dtype) { return dtype >> 8 & 0xFF; }
inline int dtype_bytes(fa_dtype dtype) { return (dtype_bits(dtype) + 7) / 8; }

// Whether every element of `t` lies in `arena`.
inline bool inside(const fa_tensor &t, const Arena &arena) {
  if (t.data == nullptr || t.ndim < 1 || t.ndim > 4) return true;  // absent, or refused before anything is read
  __int128 low = reinterpret_cast<uintptr_t>(t.data), high = low + dtype_bytes(t.dtype);
  if (std::find(t.shape, t.shape + t.ndim, 0) != t.shape + t.ndim) return true;
  for (int d = 0; d < t.ndim; ++d) {
    const __int128 steps = (static_cast<__int128>(t.shape[d]) - 1) * t.stride[d];  // two numbers of 64 bits
    if (steps > INT64_MAX || steps < INT64_MIN) return false;
    const __int128 reach = steps * dtype_bits(t.dtype) / 8;
    (reach < 0 ? low : high) += reach;
  }
  return low >= static_cast<__int128>(reinterpret_cast<uintptr_t>(arena.begin())) &&
         high <= static_cast<__int128>(reinterpret_cast<uintptr_t>(arena.end()));
}

// Where choices come from: random numbers, or the bytes of an input and then zeros.
class Source {
 public:
  void seed(uint64_t value) { random_.seed(value); }
  void feed(const uint8_t *data, size_t size) { next_ = data, end_ = data + size; }

  uint64_t operator()() { return next_ == nullptr ? random_() : bytes(8); }
  // Small choices take one byte each, so that a changed byte changes one choice.
  uint64_t below(uint64_t n) { return (next_ == nullptr ? random_() : bytes(n <= 256 ? 1 : 4)) % n; }

 private:
  uint64_t bytes(int count) {
    uint64_t value = 0;
    for (; count > 0; --count) value = value << 8 | (next_ != end_ ? *next_++ : 0);
    return value;
  }

  std::mt19937_64 random_;
  const uint8_t *next_ = nullptr, *end_ = nullptr;
};

// Where a struct of `size` bytes ends where an unmapped page begins: whoever reads on dies. At most seven bytes lie between, for alignment.
class Edge {
 public:
  Edge() : arena_(size_t{1} << 17) {}

  template <typename Struct>
  Struct *put(const Struct &value, size_t size, unsigned char rest) {
    char *place = arena_.end() - (size + 7) / 8 * 8;
    std::memset(place, rest, static_cast<size_t>(arena_.end() - place));
    std::memcpy(place, &value, std::min(size, sizeof value));
    return reinterpret_cast<Struct *>(place);
  }

 private:
  Arena arena_;
};

}  // namespace fuzz
