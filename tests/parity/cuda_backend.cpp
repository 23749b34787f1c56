// SPDX-License-Identifier: Apache-2.0
// The first CUDA device of this machine as backends of the suite.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "parity/backend.h"

#if defined(FA_TEST_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace parity {

#if defined(FA_TEST_CUDA)
namespace {

void check(cudaError_t result, const char *what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
  std::abort();  // after a failed kernel nothing on this device can be trusted
}

class CudaBackend : public Backend {
 public:
  CudaBackend(fa_context context, const char *name, int device = 0) : context_(context), name_(name), device_(device) {
    check(cudaSetDevice(device_), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
  }
  ~CudaBackend() override {
    fa_destroy(context_);
    cudaStreamDestroy(stream_);
  }
  std::string name() const override { return name_; }
  bool runs_score_text() const override { return true; }
  fa_context context() override { return context_; }
  fa_stream stream() override { return stream_; }

  void *allocate(size_t bytes) override {
    void *memory = nullptr;
    check(cudaSetDevice(device_), "cudaSetDevice");
    check(cudaMalloc(&memory, bytes > 0 ? bytes : 1), "cudaMalloc");
    return memory;
  }
  void release(void *memory) override { check(cudaFree(memory), "cudaFree"); }
  void upload(void *device, const void *host, size_t bytes) override {
    check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_), "upload");
    check(cudaStreamSynchronize(stream_), "upload");
  }
  void download(void *host, const void *device, size_t bytes) override {
    check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_), "download");
    check(cudaStreamSynchronize(stream_), "a kernel, or the download behind it,");
  }

 private:
  fa_context context_;
  const std::string name_;
  const int device_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace
#endif

Backends cuda_backends() {
  // A device with kernels of its own also runs those that it shares with others: those of A100, and of devices with less shared memory.
  constexpr const char *kName = "cuda";
  constexpr struct {
    const char *name;
    int32_t cuda_arch;
  } kOthers[] = {{"cuda_sm80", 80}, {"cuda_sm86", 86}};
  const auto all_missing = [&](const std::string &reason) {
    Backends missing{missing_backend(kName, reason)};
    for (const auto &other : kOthers) missing.push_back(missing_backend(other.name, reason));
    return missing;
  };
  Backends backends;
#if defined(FA_TEST_CUDA)
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CUDA;
  fa_context context = nullptr;
  const fa_status status = fa_create(&context, &config);
  if (status == FA_ERROR_NO_DEVICE || status == FA_ERROR_DRIVER) {
    const std::string reason = "no GPU: " + std::string(fa_last_error(nullptr));
    return all_missing(reason);
  }
  if (status != FA_OK) {
    std::fprintf(stderr, "fa_create() fails on the GPU of this machine: %s\n", fa_last_error(nullptr));
    std::abort();
  }
  backends.push_back(std::make_shared<CudaBackend>(context, kName));
  fa_device_properties device;
  fa_device_properties_init(&device, sizeof device);
  fa_device_info(context, &device);
  for (const auto &other : kOthers) {
    if (device.compute_capability != 90) {
      backends.push_back(missing_backend(other.name, "only on Hopper: on other GPUs backend cuda runs these kernels"));
      continue;
    }
    config.cuda_arch = other.cuda_arch;
    if (fa_create(&context, &config) != FA_OK) {
      std::fprintf(stderr, "fa_create() with cuda_arch = %d: %s\n", int{other.cuda_arch}, fa_last_error(nullptr));
      std::abort();
    }
    backends.push_back(std::make_shared<CudaBackend>(context, other.name));
  }
#else
  return all_missing("this build has no CUDA kernels");
#endif
  return backends;
}

int32_t num_cuda_devices() {
  int count = 0;
#if defined(FA_TEST_CUDA)
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
#endif
  return count;
}

std::shared_ptr<Backend> cuda_backend(int32_t device, [[maybe_unused]] int32_t cuda_arch) {
#if defined(FA_TEST_CUDA)
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CUDA;
  config.device_index = device;
  config.cuda_arch = cuda_arch;
  fa_context context = nullptr;
  if (fa_create(&context, &config) == FA_OK) return std::make_shared<CudaBackend>(context, "cuda", device);
#endif
  std::fprintf(stderr, "no context of CUDA device %d: %s\n", int{device}, fa_last_error(nullptr));
  std::abort();
}

void copy_any_memory(void *to, const void *from, size_t bytes) {
#if defined(FA_TEST_CUDA)
  // Memory of a pool is accessible from its own device alone.
  for (const void *memory : {static_cast<const void *>(to), from}) {
    cudaPointerAttributes attributes;
    check(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
    if (attributes.type == cudaMemoryTypeDevice) check(cudaSetDevice(attributes.device), "cudaSetDevice");
  }
  check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
  // A copy from pageable memory may return while its bytes are on their way to the device, and the backend's stream does not wait for this one.
  check(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
#else
  std::memcpy(to, from, bytes);
#endif
}
void finish(fa_stream stream) {
#if defined(FA_TEST_CUDA)
  check(cudaStreamSynchronize(stream), "a kernel");
#else
  static_cast<void>(stream);
#endif
}

}  // namespace parity
