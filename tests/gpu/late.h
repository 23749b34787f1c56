// SPDX-License-Identifier: Apache-2.0
// A kernel that lets the next launch start early (PDL), and writes only after that.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace gpu {

struct LateCopies {
  struct {
    int32_t *to;
    const int32_t *from;
    size_t count;
  } copies[3];
};

// Copies them some 20 us after the point where a programmatic dependent launch (PDL) behind this kernel may have started.
void copy_late(const LateCopies &all, cudaStream_t stream);

}  // namespace gpu
