// SPDX-License-Identifier: Apache-2.0
// Kernels compiled with a score text: those of a context, in front of those that the process has loaded, the cache on disk and the compiler.
#pragma once

#include <cuda.h>

#include <string>
#include <unordered_map>

#include "core/score.h"
#include "core/status.h"
#include "cuda/host/driver.h"
#include "cuda/host/kernel_cache.h"
#include "cuda/host/score_program.h"

namespace fa::cuda {

struct ScoreKernel {
  CUkernel handle = nullptr;
  int32_t spill_bytes = -1;  // as in CompiledCode
  bool serialised = false, alone = false;
};

class ScoreKernels {
 public:
  // `cache`: fa_config.kernel_cache.
  ScoreKernels(const Driver &driver, const Device &device, const char *cache)
      : driver_(driver), device_(device), disk_(cache) {}
  ScoreKernels(const ScoreKernels &) = delete;
  ScoreKernels &operator=(const ScoreKernels &) = delete;

  // Compiles and loads what is not there yet. A text with an error is an FA_ERROR_INVALID_ARGUMENT, no compiler FA_ERROR_NOT_BUILT.
  fa_status get(const ScoreCall &call, const ScoreProgram &program, ScoreKernel &kernel, ErrorText &error);
  // What get() has made before; null if nothing.
  const ScoreKernel *find(const ScoreCall &call, const ScoreProgram &program) const {
    const auto found = kernels_.find(key_of(call, program));
    return found != kernels_.end() ? &found->second : nullptr;
  }

 private:
  static std::string key_of(const ScoreCall &call, const ScoreProgram &program);
  fa_status make(const ScoreCall &call, const ScoreProgram &program, ScoreKernel &kernel, ErrorText &error) const;

  const Driver &driver_;
  const Device &device_;
  KernelCache disk_;
  std::unordered_map<std::string, ScoreKernel> kernels_;
};

}  // namespace fa::cuda
