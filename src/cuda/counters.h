// SPDX-License-Identifier: Apache-2.0
// Pairs of counters in device memory for kernels whose blocks of threads fetch their work from a counter. A pair is zero before and
// after the kernel that uses it, and no two kernels that may run at the same time share one.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/status.h"
#include "cuda/driver.h"

namespace fa::cuda {

class Counters {
 public:
  explicit Counters(const Driver &driver) : driver_(driver) {}
  Counters(const Counters &) = delete;
  Counters &operator=(const Counters &) = delete;

  // Two counters for the next kernel on `stream`, or null: then the kernel has to do without. `pool` provides the memory the first
  // time and must outlive the kernels. A context is current.
  fa_status next(CUmemoryPool pool, CUstream stream, int32_t *&counters, ErrorText &error);

 private:
  // Kernels in flight at once are fewer: a device's queues hold some thousand launches each.
  static constexpr uint32_t kPassing = 1 << 15;
  // A captured kernel may run again at any time: it keeps its pair for good.
  static constexpr uint32_t kCaptured = 1 << 15;

  fa_status make(CUmemoryPool pool, ErrorText &error);

  const Driver &driver_;
  int32_t *memory_ = nullptr;
  uint32_t passing_ = 0, captured_ = 0;
};

}  // namespace fa::cuda
