// SPDX-License-Identifier: Apache-2.0
// Counters in device memory for kernels whose blocks of threads fetch their work from a counter or count what they have done. They are
// zero before and after the kernel that uses them, and no two kernels that may run at the same time share one.
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
  // Kernels pass over this memory round and round. Those of one stream follow each other; on several streams fewer are in flight than it
  // has room for: some thousand of the usual ones, and of those with very many counters, which run for long, this number.
  static constexpr int64_t kPassing = 1 << 20, kPassingKernels = 1 << 8;
  // A captured kernel may run again at any time: it keeps its counters for good, of memory that comes in pieces of this size.
  static constexpr int64_t kCaptured = 1 << 16;

  fa_status make(int64_t size, CUmemoryPool pool, Memory &memory, ErrorText &error);

  const Driver &driver_;
  Memory passing_, captured_;
};

}  // namespace fa::cuda
