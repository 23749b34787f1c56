// SPDX-License-Identifier: Apache-2.0
#include "reference/number_formats.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace reference {
namespace {

// A binary format of 16 bits or fewer: sign, exponent, fraction.
struct Format {
  int exponent_bits;
  int fraction_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << fraction_bits; }
};
constexpr Format kHalf{5, 10};
constexpr Format kBfloat{8, 7};
constexpr Format kE4m3{4, 3};  // but for its largest exponent: 7 more numbers and one NaN
constexpr double kLargestE4m3 = 448;

uint16_t encode(const Format &format, double value) {
  const uint32_t sign = std::signbit(value) ? 1u << (format.exponent_bits + format.fraction_bits) : 0u;
  if (std::isnan(value)) return static_cast<uint16_t>(sign | format.infinity() | (1u << (format.fraction_bits - 1)));
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | format.infinity());
  if (magnitude == 0) return static_cast<uint16_t>(sign);
  int exponent = 0;
  std::frexp(magnitude, &exponent);  // magnitude = m * 2^exponent with m in [0.5, 1)
  exponent -= 1;
  if (exponent < 1 - format.bias()) exponent = 1 - format.bias();  // subnormal: the exponent is fixed
  // In units of the last place; nearbyint rounds ties to even. A normal number includes its hidden one, which the addition
  // below turns into an exponent step, and so does a carry out of the fraction.
  const double units = std::nearbyint(std::ldexp(magnitude, format.fraction_bits - exponent));
  const double bits = std::ldexp(static_cast<double>(exponent + format.bias() - 1), format.fraction_bits) + units;
  if (bits >= format.infinity()) return static_cast<uint16_t>(sign | format.infinity());
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(bits));
}

double decode(const Format &format, uint16_t bits) {
  const bool negative = (bits >> (format.exponent_bits + format.fraction_bits)) & 1;
  const int exponent = (bits >> format.fraction_bits) & ((1 << format.exponent_bits) - 1);
  const int fraction = bits & ((1 << format.fraction_bits) - 1);
  double magnitude = 0;
  if (exponent == (1 << format.exponent_bits) - 1) {
    magnitude = fraction ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, 1 - format.bias() - format.fraction_bits);
  } else {
    magnitude = std::ldexp((1 << format.fraction_bits) + fraction, exponent - format.bias() - format.fraction_bits);
  }
  return negative ? -magnitude : magnitude;
}

template <typename T>
T read(const void *address) {
  T value;
  std::memcpy(&value, address, sizeof value);
  return value;
}

template <typename T>
void write(void *address, T value) {
  std::memcpy(address, &value, sizeof value);
}

}  // namespace

size_t element_bytes(fa_dtype dtype) { return static_cast<size_t>((dtype >> 8) & 0xFF) / 8; }

double unit_roundoff(fa_dtype dtype) {
  switch (dtype) {
    case FA_FLOAT16:
      return std::ldexp(1.0, -11);
    case FA_BFLOAT16:
      return std::ldexp(1.0, -8);
    case FA_FLOAT8_E4M3:
      return std::ldexp(1.0, -4);
    default:
      return std::ldexp(1.0, -24);
  }
}

double load(const void *address, fa_dtype dtype) {
  switch (dtype) {
    case FA_FLOAT32:
      return read<float>(address);
    case FA_FLOAT16:
      return decode(kHalf, read<uint16_t>(address));
    case FA_BFLOAT16:
      return decode(kBfloat, read<uint16_t>(address));
    case FA_INT32:
      return read<int32_t>(address);
    case FA_INT64:
      return static_cast<double>(read<int64_t>(address));
    case FA_UINT8:
    case FA_BOOL:
      return read<uint8_t>(address);
    case FA_INT8:
      return read<int8_t>(address);
    case FA_FLOAT8_E4M3: {
      const uint8_t bits = read<uint8_t>(address);
      if ((bits & 0x7F) == 0x7F) return std::numeric_limits<double>::quiet_NaN();
      if ((bits & 0x78) != 0x78) return decode(kE4m3, bits);
      return (bits & 0x80 ? -256.0 : 256.0) * (1 + (bits & 7) / 8.0);
    }
    default:
      std::abort();
  }
}

void store(void *address, fa_dtype dtype, double value) {
  switch (dtype) {
    case FA_FLOAT32:
      return write(address, static_cast<float>(value));
    case FA_FLOAT16:
      return write(address, encode(kHalf, value));
    case FA_BFLOAT16:
      return write(address, encode(kBfloat, value));
    case FA_INT32:
      return write(address, static_cast<int32_t>(value));
    case FA_INT64:
      return write(address, static_cast<int64_t>(value));
    case FA_UINT8:
    case FA_BOOL:
      return write(address, static_cast<uint8_t>(value));
    case FA_INT8:
      if (std::isnan(value)) value = 0;
      return write(address, static_cast<int8_t>(std::nearbyint(std::fmin(std::fmax(value, -127), 127))));
    case FA_FLOAT8_E4M3: {
      const uint8_t sign = std::signbit(value) ? 0x80 : 0;
      if (std::isnan(value)) return write(address, static_cast<uint8_t>(sign | 0x7F));
      const double magnitude = std::fmin(std::fabs(value), kLargestE4m3);
      if (magnitude < 248) return write(address, static_cast<uint8_t>(sign | encode(kE4m3, magnitude)));
      return write(address, static_cast<uint8_t>(sign | (0x78 + static_cast<int>(std::nearbyint(magnitude / 32)) - 8)));
    }
    default:
      std::abort();
  }
}

double round_to(fa_dtype dtype, double value) {
  unsigned char element[8];
  store(element, dtype, value);
  return load(element, dtype);
}

}  // namespace reference
