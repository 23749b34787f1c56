// SPDX-License-Identifier: Apache-2.0
// The CUDA devices of this machine as backends of the suite; none where the library or the machine has no CUDA.
#include <cstdio>
#include <cstdlib>

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
  CudaBackend(fa_context context, const char *name) : context_(context), name_(name) {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
  }
  ~CudaBackend() override {
    fa_destroy(context_);
    cudaStreamDestroy(stream_);
  }
  std::string name() const override { return name_; }
  fa_context context() override { return context_; }
  fa_stream stream() override { return stream_; }

  void *allocate(size_t bytes) override {
    void *memory = nullptr;
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
  cudaStream_t stream_ = nullptr;
};

}  // namespace
#endif

std::vector<std::shared_ptr<Backend>> cuda_backends() {
  std::vector<std::shared_ptr<Backend>> backends;
#if defined(FA_TEST_CUDA)
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CUDA;
  fa_context context = nullptr;
  if (fa_create(&context, &config) == FA_OK) {
    backends.push_back(std::make_shared<CudaBackend>(context, "cuda"));
    // A device with kernels of its own also runs those that it shares with others.
    fa_device_properties device;
    fa_device_properties_init(&device, sizeof device);
    fa_device_info(context, &device);
    config.cuda_arch = 80;
    if (device.compute_capability == 90 && fa_create(&context, &config) == FA_OK) {
      backends.push_back(std::make_shared<CudaBackend>(context, "cuda_sm80"));
    }
  } else {
    std::fprintf(stderr, "CUDA backend not tested: %s\n", fa_last_error(nullptr));
  }
#endif
  return backends;
}

}  // namespace parity
