// SPDX-License-Identifier: Apache-2.0
// The tests' own conversions between double and the library's element types, so that a wrong conversion in the library cannot
// hide behind itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flashattn/flashattn.h"

namespace reference {

// Bytes of one element of any fa_dtype.
size_t element_bytes(fa_dtype dtype);

// Unit roundoff: the largest relative error of rounding to the nearest number of a floating-point dtype.
double unit_roundoff(fa_dtype dtype);

// Reads and writes one element; floating-point types and int8 round to nearest, ties to
// even; they overflow to infinity, fp8 and int8 to their largest number (448, 127).
double load(const void *address, fa_dtype dtype);
void store(void *address, fa_dtype dtype, double value);

// `value` rounded to a floating-point dtype.
double round_to(fa_dtype dtype, double value);

}  // namespace reference
