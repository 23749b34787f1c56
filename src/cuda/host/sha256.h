// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace fa::cuda {

// FIPS 180-4.
class Sha256 {
 public:
  void add(std::string_view bytes);
  // Of all bytes so far; the object is then used up.
  std::array<uint8_t, 32> digest();

 private:
  void add_block(const uint8_t *block);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> buffer_{};
  uint64_t bytes_ = 0;
};

std::string hex(const std::array<uint8_t, 32> &digest);

}  // namespace fa::cuda
