// SPDX-License-Identifier: Apache-2.0
#include "gpu/device.h"

#include <cstdio>
#include <cstdlib>

namespace gpu {
namespace {

fa_status create(fa_context *context) {
  fa_config config;
  fa_config_init(&config, sizeof config);
  config.device_type = FA_DEVICE_CUDA;
  return fa_create(context, &config);
}

}  // namespace

void check(cudaError_t result, const char *what) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
  std::abort();
}

// A missing device or driver is not a failure. A library that cannot use the existing device is one.
const std::string &no_gpu() {
  static const std::string reason = [] {
    fa_context context = nullptr;
    const fa_status status = create(&context);
    const std::string text = fa_last_error(nullptr);
    fa_destroy(context);
    return status == FA_ERROR_NO_DEVICE || status == FA_ERROR_DRIVER ? "no GPU: " + text : std::string();
  }();
  return reason;
}

void OnGpu::SetUp() {
  if (!no_gpu().empty()) GTEST_SKIP() << no_gpu();
  ASSERT_EQ(create(&context_), FA_OK) << fa_last_error(nullptr);
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
}

void OnGpu::TearDown() {
  fa_destroy(context_);
  if (stream_ != nullptr) check(cudaStreamDestroy(stream_), "stream");
}

}  // namespace gpu
