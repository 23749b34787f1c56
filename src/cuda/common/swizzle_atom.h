// SPDX-License-Identifier: Apache-2.0
// Swizzle atoms of tiles of rows, for host and device.
#pragma once

#include <cstdint>

namespace fa::cuda {

constexpr int32_t kAtomBytes = 128;  // of a row of a swizzle atom

// Columns of an atom of 8-bit K or V above 256 columns (describe_wide_8bit() in host/tensor_maps.h).
constexpr int32_t kWideAtom = 64;

// Swizzle atoms of a tile with `columns` columns of `element_bytes` bytes.
constexpr int32_t swizzle_atoms(int32_t columns, int32_t element_bytes = 2) {
  return (columns * element_bytes + kAtomBytes - 1) / kAtomBytes;
}

}  // namespace fa::cuda
