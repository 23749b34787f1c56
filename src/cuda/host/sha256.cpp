// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/sha256.h"

#include <bit>

namespace fa::cuda {
namespace {

constexpr uint32_t kConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

}  // namespace

void Sha256::add_block(const uint8_t *block) {
  uint32_t w[64];
  for (int n = 0; n < 16; ++n)
    w[n] = uint32_t{block[4 * n]} << 24 | uint32_t{block[4 * n + 1]} << 16 | uint32_t{block[4 * n + 2]} << 8 | block[4 * n + 3];
  for (int n = 16; n < 64; ++n) {
    const uint32_t a = w[n - 15], b = w[n - 2];
    w[n] =
        w[n - 16] + w[n - 7] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int n = 0; n < 64; ++n) {
    const uint32_t x =
        h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kConstants[n] + w[n];
    const uint32_t y = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + x, d = c, c = b, b = a, a = x + y;
  }
  const uint32_t sums[8] = {a, b, c, d, e, f, g, h};
  for (size_t n = 0; n < 8; ++n) state_[n] += sums[n];
}

void Sha256::add(std::string_view bytes) {
  for (const char c : bytes) {
    buffer_[bytes_++ % 64] = static_cast<uint8_t>(c);
    if (bytes_ % 64 == 0) add_block(buffer_.data());
  }
}

std::array<uint8_t, 32> Sha256::digest() {
  const uint64_t bits = bytes_ * 8;
  add(std::string_view("\x80", 1));
  while (bytes_ % 64 != 56) add(std::string_view("\0", 1));
  for (int n = 7; n >= 0; --n) {
    const char byte = static_cast<char>(bits >> 8 * n);
    add({&byte, 1});
  }
  std::array<uint8_t, 32> digest;
  for (size_t n = 0; n < 32; ++n) digest[n] = static_cast<uint8_t>(state_[n / 4] >> (24 - 8 * (n % 4)));
  return digest;
}

std::string hex(const std::array<uint8_t, 32> &digest) {
  std::string text;
  for (const uint8_t byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace fa::cuda
