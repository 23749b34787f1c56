// SPDX-License-Identifier: Apache-2.0
#include "cuda/counters.h"

namespace fa::cuda {

fa_status Counters::next(CUmemoryPool pool, CUstream stream, int32_t *&counters, ErrorText &error) {
  if (memory_ == nullptr) FA_RETURN_IF_ERROR(make(pool, error));
  // The legacy stream cannot be captured, and asking it about that while another stream is captured is an error.
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (stream != nullptr && stream != CU_STREAM_LEGACY) driver_.cuStreamIsCapturing(stream, &status);
  counters = nullptr;
  if (status == CU_STREAM_CAPTURE_STATUS_NONE) {
    counters = memory_ + 2 * (passing_++ % kPassing);
  } else if (captured_ < kCaptured) {
    counters = memory_ + 2 * (kPassing + captured_++);
  }
  return FA_OK;
}

fa_status Counters::make(CUmemoryPool pool, ErrorText &error) {
  constexpr size_t kBytes = size_t{kPassing + kCaptured} * 2 * sizeof(int32_t);
  const CaptureRelaxed relaxed(driver_);
  CUstream stream = nullptr;
  CUdeviceptr memory = 0;
  CUresult result = driver_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  if (result == CUDA_SUCCESS) result = driver_.cuMemAllocFromPoolAsync(&memory, kBytes, pool, stream);
  if (result == CUDA_SUCCESS) result = driver_.cuMemsetD32Async(memory, 0, kBytes / 4, stream);
  if (result == CUDA_SUCCESS) result = driver_.cuStreamSynchronize(stream);
  if (stream != nullptr) driver_.cuStreamDestroy(stream);
  if (result != CUDA_SUCCESS) {
    return fail(error, FA_ERROR_CUDA, "memory of the work counters: %s", cudaGetErrorString(to_runtime(result)));
  }
  memory_ = reinterpret_cast<int32_t *>(memory);
  return FA_OK;
}

}  // namespace fa::cuda
