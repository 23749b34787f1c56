// SPDX-License-Identifier: Apache-2.0
// A context of the library, memory of its device, and the peak speed of the device.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "arguments.h"
#include "problem.h"

struct device_memory;

namespace cli {

// The device and its settings: options of every command that uses a device.
struct DeviceChoice {
  fa_device_type type = FA_DEVICE_AUTO;
  int64_t index = 0, threads = 0, cuda_arch = 0;
  fa_cpu_isa isa = FA_CPU_ISA_AUTO;

  void declare(Options &options);
};

const char *isa_name(fa_cpu_isa isa);

// The peak speed of a device. CPU: measured, with fp32 multiply-adds and reads of memory. CUDA: clock times width, from the driver; zero if
// unknown.
struct Peak {
  double flops_per_second = 0, bytes_per_second = 0;
  std::string source;
};

class Device {
 public:
  // Throws Failure with the message of the library.
  explicit Device(const DeviceChoice &choice);
  ~Device();
  Device(const Device &) = delete;
  Device &operator=(const Device &) = delete;

  fa_context context() const { return context_; }
  const fa_device_properties &properties() const { return properties_; }
  bool is_cuda() const { return properties_.device_type == FA_DEVICE_CUDA; }
  // "cpu: Intel(R) Xeon(R), 2 threads, avx512"
  std::string describe() const;
  // `kernel` is the one that would run.
  Peak peak(fa_dtype dtype, const std::string &kernel) const;

  // Throws Failure with the text of the last failed call of this context.
  void check(fa_status status, const std::string &what) const;
  fa_plan_info query(const Problem &problem) const;
  fa_status run(const Problem &problem, void *workspace, size_t workspace_bytes) const;

  // Opens the device's memory on first use.
  ::device_memory *memory();
  void wait();

 private:
  fa_context context_ = nullptr;
  fa_device_properties properties_;
  ::device_memory *memory_ = nullptr;
};

// Memory of a device, zeroed.
class Buffer {
 public:
  Buffer(Device &device, size_t bytes);
  ~Buffer();
  Buffer(Buffer &&other) noexcept : device_(other.device_), data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
  Buffer &operator=(Buffer &&) = delete;

  void *data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void upload(const void *host);
  void download(void *host) const;

 private:
  Device *device_;
  void *data_;
  size_t bytes_;
};

}  // namespace cli
