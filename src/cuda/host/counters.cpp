// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/counters.h"

#include <algorithm>

namespace fa::cuda {

fa_status Counters::next(int32_t count, CUmemoryPool pool, CUstream stream, int32_t *&counters, ErrorText &error) {
  // The legacy stream cannot be captured, and asking it about that while another stream is captured is an error.
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (stream != nullptr && stream != CU_STREAM_LEGACY) driver_.cuStreamIsCapturing(stream, &status);
  if (status == CU_STREAM_CAPTURE_STATUS_NONE) {
    // A buffer that is too small is left to the kernels in flight.
    const int64_t size = std::max(kBufferCounters, count * kBufferKernels);
    if (ring_buffer_.size < size) FA_RETURN_IF_ERROR(make(size, pool, ring_buffer_, error));
    if (ring_buffer_.used + count > ring_buffer_.size) ring_buffer_.used = 0;
    counters = ring_buffer_.data + ring_buffer_.used;
    ring_buffer_.used += count;
  } else {
    if (captured_.used + count > captured_.size) {
      FA_RETURN_IF_ERROR(make(std::max<int64_t>(kCaptured, count), pool, captured_, error));
    }
    counters = captured_.data + captured_.used;
    captured_.used += count;
  }
  return FA_OK;
}

fa_status Counters::make(int64_t size, CUmemoryPool pool, Memory &memory, ErrorText &error) {
  const auto count = static_cast<size_t>(size);
  const CaptureRelaxed relaxed(driver_);
  CUstream stream = nullptr;
  CUdeviceptr data = 0;
  CUresult result = driver_.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  if (result == CUDA_SUCCESS) result = driver_.cuMemAllocFromPoolAsync(&data, count * sizeof(int32_t), pool, stream);
  if (result == CUDA_SUCCESS) result = driver_.cuMemsetD32Async(data, 0, count, stream);
  if (result == CUDA_SUCCESS) result = driver_.cuStreamSynchronize(stream);
  if (stream != nullptr) driver_.cuStreamDestroy(stream);
  if (result != CUDA_SUCCESS) {
    return fail(error, FA_ERROR_CUDA, "memory of the work counters: %s", cudaGetErrorString(to_runtime(result)));
  }
  memory = {reinterpret_cast<int32_t *>(data), size, 0};
  return FA_OK;
}

}  // namespace fa::cuda
