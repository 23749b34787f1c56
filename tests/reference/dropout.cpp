// SPDX-License-Identifier: Apache-2.0
#include "reference/dropout.h"

namespace reference {

std::array<uint32_t, 4> philox4x32_7(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 7; ++round) {
    if (round > 0) key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
    const uint64_t left = static_cast<uint64_t>(counter[0]) * 0xD2511F53u;
    const uint64_t right = static_cast<uint64_t>(counter[2]) * 0xCD9E8D57u;
    counter = {static_cast<uint32_t>(right / 0x100000000u) ^ counter[1] ^ key[0], static_cast<uint32_t>(right % 0x100000000u),
               static_cast<uint32_t>(left / 0x100000000u) ^ counter[3] ^ key[1], static_cast<uint32_t>(left % 0x100000000u)};
  }
  return counter;
}

uint32_t dropout_number(uint64_t seed, uint64_t offset, int64_t batch, int64_t heads_q, int64_t head, int64_t i, int64_t j) {
  const auto low = [](uint64_t x) { return static_cast<uint32_t>(x % 0x100000000u); };
  const auto high = [](uint64_t x) { return static_cast<uint32_t>(x / 0x100000000u); };
  // P is divided into blocks of 16 x 16. One call serves 16 elements of a block, four of them by each word.
  const auto block_row = static_cast<uint64_t>(i / 16);
  const auto block_column = static_cast<uint64_t>(j / 16);
  const std::array<uint32_t, 4> counter = {
      low(16 * block_column + 4 * (static_cast<uint64_t>(i % 8) / 2) + static_cast<uint64_t>(j % 8) / 2), low(block_row),
      low(static_cast<uint64_t>(batch * heads_q + head)), low(offset)};
  const std::array<uint32_t, 2> key = {low(seed), high(seed) ^ high(offset)};
  const bool lower_half = (i % 16) >= 8;
  const bool right_half = (j % 16) >= 8;
  const uint32_t word = philox4x32_7(counter, key)[(lower_half ? 2u : 0u) + (right_half ? 1u : 0u)];
  // Bytes of the word, the least significant one first. Each element has seven bits of one in the upper half of its number, and the one below it, cyclically, in the lower half.
  const auto byte = [&](int n) { return word / (1u << 8 * n) % 256; };
  const int upper = (j % 2 == 0 ? 1 : 3) - static_cast<int>(i % 2);
  return 256 * (byte(upper) % 128) + byte((upper + 3) % 4);
}

bool dropout_keeps(uint32_t number, uint32_t dropped) {
  // Large numbers keep an element, but where more than half is dropped small ones do.
  return dropped <= 16384 ? number >= dropped : number < 32768 - dropped;
}

}  // namespace reference
