// SPDX-License-Identifier: Apache-2.0
// The parts of creating a CUDA backend. Tests put them together differently: kernels for devices with less shared memory run on those
// with more, too.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "core/backend.h"
#include "cuda/host/plan.h"

namespace fa::cuda {

Device device_of(int32_t index, const cudaDeviceProp &properties);

// `device` decides which kernels run and how; `properties` only describe it. `kernel_cache`: as in fa_config.
fa_status make_backend(const Device &device, const cudaDeviceProp &properties, std::unique_ptr<Backend> &backend,
                       ErrorText &error, const char *kernel_cache = nullptr);

}  // namespace fa::cuda
