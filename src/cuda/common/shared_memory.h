// SPDX-License-Identifier: Apache-2.0
// How much shared memory devices have for CTAs, for tables of kernels and for plans.
#pragma once

#include <cstdint>

namespace fa::cuda {

// Shared memory that one CTA may use on devices of this compute capability, of unknown ones that of Hopper.
constexpr int32_t shared_bytes_of(int32_t compute_capability) {
  const int32_t major = compute_capability / 10;
  if (compute_capability == 80 || compute_capability == 87) return 163 * 1024;
  return (major == 8 || major == 12 ? 99 : 227) * 1024;
}
// The system reserves so much more for each CTA.
constexpr int32_t kReservedSharedBytes = 1024;

// How many CTAs with `shared_bytes` each fit an SM on which one CTA may use `max_shared_bytes`.
constexpr int32_t ctas_that_fit(int32_t shared_bytes, int32_t max_shared_bytes) {
  return (max_shared_bytes + kReservedSharedBytes) / (shared_bytes + kReservedSharedBytes);
}

}  // namespace fa::cuda
