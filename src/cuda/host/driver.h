// SPDX-License-Identifier: Apache-2.0
// The driver functions that the backend calls. The runtime finds them by name and version: the library does not link libcuda, so it
// loads, and its CPU side works, on machines without a driver. Unlike the runtime the driver keeps no "last error" and no current
// device that a call could leave changed.
#pragma once

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "core/status.h"

namespace fa::cuda {

// X(function, CUDA version whose signature is meant)
#define FA_DRIVER_FUNCTIONS(X)         \
  X(cuCtxGetCurrent, 4000)             \
  X(cuCtxGetDevice, 2000)              \
  X(cuCtxGetStreamPriorityRange, 5050) \
  X(cuCtxPopCurrent, 4000)             \
  X(cuCtxPushCurrent, 4000)            \
  X(cuDevicePrimaryCtxRetain, 7000)    \
  X(cuEventCreate, 2000)               \
  X(cuEventDestroy, 4000)              \
  X(cuEventQuery, 2000)                \
  X(cuEventRecord, 2000)               \
  X(cuKernelGetAttribute, 12000)       \
  X(cuKernelGetFunction, 12000)        \
  X(cuKernelSetAttribute, 12000)       \
  X(cuLaunchKernelEx, 11060)           \
  X(cuLibraryGetKernel, 12000)         \
  X(cuLibraryLoadData, 12000)          \
  X(cuLibraryUnload, 12000)            \
  X(cuMemAllocFromPoolAsync, 11020)    \
  X(cuMemcpyDtoHAsync, 3020)           \
  X(cuMemFreeAsync, 11020)             \
  X(cuMemPoolCreate, 11020)            \
  X(cuMemPoolDestroy, 11020)           \
  X(cuMemPoolSetAttribute, 11020)      \
  X(cuMemsetD8Async, 3020)             \
  X(cuMemsetD32Async, 3020)            \
  X(cuPointerGetAttributes, 7000)      \
  X(cuStreamCreate, 2000)              \
  X(cuStreamCreateWithPriority, 5050)  \
  X(cuStreamDestroy, 4000)             \
  X(cuStreamGetCtx, 9020)              \
  X(cuStreamIsCapturing, 10000)        \
  X(cuStreamSynchronize, 2000)         \
  X(cuStreamWaitEvent, 3020)           \
  X(cuTensorMapEncodeTiled, 12000)     \
  X(cuThreadExchangeStreamCaptureMode, 10010)

struct Driver {
#define FA_MEMBER(name, version) PFN_##name##_v##version name = nullptr;
  FA_DRIVER_FUNCTIONS(FA_MEMBER)
#undef FA_MEMBER
};

// The process's driver, or FA_ERROR_DRIVER where it lacks a function. Makes no context.
fa_status find_driver(const Driver *&driver, ErrorText &error);

// Driver and runtime have one numbering of errors since CUDA 10.1.
inline cudaError_t to_runtime(CUresult result) { return static_cast<cudaError_t>(result); }

// A context made current on this thread as long as this lives; then the caller's is current again.
class CurrentContext {
 public:
  explicit CurrentContext(const Driver &driver) : driver_(driver) {}
  ~CurrentContext() {
    CUcontext popped = nullptr;
    if (pushed_) driver_.cuCtxPopCurrent(&popped);
  }
  CurrentContext(const CurrentContext &) = delete;
  CurrentContext &operator=(const CurrentContext &) = delete;

  CUresult push(CUcontext context) {
    const CUresult result = driver_.cuCtxPushCurrent(context);
    pushed_ = result == CUDA_SUCCESS;
    return result;
  }

 private:
  const Driver &driver_;
  bool pushed_ = false;
};

// Allows, as long as it lives, what a stream capture on this or another thread would otherwise forbid: loading code, making a pool.
// Nothing of it belongs into a graph.
class CaptureRelaxed {
 public:
  explicit CaptureRelaxed(const Driver &driver) : driver_(driver) { exchange(); }
  ~CaptureRelaxed() { exchange(); }
  CaptureRelaxed(const CaptureRelaxed &) = delete;
  CaptureRelaxed &operator=(const CaptureRelaxed &) = delete;

 private:
  void exchange() { driver_.cuThreadExchangeStreamCaptureMode(&mode_); }

  const Driver &driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace fa::cuda
