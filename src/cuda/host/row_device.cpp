// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/row_device.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cinttypes>
#include <mutex>
#include <thread>

#include "cuda/kernels/rows/rows.h"

namespace fa::cuda {
namespace {

class DeviceRows final : public RowDevice {
 public:
  explicit DeviceRows(StreamWork &work) : work_(work), driver_(work.driver()) {}

  ~DeviceRows() override {
    ErrorText error;
    CurrentContext scope(driver_);
    if (work_.enter_primary(scope, error) != FA_OK) return;
    // Work that is still in a stream completes.
    for (CUstream stream : {second_, own_}) {
      if (stream != nullptr) driver_.cuStreamDestroy(stream);
    }
    if (forked_ != nullptr) driver_.cuEventDestroy(forked_);
    for (CUevent event : marks_) {
      if (event != nullptr) driver_.cuEventDestroy(event);
    }
  }

  fa_status make_streams(ErrorText &error) {
    CurrentContext scope(driver_);
    FA_RETURN_IF_ERROR(work_.enter_primary(scope, error));
    const CaptureRelaxed relaxed(driver_);
    // Messages first: the kernels of the other stream wait for them sooner or later.
    int least = 0, greatest = 0;
    FA_RETURN_IF_ERROR(work_.check(driver_.cuCtxGetStreamPriorityRange(&least, &greatest), "stream of messages", error));
    FA_RETURN_IF_ERROR(work_.check(driver_.cuStreamCreateWithPriority(&second_, CU_STREAM_NON_BLOCKING, greatest),
                                   "stream of messages", error));
    FA_RETURN_IF_ERROR(work_.check(driver_.cuStreamCreate(&own_, CU_STREAM_NON_BLOCKING), "stream", error));
    const auto make = [&](CUevent &event) {
      return work_.check(driver_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "event of messages", error);
    };
    FA_RETURN_IF_ERROR(make(forked_));
    for (CUevent &event : marks_) FA_RETURN_IF_ERROR(make(event));
    return FA_OK;
  }

  fa_status allocate(size_t bytes, fa_stream stream, void *&memory, ErrorText &error) override {
    CurrentContext scope(driver_);
    FA_RETURN_IF_ERROR(work_.enter(stream, scope, error));
    return work_.allocate(bytes, stream, memory, error);
  }
  void release(void *memory, fa_stream stream) override {
    ErrorText error;
    CurrentContext scope(driver_);
    if (work_.enter(stream, scope, error) == FA_OK) driver_.cuMemFreeAsync(reinterpret_cast<CUdeviceptr>(memory), stream);
  }

  fa_status prepare(ErrorText &error) override {
    CurrentContext scope(driver_);
    FA_RETURN_IF_ERROR(work_.enter(nullptr, scope, error));
    // Every kernel that a launch function chooses from.
    for (const int64_t alignment : {2, 4, 8, 16}) {
      CopyRowsParams copy{{1, 1, alignment / 2}, {}, {}};
      copy.from.dtype = copy.to.dtype = Dtype::bf16;
      FA_RETURN_IF_ERROR(load(copy_rows_launch(copy), copy, error));
      SumRowsParams sum{};
      sum.shape = {1, 1, alignment / 2};
      FA_RETURN_IF_ERROR(load(sum_rows_launch(sum), sum, error));
    }
    const AddNumbersParams add{nullptr, nullptr, 1};
    FA_RETURN_IF_ERROR(load(add_numbers_launch(add), add, error));
    const SumNumbersParams sum{nullptr, 1, 1, nullptr, 1};
    FA_RETURN_IF_ERROR(load(sum_numbers_launch(sum), sum, error));
    WriteNumbersParams write;
    write.count = 1;
    return load(write_numbers_launch(write), write, error);
  }

  fa_status copy(const RowShape &shape, const Operand &from, const Operand &to, fa_stream stream, ErrorText &error) override {
    const CopyRowsParams params{shape, from, to};
    return run("copy of rows", copy_rows_launch(params), params, stream, error);
  }

  fa_status sum(const RowShape &shape, std::span<const float *const> parts, const Operand &to, fa_stream stream,
                ErrorText &error) override {
    SumRowsParams params{};
    params.shape = shape;
    params.num_parts = static_cast<int32_t>(parts.size());
    std::copy(parts.begin(), parts.end(), params.parts);
    params.to = to;
    return run("sum of rows", sum_rows_launch(params), params, stream, error);
  }

  fa_status zero(void *memory, size_t bytes, fa_stream stream, ErrorText &error) override {
    if (bytes == 0) return FA_OK;
    CurrentContext scope(driver_);
    FA_RETURN_IF_ERROR(work_.enter(stream, scope, error));
    return work_.check(driver_.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(memory), 0, bytes, stream), "zeros", error);
  }

  fa_status add(double *sum, const float *part, int64_t count, fa_stream stream, ErrorText &error) override {
    const AddNumbersParams params{sum, part, count};
    return run("sum of dsink", add_numbers_launch(params), params, stream, error);
  }
  fa_status sum(const double *parts, int64_t num_parts, int64_t count, float *to, int64_t stride, fa_stream stream,
                ErrorText &error) override {
    const SumNumbersParams params{parts, num_parts, count, to, stride};
    return run("sum of dsink", sum_numbers_launch(params), params, stream, error);
  }

  fa_status write(std::span<const int64_t> numbers, int64_t *to, fa_stream stream, ErrorText &error) override {
    WriteNumbersParams params;
    for (size_t n = 0; n < numbers.size(); n += kNumbersPerLaunch) {
      params.to = to + n;
      params.count = static_cast<int32_t>(std::min<size_t>(kNumbersPerLaunch, numbers.size() - n));
      std::copy_n(numbers.begin() + static_cast<std::ptrdiff_t>(n), params.count, params.numbers);
      FA_RETURN_IF_ERROR(run("offsets of documents", write_numbers_launch(params), params, stream, error));
    }
    return FA_OK;
  }

  fa_status read(void *to, const void *from, size_t bytes, int64_t timeout_ms, fa_stream stream, ErrorText &error) override {
    CurrentContext scope(driver_);
    FA_RETURN_IF_ERROR(work_.enter(stream, scope, error));
    CUevent done = nullptr;
    FA_RETURN_IF_ERROR(work_.check(driver_.cuEventCreate(&done, CU_EVENT_DISABLE_TIMING), "event", error));
    fa_status status = work_.check(driver_.cuEventRecord(done, stream), "event", error);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    while (status == FA_OK) {
      const CUresult result = driver_.cuEventQuery(done);
      if (result == CUDA_SUCCESS) break;
      if (result != CUDA_ERROR_NOT_READY) {
        status = work_.check(result, "work before a copy to the host", error);
      } else if (std::chrono::steady_clock::now() > deadline) {
        status = fail(error, FA_ERROR_TRANSPORT, "the messages were not there after %" PRId64 " ms", timeout_ms);
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
    driver_.cuEventDestroy(done);
    if (status != FA_OK) return status;
    FA_RETURN_IF_ERROR(work_.check(driver_.cuMemcpyDtoHAsync(to, reinterpret_cast<CUdeviceptr>(from), bytes, stream),
                                   "copy to the host", error));
    return work_.check(driver_.cuStreamSynchronize(stream), "copy to the host", error);
  }

  fa_stream own_stream() override { return own_; }

  fa_status fork(fa_stream stream, fa_stream &second, ErrorText &error) override {
    CurrentContext scope(driver_);
    FA_RETURN_IF_ERROR(work_.enter(stream, scope, error));
    FA_RETURN_IF_ERROR(work_.check(driver_.cuEventRecord(forked_, stream), "order of messages", error));
    FA_RETURN_IF_ERROR(work_.check(driver_.cuStreamWaitEvent(second_, forked_, 0), "order of messages", error));
    second = second_;
    return FA_OK;
  }

  fa_status mark(int64_t number, ErrorText &error) override {
    CurrentContext scope(driver_);
    FA_RETURN_IF_ERROR(work_.enter_primary(scope, error));
    const std::lock_guard lock(mutex_);
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    driver_.cuStreamIsCapturing(second_, &capture);
    last_ = capture == CU_STREAM_CAPTURE_STATUS_NONE ? mark_of(number) : nullptr;
    return work_.check(driver_.cuEventRecord(mark_of(number), second_), "order of messages", error);
  }

  fa_status join(int64_t number, fa_stream stream, ErrorText &error) override {
    CurrentContext scope(driver_);
    FA_RETURN_IF_ERROR(work_.enter(stream, scope, error));
    return work_.check(driver_.cuStreamWaitEvent(stream, mark_of(number), 0), "order of messages", error);
  }

  bool is_done() override {
    const std::lock_guard lock(mutex_);
    ErrorText error;
    CurrentContext scope(driver_);
    if (last_ == nullptr || work_.enter_primary(scope, error) != FA_OK) return true;
    return driver_.cuEventQuery(last_) != CUDA_ERROR_NOT_READY;
  }

 private:
  CUevent mark_of(int64_t number) const { return marks_[static_cast<size_t>(number) % marks_.size()]; }

  template <typename Params>
  fa_status load(const Launch &launch, const Params &params, ErrorText &error) {
    Launches launches;
    launches.add("rows", launch, &params);
    return work_.load(launches, error);
  }

  template <typename Params>
  fa_status run(const char *what, const Launch &launch, const Params &params, fa_stream stream, ErrorText &error) {
    Launches launches;
    launches.add(what, launch, &params);
    CurrentContext scope(driver_);
    FA_RETURN_IF_ERROR(work_.enter(stream, scope, error));
    return work_.enqueue(launches, stream, error);
  }

  StreamWork &work_;
  const Driver &driver_;
  CUstream second_ = nullptr, own_ = nullptr;
  CUevent forked_ = nullptr;
  // Of the last marks. A mark whose event serves a later one by now is joined with that.
  std::array<CUevent, 8> marks_{};
  std::mutex mutex_;        // of what is_done() reads
  CUevent last_ = nullptr;  // recorded, outside a capture
};

}  // namespace

fa_status make_row_device(StreamWork &work, std::unique_ptr<RowDevice> &device, ErrorText &error) {
  auto rows = std::make_unique<DeviceRows>(work);
  FA_RETURN_IF_ERROR(rows->make_streams(error));
  device = std::move(rows);
  return FA_OK;
}

}  // namespace fa::cuda
