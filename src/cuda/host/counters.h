// SPDX-License-Identifier: Apache-2.0
// Counters in device memory, for kernels whose CTAs take their work from a counter or count what they have done. They are zero before and
// after the kernel that uses them, and no two kernels that may run at the same time have one in common.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/status.h"
#include "cuda/host/driver.h"

namespace fa::cuda {

class Counters {
 public:
  explicit Counters(const Driver &driver) : driver_(driver) {}
  Counters(const Counters &) = delete;
  Counters &operator=(const Counters &) = delete;

  // `count` counters for the next kernel on `stream`. `pool` provides memory when there is none left and must outlive the kernels. A
  // context is current.
  fa_status next(int32_t count, CUmemoryPool pool, CUstream stream, int32_t *&counters, ErrorText &error);

 private:
  struct Memory {
    int32_t *data = nullptr;
    int64_t size = 0, used = 0;
  };
  // Kernels that are not captured take counters from a ring buffer of this size, over and over. Kernels of one stream run one after another. On
  // several streams fewer kernels are in flight than the buffer has room for: some thousands of the usual ones, and kBufferKernels of those with
  // very many counters, which run for long.
  static constexpr int64_t kBufferCounters = 1 << 20, kBufferKernels = 1 << 8;
  // A captured kernel may run again at any time: it keeps its counters for good. Their memory is allocated in blocks of this size.
  static constexpr int64_t kCaptured = 1 << 16;

  fa_status make(int64_t size, CUmemoryPool pool, Memory &memory, ErrorText &error);

  const Driver &driver_;
  Memory ring_buffer_, captured_;
};

}  // namespace fa::cuda
